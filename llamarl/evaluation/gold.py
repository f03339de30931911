"""Gold: scores evaluations by a scorer that is never trained on.

    references, once ---> scorer ---+
    greedy answers -----> scorer ---+--> Judged --> eval/gold, eval/win_rate, ...

The reward of training is a proxy, which a policy learns to please. A scorer that it never sees
shows what the reward is worth (Gao et al. 2022; Async RLHF, 3.1).
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from llamarl.comm.together import Apart
from llamarl.errors import RewardError
from llamarl.evaluation.ask import Answers
from llamarl.evaluation.judges import EvalJudge, JudgeWork, greedy_items, spans_of
from llamarl.evaluation.win_rate import length_controlled, win_rate, wins
from llamarl.launch.inputs import JobInputs
from llamarl.launch.scorers import gold_kind
from llamarl.scoring.scorer import Item, Site
from llamarl.scoring.weighted import WeightedPart
from llamarl.tasks.parts import reference_texts
from llamarl.tasks.special import reply_ids
from llamarl.types import Outcome, Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Judged:
    """The judgement of a gold scorer on the greedy answers to N prompts, and on the references that
    they are compared with, one to each prompt; None without references.
    """

    answers: Sequence[Item]
    gold_N: np.ndarray  # NaN without a score
    references: Sequence[Item] | None = None
    against_N: np.ndarray | None = None  # the scores of the references

    @property
    def wins_N(self) -> np.ndarray:
        """The wins over the references, as `wins` gives them."""
        references, against_N = self._compared
        same = [one.text == other.text for one, other in zip(self.answers, references)]
        return wins(self.gold_N, against_N, np.array(same))

    @property
    def num_tokens_N(self) -> np.ndarray:
        """The tokens of each answer, with its end token."""
        return _num_tokens(self.answers)

    @property
    def against_tokens_N(self) -> np.ndarray:
        """The tokens of each reference."""
        references, _ = self._compared
        return _num_tokens(references)

    @property
    def longer_N(self) -> np.ndarray:
        """The tokens that each answer has more than its reference."""
        return self.num_tokens_N - self.against_tokens_N

    @property
    def _compared(self) -> tuple[Sequence[Item], np.ndarray]:
        assert self.references is not None and self.against_N is not None, "compared with none"
        return self.references, self.against_N

    def metrics(self) -> dict[str, float | None]:
        """Return the columns eval/...; None if nothing could be scored or compared."""
        found: dict[str, float | None] = {
            "eval/gold": _mean(self.gold_N),
            "eval/gold_masked": int(np.isnan(self.gold_N).sum()),
        }
        if self.against_N is not None:
            found["eval/gold_references"] = _mean(self.against_N)
            rate = win_rate(self.wins_N)
            found["eval/win_rate"] = None if rate is None else rate.share
            found["eval/win_rate_low"] = None if rate is None else rate.low
            found["eval/win_rate_high"] = None if rate is None else rate.high
            controlled = length_controlled(self.wins_N, self.longer_N)
            found["eval/win_rate_length_controlled"] = controlled
        return found


class Gold(EvalJudge[Judged]):
    """Scores the greedy answers of evaluations. A model lies over the ranks of the site, like the
    models of the reward.

    scorer: makes the scorer. references: for each held-out prompt, in order, a completion to
    compare with; None: no win rate.
    """

    def __init__(self, site: Site, *, scorer: WeightedPart, references: Sequence[Item] | None):
        self.name = scorer.name
        self._references = references
        # The reward may have a scorer of the same name: gold reports none of its metrics, and its
        # collective calls have names of their own.
        own = replace(site, metrics=None, together=Apart(site.together, "gold/"))
        self._scorer = scorer.make(own)
        self._keys = itertools.count()
        self._outcomes: dict[int, Outcome] = {}
        self._reference_keys: list[int] = []  # until the references are scored
        self._against_N: np.ndarray | None = None

    def load(self) -> None:
        """Load this rank's share of the scorer."""
        self._scorer.load()

    def start(self) -> None:
        """Start the scorer, and begin with the references. ValueError if it cannot be used."""
        self._scorer.start()
        self._reference_keys = self._submit(self._references or ())

    @property
    def is_computing(self) -> bool:
        """Whether the scorer computes here."""
        return self._scorer.is_computing

    def judge(self, version: int, answers: Answers) -> JudgeWork[Judged]:
        """Submit the greedy answers, and score a round of them a piece. RewardError if all outcomes
        are errors.
        """
        items = greedy_items(answers)
        keys = self._submit(list(itertools.chain.from_iterable(items.values())))
        known = self._outcomes.keys()
        has_come = False
        while not has_come:
            yield
            self._outcomes.update(self._scorer.poll())
            if self._reference_keys and known >= set(self._reference_keys):
                self._against_N = self._scores(self._reference_keys, "reference answers")
                self._reference_keys = []
            has_come = not self._reference_keys and known >= set(keys)
        gold_N = self._scores(keys, f"completions of policy version {version}")
        judged = {}
        for one, span in spans_of(items).items():
            judged[one] = Judged(
                answers=items[one],
                gold_N=gold_N[span],
                references=None if self._references is None else self._references[span],
                against_N=None if self._against_N is None else self._against_N[span],
            )
        return judged

    def wait(self, timeout_s: float) -> None:
        """Block until the scorer has something to do, at most timeout_s."""
        if not self.is_computing:
            self._scorer.wait(timeout_s)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the scorer's tensors."""
        yield from self._scorer.tensors()

    def close(self) -> None:
        """Close the scorer."""
        self._scorer.close()

    def _submit(self, items: Sequence[Item]) -> list[int]:
        keys = [next(self._keys) for _ in items]
        for key, item in zip(keys, items):
            self._scorer.submit(key, item)
        if keys:
            self._scorer.release(keys)
        return keys

    def _scores(self, keys: list[int], what: str) -> np.ndarray:
        """Return the scores [N] of these keys; NaN, with a warning, for those without a score.
        RewardError if all are errors.
        """
        outcomes = [self._outcomes.pop(key) for key in keys]
        unscored = Counter(one.reason or one.kind for one in outcomes if one.kind != "score")
        if unscored:
            count = unscored.total()
            (reason, _), *_ = unscored.most_common(1)
            said = f"gold {self.name}: {count} of {len(keys)} {what} have no score: {reason}"
            if all(outcome.kind == "error" for outcome in outcomes):
                raise RewardError(f"{said}; correct the gold scorer, or leave eval.gold out")
            log.warning("%s; they are left out of eval/gold and eval/win_rate", said)
        return np.array([outcome.value for outcome in outcomes], dtype=np.float64)


