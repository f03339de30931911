"""The two contracts of an environment, and the worker that plays them.

    tools       reset(**row) -> str | None     a game over a row, or one of its own: what it returns
                                               follows the row's prompt
                public methods                 tools, with types and docstrings; what one returns,
                                               or raises, is its answer
                get_reward() -> float          at the end
                done                           optional, True: a tool has ended it

    dialogue    init() -> messages, tools      the first messages; tools: their schemas, or []
                step(message)                  of the policy's message, which is {"role", "content"}
                  -> messages, done, rewards   and, if it calls tools, "tool_calls"
                close()                        optional

The first is TRL's `environment_factory`. The class, or a function that returns an object of it, is
named by its import path.

EnvironmentPool starts the worker, a process in which many environments are played, call by call;
llamarl/workers/guard.py says what it is below and what it may use.

    commands [number, key, do, what, limit_s], a call each
             do: "begin" with [row, seed], "step" with a turn, "end", or "forget", unanswered
    messages ["ready"] or ["failed", why], once
             [number, ["answer", values] or ["error", reason], finished_at], in the calls' order

An error is of that environment alone, and ends it. Processes that a call leaves running are killed
before the call is answered. Those that `begin` started belong to the environment and are killed at
its end. Those that the module started while it was imported are killed at the worker's end.
Standard library only.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamarl.tasks.environment_class import (
    ChatTurn,
    Schema,
    arguments_of,
    import_environment,
    is_dialogue,
    tools_of,
)
from llamarl.workers import guard
from llamarl.workers.guard import children, describe_in_worker, kill_children, message_of, short

MAX_CHARACTERS = 1 << 18  # of all messages of an answer


@dataclass(slots=True)
class Answer:
    """The answer of an environment to its beginning, or to a turn."""

    messages: list[ChatTurn] = field(default_factory=list)
    tools: list[Schema] = field(default_factory=list)  # that a dialogue has, at its beginning
    done: bool = False
    stopped: bool = False  # by a tool
    reward: float | None = None  # of this turn; None: it gave none

    def cut(self) -> None:
        """Cut messages that are together longer than MAX_CHARACTERS, and say so in them. Such an
        answer ends the dialogue for lack of room, and the dialogue is trained on.
        """
        if sum(len(turn["content"]) for turn in self.messages) <= MAX_CHARACTERS:
            return
        most = MAX_CHARACTERS // len(self.messages)
        for turn in self.messages:
            content = turn["content"]
            if len(content) > most:
                turn["content"] = f"{content[:most]}... (cut, of {len(content)} characters)"

    @property
    def values(self) -> list:
        """The answer as JSON values, for a pipe."""
        return [self.messages, self.tools, self.done, self.stopped, self.reward]


def answer_from(values: list) -> Answer | None:
    """Return an answer from its JSON values; None for other values, because the environment's
    process may write anything.
    """
    if len(values) != 5:
        return None
    messages, tools, done, stopped, reward = values
    if not (isinstance(messages, list) and isinstance(tools, list)):
        return None
    are_turns = all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in messages
    )
    is_reward = reward is None or isinstance(reward, float)
    if not (are_turns and isinstance(done, bool) and isinstance(stopped, bool) and is_reward):
        return None
    return Answer(messages=messages, tools=tools, done=done, stopped=stopped, reward=reward)


class Played:
    """An environment that is played in this process. seed: of the numbers that it draws from
    `random` and from numpy's global generator, which other environments use in between.

    Methods may be async. All run on one event loop of the process, so that what an environment
    opens in one call is there in the next.
    """

    _loop: Any = None

    def __init__(self, factory: Callable, seed: str):
        outside = _random_states()
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(random.getrandbits(32))
        self._seed = random.getrandbits(31)
        self._inside = _random_states()
        _set_random_states(outside)
        self._factory = factory
        self._made: Any = None
        self._tools: dict[str, Callable] = {}

    def begin(self, row: Mapping[str, object]) -> Answer:
        """Make the environment and begin the game."""
        return self._at_random(self._begin, row)

    def step(self, turn: ChatTurn) -> Answer:
        """Give it the policy's turn: {"role", "content"}, and "tool_calls" if it calls tools."""
        return self._at_random(self._step, turn)

    def end(self) -> Answer:
        """Ask for the reward of the whole, if there is one, and end it."""
        return self._at_random(self._end)

    def _begin(self, row: Mapping[str, object]) -> Answer:
        self._made = self._factory()
        if is_dialogue(self._made):
            messages, tools = self._result(self._made.init())
            return Answer(messages=turns_of(messages, "init()"), tools=list(tools or []))
        self._tools = tools_of(self._made)
        given = {**row, "seed": row.get("seed", self._seed)}
        said = self._result(self._made.reset(**_accepted(self._made.reset, given)))
        if said is None:
            return Answer()
        if not isinstance(said, str):
            raise TypeError(f"reset() returned {type(said).__name__}; need a text, or None")
        return Answer(messages=[{"role": "user", "content": said}])

    def _step(self, turn: ChatTurn) -> Answer:
        if is_dialogue(self._made):
            messages, done, rewards = self._result(self._made.step(turn))
            return Answer(
                messages=turns_of(messages, "step()"), done=bool(done), reward=total_of(rewards)
            )
        messages = [self._call(call["function"]) for call in turn.get("tool_calls", [])]
        stopped = getattr(self._made, "done", None) is True
        return Answer(messages=messages, stopped=stopped)

    def _call(self, call: Mapping[str, Any]) -> ChatTurn:
        """Return a tool's answer to a call, which is what it raised if it raised anything."""
        name = call["name"]
        arguments = call["arguments"]
        try:
            tool = self._tool(name, may_be_cut_off=not isinstance(arguments, Mapping))
            content = str(self._result(tool(**arguments_of(tool, arguments))))
        # It is the user's code, and the policy shall read what it said.
        except BaseException as error:
            content = str({"error": message_of(error)})
        return {"role": "tool", "name": name, "content": content}

    def _tool(self, name: str, *, may_be_cut_off: bool) -> Callable:
        """Return the tool of a name, which may be cut off in a call of words."""
        found = [name] if name in self._tools else []
        if may_be_cut_off and not found:
            found = [tool for tool in self._tools if tool.startswith(name)]
        if len(found) != 1:
            raise ValueError(f"there is no tool {name}; there is {', '.join(self._tools)}")
        return self._tools[found[0]]

    def _end(self) -> Answer:
        reward = None
        if callable(getattr(self._made, "get_reward", None)):
            reward = total_of(self._result(self._made.get_reward()))
        if callable(getattr(self._made, "close", None)):
            self._result(self._made.close())
        return Answer(done=True, reward=reward)

    def _result(self, returned: Any) -> Any:
        """Return what a call of the environment's returned, or what it comes to if it is async."""
        if not inspect.isawaitable(returned):
            return returned
        if Played._loop is None:
            import asyncio  # here, since most environments need none and workers start in a moment

            Played._loop = asyncio.new_event_loop()
        return Played._loop.run_until_complete(returned)

    def _at_random(self, call: Callable[..., Answer], *given: object) -> Answer:
        """Make a call with the environment's own random numbers, which go on where they were."""
        outside = _random_states()
        _set_random_states(self._inside)
        try:
            return call(*given)
        finally:
            self._inside = _random_states()
            _set_random_states(outside)


