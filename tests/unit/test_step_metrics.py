"""Parts of metrics: joined over microbatches, ranks and updates, each by its reduction."""

import math

import torch

from llamarl.comm.together import TrainerRanks
from llamarl.learning.step_metrics import (
    Metric,
    Reduction,
    Tally,
    batch_row,
    join,
    metrics_of_loss,
    over_ranks,
    updates_row,
)
from tests.updating import VERSION, group

ALONE = TrainerRanks(None, torch.device("cpu"), None)


class RankOfTwo(TrainerRanks):
    """This rank and one that knows other metrics: {"their/max": 5, "shared": 3}."""

    def __init__(self):
        super().__init__(None, torch.device("cpu"), None)
        self.size = 2

    def union(self, names):
        return sorted({*names, "MAX their/max", "TOKEN_MEAN shared"})

    def _reduced(self, values, operation):
        theirs = {"their/max": 5.0, "mine/max": -math.inf, "shared": 3.0, "mine": 0.0}
        join = max if operation == torch.distributed.ReduceOp.MAX else lambda a, b: a + b
        return {name: join(value, theirs[name]) for name, value in values.items()}


def test_names_that_ranks_tell_each_other_may_hold_any_sign():
    class First(TrainerRanks):
        def gather(self, message):
            return [message, b"[]", b"", b'["their"]']

    ranks = First(None, torch.device("cpu"), None)
    ranks.size = 4
    assert ranks.union(["reward/x,y/mean", '"']) == ['"', "reward/x,y/mean", "their"]


def test_the_name_that_a_loss_gives_says_the_reduction():
    given = ["clip/low", "ratio/sum", "ratio/capped", "ratio/max", "tb/square/completions"]
    made = metrics_of_loss({name: torch.tensor(1.0) for name in given})
    assert {name: metric.reduction for name, metric in made.items()} == {
        "clip/low": Reduction.TOKEN_MEAN,
        "ratio/mean": Reduction.TOKEN_MEAN,
        "ratio/capped_fraction": Reduction.TOKEN_MEAN,
        "ratio/max": Reduction.MAX,
        "tb/square": Reduction.COMPLETION_MEAN,
    }


def test_parts_add_up_or_their_largest_stays_and_nan_is_the_largest():
    metrics = {}
    for value, top in ((1.0, 2.0), (4.0, float("nan")), (0.5, 3.0)):
        join(metrics, {"a": Metric(torch.tensor(value), Reduction.TOKEN_MEAN)})
        join(metrics, {"b/max": Metric(torch.tensor(top), Reduction.MAX)})
    assert metrics["a"].value == 5.5 and metrics["b/max"].value.isnan()
    join(metrics, {"c/max": Metric(1.0, Reduction.MAX)})
    join(metrics, {"c/max": Metric(0.5, Reduction.MAX)})
    assert metrics["c/max"].value == 1.0


def test_ranks_may_know_different_metrics():
    own = {
        "shared": Metric(torch.tensor(2.0), Reduction.TOKEN_MEAN),
        "mine": Metric(torch.tensor(1.0), Reduction.COMPLETION_MEAN),
        "mine/max": Metric(torch.tensor(-7.0), Reduction.MAX),
    }
    assert over_ranks(own, ALONE) == {
        "shared": Metric(2.0, Reduction.TOKEN_MEAN),
        "mine": Metric(1.0, Reduction.COMPLETION_MEAN),
        "mine/max": Metric(-7.0, Reduction.MAX),
    }
    assert over_ranks(own, RankOfTwo()) == {
        "shared": Metric(5.0, Reduction.TOKEN_MEAN),
        "mine": Metric(1.0, Reduction.COMPLETION_MEAN),
        "mine/max": Metric(-7.0, Reduction.MAX),
        "their/max": Metric(5.0, Reduction.MAX),
    }


def test_each_mean_has_its_own_denominator():
    metrics = {
        "a": Metric(10.0, Reduction.TOKEN_MEAN),
        "b": Metric(10.0, Reduction.COMPLETION_MEAN),
        "c": Metric(10.0, Reduction.UPDATE_MEAN),
        "d": Metric(20.0, Reduction.MAX),
    }
    sizes = {"completions": 2.0, "labels": 5.0, "tokens": 6.0, "places": 8.0}
    norms = [Metric(norm, Reduction.UPDATE_MEAN) for norm in (1.0, 2.0)]
    parity = Metric(0.5, Reduction.MAX)  # of the first update alone
    told = metrics | {"grad_norm": norms[0], "parity/logprob_diff_max": parity}
    first = Tally(metrics=told, **sizes)
    second = Tally(metrics=metrics | {"grad_norm": norms[1]}, **sizes)
    row = updates_row([first, second], ALONE)
    assert [row[name] for name in "abcd"] == [2.0, 5.0, 10.0, 20.0]
    assert row["packing/padding_fraction"] == 0.25
    assert (row["grad_norm"], row["parity/logprob_diff_max"]) == (1.5, 0.5)


def test_what_no_microbatch_told_of_stands_at_what_means_nothing_happened():
    assert updates_row([Tally(completions=0.0)], ALONE) == {
        "entropy": 0.0,
        "kl/ref": None,
        "ratio/mean": 1.0,
        "ratio/max": 1.0,
        "ratio/capped_fraction": 0.0,
        "packing/padding_fraction": 0.0,
        "parity/logprob_diff_max": None,
        "parity/logprob_diff_rms": None,
    }


def test_completions_without_a_reward_have_no_mean_of_rewards():
    none = [group(1, [3, 4], [math.nan, math.nan])]
    row = batch_row(none, VERSION, ALONE)
    assert row["reward/mean"] is None and row["reward/std"] is None
    assert row["reward/error_rate"] == 1.0 and row["tokens/generated"] == 7.0
    row = batch_row([*none, group(2, [1, 1], [0.0, 2.0])], VERSION, ALONE)
    assert (row["reward/mean"], row["reward/std"]) == (1.0, 1.0)


def test_columns_of_completions_become_means_and_sums_over_the_groups_of_the_step():
    def told(ticket, *columns):
        return group(ticket, [1] * len(columns), [1.0] * len(columns), columns=columns)

    right = "reward/right/mean"
    groups = [
        told(1, {right: 1.0, "dialogues/turns": 2, "tokens/reencode_mismatch": 0}, {}),
        told(2, {right: 4.0, "dialogues/turns": 3, "dialogues/completed": 1}),
        group(3, [1], [math.nan]),
    ]
    row = batch_row(groups, VERSION, ALONE)
    assert (row[right], row["dialogues/turns"], row["dialogues/completed"]) == (2.5, 5.0, 1.0)
    assert row["tokens/reencode_mismatch"] == 0.0
    assert right not in batch_row(groups[2:], VERSION, ALONE)


def test_context_is_counted_of_the_groups_of_the_step():
    plain = group(1, [2], [0.0])
    mask = torch.tensor([True, False, False, True])
    row = batch_row([plain, group(2, [4], [1.0], loss_mask=mask)], VERSION, ALONE)
    assert (row["tokens/context"], row["tokens/generated"]) == (2.0, 4.0)
    assert "tokens/context" not in batch_row([plain], VERSION, ALONE)
