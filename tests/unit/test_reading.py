"""Rows of files are looked at once a run: by one rank, in batches, and again if they change."""

import json
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.comm.groups import World
from llamarl.launch.reading import FILE, SharedReading
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.tasks import list_task
from llamarl.tasks.base import Example, PromptMaker
from llamarl.tasks.files import JsonlExamples, row_to_example
from llamarl.tasks.list_task import (
    Fitting,
    fitting_of,
    from_values,
    here,
    to_values,
    tokenizer_digest,
)
from tests.built_tasks import build_task

WAIT_S = 60.0


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(tiny_directory())


def write(file, *prompts):
    rows = [{"prompt": prompt, "answer": "1"} for prompt in prompts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


PROMPTS = [f"{n // 13 + 1}" * (n % 13 + 1) for n in range(40)]  # <bos> and a token a digit


class Rank(World):
    """A rank of several whose store is one of this process."""

    def __init__(self, rank, size, shared):
        super().__init__(rank, size, device="cpu")
        object.__setattr__(self, "shared", shared)

    def store(self):
        return self.shared if self.size > 1 else None


def alone(*folders):
    return SharedReading(Rank(0, 1, None), folders, WAIT_S)


class Counted:
    """Counts how often the rows are looked at."""

    def __init__(self, reading):
        self._reading = reading
        self.num_finds = 0

    def __call__(self, key, find):
        def counted(progress):
            self.num_finds += 1
            return find(progress)

        return self._reading(key, counted)


def build(tokenizer, path, reading=here, **given):
    given = {"max_prompt_tokens": 9, "num_eval": 4} | given
    return build_task("jsonl", tokenizer, path=path, remembered=reading, **given)


def same(one, other):
    digests = [(task.train_digest, task.eval_digest) for task in (one, other)]
    texts = []
    for task in (one, other):
        own = [task.train_prompt(i).text for i in range(task.num_train)]
        texts.append(own + [task.eval_prompt(j).text for j in range(task.num_eval)])
    return digests[0] == digests[1] and texts[0] == texts[1]


@settings(max_examples=30)
@given(
    prompts=st.lists(st.text("0123456789+= \u00e9", min_size=0, max_size=20), max_size=20),
    limit=st.integers(1, 20),
    batch=st.integers(1, 7),
    chat=st.booleans(),
)
def test_a_batch_fits_as_its_prompts_do_one_at_a_time(prompts, limit, batch, chat):
    tokenizer = load_tokenizer(tiny_directory())
    if chat:
        each = "{% for m in messages %}{{ m.content }}={% endfor %}"
        tokenizer.chat_template = "{{ bos_token }}" + each
    maker = PromptMaker(tokenizer, chat=True, system_prompt=None, max_prompt_tokens=limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(list_task, "BATCH", batch)
        found = fitting_of(maker, [Example(prompt, {}) for prompt in prompts])
    want = [place for place, prompt in enumerate(prompts) if len(maker.ids(prompt)) <= limit]
    assert list(found.places) == want


@settings(max_examples=20)
@given(bits=st.lists(st.booleans(), max_size=50))
def test_a_fitting_is_the_same_as_json(bits):
    places = array("q", [place for place, bit in enumerate(bits) if bit])
    values = json.loads(json.dumps(to_values(Fitting(places, "ab"), len(bits))))
    assert from_values(values, len(bits)) == Fitting(places, "ab")
    with pytest.raises(ValueError, match="examples"):
        from_values(values, len(bits) + 1)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "rows.jsonl", *PROMPTS)


@pytest.fixture
def first(tokenizer, tmp_path, file):
    """A reading that has found the file's rows, and its task."""
    reading = alone(tmp_path)
    task = build(tokenizer, file, reading)
    reading.save(tmp_path)
    return reading, task


def test_a_resumed_run_takes_what_was_found(tokenizer, tmp_path, file, first):
    _, task = first
    again = Counted(alone(tmp_path / "elsewhere", tmp_path))
    assert same(task, build(tokenizer, file, again)) and again.num_finds == 0
    assert same(task, build(tokenizer, file))
    assert 0 < task.num_train < 36


def test_other_rows_settings_or_tokens_are_looked_at_again(tokenizer, tmp_path, file, first):
    other_tokens = load_tokenizer(tiny_directory())
    other_tokens.chat_template = "{{ messages[0].content }}"
    assert tokenizer_digest(other_tokens) != tokenizer_digest(tokenizer)
    for changes in (
        {"chat": False},
        {"answer_key": None},
        {"prompt_key": "answer"},
        {"max_prompt_tokens": 8},
        {"num_eval": 3},
        {"tokenizer": other_tokens},
        {},
    ):
        if not changes:
            write(file, *PROMPTS[1:], "7")
        reading = Counted(alone(tmp_path))
        build(**{"tokenizer": tokenizer, "path": file, "reading": reading, **changes})
        assert reading.num_finds == 1


def test_the_same_file_of_another_kind_is_looked_at_again(tokenizer, tmp_path):
    """GSM8K's prompts have an instruction behind them."""
    rows = [{"question": f"{n}+1", "answer": f"so #### {n + 1}"} for n in range(40)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reading, again = alone(tmp_path), Counted(alone(tmp_path))
    build(tokenizer, file, reading, prompt_key="question", max_prompt_tokens=200)
    reading.save(tmp_path)
    given = {"max_prompt_tokens": 200, "num_eval": 4}
    build_task("gsm8k", tokenizer, path=file, remembered=again, **given)
    assert again.num_finds == 1


def test_a_tokenizer_is_known_by_its_tokens_its_template_and_its_special_tokens():
    def digest(change=lambda loaded: None):
        loaded = load_tokenizer(tiny_directory())
        change(loaded)
        return tokenizer_digest(loaded)

    digests = {
        digest(),
        digest(lambda loaded: loaded.add_tokens(["12"])),
        digest(lambda loaded: setattr(loaded, "chat_template", "{{ bos_token }}")),
        digest(lambda loaded: setattr(loaded, "bos_token", loaded.eos_token)),
    }
    assert len(digests) == 4 and digest() in digests
    assert tokenizer_digest(object()) is None


def test_what_was_kept_stays_kept_beside_what_is_new(tokenizer, tmp_path, file, first, caplog):
    """As of a mixture to which a part was added."""
    files = [file, write(tmp_path / "b.jsonl", *PROMPTS[1:])]
    second = alone(tmp_path)
    for own in files:
        build(tokenizer, own, second)
    second.save(tmp_path)
    third = Counted(alone(tmp_path))
    for own in files:
        build(tokenizer, own, third)
    assert third.num_finds == 0
    third._reading.save(tmp_path / "gone")  # there is nothing to save
    assert "cannot be written" not in caplog.text
    first[0].save(tmp_path / "gone")
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("damage", ["bit", "no text"])
def test_a_damaged_file_is_made_anew_and_said(tokenizer, tmp_path, file, first, caplog, damage):
    _, task = first
    kept = tmp_path / FILE
    whole = kept.read_text()
    damaged = whole.replace(task.train_digest, task.eval_digest)
    kept.write_text(damaged if damage == "bit" else '{"found": 3, "digest": "0"}')
    reading = Counted(alone(tmp_path))
    assert same(task, build(tokenizer, file, reading)) and reading.num_finds == 1
    assert f"{kept} is damaged" in caplog.text
    reading._reading.save(tmp_path)
    assert kept.read_text() == whole


def together(files, tokenizer):
    """What ranks that read these files at the same time have: a task or an error of each, and how
    often it has looked.
    """
    store, size = dist.HashStore(), len(files)
    readings = [Counted(SharedReading(Rank(rank, size, store), (), WAIT_S)) for rank in range(size)]

    def work(rank):
        try:
            return build(tokenizer, files[rank], readings[rank])
        except ValueError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        made = list(pool.map(work, range(size), timeout=WAIT_S))
    return made, [reading.num_finds for reading in readings]


def test_one_rank_looks_for_all(tokenizer, file):
    tasks, finds = together([file] * 3, tokenizer)
    assert finds == [1, 0, 0]
    assert all(same(task, build(tokenizer, file)) for task in tasks)


def test_a_rank_with_other_rows_finds_its_own_and_so_is_found_out(tokenizer, tmp_path, file):
    tasks, finds = together([file, write(tmp_path / "b.jsonl", *PROMPTS[1:], "7")], tokenizer)
    assert finds == [1, 1] and tasks[0].train_digest != tasks[1].train_digest


def test_what_is_wrong_with_the_rows_ends_all_ranks(tokenizer, file):
    file.write_text(file.read_text() + "{")
    (told, other), finds = together([file, file], tokenizer)
    assert finds == [1, 0]
    assert f"{file}:41: not JSON" in str(told) and "rank 0 failed to read" in str(other)


@settings(max_examples=50)
@given(
    lines=st.lists(
        st.sampled_from(["", " ", "\u00a0", '{"prompt": "1"}', ' {"prompt": "\u00e9"}', "\r"])
    ),
    mark=st.booleans(),
    end=st.sampled_from(["", "\n"]),
)
def test_rows_that_are_read_when_asked_for_are_those_of_the_file(
    tmp_path_factory, lines, mark, end
):
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_bytes(("\ufeff" * mark + "\n".join(lines) + end).encode())
    want = [(n, json.loads(line)) for n, line in enumerate(lines, 1) if line.strip()]
    if not want:
        with pytest.raises(ValueError, match="empty"):
            JsonlExamples(file, dict)
        return
    rows = JsonlExamples(file, lambda row: row_to_example(row, "prompt", None))
    rows.check()
    assert [rows[i].text for i in range(len(rows))] == [row["prompt"] for _, row in want]
    assert [rows.where(i) for i in range(len(rows))] == [f"{file}:{n}" for n, _ in want]
    odd = rows.select(range(0, len(rows), 2))
    assert [example.text for example in odd] == [row["prompt"] for _, row in want[::2]]
