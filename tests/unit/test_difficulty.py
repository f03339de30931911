"""Prompts that are chosen by how often they were solved."""

import json
import random
import warnings
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import llamarl.tickets.sampler as sampler_module
from llamarl.learning.targets import verdict_of
from llamarl.tasks.base import Task
from llamarl.tickets.choices import choices_of
from llamarl.tickets.prompts import ChosenPrompts, PromptStream, chosen, fixed, note, prompts_of
from llamarl.tickets.sampler import DifficultySampler, chance_of_teaching
from llamarl.types import Prompt, Verdict
from tests.build.ledger import build_ledger
from tests.updating import group


@contextmanager
def quiet():
    """Let no warning pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def verdict(solved, of=4):
    return Verdict(of, float(solved), teaches=0 < solved < of, solved=float(solved))


def sampler(num_prompts=10, **changes):
    settings = {"group_size": 4, "seed": 3, "half_life": 2.0}
    return DifficultySampler(num_prompts=num_prompts, **{**settings, **changes})


def ledger(num_prompts=10, **changes):
    """Steps of two groups, max_lag 1 and no ticket above that."""
    given = {"groups_per_step": 2, "overcommit": 0, "sampler": sampler(num_prompts), **changes}
    return build_ledger(**given)


def test_the_chance_of_teaching_is_that_of_a_beta_binomial():
    # Beta(1, 1): every number of solved ones of 4 is equally likely, and 2 of 5 do not teach.
    # Beta(2, 1): p has density 2 p; E[p^4] = 2/6, E[(1-p)^4] = 2 (1/5 - 1/6) = 1/15.
    a, b = torch.tensor([1.0, 2.0]).double(), torch.tensor([1.0, 1.0]).double()
    assert chance_of_teaching(a, b, 4).tolist() == pytest.approx([3 / 5, 1 - 1 / 3 - 1 / 15])
    # A pass rate that is known: 1 - p^G - (1 - p)^G.
    known = chance_of_teaching(torch.tensor([2.5e8]).double(), torch.tensor([7.5e8]).double(), 3)
    assert known.item() == pytest.approx(1 - 0.25**3 - 0.75**3, abs=1e-6)


def test_unseen_prompts_are_equal_and_stand_between_dead_ones_and_those_that_teach():
    ours = sampler()
    for prompt, solved in enumerate([0, 1, 2, 4, 0, 0]):
        ours.learn(prompt, verdict(solved))
    chances = ours.chances().tolist()
    assert len(set(chances[6:])) == 1, "nobody knows one from another"
    assert chances[0] < chances[6] < chances[1]
    assert chances[1] < chances[2] and chances[3] < chances[1]


def test_what_was_learned_fades_until_a_dead_prompt_is_as_good_as_an_unseen_one():
    ours = sampler(4, half_life=1.0)
    ours.learn(0, verdict(0))
    ours.learn(1, verdict(2))
    gap = ours.chances()[3] - ours.chances()[0]
    for _ in range(40):  # ten half-lives
        ours.learn(2, verdict(2))
    later = ours.chances()[3] - ours.chances()[0]
    assert abs(later) < gap / 20


@pytest.mark.parametrize("failed, solved", [(0, 1), (-1, 1), (-5, 0.5)])
def test_a_sampler_counts_solved_completions_whatever_a_reward_gives_for_them(failed, solved):
    ours = sampler(4)
    beyond = (failed, solved) != (0, 1)
    with pytest.warns(match="have the reward return numbers from 0 to 1") if beyond else quiet():
        for prompt, right in enumerate((0, 1, 4)):
            rewards = [float(solved)] * right + [float(failed)] * (4 - right)
            ours.learn(prompt, verdict_of(group(0, [1] * 4, rewards)))
    worth = min(solved, 1)
    assert ours.state_dict()["counts"][0] == [0, worth, 4 * worth]
    assert ours.state_dict()["counts"][1] == [4, 4 - worth, 4 - 4 * worth]


def test_outcomes_beyond_0_and_1_are_warned_of_once():
    ours = sampler(2)
    with pytest.warns(match="4 outcomes of a group add up to -2, where 1 would be solved"):
        ours.learn(0, Verdict(num_scored=4, total=-2.0, teaches=True, solved=1.0))
    with quiet():
        ours.learn(1, Verdict(num_scored=4, total=9.0, teaches=True, solved=1.0))


def test_solved_and_failed_completions_of_a_prompt_fade_until_it_is_asked_again():
    ours = sampler(2, half_life=1.0)  # two groups
    ours.learn(0, verdict(1))
    for _ in range(3):
        ours.learn(1, verdict(2))
    ours.learn(0, verdict(2))  # two half-lives later
    solved, failed, learned_at = (column[0] for column in ours.state_dict()["counts"])
    assert (solved, failed, learned_at) == (1 / 4 + 2, 3 / 4 + 2, 4)


def test_with_many_prompts_the_mean_and_the_fading_move_at_refreshes_alone():
    ours = sampler(192, half_life=1.0)  # a refresh after every third group
    ours.chances()
    ours.learn(5, verdict(4))
    ours.learn(7, verdict(1))
    solved, failed, groups_ago = torch.zeros(3, 192, dtype=torch.float64)
    solved[[5, 7]] = torch.tensor([4.0, 1.0]).double()
    failed[7] = 3.0
    chance = chance_of_teaching(0.5 + solved, 0.5 + failed, 4)
    torch.testing.assert_close(ours.chances(), chance)
    ours.learn(9, verdict(2))
    solved[9] = failed[9] = 2.0
    groups_ago[[5, 7, 9]] = torch.tensor([3.0, 2.0, 1.0]).double()
    fade = 0.5 ** (groups_ago / 192)
    solved, failed = solved * fade, failed * fade
    mean = (0.5 + solved.sum()) / (1 + solved.sum() + failed.sum())
    expected = chance_of_teaching(mean + solved, 1 - mean + failed, 4)
    torch.testing.assert_close(ours.chances(), expected)


def test_a_group_of_many_prompts_costs_the_chance_of_one_prompt(monkeypatch):
    computed = []

    def counted(a, b, group_size):
        computed.append(a.numel())
        return chance_of_teaching(a, b, group_size)

    monkeypatch.setattr(sampler_module, "chance_of_teaching", counted)
    ours = sampler(10_000)
    for ticket in range(128):
        ours.learn(ours.choose(ticket, ()), verdict(ticket % 5))
    assert computed.count(10_000) == 2
    assert computed.count(1) == len(computed) - 2 == 126


@settings(max_examples=12)
@given(
    num_prompts=st.sampled_from([3, 127, 128, 300, 5000]),
    seed=st.integers(0, 99),
    kill_at=st.integers(0, 150),
)
def test_a_sampler_that_is_resumed_anywhere_chooses_the_same_prompts(num_prompts, seed, kill_at):
    rng = random.Random(seed)
    ours = sampler(num_prompts)
    resumed = sampler(num_prompts)
    for ticket in range(200):
        if ticket == kill_at:
            resumed.load_state_dict(json.loads(json.dumps(ours.state_dict())))
        prompt = ours.choose(ticket, ())
        said = verdict(rng.randint(0, 4))
        if ticket >= kill_at:
            assert resumed.choose(ticket, ()) == prompt
            resumed.learn(prompt, said)
        ours.learn(prompt, said)
    assert torch.equal(resumed.chances(), ours.chances())


def test_busy_prompts_are_chosen_only_when_there_are_no_others():
    ours = sampler(3)
    assert {ours.choose(ticket, busy={0, 2}) for ticket in range(20)} == {1}
    assert {ours.choose(ticket, busy={0, 1, 2}) for ticket in range(100)} == {0, 1, 2}
    ours._weights = torch.zeros(3, dtype=torch.float64)  # nothing teaches
    assert {ours.choose(ticket, busy={0, 2}) for ticket in range(20)} == {1}
    assert {ours.choose(ticket, busy={0}) for ticket in range(20)} == {1, 2}


def test_draws_follow_the_chances():
    ours = sampler(3, half_life=1e9)
    for _ in range(20):
        ours.learn(0, verdict(0))
        ours.learn(1, verdict(2))
    chances = ours.chances()
    counts = Counter(ours.choose(ticket, ()) for ticket in range(4000))
    for prompt in range(3):
        share = float(chances[prompt] / chances.sum())
        assert abs(counts[prompt] / 4000 - share) < 0.04


def run_of(seed, *, dp_ranks, generators, num_steps, kill_at=None):
    """Return [(ticket, prompt)] of each synchronous step: whoever asks first, and whatever ends
    first. Of prompt i, i of 6 are solved.
    """
    rng = random.Random(seed)

    def make():
        sizes = {"groups_per_step": 2 * dp_ranks, "num_pools": dp_ranks, "max_refill": 1}
        return ledger(7, max_lag=0, num_generators=generators, **sizes)

    ours = make()
    prompts = {}
    working = []
    steps = []
    for event in range(10_000):
        if event == kill_at:
            state = json.loads(json.dumps(ours.state_dict()))
            ours = make()
            ours.load_state_dict(state)
            ours.reconcile([ticket for ticket, _ in state["finished"]])
            working = []
            prompts = choices_of(state)
        for generator in rng.sample(range(generators), generators):
            for ticket in ours.start(rng.randint(0, 2), ours.step, generator):
                assert prompts.setdefault(ticket.index, ticket.prompt) == ticket.prompt
                working.append(ticket.index)
        rng.shuffle(working)
        ending = [working.pop() for _ in range(min(len(working), rng.randint(0, 2)))]
        ours.finish(ending, {ticket: verdict(prompts[ticket], of=6) for ticket in ending})
        if (taken := ours.take(ours.step)) is not None:
            ours.trained(0.0)
            steps.append([(ticket, prompts[ticket]) for ticket in sorted(taken)])
            if len(steps) == num_steps:
                return steps
    raise AssertionError("it got stuck")


@settings(max_examples=40)
@given(
    dp_ranks=st.integers(1, 2),
    generators=st.integers(1, 3),
    seeds=st.tuples(st.integers(0, 99), st.integers(100, 199)),
    kill_at=st.integers(0, 30),
)
def test_the_choices_of_a_synchronous_run_depend_on_no_timing_and_on_no_resume(
    dp_ranks, generators, seeds, kill_at
):
    sizes = dict(dp_ranks=dp_ranks, generators=generators, num_steps=5)
    first, second = (run_of(seed, **sizes) for seed in seeds)
    assert first == second
    assert run_of(seeds[0], **sizes, kill_at=kill_at) == first


def test_a_ticket_that_starts_again_keeps_its_prompt_and_no_prompt_is_asked_twice_at_once():
    ours = ledger(6, groups_per_step=3, max_lag=2, overcommit=3)
    begun = {t.index: t.prompt for t in ours.start(10, 0)}
    assert len(set(begun.values())) == len(begun) == 6
    ours.finish([2, 4], {2: verdict(1), 4: verdict(1)})
    ours.reconcile([])  # their data was not saved
    again = {t.index: t.prompt for t in ours.start(2, 0)}
    assert again == {2: begun[2], 4: begun[4]}


def test_a_step_that_is_given_up_has_taught_the_sampler_nothing():
    ours = ledger()
    begun = {t.index: t.prompt for t in ours.start(2, 0)}
    ours.finish([0, 1], {0: verdict(1), 1: verdict(2)})
    assert ours.take(0) == [0, 1]
    ours.untake(0)
    state = ours.state_dict()
    assert state["sampler"]["prompts"] == []
    assert choices_of(state) == begun
    ours.take(0)
    state = ours.state_dict()
    assert state["sampler"]["prompts"] == [] and choices_of(state) == begun, "not trained on yet"
    ours.trained(0.5)
    assert ours.state_dict()["sampler"]["prompts"] == sorted(begun.values())
    assert ours.state_dict()["choices"] == []


def test_a_step_is_learned_in_the_order_of_tickets_whichever_pool_and_whoever_ends_first():
    ours = ledger(8, groups_per_step=4, max_lag=0, num_pools=2)
    begun = {t.index: t.prompt for t in ours.start(4, 0)}
    for ticket in (3, 1, 2, 0):
        ours.finish([ticket], {ticket: verdict(2)})
    assert ours.take(0) == [0, 2, 1, 3], "one pool's after another's"
    ours.trained(0.5)
    state = ours.state_dict()["sampler"]
    learned_at = dict(zip(state["prompts"], state["counts"][2]))
    assert [learned_at[begun[ticket]] for ticket in range(4)] == [0, 1, 2, 3]


class Rows(Task):
    """Prompts that are their numbers."""

    num_train = 5
    train_digest = "rows"

    def train_prompt(self, index):
        return Prompt(torch.tensor([index]), str(index), {})


def test_noted_choices_come_before_the_stream():
    rows = Rows()
    stream = PromptStream(rows, 0)
    ours = prompts_of(rows, 0, chosen=True)
    assert isinstance(ours, ChosenPrompts)
    note(ours, 7, 3)
    note(ours, 8, None)
    assert ours[7].text == "3" and chosen(ours, 7) == 3
    assert ours[8].text == stream[8].text and chosen(ours, 8) is None
    assert fixed(ours)[7].text == stream[7].text
    note(stream, 7, 3)
    assert fixed(stream) is stream and chosen(stream, 7) is None


def test_old_choices_are_forgotten(monkeypatch):
    monkeypatch.setattr(ChosenPrompts, "MOST", 2)
    ours = ChosenPrompts(Rows(), 0)
    for ticket in range(3):
        ours.note(ticket, 4)
    assert [ours.chosen(ticket) for ticket in range(3)] == [None, 4, 4]


def test_a_run_that_goes_on_with_other_rows_or_without_choices_begins_anew():
    ours = ledger()
    ours.start(2, 0)
    ours.finish([0, 1], {0: verdict(1), 1: verdict(2)})
    ours.take(0)
    ours.trained(0.5)
    ours.start(2, 0)
    state = json.loads(json.dumps(ours.state_dict()))
    fewer = ledger(5)
    fewer.load_state_dict(state)
    again = fewer.start(3, 1)
    # What was begun has the stream's prompt, and later tickets are chosen for.
    assert [(t.index, t.prompt is None) for t in again] == [(2, True), (3, True)]
    assert fewer.state_dict()["sampler"]["prompts"] == []
    plain = ledger(sampler=None)
    plain.load_state_dict(state)
    assert all(ticket.prompt is None for ticket in plain.start(2, 1))
    prompts = ChosenPrompts(Rows(), 0)
    prompts.note(4, 9)
    assert prompts.chosen(4) is None
