"""recipes/sft.py, and the library under it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from llamarl.learning import sft
from llamarl.models.build import build_decoder, random_weights, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer, load_weights
from llamarl.tasks.build import build_task
from llamarl.types import Prompt
from tests.launching import JOB_S
from tests.tolerances import rounding

RECIPE = Path(__file__).parents[2] / "recipes" / "sft.py"
BAD_INPUT = 2
# loss and parameters after one step, in other batches
STEP = rounding(terms=read_config(tiny_directory()).hidden_size, depth=2 * 4)
LIMITS = {"budget_tokens": 4096, "device": "cpu"}


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("recipe_sft", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def program_state(float32_products):
    """The recipe is a program: it sets signal handlers and makes process groups, besides what
    `process_state` puts back.
    """
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture
def alone():
    """A world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(tiny_directory())


@pytest.fixture(scope="module")
def task(tokenizer):
    return build_task("addition", tokenizer)


def tiny_decoder():
    return load_weights(build_decoder(read_config(tiny_directory())), tiny_directory())


def some_pairs(task, tokenizer, numbers):
    return [sft.make_pair(task.train_prompt(i), tokenizer, 512) for i in numbers]


def pair(prompt, completion):
    learned = [False] * len(prompt) + [True] * len(completion)
    return sft.Pair(torch.tensor(prompt + completion), torch.tensor(learned))


# The library


def test_packing_shifts_once_and_marks_completion_rows():
    batch = sft.pack_pairs([pair([10, 11], [12]), pair([20], [21])])
    assert batch.input_ids.tolist() == [10, 11, 20]
    assert batch.labels.tolist() == [11, 12, 21]
    assert batch.positions.tolist() == [0, 1, 0]
    assert batch.cu_seqlens.tolist() == [0, 2, 3]
    assert batch.rows.tolist() == [1, 2] and batch.pairs.tolist() == [0, 1]


def test_a_pair_ends_with_the_end_token_which_is_trained(task, tokenizer):
    one = some_pairs(task, tokenizer, [0])[0]
    prompt = task.train_prompt(0)
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


def test_splitting_keeps_every_pair_and_the_budget():
    pairs = [pair([1] * (i % 7 + 1), [2] * (i % 3 + 1)) for i in range(40)] + [pair([1] * 50, [2])]
    parts = sft.split_pairs(pairs, 30)
    assert sorted(map(id, (p for part in parts for p in part))) == sorted(map(id, pairs))
    assert all(len(part) == 1 or sum(p.token_ids.numel() for p in part) <= 30 for part in parts)
    assert len(parts[0]) == 1 and parts[0][0].token_ids.numel() == 51


def test_loss_is_the_mean_over_completion_tokens_alone():
    """Against transformers, a pair at a time."""
    from transformers import AutoModelForCausalLM

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
        want -= of_labels[one.learned[1:]].sum().item() / 7
    got = sft.pair_loss(tiny_decoder(), sft.pack_pairs(pairs), num_loss_tokens=7)
    assert got.item() == pytest.approx(want, abs=1e-5)


def test_greedy_matches_are_those_of_real_greedy_decoding(task, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_directory(), dtype=torch.float32)
    prompts = [task.eval_prompt(j) for j in range(80)]
    inputs = torch.stack([p.prompt_ids for p in prompts])
    tokens = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=6, do_sample=False
    )
    tokens = tokens[:, inputs.shape[1] :]
    want = [
        tokenizer.decode(t, skip_special_tokens=True) == p.meta["answer"]
        for t, p in zip(tokens, prompts)
    ]
    pairs = [sft.make_pair(p, tokenizer, 512) for p in prompts]
    assert 10 < sum(want) < 70
    assert sft.greedy_matches(tiny_decoder(), sft.pack_pairs(pairs)).tolist() == want


