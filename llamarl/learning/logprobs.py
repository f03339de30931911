"""Log-probabilities and entropies of labels, without ever holding the [T, V] logits.

    head = make_head(batch.labels, batch.rows, temperature=1.0)
    # [R] each
    trainer_logprobs, entropy = decoder(batch.input_ids, batch.positions, attention, head)

Forward keeps four numbers a token; backward multiplies each chunk's logits again, one GEMM beside
the two it needs anyway. Logits that take little room (a small vocabulary or a short batch) are kept
instead.

Shapes: T tokens, C tokens of a chunk, R trained rows, D model, V vocab. GEMMs run in the model's
dtype, the softmax in float32 (float64 where the model is float64).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.learning.segments import wide_dtype
from llamarl.memory import CHUNK_TOKENS, KEEP_BYTES, KEEP_LOGITS
from llamarl.models.attention import PackedAttention, rounded_up
from llamarl.models.decoder import Decoder
from llamarl.models.fused import add_up, call_kernel, kernels, weight_gradient
from llamarl.models.parity import Canary, Sequence
from llamarl.types import Group, PackedBatch

# A logit that is out of the distribution. e^-1e30 is 0 and, unlike for -infinity, so is 0 * -1e30.
NEVER = -1e30
LABEL_STEPS = 16  # sizes between a power of two and the next that a CPU computes logits of

# At most one: the memory of logits whose backward is done, for the next to be kept.
_spare: list[Tensor] = []


@dataclass(frozen=True, slots=True)
class LateEnds:
    """End tokens that cannot be among the first min_new_tokens of a completion
    (SamplingParams.min_new_tokens).
    """

    token_ids: tuple[int, ...]
    min_new_tokens: int


@dataclass(frozen=True, slots=True)
class Narrowing:
    """What is out of the distribution of labels, as it was when they were sampled.

    absent_A: token ids that no label has. end_ids_S: those that labels have only where not
    is_early_T. None: there are none.
    """

    absent_A: Tensor | None
    end_ids_S: Tensor | None = None
    is_early_T: Tensor | None = None

    @classmethod
    def of(
        cls, absent_A: Tensor | None, late_ends: LateEnds | None, offsets_R: Tensor
    ) -> Narrowing | None:
        """Return the narrowing of labels, offsets_R [R] int64 tokens behind the beginnings of their
        completions. None: nothing is out.
        """
        if late_ends is None:
            return None if absent_A is None else cls(absent_A)
        end_ids_S = torch.tensor(late_ends.token_ids, dtype=torch.int64, device=offsets_R.device)
        return cls(absent_A, end_ids_S, offsets_R < late_ends.min_new_tokens)

    def padded(self, padding: tuple[int, int]) -> Narrowing:
        """Return the narrowing with so many labels more, for which ends are not out."""
        if self.is_early_T is None:
            return self
        return replace(self, is_early_T=F.pad(self.is_early_T, padding))

    def apply(self, logits_CV: Tensor, part: slice) -> None:
        """Take what is out from the logits of this part of the labels, in place."""
        if self.absent_A is not None:
            logits_CV.index_fill_(1, self.absent_A, NEVER)
        if self.end_ids_S is not None and self.is_early_T is not None:
            is_early_C1 = self.is_early_T[part, None]
            ends_CS = logits_CV.index_select(1, self.end_ids_S)
            logits_CV.index_copy_(1, self.end_ids_S, ends_CS.masked_fill(is_early_C1, NEVER))


def chunked_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
    entropy_grad: bool = False,
    narrowing: Narrowing | None = None,
    logit_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (log softmax(hidden @ weight.T / temperature)[label], entropy of that softmax), [T]
    nats each, float32 or wider. narrowing: leaves logits out of that softmax. logit_cap: logits are
    cap tanh(hidden @ weight.T / cap).

    temperature 0 means greedy decoding, which has no distribution of its own: it is treated as 1.
    The entropy carries a gradient only with `entropy_grad`. Peak memory beyond the gradients: a few
    [chunk_tokens, V] float32 buffers (on a CPU one, in the model's dtype), and one [V, D] float32
    accumulator of the weight's gradient when there are several chunks. T may be 0: the gradients
    are zeros. ValueError on labels that do not fit, a negative temperature or no tokens a chunk;
    IndexError for a label that is no row of the weight (on a CPU, where kernels trust it; elsewhere
    PyTorch's own operations look).
    """
    if labels_T.shape != hidden_TD.shape[:1]:
        raise ValueError(
            f"need one label a token, got labels {tuple(labels_T.shape)} for hidden "
            f"{tuple(hidden_TD.shape)}"
        )
    if temperature < 0 or chunk_tokens < 1:
        raise ValueError(
            f"need temperature >= 0 and chunk_tokens >= 1, got {temperature} and {chunk_tokens}"
        )
    if labels_T.device.type == "cpu" and labels_T.numel():
        least, most = torch.aminmax(labels_T)
        if least < 0 or most >= len(weight_VD):
            raise IndexError(f"labels {int(least)}..{int(most)}: there are 0..{len(weight_VD) - 1}")
    return _ChunkedLogprobs.apply(
        hidden_TD,
        weight_VD,
        labels_T,
        temperature or 1.0,
        chunk_tokens,
        entropy_grad,
        narrowing,
        logit_cap,
    )


