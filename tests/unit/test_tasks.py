"""Tasks and the rewards that come with them."""

import bz2
import gzip
import json
import lzma
import math
import random
import re
import sys
import unicodedata
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from itertools import product
from typing import get_args, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamarl.config.sections.task import AnyTaskSettings
from llamarl.launch import tasks as launch_tasks
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.tasks import procedural
from llamarl.tasks.base import PromptMaker
from llamarl.tasks.files import read_jsonl
from llamarl.tasks.list_task import hold_out_prompts
from llamarl.tasks.procedural import open_dataset
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


@pytest.fixture
def file(tmp_path):
    """file(rows or bytes, name): a file of JSON lines."""

    def write(content, name="t.jsonl"):
        if not isinstance(content, bytes):
            content = ("\n".join(map(json.dumps, content)) + "\n").encode()
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write


def build(kind="jsonl", tokenizer=None, **settings):
    return build_task(kind, tokenizer or CharTokenizer(), **settings)


def rows(n):
    return [{"prompt": f"q{i}", "answer": f"a{i}"} for i in range(n)]


def texts(task):
    """The prompts to train on, and those held out."""
    trained = [task.train_prompt(i).text for i in range(task.num_train)]
    return trained, [task.eval_prompt(j).text for j in range(task.num_eval)]


# --- addition and questions ---


def test_addition_is_the_fixed_split_that_figures_are_compared_on():
    task = build("addition", chat=False, max_prompt_tokens=16)
    pairs = list(product(range(10, 100), repeat=2))
    random.Random(0).shuffle(pairs)
    trained, held = texts(task)
    assert held + trained == [f"{a}+{b}=" for a, b in pairs]
    assert (task.num_train, task.num_eval) == (7600, 500)
    prompt = task.train_prompt(0)
    assert read(prompt) == prompt.text
    assert prompt.meta["answer"] == str(sum(map(int, re.findall(r"\d+", prompt.text))))


@pytest.mark.parametrize("name, count", [("sum", 400), ("larger", 380)])
def test_questions_are_all_pairs_of_which_a_tenth_is_held_out(name, count):
    settings = {"name": name, "least": 1, "most": 20, "max_prompt_tokens": 128}
    task = build("questions", **settings)
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
        build("questions", name=name, most=most)


# --- JSONL and GSM8K ---


def test_jsonl_meta_is_the_rest_of_the_row_with_the_answer_under_answer(file):
    path = file([{"q": f"q{i}", "gold": i, "level": "hard"} for i in range(2)])
    task = build(path=path, eval_path=path, prompt_key="q", answer_key="gold")
    prompt = task.train_prompt(1)
    assert (prompt.text, prompt.meta) == ("q1", {"gold": 1, "level": "hard", "answer": 1})
    assert (task.num_train, task.num_eval) == (2, 2)
    path = file([{"sampled": "q", "answer": "a"}])
    prompt = build(path=path, eval_path=path, prompt_key="sampled").train_prompt(0)
    assert prompt.meta == {"answer": "a"}  # the prompt is not in it


def test_every_bad_line_is_named_with_file_and_line(file):
    good = b'{"prompt": "q", "answer": "a"}\n'
    bad = b'{"prompt": \n\n[1]\n{"promt": "q", "answer": "a"}\n{"prompt": 3, "answer": 4}\n\xff\n'
    path = file(good + bad + good)
    with pytest.raises(ValueError) as error:
        build(path=path)
    message = str(error.value)
    assert message.startswith("5 bad lines:")
    for line, what in (
        (2, "not JSON"),
        (4, "need a JSON object, this is list"),
        (5, 'no key "prompt"; did you mean "promt"?'),
        (6, '"prompt" must be text'),
        (7, "'utf-8' codec"),
    ):
        assert f"{path}:{line}: {what}" in message


ROW = {"prompt": "q", "answer": "a"}
PLAIN = b'{"prompt": "q", "answer": "a"}\n'


