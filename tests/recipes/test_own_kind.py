"""A kind of scorer that is added in two files, and in no other, does all that a kind does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.build.rows import read_rows, write_rows
from tests.launching import ROOT, Job

pytestmark = pytest.mark.slow

MODEL = ROOT / "llamarl" / "models" / "tiny"
SMALL = (
    "max_steps=2",
    "groups_per_step=4",
    "group_size=4",
    "eval.num_prompts=8",
    "eval.every=1",
    "eval.save_samples=true",
)
RATE = 0.5
VALUES = """
kind: length
rate: 1.0                 # what a token costs
max_error_rate: 0.1
"""
KIND = '''
from __future__ import annotations

from typing import Literal

from llamarl.memory import Price
from llamarl.scoring.kinds.kind import Given, Kind, KindSettings, RunFacts
from llamarl.scoring.scorer import Scorer
from llamarl.types import Outcome
from llamarl.words.fields import Positive, settings_dataclass
from llamarl.words.findings import Findings


@settings_dataclass
class LengthKindSettings(KindSettings):
    kind: Literal["length"]
    rate: Positive

    def find(self, given: Given, run: RunFacts, found: Findings) -> None:
        if self.rate > 100:
            found.add("is too dear; at most 100", given.key("rate"))


class Length(Scorer):
    """A completion's score is what its tokens cost, below 0."""

    def __init__(self, name, rate, site):
        self.name = name
        self._rate = rate
        self._done = []

    @property
    def pending(self):
        return len(self._done)

    def submit(self, key, item):
        self._done.append((key, Outcome.score(-self._rate * len(item.sampled_ids))))

    def poll(self):
        done = self._done
        self._done = []
        return done

    def wait(self, timeout_s):
        return bool(self._done)


class LengthKind(Kind[LengthKindSettings]):
    def check(self):
        if self.settings.rate == 99:
            raise ValueError(f"{self.given.key('rate')}=99: of all numbers")

    def try_out(self, samples):
        print(f"tried on {len(samples)} samples")

    @property
    def identity(self):
        return f"length at {self.settings.rate:g}"

    def notes(self, places):
        return ["length   has no limit"]

    def memory(self, places):
        yield Price(self.price_name, places["reward"], 3 << 30)

    def make(self, site, stream=None):
        return Length(self.given.name, self.settings.rate, site)


SETTINGS = LengthKindSettings
KIND = LengthKind
'''


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the product with two files more."""
    folder = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("llamarl", "executors", "recipes", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / "conf" / "reward" / "length.yaml").write_text(VALUES)
    (folder / "llamarl" / "scoring" / "kinds" / "length.py").write_text(KIND)
    return folder


@pytest.fixture
def start(tree):
    """start(*overrides): all that a recipe of the tree prints, which must end with `code`."""

    def start(*given: str, recipe: str = "llama_async.py", code: int = 0) -> str:
        where = {"recipe": tree / "recipes" / recipe, "cwd": tree}
        with Job(*given, run_dir=None, env={"PYTHONPATH": str(tree)}, **where) as job:
            assert job.wait() == code, job.output
            return job.output

    return start


def rows(run_dir: Path) -> list[dict]:
    return read_rows(run_dir / "metrics.jsonl")[1:]


def samples(run_dir: Path) -> list[dict]:
    """The answers of all evaluations."""
    found = []
    for file in sorted((run_dir / "samples").iterdir()):
        found += read_rows(file)
    assert len(found) == 3 * 8, "at the start and after each of two steps"
    return found


PARTS = (
    "reward=parts",
    "reward.parts={brief: {kind: length, rate: 2, weight: 0.25}, right: {kind: function}}",
)


def test_a_command_line_with_a_kind_of_ones_own_is_read_as_strictly_as_any(start):
    wrong = ("reward=length", "reward.rate=0", "reward.num_workers=2")
    said = " ".join(start(*wrong, code=2).split())
    assert "reward.rate=0 need a number above 0" in said
    assert "reward.num_workers only reward=function has it" in said
    said = start(*PARTS, "reward.parts.brief.rate=101", code=2)
    assert "reward.parts.brief.rate=101.0   is too dear; at most 100" in said


def test_a_dry_run_checks_prices_and_describes_a_kind_of_ones_own(start):
    said = start(*PARTS, "+dry_run=true")
    assert "reward   length at 2\nlength   has no limit\n" in said
    assert "memory   reward.parts.brief (length): 3.00 GiB held, on rank 0" in said
    assert "reward   llamarl.tasks.rewards:exact_match, here given the reference answers" in said
    said = start("reward=length", "reward.rate=99", "+dry_run=true", code=2)
    assert "reward.rate=99: of all numbers" in said


def right(sample: dict) -> bool:
    """Whether an answer to "12+34=" is the sum, and nothing else."""
    first, second = sample["prompt"].removesuffix("=").split("+")
    return sample["completion"].strip() == str(int(first) + int(second))


def test_a_run_is_rewarded_by_a_kind_of_ones_own(start, tmp_path):
    given = ("reward=length", f"reward.rate={RATE}")
    said = start(*SMALL, *given, f"run_dir={tmp_path}/run")
    assert "tried on 3 samples" in said
    for sample in samples(tmp_path / "run"):
        assert sample["score"] == -RATE * sample["num_tokens"]
    for row in rows(tmp_path / "run"):
        assert row["reward/mean"] == pytest.approx(-RATE * row["completion/length_mean"])


def test_a_run_adds_a_kind_of_ones_own_to_others(start, tmp_path):
    start(*SMALL, *PARTS, "max_lag=0", f"run_dir={tmp_path}/run")
    for sample in samples(tmp_path / "run"):
        assert sample["score"] == 0.25 * -2 * sample["num_tokens"] + right(sample)
    for row in rows(tmp_path / "run"):
        total = 0.25 * row["reward/brief/mean"] + row["reward/right/mean"]
        assert row["reward/mean"] == pytest.approx(total)
        assert row["reward/brief/mean"] == pytest.approx(-2 * row["completion/length_mean"])


def test_preference_pairs_are_labelled_by_a_kind_of_ones_own(start, tmp_path):
    file = write_rows(tmp_path / "prompts.jsonl", *({"prompt": f"{n}+1="} for n in range(8)))
    small = ("task.max_prompt_tokens=64", "max_new_tokens=8", "task.answer_key=null")
    given = (f"task.path={file}", f"out={tmp_path}/pairs.jsonl", f"model.path={MODEL}")
    start(*given, *small, "reward=length", recipe="preferences.py")
    pairs = read_rows(tmp_path / "pairs.jsonl")
    assert pairs
    for pair in pairs:
        assert len(pair["chosen"]) < len(pair["rejected"])
