"""Dialogues: each completion of an environment's task, from its prompt to its end.

    begin --> environment --context--> sampled turn --> environment --context--> ... --> Over
               poll(): GoOn                hear()          poll(): GoOn                 poll()

The generator reports each sampled turn by `hear`, and `poll` says what to sample next. The state of
a dialogue is its tokens alone. A checkpoint holds these; `restore` plays the environment again with
their turns, and compares its words with their context.

    ended by        reason          when
    the policy      completed       a turn that calls no tool; of a dialogue: it says it is done
    a tool          tool_stopped    the environment's `done` is True behind a call
    limits          turns           max_turns turns were taken
                    tokens          a turn has max_turn_tokens, or the dialogue max_new_tokens
                    context         what the environment said does not fit into max_new_tokens
    an unreadable   parse_error     a call that cannot be read
    failures        timeout, lost   pool.py, a text that the tokenizer or the chat template raises
                                    about, or others of its group begin with other words; such a
                                    dialogue is not trained on
    an order        aborted         as for any completion

With `reproducible` nothing is polled before all calls under way are answered, and what comes then
is in the order of the environments and their dialogues: what is batched together does not depend
on who was fast.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, groupby
from typing import Literal

import torch
from torch import Tensor

from llamarl.environments.calls import ToolCall, Unreadable
from llamarl.environments.pool import EnvironmentPool, Failure, wait_for_any
from llamarl.environments.worker import Answer
from llamarl.inference.cache import Key
from llamarl.inference.sampler import SamplingParams
from llamarl.tasks.environment import GAME, TurnTokens
from llamarl.tasks.environment_class import ChatTurn, Schema
from llamarl.tasks.parts import own_meta, section_of
from llamarl.types import Completion, Ending, EndReason, FinishReason, Prompt, begin_of_turn
from llamarl.workers.guard import message_of, short

SHOWN_CHARACTERS = 60  # of a text, in messages
KEPT_GROUPS = 256  # that were begun, and have no open dialogue now
_FINISH: dict[EndReason, FinishReason] = {
    "completed": "stop",
    "tool_stopped": "stop",
    "parse_error": "stop",
    "aborted": "aborted",
}  # "length" for all others


@dataclass(frozen=True, slots=True)
class GoOn:
    """The engine is to sample the next turn of a dialogue, behind this context."""

    key: Key
    context: list[int]
    most_tokens: int  # that the completion may have with that turn
    is_anew: bool  # whether the model reads this context alone, in the place of all before it


@dataclass(frozen=True, slots=True)
class Over:
    """A dialogue has ended."""

    key: Key
    completion: Completion


@dataclass(frozen=True)
class Environment:
    """What plays the prompts of one section of the configuration, and how dialogues with it go."""

    pool: EnvironmentPool
    turns: TurnTokens  # makes tokens of what is said
    read_calls: Callable[[str], list[ToolCall]]  # of a turn's text
    prompt_key: str
    is_own: bool  # it makes its own prompts
    is_dialogue: bool  # it has the contract of dialogues, not that of tools
    max_turns: int
    max_turn_tokens: int | None  # None: what max_new_tokens leaves

    @cached_property
    def first(self) -> list[int]:
        """The tokens that all of its own prompts begin with."""
        return self.turns.first()

    @cached_property
    def tail(self) -> list[int]:
        """The tokens between a row's prompt and the policy's turn."""
        return self.turns.prompt("a")[1]

    @cached_property
    def rewrites(self) -> bool:
        """Whether the chat template changes a history that it wrote before."""
        return bool(self.turns.appends())


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring tokens of a completion that are all sampled, or all context."""

    is_context: bool
    token_ids: list[int]


@dataclass(slots=True, eq=False)
class _Group:
    """The dialogues of a prompt, which all begin with the same words. One that has ended before
    another begins is compared with it all the same, but its own completion is gone by then.
    """

    num_open: int = 0
    num_begun: int = 0
    said: list[str] | None = None  # by the first that has begun
    error: str = ""  # why none of them may be trained on

    def compare(self, said: list[str], environment: str) -> None:
        """Compare the first words of a dialogue with the others'; note an error if they differ."""
        if self.said is None:
            self.said = said
        if self.error or said == self.said:
            return
        one, other = ("".join(texts)[:SHOWN_CHARACTERS] for texts in (self.said, said))
        self.error = short(
            f"{environment}: dialogues of one prompt begin with different words, {one!r} and "
            f"{other!r}: it draws from a generator of its own; draw from random, from numpy.random "
            "or by the argument seed of reset(), which are the same for all of a group"
        )


