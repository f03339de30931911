"""Defaults that follow from the model's directory: what conf/model/hf.yaml and conf/task say by
`${lr_of:...}` and its like. A value that is given, on the command line or by an experiment, stands
in the place of such a default. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from llamarl.config.schema import Config
from llamarl.models.config import ModelConfig, read_config, tiny_directory
from llamarl.models.sharding import num_parameters

# Learning rates by the number of parameters: below each bound, and above all of them. An 8B model
# has up to 8.5 billion.
RATES = ((1_000_000_000, 1e-5), (8_500_000_000, 3e-6))
RATE_ABOVE = 1e-6
WARMUP_STEPS = 5
MOST_SLOTS = 64
MOST_EVALUATED = 500


def model_at(path: str | Path | None) -> ModelConfig | None:
    """Read the config.json of a directory; None if it cannot be read, which is reported where the
    model is checked.
    """
    try:
        return None if path is None else read_config(str(path))
    except (OSError, ValueError):
        return None


def is_tiny(path: str | Path | None) -> bool:
    """Whether a directory holds the embedded model, or one that was trained from it. None stands
    for the embedded model.
    """
    return path is None or model_at(path) == read_config(tiny_directory())


def lr_of(path: str | None) -> float:
    """Return the learning rate for the size of the model in a directory."""
    model = model_at(path)
    size = 0 if model is None else num_parameters(model)
    return next((rate for bound, rate in RATES if size < bound), RATE_ABOVE)


def by_model(path: str | None, tiny: object, other: object) -> object:
    """Return the value for the tiny model, or that for any other."""
    return tiny if is_tiny(path) else other


def warmup_of(max_steps: int, decay_steps: int | None) -> int:
    """Return the steps of the warm-up, which a short run and its decay leave less room for. A step
    follows it.
    """
    return max(0, min(WARMUP_STEPS, max_steps - max(decay_steps or 0, 1)))


def slots_of(max_lag: int | None, groups_per_step: int, group_size: int) -> int:
    """Return the completions that a generator decodes at once: all that can be in flight, up to
    MOST_SLOTS, and a group at least.
    """
    batches = 1 + (1 if max_lag is None else max_lag)
    return max(group_size, min(MOST_SLOTS, batches * groups_per_step * group_size))


def evaluated_of(groups_per_step: int, group_size: int) -> int:
    """Return how many held-out prompts are asked: as many as two steps sample completions, so that
    an evaluation takes no longer than these.
    """
    return min(MOST_EVALUATED, 2 * groups_per_step * group_size)


def prompt_room(wanted: int, path: str | None, max_new_tokens: int) -> int:
    """Return the longest prompt: as wanted, or what the model's context leaves beside a completion.
    Where it leaves nothing, as wanted: that is refused, with what to lower.
    """
    model = model_at(tiny_directory() if path is None else path)
    if model is None or max_new_tokens >= model.max_position_embeddings:
        return wanted
    return min(wanted, model.max_position_embeddings - max_new_tokens)


def told(config: Config, path: Path) -> list[str]:
    """Return lines about what follows from the model in this directory, for a run's first lines:
    how it will learn, a task that was made for another model, and prompts that are cut short.
    """
    lines = []
    model = read_config(path, config.model.implementation)
    if not is_tiny(path):
        size = f"{num_parameters(model) / 1e6:,.0f} M parameters"
        default = lr_of(str(path))
        lr = f"lr {config.lr:g} for {size}"
        if config.lr != default:
            lr = f"lr {config.lr:g} (by default {default:g} for {size})"
        warmup = f"warm-up {config.trainer.warmup_steps} steps"
        slots = f"{config.generator.max_slots} slots a generator"
        asked = f"at most {config.eval.num_prompts} held-out prompts an evaluation"
        dtype = f"{config.model.dtype} in {config.model.builder or model.implementation} modules"
        lines.append(f"model    {lr}, {warmup}, {dtype}, {slots}, {asked}")
        if config.task.kind == "addition":
            lines.append(
                'task     addition asks "35+50=" as bare text and was made for the tiny model; '
                "task=questions asks chat models, and README lists others"
            )
    if model.implementation == "transformers":
        way = "each sequence by itself" if model.is_read_alone else "packed"
        lines.append(f"model    transformers' modules compute {model.architecture}, {way}")
    if config.longest_asked == model.max_position_embeddings:
        key = config.longest_keys.partition(" ")[0]
        room = config.longest_asked - config.max_new_tokens
        context = f"the model's context of {model.max_position_embeddings}"
        lines.append(
            f"prompts  {key}={room}: {context} less max_new_tokens={config.max_new_tokens}"
        )
    return lines


for _rule in (by_model, lr_of, warmup_of, slots_of, evaluated_of, prompt_room):
    OmegaConf.register_new_resolver(_rule.__name__, _rule, replace=True)
