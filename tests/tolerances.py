"""How far apart two results may lie that would be equal in exact arithmetic. Nothing else in the
tests decides that for itself.

Which order a product sums in depends on its shape, the CPU, the library and the number of ranks;
each order rounds in its own way. Roundings are as good as random: those of one sum of n terms grow
as sqrt(n), and those of d sums in a row add up as sqrt(d). So two orders differ by about eps *
sqrt(n * d), times the size of the values, times a small number for how much a norm, a softmax or a
division by a small value enlarges it. MARGIN is that number: eight times what roundings alone make
is still a thousand times less than what is left of a product in bfloat16, and than what a wrong
weight, position or mask changes in the small models of the tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

MARGIN = 8.0


def rounding(
    dtype: torch.dtype = torch.float32, *, terms: int, depth: int = 1, size: float = 1.0
) -> float:
    """The largest difference that orders of summation make, in the unit of `size`.

    terms: of such a sum. depth: how many of them follow each other: two a layer, the attention's
    and the feed-forward's; twice as many with the backward pass. size: of the values, as their
    standard deviation; 1 for a share of the largest.
    """
    return torch.finfo(dtype).eps * (terms * depth) ** 0.5 * size * MARGIN


def of_logprobs(config, *, size: float, dtype: torch.dtype = torch.float32) -> float:
    """Nats, of one model's logprobs by two paths. config: the model's, with hidden_size and
    num_hidden_layers. size: of its logits, as their standard deviation.
    """
    return rounding(dtype, terms=config.hidden_size, depth=2 * config.num_hidden_layers, size=size)


def margins_of(logits_LV: Tensor) -> Tensor:
    """[L]: by how many nats the likeliest token is likelier than the second."""
    likeliest, second = logits_LV.detach().topk(2).values.unbind(1)
    return likeliest - second


def first_difference(ours: Tensor, theirs: Tensor) -> int:
    """The first place at which two completions [L], [M] differ, or one ends; L where they are
    equal.
    """
    shorter = min(ours.numel(), theirs.numel())
    unequal = (ours[:shorter] != theirs[:shorter]).nonzero()
    return int(unequal[0]) if unequal.numel() else shorter


def assert_same_greedy(ours: Tensor, theirs: Tensor, margins: Tensor, tolerance: float) -> int:
    """Two greedy completions are the same up to the first near-tie; returns how many tokens that
    are.

    At a near-tie the two likeliest tokens are closer than rounding, and either is right; from there
    on the completions are of different prefixes, and nothing follows. margins [M]: margins_of the
    logits that theirs was chosen from.
    """
    same = first_difference(ours, theirs)
    if same < max(ours.numel(), theirs.numel()):
        assert same < margins.numel(), f"{ours.tolist()} goes on after {theirs.tolist()} has ended"
        margin = float(margins[same])
        assert margin <= 2 * tolerance, (
            f"place {same}: {ours.tolist()}, not {theirs.tolist()}, which is likelier by "
            f"{margin:.2g} nats"
        )
    return same


def assert_same_ranking(ours: list[int], values_V: Tensor, tolerance: float) -> None:
    """`ours`, the indices of the largest values in falling order, is a right order of values_V [V].

    Two values that are closer than rounding have no order, so each place needs only a value as
    large as that place's, up to twice the tolerance of one.
    """
    assert len(set(ours)) == len(ours), f"{ours} repeats an index"
    largest = values_V.topk(len(ours)).values
    short_by = largest - values_V[ours]
    assert short_by.abs().max() <= 2 * tolerance, f"{ours} have {values_V[ours]}, not {largest}"


def assert_same_count(ours: float, *, stricter: float, looser: float, what: str) -> None:
    """How many values lie past a threshold is right, if it lies between the counts for a threshold
    that rounding moved up and one that it moved down.

    A count is not continuous: a value as close to the threshold as rounding is on either side of it
    in one order of summation or another, and is one more or one less. No tolerance on the count
    says that. stricter, looser: the counts past the threshold moved by the tolerance of a value.
    """
    assert stricter <= looser, f"{what}: {stricter} past the farther threshold, {looser} past it"
    assert stricter <= ours <= looser, f"{what}: {ours}, not {stricter} to {looser}"