def test_a_step_does_not_depend_on_the_microbatch_size(task, tokenizer, alone):
    pairs, results = some_pairs(task, tokenizer, range(24)), []
    for budget in (25, 4096):
        decoder = tiny_decoder()
        optimizer = torch.optim.SGD(decoder.parameters(), lr=1.0)
        loss = sft.train_step(decoder, optimizer, pairs, budget_tokens=budget, device="cpu")
        results.append((loss, [p.detach().clone() for p in decoder.parameters()]))
    (loss_a, small), (loss_b, large) = results
    assert loss_a == pytest.approx(loss_b, abs=STEP)
    assert all((a - b).abs().max() <= STEP for a, b in zip(small, large))
    assert any(
        (a - b).abs().max() > 100 * STEP for a, b in zip(small, tiny_decoder().parameters())
    ), "no step was taken"


def test_a_gradient_that_is_not_finite_stops_before_the_step(task, tokenizer, alone):
    decoder = tiny_decoder()
    with torch.no_grad():
        decoder.norm.scale[0] = torch.inf
    before = [p.detach().clone() for p in decoder.parameters()]
    with pytest.raises(FloatingPointError, match="no step was taken"):
        sft.train_step(
            decoder,
            torch.optim.SGD(decoder.parameters(), lr=1.0),
            some_pairs(task, tokenizer, range(4)),
            **LIMITS,
        )
    assert all(torch.equal(a, b) for a, b in zip(before, decoder.parameters()))


def test_rounding_is_undone():
    decoder = random_weights(build_decoder(read_config(tiny_directory())), seed=3)
    exact = [p.detach().clone() for p in decoder.parameters()]
    with sft.rounded(decoder, torch.bfloat16):
        assert all(
            torch.equal(p, e.bfloat16().float()) for p, e in zip(decoder.parameters(), exact)
        )
        assert not torch.equal(decoder.tok_embeddings.weight, exact[0])
    assert all(torch.equal(p, e) for p, e in zip(decoder.parameters(), exact))


def test_saving_replaces_a_model_directory_and_nothing_else(recipe, tmp_path):
    decoder, out = tiny_decoder(), tmp_path / "out"
    for _ in range(2):
        recipe.save_directory(decoder, tiny_directory(), out, torch.bfloat16)
        (out / "left_behind").touch()
    recipe.save_directory(decoder, tiny_directory(), out, torch.bfloat16)
    assert {f.name for f in out.iterdir()} == {f.name for f in tiny_directory().iterdir()}
    assert list(tmp_path.iterdir()) == [out]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(FileExistsError, match="mine: exists and is no model directory"):
        recipe.save_directory(decoder, tiny_directory(), tmp_path / "mine", torch.bfloat16)
    (out / "original").mkdir()
    with pytest.raises(FileExistsError, match="out: holds directories .original."):
        recipe.save_directory(decoder, tiny_directory(), out, torch.bfloat16)
    assert (out / "original").is_dir() and (out / "config.json").is_file()


def test_a_save_that_was_killed_between_its_renames_loses_no_model(recipe, tmp_path, monkeypatch):
    decoder, out = tiny_decoder(), tmp_path / "out"
    recipe.save_directory(decoder, tiny_directory(), out, torch.bfloat16)
    names = {file.name for file in out.iterdir()}
    out.rename(tmp_path / ".out.old")

    def killed(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "export", killed)
    with pytest.raises(KeyboardInterrupt):
        recipe.save_directory(decoder, tiny_directory(), out, torch.bfloat16)
    assert {file.name for file in out.iterdir()} == names


def test_random_weights_are_a_function_of_the_seed_and_the_norms_are_one():
    first, same, other = (
        random_weights(build_decoder(read_config(tiny_directory())), seed=s) for s in (5, 5, 6)
    )
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters()))
    assert not torch.equal(first.tok_embeddings.weight, other.tok_embeddings.weight)
    assert (first.norm.scale == 1).all() and 0.019 < first.layers[0].mlp.w1.weight.std() < 0.021


# The embedded model


