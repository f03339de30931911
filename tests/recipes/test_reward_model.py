"""recipes/reward_model.py, and recipes/sft.py at scale, as a user starts them."""

from __future__ import annotations

import random
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from llamarl.checkpoint.checkpointer import verify
from llamarl.config.command_line import check_command_line, compose_config
from llamarl.config.supervised import REWARD_MODEL, SFT
from llamarl.models.attention import PackedAttention
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.loading import load_scorer
from llamarl.models.scorer import scores_at
from llamarl.words.findings import ConfigError
from recipes import reward_model
from tests.build.model_directory import change_json, copy_tiny, same_tensors
from tests.build.rows import write_rows
from tests.launching import ROOT, ForkedJob, killed_and_resumed, untimed
from tests.tolerances import rounding

RECIPE = ROOT / "recipes" / "reward_model.py"
TINY = read_config(tiny_directory())
SCORE = 1e-5  # what float32 scores may differ from transformers'
STEPS = 6
# Scores and losses after STEPS updates, of values around 1.
TRAINED = rounding(terms=TINY.hidden_size, depth=STEPS * 4 * TINY.num_hidden_layers)
SMALL = (
    "task.max_tokens=32",
    "task.num_eval=20",
    "model.dtype=float32",
    "lr=1e-4",
    "examples_per_step=16",
    f"max_steps={STEPS}",
    "trainer.microbatch_tokens=96",
    "eval.every=3",
    "checkpoint.every=2",
)
BAD_INPUT = 2
SFT_RECIPE = ROOT / "recipes" / "sft.py"


