"""A data sheet from the metrics of runs that were made, and what is printed of any sheet.

    sheet = fit_runs([Path("runs/a")], read_sheet("h100"), prompt_tokens=150)

Each row of metrics.jsonl but a run's first gives a point of each curve. What a row does not say is
assumed, and noted in the sheet:

- A microbatch holds the mean of those of the step. The optimizer's pass is within its time.
- The generator had as many rows at once as its slots, or the bound on lag, let it.
- A prompt is read in a third of the time that a microbatch of its size is trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llamarl.config.conversion import load_config
from llamarl.config.placement import placement_of
from llamarl.config.schema import Config
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.sharding import num_parameters
from llamarl.observe.rates import Row, number_of
from llamarl.observe.rows import FILE_NAME
from llamarl.observe.sinks import read_rows
from llamarl.planner.curves import Cost, Curve
from llamarl.planner.plans import ITEMSIZES
from llamarl.planner.sheet import Measured, Sheet

_PASSES = 3  # a backward is two forwards
_LEAST_S = 1e-9
NOTES = (
    "measured in runs: the optimizer's pass is within the microbatches, rows at once are what "
    "slots and overcommit allow, and a prompt's time is a third of a microbatch's",
    "the device's figures and the assumptions are those of the sheet that the fit was based on",
)


@dataclass(frozen=True, slots=True)
class Point:
    """What a row of metrics says, of one rank or replica of each executor. Seconds of a microbatch
    of `tokens` with `pairs`; of a decode step of `rows` with `context`; of the scores of
    `completions`; of a copy of `num_bytes`. None: the row does not say.
    """

    tokens: float
    pairs: float
    microbatch_s: float
    rows: float
    context: float
    decode_s: float
    completions: int
    score_s: float | None
    num_bytes: float | None
    copy_s: float | None


def num_ranks(run: Path) -> int:
    """Return how many ranks a run had, by the traces that they left; 1 without any."""
    return max(1, len(list(run.glob("trace.rank*.json"))))


def points_of(run: Path, prompt_tokens: float) -> Iterator[Point]:
    """Yield the points of a run's rows. prompt_tokens: the mean of a prompt. ValueError or
    FileNotFoundError naming what is missing.
    """
    file = run / FILE_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; need the directory of a run")
    config = load_config(run / "config.yaml")
    ranks = num_ranks(run)
    for row in read_rows(file):
        if number_of(row, "step") not in (0, 1):  # the first step warms up
            point = _point(row, config, ranks, prompt_tokens)
            if point is not None:
                yield point


def _point(row: Row, config: Config, ranks: int, prompt_tokens: float) -> Point | None:
    """Return what a row says; None where it trained or sampled nothing."""

    def column(name: str) -> float:
        return number_of(row, name) or 0.0

    placed = placement_of(config, ranks)
    trainers = len(placed["trainer"]) // config.trainer.tensor_parallel
    replicas = max(1, len(placed["generator"]) // config.generator.tensor_parallel)
    busy_s = column("time/step_s") - column("time/wait_for_data_s")
    busy_s -= column("weights/publish_stall_s")
    length = column("completion/length_mean")
    groups = config.groups_per_step
    trained = (column("tokens/trained") + groups * prompt_tokens) / trainers
    filled = config.trainer.microbatch_tokens * (1 - column("packing/unused_budget_fraction"))
    rate = column("generator/tokens_per_s")
    working = 1 - column("generator/idle_fraction")
    if min(busy_s, trained, filled, rate, working, length) <= 0:
        return None
    filled = min(filled, trained)
    # As predict.py has it: half a batch waits, unless all of it starts together.
    started = groups if config.max_lag == 0 else groups / 2 + column("tickets/overcommit")
    at_most = started * config.group_size / replicas
    rows = max(1.0, min(at_most, float(getattr(config.generator, "max_slots", at_most))))
    decode_s = rows * replicas * working / rate
    idle = number_of(row, "reward/idle_fraction")
    completions = groups * config.group_size
    score_s = None if idle is None else (1 - idle) * column("time/step_s")
    sent = number_of(row, "weights/bytes")
    return Point(
        tokens=filled,
        pairs=filled * (prompt_tokens + length) / 2,
        microbatch_s=busy_s * filled / trained,
        rows=rows,
        context=rows * (prompt_tokens + length / 2),
        decode_s=decode_s,
        completions=completions,
        score_s=score_s if score_s else None,
        num_bytes=sent,
        copy_s=number_of(row, "weights/publish_stall_s") or None,
    )


def fit_runs(runs: Sequence[Path], base: Sheet, *, prompt_tokens: float = 0.0) -> Sheet:
    """Return a sheet of what these runs measured, all of one model; device and assumptions are the
    base's. ValueError for runs without a usable row, and of several models.
    """
    points: list[Point] = []
    models = set()
    for run in runs:
        points += points_of(run, prompt_tokens)
        config = load_config(run / "config.yaml")
        path = config.model.path or str(tiny_directory())
        models.add((path, config.trainer.compute_dtype))
    if not points:
        raise ValueError(
            f"{', '.join(map(str, runs))}: no row after the first has a step's and a generator's "
            "time; let a run make some steps more"
        )
    if len(models) > 1:
        shown = ", ".join(f"{path} in {dtype}" for path, dtype in sorted(models))
        raise ValueError(f"the runs are of several models, and a sheet is of one: {shown}")
    ((path, dtype),) = models
    model = read_config(path)
    microbatch = Cost.fitted(
        [p.tokens for p in points], [p.pairs for p in points], [p.microbatch_s for p in points]
    )
    decode = Cost.fitted(
        [p.rows for p in points], [p.context for p in points], [p.decode_s for p in points]
    )
    prefill = Curve.fitted([p.tokens for p in points], [p.microbatch_s / _PASSES for p in points])
    scored = [(p.completions, p.score_s) for p in points if p.score_s is not None]
    score = None
    if scored:
        score = Curve.fitted([n for n, _ in scored], [s for _, s in scored])
    measured = Measured(
        model=Path(path).name,
        parameters=num_parameters(model),
        dtype=dtype,
        microbatch=microbatch,
        update_s=0.0,
        decode=decode,
        prefill=prefill,
        copy=_copies(points, num_parameters(model) * ITEMSIZES[dtype]),
        score=score,
    )
    notes = [*NOTES, f"prompt_tokens={prompt_tokens:g} was given: the mean of a prompt"]
    name = f"{', '.join(run.name for run in runs)} on {base.name}"
    return replace(base, name=name, measured=measured, notes=tuple(notes))


def _copies(points: Sequence[Point], num_bytes: float) -> Curve:
    """Return the curve of copies: of stalls at publications, or what rounds to nothing."""
    sizes = []
    seconds = []
    for point in points:
        if point.num_bytes and point.copy_s:
            sizes.append(point.num_bytes)
            seconds.append(point.copy_s)
    if not sizes:
        return Curve((num_bytes,), (_LEAST_S,))
    return Curve.fitted(sizes, seconds)


# --- What is printed ---


def shown_sheet(sheet: Sheet) -> Iterator[str]:
    """Yield the lines of a sheet's curves: eta by size, as LlamaRL's figure 5 has it, and how far
    the fit is from what was measured.
    """
    device = sheet.device
    yield f"sheet     {sheet.name}"
    yield (
        f"device    {device.kind}, {device.memory_gib:.3g} GiB, "
        f"{device.memory_bytes_per_s / 1e9:.3g} GB/s; "
        + ", ".join(f"{flops / 1e12:.3g} TFLOP/s {name}" for name, flops in device.flops.items())
    )
    measured = sheet.measured
    if measured is None:
        yield "measured  nothing: seconds are derived from the device's figures"
        return
    yield f"measured  {measured.model}, {measured.parameters:,} parameters in {measured.dtype}"
    for name, cost, unit in (
        ("trainer", measured.microbatch, "a token of a microbatch of"),
        ("generator", measured.decode, "a row of a decode step of"),
    ):
        yield f"{name:<9} {_etas(cost.curve)} us {unit} so many; the fit: {cost.error}"
        yield f"          and {cost.slope * 1e9:.3g} ns a pair, or a token of context"
        yield f"          {_assumption(cost.curve)}"
    yield (
        f"prefill   {_etas(measured.prefill)} us a token of so many; "
        f"the fit: {measured.prefill.error}"
    )
    if measured.score is not None:
        yield f"scorer    {_etas(measured.score)} us a completion of so many"
    yield f"copy      {measured.copy.xs[-1] / measured.copy.ys[-1] / 1e9:.3g} GB/s"


def _etas(curve: Curve) -> str:
    units = [f"{x:.0f}: {1e6 * y:.3g}" for x, y in curve.per_unit()]
    return ", ".join(units)


def _assumption(curve: Curve) -> str:
    if curve.unit_time_falls:
        return "a unit takes no longer in a larger piece, as theorem 7.5 assumes"
    return "a unit takes longer in some larger piece, against the assumption of theorem 7.5"
