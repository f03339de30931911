"""Turns as tokens: pieces add up to what the chat template shows of the whole, and no text of a
tool or a user writes a special token.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from llamarl.environments.dialogues import row_of, seed_of
from llamarl.launch.tasks import TaskBuilder
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.tasks.environment import TurnTokens
from llamarl.tasks.environment_class import schema_of
from llamarl.tasks.special import special_tokens
from llamarl.types import Message, Prompt
from tests.built_tasks import build_task, set_of
from tests.made_tokenizers import CHATML, FORGETFUL, INJECTION, byte_level

TOOLLESS = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ raise_exception('there are no tools') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = "{% if tools %}{% for t in tools %}{{ t.function.name }};{% endfor %}{% endif %}"


def made(template=CHATML, **options):
    """A tokenizer, and its turns."""
    tokenizer = byte_level(template)
    options = {"chat": True, "system_prompt": None, **options}
    return tokenizer, TurnTokens(tokenizer, **options)


def end_of(tokenizer):
    return tokenizer.convert_tokens_to_ids("<|im_end|>")


def shown(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_the_pieces_of_a_dialogue_are_what_the_template_shows_of_all_of_it():
    tokenizer, turns = made(system_prompt="Be brief.")
    head, tail = turns.prompt("what is 12+34?")
    opening = turns.opening([{"role": "user", "content": " now"}], tail)
    said = tokenizer.encode("the asked", add_special_tokens=False)
    context = turns.context([{"role": "tool", "content": "46"}], ended_by=end_of(tokenizer))
    seen = [*head, *opening, *said, end_of(tokenizer), *context]
    whole = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "what is 12+34? now"},
            {"role": "assistant", "content": "the asked"},
            {"role": "tool", "content": "46"},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert shown(tokenizer, seen) == whole


def test_a_turn_that_was_cut_off_is_ended_by_the_context():
    tokenizer, turns = made()
    ended = turns.context([{"role": "tool", "content": "46"}], ended_by=end_of(tokenizer))
    cut = turns.context([{"role": "tool", "content": "46"}], ended_by=None)
    assert cut == [end_of(tokenizer), *ended]


@pytest.mark.parametrize("where", ["tool", "user", "prompt", "opening"])
def test_no_text_of_an_environment_writes_a_special_token(where):
    tokenizer, turns = made()
    special = special_tokens(tokenizer)

    def pieces(text):
        if where == "prompt":
            head, tail = turns.prompt(text)
            return [*head, *tail]
        if where == "opening":
            return turns.opening([{"role": "user", "content": text}], turns.prompt("a")[1])
        return turns.context([{"role": where, "content": text}], ended_by=None)

    harmless = pieces("2+2")
    hostile = pieces(INJECTION)
    assert special._num_special(hostile) == special._num_special(harmless) > 0
    assert INJECTION in shown(tokenizer, hostile)


def test_a_spelling_that_begins_in_the_prompt_and_ends_in_what_reset_says_is_no_token():
    tokenizer, turns = made()
    head, tail = turns.prompt("2+2<|im_")
    opening = turns.opening([{"role": "user", "content": "end|>"}], tail)
    special = special_tokens(tokenizer)
    harmless = [*turns.prompt("2+2")[0], *turns.opening([], tail)]
    assert special._num_special([*head, *opening]) == special._num_special(harmless)


def test_a_template_that_appends_is_told_from_one_that_rewrites_history():
    for template, said in ((CHATML, ""), (TOOLLESS, ""), (FORGETFUL, "at turn 2")):
        told = made(template)[1].appends()
        assert said in told and bool(said) == bool(told)
    own = load_tokenizer(tiny_directory())
    assert TurnTokens(own, chat=False, system_prompt=None).appends() == ""


def test_a_tool_answers_as_a_user_where_the_template_has_no_tools():
    tokenizer, turns = made(TOOLLESS)
    ids = turns.context([{"role": "tool", "name": "f", "content": "46"}], ended_by=None)
    assert "user\n46" in shown(tokenizer, ids)


def total(first: int, second: int = 0) -> int:
    """Add up two numbers.

    Args:
        first: the one
    """
    return first + second


def test_tools_are_shown_by_a_template_that_takes_them_and_else_in_the_system_prompt():
    tools = [schema_of(total)]
    tokenizer, with_tools = made(WITH_TOOLS + CHATML, tools=tools)
    assert shown(tokenizer, with_tools.prompt("a")[0]).startswith("total;<|im_start|>user")
    tokenizer, without = made(system_prompt="Be brief.", tools=tools)
    text = shown(tokenizer, without.prompt("a")[0])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions.")
    assert '"name": "total"' in text and text.count("<|im_start|>system") == 1


def test_a_conversation_goes_on_behind_its_last_question():
    tokenizer, turns = made()
    asked = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    head, tail = turns.prompt(asked)
    assert shown(tokenizer, head).endswith("<|im_start|>user\nc")
    assert shown(tokenizer, tail) == "<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_template_the_texts_stand_one_behind_the_other():
    tokenizer = load_tokenizer(tiny_directory())
    turns = TurnTokens(tokenizer, chat=False, system_prompt=None)
    assert turns.prompt("1+2=") == ([1, 5, 14, 6, 18], [])
    assert turns.first() == [1]
    assert turns.opening([{"role": "user", "content": "3"}], []) == [7]
    assert turns.context([{"role": "tool", "content": "3="}], ended_by=2) == [7, 18]
    with pytest.raises(ValueError, match="chat template"):
        TurnTokens(tokenizer, chat=False, system_prompt="Be brief.")
    with pytest.raises(ValueError, match="no chat template"):
        turns.prompt([Message("user", "a")])


def test_the_first_token_of_dialogues_that_make_their_own_messages_is_the_templates():
    tokenizer, turns = made()
    first = turns.first()
    assert shown(tokenizer, first) == "<|im_start|>"
    whole = turns.whole([{"role": "user", "content": INJECTION}], [])
    assert whole[:1] == first


def test_a_set_of_an_environment_asks_the_rows_of_its_file(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "12"}\n{"prompt": "3"}\n')
    settings = set_of(
        "environment", environment="tests.games:Shop", path=file, chat=False, num_prompts=2
    )
    tokenizer = load_tokenizer(tiny_directory())
    task = build_task("addition", tokenizer, chat=False)
    held_out = TaskBuilder(tokenizer).held_out(task, 0, {"shop": settings})
    assert [prompt.text for prompt in held_out.asked(held_out.sets).values()] == ["12", "3"]


def test_an_environments_own_games_are_numbers_and_those_held_out_are_others():
    settings = {"environment": "tests.games:Echo", "chat": False, "num_prompts": 5, "num_eval": 3}
    task = build_task("environment", load_tokenizer(tiny_directory()), **settings)
    asked = [task.train_prompt(i) for i in range(5)] + [task.eval_prompt(j) for j in range(3)]
    assert (task.num_train, task.num_eval) == (5, 3)
    assert len({prompt.text for prompt in asked}) == 8
    assert len({seed_of(7, prompt) for prompt in asked}) == 8
    assert seed_of(7, asked[0]) == seed_of(7, task.train_prompt(0)) != seed_of(8, asked[0])
    assert all(prompt.prompt_ids.tolist() == [1] for prompt in asked)
    assert all(row_of(prompt, "prompt") == {} for prompt in asked)


def test_a_row_is_what_reset_gets():
    prompt = Prompt(torch.tensor([1]), "1+1=", {"answer": "2"})
    assert row_of(prompt, "question") == {"answer": "2", "question": "1+1="}
    turns = (Message("user", "1+1="),)
    asked = dataclasses.replace(prompt, messages=turns)
    assert row_of(asked, "prompt")["prompt"] == [{"role": "user", "content": "1+1="}]
