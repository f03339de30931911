"""A data sheet from the metrics of runs that were made, and what is printed of any sheet.

    sheet = fit_runs([Path("runs/a")], read_sheet("h100"), prompt_tokens=150)

A run gives a point of each curve, the mean of its rows behind the first fifth, without the largest
and the smallest fifth of each value. Runs of one setting, which differ in their seed and their
length alone, give one point together, the median. A run that took much longer or shorter than
others of its setting is named in the sheet's notes (repeats.py). What a row does not say is
assumed, and noted in the sheet:

- A microbatch holds the mean of those of the step. The optimizer's pass is within its time.
- The generator had as many rows at once as its slots, or the bound on lag, let it.
- A prompt's token is read in a third of the time that one is trained on, in the largest
  microbatch.

Where some runs are synchronous, curves are made of these alone, because a piece of an asynchronous
run takes longer by what is computed beside it. The others then say how much longer (`crowding`, on
a CPU); and the synchronous ones what nobody's work explains: `turn_s` of a step, and more with each
completion, which are the scorers' seconds. Synchronous runs with several trainer ranks say what an
update takes more on each (`together_s`). They also bound the crowding: their ranks compute beside
each other all the time, so that it cannot make an update longer than theirs was.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

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
from llamarl.planner.repeats import by_setting, is_of_stray, num_ranks, strays, trimmed_mean
from llamarl.planner.sheet import Measured, Sheet
from llamarl.planner.turns import Placed, stretch

_PASSES = 3  # a backward is two forwards
_LEAST_S = 1e-9
_WARMUP = 5  # the first of so many parts of a run warms up
_MOST_OTHERS = 0.9  # of a generator's time that prompts and swaps may be taken to explain
_FOOT = 4  # a line through the points is followed to the smallest size over this
NOTES = (
    "measured in runs: the optimizer's pass is within the microbatches, rows at once are what "
    "slots and overcommit allow, and reading a token of a prompt takes a third of training on one",
    "the device's figures and the assumptions are those of the sheet that the fit was based on",
)


@dataclass(frozen=True, slots=True)
class Point:
    """What a row of metrics says, or the mean of some, of one rank or replica of each executor.
    Seconds of a microbatch of `tokens` with `pairs`; of a decode step of `rows` with `context`; of
    the scores of `completions`; of a copy of `num_bytes`. None: the row does not say.
    trainer_s, generator_s: busy seconds of a step of step_s.
    """

    tokens: float
    pairs: float
    microbatch_s: float
    rows: float
    context: float
    decode_s: float
    completions: float
    score_s: float | None
    num_bytes: float | None
    copy_s: float | None
    step_s: float
    trainer_s: float
    generator_s: float
    length: float  # tokens of a completion, the mean
    microbatches: float  # of a step, on a rank
    prompts: float  # tokens of a step's prompts, on a replica

    @classmethod
    def of(cls, points: Sequence[Point], middle: Callable[[Sequence[float]], float]) -> Point:
        """Return the middle of some points, value by value; of what none says, None."""
        values = {}
        for one in fields(cls):
            said = [getattr(point, one.name) for point in points]
            numbers = [value for value in said if value is not None]
            values[one.name] = middle(numbers) if numbers else None
        return cls(**values)  # type: ignore[arg-type]  # None where the points had none


@dataclass(frozen=True, slots=True)
class Seen:
    """A run, as a fit sees it."""

    point: Point
    placed: Placed
    is_synchronous: bool

    @property
    def trainers(self) -> int:
        """The number of ranks that train."""
        return len(self.placed["trainer"])

    @property
    def generators(self) -> int:
        """The number of ranks that generate."""
        return len(self.placed["generator"])

    @property
    def is_apart(self) -> bool:
        """Whether trainer and generator share no rank."""
        return not set(self.placed["trainer"]) & set(self.placed["generator"])

    @property
    def hosted_s(self) -> float:
        """Busy seconds of a rank that hosts the reward."""
        return self.point.score_s or 0.0


def counted_rows(run: Path) -> list[Row]:
    """Return a run's rows behind its first fifth, and behind its first step in any case.
    FileNotFoundError if it has none.
    """
    file = run / FILE_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; need the directory of a run")
    rows = list(read_rows(file))
    steps = [number_of(row, "step") or 0 for row in rows]
    first = max(1, max(steps, default=0) // _WARMUP)
    return [row for row, step in zip(rows, steps) if step > first]


def busy_of(run: Path) -> dict[str, float]:
    """Return an executor's busy seconds of a step, the mean of its ranks and of the rows that are
    counted, by the traces; nothing for an executor without any, or where a trace has dropped spans.

    The trainer's last span is the last checkpoint's, and no step's.
    """
    rows = counted_rows(run)
    seconds = sum(number_of(row, "time/step_s") or 0.0 for row in rows)
    spans: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for file in sorted(run.glob("trace.rank*.json")):
        trace = json.loads(file.read_text())
        if trace["otherData"]["dropped_spans"]:
            return {}
        names = {}
        for event in trace["traceEvents"]:
            if event["name"] == "thread_name":
                names[event["tid"]] = event["args"]["name"]
        for event in trace["traceEvents"]:
            if event["ph"] == "X":
                own = spans.setdefault(names[event["tid"]], {}).setdefault(event["pid"], [])
                own.append((event["ts"] / 1e6, event["dur"] / 1e6))
    if not rows or "trainer" not in spans:
        return {}
    lasts = []
    for own in spans["trainer"].values():
        lasts.append(max(began for began, _ in own))
    end_s = min(lasts)
    found = {}
    for name, by_rank in spans.items():
        total = 0.0
        for own in by_rank.values():
            total += sum(took for began, took in own if end_s - seconds <= began < end_s)
        found[name] = total / len(by_rank) / len(rows)
    return found


def points_of(run: Path, prompt_tokens: float) -> Iterator[Point]:
    """Yield the points of a run's rows that are counted. prompt_tokens: the mean of a prompt.
    ValueError or FileNotFoundError naming what is missing.
    """
    rows = counted_rows(run)
    config = load_config(run / "config.yaml")
    ranks = num_ranks(run)
    for row in rows:
        point = _point(row, config, ranks, prompt_tokens)
        if point is not None:
            yield point


def seen_of(run: Path, prompt_tokens: float) -> Seen | None:
    """Return a run as a fit sees it; None if no row says anything."""
    points = list(points_of(run, prompt_tokens))
    if not points:
        return None
    config = load_config(run / "config.yaml")
    placed = placement_of(config, num_ranks(run))
    point = Point.of(points, trimmed_mean)
    busy = busy_of(run)
    if "generator" in busy:
        point = replace(point, generator_s=busy["generator"])
    if "reward" in busy:
        point = replace(point, score_s=busy["reward"])
    return Seen(point=point, placed=placed, is_synchronous=config.max_lag == 0)


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
    number = max(1, round(trained / filled))
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
        tokens=trained / number,
        pairs=trained / number * (prompt_tokens + length) / 2,
        microbatch_s=busy_s / number,
        rows=rows,
        context=rows * (prompt_tokens + length / 2),
        decode_s=decode_s,
        completions=completions,
        score_s=score_s if score_s else None,
        num_bytes=sent,
        copy_s=number_of(row, "weights/publish_stall_s") or None,
        step_s=column("time/step_s"),
        trainer_s=busy_s,
        generator_s=working * column("time/step_s"),
        length=length,
        microbatches=number,
        prompts=groups * prompt_tokens / replicas,
    )


def fit_runs(runs: Sequence[Path], base: Sheet, *, prompt_tokens: float = 0.0) -> Sheet:
    """Return a sheet of what these runs measured, all of one model; device and assumptions are the
    base's. ValueError for runs without a usable row, and of several models.
    """
    by_run: dict[Path, Seen] = {}
    models = set()
    for run in runs:
        one = seen_of(run, prompt_tokens)
        if one is not None:
            by_run[run] = one
        config = load_config(run / "config.yaml")
        path = config.model.path or str(tiny_directory())
        models.add((path, config.trainer.compute_dtype))
    if not by_run:
        raise ValueError(
            f"{', '.join(map(str, runs))}: no row after the first has a step's and a generator's "
            "time; let a run make some steps more"
        )
    if len(models) > 1:
        shown = ", ".join(f"{path} in {dtype}" for path, dtype in sorted(models))
        raise ValueError(f"the runs are of several models, and a sheet is of one: {shown}")
    ((path, dtype),) = models
    model = read_config(path)
    settings = by_setting(list(by_run))
    every = []
    for own in settings:
        every.append(_together([by_run[run] for run in own]))
    cores = base.device.gpus_per_node if base.device.kind == "cpu" else 0
    named = Measured(
        model=Path(path).name,
        parameters=num_parameters(model),
        dtype=dtype,
        microbatch=Cost(Curve((1.0,), (_LEAST_S,))),
        update_s=0.0,
        decode=Cost(Curve((1.0,), (_LEAST_S,))),
        prefill=Curve((1.0,), (_LEAST_S,)),
        copy=_copies([one.point for one in every], num_parameters(model) * ITEMSIZES[dtype]),
    )
    measured = _fitted(every, named, cores)
    notes = [*NOTES, f"prompt_tokens={prompt_tokens:g} was given: the mean of a prompt"]
    steps_s = {run: one.point.step_s for run, one in by_run.items()}
    notes += strays(steps_s, settings)
    name = f"{', '.join(run.name for run in runs)} on {base.name}"
    return replace(base, name=name, measured=measured, notes=tuple(notes))


def _together(runs: Sequence[Seen]) -> Seen:
    """Return what is typical of runs of one setting."""
    return replace(runs[0], point=Point.of([one.point for one in runs], statistics.median))


def _fitted(every: Sequence[Seen], named: Measured, cores: int) -> Measured:
    """Return what these runs measured. cores: of a machine whose ranks share them; 0: they do
    not.
    """
    alone = [one for one in every if one.is_synchronous] or list(every)
    single = [one for one in alone if one.trainers == 1] or alone
    first = _curves_of(single, alone, named, crowding=0.0, cores=cores)
    if alone == every or not alone[0].is_synchronous:
        return _with_scores(first, every)
    measured = _with_turns(first, alone)
    beside = [one for one in every if not one.is_synchronous and one.is_apart]
    if cores > 1 and beside:
        crowding = max(0.0, statistics.median(_crowding(one, measured, cores) for one in beside))
        together = [_most_crowding(one, measured, cores) for one in alone if one.trainers > 1]
        if together and single != alone:
            crowding = min(crowding, statistics.median(together))
        measured = _with_turns(_curves_of(single, alone, named, crowding, cores), alone)
        measured = replace(measured, crowding=crowding)
    several = [one for one in alone if one.trainers > 1]
    if several and single != alone:
        together = []
        for one in several:
            quiet_s = one.point.trainer_s / stretch(one.trainers, cores, measured.crowding)
            together.append(quiet_s - _trained_s(one, measured))
        measured = replace(measured, together_s=max(0.0, statistics.median(together)))
    return measured


def _trained_s(one: Seen, measured: Measured) -> float:
    """Return the seconds of this run's update, by the curve."""
    point = one.point
    return measured.microbatch.at(point.tokens, point.pairs) * point.microbatches


