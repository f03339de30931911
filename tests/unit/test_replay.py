"""The replay buffer against a naive model of it, its draws against their probabilities, its bound
on lag, and buffers that trainer ranks draw from together. Also the fifo buffer's bound.
"""

import dataclasses
import json
import math
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executors.build_trainer import build_buffer
from llamarl.comm.channel import dp_rank_of
from llamarl.comm.together import TrainerRanks
from llamarl.errors import LagExceeded
from llamarl.learning.buffer import GroupBuffer
from llamarl.learning.replay import (
    ReplayBuffer,
    SharedReplayBuffer,
    SplitReplayBuffer,
    draw_completions,
    lag_bound,
    newest_of,
    rng_of,
)
from llamarl.learning.step_metrics import lag_histogram
from tests.build.group import build_group
from tests.build.job import finished_job
from tests.launching import SMALL
from tests.unit.refusals import job
from tests.unit.replaying import ALONE, draw, group, names_of

NAN = float("nan")
# of the standard normal, one in ten thousand: seeds are fixed, so a right buffer passes always
QUANTILE = 3.72


def buffer_of(*, prompts=2, completions=2, most_on_policy=0.5, priority="softmax", **options):
    how = draw(prompts, completions, most_on_policy, priority)
    return ReplayBuffer(draw=how, **{"sync_period": 1, "max_size": 1000, "seed": 0, **options})


class Naive:
    """What may be drawn at a step, by the letter: lists of (taken, joined, group), all of it gone
    through at each question.
    """

    def __init__(self, sync_period, max_size, grow_until, least):
        self.k = sync_period
        self.max_size = max_size
        self.grow_until = grow_until
        self.least = least  # completions that growth goes on to
        self.hidden = []
        self.held = []

    def take(self, groups, step):
        self.hidden += [(step, g) for g in groups]
        if step % self.k == 0 and self.hidden:
            self.held += [(taken, step, g) for taken, g in self.hidden]
            self.hidden = []
            self.held.sort(key=lambda x: (x[0], x[2].ticket))
            while self.size() > self.max_size:
                self.held.pop(0)
        if self.grow_until is not None and step >= self.grow_until and self.size() >= self.least:
            self.max_size = self.size()
            self.grow_until = None

    def size(self):
        return sum(len(g.rewards) for _, _, g in self.held)

    def drawable(self):
        """{prompt: {name: (is it of the newest: as many as joined last, by version, then by join,
        and whatever equals the last of these)}}
        """
        out = {}
        for _, joined, g in self.held:
            for i, reward in enumerate(g.rewards.tolist()):
                if not math.isnan(reward) and g.finish_reasons[i] != "aborted":
                    age = (int(g.policy_versions[0]), joined)
                    out.setdefault(int(g.prompt_ids[1]), {})[100 * g.ticket + i] = age
        of_prompts = chain.from_iterable(names.values() for names in out.values())
        ages = sorted(of_prompts, reverse=True)
        last_join = max((joined for _, joined in ages), default=-1)
        joined_last = [age for age in ages if age[1] == last_join]
        least = ages[len(joined_last) - 1] if ages else None
        recent = {}
        for prompt, names in out.items():
            recent[prompt] = {name: age >= least for name, age in names.items()}
        return recent


