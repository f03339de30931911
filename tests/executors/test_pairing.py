"""llamarl/scoring/pairs.py: pairs worked out by hand, from an engine and a scorer that say what a
test wants; and what waits to be scored: evaluations go first, between whole units of work.
"""

import json
import random
from collections import Counter

import pytest
import torch

from llamarl.errors import RewardError
from llamarl.inference import SamplingParams
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.scoring.model import Rounds
from llamarl.scoring.pairs import STREAM, PairMaker, PairRule
from llamarl.scoring.routing import InTurn
from llamarl.scoring.scorer import Item, Queue
from llamarl.tasks.base import PromptMaker
from llamarl.types import Outcome, Prompt
from tests.build.completion import build_completion
from tests.executors.fakes import FakeScorer

TOKENIZER = load_tokenizer(tiny_directory())
END = TOKENIZER.eos_token_id
# Of each prompt its samples, and the score of each text there; None: an error. The references are
# 13 and 25.
SAMPLES = {0: ["11", "12", "11"], 1: ["24", "26", ""], 2: ["7", "7", "7"]}
SCORES = {
    0: {"11": 1.0, "12": 1.0, "13": 3.0},
    1: {"24": -1.0, "26": None, "25": 0.5},
    2: {"7": 2.0, "777777": 1.0},
}
REFERENCES = {0: "13", 1: "25", 2: "777777"}  # the last one is longer than a sample may be
PROMPTS = {number: f"{number}+{number}=" for number in SAMPLES}


class FakeEngine:
    """Ends one sample a step, the last submitted first."""

    num_waiting = 0

    def __init__(self):
        self._left = []
        self._finished = []

    @property
    def num_live(self):
        return len(self._left)

    def submit(self, ticket, prompt_ids, params, *, stream):
        assert stream == STREAM
        for index, text in enumerate(SAMPLES[ticket][: params.n]):
            ids = [*TOKENIZER(text)["input_ids"], END]
            self._left.append(build_completion(ticket, index, ids, prompt=prompt_ids))

    def step(self, chunk):
        self._finished.append((STREAM, self._left.pop()))

    def pop_finished(self):
        finished, self._finished = self._finished, []
        return finished


class ByText(FakeScorer):
    """Scores a batch once it is released, and says so one item a poll, the last one first."""

    def __init__(self):
        super().__init__()
        self._counts = Counter()
        self._items = {}

    @property
    def counts(self):
        return self._counts

    def submit(self, key, item):
        assert item.has_ended and item.token_ids[-1] == END
        self._items[key] = item

    def outcome(self, item):
        value = SCORES[int(item.prompt.text[0])][item.text]
        return Outcome.error("no") if value is None else Outcome.score(value)

    def release(self, keys):
        items = [self._items.pop(key) for key in keys]
        self.released.append([item.text for item in items])
        self.known += zip(keys, map(self.outcome, items))

    def poll(self):
        return [self.known.pop()] if self.known else []


def made_by(*, references=True, scorer=None, batches=None, max_error_rate=0.5, **rule):
    """(rows, tally of each batch)."""
    rule = {"pairing": "all", "compares": False, "label_noise": 0.0, **rule}
    prompts = PromptMaker(TOKENIZER, chat=False, system_prompt=None, max_prompt_tokens=16)

    def prompt_of(number):
        text = PROMPTS[number]
        return Prompt(torch.tensor(prompts.ids(text)), text, {"answer": REFERENCES[number]})

    maker = PairMaker(
        engine=FakeEngine(),
        scorer=scorer or ByText(),
        sampling=SamplingParams(max_new_tokens=4, n=3),
        chunk_tokens=1,
        prompt_of=prompt_of,
        targets_of=lambda prompt: dict(prompt.meta) if references else {},
        tokenizer=TOKENIZER,
        prompts=prompts,
        rule=PairRule(margin_coef=1.0, seed=0, **rule),
        max_error_rate=max_error_rate,
    )
    made = list(maker.make(batches or [range(0, 2), range(2, 3)]))
    lines = "".join(text for text, _ in made).splitlines()
    return [json.loads(line) for line in lines], [tally for _, tally in made]


