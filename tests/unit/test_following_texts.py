"""Texts that follow others have the tokens that the whole text has there, also where a tokenizer
puts a mark in front of each text.
"""

import json
from types import SimpleNamespace

import pytest
import torch

from llamarl.learning.preference import read_preference_data
from llamarl.learning.sft import answered, conversation_pair
from llamarl.tasks.environment import TurnTokens
from llamarl.tasks.special import PLAIN, reply_ids, special_tokens, text_ids
from tests.made_tokenizers import ZEPHYR, byte_level, sentencepiece

KINDS = ["prepend", "first"]
ASKED = {"role": "user", "content": "What is the sum?"}
SAID = {"role": "assistant", "content": "The sum is 42."}
NEXT = {"role": "user", "content": "And 7?"}


@pytest.fixture(params=KINDS)
def marked(request):
    return sentencepiece(request.param, ZEPHYR)


def whole(tokenizer, turns, *, reply=False):
    return tokenizer.apply_chat_template(
        turns, tokenize=True, add_generation_prompt=reply, return_dict=False
    )


def test_such_a_tokenizer_encodes_a_text_apart_with_a_mark(marked):
    """Otherwise the tests below would show nothing."""
    assert marked.convert_ids_to_tokens(marked.encode("42", add_special_tokens=False))[0][0] == "▁"


def test_a_conversation_to_learn_has_the_tokens_of_the_whole(marked):
    turns = [ASKED, SAID, NEXT, SAID]
    ids = conversation_pair(turns, marked).token_ids.tolist()
    assert ids == whole(marked, turns)[: len(ids)]


def test_an_answer_has_the_tokens_that_it_has_behind_its_prompt(marked):
    prompt = text_ids(marked, "12+30=", add_special_tokens=True)
    pair = answered(torch.tensor(prompt), "42", marked)
    assert pair.token_ids.tolist() == [*marked.encode("12+30=42"), marked.eos_token_id]


def test_preferred_answers_have_them_too(marked, tmp_path):
    marked.chat_template = None
    rows = [{"prompt": "12+30=", "chosen": "42", "rejected": str(i)} for i in range(3)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = SimpleNamespace(
        path=file,
        eval_path=None,
        num_eval=1,
        max_tokens=99,
        drop_long=False,
        chat=False,
        system_prompt=None,
    )
    pair = read_preference_data(task, marked).train[0]
    got = [*pair.prompt_ids.tolist(), *pair.chosen_ids.tolist()]
    assert got == [*marked.encode("12+30=42"), marked.eos_token_id]


def test_what_follows_a_turn_in_a_dialogue_has_them(marked):
    turns = TurnTokens(marked, chat=True, system_prompt=None)
    context = turns.context([NEXT], ended_by=marked.eos_token_id)
    before = whole(marked, [ASKED, SAID])
    behind = len(before) - before[::-1].index(marked.eos_token_id)
    assert context == whole(marked, [ASKED, SAID, NEXT], reply=True)[behind:]


def test_a_dialogues_prompt_is_that_of_the_template(marked):
    head, tail = TurnTokens(marked, chat=True, system_prompt=None).prompt(ASKED["content"])
    assert [*head, *tail] == whole(marked, [ASKED], reply=True)


def test_without_a_template_a_tools_text_goes_on(marked):
    turns = TurnTokens(marked, chat=False, system_prompt=None)
    got = turns.context([{"role": "tool", "content": "42"}], ended_by=None)
    assert [*marked.encode("12+30="), *got] == marked.encode("12+30=42")


def test_a_byte_level_tokenizer_encodes_texts_as_ever():
    tokenizer = byte_level()
    for text in ("42", " 42", "\n42", "\n\nso", ""):
        plain = tokenizer.encode(text, add_special_tokens=False)
        assert text_ids(tokenizer, text) == plain
        assert special_tokens(tokenizer).text_ids(text, add_special_tokens=False) == plain
    assert reply_ids(tokenizer, [], "42", chat=False) == [
        *text_ids(tokenizer, "42", behind=PLAIN),
        tokenizer.eos_token_id,
    ]
