"""Reward: completions in, whole groups with rewards out. RuleReward: what scores them is a
RewardSource, such as a plain function in worker processes.

    completions --decode--> Scoring --Outcome--> GroupAssembler --a group is whole--> "scored"
    evaluations --decode--> Scoring --Outcome--> GroupAssembler --a version has all--> eval/...
                                                     --greedy answers--> Gold, if any --> eval/...
                                                     --sampled--> Diversity, if any --> eval/...
                                                     --> Samples, if asked for

It keeps no state: a score is a function of its completion, and what was not trained on comes again
on resume. A ModelReward keeps what novelty remembers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from executors.answers import AnswerScoring, AnswerSettings, Attack
from executors.assembly import Answer, GroupAssembler
from executors.diversity import Diversity
from executors.gold import Gold, GoldSettings
from executors.samples import Samples
from executors.scoring import Item, Scoring, SourceScoring
from llamarl.executor import Executor
from llamarl.learning.embedding import EmbedderSettings
from llamarl.tasks.held_out import EvalSet, set_of
from llamarl.tasks.source import MakeSource, Outcome
from llamarl.tickets.prompts import AnyPrompts, part_of
from llamarl.types import Answered, Completion, EvalCompletion, Prompt

# Completions that are being scored; more wait in the channel, where the generator feels them.
MAX_PENDING = 1024


@dataclass(kw_only=True, eq=False, repr=False)
class Reward(Executor):
    """Scores completions and joins those of a ticket to a group. Subclasses say what scores.

    consumes  "completions": Completions of training tickets
              "evaluations": EvalCompletions, of which one policy version sampled each
    produces  a Group, to its only output ("scored" here), as soon as its group_size completions are
              scored
              metrics eval/... of a version as soon as all completions of its held-out prompts are,
              and of each further set eval/NAME/...
              with gold or an embedder, of its first rank: what they say of them too
    With answers it consumes "answered" and "eval_answered" in their place: such Completions with
    what a victim answered, which is scored.

    waits for what scores; the generator, while a group or an evaluation is begun and not whole;
              room in "scored"

    An error or an abstention is a NaN reward, which the trainer masks, and is left out of an
    evaluation. RewardError when more than max_error_rate of the last assembly.MIN_OUTCOMES to
    ERROR_WINDOW outcomes are errors.
    """

    name = "reward"

    prompts: AnyPrompts
    eval_prompts: Callable[[int], Prompt]
    decode: Callable[[list[int]], str]
    decode_raw: Callable[[list[int]], str] | None = (
        None  # with special tokens; None: there are none
    )
    group_size: int
    eval_sets: Sequence[EvalSet]
    num_eval_samples: int = 0
    max_error_rate: float = 0.5
    gold: GoldSettings | None = None
    embedder: EmbedderSettings | None = None
    answers: AnswerSettings | None = None
    samples: Path | None = None  # the folder of evaluations; None: they are not written

    def __post_init__(self):
        # What is being scored or waits for its batch, by key.
        self._submitted: dict[int, Answer] = {}
        self._keys = itertools.count()
        self._groups = Batches(self.group_size)  # by ticket
        # By version; a set is a batch of its own, and what compares completions keeps to it.
        each = 1 + self.num_eval_samples
        self._evaluations = {one: Batches(one.count * each) for one in self.eval_sets}
        # With gold or diversity: by version its answers by place, its metrics until both have
        # spoken, and how many of them have not.
        self._answers: dict[int, dict[tuple[int, bool, int], Item]] = {}
        self._reported: dict[int, dict[str, float | str]] = {}
        self._unsaid: Counter[int] = Counter()
        self._gold: Gold | None = None
        self._diversity: Diversity | None = None
        self._samples: Samples | None = None

    def make_scoring(self) -> Scoring:
        """What scores, not started yet."""
        raise NotImplementedError

    def setup(self) -> None:
        """Start what scores. ValueError if it cannot be used: of a function, if it cannot be
        imported or called.
        """
        # To the trainer, or to a reference before it: the recipe names the channel.
        (self._sink,) = self.outputs.values()
        self._scoring: Scoring | AnswerScoring = self.make_scoring()
        if self.answers is not None:
            self._scoring = AnswerScoring(self._scoring, self.answers, self.metrics)
        self._assembler = GroupAssembler(
            self._scoring.name,
            group_size=self.group_size,
            eval_sets=self.eval_sets,
            num_eval_samples=self.num_eval_samples,
            max_error_rate=self.max_error_rate,
            success_above=self._success_above,
        )
        self._scoring.start()
        if self.gold is not None and self.group.index == 0:  # which gets all evaluations
            self._gold = Gold(self.gold, self.group.device, on_result=self.control.wake)
            self._gold.start()
        if self.embedder is not None and self.group.index == 0:
            self._diversity = Diversity(self.embedder, self.eval_sets, self.group.device)
            self._diversity.start()
        if self.samples is not None and self.group.index == 0:
            self._samples = Samples(self.samples, self.eval_sets, self._success_above)

    def step(self) -> bool:
        """Hand on what came, and send on what is scored. True if there was any."""
        has_taken = self._take()
        outcomes = self._scoring.poll()
        settled = [(self._submitted.pop(key), outcome) for key, outcome in outcomes]
        for completion, outcome in settled:
            self._note(completion, outcome)
        self._assembler.settle_all(settled, self.metrics)
        has_judged = self._report()
        has_sent = self._assembler.send(self._sink)
        return has_sent or bool(outcomes) or has_taken or has_judged

    def waiting_for(self) -> str | None:
        """What it waits for, in words that begin with the cause: room, scores or data."""
        if self._assembler.whole:
            return f"room: in channel {self._sink.name}, which the trainer empties"
        if self._scoring.pending:
            what = f"{self._scoring.pending} by {self._scoring.name}"
            return f"scores: {what}, from the reward workers"
        if self._reported:
            version = min(self._reported)
            return f"scores: what is said besides of the evaluation of policy version {version}"
        if self._groups.begun:
            ticket = min(self._groups.begun)
            what = f"ticket {ticket} lacks {self._groups.missing(ticket)} completions"
            begun = len(self._groups.begun)
            return f"data: {begun} groups are begun; {what} from the {self._source}"
        for one, answers in self._evaluations.items():
            if answers.begun:
                version = min(answers.begun)
                what = f"{answers.missing(version)} evaluation completions{one.place}"
                return f"data: {what} of policy version {version}, from the {self._source}"
        return None

    @property
    def _success_above(self) -> float | None:
        """The score above which an attack succeeds; None: there is no victim."""
        return None if self.answers is None else self.answers.threshold

    @property
    def _source(self) -> str:
        """Who sends what is scored, for people."""
        return "generator" if self.answers is None else "victim"

    def teardown(self) -> None:
        """Close what scores, if there is anything."""
        if hasattr(self, "_scoring"):
            self._scoring.close()
        for judge in self._judges():
            judge.close()

    def offloadable(self) -> Iterable[torch.Tensor]:
        """The tensors that may leave the device while others use it."""
        return itertools.chain.from_iterable(judge.tensors() for judge in self._judges())

    def _judges(self) -> list[Gold | Diversity]:
        """What says more of an evaluation than its scores."""
        return [judge for judge in (self._gold, self._diversity) if judge is not None]

    def _report(self) -> bool:
        """Report the evaluations that are whole, with what judges say of them; let these do a piece
        of their work. True if they have some.
        """
        for version, values in self._assembler.evaluated():
            if self._samples is not None:
                self._samples.write(version)
            if not self._judges():
                self.metrics.report(version, values)
                continue
            self._reported[version] = values
            self._unsaid[version] = len(self._judges())
            self._begin(version)
        if not self._reported:
            return False
        self.claim_device()
        said = []
        if self._gold is not None:
            for version, judged in self._gold.poll():
                for one, of_set in zip(self.eval_sets, judged):
                    self._reported[version] |= one.columns(of_set.metrics())
                said.append((version, {}))
        if self._diversity is not None:
            said += self._diversity.poll()
        for version, more in said:
            self._reported[version] |= more
            self._unsaid[version] -= 1
            if not self._unsaid[version]:
                self.metrics.report(version, self._reported.pop(version))
        return bool(said) or any(judge.is_computing for judge in self._judges())

    def _begin(self, version: int) -> None:
        """Have an evaluation judged."""
        answers = sorted(self._answers.pop(version).items(), key=lambda entry: entry[0])
        if self._gold is not None:
            self._gold.begin(version, [item for (_, greedy, _), item in answers if greedy])
        if self._diversity is not None:
            sampled: dict[int, list[str]] = {}
            for (prompt_index, greedy, _), item in answers:
                if not greedy:
                    sampled.setdefault(prompt_index, []).append(item.text)
            self._diversity.begin(version, list(sampled.values()))

    def _take(self) -> bool:
        """Hand on what came. Evaluations need no room, and what scores takes them first: a row of
        metrics waits for them, and there are never more than the generator may have asked for. True
        if there was any.
        """
        with_answers = self.answers is not None
        source = self.inputs["eval_answered" if with_answers else "evaluations"]
        evaluations = source.take()
        for record in evaluations:
            answer = record.attack if with_answers else record
            key = self._submit(record, self.eval_prompts(answer.prompt_index))
            if answer.token_ids.numel():  # else no version sampled it: its evaluation was given up
                version = int(answer.policy_versions[0])
                place = (answer.prompt_index, answer.greedy, answer.sample_index)
                of = set_of(self.eval_sets, answer.prompt_index)
                self._scoring.release(self._evaluations[of].add(version, place, key))
                self._keep(version, answer)
        # While groups wait for room no more are made; the completions stay in their channel.
        room = 0 if self._assembler.whole else self._room()
        completions = self.inputs["answered" if with_answers else "completions"].take(room)
        for record in completions:
            completion = record.attack if with_answers else record
            key = self._submit(record, self.prompts[completion.ticket])
            keys = self._groups.add(completion.ticket, completion.sample_index, key)
            self._scoring.release(keys)
        return bool(evaluations or completions)

    def _note(self, completion: Answer, outcome: Outcome) -> None:
        """Note what became of a completion, where that is written."""
        if self._is_sample(completion):
            self._samples.score(completion, outcome)
        if isinstance(completion, Completion) and outcome.kind == "score":
            part = part_of(self.prompts[completion.ticket])
            if part is not None:
                self.metrics.add_mean(f"reward/part/{part}/mean", outcome.value)

    def _is_sample(self, completion: Answer) -> bool:
        """Whether it is written; one without tokens no version sampled."""
        is_written = self._samples is not None and isinstance(completion, EvalCompletion)
        return is_written and completion.token_ids.numel() > 0

    def _keep(self, version: int, answer: EvalCompletion) -> None:
        """Keep what is to be judged."""
        judge = self._gold if answer.greedy else self._diversity
        if judge is not None:
            prompt = self.eval_prompts(answer.prompt_index)
            item = item_of(answer, prompt, self.decode, self.decode_raw)
            place = (answer.prompt_index, answer.greedy, answer.sample_index)
            self._answers.setdefault(version, {})[place] = item

    def _room(self) -> int:
        """How many completions may still be handed on."""
        return max(0, MAX_PENDING - self._scoring.pending)

    def _submit(self, record: Answer | Answered, prompt: Prompt) -> int | None:
        """Hand a completion on. Its key; None if it is not to be scored."""
        completion = record.attack if isinstance(record, Answered) else record
        if completion.policy_versions.numel():
            self.note_version(int(completion.policy_versions[-1]))
        item: Item | Attack = item_of(completion, prompt, self.decode, self.decode_raw)
        if isinstance(record, Answered):
            item = self.answers.attack(item, record)
        if self._is_sample(completion):
            self._samples.keep(completion, item)
        if completion.finish_reason == "aborted":
            outcome = Outcome.abstain("the completion was aborted")
            self._note(completion, outcome)
            self._assembler.settle(completion, outcome)
            return None
        key = next(self._keys)
        self._submitted[key] = completion
        self._scoring.submit(key, item)
        return key


@dataclass(kw_only=True, eq=False, repr=False)
class RuleReward(Reward):
    """The rewards of a RewardSource.

    make_source: makes it, as `partial(RewardPool, "my_module:my_reward")` does.
    """

    make_source: MakeSource

    def make_scoring(self) -> SourceScoring:
        """The source, which wakes the loop when it has scored."""
        return SourceScoring(self.make_source(on_result=self.control.wake))


def item_of(
    completion: Answer,
    prompt: Prompt,
    decode: Callable[[list[int]], str],
    decode_raw: Callable[[list[int]], str] | None = None,
) -> Item:
    """A completion as what scores sees it. decode: the text of token ids without special tokens;
    decode_raw: with them, None if there are none.
    """
    is_held_out = isinstance(completion, EvalCompletion)
    sample = None if is_held_out else (completion.ticket, completion.sample_index)
    return Item(
        prompt=prompt,
        token_ids=completion.token_ids,
        text=decode(completion.token_ids.tolist()),
        has_ended=completion.finish_reason == "stop",
        is_held_out=is_held_out,
        sample=sample,
        decode_raw=decode_raw,
    )


Entry = TypeVar("Entry")  # a completion, or the key that it is known by


class Batches(Generic[Entry]):
    """Completions that came, by the batch that they are of, until it is whole."""

    def __init__(self, size: int):
        self._size = size
        # Of each batch the entries by place, None for what is not scored.
        self.begun: dict[int, dict[object, Entry | None]] = {}

    def add(self, batch: int, place: object, key: Entry | None) -> list[Entry]:
        """Enter one completion. The entries of its batch, in the order of their places, if it is
        whole with it; else none.
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
