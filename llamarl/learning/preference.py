"""Reward models by Bradley and Terry: the better of two completions of a prompt is to score higher.

P(chosen is better) = sigmoid(r_chosen - r_rejected)

A pair's prompt is computed once for both of its completions: [7 8] with [1 2] and [3] becomes

    input_ids  7 8 1 2 3     positions 0 1 2 3 2     cu_seqlens 0 2 4 5     parents -1 0 0
    chosen 3   rejected 4                            the places of the completions' last tokens

Shapes: N pairs, P tokens of a prompt, L of a completion, T packed, S segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.learning.supervised import Sums
from llamarl.models.attention import PackedAttention
from llamarl.models.build import Decoder
from llamarl.models.scorer import scores_at

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
    ids = []
    positions = []
    parents: list[int] = []
    last = []  # of each completion
    tokens = 0
    for pair in pairs:
        prompt = pair.prompt_ids.numel()
        root = len(parents)
        ids.append(pair.prompt_ids)
        positions.append(torch.arange(prompt))
        parents.append(-1)
        tokens += prompt
        for completion in (pair.chosen_ids, pair.rejected_ids):
            ids.append(completion)
            positions.append(torch.arange(prompt, prompt + completion.numel()))
            parents.append(root)
            tokens += completion.numel()
            last.append(tokens - 1)
    if not pairs:
        ids.append(torch.zeros(1, dtype=torch.int64))
        positions.append(torch.arange(1))
        parents.append(-1)
    sizes = torch.tensor([segment.numel() for segment in ids])
    return PreferenceBatch(
        input_ids=torch.cat(ids).to(device),
        positions=torch.cat(positions).to(device),
        cu_seqlens=F.pad(sizes.cumsum(0), (1, 0)).to(device),
        parents=torch.tensor(parents, device=device),
        chosen=torch.tensor(last[0::2], dtype=torch.int64, device=device),
        rejected=torch.tensor(last[1::2], dtype=torch.int64, device=device),
        margins=torch.tensor([pair.margin for pair in pairs], device=device),
    )


# --- Held-out pairs ---


def held_out_sums(chosen_N: Tensor, rejected_N: Tensor, margins_N: Tensor) -> Sums:
    """Return sums over pairs, float64: the loss, scores, and by bin of confidence how many pairs
    there are, how sure the model is of them, and how many it ranks right.
    """
    chosen_N = chosen_N.double()
    rejected_N = rejected_N.double()
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
