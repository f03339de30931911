"""Choose the ranks of trainer and generator by a hardware profile, if placement.sheet names one.

    planned = planned_placement(config, world_size)
    planned.config, planned.words

The profile says what the machine does; the configuration says the job. The planner chooses how many
ranks train and how many generate. Microbatch, slots and degrees stay as configured.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from llamarl.config.command_line import Config
from llamarl.config.placement import TINY_MODEL
from llamarl.memory import GIB
from llamarl.models.config import read_config
from llamarl.planner.costs import Costs, Numerics, Work
from llamarl.planner.predict import Prediction, Predictor
from llamarl.planner.profile import Profile, read_profile
from llamarl.planner.search import Limits, search


@dataclass(frozen=True, slots=True)
class Planned:
    """A configuration with ranks. words: the predicted step, for people."""

    config: Config
    words: str


def planned_placement(config: Config, world_size: int) -> Planned | None:
    """Return the configuration with the ranks whose predicted step is shortest; None if there is no
    placement.sheet, or one rank hosts all.

    ValueError if the profile cannot be read, or if no split fits its memory.
    """
    name = config.placement.sheet
    if name is None or world_size == 1:
        return None
    profile = read_profile(name)
    predictor = _predictor(config, profile)
    limits = Limits(
        gpus=world_size,
        memory=profile.device.memory_gib * GIB * profile.assumed("memory_share"),
        overcommit=config.overcommit if isinstance(config.overcommit, int) else None,
        trainer_tensor=config.trainer.tensor_parallel,
        generator_tensor=config.generator.tensor_parallel,
    )
    found = search(predictor, limits)
    best = found.asynchronous
    if best is None:
        raise ValueError(
            f"placement.sheet={name}: no split of {world_size} ranks into trainers and generators "
            "fits; leave it out, and give placement.trainer and placement.generator"
        )
    first = best.plan.trainer.gpus
    placement = dataclasses.replace(
        config.placement,
        trainer=list(range(first)),
        generator=list(range(first, first + best.plan.generator.gpus)),
    )
    return Planned(
        config=dataclasses.replace(config, placement=placement),
        words=_words(name, best, found.synchronous),
    )


def _predictor(config: Config, profile: Profile) -> Predictor:
    trainer = config.trainer
    work = Work(
        groups=config.groups_per_step,
        group_size=config.group_size,
        # Not known before the run: the defaults of a search.
        prompt_tokens=config.task.max_prompt_tokens / 2,
        completion_tokens=config.max_new_tokens / 2,
        longest_prompt=config.task.max_prompt_tokens,
        max_new_tokens=config.max_new_tokens,
        max_lag=config.max_lag or 1,
    )
    numerics = Numerics(
        dtype=config.model.dtype,
        compute_dtype=trainer.compute_dtype,
        quantize=getattr(config.generator, "quantize", "none"),
        optimizer=trainer.optimizer,
        checkpointing=trainer.activation_checkpointing,
        on_cpu=profile.device.kind == "cpu",
    )
    model = read_config(config.model.path or TINY_MODEL)
    return Predictor.of(Costs(profile, model, numerics), work)


def _words(sheet: str, best: Prediction, synchronous: Prediction | None) -> str:
    words = f"{best.step_s:.3g} s a step by {sheet}"
    if synchronous is not None and synchronous.step_s <= best.step_s:
        words += (
            f"; the best synchronous one {synchronous.step_s:.3g} s: "
            "asynchrony is not expected to pay"
        )
    return words
