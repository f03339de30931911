"""recipes/evaluate.py: the accuracy that a run reported, of the weights that it saved."""

import re
import shutil
from dataclasses import dataclass

import pytest

from llamarl.config.command_line import compose_config
from llamarl.config.conversion import load_config, save_config
from llamarl.errors import CheckpointError
from llamarl.evaluation import model as evaluated
from llamarl.evaluation.metrics import pass_at_k
from llamarl.models.config import tiny_directory
from recipes import evaluate as recipe
from tests.build.job import finished_job, run_python
from tests.build.rows import read_rows
from tests.launching import EVAL_PROMPTS, ROOT, SMALL, STEPS, untimed

RECIPE = ROOT / "recipes" / "evaluate.py"
SAMPLES = 4
BAD_INPUT = 2
TINY = f"model.path={tiny_directory()}"


pytestmark = pytest.mark.usefixtures("process_state")  # the recipe is a program


@dataclass(frozen=True)
class Done:
    """How the recipe ended; lines: of --out, if there are any."""

    returncode: int
    stdout: str
    stderr: str
    lines: list[dict]


@pytest.fixture
def evaluate(tmp_path, monkeypatch, capsys):
    """The recipe with some words, in this process: to start another would take longer than all that
    it does.
    """
    monkeypatch.chdir(tmp_path)

    def run(*words, out="out.jsonl"):
        capsys.readouterr()
        model, *others = map(str, words)
        code = recipe.main([f"model.path={model}", *others, f"out={out}", "threads=1"])
        file, said = tmp_path / out, capsys.readouterr()
        lines = read_rows(file) if file.is_file() else []
        return Done(code, said.out, said.err, lines)

    return run


@pytest.mark.slow
def test_it_is_a_program(tmp_path):
    few = ("num_prompts=2", "samples=0", "max_new_tokens=1")
    assert "greedy   pass@1 " in run_python(RECIPE, TINY, *few, cwd=tmp_path)


def percent(value):
    return f"{value:.2%}"


@pytest.mark.parametrize("step", [2, STEPS])
def test_it_finds_the_accuracy_that_the_run_reported(synchronous_run, evaluate, step):
    name = "latest" if step == STEPS else f"step_{step}"
    done = evaluate(synchronous_run.run_dir / "checkpoints" / name)
    assert done.returncode == 0, done.stderr
    lines = done.lines
    row = synchronous_run.rows[step]
    assert len(lines) == EVAL_PROMPTS
    assert sum(line["score"] for line in lines) / EVAL_PROMPTS == row["eval/accuracy"]
    assert sum(line["num_tokens"] for line in lines) / EVAL_PROMPTS == row["eval/length_mean"]
    accuracy = f"{percent(row['eval/accuracy'])} of {EVAL_PROMPTS} held-out prompts"
    assert f"greedy   pass@1 {accuracy}" in done.stdout
    for line in lines:
        true = str(eval(line["prompt"].rstrip("=")))
        assert (line["completion"] == true) == line["score"]


@pytest.fixture(scope="module")
def sampling_run(tmp_path_factory):
    """One that samples held-out prompts, too."""
    sampled = ("max_lag=0", "max_steps=2", f"eval.num_samples={SAMPLES}")
    run_dir = tmp_path_factory.mktemp("sampling") / "run"
    return finished_job(*SMALL, *sampled, run_dir=run_dir)


@pytest.mark.bitwise("what is sampled of held-out prompts changes nothing that is learned")
@pytest.mark.slow
def test_sampling_held_out_prompts_does_not_touch_training(sampling_run, synchronous_run):
    for ours, theirs in zip(untimed(sampling_run.rows), untimed(synchronous_run.rows)):
        assert {name: ours[name] for name in ours if "pass_at" not in name} == theirs
    assert len(sampling_run.rows) == 3


