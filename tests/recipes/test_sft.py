"""recipes/sft.py as a warm start: a task's answers are learned until enough of them are right."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llamarl.config.command_line import check_command_line, compose_config
from llamarl.config.conversion import ConfigError
from llamarl.config.supervised import SFT, SFTConfig
from llamarl.learning import sft
from llamarl.learning.sft import PairsOnDemand, read_answers, read_sft_data
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer, load_weights
from llamarl.types import Prompt
from recipes import sft as recipe
from tests.build.model_directory import same_tensors
from tests.build.rows import write_rows
from tests.built_tasks import build_task
from tests.launching import ROOT, ForkedJob, killed_and_resumed, untimed
from tests.supervised import task_of
from tests.tolerances import rounding

RECIPE = ROOT / "recipes" / "sft.py"
BAD_INPUT = 2
MISSED = 1
WARM = ("model=tiny", "task=addition", "threads=1", "eval.num_prompts=60")
# Loss and weights after a few steps, of values around 1.
TRAINED = rounding(terms=read_config(tiny_directory()).hidden_size, depth=4 * 2 * 4)


def warm_start(*overrides: str, out: Path, ranks: int | None = None) -> ForkedJob:
    given = (*WARM, *overrides)
    return ForkedJob(*given, run_dir=out, ranks=ranks, recipe=RECIPE, directory_key="out")


def ended(*overrides: str, out: Path, code: int = 0, ranks: int | None = None) -> ForkedJob:
    """A warm start that has ended with this code."""
    with warm_start(*overrides, out=out, ranks=ranks) as job:
        assert job.wait() == code, job.output
        return job


def test_a_dry_run_shows_memory_and_examples_and_writes_nothing(tmp_path):
    job = ended("dry_run=true", "ranks=4", "trainer.replicate=2", out=tmp_path / "sft")
    assert "ranks    4" in job.output and "memory   trainer: " in job.output
    assert "'<bos>35+50='  learned '85<eos>'" in job.output
    assert not (tmp_path / "sft").exists()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(tiny_directory())


@pytest.fixture(scope="module")
def task(tokenizer):
    return build_task("addition", tokenizer)


def pair(prompt, completion):
    learned = [False] * len(prompt) + [True] * len(completion)
    return sft.SFTPair(torch.tensor(prompt + completion), torch.tensor(learned))


# The library


def test_a_pair_ends_with_the_end_token_which_is_trained(task, tokenizer):
    prompt = task.train_prompt(0)
    one = sft.make_pair(prompt, tokenizer, 512)
    assert tokenizer.decode(one.token_ids) == f"<bos>{prompt.text}{prompt.meta['answer']}<eos>"
    batch = sft.pack_pairs([one])
    assert batch.labels[batch.rows].tolist() == one.token_ids[one.learned].tolist()


def test_a_worked_solution_is_learned_rather_than_the_bare_answer(tokenizer):
    prompt = Prompt(torch.tensor([1, 5]), "1", {"answer": "3", "solution": "1+2=3"})
    assert tokenizer.decode(sft.make_pair(prompt, tokenizer, 99).token_ids[2:]) == "1+2=3<eos>"


def test_pairs_that_cannot_be_learned_say_why(tokenizer):
    with pytest.raises(ValueError, match="without answers"):
        sft.make_pair(Prompt(torch.tensor([1]), "q", {}), tokenizer, 99)
    with pytest.raises(ValueError, match="5 tokens, the model takes 4"):
        sft.make_pair(Prompt(torch.tensor([1, 4, 4]), "00", {"answer": "1"}), tokenizer, 4)


def test_loss_is_the_mean_over_completion_tokens_alone():
    """Against transformers, a pair at a time."""
    model = AutoModelForCausalLM.from_pretrained(tiny_directory(), dtype=torch.float32)
    pairs = [
        pair([1, 5, 4, 14, 7], [9, 2]),
        pair([1, 8], [2]),
        pair([1, 6, 6, 6, 6, 6], [4, 5, 6, 2]),
    ]
    want = 0.0
    for one in pairs:
        logprobs = model(one.token_ids[None, :-1]).logits[0].log_softmax(-1)
        of_labels = logprobs.gather(1, one.token_ids[1:, None])
        want -= of_labels[one.learned[1:]].sum().item()
    objective = sft.NextToken()
    batch = objective.pack(pairs, torch.device("cpu"))
    got, _, _ = objective.loss(load_tiny(), batch)
    assert got.item() == pytest.approx(want, abs=1e-4)
    assert sum(map(objective.num_targets, pairs)) == 7


def load_tiny():
    return load_weights(build_decoder(read_config(tiny_directory())), tiny_directory())


# The command line


def config_of(*words: str) -> SFTConfig:
    return compose_config(list(words), SFT)


def test_the_embedded_model_comes_with_what_its_warm_start_takes():
    config = config_of("model=tiny", "task=addition", "target_accuracy=0.6")
    assert config.model.path == str(tiny_directory())
    assert (config.lr, config.examples_per_step, config.max_steps) == (5e-4, 256, 2000)
    assert (config.epochs, config.max_new_tokens, config.out) == (None, 6, None)
    assert config_of("model=tiny", "task=addition", "lr=1e-3").lr == 1e-3


def test_a_directory_leaves_the_values_of_supervised_jobs(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.touch()
    given = (f"model.path={tiny_directory()}", f"task.path={file}")
    config = config_of(*given)
    assert config == config_of("model=hf", *given)
    assert (config.lr, config.epochs, config.model.dtype) == (1e-5, 1.0, "bfloat16")
    assert config.rows.kind == "rows"


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["model=tiny", "task=addition", "target_acuracy=0.6"], "did you mean target_accuracy?"),
        (["model=tinny", "task=addition"], "did you mean tiny?"),
        (["model=tiny", "task=aditon"], "did you mean addition?"),
        (["model=tiny", "task=addition", "target_accuracy=40"], "between 0 and 1"),
        (["model=tiny", "task=one_prompt"], "task.kind=one_prompt   need rows or addition"),
    ],
)
def test_a_wrong_command_line_is_refused(words, complaint):
    with pytest.raises(ConfigError) as refused:
        check_command_line(words, kind=SFT)
    assert complaint in str(refused.value)


def test_the_main_job_knows_no_rows():
    with pytest.raises(ConfigError, match="task.kind=rows"):
        check_command_line(["task=rows", f"task.path={RECIPE}"])


# The program


@pytest.fixture(scope="module")
def reached(tmp_path_factory) -> ForkedJob:
    """A warm start that reaches its target."""
    steps = ("target_accuracy=0.5", "eval.every=3", "max_steps=60", "examples_per_step=64")
    out = tmp_path_factory.mktemp("reached") / "out"
    return ended(*steps, "trainer.warmup_fraction=0", out=out)


def greedy_answers(path: Path, prompts: list[Prompt], tokenizer) -> list[str]:
    """By transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    inputs = torch.stack([prompt.prompt_ids for prompt in prompts])
    mask = torch.ones_like(inputs)
    tokens = model.generate(inputs, attention_mask=mask, max_new_tokens=6, do_sample=False)
    return [tokenizer.decode(t, skip_special_tokens=True) for t in tokens[:, inputs.shape[1] :]]


