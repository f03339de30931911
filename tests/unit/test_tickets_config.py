"""What cannot go together with batches that teach, and how earlier runs are read."""

import pytest

from llamarl.config.command_line import compose_config
from llamarl.scoring.scorer import Item, Scorer, site_alone
from llamarl.scoring.weighted import Weighted, WeightedPart
from llamarl.types import Outcome
from tests.unit.refusals import complaint

INFORMATIVE = "tickets.informative=true"


@pytest.mark.parametrize(
    "given, said",
    [
        (("group_size=1",), "one completion has no other to differ from"),
        (("loss=ppo", "trainer.advantages=gae"), "a value model learns from groups of equal"),
        (("loss=ppo", "trainer.advantages=turns"), "groups of equal outcomes may have turns"),
        (("loss=tb", "reference=frozen"), "this loss fits a distribution"),
        (("buffer=replay", "max_lag=null"), "a step draws from all that the buffer holds"),
    ],
)
def test_what_needs_groups_of_equal_outcomes_is_refused(given, said):
    assert said in complaint(INFORMATIVE, *given)


@pytest.mark.parametrize("loss", ["aipo", "online_dpo", "grpo", "kimi_k2", "best_of_n"])
def test_losses_over_a_group_take_batches_that_teach(loss):
    assert compose_config([INFORMATIVE, f"loss={loss}"]).tickets.informative


def test_a_bound_on_what_is_given_back_is_a_count():
    assert "tickets.max_refill=0" in complaint(INFORMATIVE, "tickets.max_refill=0")


def test_prompts_are_chosen_among_the_rows_of_one_task():
    said = complaint(
        "tickets.sampler=difficulty",
        "task=mixture",
        "task.parts={a: {kind: addition, weight: 1}}",
    )
    assert "prompts are chosen among the rows of one task" in said
    assert "environment without a file makes its own" in complaint(
        "tickets.sampler=difficulty", "task=environment", "task.environment=m:C"
    )


def test_an_outcome_is_one_of_the_parts():
    parts = "reward.parts={right: {kind: function, fn: 'rewards:exact_match'}}"
    said = complaint("reward=parts", parts, "reward.outcomes=[rihgt]")
    assert "no part is called rihgt" in said and "did you mean right" in said
    config = compose_config(["reward=parts", parts, "reward.outcomes=[right]"])
    assert config.reward.outcomes == ["right"]
    assert compose_config([]).reward.outcomes == []


class Fixed(Scorer):
    """A scorer that gives every item the same score."""

    def __init__(self, value):
        self.name = "fixed"
        self._value = value
        self._keys = []

    def submit(self, key, item):
        self._keys.append(key)

    def poll(self):
        keys, self._keys = self._keys, []
        return [(key, Outcome.score(self._value)) for key in keys]


def test_parts_that_are_outcomes_alone_say_whether_a_completion_succeeded():
    parts = [
        WeightedPart("right", lambda site: Fixed(1.0), 0.9),
        WeightedPart("short", lambda site: Fixed(-0.5)),
    ]
    ours = Weighted(parts, site_alone("cpu"), outcomes=["right"])
    ours.submit(1, Item(None, None, "", True, is_held_out=False))
    ((key, outcome),) = ours.poll()
    assert key == 1
    assert outcome.value == pytest.approx(0.4)
    assert outcome.achieved == pytest.approx(0.9)
    plain = Weighted(parts, site_alone("cpu"))
    plain.submit(1, Item(None, None, "", True, is_held_out=False))
    ((_, outcome),) = plain.poll()
    assert outcome.achieved == outcome.value
