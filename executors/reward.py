"""RuleReward: completions in, whole groups with rewards out. What scores them is a RewardSource,
such as a plain function in worker processes.

    completions --decode--> source --Outcome--> ScoredCompletion --its group is whole--> "scored"
    evaluations --decode--> source --Outcome--> Evaluations --a version has all--> eval/... metrics

It keeps no state: a score is a function of its completion, and what was not trained on comes again
on resume.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from llamarl.errors import RewardError
from llamarl.executor import Executor
from llamarl.tasks.evaluation import Evaluations
from llamarl.tasks.source import MakeSource, Outcome, RewardSource
from llamarl.tickets.prompts import PromptStream
from llamarl.types import Completion, EvalCompletion, Group, Prompt, ScoredCompletion

# Completions in the source; more wait in the channel, where the generator feels them.
MAX_PENDING = 1024
ERROR_WINDOW = 256  # outcomes over which the error rate is taken
MIN_OUTCOMES = 64  # before a rate says anything
_LOGGED_REASONS = 20  # distinct ones; the counters go on

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False, repr=False)
class RuleReward(Executor):
    """Scores completions and joins those of a ticket to a group.

    consumes  "completions": Completions of training tickets
              "evaluations": EvalCompletions, of which one policy version sampled each
    produces  "scored": a Group as soon as its group_size completions are scored
              metrics eval/... of a version as soon as all completions of its held-out prompts are
    waits for the source; the generator, while a group or an evaluation is begun and not whole;
              room in "scored"

    make_source: makes what scores, as `partial(RewardPool, "my_module:my_reward")` does.

    An error or an abstention is a NaN reward, which the trainer masks, and in an evaluation a wrong
    answer. RewardError when more than max_error_rate of the last MIN_OUTCOMES to ERROR_WINDOW
    outcomes are errors.
    """

    name = "reward"

    prompts: PromptStream
    eval_prompts: Callable[[int], Prompt]
    decode: Callable[[list[int]], str]
    make_source: MakeSource
    group_size: int
    num_eval_prompts: int
    num_eval_samples: int = 0
    max_error_rate: float = 0.5

    def __post_init__(self):
        self._evaluations = Evaluations(self.num_eval_prompts, self.num_eval_samples)
        self._source: RewardSource | None = None
        # What is in the source, by key.
        self._submitted: dict[int, Completion | EvalCompletion] = {}
        self._keys = itertools.count()
        self._groups = Batches(self.group_size)  # by ticket
        # By version.
        self._asked = Batches(self.num_eval_prompts * (1 + self.num_eval_samples))
        # By ticket, those scored so far while the group is not whole.
        self._begun: dict[int, list[ScoredCompletion]] = {}
        self._whole: deque[Group] = deque()  # waiting for room

    def setup(self) -> None:
        """Start the source. ValueError if it cannot be used: of a function, if it cannot be
        imported or called.
        """
        self._source = self.make_source(on_result=self.control.wake)
        self._errors = ErrorRate(self._source.name, self.max_error_rate)
        self._source.start()

    def step(self) -> bool:
        """Give the source what came, and send on what it has scored. True if there was any."""
        has_taken = self._take()
        outcomes = self._source.poll()
        for key, outcome in outcomes:
            completion = self._submitted.pop(key)
            self._errors.add(outcome)
            self._settle(completion, outcome)
        if outcomes:
            kinds = Counter(outcome.kind for _, outcome in outcomes)
            self.metrics.add("reward/scored", kinds["score"])
            self.metrics.add("reward/errors", kinds["error"])
            self._errors.check()
        for version, values in self._evaluations.finished():
            self.metrics.report(version, values)
        has_sent = self._send()
        return has_sent or bool(outcomes) or has_taken

    def waiting_for(self) -> str | None:
        """What it waits for, in words that begin with the cause: room, scores or data."""
        if self._whole:
            return f"room: in channel {self.outputs['scored'].name}, which the trainer empties"
        if self._source.pending:
            what = f"{self._source.pending} by {self._source.name}"
            return f"scores: {what}, from the reward workers"
        begun = self._groups.begun
        if begun:
            ticket = min(begun)
            what = f"ticket {ticket} lacks {self._groups.missing(ticket)} completions"
            return f"data: {len(begun)} groups are begun; {what} from the generator"
        return self._evaluations.missing()

    def teardown(self) -> None:
        """Close the source, if there is one."""
        if self._source is not None:
            self._source.close()

    def _take(self) -> bool:
        """Give the source what came, evaluations first: a row of metrics waits for them. True if
        there was any.
        """
        evaluations = self.inputs["evaluations"].take(self._room())
        for answer in evaluations:
            key = self._submit(answer, self.eval_prompts(answer.prompt_index))
            if answer.token_ids.numel():  # else no version sampled it: its evaluation was given up
                version = int(answer.policy_versions[0])
                place = (answer.prompt_index, answer.greedy, answer.sample_index)
                self._source.release(self._asked.add(version, place, key))
        # While groups wait for room no more are made; the completions stay in their channel.
        room = 0 if self._whole else self._room()
        completions = self.inputs["completions"].take(room)
        for completion in completions:
            key = self._submit(completion, self.prompts[completion.ticket])
            keys = self._groups.add(completion.ticket, completion.sample_index, key)
            self._source.release(keys)
        return bool(evaluations or completions)

    def _room(self) -> int:
        """How many completions the source may still be given."""
        return max(0, MAX_PENDING - self._source.pending)

    def _submit(self, completion: Completion | EvalCompletion, prompt: Prompt) -> int | None:
        """Give the source a completion. Its key; None if it is not to be scored."""
        if completion.finish_reason == "aborted":
            self._settle(completion, Outcome.abstain("the completion was aborted"))
            return None
        key = next(self._keys)
        self._submitted[key] = completion
        text = self.decode(completion.token_ids.tolist())
        self._source.submit(key, prompt.text, text, prompt.meta)
        return key

    def _settle(self, completion: Completion | EvalCompletion, outcome: Outcome) -> None:
        """Enter an outcome into its evaluation, or into its group, which may be whole with it."""
        if isinstance(completion, EvalCompletion):
            self._evaluations.add(completion, outcome)
            return
        scored = ScoredCompletion(
            completion=completion,
            outcome=outcome.kind,
            reward=outcome.value,
            reason=outcome.reason,
        )
        group = self._begun.setdefault(completion.ticket, [])
        group.append(scored)
        if len(group) == self.group_size:
            del self._begun[completion.ticket]
            self._whole.append(Group.of(group))

    def _send(self) -> bool:
        """Send whole groups while there is room. True if any was sent."""
        has_sent = False
        (sink,) = self.outputs.values()  # to the trainer, or to a reference before it
        while self._whole and sink.has_room():
            sink.put(self._whole.popleft())
            has_sent = True
        return has_sent


class Batches:
    """Completions that came, by the batch that they are of, until it is whole."""

    def __init__(self, size: int):
        self._size = size
        # Of each batch the keys by place, None for what is not scored.
        self.begun: dict[int, dict[object, int | None]] = {}

    def add(self, batch: int, place: object, key: int | None) -> list[int]:
        """Enter one completion. The keys of its batch, in the order of their places, if it is whole
        with it; else none.
        """
        come = self.begun.setdefault(batch, {})
        come[place] = key
        if len(come) < self._size:
            return []
        del self.begun[batch]
        return [come[place] for place in sorted(come) if come[place] is not None]

    def missing(self, batch: int) -> int:
        """How many completions a batch that was begun still lacks."""
        return self._size - len(self.begun[batch])


class ErrorRate:
    """The share of errors among the newest ERROR_WINDOW outcomes, and what they said."""

    def __init__(self, source: str, max_error_rate: float):
        self._source = source  # its name
        self._max = max_error_rate
        # The reason of an error, None for anything else.
        self._newest: deque[str | None] = deque(maxlen=ERROR_WINDOW)
        self._logged: set[str] = set()

    def add(self, outcome: Outcome) -> None:
        """Count an outcome; log an error that says something new."""
        if outcome.kind != "error":
            self._newest.append(None)
            return
        reason = outcome.reason
        self._newest.append(reason)
        if reason not in self._logged and len(self._logged) < _LOGGED_REASONS:
            self._logged.add(reason)
            log.warning("reward %s: error, its completion is masked: %s", self._source, reason)

    def check(self) -> None:
        """RewardError if the rate is above its limit."""
        num_outcomes = len(self._newest)
        if num_outcomes < MIN_OUTCOMES:
            return
        reasons = Counter(reason for reason in self._newest if reason is not None)
        rate = reasons.total() / num_outcomes
        if rate > self._max:
            commonest = reasons.most_common(3)
            examples = "".join(f"\n  {count} x {reason}" for reason, count in commonest)
            raise RewardError(
                f"reward {self._source}: {rate:.0%} of the last {num_outcomes} scores are errors, "
                f"above reward.max_error_rate={self._max:g}; "
                f"fix the function, or raise the limit:{examples}"
            )
