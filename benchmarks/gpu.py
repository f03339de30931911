"""Everything that only a GPU can show, in one command and 25 minutes: the tests, and what decoding,
fp8, an update, weight sync, offload and the default job come to.

    python benchmarks/gpu.py [--out FOLDER] [--stages tests,decode,...] [--rehearse]

Stages run one after another, each in processes of its own and within its own time limit; one that
fails or takes too long is written down as such, and the next one runs. FOLDER (benchmarks/results)
gets a page and all figures, both called gpu, anew after each stage. Stages that --stages leaves out
stay there as they were, each with the machine that it ran on.

    tests      pytest -m gpu; in a rehearsal on the GPU that is not there (tests/imagined_gpu.py),
               without those that start jobs
    decode     tokens/s with and without CUDA graphs, over the bound of reading weights and cache at
               the copy bandwidth (benchmarks/decode.py)
    fp8        the same with fp8 products
    update     model FLOPs a second of the trainer's step, over those of its own products, and over
               the peak of the GPU's sheet, if there is one (benchmarks/train.py)
    weights    trainer to generator by CUDA IPC, over two copies; by NCCL where there are two GPUs,
               which it needs (benchmarks/weight_sync.py)
    offload    seconds a step when trainer and generator take turns in the GPU's memory, and when
               the trainer stays in host memory, over those of both side by side
    job        the default job on two ranks: held-out accuracy, seconds

Without CUDA it says so and ends with 2. --rehearse runs every stage on the CPU instead, tiny: a
rehearsal of this file, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
from running import ROOT, as_paragraph, machine, run_job, run_process

BENCHMARKS = ROOT / "benchmarks"
TINY_MODEL = ROOT / "llamarl" / "models" / "tiny"
TOTAL_S = 25 * 60.0
NO_GPU = 2  # exit status
NO_DEVICE = "none"  # the GPU's name in a rehearsal
# 1.1 billion weights: a model whose products fill a GPU, and whose training state fits its memory.
SIZES = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
# In --rehearse, limits of a stage are so many times as long: a CPU that others use may be slow.
PATIENCE = 2.0

Figures = dict[str, object]


class Skipped(Exception):
    """A stage, or a part of one, that this machine cannot run."""


@dataclass(frozen=True)
class Setup:
    """What all stages are given."""

    scratch: Path
    rehearse: bool
    limit_s: float  # of the stage

    def benchmark(self, name: str, *options: str) -> dict:
        """Run one of the benchmarks and return its JSON. RuntimeError with its last words."""
        found = self.scratch / f"{time.monotonic_ns()}.json"
        command = [sys.executable, str(BENCHMARKS / name), *options, "--json", str(found)]
        done = run_process(command, timeout_s=self.limit_s)
        if done.timed_out:
            raise RuntimeError(f"{name} took longer than {self.limit_s:.0f} s")
        if done.status:
            raise RuntimeError(f"{name} ended with {done.status}:\n{done.last_lines()}")
        return json.loads(found.read_text())

    def model(self) -> Path:
        """A directory of random weights, with the tiny model's tokenizer; made once."""
        folder = self.scratch / "model"
        if not folder.exists():
            sizes = {} if self.rehearse else SIZES
            # A CPU without instructions for bfloat16 takes minutes over it.
            dtype = torch.float32 if self.rehearse else torch.bfloat16
            write_model(folder, sizes, dtype)
        return folder


def write_model(folder: Path, sizes: dict, dtype: torch.dtype) -> None:
    """Write a directory of random weights: the tiny model's, but for these sizes."""
    from make_tiny import TINY_CONFIG
    from random_weights import random_weights

    from llamarl.models.build import build_decoder, read_config
    from llamarl.models.hf import export, named_parameters_hf

    like = folder.with_name("like")
    like.mkdir()
    for file in TINY_MODEL.glob("tokenizer*.json"):
        shutil.copyfile(file, like / file.name)
    (like / "config.json").write_text(json.dumps(TINY_CONFIG | sizes))
    decoder = random_weights(build_decoder(read_config(like), dtype=dtype), seed=0)
    export(named_parameters_hf(decoder), like, folder, dtype=dtype)


