"""Supervised pairs: packed, their loss, a step on it, and how many pairs greedy decoding gets
right. Used by recipes/sft.py.

Shapes: T packed tokens, N pairs, R trained rows (places whose label is a completion token), D
model, V vocab.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from llamarl.learning.logprobs import make_head
from llamarl.learning.optim import clip_grad_norm
from llamarl.learning.packing import collate
from llamarl.learning.segments import sum_by
from llamarl.learning.supervised import Sums
from llamarl.models.attention import PackedAttention
from llamarl.models.build import Decoder
from llamarl.tasks.special import text_ids
from llamarl.types import Prompt


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and the completion to learn, or a conversation."""

    token_ids: Tensor  # [P + L] int64; the completion ends with the end-of-text token
    learned: Tensor  # [P + L] bool; the first token, which has nothing before it, is not


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Whole pairs end to end, shifted once, here: [10,11,12] with prompt 10,11 and [20,21] with
    prompt 20 become

    input_ids 10 11 20    labels 11 12 21    positions 0 1 0
    cu_seqlens 0 2 3      rows 1 2           pairs 0 1
    """

    input_ids: Tensor  # [T] int64
    labels: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    cu_seqlens: Tensor  # [N+1] int64
    rows: Tensor  # [R] int64, in order: the places whose label is learned
    pairs: Tensor  # [R] int64: whose a row is


def make_pair(prompt: Prompt, tokenizer, max_tokens: int) -> Pair:
    """The pair of a task's prompt: meta["solution"] if the task has worked solutions, else
    meta["answer"], then the end token.

    tokenizer: transformers'. ValueError if there is no answer or no end token, or for a pair of
    more than max_tokens.
    """
    text = prompt.meta.get("solution", prompt.meta.get("answer"))
    if text is None:
        raise ValueError(
            "the task gives prompts without answers; choose one with answers, or name their key"
        )
    pair = answered(prompt.prompt_ids, str(text), tokenizer)
    length = pair.token_ids.numel()
    if length > max_tokens:
        raise ValueError(
            f"a pair has {length} tokens, the model takes {max_tokens}: drop the one beginning "
            f"{prompt.text[:50]!r}"
        )
    return pair


def answered(prompt_ids: Tensor, text: str, tokenizer) -> Pair:
    """A prompt and the text to learn behind it, which ends with the end token. ValueError if there
    is none, or as `text_ids`.
    """
    check_end_token(tokenizer)
    completion = text_ids(tokenizer, text)
    return pair_of(prompt_ids, torch.tensor([*completion, tokenizer.eos_token_id]))


def pair_of(prompt_ids: Tensor, completion_ids: Tensor) -> Pair:
    """A prompt [P] and its completion [L], both int64. ValueError if one of them has no token."""
    if not prompt_ids.numel() or not completion_ids.numel():
        raise ValueError("a prompt or an answer without tokens has no log-probability")
    token_ids = torch.cat([prompt_ids, completion_ids])
    return Pair(token_ids, torch.arange(token_ids.numel()) >= prompt_ids.numel())


def check_end_token(tokenizer) -> None:
    """ValueError if a tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer names no eos_token; set it in tokenizer_config.json")


def pack_pairs(pairs: list[Pair], device: str | torch.device = "cpu") -> PairBatch:
    """One batch of at least one pair, each with a prompt of at least one token."""
    # The last token of a pair is only ever a label, the first one never.
    sizes = torch.tensor([p.token_ids.numel() - 1 for p in pairs])
    learned = torch.cat([p.learned[1:] for p in pairs])
    rows = learned.nonzero().squeeze(1)
    owners = torch.arange(len(pairs)).repeat_interleave(sizes)
    return PairBatch(
        input_ids=torch.cat([p.token_ids[:-1] for p in pairs]).to(device),
        labels=torch.cat([p.token_ids[1:] for p in pairs]).to(device),
        positions=torch.cat([torch.arange(size) for size in sizes]).to(device),
        cu_seqlens=F.pad(sizes.cumsum(0), (1, 0)).to(device),
        rows=rows.to(device),
        pairs=owners[rows].to(device),
    )


class NextToken:
    """The Objective of supervised fine-tuning (llamarl.learning.supervised). Its targets are the
    learned tokens, so a row counts by its length.
    """

    def num_tokens(self, pair: Pair) -> int:
        return pair.token_ids.numel() - 1  # the last one is only ever a label

    def num_targets(self, pair: Pair) -> int:
        return int(pair.learned.sum())

    def pack(self, pairs: Sequence[Pair], device: torch.device) -> PairBatch:
        if pairs:
            return pack_pairs(list(pairs), device)
        nothing = Pair(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool))
        return pack_pairs([nothing], device)

    def loss(self, decoder: Decoder, batch: PairBatch) -> tuple[Tensor, Sums, PackedAttention]:
        head = make_head(batch.labels[batch.rows], batch.rows)
        attention = PackedAttention(batch.cu_seqlens)
        logprobs_R, entropy_R = decoder(batch.input_ids, batch.positions, attention, head)
        return -logprobs_R.sum(), {"entropy": entropy_R.detach().sum()}, attention

    def measure(self, decoder: Decoder, batch: PairBatch) -> Sums:
        loss, _, _ = self.loss(decoder, batch)
        return {"loss": loss}

    def summary(self, sums: Mapping[str, float], num_targets: float) -> dict[str, float | None]:
        """Nats a held-out token, and the perplexity that they are."""
        loss = sums["loss"] / num_targets
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}


