"""What waits to be scored: evaluations go first, between whole units of work."""

import random

import torch

from llamarl.scoring.model import Rounds
from llamarl.scoring.routing import InTurn
from llamarl.scoring.scorer import Item, Queue, Scorer
from llamarl.types import Outcome, Prompt


def item(name, *, is_held_out=False, attack=None):
    prompt = Prompt(torch.tensor([1, len(name)]), name, {})
    return Item(prompt, torch.tensor([3, 2]), name, True, is_held_out, attack=attack)


class OneAtATime(Scorer):
    """A scorer that is busy with one item, or one batch of so many; `score` ends that."""

    name = "one at a time"

    def __init__(self, size=1):
        self._size = size
        self.given = []
        self.released = []
        self._ready = []
        self._done = []

    @property
    def pending(self):
        return len(self._ready) + len(self._done)

    @property
    def is_busy(self):
        return bool(self._ready)

    def wait(self, timeout_s):
        return True

    def submit(self, key, item):
        self.given.append(item.text)
        if self._size == 1:
            self._ready.append(key)

    def release(self, keys):
        self.released.append(list(keys))
        if self._size > 1:
            assert len(self.given) >= len(keys), "released before it was given"
            self._ready += keys

    def score(self):
        self._done += [(key, Outcome("score", 1.0, "")) for key in self._ready]
        self._ready = []

    def poll(self):
        self.num_begun = len(self.given)
        done = self._done
        self._done = []
        return done


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
    scoring.submit(3, item("held out 3", is_held_out=True))
    scoring.submit(4, item("held out 4", is_held_out=True))
    outcomes = []
    while scoring.pending:
        source.score()
        outcomes += [key for key, _ in scoring.poll()]
        assert source.num_begun == len(source.given), "what it was given last has not begun"
    assert outcomes == [0, 3, 4, 1, 2]


def test_a_batch_is_released_once_the_source_has_all_of_it():
    source = OneAtATime(size=2)
    scoring = InTurn(source)
    for ticket in range(3):
        for key in (2 * ticket, 2 * ticket + 1):
            scoring.submit(key, item(f"train {key}"))
        scoring.release([2 * ticket, 2 * ticket + 1])
    assert source.released == [[0, 1]] and source.given == ["train 0", "train 1"]
    for key in (6, 7):
        scoring.submit(key, item(f"held out {key}", is_held_out=True))
    scoring.release([6, 7])
    outcomes = []
    while scoring.pending:
        source.score()
        outcomes += [key for key, _ in scoring.poll()]
    assert outcomes == [0, 1, 6, 7, 2, 3, 4, 5]
    assert source.released == [[0, 1], [6, 7], [2, 3], [4, 5]]


def test_in_any_order_everything_is_scored_once_and_each_attacks_answers_are_a_batch():
    for seed in range(20):
        roll = random.Random(seed)
        source = OneAtATime(size=roll.choice([1, 2]))
        scoring = InTurn(source)
        batches = []
        for number in range(8):
            is_held_out = roll.random() < 0.3
            attack = item(f"attack {number}", is_held_out=is_held_out)
            keys = [2 * number, 2 * number + 1]
            batches.append((keys, [item("", is_held_out=is_held_out, attack=attack)] * 2))
        outcomes = []
        for keys, items in batches:
            for key, one in zip(keys, items):
                scoring.submit(key, one)
            scoring.release(keys)
            if roll.random() < 0.5:
                source.score()
                outcomes += [key for key, _ in scoring.poll()]
        while scoring.pending:
            source.score()
            outcomes += [key for key, _ in scoring.poll()]
        assert sorted(outcomes) == list(range(16))
        assert sorted(source.released) == [keys for keys, _ in batches]


def test_a_model_scores_the_batches_of_evaluations_first():
    for reproducible in (True, False):
        rounds = Rounds(
            None,
            context=100,
            tokens_a_round=1,
            reproducible=reproducible,
        )
        for key in range(3):
            rounds.put({key: item(f"train {key}")})
        rounds.put({3: item("held out", is_held_out=True)})
        order = []
        while rounds.pending:
            keys, _ = rounds.take()
            order += keys
        assert order == [3, 0, 1, 2]
