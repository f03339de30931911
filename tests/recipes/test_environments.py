"""Whole runs of dialogues: asynchronous and synchronous, broken environments, and going on."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.launching import ForkedJob, Job, untimed

STEPS = 4
PLAYED = (
    "task=environment",
    "task.chat=false",
    "task.max_prompt_tokens=16",
    "task.play.max_turns=3",
    "task.play.max_turn_tokens=6",
    "task.play.timeout_s=60",
    "max_new_tokens=40",
    "groups_per_step=4",
    "group_size=4",
    "eval.num_prompts=8",
    "eval.every=2",
    "checkpoint.every=2",
    f"max_steps={STEPS}",
    "generator.max_slots=24",
    # The tiny model ends a sum with a digit or two, and then with the end token.
    "generator.chunk_tokens=2",
)
ECHO = (*PLAYED, "task.environment=tests.games:Echo")

RIGHT = "{kind: function, fn: llamarl.tasks.rewards:exact_match}"
GAME = "kind: environment, environment: tests.games:Echo, chat: false, max_prompt_tokens: 16"
LIMITS = "max_turns: 3, max_turn_tokens: 6, timeout_s: 60"


def mixed(num_workers):
    """A game that an environment plays, and sums that it does not."""
    play = f"play: {{{LIMITS}, num_workers: {num_workers}}}"
    parts = f"task.parts={{game: {{{GAME}, {play}}}, sums: {{kind: addition}}}}"
    return ("task=mixture", parts, *(word for word in PLAYED if not word.startswith("task")))


def shop_rows(tmp_path, **more):
    """Write rows of sums, for the shop."""
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{10 + n}+{20 + n}=", "answer": str(30 + 2 * n), **more} for n in range(24)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def check(rows, *, turns=True):
    """What every run of dialogues has."""
    steps = [row for row in rows if row["step"]]
    assert steps and not any(row["tokens/reencode_mismatch"] for row in steps)
    for row in steps:
        ended = {name: value for name, value in row.items() if name.startswith("dialogues/")}
        num_turns = ended.pop("dialogues/turns")
        assert 0 < sum(ended.values()) <= 16 and num_turns <= 3 * sum(ended.values())
        if turns:
            assert num_turns > 0 and row["tokens/context"] > 0
        assert row["parity/canary_diff_rms"] <= row["parity/canary_diff_max"] < 1e-3


def test_a_run_on_two_ranks_trains_on_dialogues_within_its_lag(tmp_path):
    with ForkedJob(*ECHO, "max_lag=2", run_dir=tmp_path / "run", ranks=2) as job:
        assert job.wait() == 0, job.output
    rows = job.rows
    assert len(rows) == STEPS + 1
    check(rows)
    assert max(row["lag/max"] for row in rows[1:]) <= 2
    assert sum(row.get("dialogues/completed", 0) for row in rows) > 0
    assert all(0 < row["reward/mean"] <= 0.75 for row in rows[1:])
    assert 0 < rows[0]["eval/reward"] <= 0.75


def test_an_environment_plays_its_part_of_a_mixture(tmp_path):
    with ForkedJob(*mixed(1), "max_lag=2", run_dir=tmp_path / "run", ranks=2) as job:
        assert job.wait() == 0, job.output
    rows = job.rows
    check(rows)
    assert max(row["lag/max"] for row in rows[1:]) <= 2
    by_part = {"game": set(), "sums": set()}
    for row in rows[1:]:
        for name, seen in by_part.items():
            seen.add(row.get(f"reward/part/{name}/mean"))
    # A quarter for each of three turns, whoever says what.
    assert by_part["game"] - {None} == {0.75}
    assert by_part["sums"] - {None}


def test_an_environment_plays_a_set_of_held_out_prompts(tmp_path):
    play = "play: {max_turns: 2, max_turn_tokens: 6}"
    sets = f"eval.sets={{game: {{{GAME}, num_prompts: 6, {play}}}}}"
    plain = [word for word in PLAYED if not word.startswith("task")] + ["task=addition"]
    with ForkedJob(*plain, sets, "max_steps=1", "eval.every=1", run_dir=tmp_path / "run") as job:
        assert job.wait() == 0, job.output
    for row in job.rows:
        assert row["eval/game/reward"] == 0.5 and row["eval/reward"] == row["eval/accuracy"]


def test_what_is_wrong_with_a_parts_environment_is_said_of_the_part(tmp_path):
    wrong = [word.replace("games:Echo", "games:Ech") for word in mixed(1)]
    with ForkedJob(*wrong, run_dir=tmp_path / "run") as job:
        assert job.wait() == 2, job.output
    assert "task.parts.game.environment=tests.games:Ech: " in job.output
    assert "did you mean Echo?" in job.output


def test_a_dry_run_names_every_environment_and_scores_what_none_plays(tmp_path):
    with ForkedJob(*mixed(1), "+dry_run=true", run_dir=tmp_path / "run") as job:
        assert job.wait() == 0, job.output
    assert "dialogue task.parts.game: tests.games:Echo (dialogue: none)" in job.output
    assert job.output.count("  reward 1\n") == 3


@pytest.mark.parametrize("ranks", [2])
@pytest.mark.bitwise("synchronous runs of dialogues are equal")
def test_synchronous_runs_of_a_mixture_are_equal_whoever_answers_first(tmp_path, ranks):
    found = []
    for workers in (1, 3):
        run_dir = tmp_path / f"run{workers}"
        with ForkedJob(*mixed(workers), "max_lag=0", run_dir=run_dir, ranks=ranks) as job:
            assert job.wait() == 0, job.output
        check(job.rows)
        found.append(untimed(job.rows))
    assert found[0] == found[1]
    assert {"reward/part/game/mean", "reward/part/sums/mean"} <= set().union(*found[0])


@pytest.mark.parametrize("ranks", [None])
@pytest.mark.bitwise("synchronous runs of dialogues are equal")
def test_synchronous_runs_are_equal_whoever_answers_first(tmp_path, ranks):
    parts = "{game: {kind: environment}, new: {kind: novelty, nearest: 2, weight: 0.5}}"
    found = []
    for number, workers in enumerate((1, 3)):
        rewarded = ("reward=parts", f"reward.parts={parts}")
        given = (*rewarded, "max_lag=0", f"task.play.num_workers={workers}")
        with ForkedJob(*ECHO, *given, run_dir=tmp_path / f"run{number}", ranks=ranks) as job:
            assert job.wait() == 0, job.output
        check(job.rows)
        found.append(untimed(job.rows))
    assert found[0] == found[1]
    for row in found[0][1:]:
        assert {"reward/game/mean", "reward/new/mean", "diversity/cosine_distance"} <= set(row)


@pytest.mark.slow
@pytest.mark.bitwise("a synchronous run of dialogues that was resumed is the one that was not")
def test_a_run_killed_in_its_dialogues_and_resumed_equals_one_that_was_not(tmp_path):
    with ForkedJob(*ECHO, "max_lag=0", run_dir=tmp_path / "whole") as whole:
        assert whole.wait() == 0, whole.output
    with Job(*ECHO, "max_lag=0", run_dir=tmp_path / "run") as job:
        job.until(lambda: (tmp_path / "run" / "checkpoints" / "latest").exists(), "a checkpoint")
        os.kill(job.rank_pids()[0], signal.SIGKILL)
        assert job.wait() != 0
    with Job(*ECHO, "max_lag=0", "resume=auto", run_dir=tmp_path / "run") as job:
        assert job.wait() == 0, job.output
        assert "resumed from step_" in job.output
    assert untimed(job.rows) == untimed(whole.rows)


def test_a_run_that_was_stopped_goes_on_in_the_middle_of_its_dialogues(tmp_path):
    hold, held = tmp_path / "hold", tmp_path / "held"
    hold.touch()
    # Some steps' turns; the dialogue of the next one is in the middle when the run is stopped.
    env = {"HOLD_AFTER": "100", "HOLD_FILE": str(hold), "HELD_FILE": str(held)}
    given = (
        *PLAYED,
        "task.environment=tests.games:Held",
        "task.play.num_workers=1",
        "max_lag=2",
        "max_steps=100000",
        "eval.every=0",
        "checkpoint.every=0",
    )
    with ForkedJob(*given, run_dir=tmp_path / "run", ranks=2, env=env) as job:
        job.until(lambda: held.exists() and job.rows, "a step, and a dialogue that is held")
        job.stop()
        assert job.wait() == 0, job.output
    hold.unlink()
    step = int(job.checkpoint.name.removeprefix("step_"))
    last = f"max_steps={step + 20}"
    resumed = (*given, last, "resume=auto")
    with ForkedJob(*resumed, run_dir=tmp_path / "run", ranks=2, env=env) as job:
        assert job.wait() == 0, job.output
    assert "completions go on after" in job.output
    assert "lost" not in job.output
    rows = job.rows
    check(rows)
    assert rows[-1]["step"] == step + 20


def refusing(tmp_path, *more):
    """A run over rows, of which those that begin with a 9 are refused by their environment."""
    return (
        *PLAYED,
        "task.environment=tests.games:Refuses",
        f"task.path={tmp_path}/rows.jsonl",
        "reward=parts",
        f"reward.parts={{right: {RIGHT}, asked: {{kind: environment, weight: 0.5}}}}",
        "reward.max_error_rate=1",
        "max_lag=1",
        *more,
    )


def test_rows_and_tools_are_rewarded_by_several_and_broken_dialogues_are_masked(tmp_path):
    shop_rows(tmp_path)
    file = tmp_path / "rows.jsonl"
    rows = file.read_text()
    assert rows.count('"prompt": "3') == 4
    file.write_text(rows.replace('"prompt": "3', '"prompt": "9'))
    with ForkedJob(*refusing(tmp_path), run_dir=tmp_path / "run") as job:
        assert job.wait() == 0, job.output
    check(job.rows, turns=False)
    assert sum(row.get("dialogues/lost", 0) for row in job.rows[1:]) > 0
    assert 0 < max(row["reward/error_rate"] for row in job.rows[1:]) < 1
    assert "error, its completion is masked: the environment: lost: " in job.output
    assert "no nines" in job.output


def test_an_environment_that_cannot_begin_is_told_before_anything_starts(tmp_path):
    shop_rows(tmp_path)
    file = tmp_path / "rows.jsonl"
    file.write_text(file.read_text().replace('"prompt": "', '"prompt": "9'))
    with ForkedJob(*refusing(tmp_path), run_dir=tmp_path / "run") as job:
        assert job.wait() == 2, job.output
    assert "with one of its first prompts it fails as it begins: " in job.output
    assert "no nines" in job.output and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "given, said",
    [
        (("task.environment=tests.games:Shp",), "did you mean Shop?"),
        (("task.environment=tests.games:Echo", "task.eval_path=x"), "task.path=FILE"),
    ],
)
def test_an_environment_that_cannot_be_used_is_told_before_anything_starts(tmp_path, given, said):
    with ForkedJob(*PLAYED, *given, run_dir=tmp_path / "run") as job:
        assert job.wait() == 2, job.output
    assert said in " ".join(job.output.split())
    assert not (tmp_path / "run").exists()


def test_an_environment_that_leaves_no_room_for_a_turn_is_told_before_anything_starts(tmp_path):
    with ForkedJob(*ECHO, "max_new_tokens=3", run_dir=tmp_path / "run") as job:
        assert job.wait() == 2, job.output
    said = " ".join(job.output.split())
    assert "tests.games:Echo: its first dialogues begin with 3, 3, 3 tokens" in said
    assert "max_new_tokens=3 counts them: no room is left for a turn" in said
    assert not (tmp_path / "run").exists()


def test_an_environment_whose_further_dialogues_leave_room_is_started_with_a_warning(tmp_path):
    """Its first two leave none."""
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}=", "answer": "1", "more": "1" * (80 - 30 * n)} for n in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = refusing(tmp_path, f"task.eval_path={file}", "+dry_run=true")
    with ForkedJob(*given, run_dir=tmp_path / "run") as job:
        assert job.wait() == 0, job.output
    said = " ".join(job.output.split())
    assert "2 of its first 3 dialogues begin with 50 or more tokens" in said
    with ForkedJob(*given, "max_new_tokens=20", run_dir=tmp_path / "run") as job:
        assert job.wait() == 2, job.output
    assert "its first dialogues begin with 80, 50, 20 tokens" in " ".join(job.output.split())


def test_the_reward_of_an_environment_needs_one(tmp_path):
    with ForkedJob("reward=environment", run_dir=tmp_path / "run") as job:
        assert job.wait() == 2, job.output
    assert "no environment plays here; task=environment" in " ".join(job.output.split())
