"""A run's step as the planner predicts it, beside what the run measured.

    checked = check_run(Path("runs/a"), read_sheet("NAME.yaml"), prompt_tokens=6)
    checked.error    # -0.08: the prediction is 8 % too short

Work and plan are the run's own: lengths of its completions, placement, degrees, slots, overcommit.
Where trainer and generator share a rank they take turns, so that their seconds add up.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llamarl.config.conversion import load_config
from llamarl.config.placement import placement_of
from llamarl.config.schema import Config
from llamarl.models.config import read_config, tiny_directory
from llamarl.observe.rates import Row, number_of
from llamarl.observe.rows import FILE_NAME
from llamarl.observe.sinks import read_rows
from llamarl.planner.costs import Costs
from llamarl.planner.fit import num_ranks
from llamarl.planner.plans import GeneratorPlan, Numerics, Plan, TrainerPlan, Work
from llamarl.planner.predict import Predictor
from llamarl.planner.sheet import Sheet

_ANY_PROMPT = 1.0  # tokens, where none are given


@dataclass(frozen=True, slots=True)
class Checked:
    """Seconds of a step: predicted, and the median of a run's. trainer_s, sample_s: of their busy
    parts, (predicted, measured).
    """

    step_s: float
    measured_s: float
    trainer_s: tuple[float, float]
    sample_s: tuple[float, float]
    rows: int

    @property
    def error(self) -> float:
        """The share by which the prediction is too long; below 0: too short."""
        return self.step_s / self.measured_s - 1


def check_run(run: Path, sheet: Sheet, *, prompt_tokens: float = 0.0) -> Checked:
    """Predict a run's step and compare. prompt_tokens: the mean of a prompt. ValueError or
    FileNotFoundError naming what is missing.
    """
    file = run / FILE_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; need the directory of a run")
    config = load_config(run / "config.yaml")
    rows = [row for row in read_rows(file) if number_of(row, "step") not in (0, 1)]
    timed = [row for row in rows if (number_of(row, "time/step_s") or 0) > 0]
    if not timed:
        raise ValueError(f"{file}: no row after the first has a step's time")
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
    found = Predictor.of(Costs(sheet, model, numerics), work).predict(plan)
    step_s = found.step_s
    if set(placed["trainer"]) & set(placed["generator"]):
        step_s = found.trainer_s + found.generator_s
    measured_s = _median(timed, "time/step_s")
    working = [1 - (number_of(row, "generator/idle_fraction") or 0.0) for row in timed]
    return Checked(
        step_s=step_s,
        measured_s=measured_s,
        trainer_s=(found.trainer_s, measured_s - _median(timed, "time/wait_for_data_s")),
        sample_s=(found.generator_s, measured_s * statistics.median(working)),
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
        f"(median of {checked.rows} steps): {checked.error:+.0%}"
    )
    for name, (predicted_s, measured_s) in {
        "trainer": checked.trainer_s,
        "generator": checked.sample_s,
    }.items():
        yield f"  {name:<9} busy {predicted_s:.3g} s predicted, {measured_s:.3g} s measured"