def split_pairs(pairs: list[Pair], budget_tokens: int) -> list[list[Pair]]:
    """Microbatches of at most budget_tokens, longest first into the first with room (Magistral). A
    longer pair goes alone.
    """
    parts = collate([p.token_ids.numel() for p in pairs], budget_tokens)
    return [list(map(pairs.__getitem__, part)) for part in parts]


def pair_loss(decoder: Decoder, batch: PairBatch, *, num_loss_tokens: int) -> Tensor:
    """-sum of log p(label) over the trained rows / num_loss_tokens, nats. num_loss_tokens: the R of
    the whole global batch.
    """
    loss, _, _ = NextToken().loss(decoder, batch)
    return loss / num_loss_tokens


@torch.no_grad()
def greedy_matches(decoder: Decoder, batch: PairBatch) -> Tensor:
    """[N] bool: does greedy decoding give exactly the pair's completion, end token and all?

    One forward pass tells: it does if and only if each token of the completion is the most likely
    after those before it. Of a conversation each reply counts as if the earlier ones had been given
    so.
    """

    def head(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
        return F.linear(hidden_TD[batch.rows], weight_VD).argmax(-1)

    best = decoder(batch.input_ids, batch.positions, PackedAttention(batch.cu_seqlens), head)
    wrong = (best != batch.labels[batch.rows]).long()
    return sum_by(wrong, batch.pairs, batch.cu_seqlens.numel() - 1) == 0


@torch.no_grad()
def completion_logprobs(decoder: Decoder, batch: PairBatch) -> Tensor:
    """[N] float64, nats, on the CPU: the log-probability of each pair's whole completion given its
    prompt, at temperature 1.
    """
    head = make_head(batch.labels[batch.rows], batch.rows)
    attention = PackedAttention(batch.cu_seqlens)
    logprobs_R, _ = decoder(batch.input_ids, batch.positions, attention, head)
    num_pairs = batch.cu_seqlens.numel() - 1
    return sum_by(logprobs_R.double().cpu(), batch.pairs.cpu(), num_pairs)


def total(number: float) -> float:
    """Collective over the world: the sum of the ranks' numbers."""
    tensor = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def accuracy(
    decoder: Decoder, pairs: list[Pair], *, budget_tokens: int, device: str | torch.device
) -> float:
    """Collective over the world: the share of all ranks' pairs that greedy decoding gets right.
    ValueError if there are none.
    """
    right = 0
    for part in split_pairs(pairs, budget_tokens):
        right += int(greedy_matches(decoder, pack_pairs(part, device)).sum())
    num_pairs = total(len(pairs))
    if not num_pairs:
        raise ValueError("no held-out prompts to measure accuracy on; give the task more data")
    return total(right) / num_pairs


def train_step(
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    pairs: list[Pair],
    *,
    budget_tokens: int,
    device: str | torch.device,
) -> float:
    """Collective over the world: one optimizer step on all ranks' pairs; a rank may have none.
    Returns the loss, nats a token.

    FloatingPointError, before the step, for a gradient norm that is not finite. Gradients are
    clipped to norm 1.
    """
    parts = [pack_pairs(part, device) for part in split_pairs(pairs, budget_tokens)]
    # Divide by the global count: a per-rank mean would up-weight short ranks.
    num_loss_tokens = int(total(sum(part.rows.numel() for part in parts)))
    loss = 0.0
    optimizer.zero_grad()
    for part in parts:
        part_loss = pair_loss(decoder, part, num_loss_tokens=num_loss_tokens)
        part_loss.backward()
        loss += part_loss.item()
    if dist.get_world_size() > 1:
        for parameter in decoder.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
    norm = clip_grad_norm(decoder.parameters(), 1.0)
    if not norm.isfinite():
        raise FloatingPointError(
            f"gradient norm {norm.item()}: no step was taken; lower the learning rate or check the "
            "data"
        )
    optimizer.step()
    return total(loss)


@contextmanager
@torch.no_grad()
def rounded(decoder: Decoder, dtype: torch.dtype):
    """Within it the weights are what a directory saved in `dtype` will hold; holds a second copy of
    them meanwhile.
    """
    exact = [parameter.clone() for parameter in decoder.parameters()]
    for parameter in decoder.parameters():
        parameter.copy_(parameter.to(dtype))
    try:
        yield
    finally:
        for parameter, value in zip(decoder.parameters(), exact):
            parameter.copy_(value)


def sample_batch(num_examples: int, size: int, *, seed: int, step: int) -> list[int]:
    """The examples of a step, drawn with replacement: a function of (seed, step) alone, whatever
    the number of ranks.
    """
    draw = random.Random(f"{seed} {step}")
    return [draw.randrange(num_examples) for _ in range(size)]
