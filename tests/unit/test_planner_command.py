"""python -m llamarl.planner: its command lines, and what it says of bad ones."""

import json
import re
from dataclasses import asdict

import pytest

from llamarl.config.command_line import check_command_line
from llamarl.models.config import read_config, tiny_directory
from llamarl.planner.__main__ import KEYS, main, read_words
from llamarl.planner.costs import Costs, GeneratorPlan, Numerics, Split, StepWork, TrainerPlan
from llamarl.planner.fit import Lengths, fit_runs, points_of
from llamarl.planner.predict import Predictor
from llamarl.planner.profile import read_profile
from tests.build.job import run_python
from tests.unit.made_runs import ROW, made_run

TINY = f"model.path={tiny_directory()}"
SIZES = ["groups_per_step=8", "group_size=4", "max_new_tokens=32", "task.max_prompt_tokens=16"]
ON_TWO = ("search", "--gpus", "2")
EVEN = Lengths(prompt_tokens=6.0, length_sigma=0.0)
SYNCHRONOUS = ("max_lag=0", "overcommit=0")
AHEAD = ("max_lag=4", "overcommit=2")
TWO_REPLICAS = ("placement.trainer=[0]", "placement.generator=[1,2]")
FLOAT32 = Numerics(dtype="float32", compute_dtype="float32")


def run(capsys, *words):
    """(status, what was printed, errors)"""
    status = main(list(words))
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_split_without_gpus_for_both_sides_is_no_plan(capsys):
    status, out, _ = run(capsys, *ON_TWO, TINY, *SIZES, "trainer.tensor_parallel=2")
    assert status == 0 and "synchronous:" in out
    assert "no asynchronous plan fits: it needs max_lag of at least 1, and GPUs" in out


def test_a_plan_takes_on_the_real_ledger_what_the_formulas_say(capsys):
    """16 groups on 15 replicas, where the ledger and whole groups bound the rows: a formula that
    leaves either out is a third too short.
    """
    words = ["--gpus", "16", "--gpu-memory", "80", TINY, "groups_per_step=16", "--simulate"]
    status, out, err = run(capsys, "search", *words)
    assert (status, err) == (0, "")
    plan, simulated = out.split("simulated\n")
    for said in ("theta*", "mean lag", "synchronous:", "asynchrony", "to paste", "GiB a GPU"):
        assert said in out
    predicted = float(re.search(r"^asynchronous: (\S+) s a step", plan, re.MULTILINE)[1])
    step = float(re.search(r"^step +(\S+) s, the mean", simulated, re.MULTILINE)[1])
    assert step == pytest.approx(predicted, rel=0.1)
    lag = re.search(r"^lag +\S+ mean, (\d+) at most, of max_lag (\d+)", simulated, re.MULTILINE)
    assert int(lag[1]) <= int(lag[2]) == 1