@pytest.mark.slow
def test_a_run_reports_pass_at_k_from_its_first_version_on_and_the_recipe_finds_the_same(
    sampling_run, evaluate
):
    rows = sampling_run.rows
    evaluated = [row for row in rows if "eval/pass_at_k" in row]
    assert [row["step"] for row in evaluated] == [0, 2]
    assert all(0 < row["eval/pass_at_1_sampled"] < row["eval/pass_at_k"] <= 1 for row in evaluated)
    done = evaluate(sampling_run.run_dir, f"samples={SAMPLES}")
    assert done.returncode == 0, done.stderr
    assert f"pass@1 {percent(rows[2]['eval/pass_at_1_sampled'])}  pass@2 " in done.stdout
    of_all = f"pass@{SAMPLES} {percent(rows[2]['eval/pass_at_k'])}   {SAMPLES} a prompt"
    assert f"{of_all} at temperature 1" in done.stdout
    scores = {}
    for line in done.lines:
        if line["sample"]:
            scores.setdefault(line["number"], []).append(line["score"])
    told = float(re.search(r"pass@2 ([\d.]+)%", done.stdout)[1]) / 100
    found = sum(pass_at_k(one, 2) for one in scores.values()) / EVAL_PROMPTS
    assert found == pytest.approx(told, abs=1e-4)


def test_a_model_without_a_run_takes_keys_of_the_main_job(evaluate):
    done = evaluate(tiny_directory(), "num_prompts=7", "samples=0", "max_new_tokens=1")
    assert done.returncode == 0, done.stderr
    found = [(line["number"], line["num_tokens"]) for line in done.lines]
    assert found == [(number, 1) for number in range(7)]


def test_a_function_is_told_what_was_sampled(evaluate):
    asked = ("num_prompts=3", "samples=2", "max_new_tokens=3", "temperature=2")
    done = evaluate(tiny_directory(), *asked, "reward.fn=tests.labels:tokens")
    assert [line["score"] for line in done.lines] == [line["num_tokens"] for line in done.lines]
    assert {line["outcome"] for line in done.lines} == {"score"} and len(done.lines) == 9


def test_where_all_are_errors_there_is_no_figure(evaluate):
    asked = ("num_prompts=3", "samples=2", "max_new_tokens=1")
    done = evaluate(tiny_directory(), *asked, "reward.fn=tests.labels:broken")
    assert "greedy   -- (all 3 are errors: ModuleNotFoundError" in done.stdout
    assert "pass@" not in done.stdout and "9 completions could not be scored" in done.stdout
    assert {line["score"] for line in done.lines} == {None}


def test_lines_that_cannot_be_written_are_said_before_anything_is_answered(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(recipe, "complete_prompts", None)
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file" / "x.jsonl"):
        assert recipe.main([f"model.path={tiny_directory()}", f"out={out}"]) == BAD_INPUT
        assert f"evaluate: out={out}: cannot be written: " in capsys.readouterr().err


def test_figures_are_printed_though_the_lines_could_not_be_written(evaluate):
    few = ("num_prompts=2", "samples=0", "max_new_tokens=1")
    done = evaluate(tiny_directory(), *few, out="/dev/full")
    assert done.returncode == BAD_INPUT
    assert "No space left" in done.stderr and "Traceback" not in done.stderr
    assert "greedy   pass@1 " in done.stdout and "written" not in done.stdout


def config_of(run, *words):
    """The config of an evaluation of the tiny model as that of a run, with words of its own."""
    return evaluated.config_of(evaluated.words_of(tiny_directory()), run, list(words))


def test_the_runs_values_hold_but_for_what_the_command_line_names(synchronous_run):
    own = load_config(synchronous_run.run_dir / "config.yaml")
    config = config_of(synchronous_run.run_dir)
    assert config.max_lag == 0 and config.model.path == str(tiny_directory())
    assert (config.generator, config.eval, config.task) == (own.generator, own.eval, own.task)
    words = ("temperature=0.5", "task=gsm8k", f"task.path={RECIPE}")
    config = config_of(synchronous_run.run_dir, "generator.max_slots=512", *words)
    assert config.generator.max_slots == 512, "also a value that is the default"
    assert (config.temperature, config.task.kind) == (0.5, "gsm8k")
    assert config.eval.num_prompts == EVAL_PROMPTS
    assert config.max_new_tokens == 256  # as the task has it


JUDGE = ("reward=judge", "reward.url=http://127.0.0.1:8000/v1", "reward.model=NAME")
PARTS = ("reward=parts", "reward.parts.a.kind=function", "reward.parts.a.fn=m:f")


@pytest.mark.parametrize(
    "of_the_run, word",
    [
        (PARTS, "reward.max_error_rate=0.9"),
        ((r"task.system_prompt='pay \${5}'",), "task.max_prompt_tokens=9"),
        (JUDGE, "reward.url=http://127.0.0.1:8001/v1"),
    ],
)
def test_a_key_leaves_the_kind_of_the_run(tmp_path, of_the_run, word):
    save_config(compose_config(list(of_the_run)), tmp_path / "config.yaml")
    config, wanted = config_of(tmp_path, word), compose_config([*of_the_run, word])
    assert (config.reward, config.task) == (wanted.reward, wanted.task)


@pytest.mark.parametrize(
    "of_the_run, given",
    [
        (PARTS, ["reward=function", "reward.fn=m:g"]),
        (("task=reasoning_gym", "task.options.max_digits=1"), ["task=addition"]),
    ],
)
def test_another_kind_leaves_nothing_of_the_runs(tmp_path, of_the_run, given):
    save_config(compose_config(list(of_the_run)), tmp_path / "config.yaml")
    config, wanted = config_of(tmp_path, *given), compose_config(given)
    assert (config.reward, config.task) == (wanted.reward, wanted.task)


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["model.path=nowhere"], "nowhere: neither a Hugging Face directory"),
        ([TINY, "num_prompts=0"], "num_prompts=0   need a whole number of at least 1"),
        ([TINY, "max_new_tokns=3"], "did you mean max_new_tokens"),
        ([TINY, "reward.fn=nowhere:score"], "nowhere"),
        ([TINY, "max_new_tokens=100000"], "the model's context is"),
        ([TINY, "against=x.jsonl"], "a judge must compare the two; eval.gold=DIR"),
    ],
)
def test_what_cannot_be_used_is_said(capsys, words, complaint):
    assert recipe.main(words) == BAD_INPUT
    assert complaint in capsys.readouterr().err


