"""The words of the planner's command line: key=value, with the keys of the main job where it has
them.

    settings = read_words(["model.path=DIR", "groups_per_step=64"])
    settings.work(), settings.numerics(checkpointing=False)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.planner.plans import ITEMSIZES, QUANTIZED, Numerics, Work
from llamarl.words.names import did_you_mean

OPTIMIZERS = ("adamw", "adamw8bit")
_AUTO = ("auto", "null")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a search is told. None: not given, so that the planner chooses, or takes a default that
    follows from others.
    """

    path: str
    dtype: str = "bfloat16"
    compute_dtype: str | None = None
    optimizer: str = "adamw"
    checkpointing: bool | None = None
    trainer_tensor: int | None = None
    generator_tensor: int | None = None
    quantize: str = "none"
    groups: int = 64
    group_size: int = 8
    max_prompt_tokens: int = 512
    max_new_tokens: int = 1024
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    length_sigma: float = 0.5
    max_lag: int = 1
    overcommit: int | None = None

    def work(self) -> Work:
        """Return the work of a step. ValueError for sizes that contradict each other."""
        prompt = self.max_prompt_tokens / 2 if self.prompt_tokens is None else self.prompt_tokens
        completion = self.completion_tokens
        if completion is None:
            completion = self.max_new_tokens / 2
        return Work(
            groups=self.groups,
            group_size=self.group_size,
            prompt_tokens=prompt,
            completion_tokens=completion,
            longest_prompt=self.max_prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            sigma=self.length_sigma,
            max_lag=self.max_lag,
        )

    def numerics(self, *, checkpointing: bool, on_cpu: bool = False) -> Numerics:
        """Return the numbers that the job computes in."""
        return Numerics(
            dtype=self.dtype,
            compute_dtype=self.compute_dtype or self.dtype,
            quantize=self.quantize,
            optimizer=self.optimizer,
            checkpointing=checkpointing,
            on_cpu=on_cpu,
        )


# Key of the command line -> field. Those of the main job are called as they are there.
KEYS = {
    "model.path": "path",
    "model.dtype": "dtype",
    "trainer.compute_dtype": "compute_dtype",
    "trainer.optimizer": "optimizer",
    "trainer.activation_checkpointing": "checkpointing",
    "trainer.tensor_parallel": "trainer_tensor",
    "generator.tensor_parallel": "generator_tensor",
    "generator.quantize": "quantize",
    "groups_per_step": "groups",
    "group_size": "group_size",
    "task.max_prompt_tokens": "max_prompt_tokens",
    "max_new_tokens": "max_new_tokens",
    "prompt_tokens": "prompt_tokens",
    "completion_tokens": "completion_tokens",
    "length_sigma": "length_sigma",
    "max_lag": "max_lag",
    "overcommit": "overcommit",
}
_CHOICES = {
    "dtype": tuple(name for name in ITEMSIZES if "float" in name and name != "float8"),
    "compute_dtype": ("float32", "bfloat16"),
    "optimizer": OPTIMIZERS,
    "quantize": ("none", *QUANTIZED),
}
_COUNTS = (
    "trainer_tensor generator_tensor groups group_size max_prompt_tokens max_new_tokens".split()
)
_FROM_ZERO = ("max_lag", "overcommit")


def read_words(words: Sequence[str], known: Sequence[str] = tuple(KEYS)) -> Settings:
    """Return the settings of key=value words. ValueError names all that is wrong, a line each.

    known: the keys that this command has.
    """
    problems = []
    values: dict[str, object] = {}
    for word in words:
        key, has_value, text = word.partition("=")
        if not has_value or key not in known:
            near = did_you_mean(key, known)
            problems.append(f"{word}: unknown key{near}; known: {', '.join(known)}")
            continue
        name = KEYS[key]
        try:
            values[name] = _value(name, text)
        except ValueError as error:
            problems.append(f"{word}: {error}")
    if "path" not in values:
        problems.append("model.path: missing; a directory with a config.json, or that file")
    if problems:
        raise ValueError("\n".join(problems))
    return Settings(**values)  # type: ignore[arg-type]  # each was converted by its field's name


def _value(name: str, text: str) -> object:
    """Convert a word's value to its field's type. ValueError says what it needs."""
    optional = {one.name for one in dataclasses.fields(Settings) if one.default is None}
    if text in _AUTO and name in optional:
        return None
    if name == "path":
        return text
    if name in _CHOICES:
        if text not in _CHOICES[name]:
            near = did_you_mean(text, _CHOICES[name])
            raise ValueError(f"need one of {', '.join(_CHOICES[name])}{near}")
        return text
    if name == "checkpointing":
        if text not in ("true", "false"):
            raise ValueError("need true, false or auto")
        return text == "true"
    if name in _COUNTS or name in _FROM_ZERO:
        least = 0 if name in _FROM_ZERO else 1
        if not text.isdigit() or int(text) < least:
            raise ValueError(f"need a whole number of at least {least}")
        return int(text)
    return _number(text, from_zero=name == "length_sigma")


def _number(text: str, *, from_zero: bool) -> float:
    needs = "a number of at least 0" if from_zero else "a number above 0"
    try:
        number = float(text)
    except ValueError as error:
        raise ValueError(f"need {needs}") from error
    is_enough = number >= 0 if from_zero else number > 0
    if not (is_enough and number < float("inf")):
        raise ValueError(f"need {needs}")
    return number