def test_the_tiny_model_adds_two_digit_numbers_right_about_two_times_in_five(
    task, tokenizer, alone
):
    held_out = [sft.make_pair(task.eval_prompt(j), tokenizer, 512) for j in range(task.num_eval)]
    assert len(held_out) == 500
    assert 0.38 <= sft.accuracy(tiny_decoder(), held_out, **LIMITS) <= 0.43


# The program


def test_the_saved_weights_are_trained_and_have_the_accuracy_that_was_printed(
    recipe, tmp_path, task, tokenizer, capsys
):
    out = tmp_path / "out"
    arguments = (
        "--max-steps 8 --warmup-steps 2 --batch-size 32 --eval-every 6 --num-eval 100 --threads 1"
    )
    assert recipe.main(["--out", str(out), *arguments.split()]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    pairs = [sft.make_pair(task.eval_prompt(j), tokenizer, 512) for j in range(100)]
    saved = load_weights(build_decoder(read_config(out)), out)
    right = int(sft.greedy_matches(saved, sft.pack_pairs(pairs)).sum())
    assert (
        last == f"done: {out} after 8 steps, greedy accuracy {right / 100:.1%} when last measured"
    )
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    matrices = [
        (a, b) for a, b in zip(saved.parameters(), tiny_decoder().parameters()) if a.dim() > 1
    ]
    assert not any(torch.equal(a, b) for a, b in matrices)


def test_a_target_that_is_met_ends_at_once_and_one_that_is_not_fails(recipe, tmp_path, capsys):
    common = [
        "--out",
        str(tmp_path / "out"),
        "--num-eval",
        "100",
        "--threads",
        "1",
        "--batch-size",
        "4",
    ]
    assert recipe.main([*common, "--target-accuracy", "0.2"]) == 0
    assert "after 0 steps" in capsys.readouterr().out
    saved, start = (
        load_file(path / "model.safetensors") for path in (tmp_path / "out", tiny_directory())
    )
    assert all(torch.equal(saved[key], start[key]) for key in start), (
        "saved other weights than were measured"
    )
    assert (
        recipe.main([*common, "--target-accuracy", "1", "--max-steps", "1", "--warmup-steps", "0"])
        == 1
    )
    assert "target not reached" in capsys.readouterr().out


def test_a_model_from_nothing_learns_a_jsonl_file(recipe, tmp_path, capsys):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"q": f"{i}", "a": "yes"}) + "\n" for i in range(100)))
    data = ["--task", "jsonl", "--path", str(file), "--prompt-key", "q", "--answer-key", "a"]
    arguments = (
        "--random-init --target-accuracy 1 --max-steps 60 --warmup-steps 5 --batch-size 16 "
        "--threads 1"
    ).split()
    assert recipe.main(["--out", str(tmp_path / "out"), *data, *arguments]) == 0
    assert "greedy accuracy 100.0% of 10 held out" in capsys.readouterr().out


def test_conversations_are_learned_and_held_out_rows_may_be_given(
    recipe, tmp_path, tokenizer, capsys
):
    template = (
        "<bos>{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    )
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_directory().iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    reply = template + "{% if add_generation_prompt %}a:{% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": reply}))
    said = [{"role": "assistant", "content": "yes"}]
    turns = [
        [{"role": "user", "content": f"{i}?"}, *said, {"role": "user", "content": "no?"}, *said]
        for i in range(40)
    ]
    for name, part in (("train", turns[:30]), ("held", turns[30:])):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"messages": messages}) + "\n" for messages in part)
        )
    data = [
        "--model",
        str(model),
        "--task",
        "jsonl",
        "--path",
        str(tmp_path / "train.jsonl"),
        "--eval-path",
        str(tmp_path / "held.jsonl"),
    ]
    arguments = (
        "--target-accuracy 1 --max-steps 60 --warmup-steps 5 --batch-size 16 --threads 1".split()
    )
    assert recipe.main(["--out", str(tmp_path / "out"), *data, *arguments]) == 0
    assert "greedy accuracy 100.0% of 10 held out" in capsys.readouterr().out
    (tmp_path / "train.jsonl").write_text('{"messages": []}\n')
    assert recipe.main(["--out", str(tmp_path / "out2"), *data, *arguments]) == BAD_INPUT
    assert "train.jsonl:1: " in capsys.readouterr().err


