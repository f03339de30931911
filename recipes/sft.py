"""Supervised warm start: a model learns a task's own answers until it is right often enough for RL to begin.

    python recipes/sft.py --out runs/warm --task addition --target-accuracy 0.4         # the embedded model, further
    python recipes/sft.py --out DIR --model HF_DIR --task jsonl --path pairs.jsonl --completion-key completion
    torchrun --nproc-per-node=2 recipes/sft.py ...                                       # data parallel: the same numbers
    python recipes/sft.py --make-tiny                                                    # how llamarl/models/tiny was made

Accuracy is the share of held-out prompts whose greedy completion is the answer, token for token, measured on the weights
as they will be saved. Ctrl-C or SIGTERM saves what there is and ends. Whole float32 weights on every rank: for models of
up to a few billion parameters. Left out: schedules beyond warm-up, mixed precision, resuming.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from llamarl.learning import sft
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import load_tokenizer, load_weights
from llamarl.models.scratch import TINY_CONFIG, random_weights, tiny_directory, write_directory
from llamarl.placement import World, init_world
from llamarl.tasks.build import KINDS, build_task


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="the model directory to write")
    add("--model", type=Path, default=tiny_directory(), help="the model directory to start from")
    add("--random-init", action="store_true", help="take only config and tokenizer from --model")
    add("--make-tiny", action="store_true", help="make the embedded model from nothing; --out defaults to its place")
    add("--task", choices=KINDS, default="addition")
    add("--path", type=Path, help="the task's file or directory")
    add("--prompt-key", default="prompt")
    add("--completion-key", default="answer", help="the key of the text to learn")
    add("--name", help="the reasoning_gym task")
    add("--plain", action="store_true", help="ignore the tokenizer's chat template")
    add("--target-accuracy", type=float, help="stop when greedy accuracy on held-out prompts reaches it, 0 to 1")
    add("--max-steps", type=int, default=2000)
    add("--batch-size", type=int, default=256, help="pairs a step, over all ranks")
    add("--microbatch-tokens", type=int, default=8192)
    add("--lr", type=float, default=1e-3)
    add("--warmup-steps", type=int, default=50)
    add("--eval-every", type=int, default=10)
    add("--num-eval", type=int, default=500)
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of the saved weights")
    add("--threads", type=int)
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.make_tiny:
        args.random_init, args.out, args.threads = True, args.out or tiny_directory(), 1
        args.target_accuracy = 0.4 if args.target_accuracy is None else args.target_accuracy
    problems = [f"--{n.replace('_', '-')} {getattr(args, n)}: need at least 1"
                for n in ("max_steps", "batch_size", "microbatch_tokens", "warmup_steps", "eval_every", "num_eval") if getattr(args, n) < 1]
    problems += ["--out: say where to write the model directory"] if args.out is None else []
    problems += [f"--target-accuracy {args.target_accuracy}: need 0 to 1"] if not 0 <= (args.target_accuracy or 0) <= 1 else []
    if problems:
        parser.error("\n  ".join(problems))
    return args


class StopRequest:
    """The first SIGTERM or Ctrl-C is remembered, the second one kills."""

    signum = 0

    def __init__(self):
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._remember)

    def _remember(self, signum, _frame) -> None:
        self.signum = signum
        signal.signal(signum, signal.SIG_DFL)


def agree(world: World, *numbers: float) -> list[float]:
    """Collective over the world: the sums of the numbers."""
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def accuracy(decoder, pairs: list[sft.Pair], world: World, args) -> float:
    """Collective over the world: the share of all pairs that greedy decoding gets right."""
    with sft.rounded(decoder, getattr(torch, args.dtype)):
        mine = sft.split_pairs(pairs[world.rank::world.size], args.microbatch_tokens)
        right = sum(int(sft.greedy_matches(decoder, sft.pack_pairs(part, world.device)).sum()) for part in mine)
    return agree(world, right)[0] / len(pairs)


def train_step(decoder, optimizer, pairs: list[sft.Pair], world: World, args) -> float:
    """Collective over the world: one optimizer step on this rank's pairs and the others'. Returns the loss, nats a token."""
    parts = [sft.pack_pairs(part, world.device) for part in sft.split_pairs(pairs, args.microbatch_tokens)]
    # Divide by the global count: a per-rank mean would up-weight short ranks.
    num_loss_tokens = int(agree(world, sum(part.rows.numel() for part in parts))[0])
    optimizer.zero_grad()
    loss = 0.0
    for part in parts:
        part_loss = sft.pair_loss(decoder, part, num_loss_tokens=num_loss_tokens)
        part_loss.backward()
        loss += part_loss.item()
    if world.size > 1:
        for parameter in decoder.parameters():
            dist.all_reduce(parameter.grad)
    torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    return agree(world, loss)[0]


def train(decoder, args, world: World, tokenizer, stop: StopRequest, progress: Progress) -> tuple[int, float]:
    """Collective over the world: train until the target, the last step or a stop request. Returns (steps, last accuracy)."""
    limit = decoder.config.max_position_embeddings
    task = build_task(args.task, tokenizer, path=args.path, prompt_key=args.prompt_key, answer_key=args.completion_key, name=args.name,
                      chat=not args.plain, max_prompt_tokens=limit - 1, num_eval=args.num_eval, seed=args.seed)
    train_pair = lru_cache(65_536)(lambda i: sft.make_pair(task.train_prompt(i), tokenizer))
    held_out = [sft.make_pair(task.eval_prompt(j), tokenizer) for j in range(min(task.num_eval, args.num_eval))]
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=args.lr, weight_decay=0.01)
    bar, last, loss = progress.add_task("sft", total=args.max_steps), float("nan"), float("nan")
    for step in range(args.max_steps + 1):
        if step % args.eval_every == 0 or step == args.max_steps:
            last = accuracy(decoder, held_out, world, args)
            progress.console.print(f"step {step:5d}  loss {loss:7.4f}  greedy accuracy {last:6.1%} of {len(held_out)} held out")
            if args.target_accuracy is not None and last >= args.target_accuracy:
                return step, last
        if agree(world, bool(stop.signum))[0] or step == args.max_steps:
            return step, last
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / args.warmup_steps)
        batch = sft.sample_batch(task.num_train, args.batch_size, seed=args.seed, step=step)
        loss = train_step(decoder, optimizer, [train_pair(i) for i in batch[world.rank::world.size]], world, args)
        progress.update(bar, advance=1, description=f"sft  loss {loss:.3f}  accuracy {last:.1%}")


def main(argv: list[str] | None = None) -> int:
    args, stop = parse(argv), StopRequest()
    sft.check_replaceable(args.out)
    world = init_world(threads=args.threads, deadline_s=600)
    with tempfile.TemporaryDirectory() as scratch:
        like = args.model
        if args.make_tiny:
            like = Path(scratch)
            write_directory(like, TINY_CONFIG)
        decoder = build_decoder(read_config(like))
        decoder = random_weights(decoder, seed=args.seed) if args.random_init else load_weights(decoder, like, dtype=torch.float32)
        console = Console(quiet=world.rank > 0, highlight=False)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            steps, last = train(decoder.to(world.device), args, world, load_tokenizer(like), stop, progress)
        if world.rank == 0:
            sft.save_directory(decoder, like, args.out, getattr(torch, args.dtype))
    missed = args.target_accuracy is not None and not last >= args.target_accuracy
    why = f"stopped by {signal.Signals(stop.signum).name}" if stop.signum else "target not reached" if missed else "done"
    console.print(f"{why} after {steps} steps: {args.out}, greedy accuracy {last:.1%} when last measured")
    dist.destroy_process_group()
    return 128 + stop.signum if stop.signum else int(missed)


if __name__ == "__main__":
    sys.exit(main())