def write_sums(path: Path, count: int, row) -> str:
    """Write row(sum, draw) of random sums beside their prompts. Return the override."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        a, b = draw.randrange(10, 60), draw.randrange(10, 40)
        rows.append({"prompt": f"{a}+{b}=", **row(a + b, draw)})
    return f"task.path={write_rows(path, *rows)}"


def backwards(total: int, draw: random.Random) -> dict[str, str]:
    """The answer backwards, which is new to the model."""
    return {"completion": str(total)[::-1]}


def preferred(total: int, draw: random.Random) -> dict[str, str]:
    """The right answer and a wrong one."""
    wrong = draw.choice([n for n in range(20, 99) if n != total])
    return {"chosen": str(total), "rejected": str(wrong)}


def job_of(*overrides: str, out: Path, recipe: Path = RECIPE, ranks: int | None = None):
    given = (TINY_PATH, *overrides)  # of a key the last value holds
    return ForkedJob(*given, run_dir=out, ranks=ranks, recipe=recipe, directory_key="out")


def finished(*overrides: str, out: Path, **options) -> ForkedJob:
    with job_of(*overrides, out=out, **options) as job:
        assert job.wait() == 0, job.output
        return job


TINY_PATH = f"model.path={tiny_directory()}"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    return write_sums(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", 300, preferred)


@pytest.fixture(scope="module")
def two_ranks(pairs, tmp_path_factory) -> ForkedJob:
    """The finished run on two ranks, over which score.weight [1, D] is sharded unevenly."""
    return finished(*SMALL, pairs, out=tmp_path_factory.mktemp("two") / "out", ranks=2)


@pytest.mark.machine
@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(two_ranks, pairs, tmp_path):
    alone = finished(*SMALL, pairs, out=tmp_path / "out")
    ours, theirs = untimed(two_ranks.rows), untimed(alone.rows)
    assert [row["step"] for row in ours] == list(range(STEPS + 1))
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss/value", "preference/margin", "eval/loss", "eval/margin", "grad_norm"):
            assert (name in mine) == (name in other)
            if name in mine:
                assert mine[name] == pytest.approx(other[name], rel=TRAINED, abs=TRAINED), name
        assert mine.get("tokens/trained") == other.get("tokens/trained")
    assert ours[-1]["eval/loss"] < ours[0]["eval/loss"]


@pytest.mark.slow
def test_transformers_scores_alike(two_ranks):
    """A batch as its users make one: padded, each row with the end token."""
    out = two_ranks.run_dir
    theirs = AutoModelForSequenceClassification.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert theirs.config.num_labels == 1
    texts = [f"{text}{tokenizer.eos_token}" for text in ("12+34=46", "1+1=2", "50+39=8")]
    tokenizer.padding_side = "right"
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    ours = load_scorer(out, device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        of_theirs = theirs(batch.input_ids, attention_mask=batch.attention_mask).logits
        for i, text in enumerate(texts):
            tokens = torch.tensor(tokenizer.encode(text))
            size = tokens.numel()
            attention = PackedAttention(torch.tensor([0, size]))
            head = scores_at(torch.tensor([size - 1]))
            score = ours(tokens, torch.arange(size), attention, head)
            torch.testing.assert_close(score[0], of_theirs[i], rtol=0, atol=SCORE)


@pytest.mark.slow
def test_a_pad_token_that_is_the_end_token_is_replaced(pairs, tmp_path):
    model = copy_tiny(tmp_path / "model", pad_token_id=2)
    change_json(model / "tokenizer_config.json", pad_token="<eos>")
    finished(*SMALL, f"model.path={model}", "max_steps=1", pairs, out=tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert tokenizer.pad_token_id == theirs.config.pad_token_id != tokenizer.eos_token_id
    text = f"1+1=2{tokenizer.eos_token}"
    with torch.no_grad():
        whole = theirs.model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1]
        of_padded = theirs(**tokenizer([text, "1" * 20], padding=True, return_tensors="pt")).logits
    at_the_end = theirs.score(whole).detach()
    torch.testing.assert_close(of_padded[0], at_the_end, rtol=0, atol=SCORE)


@pytest.mark.bitwise("a run that was resumed is the one that was not")
@pytest.mark.slow
@pytest.mark.parametrize("recipe, ranks", [(RECIPE, None), (RECIPE, 2), (SFT_RECIPE, 2)])
def test_a_run_killed_and_resumed_equals_one_that_was_not(pairs, tmp_path, recipe, ranks):
    data = (pairs,)
    if recipe == SFT_RECIPE:
        data = ("epochs=3", write_sums(tmp_path / "rows.jsonl", 300, backwards))
    given = {"recipe": recipe, "ranks": ranks}
    long = (*SMALL, "max_steps=40", *data)
    whole = finished(*long, out=tmp_path / "whole", **given)
    job = killed_and_resumed(partial(job_of, *long, out=tmp_path / "out", **given))
    assert untimed(job.rows) == untimed(whole.rows)
    assert same_tensors(*(run.run_dir / "model.safetensors" for run in (job, whole)))


@pytest.mark.slow
def test_a_run_goes_on_over_another_number_of_ranks(two_ranks, pairs, tmp_path):
    """From two ranks' checkpoint to one's."""
    shutil.copytree(two_ranks.run_dir, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / f"step_{STEPS}")
    job = finished(*SMALL, pairs, "resume=auto", out=tmp_path / "out")
    assert f"resumed from step_{STEPS - 2}" in job.output
    last, before = job.rows[-1], two_ranks.rows[-1]
    assert last["eval/loss"] == pytest.approx(before["eval/loss"], rel=TRAINED, abs=TRAINED)


@pytest.mark.slow
def test_a_stop_request_saves_and_writes_no_model(pairs, tmp_path):
    with job_of(*SMALL, "max_steps=1000", "epochs=100", pairs, out=tmp_path / "out") as job:
        job.until_rows(3)
        job.signal_rank(0, signal.SIGINT)
        assert job.wait() == 0, job.output
        assert "resume=auto goes on" in job.output
        assert verify(job.checkpoint) == []
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.fixture
def refusal(run_here):
    """refusal(*words, out=DIR): what is said of a job that ends at once. In this process."""

    def run(*words: str, out: Path) -> str:
        config = compose_config([TINY_PATH, *SMALL, *words, f"out={out}"], REWARD_MODEL)
        code, said = run_here(lambda: reward_model.run.__wrapped__(config))
        assert code == BAD_INPUT
        return said.out + said.err

    return run


def test_a_dry_run_shows_memory_and_pairs_and_writes_nothing(pairs, tmp_path):
    out = tmp_path / "rm"
    job = finished(pairs, "dry_run=true", out=out)
    assert "memory   trainer: " in job.output and "  chosen '" in job.output
    assert not out.exists()


def test_bad_rows_are_named_before_anything_is_written(refusal, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        '{"prompt": "1+1=", "chosen": "2"}\n{"prompt": "1", "chosen": "2", "rejected": "2"}'
    )
    said = refusal(f"task.path={file}", out=tmp_path / "out")
    assert f'{file}:1: no key "rejected"' in said
    assert f"{file}:2: both completions are equal" in said
    assert "Traceback" not in said and not (tmp_path / "out").exists()


def test_a_used_directory_is_refused_by_the_name_of_its_key_and_its_own(refusal, pairs, tmp_path):
    out = tmp_path / "run_dir"  # as the main job calls what is `out` here
    out.mkdir()
    (out / "config.yaml").touch()
    said = refusal(pairs, out=out)
    assert f"{out} holds a run already" in said
    assert "choose another out" in said


@pytest.mark.slow
def test_a_head_of_two_labels_is_refused(refusal, two_ranks, pairs, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(two_ranks.run_dir, model)
    change_json(model / "config.json", id2label={"0": "bad", "1": "good"})
    said = refusal(f"model.path={model}", pairs, out=tmp_path / "out")
    assert "gives 2 scores (bad, good)" in said


def test_what_is_wrong_with_a_command_line_is_told_at_once(pairs, tmp_path):
    given = [f"model.path={tmp_path}", pairs, "out=x", "lrr=1", "epochs=0", "loss.center_coef=-1"]
    with pytest.raises(ConfigError) as refused:
        check_command_line(given, kind=REWARD_MODEL)
    said = str(refused.value)
    assert "lrr" in said and "did you mean lr?" in said
    assert "epochs=0" in said and "loss.center_coef=-1" in said


@pytest.mark.parametrize(
    "table, kind, given",
    [
        (5, SFT, {"lr": 5e-6, "epochs": 2.0, "examples_per_step": 128}),
        (6, REWARD_MODEL, {"lr": 3e-6, "epochs": 1.0, "examples_per_step": 256}),
    ],
)
def test_tables_of_async_rlhf(pairs, table, kind, given):
    words = [f"+experiment=async_rlhf_table{table}", TINY_PATH, pairs, "out=x"]
    config = compose_config(words, kind=kind)
    assert config.trainer.schedule == "linear"
    assert {name: getattr(config, name) for name in given} == given


@pytest.mark.slow
def test_sft_begins_with_no_scorer(two_ranks, tmp_path):
    model = f"model.path={two_ranks.run_dir}"
    rows = write_sums(tmp_path / "rows.jsonl", 10, backwards)
    with job_of(*SMALL, model, rows, out=tmp_path / "out", recipe=SFT_RECIPE) as job:
        assert job.wait() == BAD_INPUT
    assert "LlamaForSequenceClassification gives scores and no tokens" in job.output


@pytest.mark.slow
def test_a_reward_model_learns_synthetic_preferences(tmp_path):
    data = write_sums(tmp_path / "pairs.jsonl", 4000, preferred)
    learn = ("lr=3e-4", "epochs=2", "examples_per_step=32", "trainer.schedule=linear")
    limits = ("task.max_tokens=32", "model.dtype=float32", "eval.every=0")
    job = finished(*learn, *limits, data, out=tmp_path / "out")
    assert job.rows[0]["eval/accuracy"] < 0.7
    assert job.rows[-1]["eval/accuracy"] >= 0.9
