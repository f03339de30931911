"""NativeDecode: a decoder's pass over the cache on a CPU as one call of a C kernel
(llamarl/machine/decode.c), for one token per row or for whole prompts.

The kernel multiplies with vector instructions or, in bfloat16 on a CPU with AMX, with tile
instructions. It sums a row in one order, whatever rows are beside it. oneDNN's packed products do
not: on a CPU with AMX a row has other bits among 32 rows than among 48.

The module's own forward reads weights in an order that is slow for few rows, and calls some thirty
small operations per layer. The kernel has its own copy of the weights, laid out once per policy
version. Its results equal the module's up to rounding (tests/unit/test_engine.py). In bfloat16 they
are closer to float32, because the residual stream is float32. Without a compiler the module
decodes.

Shapes: N rows, D model, H query heads, J key/value heads, K head dim, V vocabulary.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarl.inference.cache import SlotCache
from llamarl.inference.sampler import check_vector
from llamarl.machine.kernels import library
from llamarl.models.attention import Attention
from llamarl.models.build import Decoder, FeedForward, Layer, NativeDecoder
from llamarl.models.fused import RMSNorm, is_altered
from llamarl.models.lora import LoraLinear, adapters_of

_CPU = torch.device("cpu")
_FLAGS = {torch.float32: ("-fopenmp",), torch.bfloat16: ("-fopenmp", "-DBF16")}
# The modules whose forward the kernel computes. A subclass may compute something else.
_PLAIN = (
    *(NativeDecoder, nn.ModuleList, Layer, Attention, FeedForward),
    *(nn.Linear, LoraLinear, nn.Embedding, nn.Identity, RMSNorm, nn.SiLU),
)
# Ranks of adapters are filled up to a multiple, so that a product takes tiles with them as without.
_TILE_INPUTS = 32
_UNIT_INPUTS = 2

log = logging.getLogger(__name__)


def _of_type(kind: type, names: str) -> list[tuple[str, type]]:
    """Fields of a structure, named as in C."""
    return [(name, kind) for name in names.split()]


class _Layer(ctypes.Structure):
    _fields_ = _of_type(ctypes.c_void_p, "qkv output gate up down")
    _fields_ += _of_type(ctypes.c_void_p, "qkv_low output_low mlp_low down_low")
    _fields_ += _of_type(ctypes.c_void_p, "qkv_bias attention_norm mlp_norm")
    _fields_ += _of_type(ctypes.c_void_p, "keys values")


class _Model(ctypes.Structure):
    _fields_ = _of_type(ctypes.c_int64, "layers hidden heads groups head_dim units vocab")
    _fields_ += _of_type(ctypes.c_int64, "qkv_rank output_rank mlp_rank down_rank tiles")
    _fields_ += _of_type(ctypes.c_double, "eps scaling")
    _fields_ += _of_type(ctypes.c_void_p, "layer embedding norm head")


class _Step(ctypes.Structure):
    _fields_ = _of_type(ctypes.c_int64, "rows outputs capacity threads")
    _fields_ += _of_type(ctypes.c_void_p, "tokens positions slots last cos sin")
    _fields_ += _of_type(ctypes.c_void_p, "h qkv x gated logits")


def has_own_code(decoder: Decoder) -> bool:
    """Return whether a module of the decoder is of a subclass or has a hook, neither of which the
    kernel would run; if so, say which.
    """
    for name, module in decoder.named_modules():
        what = ""
        if type(module) not in _PLAIN:
            what = f"is a {type(module).__name__}"
        elif is_altered(module):
            what = "has a hook or a forward of its own"
        if what:
            log.warning(
                "%s %s: the C kernels leave such code out, so the model's modules compute here, "
                "which is slower",
                name or "the decoder",
                what,
            )
            return True
    return False


def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    return library("decode", *_FLAGS[dtype], structs=(_Layer, _Model, _Step))


class NativeDecode:
    """Computes what `decoder` does in the contexts Decode, Prefill and Pieces of a cache. Logits
    [N, V] float32.
    """

    def __init__(self, decoder: Decoder, dtype: torch.dtype):
        """Take a decoder that `fits`."""
        self.stale = True  # the weights were exchanged: lay them out again
        self._decoder = decoder
        self._dtype = dtype
        kernels = _library(dtype)
        assert kernels is not None, "`fits` says whether there are any"
        self._kernels = kernels
        self.has_tiles = bool(self._kernels.tiles_allowed())
        self.use_tiles = self.has_tiles
        # The kernel is another one if the source, the compiler or the CPU is.
        self.version = Path(self._kernels._name).name
        self._seen: list[tuple[int, int]] = []  # the last write to each weight
        self._seen_adapters: list[tuple[int, int]] = []
        self._kept: list[Tensor] = []  # what the structures below point to, and so do products
        self._products: list[_Product] = []
        self._layers = (_Layer * len(decoder.layers))()
        self._model = _Model()

    @staticmethod
    def fits(decoder: Decoder, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether every module is what the kernel computes, in a dtype that it knows, and
        the kernel could be compiled. Says so if only a subclass or a hook is in the way.
        """
        if device.type != "cpu" or dtype not in _FLAGS:
            return False
        if not all(isinstance(module, _PLAIN) for module in decoder.modules()):
            return False
        if any(type(parameter) is not nn.Parameter for parameter in decoder.parameters()):
            return False
        config = decoder.config
        if config.traits.qk_norm or config.num_attention_heads % config.num_key_value_heads:
            return False
        # Pairs of bfloat16 are multiplied at once.
        if config.hidden_size % 2 or config.intermediate_size % 2 or config.head_dim % 2:
            return False
        # A tensor-parallel rank communicates inside its modules.
        if decoder.tensor_parallel is not None or _library(dtype) is None:
            return False
        return not has_own_code(decoder)

    @torch.no_grad()
    def refresh(self) -> None:
        """Lay out the weights again if `stale`, or if one is another tensor than the last time or
        was written to since. Beside adapters the weights are frozen, and `stale` is about adapters.
        """
        adapters = {id(parameter) for _, parameter in adapters_of(self._decoder)}
        weights: list[tuple[int, int]] = []
        seen: list[tuple[int, int]] = []
        for parameter in self._decoder.parameters():
            of = seen if id(parameter) in adapters else weights
            of.append(_last_write(parameter))
        is_stale = self.stale and not adapters
        if is_stale or weights != self._seen:
            self._lay_out()
        elif not self.stale and seen == self._seen_adapters:
            return
        for product in self._products:
            product.take_adapters()
        self.stale = False
        self._seen = weights
        self._seen_adapters = seen

    def _lay_out(self) -> None:
        """Lay out the weights, with room for their adapters."""
        decoder = self._decoder
        config = decoder.config
        self._kept = []
        self._products = []
        width = self._kernels.panel_width()
        multiple = _TILE_INPUTS if self.has_tiles else _UNIT_INPUTS
        ranks = []
        for layer, its in zip(self._layers, decoder.layers):
            assert isinstance(its, Layer) and isinstance(its.mlp, FeedForward), "as `fits` saw"
            attn, mlp = its.attn, its.mlp
            qkv = (attn.q_proj, attn.k_proj, attn.v_proj)
            by_groups = partial(_by_groups, config.num_key_value_heads)
            of_layer = [
                _Product(layer, "qkv_low", {"qkv": qkv}, width, multiple, by_groups),
                _Product(layer, "output_low", {"output": (attn.output_proj,)}, width, multiple),
                _Product(layer, "mlp_low", {"gate": (mlp.w1,), "up": (mlp.w3,)}, width, multiple),
                _Product(layer, "down_low", {"down": (mlp.w2,)}, width, multiple),
            ]
            self._products += of_layer
            ranks = [product.rank for product in of_layer]
            if attn.q_proj.bias is not None:
                biases = by_groups([projection.bias for projection in qkv])
                layer.qkv_bias = self._keep(biases.float())
            layer.attention_norm = self._keep(its.sa_norm.scale.float())
            layer.mlp_norm = self._keep(its.mlp_norm.scale.float())
        norm = decoder.norm
        assert isinstance(norm, RMSNorm), "as `fits` saw"
        qkv_rank, output_rank, mlp_rank, down_rank = ranks
        self._model = _Model(
            layers=len(decoder.layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            head_dim=config.head_dim,
            units=config.intermediate_size,
            vocab=len(decoder.output_weight),
            qkv_rank=qkv_rank,
            output_rank=output_rank,
            mlp_rank=mlp_rank,
            down_rank=down_rank,
            eps=norm.eps,
            scaling=config.lora.scaling if config.lora else 0.0,
            layer=ctypes.addressof(self._layers),
            embedding=self._keep(decoder.tok_embeddings.weight),
            norm=self._keep(norm.scale.float()),
            head=self._keep(_panels(decoder.output_weight, width)),
        )

    def _keep(self, tensor: Tensor) -> int:
        """Keep a tensor until weights are laid out again, and return its address."""
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def __call__(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        cache: SlotCache,
        slots_N: Tensor,
        last_M: Tensor | None = None,
    ) -> Tensor:
        """Row i reads slots_N[i] up to positions_N[i], which it fills.

        last_M: the ascending rows that get logits. All int64. They are checked here, because C
        trusts them: IndexError for a token, place, slot or row out of range.
        """
        of_rows = self._looked_at(tokens_N, positions_N, cache, slots_N)
        outputs = rows = tokens_N.numel()
        if last_M is not None:
            outputs = last_M.numel()
            _check_indices("rows", last_M, outputs, rows)
        logits_MV = torch.empty(outputs, self._model.vocab)
        self._run(self._model, cache, of_rows, last_M, logits_MV)
        return logits_MV

    def hidden(
        self, tokens_N: Tensor, positions_N: Tensor, cache: SlotCache, slots_N: Tensor
    ) -> Tensor:
        """Run the same pass without the head. Returns the normed hidden states [N, D], in the
        model's dtype.
        """
        width = self._model.hidden
        headless = _Model.from_buffer_copy(self._model)
        headless.vocab = 0
        of_rows = self._looked_at(tokens_N, positions_N, cache, slots_N)
        rows = tokens_N.numel()
        x = self._run(headless, cache, of_rows, None, torch.empty(rows, 0))
        # They lie end to end, whatever the width of this room for them.
        return x.flatten()[: rows * width].unflatten(0, (-1, width))

    def _looked_at(
        self, tokens_N: Tensor, positions_N: Tensor, cache: SlotCache, slots_N: Tensor
    ) -> dict[str, Tensor]:
        """Check what the kernel is to be given and point it to the cache. Return what it needs of
        each row, [N, ...], by name in _Step.
        """
        rows = tokens_N.numel()
        _check_indices("token ids", tokens_N, rows, self._decoder.config.vocab_size)
        _check_indices("places", positions_N, rows, cache.capacity)
        _check_indices("slots", slots_N, rows, cache.rows)
        for layer, held in zip(self._layers, cache.layers):
            layer.keys = held.data_ptr()
            layer.values = layer.keys + held.nbytes // 2
        cos, sin = self._decoder.rotary(positions_N, cache.capacity)
        return {
            "tokens": tokens_N,
            "positions": positions_N,
            "slots": slots_N,
            "cos": cos.contiguous(),
            "sin": sin.contiguous(),
        }

    def _run(
        self,
        model: _Model,
        cache: SlotCache,
        of_rows: dict[str, Tensor],
        last_M: Tensor | None,
        logits_MV: Tensor,
    ) -> Tensor:
        """Run the kernel for these rows and write the logits of those in last_M. Return their room
        `x` of _Step, which then begins with the normed hidden states of the rows with logits.
        """
        rows = of_rows["tokens"].numel()
        query_width = model.heads * model.head_dim
        kv_width = 2 * model.groups * model.head_dim
        padded_rows = rows + -rows % self._kernels.row_multiple()
        of_hidden = model.hidden + max(model.qkv_rank, model.mlp_rank)
        of_x = max(of_hidden, query_width + model.output_rank)
        x = torch.empty(padded_rows, of_x, dtype=self._dtype)
        tensors = of_rows | {
            "h": torch.empty(rows, model.hidden),
            "qkv": torch.empty(rows, query_width + kv_width),
            "x": x,
            "gated": torch.empty(padded_rows, model.units + model.down_rank, dtype=self._dtype),
            "logits": logits_MV,
        }
        if last_M is not None:
            tensors["last"] = last_M
        model.tiles = self.use_tiles
        step = _Step(
            rows=rows,
            outputs=len(logits_MV),
            capacity=cache.capacity,
            threads=torch.get_num_threads(),
        )
        for name, tensor in tensors.items():
            setattr(step, name, tensor.data_ptr())
        self._kernels.decode(ctypes.byref(model), ctypes.byref(step))
        return x


def _last_write(parameter: Tensor) -> tuple[int, int]:
    """(address, how often it was written to): another one where the weights may be others."""
    # Inference tensors count no writes, so only `stale` tells.
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version


def _check_indices(what: str, given: Tensor, count: int, end: int) -> None:
    """Raise IndexError for an index outside [0, end); ValueError if not [count] int64."""
    check_vector(what, given, count, torch.int64, _CPU)
    if count:
        low, high = torch.aminmax(given)
        if low < 0 or high >= end:
            raise IndexError(f"{what} {low}..{high}: there are 0..{end - 1}")


def _by_groups(num_kv_heads: int, qkv: Sequence[Tensor]) -> Tensor:
    """q, k and v as one matrix (or bias) whose rows lie by key/value head: its R query heads, its
    key, its value.
    """
    parts = [rows.unflatten(0, (num_kv_heads, -1)) for rows in qkv]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _end_to_end(matrices: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(matrices))


def _panels(weight_OI: Tensor, width: int) -> Tensor:
    """Lay a weight out as the kernel reads it: [O / width, I / unit, width], a unit being four
    bytes, zeros behind the last O.
    """
    missing = -len(weight_OI) % width
    units = F.pad(weight_OI, (0, 0, 0, missing)).contiguous().view(torch.float32)
    return units.unflatten(0, (-1, width)).mT.contiguous()


class _Product:
    """The projections of a layer that read one input, laid out: W with B behind its columns, and
    the A of all of them as one matrix, `rank` rows with zeros up to the multiple.

    fields: of the layer, each with the projections whose rows `arranged` brings together in it.
    """

    def __init__(
        self,
        layer: _Layer,
        low: str,
        fields: dict[str, tuple[nn.Linear, ...]],
        width: int,
        multiple: int,
        arranged: Callable[[Sequence[Tensor]], Tensor] = _end_to_end,
    ):
        self._layer = layer
        self._low = low
        self._fields = fields
        self._width = width
        self._arranged = arranged
        self._at: dict[nn.Linear, int] = {}  # an adapter's first row among those of all
        rank = 0
        for projection in itertools.chain.from_iterable(fields.values()):
            if isinstance(projection, LoraLinear):
                self._at[projection] = rank
                rank += len(projection.lora_a)
        self.rank = rank + -rank % multiple
        self._laid: dict[str, Tensor] = {}
        for field, projections in fields.items():
            weight = arranged([projection.weight for projection in projections])
            self._laid[field] = _panels(F.pad(weight, (0, self.rank)), width)
            setattr(layer, field, self._laid[field].data_ptr())
        self._a: Tensor | None = None

    def take_adapters(self) -> None:
        """Lay out A and B as they are now."""
        if not self._at:
            return
        first = next(iter(self._at))
        a_RI = first.weight.new_zeros(self.rank, first.in_features)
        for field, projections in self._fields.items():
            columns = []
            for projection in projections:
                b_OR = projection.weight.new_zeros(projection.out_features, self.rank)
                if isinstance(projection, LoraLinear):
                    at = self._at[projection]
                    rows = slice(at, at + len(projection.lora_a))
                    a_RI[rows] = projection.lora_a
                    b_OR[:, rows] = projection.lora_b
                columns.append(b_OR)
            behind = _panels(self._arranged(columns), self._width)
            laid = self._laid[field]
            laid[:, laid.shape[1] - behind.shape[1] :] = behind
        self._a = _panels(a_RI, self._width)
        setattr(self._layer, self._low, self._a.data_ptr())