@dataclass(slots=True, eq=False)
class _Dialogue:
    """A dialogue that has not ended."""

    key: Key
    number: int  # the pool's key of its game
    environment: Environment
    prompt: Prompt
    params: SamplingParams
    group: _Group
    completion: Completion  # what it has so far; behind the last GoOn also what is sampled now
    state: Literal["begins", "samples", "acts", "ends"] = "begins"
    sampled: list[int] = field(default_factory=list)  # in all turns
    turn_begin: int = 0  # of the newest turn, in `sampled`
    num_turns: int = 0
    reward: float | None = None
    turn_rewards: list[float] = field(default_factory=list)
    reason: EndReason = "completed"
    said: str = ""  # by the policy or the environment, the last
    # What was said so far, for a template that rewrites history; nothing is kept for any other.
    history: list[ChatTurn] = field(default_factory=list)
    tools: list[Schema] = field(default_factory=list)
    # What of a restored dialogue's tokens must still be played again; None: it is not restored, or
    # nothing is left.
    runs: deque[_Run] | None = None

    def take(self, turn: list[int]) -> None:
        """Note the tokens of a turn that was sampled."""
        self.turn_begin = len(self.sampled)
        self.sampled += turn


@dataclass(eq=False)
class Dialogues:
    """Keeps the dialogues of one replica of the generator, with one or several environments.

    environments: by the section of the configuration that sets them. decode: gives the text of
    token ids. seed: the run's.
    """

    environments: Mapping[str, Environment]
    decode: Callable[[list[int]], str]
    seed: int
    reproducible: bool

    def __post_init__(self):
        self._pools = [environment.pool for environment in self.environments.values()]
        self._numbers = count()
        self._open: dict[Key, _Dialogue] = {}
        self._keys: dict[int, Key] = {}  # by number
        self._groups: dict[tuple[int, int], _Group] = {}  # by stream and ticket
        self._moves: list[GoOn] = []
        self._over: list[Over] = []
        self._answers: list[tuple[int, int, Answer | Failure]] = []  # with the environment's place

    @property
    def num_open(self) -> int:
        """How many dialogues have not ended."""
        return len(self._open)

    @property
    def num_opening(self) -> int:
        """How many dialogues wait for the first words of their environment."""
        return sum(dialogue.state == "begins" for dialogue in self._open.values())

    @property
    def num_acting(self) -> int:
        """How many environments are at work."""
        return sum(pool.pending for pool in self._pools)

    def start(self) -> None:
        """Block until a worker of each has imported its environment. ValueError says what is wrong
        with it.
        """
        for pool in self._pools:
            pool.start()

    def wait(self, timeout_s: float) -> None:
        """Block until an environment has answered, at most so long."""
        wait_for_any(self._pools, timeout_s)

    def begin(self, key: Key, prompt: Prompt, params: SamplingParams) -> Completion:
        """Begin a dialogue, and return its completion, which has no token yet.
        params.max_new_tokens: the most tokens that it may come to, context included.
        """
        return self._begin(key, prompt, params, _begun(key, prompt)).completion

    def restore(
        self, key: Key, prompt: Prompt, params: SamplingParams, completion: Completion
    ) -> None:
        """Go on with a dialogue from its tokens: its environment is played again."""
        dialogue = self._begin(key, prompt, params, completion)
        dialogue.runs = runs_of(completion.token_ids, completion.loss_mask)

    def hear(self, key: Key, completion: Completion) -> None:
        """Note that a dialogue's turn has ended. completion: all that it has."""
        dialogue = self._open.get(key)
        if dialogue is None:
            return  # it was aborted
        dialogue.completion = completion
        turn = completion.last_turn.tolist()
        dialogue.take(turn)
        if completion.finish_reason == "aborted":
            self._finish(dialogue, "aborted")
        elif dialogue.group.error:
            self._finish(dialogue, "lost", error=dialogue.group.error)
        elif completion.finish_reason == "length":
            dialogue.num_turns += 1
            self._end(dialogue, "tokens")
        else:
            with self._contained(dialogue):
                self._act(dialogue, turn)

    def abort(self, ticket: int | None, stream: int | None = None) -> None:
        """End the dialogues of a ticket and a stream (None: of any) that no engine is sampling."""
        not_begun = {move.key for move in self._moves}
        for key, dialogue in list(self._open.items()):
            is_of = stream in (None, key[0]) and ticket in (None, key[1])
            is_sampled = dialogue.state == "samples" and key not in not_begun
            if is_of and not is_sampled:
                self._finish(dialogue, "aborted")

    def poll(self) -> tuple[list[GoOn], list[Over]]:
        """Return what the engine is to sample next, and what has ended since the last call."""
        self.take_answers()
        if self.reproducible and self.num_acting:
            return [], self.pop_over()
        return self.pop_moves(), self.pop_over()

    def take_answers(self) -> None:
        """Take in what environments have answered. With `reproducible` an answer waits until all
        calls under way are answered.
        """
        for place, pool in enumerate(self._pools):
            self._answers += [(place, *answer) for answer in pool.poll()]
        if self.reproducible and self.num_acting:
            return
        # The order of environments, then of dialogues, decides what is batched together.
        self._answers.sort(key=lambda answer: answer[:2])
        answers, self._answers = self._answers, []
        for _, number, answer in answers:
            key = self._keys.get(number)
            if key is not None:
                dialogue = self._open[key]
                with self._contained(dialogue):
                    self._take(dialogue, answer)

    def pop_moves(self) -> list[GoOn]:
        """Return what the engine is to sample next."""
        moves, self._moves = self._moves, []
        return moves

    def pop_over(self) -> list[Over]:
        """Return what has ended since the last call."""
        over, self._over = self._over, []
        return over

    def close(self) -> None:
        """End all environments."""
        for pool in self._pools:
            pool.close()

    # --- One dialogue ---

    @contextmanager
    def _contained(self, dialogue: _Dialogue) -> Iterator[None]:
        """End a dialogue alone, as lost, whatever is raised about its texts: by the tokenizer, the
        chat template or what reads calls. Whoever wrote them must not end the run.
        """
        try:
            yield
        except Exception as error:
            if self._open.get(dialogue.key) is not dialogue:
                raise  # it has ended already
            what = f"{type(error).__name__}: {message_of(error)}"
            said = dialogue.said[:SHOWN_CHARACTERS]
            where = f"{dialogue.environment.pool.name}, ticket {dialogue.key[1]}, behind {said!r}"
            self._finish(dialogue, "lost", error=short(f"{where}: {what}"))

    def _begin(
        self, key: Key, prompt: Prompt, params: SamplingParams, completion: Completion
    ) -> _Dialogue:
        number = next(self._numbers)
        environment = self.environments[section_of(prompt)]
        group = self._groups.setdefault(key[:2], _Group())
        group.num_open += 1
        group.num_begun += 1
        self._forget_groups()
        dialogue = _Dialogue(
            key=key,
            number=number,
            environment=environment,
            prompt=prompt,
            params=params,
            group=group,
            completion=completion,
        )
        if environment.is_dialogue:
            dialogue.reward = 0.0  # turns add to it, and without any it is a sum of nothing
        self._open[key] = dialogue
        self._keys[number] = key
        row = row_of(prompt, environment.prompt_key)
        environment.pool.begin(number, row, seed_of(self.seed, prompt))
        return dialogue

    def _forget_groups(self) -> None:
        """Forget the oldest groups without an open dialogue: not all begin all of theirs."""
        idle = [name for name, group in self._groups.items() if not group.num_open]
        for name in idle[: max(0, len(idle) - KEPT_GROUPS)]:
            del self._groups[name]

    def _act(self, dialogue: _Dialogue, turn: list[int]) -> None:
        """Put a turn to the environment, or end with it."""
        dialogue.num_turns += 1
        text = dialogue.said = self.decode(turn)
        try:
            calls = dialogue.environment.read_calls(text)
        except Unreadable:
            self._end(dialogue, "parse_error")
            return
        if not (calls or dialogue.environment.is_dialogue):
            self._end(dialogue, "completed")
            return
        said: ChatTurn = {"role": "assistant", "content": text}
        if calls:
            said["tool_calls"] = calls
        dialogue.state = "acts"
        dialogue.environment.pool.step(dialogue.number, said)

    def _take(self, dialogue: _Dialogue, answer: Answer | Failure) -> None:
        """Take the environment's answer in."""
        if isinstance(answer, Failure):
            self._finish(dialogue, answer.kind, error=answer.reason)
            return
        dialogue.said = "".join(turn["content"] for turn in answer.messages)
        if dialogue.state == "begins":
            said = [turn["content"] for turn in answer.messages]
            dialogue.group.compare(said, dialogue.environment.pool.name)
        if dialogue.group.error:
            self._finish(dialogue, "lost", error=dialogue.group.error)
            return
        if answer.reward is not None:
            dialogue.reward = answer.reward + (dialogue.reward or 0.0)
        if dialogue.state == "acts":
            missing = dialogue.num_turns - 1 - len(dialogue.turn_rewards)
            dialogue.turn_rewards += [0.0] * missing + [answer.reward or 0.0]
        if dialogue.state == "ends":
            self._finish(dialogue, dialogue.reason)
        elif dialogue.state == "begins":
            self._open_with(dialogue, answer)
        elif dialogue.runs and (answer.done or answer.stopped):
            self._finish(dialogue, "lost", error="begun again, the environment ends earlier")
        elif answer.done:
            self._end(dialogue, "completed")
        elif answer.stopped:
            self._end(dialogue, "tool_stopped")
        elif dialogue.num_turns >= dialogue.environment.max_turns:
            self._end(dialogue, "turns")
        else:
            context, is_anew = self._context(dialogue, answer.messages)
            self._go_on(dialogue, context, is_anew=is_anew)

    def _context(self, dialogue: _Dialogue, said: list[ChatTurn]) -> tuple[list[int], bool]:
        """Return (context, is_anew): the context after the newest turn, and whether it replaces the
        whole dialogue, because the template has rewritten earlier turns.
        """
        turns = dialogue.environment.turns
        if dialogue.environment.rewrites:
            before = dialogue.history
            newest = self.decode(dialogue.sampled[dialogue.turn_begin :])
            turn = {"role": "assistant", "content": newest}
            dialogue.history = [*before, turn, *said]
            if not turns.goes_on(before, turn, said, dialogue.tools):
                return turns.whole(dialogue.history, dialogue.tools), True
        last = dialogue.sampled[-1]
        ended_by = last if last in dialogue.params.stop_token_ids else None
        return turns.context(said, ended_by=ended_by), False

    def _open_with(self, dialogue: _Dialogue, answer: Answer) -> None:
        """Make the context before the first turn."""
        environment = dialogue.environment
        turns = environment.turns
        dialogue.tools = answer.tools or turns.tools
        if environment.rewrites:
            dialogue.history = answer.messages
            if not environment.is_own:
                dialogue.history = _first_turns(dialogue.prompt, answer.messages)
        if environment.is_own:
            context = turns.own_opening(answer.messages, dialogue.tools, environment.first)
        else:
            context = turns.opening(answer.messages, environment.tail)
        self._go_on(dialogue, context)

    def _go_on(self, dialogue: _Dialogue, context: list[int], *, is_anew: bool = False) -> None:
        """Have the next turn sampled behind a context, or play on what is restored."""
        if dialogue.runs is not None:
            if not self._replay(dialogue, context):
                return
            context = [] if dialogue.runs is None else context
            dialogue.runs = None
        have = dialogue.completion.token_ids.numel() + len(context)
        most = dialogue.params.max_new_tokens
        begin = have
        if not context:
            begin = begin_of_turn(dialogue.completion.loss_mask)
        if dialogue.environment.max_turn_tokens is not None:
            most = min(most, begin + dialogue.environment.max_turn_tokens)
        if have >= most and not dialogue.num_turns:
            # It fails alone: the others of its group may begin with less.
            why = f"it begins with {have} tokens, and max_new_tokens leaves no room for a turn"
            self._finish(dialogue, "context", error=why)
            return
        if have >= most:
            self._end(dialogue, "context" if begin == have else "tokens")
            return
        dialogue.state = "samples"
        self._moves.append(GoOn(dialogue.key, context, most, is_anew))

    def _replay(self, dialogue: _Dialogue, context: list[int]) -> bool:
        """Compare the environment's words with the tokens of a restored dialogue, and play its next
        turn. Return True if the next turn is to be sampled: after the context if `runs` stays, as
        the tokens end before it; otherwise after the tokens.
        """
        runs = dialogue.runs
        assert runs is not None, "asked of restored dialogues"
        if not runs:
            return True
        was_said = runs.popleft().token_ids if runs[0].is_context else []
        if was_said != context:
            why = "begun again, it does not say what it said before"
            self._finish(dialogue, "lost", error=f"the environment has no saved state: {why}")
            return False
        if not runs:
            dialogue.runs = None
            return True
        turn = runs.popleft().token_ids
        params = dialogue.params
        ends = turn[-1] in params.stop_token_ids
        if not ends and params.stop_strings:
            text = self.decode(turn)
            ends = any(string in text for string in params.stop_strings)
        if runs or ends:
            dialogue.take(turn)
            self._act(dialogue, turn)
            return False
        dialogue.runs = None
        return True

    def _end(self, dialogue: _Dialogue, reason: EndReason) -> None:
        """Ask the environment for its reward, the last that is asked of it."""
        dialogue.reason = reason
        dialogue.state = "ends"
        dialogue.environment.pool.end(dialogue.number)

    def _finish(self, dialogue: _Dialogue, reason: EndReason, *, error: str = "") -> None:
        """Let go of a dialogue, which is over."""
        dialogue.environment.pool.forget(dialogue.number)
        del self._open[dialogue.key]
        del self._keys[dialogue.number]
        group = dialogue.group
        group.num_open -= 1
        if not group.num_open and group.num_begun >= dialogue.params.n:
            self._groups.pop(dialogue.key[:2], None)
        self._moves = [move for move in self._moves if move.key != dialogue.key]
        ending = Ending(
            reason=reason,
            num_turns=dialogue.num_turns,
            reward=dialogue.reward,
            error=error,
            turn_rewards=tuple(dialogue.turn_rewards) if any(dialogue.turn_rewards) else (),
        )
        completion = dialogue.completion
        mismatches = 0  # tokens that differ from those that were sampled
        if dialogue.runs is None:
            kept = completion.token_ids[completion.loss_mask].tolist()
            mismatches = abs(len(kept) - len(dialogue.sampled))
            mismatches += sum(one != other for one, other in zip(kept, dialogue.sampled))
        columns = {
            f"dialogues/{reason}": 1,
            "dialogues/turns": dialogue.num_turns,
            "tokens/reencode_mismatch": mismatches,
        }
        finish_reason = _FINISH.get(reason, "length")
        completion = replace(
            completion, finish_reason=finish_reason, ending=ending, columns=columns
        )
        self._over.append(Over(dialogue.key, completion))