def test_it_ends_where_the_target_is_reached_with_a_model_that_transformers_finds_as_good(
    reached, tokenizer
):
    measured = [row["eval/accuracy"] for row in reached.rows if "eval/accuracy" in row]
    last = reached.rows[-1]
    assert last["step"] < 60 and last["step"] % 3 == 0
    assert all(accuracy < 0.5 for accuracy in measured[:-1]) and measured[-1] >= 0.5
    assert f"reached after {last['step']} steps" in reached.output
    task = build_task("addition", tokenizer, num_eval=60)
    prompts = [task.eval_prompt(j) for j in range(60)]
    answers = greedy_answers(reached.run_dir, prompts, tokenizer)
    right = sum(answer == prompt.meta["answer"] for answer, prompt in zip(answers, prompts))
    assert right / 60 == pytest.approx(measured[-1], abs=1.5 / 60)
    assert reached.outcome["ended"] == "finished"


@pytest.mark.slow
def test_a_target_that_is_met_at_the_start_leaves_the_weights_as_they_were(tmp_path):
    job = ended("target_accuracy=0.2", out=tmp_path / "out")
    assert [row["step"] for row in job.rows] == [0]
    saved = load_file(tmp_path / "out" / "model.safetensors")
    start = load_file(tiny_directory() / "model.safetensors")
    assert all(torch.equal(saved[name], start[name].float()) for name in start)


def test_a_target_that_is_missed_is_exit_status_1_and_leaves_the_model(tmp_path):
    few = ("target_accuracy=1", "max_steps=2", "examples_per_step=4", "eval.every=0")
    job = ended(*few, out=tmp_path / "out", code=MISSED)
    assert "target     100.0% not reached after 2 steps" in job.output
    assert [row["step"] for row in job.rows if "eval/accuracy" in row] == [0, 2]
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.bitwise("a run that was resumed is the one that was not")
@pytest.mark.slow
def test_a_warm_start_killed_and_resumed_equals_one_that_was_not(tmp_path):
    long = ("target_accuracy=1", "max_steps=12", "examples_per_step=16", "checkpoint.every=4")
    whole = ended(*long, "eval.every=2", out=tmp_path / "whole", code=MISSED)
    start = partial(warm_start, *long, "eval.every=2", out=tmp_path / "out")
    job = killed_and_resumed(start, code=MISSED)
    assert untimed(job.rows) == untimed(whole.rows)
    assert same_tensors(*(run.run_dir / "model.safetensors" for run in (job, whole)))


