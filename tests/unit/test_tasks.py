"""Tasks and the rewards that come with them."""

import bz2
import gzip
import json
import lzma
import math
import random
import re
import sys
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from itertools import product
from typing import get_args, get_type_hints

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamarl.config.sections.task import AnyTaskSettings
from llamarl.launch import tasks as launch_tasks
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.tasks import procedural
from llamarl.tasks.base import PromptMaker
from llamarl.tasks.files import read_jsonl
from llamarl.tasks.list_task import hold_out
from llamarl.tasks.rewards import exact_match, final_number, numeric_match, reasoning_gym_score
from tests.built_tasks import NAMES, build_task, set_of

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if "
    "add_generation_prompt %}<a>{% endif %}"
)


class CharTokenizer:
    """One token a character, after a bos; a chat template is a role letter before each turn and
    "<a>" at the end.
    """

    def __init__(self, chat_template=None):
        self.chat_template, self.num_encoded = chat_template, 0

    def encode(self, text):
        self.num_encoded += 1
        return [1, *map(ord, text)]

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, return_dict=False):
        assert add_generation_prompt and not return_dict
        text = "".join(f"<{m['role'][0]}>{m['content']}" for m in messages) + "<a>"
        return self.encode(text) if tokenize else text


def read(prompt):
    assert prompt.prompt_ids.tolist()[0] == 1
    return "".join(map(chr, prompt.prompt_ids.tolist()[1:]))


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def rows(n):
    return [{"prompt": f"q{i}", "answer": f"a{i}"} for i in range(n)]


# --- addition ---


def test_addition_is_the_fixed_split_that_figures_are_compared_on():
    task = build_task("addition", CharTokenizer(), chat=False, max_prompt_tokens=16)
    pairs = list(product(range(10, 100), repeat=2))
    random.Random(0).shuffle(pairs)
    asked = [task.eval_prompt(j).text for j in range(task.num_eval)] + [
        task.train_prompt(i).text for i in range(task.num_train)
    ]
    assert asked == [f"{a}+{b}=" for a, b in pairs]
    assert (task.num_train, task.num_eval) == (7600, 500)
    prompt = task.train_prompt(0)
    assert read(prompt) == prompt.text and prompt.meta["answer"] == str(
        sum(map(int, re.findall(r"\d+", prompt.text)))
    )


# --- questions ---


@pytest.mark.parametrize("name, count", [("sum", 400), ("larger", 380)])
def test_questions_are_all_pairs_of_which_a_tenth_is_held_out(name, count):
    settings = {"name": name, "least": 1, "most": 20, "max_prompt_tokens": 128}
    task = build_task("questions", CharTokenizer(), **settings)
    asked = [task.eval_prompt(j) for j in range(task.num_eval)]
    asked += [task.train_prompt(i) for i in range(task.num_train)]
    assert len({prompt.text for prompt in asked}) == len(asked) == count
    assert task.num_eval == count // 10
    for prompt in asked:
        a, b = map(int, re.findall(r"\d+", prompt.text))
        assert 1 <= min(a, b) and max(a, b) <= 20
        assert prompt.meta["answer"] == str(a + b if name == "sum" else max(a, b))
    assert task.default_reward.endswith(":numeric_match")
    score = numeric_match(prompt.text, f"It is {prompt.meta['answer']}.", prompt.meta)
    assert score == 1.0


@pytest.mark.parametrize(
    "name, most, what",
    [("sums", 20, "did you mean sum?"), (None, 20, "sum and larger"), ("sum", 1, "task.most=1")],
)
def test_questions_that_there_are_not_are_refused(name, most, what):
    with pytest.raises(ValueError, match=re.escape(what)):
        build_task("questions", CharTokenizer(), name=name, most=most)


# -- JSONL and GSM8K
# --------------------------------------------------------------------------------------------------


def test_jsonl_meta_is_the_rest_of_the_row_with_the_answer_under_answer(tmp_path):
    file = write_jsonl(
        tmp_path / "t.jsonl", [{"q": f"q{i}", "gold": i, "level": "hard"} for i in range(2)]
    )
    task = build_task(
        "jsonl", CharTokenizer(), path=file, eval_path=file, prompt_key="q", answer_key="gold"
    )
    assert (task.train_prompt(1).text, task.train_prompt(1).meta) == (
        "q1",
        {"gold": 1, "level": "hard", "answer": 1},
    )
    assert (task.num_train, task.num_eval) == (2, 2)


