"""Reward: completions in, whole groups with rewards out.

    completions --decode--> Scorer --Outcome--> GroupAssembler --a group is whole--> "scored"
    evaluations --decode--> Scorer --Outcome--> GroupAssembler --a version has all--> eval/...
                                                     --greedy answers--> Gold, if any --> eval/...
                                                     --sampled--> Diversity, if any --> eval/...
                                                     --> Samples, if asked for

What scores is any Scorer (llamarl/scoring/scorer.py): a function in worker processes, a model over
the ranks of this executor, a weighted sum of several. Where a scorer needs all ranks they act as
one: the first takes all completions and says what all compute next; the others do nothing but
their share of that.

    loop step    consumes              waits for               unblocked by
    first rank   completions           what scores; room       its workers; the trainer
                 stretches             -                       the generator
                 a batch of tokens     the others' share       the others
    another      the first's calls     -                       the first rank

A score is a function of its completion, and what was not trained on comes again on resume. So the
only state is the scorer's own, such as what novelty remembers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from llamarl.executor import Executor, State
from llamarl.scoring.assembly import Batches, GroupAssembler, Scorable, item_of
from llamarl.scoring.diversity import Diversity
from llamarl.scoring.embedding import EmbedderSettings
from llamarl.scoring.gold import Gold, GoldSettings
from llamarl.scoring.replies import ReplyMean, ReplySettings
from llamarl.scoring.samples import Samples
from llamarl.scoring.scorer import Item, MakeScorer, Outcome, Site
from llamarl.scoring.together import Ranks
from llamarl.tasks.held_out import EvalSet, set_of
from llamarl.tickets.prompts import AnyPrompts, part_of
from llamarl.types import (
    Answered,
    Completion,
    EvalAnswered,
    EvalCompletion,
    Group,
    Prompt,
    Replies,
    Stretch,
)

# Completions that are being scored; more wait in the channel, where the generator feels them.
MAX_PENDING = 1024
# Stretches that are taken at a time; more wait in their channel.
MAX_STRETCHES = 4096


@dataclass(kw_only=True, eq=False, repr=False)
class Reward(Executor):
    """Scores completions and joins those of a ticket to a group.

    make_scorer: makes what scores. first_takes: its ranks act as one, because it has models that
    they hold together, or one history. replicate: copies of each model, each sharded over an equal
    share of the ranks. tensor_parallel: ranks, one after another, that share each layer.
    reproducible: what is computed together never depends on what came when. reads_ahead: it takes
    what completions have grown by, and its scorers read that.

    consumes  Completion, of training tickets
              EvalCompletion, of which one policy version sampled each
              Stretch, if it reads ahead: what completions have grown by
    produces  Group, as soon as its group_size completions are scored
              metrics eval/... of a version as soon as all completions of its held-out prompts are,
              and of each further set eval/NAME/...
              with gold or an embedder, of its first rank: what they say of them too
    With replies it consumes Answered and EvalAnswered in the place of completions: each attack with
    the victim's replies. The replies are scored.

    waits for what scores; the generator, while a group or an evaluation is begun and not whole;
              room for groups

    An error or an abstention is a NaN reward, which the trainer masks, and is left out of an
    evaluation. RewardError when more than max_error_rate of the last assembly.MIN_OUTCOMES to
    ERROR_WINDOW outcomes are errors.
    """

    name = "reward"
    produces = (Group,)
    # What a scorer remembers; without that its history begins anew.
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
    decode_raw: Callable[[list[int]], str] | None = (
        None  # with special tokens; None: there are none
    )
    group_size: int
    eval_sets: Sequence[EvalSet]
    num_eval_samples: int = 0
    max_error_rate: float = 0.5
    gold: GoldSettings | None = None
    embedder: EmbedderSettings | None = None
    replies: ReplySettings | None = None
    samples: Path | None = None  # the folder of evaluations; None: they are not written

    def __post_init__(self):
        # What is being scored or waits for its batch, by key.
        self._submitted: dict[int, Scorable] = {}
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

    @property
    def consumes(self) -> tuple[type, ...]:
        """See the class."""
        ahead = (Stretch,) if self.reads_ahead else ()
        return (self._completion, self._evaluation, *ahead)

    @property
    def _completion(self) -> type[Completion | Answered]:
        """The type of record that brings a ticket's completion."""
        return Completion if self.replies is None else Answered

    @property
    def _evaluation(self) -> type[EvalCompletion | EvalAnswered]:
        """The type of record that brings an evaluation's."""
        return EvalCompletion if self.replies is None else EvalAnswered

    @property
    def follows(self) -> bool:
        """Whether this rank does nothing but its share of what the first one begins."""
        return self._ranks.follows

    @property
    def finishes_on_stop(self) -> bool:
        """A rank takes part to the end in what the first one has begun."""
        return self.follows

    def setup(self) -> None:
        """Load models, each rank its own share, and start what scores. ValueError if it cannot be
        used: a function, if it cannot be imported or called.
        """
        self._ranks = Ranks(self, as_one=self.first_takes)
        site = Site(
            group=self.group,
            together=self._ranks,
            metrics=self.metrics,
            on_result=self.control.wake,
            reproducible=self.reproducible,
        )
        self._scorer = self.make_scorer(site)
        if self.replies is not None:
            self._scorer = ReplyMean(self._scorer, self.replies, self.metrics)
        self._scorer.load()
        if not self.follows:
            self._start()

    def _start(self) -> None:
        self._sink = self.outputs.of(Group)
        self._assembler = GroupAssembler(
            self._scorer.name,
            group_size=self.group_size,
            eval_sets=self.eval_sets,
            num_eval_samples=self.num_eval_samples,
            max_error_rate=self.max_error_rate,
            success_above=self._success_above,
        )
        self._scorer.start()
        if self.gold is not None and self.group.index == 0:  # which gets all evaluations
            self._gold = Gold(self.gold, self.group.device, on_result=self.control.wake)
            self._gold.start()
        if self.embedder is not None and self.group.index == 0:
            self._diversity = Diversity(self.embedder, self.eval_sets, self.group.device)
            self._diversity.start()
        if self.samples is not None and self.group.index == 0:
            self._samples = Samples(self.samples, self.eval_sets, self._success_above)

    def step(self) -> bool:
        """Hand on what came, and send on what is scored; or, on another rank than the first, take
        part in it. True if there was any.
        """
        if self.follows:
            return self._ranks.follow()
        self._hear()
        has_taken = self._take()
        outcomes = self._scorer.poll()
        settled = [(self._submitted.pop(key), outcome) for key, outcome in outcomes]
        for completion, outcome in settled:
            self._note(completion, outcome)
        self._assembler.settle_all(settled, self.metrics)
        has_judged = self._report()
        has_sent = self._assembler.send(self._sink)
        has_scored = bool(outcomes) or self._scorer.has_read_ahead
        return has_sent or has_scored or has_taken or has_judged

    def waiting_for(self) -> str | None:
        """What it waits for, in words that begin with the cause: room, scores or data. The first
        rank alone is owed anything.
        """
        if self.follows:
            return None
        if self._assembler.whole:
            return f"room: in channel {self._sink.name}, which the trainer empties"
        if self._scorer.pending:
            what = f"{self._scorer.pending} by {self._scorer.name}"
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
        return None if self.replies is None else self.replies.threshold

    @property
    def _source(self) -> str:
        """Who sends what is scored, for people."""
        return "generator" if self.replies is None else "victim"

    def teardown(self) -> None:
        """Take part in what was begun, then close what scores, if there is anything."""
        if hasattr(self, "_scorer"):
            self._ranks.part()
            self._scorer.close()
        for judge in self._judges():
            judge.close()

    def offloadable(self) -> Iterable[torch.Tensor]:
        """The tensors that may leave the device while others use it."""
        yield from self._scorer.tensors()
        for judge in self._judges():
            yield from judge.tensors()

    def has_state(self) -> bool:
        """Whether checkpoints hold a part of it: of ranks that score each by itself, none."""
        return self.first_takes

    def state_dict(self) -> State:
        """Return what the first rank's scorer remembers."""
        return {} if self.follows else self._scorer.state_dict()

    def load_state_dict(self, parts: Iterable[Mapping]) -> None:
        """Remember what the first rank did."""
        if self.follows:
            return
        for part in parts:
            self._scorer.load_state_dict(part)

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

    def _hear(self) -> None:
        """Tell the scorer what completions have grown by, where that is sent."""
        if not self.reads_ahead:
            return
        for stretch in self.inputs.of(Stretch).take(MAX_STRETCHES):
            self._scorer.hear(stretch, self.prompts[stretch.ticket].prompt_ids)

    def _take(self) -> bool:
        """Hand on what came. Evaluations need no room, and what scores takes them first: a row of
        metrics waits for them, and there are never more than the generator may have asked for. True
        if there was any.
        """
        with_answers = self.replies is not None
        evaluations = self.inputs.of(self._evaluation).take()
        for record in evaluations:
            answer = record.attack if with_answers else record
            key = self._submit(record, self.eval_prompts(answer.prompt_index))
            if answer.token_ids.numel():  # else no version sampled it: its evaluation was given up
                version = int(answer.policy_versions[0])
                place = (answer.prompt_index, answer.greedy, answer.sample_index)
                of = set_of(self.eval_sets, answer.prompt_index)
                self._scorer.release(self._evaluations[of].add(version, place, key))
                self._keep(version, answer)
        # While groups wait for room no more are made; the completions stay in their channel.
        room = 0 if self._assembler.whole else self._room()
        completions = self.inputs.of(self._completion).take(room)
        for record in completions:
            completion = record.attack if with_answers else record
            key = self._submit(record, self.prompts[completion.ticket])
            keys = self._groups.add(completion.ticket, completion.sample_index, key)
            self._scorer.release(keys)
        return bool(evaluations or completions)

    def _note(self, completion: Scorable, outcome: Outcome) -> None:
        """Note what became of a completion, where that is written."""
        if self._is_sample(completion):
            self._samples.score(completion, outcome)
        if isinstance(completion, Completion) and outcome.kind == "score":
            part = part_of(self.prompts[completion.ticket])
            if part is not None:
                self.metrics.add_mean(f"reward/part/{part}/mean", outcome.value)

    def _is_sample(self, completion: Scorable) -> bool:
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
        return max(0, MAX_PENDING - self._scorer.pending)

    def _submit(self, record: Scorable | Replies, prompt: Prompt) -> int | None:
        """Hand a completion on. Its key; None if it is not to be scored."""
        completion = record.attack if isinstance(record, Replies) else record
        if completion.policy_versions.numel():
            self.note_version(int(completion.policy_versions[-1]))
        item = item_of(completion, prompt, self.decode, self.decode_raw)
        if isinstance(record, Replies):
            item = self.replies.with_replies(item, record)
        if self._is_sample(completion):
            self._samples.keep(completion, item)
        if completion.finish_reason == "aborted":
            if item.sample is not None:
                self._scorer.forget(*item.sample)
            outcome = Outcome.abstain("the completion was aborted")
            self._note(completion, outcome)
            self._assembler.settle(completion, outcome)
            return None
        key = next(self._keys)
        self._submitted[key] = completion
        self._scorer.submit(key, item)
        return key
