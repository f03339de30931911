"""Make a hardware profile from the rows of runs.

    profile = fit_runs([Path("runs/a"), Path("runs/b")], read_profile("h100"), Lengths(100))

A synchronous run of ten steps is a probe: nothing overlaps, so its rows say how long each part of a
step takes. Each run gives one point of each curve, the median of its rows after the first fifth.
Runs of several batch sizes give curves: eta_t(b) and eta_g(b) of LlamaRL's figure 5. If any of the
runs is synchronous, the others are left out, since their parts slow each other down.

A row does not say everything. Assumed, and noted in the profile:

- Lengths are log-normal. A synchronous batch starts together and its rows run out; an asynchronous
  generator has as many rows as its slots and the bound on lag allow (predict.py).
- A token of a prompt is read in a third of the time that training on it takes.
- The optimizer's time is part of the microbatches'.
- Fewer completions than in the smallest run, or fewer bytes than a whole copy of the weights, take
  proportionally less time to score or to copy.

Runs whose ranks share a model are refused, and runs in several dtypes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from llamarl.config.conversion import load_config
from llamarl.config.placement import placement_of
from llamarl.config.schema import Config
from llamarl.memory import ITEMSIZES
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.sharding import num_parameters
from llamarl.observe.rates import Row, number_of
from llamarl.observe.rows import FILE_NAME
from llamarl.observe.sinks import read_rows
from llamarl.planner.costs import StepWork
from llamarl.planner.profile import Curve, FromZero, MeasuredTimes, Positive, Profile
from llamarl.words.fields import settings_dataclass

_PASSES = 3  # a backward takes as long as two forwards
_LEAST_S = 1e-9
_WARMUP = 5  # the first of so many parts of a run warms up
_LEAST_DECODING = 0.1  # of a generator's time is decoding, whatever prompts and swaps explain
NOTES = (
    "measured in runs: rows at once follow from slots, overcommit and length_sigma; a token of a "
    "prompt is read in a third of the time of training on it; microbatches include the optimizer",
    "device and assumptions are those of the profile that the fit was based on",
)


@settings_dataclass
class Lengths:
    """What rows do not say of the sequences. prompt_tokens: the mean; None: half of the most.
    length_sigma: the deviation of the logarithm of a completion's length.
    """

    prompt_tokens: Positive | None = None
    length_sigma: FromZero = 0.5


@dataclass(frozen=True, slots=True)
class Point:
    """The times of a step of one rank or replica of each executor, by a row or the median of some.

    tokens: packed tokens of a microbatch. rows: live rows of a decode step, the mean over steps.
    prefill_s: of a token of a prompt. score_s: of the `completions` of a step. prompt, length: mean
    tokens of a prompt and of a completion.
    """

    tokens: float
    microbatches: float
    train_s: float
    rows: float
    decode_s: float
    prefill_s: float
    completions: float
    score_s: float
    publish_s: float
    prompt: float
    length: float

    @property
    def microbatch_s(self) -> float:
        """Seconds of a microbatch."""
        return self.train_s / self.microbatches


def counted_rows(run: Path) -> list[Row]:
    """Return a run's rows after its first fifth, and in any case after its first step.
    FileNotFoundError if it has none.
    """
    file = run / FILE_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; need the directory of a run")
    rows = list(read_rows(file))
    steps = [number_of(row, "step") or 0 for row in rows]
    first = max(1, max(steps, default=0) // _WARMUP)
    return [row for row, step in zip(rows, steps) if step > first]


def replicas_of(run: Path, config: Config) -> tuple[int, int]:
    """Return a run's data-parallel trainer ranks and its generator replicas. The ranks are counted
    by the traces that they left; there is 1 without any.
    """
    placed = placement_of(config, max(1, len(list(run.glob("trace.rank*.json")))))
    trainers = len(placed["trainer"]) // config.trainer.tensor_parallel
    generators = len(placed["generator"]) // config.generator.tensor_parallel
    return trainers, max(1, generators)


def points_of(run: Path, lengths: Lengths) -> list[Point]:
    """Return the points of a run's counted rows. ValueError or FileNotFoundError naming what is
    missing.
    """
    rows = counted_rows(run)
    config = load_config(run / "config.yaml")
    trainers, replicas = replicas_of(run, config)
    found = [_point(row, config, trainers, replicas, lengths) for row in rows]
    points = [point for point in found if point is not None]
    if not points:
        raise ValueError(
            f"{run / FILE_NAME}: no row after the first has the times of a step; let the run make "
            "some steps more"
        )
    return points


def median_of(points: Sequence[Point]) -> Point:
    """Return the median of some points, value by value."""
    values = {}
    for one in fields(Point):
        values[one.name] = statistics.median(getattr(point, one.name) for point in points)
    return Point(**values)


def _point(
    row: Row, config: Config, trainers: int, replicas: int, lengths: Lengths
) -> Point | None:
    """Return the times in a row; None if it trained or sampled nothing."""

    def column(name: str) -> float:
        return number_of(row, name) or 0.0

    step_s = column("time/step_s")
    train_s = step_s - column("time/wait_for_data_s") - column("weights/publish_stall_s")
    working_s = step_s * (1 - column("generator/idle_fraction"))
    length = min(column("completion/length_mean"), config.max_new_tokens)
    tokens = config.trainer.microbatch_tokens * (1 - column("packing/unused_budget_fraction"))
    if min(train_s, working_s, length, tokens, column("tokens/trained")) <= 0:
        return None
    work = _work(config, length, lengths)
    trained = (column("tokens/trained") + work.groups * work.prompt_tokens) / trainers
    microbatches = max(1, round(trained / tokens))
    rows, steps = _decoding(config, work, replicas, column("tickets/overcommit"))
    prompts = work.groups * work.prompt_tokens / replicas
    prompts_s = prompts * train_s / (microbatches * tokens) / _PASSES
    swap_s = column("weights/swap_stall_s") / replicas  # a row has the sum over replicas
    reading_and_decoding_s = working_s - swap_s
    decoding_s = max(_LEAST_DECODING * working_s, reading_and_decoding_s - prompts_s)
    prompts_s = max(0.0, reading_and_decoding_s - decoding_s)
    reward_idle = number_of(row, "reward/idle_fraction")
    return Point(
        tokens=tokens,
        microbatches=microbatches,
        train_s=train_s,
        rows=rows,
        decode_s=decoding_s / steps,
        prefill_s=prompts_s / prompts,
        completions=work.completions,
        score_s=0.0 if reward_idle is None else (1 - reward_idle) * step_s,
        publish_s=column("weights/publish_stall_s"),
        prompt=work.prompt_tokens,
        length=length,
    )


def _work(config: Config, length: float, lengths: Lengths) -> StepWork:
    most = config.longest - config.max_new_tokens
    given = most / 2 if lengths.prompt_tokens is None else lengths.prompt_tokens
    return StepWork(
        groups=config.groups_per_step,
        group_size=config.group_size,
        prompt_tokens=given,
        completion_tokens=length,
        longest_prompt=most,
        max_new_tokens=config.max_new_tokens,
        sigma=lengths.length_sigma,
    )


def _decoding(
    config: Config, work: StepWork, replicas: int, overcommit: float
) -> tuple[float, float]:
    """Return the mean live rows of a replica, and its decode steps, of a training step."""
    groups = math.ceil(work.groups / replicas)
    waiting = groups * work.group_size
    slots = getattr(config.generator, "max_slots", None) or waiting
    if config.synchronous:
        stretches = work.batch(min(slots, waiting), waiting)
        steps = sum(count for _, count in stretches)
        return sum(rows * count for rows, count in stretches) / steps, steps
    allowed = (work.groups / 2 + overcommit) * work.group_size * work.share_in_work
    usable = slots - (work.group_size - 1) / 2
    rows = max(1.0, min(usable, allowed / replicas))
    return rows, work.completions * work.completion_tokens / replicas / rows


def _check_fits(run: Path, config: Config) -> None:
    """Raise ValueError if a run's times are not those of one rank an executor in one dtype, which
    costs.py adds messages to.
    """
    dtype = config.model.dtype
    compute_dtype = config.trainer.compute_dtype
    quantize = getattr(config.generator, "quantize", "none")
    trainers, _ = replicas_of(run, config)
    reasons = []
    if dtype != compute_dtype:
        reasons.append(f"model.dtype={dtype} is not trainer.compute_dtype={compute_dtype}")
    if quantize != "none":
        reasons.append(f"generator.quantize={quantize} has a dtype of its own")
    if trainers > 1:
        reasons.append(f"{trainers} trainer ranks send each other messages")
    for side, tensor in (
        ("trainer", config.trainer.tensor_parallel),
        ("generator", config.generator.tensor_parallel),
    ):
        if tensor > 1:
            reasons.append(f"{side}.tensor_parallel={tensor}: its ranks send each other messages")
    if reasons:
        raise ValueError(
            f"{run}: a profile has the times of one rank an executor in one dtype; "
            + "; ".join(reasons)
        )


def _from_one(sizes: Sequence[float], seconds: Sequence[float]) -> Curve:
    """Return the curve of these points, proportional to the size below the smallest."""
    curve = Curve.through(sizes, seconds)
    least, least_s = curve.xs[0], curve.ys[0]
    if least <= 1:
        return curve
    return Curve((1.0, *curve.xs), (least_s / least, *curve.ys))


def fit_runs(runs: Sequence[Path], base: Profile, lengths: Lengths = Lengths()) -> Profile:
    """Return a profile with the times of these runs, all of one model. Device and assumptions are
    the base's. ValueError for runs without a usable row, of several models, in several dtypes, or
    of ranks that share a model.
    """
    configs = {}
    points = {}
    for run in runs:
        points[run] = median_of(points_of(run, lengths))
        configs[run] = load_config(run / "config.yaml")
        _check_fits(run, configs[run])
    models = set()
    for config in configs.values():
        models.add((config.model.path or str(tiny_directory()), config.trainer.compute_dtype))
    if len(models) > 1:
        shown = ", ".join(f"{path} in {dtype}" for path, dtype in sorted(models))
        raise ValueError(f"the runs are of several models, and a profile is of one: {shown}")
    ((path, dtype),) = models
    parameters = num_parameters(read_config(path))
    chosen = [points[run] for run in runs if configs[run].synchronous] or list(points.values())
    train = Curve.through([p.tokens for p in chosen], [p.microbatch_s for p in chosen])
    published_s = [p.publish_s for p in chosen if p.publish_s > 0] or [_LEAST_S]
    copied = [parameters * ITEMSIZES[dtype]] * len(published_s)  # by the one trainer rank
    scored = [p for p in chosen if p.score_s > 0]
    measured = MeasuredTimes(
        model=Path(path).name,
        parameters=parameters,
        dtype=dtype,
        train=train,
        decode=Curve.through([p.rows for p in chosen], [p.decode_s for p in chosen]),
        prefill=Curve((1.0,), (train.ys[-1] / train.xs[-1] / _PASSES,)),
        copy=_from_one(copied, published_s),
        score=_from_one([p.completions for p in scored], [p.score_s for p in scored])
        if scored
        else None,
    )
    name = f"{', '.join(run.name for run in runs)} on {base.name}"
    prompts = sorted({f"{p.prompt:.4g}" for p in chosen})
    completions = sorted({f"{p.length:.4g}" for p in chosen})
    source = "half of the most" if lengths.prompt_tokens is None else "as given"
    means = (
        f"mean tokens of the runs: {', '.join(prompts)} of a prompt ({source}), "
        f"{', '.join(completions)} of a completion"
    )
    return replace(base, name=name, measured=measured, notes=(*NOTES, means))


def shown_profile(profile: Profile) -> Iterator[str]:
    """Yield the lines that describe a profile, with eta by batch size (LlamaRL's figure 5)."""
    device = profile.device
    yield f"profile   {profile.name}"
    speeds = [f"{flops / 1e12:.3g} TFLOP/s {name}" for name, flops in device.flops.stated.items()]
    yield (
        f"device    {device.kind}, {device.memory_gib:.3g} GiB, "
        f"{device.memory_bytes_per_s / 1e9:.3g} GB/s; {', '.join(speeds)}"
    )
    measured = profile.measured
    if measured is None:
        yield "measured  nothing: seconds are derived from the device's figures"
        return
    yield f"measured  {measured.model}, {measured.parameters:,} parameters in {measured.dtype}"
    yield f"eta_t(b)  {_etas(measured.train)} us a token, in microbatches of b tokens"
    yield f"eta_g(b)  {_etas(measured.decode)} us a token, with b rows at once"
    for name, curve in (("eta_t", measured.train), ("eta_g", measured.decode)):
        if len(curve.xs) == 1:
            yield f"          {name} was measured at one batch size; give runs of others too"
        elif curve.unit_time_falls:
            yield f"          {name} does not rise with b, as theorem 7.5 assumes"
        else:
            yield f"          {name} rises with some b, against the assumption of theorem 7.5"
    if measured.score is not None:
        yield f"scorer    {_etas(measured.score)} us a completion, of so many together"
    yield f"copy      {measured.copy.xs[-1] / measured.copy.ys[-1] / 1e9:.3g} GB/s"


def _etas(curve: Curve) -> str:
    return ", ".join(f"{x:.0f}: {1e6 * y:.3g}" for x, y in curve.per_unit())