def test_all_that_is_wrong_is_said_at_once(capsys):
    assert recipe.main(["model.path=nowhere", "num_promts=3", "samples=-1"]) == BAD_INPUT
    said = capsys.readouterr().err
    assert "model.path=nowhere" in said and "num_promts" in said and "samples=-1" in said
    assert said.count("nowhere/config.json") == 0, "of a directory that is not there once is enough"


def test_a_damaged_checkpoint_is_named(synchronous_run, tmp_path, capsys):
    step = tmp_path / "checkpoints" / "step_4"
    shutil.copytree(synchronous_run.run_dir / "checkpoints" / "step_4", step)
    weights = step / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"spam")
    assert recipe.main([f"model.path={step}"]) == BAD_INPUT
    assert "hf/model.safetensors: its contents have changed" in capsys.readouterr().err


def test_the_directory_of_a_supervised_job_is_evaluated_by_the_command_line_alone(tmp_path):
    (tmp_path / "config.yaml").write_text("out: sft\nresume: auto\nexamples_per_step: 4\n")
    config = config_of(tmp_path, "max_new_tokens=7")
    assert config == config_of(None, "max_new_tokens=7")
    assert config.max_new_tokens == 7


def test_what_is_neither_a_model_nor_a_checkpoint_is_refused(tmp_path):
    neither = "neither a Hugging Face directory .* nor a checkpoint .*; give one of these"
    with pytest.raises(FileNotFoundError, match=neither):
        evaluated.find_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither"):
        evaluated.find_model(tmp_path / "absent")
    (tmp_path / "checkpoints").mkdir()
    no_file = "latest: no such file; a run writes it with its first checkpoint"
    with pytest.raises(FileNotFoundError, match=no_file):
        evaluated.find_model(tmp_path)
    step = tmp_path / "checkpoints" / "step_3"
    step.mkdir()
    (step / "manifest.json").write_text("{}")
    latest = tmp_path / "checkpoints" / "latest"
    damaged = "step_3 is damaged:\n  manifest.json: its contents have changed"
    for make in (latest.write_text, latest.symlink_to):  # the text is an older run's
        latest.unlink(missing_ok=True)
        make("step_3")
        with pytest.raises(CheckpointError, match=damaged):
            evaluated.find_model(latest)
