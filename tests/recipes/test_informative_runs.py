"""Whole runs whose groups of equal outcomes are given back, and whose prompts are chosen."""

import json

import pytest

from tests.build.job import finished_job
from tests.launching import SMALL, untimed

TEACHING = (
    *SMALL,
    "tickets.informative=true",
    "tickets.sampler=difficulty",
    "tickets.half_life=0.01",
    "checkpoint.every=2",
)
GIVEN_BACK = "tickets/given_back"


def run(folder, *overrides, ranks=None):
    return finished_job(*TEACHING, *overrides, run_dir=folder, ranks=ranks).rows


@pytest.fixture(scope="module")
def in_step(tmp_path_factory):
    """The rows of a synchronous run."""
    return run(tmp_path_factory.mktemp("in_step") / "run", "max_lag=0", "max_steps=4")


def test_every_group_of_a_batch_teaches_and_the_others_are_counted(in_step):
    rows = in_step[1:]
    assert sum(row[GIVEN_BACK] for row in rows) > 0, "nothing was put to the test"
    assert all(row["groups/kept_equal"] == 0 for row in rows)
    batch = [row["groups/teaching_fraction"] for row in rows]
    assert all(0 < fraction <= 1 for fraction in batch)
    assert all(0 <= row["reward/all_mean"] <= 1 for row in rows)


@pytest.mark.bitwise("a synchronous run is the same on one rank and on two, resumed or not")
def test_a_run_of_two_ranks_goes_on_with_that_of_one_process(in_step, tmp_path):
    folder = tmp_path / "run"
    run(folder, "max_lag=0", "max_steps=2")
    rows = run(folder, "max_lag=0", "max_steps=4", "resume=auto", ranks=2)
    assert untimed(rows) == untimed(in_step)


def test_where_nothing_is_solved_a_step_trains_on_what_there_is(tmp_path):
    data = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": "never"}) for n in range(40)]
    data.write_text("\n".join(lines))
    rows = run(
        tmp_path / "run",
        "task=jsonl",
        f"task.path={data}",
        "task.chat=false",
        "task.max_prompt_tokens=16",
        "max_new_tokens=4",
        "eval.num_prompts=0",
        "tickets.max_refill=2",
        "max_lag=1",
        "max_steps=2",
        "groups_per_step=4",
    )
    assert [row["groups/kept_equal"] for row in rows] == [4, 4]
    assert all(row[GIVEN_BACK] <= 8 for row in rows)
    assert rows[0][GIVEN_BACK] == 8
    assert all(row["groups/teaching_fraction"] == 0 for row in rows)
