"""Diversity of evaluations: each prompt's answers by themselves, versions in their order."""

import pytest
import torch

from llamarl.evaluation import diversity as diversity_module
from llamarl.evaluation.diversity import TEXTS_A_CALL, Diversity
from llamarl.evaluation.judges import advance
from llamarl.scoring.scorer import site_alone
from llamarl.tasks.parts import EvalSet
from tests.evaluated import begun, columns_of, evaluated
from tests.launching import SMALL, ForkedJob

DIRECTIONS = {"east": [1.0, 0.0], "north": [0.0, 1.0], "west": [-1.0, 0.0]}


class ByWord:
    """Embeds the words of DIRECTIONS, and remembers how many at a time."""

    def __init__(self):
        self.calls = []

    def embed(self, texts):
        self.calls.append(len(texts))
        return torch.tensor([DIRECTIONS[text] for text in texts])

    def tensors(self):
        return []


@pytest.fixture
def embedder(monkeypatch):
    made = ByWord()
    monkeypatch.setattr(diversity_module, "load_embedder", lambda settings, device: made)
    return made


def started():
    diversity = Diversity(site_alone(torch.device("cpu")), settings=None)
    diversity.start()
    return diversity


def answers(*of_prompts, first=0):
    """A greedy answer to each prompt, and these sampled ones."""
    found = []
    for prompt, texts in enumerate(of_prompts, start=first):
        for sample, text in enumerate(["greedy", *texts]):
            found.append(evaluated(text, prompt=prompt, sample=sample))
    return found


def test_it_is_the_mean_over_prompts_of_the_distance_among_a_prompts_answers(embedder):
    asked = answers(["east", "east"], ["east", "west"], ["north", "east"])
    assert columns_of(started(), asked) == {"eval/diversity": pytest.approx((0 + 2 + 1) / 3)}


def test_each_set_has_a_mean_of_its_own(embedder):
    sets = (EvalSet("", 0, 1), EvalSet("a", 9, 2))
    of_a = answers(["east", "east"], ["north", "east"], first=9)
    metrics = columns_of(started(), answers(["east", "west"]) + of_a, sets=sets)
    assert metrics == {"eval/diversity": pytest.approx(2), "eval/a/diversity": pytest.approx(0.5)}


def test_it_works_in_pieces(embedder):
    diversity = started()
    work = begun(diversity, answers(["east", "north"] * TEXTS_A_CALL))
    assert embedder.calls == [] and diversity.is_computing
    assert advance(work) is None and embedder.calls == [TEXTS_A_CALL]
    assert advance(work) is not None and embedder.calls == [TEXTS_A_CALL, TEXTS_A_CALL]


@pytest.mark.slow
def test_a_run_reports_it_beside_what_gold_says(tmp_path):
    judged = ("eval.gold=tests.launching:unhurried", "eval.reference_key=null")
    sampled = ("eval.embedder=start", "eval.num_samples=3", "max_steps=2")
    with ForkedJob(*SMALL, *judged, *sampled, run_dir=tmp_path / "run") as job:
        assert job.wait() == 0, job.output
        rows = job.rows
    assert [row["step"] for row in rows if row.get("eval/diversity") is not None] == [0, 2]
    for row in (rows[0], rows[2]):
        assert 0 < row["eval/diversity"] < 2 and row["eval/gold"] is not None