@pytest.mark.parametrize("max_lag, gpus", [(0, 2), (1, 1), (3, 5)])
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
    words = [*ON_TWO, f"model.path={tmp_path}/config.json", *SIZES]
    code = (
        "import sys\nfrom llamarl.planner.__main__ import main\n"
        f"status = main({words!r})\n"
        "print(status, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert run_python("-c", code).splitlines()[-1] == "0 []"


@pytest.mark.parametrize(
    "command, words, said",
    [
        (ON_TWO, ["model.pat=x"], ["unknown key; did you mean model.path?"]),
        (ON_TWO, ["a=1", "group_size=x"], ["a=1 ", "group_size=x ", "model.path "]),
        (ON_TWO, [], ["model.path   missing"]),
        (ON_TWO, [TINY, "groups_per_step=0"], ["groups_per_step=0 "]),
        (ON_TWO, [TINY, "model.dtype=bfloat61"], ["did you mean bfloat16?"]),
        (ON_TWO, [TINY, "trainer.activation_checkpointing=maybe"], ["checkpointing=maybe"]),
        (ON_TWO, [TINY, "max_lag=1", "overcommit=65"], ["at most 64 groups"]),
        (ON_TWO, [TINY, "completion_tokens=5000"], ["cannot be above max_new_tokens"]),
        (ON_TWO, [TINY, "generator.tensor_parallel=64", "--gpus=64"], ["query heads to split"]),
        (ON_TWO, [TINY, "trainer.tensor_parallel=4"], ["parallel=4: 4 GPUs share a layer"]),
        (ON_TWO, [TINY, "--gpu-memory=nan"], ["--gpu-memory nan: need a number of GiB above 0"]),
        (ON_TWO, [TINY, "--gpu-memory=-1"], ["--gpu-memory -1"]),
        (ON_TWO, [TINY, "--gpu-memory=0.01"], ["nothing fits 0.009 GiB a GPU", "at least"]),
        (ON_TWO, [TINY, "sheet=h10"], ["did you mean h100?"]),
        (ON_TWO, ["model.path=nowhere"], ["nowhere"]),
        (("fit",), [], ["fit needs the directories of runs"]),
        (("fit", "nowhere"), [], ["nowhere/metrics.jsonl: no such file"]),
        (("fit", "nowhere"), ["prompts=3"], ["unknown key; did you mean prompt_tokens?"]),
        (("fit", "nowhere"), ["prompt_tokens=0"], ["prompt_tokens=0 "]),
    ],
)
def test_all_that_is_wrong_is_said_and_ends_with_2(capsys, command, words, said):
    status, out, err = run(capsys, *command, *words)
    assert (status, out) == (2, "")
    assert err.startswith("llamarl.planner: ") and all(one in err for one in said)


def test_auto_leaves_a_choice_to_the_planner():
    settings = read_words([TINY, "overcommit=auto", "generator.tensor_parallel=null"])
    assert settings == read_words([TINY])
    fields = asdict(settings)
    assert sorted(KEYS.values()) == sorted(fields)


def test_a_row_of_an_asynchronous_run_is_a_point_of_each_curve(tmp_path):
    """The generator works for 0.3 s: it reads prompts of 24 tokens, each in a third of what a
    trained token takes, and decodes for the rest. Half a batch and 2 groups are 16 rows, and so
    160 tokens are ten steps.
    """
    (point,) = points_of(made_run(tmp_path / "a", [{}, {}, ROW], *AHEAD), EVEN)
    assert (point.tokens, point.microbatches) == (pytest.approx(92), 2)
    assert point.microbatch_s == pytest.approx(0.4 / 2)
    assert point.rows == 16
    prompts_s = 24 * 0.4 / (2 * 92) / 3
    assert point.decode_s == pytest.approx((0.3 - prompts_s) / 10)
    assert (point.score_s, point.completions) == (pytest.approx(0.08), 16)
    assert point.publish_s == 0.1
    assert point.prefill_s == pytest.approx(prompts_s / 24)


def test_a_swap_is_the_mean_of_the_replicas(tmp_path):
    """A row has the sum over both, and each of them works for 0.3 s."""
    row = ROW | {"weights/swap_stall_s": 0.06}
    run_dir = made_run(tmp_path / "a", [{}, {}, row], *TWO_REPLICAS, *AHEAD, num_ranks=3)
    (point,) = points_of(run_dir, EVEN)
    # Eight rows of each replica: 80 tokens are ten steps.
    assert point.rows == 8
    prompts_s = 12 * 0.4 / (2 * 92) / 3
    assert point.decode_s == pytest.approx((0.3 - prompts_s - 0.03) / 10)


def test_a_synchronous_batch_takes_as_many_steps_as_its_longest_completion(tmp_path):
    """Sixteen rows start together. Equally long, they take ten steps. With a deviation they take as
    many as the longest of 16, of which there are fewer rows in the mean.
    """
    run_dir = made_run(tmp_path / "a", [{}, {}, ROW], *SYNCHRONOUS)
    (even,) = points_of(run_dir, EVEN)
    assert even.rows == pytest.approx(16)
    (uneven,) = points_of(run_dir, Lengths(prompt_tokens=6.0, length_sigma=0.5))
    # exp(0.5 z - 0.125) at 16/17, z = 1.565: 19.3 steps of 160 / 19.3 rows, but for the quantiles
    # that the lengths are counted in.
    assert even.decode_s / uneven.decode_s == pytest.approx(1.93, rel=0.02)
    assert uneven.rows == pytest.approx(160 / 19.3, rel=0.12)


def test_runs_of_several_batch_sizes_give_eta_and_a_profile_for_a_search(capsys, tmp_path):
    """Twice the tokens take 1.5 times as long on both sides. A row in which nothing was sampled is
    left out, and so is a run that is not synchronous.
    """
    idle = ROW | {"generator/idle_fraction": 1.0}
    small = made_run(tmp_path / "a", [ROW, ROW, ROW, idle, ROW], *SYNCHRONOUS)
    twice = ROW | {"time/step_s": 1.2, "time/wait_for_data_s": 0.5}
    twice |= {"tokens/trained": 320.0, "packing/unused_budget_fraction": 0.816}
    large = made_run(tmp_path / "b", [twice] * 3, "groups_per_step=8", *SYNCHRONOUS)
    ahead = made_run(tmp_path / "c", [ROW, ROW, ROW | {"time/step_s": 9.0}], "max_lag=1")
    file = tmp_path / "mine.yaml"
    words = [f"sheet={file}", "prompt_tokens=6", "length_sigma=0"]
    status, out, err = run(capsys, "fit", str(small), str(large), str(ahead), *words)
    assert (status, err) == (0, "")
    measured = read_profile(file).measured
    assert measured.is_of(read_config(tiny_directory()), "float32")
    assert measured.train.xs == pytest.approx((92, 184))
    assert measured.train.ys == pytest.approx((0.2, 0.3))
    assert measured.decode.xs == pytest.approx((16, 32))
    assert measured.decode.ys[1] == pytest.approx(1.5 * measured.decode.ys[0])
    assert measured.score.xs == (1, 16, 32)
    assert measured.score.ys == pytest.approx((0.08 / 16, 0.08, 0.12))
    means = "mean tokens of the runs: 6 of a prompt (as given), 10 of a completion"
    assert means in read_profile(file).notes
    eta_t = re.search(r"^eta_t\(b\)  92: (\S+), 184: (\S+) us a token", out, re.MULTILINE)
    assert [float(eta_t[1]), float(eta_t[2])] == [2170, 1630]
    assert re.search(r"^eta_g\(b\)  16: \S+, 32: \S+ us a token", out, re.MULTILINE)
    assert "eta_t does not rise with b" in out and "eta_g does not rise with b" in out
    status, out, _ = run(capsys, *ON_TWO, TINY, *SIZES, f"sheet={file}", "model.dtype=float32")
    assert status == 0 and "measured (tiny" in out


def test_a_fit_predicts_the_run_that_it_was_made_of_and_less_work_in_proportion(tmp_path):
    """In one process both sides take turns: two microbatches of 0.2 s and a publication of 0.1 s;
    0.3 s of sampling.
    """
    run_dir = made_run(tmp_path / "a", [{}, {}, ROW], *SYNCHRONOUS)
    costs = Costs(
        fit_runs([run_dir], read_profile("h100"), EVEN), read_config(tiny_directory()), FLOAT32
    )
    work = StepWork(4, 4, 6.0, 10.0, longest_prompt=16, max_new_tokens=40, max_lag=0)
    plan = Split(TrainerPlan(1, 1, 1, 92), GeneratorPlan(1, 1, 16), sharing="shared", max_lag=0)
    found = Predictor(costs, work).predict(plan)
    assert found.update_s == pytest.approx(0.4)
    assert found.publish_s == pytest.approx(0.1)
    assert found.sample_s == pytest.approx(0.3, rel=0.01)
    assert costs.score_s(16) == pytest.approx(0.08)
    assert costs.score_s(1) == pytest.approx(0.08 / 16)
    assert costs.publish_s(TrainerPlan(8, 1, 1, 92)) == pytest.approx(0.1 / 8)


def test_a_trainer_copies_its_weights_once_for_all_generators(tmp_path):
    """A row has the bytes that all links carry: twice as many with two replicas."""
    row = ROW | {"weights/bytes": 2 * ROW["weights/bytes"]}
    run_dir = made_run(tmp_path / "a", [{}, {}, row], *TWO_REPLICAS, "max_lag=1", num_ranks=3)
    measured = fit_runs([run_dir], read_profile("h100"), Lengths(6.0)).measured
    copied = 4 * measured.parameters
    assert measured.copy.at(copied) == pytest.approx(0.1)
    assert measured.copy.at(2 * copied) == pytest.approx(0.2)


def test_runs_of_several_models_and_without_rows_are_refused(capsys, tmp_path):
    first = made_run(tmp_path / "a", [{}, {}, ROW])
    other = made_run(tmp_path / "b", [{}, {}, ROW], "model.dtype=bfloat16")
    assert "of several models" in run(capsys, "fit", str(first), str(other))[2]
    empty = made_run(tmp_path / "c", [{}, {}])
    assert "no row after the first" in run(capsys, "fit", str(empty))[2]


@pytest.mark.parametrize(
    "words, said",
    [
        (["trainer.compute_dtype=bfloat16"], "float32 is not trainer.compute_dtype=bfloat16"),
        (["generator.quantize=int8"], "generator.quantize=int8 has a dtype of its own"),
        (["placement.trainer=[0,1]"], "2 trainer ranks send each other messages"),
        (["placement.trainer=[0]", "generator.tensor_parallel=2"], "generator.tensor_parallel=2: "),
    ],
)
def test_times_that_costs_would_add_something_to_again_are_refused(capsys, tmp_path, words, said):
    run_dir = made_run(tmp_path / "a", [{}, {}, ROW], *words, num_ranks=4)
    sheet = tmp_path / "mine.yaml"
    status, _, err = run(capsys, "fit", str(run_dir), f"sheet={sheet}", "prompt_tokens=6")
    assert status == 2 and f"{run_dir}: a profile has the times of one rank" in err
    assert said in err and not sheet.exists()


@pytest.mark.slow
def test_ten_synchronous_steps_are_a_probe(capsys, tmp_path):
    """Real runs of two batch sizes make a profile, and a search takes it."""
    runs = []
    for groups in (4, 8):
        runs.append(str(tmp_path / str(groups)))
        words = [f"groups_per_step={groups}", "max_lag=0", "max_steps=10", "eval.every=0"]
        run_python("recipes/llama_async.py", *words, f"run_dir={runs[-1]}", timeout_s=600)
    file = tmp_path / "mine.yaml"
    status, out, err = run(capsys, "fit", *runs, f"sheet={file}", "prompt_tokens=5")
    assert (status, err) == (0, "")
    assert "eta_t(b)" in out and "eta_g(b)" in out
    assert run(capsys, *ON_TWO, TINY, *SIZES, f"sheet={file}", "model.dtype=float32")[0] == 0
