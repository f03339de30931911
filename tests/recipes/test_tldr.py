"""benchmarks/rlhf/tldr.py: prompts, answers and pairs from files like those of TL;DR."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rlhf import tldr
from llamarl.learning.preference import read_preference_data
from llamarl.learning.sft import read_pairs
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from tests.build.rows import read_rows, write_rows
from tests.supervised import task_of

TINY_DIR = tiny_directory()
POST = {
    "id": "t3_1",
    "subreddit": "cats",
    "title": "She sleeps on my keyboard",
    "post": "Every day at nine.\nI tried a box.\nShe wants the keyboard.",
    "summary": "My cat wants my keyboard, not a box.",
}
INFO = {key: POST[key] for key in ("id", "subreddit", "title", "post")}
PROMPT = (
    "SUBREDDIT: r/cats\n\nTITLE: She sleeps on my keyboard\n\n"
    "POST: Every day at nine.\nI tried a box.\nShe wants the keyboard.\n\nTL;DR:"
)


def comparison(choice=1, texts=(" A box.", " My cat wants my keyboard."), **more):
    return {
        "info": INFO,
        "summaries": [{"text": text, "policy": "sup"} for text in texts],
        "choice": choice,
        "split": "train",
        **more,
    }


def words_fit(limit):
    return lambda prompt: len(prompt.split()) <= limit


@pytest.fixture
def made(tmp_path):
    """Run on these posts and comparisons: (exit status, directory of the output)."""

    def run(posts=(), comparisons=(), *flags):
        command = [f"tokenizer={TINY_DIR}", f"out={tmp_path / 'out'}", *flags]
        command += ["max_prompt_tokens=1000"]
        if posts:
            command += [f"posts=[{write_rows(tmp_path / 'valid.jsonl', *posts)}]"]
        if comparisons:
            write_rows(tmp_path / "batch3.json", *comparisons)
            command += [f"comparisons=[{tmp_path}/batch*.json]"]
        return tldr.main(command), tmp_path / "out"

    return run


def test_a_post_becomes_a_prompt_and_an_answer(made):
    status, out = made([POST])
    assert status == 0
    assert read_rows(out / "valid.jsonl") == [
        {"prompt": PROMPT, "answer": " My cat wants my keyboard, not a box."}
    ]


def test_the_chosen_summary_of_a_comparison_is_the_better_one(made):
    status, out = made([], [comparison(1), comparison(0, split="valid1")])
    assert status == 0
    right, left = " My cat wants my keyboard.", " A box."
    (train,), (valid,) = (read_rows(out / f"pairs_{split}.jsonl") for split in ("train", "valid"))
    assert train == {"prompt": PROMPT, "chosen": right, "rejected": left}
    assert valid == {"prompt": PROMPT, "chosen": left, "rejected": right}


def test_what_is_left_out_is_counted(made, capsys):
    article = {"info": {"id": "x", "article": "News."}, "split": "valid2"}
    equal = comparison(texts=(" A box.", "A box. "))
    status, out = made([POST, POST], [article, equal, comparison()])
    assert status == 0
    assert len(read_rows(out / "valid.jsonl")) == len(read_rows(out / "pairs_train.jsonl")) == 1
    assert not (out / "pairs_valid.jsonl").exists()
    said = capsys.readouterr().out
    for reason in (tldr.ARTICLE, tldr.EQUAL, tldr.REPEATED):
        assert f"left out  1 {reason}" in said


def test_a_long_post_loses_lines_from_its_end_and_then_words():
    whole = len(PROMPT.split())
    assert tldr.shorten(POST, words_fit(whole)) == PROMPT
    two_lines = PROMPT.replace("\nShe wants the keyboard.", "")
    assert tldr.shorten(POST, words_fit(whole - 1)) == two_lines
    assert tldr.shorten(POST, words_fit(whole - 4)) == two_lines
    two_words = PROMPT.replace(" at nine.\nI tried a box.\nShe wants the keyboard.", "")
    assert tldr.shorten(POST, words_fit(len(two_words.split()))) == two_words
    with pytest.raises(ValueError, match="longer than --max-prompt-tokens"):
        tldr.shorten(POST, words_fit(5))


@given(
    st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6), min_size=1, max_size=5),
    st.integers(5, 40),
)
def test_a_prompt_fits_and_no_longer_one_of_its_kind_would(lines, limit):
    text = "\n".join(" ".join(words) for words in lines)
    post = {**POST, "title": "t", "post": text}
    fits = words_fit(limit)
    least = len(tldr.prompt_of(post, "a").split())
    if limit < least:
        with pytest.raises(ValueError):
            tldr.shorten(post, fits)
        return
    prompt = tldr.shorten(post, fits)
    assert fits(prompt)
    whole_lines = ["\n".join(text.split("\n")[:k]) for k in range(1, len(lines) + 1)]
    fitting = [line for line in whole_lines if fits(tldr.prompt_of(post, line))]
    if fitting:
        assert prompt == tldr.prompt_of(post, fitting[-1])
    else:
        assert len(prompt.split()) == limit


@pytest.mark.parametrize(
    "posts, comparisons, what",
    [
        ([{**POST, "summary": " "}], [], 'valid.jsonl:1: "summary" must be text'),
        ([{**POST, "post": None}], [], 'valid.jsonl:1: "post" must be text'),
        ([], [comparison(2)], 'batch3.json:1: "choice" must be 0 or 1, this is 2'),
        ([], [comparison(1.0)], 'batch3.json:1: "choice" must be 0 or 1, this is 1.0'),
        ([], [comparison(texts=(" A box.",))], 'batch3.json:1: "summaries" must be a list of two'),
        ([], [comparison(texts=(" A box.", ""))], "summary 1: "),
        ([], [{**comparison(), "info": 1}], 'batch3.json:1: "info" must be an object'),
        ([], [{**comparison(), "info": {**INFO, "title": 3}}], 'info: "title" must be text'),
        ([], [comparison(texts=(" A.", " A."))], "no row is left"),
    ],
)
def test_bad_rows_are_named_and_nothing_is_written(made, capsys, posts, comparisons, what):
    status, out = made(posts, comparisons)
    assert status == 2 and not out.exists()
    assert what in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    words = [f"tokenizer={TINY_DIR}", f"out={tmp_path}"]
    assert tldr.main([*words, "posts=[absent.jsonl]"]) == 2
    assert "absent.jsonl: no such file" in capsys.readouterr().err


def test_a_command_line_that_cannot_be_used_is_answered(tmp_path, capsys):
    words = [f"tokenizer={TINY_DIR}", f"out={tmp_path}"]
    assert tldr.main(words) == 2
    assert "nothing to read" in capsys.readouterr().err
    assert tldr.main([*words, "post=[a.jsonl]", "max_prompt_tokens=0"]) == 2
    said = capsys.readouterr().err
    assert "did you mean posts?" in said and "max_prompt_tokens=0   need a whole" in said
    assert tldr.main(["--posts", "a.jsonl"]) == 2
    assert "--posts     write key=value" in capsys.readouterr().err


def test_a_file_that_is_read_is_not_written(tmp_path, capsys):
    posts = write_rows(tmp_path / "train.jsonl", POST)
    words = [f"tokenizer={TINY_DIR}", "max_prompt_tokens=1000"]
    assert tldr.main([*words, f"posts=[{posts}]", f"out={tmp_path}"]) == 2
    assert "train.jsonl there is one that is read" in capsys.readouterr().err
    assert read_rows(posts) == [POST]


def test_sft_and_reward_model_read_what_is_written(made):
    _, out = made([POST], [comparison(), comparison(0, info=INFO | {"title": "Another cat"})])
    tokenizer = load_tokenizer(TINY_DIR)
    (pair,) = read_pairs(out / "valid.jsonl", tokenizer=tokenizer, max_tokens=1000, chat=False)
    learned = tokenizer.decode(pair.token_ids[pair.learned])
    assert learned.endswith("y cat wants my keyboard, not a box.<eos>") and "TITLE" not in learned
    task = task_of(out / "pairs_train.jsonl", num_eval=1, max_tokens=1000, chat=False)
    data = read_preference_data(task, tokenizer)
    assert len(data.train) == len(data.held_out) == 1
