"""Reward models by Bradley and Terry: the better of two completions of a prompt is to score higher.

P(chosen is better) = sigmoid(r_chosen - r_rejected)

Pairs are read from JSON lines, as texts or as chat messages:

    {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 0.5}
    {"prompt": [{"role": "user", "content": "1+1?"}],
     "chosen": [{"role": "assistant", "content": "2"}], "rejected": [...]}

A completion that is a list of messages may repeat the prompt's before its reply. Prompts and
completions are tokenised apart, as in RL, where the prompt is tokens before the completion is text.
A completion ends with the end token, as a sampled one that was not cut does.

A pair's prompt is computed once for both of its completions: [7 8] with [1 2] and [3] becomes

    input_ids  7 8 1 2 3     positions 0 1 2 3 2     cu_seqlens 0 2 4 5     parents -1 0 0
    chosen 3   rejected 4                            the places of the completions' last tokens

Shapes: N pairs, P tokens of a prompt, L of a completion, T packed, S segments.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.learning.segments import Segments
from llamarl.learning.sft import check_end_token
from llamarl.learning.supervised import RowsToRead, Sums, SupervisedData, read_data, read_examples
from llamarl.machine.device import in_float64
from llamarl.models.attention import PackedAttention
from llamarl.models.build import Decoder
from llamarl.models.scorer import scores_at
from llamarl.tasks.base import (
    PromptMaker,
    check_chat_template,
    messages_of,
    refused_by_template,
    shown,
)
from llamarl.tasks.files import check_keys
from llamarl.tasks.special import Spelled, chat_ids, reply_ids
from llamarl.types import Message

SIDES = ("chosen", "rejected")
Messages = tuple[Message, ...]
# Bins of a pair's confidence max(p, 1 - p), which is at least a half: 50 to 55 %, to 60 %, ...
NUM_BINS = 10
BINS = tuple(f"{50 + 5 * i}-{55 + 5 * i}" for i in range(NUM_BINS))


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt and two completions, each with the token that ends it."""

    prompt_ids: Tensor  # [P] int64, at least one
    chosen_ids: Tensor  # [L] int64
    rejected_ids: Tensor  # [L] int64
    margin: float = 0.0  # by how much the chosen one is to score higher, at the loss's middle

    @property
    def num_tokens(self) -> int:
        """The tokens of a pair, with the prompt once."""
        ids = (self.prompt_ids, self.chosen_ids, self.rejected_ids)
        return sum(part.numel() for part in ids)


@dataclass(frozen=True, slots=True)
class PreferenceBatch:
    """N pairs end to end."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S+1] int64
    parents: Tensor  # [S] int64
    chosen: Tensor  # [N] int64: places of the chosen completions' last tokens
    rejected: Tensor  # [N] int64
    margins: Tensor  # [N] float32


def bradley_terry(
    chosen_N: Tensor, rejected_N: Tensor, margins_N: Tensor, *, center_coef: float
) -> Tensor:
    """sum over pairs of -log sigmoid(r_c - r_r - m) + center_coef (r_c + r_r)^2, []

    r_c, r_r: scores; m: margins (Touvron et al. 2023, Llama 2, eq. 2). The second term, which keeps
    scores around 0, is Eisenstein et al.'s (2023), and TRL's center_rewards_coefficient.
    """
    losses_N = -F.logsigmoid(chosen_N - rejected_N - margins_N)
    if center_coef:
        losses_N = losses_N + center_coef * (chosen_N + rejected_N).square()
    return losses_N.sum()


class BradleyTerry:
    """The objective of a reward model (llamarl.learning.supervised.Objective). Its targets are
    pairs.
    """

    def __init__(self, *, center_coef: float):
        self.center_coef = center_coef

    def num_tokens(self, pair: Preference) -> int:
        """Return how many tokens a pair takes of a microbatch."""
        return pair.num_tokens

    def num_targets(self, pair: Preference) -> int:
        """Return 1: a pair is one target of the mean."""
        return 1

    def pack(self, pairs: Sequence[Preference], device: torch.device) -> PreferenceBatch:
        """Return the pairs as one batch on the device."""
        return pack_preferences(pairs, device)

    def loss(
        self, decoder: Decoder, batch: PreferenceBatch
    ) -> tuple[Tensor, Sums, PackedAttention]:
        """Return the batch's loss [], sums for the metrics, and the attention."""
        attention = PackedAttention(batch.cu_seqlens, batch.parents)
        chosen_N, rejected_N = pair_scores(decoder, batch, attention)
        loss = bradley_terry(chosen_N, rejected_N, batch.margins, center_coef=self.center_coef)
        chosen_N = chosen_N.detach()
        rejected_N = rejected_N.detach()
        sums = {
            "preference/accuracy": (chosen_N > rejected_N).sum(),
            "preference/margin": (chosen_N - rejected_N).sum(),
            "preference/score_chosen": chosen_N.sum(),
            "preference/score_rejected": rejected_N.sum(),
        }
        return loss, sums, attention

    def measure(self, decoder: Decoder, batch: PreferenceBatch) -> Sums:
        """Return the sums of an evaluation over the batch's pairs."""
        attention = PackedAttention(batch.cu_seqlens, batch.parents)
        chosen_N, rejected_N = pair_scores(decoder, batch, attention)
        return held_out_sums(chosen_N, rejected_N, batch.margins)

    def summary(self, sums: Mapping[str, float], num_targets: float) -> dict[str, float | None]:
        """Return the columns of an evaluation from its sums."""
        return held_out_columns(sums, num_targets)