@settings(max_examples=60)
@given(
    sync_period=st.integers(1, 3),
    max_size=st.integers(4, 24),
    k=st.integers(1, 4),
    prompts=st.integers(1, 4),
    m=st.sampled_from([0.0, 0.5, 1.0]),
    priority=st.sampled_from(["softmax", "uniform"]),
    steps=st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 3),
                st.lists(st.sampled_from([0.0, 1.0, NAN, 2.5]), min_size=1, max_size=4),
                st.integers(0, 4),
            ),
            max_size=3,
        ),
        min_size=1,
        max_size=8,
    ),
    give_up=st.sets(st.integers(0, 7)),
    grow_until=st.none() | st.integers(0, 6),
)
def test_what_is_drawn_is_what_a_naive_buffer_could_give(
    sync_period, max_size, k, prompts, m, priority, steps, give_up, grow_until
):
    ours = buffer_of(
        sync_period=sync_period,
        max_size=max_size,
        completions=k,
        prompts=prompts,
        most_on_policy=m,
        priority=priority,
        grow_until=grow_until,
    )
    naive, ticket = Naive(sync_period, max_size, grow_until, least=k * prompts), 0
    for step, come in enumerate(steps):
        groups = [
            group(ticket + i, prompt=p, rewards=tuple(rewards), version=max(0, step - lag))
            for i, (p, rewards, lag) in enumerate(come)
        ]
        ticket += len(groups)
        ours.put(groups)
        assert ours.tickets() == [g.ticket for g in groups]
        got = ours.take([g.ticket for g in groups], step)
        if step in give_up:
            ours.untake(got)
            assert ours.tickets() == [g.ticket for g in groups]
            again = ours.take([g.ticket for g in groups], step)
            assert [names_of(g) for g in again] == [names_of(g) for g in got]
        naive.take(groups, step)
        drawable = naive.drawable()
        assert len(got) == (prompts if drawable else 0)
        told = ours.metrics(ALONE)
        assert told["buffer/size"] == sum(map(len, drawable.values()))
        assert told["buffer/prompts"] == len(drawable)
        assert told["buffer/hidden"] == sum(len(g.rewards) for _, g in naive.hidden)
        asked = Counter(int(g.prompt_ids[1]) for g in got)
        recent_prompts = {p for p, names in drawable.items() if any(names.values())}
        if m == 0 and got:  # each prompt before any twice
            assert max(asked.values()) - min(asked[p] for p in drawable) <= 1
        drawn = []
        for g in got:
            names = drawable[int(g.prompt_ids[1])]
            chosen = names_of(g)
            drawn += chosen
            assert set(chosen) <= set(names) and len(chosen) == k
            if m == 1:
                assert int(g.prompt_ids[1]) in recent_prompts and all(names[c] for c in chosen)
            pool = [c for c, recent in names.items() if recent] if m == 1 else list(names)
            if m != 0.5 and len(pool) >= k:
                assert len(set(chosen)) == k, "with replacement only where there are too few"
            by_ticket = {x.ticket: x for _, _, x in reversed(naive.held)}
            rewards, versions = [], []
            for c, n in zip(chosen, g.lengths.tolist()):
                rewards.append(by_ticket[c // 100].rewards[c % 100].item())
                versions += [int(by_ticket[c // 100].policy_versions[0])] * n
            assert (g.rewards.tolist(), g.policy_versions.tolist()) == (rewards, versions)
            assert g.generator_logprobs.tolist() == (-g.token_ids.float()).tolist()
            assert g.ref_logprobs.tolist() == (g.token_ids.float() / 2).tolist()
            assert g.ticket == max(c // 100 for c in chosen)
        assert told["buffer/duplicates"] == len(drawn) - len(set(drawn))
        flat = {}
        for names in drawable.values():
            flat |= names
        on_policy = sum(flat[c] for c in drawn) / max(1, len(drawn))
        assert told["buffer/on_policy_fraction"] == on_policy


def test_a_completion_over_two_versions_is_as_old_as_its_oldest_token():
    versions, joined = torch.tensor([3, 5, 4, 5, 5]), torch.tensor([6, 4, 6, 4, 2])
    assert newest_of(versions, joined).tolist() == [False, True, False, True, False]
    ours = buffer_of(prompts=1, completions=2, most_on_policy=1.0)
    old = group(0, version=7, lengths=[2, 2])
    old.policy_versions[[0, 2]] = 5  # and 7 from the second token on
    ours.put([old, group(1, version=6)])
    ours.take([0, 1], 8)
    ours.put([group(2, version=5)])
    assert [g.ticket for g in ours.take([2], 9)] == [1]


# --- probabilities ---


def chi_square(counts, probabilities):
    """How many standard deviations of the normal the statistic is out, by Wilson and Hilferty's
    cube root.
    """
    n, expected = sum(counts.values()), {x: p for x, p in probabilities.items() if p > 0}
    assert set(counts) <= set(expected) and min(expected.values()) * n > 5
    statistic = sum((counts[x] - n * p) ** 2 / (n * p) for x, p in expected.items())
    df = len(expected) - 1
    return ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


def is_drawn(probabilities, n, rewards, prompts, newest, how, *, by=lambda row: row[0]):
    """Whether rows drawn at n steps have these probabilities. Those of one prompt are independent,
    those of several are not: then only one a step.
    """
    columns = torch.tensor(rewards), torch.tensor(prompts), torch.tensor(newest)
    rows = []
    for step in range(n):
        nobody = torch.zeros(max(prompts) + 1, dtype=torch.bool)
        rows += draw_completions(*columns, nobody, how, rng_of(0, step, 0)).tolist()
    return chi_square(Counter(map(by, rows)), probabilities) < QUANTILE


def thirds():
    return dict.fromkeys(range(3), 1 / 3)


def test_softmax_priority_draws_in_proportion_to_the_exponential_of_the_reward():
    temperature = 0.5
    rewards = [0.0, 1.0, -0.5, 2.0, 1.0]
    weights = [math.exp(r / temperature) for r in rewards]
    want = {i: w / sum(weights) for i, w in enumerate(weights)}
    how = draw(500, 1, 0.0, "softmax", temperature)
    assert is_drawn(want, 8, rewards, [0] * 5, [False] * 5, how)


def test_uniform_priority_and_the_most_on_policy_ones_look_at_no_reward():
    how = draw(500, 1, 0.0, "uniform", 0.1)
    assert is_drawn(thirds(), 8, [0.0, 9.0, -9.0], [0] * 3, [False] * 3, how)
    how, newest = draw(500, 1, 1.0, "softmax"), [True, True, True, False]
    assert is_drawn(thirds(), 8, [0.0, 3.0, 1.0, 5.0], [0] * 4, newest, how)


def test_without_replacement_it_is_one_after_the_other():
    """p(i, then j) = p_i * p_j / (1 - p_i)."""
    rewards = [0.0, 1.0, 1.5, -0.5]
    weights = [math.exp(r) for r in rewards]
    p = [w / sum(weights) for w in weights]
    pairs = {(i, j): p[i] * p[j] / (1 - p[i]) for i, j in permutations(range(4), 2)}
    assert is_drawn(pairs, 8, rewards, [0] * 4, [True] * 4, draw(750, 2, 0.0), by=tuple)


def test_with_replacement_where_there_are_too_few_draws_are_independent():
    p = [1 / (1 + math.e), math.e / (1 + math.e)]
    triples = {(a, b, c): p[a] * p[b] * p[c] for a, b, c in product((0, 1), repeat=3)}
    assert is_drawn(triples, 8, [0.0, 1.0], [0, 0], [True] * 2, draw(400, 3, 0.0), by=tuple)


def test_the_most_on_policy_probability_and_what_it_leads_to():
    """Prompt 0 has an old and a new completion, 1 an old one, 2 a new one; K = 1, uniform."""
    m = 0.25
    each = (1 - m) / 3
    want = {0: each / 2, 1: m / 2 + each / 2, 2: each, 3: m / 2 + each}
    how = draw(1, 1, m, "uniform")
    assert is_drawn(want, 2000, [0.0] * 4, [0, 0, 1, 2], [False, True, False, True], how)


def test_prompts_are_equally_likely_whatever_they_hold():
    prompts = [0] * 5 + [1] + [2] * 2
    how = draw(2, 1, 0.0, "softmax")
    of_prompt = lambda row: prompts[row[0]]  # noqa: E731
    assert is_drawn(thirds(), 1000, [0.0] * 8, prompts, [False] * 8, how, by=of_prompt)


def test_a_draw_is_a_function_of_seed_step_and_rank():
    rows = {}
    for seed, step, rank in [(0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        ours = buffer_of(seed=seed, rank=rank, prompts=4, completions=3)
        ours.put([group(t, rewards=(0.0, 1.0, 2.0, 3.0)) for t in range(20)])
        got = [names_of(g) for g in ours.take(list(range(20)), step)]
        assert rows.setdefault((seed, step, rank), got) == got
    assert len({str(r) for r in rows.values()}) == 4


# --- copies ---


def with_tokens(ticket, completions, rewards, *, prompt=0, version=0):
    lengths = [len(tokens) for tokens in completions]
    made = group(ticket, prompt=prompt, rewards=rewards, version=version, lengths=lengths)
    tokens = torch.tensor(list(chain.from_iterable(completions)))
    return dataclasses.replace(made, token_ids=tokens)


def test_equal_completions_of_a_prompt_are_one_sample():
    """TBA, 4.2: with replacement only if there are fewer than K unique samples."""
    ours = buffer_of(prompts=1, completions=2, most_on_policy=0.0, priority="uniform")
    ours.put([with_tokens(0, [[7, 2]] * 5 + [[8, 2]], [0.0] * 5 + [1.0])])
    for step in range(100):
        (got,) = ours.take([0] if step == 0 else [], step)
        assert sorted(names_of(got)) == [7, 8]
    told = ours.metrics(ALONE)
    assert (told["buffer/size"], told["buffer/copies"], told["buffer/duplicates"]) == (2, 4, 0)


def test_of_equal_completions_the_newest_is_kept():
    ours = buffer_of(prompts=1, completions=2, most_on_policy=1.0)
    old = with_tokens(0, [[7, 2], [9, 9]], [0.0, 0.0], version=0)
    new = with_tokens(5, [[7, 2], [7]], [1.0, 1.0], version=3)
    other = with_tokens(6, [[7, 2]], [0.5], prompt=1, version=3)
    ours.put([old, new, other])
    ours.take([0], 0)
    for step in range(3, 40):
        (got,) = ours.take([5, 6] if step == 3 else [], step)
        assert got.oldest_version == 3 and 0.0 not in got.rewards.tolist()
    assert ours.metrics(ALONE)["buffer/size"] == 4, "another prompt's answer is another sample"


def test_copies_take_their_place_so_the_bound_on_lag_is_the_same():
    ours = buffer_of(prompts=1, completions=1, max_size=4)
    for step in range(6):
        ours.put([with_tokens(step, [[7], [7]], [0.0, 0.0], version=step)])
        ours.take([step], step)
    told = ours.metrics(ALONE)
    assert (told["buffer/size"], told["buffer/copies"], told["buffer/age_max"]) == (1, 3, 0)
    assert len(ours.stored()) == 2


# --- turns ---


def prompts_drawn(ours, step, come=()):
    return [int(g.prompt_ids[1]) for g in ours.take(list(come), step)]


@pytest.mark.parametrize("m", [0.0, 1.0])
@pytest.mark.parametrize("prompts, held", [(3, 8), (5, 3)])
def test_no_prompt_comes_again_before_all_were_drawn_over_steps(m, prompts, held):
    ours = buffer_of(prompts=prompts, completions=1, most_on_policy=m)
    ours.put([group(t, rewards=(0.0,)) for t in range(held)])
    drawn = []
    for step in range(24):
        drawn += prompts_drawn(ours, step, range(held) if step == 0 else ())
    for start in range(0, len(drawn) - held + 1, held):
        assert sorted(drawn[start : start + held]) == list(range(held))


@pytest.mark.parametrize("seed", range(3))
def test_recency_and_reward_do_not_draw_the_same_prompt_in_a_step_while_there_are_others(seed):
    ours = buffer_of(prompts=2, completions=1, most_on_policy=0.5, seed=seed)
    ours.put([group(t, rewards=(0.0,)) for t in range(8)])
    for step in range(20):
        first, second = prompts_drawn(ours, step, range(8) if step == 0 else ())
        assert first != second


# --- what is held ---


def test_what_must_not_be_trained_on_is_never_drawn_and_takes_its_place():
    ours = buffer_of(prompts=1, completions=1, max_size=6)
    reasons = ("stop", "aborted", "stop", "stop")
    ours.put([group(0, rewards=(NAN, 1.0, 1.0, 1.0), reasons=reasons, lengths=[1, 2, 0, 1])])
    drawn = set()
    for step in range(20):
        for g in ours.take([0] if step == 0 else [], step):
            drawn.update(names_of(g))
    assert drawn == {3}
    ours.put([group(1), group(2)])
    ours.take([1, 2], 20)
    assert ours.metrics(ALONE)["buffer/size"] == 4, "the first four and other four are over six"


def test_metrics_by_hand():
    ours = buffer_of(sync_period=2, prompts=1, completions=3, most_on_policy=1.0)
    ours.put([group(0, version=0), group(1, version=1), group(2, version=3)])
    ours.take([0], 0), ours.take([1], 2)
    drawn = ours.take([2], 3)
    told = ours.metrics(ALONE)
    assert told == {
        "buffer/size": 4,
        "buffer/prompts": 2,
        "buffer/hidden": 2,
        "buffer/age_mean": (3 + 3 + 2 + 2) / 4,
        "buffer/age_max": 3,
        "buffer/age_min": 2,
        "buffer/copies": 0,
        "buffer/on_policy_fraction": 1,
        "buffer/duplicates": 3 - len(set(names_of(drawn[0]))),
    }
    assert told["buffer/duplicates"] >= 1


def test_lags_of_tokens_are_counted_once_each():
    lags = torch.tensor([0, 0, 1, 2, 3, 4, 8, 15, 40, 64, 1000])
    ranges = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64+")
    counts = {name.removeprefix("lag/tokens/"): int(n) for name, n in lag_histogram(lags).items()}
    assert counts == dict(zip(ranges, (2, 1, 2, 1, 2, 0, 1, 2)))
    assert not any(lag_histogram(lags[:0]).values())


@pytest.mark.parametrize("k, max_lag, max_size, batch, size", [(1, 2, 30, 2, 4), (4, 3, 9, 1, 3)])
def test_the_bound_on_lag_holds_and_is_reached(k, max_lag, max_size, batch, size, caplog):
    """Each step brings a batch that was sampled max_lag steps before."""
    held = {"sync_period": k, "max_size": max_size}
    bound = lag_bound(max_lag=max_lag, completions_per_step=batch * size, group_size=size, **held)
    drawn = {"prompts": 1, "completions": 1, "priority": "uniform"}
    ours = buffer_of(**held, **drawn, max_lag=max_lag, most_lag=bound)
    worst = 0
    for step in range(80):
        tickets = list(range(step * batch, (step + 1) * batch))
        ours.put([group(t, rewards=(0.0,) * size, version=step - max_lag) for t in tickets])
        (got,) = ours.take(tickets, step)
        worst = max(worst, int(ours.metrics(ALONE)["buffer/age_max"]))
        assert step - got.oldest_version <= worst
    assert worst == bound and not caplog.records, "none leaves for its age"


# --- checkpoints ---


def fill(ours, steps, dp_ranks=1, dp_rank=0):
    for step in range(steps):
        tickets = [t for t in range(step * 4, step * 4 + 4) if t % dp_ranks == dp_rank]
        ours.put([group(t, prompt=t % 6, version=step) for t in tickets])
        ours.take(tickets, step)
    late = [t for t in range(1000, 1003) if t % dp_ranks == dp_rank]
    ours.put([group(t) for t in late])
    return ours


def test_a_resumed_buffer_draws_what_the_other_would_have():
    make = dict(sync_period=3, max_size=20, prompts=3, completions=3)
    ours, resumed = fill(buffer_of(**make), 8), buffer_of(**make)
    stored = json.loads(json.dumps(ours.state_dict()["passed"]))
    assert stored, "some prompts wait for the others"
    resumed.load([{**ours.state_dict(), "passed": stored}], {1000, 1002}, lambda ticket: True)
    # 1001 starts again: the ledger does not count it as finished.
    assert resumed.tickets() == [1000, 1002]
    ours.take([1001], 8), resumed.take([], 8)
    for buffer in (ours, resumed):  # what came after the last sync step differs
        buffer._held = [held for held in buffer._held if held.joined <= 8]
    for step, handed in ((9, [1000, 1002]), (10, []), (12, [])):
        mine, other = (buffer.take(handed, step) for buffer in (ours, resumed))
        assert [names_of(g) for g in mine] == [names_of(g) for g in other]
        assert ours.metrics(ALONE) == resumed.metrics(ALONE)


def test_two_ranks_go_on_as_one_that_holds_what_both_held():
    parts = []
    for dp_rank in (0, 1):
        made = fill(buffer_of(rank=dp_rank), 5, dp_ranks=2, dp_rank=dp_rank)
        parts.append(made.state_dict())
    whole, one = fill(buffer_of(), 5), buffer_of()
    one.load(parts, {1000, 1001, 1002}, lambda ticket: True)
    assert one.tickets() == whole.tickets()
    # Who was drawn is of each rank; what is drawn from is the same.
    one._passed = whole._passed
    assert [names_of(g) for g in one.take([], 7)] == [names_of(g) for g in whole.take([], 7)]
    mine = buffer_of()
    mine.load(parts, set(), lambda ticket: ticket % 2 == 1)
    assert {g.ticket % 2 for g in mine.stored()} == {1} and mine.tickets() == []


def test_on_another_number_of_ranks_what_newer_groups_do_not_push_out_leaves_at_the_bound(
    caplog,
):
    def two_of(ticket, version):
        return group(ticket, rewards=(0.0, 1.0), version=version)

    def made(num_ranks):
        sizes = {"sync_period": 1, "max_size": 8 // num_ranks}
        most = lag_bound(max_lag=0, completions_per_step=4 // num_ranks, group_size=2, **sizes)
        assert most == 1
        return buffer_of(**sizes, max_lag=0, most_lag=most)

    whole, odd = made(1), made(2)
    for step, tickets in enumerate([[0, 1], [2, 4]]):
        whole.put([two_of(t, step) for t in tickets])
        whole.take(tickets, step)
    odd.load([whole.state_dict()], set(), lambda ticket: ticket % 2 == 1)
    assert [g.ticket for g in odd.stored()] == [1] and not caplog.records
    odd.put([two_of(3, 2)])
    drawn = odd.take([3], 2)
    assert set(chain.from_iterable(g.policy_versions.tolist() for g in drawn)) == {2}
    assert [g.ticket for g in odd.stored()] == [3]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "step 2: 1 of 2 groups left the replay buffer for tokens of more than 1 steps ago"
    )
    odd.untake(drawn)
    held = sorted(g.ticket for g in odd.stored())
    assert held == [1, 3], "a step that is given up changes nothing"


def test_wrong_use_is_refused():
    ours = buffer_of()
    ours.put([group(3)])
    with pytest.raises(ValueError, match="group 3 came twice"):
        ours.put([group(3)])
    with pytest.raises(KeyError, match="groups \\[4\\] were taken"):
        ours.take([3, 4], 0)


# --- growth that ends ---


def grown(buffer, steps, first=0, per_step=3):
    """The tickets held after each step, each of which brings so many groups of two."""
    held = []
    for step in range(first, steps):
        groups = [group(per_step * step + i, version=step) for i in range(per_step)]
        buffer.put(groups)
        drawn = buffer.take([g.ticket for g in groups], step)
        buffer.untake(drawn)  # whatever is given up is done again alike
        buffer.take([g.ticket for g in groups], step)
        held.append([h.group.ticket for h in buffer._held])
    return held


def test_the_end_of_growth_outlives_a_checkpoint_on_any_number_of_ranks():
    parts = []
    for rank in (0, 1):
        buffer = buffer_of(grow_until=2, rank=rank, num_ranks=2)
        grown(buffer, 4)
        parts.append(buffer.state_dict())
    assert [part["room"] for part in parts] == [18, 18]
    for num_ranks, room in ((1, 36), (2, 18), (4, 9)):
        again = buffer_of(grow_until=2, num_ranks=num_ranks)
        again.load(parts[:1], set(), lambda ticket: True)
        assert again._room == room // 2 and not again._grows
        again = buffer_of(grow_until=2, num_ranks=num_ranks)
        again.load([*parts, {"buffered": []}], set(), lambda ticket: False)
        assert again._room == room
    later = buffer_of(grow_until=6)
    grown(later, 4)
    assert "room" not in later.state_dict(), "it still grows"


def test_on_as_many_ranks_each_has_the_room_that_it_had_and_grows_if_it_grew():
    """Three ranks, to which different numbers of groups had come; nothing had come to the last."""
    saved = [buffer_of(grow_until=2, rank=rank, num_ranks=3) for rank in range(3)]
    for buffer, per_step in zip(saved, (4, 2)):
        grown(buffer, 4, per_step=per_step)
    parts = []
    for buffer in saved:
        parts += [buffer.state_dict(), {"buffered": []}]  # and a tensor-parallel peer's
    assert [part.get("room") for part in parts[::2]] == [24, 12, None]
    for rank, (room, grows) in enumerate([(24, False), (12, False), (1000, True)]):
        again = buffer_of(grow_until=2, rank=rank, num_ranks=3)
        again.load(parts, set(), lambda ticket: False)
        assert (again._room, again._grows) == (room, grows)


# --- what was found ---


class Both:
    """Ranks whose gathering hands on what both buffers have found, before either takes it in."""

    def __init__(self, buffers):
        found = [torch.tensor(b._found, dtype=torch.int64).numpy().tobytes() for b in buffers]
        self.gather = lambda message: found
        self.sum = lambda good: {"good": good}


def test_good_completions_are_counted_once_however_often_they_come_and_leave():
    buffer = buffer_of(good_reward=1.0, max_size=4)
    same = dataclasses.replace(group(0, prompt=1, rewards=(1.0, 2.0, 0.5)), ticket=9)
    come = [[group(0, prompt=1, rewards=(1.0, 2.0, 0.5))], [same], [group(2, prompt=1)]]
    counts = []
    for step, groups in enumerate(come):
        buffer.put(groups)
        drawn = buffer.take([g.ticket for g in groups], step)
        buffer.untake(drawn)
        buffer.take([g.ticket for g in groups], step)
        counts.append(buffer.metrics(ALONE)["buffer/distinct_good"])
    assert counts == [2, 2, 3]
    again = buffer_of(good_reward=1.0)
    again.load([buffer.state_dict()], set(), lambda ticket: True)
    again.take([], 3)
    assert again.metrics(ALONE)["buffer/distinct_good"] == 3
    without = buffer_of()
    without.take([], 0)
    assert "buffer/distinct_good" not in without.metrics(ALONE)


def test_what_two_ranks_both_find_counts_once_and_outlives_their_number():
    ranks = [buffer_of(good_reward=1.0, rank=rank, num_ranks=2) for rank in (0, 1)]
    for rank, buffer in enumerate(ranks):
        both = dataclasses.replace(group(0, prompt=7, rewards=(1.0, 1.0, 1.0)), ticket=10 + rank)
        own = group(20 + rank, prompt=7, rewards=(1.0, 0.0))
        buffer.put([both, own])
        buffer.take([both.ticket, own.ticket], 0)
    both = Both(ranks)
    assert sum(buffer._num_good(both) for buffer in ranks) == 3 + 2
    three = [buffer_of(good_reward=1.0, rank=rank, num_ranks=3) for rank in range(3)]
    for buffer in three:
        buffer.load([b.state_dict() for b in ranks], set(), lambda ticket: False)
    assert sum(len(buffer._good) for buffer in three) == 5


@pytest.mark.parametrize("draw, num_buffers", [("local", 2), ("shared", 1), ("split", 1)])
def test_prompts_and_room_are_shared_out_over_a_runs_buffers(draw, num_buffers):
    words = ("buffer=replay", "buffer.max_size=600", f"buffer.draw={draw}")
    made = job(*words, "loss=tb", "reference=frozen", "groups_per_step=8")
    made.placement["trainer"] = (0, 1)
    assert made.placement.num_buffers == num_buffers
    buffer = build_buffer(made.config, made)
    assert buffer.draw.prompts == 8 // num_buffers
    assert buffer.max_size == 600 // num_buffers


# --- The fifo buffer ---


def of_versions(ticket, *completions):
    """A group of completions whose tokens are of these versions."""
    versions = torch.tensor(list(chain.from_iterable(completions)), dtype=torch.int64)
    lengths = [len(own) for own in completions]
    return build_group(ticket, lengths, policy_versions=versions)


def holding(max_lag, *groups):
    buffer = GroupBuffer(max_lag)
    buffer.put(list(groups))
    return buffer


def test_a_group_as_old_as_the_bound_allows_is_taken_and_one_token_too_old_ends_the_run():
    buffer = holding(2, of_versions(7, [5, 6, 7], [7]), of_versions(3, [], [6]))
    assert [g.ticket for g in buffer.take([7, 3], 7)] == [3, 7]
    assert len(holding(None, of_versions(7, [0], [0])).take([7], 1000)) == 1
    buffer = holding(2, of_versions(3, [8, 8], [8]), of_versions(7, [7, 8], [8, 8], [4, 6]))
    with pytest.raises(LagExceeded, match="step 8 .* ticket 7, .* versions 4 to 8.* max_lag=2"):
        buffer.take([3, 7], 8)
    assert buffer.tickets() == [3, 7], "nothing was taken"


# --- A replay buffer that all trainer ranks draw from ---


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


def shared(ranks, make=SharedReplayBuffer, **options):
    """The buffers of so many ranks."""
    together = Together(ranks)
    made = []
    for rank in range(ranks):
        buffer = alone(make, rank=rank, num_ranks=ranks, **options)
        buffer.attach(together.of(rank))
        made.append(buffer)
    return made


def alone(make=ReplayBuffer, *, completions=3, **options):
    how = draw(prompts=4, completions=completions)
    made = make(draw=how, sync_period=2, max_size=20, seed=5, **options)
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
    one = finished_job(*drawn, *placed_on(2), run_dir=tmp_path / "one", ranks=2)
    words = (*drawn, *placed_on(ranks), topology)
    many = finished_job(*words, run_dir=tmp_path / "all", ranks=ranks)
    (alone, _), (together, _) = one.rows, many.rows
    for column in ("buffer/size", "buffer/prompts", "reward/mean", "tokens/trained"):
        assert alone[column] == pytest.approx(together[column], rel=1e-6)
    assert alone["grad_norm"] > 1e-3, "else rewards are all equal, and nothing is compared"
    assert alone["grad_norm"] == pytest.approx(together["grad_norm"], rel=1e-3)
