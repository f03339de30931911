"""Games of textarena and tasksets of verifiers, as dialogues; skipped where a package is absent."""

from __future__ import annotations

import random
import re

import pytest

from llamarl.environments.worker import Played
from llamarl.tasks.environment_class import import_environment
from llamarl.words.names import NoFunction


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
    import llamarl.tasks.environment_class as foreign

    def absent(module):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(foreign.importlib, "import_module", absent)
    with pytest.raises(NoFunction, match=r"pip install 'llamarl\[textarena\]'"):
        import_environment("textarena:GuessTheNumber-v0")
    with pytest.raises(NoFunction, match=r"pip install 'llamarl\[verifiers\]'"):
        import_environment("verifiers:tests.tasksets:Sums")


def test_a_users_own_module_is_imported_as_ever():
    from tests.games import Shop

    assert import_environment("tests.games:Shop") is Shop


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