@pytest.mark.slow
def test_two_ranks_learn_and_answer_as_one(tmp_path):
    few = ("target_accuracy=1", "max_steps=4", "examples_per_step=17", "eval.every=2", "lr=1e-4")
    runs = []
    for ranks in (None, 2):
        out = tmp_path / f"ranks{ranks}"
        runs.append(untimed(ended(*few, out=out, code=MISSED, ranks=ranks).rows))
    for one, two in zip(*runs, strict=True):
        assert one.keys() == two.keys()
        for name in ("loss/value", "eval/loss", "grad_norm"):
            if name in one:
                assert two[name] == pytest.approx(one[name], rel=TRAINED, abs=TRAINED), name
        if "eval/accuracy" in one:
            # A greedy answer may turn where two tokens are equally likely.
            assert two["eval/accuracy"] == pytest.approx(one["eval/accuracy"], abs=2.5 / 60)
    assert runs[0][-1]["eval/loss"] < runs[0][0]["eval/loss"]


@pytest.fixture
def refusal(run_here):
    """refusal(*words, out=DIR): what is said of a job that ends at once. In this process."""

    def run(*words: str, out: Path) -> str:
        config = compose_config([*WARM, *words, f"out={out}"], SFT)
        code, said = run_here(lambda: recipe.run.__wrapped__(config))
        assert code == BAD_INPUT
        return said.out + said.err

    return run


def test_what_the_user_gave_is_looked_at_before_anything_is_written(refusal, tmp_path):
    out = tmp_path / "out"
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1="}]
    file = write_rows(tmp_path / "rows.jsonl", *rows * 10)
    said = refusal("task=jsonl", f"task.path={file}", out=out)
    assert f'{file}:2: no key "answer"' in said
    assert "the model's context is 512" in refusal("max_new_tokens=600", out=out)
    write_rows(file, *rows[1:] * 20)
    short = ("max_new_tokens=6", "task.max_prompt_tokens=16")
    keyless = ("task=jsonl", f"task.path={file}", "task.answer_key=null", *short)
    assert "prompts without answers" in refusal(*keyless, out=out)
    assert not out.exists()


def test_answers_that_are_made_on_demand_are_those_of_their_numbers(tokenizer):
    class Doubling:
        name = "doubling"
        default_reward = "llamarl.tasks.rewards:exact_match"
        num_train, num_eval = 1000, 3
        train_digest = eval_digest = ""

        def train_prompt(self, i):
            ids = torch.tensor(tokenizer.encode(f"2*{i}="))
            return Prompt(ids, f"2*{i}=", {"answer": str(2 * i)})

        eval_prompt = train_prompt

    data = read_answers(Doubling(), tokenizer, max_tokens=99, num_eval=2, fingerprints={})
    assert isinstance(data.train, PairsOnDemand) and len(data.train) == 1000
    assert tokenizer.decode(data.train[7].token_ids) == "<bos>2*7=14<eos>"
    assert [tokenizer.decode(one.token_ids) for one in data.train[998:]] == [
        "<bos>2*998=1996<eos>",
        "<bos>2*999=1998<eos>",
    ]
    assert len(data.held_out) == 2
    with pytest.raises(IndexError):
        data.train[1000]


@pytest.mark.parametrize("dry_run, status", [(True, 0), (False, BAD_INPUT)])
def test_a_dry_run_needs_no_weights_and_a_run_does(run_here, tmp_path, dry_run, status):
    model = tmp_path / "model"
    shutil.copytree(tiny_directory(), model, ignore=shutil.ignore_patterns("*.safetensors"))
    rows = write_rows(tmp_path / "rows.jsonl", *[{"prompt": "2+3=", "completion": "5"}] * 4)
    given = ["task.chat=false", f"model.path={model}", f"task.path={rows}"]
    words = [*given, f"dry_run={str(dry_run).lower()}", f"out={tmp_path / 'out'}"]
    code, said = run_here(lambda: recipe.run.__wrapped__(compose_config(words, SFT)))
    assert code == status and "no such file" in said.out + said.err


def test_conversations_are_rows(tokenizer, tmp_path):
    """Those of a file, whose turns the tests of read_pairs look at, have no answers of a task."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "1"}]}\n')
    with pytest.raises(ValueError, match="rows.jsonl:1: no assistant message"):
        read_sft_data(task_of(file), tokenizer)


# The embedded model


def test_the_tiny_model_adds_two_digit_numbers_right_about_two_times_in_five(task, tokenizer):
    prompts = [task.eval_prompt(j) for j in range(task.num_eval)]
    assert len(prompts) == 500
    answers = greedy_answers(tiny_directory(), prompts, tokenizer)
    right = sum(answer == prompt.meta["answer"] for answer, prompt in zip(answers, prompts))
    assert 0.38 <= right / 500 <= 0.43
