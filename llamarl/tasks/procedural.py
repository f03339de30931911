"""Questions that a program makes.

addition        "12+34=", all pairs of 10..99, 500 of them held out
questions       "What is 7+12? Answer with the number only.", or which of two is larger
reasoning_gym   made on demand, by number, from a seed
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property, lru_cache

from llamarl.tasks.base import CACHED_PROMPTS, Example, PromptMaker
from llamarl.tasks.forms import import_package
from llamarl.types import Prompt
from llamarl.words.names import did_you_mean, nearest

NUM_EVAL = 500
_SHUFFLE_SEED = 0  # the split never changes, so that figures of different runs and programs compare


def addition_examples() -> tuple[list[Example], list[Example]]:
    """Return (training, held out) examples: 7,600 and 500."""
    pairs = list(itertools.product(range(10, 100), repeat=2))
    random.Random(_SHUFFLE_SEED).shuffle(pairs)
    examples = []
    for a, b in pairs:
        examples.append(Example(f"{a}+{b}=", {"answer": str(a + b)}))
    return examples[NUM_EVAL:], examples[:NUM_EVAL]


INSTRUCTION = "Answer with the number only."
NAMES = ("sum", "larger")


def question_examples(name: str | None, least: int, most: int) -> list[Example]:
    """Return a question for each pair of numbers from least to most, in both orders. `larger`
    leaves equal numbers out.

    question_examples("sum", 7, 8)[1].text    # What is 7+8? Answer with the number only.

    ValueError for an unknown name, or a range that holds fewer than two numbers.
    """
    if name not in NAMES:
        hint = did_you_mean(str(name), NAMES)
        raise ValueError(f"task.name={name}: no kind of question{hint}; there is sum and larger")
    if least >= most:
        raise ValueError(f"task.most={most}: need more than task.least={least}")
    examples = []
    for a, b in itertools.product(range(least, most + 1), repeat=2):
        if name == "sum":
            examples.append(Example(f"What is {a}+{b}? {INSTRUCTION}", {"answer": str(a + b)}))
        elif a != b:
            question = f"Which number is larger, {a} or {b}? {INSTRUCTION}"
            examples.append(Example(question, {"answer": str(max(a, b))}))
    return examples


NUM_TRAIN = 20_000  # questions before they repeat; some datasets are slow or refuse to be larger
# Item i of a reasoning_gym dataset is made from seed + i, so datasets of neighbouring seeds share
# nearly all questions. We put seeds a whole window apart: evaluation uses window 0, training with
# seed s uses window s + 1.
SEED_WINDOW = 1 << 20
_DRAWS = 100  # questions tried in the place of one that does not do
_STRIDE = 7_919  # prime, so that the tries for neighbouring items differ
# Those whose questions follow the order of a set of strings (found by making all 106 under two hash
# seeds).
_HASH_DEPENDENT = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")


class ReasoningGymTask:
    """A Task over reasoning_gym's dataset `name`. Questions over max_prompt_tokens are replaced by
    others that fit.

    options: the dataset's own parameters, {"min_terms": 2}, which make it easier or harder.
    ValueError for an unknown name or parameter, one that reasoning_gym refuses, or a limit that
    next to no question meets.
    """

    default_reward = "llamarl.tasks.rewards:reasoning_gym_score"
    train_digest = eval_digest = ""

    def __init__(
        self,
        name: str | None,
        maker: PromptMaker,
        *,
        num_eval: int,
        seed: int,
        options: Mapping[str, object],
    ):
        self.name = str(name)
        self._options = json.dumps(options, sort_keys=True)
        self._maker = maker
        self.num_train = NUM_TRAIN
        self.num_eval = num_eval
        train_seed = SEED_WINDOW * (seed % 1000 + 1)
        train = open_dataset(name, NUM_TRAIN, train_seed, self._options)
        self._eval_questions = held_out = open_dataset(name, max(1, num_eval), 0, self._options)
        cached = lru_cache(CACHED_PROMPTS)
        self.train_prompt = cached(lambda i: self._draw(train, i, forbidden=self._held_out))
        self.eval_prompt = cached(lambda j: self._draw(held_out, j, forbidden=frozenset()))

    @cached_property
    def _held_out(self) -> frozenset[str]:
        entries = (self._eval_questions[j] for j in range(self.num_eval))
        return frozenset(entry["question"] for entry in entries)

    def _draw(self, questions, i: int, *, forbidden: frozenset[str]) -> Prompt:
        """Return question i of a dataset, or the first after it in steps of _STRIDE that fits and
        is not forbidden.
        """
        for attempt in range(_DRAWS):
            index = (i + attempt * _STRIDE) % questions.size
            entry = questions[index]
            text = entry["question"]
            # Two seeds may make the same question, so one that is held out is never trained on.
            if text not in forbidden and self._maker.fits(text):
                # The scorer makes the entry again from these: its metadata need not survive JSON.
                meta = {
                    "answer": str(entry["answer"]),
                    "dataset": self.name,
                    "size": questions.size,
                    "seed": questions.seed,
                    "options": self._options,
                    "index": index,
                }
                return self._maker.prompt(Example(text, meta))
        raise ValueError(
            f"task {self.name}: {_DRAWS} questions in a row were over "
            f"max_prompt_tokens={self._maker.max_prompt_tokens} "
            "or held out for evaluation; raise it, or evaluate on fewer"
        )


@lru_cache(maxsize=8)
def open_dataset(name: str | None, size: int, seed: int, options: str = "{}"):
    """Open a reasoning_gym dataset. options: its own parameters, as a JSON object.

    ValueError with the nearest name if there is none such, or no such parameter.
    """
    reasoning_gym = import_package(
        "reasoning_gym",
        user="task=reasoning_gym",
        package="reasoning-gym",
        extra="reasoning_gym",
    )
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = nearest(str(name), DATASETS, cutoff=0.4) or "chain_sum"
        raise ValueError(f"task.name={name}: not a reasoning_gym dataset; did you mean {near}?")
    if name in _HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED", "random") == "random":
        remedy = "start with PYTHONHASHSEED=0, or choose another dataset"
        raise ValueError(
            f"task.name={name}: its questions differ from process to process; {remedy}"
        )
    given = json.loads(options)
    _, config = DATASETS[name]
    own = [field.name for field in fields(config) if field.name not in ("size", "seed")]
    for option in given:
        if option not in own:
            hint = did_you_mean(option, own)
            raise ValueError(f"task.options.{option}: {name} takes {', '.join(own)}{hint}")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **given)
    except (AssertionError, TypeError, ValueError) as error:
        where = f"task.name={name}"
        remedy = "choose another dataset"
        if given:
            where += f" task.options={options}"
            remedy = "choose other options"
        refusal = f"reasoning_gym refuses {size} questions of it: {error}"
        raise ValueError(f"{where}: {refusal}; {remedy}") from error
