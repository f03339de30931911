"""Which part of each parameter a rank holds under tensor parallelism. Pure; the model and the
weight plan both read it.

Projections into the attention heads and into the MLP are split by output rows, those back into the
model by input columns, the vocabulary by rows; norms are whole everywhere. Query heads are split as
evenly as they go; a rank holds the key/value heads that its query heads read, so one that several
ranks need is held by each of them.

Models that transformers' modules compute are split evenly, by transformers' own plan
(`ModelConfig.plan`): rows or columns of projections, and whole experts. Embedding and head are
whole everywhere.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from dataclasses import dataclass

from llamarl.models.shape import ModelConfig, Shape

SCALE = "_scale"  # behind the name of a quantised weight: its per-row scales
HEAD = "lm_head"  # quantised only where asked: every logit passes through it
LORA_A = ".lora_a"  # ends the names of adapters: A [r, in] and B [out, r] of a projection
LORA_B = ".lora_b"
ALL_LINEAR = "all-linear"  # in the place of targets: every projection of the layers
# Kinds of transformers' plans: how ranks share a module.
BY_ROWS = ("colwise", "colwise_gather_output")  # whose output is each rank's part, or joined
BY_COLUMNS = ("rowwise", "rowwise_split_input")  # whose input is each rank's part, or whole
EXPERTS = "ep_dispatch_experts"
WHOLE = "replicated_with_grad_allreduce"  # each rank sees a part of what it computes
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_IN_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
ALIGN_BYTES = 64  # everything starts on a cache line


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a global tensor: first index and length of each dim."""

    offsets: Shape
    lengths: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.lengths)

    @property
    def ends(self) -> Shape:
        """The first index behind the box in each dim."""
        return tuple(map(operator.add, self.offsets, self.lengths))

    def fits(self, shape: Shape) -> bool:
        """Whether this box lies inside a tensor of this shape."""
        return len(shape) == len(self.lengths) and all(map(operator.le, self.ends, shape))

    def cut(self, dim: int, first: int, count: int) -> Box:
        """Return this box with `count` of its places in `dim`, from its own place `first` on."""
        offsets = list(self.offsets)
        lengths = list(self.lengths)
        offsets[dim] += first
        lengths[dim] = count
        return Box(tuple(offsets), tuple(lengths))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this box in a tensor that holds `outer`."""
        starts = map(operator.sub, self.offsets, outer.offsets)
        stops = map(operator.sub, self.ends, outer.offsets)
        return tuple(map(slice, starts, stops))


def overlap(a: Box, b: Box) -> Box:
    """Return the box that both boxes cover; some lengths are 0 if they share nothing."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    lengths = map(operator.sub, map(min, a.ends, b.ends), offsets)
    return Box(offsets, tuple(max(0, length) for length in lengths))


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of one tensor-parallel rank. readers: how many of its query heads read
    each of its K/V heads, in their order.
    """

    first_query: int
    num_query: int
    first_kv: int
    readers: tuple[int, ...]

    @property
    def num_kv(self) -> int:
        """The number of key/value heads that the rank holds."""
        return len(self.readers)

    @property
    def uniform(self) -> bool:
        """Whether every K/V head serves equally many query heads."""
        return len(set(self.readers)) == 1

    @property
    def num_cached(self) -> int:
        """The key/value heads that attention reads. A kernel takes equally many query heads for
        each; where they are not, each query head gets its own.
        """
        return self.num_kv if self.uniform else self.num_query


def span(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return (first, count) of the rank's share of `total`, as even as it goes."""
    first = total * rank // size
    end = total * (rank + 1) // size
    return first, end - first


