"""All studies: settings of benchmarks/study.py, a file a subject."""

from studies.episodes import EPISODES
from studies.offpolicy import OFFPOLICY
from studies.oppo import OPPO
from studies.real_model import REAL_MODEL
from studies.rlhf import RLHF
from studies.tba import TBA

STUDIES = {study.name: study for study in (*TBA, *RLHF, *OFFPOLICY, *OPPO, *REAL_MODEL, *EPISODES)}