def test_a_row_has_no_key_under_which_a_reward_finds_what_was_sampled(tmp_path):
    row = {"prompt": "q", "answer": "a", "sampled": 1}
    file = write_jsonl(tmp_path / "t.jsonl", [row])
    with pytest.raises(ValueError, match=r't.jsonl:1: the key "sampled" is where a reward finds'):
        build_task("jsonl", CharTokenizer(), path=file, eval_path=file)
    file = write_jsonl(tmp_path / "t.jsonl", [{"sampled": "q", "answer": "a"}])
    task = build_task("jsonl", CharTokenizer(), path=file, eval_path=file, prompt_key="sampled")
    assert task.train_prompt(0).meta == {"answer": "a"}  # the prompt is not in it


@pytest.mark.parametrize("key", ["part_reward", "eval_set"])
def test_a_row_has_no_key_under_which_a_prompts_own_reward_or_set_is_noted(tmp_path, key):
    file = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "q", "answer": "a", key: "x"}])
    with pytest.raises(ValueError, match=rf't.jsonl:1: the key "{key}" is where .*; rename'):
        build_task("jsonl", CharTokenizer(), path=file, eval_path=file)


def test_every_bad_line_is_named_with_file_and_line(tmp_path):
    file = tmp_path / "t.jsonl"
    good = b'{"prompt": "q", "answer": "a"}\n'
    file.write_bytes(
        good
        + b'{"prompt": \n\n[1]\n{"promt": "q", "answer": "a"}\n{"prompt": 3, "answer": 4}\n\xff\n'
        + good
    )
    with pytest.raises(ValueError) as error:
        build_task("jsonl", CharTokenizer(), path=file)
    message = str(error.value)
    assert message.startswith("5 bad lines:")
    for line, what in (
        (2, "not JSON"),
        (4, "need a JSON object, this is list"),
        (5, 'no key "prompt"; did you mean "promt"?'),
    ):
        assert f"{file}:{line}: {what}" in message
    assert f'{file}:6: "prompt" must be text' in message and f"{file}:7: 'utf-8' codec" in message


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (
            {"prompt": "2+2=", "answer": None},
            '"answer" is null; give the answer, or leave the row out',
        ),
        (
            {"prompt": "ab\ud800", "answer": "4"},
            r'"prompt" holds \ud800 at character 3, half of a surrogate pair; remove it',
        ),
    ],
)
def test_a_null_and_half_a_character_are_refused_by_line(tmp_path, row, what):
    file = write_jsonl(tmp_path / "t.jsonl", [*rows(1), row])
    with pytest.raises(ValueError, match=re.escape(f"{file}:2: {what}")):
        build_task("jsonl", CharTokenizer(), path=file)


def test_without_an_answer_key_prompts_need_no_answer(tmp_path):
    file = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "q", "level": 3, "answer": None}] * 2)
    prompt = build_task("jsonl", CharTokenizer(), path=file, answer_key=None).train_prompt(0)
    assert (prompt.text, prompt.meta) == ("q", {"level": 3, "answer": None})


def test_many_bad_lines_are_cut_and_counted(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text("x\n" * 13)
    with pytest.raises(ValueError, match="13 bad lines(.|\n)*:10: (.|\n)*and 3 more$"):
        build_task("jsonl", CharTokenizer(), path=file)


@pytest.mark.parametrize("text", ["\n\n"])
def test_an_empty_file_is_an_error(tmp_path, text):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ValueError, match="t.jsonl: empty"):
        build_task("jsonl", CharTokenizer(), path=tmp_path / "t.jsonl")


@pytest.mark.parametrize("kind", ["jsonl", "hf_dataset"])
def test_a_missing_path_says_which_setting_names_it(kind, tmp_path):
    with pytest.raises(FileNotFoundError, match="task.path"):
        build_task(kind, CharTokenizer(), path=tmp_path / "absent")