def _curves_of(
    trained: Sequence[Seen], alone: Sequence[Seen], named: Measured, crowding: float, cores: int
) -> Measured:
    """Return the curves of these runs: of an update by those where one rank trains, of a decode
    step by all that are alone.
    """
    points = [one.point for one in trained]
    microbatch = Cost.fitted(
        [p.tokens for p in points], [p.pairs for p in points], [p.microbatch_s for p in points]
    )
    microbatch = replace(microbatch, curve=_with_foot(microbatch.curve))
    largest = max(points, key=lambda point: point.tokens)
    of_token_s = largest.microbatch_s / largest.tokens / _PASSES
    prefill = Curve((1.0, largest.tokens), (of_token_s, of_token_s * largest.tokens))
    rows = []
    contexts = []
    seconds = []
    for one in alone:
        rows.append(one.point.rows)
        contexts.append(one.point.context)
        point = one.point
        quiet_s = point.generator_s / stretch(one.generators, cores, crowding)
        others_s = prefill.at(point.prompts) + named.copy.at(point.num_bytes or 0.0)
        decoding_s = max((1 - _MOST_OTHERS) * quiet_s, quiet_s - others_s)
        steps = point.completions * point.length / (point.rows * one.generators)
        seconds.append(decoding_s / steps)
    decode = Cost.fitted(rows, contexts, seconds)
    return replace(named, microbatch=microbatch, decode=decode, prefill=prefill)