def make_head(
    labels_R: Tensor,
    rows: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
    entropy_grad: bool = False,
    narrowing: Narrowing | None = None,
    logit_cap: float | None = None,
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a head for Decoder.forward that gives (logprobs, entropy) of labels [R], each
    predicted at its row of the hidden states. See chunked_logprobs for the rest.

    rows [R] int64 into T. Prompt tokens need no logits, so they are in no row; a row may predict
    several labels (the first tokens of a group's completions). Without any, the empty results still
    carry gradients (zeros), so that a rank with nothing to train takes part in FSDP's collectives.
    """

    num_labels = labels_R.numel()
    if labels_R.device.type == "cpu":
        # What is more than the labels has no gradient, and is dropped.
        padding = (0, rounded_up(num_labels, steps=LABEL_STEPS) - num_labels)
        labels_R = F.pad(labels_R, padding)
        rows = F.pad(rows, padding)
        narrowing = narrowing and narrowing.padded(padding)

    def head(hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = chunked_logprobs(
            hidden_TD.index_select(0, rows),
            weight_VD,
            labels_R,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            entropy_grad=entropy_grad,
            narrowing=narrowing,
            logit_cap=logit_cap,
        )
        # Copies: FSDP2 hooks what a module returns, and warns of a view.
        return logprobs[:num_labels].clone(), entropy[:num_labels].clone()

    return head


class _ChunkedLogprobs(torch.autograd.Function):
    """z = h W^T / temperature, l = log softmax(z), p = exp(l), H = -sum p l. For upstream gradients
    a of l[y] and b of H:

    dz = a (onehot(y) - p) - b p (l + H),   dh = dz W / temperature,   dW = dz^T h / temperature

    With a cap z = cap tanh(h W^T / cap) / temperature, and dz counts 1 - (z temperature / cap)^2.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_TD,
        weight_VD,
        labels_T,
        temperature,
        chunk_tokens,
        entropy_grad,
        narrowing,
        logit_cap,
    ):
        tokens = hidden_TD.shape[0]
        vocab = weight_VD.shape[0]
        is_whole = tokens * vocab <= KEEP_LOGITS
        size = tokens if is_whole else min(tokens, chunk_tokens)
        keeps = is_whole or tokens * vocab * weight_VD.element_size() <= KEEP_BYTES
        logits = _room(tokens if keeps else size, weight_VD)
        found_4T = hidden_TD.new_empty(4, tokens, dtype=wide_dtype(weight_VD))
        for part in _parts(tokens, size):
            logits_CV = logits[part if keeps else slice(part.stop - part.start)]
            _logits(hidden_TD, weight_VD, part, narrowing, logit_cap, out=logits_CV)
            log_softmax(logits_CV, labels_T[part], temperature, out=found_4T[:, part])
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T, found_4T)
        ctx.kept_TV = logits if keeps else None
        ctx.temperature = temperature
        ctx.size = size
        ctx.entropy_grad = entropy_grad
        ctx.narrowing = narrowing
        ctx.logit_cap = logit_cap
        logprobs = found_4T[0].clone()
        entropy = found_4T[1].clone()
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden_TD, weight_VD, labels_T, found_4T = ctx.saved_tensors
        a = grad_logprobs.contiguous()
        b = grad_entropy.contiguous() if ctx.entropy_grad else None
        grad_hidden = torch.empty_like(hidden_TD)
        grad_weight = None
        # Gradients take the place of kept logits. A second backward multiplies again.
        logits = ctx.kept_TV
        ctx.kept_TV = None
        keeps = logits is not None
        if not keeps:
            logits = weight_VD.new_empty(ctx.size, weight_VD.shape[0])
        parts = _parts(hidden_TD.shape[0], ctx.size)
        for part in parts:
            logits_CV = logits[part if keeps else slice(part.stop - part.start)]
            if not keeps:
                _logits(hidden_TD, weight_VD, part, ctx.narrowing, ctx.logit_cap, out=logits_CV)
            slope_CV = _slope(logits_CV, ctx.logit_cap)
            grad_CV = log_softmax_backward(
                logits_CV,
                labels_T[part],
                found_4T[:, part],
                a[part],
                None if b is None else b[part],
                ctx.temperature,
            )
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            torch.mm(grad_CV, weight_VD, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                product = weight_gradient(grad_CV, hidden_TD[part])
                if grad_weight is None:
                    # Chunks add up in float32: hundreds of bfloat16 additions would lose the small
                    # ones.
                    grad_weight = product.to(wide_dtype(product)) if len(parts) > 1 else product
                else:
                    add_up(grad_weight, product)  # without a float32 copy of the product
                del product  # as large as the weight: not beside the next chunk's
        if keeps and logits.device.type == "cpu":
            _spare[:] = [logits]
        if ctx.needs_input_grad[1]:
            if grad_weight is None:
                grad_weight = torch.zeros_like(weight_VD)
            grad_weight = grad_weight.to(weight_VD.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _logits(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    part: slice,
    narrowing: Narrowing | None,
    logit_cap: float | None,
    *,
    out: Tensor,
) -> None:
    """Write the logits [C, V] of a part of the tokens."""
    torch.mm(hidden_TD[part], weight_VD.T, out=out)
    if logit_cap is not None:
        out.div_(logit_cap).tanh_().mul_(logit_cap)
    if narrowing is not None:
        narrowing.apply(out, part)


def _slope(logits_CV: Tensor, logit_cap: float | None) -> Tensor | None:
    """Return how capped logits [C, V] change with those before the cap; None without a cap. Those
    that a narrowing took out lie beyond the cap, and do not change.
    """
    if logit_cap is None:
        return None
    return (1 - (logits_CV / logit_cap).square_()).clamp_(min=0)


def log_softmax(logits_CV: Tensor, labels_C: Tensor, temperature: float, *, out: Tensor) -> None:
    """Write the logprob and entropy of each label, and what makes p of the logits again.

    x = (z - top) / temperature,   log_sum = log sum e^x
    out [4, C] = x[label] - log_sum,   log_sum - sum p x,   top,   log_sum

    In float32 or wider; the logits stay as they are.
    """
    if kernels(logits_CV) is not None:
        given = (*out, logits_CV, labels_C.contiguous(), *logits_CV.shape, temperature)
        call_kernel("log_softmax", logits_CV, *given)
        return
    wide_CV = logits_CV.to(wide_dtype(logits_CV))
    top_C1 = wide_CV.amax(1, keepdim=True)
    x_CV = (wide_CV - top_C1).div_(temperature)
    log_sum_C1 = x_CV.logsumexp(1, keepdim=True)
    logp_CV = x_CV.sub_(log_sum_C1)
    out[0] = logp_CV.gather(1, labels_C[:, None])[:, 0]
    out[1] = (logp_CV.exp() * logp_CV).sum(1).neg_()
    out[2] = top_C1[:, 0]
    out[3] = log_sum_C1[:, 0]


def log_softmax_backward(
    logits_CV: Tensor,
    labels_C: Tensor,
    found_4C: Tensor,
    a_C: Tensor,
    b_C: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return the gradient dz [C, V] of the logits.

    p = e^l,   l = (z - top) / temperature - log_sum
    dz = (a (onehot(label) - p) - b p (l + entropy)) / temperature

    found: what `log_softmax` wrote; a, b: the upstream gradients of logprob and entropy, b may be
    None. dz takes the place of the logits and is returned.
    """
    _, entropy_C, top_C, log_sum_C = found_4C
    if kernels(logits_CV) is not None:
        given = (logits_CV, labels_C.contiguous(), top_C, log_sum_C, entropy_C, a_C, b_C)
        call_kernel("log_softmax_backward", logits_CV, *given, *logits_CV.shape, temperature)
        return logits_CV
    wide_CV = logits_CV.to(wide_dtype(logits_CV))
    logp_CV = (wide_CV - top_C[:, None]).div_(temperature).sub_(log_sum_C[:, None])
    factor = a_C[:, None]
    if b_C is not None:
        factor = factor + b_C[:, None] * (logp_CV + entropy_C[:, None])
    grad_CV = logp_CV.exp().mul_(-factor).scatter_add_(1, labels_C[:, None], a_C[:, None])
    return logits_CV.copy_(grad_CV.div_(temperature))


def _room(tokens: int, weight_VD: Tensor) -> Tensor:
    """Return memory for logits [T, V], not initialised: the spare where it fits, because fresh
    pages cost a CPU as much as the softmax does.
    """
    vocab = weight_VD.shape[0]
    needed = tokens * vocab
    try:
        spare = _spare.pop()
    except IndexError:
        spare = weight_VD.new_empty(0)
    same_kind = (spare.dtype, spare.device) == (weight_VD.dtype, weight_VD.device)
    if not same_kind or spare.numel() < needed:
        spare = weight_VD.new_empty(needed)
    return spare.flatten()[:needed].view(tokens, vocab)


def _parts(tokens: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, tokens)) for i in range(0, tokens, max(size, 1))]


# --- Microbatches ---


def group_to_score(prompt_ids: Tensor, completions: Iterable[Tensor]) -> Group:
    """Return a prompt [P] and its completions [L] as a group in which every completion is trained
    on, so that packing leaves none out.
    """
    completions = list(completions)
    lengths = [completion.numel() for completion in completions]
    zeros = torch.zeros(sum(lengths))
    return Group(
        ticket=0,
        prompt_ids=prompt_ids,
        lengths=torch.tensor(lengths),
        token_ids=torch.cat(completions),
        generator_logprobs=zeros,
        policy_versions=zeros.long(),
        ref_logprobs=zeros[:0],
        rewards=torch.ones(len(lengths)),
        finish_reasons=("stop",) * len(lengths),
        outcomes=("score",) * len(lengths),
    )


def to_device(
    batch: PackedBatch, device: torch.device | str
) -> tuple[PackedBatch, PackedAttention]:
    """Return the batch with every tensor on `device`, and the attention over its segments."""
    moved = {}
    for one in fields(batch):
        tensor = getattr(batch, one.name)
        # Not so on an Apple GPU, where memory that is copied without a wait must stay as it is.
        moved[one.name] = tensor.to(device, non_blocking=torch.device(device).type == "cuda")
    on_device = PackedBatch(**moved)
    attention = PackedAttention(on_device.cu_seqlens, on_device.parents)
    attention.routes = on_device.routes if len(on_device.routes) else None
    return on_device, attention


def label_head(
    decoder: Decoder,
    batch: PackedBatch,
    *,
    temperature: float,
    late_ends: LateEnds | None,
    entropy_grad: bool = False,
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the head of the decoder's forward that gives (logprobs, entropy) of a batch's labels,
    [R] each. See chunked_logprobs.
    """
    return make_head(
        batch.labels,
        batch.rows,
        temperature=temperature,
        narrowing=Narrowing.of(decoder.absent_rows, late_ends, batch.offsets),
        entropy_grad=entropy_grad,
        logit_cap=decoder.logit_cap,
    )


@torch.no_grad()
def label_logprobs(
    decoder: Decoder,
    microbatch: PackedBatch,
    device: torch.device,
    *,
    temperature: float,
    late_ends: LateEnds | None = None,
) -> Tensor:
    """Return the logprobs [R] of a microbatch's labels, float32, nats, on the CPU."""
    batch, attention = to_device(microbatch, device)
    head = label_head(decoder, batch, temperature=temperature, late_ends=late_ends)
    logprobs, _ = decoder(batch.input_ids, batch.positions, attention, head)
    return logprobs.float().cpu()


@torch.no_grad()
def canary_of(
    decoder: Decoder,
    sequences: list[Sequence],
    device: torch.device,
    *,
    temperature: float,
    top: int = 0,
) -> Canary:
    """Collective over a sharded decoder's ranks: return the logprobs of these sequences under the
    weights as they are. top: likeliest tokens to keep at each place.

    Each is computed alone, so that its logprobs do not depend on the others.
    """
    labels = []
    logits = []
    for sequence in sequences:
        with device:
            ids = torch.tensor(sequence.token_ids)
            positions = torch.arange(len(ids) - 1)
            attention = PackedAttention(torch.tensor([0, len(positions)]))
        logits_TV = decoder(ids[:-1], positions, attention)
        logits.append(logits_TV[sequence.given - 1 :])
        labels.append(ids[sequence.given :])
    labels_S = torch.cat(labels)
    logits_SV = torch.cat(logits).float() / (temperature or 1.0)
    if decoder.absent_rows is not None:
        logits_SV.index_fill_(1, decoder.absent_rows, NEVER)
    logprobs_SV = logits_SV.log_softmax(1)
    scored_S1 = logprobs_SV.gather(1, labels_S[:, None])
    likeliest = logprobs_SV.topk(min(top, logprobs_SV.shape[1]), dim=1)
    return Canary(
        sequences=sequences,
        logprobs=scored_S1.squeeze(1).tolist(),
        top_ids=likeliest.indices.tolist() if top else [],
        top_logprobs=likeliest.values.tolist() if top else [],
    )
