"""A run's step as the planner predicts it, beside what the run measured.

    checked = check_run(Path("runs/a"), read_sheet("NAME.yaml"), prompt_tokens=6)
    checked.error    # -0.08: the prediction is 8 % too short

Work and plan are the run's own: lengths of its completions, placement, degrees, slots, overcommit.
Where trainer and generator share a rank they take turns, so that their seconds add up. On a CPU all
executors that share a rank do, and ranks share cores (ranks.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llamarl.config.conversion import load_config
from llamarl.config.placement import placement_of
from llamarl.config.schema import Config
from llamarl.models.config import read_config, tiny_directory
from llamarl.observe.rates import Row, number_of
from llamarl.observe.rows import FILE_NAME
from llamarl.planner.costs import Costs
from llamarl.planner.fit import counted_rows
from llamarl.planner.plans import GeneratorPlan, Numerics, Plan, TrainerPlan, Work
from llamarl.planner.predict import Predictor
from llamarl.planner.ranks import bytes_of_ranks, share
from llamarl.planner.repeats import num_ranks, step_of
from llamarl.planner.sheet import Sheet

_ANY_PROMPT = 1.0  # tokens, where none are given


@dataclass(frozen=True, slots=True)
class Checked:
    """Seconds of a step: predicted, and the mean of a run's without the longest and the shortest
    fifth of them.

    lag, trainer_s, sample_s: the mean lag in steps, and seconds of the busy parts, (predicted,
    measured). rank_bytes: what each rank's process is predicted to hold at most, on a CPU.
    """

    step_s: float
    measured_s: float
    lag: tuple[float, float]
    trainer_s: tuple[float, float]
    sample_s: tuple[float, float]
    rank_bytes: Mapping[int, int]
    rows: int

    @property
    def error(self) -> float:
        """The share by which the prediction is too long; below 0: too short."""
        return self.step_s / self.measured_s - 1


def timed_rows(run: Path) -> list[Row]:
    """Return a run's rows that are counted and have a step's time. ValueError if there is none,
    FileNotFoundError if the run has none at all.
    """
    timed = [row for row in counted_rows(run) if (number_of(row, "time/step_s") or 0) > 0]
    if not timed:
        raise ValueError(f"{run / FILE_NAME}: no row after the first has a step's time")
    return timed


def lag_of(rows: list[Row]) -> float:
    """Return the mean lag of these rows, in steps."""
    return statistics.fmean(number_of(row, "lag/mean") or 0.0 for row in rows)


def check_run(run: Path, sheet: Sheet, *, prompt_tokens: float = 0.0) -> Checked:
    """Predict a run's step and compare. prompt_tokens: the mean of a prompt. ValueError or
    FileNotFoundError naming what is missing.
    """
    timed = timed_rows(run)
    config = load_config(run / "config.yaml")
    placed = placement_of(config, num_ranks(run))
    plan = _plan(config, placed, _median(timed, "tickets/overcommit"))
    work = _work(config, _median(timed, "completion/length_mean"), prompt_tokens)
    device = sheet.device.kind
    numerics = Numerics(
        dtype=config.model.dtype,
        compute_dtype=config.trainer.compute_dtype,
        quantize=getattr(config.generator, "quantize", "none"),
        optimizer=config.trainer.optimizer,
        checkpointing=config.trainer.activation_checkpointing,
        on_cpu=device == "cpu",
    )
    model = read_config(config.model.path or tiny_directory())
    predictor = Predictor.of(Costs(sheet, model, numerics), work)
    found = predictor.predict(plan)
    step_s = found.step_s
    lag = found.mean_lag
    if device == "cpu":
        last = max(number_of(row, "step") or 0 for row in timed)
        steps = round(last)
        shared = share(
            predictor,
            plan,
            placed,
            cores=sheet.device.gpus_per_node,
            steps=steps,
            first=steps - len(timed),
        )
        step_s = shared.step_s
        lag = shared.mean_lag
    elif set(placed["trainer"]) & set(placed["generator"]):
        step_s = found.trainer_s + found.generator_s
    measured_s = step_of(timed)
    working = [1 - (number_of(row, "generator/idle_fraction") or 0.0) for row in timed]
    return Checked(
        step_s=step_s,
        measured_s=measured_s,
        lag=(lag, lag_of(timed)),
        trainer_s=(found.trainer_s, measured_s - _median(timed, "time/wait_for_data_s")),
        sample_s=(found.generator_s, measured_s * statistics.median(working)),
        rank_bytes=bytes_of_ranks(predictor, plan, placed) if device == "cpu" else {},
        rows=len(timed),
    )


def _median(rows: list[Row], column: str) -> float:
    values = [value for row in rows if (value := number_of(row, column)) is not None]
    return statistics.median(values) if values else 0.0


def _plan(config: Config, placed: dict, overcommit: float) -> Plan:
    trainer = config.trainer
    generator = config.generator
    ranks = len(placed["trainer"]) // (trainer.tensor_parallel * trainer.replicate)
    replicas = max(1, len(placed["generator"]) // generator.tensor_parallel)
    return Plan(
        trainer=TrainerPlan(
            shards=ranks,
            replicate=trainer.replicate,
            tensor=trainer.tensor_parallel,
            microbatch_tokens=trainer.microbatch_tokens,
        ),
        generator=GeneratorPlan(
            tensor=generator.tensor_parallel,
            replicas=replicas,
            slots=generator.max_slots,
        ),
        overcommit=int(overcommit),
        max_lag=1 if config.max_lag is None else config.max_lag,
    )


def _work(config: Config, length: float, prompt_tokens: float) -> Work:
    most = config.longest - config.max_new_tokens
    return Work(
        groups=config.groups_per_step,
        group_size=config.group_size,
        prompt_tokens=min(max(_ANY_PROMPT, prompt_tokens), most),
        completion_tokens=min(max(1.0, length), config.max_new_tokens),
        longest_prompt=most,
        max_new_tokens=config.max_new_tokens,
        max_lag=1 if config.max_lag is None else config.max_lag,
    )


def lines_of(run: Path, checked: Checked) -> Iterator[str]:
    """Yield what is printed of a comparison."""
    yield (
        f"{run}: {checked.step_s:.3g} s a step predicted, {checked.measured_s:.3g} s measured "
        f"(middle of {checked.rows} steps): {checked.error:+.0%}"
    )
    yield f"  lag       {checked.lag[0]:.2f} predicted, {checked.lag[1]:.2f} measured, the mean"
    for name, (predicted_s, measured_s) in {
        "trainer": checked.trainer_s,
        "generator": checked.sample_s,
    }.items():
        yield f"  {name:<9} busy {predicted_s:.3g} s predicted, {measured_s:.3g} s measured"
