"""One decode step of a decoder on a CPU, on projections that are packed once a policy version.

The module's own forward multiplies by weights as they lie, which oneDNN packs again at every call: for few rows that costs
more than the product. Here they are packed once, q, k and v lie in one matrix, and silu, the gate and both residual sums
are the products' epilogues. The packed weights are a second copy of the decoder's. The results are the module's up to
rounding (tests/unit/test_engine.py holds them to it), and the norms and the embedding are read from it in place.

Shapes: N rows, D model, H query heads, G key/value heads, K head dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarl.inference.cache import Decode
from llamarl.models.attention import Attention
from llamarl.models.build import Decoder, FeedForward, RMSNorm


@dataclass(slots=True)
class _Layer:
    """Packed projections of one layer, [out, in] each before packing."""

    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class PackedDecode:
    """Logits [N, V] of one token a row, as `decoder(tokens_N, positions_N, attention)` gives them."""

    def __init__(self, decoder: Decoder):
        self._decoder, self.stale = decoder, True
        self._seen: list[tuple[int, int]] = []
        self._layers: list[_Layer] = []

    @staticmethod
    def fits(decoder: Decoder, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether every projection is a whole, plain nn.Linear in a dtype that this CPU's oneDNN packs."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if dtype != torch.float32 and not (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            return False
        plain = (nn.Linear, nn.Embedding, nn.Identity, RMSNorm, nn.SiLU)
        leaves = [m for m in decoder.modules() if not list(m.children())]
        if not all(type(m) in plain and all(type(p) is nn.Parameter for p in m.parameters()) for m in leaves):
            return False
        # A tensor-parallel rank communicates inside its modules; heads that divide unevenly are repeated there.
        return all(type(layer.mlp) is FeedForward and not (layer.attn.tp or layer.attn.repeats) for layer in decoder.layers)

    def refresh(self) -> None:
        """Pack again if `stale`, or if a weight is another tensor than at the last packing or was written to since."""
        # Inference tensors count no writes: there `stale` alone tells.
        seen = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in self._decoder.parameters()]
        if not self.stale and seen == self._seen:
            return
        self._seen, self._layers, self.stale = seen, [], False
        for layer in self._decoder.layers:
            attn, mlp = layer.attn, layer.mlp
            self._layers.append(
                _Layer(
                    qkv=_pack(_by_groups(attn, "weight")),
                    qkv_bias=None if attn.q_proj.bias is None else _by_groups(attn, "bias"),
                    output=_pack(attn.output_proj.weight),
                    gate=_pack(mlp.w1.weight),
                    up=_pack(mlp.w3.weight),
                    down=_pack(mlp.w2.weight),
                )
            )
        self._head = _pack(self._decoder.output_weight)

    def __call__(self, tokens_N: Tensor, positions_N: Tensor, attention: Decode) -> Tensor:
        decoder = self._decoder
        config, rows = decoder.config, tokens_N.numel()
        groups, head_dim = config.num_key_value_heads, config.head_dim
        h_ND = F.embedding(tokens_N, decoder.tok_embeddings.weight)
        cos, sin = (x[:, None].to(h_ND.dtype) for x in decoder.rotary(positions_N, attention.longest))  # [N, 1, 1, K]
        sin[..., : head_dim // 2].neg_()  # so that rotating is x cos + (x's halves exchanged) sin
        for i, (packed, layer) in enumerate(zip(self._layers, decoder.layers)):
            qkv = _linear(_norm(layer.sa_norm, h_ND), packed.qkv, packed.qkv_bias).view(rows, groups, -1, head_dim)
            qk = qkv[:, :, :-1]
            qk = torch.addcmul(qk * cos, qk.roll(head_dim // 2, -1), sin)
            seen = attention.attend_by_groups(i, qk[:, :, :-1], qk[:, :, -1], qkv[:, :, -1])
            h_ND = _linear_with(seen, packed.output, h_ND, "add")
            x_ND = _norm(layer.mlp_norm, h_ND)
            gated = _linear_with(x_ND, packed.up, _linear(x_ND, packed.gate, None, "swish"), "mul")
            h_ND = _linear_with(gated, packed.down, h_ND, "add")
        return _linear(_norm(decoder.norm, h_ND), self._head, None)


def _by_groups(attn: Attention, name: str) -> Tensor:
    """q, k and v as one matrix (or bias) whose rows lie by key/value head: its R query heads, its key, its value."""
    parts = (getattr(m, name).detach() for m in (attn.q_proj, attn.k_proj, attn.v_proj))
    parts = [p.view(attn.num_cached_kv_heads, -1, attn.head_dim, *p.shape[1:]) for p in parts]
    return torch.cat(parts, dim=1).flatten(0, 2)


def _norm(norm: RMSNorm, x_ND: Tensor) -> Tensor:
    return F.rms_norm(x_ND, norm.scale.shape, norm.scale, norm.eps)


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach())


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None, then: str = "none") -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, then, [], "")


def _linear_with(x: Tensor, packed: Tensor, other: Tensor, how: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.binary(x, other, packed, None, how)
