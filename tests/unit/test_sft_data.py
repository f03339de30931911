"""Rows of JSON lines as supervised pairs: which tokens are learned, against transformers' own mask;
what is wrong is named.
"""

from __future__ import annotations

import json

import pytest
import torch

from llamarl.learning import sft
from llamarl.learning.sft import conversation_pair, read_pairs, read_sft_data
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from tests.supervised import task_of

TEMPLATE = (
    "<bos>{% for m in messages %}{{ m['role'] }}: "
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<eos>{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SYSTEM = {"role": "system", "content": "add"}
ONE = {"role": "user", "content": "1+1"}
TWO = {"role": "user", "content": "10+2"}
SAID = [{"role": "assistant", "content": text} for text in ("2", "12", "0")]


@pytest.fixture
def tokenizer():
    return load_tokenizer(tiny_directory())


@pytest.fixture
def chatting(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def rows(path, *lines):
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


@pytest.mark.parametrize(
    "messages",
    [
        [ONE, SAID[0]],
        [SYSTEM, ONE, SAID[0], TWO, SAID[1]],
        [ONE, SAID[0], TWO],
        [SYSTEM, SAID[2], ONE, TWO, SAID[1]],
    ],
    ids=range(4),
)
def test_what_is_learned_is_what_transformers_marks_as_the_assistants(chatting, messages):
    pair = conversation_pair(messages, chatting)
    want = chatting.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    size = pair.token_ids.numel()
    assert pair.token_ids.tolist() == want["input_ids"][:size]
    assert pair.learned.tolist() == [bool(x) for x in want["assistant_masks"]][:size]
    assert not any(want["assistant_masks"][size:]) and pair.learned[-1], (
        "ends with the last learned token"
    )


def test_a_packed_conversation_learns_every_reply_and_nothing_else(chatting):
    pairs = [
        conversation_pair([SYSTEM, ONE, SAID[0], TWO, SAID[1]], chatting),
        sft.SFTPair(torch.tensor([1, 5, 6, 2]), torch.tensor([False, False, True, True])),
    ]
    batch = sft.pack_pairs(pairs)
    assert chatting.decode(batch.labels[batch.rows]) == "2<eos>12<eos>" + chatting.decode([6, 2])
    assert batch.pairs.tolist() == [0] * (2 + 3) + [1] * 2
    before = pairs[0].token_ids[:-1][pairs[0].learned[1:]]
    assert batch.input_ids[batch.rows][:5].tolist() == before.tolist()


def test_a_prompt_and_its_completion_end_with_the_end_token(tokenizer, tmp_path):
    file = rows(
        tmp_path / "a.jsonl",
        {"prompt": "1+1=", "completion": "2"},
        "",
        {"prompt": "1+2=", "answer": 3},
    )
    first, second = read_pairs(file, tokenizer, max_tokens=99)
    assert (
        tokenizer.decode(first.token_ids) == "<bos>1+1=2<eos>"
        and first.learned.tolist() == [False] * 5 + [True] * 2
    )
    assert tokenizer.decode(second.token_ids) == "<bos>1+2=3<eos>"


def test_a_prompt_is_a_user_turn_where_there_is_a_template(chatting, tmp_path):
    file = rows(
        tmp_path / "a.jsonl", {"prompt": "1+1", "completion": "2"}, {"messages": [ONE, SAID[0]]}
    )
    first, second = read_pairs(file, chatting, max_tokens=99)
    assert (
        chatting.decode(first.token_ids)
        == "<bos>user: 1+1;assistant: 2<eos>"
        == chatting.decode(second.token_ids)
    )
    (plain, _) = read_pairs(file, chatting, max_tokens=99, chat=False)
    assert chatting.decode(plain.token_ids) == "<bos>1+12<eos>"


def test_a_prompt_may_be_empty_where_a_text_begins_with_a_token_of_its_own(tokenizer, tmp_path):
    file = rows(tmp_path / "a.jsonl", {"prompt": "", "completion": "2"})
    (pair,) = read_pairs(file, tokenizer, max_tokens=9)
    assert tokenizer.decode(pair.token_ids) == "<bos>2<eos>"
    assert pair.learned.tolist() == [False, True, True]

    class Bare:
        chat_template = None
        eos_token_id = 0

        def encode(self, text):
            return [ord(sign) for sign in text]

    with pytest.raises(ValueError, match='a.jsonl:1: "prompt" is empty, and this tokenizer'):
        read_pairs(file, Bare(), max_tokens=9)


def test_a_number_is_learned_as_it_is_written_in_full(tokenizer, tmp_path):
    numbers = [{"prompt": "1", "completion": one} for one in (42.0, 1e-05, 7)]
    found = read_pairs(rows(tmp_path / "a.jsonl", *numbers), tokenizer, max_tokens=11)
    learned = [tokenizer.decode(pair.token_ids[pair.learned]) for pair in found]
    assert learned == ["42<eos>", "0.00001<eos>", "7<eos>"]


BAD = {
    "not JSON": "{",
    "need a JSON object": [1],
    'no key "completion"; ': {"prompt": "1"},
    '"prompt" must be text, this is list': {"prompt": ["1"], "completion": "1"},
    '"completion" must be text that is not empty': {"prompt": "1", "completion": ""},
    '"completion" must be text, this is NoneType': {"prompt": "1", "completion": None},
    "the answer is bool True; need a text": {"prompt": "1", "completion": True},
    "12 tokens, the model takes 11": {"prompt": "12345", "completion": "12345"},
    '"messages" must be a list': {"messages": "hello"},
    '"messages", message 2: need {"role": ..., "content": text}': {
        "messages": [ONE, {"role": "assistant"}]
    },
    "message 1 has role 'human'; there is system, user": {
        "messages": [{"role": "human", "content": "1"}, SAID[0]]
    },
    "two assistant messages in a row": {"messages": [ONE, SAID[0], SAID[1]]},
    "no assistant message": {"messages": [ONE]},
    "no chat template": {"messages": [ONE, SAID[0]]},
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_row_is_named_by_file_and_line(tokenizer, tmp_path, what):
    file = rows(tmp_path / "bad.jsonl", {"prompt": "1", "completion": "2"}, BAD[what])
    with pytest.raises(ValueError) as caught:
        read_pairs(file, tokenizer, max_tokens=11)
    assert f"{file}:2: " in str(caught.value) and what in str(caught.value)


def test_a_template_that_changes_earlier_turns_or_refuses_is_named(chatting, tmp_path):
    file = rows(tmp_path / "bad.jsonl", {"messages": [ONE, SAID[0], TWO, SAID[1]]})
    chatting.chat_template = TEMPLATE.replace(
        "{{ m['content'] }}<eos>", "{% if loop.last %}think {% endif %}{{ m['content'] }}<eos>"
    )
    with pytest.raises(
        ValueError, match="bad.jsonl:1: the chat template shows message 2 otherwise"
    ):
        read_pairs(file, chatting, max_tokens=99)
    chatting.chat_template = (
        "{% if messages|length > 1 %}{{ raise_exception('no system') }}{% endif %}"
    )
    with pytest.raises(ValueError, match="bad.jsonl:1: the chat template refuses it: no system"):
        read_pairs(file, chatting, max_tokens=99)


def test_no_row_of_a_held_out_prompt_is_learned(tokenizer, tmp_path, caplog):
    """20 prompts with three rows each; and as many texts without a prompt, which all differ."""
    lines = [{"prompt": f"{i % 20}=", "completion": str(i)} for i in range(60)]
    data = read_sft_data(task_of(rows(tmp_path / "a.jsonl", *lines), num_eval=500), tokenizer)
    trained = [tuple(pair.token_ids[~pair.learned].tolist()) for pair in data.train]
    held = [tuple(pair.token_ids[~pair.learned].tolist()) for pair in data.held_out]
    assert (len(trained), len(held)) == (54, 2) and not set(trained) & set(held)
    assert "60 rows have 20 different prompts: 2 are held out, and 4 more rows" in caplog.text
    lines = [line | {"prompt": ""} for line in lines]
    data = read_sft_data(task_of(rows(tmp_path / "b.jsonl", *lines), num_eval=500), tokenizer)
    assert (len(data.train), len(data.held_out)) == (54, 6)