def pair_scores(
    decoder: Decoder, batch: PreferenceBatch, attention: PackedAttention
) -> tuple[Tensor, Tensor]:
    """Return the scores [N] of the chosen and of the rejected completions, float32."""
    rows = torch.cat([batch.chosen, batch.rejected])
    scores_R1 = decoder(batch.input_ids, batch.positions, attention, scores_at(rows))
    scores_R = scores_R1.squeeze(1)
    num_pairs = batch.chosen.numel()
    return scores_R[:num_pairs], scores_R[num_pairs:]


def pack_preferences(pairs: Sequence[Preference], device: torch.device) -> PreferenceBatch:
    """Pack pairs as one batch. Without any pair it holds a single token whose score nobody
    reads.
    """
    segments = Segments()
    last = []  # of each completion
    for pair in pairs:
        prompt = pair.prompt_ids.numel()
        root = segments.add(pair.prompt_ids)
        for completion in (pair.chosen_ids, pair.rejected_ids):
            segments.add(completion, position=prompt, parent=root)
            last.append(segments.num_tokens - 1)
    packed = segments.packed()
    return PreferenceBatch(
        **{name: tensor.to(device) for name, tensor in packed.items()},
        chosen=torch.tensor(last[0::2], dtype=torch.int64, device=device),
        rejected=torch.tensor(last[1::2], dtype=torch.int64, device=device),
        margins=torch.tensor([pair.margin for pair in pairs], device=device),
    )


# --- Held-out pairs ---