# --- Stages ---


def tests(setup: Setup) -> Figures:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "gpu", "-q", "-rA", "tests/gpu"]
    if setup.rehearse:
        command += ["-p", "tests.imagined_plugin"]
    done = run_process(command, timeout_s=setup.limit_s)
    last = done.output.splitlines()[-1] if done.output else ""
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.output, re.MULTILINE)
    figures: Figures = {**counts, "names_of_failed": failed}
    if done.timed_out:
        raise Failed(f"not over after {setup.limit_s:.0f} s", figures)
    if done.status:
        raise Failed(f"pytest ended with {done.status}: {last}", figures)
    return figures


def decode(setup: Setup) -> Figures:
    figures: Figures = {}
    for name, options in (("graphs", ()), ("no graphs", ("--no-graphs",))):
        figures |= decoded(setup, name, *options)
    return figures


def fp8(setup: Setup) -> Figures:
    if not setup.rehearse and torch.cuda.get_device_capability() < (8, 9):
        raise Skipped("fp8 products need compute capability 8.9")
    return decoded(setup, "fp8", "--quantize", "fp8")


def decoded(setup: Setup, name: str, *options: str) -> Figures:
    """Tokens/s of decoding at each batch, and their share of the bound."""
    batches = "2" if setup.rehearse else "1,32,128"
    tokens = "8" if setup.rehearse else "256"
    usual = ["--model", str(setup.model()), "--against", "", "--batch", batches]
    found = setup.benchmark("decode.py", *usual, "--new-tokens", tokens, *options)
    figures: Figures = {}
    for batch, rates in found["tokens_per_s"].items():
        figures[f"{name}, batch {batch}: tokens/s"] = rates["engine"]
        figures[f"{name}, batch {batch}: of the bandwidth"] = rates["engine"] / rates["bound"]
    return figures


def update(setup: Setup) -> Figures:
    dtype = "float32" if setup.rehearse else "bfloat16"
    options = ["--model", str(setup.model()), "--even-only", "--dtype", dtype]
    # Without the peer's preset.
    options += ["--peer", str(setup.scratch / "none"), "--repeats", "1" if setup.rehearse else "5"]
    found = setup.benchmark("train.py", *options)
    (by_dtype,) = found["models"].values()
    even = by_dtype[dtype]["even"]
    figures: Figures = {
        "tokens/s": even["tokens_per_s"],
        "TFLOP/s": even["model_gflops"] / 1e3,
        "of its own products": even["of_gemm_rate"],
    }
    peak = peak_flops()
    if peak:
        figures["MFU"] = even["model_gflops"] * 1e9 / peak
    return figures


def peak_flops() -> float | None:
    """Return the maker's bfloat16 FLOP/s, if a hardware profile has the GPU's name."""
    import yaml

    if not torch.cuda.is_available():
        return None
    words = set(torch.cuda.get_device_name().split())
    for file in sorted((ROOT / "llamarl" / "planner" / "profiles").glob("*.yaml")):
        profile = yaml.safe_load(file.read_text())
        if file.stem.upper() in words and profile["device"]["kind"] == "gpu":
            return float(profile["device"]["flops"]["bfloat16"])
    return None


def weights(setup: Setup) -> Figures:
    if setup.rehearse:
        return synced(setup, "tiny", "shm") | synced(setup, "tiny", "gloo")
    figures = synced(setup, "smollm2-bf16,1b", "cuda_ipc")
    if torch.cuda.device_count() < 2:
        return figures | {"nccl": "skipped: it joins no two ranks on one GPU"}
    return figures | synced(setup, "smollm2-bf16,1b", "nccl")


def synced(setup: Setup, models: str, transport: str) -> Figures:
    """GB/s of weight sync by one transport, and its share of two copies."""
    options = ["--models", models, "--topologies", "1 -> 1", "--transports", transport]
    found = setup.benchmark("weight_sync.py", *options, "--repeats", "1" if setup.rehearse else "7")
    figures: Figures = {}
    for row in found["rows"]:
        where = f"{row['model']} by {transport}"
        figures[f"{where}: GB/s"] = row["gb_per_s"]
        figures[f"{where}: of the limit"] = row["of_limit"]
    return figures


