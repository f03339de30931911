"""Supervised fine-tuning, in two ways.

At scale: a model learns the answers of a file, sharded over any number of ranks by FSDP2, with
checkpoints to go on from. What can be set is in conf/supervised.yaml.

    torchrun --standalone --nproc-per-node=2 recipes/sft.py model.path=DIR task.path=ROWS.jsonl \
        out=DIR resume=auto

Warm start: a small model learns a task's own answers until it is right often enough for RL to
begin.

    # From the embedded tiny model.
    python recipes/sft.py --out DIR --task addition --target-accuracy 0.6
    python recipes/sft.py --out DIR --model HF_DIR --lr 1e-5 --task jsonl --path rows.jsonl
    # Data parallel: the same batches.
    torchrun --nproc-per-node=2 recipes/sft.py ...

For both a row of a JSONL file has a "prompt" and a "completion" (or an "answer"), or "messages": a
conversation, whose assistant turns are learned, in the tokenizer's chat template. Bad rows are
named FILE:LINE, all before training begins.

Of a warm start: accuracy is the share of held-out prompts whose greedy completion is the answer,
token for token, measured on the weights as they will be saved. Ctrl-C or SIGTERM ends it after the
step at hand and saves. Exit status: 0, 1 if the target was not reached, 2 for a model, data or an
--out that cannot be used, 128 + signal. Every rank holds float32 weights and optimizer whole (16
bytes a parameter); for models that do not fit so, and for resuming, there is the other way.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from executors.build_supervised import build_sft_trainer
from llamarl.comm.groups import World, init_world
from llamarl.config.supervised import SFTConfig, sft_main
from llamarl.launch import launch_supervised
from llamarl.learning import sft
from llamarl.learning.optim import build_optimizer, lr_at, set_lr
from llamarl.learning.sft_data import read_pairs, read_sft_data
from llamarl.models.build import build_decoder, random_weights, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.hf import export, load_tokenizer, load_weights, named_parameters_hf
from llamarl.tasks.build import KINDS, build_task, hold_out

FLAGS = {
    "task.kind": "--task",
    "task.path": "--path",
    "task.eval_path": "--eval-path",
    "task.name": "--name",
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        help="the model directory to write; one that is there is replaced by the whole new one",
    )
    add("--model", type=Path, default=tiny_directory(), help="the model directory to start from")
    add(
        "--random-init",
        action="store_true",
        help="take config and tokenizer from --model, but no weights",
    )
    add("--task", choices=KINDS, default="addition")
    add("--path", type=Path, help="the task's file or directory")
    add("--eval-path", type=Path, help="held-out rows; none: a part of --path")
    add("--prompt-key", default="prompt")
    add(
        "--answer-key",
        help="names the text to learn; none: answer, or in JSONL completion if there is one",
    )
    add("--messages-key", default="messages", help="names the conversation of a JSONL row")
    add("--name", help="which reasoning_gym task")
    add("--no-chat", action="store_true", help="ignore the tokenizer's chat template")
    add("--target-accuracy", type=float, help="0 to 1; stop once it is reached")
    add("--max-steps", type=int, default=2000)
    add("--batch-size", type=int, default=256, help="pairs a step, over all ranks")
    add("--microbatch-tokens", type=int, default=8192)
    add("--lr", type=float, default=5e-4)
    add("--warmup-steps", type=int, default=50)
    add("--eval-every", type=int, default=5, help="steps")
    add("--num-eval", type=int, default=500, help="held-out prompts")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of the saved weights")
    add("--threads", type=int)
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    counts = ("max_steps", "batch_size", "microbatch_tokens", "eval_every", "num_eval")
    checks = [
        (f"--{name.replace('_', '-')}", getattr(args, name) >= 1, "need at least 1")
        for name in counts
    ]
    checks += [
        ("--out", args.out is not None, "say where to write the model directory"),
        (
            "--warmup-steps",
            0 <= args.warmup_steps < args.max_steps,
            "need 0 or more, and fewer than --max-steps",
        ),
        ("--target-accuracy", 0 <= (args.target_accuracy or 0) <= 1, "need 0 to 1"),
    ]
    if any(not right for _, right, _ in checks):
        parser.error(
            "".join(f"\n  {flag}: {remedy}" for flag, right, remedy in checks if not right)
        )
    return args


class StopRequest:
    """Remembers the first SIGTERM or Ctrl-C; the second one kills."""

    def __init__(self):
        self.signum = 0
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._remember)

    def _remember(self, signum: int, _frame) -> None:
        self.signum = signum
        signal.signal(signum, signal.SIG_DFL)


class Data(NamedTuple):
    """Training pairs by number, and those held out."""

    num_train: int
    train_pair: Callable[[int], sft.Pair]
    held_out: list[sft.Pair]


def read_data(args: argparse.Namespace, tokenizer, longest: int) -> Data:
    """ValueError naming what is wrong, by FILE:LINE in a JSONL file."""
    if args.task == "jsonl" and args.path:
        read: Callable[[str], list[sft.Pair]] = partial(
            read_pairs,
            tokenizer=tokenizer,
            max_tokens=longest,
            chat=not args.no_chat,
            prompt_key=args.prompt_key,
            answer_key=args.answer_key,
            messages_key=args.messages_key,
        )
        pairs = read(args.path)
        if args.eval_path:
            return Data(len(pairs), pairs.__getitem__, read(args.eval_path)[: args.num_eval])
        kept, held = hold_out(len(pairs), args.num_eval)
        return Data(len(kept), lambda i: pairs[kept[i]], [pairs[i] for i in held])
    task = build_task(
        args.task,
        tokenizer,
        path=args.path,
        eval_path=args.eval_path,
        prompt_key=args.prompt_key,
        name=args.name,
        answer_key=args.answer_key or "answer",
        chat=not args.no_chat,
        max_prompt_tokens=longest,
        num_eval=args.num_eval,
    )
    train_pair = lru_cache(65_536)(
        lambda i: sft.make_pair(task.train_prompt(i), tokenizer, longest)
    )
    held_out = [
        sft.make_pair(task.eval_prompt(j), tokenizer, longest)
        for j in range(min(task.num_eval, args.num_eval))
    ]
    return Data(task.num_train, train_pair, held_out)


def train(
    decoder, data: Data, world: World, args, stop: StopRequest, progress: Progress
) -> tuple[int, float]:
    """Collective over the world: until the target, the last step or a stop request. Returns (steps
    done, last accuracy).
    """
    held_out = data.held_out
    limits = {"budget_tokens": args.microbatch_tokens, "device": world.device}
    optimizer = build_optimizer(
        decoder.parameters(), lr=args.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    )
    bar = progress.add_task("sft", total=args.max_steps)
    last = float("nan")
    loss = float("nan")
    for step in range(args.max_steps + 1):
        if sft.total(stop.signum):
            return step, last
        if step % args.eval_every == 0 or step == args.max_steps:
            with sft.rounded(decoder, getattr(torch, args.dtype)):
                last = sft.accuracy(decoder, held_out[world.rank :: world.size], **limits)
            accuracy = f"greedy accuracy {last:6.1%} of {len(held_out)} held out"
            progress.console.print(f"step {step:5d}  loss {loss:7.4f}  {accuracy}")
            if (
                args.target_accuracy is not None
                and last >= args.target_accuracy
                or step == args.max_steps
            ):
                return step, last
        set_lr(
            optimizer,
            lr_at(
                step,
                lr=args.lr,
                schedule="linear",
                warmup_steps=args.warmup_steps,
                max_steps=args.max_steps,
            ),
        )
        batch = sft.sample_batch(data.num_train, args.batch_size, seed=args.seed, step=step)
        loss = sft.train_step(
            decoder,
            optimizer,
            [data.train_pair(i) for i in batch[world.rank :: world.size]],
            **limits,
        )
        progress.update(bar, advance=1, description=f"sft  loss {loss:.3f}  accuracy {last:.1%}")
    raise AssertionError("the last step returns")


def check_writable(out: Path) -> None:
    """Makes the directory that `out` will be in. ValueError if nothing could be saved there."""
    try:
        fresh = out.with_name(f".{out.name}.new")
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(prefix=fresh.name, dir=out.parent).cleanup()
    except (OSError, ValueError) as error:
        raise ValueError(f"--out {out}: cannot be written: {error}") from error


def save_directory(decoder, like: Path, out: Path, dtype: torch.dtype) -> None:
    """Write the model directory `out` (the rest of it from `like`), replacing an older one only
    once the new one is whole.
    """
    check_replaceable(out)
    fresh = out.with_name(f".{out.name}.new")
    old = out.with_name(f".{out.name}.old")
    if old.is_dir() and not out.exists():
        old.rename(out)  # a process that was killed between the two renames below left it so
    for left_over in (fresh, old):
        if left_over.is_dir():
            shutil.rmtree(left_over)
    export(named_parameters_hf(decoder), like, fresh, dtype=dtype)
    if not out.exists():
        fresh.rename(out)
        return
    out.rename(old)
    fresh.rename(out)
    shutil.rmtree(old)


def check_replaceable(out: Path) -> None:
    """FileExistsError if `out` is something else than a model directory, of files alone, or an
    empty one.
    """
    if not out.exists():
        return
    is_model = (out / "config.json").is_file()
    if not out.is_dir() or not (is_model or not any(out.iterdir())):
        raise FileExistsError(
            f"{out}: exists and is no model directory; choose another --out or remove it"
        )
    folders = sorted(p.name for p in out.iterdir() if p.is_dir())
    if folders:
        raise FileExistsError(
            f"{out}: holds directories ({', '.join(folders[:3])}), which replacing it would "
            "delete; choose another --out"
        )


def run(args: argparse.Namespace, stop: StopRequest) -> int:
    """Returns the exit status. ValueError or OSError for what cannot be used."""
    check_replaceable(args.out)
    check_writable(args.out)
    world = init_world(threads=args.threads, timeout_s=600, reproducible=True)
    console = Console(quiet=world.rank > 0, highlight=False, soft_wrap=True)
    tokenizer, decoder = load_tokenizer(args.model), build_decoder(read_config(args.model))
    data = read_data(args, tokenizer, decoder.config.max_position_embeddings)
    if args.random_init:
        random_weights(decoder, seed=args.seed)
    else:
        load_weights(decoder, args.model)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        steps, last = train(decoder.to(world.device), data, world, args, stop, progress)
    if world.rank == 0:
        save_directory(decoder, args.model, args.out, getattr(torch, args.dtype))
    missed = args.target_accuracy is not None and not last >= args.target_accuracy
    why = "done"
    if stop.signum:
        why = f"stopped by {signal.Signals(stop.signum).name}"
    elif missed:
        why = "target not reached"
    console.print(
        f"{why}: {args.out} after {steps} steps, greedy accuracy {last:.1%} when last measured"
    )
    return 128 + stop.signum if stop.signum else int(missed)


def in_flags(message: str) -> str:
    """What tasks say of keys of the main job's config, said of the flags here."""
    return re.sub(
        rf"(?<![\w./-])({'|'.join(map(re.escape, FLAGS))})\b", lambda key: FLAGS[key[0]], message
    )


@sft_main
def train_sharded(config: SFTConfig) -> None:
    with launch_supervised(config, read_sft_data) as job:
        job.run(build_sft_trainer(config, job))


def main(argv: list[str] | None = None) -> int:
    first = "".join(sys.argv[1:2]) if argv is None else ""
    if "=" in first and not first.startswith("-"):
        train_sharded()  # whose words are key=value
        return 0
    args, stop = parse(argv), StopRequest()
    try:
        return run(args, stop)
    except (ValueError, OSError) as error:
        print(f"sft: {in_flags(str(error))}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