def test_gsm8k_keeps_the_question_raw_and_tells_the_model_how_to_finish(tmp_path):
    row = {"question": "How many?", "answer": "2*3=<<2*3=6>>6\n#### 1,006"}
    task = build_task("gsm8k", CharTokenizer(), path=write_jsonl(tmp_path / "t.jsonl", [row] * 2))
    prompt = task.train_prompt(0)
    assert prompt.text == "How many?" and prompt.meta == {
        "answer": "1,006",
        "solution": row["answer"],
    }
    assert read(prompt).startswith("How many?\n\n") and read(prompt).endswith("#### number")
    assert task.default_reward.endswith(":numeric_match")


def test_gsm8k_without_a_final_answer_is_a_bad_line(tmp_path):
    file = write_jsonl(tmp_path / "t.jsonl", [{"question": "q", "answer": "6"}])
    with pytest.raises(ValueError, match=r't.jsonl:1: "answer" must be a worked solution'):
        build_task("gsm8k", CharTokenizer(), path=file)


# -- held-out rows, lengths, templates
# --------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(0, 50))
def test_held_out_rows_are_few_and_never_trained_on(num_rows, num_eval):
    train, held = hold_out(num_rows, num_eval)
    assert sorted(train + held) == list(range(num_rows))
    assert train and len(held) <= min(num_eval, max(1, num_rows // 10))
    assert hold_out(num_rows, num_eval) == (train, held)


def test_a_prompt_whose_rows_repeat_is_held_out_with_all_of_them(tmp_path, caplog):
    """20 prompts, each in 20 rows: two prompts are held out, once each."""
    file = write_jsonl(tmp_path / "t.jsonl", rows(20) * 20)
    task = build_task("jsonl", CharTokenizer(), path=file)
    trained, held = texts(task)
    assert len(held) == 2 and len(trained) == 18 * 20
    assert not set(held) & set(trained) and len(set(held)) == 2
    assert "2 are held out, and 38 more rows of theirs are left out of training" in caplog.text


def test_rows_without_repeats_are_split_as_ever(tmp_path, caplog):
    file = write_jsonl(tmp_path / "t.jsonl", rows(100))
    trained, held = texts(build_task("jsonl", CharTokenizer(), path=file))
    kept, chosen = hold_out(100, 500)
    assert trained == [f"q{i}" for i in kept] and held == [f"q{i}" for i in chosen]
    assert not caplog.text


def test_rows_of_one_prompt_hold_none_out_and_say_so(tmp_path, caplog):
    file = write_jsonl(tmp_path / "t.jsonl", [row | {"prompt": "q"} for row in rows(50)])
    task = build_task("jsonl", CharTokenizer(), path=file)
    assert (task.num_train, task.num_eval) == (50, 0)
    assert "50 row(s), 1 different prompt(s), so none is held out" in caplog.text


@pytest.mark.parametrize("is_mixture", [False, True])
def test_a_set_whose_prompts_are_trained_on_is_told(tmp_path, caplog, is_mixture):
    """Two of the set's three rows have prompts of the 40 rows of the task."""
    trained = write_jsonl(tmp_path / "t.jsonl", rows(40))
    own = write_jsonl(tmp_path / "own.jsonl", [{"prompt": "own", "answer": "a"}])
    asked = [*rows(2), {"prompt": "other", "answer": "a"}]
    file = write_jsonl(tmp_path / "e.jsonl", asked)
    kind = {"kind": "jsonl", "eval_path": own}
    if is_mixture:
        part = {"weight": 1.0, **kind}
        parts = {"a": part | {"path": trained}, "b": part | {"path": own, "eval_path": file}}
        build_task("mixture", CharTokenizer(), parts=parts, num_eval=6)
        told = "task.parts.b: 2 of 3 held-out rows have a prompt that task.parts.a trains on"
    else:
        task = build_task("jsonl", CharTokenizer(), path=trained, eval_path=own)
        one = set_of("jsonl", path=file, num_prompts=3, max_prompt_tokens=100)
        launch_tasks.TaskBuilder(CharTokenizer()).held_out(task, 1, {"e": one})
        told = "eval.sets.e: 2 of 3 held-out rows have a prompt that the task trains on"
    assert told in caplog.text


@pytest.mark.parametrize("num_prompts", [1])
def test_rows_of_an_environment_differ_by_all_of_their_columns(tmp_path, caplog, num_prompts):
    """What it asks may be in any of them; the first two rows are equal."""
    lines = [{"prompt": f"Guess {i % num_prompts}", "secret": i} for i in range(100)]
    file = write_jsonl(tmp_path / "t.jsonl", [lines[0], *lines])
    settings = {"environment": "tests.games:Shop", "path": file}
    task = build_task("environment", load_tokenizer(tiny_directory()), chat=False, **settings)
    trained = [task.train_prompt(i).meta["secret"] for i in range(task.num_train)]
    held = [task.eval_prompt(j).meta["secret"] for j in range(task.num_eval)]
    _, chosen = hold_out(100, 500)
    assert held == chosen and not set(trained) & set(held)
    assert len(trained) + len(held) == 101 - (0 in chosen)


def test_held_out_rows_that_are_trained_on_are_counted(tmp_path, caplog):
    file = write_jsonl(tmp_path / "t.jsonl", rows(10) * 3)
    other = write_jsonl(tmp_path / "e.jsonl", rows(12)[8:])
    build_task("jsonl", CharTokenizer(), path=file, eval_path=other)
    said = "2 of 4 held-out rows have a prompt that 6 of 30 training rows have too"
    assert said in caplog.text


def test_what_is_no_text_is_named(tmp_path):
    file = tmp_path / "t.jsonl"
    plain = b'{"prompt": "q", "answer": "a"}\n'
    for data, kind in (
        (gzip.compress(plain), "a gzip file"),
        (bz2.compress(plain), "a bzip2 file"),
        (lzma.compress(plain), "an xz file"),
        (b"\x28\xb5\x2f\xfd" + plain, "a zstd file"),
        (plain.decode().encode("utf-16"), "a text in UTF-16"),
        (b"PAR1" + plain, "a parquet file; task=hf_dataset"),
    ):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=f"t.jsonl: looks like {kind}"):
            build_task("jsonl", CharTokenizer(), path=file)
        with pytest.raises(ValueError, match=f"t.jsonl: looks like {kind}"):
            read_jsonl(file, dict)


def test_long_prompts_are_dropped_counted_and_warned_of_once(tmp_path, caplog):
    texts = ["x" * n for n in (3, 9, 10, 4, 50)]  # with the bos: 4, 10, 11, 5, 51 tokens
    file = write_jsonl(tmp_path / "t.jsonl", [{"prompt": t, "answer": ""} for t in texts])
    other = [{"prompt": t.replace("x", "y"), "answer": ""} for t in texts]
    asked = write_jsonl(tmp_path / "e.jsonl", other)
    task = build_task("jsonl", CharTokenizer(), path=file, eval_path=asked, max_prompt_tokens=10)
    assert [task.train_prompt(i).text for i in range(task.num_train)] == [
        texts[0],
        texts[1],
        texts[3],
    ]
    assert [r.getMessage() for r in caplog.records] == [
        "task jsonl: dropped 2 of 5 training and 2 of 5 evaluation prompts, longer than "
        "max_prompt_tokens=10"
    ]


def test_no_prompt_that_fits_is_an_error(tmp_path):
    file = write_jsonl(tmp_path / "t.jsonl", rows(3))
    with pytest.raises(
        ValueError, match="none of 2 training prompts fits task.max_prompt_tokens=2; raise it"
    ):
        build_task("jsonl", CharTokenizer(), path=file, max_prompt_tokens=2)


def test_prompts_are_tokenised_once_and_only_when_asked_for(tmp_path):
    tokenizer = CharTokenizer()
    task = build_task("jsonl", tokenizer, path=write_jsonl(tmp_path / "t.jsonl", rows(1000)))
    assert tokenizer.num_encoded == 1  # the empty prompt, for the template's own length
    assert task.train_prompt(5) is task.train_prompt(5)
    assert tokenizer.num_encoded == 2


@given(st.text(max_size=30), st.integers(1, 40))
@example("\ufdfa", 15)  # 3 bytes that normalization makes 33
def test_the_shortcut_by_size_never_lets_a_long_prompt_through(text, limit):
    class Worst(CharTokenizer):
        """A byte a token, after the normalization that lengthens text most."""

        def encode(self, text):
            import unicodedata

            return [1, *unicodedata.normalize("NFKD", text).encode("utf-8", "replace")]

    maker = PromptMaker(Worst(), chat=False, system_prompt=None, max_prompt_tokens=limit)
    assert maker.fits(text) == (len(maker.ids(text)) <= limit)


def test_the_chat_template_is_used_where_the_tokenizer_has_one(tmp_path):
    file = write_jsonl(tmp_path / "t.jsonl", rows(2))

    def first(template, **options):
        return read(
            build_task(
                "jsonl", CharTokenizer(template), path=file, eval_path=file, **options
            ).train_prompt(0)
        )

    assert first(TEMPLATE, system_prompt="be brief") == "<s>be brief<u>q0<a>"
    assert first(TEMPLATE) == "<u>q0<a>"
    assert first(TEMPLATE, chat=False) == first(None) == "q0"


@pytest.mark.parametrize(
    ("template", "chat", "why"),
    [(None, True, "no chat template"), (TEMPLATE, False, "task.chat is false")],
)
def test_a_system_prompt_that_cannot_be_sent_is_an_error(template, chat, why):
    with pytest.raises(ValueError, match=f"task.system_prompt is set, but .*{why}"):
        build_task("addition", CharTokenizer(template), chat=chat, system_prompt="be brief")


# -- Hugging Face datasets on disk
# ------------------------------------------------------------------------------------


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    module = pytest.importorskip("datasets")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    module.disable_progress_bars()
    return module


def texts(task):
    return [task.train_prompt(i).text for i in range(task.num_train)], [
        task.eval_prompt(j).text for j in range(task.num_eval)
    ]


def test_a_saved_dataset_reads_its_train_and_test_splits(tmp_path, datasets):
    splits = {
        "test": datasets.Dataset.from_list(rows(3)[2:]),
        "train": datasets.Dataset.from_list(rows(2)),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    task = build_task("hf_dataset", CharTokenizer(), path=tmp_path / "saved")
    assert texts(task) == (["q0", "q1"], ["q2"])
    assert task.train_prompt(1).meta == {"answer": "a1"}


def test_a_directory_of_parquet_without_a_test_split_has_a_tenth_held_out(tmp_path, datasets):
    (tmp_path / "files").mkdir()
    datasets.Dataset.from_list(rows(20)).to_parquet(tmp_path / "files" / "train-00000.parquet")
    train, held = texts(build_task("hf_dataset", CharTokenizer(), path=tmp_path / "files"))
    assert len(held) == 2 and sorted(train + held) == sorted(r["prompt"] for r in rows(20))


def save_splits(folder, datasets, *names):
    """Save a dataset with these splits, of two rows each; a row's prompt names its split."""
    splits = {}
    for name in names:
        own = [{"prompt": f"{name} {n}", "answer": "a"} for n in range(2)]
        splits[name] = datasets.Dataset.from_list(own)
    datasets.DatasetDict(splits).save_to_disk(folder)
    return folder


@pytest.mark.parametrize(
    "names, train, held_out",
    [
        (("test_prefs", "train_prefs", "test"), "train_prefs", "test_prefs"),
        (("train_sft", "train", "test_sft"), "train", None),
        (("everything",), "everything", None),
    ],
)
def test_the_split_whose_name_says_so_is_trained_on(tmp_path, datasets, names, train, held_out):
    folder = save_splits(tmp_path / "saved", datasets, *names)
    trained, held = texts(build_task("hf_dataset", CharTokenizer(), path=folder))
    assert {text.split()[0] for text in trained} == {train}
    assert {text.split()[0] for text in held} == {held_out or train}


@pytest.mark.parametrize(
    "names, said",
    [
        (("test",), "none of its splits is for training (test)"),
        (("train_gen", "train_sft", "test"), "several of its splits are for training"),
        (("constrained", "strained"), "none of its splits is for training"),
    ],
)
def test_no_split_is_trained_on_by_a_guess(tmp_path, datasets, names, said):
    folder = save_splits(tmp_path / "saved", datasets, *names)
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        build_task("hf_dataset", CharTokenizer(), path=folder)
    assert "name one of them in task.path" in str(refused.value)
    own = build_task("hf_dataset", CharTokenizer(), path=folder / names[0])
    assert {text.split()[0] for text in sum(texts(own), [])} == {names[0]}


def test_evaluation_data_may_be_a_test_split_alone(tmp_path, datasets):
    train = save_splits(tmp_path / "train", datasets, "train")
    for names, held_out in (
        (("test",), "test"),
        (("train_sft", "test_sft"), "test_sft"),
        (("validation", "test"), "test"),
    ):
        folder = save_splits(tmp_path / "_".join(names), datasets, *names)
        task = build_task("hf_dataset", CharTokenizer(), path=train, eval_path=folder)
        assert {text.split()[0] for text in texts(task)[1]} == {held_out}


def test_files_of_a_dataset_may_be_named_alone_or_by_a_pattern(tmp_path, datasets):
    for name in ("test", "train_gen-0", "train_gen-1", "train_sft-0"):
        own = datasets.Dataset.from_list([{"prompt": name, "answer": "a"}])
        own.to_parquet(tmp_path / f"{name}.parquet")
    read = partial(build_task, "hf_dataset", CharTokenizer(), eval_path=tmp_path / "test.parquet")
    trained, held = texts(read(path=tmp_path / "train_sft-0.parquet"))
    assert (trained, held) == (["train_sft-0"], ["test"])
    trained, _ = texts(read(path=tmp_path / "train_gen-*.parquet"))
    assert sorted(trained) == ["train_gen-0", "train_gen-1"]
    with pytest.raises(FileNotFoundError, match="no such directory, file or pattern of files"):
        read(path=tmp_path / "train_dpo-*.parquet")
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(ValueError, match="notes.txt: not a dataset, .*it ends in .txt"):
        read(path=tmp_path / "notes.txt")


def test_bad_hf_data_says_where_and_what(tmp_path, datasets):
    datasets.Dataset.from_list(
        [{"prompt": "q", "gold": "a"}, {"prompt": None, "gold": "a"}]
    ).save_to_disk(tmp_path / "saved")
    with pytest.raises(
        ValueError, match=r'saved \(train\): no key "answer"; there is "prompt", "gold"'
    ):
        build_task("hf_dataset", CharTokenizer(), path=tmp_path / "saved")
    with pytest.raises(ValueError, match=r'saved \(train\): row \d: "prompt" must be text'):
        build_task("hf_dataset", CharTokenizer(), path=tmp_path / "saved", answer_key="gold")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="nothing: not a dataset, need parquet"):
        build_task("hf_dataset", CharTokenizer(), path=tmp_path / "nothing")


def test_columns_that_json_cannot_hold_are_left_out_with_one_warning(tmp_path, datasets, caplog):
    held = {"words": ["a"], "score": 0.5, "pair": {"en": "x"}, "kind": 0, "grid": [[1, 2]]}
    odd = {
        "day": date(2020, 1, 2),
        "raw": b"\xff",
        "deep": {"times": [datetime(2020, 1, 2)]},
        "picture": {"bytes": b"", "path": None},
    }
    saved = datasets.Dataset.from_list([{**row, **held, **odd} for row in rows(20)])
    saved = saved.cast_column("picture", datasets.Image()).cast_column(
        "kind", datasets.ClassLabel(names=["a"])
    )
    saved = saved.cast_column("grid", datasets.Array2D((1, 2), "int32"))
    saved.with_format("numpy").save_to_disk(tmp_path / "saved")
    task = build_task("hf_dataset", CharTokenizer(), path=tmp_path / "saved")
    assert json.loads(json.dumps(task.train_prompt(0).meta)) == {"answer": "a0", **held}
    (said,) = [r.getMessage() for r in caplog.records if r.name.startswith("llamarl")]
    assert f"{tmp_path / 'saved'} (train): left out what JSON cannot hold: " in said and all(
        f"{name} (" in said for name in odd
    )


def test_an_answer_that_json_cannot_hold_is_refused(tmp_path, datasets):
    datasets.Dataset.from_list([{"prompt": "q", "answer": date(2020, 1, 2)}] * 2).save_to_disk(
        tmp_path / "saved"
    )
    with pytest.raises(
        ValueError,
        match=(
            r'saved \(train\): "answer" is date32\[day\], which JSON cannot hold; cast it to text'
        ),
    ):
        build_task("hf_dataset", CharTokenizer(), path=tmp_path / "saved")


def test_a_null_answer_of_a_dataset_is_refused_by_row(tmp_path, datasets):
    datasets.Dataset.from_list([{"prompt": "q", "answer": a} for a in ("4", None)]).save_to_disk(
        tmp_path / "saved"
    )
    with pytest.raises(ValueError, match=r'saved \(train\): row 1: "answer" is null'):
        build_task(
            "hf_dataset", CharTokenizer(), path=tmp_path / "saved", eval_path=tmp_path / "saved"
        )


def test_without_the_datasets_package_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        build_task("hf_dataset", CharTokenizer(), path=tmp_path)


# --- reasoning_gym ---


def chain_sum(seed=0, **options):
    return build_task(
        "reasoning_gym", CharTokenizer(), name="chain_sum", seed=seed, num_eval=40, **options
    )


def questions(task, n=200):
    return [task.train_prompt(i).text for i in range(n)]


def texts_of_eval(task):
    return [task.eval_prompt(j).text for j in range(task.num_eval)]


def test_reasoning_gym_is_a_function_of_the_seed_and_evaluates_on_the_same_questions_always():
    assert questions(chain_sum()) == questions(chain_sum())
    shared = set(questions(chain_sum())) & set(questions(chain_sum(seed=1)))
    assert len(shared) < 50  # by chance; windows one seed apart would share 199 of 200
    assert texts_of_eval(chain_sum()) == texts_of_eval(chain_sum(seed=1))


def test_a_training_question_that_is_held_out_is_replaced(monkeypatch):
    monkeypatch.setattr(
        procedural, "SEED_WINDOW", 0
    )  # training would begin with the evaluation questions
    task = chain_sum()
    held = set(texts_of_eval(task))
    assert not held & set(questions(task))
    assert procedural.open_dataset("chain_sum", 40, 0)[0]["question"] in held


def test_a_question_that_is_too_long_is_replaced_by_one_that_fits():
    lengths = [p.prompt_ids.numel() for p in map(chain_sum().train_prompt, range(100))]
    limit = sorted(lengths)[50]
    task = chain_sum(max_prompt_tokens=limit)
    assert max(lengths) > limit >= max(task.train_prompt(i).prompt_ids.numel() for i in range(100))
    with pytest.raises(ValueError, match="100 questions in a row were over max_prompt_tokens=5"):
        chain_sum(max_prompt_tokens=5).train_prompt(0)


def test_reasoning_gym_scores_the_tagged_answer_or_the_last_line():
    prompt = chain_sum().train_prompt(7)
    meta = json.loads(json.dumps(prompt.meta))  # as the worker gets it
    right = meta["answer"]
    for text, score in (
        (right, 1),
        (f"so it is\n{right}\n", 1),
        (f"<answer>5</answer><answer> {right} </answer> bye", 1),
        (str(int(right) + 1), 0),
        ("", 0),
        (f"{right}\nno idea", 0),
    ):
        assert reasoning_gym_score(prompt.text, text, meta) == score, text
    with pytest.raises(ValueError, match="another question"):
        reasoning_gym_score(prompt.text + "?", right, meta)


def test_the_consolation_for_a_wrong_answer_is_no_reward():
    prompt = build_task(
        "reasoning_gym", CharTokenizer(), name="countdown", num_eval=0
    ).train_prompt(0)
    meta = prompt.meta
    entry = procedural.open_dataset(meta["dataset"], meta["size"], meta["seed"])[meta["index"]]
    assert procedural.open_dataset("countdown", 1, 0).score_answer("no idea", entry) == 0.01
    assert reasoning_gym_score(prompt.text, "no idea", meta) == 0.0
    assert reasoning_gym_score(prompt.text, meta["answer"], meta) == 1.0


def test_reasoning_gym_takes_the_datasets_own_parameters():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = chain_sum(options=options)
    for i in range(50):
        prompt = task.train_prompt(i)
        terms = re.findall(r"\d+", prompt.text)
        assert len(terms) == 2 and all(len(term) == 1 for term in terms), prompt.text
        meta = json.loads(json.dumps(prompt.meta))
        assert reasoning_gym_score(prompt.text, meta["answer"], meta) == 1.0
    assert texts_of_eval(task) != texts_of_eval(chain_sum())


def test_reasoning_gym_parameters_are_checked():
    with pytest.raises(
        ValueError,
        match="task.options.min_term: chain_sum takes min_terms, .*did you mean min_terms",
    ):
        chain_sum(options={"min_term": 2})
    refused = "task.options=.*max_digits.*refuses .* choose other options"
    with pytest.raises(ValueError, match=refused):
        chain_sum(options={"min_digits": 3, "max_digits": 1})


def test_reasoning_gym_names_are_checked(monkeypatch):
    with pytest.raises(ValueError, match="task.name=chain_sums: .*did you mean chain_sum"):
        build_task("reasoning_gym", CharTokenizer(), name="chain_sums")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="PYTHONHASHSEED=0"):
        build_task("reasoning_gym", CharTokenizer(), name="ransom_note")


