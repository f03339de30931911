"""The configuration of recipes/preferences.py. Imports no torch.

Its keys are those of the main job wherever they mean the same; conf/preferences.yaml has their
values, and what the others mean.
"""

from __future__ import annotations

import functools
from typing import Literal

from llamarl.config.command_line import JobKind, sampling_job
from llamarl.config.conversion import known_keys, to_values
from llamarl.config.recipe import main
from llamarl.config.rules import check_sampling
from llamarl.config.schema import Config
from llamarl.config.sections.reward import AnyRewardSettings, parts_of
from llamarl.config.sections.task import AnyTaskSettings, EnvironmentSettings
from llamarl.words.choices import DeviceName, Pairing
from llamarl.words.fields import (
    Count,
    Natural,
    NonNegative,
    Options,
    Positive,
    PositiveShare,
    Seed,
    Share,
    Text,
    marked,
    settings_dataclass,
)
from llamarl.words.findings import Findings, Problem


@settings_dataclass
class PolicySettings:
    """The model whose completions are compared."""

    path: Text = marked("data")
    """Directory of the model that answers."""
    dtype: Literal["float32", "bfloat16"] = marked("identity")
    """Type of its weights."""
    template_options: Options = marked("data")
    """Variables of the chat template: model.template_options.enable_thinking=false."""


@settings_dataclass
class SamplerSettings:
    max_slots: Count
    """Completions that a rank decodes at once."""
    chunk_tokens: Count
    """Tokens of a slot between two looks at new work, new weights and requests."""
    top_k: Natural
    """Tokens to sample from; 0: all."""
    top_p: PositiveShare
    """Probability mass to sample from."""
    min_p: Share
    """Leave out tokens whose probability is below this share of the likeliest's, before top_k and
    top_p; 0: none.
    """
    min_new_tokens: Natural
    """Tokens before which there is no end token. The trainer and the reference leave it out
    there too.
    """
    cache_tokens: Count | None
    """Places of the K/V cache. Completions that do not fit wait; null: enough for max_slots of
    the longest sequence.
    """
    prefill_chunk: Count
    """Tokens of a prompt that are prefilled at once, so that a long one does not hold up the
    others.
    """


@settings_dataclass
class HoldOutSettings:
    num_prompts: Natural
    """Prompts that a task holds out if it has no data of its own for that: at most a tenth."""


@settings_dataclass
class PreferencesConfig:
    out: Text
    """File of pairs. Until all are there: OUT.part and OUT.progress."""
    resume: Literal["auto", "never"]
    """auto: continue OUT.part if it holds the same pairs; never: start again, even if OUT is
    there.
    """
    seed: Seed = marked("identity")
    """Seed of the samples, of the two that pairing=random takes, and of label_noise."""
    split: Literal["train", "held_out", "all"] = marked("identity")
    """Prompts of the task: train: those that a run trains on; held_out: those that it is
    evaluated on; all.
    """
    num_prompts: Count | None = marked("identity")
    """The first so many of them; null: all."""
    samples: Natural = marked("identity")
    """Completions of a prompt."""
    references: list[Text] = marked("identity")
    """Keys of the row whose answers join the completions: [answer]. With samples=0,
    [chosen,rejected] labels pairs again.
    """
    pairing: Pairing = marked("identity")
    """all: each two of a prompt's completions; best_worst: by their scores; random: two of them."""
    label_noise: Share = marked("identity")
    """Share of the pairs whose sides are exchanged, for studies."""
    margin_coef: NonNegative = marked("identity")
    """A row's margin, which a reward model's loss subtracts, is this times the difference of
    the scores.
    """
    groups_per_step: Count = marked("identity")
    """Prompts that are answered at a time. Then their pairs are written."""
    max_new_tokens: Count = marked("identity")
    """Tokens of a completion at most."""
    temperature: Positive = marked("identity")
    """Sampling temperature."""
    device: DeviceName
    """auto: a GPU where there is one, else the CPU; or one of the others. mps is a Mac's GPU, on
    which nothing was tried (docs/quickstart.md).
    """
    threads: Count | None
    """Intra-op threads; null: 1 on CPUs, for equal bits."""
    timeout_s: Positive
    """Seconds that the process group of the models may wait."""
    model: PolicySettings
    task: AnyTaskSettings = marked("data")
    eval: HoldOutSettings = marked("data")
    generator: SamplerSettings = marked("identity")
    reward: AnyRewardSettings


def as_run(config: PreferencesConfig) -> Config:
    """Return a main job that samples and scores in the same way, in one process and without
    evaluations.
    """
    shared = ("seed", "max_new_tokens", "temperature", "device", "threads", "timeout_s")
    sections = ("task", "reward", "model", "eval", "generator")
    group_size = max(2, min(config.samples, config.generator.max_slots))
    settings = {"eval.every": 0, "group_size": group_size}
    return sampling_job(config, (*shared, *sections), settings)


def check(
    config: PreferencesConfig, world_size: int, local_world_size: int | None = None
) -> list[Problem]:
    """Return the values that cannot work together, or with this many ranks and these files."""
    found = Findings(to_values(config))
    if world_size > 1:
        what = "pairs are made by one process; start it with python"
        found.problems.append(Problem(f"{world_size} ranks", what))
    if config.samples + len(config.references) < 2:
        what = (
            "a single completion has nothing to be compared with; samples=2 or more, or "
            "references=[answer]"
        )
        found.add(what, "samples", "references")
    if config.task.kind == "mixture":
        found.add("pairs come from one task; choose a part of the mixture", "task.kind")
    if isinstance(config.task, EnvironmentSettings):
        found.add("no environment is played here; choose a task of one turn", "task.kind")
    split = ("reward.replicate", "reward.tensor_parallel")
    if config.reward.replicate * config.reward.tensor_parallel > 1:
        found.add("the scorer lies in one process here; set both to 1", *split)
    if config.reward.stream:
        found.add(
            "completions are scored when they are whole; reward.stream=false", "reward.stream"
        )
    for part in parts_of(config.reward):
        if part.settings.is_novelty:
            remedy = "another reward" if part.weight is None else "leave the part out"
            what = (
                "novelty compares with the earlier completions of a run, and there are none "
                f"here; {remedy}"
            )
            found.add(what, part.key("kind"))
    keys = known_keys(PreferencesConfig).keys() - set(split)
    return found.problems + check_sampling(as_run(config), keys)


PREFERENCES = JobKind("preferences", PreferencesConfig, check=check)
preferences_main = functools.partial(main, kind=PREFERENCES)