@pytest.mark.parametrize(
    "content, said",
    [
        ([ROW | {"sampled": 1}], ':1: the key "sampled" is where a reward finds'),
        ([ROW | {"part_reward": "x"}], ':1: the key "part_reward" is where .*; rename'),
        ([ROW | {"eval_set": "x"}], ':1: the key "eval_set" is where .*; rename'),
        ([ROW, ROW | {"answer": None}], ':2: "answer" is null; give the answer, or leave the row'),
        (
            [ROW, ROW | {"prompt": "ab\ud800"}],
            r':2: "prompt" holds \\ud800 at character 3, half of a surrogate pair; remove it',
        ),
        (b"x\n" * 13, ":10: (.|\n)*and 3 more$"),
        (b"\n\n", ": empty"),
        (gzip.compress(PLAIN), ": looks like a gzip file"),
        (bz2.compress(PLAIN), ": looks like a bzip2 file"),
        (lzma.compress(PLAIN), ": looks like an xz file"),
        (b"\x28\xb5\x2f\xfd" + PLAIN, ": looks like a zstd file"),
        (PLAIN.decode().encode("utf-16"), ": looks like a text in UTF-16"),
        (b"PAR1" + PLAIN, ": looks like a parquet file; task=hf_dataset"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_row_of_a_task_is_named(file, content, said):
    path = file(content)
    with pytest.raises(ValueError, match=f"t.jsonl{said}"):
        build(path=path, eval_path=path)
    if "looks like" in said:
        with pytest.raises(ValueError, match=f"t.jsonl{said}"):
            read_jsonl(path, dict)


def test_without_an_answer_key_prompts_need_no_answer(file):
    path = file([{"prompt": "q", "level": 3, "answer": None}] * 2)
    prompt = build(path=path, answer_key=None).train_prompt(0)
    assert (prompt.text, prompt.meta) == ("q", {"level": 3, "answer": None})


@pytest.mark.parametrize("kind", ["jsonl", "hf_dataset"])
def test_a_missing_path_says_which_setting_names_it(kind, tmp_path):
    with pytest.raises(FileNotFoundError, match="task.path"):
        build(kind, path=tmp_path / "absent")


def test_gsm8k_keeps_the_question_raw_and_tells_the_model_how_to_finish(file):
    row = {"question": "How many?", "answer": "2*3=<<2*3=6>>6\n#### 1,006"}
    task = build("gsm8k", path=file([row] * 2))
    prompt = task.train_prompt(0)
    assert prompt.text == "How many?"
    assert prompt.meta == {"answer": "1,006", "solution": row["answer"]}
    assert read(prompt).startswith("How many?\n\n") and read(prompt).endswith("#### number")
    assert task.default_reward.endswith(":numeric_match")
    with pytest.raises(ValueError, match=r't.jsonl:1: "answer" must be a worked solution'):
        build("gsm8k", path=file([{"question": "q", "answer": "6"}]))


# --- Held-out rows, lengths, templates ---


def hold_out(num_rows, num_eval):
    split = hold_out_prompts((str(row).encode() for row in range(num_rows)), num_eval)
    return split.kept(num_rows), split.held


@given(st.integers(1, 300), st.integers(0, 50))
def test_held_out_rows_are_few_and_never_trained_on(num_rows, num_eval):
    train, held = hold_out(num_rows, num_eval)
    assert sorted(train + held) == list(range(num_rows))
    assert train and len(held) <= min(num_eval, max(1, num_rows // 10))
    assert hold_out(num_rows, num_eval) == (train, held)


def test_a_prompt_whose_rows_repeat_is_held_out_with_all_of_them(file, caplog):
    """20 prompts, each in 20 rows: two prompts are held out, once each."""
    trained, held = texts(build(path=file(rows(20) * 20)))
    assert len(held) == 2 and len(trained) == 18 * 20
    assert not set(held) & set(trained) and len(set(held)) == 2
    assert "2 are held out, and 38 more rows of theirs are left out of training" in caplog.text


def test_rows_without_repeats_are_split_as_ever_and_one_prompt_holds_none_out(file, caplog):
    trained, held = texts(build(path=file(rows(100))))
    kept, chosen = hold_out(100, 500)
    assert trained == [f"q{i}" for i in kept] and held == [f"q{i}" for i in chosen]
    assert not caplog.text
    task = build(path=file([row | {"prompt": "q"} for row in rows(50)]))
    assert (task.num_train, task.num_eval) == (50, 0)
    assert "50 row(s), 1 different prompt(s), so none is held out" in caplog.text


@pytest.mark.parametrize("is_mixture", [False, True])
def test_a_set_whose_prompts_are_trained_on_is_told(file, caplog, is_mixture):
    """Two of the set's three rows have prompts of the 40 rows of the task."""
    trained = file(rows(40))
    own = file([{"prompt": "own", "answer": "a"}], "own.jsonl")
    asked = file([*rows(2), {"prompt": "other", "answer": "a"}], "e.jsonl")
    if is_mixture:
        part = {"weight": 1.0, "kind": "jsonl", "eval_path": own}
        parts = {"a": part | {"path": trained}, "b": part | {"path": own, "eval_path": asked}}
        build("mixture", parts=parts, num_eval=6)
        told = "task.parts.b: 2 of 3 held-out rows have a prompt that task.parts.a trains on"
    else:
        task = build(path=trained, eval_path=own)
        one = set_of("jsonl", path=asked, num_prompts=3, max_prompt_tokens=100)
        launch_tasks.TaskBuilder(CharTokenizer()).held_out(task, 1, {"e": one})
        told = "eval.sets.e: 2 of 3 held-out rows have a prompt that the task trains on"
    assert told in caplog.text


def test_rows_of_an_environment_differ_by_all_of_their_columns(file):
    """What it asks may be in any of them; the first two rows are equal."""
    lines = [{"prompt": "Guess", "secret": i} for i in range(100)]
    settings = {"environment": "tests.games:Shop", "path": file([lines[0], *lines])}
    task = build("environment", load_tokenizer(tiny_directory()), chat=False, **settings)
    trained = [task.train_prompt(i).meta["secret"] for i in range(task.num_train)]
    held = [task.eval_prompt(j).meta["secret"] for j in range(task.num_eval)]
    _, chosen = hold_out(100, 500)
    assert held == chosen and not set(trained) & set(held)
    assert len(trained) + len(held) == 101 - (0 in chosen)


def test_held_out_rows_that_are_trained_on_are_counted(file, caplog):
    build(path=file(rows(10) * 3), eval_path=file(rows(12)[8:], "e.jsonl"))
    said = "2 of 4 held-out rows have a prompt that 6 of 30 training rows have too"
    assert said in caplog.text


def test_long_prompts_are_dropped_counted_and_warned_of_once(file, caplog):
    asked = ["x" * n for n in (3, 9, 10, 4, 50)]  # with the bos: 4, 10, 11, 5, 51 tokens
    path = file([{"prompt": text, "answer": ""} for text in asked])
    held_out = file([{"prompt": text.replace("x", "y"), "answer": ""} for text in asked], "e.jsonl")
    task = build(path=path, eval_path=held_out, max_prompt_tokens=10)
    assert texts(task)[0] == [asked[0], asked[1], asked[3]]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "task jsonl: dropped 2 of 5 training and 2 of 5 evaluation prompts, longer than "
        "max_prompt_tokens=10"
    )
    none = "none of 2 training prompts fits task.max_prompt_tokens=2; raise it"
    with pytest.raises(ValueError, match=none):
        build(path=file(rows(3)), max_prompt_tokens=2)


def test_prompts_are_tokenised_once_and_only_when_asked_for(file):
    tokenizer = CharTokenizer()
    task = build(tokenizer=tokenizer, path=file(rows(1000)))
    assert tokenizer.num_encoded == 1  # the empty prompt, for the template's own length
    assert task.train_prompt(5) is task.train_prompt(5)
    assert tokenizer.num_encoded == 2


@settings(max_examples=40)
@given(st.text(max_size=30), st.integers(1, 40))
@example("\ufdfa", 15)  # 3 bytes that normalization makes 33
def test_the_shortcut_by_size_never_lets_a_long_prompt_through(text, limit):
    class Worst(CharTokenizer):
        """A byte a token, after the normalization that lengthens text most."""

        def encode(self, text):
            return [1, *unicodedata.normalize("NFKD", text).encode("utf-8", "replace")]

    maker = PromptMaker(Worst(), chat=False, system_prompt=None, max_prompt_tokens=limit)
    assert maker.fits(text) == (len(maker.ids(text)) <= limit)


def test_the_chat_template_is_used_where_the_tokenizer_has_one(file):
    path = file(rows(2))

    def first(template, **options):
        task = build(tokenizer=CharTokenizer(template), path=path, eval_path=path, **options)
        return read(task.train_prompt(0))

    assert first(TEMPLATE, system_prompt="be brief") == "<s>be brief<u>q0<a>"
    assert first(TEMPLATE) == "<u>q0<a>"
    assert first(TEMPLATE, chat=False) == first(None) == "q0"
    for template, chat, why in (
        (None, True, "no chat template"),
        (TEMPLATE, False, "task.chat is false"),
    ):
        with pytest.raises(ValueError, match=f"task.system_prompt is set, but .*{why}"):
            first(template, chat=chat, system_prompt="be brief")


# --- Hugging Face datasets on disk ---


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    module = pytest.importorskip("datasets")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    module.disable_progress_bars()
    return module


@pytest.fixture
def save(tmp_path, datasets):
    """save(rows) or save(split=rows, ...): where they lie on disk."""

    def write(content=None, folder="saved", **splits):
        if content is not None:
            data = datasets.Dataset.from_list(content)
        else:
            made = {name: datasets.Dataset.from_list(own) for name, own in splits.items()}
            data = datasets.DatasetDict(made)
        data.save_to_disk(tmp_path / folder)
        return tmp_path / folder

    return write


def test_a_saved_dataset_reads_its_train_and_test_splits(save):
    task = build("hf_dataset", path=save(test=rows(3)[2:], train=rows(2)))
    assert texts(task) == (["q0", "q1"], ["q2"])
    assert task.train_prompt(1).meta == {"answer": "a1"}


def test_a_directory_of_parquet_without_a_test_split_has_a_tenth_held_out(tmp_path, datasets):
    (tmp_path / "files").mkdir()
    datasets.Dataset.from_list(rows(20)).to_parquet(tmp_path / "files" / "train-00000.parquet")
    train, held = texts(build("hf_dataset", path=tmp_path / "files"))
    assert len(held) == 2 and sorted(train + held) == sorted(r["prompt"] for r in rows(20))


def named(*splits):
    """Two rows a split; a row's prompt names its split."""
    found = {}
    for name in splits:
        found[name] = [{"prompt": f"{name} {n}", "answer": "a"} for n in range(2)]
    return found


def splits_of(found):
    return {text.split()[0] for text in found}


@pytest.mark.parametrize(
    "names, train, held_out",
    [
        (("test_prefs", "train_prefs", "test"), "train_prefs", "test_prefs"),
        (("train_sft", "train", "test_sft"), "train", "train"),
        (("everything",), "everything", "everything"),
    ],
)
def test_the_split_whose_name_says_so_is_trained_on(save, names, train, held_out):
    trained, held = texts(build("hf_dataset", path=save(**named(*names))))
    assert (splits_of(trained), splits_of(held)) == ({train}, {held_out})


@pytest.mark.parametrize(
    "names, said",
    [
        (("test",), "none of its splits is for training (test)"),
        (("train_gen", "train_sft", "test"), "several of its splits are for training"),
        (("constrained", "strained"), "none of its splits is for training"),
    ],
)
def test_no_split_is_trained_on_by_a_guess(save, names, said):
    folder = save(**named(*names))
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        build("hf_dataset", path=folder)
    assert "name one of them in task.path" in str(refused.value)
    assert splits_of(sum(texts(build("hf_dataset", path=folder / names[0])), [])) == {names[0]}


@pytest.mark.parametrize(
    "names, held_out",
    [
        (("test",), "test"),
        (("train_sft", "test_sft"), "test_sft"),
        (("validation", "test"), "test"),
    ],
)
def test_evaluation_data_may_be_a_test_split_alone(save, names, held_out):
    train = save(folder="train", **named("train"))
    task = build("hf_dataset", path=train, eval_path=save(**named(*names)))
    assert splits_of(texts(task)[1]) == {held_out}


def test_files_of_a_dataset_may_be_named_alone_or_by_a_pattern(tmp_path, datasets):
    for name in ("test", "train_gen-0", "train_gen-1", "train_sft-0"):
        own = datasets.Dataset.from_list([{"prompt": name, "answer": "a"}])
        own.to_parquet(tmp_path / f"{name}.parquet")
    read = partial(build, "hf_dataset", eval_path=tmp_path / "test.parquet")
    trained, held = texts(read(path=tmp_path / "train_sft-0.parquet"))
    assert (trained, held) == (["train_sft-0"], ["test"])
    trained, _ = texts(read(path=tmp_path / "train_gen-*.parquet"))
    assert sorted(trained) == ["train_gen-0", "train_gen-1"]
    with pytest.raises(FileNotFoundError, match="no such directory, file or pattern of files"):
        read(path=tmp_path / "train_dpo-*.parquet")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="nothing: not a dataset, need parquet"):
        read(path=tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(ValueError, match="notes.txt: not a dataset, .*it ends in .txt"):
        read(path=tmp_path / "notes.txt")


@pytest.mark.parametrize(
    "own, options, said",
    [
        ([{"prompt": "q", "gold": "a"}], {}, 'no key "answer"; there is "prompt", "gold"'),
        (
            [{"prompt": "q", "gold": "a"}, {"prompt": None, "gold": "a"}],
            {"answer_key": "gold"},
            r'row 1: "prompt" must be text',
        ),
        (
            [{"prompt": "q", "answer": date(2020, 1, 2)}] * 2,
            {},
            r'"answer" is date32\[day\], which JSON cannot hold; cast it to text',
        ),
        ([{"prompt": "q", "answer": a} for a in ("4", None)], {}, 'row 1: "answer" is null'),
    ],
)
def test_bad_hf_data_says_where_and_what(save, own, options, said):
    path = save(own)
    with pytest.raises(ValueError, match=rf"saved \(train\): {said}"):
        build("hf_dataset", path=path, eval_path=path, **options)


def test_columns_that_json_cannot_hold_are_left_out_with_one_warning(tmp_path, datasets, caplog):
    held = {"words": ["a"], "score": 0.5, "pair": {"en": "x"}, "kind": 0, "grid": [[1, 2]]}
    odd = {
        "day": date(2020, 1, 2),
        "raw": b"\xff",
        "deep": {"times": [datetime(2020, 1, 2)]},
        "picture": {"bytes": b"", "path": None},
    }
    saved = datasets.Dataset.from_list([{**row, **held, **odd} for row in rows(20)])
    saved = saved.cast_column("picture", datasets.Image())
    saved = saved.cast_column("kind", datasets.ClassLabel(names=["a"]))
    saved = saved.cast_column("grid", datasets.Array2D((1, 2), "int32"))
    saved.with_format("numpy").save_to_disk(tmp_path / "saved")
    task = build("hf_dataset", path=tmp_path / "saved")
    assert json.loads(json.dumps(task.train_prompt(0).meta)) == {"answer": "a0", **held}
    (said,) = [r.getMessage() for r in caplog.records if r.name.startswith("llamarl")]
    assert f"{tmp_path / 'saved'} (train): left out what JSON cannot hold: " in said
    assert all(f"{name} (" in said for name in odd)


def test_without_the_datasets_package_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        build("hf_dataset", path=tmp_path)


# --- reasoning_gym ---


def test_without_its_package_the_error_names_the_extra(monkeypatch):
    open_dataset.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'llamarl\[reasoning_gym\]'"):
        open_dataset("chain_sum", 3, 0)


def chain_sum(seed=0, **options):
    return build("reasoning_gym", name="chain_sum", seed=seed, num_eval=40, **options)


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
    # Training would begin with the evaluation questions.
    monkeypatch.setattr(procedural, "SEED_WINDOW", 0)
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
    prompt = build("reasoning_gym", name="countdown", num_eval=0).train_prompt(0)
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


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("chain_sum", {"min_term": 2}, "options.min_term: chain_sum takes min_terms, .*did you"),
        (
            "chain_sum",
            {"min_digits": 3, "max_digits": 1},
            "task.options=.*max_digits.*refuses .* choose other options",
        ),
        ("chain_sums", {}, "task.name=chain_sums: .*did you mean chain_sum"),
        ("ransom_note", {}, "PYTHONHASHSEED=0"),
    ],
)
def test_names_and_parameters_of_reasoning_gym_are_checked(monkeypatch, name, options, said):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match=said):
        build("reasoning_gym", name=name, options=options)


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
        ("####", None),
        ("12 is it #### none", None),
        ("-", None),
        ("٣", None),
    ],
)
def test_the_final_number_of_a_text(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


NUMBERS = {"places": 3, "min_value": -(10**12), "max_value": 10**12}


@given(st.decimals(allow_nan=False, allow_infinity=False, **NUMBERS))
def test_a_number_is_equal_however_it_is_written(number):
    meta = {"answer": str(number)}
    full = f"{number:f}"
    for text in (full, f"{number:,f}", f"It is {full}.", f"#### ${number:,f}", f"{full}000"):
        assert numeric_match("", text, meta) == 1.0, text
    assert numeric_match("", f"{number + Decimal('0.001'):f}", meta) == 0.0


def test_exact_match_forgives_only_the_space_around():
    for text, score in ((" 46\n", 1), ("046", 0), ("46.", 0), ("4 6", 0), ("", 0)):
        assert exact_match("", text, {"answer": 46}) == score


@pytest.mark.parametrize(
    "answer, text",
    [(42.0, "42"), (1e-05, "0.00001"), pytest.param(10**5000, "1" + "0" * 5000, id="5,001 digits")],
)
def test_a_number_of_json_is_compared_as_it_is_written_in_full(answer, text):
    for reward in (exact_match, numeric_match):
        assert reward("", text, {"answer": answer}) == 1.0
        assert reward("", "22", {"answer": answer}) == 0.0


@pytest.mark.parametrize(
    "reward, meta, said",
    [
        *product(
            [exact_match, numeric_match],
            [{"answer": ["42", "forty-two"]}, {"answer": True}, {"answer": math.nan}],
            ["need a text, a whole number or a finite decimal"],
        ),
        (exact_match, {}, "answer_key"),
        (exact_match, {"answer": None}, "answer_key"),
        (numeric_match, {"answer": "four"}, "holds no number"),
    ],
)
def test_an_answer_that_cannot_be_compared_is_an_error_and_no_score(reward, meta, said):
    with pytest.raises(ValueError, match=said):
        reward("", "42", meta)


def test_the_table_of_kinds_is_whole():
    kinds = []
    for one in get_args(get_args(AnyTaskSettings)[0]):
        kinds += get_args(get_type_hints(one)["kind"])
    assert sorted(kinds) == sorted([*NAMES, "mixture"])
    assert all(f"\n    {kind} " in launch_tasks.__doc__ for kind in kinds)
