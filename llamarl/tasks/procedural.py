"""reasoning_gym: questions made on demand, by number, from a seed.

Item i of a reasoning_gym dataset is made from seed + i, so datasets of neighbouring seeds share
nearly all questions. The seeds here are a whole window apart: evaluation always comes from the
first, training with seed s from the (s + 1)-th, and a training question that is also an evaluation
question is replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property, lru_cache

from llamarl.tasks.base import CACHED_PROMPTS, Example, PromptMaker
from llamarl.types import Prompt
from llamarl.words.names import did_you_mean, nearest

NUM_TRAIN = 20_000  # questions before they repeat; some datasets are slow or refuse to be larger
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
        self._train_questions = open_dataset(name, NUM_TRAIN, train_seed, self._options)
        self._eval_questions = open_dataset(name, max(1, num_eval), 0, self._options)
        self.train_prompt = lru_cache(CACHED_PROMPTS)(self._train_prompt)
        self.eval_prompt = lru_cache(CACHED_PROMPTS)(self._eval_prompt)

    @cached_property
    def _held_out(self) -> frozenset[str]:
        entries = (self._eval_questions[j] for j in range(self.num_eval))
        return frozenset(entry["question"] for entry in entries)

    def _train_prompt(self, i: int) -> Prompt:
        return self._draw(self._train_questions, i, forbidden=self._held_out)

    def _eval_prompt(self, j: int) -> Prompt:
        return self._draw(self._eval_questions, j, forbidden=frozenset())

    def _draw(self, questions, i: int, *, forbidden: frozenset[str]) -> Prompt:
        """Return question i of a dataset, or the first after it in steps of _STRIDE that fits and
        is not forbidden.
        """
        for attempt in range(_DRAWS):
            index = (i + attempt * _STRIDE) % questions.size
            entry = questions[index]
            text = entry["question"]
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
    import reasoning_gym
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