def test_bad_arguments_are_reported_at_once(recipe, capsys):
    with pytest.raises(SystemExit) as caught:
        recipe.main("--batch-size 0 --target-accuracy 40 --warmup-steps 9 --max-steps 9".split())
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    for flag in ("--batch-size", "--out", "--warmup-steps", "--target-accuracy"):
        assert f"\n  {flag}: " in shown


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--task", "jsonl"], "needs --path"),
        (["--task", "gsm8k"], "needs --path"),
        (
            ["--task", "jsonl", "--path", "absent.jsonl"],
            "absent.jsonl: no such file; set --path or --eval-path",
        ),
        (
            ["--task", "gsm8k", "--path", "absent.jsonl"],
            "absent.jsonl: no such file; set --path or --eval-path",
        ),
        (["--task", "jsonl", "--path", "empty.jsonl"], "empty.jsonl: empty"),
        (
            ["--task", "reasoning_gym", "--name", "chain_sums"],
            "--name=chain_sums: not a reasoning_gym dataset",
        ),
        (["--model", "absent"], "absent: no tokenizer_config.json"),
        (["--model", "narrow"], "weights do not fit config.json"),
    ],
)
def test_what_cannot_be_used_is_said(recipe, tmp_path, monkeypatch, capsys, words, complaint):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    shutil.copytree(tiny_directory(), "narrow")
    config = json.loads(Path("narrow/config.json").read_text())
    Path("narrow/config.json").write_text(
        json.dumps(config | {"intermediate_size": config["intermediate_size"] // 2})
    )
    assert recipe.main(["--out", "out", "--threads", "1", *words]) == BAD_INPUT
    said = capsys.readouterr().err
    assert said.startswith("sft: ") and complaint in said and "task." not in said
    assert not Path("out").exists()


@pytest.mark.parametrize("out", ["../file/out", ".", "/proc/out"])
def test_an_out_that_cannot_be_written_is_found_before_training(
    recipe, tmp_path, monkeypatch, capsys, out
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr(recipe, "train", None)
    assert recipe.main(["--out", out, "--threads", "1"]) == BAD_INPUT
    assert f"sft: --out {out}: cannot be written: " in capsys.readouterr().err


@pytest.mark.slow
def test_sigterm_saves_what_there_is_and_ends(tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable,
        str(RECIPE),
        "--out",
        str(out),
        "--batch-size",
        "8",
        "--num-eval",
        "20",
        "--threads",
        "1",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    for line in process.stdout:
        if line.startswith("step     5"):
            break
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=JOB_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in rest
    trained = load_weights(build_decoder(read_config(out)), out)
    assert not torch.equal(trained.tok_embeddings.weight, tiny_decoder().tok_embeddings.weight)


@pytest.mark.slow
def test_two_ranks_train_the_same_model_as_one(tmp_path):
    arguments = (
        "--max-steps 3 --warmup-steps 0 --batch-size 9 --num-eval 21 --dtype float32 --threads 1 "
        "--lr 1e-4"
    ).split()
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    launchers = {"one": [sys.executable], "two": [sys.executable, *torchrun]}
    for name, launcher in launchers.items():
        subprocess.run(
            [*launcher, str(RECIPE), "--out", str(tmp_path / name), *arguments],
            check=True,
            timeout=240,
        )
    one, two, start = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "one", tmp_path / "two", tiny_directory())
    )
    moved = max((one[key] - start[key].float()).abs().max() for key in one)
    assert moved > 2e-4
    assert all((one[key] - two[key]).abs().mean() < 0.01 * moved for key in one)
