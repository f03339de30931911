"""A replay buffer that all trainer ranks draw from: two ranks, in two threads, against one that
gets everything.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
import torch

from llamarl.comm.channel import dp_rank_of
from llamarl.comm.together import TrainerRanks
from llamarl.learning.replay import ReplayBuffer, SharedReplayBuffer, SplitReplayBuffer
from tests.launching import SMALL, ForkedJob
from tests.unit.replaying import ALONE, draw, group, names_of

SECONDS = 30


class Together:
    """Ranks in threads of one process, which meet at each gathering."""

    def __init__(self, size):
        self.size = size
        self.given = [b""] * size
        self.barrier = threading.Barrier(size, timeout=SECONDS)

    def of(self, rank):
        ranks = TrainerRanks(None, torch.device("cpu"), None)

        def gather(message):
            self.given[rank] = message
            self.barrier.wait()
            messages = list(self.given)
            self.barrier.wait()
            return messages

        ranks.gather = gather
        return ranks


def shared(ranks, make=SharedReplayBuffer, completions=3, **options):
    """The buffers of so many ranks."""
    together = Together(ranks)
    made = []
    for rank in range(ranks):
        buffer = make(
            draw=draw(prompts=4, completions=completions),
            sync_period=2,
            max_size=20,
            seed=5,
            rank=rank,
            num_ranks=ranks,
            **options,
        )
        buffer.attach(together.of(rank))
        made.append(buffer)
    return made


def alone(completions=3, **options):
    made = ReplayBuffer(
        draw=draw(prompts=4, completions=completions),
        sync_period=2,
        max_size=20,
        seed=5,
        **options,
    )
    made.attach(ALONE)
    return made


def come_at(step):
    """Four groups of two, of three prompts: those of a prompt go to both ranks."""
    groups = []
    for ticket in range(4 * step, 4 * step + 4):
        rewards = (float(ticket % 5), float(ticket % 3))
        groups.append(group(ticket, prompt=ticket % 3, rewards=rewards, version=step))
    return groups


def take(buffers, step):
    """What each rank trains on, each having been handed the groups of its own tickets."""
    ranks = len(buffers)

    def on(rank):
        own = [g for g in come_at(step) if ranks == 1 or dp_rank_of(g.ticket, ranks) == rank]
        buffers[rank].put(own)
        return buffers[rank].take([g.ticket for g in own], step)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(on, range(ranks)))


def in_draw_order(parts):
    """Names of what all ranks train on, in the order of the draws."""
    count = sum(map(len, parts))
    return [names_of(parts[i % len(parts)][i // len(parts)]) for i in range(count)]


def test_ranks_together_draw_what_one_rank_draws():
    ranks = 2
    one, many = alone(grow_until=3), shared(ranks, grow_until=3)
    for step in range(6):
        (expected,) = take([one], step)
        parts = take(many, step)
        assert [len(part) for part in parts] == [4 // ranks] * ranks
        assert in_draw_order(parts) == [names_of(g) for g in expected]
    told = one.metrics(ALONE)
    sums = [buffer._told if buffer._counts() else {} for buffer in many]
    assert sum(part.get("size", 0) for part in sums) == told["buffer/size"]
    prompts = {int(g.prompt_ids[1]) for g in chain.from_iterable(parts)}
    assert len(prompts) == 3, "a prompt's completions have met on all ranks"


def test_ranks_that_split_a_draw_have_equal_shares_of_all_its_prompts():
    ranks = 2
    one, many = alone(completions=4), shared(ranks, SplitReplayBuffer, completions=4)
    for step in range(4):
        (expected,) = take([one], step)
        parts = take(many, step)
        for place, whole in enumerate(expected):
            of_ranks = [names_of(part[place]) for part in parts]
            assert [len(names) for names in of_ranks] == [4 // ranks] * ranks
            in_turn = [of_ranks[k % ranks][k // ranks] for k in range(4)]
            assert in_turn == names_of(whole)


def test_what_the_first_rank_draws_counts_should_another_draw_otherwise():
    """As a processor may whose softmax rounds otherwise; this one looks at no reward at all."""
    one, many = alone(), shared(2)
    many[1].draw = draw(prompts=4, completions=3, priority="uniform", most_on_policy=0.0)
    for step in range(3):
        (expected,) = take([one], step)
        assert in_draw_order(take(many, step)) == [names_of(g) for g in expected]


def test_a_step_that_is_given_up_is_drawn_again():
    many = shared(2)
    take(many, 0)
    first = take(many, 1)
    for buffer, groups in zip(many, first):
        buffer.untake(groups)
        assert buffer.tickets() == [g.ticket for g in come_at(1) if buffer._stores(g.ticket)]

    def again(rank):
        return many[rank].take(many[rank].tickets(), 1)

    with ThreadPoolExecutor(2) as pool:
        assert in_draw_order(list(pool.map(again, range(2)))) == in_draw_order(first)


@pytest.mark.parametrize("before, after", [(2, 1), (2, 4)])
def test_a_checkpoint_has_each_group_once_and_goes_on_with_any_number_of_ranks(before, after):
    one, many = alone(grow_until=1), shared(before, grow_until=1)
    for step in range(4):
        take([one], step)
        take(many, step)
    parts = [buffer.state_dict() for buffer in many]
    tickets = []
    for part in parts:
        tickets += [ticket for ticket, _ in part["held"]]
    assert len(tickets) == len(set(tickets)) > 0
    resumed = shared(after, grow_until=1)
    for rank, buffer in enumerate(resumed):
        buffer.load(parts, set(), lambda t, rank=rank: dp_rank_of(t, after) == rank)
    for step in (4, 5):
        (expected,) = take([one], step)
        assert in_draw_order(take(resumed, step)) == [names_of(g) for g in expected]


def placed_on(ranks):
    """Trainers on all of them but the last, which has the rest."""
    others = [f"placement.{name}=[{ranks - 1}]" for name in ("generator", "reward", "reference")]
    return [f"placement.trainer={list(range(ranks - 1))}".replace(" ", ""), *others]


SPLIT = ("buffer.draw=split", "groups_per_step=3", "loss=tb", "reference=frozen")


@pytest.mark.slow
@pytest.mark.parametrize(
    "own, ranks, topology",
    [
        (("buffer.draw=shared",), 3, "trainer.tensor_parallel=1"),
        (SPLIT, 3, "trainer.tensor_parallel=1"),
        (SPLIT, 5, "trainer.tensor_parallel=2"),
    ],
    ids=["shared", "split", "split_layers_too"],
)
def test_trainer_ranks_of_a_run_draw_what_one_draws(tmp_path, own, ranks, topology):
    """The same completions as in a run of one trainer rank, until the weights round otherwise."""
    drawn = (*SMALL, *own, "buffer=replay", "max_lag=0", "max_steps=2", "eval.every=0")
    with ForkedJob(*drawn, *placed_on(2), run_dir=tmp_path / "one", ranks=2) as job:
        assert job.wait() == 0, job.output
        (alone, _) = job.rows
    with ForkedJob(
        *drawn, *placed_on(ranks), topology, run_dir=tmp_path / "all", ranks=ranks
    ) as job:
        assert job.wait() == 0, job.output
        (together, _) = job.rows
    for column in ("buffer/size", "buffer/prompts", "reward/mean", "tokens/trained"):
        assert alone[column] == pytest.approx(together[column], rel=1e-6)
    assert alone["grad_norm"] > 1e-3, "else rewards are all equal, and nothing is compared"
    assert alone["grad_norm"] == pytest.approx(together["grad_norm"], rel=1e-3)
