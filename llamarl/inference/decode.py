"""A decoder's pass over the cache on a CPU, one call of a C kernel (llamarl/native/decode.c): a
token a row, or whole prompts.

Products are made by vector instructions or, in bfloat16 on a CPU that has them (AMX), by tile
instructions. Either sums a row's numbers in one order, whatever rows lie beside it. oneDNN's packed
products, which also bring tiles, need not: seen on a CPU with AMX, the same row has other bits
among 32 rows than among 48.

The module's own forward multiplies by weights as they lie, which costs more than the product for
few rows, and calls some thirty small operations a layer. Here the weights are laid out for the
kernel once a policy version, which makes a second copy of them. The results are the module's up to
rounding (tests/unit/test_engine.py holds them to it); in bfloat16 they are nearer to float32's, for
the residual stream is float32. Where no compiler is, the module decodes.

Shapes: N rows, D model, H query heads, J key/value heads, K head dim, V vocabulary.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarl.inference.cache import SlotCache
from llamarl.inference.sampler import check_vector
from llamarl.models.attention import Attention
from llamarl.models.build import Decoder, FeedForward, Layer
from llamarl.models.fused import is_altered
from llamarl.models.norms import RMSNorm
from llamarl.native import library

_CPU = torch.device("cpu")
_FLAGS = {torch.float32: ("-fopenmp",), torch.bfloat16: ("-fopenmp", "-DBF16")}
# The modules whose forward the kernel computes. A subclass may compute something else.
_PLAIN = (
    *(Decoder, nn.ModuleList, Layer, Attention, FeedForward),
    *(nn.Linear, nn.Embedding, nn.Identity, RMSNorm, nn.SiLU),
)

log = logging.getLogger(__name__)


def _of_type(kind: type, names: str) -> list[tuple[str, type]]:
    """Fields of a structure, named as in C."""
    return [(name, kind) for name in names.split()]


class _Layer(ctypes.Structure):
    _fields_ = _of_type(ctypes.c_void_p, "qkv output gate up down qkv_bias attention_norm mlp_norm")
    _fields_ += _of_type(ctypes.c_void_p, "keys values")


class _Model(ctypes.Structure):
    _fields_ = _of_type(ctypes.c_int64, "layers hidden heads groups head_dim units vocab tiles")
    _fields_ += _of_type(ctypes.c_double, "eps")
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
    """Computes what `decoder` does in the contexts Decode, Prefill and Extend of a cache. Logits
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
        self._seen: list[tuple[int, int]] = []  # the last write to each parameter
        self._kept: list[Tensor] = []  # what the structures below point to
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
        traits = config.traits
        has_more = traits.qk_norm or traits.biases or traits.learned_positions
        is_llamas = traits.norm == "rms" and traits.gated and not has_more
        if not is_llamas or config.rotary_dim is not None or config.parallel_residual:
            return False
        if config.num_attention_heads % config.num_key_value_heads:
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
        was written to since.
        """
        decoder = self._decoder
        config = decoder.config
        seen = [_last_write(parameter) for parameter in decoder.parameters()]
        if not self.stale and seen == self._seen:
            return
        self.stale = False
        self._seen = seen
        self._kept = []
        for layer, its in zip(self._layers, decoder.layers):
            assert isinstance(its, Layer) and isinstance(its.mlp, FeedForward), "as `fits` saw"
            layer.qkv = self._panels(_by_groups(its.attn, "weight"))
            layer.output = self._panels(its.attn.output_proj.weight)
            layer.gate = self._panels(its.mlp.w1.weight)
            layer.up = self._panels(its.mlp.w3.weight)
            layer.down = self._panels(its.mlp.w2.weight)
            if its.attn.q_proj.bias is not None:
                layer.qkv_bias = self._keep(_by_groups(its.attn, "bias").float())
            layer.attention_norm = self._keep(its.sa_norm.scale.float())
            layer.mlp_norm = self._keep(its.mlp_norm.scale.float())
        norm = decoder.norm
        assert isinstance(norm, RMSNorm), "as `fits` saw"
        self._model = _Model(
            layers=len(decoder.layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            head_dim=config.head_dim,
            units=config.intermediate_size,
            vocab=len(decoder.output_weight),
            eps=norm.eps,
            layer=ctypes.addressof(self._layers),
            embedding=self._keep(decoder.tok_embeddings.weight),
            norm=self._keep(norm.scale.float()),
            head=self._panels(decoder.output_weight),
        )

    def _keep(self, tensor: Tensor) -> int:
        """Keep a tensor until the next refresh, and return its address."""
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _panels(self, weight_OI: Tensor) -> int:
        """Lay a weight out as the kernel reads it: [O / width, I / unit, width, unit], a unit being
        four bytes, zeros behind the last O.
        """
        width = self._kernels.panel_width()
        missing = -len(weight_OI) % width
        padded_OI = F.pad(weight_OI, (0, 0, 0, missing))
        units = padded_OI.view(torch.float32)
        panels = units.unflatten(0, (-1, width)).mT
        return self._keep(panels)

    def __call__(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        cache: SlotCache,
        slots_N: Tensor,
        last_M: Tensor | None = None,
    ) -> Tensor:
        """Row i reads slots_N[i] up to positions_N[i], which it fills.

        last_M: ascending rows, the only ones with logits. All int64, and looked at before C, which
        trusts them, sees them: IndexError for a token, place, slot or row that is not there.
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
        x = torch.empty(padded_rows, max(model.hidden, query_width), dtype=self._dtype)
        tensors = of_rows | {
            "h": torch.empty(rows, model.hidden),
            "qkv": torch.empty(rows, query_width + kv_width),
            "x": x,
            "gated": torch.empty(padded_rows, model.units, dtype=self._dtype),
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


def _by_groups(attn: Attention, name: str) -> Tensor:
    """q, k and v as one matrix (or bias) whose rows lie by key/value head: its R query heads, its
    key, its value.
    """
    parts = []
    for projection in (attn.q_proj, attn.k_proj, attn.v_proj):
        rows = getattr(projection, name)
        parts.append(rows.unflatten(0, (attn.num_cached_kv_heads, -1)))
    return torch.cat(parts, dim=1).flatten(0, 1)
