"""python -m llamarl.planner: its command lines, and what it says of bad ones."""

import json
import re
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
import torch

from llamarl.config.command_line import check_command_line
from llamarl.models.config import read_config, tiny_directory
from llamarl.planner import probe as probing
from llamarl.planner.__main__ import main
from llamarl.planner.check import check_run
from llamarl.planner.fit import fit_runs, points_of
from llamarl.planner.probe_ranks import time_together_s
from llamarl.planner.search_settings import KEYS, read_words
from llamarl.planner.sheet import read_sheet
from tests.house import ROOT
from tests.unit.made_runs import ROW, made_run

TINY = f"model.path={tiny_directory()}"
SIZES = ["groups_per_step=8", "group_size=4", "max_new_tokens=32", "task.max_prompt_tokens=16"]


def run(capsys, *words):
    """(status, what was printed, errors)"""
    status = main(list(words))
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_search_says_all_that_a_plan_is(capsys):
    status, out, err = run(capsys, "search", "--gpus", "8", "--gpu-memory", "80", TINY, *SIZES)
    assert (status, err) == (0, "")
    for said in ("asynchronous:", "theta*", "mean lag", "synchronous:", "asynchrony", "to paste"):
        assert said in out
    assert "GiB a GPU" in out


def test_a_plan_takes_on_the_real_ledger_what_the_formulas_say(capsys):
    """16 groups on 15 replicas, where the ledger and whole groups bound the rows: a formula that
    leaves either out is a third too short.
    """
    words = ["--gpus", "16", "--gpu-memory", "80", TINY, "groups_per_step=16", "--simulate"]
    status, out, err = run(capsys, "search", *words)
    assert (status, err) == (0, "")
    plan, simulated = out.split("simulated\n")
    predicted = float(re.search(r"^asynchronous: (\S+) s a step", plan, re.MULTILINE)[1])
    step = float(re.search(r"^step +(\S+) s mean", simulated, re.MULTILINE)[1])
    assert step == pytest.approx(predicted, rel=0.1)
    lag = re.search(r"^lag +\S+ mean, (\d+) at most, of max_lag (\d+)", simulated, re.MULTILINE)
    assert int(lag[1]) <= int(lag[2]) == 1


def test_words_may_stand_anywhere(capsys):
    _, first, _ = run(capsys, "search", "--gpus", "4", TINY, *SIZES)
    _, second, _ = run(capsys, "search", TINY, *SIZES, "--gpus", "4", "sheet=h100")
    assert first == second != ""


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("gpus", [1, 2, 5, 8])
def test_what_is_to_be_pasted_is_accepted(capsys, gpus, max_lag):
    words = [TINY, *SIZES, f"max_lag={max_lag}", "--json"]
    status, out, _ = run(capsys, "search", f"--gpus={gpus}", *words)
    assert status == 0
    found = json.loads(out)
    assert found["asynchronous"] is not None or max_lag == 0 or gpus == 1
    for name in ("asynchronous", "synchronous"):
        if found[name] is not None:
            given = [*found[name]["overrides"], "task=addition", "eval.every=0"]
            check_command_line(given, world_size=gpus)


