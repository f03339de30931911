"""Magistral's parts of a reward beside the right answer, and their sum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.scoring.pool import check_reward
from llamarl.tasks.thinking import one_language, soft_length, thinking_form

REMEDY = "the package py3langid, of the extra language, is not installed"


def of_tokens(count):
    return {"sampled": {"num_tokens": count, "raw_text": ""}}


# --- form ---


@pytest.mark.parametrize(
    "text, thinking, answer, is_right",
    [
        ("<think>a</think>b", "opens", "any", True),
        ("\n<think>a</think>b", "opens", "any", True),
        ("<think>a</think>", "opens", "any", False),
        ("a</think>b", "opens", "any", False),
        ("so <think>a</think>b", "opens", "any", False),
        ("<think>a</think>b</think>c", "opens", "any", False),
        ("a</think>b", "opened", "any", True),
        ("<think>a</think>b", "opened", "any", False),
        ("b", "none", "any", True),
        ("", "none", "any", False),
        (r"<think>a</think>\boxed{4}", "opens", "boxed", True),
        (r"<think>\boxed{4}</think>4", "opens", "boxed", False),
        (r"<think>a</think>\boxed{4", "opens", "boxed", False),
        ("<think>a</think>\n```python\n1\n```", "opens", "program", True),
        ("<think>a</think>\n```json\n1\n```", "opens", "program", False),
        ("<think>\n```python\n1\n```\n</think>1", "opens", "program", False),
    ],
)
def test_the_form_of_a_completion(text, thinking, answer, is_right):
    assert thinking_form("", text, {}, thinking=thinking, answer=answer) == float(is_right)


# --- length ---


@pytest.mark.parametrize(
    "num_tokens, cache, penalty",
    [
        (60, {"cache_tokens": 40}, 0.0),
        (70, {"cache_tokens": 40}, -0.25),
        (100, {"cache_tokens": 40}, -1.0),
        (500, {"cache_tokens": 40}, -1.0),
        (75, {}, 0.0),  # a quarter unless it is given
        (80, {}, -0.2),
    ],
)
def test_the_penalty_falls_evenly_over_the_cache(num_tokens, cache, penalty):
    """100 tokens of which the last 40 are the cache: 10 into it are a quarter of the penalty."""
    got = soft_length("", "", of_tokens(num_tokens), max_tokens=100, **cache)
    assert got == pytest.approx(penalty)


@given(text=st.text(), cache=st.integers(1, 50))
def test_tokens_count_and_not_signs(text, cache):
    lengths = {"max_tokens": 50, "cache_tokens": cache}
    assert soft_length("", text, of_tokens(50), **lengths) == -1.0
    assert soft_length("", text, of_tokens(50 - cache), **lengths) == 0.0


def test_a_text_without_tokens_has_no_length():
    with pytest.raises(ValueError, match="its tokens are counted"):
        soft_length("", "some text", {}, max_tokens=10, cache_tokens=5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "option max_tokens=None: need a whole number of at least 1"),
        ({"max_tokens": 10, "cache_tokens": 0}, "option cache_tokens=0: need a whole number"),
        ({"max_tokens": 10, "cache_tokens": 11}, "cache_tokens=11: .*; at most 10"),
        ({"max_tokens": 10, "cache_token": 5}, "no option cache_token; did you mean cache_tokens"),
    ],
)
def test_lengths_that_cannot_be_end_the_start(options, message):
    with pytest.raises(ValueError, match=message):
        check_reward("rewards:soft_length", [], options=options)


# --- language ---

ENGLISH = "There are twelve apples in the basket, and we take four of them away."
FRENCH = "Il y a douze pommes dans le panier, et nous en prenons quatre."
GERMAN = "Im Korb liegen zwölf Äpfel, und wir nehmen vier davon heraus."
CHINESE = "篮子里有十二个苹果，我们拿走四个苹果，请问篮子里还剩下多少个苹果？"


@pytest.fixture
def library():
    return pytest.importorskip("py3langid", reason=REMEDY)


@pytest.mark.parametrize(
    "prompt, thoughts, answer, is_one",
    [
        (ENGLISH, ENGLISH, ENGLISH, True),
        (FRENCH, ENGLISH, FRENCH, False),
        (GERMAN, GERMAN, ENGLISH, False),
        (GERMAN, GERMAN, r"\boxed{8}", True),
        (GERMAN, f"{GERMAN} $x = \\text{{the number of apples that are left in it}}$", "8", True),
        (FRENCH, f"{FRENCH}\n```\n# {ENGLISH}\nprint(12 - 4)\n```\n", "8", True),
    ],
)
def test_prompt_thoughts_and_answer_are_in_one_language(library, prompt, thoughts, answer, is_one):
    text = f"<think>{thoughts}</think>{answer}"
    assert one_language(prompt, text, {}) == float(is_one)


def test_of_a_conversation_the_users_last_turn_counts(library):
    turns = [
        {"role": "system", "content": ENGLISH},
        {"role": "user", "content": ENGLISH},
        {"role": "assistant", "content": ENGLISH},
        {"role": "user", "content": GERMAN},
    ]
    meta = {"prompt_messages": turns}
    text = f"<think>{GERMAN}</think>{GERMAN}"
    assert one_language(f"user: {ENGLISH}", text, meta) == 1.0
    assert one_language(f"user: {ENGLISH}", text.replace(GERMAN, ENGLISH), meta) == 0.0


def test_what_does_not_mark_its_thoughts_is_in_no_language(library):
    assert one_language(ENGLISH, ENGLISH, {}) == 0.0
    assert one_language(ENGLISH, ENGLISH, {}, thinking="none") == 1.0
