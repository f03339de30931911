"""llamarl/scoring/pairs.py: pairs worked out by hand, from an engine and a scorer that say what a
test wants.
"""

import json
from collections import Counter

import pytest
import torch

from llamarl.errors import RewardError
from llamarl.inference import SamplingParams
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.scoring.pairs import STREAM, PairMaker, PairRule
from llamarl.scoring.scorer import Scorer
from llamarl.tasks.base import PromptMaker
from llamarl.types import Completion, Outcome, Prompt

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

    def __init__(self):
        self._left = []
        self._finished = []

    @property
    def num_live(self):
        return len(self._left)

    num_waiting = 0

    def submit(self, ticket, prompt_ids, params, *, stream):
        assert stream == STREAM
        for index, text in enumerate(SAMPLES[ticket][: params.n]):
            self._left.append((ticket, index, prompt_ids, text))

    def step(self, chunk):
        ticket, index, prompt_ids, text = self._left.pop()
        ids = torch.tensor([*TOKENIZER(text)["input_ids"], END])
        completion = Completion(
            ticket=ticket,
            sample_index=index,
            prompt_ids=prompt_ids,
            token_ids=ids,
            generator_logprobs=torch.zeros(ids.numel()),
            policy_versions=torch.zeros(ids.numel(), dtype=torch.int64),
            finish_reason="stop",
        )
        self._finished.append((STREAM, completion))

    def pop_finished(self):
        finished, self._finished = self._finished, []
        return finished


class FakeScorer(Scorer):
    """Scores a batch once it is released, and says so one item a poll, the last one first."""

    name = "fake"

    def __init__(self):
        self.released = []  # the texts of each batch
        self._counts = Counter()
        self._items = {}
        self._known = []

    @property
    def counts(self):
        return self._counts

    def submit(self, key, item):
        assert item.has_ended and item.token_ids[-1] == END
        self._items[key] = item

    def release(self, keys):
        self.released.append([self._items[key].text for key in keys])
        for key in keys:
            item = self._items.pop(key)
            number = int(item.prompt.text[0])
            value = SCORES[number][item.text]
            outcome = Outcome.error("no") if value is None else Outcome("score", value, "")
            self._known.append((key, outcome))

    def poll(self):
        return [self._known.pop()] if self._known else []

    def wait(self, timeout_s):
        return True


def made_by(
    *,
    pairing="all",
    compares=False,
    references=True,
    scorer=None,
    batches=None,
    max_error_rate=0.5,
    **more,
):
    """(rows, tally of each batch)."""
    rule = PairRule(
        pairing=pairing,
        compares=compares,
        label_noise=more.pop("label_noise", 0.0),
        margin_coef=1.0,
        seed=0,
    )
    prompts = PromptMaker(TOKENIZER, chat=False, system_prompt=None, max_prompt_tokens=16)

    def prompt_of(number):
        text = PROMPTS[number]
        return Prompt(torch.tensor(prompts.ids(text)), text, {"answer": REFERENCES[number]})

    maker = PairMaker(
        engine=FakeEngine(),
        scorer=scorer or FakeScorer(),
        sampling=SamplingParams(max_new_tokens=4, n=3),
        chunk_tokens=1,
        prompt_of=prompt_of,
        targets_of=lambda prompt: dict(prompt.meta) if references else {},
        tokenizer=TOKENIZER,
        prompts=prompts,
        rule=rule,
        max_error_rate=max_error_rate,
    )
    made = list(maker.make(batches or [range(0, 2), range(2, 3)]))
    lines = "".join(text for text, _ in made).splitlines()
    return [json.loads(line) for line in lines], [tally for _, tally in made]


class FailingScorer(FakeScorer):
    """It can score nothing."""

    def release(self, keys):
        self._known += [(key, Outcome.error("no")) for key in keys]


def test_errors_of_one_prompt_alone_end_nothing_and_those_of_all_do():
    strict = {"max_error_rate": 0.01}
    rows, (tally,) = made_by(scorer=FailingScorer(), batches=[range(1)], **strict)
    assert rows == [] and tally.unscored == 4
    with pytest.raises(RewardError, match="100% of the last . scores are errors"):
        made_by(scorer=FailingScorer(), **strict)


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
    scorer = FakeScorer()
    _, tallies = made_by(pairing="random", scorer=scorer)
    assert [len(batch) for batch in scorer.released] == [2, 2, 2]
    entered = [tally.pairs + tally.ties + tally.equal_texts for tally in tallies]
    assert sum(entered) + sum(tally.unscored for tally in tallies) == 3


def test_a_source_that_compares_is_given_two_at_a_time():
    scorer = FakeScorer()
    _, (first,) = made_by(compares=True, scorer=scorer, batches=[range(1)])
    assert sorted(map(sorted, scorer.released)) == [
        ["11", "11"],
        ["11", "12"],
        ["11", "12"],
        ["11", "13"],
        ["11", "13"],
        ["12", "13"],
    ]
    assert first.pairs == 3


def test_pairs_do_not_depend_on_how_prompts_are_batched():
    noisy = {"label_noise": 0.5}
    one_by_one = [range(number, number + 1) for number in range(3)]
    for pairing in ("all", "best_worst", "random"):
        rows, _ = made_by(pairing=pairing, batches=[range(3)], **noisy)
        assert rows == made_by(pairing=pairing, batches=one_by_one, **noisy)[0]
        assert pairing == "random" or any(row["flipped"] for row in rows)


def test_what_judges_count_is_each_batchs_own():
    class Counting(FakeScorer):
        def release(self, keys):
            super().release(keys)
            self._counts = self._counts + Counter(pairs=1)

    scorer = Counting()
    _, tallies = made_by(scorer=scorer)
    assert sum(tally.compared for tally in tallies) == 3


def test_too_many_errors_end_it(monkeypatch):
    monkeypatch.setattr("llamarl.scoring.assembly.MIN_OUTCOMES", 3)
    monkeypatch.setattr("llamarl.scoring.assembly.MIN_BAD_PROMPTS", 1)
    broken = {text: None for text in ("24", "26", "25")}
    monkeypatch.setitem(SCORES, 1, broken)
    with pytest.raises(RewardError, match="100% of the last 3 scores are errors"):
        made_by(batches=[range(1, 2)])