# --- rewards ---


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,000", "1000.0"),
        ("$5", "5"),
        (".5", "0.5"),
        ("-$2", "-2"),
        ("$-2", "-2"),
        ("10-3", "3"),
        ("x = -3", "-3"),
        ("(2)-5", "5"),
        ("\u22124", "-4"),
        ("- 6 apples", "6"),
        ("1,2,3", "3"),
        ("12,34", "34"),
        ("#### 8 (or 9)", "8"),
        ("so 12 \n####7", "7"),
        ("1.5e3", "1500"),
        ("1e-05", "0.00001"),
        ("It is 2E+6.", "2000000"),
        ("-1.5e-2", "-0.015"),
        ("1e5x", "5"),
    ],
)
def test_the_final_number_of_a_text(text, number):
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["####", "12 is it #### none", "-", "٣"])
def test_a_text_without_a_final_number_has_none(text):
    assert final_number(text) is None


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12
    )
)
def test_a_number_is_equal_however_it_is_written(number):
    meta = {"answer": str(number)}
    for text in (
        f"{number:f}",
        f"{number:,f}",
        f"It is {number:f}.",
        f"#### ${number:,f}",
        f"{number:f}000",
    ):
        assert numeric_match("", text, meta) == 1.0, text
    assert numeric_match("", f"{number + Decimal('0.001'):f}", meta) == 0.0


