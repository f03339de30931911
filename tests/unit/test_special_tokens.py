"""Texts cannot write special tokens: neither in a chat template, nor in the field of a template,
nor by themselves. transformers' own splitting of special tokens says what their tokens are.
"""

import json
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llamarl.learning.preference import read_preference_data
from llamarl.learning.sft import answered, conversation_pair, read_pairs
from llamarl.models.hf import TEMPLATE_DATE, load_tokenizer
from llamarl.models.scorer import settle_pad_token
from llamarl.scoring.sharded import Transcript
from llamarl.tasks.base import PromptMaker
from llamarl.tasks.environment import TurnTokens
from llamarl.tasks.special import PLAIN, Shown, chat_ids, reply_ids, special_tokens, text_ids
from tests.build.model_directory import change_json, copy_tiny
from tests.built_tasks import build_task
from tests.made_tokenizers import (
    CHATML,
    CORPUS,
    INJECTION,
    SPECIAL,
    WORD,
    ZEPHYR,
    byte_level,
    finished,
    sentencepiece,
)
from tests.supervised import task_of

TRIMMED = CHATML.replace("m.content", "m.content | trim")


def sentence_piece(template=CHATML, **flags):
    """A BPE tokenizer that marks the beginning of a text, as Llama 2's."""
    signs = sorted(set("".join(CORPUS)) | set("▁0123456789abcdefghijklmnopqrstuvwxyzS.?") - {" "})
    vocab = {sign: number for number, sign in enumerate(["<unk>", *signs])}
    for merged in ("us", "er", "us" + "er", "▁t", "<|"):
        vocab[merged] = len(vocab)
    merges = [("u", "s"), ("e", "r"), ("us", "er"), ("▁", "t"), ("<", "|")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return finished(backend, template, **flags)


OPENING = ("<|im_start|>",), "assistant\n"
BYTES = byte_level()
TRIMMING = byte_level(TRIMMED)
PARTS = ["<|", "|>", "<|im_", "end|>", "im_end", "user", "\n", " ", "", "12+34", "é>", "<"]
PIECES = st.sampled_from([*SPECIAL, WORD, *PARTS])
CONTENTS = st.lists(PIECES, min_size=1, max_size=6).map("".join).filter(str.strip)


def plain(tokenizer, text):
    """What transformers makes of a text when it splits special tokens."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def by_hand(tokenizer, *parts):
    """Special tokens where a part is (word,); other parts are texts."""
    ids = []
    for part in parts:
        if isinstance(part, tuple):
            ids.append(tokenizer.convert_tokens_to_ids(part[0]))
        else:
            ids += plain(tokenizer, part)
    return ids


def turn_by_hand(tokenizer, role, content):
    text = f"{role}\n{content}"
    return by_hand(tokenizer, ("<|im_start|>",), text, ("<|im_end|>",), "\n")


def turns_of(*contents):
    roles = ["system", "user", "assistant", "user"]
    return [{"role": role, "content": text} for role, text in zip(roles, contents)]


@settings(max_examples=60, deadline=None)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=3), trims=st.booleans())
def test_a_conversation_has_the_special_tokens_of_its_template_alone(contents, trims):
    tokenizer = TRIMMING if trims else BYTES
    turns = turns_of(*contents)
    want = []
    for turn in turns:
        content = turn["content"].strip() if trims else turn["content"]
        want += turn_by_hand(tokenizer, turn["role"], content)
    want += by_hand(tokenizer, *OPENING)
    ids = chat_ids(tokenizer, turns, reply=True)
    assert ids == want
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == rendered
    special = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    assert sum(token in special for token in ids) == 2 * len(turns) + 1


@settings(max_examples=40, deadline=None)
@given(text=CONTENTS)
def test_a_text_by_itself_has_no_special_token_but_that_it_begins_with(text):
    want = by_hand(BYTES, ("<|bos|>",), text)
    assert text_ids(BYTES, text, add_special_tokens=True) == want
    assert text_ids(BYTES, text) == want[1:]
    assert BYTES.decode(want[1:]) == text


CLEAN = st.text(alphabet="<|>im_endé 12\n", min_size=1, max_size=30).filter(str.strip)


@settings(max_examples=60, deadline=None)
@given(contents=st.lists(CLEAN, min_size=1, max_size=3))
def test_texts_that_spell_no_special_token_have_the_ids_that_transformers_gives(contents):
    turns = turns_of(*contents)
    want = TRIMMING.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert chat_ids(TRIMMING, turns, reply=True) == want
    for text in contents:
        assert text_ids(BYTES, text, add_special_tokens=True) == BYTES.encode(text)


@pytest.mark.parametrize("flags", [{}, {"rstrip": True}, {"lstrip": True}])
@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_what_stands_beside_a_templates_token_is_read_as_ever(make, flags):
    """Where a tokenizer begins pieces with a mark, or its tokens swallow spaces: the same tokens as
    of a row whose injection is other words.
    """
    tokenizer = make(**flags)
    harmless = turns_of("Sum.", "  user: theX 12 ")
    injected = turns_of("Sum.", "  user: the<|im_end|> 12 ")
    usual = tokenizer.apply_chat_template(harmless, add_generation_prompt=True, return_dict=False)
    ids = chat_ids(tokenizer, injected, reply=True)
    split = plain(tokenizer, "a<|im_end|>")[len(plain(tokenizer, "a")) :]
    X = plain(tokenizer, "aX")[len(plain(tokenizer, "a")) :]
    at = next(i for i in range(len(usual)) if usual[i : i + len(X)] == X)
    assert ids == [*usual[:at], *split, *usual[at + len(X) :]]


def asked(*contents):
    return [{"role": "user", "content": text} for text in contents]


def test_neither_a_template_and_a_text_nor_two_texts_spell_one_together():
    tokenizer = byte_level("{% for m in messages %}<|im_{{ m.content }}|>{% endfor %}")
    ids = chat_ids(tokenizer, asked("end", "x"), reply=False)
    assert ids == plain(tokenizer, "<|im_end|><|im_x|>")
    assert tokenizer.eos_token_id not in ids
    tokenizer = byte_level("{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>")
    ids = chat_ids(tokenizer, asked("1<|im_", "end|>2"), reply=False)
    assert ids == [*plain(tokenizer, "1<|im_end|>2"), tokenizer.eos_token_id]


CUTTING = CHATML.replace("m.content", "m.content[:12]")


def test_a_template_that_changes_such_a_text_is_refused():
    tokenizer = byte_level(CUTTING)
    with pytest.raises(ValueError, match=r"spells the special token '<\|im_end\|>'.*take it out"):
        chat_ids(tokenizer, turns_of("1", "1<|im_end|> and more"), reply=True)
    # Behind what it shows there is nothing to tell.
    behind = turns_of("1", "and much more than this <|im_end|>")
    want = tokenizer.apply_chat_template(behind, return_dict=False)
    assert chat_ids(tokenizer, behind, reply=False) == want


def test_a_template_that_shows_nothing_of_it_is_read_as_ever():
    last = "{% for m in messages %}{{ m.content.split('<|im_end|>')[-1] }}<|im_end|>{% endfor %}"
    tokenizer = byte_level(last)
    turns = asked("no<|im_end|>yes")
    want = tokenizer.apply_chat_template(turns, return_dict=False)
    assert tokenizer.decode(want) in ("yes<|im_end|>", "no<|im_end|>yes<|im_end|>")
    ids = chat_ids(tokenizer, turns, reply=False)
    assert ids.count(tokenizer.eos_token_id) == 1


def test_a_tokenizer_without_other_tokens_for_it_refuses_the_text():
    vocab = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), *((c, -3.0) for c in "ab<>/s")]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"
    )
    assert text_ids(tokenizer, "ab") == tokenizer.encode("ab")
    with pytest.raises(ValueError, match="'</s>', and this tokenizer has no other tokens for that"):
        text_ids(tokenizer, "ab</s>")


def test_a_token_that_is_looked_for_behind_a_normalizer_is_found_there():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "[": 1, "sep": 2, "]": 3, "a": 4}))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens([AddedToken("[SEP]", normalized=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"sep_token": AddedToken("[SEP]", normalized=True, special=True)})
    sep = tokenizer.convert_tokens_to_ids("[SEP]")
    assert sep in tokenizer.encode("a [sep] a")  # which is why it matters
    assert text_ids(tokenizer, "a [sEp] a") == [4, 1, 2, 3, 4]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}[SEP]{% endfor %}"
    assert chat_ids(tokenizer, asked("a [sEp] a"), reply=False) == [4, 1, 2, 3, 4, sep]


def test_the_field_of_a_template_is_somebodys_and_the_rest_the_templates():
    maker = PromptMaker(BYTES, chat=False, system_prompt=None, max_prompt_tokens=99)
    template = "<|im_start|>user\n{attack}<|im_end|>"
    want = by_hand(BYTES, ("<|bos|>",), ("<|im_start|>",), f"user\n{INJECTION}", ("<|im_end|>",))
    assert maker.filled_ids(template, "{attack}", INJECTION) == want
    assert maker.filled_ids("<|im_{attack}|>", "{attack}", "end") == by_hand(
        BYTES, ("<|bos|>",), "<|im_end|>"
    )
    chat = PromptMaker(BYTES, chat=True, system_prompt="Be <|im_end|>.", max_prompt_tokens=99)
    twice = chat.filled_ids("{attack} and {attack}", "{attack}", INJECTION)
    want = turn_by_hand(BYTES, "system", "Be <|im_end|>.")
    want += turn_by_hand(BYTES, "user", f"{INJECTION} and {INJECTION}")
    assert twice == [*want, *by_hand(BYTES, *OPENING)]
    assert chat.filled_ids("Say {attack}", "{attack}", "1") == chat.ids("Say 1")


def test_a_scorer_reads_a_completion_that_closes_its_turn_as_text():
    read = Transcript(BYTES, chat=True, system_prompt=None)
    want = turn_by_hand(BYTES, "user", "1") + turn_by_hand(BYTES, "assistant", INJECTION)
    assert read.ids("1", INJECTION, has_ended=True) == want
    end_to_end = Transcript(BYTES, chat=False, system_prompt=None)
    want = by_hand(BYTES, ("<|bos|>",), f"1{INJECTION}", ("<|im_end|>",))
    assert end_to_end.ids("1", INJECTION, has_ended=True) == want
    assert end_to_end.ids("1<|im_", "end|>", has_ended=False) == by_hand(
        BYTES, ("<|bos|>",), "1<|im_end|>"
    )


def test_a_conversation_to_learn_is_learned_as_it_is_written():
    turns = [*turns_of("Be.", INJECTION, f"no {INJECTION} yes")]
    pair = conversation_pair(turns, BYTES)
    want = turn_by_hand(BYTES, "system", "Be.") + turn_by_hand(BYTES, "user", INJECTION)
    want += by_hand(BYTES, *OPENING)
    reply = by_hand(BYTES, f"no {INJECTION} yes", ("<|im_end|>",))
    assert pair.token_ids.tolist() == [*want, *reply]
    assert pair.learned.tolist() == [False] * len(want) + [True] * len(reply)


def write(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_rows_to_learn_and_to_prefer_that_spell_them_are_counted(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    rows = [{"prompt": "1", "completion": "2"}, {"prompt": "1", "completion": "2<|im_end|>"}]
    file = write(tmp_path / "sft.jsonl", *rows)
    pairs = read_pairs(file, BYTES, max_tokens=99)
    want = [*plain(BYTES, "2<|im_end|>"), BYTES.eos_token_id]
    assert pairs[1].token_ids[pairs[1].learned].tolist() == want
    assert f"{file}: 1 of 2 rows spell a special token in their texts" in caplog.text
    caplog.clear()
    row = {"prompt": INJECTION, "chosen": "2<|im_end|>", "rejected": "3"}
    file = write(tmp_path / "pairs.jsonl", row, {**row, "prompt": turns_of("1", "2")})
    data = read_preference_data(task_of(file, max_tokens=999), BYTES)
    opened = turn_by_hand(BYTES, "user", INJECTION) + by_hand(BYTES, *OPENING)
    assert data.train[0].prompt_ids.tolist() == opened
    assert data.train[0].chosen_ids.tolist() == want
    assert f"{file}: 2 of 2 rows spell a special token" in caplog.text


@pytest.mark.parametrize("most", [40, 9999])
def test_a_tasks_rows_that_spell_them_are_counted_once_and_measured_as_text(tmp_path, caplog, most):
    caplog.set_level(logging.WARNING)
    prompts = ["1+1", INJECTION, turns_of("", "2+2<|im_end|>")[1:], "3+3"]
    file = write(tmp_path / "rows.jsonl", *({"prompt": prompt, "answer": ""} for prompt in prompts))
    task = build_task("jsonl", BYTES, path=file, eval_path=file, max_prompt_tokens=most)
    if most == 40:  # as text, the longest has more
        assert task.num_train == 3
    else:
        maker = PromptMaker(BYTES, chat=True, system_prompt=None, max_prompt_tokens=most)
        lengths = maker.num_tokens(prompts[:2])
        assert lengths == [len(task.train_prompt(i).prompt_ids) for i in range(2)]
        want = turn_by_hand(BYTES, "user", INJECTION) + by_hand(BYTES, *OPENING)
        assert task.train_prompt(1).prompt_ids.tolist() == want
    said = [record.message for record in caplog.records if "spell" in record.message]
    assert len(said) == 1
    assert said[0].startswith("task jsonl: 4 of 8 rows spell a special token")
    assert f"first {file}:2;" in said[0]


def test_a_row_that_cannot_be_told_from_special_tokens_is_named(tmp_path):
    good = {"prompt": "1", "answer": ""}
    file = write(tmp_path / "good.jsonl", good)
    bad = write(tmp_path / "bad.jsonl", good, {**good, "prompt": "1<|im_end|> and more"})
    with pytest.raises(ValueError, match=r"bad.jsonl:2: the text spells the special token"):
        build_task("jsonl", byte_level(CUTTING), path=bad, eval_path=file)


def test_a_part_of_a_text_keeps_what_others_wrote_in_it():
    shown = Shown("0123456789", ((1, 3), (5, 8)))
    assert shown.part(2, 6) == Shown("2345", ((0, 1), (3, 4)))


# --- templates that ask for the date ---


def dated(path, template):
    (copy_tiny(path) / "chat_template.jinja").write_text(template)
    return path


@pytest.mark.parametrize("form", ["%A %-d %B", "%H:%M:%S %j %p"])
def test_a_template_sees_one_date_in_any_form_and_is_else_as_it_was(form, tmp_path):
    template = (
        "\n  {% macro day(form) %}{{ strftime_now(form) }}{% endmacro %}\n"
        "  {% if strftime_now is defined %}<{{ strftime_now('FORM') }}>{% endif %}"
        "{% for m in messages %} {{ day('FORM') }} {{ m.content }}\n{% endfor %}\n"
    ).replace("FORM", form)
    turns = [{"role": "user", "content": "1+1="}]
    tokenizer = load_tokenizer(dated(tmp_path / "model", template))
    shown = tokenizer.apply_chat_template(turns, tokenize=False)
    day = TEMPLATE_DATE.strftime(form)
    assert shown == f"\n<{day}> {day} 1+1=\n"


def test_a_scorers_directory_keeps_the_template_that_it_had(tmp_path):
    path = dated(tmp_path / "scorer", "{{ strftime_now('%d') }}")
    change_json(path / "config.json", pad_token_id=None)
    settle_pad_token(path)
    assert json.loads((path / "config.json").read_text())["pad_token_id"] is not None
    assert (path / "chat_template.jinja").read_text() == "{{ strftime_now('%d') }}"


# --- Texts that follow others ---

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
    file = write(tmp_path / "pairs.jsonl", *rows)
    task = task_of(file, num_eval=1, max_tokens=99, chat=False)
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
