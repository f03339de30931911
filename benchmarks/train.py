"""Training tokens per second: our trainer's step against the machine's GEMMs, and against TRL's on
uneven lengths, in one run.

    python benchmarks/train.py --model DIR [--dtype bfloat16,float32] [--json FILE]
                               [--against trl --trl-python V/bin/python]

medium   a random 12.6 M-parameter Llama of the peer's preset (--peer, beside the repository;
         skipped where it is absent)
model    the Hugging Face directory of --model (skipped without one)

even     4 microbatches of 512 packed tokens (8,192 on a GPU), then the optimizer's step. Model
         FLOPs (6 a weight and token, the head's for labels alone, causal attention's by half) a
         second, against the rate of the same products by themselves: every shape of the model
         forward and both ways backward, at its share of the FLOPs.
uneven   groups of 8 completions of log-normal lengths (sigma 1, at most 8 times the median) behind
         prompts of 32 tokens, in microbatches of 4 times the longest sequence. Padding is that of
         1,024 such completions. Tokens are those of prompts and completions, a prompt once a
         completion. TRL's step is GRPOTrainer's own loss, its backward and AdamW on the same
         tokens, padded as TRL pads a generation batch; `trimmed`: cut to the longest of each of its
         microbatches, which TRL does not do.

Contestants take turns within each of --repeats rounds, and medians are given. --cpu-time counts the
processes' CPU seconds instead of the clock's: for one thread on a machine that others use. Peak
memory is the process's largest resident set in its own steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
from running import ROOT, machine

PROMPT = 32
GROUP = 8
MICRO_TRL = 8
EVEN = (4, 512)  # microbatches, tokens of each
EVEN_GPU = (4, 8192)
GEMM_FLOPS = 1.0e10  # of each product that is timed
clock = time.perf_counter


def seconds(work: Callable[[], object]) -> float:
    began = clock()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - began


def peak_mib(since_reset: bool = False) -> float:
    """Largest resident set of this process, in MiB, and of what came after the last reset where the
    system can tell.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if since_reset:
        Path("/proc/self/clear_refs").write_text("5")
    return (
        next(
            int(line.split()[1])
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM")
        )
        / 1024
    )


# --- Data: the same groups for both ---


def group_of(ticket: int, lengths: list[int], vocab: int, prompt: int = PROMPT):
    from llamarl.types import Group

    draw = torch.Generator().manual_seed(ticket)
    total, size = sum(lengths), len(lengths)
    ids = torch.randint(4, vocab, (prompt + total,), generator=draw)
    rewards = (torch.arange(size) % 2).float() if size > 1 else torch.ones(1)
    return Group(
        ticket=ticket,
        prompt_ids=ids[:prompt],
        lengths=torch.tensor(lengths),
        token_ids=ids[prompt:],
        generator_logprobs=torch.full((total,), -math.log(vocab)),
        policy_versions=torch.zeros(total, dtype=torch.long),
        ref_logprobs=torch.empty(0),
        rewards=rewards,
        finish_reasons=("stop",) * size,
        outcomes=("score",) * size,
    )


def even_size() -> tuple[int, int]:
    """Microbatches of a step, and the tokens of each."""
    return EVEN_GPU if torch.cuda.is_available() else EVEN


def even_groups(vocab: int) -> list:
    """Each fills a microbatch: two completions, so that they have advantages."""
    count, tokens = even_size()
    first = (tokens - PROMPT + 2) // 2
    return [group_of(i, [first, tokens - PROMPT + 2 - first], vocab) for i in range(count)]


