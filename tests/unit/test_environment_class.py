"""Tools: what a policy is shown of a function, and how a call is read."""

from __future__ import annotations

import random
import re
from typing import Literal

import pytest

from benchmarks.games import HigherLower
from llamarl.environments.calls import Unreadable, json_calls, word_calls
from llamarl.environments.worker import Played
from llamarl.tasks.environment_class import (
    arguments_of,
    import_environment,
    is_dialogue,
    schema_of,
    schemas_of,
    tools_of,
)
from llamarl.words.names import NoFunction


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


# --- Games of textarena and tasksets of verifiers ---


def said(answer):
    return " ".join(message["content"] for message in answer.messages)


def turn(text):
    return {"role": "assistant", "content": text}


def test_methods_of_an_environment_may_be_async():
    played = Played(import_environment("tests.games:Waiting"), "1")
    assert said(played.begin({})) == "ready"
    call = {"type": "function", "function": {"name": "ask", "arguments": {"number": 21}}}
    answer = played.step({**turn(""), "tool_calls": [call]})
    assert said(answer) == "42"
    assert played.end().reward == 42.0


def textarena():
    return pytest.importorskip("textarena", reason="needs textarena")


def test_what_is_not_installed_names_its_extra(monkeypatch):
    def absent(module):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("importlib.import_module", absent)
    for path in ("textarena:GuessTheNumber-v0", "verifiers:tests.tasksets:Sums"):
        extra = path.partition(":")[0]
        with pytest.raises(NoFunction, match=rf"pip install 'llamarl\[{extra}\]'"):
            import_environment(path)


def test_a_game_of_textarena_is_won_by_halving():
    textarena()
    played = Played(import_environment("textarena:GuessTheNumber-v0"), "7")
    text = said(played.begin({}))
    low, high = map(int, re.search(r"between (\d+) and (\d+)", text).groups())
    answer = None
    while answer is None or not answer.done:
        guess = (low + high) // 2
        answer = played.step(turn(f"I say [{guess}]"))
        assert "I say" not in said(answer), "its own words are not said to it again"
        if "higher" in said(answer):
            low = guess + 1
        else:
            high = guess - 1
    assert answer.reward == 1.0


def test_a_seed_gives_the_same_game_of_textarena():
    textarena()
    hints = []
    for _ in range(2):
        played = Played(import_environment("textarena:GuessTheNumber-v0"), "3")
        played.begin({})
        random.random()
        hints.append([said(played.step(turn(f"[{number}]"))) for number in (2, 5, 9)])
    assert hints[0] == hints[1]


def test_a_game_that_textarena_has_not_is_told_with_the_nearest():
    textarena()
    with pytest.raises(NoFunction, match="did you mean GuessTheNumber-v0"):
        import_environment("textarena:GuesTheNumber-v0")


def test_a_taskset_of_verifiers_asks_and_scores_an_answer():
    pytest.importorskip("verifiers.v1", reason="needs verifiers")
    for right in (True, False):
        played = Played(import_environment("verifiers:tests.tasksets:Sums"), "5")
        opening = played.begin({}).messages
        assert [message["role"] for message in opening] == ["system", "user"]
        first, second = map(int, re.fullmatch(r"(\d+)\+(\d+)=", opening[1]["content"]).groups())
        answer = played.step(turn(str(first + second + (not right))))
        assert answer.done and answer.messages == []
        # The sum has weight 2, and an answer in digits 0.5.
        assert answer.reward == (2.5 if right else 0.5)


# --- The game of benchmarks/games.py that a study has a model learn ---


def guesses(number):
    """A game of this number: a guess becomes (the answer, whether it is over, the reward)."""
    game = HigherLower()
    game.init()
    game.number = number
    return lambda guess: game.step({"role": "assistant", "content": guess})


@pytest.mark.parametrize("number", [1, 6, HigherLower.LARGEST])
def test_every_number_is_found_by_halves(number):
    low, high = 1, HigherLower.LARGEST
    guess = guesses(number)
    for _ in range(HigherLower.MOST_GUESSES):
        middle = (low + high) // 2
        answer, is_over, reward = guess(str(middle))
        if is_over:
            break
        low, high = (middle + 1, high) if answer == "Higher." else (low, middle - 1)
    assert is_over and reward == 1.0


def test_a_game_ends_after_its_last_guess_and_says_what_is_no_number():
    guess = guesses(9)
    told = [guess(word) for word in ("12", "five", "3.", "10")]
    assert [answer for answer, _, _ in told] == ["Lower.", "Say a number.", "Higher.", "Lower."]
    assert [is_over for _, is_over, _ in told] == [False, False, False, True]
    assert told[-1][2] == 0.0
