"""Prompts of a task whose answers go to an environment: `task=environment`.

    rows of a file -----------> DialogueMaker: the prompt up to the end of the user's text
    an environment's own -----> OwnTask: a number, by which the environment draws its game

What an environment says first follows a prompt as context, which each completion has for itself. So
a prompt is a function of its number alone here too, and no environment has to be asked for it.
`TurnTokens` encodes each segment of a dialogue once, when it arrives:

    prompt ids | opening | sampled turn | context | sampled turn | context | ...

With a chat template, a segment is the text that the template writes after the policy's turn: the
turn's end, unless the policy sampled it, the new messages, and the beginning of the next turn. The
tokens of a dialogue therefore only grow at their end. This is right for a template that never
changes earlier turns; `appends` says whether a template does, for example by dropping thoughts.
Without a template the texts are joined, and a line break stands for an empty one.

Texts of users, tools and environments can only spell special tokens (special.py).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch

from llamarl.tasks.base import PromptMaker, Tokenizer, imported, refused_by_template
from llamarl.tasks.environment_class import (
    ChatTurn,
    Schema,
    import_environment,
    is_dialogue,
    schemas_of,
)
from llamarl.tasks.special import PLAIN, Shown, special_tokens, text_ids
from llamarl.types import Message, Prompt

_TOOLS_TEXT = (
    "You may call functions. Write each call as <tool_call>\n"
    '{{"name": NAME, "arguments": {{...}}}}\n</tool_call>. The functions:\n{tools}'
)


class TurnTokens:
    """Encodes the segments of a dialogue.

        turns = TurnTokens(tokenizer, chat=True, system_prompt=None, tools=[])
        prompt_ids, tail = turns.prompt("What is 12+34?")    # up to the end of the user's text
        turns.opening([], tail)                              # to where the policy's turn begins
        turns.context([{"role": "tool", "content": "46"}], ended_by=2)

    chat: put texts into the tokenizer's chat template, if it has one, behind system_prompt. tools:
    schemas that the model is shown, by a template that takes tools or in the system prompt.
    ValueError if there are tools or a system prompt and no template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat: bool,
        system_prompt: str | None,
        tools: Sequence[Schema] = (),
    ):
        self._tokenizer = tokenizer
        self._template = (getattr(tokenizer, "chat_template", None) or "") if chat else ""
        if system_prompt and not self._template:
            raise ValueError("task.system_prompt needs task.chat and a chat template; unset it")
        self._system_prompt = system_prompt
        self.tools = list(tools)
        self._special = special_tokens(tokenizer)
        self._mark = f"⟦{secrets.token_hex(8)}⟧"  # which no text holds
        self._tool_role = self._role_of_tools()

    @property
    def has_template(self) -> bool:
        """Whether turns are put into a chat template."""
        return bool(self._template)

    def prompt(self, asked: str | Sequence[Message]) -> tuple[list[int], list[int]]:
        """Return (prompt ids [P], tail): the tokens of a question up to the end of the user's last
        text, and those behind it up to the policy's turn.
        """
        if not self._template:
            if not isinstance(asked, str):
                raise ValueError("the prompt is a conversation, and there is no chat template")
            return text_ids(self._tokenizer, asked, add_special_tokens=True), []
        if isinstance(asked, str):
            asked = [Message("user", asked)]
        turns = self._with_system([message.to_dict() for message in asked], self.tools)
        return self._cut(turns, self.tools)

    def first(self) -> list[int]:
        """Return the tokens, at least one, that every dialogue begins with, whatever its messages.
        ValueError if there are none.
        """
        if not self._template:
            ids = text_ids(self._tokenizer, "", add_special_tokens=True)
        else:
            first, second = (self._cut([{"role": "user", "content": c}], [])[0] for c in ("a", "b"))
            same = [one for one, other in zip(first, second) if one == other]
            ids = same[:1] if first[0] == second[0] else []
        if not ids:
            raise ValueError(
                "the tokenizer begins a text with no token of its own, so there is nothing for the "
                "first token to look at; give task.path, whose rows have prompts"
            )
        return ids

    def opening(self, said: Sequence[ChatTurn], tail: Sequence[int]) -> list[int]:
        """Return the context between a prompt and the first turn: what `reset` said, which goes on
        with the user's text, and the tail.
        """
        ids = []
        for turn in said:
            ids += text_ids(self._tokenizer, turn["content"])
        return [*ids, *tail]

    def whole(self, messages: Sequence[ChatTurn], tools: Sequence[Schema]) -> list[int]:
        """Return the tokens of the first messages of a dialogue that makes its own, up to the
        policy's turn.
        """
        if not self._template:
            text = "".join(turn["content"] for turn in messages)
            return text_ids(self._tokenizer, text, add_special_tokens=True)
        turns = self._with_system([self._as_shown(turn) for turn in messages], tools)
        return self._special.ids(self._shown(turns, tools))

    def own_opening(
        self, messages: Sequence[ChatTurn], tools: Sequence[Schema], first: Sequence[int]
    ) -> list[int]:
        """Return the context before the first turn of a dialogue that makes its own prompt. first:
        what `first` returns. ValueError if it does not begin so.
        """
        if not messages:
            raise ValueError("the environment began without a prompt, and there are no rows")
        whole = self.whole(messages, tools)
        if whole[: len(first)] != list(first):
            raise ValueError("the chat template begins this dialogue with other tokens")
        return whole[len(first) :]

    def context(self, messages: Sequence[ChatTurn], *, ended_by: int | None) -> list[int]:
        """Return the context behind a turn of the policy: at least one token, by which turns are
        told apart. ended_by: the stop token that the policy sampled; None: it sampled none.
        ValueError if there is no token for it.
        """
        if not self._template:
            text = "".join(turn["content"] for turn in messages)
            behind = PLAIN if ended_by is None else ended_by
            ids = text_ids(self._tokenizer, text, behind=behind)
            # What has no token, such as an empty text, is a line without words.
            ids = ids or text_ids(self._tokenizer, "\n", behind=behind)
        else:
            ids = self._template_context(messages, ended_by)
        if not ids:
            raise ValueError("the environment answered with nothing that has a token")
        return ids

    def _template_context(self, messages: Sequence[ChatTurn], ended_by: int | None) -> list[int]:
        """Return what the template writes behind a turn of the policy."""
        before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": self._mark}]
        shown = self._shown([*before, *map(self._as_shown, messages)], [])
        begin = shown.text.index(self._mark) + len(self._mark)
        if ended_by is not None:
            end = self._tokenizer.decode([ended_by], skip_special_tokens=False)
            if shown.text.startswith(end, begin):
                begin += len(end)
        behind = PLAIN if ended_by is None else ended_by
        return self._special.ids(shown.part(begin, len(shown.text)), behind=behind)

    def goes_on(
        self,
        before: Sequence[ChatTurn],
        turn: ChatTurn,
        after: Sequence[ChatTurn],
        tools: Sequence[Schema],
    ) -> bool:
        """Whether the template shows turns, the policy's newest one and what follows it by adding
        to what it showed before.
        """
        shown = self._text_of(before, tools)
        text = self._text_of([*before, turn, *after], tools)
        return text.startswith(shown + turn["content"])

    def appends(self) -> str:
        """Return how the template changes a history that it wrote before; "" if it does not. It is
        shown three turns of the policy, with thoughts, and a tool's answers.
        """
        if not self._template:
            return ""
        thought = "<think>\nso\n</think>\n\n"
        turns: list[ChatTurn] = [{"role": "user", "content": "q0"}]
        seen = self._shown(turns, []).text
        for number in range(1, 4):
            said = {"role": "assistant", "content": f"{thought}a{number}"}
            answer = self._as_shown({"role": "tool", "name": "f", "content": f"t{number}"})
            turns += [said, answer]
            text = self._shown(turns, []).text
            if not text.startswith(seen):
                at = next(i for i, (one, other) in enumerate(zip(seen, text)) if one != other)
                return f"at turn {number} {seen[at : at + 40]!r} became {text[at : at + 40]!r}"
            behind = self._shown(
                [{"role": "user", "content": "a"}, {**said, "content": self._mark}, answer],
                [],
            ).text
            added = behind[behind.index(self._mark) + len(self._mark) :]
            seen += said["content"] + added
            if text != seen:
                return f"at turn {number} it writes {text[-60:]!r}, and alone {seen[-60:]!r}"
        return ""

    def _text_of(self, turns: Sequence[ChatTurn], tools: Sequence[Schema]) -> str:
        shown = self._with_system([self._as_shown(turn) for turn in turns], tools)
        return self._shown(shown, tools).text

    def _as_shown(self, turn: ChatTurn) -> ChatTurn:
        """Return a message as the template takes it."""
        if turn["role"] == "tool" and self._tool_role != "tool":
            return {"role": self._tool_role, "content": turn["content"]}
        return turn

    def _role_of_tools(self) -> str:
        """Return the role under which the template shows the answer of a tool: a user's, if it
        shows no tools'.
        """
        if not self._template:
            return "tool"
        turns = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "tool", "name": "f", "content": self._mark},
        ]
        try:
            shown = self._render(turns, [])
        except ValueError:
            return "user"
        return "tool" if shown.count(self._mark) == 1 else "user"

    def _with_system(self, turns: list[ChatTurn], tools: Sequence[Schema]) -> list[ChatTurn]:
        """Return turns behind a system turn, if there is something for it to say."""
        own = [turn["content"] for turn in turns if turn["role"] == "system"]
        said = own or ([self._system_prompt] if self._system_prompt else [])
        if tools and "tools" not in self._template:
            lines = "\n".join(json.dumps(tool) for tool in tools)
            said = [*said, _TOOLS_TEXT.format(tools=lines)]
        others = [turn for turn in turns if turn["role"] != "system"]
        if not said:
            return others
        return [{"role": "system", "content": "\n\n".join(said)}, *others]

    def _cut(self, turns: list[ChatTurn], tools: Sequence[Schema]) -> tuple[list[int], list[int]]:
        """Return the tokens up to the end of the last turn's text, and those behind it."""
        *before, last = turns
        marked = {**last, "content": last["content"] + self._mark}
        shown = self._shown([*before, marked], tools)
        at = shown.text.index(self._mark)
        head = shown.part(0, at)
        tail = shown.part(at + len(self._mark), len(shown.text))
        return self._special.ids(head), self._special.ids(tail, behind=PLAIN)

    def _shown(self, turns: list[ChatTurn], tools: Sequence[Schema]) -> Shown:
        """Show turns in the template, and where in it others' texts are that could spell a special
        token.
        """
        foreign = [self._special.foreign_in(turn["content"]) for turn in turns]
        return self._special.shown(lambda turns: self._render(turns, tools), turns, foreign)

    def _render(self, turns: list[ChatTurn], tools: Sequence[Schema]) -> str:
        with refused_by_template():
            return self._tokenizer.apply_chat_template(
                turns, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )


