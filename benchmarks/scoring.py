"""Completions scored per second: our scorer, and transformers padded in batches, in one run on one
machine.

    python benchmarks/scoring.py --model DIR [--prompts 16] [--group 8] [--dtype float32]
    [--threads N] [--steps N] [--json FILE]

What is scored is a batch of RL: groups of completions of one prompt, with prompts and completions
of log-normal lengths (--prompt-tokens and --completion-tokens are the medians, twice of which is
about the 84th percentile; none is over 8 times as long). DIR is a ...ForSequenceClassification
directory; of a language model's, a scorer with a random head is made for the time of the run.
transformers gets the same sequences in batches of --batch, right-padded, in the order in which they
came, and also sorted by length, which is the best that padding can do; the fastest of the batch
sizes counts. Each figure is the median of --repeats runs, taken in turn, so that a busy minute of
the machine falls on all. The scores are compared.

With --steps the main job is run too, synchronous on two ranks of one thread, with DIR as its policy
and a scorer of the same size as its reward: how much of a step the scorer takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
from running import machine, run_job
from torch import Tensor

from llamarl.executor import ExecutorGroup
from llamarl.machine.precision import use_float32_products
from llamarl.models.config import read_config
from llamarl.models.hf import export, named_parameters_hf
from llamarl.models.loading import training_decoder
from llamarl.models.scorer import scorer_fields
from llamarl.scoring.kinds.model import ModelKindSettings
from llamarl.scoring.sharded import ScoreRequest, ShardedScorer, pack_scored

SPREAD = 0.7  # of the logarithm of lengths
LONGEST = 8  # times the median
FIRST_TOKEN = 4  # tokens below it mean something to many tokenizers


def scorer_of(model: Path, folder: Path) -> Path:
    """The directory, or that of a scorer made of its language model."""
    if read_config(model).labels:
        return model
    cpu = torch.device("cpu")
    made = training_decoder(model, mesh=None, device=cpu, compute_dtype=torch.float32, score_seed=0)
    fields = scorer_fields(made.config, model)
    export(named_parameters_hf(made), model, folder, dtype=torch.float32, fields=fields)
    return folder


def drawn(args: argparse.Namespace, vocab: int) -> list[ScoreRequest]:
    """The batch."""
    draw = torch.Generator().manual_seed(args.seed)

    def tokens(median: int) -> Tensor:
        stretch = float(torch.randn((), generator=draw).mul(SPREAD).exp().clamp(max=LONGEST))
        length = max(1, round(median * stretch))
        return torch.randint(FIRST_TOKEN, vocab, (length,), generator=draw)

    batch = []
    for _ in range(args.prompts):
        completions = [tokens(args.completion_tokens) for _ in range(args.group)]
        batch.append(ScoreRequest(tokens(args.prompt_tokens), tuple(completions)))
    return batch


def ours(args: argparse.Namespace, path: Path, asked: list[ScoreRequest]) -> Callable[[], Tensor]:
    alone = ExecutorGroup("reward", (0,), 0, torch.device(args.device))
    settings = ModelKindSettings(
        kind="model",
        path=str(path),
        label=None,
        dtype=args.dtype,
        microbatch_tokens=args.microbatch_tokens,
        scale=1.0,
        shift=0.0,
    )
    scorer = ShardedScorer(settings, alone)
    return lambda: scorer.scores(asked)


def padded(
    args: argparse.Namespace,
    model: torch.nn.Module,
    asked: list[ScoreRequest],
    size: int,
    by_length: bool,
) -> Callable[[], Tensor]:
    """transformers' scores in batches of `size`."""
    sequences = []
    for one in asked:
        sequences += [torch.cat([one.prompt_ids, completion]) for completion in one.completions]
    order = list(range(len(sequences)))
    if by_length:
        order.sort(key=lambda i: len(sequences[i]))
    pad = model.config.pad_token_id

    @torch.inference_mode()
    def run() -> Tensor:
        scores_N = torch.empty(len(sequences))
        for first in range(0, len(order), size):
            places = order[first : first + size]
            chosen = [sequences[i] for i in places]
            ids = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=pad)
            mask = torch.zeros_like(ids)
            for row, tokens in enumerate(chosen):
                mask[row, : len(tokens)] = 1
            ids, mask = ids.to(args.device), mask.to(args.device)
            logits_NC = model(input_ids=ids, attention_mask=mask).logits
            scores_N[places] = logits_NC[:, 0].float().cpu()
        return scores_N

    return run