def test_exact_match_forgives_only_the_space_around():
    assert [
        exact_match("", t, {"answer": 46}) for t in ("46", " 46\n", "046", "46.", "4 6", "")
    ] == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "answer, text",
    [(42.0, "42"), (1e-05, "0.00001"), pytest.param(10**5000, "1" + "0" * 5000, id="5,001 digits")],
)
def test_a_number_of_json_is_compared_as_it_is_written_in_full(answer, text):
    for reward in (exact_match, numeric_match):
        assert reward("", text, {"answer": answer}) == 1.0
        assert reward("", "22", {"answer": answer}) == 0.0


@pytest.mark.parametrize("answer", [["42", "forty-two"], True, math.nan])
def test_an_answer_with_several_forms_is_an_error_and_no_score(answer):
    for reward in (exact_match, numeric_match):
        with pytest.raises(ValueError, match="need a text, a whole number or a finite decimal"):
            reward("", "42", {"answer": answer})


def test_an_answer_that_cannot_be_compared_is_an_error_and_no_score():
    with pytest.raises(ValueError, match="answer_key"):
        exact_match("", "4", {})
    with pytest.raises(ValueError, match="answer_key"):
        exact_match("", "None", {"answer": None})
    with pytest.raises(ValueError, match="holds no number"):
        numeric_match("", "4", {"answer": "four"})


def test_the_table_of_kinds_is_whole():
    kinds = []
    for settings in get_args(get_args(AnyTaskSettings)[0]):
        kinds += get_args(get_type_hints(settings)["kind"])
    assert sorted(kinds) == sorted([*NAMES, "mixture"])
    assert all(f"\n    {kind} " in launch_tasks.__doc__ for kind in kinds)
