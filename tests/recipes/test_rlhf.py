"""benchmarks/rlhf: the pipeline, and the data and the report that it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.rlhf.report import quality_of
from llamarl.config.command_line import RL, check_command_line
from llamarl.config.preferences import PREFERENCES
from llamarl.config.supervised import REWARD_MODEL, SFT
from llamarl.models.hf import load_tokenizer
from llamarl.tasks.facts import facts_posts, make_post
from tests.build.rows import read_rows
from tests.launching import ROOT, environment

sys.path.insert(0, str(ROOT / "benchmarks" / "rlhf"))
from facts_data import main as make_data  # noqa: E402
from facts_data import vocabulary  # noqa: E402
from pipeline import main, read_words, stages  # noqa: E402

TINY = (
    "data.rows=40",
    "sft.max_steps=2",
    "pairs.num_prompts=24",
    "clean_pairs.num_prompts=24",
    "reward_model.max_steps=2",
    "reward_model.examples_per_step=4",
    "rl.max_steps=2",
    "rl.groups_per_step=4",
    "rl.eval.num_prompts=8",
    "judge_sft.eval.num_prompts=8",
    "judge_rl.eval.num_prompts=8",
)
BAD_INPUT = 2
PIPELINE_S = 800  # on a busy machine, and below pytest's own timeout


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("data")
    assert make_data([f"out={out}", "rows=30"]) == 0
    return out


def test_a_wider_model_is_as_many_heads_wide_and_draws_as_large_products(tmp_path):
    words = (f"out={tmp_path}", "rows=1")
    assert make_data([*words, "width=64"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    of_layer = model.model.layers[0].self_attn.q_proj.weight
    assert model.config.num_attention_heads == 2 and of_layer.shape == (64, 64)
    assert of_layer.std().item() == pytest.approx(0.09 * 2**0.5, rel=0.05)


def test_a_width_that_makes_no_heads_is_refused_before_anything_is_written(tmp_path, capsys):
    assert make_data([f"out={tmp_path / 'out'}", "width=50"]) == BAD_INPUT
    assert "width=50: need whole heads of 32 channels, such as 64" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_data_is_a_model_of_the_tasks_words_and_a_teacher(data):
    tokenizer = load_tokenizer(data / "start")
    for post in facts_posts(0)[1]:
        ids = tokenizer.encode(post.text)
        answer = tokenizer(post.summary, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids + answer, skip_special_tokens=True) == post.text + post.summary
        assert len(ids) == 1 + len(post.text.split()) and len(answer) == len(post.summary.split())
    rows = read_rows(data / "teacher.jsonl")
    assert [row["prompt"] for row in rows] == [post.text for post in facts_posts(0)[0][:30]]


def test_the_lengths_of_the_pipeline_hold_every_post_and_summary():
    """The longest that there can be: each part of a post with the most words."""

    class Longest:
        """Draws what has the most words, and all chatter."""

        def sample(self, names, count):
            return names[:count]

        def randint(self, low, high):
            return high

        def choice(self, phrases):
            return max(phrases, key=lambda phrase: len(phrase.split()))

        def random(self):
            return 0.0

    post = make_post(Longest())
    words = {}
    for stage in stages(Path("D"), 0):
        words |= {word.partition("=")[0]: word for word in stage.words}
    most_prompt = int(words["task.max_prompt_tokens"].partition("=")[2])
    most_new = int(words["max_new_tokens"].partition("=")[2])
    most_row = int(words["task.max_tokens"].partition("=")[2])
    num_prompt = 1 + len(post.text.split())
    num_summary = len(post.summary.split()) + 1
    assert num_prompt <= most_prompt and num_summary < most_new
    assert num_prompt + most_new <= most_row


@pytest.mark.parametrize(
    "name, kind",
    [("sft", SFT), ("reward_model", REWARD_MODEL), ("pairs", PREFERENCES), ("rl", RL)],
)
def test_the_stages_words_are_accepted_where_there_are_its_files(name, kind, data, tmp_path):
    for folder in ("sft", "reward_model"):
        (tmp_path / folder).symlink_to(data / "start")
    (tmp_path / "start").symlink_to(data / "start")
    for file in ("teacher", "teacher_held_out", "pairs", "clean_pairs"):
        (tmp_path / f"{file}.jsonl").write_text("{}\n")
    (stage,) = [stage for stage in stages(tmp_path, 0) if stage.name == name]
    check_command_line(list(stage.words), kind=kind, world_size=stage.ranks or 1)


def test_words_go_to_the_command_of_their_stage_in_the_place_of_its_own():
    out, pipeline = read_words(["out=D", "seed=3", "rl.lr=1", "rl.trainer.beta1=0.5"])
    words = {stage.name: stage.words for stage in pipeline}
    assert out == Path("D")
    assert "lr=1" in words["rl"] and "trainer.beta1=0.5" in words["rl"]
    assert len([word for word in words["rl"] if word.startswith("lr=")]) == 1
    assert "lr=1" not in words["sft"]
    assert "seed=3" in words["data"] and "seed=3" in words["rl"]


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "required: set out=DIR"),
        (["out=D", "sead=1"], "not known here; did you mean seed?"),
        (["out=D", "rl.lrr=1"], "rl.lrr   unknown key; did you mean lr?"),
        (["out=D", "reward_model.max_steps=0"], "reward_model.max_steps=0   need a whole number"),
        (["out=D", "judge_sft.sampls=4"], "did you mean samples?"),
        (["out=D", "data.--rows=8000"], "data.--rows=8000   write data.key=value"),
        (["out=D", "report.lr=1"], "this stage has no keys"),
    ],
)
def test_words_that_cannot_be_used_start_nothing(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == BAD_INPUT
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_all_stages_words_are_looked_at_at_once(capsys):
    assert main(["out=D", "rl.lrr=1", "sft.epochs=0", "seed=x", "pears.samples=3"]) == BAD_INPUT
    said = capsys.readouterr().err
    for wrong in ("rl.lrr", "sft.epochs=0", "seed=x", "did you mean pairs?"):
        assert wrong in said


def test_a_stage_that_was_done_otherwise_is_named(capsys, tmp_path):
    (stage, *_) = stages(tmp_path, 0)
    command = "python benchmarks/rlhf/facts_data.py rows=7"
    record = {"command": command, "seconds": 1.0, "cpu_seconds": 1.0}
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / f"{stage.name}.json").write_text(json.dumps(record))
    assert main([f"out={tmp_path}"]) == BAD_INPUT
    assert "stage data was done by another command" in capsys.readouterr().err


def test_a_quality_is_the_mean_of_what_gold_is_made_of():
    post = "post: anna likes tea . ben sold boats . tl;dr:"
    found = quality_of([(post, " anna likes tea ; ben sold boats ."), (post, " anna likes tea")])
    # 1 and 2/3 - 0.1.
    assert found.gold == pytest.approx((1 + 2 / 3 - 0.1) / 2, abs=1e-4)
    assert found.f1 == pytest.approx(5 / 6, abs=1e-4)
    assert (found.excess_words, found.format_faults, found.words) == (0, 0.5, 5.5)


def start(out: Path, *more: str) -> subprocess.CompletedProcess:
    script = ROOT / "benchmarks" / "rlhf" / "pipeline.py"
    command = [sys.executable, str(script), f"out={out}", *TINY, *more]
    options = {"capture_output": True, "text": True, "timeout": PIPELINE_S}
    return subprocess.run(command, env=environment(), **options)


@pytest.mark.slow
def test_the_pipeline_runs_to_its_plots_and_does_nothing_twice(tmp_path):
    out = tmp_path / "out"
    done = start(out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((out / "rlhf.json").read_text())
    of_models = {"SFT, greedy", "SFT, sampled", "RL, greedy", "RL, sampled"}
    assert set(found["qualities"]) == {"teacher"} | of_models
    assert 0 <= found["agreement"] <= 1 and found["kl"] >= 0
    names = [stage.name for stage in stages(out, 0)]
    assert list(found["seconds"]) == names[:-1]  # the report is not done while it is written
    assert (out / "rlhf.png").stat().st_size > 10_000
    again = start(out)
    assert again.returncode == 0 and again.stdout.count("done before") == len(names)
    other = start(out, "rl.lr=1e-5")
    assert other.returncode == BAD_INPUT and "stage rl was done by another" in other.stderr


def test_the_vocabulary_is_that_of_the_directory(data):
    config = json.loads((data / "start" / "config.json").read_text())
    assert config["vocab_size"] == 4 + len(vocabulary())
