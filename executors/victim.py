"""Victim: takes attacks, and samples the replies of a model with fixed weights.

    loop step    consumes                     waits for                   unblocked by
    take         completions, evaluations     room in replied,            the reward
                                              eval_replied
    begin        what has come                the slots of its engine     -
    decode       one chunk of tokens          -                           -

A reply is a function of (seed, ticket, sample_index, number of the reply) and the attack. A victim
is never trained, and no weights are sent to it. It keeps no state, because on resume attacks that
were not trained on come again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from llamarl.evaluation.ask import GREEDY, SAMPLED
from llamarl.executor import Executor
from llamarl.inference.protocol import GenerationEngine
from llamarl.inference.sampler import SamplingParams
from llamarl.scoring.assembly import Batches, Scorable
from llamarl.scoring.scorer import Queue
from llamarl.types import Completion, EvalCompletion, EvalReplied, OutcomeKind, Replied

# The first of the engine's streams for replies. The streams below it belong to the attacker's
# samples and to win rates, and replies must not share their random numbers.
FIRST_STREAM = 16
_KINDS = 3  # an attack of a ticket, a greedy one of an evaluation, a sampled one
# Most attacks that wait here. More wait in the channel, so that the generator slows down.
MAX_PENDING = 1024

Place = tuple[int, int]  # (stream, ticket) of an attack in the engine


@dataclass(slots=True)
class _Asked:
    """An attack that the victim is replying to."""

    attack: Scorable
    prompt_ids: torch.Tensor  # [P] int64
    replies: list[Completion] = field(default_factory=list)


@dataclass(kw_only=True, eq=False, repr=False)
class Victim(Executor):
    """Samples sampling.n replies to each attack.

    consumes  Completion, EvalCompletion: attacks; all those of a ticket come to one rank
    produces  Replied, EvalReplied: each attack with its replies, as soon as it has all

    build_engine: given the device, builds the engine with its weights.
    decode: token ids of an attack -> its text.
    read: an attack's text -> the victim's prompt, token ids [P]. If read raises ValueError, or the
    prompt has more than max_prompt_tokens, the attack's outcome is an error. An attack without
    text, or one that was aborted, is an abstention.
    reproducible: reply to the attacks of one ticket, or of one evaluation, together and to no
    others, so that batches do not depend on timing; otherwise reply to as many as there is room
    for.
    """

    name = "victim"
    consumes = (Completion, EvalCompletion)
    produces = (Replied, EvalReplied)

    build_engine: Callable[[torch.device], GenerationEngine]
    decode: Callable[[list[int]], str]
    read: Callable[[str], list[int]]
    sampling: SamplingParams
    max_prompt_tokens: int
    chunk_tokens: int
    group_size: int
    num_eval_attacks: int
    reproducible: bool

    def __post_init__(self):
        # If replies must be reproducible: the attacks so far of each ticket, or of each version's
        # evaluation.
        self._groups: Batches[Scorable] = Batches(self.group_size)
        self._evaluations: Batches[Scorable] = Batches(self.num_eval_attacks)
        self._ready: Queue[list[Scorable]] = Queue()  # batches of attacks that get replies together
        self._asked: dict[Place, _Asked] = {}

    def setup(self) -> None:
        """Load the model. ValueError or OSError if it cannot be."""
        self.engine = self.build_engine(self.group.device)

    def step(self) -> bool:
        """Take what came, and sample a chunk of the replies. True if there was any work."""
        if not all(output.has_room() for output in self.outputs):
            return False
        has_taken = self._take()
        has_begun = self._begin()
        return self._decode() or has_begun or has_taken

    def waiting_for(self) -> str | None:
        """Return what it waits for, in words that begin with the cause: room or data."""
        for output in self.outputs:
            if not output.has_room():
                return f"room: in channel {output.name}, which the reward empties"
        for noun, batches in (("ticket", self._groups), ("version", self._evaluations)):
            if batches.begun:
                first = min(batches.begun)
                what = f"{noun} {first} lacks {batches.missing(first)} attacks"
                return f"data: {what} from the generator"
        return None

    def offloadable(self) -> Iterable[torch.Tensor]:
        """Return the tensors that may leave the device while others use it."""
        return self.engine.offloadable()

    def teardown(self) -> None:
        """Release the engine, if there is one."""
        if hasattr(self, "engine"):
            self.engine.close()

    def _take(self) -> bool:
        """Take in what came. Evaluations need no room, because a row of metrics waits for them;
        there are never more than the held-out prompts ask for.
        """
        room = max(0, MAX_PENDING - len(self._asked) - sum(map(len, self._ready)))
        evaluations = self.inputs.of(EvalCompletion).take()
        completions = self.inputs.of(Completion).take(room)
        attacks: list[Scorable] = [*evaluations, *completions]
        for attack in attacks:
            if attack.policy_versions.numel():
                self.note_version(int(attack.policy_versions[-1]))
            batch = self._batch_with(attack) if self.reproducible else [attack]
            if batch:
                self._ready.put(batch, is_held_out=isinstance(attack, EvalCompletion))
        return bool(attacks)

    def _batch_with(self, attack: Scorable) -> list[Scorable]:
        """Return all attacks of a ticket, or of an evaluation, in order, if this one is the last to
        come.
        """
        if isinstance(attack, Completion):
            return self._groups.add(attack.ticket, attack.sample_index, attack)
        if not attack.token_ids.numel():  # its evaluation was given up
            return [attack]
        place = (attack.prompt_index, attack.greedy, attack.sample_index)
        return self._evaluations.add(int(attack.policy_versions[0]), place, attack)

    def _begin(self) -> bool:
        """Hand batches to the engine, evaluations first: one at a time, or as many as keep its
        slots busy.
        """
        has_begun = False
        while self._ready and self._may_begin(self._ready.first):
            for attack in self._ready.take():
                self._ask(attack)
            has_begun = True
        return has_begun

    def _may_begin(self, batch: list[Scorable]) -> bool:
        if self.reproducible:
            return not self._asked
        # An attack of an earlier version on the same held-out prompt may still have its place.
        is_taken = any(place_of(attack) in self._asked for attack in batch)
        return self.engine.num_waiting < self.engine.free_slots and not is_taken

    def _ask(self, attack: Scorable) -> None:
        """Submit an attack to the engine, or send its outcome if the victim cannot read it."""
        if attack.finish_reason == "aborted":
            self._send_unasked(attack, "abstain", "the attack was aborted")
            return
        text = self.decode(attack.token_ids.tolist())
        if not text.strip():
            self._send_unasked(attack, "abstain", "the attack is empty")
            return
        try:
            prompt_ids = torch.tensor(self.read(text), dtype=torch.int64)
        except ValueError as error:
            self._send_unasked(attack, "error", f"the attack cannot be read: {error}")
            return
        most = self.max_prompt_tokens
        if not 0 < prompt_ids.numel() <= most:
            what = (
                f"{prompt_ids.numel()} tokens of the victim's tokenizer, and the victim reads 1 "
                f"to {most}"
            )
            self._send_unasked(attack, "error", f"the attack has {what} (victim.max_prompt_tokens)")
            return
        place = place_of(attack)
        self._asked[place] = _Asked(attack, prompt_ids)
        stream, ticket = place
        self.engine.submit(ticket, prompt_ids, self.sampling, stream=stream)

    def _decode(self) -> bool:
        """Sample a chunk, and send the attacks that have all their replies."""
        if not self._asked:
            return False
        self.claim_device()
        self.engine.step(self.chunk_tokens)
        for stream, reply in self.engine.pop_finished():
            place = (stream, reply.ticket)
            asked = self._asked[place]
            asked.replies.append(reply)
            if len(asked.replies) == self.sampling.n:
                del self._asked[place]
                self._send(replied_of(asked))
        return True

    def _send_unasked(self, attack: Scorable, outcome: OutcomeKind, reason: str) -> None:
        nothing = torch.empty(0, dtype=torch.int64)
        replied = record_of(attack)(
            attack=attack,
            prompt_ids=nothing,
            lengths=nothing,
            token_ids=nothing,
            has_ended=(),
            outcome=outcome,
            reason=reason,
        )
        self._send(replied)

    def _send(self, replied: Replied | EvalReplied) -> None:
        if isinstance(replied, Replied):
            self.outputs.of(Replied).put(replied)
        else:
            self.outputs.of(EvalReplied).put(replied)


def place_of(attack: Scorable) -> Place:
    """Return an attack's place in the engine. No two tickets of a run share random numbers."""
    first = FIRST_STREAM + _KINDS * attack.sample_index
    if isinstance(attack, Completion):
        return first, attack.ticket
    return first + (GREEDY if attack.greedy else SAMPLED), attack.prompt_index


def record_of(attack: Scorable) -> type[Replied] | type[EvalReplied]:
    """Return the type of record in which an attack's replies are sent."""
    return Replied if isinstance(attack, Completion) else EvalReplied


def replied_of(asked: _Asked) -> Replied | EvalReplied:
    """Return an attack with all its replies, in the order of their numbers."""
    replies = sorted(asked.replies, key=lambda reply: reply.sample_index)
    lengths = torch.tensor([reply.token_ids.numel() for reply in replies])
    attack = asked.attack
    if isinstance(attack, Completion):
        columns = {**attack.columns, "victim/tokens": int(lengths.sum())}
        attack = dataclasses.replace(attack, columns=columns)
    return record_of(attack)(
        attack=attack,
        prompt_ids=asked.prompt_ids,
        lengths=lengths,
        token_ids=torch.cat([reply.token_ids for reply in replies]),
        has_ended=tuple(reply.finish_reason == "stop" for reply in replies),
        outcome="score",
        reason="",
    )