def _with_foot(curve: Curve) -> Curve:
    """Return a curve with one more knot before the first, on the line through the knots: the few
    sizes of runs leave more to guess there than a probe's. Of one knot nothing is known.
    """
    if len(curve.xs) == 1:
        return curve
    slope, _ = np.polyfit(curve.xs, curve.ys, 1)
    size = curve.xs[0] / _FOOT
    seconds = curve.ys[0] - slope * (curve.xs[0] - size)
    foot = min(curve.ys[0], max(curve.ys[0] / _FOOT, float(seconds)))
    return Curve((size, *curve.xs), (foot, *curve.ys), curve.error)


def _crowding(one: Seen, measured: Measured, cores: int) -> float:
    """Return the share by which an asynchronous run's update was longer than by the curve, over the
    share of the step in which the other cores worked. Negative where it was shorter.
    """
    point = one.point
    longer = point.trainer_s / _trained_s(one, measured) - 1
    scored_s = 0.0 if measured.score is None else measured.score.at(point.completions)
    working_s = point.generator_s * one.generators + one.hosted_s + scored_s
    beside = min(1.0, working_s / point.step_s / (cores - 1))
    return longer / beside if beside > 0 else 0.0


def _most_crowding(one: Seen, measured: Measured, cores: int) -> float:
    """Return the crowding that would explain all that a synchronous run's update took longer on
    each of its ranks than by the curve, if their sum of gradients took nothing.
    """
    uncrowded_s = _trained_s(one, measured) * stretch(one.trainers, cores, 0.0)
    busy = min(1.0, (one.trainers - 1) / (cores - 1))
    return max(0.0, one.point.trainer_s / uncrowded_s - 1) / busy