def heads_of(config: ModelConfig, rank: int, size: int) -> Heads:
    """Return the attention heads of a rank. ValueError if there are fewer query heads than
    ranks.
    """
    if size > config.num_attention_heads:
        raise ValueError(
            f"tensor_parallel={size}: the model has {config.num_attention_heads} query heads "
            "to split"
        )
    first, count = span(config.num_attention_heads, rank, size)
    per_kv = config.num_attention_heads // config.num_key_value_heads
    readers = Counter(query // per_kv for query in range(first, first + count))
    return Heads(
        first_query=first,
        num_query=count,
        first_kv=first // per_kv,
        readers=tuple(readers.values()),
    )


def tensor_parallel_box(
    config: ModelConfig,
    name: str,
    shape: Shape,
    rank: int,
    size: int,
    *,
    split_vocabulary: bool = True,
) -> Box:
    """Return the part of the parameter with this Hugging Face name that tensor-parallel rank `rank`
    of `size` holds.
    """
    whole = Box.whole(shape)
    if size == 1:
        return whole
    if config.implementation == "transformers":
        dim = _split_dim(config, name)
        return whole if dim is None else whole.cut(dim, *span(shape[dim], rank, size))
    head_dim = config.head_dim
    heads = heads_of(config, rank, size)
    query = (heads.first_query * head_dim, heads.num_query * head_dim)
    key_value = (heads.first_kv * head_dim, heads.num_kv * head_dim)
    hidden = span(config.intermediate_size, rank, size)
    columns = {"o_proj": query, "down_proj": hidden}
    rows = {
        "q_proj": query,
        "k_proj": key_value,
        "v_proj": key_value,
        "gate_proj": hidden,
        "up_proj": hidden,
    }
    if split_vocabulary:
        vocabulary = span(config.vocab_size, rank, size)
        rows |= {"embed_tokens": vocabulary, "lm_head": vocabulary}
    module = name.split(".")[-2]
    # An adapter's A has a weight's columns and its B a weight's rows; its rank is not split.
    if module in rows and not name.endswith(LORA_A):
        return whole.cut(0, *rows[module])
    # Not the per-row scales of a quantised weight.
    if module in columns and len(shape) == 2 and not name.endswith(LORA_B):
        return whole.cut(1, *columns[module])
    return whole


def kind_of(config: ModelConfig, module: str) -> str | None:
    """Return how tensor-parallel ranks share a module of transformers with this name; None: each
    has it whole.
    """
    return dict(config.plan).get(without_numbers(module))


def without_numbers(name: str) -> str:
    """Return the name of a module or parameter as transformers' plans write it, for all layers."""
    return _NUMBER.sub(".*", name)


def _split_dim(config: ModelConfig, name: str) -> int | None:
    """Return the dim of a parameter of transformers' modules, or of its adapter, that ranks share;
    None if each holds the whole.
    """
    module, _, parameter = name.rpartition(".")
    kind = kind_of(config, module)
    if kind == EXPERTS or (kind in BY_ROWS and not name.endswith(LORA_A)):
        return 0
    if kind in BY_COLUMNS and parameter != "bias" and not name.endswith(LORA_B):
        return 1
    return None


def why_not_split(config: ModelConfig, size: int) -> str | None:
    """Return why `size` tensor-parallel ranks cannot share a model that transformers' modules
    compute, as half a sentence; None if they can.
    """
    if size == 1 or config.implementation != "transformers":
        return None
    why = config.unsplit
    if config.split_heads % size:
        why = f"at most {config.split_heads} share its heads evenly"
    for name, shape in parameter_shapes(config).items():
        dim = _split_dim(config, name)
        if not why and dim is not None and shape[dim] % size:
            why = f"{name} has {shape[dim]} {('rows', 'columns')[dim]}"
    if not why:
        return None
    return (
        f"transformers' modules compute {config.architecture}, and {size} ranks cannot share its "
        f"layers: {why}"
    )


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return Hugging Face name -> shape of every parameter, in the decoder's order."""
    if config.shapes:
        return {
            name: shape
            for name, shape in config.shapes
            if _layer_of(name) < config.num_hidden_layers
        }
    d = config.hidden_size
    f = config.intermediate_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    vocabulary = (config.vocab_size, d)
    of_layer: dict[str, Shape] = {}
    for projection, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        of_layer[f"self_attn.{projection}.weight"] = (rows, d)
        if config.attention_bias:
            of_layer[f"self_attn.{projection}.bias"] = (rows,)
    of_layer["self_attn.o_proj.weight"] = (d, q)
    if config.traits.qk_norm:
        of_layer["self_attn.q_norm.weight"] = (config.head_dim,)
        of_layer["self_attn.k_norm.weight"] = (config.head_dim,)
    of_layer["mlp.gate_proj.weight"] = (f, d)
    of_layer["mlp.down_proj.weight"] = (d, f)
    of_layer["mlp.up_proj.weight"] = (f, d)
    of_layer["input_layernorm.weight"] = (d,)
    of_layer["post_attention_layernorm.weight"] = (d,)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": vocabulary}
    for i in range(config.num_hidden_layers):
        for name, shape in of_layer.items():
            shapes[f"model.layers.{i}.{name}"] = shape
    shapes["model.norm.weight"] = (d,)
    if config.labels:
        shapes["score.weight"] = (len(config.labels), d)
    elif not config.tie_word_embeddings:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def stored_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every tensor of a directory, by its name there."""
    return parameter_shapes(config) | dict(config.buffers + config.carried)


def _layer_of(name: str) -> int:
    """Return the layer that a parameter of transformers' belongs to; -1: to none."""
    found = _IN_LAYER.search(name)
    return int(found.group(1)) if found else -1


def adapter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return Hugging Face name -> shape of the adapters, in the decoder's order; empty without any.

    ValueError for targets that the model does not have.
    """
    lora = config.lora
    if lora is None:
        return {}
    shapes: dict[str, Shape] = {}
    known = set()
    for name, (outs, *ins) in parameter_shapes(config).items():
        projection = name.removesuffix(".weight")
        target = projection.split(".")[-1]
        is_projection = name.startswith("model.layers.") and target.endswith("_proj")
        if config.shapes:
            is_projection = projection in config.linears
        if not (is_projection and ins):
            continue
        known.add(target)
        if target in lora.targets or lora.targets == (ALL_LINEAR,):
            shapes[projection + LORA_A] = (lora.rank, *ins)
            shapes[projection + LORA_B] = (outs, lora.rank)
    missing = set(lora.targets) - known - {ALL_LINEAR}
    if missing:
        raise ValueError(
            f"no projection is called {', '.join(sorted(missing))}; choose among "
            f"{', '.join(sorted(known))}"
        )
    return shapes


def whole_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return Hugging Face name -> shape of every parameter and adapter."""
    return parameter_shapes(config) | adapter_shapes(config)


def num_parameters(config: ModelConfig) -> int:
    """Return the number of elements of all parameters."""
    shapes = parameter_shapes(config)
    return sum(math.prod(shape) for shape in shapes.values())


def is_quantized(name: str, shape: Shape, exclude: tuple[str, ...] = (HEAD,)) -> bool:
    """Whether a quantised generator holds this parameter in one byte an element; its scales are
    another, named name + SCALE.

    The projections of the layers and an untied head are, but for those whose Hugging Face name
    holds a fragment of `exclude` ("lm_head", "down_proj", "layers.0.").
    """
    is_projection = name.endswith("_proj.weight") or name == f"{HEAD}.weight"
    if not is_projection or len(shape) != 2:
        return False
    return not any(fragment in name for fragment in exclude)


def aligned(num_bytes: int) -> int:
    """Return the next place, from num_bytes on, where something may start."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