# --- The task ---

GAME = "game"  # the key of a prompt's meta for the number of an environment's own game
# The default reward of prompts that an environment plays: what it gives. No function's import path.
GIVEN = "environment"


class OwnTask:
    """A Task of an environment that makes its own prompts: `num_train` games to train on, and
    others to hold out, by number.
    """

    name = "environment"
    default_reward = GIVEN
    train_digest = eval_digest = ""

    def __init__(self, turns: TurnTokens, *, num_train: int, num_eval: int):
        self.num_train = num_train
        self.num_eval = num_eval
        self._first = torch.tensor(turns.first(), dtype=torch.int64)

    def train_prompt(self, i: int) -> Prompt:
        """Return the prompt of game i."""
        return self._game(i)

    def eval_prompt(self, j: int) -> Prompt:
        """Return the prompt of held-out game j, which is none of the others."""
        return self._game(-1 - j)

    def _game(self, number: int) -> Prompt:
        return Prompt(self._first, f"game {number}", {GAME: number})


class DialogueMaker(PromptMaker):
    """Makes prompts that end where the first words of an environment follow.

    environment: its import path. ValueError for one that cannot be used.
    """

    def __init__(
        self,
        environment: str,
        tokenizer: Tokenizer,
        *,
        chat: bool,
        system_prompt: str | None,
        max_prompt_tokens: int,
    ):
        self.turn_tokens = turn_tokens(
            environment, tokenizer, chat=chat, system_prompt=system_prompt
        )
        self._is_own = makes_prompts(environment)
        super().__init__(
            tokenizer,
            chat=chat,
            system_prompt=system_prompt,
            max_prompt_tokens=max_prompt_tokens,
        )

    @property
    def identity(self) -> dict[str, object]:
        """As PromptMaker has it, with the schemas of the tools."""
        return {**super().identity, "tools": self.turn_tokens.tools}

    def ids(self, question: str | tuple[Message, ...]) -> list[int]:
        """Return the prompt ids [P] of a question, up to the end of its last text."""
        if self._is_own:
            return self.turn_tokens.first()
        return self.turn_tokens.prompt(question)[0]

    def num_tokens(self, questions: Sequence[str | tuple[Message, ...]]) -> list[int]:
        """Return how long the prompts of questions are, in tokens."""
        return [len(self.ids(question)) for question in questions]


def factory_of(path: str) -> Callable:
    """Return the factory at an import path. ValueError begins with the configuration's key."""
    return imported(f"task.environment={path}", import_environment, path)


def turn_tokens(path: str, tokenizer: Any, *, chat: bool, system_prompt: str | None) -> TurnTokens:
    """Return the encoder of dialogues with an environment, which shows its tools to the model.
    ValueError for an environment or tools that cannot be used.
    """
    factory = factory_of(path)
    try:
        tools = schemas_of(factory)
    except Exception as error:  # a factory is the user's code
        raise ValueError(f"task.environment={path}: {error}") from error
    return TurnTokens(tokenizer, chat=chat, system_prompt=system_prompt, tools=tools)


def makes_prompts(path: str) -> bool:
    """Whether the environment has the contract of dialogues and so makes its own prompts."""
    factory = factory_of(path)
    return is_dialogue(factory if isinstance(factory, type) else factory())