class Failing(ByText):
    """It can score nothing."""

    def outcome(self, item):
        return Outcome.error("no")


def test_errors_of_one_prompt_alone_end_nothing_and_those_of_all_do():
    strict = {"max_error_rate": 0.01}
    rows, (tally,) = made_by(scorer=Failing(), batches=[range(1)], **strict)
    assert rows == [] and tally.unscored == 4
    with pytest.raises(RewardError, match="100% of the last . scores are errors"):
        made_by(scorer=Failing(), **strict)


def sides(rows):
    return [(row["number"], row["chosen"], row["rejected"], row["margin"]) for row in rows]


def test_all_pairs_by_hand():
    rows, (first, second) = made_by()
    # Of prompt 0: 11, 12 and 11 tie, the two 11 are equal texts, 13 beats all of them. Of prompt 1
    # the empty one and 26, which has no score, are out. Of prompt 2 all texts are equal.
    assert sides(rows) == [
        (0, "13", "11", 2.0),
        (0, "13", "12", 2.0),
        (0, "13", "11", 2.0),
        (1, "25", "24", 1.5),
    ]
    assert [row["rejected_sample"] for row in rows] == [0, 1, 2, 0]
    assert {row["chosen_sample"] for row in rows} == {"answer"}
    assert (first.prompts, first.completions, first.references) == (2, 6, 2)
    assert (first.pairs, first.ties, first.equal_texts) == (4, 2, 1)
    assert (first.empty, first.unscored, first.difference) == (1, 1, 7.5)
    assert (second.pairs, second.equal_texts, second.long_references) == (0, 3, 1)


def test_best_and_worst_by_hand():
    rows, (first, second) = made_by(pairing="best_worst")
    assert sides(rows) == [(0, "13", "11", 2.0), (1, "25", "24", 1.5)]
    assert first.ties == 0 and second.equal_texts == 1


def test_one_random_pair_of_a_prompt_is_all_that_is_scored():
    scorer = ByText()
    _, tallies = made_by(pairing="random", scorer=scorer)
    assert [len(batch) for batch in scorer.released] == [2, 2, 2]
    entered = [tally.pairs + tally.ties + tally.equal_texts for tally in tallies]
    assert sum(entered) + sum(tally.unscored for tally in tallies) == 3


def test_a_source_that_compares_is_given_two_at_a_time():
    scorer = ByText()
    _, (first,) = made_by(compares=True, scorer=scorer, batches=[range(1)])
    released = Counter(tuple(sorted(texts)) for texts in scorer.released)
    assert released == {
        ("11", "11"): 1,
        ("11", "12"): 2,
        ("11", "13"): 2,
        ("12", "13"): 1,
    }
    assert first.pairs == 3


def test_pairs_do_not_depend_on_how_prompts_are_batched():
    noisy = {"label_noise": 0.5}
    one_by_one = [range(number, number + 1) for number in range(3)]
    for pairing in ("all", "best_worst", "random"):
        rows, _ = made_by(pairing=pairing, batches=[range(3)], **noisy)
        assert rows == made_by(pairing=pairing, batches=one_by_one, **noisy)[0]
        assert pairing == "random" or any(row["flipped"] for row in rows)


def test_what_judges_count_is_each_batchs_own():
    class Counting(ByText):
        def release(self, keys):
            super().release(keys)
            self._counts = self._counts + Counter(pairs=1)

    _, tallies = made_by(scorer=Counting())
    assert sum(tally.compared for tally in tallies) == 3


def test_too_many_errors_end_it(monkeypatch):
    monkeypatch.setattr("llamarl.scoring.assembly.MIN_OUTCOMES", 3)
    monkeypatch.setattr("llamarl.scoring.assembly.MIN_BAD_PROMPTS", 1)
    with pytest.raises(RewardError, match="100% of the last 3 scores are errors"):
        made_by(batches=[range(1, 2)], scorer=Failing())


# --- What waits to be scored ---


