"""RuleReward: completions in, whole groups with rewards out. The rule is a plain function in worker
processes.

    completions --decode--> pool --outcome--> ScoredCompletion --group is whole--> Group --> "scored"
    evaluations --decode--> pool --outcome--> Evaluations --a version has all--> metrics "eval/reward", ...

It keeps no state: a score is a function of its completion, and what was not trained on comes again
on resume.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from llamarl.errors import RewardError
from llamarl.executor import Executor
from llamarl.tasks.evaluation import Evaluations
from llamarl.tasks.pool import Outcome, RewardPool
from llamarl.types import Completion, Group, Prompt, ScoredCompletion

MAX_PENDING = (
    1024  # completions in the pool; more wait in the channel, where the generator feels them
)
ERROR_WINDOW = 256  # outcomes over which the error rate is taken
MIN_OUTCOMES = 64  # before a rate says anything
_LOGGED_REASONS = 20  # distinct ones; the counters go on

log = logging.getLogger(__name__)


class Prompts(Protocol):
    """PromptStream, or anything that maps a ticket to its prompt."""

    def __getitem__(self, ticket: int) -> Prompt: ...


class RuleReward(Executor):
    """Scores completions with the function at import path `fn`, (prompt, completion_text, meta) ->
    float or None.

    consumes  "completions": of training tickets; "evaluations": their `ticket` is an evaluation prompt's number, and one
              policy version sampled all of a completion; sample_index 0 is greedy, 1 ..
              num_eval_samples are sampled
    produces  "scored": a Group as soon as its group_size completions are scored; metrics eval/... of a version when all
              completions of its num_eval_prompts are
    waits for the pool; the generator, while a group or an evaluation is begun and not whole; room
    in "scored"

    An error or an abstention is a NaN reward, which the trainer masks, and in an evaluation a wrong
    answer. RewardError when more than max_error_rate of the last MIN_OUTCOMES to ERROR_WINDOW
    outcomes are errors.
    """

    name = "reward"

    def __init__(
        self,
        *,
        prompts: Prompts,
        eval_prompts: Callable[[int], Prompt],
        decode: Callable[[list[int]], str],
        fn: str,
        group_size: int,
        num_eval_prompts: int,
        num_eval_samples: int = 0,
        num_workers: int = 1,
        timeout_s: float = 5.0,
        memory_mb: int = 1024,
        max_error_rate: float = 0.5,
    ):
        self._prompts, self._eval_prompts, self._decode = prompts, eval_prompts, decode
        self._fn, self._num_workers, self._timeout_s, self._memory_mb = (
            fn,
            num_workers,
            timeout_s,
            memory_mb,
        )
        self._group_size = group_size
        self._errors = ErrorRate(fn, max_error_rate)
        self._evaluations = Evaluations(num_eval_prompts, num_eval_samples)
        self._pool: RewardPool | None = None
        self._in_pool: dict[
            int, tuple[Completion, bool]
        ] = {}  # key -> completion, and is it of an evaluation
        self._next_key = 0
        self._begun: dict[
            int, list[ScoredCompletion]
        ] = {}  # ticket -> those scored so far, while it is not whole
        self._whole: deque[Group] = deque()  # waiting for room

    def setup(self) -> None:
        """Start the workers. ValueError if `fn` cannot be imported or called."""
        self._pool = RewardPool(
            self._fn,
            num_workers=self._num_workers,
            timeout_s=self._timeout_s,
            memory_mb=self._memory_mb,
            on_result=self.control.wake,
        )
        self._pool.start()

    def step(self) -> bool:
        taken = self._take()
        outcomes = self._pool.poll()
        for key, outcome in outcomes:
            self._settle(*self._in_pool.pop(key), outcome)
        if outcomes:
            self.metrics.add("reward/scored", sum(o.kind == "score" for _, o in outcomes))
            self.metrics.add("reward/errors", sum(o.kind == "error" for _, o in outcomes))
            self._errors.check()
        for version, values in self._evaluations.finished():
            self.metrics.report(version, values)
        return self._send() or bool(outcomes) or taken

    def waiting_for(self) -> str | None:
        if self._whole:
            return f"room: in channel {self.outputs['scored'].name}, which the trainer empties"
        if self._pool.pending:
            return f"scores: {self._pool.pending} by {self._fn}, from the reward workers"
        if self._begun:
            ticket = min(self._begun)
            missing = self._group_size - len(self._begun[ticket])
            return f"data: {len(self._begun)} groups are begun; ticket {ticket} lacks {missing} completions from the generator"
        return self._evaluations.missing()

    def teardown(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _take(self) -> bool:
        """Move what came into the pool, evaluations first: a row of metrics waits for them. True if
        there was any.
        """
        evaluations = self.inputs["evaluations"].take(max(0, MAX_PENDING - self._pool.pending))
        for completion in evaluations:
            self._submit(completion, self._eval_prompts(completion.ticket), is_eval=True)
        # While groups wait for room no more are made; the completions stay in their channel.
        room = 0 if self._whole else max(0, MAX_PENDING - self._pool.pending)
        completions = self.inputs["completions"].take(room)
        for completion in completions:
            self._submit(completion, self._prompts[completion.ticket], is_eval=False)
        return bool(evaluations or completions)

    def _submit(self, completion: Completion, prompt: Prompt, is_eval: bool) -> None:
        if completion.finish_reason == "aborted":
            self._settle(
                completion, is_eval, Outcome("abstain", math.nan, "the completion was aborted")
            )
            return
        self._in_pool[self._next_key] = completion, is_eval
        self._pool.submit(
            self._next_key, prompt.text, self._decode(completion.token_ids.tolist()), prompt.meta
        )
        self._next_key += 1

    def _settle(self, completion: Completion, is_eval: bool, outcome: Outcome) -> None:
        if completion.finish_reason != "aborted":
            self._errors.add(outcome)
        if is_eval:
            self._evaluations.add(completion, outcome)
            return
        group = self._begun.setdefault(completion.ticket, [])
        group.append(ScoredCompletion(completion, outcome.kind, outcome.value, outcome.reason))
        if len(group) == self._group_size:
            self._whole.append(Group.of(self._begun.pop(completion.ticket)))

    def _send(self) -> bool:
        sent = False
        (sink,) = self.outputs.values()  # to the trainer, or to a reference before it
        while self._whole and sink.has_room():
            sink.put(self._whole.popleft())
            sent = True
        return sent


class ErrorRate:
    """The share of errors among the newest outcomes, and what they said."""

    def __init__(self, fn: str, max_error_rate: float):
        self._fn, self._max = fn, max_error_rate
        self._newest: deque[str | None] = deque(
            maxlen=ERROR_WINDOW
        )  # the reason of an error, None for anything else
        self._logged: set[str] = set()

    def add(self, outcome: Outcome) -> None:
        reason = outcome.reason if outcome.kind == "error" else None
        self._newest.append(reason)
        if (
            reason is not None
            and reason not in self._logged
            and len(self._logged) < _LOGGED_REASONS
        ):
            self._logged.add(reason)
            log.warning("reward %s: error, its completion is masked: %s", self._fn, reason)

    def check(self) -> None:
        """RewardError if the rate is above its limit."""
        reasons = Counter(reason for reason in self._newest if reason is not None)
        rate = reasons.total() / max(1, len(self._newest))
        if len(self._newest) >= MIN_OUTCOMES and rate > self._max:
            examples = "".join(
                f"\n  {count} x {reason}" for reason, count in reasons.most_common(3)
            )
            raise RewardError(
                f"reward {self._fn}: {rate:.0%} of the last {len(self._newest)} scores are errors, "
                f"above reward.max_error_rate={self._max:g}; fix the function, or raise the limit:{examples}"
            )
