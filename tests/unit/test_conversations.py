"""Prompts that are lists of messages: what the model reads of them, and what scores see."""

import hashlib
import json
from types import SimpleNamespace

import pytest
import torch

from llamarl.learning.preference import read_preference_data
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.scoring.pairs import Candidate, LabelledPair, row_of
from llamarl.scoring.scorer import Item
from llamarl.scoring.sharded import Transcript
from llamarl.tasks.base import Example, PromptMaker, text_of
from llamarl.tasks.forms import call_of
from llamarl.types import MESSAGES_KEY, Message
from tests.build.rows import write_rows
from tests.built_tasks import build_task

TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('an assistant begins') }}"
    "{% endif %}{{ bos_token }}{% for m in messages %}{{ m.role[0] }}{{ m.content }}="
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
SYSTEM = {"role": "system", "content": "77"}
ASKED = {"role": "user", "content": "1+1"}
SAID = {"role": "assistant", "content": "2"}
AGAIN = {"role": "user", "content": "2+2"}
TURNS = [SYSTEM, ASKED, SAID, AGAIN]


@pytest.fixture
def tokenizer():
    loaded = load_tokenizer(tiny_directory())
    loaded.chat_template = TEMPLATE
    return loaded


def task_of(tmp_path, tokenizer, *prompts, kind="jsonl", **settings):
    rows = [{"prompt": prompt, "answer": str(n)} for n, prompt in enumerate(prompts)]
    if kind == "jsonl":
        path = write_rows(tmp_path / "rows.jsonl", *rows)
    else:
        datasets = pytest.importorskip("datasets")
        path = tmp_path / "dataset"
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return build_task(kind, tokenizer, path=path, eval_path=path, **settings)


@pytest.mark.parametrize("kind", ["jsonl", "hf_dataset"])
def test_a_conversation_is_what_transformers_makes_of_it(tokenizer, tmp_path, kind):
    task = task_of(tmp_path, tokenizer, TURNS, [ASKED], kind=kind)
    want = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    prompt = task.train_prompt(0)
    assert prompt.prompt_ids.tolist() == want
    assert prompt.text == "system: 77\n\nuser: 1+1\n\nassistant: 2\n\nuser: 2+2"
    assert prompt.messages == tuple(Message(**turn) for turn in TURNS)
    assert prompt.meta == {"answer": "0"}
    assert prompt.reward_meta == {"answer": "0", MESSAGES_KEY: TURNS}


def test_one_turn_of_the_user_is_the_prompt_that_its_text_is(tokenizer, tmp_path):
    as_turn = task_of(tmp_path, tokenizer, [ASKED], system_prompt="9").train_prompt(0)
    as_text = task_of(tmp_path, tokenizer, "1+1", system_prompt="9").train_prompt(0)
    assert torch.equal(as_turn.prompt_ids, as_text.prompt_ids)
    assert as_turn.text == as_text.text == "1+1"


def test_a_rows_own_system_turn_takes_the_place_of_the_tasks(tokenizer, tmp_path):
    task = task_of(tmp_path, tokenizer, TURNS, [ASKED], system_prompt="9")
    read = [tokenizer.decode(task.train_prompt(i).prompt_ids) for i in range(2)]
    assert "77" in read[0]
    assert "9" not in read[0] and "9" in read[1]
    assert task.train_prompt(1).messages == (Message("system", "9"), Message(**ASKED))


def test_what_rows_of_text_are_known_by_has_not_changed(tokenizer, tmp_path):
    task = task_of(tmp_path, tokenizer, "1+1=", "2+2=", max_prompt_tokens=30)
    rows = [json.dumps([f"{n}+{n}=", {"answer": str(n - 1)}], sort_keys=True) for n in (1, 2)]
    assert task.train_digest == hashlib.sha256("".join(rows).encode()).hexdigest()
    assert task.train_prompt(0).messages == ()
    assert task.train_prompt(0).reward_meta == task.train_prompt(0).meta


def test_other_turns_are_other_data(tokenizer, tmp_path):
    one = task_of(tmp_path, tokenizer, TURNS).train_digest
    # The same text to a reward, told apart by its turns.
    joined = [{"role": "user", "content": text_of([Message(**turn) for turn in TURNS])}]
    assert task_of(tmp_path, tokenizer, joined).train_digest != one


@pytest.mark.parametrize(
    "prompt, what",
    [
        ([], '"prompt" is an empty list'),
        ([SYSTEM, ASKED, SAID], '"prompt" ends with a turn of the assistant'),
        ([ASKED, {"role": "tool", "content": "1"}, AGAIN], '"prompt", message 2 is a tool\'s'),
        ([ASKED, SYSTEM, AGAIN], '"prompt", message 2 is a system turn'),
        ([{"role": "human", "content": "1"}], "\"prompt\", message 1 has role 'human'"),
        ([ASKED, SAID, {**ASKED, "content": ""}], "message 3: the user's last turn is empty"),
        ([{**ASKED, "content": [{"type": "image"}]}], '"prompt", message 1: its content is a list'),
        ([{**ASKED, "content": 1}], '"prompt", message 1: need'),
        ([SAID, ASKED], "the chat template refuses it: an assistant begins"),
        ([{**ASKED, "content": " \n"}], '"prompt" has no text in any message'),
    ],
)
def test_a_bad_conversation_is_named_by_file_and_line(tokenizer, tmp_path, prompt, what):
    with pytest.raises(ValueError) as refused:
        task_of(tmp_path, tokenizer, "1+1", prompt)
    assert "rows.jsonl:2: " in str(refused.value) and what in str(refused.value)