def item(name, *, is_held_out=False, attack=None):
    prompt = Prompt(torch.tensor([1, len(name)]), name, {})
    return Item(prompt, torch.tensor([3, 2]), name, True, is_held_out, attack=attack)


class OneAtATime(FakeScorer):
    """A scorer that is busy with one item, or one batch of so many; `end` ends that."""

    def __init__(self, size=1):
        super().__init__()
        self._size = size
        self._ready = []
        self.given = []

    @property
    def pending(self):
        return len(self._ready) + len(self.known)

    @property
    def is_busy(self):
        return bool(self._ready)

    def submit(self, key, item):
        self.given.append(item.text)
        if self._size == 1:
            self._ready.append(key)

    def release(self, keys):
        super().release(keys)
        if self._size > 1:
            assert len(self.given) >= len(keys), "released before it was given"
            self._ready += keys

    def end(self):
        self.known += [(key, Outcome.score(1.0)) for key in self._ready]
        self._ready = []

    def poll(self):
        self.num_begun = len(self.given)
        return super().poll()


def ended(scoring, source):
    """The keys of the outcomes that come once what the source is busy with has ended."""
    source.end()
    return [key for key, _ in scoring.poll()]


def test_of_equals_the_first_to_come_is_first_and_evaluations_before_all_others():
    queue = Queue()
    for number in range(6):
        queue.put(number, is_held_out=number in (2, 4))
    assert list(queue) == [2, 4, 0, 1, 3, 5] and len(queue) == 6
    assert queue.first == 2
    assert [queue.take() for _ in range(6)] == [2, 4, 0, 1, 3, 5] and not queue


def test_an_evaluation_goes_before_what_the_source_was_not_given():
    source = OneAtATime()
    scoring = InTurn(source)
    for key in range(3):
        scoring.submit(key, item(f"train {key}"))
    assert source.given == ["train 0"] and scoring.pending == 3
    for key in (3, 4):
        scoring.submit(key, item(f"held out {key}", is_held_out=True))
    outcomes = []
    while scoring.pending:
        outcomes += ended(scoring, source)
        assert source.num_begun == len(source.given), "what it was given last has not begun"
    assert outcomes == [0, 3, 4, 1, 2]


def test_a_batch_is_released_once_the_source_has_all_of_it():
    source = OneAtATime(size=2)
    scoring = InTurn(source)
    for batch in range(4):
        is_held_out = batch == 3
        keys = [2 * batch, 2 * batch + 1]
        for key in keys:
            scoring.submit(key, item(f"{key}", is_held_out=is_held_out))
        scoring.release(keys)
    assert source.released == [[0, 1]] and source.given == ["0", "1"]
    outcomes = []
    while scoring.pending:
        outcomes += ended(scoring, source)
    assert outcomes == [0, 1, 6, 7, 2, 3, 4, 5]
    assert source.released == [[0, 1], [6, 7], [2, 3], [4, 5]]


def test_in_any_order_everything_is_scored_once_and_each_attacks_answers_are_a_batch():
    for seed in range(20):
        roll = random.Random(seed)
        source = OneAtATime(size=roll.choice([1, 2]))
        scoring = InTurn(source)
        outcomes = []
        batches = [[2 * number, 2 * number + 1] for number in range(8)]
        for keys in batches:
            is_held_out = roll.random() < 0.3
            attack = item(f"attack {keys}", is_held_out=is_held_out)
            for key in keys:
                scoring.submit(key, item("", is_held_out=is_held_out, attack=attack))
            scoring.release(keys)
            if roll.random() < 0.5:
                outcomes += ended(scoring, source)
        while scoring.pending:
            outcomes += ended(scoring, source)
        assert sorted(outcomes) == list(range(16))
        assert sorted(source.released) == batches


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_model_scores_the_batches_of_evaluations_first(reproducible):
    rounds = Rounds(transcript=None, context=100, tokens_a_round=1, reproducible=reproducible)
    for key in range(4):
        rounds.put({key: item("any", is_held_out=key == 3)})
    order = []
    while rounds.pending:
        keys, _ = rounds.take()
        order += keys
    assert order == [3, 0, 1, 2]
