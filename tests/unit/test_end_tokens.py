"""What the chat template, the tokenizer and the directory end a text with ends a sample too."""

import json
import logging

import pytest
from tokenizers import processors

from llamarl.launch.checks import check_inputs
from llamarl.learning.sft import conversation_pair, read_pairs
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.tasks.base import PromptMaker
from llamarl.tasks.special import end_token, special_tokens, stop_tokens, turn_end
from tests.build.model_directory import copy_tiny
from tests.made_tokenizers import CHATML, ZEPHYR, byte_level, sentencepiece
from tests.unit.refusals import change, model_job

TURNS = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
PHI = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}<|bos|>"


@pytest.fixture
def model(tmp_path):
    return copy_tiny(tmp_path / "model")


def base_model(template=CHATML):
    """A tokenizer whose end token is another than what its template ends turns with."""
    tokenizer = byte_level(template)
    tokenizer.eos_token = "<|bos|>"
    return tokenizer


def warned(model, caplog, *options):
    """What is warned of at the start of such a job."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "llamarl"):
        check_inputs(model_job(model, *options).inputs)
    return caplog.text


def ids_of(tokenizer, *words):
    return tokenizer.convert_tokens_to_ids(list(words))


@pytest.mark.parametrize(
    "template, end",
    [
        (PHI, "<|im_end|>"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        (None, None),
    ],
)
def test_the_end_of_a_turn_is_the_first_special_token_behind_a_reply(template, end):
    tokenizer = byte_level(template)
    assert turn_end(tokenizer) == (None if end is None else ids_of(tokenizer, end)[0])


def test_a_templates_end_of_a_turn_ends_samples(model):
    tokenizer = base_model()
    im_end, bos = ids_of(tokenizer, "<|im_end|>", "<|bos|>")
    (model / "generation_config.json").write_text("{}")
    assert set(stop_tokens(model, tokenizer)) == {bos, im_end}
    assert stop_tokens(model, tokenizer, chat=False) == (bos,)


def test_end_tokens_of_config_json_count_without_a_generation_config(model):
    change(model / "config.json", eos_token_id=[2, 14])
    tokenizer = load_tokenizer(model)
    assert stop_tokens(model, tokenizer, chat=False) == (2,)
    (model / "generation_config.json").unlink()
    assert stop_tokens(model, tokenizer, chat=False) == (2, 14)


def test_a_run_says_that_the_template_ends_turns_with_another_token(model, caplog):
    template = "{% for m in messages %}{{ m.content }}<pad>{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    said = "ends a reply with <pad>, which is no end token of the directory"
    assert said in warned(model, caplog, "task.chat=true")
    assert "ends a reply" not in warned(model, caplog, "task.chat=false")


def test_a_conversation_is_learned_up_to_the_end_of_its_turn():
    tokenizer = base_model()
    pair = conversation_pair(TURNS, tokenizer)
    learned = pair.token_ids[pair.learned].tolist()
    assert tokenizer.convert_ids_to_tokens(learned) == ["2", "<|im_end|>"]


@pytest.mark.parametrize("chat, end", [(True, "<|im_end|>"), (False, "<|bos|>")])
def test_a_row_of_texts_ends_as_its_prompt_is_shown(tmp_path, chat, end):
    tokenizer = base_model()
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1+1?", "completion": "2"}) + "\n")
    (pair,) = read_pairs(file, tokenizer, max_tokens=99, chat=chat)
    assert pair.token_ids[-1] == ids_of(tokenizer, end)[0] == end_token(tokenizer, chat=chat)


@pytest.mark.parametrize("make", [byte_level, lambda: sentencepiece("prepend", ZEPHYR)])
def test_an_end_token_that_a_tokenizer_adds_is_no_part_of_a_prompt(make):
    tokenizer = make()
    spelled = tokenizer.eos_token if make is byte_level else "is"
    maker = PromptMaker(tokenizer, chat=False, system_prompt=None, max_prompt_tokens=99)
    texts = ["12+34", "", f"what is {spelled}"]
    want = [maker.ids(text) for text in texts]
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        special_tokens=[(word, ids_of(tokenizer, word)[0]) for word in (begin, end)],
    )
    assert tokenizer.encode("12")[-1] == tokenizer.eos_token_id
    ending = PromptMaker(tokenizer, chat=False, system_prompt=None, max_prompt_tokens=99)
    special_tokens.cache_clear()  # it was changed, and what is known of it is kept
    assert [ending.ids(text) for text in texts] == want
    assert ending.num_tokens(texts) == [len(ids) for ids in want]


def rows(path, *prompts):
    """The options of a task of these rows."""
    path.write_text("".join(json.dumps({"prompt": p, "answer": "5"}) + "\n" for p in prompts))
    return ("task=jsonl", f"task.path={path}", "task.max_prompt_tokens=99")


def test_a_chat_task_without_a_chat_template_is_warned_of(model, tmp_path, caplog):
    task = rows(tmp_path / "rows.jsonl", *(f"1+{i}=" for i in range(8)))
    assert "has no chat template, so with task.chat=true" in warned(model, caplog, *task)
    assert "no chat template" not in warned(model, caplog, *task, "task.chat=false")
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    assert "no chat template" not in warned(model, caplog, *task)


def test_prompts_that_the_tokenizer_cannot_write_are_counted(model, tmp_path, caplog):
    task = rows(tmp_path / "rows.jsonl", *(f"1+{i}=" for i in range(8)))
    assert "this tokenizer cannot write" not in warned(model, caplog, *task, "task.chat=false")
    tokenizer = load_tokenizer(model)
    task = rows(tmp_path / "rows.jsonl", *("ÄÖÜß" for _ in range(8)))
    ids = tokenizer.encode("ÄÖÜß")
    num_unknown = ids.count(tokenizer.unk_token_id)
    assert num_unknown
    said = warned(model, caplog, *task, "task.chat=false", "eval.num_prompts=1")
    assert f"{8 * num_unknown} of the {8 * len(ids)} tokens of the first 8 prompts are" in said


@pytest.mark.parametrize(
    "content, most",
    [
        ("{{ m.content }}{{ m.content }}", 36),  # re-reading
        ("{{ m.content | tojson | replace('1', '1+1') }}", 30),
    ],
)
def test_a_prompt_that_the_template_makes_longer_is_counted_as_it_is_shown(content, most):
    tokenizer = load_tokenizer(tiny_directory())
    tokenizer.chat_template = "{% for m in messages %}" + content + "{% endfor %}"
    maker = PromptMaker(tokenizer, chat=True, system_prompt=None, max_prompt_tokens=most)
    text = "1+" * 10
    assert len(maker.ids(text)) > most > len(text) + 8
    assert not maker.fits(text) and not maker.surely_fits(text)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    plain = PromptMaker(tokenizer, chat=True, system_prompt=None, max_prompt_tokens=most)
    assert plain.surely_fits(text)