def uneven_groups(vocab: int, completions: int, median: int) -> list:
    noise = torch.randn(completions, generator=torch.Generator().manual_seed(0))
    lengths = (median * noise.exp()).clamp(1, 8 * median).long().tolist()
    return [
        group_of(i, lengths[i * GROUP : (i + 1) * GROUP], vocab)
        for i in range(completions // GROUP)
    ]


# --- Ours: the trainer executor itself, alone ---


def our_step(
    model: Path, dtype: str, budget: int, groups: list, made_by: str = "auto"
) -> Callable[[], None]:
    from executors.build_trainer import build_trainer
    from llamarl.comm.groups import World
    from llamarl.config.command_line import compose_config
    from llamarl.executor import ExecutorGroup
    from llamarl.launch.job import Job
    from llamarl.launch.run_directory import RunDirectory
    from llamarl.machine.allocator import keep_freed_memory
    from llamarl.types import Policy

    overrides = [
        "model=hf",
        f"model.path={model}",
        f"model.implementation={made_by}",
        "model.dtype=float32",
        f"trainer.compute_dtype={dtype}",
        f"trainer.microbatch_tokens={budget}",
        "trainer.skip_zero_advantage=false",
        "lr=1e-6",
        "eval.every=0",
        "checkpoint.every=0",
    ]
    keep_freed_memory()  # as every job does when it starts
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    nothing = SimpleNamespace(bind=lambda *_: None)
    config = compose_config(overrides)
    trainer = build_trainer(config, Job(config, World(0, 1, device), RunDirectory(Path(), None)))
    world = torch.distributed.group.WORLD
    trainer.attach(
        ExecutorGroup("trainer", (0,), 0, device, world, shard_group=world),
        [],
        [(Policy, nothing)],
        *[nothing] * 4,
    )
    trainer.setup()
    return lambda: trainer._update.run(groups, 1, lambda: False)


def padding(groups: list, budget: int) -> dict[str, float]:
    """Unused shares: of microbatches of single sequences by Magistral's order; of those that we
    make; and within attention.
    """
    from llamarl.learning.collation import collate
    from llamarl.learning.packing import pack
    from llamarl.learning.targets import Targets
    from llamarl.models.attention import PackedAttention

    sequences = []
    for group in groups:
        prompt = group.prompt_ids.numel()
        sequences += [prompt + n - 1 for n in group.lengths.tolist()]
    bins = collate(sequences, budget)
    packing = pack(
        groups,
        [Targets.of(g, torch.ones_like(g.rewards)) for g in groups],
        budget_tokens=budget,
        skip_zero_advantage=False,
    )
    sizes = [batch.input_ids.numel() for batch in packing.microbatches]
    padded = sum(
        PackedAttention(b.cu_seqlens, b.parents).padded_tokens for b in packing.microbatches
    )
    return {
        "microbatches": len(sizes),
        "greedy": 1 - sum(sequences) / (len(bins) * budget),
        "ours": packing.unused_budget_fraction,
        "attention": 1 - sum(sizes) / padded,
        "prompts_shared": 1 - sum(sizes) / sum(sequences),
    }


def flops(config, groups: list) -> float:
    """Of forward and backward over these groups, as the trainer computes them: a prompt once a
    group.
    """
    c, total = config, 0.0
    heads = c.num_attention_heads * c.head_dim
    layer = c.hidden_size * (
        2 * heads + 2 * c.num_key_value_heads * c.head_dim + 3 * c.intermediate_size
    )
    for group in groups:
        prompt, lengths = group.prompt_ids.numel(), group.lengths.tolist()
        tokens = prompt + sum(n - 1 for n in lengths)
        seen = prompt**2 / 2 + sum(n * prompt + n**2 / 2 for n in lengths)  # pairs of query and key
        total += 6 * tokens * c.num_hidden_layers * layer + 6 * c.vocab_size * c.hidden_size * sum(
            lengths
        )
        total += 12 * seen * heads * c.num_hidden_layers
    return total


def gemm_rate(config, dtype: torch.dtype, tokens: int) -> Callable[[], float]:
    """A function that measures FLOP/s of the model's own linear products, forward and backward, by
    themselves.
    """
    c = config
    heads = c.num_attention_heads * c.head_dim
    kv = c.num_key_value_heads * c.head_dim
    shapes = {}  # (inputs, outputs) -> how many of them the model has
    per_layer = [
        (c.hidden_size, heads),
        (c.hidden_size, kv),
        (c.hidden_size, kv),
        (heads, c.hidden_size),
    ]
    per_layer += [(c.hidden_size, c.intermediate_size)] * 2 + [(c.intermediate_size, c.hidden_size)]
    for shape in per_layer:
        shapes[shape] = shapes.get(shape, 0) + c.num_hidden_layers
    shapes[c.hidden_size, c.vocab_size] = 1
    work = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for (k, n), count in shapes.items():
        sizes = ((tokens, k), (n, k), (tokens, n))
        x, w, g = (torch.randn(size, dtype=dtype, device=device) for size in sizes)
        for a, b in ((x, w.T), (g, w), (g.T, x)):
            out = torch.mm(a, b)
            times = max(1, round(GEMM_FLOPS / (2 * tokens * k * n)))
            work.append((a, b, out, times, count, 2.0 * tokens * k * n))

    def many(a, b, out, times):
        for _ in range(times):
            torch.mm(a, b, out=out)

    def measure() -> float:
        spent = sum(
            seconds(lambda: many(a, b, out, times)) / times * count
            for a, b, out, times, count, _ in work
        )
        return sum(count * f for *_, count, f in work) / spent

    return measure


# --- TRL: a worker in its own interpreter, which takes turns with us ---


class Trl:
    """benchmarks/train_trl.py, started with the same tokens. step(): seconds of one of its training
    steps.
    """

    def __init__(
        self, args: argparse.Namespace, model: Path, dtype: str, groups: list, folder: Path
    ):
        rows = []
        for g in groups:
            completions = g.token_ids.split(g.lengths.tolist())
            for ids, reward in zip(completions, g.rewards.tolist()):
                row = {
                    "prompt": g.prompt_ids.tolist(),
                    "completion": ids.tolist(),
                    "advantage": reward - g.rewards.mean().item(),
                }
                rows.append(row)
        data = folder / "rows.json"
        data.write_text(json.dumps(rows))
        command = [
            args.trl_python,
            str(ROOT / "benchmarks" / "train_trl.py"),
            "--model",
            str(model),
            "--dtype",
            dtype,
        ]
        command += ["--rows", str(data), "--micro", str(MICRO_TRL), "--threads", str(args.threads)]
        self._log = open(folder / "trl.log", "w+")  # noqa: SIM115 - as long as the worker
        self._worker = subprocess.Popen(
            command + ["--cpu-time"] * args.cpu_time,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.ready = self._answer()

    def ask(self, word: str) -> dict:
        self._worker.stdin.write(word + "\n")
        self._worker.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        for line in self._worker.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self._log.seek(0)
        raise RuntimeError("TRL's worker ended:\n" + self._log.read()[-2000:])

    def close(self) -> None:
        self._worker.stdin.close()
        self._worker.wait(60)
        self._log.close()


# --- Measuring ---


def measure_even(model: Path, dtype: str, args: argparse.Namespace) -> dict:
    from llamarl.models.config import read_config

    config = read_config(model)
    groups = even_groups(config.vocab_size)
    step, gemm = (
        our_step(model, dtype, even_size()[1], groups),
        gemm_rate(config, getattr(torch, dtype), even_size()[1]),
    )
    seconds(step), gemm()
    peak_mib(since_reset=True)
    rows = [(seconds(step), gemm()) for _ in range(args.repeats)]
    took = statistics.median(s for s, _ in rows)
    work = flops(config, groups)
    count, size = even_size()
    tokens = count * size
    return {
        "tokens_per_s": tokens / took,
        "step_s": took,
        "model_gflops": work / took / 1e9,
        "gemm_gflops": statistics.median(rate for _, rate in rows) / 1e9,
        "of_gemm_rate": statistics.median(work / s / rate for s, rate in rows),
        "peak_mib": peak_mib(),
    }


def lengths_with_prompts(groups: list) -> list[int]:
    """Tokens of each sequence of these groups."""
    sequences = []
    for group in groups:
        sequences += [PROMPT + n for n in group.lengths.tolist()]
    return sequences


def measure_uneven(model: Path, dtype: str, args: argparse.Namespace) -> dict:
    from llamarl.models.config import read_config

    groups = uneven_groups(read_config(model).vocab_size, args.completions, args.median)
    sequences = lengths_with_prompts(groups)
    budget, tokens = 4 * max(sequences), sum(sequences)
    step = our_step(model, dtype, budget, groups)
    with tempfile.TemporaryDirectory() as folder:
        trl = Trl(args, model, dtype, groups, Path(folder)) if args.trl_python else None
        words = ("step", "trimmed") if trl else ()
        seconds(step), [trl.ask(word) for word in words]
        peak_mib(since_reset=True)
        rows = []
        for _ in range(args.repeats):
            ours = seconds(step)
            rows.append((ours, *(trl.ask(word)["s"] for word in words)))
        many = uneven_groups(read_config(model).vocab_size, 1024, args.median)
        most = 4 * max(lengths_with_prompts(many))
        out = {"tokens": tokens, "longest": max(sequences), "padding": padding(many, most)}
        out |= {
            "tokens_per_s": tokens / statistics.median(row[0] for row in rows),
            "peak_mib": peak_mib(),
        }
        for i, word in enumerate(words, start=1):
            name = "trl" if word == "step" else f"trl_{word}"
            out[f"{name}_tokens_per_s"] = tokens / statistics.median(row[i] for row in rows)
            ratios = [row[i] / row[0] for row in rows]
            out[f"over_{name}"] = statistics.median(ratios)
            out[f"over_{name}_range"] = [min(ratios), max(ratios)]
        if trl:
            out |= {"trl_peak_mib": trl.ask("peak")["mib"], "trl": trl.ready}
            trl.close()
    return out


def medium_model(peer: Path, out: Path) -> Path | None:
    """The peer's medium preset with random weights; None if the peer is not at hand."""
    file = peer / "common.py"
    if not file.is_file():
        return None
    from make_tiny import TINY_CONFIG, write_directory
    from random_weights import random_weights

    from llamarl.models.build import build_decoder, read_config
    from llamarl.models.hf import export, named_parameters_hf

    spec = importlib.util.spec_from_file_location("peer_common", file)
    common = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    layers, hidden, inner, heads, kv = common.PRESETS["medium"]
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": hidden // heads,
    }
    like = out / "like"
    write_directory(like, TINY_CONFIG | sizes)
    decoder = random_weights(build_decoder(read_config(like)), seed=0)
    export(named_parameters_hf(decoder), like, out / "medium", dtype=torch.float32)
    return out / "medium"


def times_of(found: dict, name: str) -> str:
    """A ratio's median and range over the repeats."""
    least, most = found[f"{name}_range"]
    return f"{found[name]:.2f} x ({least:.2f} to {most:.2f})"


def show(name: str, dtype: str, even: dict, uneven: dict | None) -> None:
    print(
        f"{name:8} {dtype:9} even    {even['tokens_per_s']:7.0f} tok/s   "
        f"{even['model_gflops']:4.0f} of {even['gemm_gflops']:4.0f} GFLOP/s: "
        f"{even['of_gemm_rate']:.0%} of the GEMM rate   peak {even['peak_mib']:.0f} MiB"
    )
    if uneven is None:
        return
    pad = "   ".join(f"{k} {v:.1%}" for k, v in uneven["padding"].items() if k != "microbatches")
    print(
        f"{'':18} uneven  {uneven['tokens_per_s']:7.0f} tok/s   "
        f"peak {uneven['peak_mib']:.0f} MiB   padding: {pad}"
    )
    if "over_trl" in uneven:
        times, trimmed = (times_of(uneven, name) for name in ("over_trl", "over_trl_trimmed"))
        print(
            f"{'':18} TRL     {uneven['trl_tokens_per_s']:7.0f} tok/s: ours is {times}, "
            f"and {trimmed} if it trimmed its microbatches   peak {uneven['trl_peak_mib']:.0f} MiB"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="a Hugging Face directory")
    add("--peer", type=Path, default=ROOT.parent / "shared" / "peer")
    add("--dtype", default="bfloat16,float32")
    add("--even-only", action="store_true")
    add("--against", default="", choices=("", "trl"))
    add("--trl-python", help="the interpreter that TRL is installed in")
    add("--completions", type=int, default=64)
    add("--median", type=int, default=64, help="of the log-normal lengths")
    add("--repeats", type=int, default=3)
    add("--threads", type=int, default=1)
    add("--cpu-time", action="store_true")
    add("--json", type=Path)
    args = parser.parse_args()
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time needs --threads 1: threads that wait burn CPU seconds too")
    if args.against and not args.trl_python:
        parser.error("--against trl needs --trl-python, the interpreter that TRL is installed in")
    if not args.against:
        args.trl_python = None
    return args


def main() -> None:
    global clock
    args = arguments()
    clock = time.process_time if args.cpu_time else time.perf_counter
    sys.path.insert(0, str(ROOT))
    from llamarl.comm.groups import init_world

    world = init_world(threads=args.threads, timeout_s=600, reproducible=True)
    print(f"float32 {world.products}")
    result = {
        "benchmark": "train",
        "threads": args.threads,
        "cpu_time": args.cpu_time,
        "repeats": args.repeats,
        "completions": args.completions,
        "float32": str(world.products),
        "machine": machine(),
        "models": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        models = {"medium": medium_model(args.peer, Path(scratch)), "model": args.model}
        for name, path in models.items():
            if path is None:
                print(
                    f"{name:8} skipped: "
                    + (f"no {args.peer}" if name == "medium" else "no --model")
                )
                continue
            for dtype in args.dtype.split(","):
                even = measure_even(path, dtype, args)
                uneven = None if args.even_only else measure_uneven(path, dtype, args)
                result["models"].setdefault(path.name, {})[dtype] = {"even": even, "uneven": uneven}
                show(path.name, dtype, even, uneven)
    torch.distributed.destroy_process_group()
    print(
        f"{args.threads} threads, medians (and ranges) of {args.repeats} repeats, "
        f"machine {result['machine']}"
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
