"""Tools: what a policy is shown of a function, and how a call is read."""

from __future__ import annotations

from typing import Literal

import pytest

from llamarl.environments.calls import Unreadable, json_calls, word_calls
from llamarl.tasks.environment_class import (
    arguments_of,
    is_dialogue,
    schema_of,
    schemas_of,
    tools_of,
)


class Shop:
    def reset(self, **row) -> None:
        """Begin."""

    def get_reward(self) -> float:
        """End."""
        return 0.0

    def buy(
        self,
        what: str,
        count: int,
        price: float | None = None,
        colour: Literal["red", "blue"] = "red",
        more: list[str] | None = None,
        gift: bool = False,
    ) -> str:
        """Buy something,
        or several.

        Args:
            what: the name of it
            count (int): how many

        Returns:
            a bill
        """
        return f"{count} {what} {gift}"

    def _count(self) -> int:
        return 0


class Talk:
    def init(self):
        return "hello", []

    def step(self, message):
        return [], True, 1.0


def test_a_tool_is_described_by_its_types_and_its_docstring():
    assert schema_of(Shop.buy) == {
        "type": "function",
        "function": {
            "name": "buy",
            "description": "Buy something, or several.",
            "parameters": {
                "type": "object",
                "properties": {
                    "what": {"type": "string", "description": "the name of it"},
                    "count": {"type": "integer", "description": "how many"},
                    "price": {"type": "number", "description": ""},
                    "colour": {"enum": ["red", "blue"], "description": ""},
                    "more": {"type": "array", "items": {"type": "string"}, "description": ""},
                    "gift": {"type": "boolean", "description": ""},
                },
                "required": ["what", "count"],
            },
        },
    }


def test_tools_are_the_public_methods_and_a_dialogue_says_its_own():
    assert list(tools_of(Shop)) == ["buy"] == list(tools_of(Shop()))
    assert [one["function"]["name"] for one in schemas_of(Shop)] == ["buy"]
    assert schemas_of(Talk) == [] and is_dialogue(Talk) and not is_dialogue(Shop())
    with pytest.raises(ValueError, match="object has neither reset"):
        is_dialogue(object())


def test_a_tool_without_a_docstring_or_a_type_is_refused_by_name():
    def bare(a: int):
        return a

    def untyped(a):
        """Do."""

    with pytest.raises(ValueError, match="tool bare has no docstring"):
        schema_of(bare)
    with pytest.raises(ValueError, match="untyped: its parameter a has no type"):
        schema_of(untyped)


def test_words_are_read_as_the_types_of_the_parameters_say():
    buy = Shop().buy
    assert arguments_of(buy, ["tea", "3", "1.5", "blue", '["a"]', "yes"]) == {
        "what": "tea",
        "count": 3,
        "price": 1.5,
        "colour": "blue",
        "more": ["a"],
        "gift": True,
    }
    assert arguments_of(buy, {"what": "tea", "count": 3}) == {"what": "tea", "count": 3}
    for given, said in (
        (["tea", "x"], "invalid literal"),
        (["tea"], "missing a required argument"),
        ({"what": "tea"}, "missing a required argument"),
        ({"who": "me"}, "missing a required|unexpected"),
        (["a"] * 7, "takes 6 arguments and was given 7"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            arguments_of(buy, given)


def called(calls):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def test_calls_in_json_are_read_and_what_is_none_is_unreadable():
    text = 'so <tool_call>\n{"name": "buy", "arguments": {"count": 3}}\n</tool_call> and'
    assert called(json_calls(text)) == [("buy", {"count": 3})]
    assert called(json_calls(text + text)) == [("buy", {"count": 3})] * 2
    assert called(json_calls('<tool_call>{"name": "buy"}')) == [("buy", {})]
    assert json_calls("no call") == []
    for bad in ("{", '{"arguments": {}}', "[]", '{"name": "buy", "arguments": 3}'):
        with pytest.raises(Unreadable):
            json_calls(f"<tool_call>{bad}</tool_call>")


def test_calls_in_words_end_with_a_question_mark():
    assert called(word_calls("?")) == [("", [])]
    assert called(word_calls(" buy tea, 3? ")) == [("buy", ["tea", "3"])]
    assert called(word_calls("buy?")) == [("buy", [])]
    for text in ("46", "buy tea", "12+34?", "a? b", ""):
        assert word_calls(text) == []
