"""Directories whose tensors are not called, or cut, as transformers' parameters are: an expert's
matrices by themselves, a head by another name. transformers' table of conversions says what becomes
of them. They are converted one by one, and only those that are asked for.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    Interleave,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from llamarl.models.directory import SafetensorsDir, refuse_unfit
from llamarl.models.fsdp import NamedTensors
from llamarl.models.shape import HEADS, RECREATED, ModelConfig
from llamarl.models.sharding import Shape, stored_shapes
from llamarl.models.transformers_config import whole_model

_ALL = slice(None)


@dataclass(slots=True)
class _Conversion:
    """How tensors become others: one that is only renamed, or those that a converter takes.

    target: the (first) name of what is made. sources: names of what it is made of, by the
    converter's patterns, in the order of their numbers.
    """

    target: str
    converter: WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def names(self) -> list[str]:
        """Names of what it takes."""
        return list(chain.from_iterable(self.sources.values()))

    @property
    def has_rows_of_experts(self) -> bool:
        """Whether its first step stacks the tensors of experts, and no later one mixes them."""
        if self.converter is None:
            return False
        first, *others = self.converter.operations
        stacks = isinstance(first, MergeModulelist) and first.dim == 0
        return stacks and all(_keeps_rows(other) for other in others)

    def run(
        self, model: Any, read: Callable[[str], Tensor], experts: slice = _ALL
    ) -> dict[str, Tensor]:
        """Return what is made, by name. read: returns a tensor that it takes. experts: those whose
        rows are made, where it has_rows_of_experts.
        """
        if self.converter is None:
            return {self.target: read(self.names[0])}
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names[experts]:
                later: Any = partial(read, name)  # called when it is converted
                converter.add_tensor(self.target, name, pattern, later)
        made = converter.convert(self.target, model=model, config=model.config)
        for name, tensor in made.items():
            if isinstance(tensor, list):
                made[name] = tensor[0]
        return made


def _keeps_rows(operation: Any) -> bool:
    """Whether a conversion's step computes each row of the first dimension from that row alone."""
    if isinstance(operation, Concatenate | Interleave):
        return operation.dim != 0
    if isinstance(operation, Transpose) and not operation.check_dims:
        return 0 not in (operation.dim0, operation.dim1)
    return False


def _conversions(
    names: Iterable[str],
    converters: list[WeightConverter],
    rename: Callable[[str], tuple[str, str | None]],
) -> dict[str, _Conversion]:
    """Return the conversions of tensors by the first name of what each makes. rename: returns that
    name, and the converter's pattern for the tensor's own, if a converter takes it.
    """
    converter_of = {}
    for converter in converters:
        converter_of.update(dict.fromkeys(converter.source_patterns, converter))
    found: dict[str, _Conversion] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename(name)
        taker = None if pattern is None else converter_of[pattern]
        conversion = found.setdefault(target, _Conversion(target, taker))
        conversion.sources[pattern or name].append(name)
    return found


