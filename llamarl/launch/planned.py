"""Choose the ranks of trainer and generator by a hardware profile, if placement.sheet names one.

    config, words = planned_placement(config, world_size)

The profile says what the machine does; the configuration says the job. The planner chooses how many
ranks train and how many generate. Microbatch, slots and degrees stay as configured.
"""

from __future__ import annotations

import dataclasses

from llamarl.config.command_line import Config
from llamarl.config.placement import TINY_MODEL
from llamarl.memory import GIB
from llamarl.planner.predict import Prediction
from llamarl.planner.profile import read_profile
from llamarl.planner.search import SearchSettings, best_of


def planned_placement(config: Config, world_size: int) -> tuple[Config, str]:
    """Return the configuration with the ranks whose predicted step is shortest, and that step in
    words. Without placement.sheet, or on one rank, they are as given and "".

    ValueError if the profile cannot be read, or if no split fits its memory.
    """
    name = config.placement.sheet
    if name is None or world_size == 1:
        return config, ""
    profile = read_profile(name)
    memory = profile.device.memory_gib * GIB * profile.assumed("memory_share")
    found, _ = best_of(_settings(config), profile, gpus=world_size, memory=memory)
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
    planned = dataclasses.replace(config, placement=placement)
    return planned, _words(name, best, found.synchronous)


def _settings(config: Config) -> SearchSettings:
    return SearchSettings(
        path=str(config.model.path or TINY_MODEL),
        dtype=config.model.dtype,
        compute_dtype=config.trainer.compute_dtype,
        optimizer=config.trainer.optimizer,
        checkpointing=config.trainer.activation_checkpointing,
        trainer_tensor=config.trainer.tensor_parallel,
        generator_tensor=config.generator.tensor_parallel,
        quantize=getattr(config.generator, "quantize", "none"),
        groups_per_step=config.groups_per_step,
        group_size=config.group_size,
        max_prompt_tokens=config.task.max_prompt_tokens,
        max_new_tokens=config.max_new_tokens,
        length_sigma=0.0,  # not known before the run, and nor are the mean lengths
        max_lag=config.max_lag or 1,
        overcommit=config.overcommit if isinstance(config.overcommit, int) else None,
    )


def _words(sheet: str, best: Prediction, synchronous: Prediction | None) -> str:
    words = f"{best.step_s:.3g} s a step by {sheet}"
    if synchronous is not None and synchronous.step_s <= best.step_s:
        words += (
            f"; the best synchronous one {synchronous.step_s:.3g} s: "
            "asynchrony is not expected to pay"
        )
    return words