def offload(setup: Setup) -> Figures:
    turns = ["placement.colocate=[trainer,generator]", "offload=true"]
    kinds = {"side by side": [], "in turns": turns}
    if not setup.rehearse:  # a trainer on a CPU is in host memory already
        kinds["trainer in host memory"] = ["trainer.cpu_offload=true"]
    steps = 3 if setup.rehearse else 12
    medians: dict[str, float] = {}
    for name, overrides in kinds.items():
        common = [f"max_steps={steps}", "max_lag=0", "eval.every=0", "checkpoint.every=0"]
        common += small(setup)
        folder = setup.scratch / name.replace(" ", "-")
        rows = run_job(folder, [*common, *overrides], ranks=1, timeout_s=setup.limit_s)
        times = [row["time/step_s"] for row in rows if row["step"] > 1]
        medians[name] = statistics.median(times)
    figures: Figures = {f"{name}: s a step": took for name, took in medians.items()}
    for name, took in medians.items():
        figures[f"{name}: over side by side"] = took / medians["side by side"]
    return figures


def job(setup: Setup) -> Figures:
    overrides = ["checkpoint.every=0"]
    if setup.rehearse:
        overrides += ["max_steps=2", "eval.every=2", "eval.num_prompts=4", *small(setup)]
    rows = run_job(setup.scratch / "job", overrides, ranks=2, timeout_s=setup.limit_s)
    last = [row for row in rows if row.get("eval/accuracy") is not None][-1]
    times = [row["time/step_s"] for row in rows if row["step"] > 1]
    return {
        "held-out accuracy": last["eval/accuracy"],
        "steps": rows[-1]["step"],
        "s": rows[-1]["time/wall_s"],
        "s a step": statistics.median(times),
    }


def small(setup: Setup) -> list[str]:
    """Settings of a tiny batch, in a rehearsal."""
    return ["groups_per_step=2", "group_size=2"] if setup.rehearse else []


# Name -> what runs, and for how many seconds at most; in all TOTAL_S.
STAGES: dict[str, tuple[Callable[[Setup], Figures], float]] = {
    "tests": (tests, 420.0),
    "decode": (decode, 240.0),
    "fp8": (fp8, 150.0),
    "update": (update, 180.0),
    "weights": (weights, 180.0),
    "offload": (offload, 150.0),
    "job": (job, 180.0),
}


# --- Running them ---


class Failed(RuntimeError):
    """A stage that failed after it had found something."""

    def __init__(self, why: str, figures: Figures):
        super().__init__(why)
        self.figures = figures


@dataclass(frozen=True)
class Outcome:
    """What came of a stage."""

    stage: str
    state: str  # done, failed or skipped
    seconds: float
    machine: dict
    figures: Figures = field(default_factory=dict)
    why: str = ""  # what failed, or why it was skipped


def run_stage(name: str, scratch: Path, on: dict, *, rehearse: bool, left_s: float) -> Outcome:
    """Run one stage on this machine, and say what came of it whatever that is."""
    stage, limit_s = STAGES[name]
    if rehearse:
        limit_s *= PATIENCE
    if left_s <= 0:
        return Outcome(name, "skipped", 0.0, on, why="the time for all stages was over")
    setup = Setup(scratch, rehearse, min(limit_s, left_s))
    began = time.monotonic()
    state = "done"
    figures: Figures = {}
    why = ""
    try:
        figures = stage(setup)
    except Skipped as reason:
        state = "skipped"
        why = str(reason)
    except Exception as error:  # the next stage is to run whatever this one met
        state = "failed"
        why = f"{type(error).__name__}: {error}"
        figures = getattr(error, "figures", {})
    return Outcome(name, state, time.monotonic() - began, on, figures, why)


