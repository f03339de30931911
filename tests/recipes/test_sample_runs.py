"""Samples of whole runs: what they say of tokens is so, and a run is the same without them."""

import pytest

from llamarl.comm.channel import dp_rank_of
from llamarl.observe.samples import FILE_NAME, read_samples
from llamarl.words.choices import GROUP_FIELDS
from tests.build.job import finished_job
from tests.launching import GROUP_SIZE, SMALL, STEPS

TWO_TRAINERS = ("placement.trainer=[0,1]", "placement.generator=[0]", "placement.reward=[0]")


def spread(runs):
    values = []
    for value, count in runs:
        values += [value] * count
    return values


def check(samples, *, group_size):
    """What holds of the samples of any run of one turn."""
    for sample in samples:
        assert 1 <= len(sample["shown"]) <= 2
        for group in sample["shown"]:
            assert len(group["completions"]) == group_size
            for completion in group["completions"]:
                size = completion["length"]
                runs = ("lag", "sampled", "advantage", "turn_reward")
                assert {len(spread(completion[name])) for name in runs} == {size}
                columns = ("ids", "text", "generator", "trainer")
                assert {len(completion[name]) for name in columns} == {size}
                assert all(lag >= 0 for lag in spread(completion["lag"]))


def test_a_run_may_keep_no_samples(runs):
    """test_eval_sets.py has it that the run is the same without them."""
    assert not (runs("half").run_dir / FILE_NAME).exists()
    assert "sample of step" not in runs("half").output


def test_a_synchronous_runs_samples_are_of_its_own_weights(synchronous_run):
    samples = read_samples(synchronous_run.run_dir / FILE_NAME)
    assert [sample["step"] for sample in samples] == list(range(1, STEPS + 1))
    check(samples, group_size=GROUP_SIZE)
    num_tokens = 0
    for sample in samples:
        lag = GROUP_FIELDS.index("lag")
        assert all(line[lag] == 0 for line in sample["groups"])
        for group in sample["shown"]:
            for completion in group["completions"]:
                assert "".join(completion["text"]).count("<eos>") <= 1
                for ours, theirs in zip(completion["trainer"], completion["generator"]):
                    if ours is not None:
                        num_tokens += 1
                        assert ours == pytest.approx(theirs, abs=1e-3)
    assert num_tokens > 0


@pytest.mark.slow
def test_two_trainer_ranks_keep_the_samples_of_the_first(tmp_path):
    job = finished_job(*SMALL, *TWO_TRAINERS, run_dir=tmp_path / "run", ranks=2)
    samples = read_samples(job.run_dir / FILE_NAME)
    assert [sample["step"] for sample in samples] == list(range(1, STEPS + 1))
    check(samples, group_size=GROUP_SIZE)
    tickets = []
    for sample in samples:
        tickets += [line[0] for line in sample["groups"]]
    assert {dp_rank_of(ticket, 2) for ticket in tickets} == {0}
