"""Gold: what a gold scorer, and the model that the policy began as, say of evaluations.

    references, once ---> scorer ---+
    greedy answers -----> scorer ---+--> Judged --> eval/gold, eval/win_rate, eval/perplexity, ...
                   -----> base -----+

The reward that is trained on is a proxy, which a policy learns to please: a scorer that it never
sees says what it is worth (Gao et al. 2022; Async RLHF, 3.1). Answers are scored in microbatches of
tokens, one at a call, so that training's completions are not held up by more than one.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from llamarl.errors import NotFinite, RewardError
from llamarl.learning.packing import collate
from llamarl.learning.sft import NextToken, Pair, completion_logprobs, pack_pairs, pair_of
from llamarl.models.frozen import frozen_decoder
from llamarl.scoring.scorer import Item, Outcome, Scorer, site_alone
from llamarl.scoring.weighted import Part, Weighted
from llamarl.scoring.win_rate import Judged
from llamarl.tasks.held_out import EvalSet

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GoldSettings:
    """What judges, and what answers are compared with.

    scorer: what scores; None: nothing does. base_path: a Hugging Face
    directory of a language model with the policy's tokens; None: no perplexity. references: an
    answer to each held-out prompt, in order; None: no win rate. sets: of whose prompts these and
    all answers are, one set after the other. microbatch_tokens: packed tokens a forward of base.
    """

    scorer: Part | None
    base_path: str | None
    references: tuple[Item, ...] | None
    sets: tuple[EvalSet, ...]
    dtype: str
    microbatch_tokens: int


@dataclass(eq=False, repr=False)
class _Evaluation:
    """A version's answers and what is known of them."""

    version: int
    answers: Sequence[Item]
    keys: list[int]
    pairs: list[Pair]  # the answers as base reads them
    unread: deque[list[int]]  # by microbatch, the numbers of those that it has not read
    logprobs_N: Tensor