def device() -> dict[str, str | int | float]:
    """The GPU by name, if there is one."""
    if not torch.cuda.is_available():
        return {"gpu": NO_DEVICE}
    about = torch.cuda.get_device_properties(0)
    return {
        "gpu": about.name,
        "gpus": torch.cuda.device_count(),
        "memory_gib": round(about.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }


def kept(out: Path, asked_for: list[str]) -> list[Outcome]:
    """What a GPU has made in the folder of stages that are not asked for."""
    file = out / "gpu.json"
    if not file.exists():
        return []
    outcomes = []
    for one in json.loads(file.read_text())["stages"]:
        outcome = Outcome(**one)
        is_rehearsed = outcome.machine["gpu"] == NO_DEVICE
        if outcome.stage in STAGES and outcome.stage not in asked_for and not is_rehearsed:
            outcomes.append(outcome)
    return outcomes


def write_down(out: Path, outcomes: list[Outcome], *, rehearse: bool) -> None:
    """Write the page and the figures of these outcomes, in the order of the stages."""
    order = list(STAGES)
    in_order = sorted(outcomes, key=lambda outcome: order.index(outcome.stage))
    result = {"stages": [asdict(outcome) for outcome in in_order]}
    (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "gpu.md").write_text(page(in_order, rehearse=rehearse))


def page(outcomes: list[Outcome], *, rehearse: bool) -> str:
    """The page of these outcomes."""
    title = "# A GPU"
    said = "Made by `benchmarks/gpu.py`; `gpu.json` has all figures."
    if rehearse:
        title = "# A rehearsal on a CPU"
        said += " The figures mean nothing: every stage ran tiny, to show that it runs."
    lines = [title, "", as_paragraph(said), ""]
    lines += ["| stage | on | state | s | |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        first = outcome.why.splitlines()[0] if outcome.why else ""
        shown = first.replace("|", "/")
        on = f"{outcome.machine['gpu']}, torch {outcome.machine['torch']}"
        cells = [outcome.stage, on, outcome.state, f"{outcome.seconds:.0f}", shown]
        lines.append("| " + " | ".join(cells) + " |")
    for outcome in outcomes:
        if outcome.figures:
            lines += ["", f"## {outcome.stage}", "", "| | |", "|---|---|"]
            for name, value in outcome.figures.items():
                lines.append(f"| {name} | {shown_value(name, value)} |")
    return "\n".join(lines) + "\n"


def shown_value(name: str, value: object) -> str:
    """A figure as the page has it: shares in per cent."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    is_share = " of the " in f" {name} " or "of its" in name or name in ("MFU", "held-out accuracy")
    if is_share:
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where the page goes (benchmarks/results)")
    parser.add_argument("--stages", default=",".join(STAGES), help="any of the default's")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny; needs --out")
    args = parser.parse_args()
    args.stages = args.stages.split(",")
    unknown = [name for name in args.stages if name not in STAGES]
    if unknown:
        parser.error(f"--stages {','.join(unknown)}: need some of {', '.join(STAGES)}")
    if args.rehearse and args.out is None:
        parser.error("--rehearse needs --out: its page must not be taken for a measured one")
    return args


def main() -> int:
    args = arguments()
    if args.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU that is there is not rehearsed on
    elif not torch.cuda.is_available():
        print("benchmarks/gpu.py: no CUDA here; --rehearse --out FOLDER runs it tiny on the CPU")
        return NO_GPU
    out = args.out or BENCHMARKS / "results"
    out.mkdir(parents=True, exist_ok=True)
    on = device() | machine()
    print(on, flush=True)
    # A rehearsal's figures are not to stand beside measured ones.
    outcomes = [] if args.rehearse else kept(out, args.stages)
    total_s = TOTAL_S * (PATIENCE if args.rehearse else 1.0)
    ends = time.monotonic() + total_s
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.stages:
            left_s = ends - time.monotonic()
            outcome = run_stage(name, Path(scratch), on, rehearse=args.rehearse, left_s=left_s)
            outcomes.append(outcome)
            print(f"{name:8} {outcome.state:8} {outcome.seconds:5.0f} s  {outcome.why}", flush=True)
            write_down(out, outcomes, rehearse=args.rehearse)
    asked_for = [outcome for outcome in outcomes if outcome.stage in args.stages]
    return 1 if any(outcome.state == "failed" for outcome in asked_for) else 0


if __name__ == "__main__":
    sys.exit(main())
