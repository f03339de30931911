"""benchmarks/streaming.py without its runs: its arithmetic, and what it says of its figures."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """The script, which finds its neighbours beside itself."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("streaming")


def a_run(way, chunk_tokens, step_s, tail_s):
    early = None if chunk_tokens is None else 0.5
    return {
        "way": way,
        "chunk_tokens": chunk_tokens,
        "step_s": step_s,
        "tail_s": tail_s,
        "prefilled_early": early,
        "scorer_s": 1.0,
    }


RUNS = [
    a_run("none", None, 10.0, 2.0),
    a_run("intra", 16, 9.0, 0.2),
    a_run("intra", 64, 8.0, 0.8),
    a_run("inter", None, 6.0, 2.0),
    a_run("both", 64, 6.6, 0.9),
]


# 1,000 operations a second at a half, 2 x 5 a token: 50 tokens a second are read.
SMALL = {
    "parameters": 5.0,
    "peak": 1000.0,
    "prefill_share": 0.5,
    "decode_step_s": 0.1,
    "answers": 2,
    "answer_tokens": 100,
    "prompt_tokens": 50,
    "train_s": 4.0,
}


def test_a_step_of_eight_gpus_by_hand(benchmark):
    step = benchmark.predicted(benchmark.Cluster(**SMALL), 25)
    assert (step["decode_s"], step["read_s"], step["tail_s"]) == (10.0, 6.0, 1.0)
    assert (step["whole_step_s"], step["ahead_step_s"]) == (20.0, 15.0)
    assert step["saved"] == 0.25


def test_a_scorer_that_cannot_keep_up_is_behind_at_the_end(benchmark):
    slow = benchmark.Cluster(**{**SMALL, "peak": 100.0})
    step = benchmark.predicted(slow, 25)
    assert (step["read_s"], step["tail_s"]) == (60.0, 50.0 + 10.0)


def said_of(benchmark, runs, trl=None):
    return "\n".join(benchmark.verdict({"runs": runs, "trl": trl, "settings": {"steps": 3}}))


def test_the_fastest_chunk_is_taken_and_the_aim_is_judged_by_the_shortest_tail(benchmark):
    assert benchmark.best_chunk(RUNS) == 64
    said = said_of(benchmark, RUNS, {"step_s": 24.0})
    assert "chunks of 16 tokens, is 10% of" in said and "of 15% is met" in said
    assert "takes 80% of the time" in said and "90% at the slowest" in said
    assert "it changes a step by +10%" in said and "3.0 times" in said
    slower = [a_run("intra", 16, 9.0, 1.0) if run["chunk_tokens"] == 16 else run for run in RUNS]
    said = said_of(benchmark, slower)
    assert "not met" in said and "TRL" not in said


def test_no_saving_is_told_that_the_runs_cannot_show(benchmark):
    # The scorer works for 1 s of a step, and 2 s seem to be saved.
    assert "2.0 s seem to be saved" in said_of(benchmark, RUNS)
    within = [run | {"scorer_s": 2.5} for run in RUNS]
    assert "seem to be saved" not in said_of(benchmark, within)
    unread = [run | {"prefilled_early": 0.0} if run["way"] == "both" else run for run in RUNS]
    said = said_of(benchmark, unread)
    assert "nothing was read ahead (0%)" in said and "no effect of streaming" in said
