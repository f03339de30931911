"""Log-probabilities and entropies of labels, without ever holding the [T, V] logits.

    head = make_head(batch.labels, rows=batch.loss_mask.nonzero().squeeze(1), temperature=1.0)
    trainer_logprobs, entropy = decoder(batch.input_ids, batch.positions, attention, head)     # [R] each

Forward keeps two numbers a token; backward multiplies each chunk's logits again, one GEMM beside the two it needs anyway.
Logits that are few (a small vocabulary or a short batch) are kept instead.

Shapes: T tokens, C tokens of a chunk, R trained rows, D model, V vocab. GEMMs run in the model's dtype, the softmax in
float32 (float64 where the model is float64).
"""

from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Up to this many logits (16 MiB of float32) are one chunk, kept for backward: recomputing them would cost more than it saves.
KEEP_LOGITS = 1 << 22


def chunked_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log softmax(hidden @ weight.T / temperature)[label], entropy of that softmax), [T] nats each, float32 or wider.

    temperature 0 means greedy decoding, which has no distribution of its own: it is treated as 1. The entropy carries a
    gradient only with `entropy_grad`. Peak memory beyond the gradients: a few [chunk_tokens, V] float32 buffers, and one
    [V, D] float32 accumulator of the weight's gradient when there are several chunks. T may be 0: the gradients are zeros.
    ValueError on shapes that do not fit, a negative temperature or no tokens a chunk.
    """
    if hidden_TD.dim() != 2 or weight_VD.dim() != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(f"need hidden [T, D] and weight [V, D], got {tuple(hidden_TD.shape)} and {tuple(weight_VD.shape)}")
    if labels_T.shape != hidden_TD.shape[:1]:
        raise ValueError(f"need one label a token, got labels {tuple(labels_T.shape)} for hidden {tuple(hidden_TD.shape)}")
    if temperature < 0 or chunk_tokens < 1:
        raise ValueError(f"need temperature >= 0 and chunk_tokens >= 1, got {temperature} and {chunk_tokens}")
    return _ChunkedLogprobs.apply(hidden_TD, weight_VD, labels_T, temperature or 1.0, chunk_tokens, entropy_grad)


def make_head(
    labels_T: Tensor,
    rows: Tensor | None = None,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    entropy_grad: bool = False,
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A head for Decoder.forward that gives (logprobs, entropy) of the labels at `rows` ([R] int64; None: all T of them).

    Prompt tokens need no logits: hand in the trained positions only. Without any, the empty results still carry gradients
    (zeros), so that a rank with nothing to train takes part in FSDP's collectives.
    """

    def head(hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        hidden, labels = hidden_TD, labels_T
        if rows is not None and rows.numel() < labels_T.numel():
            hidden, labels = hidden_TD.index_select(0, rows), labels_T.index_select(0, rows)
        return chunked_logprobs(
            hidden, weight_VD, labels, temperature=temperature, chunk_tokens=chunk_tokens, entropy_grad=entropy_grad
        )

    return head


class _ChunkedLogprobs(torch.autograd.Function):
    """z = h W^T / temperature, l = log softmax(z), p = exp(l), H = -sum p l. For upstream gradients a of l[y] and b of H:

    dz = a (onehot(y) - p) - b p (l + H),   dh = dz W / temperature,   dW = dz^T h / temperature
    """

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, labels_T, temperature, chunk_tokens, entropy_grad):
        tokens, vocab = hidden_TD.shape[0], weight_VD.shape[0]
        keep = tokens * vocab <= KEEP_LOGITS
        chunk = max(tokens, 1) if keep else chunk_tokens
        logprobs = hidden_TD.new_empty(tokens, dtype=_wide(hidden_TD))
        entropy = torch.empty_like(logprobs)
        logp_CV = None
        for part in _parts(tokens, chunk):
            logp_CV = _log_softmax(hidden_TD[part], weight_VD, temperature)
            torch.gather(logp_CV, 1, labels_T[part, None], out=logprobs[part, None])
            torch.sum(logp_CV.exp().mul_(logp_CV), dim=1, out=entropy[part])
        entropy.neg_()
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T, entropy, logp_CV if keep else None)
        ctx.temperature, ctx.chunk, ctx.entropy_grad = temperature, chunk, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden_TD, weight_VD, labels_T, entropy, kept = ctx.saved_tensors
        if not ctx.entropy_grad:
            grad_entropy = None
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        parts = _parts(hidden_TD.shape[0], ctx.chunk)
        grad_hidden = torch.empty_like(hidden_TD) if wants_hidden else None
        # Chunks add up in float32: hundreds of bfloat16 additions would lose the small ones.
        accumulator = _wide(weight_VD) if len(parts) > 1 else weight_VD.dtype
        grad_weight = torch.zeros_like(weight_VD, dtype=accumulator) if wants_weight and len(parts) != 1 else None
        for part in parts:
            logp_CV = kept if kept is not None else _log_softmax(hidden_TD[part], weight_VD, ctx.temperature)
            a = grad_logprobs[part, None] / ctx.temperature
            b = None if grad_entropy is None else grad_entropy[part, None] / ctx.temperature
            grad_CV = _grad_logits(logp_CV, labels_T[part, None], entropy[part, None], a, b).to(weight_VD.dtype)
            if wants_hidden:
                torch.mm(grad_CV, weight_VD, out=grad_hidden[part])
            if wants_weight:
                product = grad_CV.T @ hidden_TD[part]
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_VD.dtype), None, None, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _parts(tokens: int, chunk: int) -> list[slice]:
    return [slice(i, min(i + chunk, tokens)) for i in range(0, tokens, chunk)]


def _log_softmax(hidden_CD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    """[C, V] in float32 or wider, from logits in the model's dtype."""
    logits_CV = F.linear(hidden_CD, weight_VD)
    wide = _wide(logits_CV)
    if temperature != 1.0:
        logits_CV = logits_CV.to(wide) / temperature
    return torch.log_softmax(logits_CV, dim=1, dtype=wide)


def _grad_logits(logp_CV: Tensor, labels_C1: Tensor, entropy_C1: Tensor, a_C1: Tensor, b_C1: Tensor | None) -> Tensor:
    """a (onehot - p) - b p (l + H), the gradient with respect to the logits; it may not touch logp_CV, which may be kept."""
    p_CV = logp_CV.exp()
    scale = -a_C1 if b_C1 is None else (logp_CV + entropy_C1).mul_(-b_C1).sub_(a_C1)
    return p_CV.mul_(scale).scatter_add_(1, labels_C1, a_C1)
