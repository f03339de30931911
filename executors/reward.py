"""Reward: completions in, whole groups with rewards out.

    take --> Scorer --Outcome--> settle --a group is whole--> send
                                        --a version has all--> Judges --> eval/...

The scorer is any Scorer (llamarl/scoring/scorer.py): a function in worker processes, a model over
the ranks of this executor, a weighted sum of several. A judge of evaluations is any EvalJudge
(llamarl/evaluation/judges.py). If one of these needs all ranks, the ranks act as one: the first
takes all completions and tells the others what to compute next, and these only do their share.

    loop step    consumes              waits for               unblocked by
    first rank   completions           what scores; room       its workers; the trainer
                 stretches             -                       the generator
                 a batch of tokens     the others' share       the others
    another      the first's calls     -                       the first rank

A score is a function of its completion, and on resume completions that were not trained on come
again. So the only state is the scorer's own, such as the completions that novelty remembers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from llamarl.comm.together import RankCalls
from llamarl.evaluation.ask import ScoredAnswer
from llamarl.evaluation.judges import Judges, MakeEvalJudge
from llamarl.evaluation.metrics import Evaluations
from llamarl.executor import Executor, State
from llamarl.scoring.assembly import (
    Batches,
    ErrorRate,
    Groups,
    Scorable,
    item_of,
    outcome_at_source,
)
from llamarl.scoring.replies import ReplyMean, ReplySettings
from llamarl.scoring.scorer import Item, MakeScorer, Site
from llamarl.tasks.parts import EvalSet, set_of
from llamarl.tickets.prompts import AnyPrompts, note, part_of
from llamarl.types import (
    Completion,
    EvalCompletion,
    EvalReplied,
    Group,
    Outcome,
    Prompt,
    Replied,
    Replies,
    Stretch,
)

# Most completions that are scored at once. More wait in the channel, so that the generator slows
# down.
MAX_PENDING = 1024
# Most stretches that are taken at once; more wait in their channel.
MAX_STRETCHES = 4096


@dataclass(kw_only=True, eq=False, repr=False)
class Reward(Executor):
    """Scores completions and joins those of a ticket to a group.

    make_scorer: makes the scorer. judges: make the judges of evaluations. first_takes: its ranks
    act as one, because they hold models together, or because the scorer has one history. replicate:
    copies of each model, each sharded over an equal share of the ranks. tensor_parallel: ranks, one
    after another, that share each layer. reproducible: what is computed together does not depend on
    what came at the same time. reads_ahead: its scorers read completions while these are sampled.

    consumes  Completion, of training tickets
              EvalCompletion, of which one policy version sampled each
              Stretch, if it reads ahead: what completions have grown by
    produces  Group, as soon as its group_size completions are scored
              metrics eval/... of a version as soon as all completions of its held-out prompts are,
              and of each further set eval/NAME/..., with what the judges say of them
    With replies it consumes Replied and EvalReplied in the place of completions: each attack with
    the victim's replies. The replies are scored.

    waits for what scores; the generator, while a group or an evaluation is begun and not whole;
              room for groups

    A completion with an error or an abstention is not trained on, and is left out of an evaluation.
    RewardError when more than max_error_rate of the newest outcomes are errors
    (assembly.ErrorRate).
    """

    name = "reward"
    produces = (Group,)
    # Without this state, a scorer that remembers completions begins a new history.
    state_is_optional = True
    state_may_be_absent = True

    make_scorer: MakeScorer
    first_takes: bool = False
    reads_ahead: bool = False
    replicate: int = 1
    tensor_parallel: int = 1
    reproducible: bool = False
    prompts: AnyPrompts
    eval_prompts: Callable[[int], Prompt]
    decode: Callable[[list[int]], str]
    # With special tokens; None if the text never has any.
    decode_raw: Callable[[list[int]], str] | None = None
    group_size: int
    eval_sets: Sequence[EvalSet]
    num_eval_samples: int = 0
    max_error_rate: float = 0.5
    judges: Sequence[MakeEvalJudge] = ()
    replies: ReplySettings | None = None

    def __post_init__(self):
        # By key: the completions that are being scored or wait for their batch.
        self._submitted: dict[int, tuple[Scorable, Item]] = {}
        self._keys = itertools.count()
        self._come: Batches[int] = Batches(self.group_size)  # by ticket
        # By version. Each set is a batch of its own, because scorers that compare must not compare
        # across sets.
        each = 1 + self.num_eval_samples
        self._evaluations: dict[EvalSet, Batches[int]] = {
            one: Batches(one.count * each) for one in self.eval_sets
        }
        success_above = None if self.replies is None else self.replies.threshold
        self._answers = Evaluations(self.eval_sets, self.num_eval_samples, success_above)
        self._judges = Judges(())
        # The types of record that bring completions, and the executor that sends them.
        has_replies = self.replies is not None
        self._completion: type[Completion | Replied] = Replied if has_replies else Completion
        self._evaluation: type[EvalCompletion | EvalReplied] = (
            EvalReplied if has_replies else EvalCompletion
        )
        self._source = "victim" if has_replies else "generator"
        self._is_set_up = False  # before that no rank has begun anything with the others
        self._whole: deque[Group] = deque()  # waiting for room

    @property
    def consumes(self) -> tuple[type, ...]:
        """The types of records that it reads; the class lists them."""
        ahead = (Stretch,) if self.reads_ahead else ()
        return (self._completion, self._evaluation, *ahead)

    @property
    def follows(self) -> bool:
        """Whether this rank only does its share of what the first one begins."""
        return self._ranks.follows

    def setup(self) -> None:
        """Make the scorer and the judges, load models, each rank its own share, and start the
        scorer. ValueError if it cannot be used, such as a function that cannot be imported or
        called.
        """
        self._ranks = RankCalls(self, as_one=self.first_takes)
        site = Site(
            group=self.group,
            together=self._ranks,
            metrics=self.metrics,
            on_result=self.control.wake,
            reproducible=self.reproducible,
        )
        self._scorer = self.make_scorer(site)
        if self.replies is not None:
            self._scorer = ReplyMean(self._scorer, self.replies)
        self._judges = Judges([make(site) for make in self.judges])
        self._scorer.load()
        self._judges.load()
        if not self.follows:
            self._sink = self.outputs.of(Group)
            self._groups = Groups(self._scorer.name, group_size=self.group_size)
            self._errors = ErrorRate(self._scorer.name, self.max_error_rate)
            self._scorer.start()
        if self.group.index == 0:  # the first rank gets all evaluations
            self._judges.start()
        self._is_set_up = True

    def step(self) -> bool:
        """Hand on what came, and send what is scored. Ranks other than the first take part in what
        it begins. True if there was any work.
        """
        if self.follows:
            return self._ranks.follow()
        self._hear()
        has_taken = self._take()
        outcomes = self._scorer.poll()
        for key, outcome in outcomes:
            completion, item = self._submitted.pop(key)
            self._settle(completion, item, outcome)
        self._errors.check()
        has_judged = self._report()
        has_sent = self._send()
        has_scored = bool(outcomes) or self._scorer.has_read_ahead
        return has_sent or has_scored or has_taken or has_judged

    def waiting_for(self) -> str | None:
        """Return what it waits for, in words that begin with the cause: room, scores or data. None
        on ranks that follow the first.
        """
        if self.follows:
            return None
        if self._whole:
            return f"room: in channel {self._sink.name}, which the trainer empties"
        if self._scorer.pending:
            what = f"{self._scorer.pending} by {self._scorer.name}"
            return f"scores: {what}, from the reward workers"
        version = self._judges.oldest
        if version is not None:
            return f"scores: judgements of the evaluation of policy version {version}"
        if self._come.begun:
            ticket = min(self._come.begun)
            what = f"ticket {ticket} lacks {self._come.missing(ticket)} completions"
            begun = len(self._come.begun)
            return f"data: {begun} groups are begun; {what} from the {self._source}"
        for one, answers in self._evaluations.items():
            if answers.begun:
                version = min(answers.begun)
                what = f"{answers.missing(version)} evaluation completions{one.place}"
                return f"data: {what} of policy version {version}, from the {self._source}"
        return None

    def lacks_of_evaluation(self) -> int | None:
        """Return the oldest version of which completions of held-out prompts are missing."""
        begun = [min(answers.begun) for answers in self._evaluations.values() if answers.begun]
        return min(begun, default=None)

    def teardown(self) -> None:
        """Finish what was begun with the other ranks, then close the scorer, if there is one."""
        if self._is_set_up:
            self._ranks.leave()
        if hasattr(self, "_scorer"):
            self._scorer.close()
        self._judges.close()

    def offloadable(self) -> Iterable[torch.Tensor]:
        """Yield the tensors that may leave the device while others use it."""
        yield from self._scorer.tensors()
        yield from self._judges.tensors()

    def has_state(self) -> bool:
        """Whether checkpoints hold a scorer's state. Ranks that score each for itself have none."""
        return self.first_takes

    def state_dict(self) -> State:
        """Return the state of the first rank's scorer."""
        return {} if self.follows else self._scorer.state_dict()

    def load_state_dict(self, parts: Iterable[Mapping]) -> None:
        """Give every rank's scorer the state of the first rank's."""
        if self.follows:
            return
        for part in parts:
            self._scorer.load_state_dict(part)

    def _report(self) -> bool:
        """Let the judges do a piece of their work, and report the evaluations that all have judged.
        True if there was any work.
        """
        if self._judges.is_computing:
            self.claim_device()
        judged = self._judges.poll()
        for version, columns in judged:
            self.metrics.report(version, columns)
        return bool(judged) or self._judges.is_computing

    def _hear(self) -> None:
        """Hand new tokens of running completions to the scorer, if these are sent."""
        if not self.reads_ahead:
            return
        for stretch in self.inputs.of(Stretch).take(MAX_STRETCHES):
            note(self.prompts, stretch.ticket, stretch.prompt)
            self._scorer.hear(stretch, self.prompts[stretch.ticket].prompt_ids)

    def _take(self) -> bool:
        """Hand on what came; True if anything did. Evaluations need no room and are scored first,
        because a row of metrics waits for them. There are never more than the held-out prompts ask
        for.
        """
        evaluations: Sequence[EvalCompletion | EvalReplied]
        evaluations = self.inputs.of(self._evaluation).take()
        for evaluation in evaluations:
            self._take_evaluation(evaluation)
        # While groups wait for room, completions stay in their channel, so that no more groups are
        # made.
        room = 0 if self._whole else max(0, MAX_PENDING - self._scorer.pending)
        completions: Sequence[Completion | Replied]
        completions = self.inputs.of(self._completion).take(room)
        for completion in completions:
            self._take_completion(completion)
        return bool(evaluations or completions)

    def _take_evaluation(self, record: EvalCompletion | EvalReplied) -> None:
        """Hand on a completion of a held-out prompt, and release its evaluation if it is whole."""
        completion = record.attack if isinstance(record, EvalReplied) else record
        assert isinstance(completion, EvalCompletion), "a channel carries one type of record"
        key = self._submit(record, self.eval_prompts(completion.prompt_index))
        if completion.token_ids.numel():  # empty: its evaluation was given up
            version = int(completion.policy_versions[0])
            place = (completion.prompt_index, completion.greedy, completion.sample_index)
            of = set_of(self.eval_sets, completion.prompt_index)
            self._scorer.release(self._evaluations[of].add(version, place, key))

    def _take_completion(self, record: Completion | Replied) -> None:
        """Hand on a completion of a ticket, and release its group if it is whole."""
        completion = record.attack if isinstance(record, Replied) else record
        assert isinstance(completion, Completion), "a channel carries one type of record"
        note(self.prompts, completion.ticket, completion.prompt)
        key = self._submit(record, self.prompts[completion.ticket])
        self._scorer.release(self._come.add(completion.ticket, completion.sample_index, key))

    def _submit(self, record: Scorable | Replies, prompt: Prompt) -> int | None:
        """Hand a completion to the scorer. Return its key; None if it is not to be scored."""
        completion = record.attack if isinstance(record, Replies) else record
        if completion.policy_versions.numel():
            self.note_version(int(completion.policy_versions[-1]))
        item = item_of(completion, prompt, self.decode, self.decode_raw)
        if isinstance(record, Replies):
            assert self.replies is not None, "with a victim its replies are scored"
            item = self.replies.with_replies(item, record)
        known = outcome_at_source(completion)
        if known is not None:
            if item.sample is not None:
                self._scorer.forget(*item.sample)
            self._settle(completion, item, known)
            return None
        key = next(self._keys)
        self._submitted[key] = (completion, item)
        self._scorer.submit(key, item)
        return key

    def _settle(self, completion: Scorable, item: Item, outcome: Outcome) -> None:
        """Enter a completion's outcome into its group or its evaluation, and count it."""
        if completion.finish_reason != "aborted":  # what was given up says nothing of the scorer
            self.metrics.add("reward/scored", int(outcome.kind == "score"))
            self.metrics.add("reward/errors", int(outcome.kind == "error"))
            self._errors.add(outcome, prompt=_prompt_of(completion))
        if isinstance(completion, Completion):
            part = part_of(self.prompts[completion.ticket])
            group = self._groups.add(completion, _with_part(outcome, part))
            if group is not None:
                self._whole.append(group)
        elif completion.token_ids.numel():  # without tokens its evaluation was given up
            evaluation = self._answers.add(ScoredAnswer(completion, item, outcome))
            if evaluation is not None:
                self._judges.begin(evaluation)

    def _send(self) -> bool:
        """Send whole groups while there is room. True if any was sent."""
        has_sent = False
        while self._whole and self._sink.has_room():
            self._sink.put(self._whole.popleft())
            has_sent = True
        return has_sent


def _prompt_of(completion: Scorable) -> tuple[bool, int]:
    """Return what a completion has in common with the others of its prompt."""
    if isinstance(completion, EvalCompletion):
        return True, completion.prompt_index
    return False, completion.ticket


def _with_part(outcome: Outcome, part: str | None) -> Outcome:
    """Return an outcome with the column of its part of a mixture, if it is of one."""
    if part is None or outcome.kind != "score":
        return outcome
    columns = {**outcome.columns, f"reward/part/{part}/mean": outcome.value}
    return dataclasses.replace(outcome, columns=columns)