@dataclass(eq=False, repr=False)
class Gold:
    """Judges evaluations, in the order in which they came; on one rank alone."""

    settings: GoldSettings
    device: torch.device
    on_result: Callable[[], None] = field(default=lambda: None)

    def __post_init__(self):
        self._keys = itertools.count()
        self._outcomes: dict[int, Outcome] = {}
        self._evaluations: deque[_Evaluation] = deque()
        self._references: list[int] = []  # their keys, until they are scored
        self._against_N: np.ndarray | None = None
        self._scorer: Scorer | None = None
        self._base = None

    def start(self) -> None:
        """Load the models, start the source, and begin with the references. ValueError for what
        cannot be used.
        """
        scorer = self.settings.scorer
        if scorer is not None:
            site = site_alone(self.device, on_result=self.on_result)
            self._scorer = Weighted([scorer], site)
            self._scorer.load()
            self._scorer.start()
            self._references = self._submit(self.settings.references or ())
        if self.settings.base_path is not None:
            dtype = getattr(torch, self.settings.dtype)
            self._base = frozen_decoder(
                self.settings.base_path, mesh=None, device=self.device, dtype=dtype
            )

    @property
    def pending(self) -> int:
        """The number of evaluations that are begun."""
        return len(self._evaluations)

    @property
    def is_computing(self) -> bool:
        """Whether a model has work, so that the next `poll` does some."""
        is_reading = any(evaluation.unread for evaluation in self._evaluations)
        return is_reading or (self._scorer is not None and self._scorer.is_computing)

    @property
    def name(self) -> str:
        """What messages call the scorer."""
        return self.settings.scorer.name

    def tensors(self) -> list[Tensor]:
        """The models' weights."""
        found: list[Tensor] = []
        if self._scorer is not None:
            found += self._scorer.tensors()
        if self._base is not None:
            found += self._base.parameters()
        return found

    def begin(self, version: int, answers: Sequence[Item]) -> None:
        """Take an evaluation: one answer to each held-out prompt, in order."""
        pairs: list[Pair] = []
        if self._base is not None:
            pairs = [pair_of(item.prompt.prompt_ids, item.token_ids) for item in answers]
        sizes = list(map(NextToken().num_tokens, pairs))
        evaluation = _Evaluation(
            version=version,
            answers=answers,
            keys=self._submit(answers) if self._scorer else [],
            pairs=pairs,
            unread=deque(collate(sizes, self.settings.microbatch_tokens)),
            logprobs_N=torch.zeros(len(answers), dtype=torch.float64),
        )
        self._evaluations.append(evaluation)

    def poll(self) -> list[tuple[int, list[Judged]]]:
        """Score a microbatch with each model, and return the versions that are judged with it, each
        set by itself.

        RewardError if all of an evaluation are errors; NotFinite for a log-probability
        that is no number.
        """
        if self._scorer is not None:
            self._outcomes.update(self._scorer.poll())
        if self._references and self._outcomes.keys() >= set(self._references):
            self._settle_references()
        if not self._evaluations:
            return []
        oldest = self._evaluations[0]
        if oldest.unread:
            numbers = oldest.unread.popleft()
            batch = pack_pairs([oldest.pairs[number] for number in numbers], self.device)
            oldest.logprobs_N[numbers] = completion_logprobs(self._base, batch)
        is_scored = not self._references and self._outcomes.keys() >= set(oldest.keys)
        if oldest.unread or not is_scored:
            return []
        self._evaluations.popleft()
        judged = self._judged(oldest)
        ends = list(itertools.accumulate(one.count for one in self.settings.sets))
        begins = [0, *ends[:-1]]
        return [(oldest.version, [judged.part(*span) for span in zip(begins, ends)])]

    def wait(self, timeout_s: float) -> None:
        """Block until `poll` has something to do, at most timeout_s."""
        if not self.is_computing:
            self._scorer.wait(timeout_s)

    def close(self) -> None:
        """Drop what is pending and free the source."""
        self._evaluations.clear()
        if self._scorer is not None:
            self._scorer.close()

    def _submit(self, items: Sequence[Item]) -> list[int]:
        keys = [next(self._keys) for _ in items]
        for key, item in zip(keys, items):
            self._scorer.submit(key, item)
        if keys:
            self._scorer.release(keys)
        return keys

    def _scores(self, keys: list[int], what: str) -> np.ndarray:
        """[N] of these keys, NaN for those that have no score, of which a warning says why.
        RewardError if all are errors.
        """
        outcomes = [self._outcomes.pop(key) for key in keys]
        unscored = Counter(one.reason or one.kind for one in outcomes if one.kind != "score")
        if unscored:
            count = unscored.total()
            (reason, _), *_ = unscored.most_common(1)
            said = f"gold {self.name}: {count} of {len(keys)} {what} have no score: {reason}"
            if all(outcome.kind == "error" for outcome in outcomes):
                raise RewardError(f"{said}; correct what scores, or leave eval.gold out")
            log.warning("%s; they are left out of eval/gold and eval/win_rate", said)
        return np.array([outcome.value for outcome in outcomes], dtype=np.float64)

    def _settle_references(self) -> None:
        self._against_N = self._scores(self._references, "reference answers")
        self._references = []

    def _judged(self, evaluation: _Evaluation) -> Judged:
        answers = evaluation.answers
        gold_N = None
        if self._scorer is not None:
            what = f"answers of policy version {evaluation.version}"
            gold_N = self._scores(evaluation.keys, what)
        compared = {}
        if self._against_N is not None:
            references = self.settings.references
            same = [one.text == other.text for one, other in zip(answers, references)]
            compared = {
                "against_N": self._against_N,
                "against_tokens_N": _num_tokens(references),
                "same_N": np.array(same),
            }
        logprobs_N = None
        if self._base is not None:
            logprobs_N = evaluation.logprobs_N.numpy()
            self._check_finite(evaluation.version, logprobs_N)
        return Judged(
            num_tokens_N=_num_tokens(answers), gold_N=gold_N, logprobs_N=logprobs_N, **compared
        )

    def _check_finite(self, version: int, logprobs_N: np.ndarray) -> None:
        wrong = np.flatnonzero(~np.isfinite(logprobs_N))
        if wrong.size:
            first = wrong[0]
            raise NotFinite(
                f"eval.base={self.settings.base_path}: the log-probability of the answer of policy "
                f"version {version} to held-out prompt {first} is {logprobs_N[first]}; "
                "model.dtype=float32, or another eval.base"
            )


def _num_tokens(items: Sequence[Item]) -> np.ndarray:
    return np.array([item.token_ids.numel() for item in items])