def turns_of(messages: object, what: str) -> list[ChatTurn]:
    """Return messages that a dialogue gave; a text is a user's. TypeError for what is none."""
    if messages is None:
        return []
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping):
        messages = [messages]
    found = []
    for message in messages:  # type: ignore[attr-defined]
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise TypeError(f'{what} gave {message!r:.60}; need {{"role", "content": text}}')
        found.append({**message, "role": str(message.get("role", "user"))})
    return found


def total_of(rewards: object) -> float | None:
    """Return what a turn is rewarded with: a number, or the sum of several; None without any."""
    if rewards is None:
        return None
    if isinstance(rewards, Mapping):
        rewards = list(rewards.values())
    if isinstance(rewards, Sequence):
        return float(sum(map(float, rewards))) if rewards else None
    return float(rewards)  # type: ignore[arg-type]


def _accepted(function: Callable, given: Mapping[str, object]) -> dict[str, object]:
    """Return those of the arguments that a function takes. It gets the seed only by name."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    taken = {}
    for name, value in given.items():
        if name in parameters or (takes_all and name != "seed"):
            taken[name] = value
    return taken


def _random_states() -> tuple:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random_states(states: tuple) -> None:
    own, of_numpy = states
    random.setstate(own)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


# --- The worker ---

MAX_ANSWER_BYTES = 1 << 22  # of a line


def main(path: str, setup: dict, note: int) -> None:
    """Play the environments of the commands until there are no more. setup: guard.begin's."""
    commands, send = guard.begin(setup, note)
    memory_bytes = setup["memory_mb"] << 20
    try:
        factory = import_environment(path)
    except BaseException as error:  # a module may raise anything while it is imported
        send(["failed", short(describe_in_worker(error))])
        return
    guard.end_if_over(memory_bytes, note)
    of_module = children()
    send(["ready"])
    played: dict[int, Played] = {}
    started: dict[int, frozenset[int]] = {}  # by an environment as it began: processes

    def sweep() -> None:
        """Kill the processes that neither the module nor a living environment needs."""
        for key in started.keys() - played.keys():
            del started[key]
        kill_children(but=of_module.union(guard.held_by_multiprocessing(), *started.values()))

    for line in commands:
        number, key, do, what, limit_s = json.loads(line)
        if do == "forget":
            played.pop(key, None)
            sweep()
            continue
        guard.limit_cpu(limit_s)
        try:
            if do == "begin":
                row, seed = what
                played[key] = Played(factory, seed)
                answer = played[key].begin(row)
                started[key] = children() - of_module.union(*started.values())
            elif do == "step":
                answer = played[key].step(what)
            else:
                answer = played.pop(key).end()
            answer.cut()
            said = ["answer", answer.values]
            size = len(guard.line_of(said))
            if size > MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of {size} bytes; at most {MAX_ANSWER_BYTES}")
        except BaseException as error:  # the user's code may raise anything
            played.pop(key, None)
            said = ["error", short(describe_in_worker(error))]
        sweep()
        guard.end_if_over(memory_bytes, note)
        send([number, said, time.monotonic()])