def seconds(work: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measured(args: argparse.Namespace, path: Path) -> dict[str, object]:
    """Seconds of each contestant, and how far apart the scores lie."""
    from transformers import AutoModelForSequenceClassification

    asked = drawn(args, read_config(path).vocab_size)
    theirs = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=getattr(torch, args.dtype), trust_remote_code=False
    )
    theirs = theirs.to(args.device).eval()
    contestants = {"ours": ours(args, path, asked)}
    for size in args.batch:
        contestants[f"transformers, batches of {size}"] = padded(args, theirs, asked, size, False)
        contestants[f"transformers, batches of {size} by length"] = padded(
            args, theirs, asked, size, True
        )
    scores = {name: work() for name, work in contestants.items()}  # which warms up, too
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(args.repeats):
        for name, work in contestants.items():
            taken[name].append(seconds(work))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    theirs_s = {name: s for name, s in medians.items() if "transformers" in name}
    as_they_come = min(s for name, s in theirs_s.items() if "by length" not in name)
    packed = pack_scored(asked, budget_tokens=args.microbatch_tokens)
    apart = [(scores["ours"] - scores[name]).abs().max().item() for name in theirs_s]
    tokens = 0
    for one in asked:
        tokens += sum(one.prompt_ids.numel() + c.numel() for c in one.completions)
    return {
        "sequences": args.prompts * args.group,
        "tokens": tokens,
        "tokens_packed": sum(batch.input_ids.numel() for batch in packed),
        "seconds": medians,
        "ratio": as_they_come / medians["ours"],
        "ratio_by_length": min(theirs_s.values()) / medians["ours"],
        "scores_apart": max(apart),
    }


def share_of_steps(args: argparse.Namespace, scorer: Path, run_dir: Path) -> dict[str, float]:
    """Medians of a step's seconds, and of those in which the scorer worked, after the first."""
    overrides = [
        "model=hf",
        f"model.path={args.model.absolute()}",
        "reward=model",
        f"reward.path={scorer.absolute()}",
        f"reward.dtype={args.dtype}",
        f"model.dtype={args.dtype}",
        f"trainer.compute_dtype={args.dtype}",
        "task=questions",
        f"groups_per_step={args.prompts}",
        f"group_size={args.group}",
        f"max_new_tokens={args.completion_tokens}",
        f"max_steps={args.steps + 1}",
        "max_lag=0",
        "eval.every=0",
        "checkpoint.every=0",
        "threads=1",
    ]
    rows = [row for row in run_job(run_dir, overrides) if row["step"] > 1]
    step_s = statistics.median(row["time/step_s"] for row in rows)
    scorer_s = statistics.median(row["reward/model/seconds"] for row in rows)
    return {"step_s": step_s, "scorer_s": scorer_s, "share": scorer_s / step_s}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8, help="completions a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="median")
    parser.add_argument("--completion-tokens", type=int, default=48, help="median")
    parser.add_argument("--microbatch-tokens", type=int, default=4096, help="of ours")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32], help="of transformers")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="of the main job; 0: without it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    use_float32_products(reproducible=True)
    with tempfile.TemporaryDirectory() as folder:
        scorer = scorer_of(args.model, Path(folder) / "scorer")
        found = measured(args, scorer)
        if args.steps:
            found["job"] = share_of_steps(args, scorer, Path(folder) / "run")
    print(
        f"{found['sequences']} sequences of {found['tokens']:,} tokens, packed "
        f"{found['tokens_packed']:,}; {args.dtype}, {torch.get_num_threads()} thread(s)"
    )
    for name, value in found["seconds"].items():
        print(f"{name:<40} {value:8.3f} s   {found['sequences'] / value:8.1f} a second")
    print(
        f"ratio {found['ratio']:.2f}; {found['ratio_by_length']:.2f} to the best of all; "
        f"scores {found['scores_apart']:.1e} apart"
    )
    if "job" in found:
        job = found["job"]
        print(
            f"a step of the main job {job['step_s']:.2f} s, of which the scorer "
            f"{job['scorer_s']:.2f} s, {job['share']:.1%}"
        )
    if args.json:
        named = vars(args) | {"model": args.model.name}  # and not where it lies
        settings = {name: str(value) for name, value in named.items() if name != "json"}
        args.json.write_text(
            json.dumps({"machine": machine(), "settings": settings, **found}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