def _by_kind(transforms: Iterable[Any]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """Return the renamings and the converters among transformers' transforms."""
    given = list(transforms)
    renamings = [transform for transform in given if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in given if isinstance(transform, WeightConverter)]
    return renamings, converters


# --- From a directory ---


@dataclass(frozen=True, slots=True)
class _Slice:
    """A parameter that is read where it is sliced."""

    weights: ConvertedWeights
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        conversion = self.weights.file_of[self.name]
        if conversion.converter is None:
            return self.weights.source.get_slice(conversion.names[0])[index]
        is_boxed = isinstance(index, tuple) and len(index) > 0
        if not (is_boxed and conversion.has_rows_of_experts):
            return self.weights.made(conversion, 0, None)[self.name][index]
        experts, *others = index
        made = self.weights.made(conversion, experts.start, experts.stop)
        return made[self.name][(_ALL, *others)]


class ConvertedWeights:
    """The weights of such a directory by transformers' names. It has what SafetensorsDir has of
    them: of a tensor no more is read than what a conversion needs, of experts the rows that are
    asked for. ValueError naming what does not fit config.json; no numbers are read for that.

    may_lack: names that need not be there.
    """

    def __init__(self, path: Path, config: ModelConfig, *, may_lack: Collection[str] = ()):
        self.path = path
        self.source = SafetensorsDir(path)
        self._model: Any = whole_model(config.fields, torch.float32)
        self._last: tuple[Any, dict[str, Tensor]] = (None, {})
        self.file_of: dict[str, _Conversion] = {}  # name of a parameter -> how it is made
        wanted = stored_shapes(config)
        held = self._model.state_dict()
        renamings, converters = _by_kind(get_model_conversion_mapping(self._model))
        rename = partial(self._renamed, held, renamings, converters)
        ignored = self._model._keys_to_ignore_on_load_unexpected or ()
        # A model that is trained to score may begin as a language model, and a tied one keep a
        # head.
        heads = HEADS if config.labels or config.tie_word_embeddings else ()
        problems = []
        for conversion in _conversions(self.source.file_of, converters, rename).values():
            name = conversion.target
            if name in held:
                problems += self._add(conversion, wanted)
                continue
            is_known = name.endswith((*heads, *RECREATED))
            if not is_known and not any(re.search(pattern, name) for pattern in ignored):
                problems.append(f"{name}: not in this architecture")
        for name in wanted.keys() - self.file_of.keys() - set(may_lack):
            problems.append(f"{name}: absent")
        refuse_unfit(path, problems)

    def _renamed(
        self,
        held: dict[str, Tensor],
        renamings: list[WeightRenaming],
        converters: list[WeightConverter],
        name: str,
    ) -> tuple[str, str | None]:
        """Return what transformers calls a tensor, and the converter's pattern that takes it."""
        base = self._model.base_model_prefix
        renamed, pattern = rename_source_key(name, renamings, converters, base, held)
        if renamed not in held and name in held:
            return name, None
        return renamed, pattern

    def _add(self, conversion: _Conversion, wanted: dict[str, Shape]) -> list[str]:
        """Note what a conversion makes. Returns what is wrong with it."""
        for name in conversion.names:
            problems = self.source.problems_of(name)
            if problems:
                return problems
        try:
            made = conversion.run(self._model, self._outline)
        except (RuntimeError, ValueError, IndexError) as error:  # sizes that do not go together
            what = str(error).partition("\n")[0]
            return [f"{conversion.target}: cannot be made of {conversion.names[0]}, ... ({what})"]
        problems = []
        for name in made.keys() & wanted.keys():
            shape = tuple(made[name].shape)
            if shape != wanted[name]:
                problems.append(f"{name}: shape {shape}, the config says {wanted[name]}")
            self.file_of[name] = conversion
        return problems

    def _outline(self, name: str) -> Tensor:
        """Return a tensor of the directory without numbers."""
        return torch.empty(self.source.get_slice(name).get_shape(), device="meta")

    def _read(self, name: str) -> Tensor:
        return self.source.get_slice(name)[...]

    def made(self, conversion: _Conversion, start: int, stop: int | None) -> dict[str, Tensor]:
        """Return what a conversion makes, of the experts from start to stop. What was made last is
        kept, because one conversion may make several parameters.
        """
        asked = (id(conversion), start, stop)
        if self._last[0] != asked:
            self._last = (None, {})  # its memory is needed
            self._last = (asked, conversion.run(self._model, self._read, slice(start, stop)))
        return self._last[1]

    def get_slice(self, name: str) -> _Slice:
        """Return a parameter that is read only where it is sliced."""
        return _Slice(self, name)


# --- To a directory ---


class StoredForm:
    """How a directory of this family calls and cuts transformers' parameters."""

    def __init__(self, config: ModelConfig):
        self._model: Any = whole_model(config.fields, torch.float32)
        reverses = []
        for transform in get_model_conversion_mapping(self._model, add_legacy=False):
            # Without having read a directory's files, nobody knows whether their names had it.
            if not isinstance(transform, PrefixChange):
                reverses.append(transform.reverse_transform())
        self._renamings, converters = _by_kind(reversed(reverses))
        self._taker_of: dict[str, _Conversion] = {}  # name of a parameter -> what takes it
        rename = partial(self._renamed, converters)
        for conversion in _conversions(stored_shapes(config), converters, rename).values():
            self._taker_of.update(dict.fromkeys(conversion.names, conversion))

    def _renamed(self, converters: list[WeightConverter], name: str) -> tuple[str, str | None]:
        """Return the first name of what becomes of a parameter, and the converter's pattern that
        takes it.
        """
        for converter in converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return target, pattern
        return self._with_stored_name(name), None

    def _with_stored_name(self, name: str) -> str:
        """Return what a directory calls a tensor."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def tensors(self, named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield the directory's tensors, of parameters that come by transformers' names. One is
        held until all have come that are converted with it.
        """
        held: dict[str, Tensor] = {}
        for name, tensor in named:
            conversion = self._taker_of.get(name)
            if conversion is None:  # a score head that was drawn on a language model
                yield self._with_stored_name(name), tensor
                continue
            held[name] = tensor
            if not held.keys() >= set(conversion.names):
                continue
            for made, stored in conversion.run(self._model, held.pop).items():
                if conversion.converter is None:
                    yield made, stored
                else:
                    yield self._with_stored_name(made), stored
        assert not held, "all that are converted together come"