def test_a_search_needs_a_config_alone_and_no_torch(tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_directory() / "config.json").read_bytes())
    words = ["search", "--gpus", "2", f"model.path={tmp_path}/config.json", *SIZES]
    code = (
        "import sys\nfrom llamarl.planner.__main__ import main\n"
        f"status = main({words!r})\n"
        "print(status, [m for m in ('torch', 'transformers', 'omegaconf') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


@pytest.mark.parametrize(
    "words, said",
    [
        (["model.pat=x"], "model.pat=x: unknown key; did you mean model.path?"),
        ([], "model.path: missing"),
        ([TINY, "groups_per_step=0"], "groups_per_step=0: need a whole number of at least 1"),
        ([TINY, "model.dtype=bfloat61"], "did you mean bfloat16?"),
        ([TINY, "length_sigma=-1"], "length_sigma=-1: need a number of at least 0"),
        ([TINY, "prompt_tokens=x"], "prompt_tokens=x: need a number above 0"),
        ([TINY, "trainer.activation_checkpointing=maybe"], "need true, false or auto"),
        ([TINY, "max_lag=1", "overcommit=65"], "at most 64 groups"),
        ([TINY, "completion_tokens=5000"], "cannot be above max_new_tokens"),
        ([TINY, "generator.tensor_parallel=64"], "query heads to split"),
        ([TINY, "sheet=h10"], "did you mean h100?"),
        (["model.path=nowhere"], "nowhere"),
    ],
)
def test_what_is_wrong_is_said_and_ends_with_2(capsys, words, said):
    status, out, err = run(capsys, "search", "--gpus", "2", *words)
    assert (status, out) == (2, "")
    assert err.startswith("llamarl.planner: ") and said in err


def test_all_wrong_words_are_named_at_once(capsys):
    _, _, err = run(capsys, "search", "--gpus", "2", "a=1", "group_size=x")
    assert all(said in err for said in ("a=1", "group_size=x", "model.path"))


def test_a_memory_that_holds_nothing_says_what_would(capsys):
    words = ["search", "--gpus", "1", "--gpu-memory", "0.01", TINY]
    status, _, err = run(capsys, *words)
    assert status == 2
    assert "nothing fits 0.009 GiB a GPU" in err and "at least" in err
    assert run(capsys, *words[:4], "-1", TINY)[0] == 2


def test_auto_leaves_a_choice_to_the_planner():
    settings = read_words([TINY, "overcommit=auto", "generator.tensor_parallel=null"])
    assert settings == read_words([TINY])
    fields = asdict(settings)
    assert sorted(KEYS.values()) == sorted(fields)


@pytest.mark.parametrize(
    "words, said",
    [
        (["fit"], "either --probe or the directories"),
        (["fit", "--probe", "runs/a"], "either --probe or the directories"),
        (["fit", "--probe", "minutes=3"], "minutes=3: unknown key"),
        (["fit", "--probe", "seconds=-3"], "seconds=-3: need a number above 0"),
        (["fit", "--probe", "threads=0"], "threads=0: need a whole number of at least 1"),
        (["fit", "nowhere"], "nowhere/metrics.jsonl: no such file"),
        (["fit", "nowhere", "prompts=3"], "prompts=3: unknown key"),
        (["check"], "needs the directories of runs"),
        (["check", "nowhere"], "nowhere/metrics.jsonl: no such file"),
    ],
)
def test_fits_and_checks_of_nothing_are_refused(capsys, words, said):
    status, _, err = run(capsys, *words)
    assert status == 2 and said in err


# --- A probe, on a clock that counts its readings ---


class Readings:
    """A clock that has moved on by a second at every look."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.fixture
def counted(monkeypatch):
    """Every piece of work takes a second, and a budget is soon spent."""
    clock = Readings()
    made = probing.Watch

    def watch(device, **_):
        return made(device, clock)

    monkeypatch.setattr(probing, "Watch", watch)
    # Half a second more than an update of one rank.
    monkeypatch.setattr(probing, "time_together_s", lambda *_, **__: 1.5)


@pytest.mark.slow
def test_a_probe_makes_a_sheet_that_a_search_takes(capsys, tmp_path, counted):
    file = tmp_path / "mine.yaml"
    status, out, err = run(capsys, "fit", "--probe", f"sheet={file}", "seconds=1")
    assert (status, err) == (0, "")
    assert "trainer" in out and "scorer" in out and f"written   {file}" in out
    measured = read_sheet(file).measured
    config = read_config(tiny_directory())
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    assert measured.is_of(config, dtype)
    # Every step took a second, of 16 tokens a row.
    assert measured.decode.curve.ys[0] == pytest.approx(1 / probing.CHUNK)
    assert measured.score.ys == (1.0, 1.0, 1.0, 1.0)
    # 512 completions in a second; an update takes no longer beside others on this clock.
    assert measured.hosted_s == pytest.approx(1 / 512)
    assert (measured.publish_s, measured.swap_s, measured.crowding) == (1.0, 1.0, 0.0)
    assert measured.together_s == (0.5 if probing.has_other_cores() else 0.0)
    words = [TINY, *SIZES, f"sheet={file}", f"model.dtype={dtype}", "--gpus", "2"]
    status, out, _ = run(capsys, "search", *words)
    assert status == 0 and "measured (tiny" in out


def test_decode_steps_are_timed_while_all_rows_are_there(monkeypatch):
    """The first rows sample while the prompts of the others are read."""
    rows = []

    class Counting(probing.Watch):
        def shortest(self, work, repeats=probing.REPEATS):
            sampled = [work() for _ in range(1 + repeats)]
            rows.append(min(sampled) / probing.CHUNK)
            return super().shortest(lambda: None)

    monkeypatch.setattr(probing, "MOST_ROWS", 64)
    config = read_config(tiny_directory())
    watch = Counting(torch.device("cpu"))
    cost = probing.time_decoding(config, "float32", watch, budget_s=60.0)
    # Where some had ended there is no point.
    assert list(cost.curve.xs) == [1, 4, 16, 64]
    assert cost.error.points == sum(row in (1, 4, 16, 64) for row in rows)


def test_a_process_that_waits_for_a_core_is_timed_without_the_wait():
    """Its budget is spent all the same."""
    watch = probing.Watch(torch.device("cpu"), clock=time.process_time)
    is_spent = watch.until(0.2)
    assert watch.seconds(lambda: time.sleep(0.3)) < 0.2
    assert is_spent()


def test_two_ranks_train_together():
    assert 0 < time_together_s("", "float32", groups=2) < 60


# --- Runs, whose rows are written by hand ---


def test_a_row_is_a_point_of_each_curve(tmp_path):
    run_dir = made_run(tmp_path / "a", [{}, {}, ROW])
    (point,) = points_of(run_dir, 6.0)
    assert point.tokens == pytest.approx(92)
    assert point.microbatch_s == pytest.approx(0.4 / 2)
    assert point.pairs == pytest.approx(92 * 16 / 2)
    assert point.rows == 16
    assert point.decode_s == pytest.approx(0.03)
    assert point.score_s == pytest.approx(0.08)
    assert (point.num_bytes, point.copy_s) == (6534912, 0.1)


def test_runs_make_a_sheet_and_are_compared_with_it(capsys, tmp_path):
    """The first steps are left out, and so is a row in which nothing was sampled."""
    idle = ROW | {"generator/tokens_per_s": 0.0}
    run_dir = str(made_run(tmp_path / "a", [ROW, ROW, ROW, idle, ROW]))
    file = tmp_path / "runs.yaml"
    status, out, err = run(capsys, "fit", run_dir, f"sheet={file}", "prompt_tokens=6")
    assert (status, err) == (0, "")
    measured = read_sheet(file).measured
    assert measured.is_of(read_config(tiny_directory()), "float32")
    assert measured.microbatch.error.points == 1  # a run
    status, out, err = run(capsys, "check", run_dir, f"sheet={file}", "prompt_tokens=6")
    assert (status, err) == (0, "")
    assert "0.8 s measured (middle of 3 steps)" in out


def test_a_step_is_predicted_from_what_was_measured_by_hand(tmp_path):
    """In one process both sides take turns: two microbatches of 0.2 s and a publication of 0.1 s;
    0.3 s of sampling are prompts of 24 tokens at a third of what a trained token takes, a swap as
    long as a publication, and ten steps in the rest.
    """
    run_dir = made_run(tmp_path / "a", [{}, {}, ROW])
    sheet = fit_runs([run_dir], read_sheet("h100"), prompt_tokens=6.0)
    found = check_run(run_dir, sheet, prompt_tokens=6.0)
    assert found.trainer_s == (pytest.approx(0.4 + 0.1), pytest.approx(0.5))
    assert found.sample_s == (pytest.approx(0.3), pytest.approx(0.3))
    assert found.step_s == pytest.approx(0.5 + 0.3)
    assert sheet.measured.prefill.at(24) == pytest.approx(24 * 0.2 / 92 / 3)
    assert found.error == pytest.approx(found.step_s / 0.8 - 1)


def test_runs_of_several_models_and_without_rows_are_refused(capsys, tmp_path):
    first = made_run(tmp_path / "a", [{}, {}, ROW])
    other = made_run(tmp_path / "b", [{}, {}, ROW], "trainer.compute_dtype=bfloat16")
    assert "of several models" in run(capsys, "fit", str(first), str(other))[2]
    empty = made_run(tmp_path / "c", [{}, {}])
    assert "no row after the first" in run(capsys, "fit", str(empty))[2]
    assert "no row after the first" in run(capsys, "check", str(empty))[2]