def make_gold(inputs: JobInputs, references: Sequence[Item] | None) -> Callable[[Site], Gold]:
    """Return a function that makes the judge of eval.gold."""
    gold = gold_kind(inputs)
    assert gold is not None, "called only if eval.gold is set"
    return partial(Gold, scorer=WeightedPart(gold.given.name, gold.make), references=references)


def references_of(inputs: JobInputs) -> list[Item] | None:
    """Return the completions that the held-out rows have under eval.reference_key; None without
    this key.
    """
    texts = reference_texts(inputs.eval_sets, inputs.eval_prompts, inputs.config.eval.reference_key)
    return None if texts is None else reference_items(inputs, inputs.eval_prompts.values(), texts)


def reference_items(
    inputs: JobInputs, prompts: Iterable[Prompt], texts: Iterable[str]
) -> list[Item]:
    """Return texts, one to each prompt, as completions that the policy sampled and ended."""
    chat = inputs.sampled.conversation["chat"]
    items = []
    for prompt, text in zip(prompts, texts):
        ids = reply_ids(inputs.tokenizer, prompt.prompt_ids.tolist(), text, chat=chat)
        item = Item(
            prompt=prompt,
            token_ids=torch.tensor(ids, dtype=torch.int64),
            text=text,
            has_ended=True,
            is_held_out=True,
            decode_raw=inputs.decode_raw,
        )
        items.append(item)
    return items


def _num_tokens(items: Sequence[Item]) -> np.ndarray:
    return np.array([item.sampled_ids.numel() for item in items])


def _mean(values_N: np.ndarray) -> float | None:
    known = values_N[~np.isnan(values_N)]
    return float(known.mean()) if known.size else None