def held_out_sums(chosen_N: Tensor, rejected_N: Tensor, margins_N: Tensor) -> Sums:
    """Return sums over pairs, float64: the loss, scores, and by bin of confidence how many pairs
    there are, how sure the model is of them, and how many it ranks right.
    """
    chosen_N = in_float64(chosen_N)
    rejected_N = in_float64(rejected_N)
    margins_N = margins_N.to(chosen_N.device)
    differences_N = chosen_N - rejected_N
    is_right_N = (differences_N > 0).double()
    confidence_N = differences_N.abs().sigmoid()
    bins_N = ((confidence_N - 0.5) * 2 * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    sums = {
        "loss": bradley_terry(chosen_N, rejected_N, margins_N, center_coef=0.0),
        "right": is_right_N.sum(),
        "margin": differences_N.sum(),
        "score": chosen_N.sum() + rejected_N.sum(),
        "square": chosen_N.square().sum() + rejected_N.square().sum(),
    }
    for i, name in enumerate(BINS):
        in_bin_N = bins_N == i
        sums[f"pairs {name}"] = in_bin_N.sum()
        sums[f"right {name}"] = is_right_N[in_bin_N].sum()
        sums[f"confidence {name}"] = confidence_N[in_bin_N].sum()
    return sums


def held_out_columns(sums: Mapping[str, float], num_pairs: float) -> dict[str, float | None]:
    """Return the columns of an evaluation: means over pairs, the scores' mean and standard
    deviation, and the reliability table with its expected calibration error:

    ECE = sum over bins of pairs / all pairs * |share ranked right - mean confidence|
    (Guo et al. 2017, eq. 3)
    """
    num_scores = 2 * num_pairs
    mean = sums["score"] / num_scores
    variance = sums["square"] / num_scores - mean**2
    columns: dict[str, float | None] = {
        "eval/accuracy": sums["right"] / num_pairs,
        "eval/loss": sums["loss"] / num_pairs,
        "eval/margin": sums["margin"] / num_pairs,
        "eval/score_mean": mean,
        "eval/score_std": max(0.0, variance) ** 0.5,
    }
    error = 0.0
    for name in BINS:
        pairs = sums[f"pairs {name}"]
        columns[f"calibration/pairs/{name}"] = pairs
        if not pairs:
            continue
        right = sums[f"right {name}"]
        confidence = sums[f"confidence {name}"]
        columns[f"calibration/accuracy/{name}"] = right / pairs
        columns[f"calibration/confidence/{name}"] = confidence / pairs
        error += abs(right - confidence) / num_pairs
    columns["eval/calibration_error"] = error
    return columns


def read_preference_data(task: RowsToRead, tokenizer) -> SupervisedData[Preference]:
    """Read the pairs of task.path, and those held out, see read_data.

    drop_long: pairs of more than max_tokens are left out, with a warning; else they are bad rows.
    Errors as from `read_examples`.
    """
    return read_data(
        task,
        _Reader(task, tokenizer).read,
        unit="pairs",
        prompt_of=lambda pair: pair.prompt_ids.numpy().tobytes(),
        content_of=_content_of,
    )


def _content_of(pair: Preference) -> str:
    """Return the tokens as JSON, and the margin."""
    ids = (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)
    return "".join(json.dumps(part.tolist()) for part in ids) + repr(pair.margin)


class _Reader:
    """Makes pairs from rows."""

    def __init__(self, task: RowsToRead, tokenizer):
        check_end_token(tokenizer)
        self._tokenizer = tokenizer
        self._max_tokens = task.max_tokens
        self._drop_long = task.drop_long
        self._maker = PromptMaker(
            tokenizer,
            chat=task.chat,
            system_prompt=task.system_prompt,
            max_prompt_tokens=task.max_tokens,
        )

    def read(self, path: str | Path) -> list[Preference]:
        """Read all pairs of a file that are not too long."""
        self._spelled = Spelled(self._tokenizer)
        return read_examples(path, self._pair, spelled=self._spelled, max_tokens=self._max_tokens)

    def _pair(self, row: dict) -> Preference | None:
        """Make the pair of a row; None for one that is too long and may be left out. ValueError."""
        for side in SIDES:
            check_keys(row, "prompt", side)
        margin = _margin(row.get("margin"))
        prompt = _prompt(row["prompt"])
        chosen, rejected = (_completion(row[side], prompt, side) for side in SIDES)
        asked = [prompt] if isinstance(prompt, str) else [turn.content for turn in prompt]
        self._spelled.note([*asked, chosen, rejected])
        if chosen == rejected:
            raise ValueError("both completions are equal: there is nothing to prefer; leave it out")
        prompt_ids = self._prompt_ids(prompt)
        reads_turns = self._maker.shows_turns or not isinstance(prompt, str)
        to_ids = partial(reply_ids, self._tokenizer, prompt_ids, chat=reads_turns)
        pair = Preference(
            prompt_ids=torch.tensor(prompt_ids),
            chosen_ids=torch.tensor(to_ids(chosen)),
            rejected_ids=torch.tensor(to_ids(rejected)),
            margin=margin,
        )
        if torch.equal(pair.chosen_ids, pair.rejected_ids):
            raise ValueError("both completions are the same tokens: there is nothing to prefer")
        longer = max(pair.chosen_ids.numel(), pair.rejected_ids.numel())
        length = pair.prompt_ids.numel() + longer
        if length <= self._max_tokens:
            return pair
        if self._drop_long:
            return None
        raise ValueError(
            f"{length} tokens, task.max_tokens={self._max_tokens}; shorten it, or leave out all "
            "such pairs with task.drop_long=true"
        )

    def _prompt_ids(self, prompt: str | Messages) -> list[int]:
        if isinstance(prompt, str):
            return self._maker.ids(prompt)
        check_chat_template(self._tokenizer)
        turns = [message.to_dict() for message in prompt]
        with refused_by_template():
            return chat_ids(self._tokenizer, turns, reply=True)


def _margin(value: object) -> float:
    if value is None:
        return 0.0
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError(f'"margin" must be a finite number, this is {value!r}')


def _prompt(value: object) -> str | Messages:
    if isinstance(value, list):
        return messages_of(value, "prompt")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'"prompt" must be text that is not empty, or messages: {shown(value)}')
    return value


def _completion(value: object, prompt: str | Messages, side: str) -> str:
    """Return the text of a completion; if it is messages, of the one reply behind the prompt's."""
    if isinstance(value, list):
        messages = messages_of(value, side)
        before = prompt
        if isinstance(prompt, str):
            before = (Message("user", prompt),)
        *repeated, reply = messages
        if repeated and tuple(repeated) != before:
            raise ValueError(
                f'"{side}" has {len(messages)} messages that do not begin with the '
                "prompt's; give the reply alone"
            )
        if reply.role != "assistant":
            raise ValueError(f'"{side}" ends with a message of {reply.role!r}, not assistant')
        value = reply.content
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'"{side}" must be text that is not empty, or messages: {shown(value)}')
    return value
