"""Log-probabilities and entropies of labels, without ever holding the [T, V] logits.

    head = make_head(batch.labels, batch.rows, temperature=1.0)
    trainer_logprobs, entropy = decoder(batch.input_ids, batch.positions, attention, head)     # [R] each

Forward keeps two numbers a token; backward multiplies each chunk's logits again, one GEMM beside the two it needs anyway.
Logits that take little room (a small vocabulary or a short batch) are kept instead.

Shapes: T tokens, C tokens of a chunk, R trained rows, D model, V vocab. GEMMs run in the model's dtype, the softmax in
float32 (float64 where the model is float64).
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

# Up to this many logits (16 MiB of float32) are one chunk, kept for backward: recomputing them would cost more than it saves.
KEEP_LOGITS = 1 << 22
# Up to this many bytes they are kept for backward in the model's dtype, though chunks are smaller: less than a chunk's buffers.
KEEP_BYTES = 1 << 26


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
    labels_R: Tensor,
    rows: Tensor | None = None,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    entropy_grad: bool = False,
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A head for Decoder.forward that gives (logprobs, entropy) of labels [R], each predicted at its row of the hidden states.

    rows [R] int64 into T; None: label r at row r. Prompt tokens need no logits, so they are in no row; a row may predict
    several labels (the first tokens of a group's completions). Without any, the empty results still carry gradients
    (zeros), so that a rank with nothing to train takes part in FSDP's collectives.
    """

    def head(hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        hidden_RD = hidden_TD if rows is None else hidden_TD.index_select(0, rows)
        return chunked_logprobs(
            hidden_RD, weight_VD, labels_R, temperature=temperature, chunk_tokens=chunk_tokens, entropy_grad=entropy_grad
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
        chunk = _Chunk(tokens if keep else min(tokens, chunk_tokens), weight_VD, temperature)
        logprobs = hidden_TD.new_empty(tokens, dtype=chunk.wide_CV.dtype)
        entropy = torch.empty_like(logprobs)
        fits = tokens * vocab * weight_VD.element_size() <= KEEP_BYTES
        logits_TV = weight_VD.new_empty(tokens, vocab) if fits and not keep else None
        for part in chunk.parts(tokens):
            logp_CV = chunk.log_softmax(chunk.logits(hidden_TD[part], None if logits_TV is None else logits_TV[part]))
            torch.gather(logp_CV, 1, labels_T[part, None], out=logprobs[part, None])
            torch.sum(chunk.exp(logp_CV).mul_(logp_CV), dim=1, out=entropy[part])
        entropy.neg_()
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T, entropy, chunk.logp_CV if keep else None, logits_TV)
        ctx.temperature, ctx.chunk_tokens, ctx.entropy_grad = temperature, chunk.size, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden_TD, weight_VD, labels_T, entropy, kept, logits_TV = ctx.saved_tensors
        a = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs / ctx.temperature
        b = grad_entropy / ctx.temperature if ctx.entropy_grad and grad_entropy is not None else None
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_TD) if wants_hidden else None
        grad_weight = None
        chunk = _Chunk(ctx.chunk_tokens, weight_VD, ctx.temperature)
        parts = chunk.parts(hidden_TD.shape[0])
        for part in parts:
            logits_CV = chunk.logits(hidden_TD[part]) if logits_TV is None and kept is None else None
            logp_CV = kept if kept is not None else chunk.log_softmax(logits_TV[part] if logits_CV is None else logits_CV)
            scale = -a[part, None] if b is None else (logp_CV + entropy[part, None]).mul_(-b[part, None]).sub_(a[part, None])
            grad_CV = chunk.exp(logp_CV).mul_(scale).scatter_add_(1, labels_T[part, None], a[part, None])
            grad_CV = chunk.narrow(grad_CV)
            if wants_hidden:
                torch.mm(grad_CV, weight_VD, out=grad_hidden[part])
            if wants_weight:
                product = grad_CV.T @ hidden_TD[part]
                if grad_weight is None:
                    # Chunks add up in float32: hundreds of bfloat16 additions would lose the small ones.
                    grad_weight = product.to(_wide(product)) if len(parts) > 1 else product
                else:
                    grad_weight += product
        if wants_weight:
            grad_weight = torch.zeros_like(weight_VD) if grad_weight is None else grad_weight.to(weight_VD.dtype)
        return grad_hidden, grad_weight, None, None, None, None


class _Chunk:
    """The [C, V] buffers that all chunks of a call share: fresh ones cost as much in page faults as in arithmetic."""

    def __init__(self, size: int, weight_VD: Tensor, temperature: float):
        self.size, self._weight_DV, self._temperature = size, weight_VD.T, temperature
        self._logits_CV = weight_VD.new_empty(size, weight_VD.shape[0])
        same = weight_VD.dtype == _wide(weight_VD)
        self.wide_CV = self._logits_CV if same else torch.empty_like(self._logits_CV, dtype=_wide(weight_VD))
        self.logp_CV = torch.empty_like(self.wide_CV)

    def parts(self, tokens: int) -> list[slice]:
        return [slice(i, min(i + self.size, tokens)) for i in range(0, tokens, max(self.size, 1))]

    def logits(self, hidden_CD: Tensor, out: Tensor | None = None) -> Tensor:
        """[C, V] in the model's dtype, in `out` or a buffer that the next call overwrites."""
        return torch.mm(hidden_CD, self._weight_DV, out=self._logits_CV[: hidden_CD.shape[0]] if out is None else out)

    def log_softmax(self, logits_CV: Tensor) -> Tensor:
        """[C, V] in float32 or wider; the logits stay as they are. The next call overwrites it."""
        wide = self._widen(logits_CV)
        if self._temperature != 1.0:
            wide = torch.div(wide, self._temperature, out=self.wide_CV[: len(wide)])
        return torch.log_softmax(wide, dim=1, out=self.logp_CV[: len(wide)])

    def exp(self, logp_CV: Tensor) -> Tensor:
        """exp(logp_CV), in the buffer of the logits."""
        return torch.exp(logp_CV, out=self.wide_CV[: logp_CV.shape[0]])

    def narrow(self, wide_CV: Tensor) -> Tensor:
        """A result of `exp` in the model's dtype, for a GEMM."""
        logits = self._logits_CV[: wide_CV.shape[0]]
        return wide_CV if wide_CV.dtype == logits.dtype else logits.copy_(wide_CV)

    def _widen(self, logits_CV: Tensor) -> Tensor:
        wide = self.wide_CV[: logits_CV.shape[0]]
        return logits_CV if logits_CV.dtype == wide.dtype else wide.copy_(logits_CV)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
