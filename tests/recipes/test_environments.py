"""Whole runs of dialogues: asynchronous and synchronous, broken environments, and going on."""

from __future__ import annotations

from functools import partial

import pytest

from tests.build.job import finished_job
from tests.build.rows import write_rows
from tests.launching import ForkedJob, Job, killed_and_resumed, untimed

BAD_INPUT = 2
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


def shop_rows(tmp_path, digits):
    """Write 24 rows of sums for the shop, eight that begin with each of the digits."""
    rows = []
    for digit in digits:
        for n in range(8):
            rows.append({"prompt": f"{digit}{n}+20=", "answer": str(10 * int(digit) + n + 20)})
    write_rows(tmp_path / "rows.jsonl", *rows)


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
    job = finished_job(*ECHO, "max_lag=2", run_dir=tmp_path / "run", ranks=2)
    rows = job.rows
    assert len(rows) == STEPS + 1
    check(rows)
    assert max(row["lag/max"] for row in rows[1:]) <= 2
    assert sum(row.get("dialogues/completed", 0) for row in rows) > 0
    assert all(0 < row["reward/mean"] <= 0.75 for row in rows[1:])
    assert 0 < rows[0]["eval/reward"] <= 0.75


def test_an_environment_plays_a_set_of_held_out_prompts(tmp_path):
    play = "play: {max_turns: 2, max_turn_tokens: 6}"
    sets = f"eval.sets={{game: {{{GAME}, num_prompts: 6, {play}}}}}"
    plain = [word for word in PLAYED if not word.startswith("task")] + ["task=addition"]
    job = finished_job(*plain, sets, "max_steps=1", "eval.every=1", run_dir=tmp_path / "run")
    for row in job.rows:
        assert row["eval/game/reward"] == 0.5 and row["eval/reward"] == row["eval/accuracy"]


def test_a_dry_run_names_every_environment_and_scores_what_none_plays(launch_here, tmp_path):
    code, said = launch_here(*mixed(1), "+dry_run=true", f"run_dir={tmp_path / 'run'}")
    assert code == 0, said.err
    assert "dialogue task.parts.game: tests.games:Echo (dialogue: none)" in said.out
    assert said.out.count("  reward 1\n") == 3


def equal_runs(tmp_path, given, ranks=None):
    """The rows of two synchronous runs, which are equal. given: of so many workers."""
    found = []
    for workers in (1, 3):
        run_dir = tmp_path / f"run{workers}"
        job = finished_job(*given(workers), "max_lag=0", run_dir=run_dir, ranks=ranks)
        check(job.rows)
        found.append(untimed(job.rows))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.bitwise("synchronous runs of dialogues are equal")
def test_synchronous_runs_of_a_mixture_are_equal_whoever_answers_first(tmp_path):
    rows = equal_runs(tmp_path, mixed, ranks=2)[1:]
    of_game = {row.get("reward/part/game/mean") for row in rows} - {None}
    of_sums = {row.get("reward/part/sums/mean") for row in rows} - {None}
    # A quarter for each of three turns, whoever says what.
    assert of_game == {0.75} and of_sums


@pytest.mark.slow
@pytest.mark.bitwise("synchronous runs of dialogues are equal")
def test_synchronous_runs_are_equal_whoever_answers_first(tmp_path):
    parts = "{game: {kind: environment}, new: {kind: novelty, nearest: 2, weight: 0.5}}"
    given = (*ECHO, "reward=parts", f"reward.parts={parts}")
    for row in equal_runs(tmp_path, lambda n: (*given, f"task.play.num_workers={n}"))[1:]:
        assert {"reward/game/mean", "reward/new/mean", "diversity/cosine_distance"} <= set(row)


@pytest.mark.slow
@pytest.mark.bitwise("a synchronous run of dialogues that was resumed is the one that was not")
def test_a_run_killed_in_its_dialogues_and_resumed_equals_one_that_was_not(tmp_path):
    whole = finished_job(*ECHO, "max_lag=0", run_dir=tmp_path / "whole")
    job = killed_and_resumed(partial(Job, *ECHO, "max_lag=0", run_dir=tmp_path / "run"))
    assert untimed(job.rows) == untimed(whole.rows)


@pytest.mark.slow
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
    step = job.saved_step + 20
    resumed = (*given, f"max_steps={step}", "resume=auto")
    job = finished_job(*resumed, run_dir=tmp_path / "run", ranks=2, env=env)
    assert "completions go on after" in job.output and "lost" not in job.output
    check(job.rows)
    assert job.rows[-1]["step"] == step


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
    shop_rows(tmp_path, "129")
    job = finished_job(*refusing(tmp_path), run_dir=tmp_path / "run")
    check(job.rows, turns=False)
    assert sum(row.get("dialogues/lost", 0) for row in job.rows[1:]) > 0
    assert 0 < max(row["reward/error_rate"] for row in job.rows[1:]) < 1
    assert "error, its completion is masked: the environment: lost: " in job.output
    assert "no nines" in job.output


def test_an_environment_that_cannot_begin_is_told_before_anything_starts(launch_here, tmp_path):
    shop_rows(tmp_path, "9")
    code, said = launch_here(*refusing(tmp_path), f"run_dir={tmp_path / 'run'}")
    assert code == BAD_INPUT
    assert "with one of its first prompts it fails as it begins: " in said.err
    assert "no nines" in said.err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "given, said",
    [
        ((*PLAYED, "task.environment=tests.games:Shp"), ["did you mean Shop?"]),
        (
            [word.replace("games:Echo", "games:Ech") for word in mixed(1)],
            ["task.parts.game.environment=tests.games:Ech: ", "did you mean Echo?"],
        ),
        (
            (*ECHO, "max_new_tokens=3"),
            [
                "tests.games:Echo: its first dialogues begin with 3, 3, 3 tokens",
                "max_new_tokens=3 counts them: no room is left for a turn",
            ],
        ),
    ],
)
def test_an_environment_that_cannot_be_used_is_told_before_anything_starts(
    launch_here, tmp_path, given, said
):
    code, found = launch_here(*given, f"run_dir={tmp_path / 'run'}")
    assert code == BAD_INPUT and all(one in " ".join(found.err.split()) for one in said)
    assert not (tmp_path / "run").exists()


def test_an_environment_whose_further_dialogues_leave_room_is_started_with_a_warning(
    launch_here, tmp_path
):
    """Its first two leave none."""
    rows = [{"prompt": f"{n}=", "answer": "1", "more": "1" * (80 - 30 * n)} for n in range(3)]
    file = write_rows(tmp_path / "rows.jsonl", *rows)
    given = refusing(tmp_path, f"task.eval_path={file}", f"run_dir={tmp_path / 'run'}")
    code, said = launch_here(*given, "+dry_run=true")
    told = " ".join((said.out + said.err).split())
    assert code == 0 and "2 of its first 3 dialogues begin with 50 or more tokens" in told
    code, said = launch_here(*given, "max_new_tokens=20", "+dry_run=true")
    assert code == BAD_INPUT
    assert "its first dialogues begin with 80, 50, 20 tokens" in " ".join(said.err.split())