def runs_of(token_ids: Tensor, loss_mask: Tensor) -> deque[_Run]:
    """Return a completion's tokens [L] as runs, sampled ones and context in turn."""
    runs: deque[_Run] = deque()
    marked = zip(loss_mask.tolist(), token_ids.tolist())
    for is_sampled, tokens in groupby(marked, key=lambda one: one[0]):
        runs.append(_Run(not is_sampled, [token for _, token in tokens]))
    return runs


def row_of(prompt: Prompt, prompt_key: str) -> dict[str, object]:
    """Return the row of a prompt, as `reset` gets it; {} for one that has none."""
    if GAME in prompt.meta:
        return {}
    asked: object = prompt.text
    if prompt.messages:
        asked = [message.to_dict() for message in prompt.messages]
    return {**own_meta(prompt), prompt_key: asked}


def seed_of(seed: int, prompt: Prompt) -> str:
    """Return the seed of a prompt's games: the same for all its completions, in every run of a
    seed.
    """
    values = json.dumps([seed, prompt.text, prompt.meta], sort_keys=True, default=str)
    return hashlib.blake2b(values.encode(), digest_size=16).hexdigest()


def _first_turns(prompt: Prompt, said: list[ChatTurn]) -> list[ChatTurn]:
    """Return the turns before the policy's first: what the environment says goes on with the
    prompt's last.
    """
    turns: list[ChatTurn] = [dict(message.to_dict()) for message in prompt.messages]
    if not turns:
        turns = [{"role": "user", "content": prompt.text}]
    turns[-1]["content"] += "".join(turn["content"] for turn in said)
    return turns


def _begun(key: Key, prompt: Prompt) -> Completion:
    """Return a completion without a token."""
    none = torch.zeros(0, dtype=torch.int64)
    return Completion(
        ticket=key[1],
        sample_index=key[2],
        prompt_ids=prompt.prompt_ids,
        token_ids=none,
        generator_logprobs=torch.zeros(0),
        policy_versions=none,
        finish_reason="length",
    )
