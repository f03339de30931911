"""Supervised pairs: packed, and the loss on them, which recipes/sft.py learns from.

Shapes: T packed tokens, N pairs, R trained rows (places whose label is a completion token), D
model, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.learning.logprobs import Narrowing, make_head
from llamarl.learning.segments import sum_by
from llamarl.learning.supervised import Sums
from llamarl.models.attention import PackedAttention
from llamarl.models.build import Decoder
from llamarl.tasks.special import reply_ids
from llamarl.types import Prompt
from llamarl.words.answers import answer_text


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


def make_pair(prompt: Prompt, tokenizer, max_tokens: int, *, chat: bool = False) -> Pair:
    """Make the pair of a task's prompt: meta["solution"] if the task has worked solutions, else
    meta["answer"], then the end token.

    tokenizer: transformers'. chat: the prompt is a turn of its chat template. ValueError if there
    is no answer or no end token, or for a pair of more than max_tokens.
    """
    text = prompt.meta.get("solution", prompt.meta.get("answer"))
    if text is None:
        raise ValueError(
            "the task gives prompts without answers; choose one with answers, or name their key"
        )
    pair = answered(prompt.prompt_ids, answer_text(text), tokenizer, chat=chat)
    length = pair.token_ids.numel()
    if length > max_tokens:
        raise ValueError(
            f"a pair has {length} tokens, the model takes {max_tokens}: drop the one beginning "
            f"{prompt.text[:50]!r}"
        )
    return pair


def answered(prompt_ids: Tensor, text: str, tokenizer, *, chat: bool = False) -> Pair:
    """Make a pair of a prompt and the text to learn behind it, which ends with the end token; that
    of a turn, if the prompt is one of the chat template. ValueError if there is none, or as from
    `text_ids`.
    """
    check_end_token(tokenizer)
    completion = reply_ids(tokenizer, prompt_ids.tolist(), text, chat=chat)
    return pair_of(prompt_ids, torch.tensor(completion))


def pair_of(prompt_ids: Tensor, completion_ids: Tensor) -> Pair:
    """Make a pair of a prompt [P] and its completion [L], both int64. ValueError if one of them has
    no token.
    """
    if not prompt_ids.numel() or not completion_ids.numel():
        raise ValueError("a prompt or an answer without tokens has no log-probability")
    token_ids = torch.cat([prompt_ids, completion_ids])
    return Pair(token_ids, torch.arange(token_ids.numel()) >= prompt_ids.numel())


def check_end_token(tokenizer) -> None:
    """ValueError if a tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer names no eos_token; set it in tokenizer_config.json")


def pack_pairs(pairs: list[Pair], device: str | torch.device = "cpu") -> PairBatch:
    """Pack one batch of at least one pair, each with a prompt of at least one token."""
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
        head = _head(decoder, batch)
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


def _head(decoder: Decoder, batch: PairBatch) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    labels = batch.labels[batch.rows]
    narrowing = Narrowing.of(decoder.absent_rows, None, labels)
    return make_head(labels, batch.rows, narrowing=narrowing)


@torch.no_grad()
def completion_logprobs(decoder: Decoder, batch: PairBatch) -> Tensor:
    """[N] float64, nats, on the CPU: the log-probability of each pair's whole completion given its
    prompt, at temperature 1.
    """
    head = _head(decoder, batch)
    attention = PackedAttention(batch.cu_seqlens)
    logprobs_R, _ = decoder(batch.input_ids, batch.positions, attention, head)
    num_pairs = batch.cu_seqlens.numel() - 1
    return sum_by(logprobs_R.double().cpu(), batch.pairs.cpu(), num_pairs)