def test_a_row_has_no_place_of_its_own_for_the_turns(tokenizer, tmp_path):
    row = {"prompt": TURNS, "answer": "4", MESSAGES_KEY: [ASKED]}
    file = write_rows(tmp_path / "rows.jsonl", row)
    with pytest.raises(ValueError, match='jsonl:1: the key "prompt_messages" is where a reward'):
        build_task("jsonl", tokenizer, path=file, eval_path=file)
    # Where it is the prompt itself there is no other.
    task = build_task("jsonl", tokenizer, path=file, eval_path=file, prompt_key=MESSAGES_KEY)
    assert task.train_prompt(0).reward_meta[MESSAGES_KEY] == [ASKED]


def test_a_conversation_needs_a_template_and_chat(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .* but task.chat is false"):
        task_of(tmp_path, tokenizer, TURNS, chat=False)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .* tokenizer has no chat template"):
        task_of(tmp_path, tokenizer, TURNS)


def test_conversations_that_are_too_long_are_dropped(tokenizer, tmp_path, caplog):
    task = task_of(tmp_path, tokenizer, TURNS, [ASKED], max_prompt_tokens=10)
    assert (task.num_train, task.train_prompt(0).text) == (1, "1+1")
    assert "dropped 1 of 2 training" in caplog.text


def test_functions_of_every_form_find_the_turns(tokenizer, tmp_path):
    prompt = task_of(tmp_path, tokenizer, TURNS).train_prompt(0)
    columns = ([prompt.text], ["4"], [prompt.reward_meta])
    seen = []

    def single(prompt, completion, meta):
        seen.append((prompt, meta[MESSAGES_KEY]))
        return 1.0

    def trl(prompts, completions, answer, **columns):
        seen.append((prompts, completions, answer, sorted(columns)))
        return [1.0]

    for function, chat in ((single, True), (trl, True), (trl, False)):
        assert call_of(function, chat=chat, system_prompt="9")(*columns) == [1.0]
    reply = [{"role": "assistant", "content": "4"}]
    of_trl = ([TURNS], [reply], ["0"], ["log_extra", "log_metric"])
    assert seen == [(prompt.text, TURNS), of_trl, of_trl]


def test_a_scorer_is_given_the_text_and_the_turns(tokenizer, tmp_path):
    prompt = task_of(tmp_path, tokenizer, TURNS).train_prompt(0)
    item = Item(prompt, torch.tensor([5]), "4", has_ended=True, is_held_out=False)
    meta = dict(item.meta)
    assert meta.pop("sampled")["token_ids"] == [5]
    assert meta == {"answer": "0", MESSAGES_KEY: TURNS}


def test_a_scorer_of_other_tokens_reads_the_turns(tokenizer, tmp_path):
    prompt = task_of(tmp_path, tokenizer, TURNS).train_prompt(0)
    transcript = Transcript(tokenizer, chat=True, system_prompt="9")
    reply = {"role": "assistant", "content": "4"}
    want = tokenizer.apply_chat_template([*TURNS, reply], return_dict=False)
    assert transcript.ids(prompt.asked, "4", has_ended=True) == want
    tokenizer.chat_template = None
    plain = Transcript(tokenizer, chat=True, system_prompt=None)
    text = f"{prompt.text}\n\nassistant: 4"
    want = [*tokenizer.encode(text), tokenizer.eos_token_id]
    assert plain.ids(prompt.asked, "4", has_ended=True) == want


def test_preference_rows_of_conversations_are_prompts_of_the_main_job(tokenizer, tmp_path):
    maker = PromptMaker(tokenizer, chat=True, system_prompt="9", max_prompt_tokens=99)
    made = [maker.prompt(Example(tuple(Message(**turn) for turn in TURNS), {}))]
    made.append(maker.prompt(Example("1+1", {})))
    sides = (Candidate(0, "4", (1,)), Candidate(1, "5", (2,)))
    pair = LabelledPair(*sides, chosen_score=1.0, rejected_score=0.0, is_flipped=False)
    rows = []
    for number, prompt in enumerate(made):
        rows.append(row_of(pair, maker.turns(prompt.asked), number=number, margin_coef=0.0))
    file = write_rows(tmp_path / "pairs.jsonl", *rows)
    # Without the system prompt: the rows say it themselves.
    task = build_task("jsonl", tokenizer, path=file, eval_path=file, answer_key=None)
    for number, prompt in enumerate(made):
        assert torch.equal(task.train_prompt(number).prompt_ids, prompt.prompt_ids)
    chat = {"chat": True, "system_prompt": None, "max_tokens": 99}
    read = SimpleNamespace(path=str(file), eval_path=None, num_eval=0, drop_long=False, **chat)
    data = read_preference_data(read, tokenizer)
    wanted = [prompt.prompt_ids.tolist() for prompt in made]
    assert [row.prompt_ids.tolist() for row in data.train] == wanted