def _with_turns(measured: Measured, alone: Sequence[Seen]) -> Measured:
    """Return it with what is seen of the reward's rank, and of what nobody's work explains."""
    hosted = []
    counts = []
    gaps = []
    for one in alone:
        point = one.point
        hosted.append(one.hosted_s * len(one.placed["reward"]) / point.completions)
        counts.append(point.completions)
        busy_s = point.trainer_s + (point.copy_s or 0.0) + point.generator_s + one.hosted_s
        gaps.append(max(0.0, point.step_s - busy_s))
    sizes = sorted(set(counts))
    middle = []
    for size in sizes:
        middle.append(statistics.median(gap for n, gap in zip(counts, gaps) if n == size))
    turn_s, each_s = _line(sizes, middle)
    most = max(counts)
    score = Curve((1.0, most), (max(each_s, _LEAST_S), max(each_s, _LEAST_S) * most))
    return replace(measured, hosted_s=statistics.median(hosted), turn_s=turn_s, score=score)


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return (a, b) of the line a + b x nearest to these points, neither below 0."""
    if len(set(xs)) == 1:
        return statistics.median(ys), 0.0
    slope, start = np.polyfit(xs, ys, 1)
    if slope <= 0:
        return statistics.median(ys), 0.0
    if start < 0:
        return 0.0, float(np.dot(xs, ys) / np.dot(xs, xs))
    return float(start), float(slope)


def _with_scores(measured: Measured, every: Sequence[Seen]) -> Measured:
    """Return it with the seconds of the reward's rank as the scorer's."""
    scored = [one for one in every if one.point.score_s is not None]
    if not scored:
        return measured
    counts = [one.point.completions for one in scored]
    return replace(measured, score=Curve.fitted(counts, [one.hosted_s for one in scored]))


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
    for note in sheet.notes:
        if is_of_stray(note):
            yield f"stray     {note}"


def _etas(curve: Curve) -> str:
    units = [f"{x:.0f}: {1e6 * y:.3g}" for x, y in curve.per_unit()]
    return ", ".join(units)


def _assumption(curve: Curve) -> str:
    if curve.unit_time_falls:
        return "a unit takes no longer in a larger piece, as theorem 7.5 assumes"
    return "a unit takes longer in some larger piece, against the assumption of theorem 7.5"
