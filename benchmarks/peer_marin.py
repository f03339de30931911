"""marin's asynchronous RL, simulated: 25 updates take 1,653 s in turn, 1,182 s asynchronously, and
960 s where weights sync every second update only.

Published (marin's issue 8936, a comment of 2026-09-06, and issue 8955): a mixture of experts of
67 B parameters, 2 B of which a token sees; 32 H100s train and 8 generate; 32 prompts a step and 4
completions each, of at most 4,096 tokens; what is trained on is one update old at most. All three
jobs are one ledger with other settings, and are simulated from seconds that marin published:

SYNC_S     of a weight sync: 20.2, their median. The trainer and the generator stand still
           meanwhile, and the cache is read again. PAUSE_S of it, 5.2, is a wait before the engine's
           pause. The synchronous job has nothing to pause, and is assumed not to wait: for a
           smaller model of theirs the sync is that much shorter when synchronous
UPDATE_S   9.6: what syncs and waiting, in shares of a pilot of the asynchronous job, leave of its
           1,202 s
lengths    log-normal, from the shares of completions that two pilots cut off: 14.6 % at 2,048 and
           3.6 % at 4,096 tokens. The mean of those up to 4,096 is then 1,102; they state 1,134
assumed    prompts of 150 tokens; a million tokens a second read; 256 rows at once; a decode step
           takes the same whatever its rows
set        seconds of a decode step, on the synchronous job. The others are predictions
beside     two more of their jobs: one that cuts off at 2,048 tokens, and a later one whose weights
           sync in FAST_SYNC_S, 5.6: its share of the time over the learner's, times UPDATE_S

Missed is what their ledger does with groups that are too old: it rejects them (a third of the
tokens of one pilot), and samples others. The ledger here does not start them.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from peer_figures import Figure, Verdict

from llamarl.planner.simulation_settings import SimulationSettings
from llamarl.planner.straight import StraightTimings
from llamarl.planner.world import SimulationResult, simulate

SYNC_S = 20.2
PAUSE_S = 5.2
FAST_SYNC_S = 5.6
UPDATE_S = 9.6
CUT_OFF = ((2048, 0.146), (4096, 0.036))  # tokens, and the share of completions that reach them
MARIN = {  # core seconds of 25 updates
    "synchronous": 1652.8,
    "async, sync every update": 1182.2,
    "async, sync every 2 updates": 959.7,
    "async, sync every update, up to 2,048 tokens": 914.4,
    "async, sync every update, a faster one": 920.2,
}
ONE_OFF = {"max_lag": 1, "overcommit": 32, "stops_generators": True, "recompute_kv": True}
MARIN_SETTINGS: dict[str, dict] = {
    "synchronous": {"max_lag": 0, "overcommit": 0},
    "async, sync every update": ONE_OFF,
    "async, sync every 2 updates": {**ONE_OFF, "publish_every": 2},
    "async, sync every update, up to 2,048 tokens": {**ONE_OFF, "max_new_tokens": 2048},
    "async, sync every update, a faster one": ONE_OFF,
}


def marin_lengths() -> tuple[float, float]:
    """Return the mean and the sigma of the log-normal lengths of which these shares are cut off."""
    (shorter, share), (longer, less) = CUT_OFF
    first = NormalDist().inv_cdf(1 - share)
    second = NormalDist().inv_cdf(1 - less)
    sigma = math.log(longer / shorter) / (second - first)
    median_log = math.log(shorter) - sigma * first
    return math.exp(median_log + sigma**2 / 2), sigma


def marin(job: str, decode_s: float, pause_s: float = PAUSE_S) -> SimulationResult:
    """Return the simulated job. pause_s: what the synchronous one saves of a sync."""
    mean, sigma = marin_lengths()
    shared = {
        "max_steps": 25,
        "groups_per_step": 32,
        "group_size": 4,
        "max_slots": 256,
        "chunk_tokens": 16,
        "prompt_tokens": 150,
        "length_mean": mean,
        "length_sigma": sigma,
        "max_new_tokens": 4096,
    }
    settings = SimulationSettings(**{**shared, **MARIN_SETTINGS[job]})
    sync_s = FAST_SYNC_S if "a faster one" in job else SYNC_S
    if settings.max_lag == 0:
        sync_s -= pause_s
    timings = StraightTimings(
        decode_s=decode_s,
        prefill_token_s=1e-6,
        update_s=UPDATE_S,
        publish_s=sync_s,
    )
    return simulate(settings, timings.timings())


def marin_decode_s(pause_s: float = PAUSE_S) -> float:
    """Return the seconds of a decode step that the synchronous job sets. Its seconds are a straight
    line of them.
    """
    first_s, second_s = 0.01, 0.02
    at_first = marin("synchronous", first_s, pause_s).seconds
    slope = (marin("synchronous", second_s, pause_s).seconds - at_first) / (second_s - first_s)
    return first_s + (MARIN["synchronous"] - at_first) / slope


def marin_rows() -> tuple[list[Figure], list[Verdict]]:
    """Return marin's figures and what they say."""
    decode_s = marin_decode_s()
    figures = []
    for job, published_s in MARIN.items():
        is_set = job == "synchronous"
        here_s = marin(job, decode_s).seconds
        figures.append(Figure("marin", job, "25 updates", published_s, here_s, is_set))
    together = figures[0]
    verdicts = []
    for one in figures[1:3]:
        published = one.published_s / together.published_s
        verdicts.append(Verdict("marin", one.job, published, one.here_s / together.here_s))
    return figures, verdicts
