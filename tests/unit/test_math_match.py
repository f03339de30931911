"""math_match: pairs of equal and different answers, marks of thoughts and boxes, and answers that
would take for ever.
"""

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.scoring.pool import RewardPool, check_reward
from llamarl.scoring.scorer import score_all, text_item
from llamarl.tasks import math_answers
from llamarl.tasks.math_answers import check_row, is_equivalent, math_match
from llamarl.tasks.thinking import last_boxed, split_thoughts
from tests.build.user_module import write_modules
from tests.math_pairs import pairs

PAIRS = pairs()
ABSENT = """
import sys
class Absent:
    def find_spec(self, name, *_):
        if name == "math_verify":
            raise ModuleNotFoundError("no", name=name)
sys.meta_path.insert(0, Absent())
from llamarl.tasks.rewards import math_match
"""


@pytest.fixture
def library():
    remedy = "the package math-verify, of the extra math, is not installed"
    return pytest.importorskip("math_verify", reason=remedy)


@pytest.mark.parametrize("family", PAIRS)
def test_equal_answers_are_equal_and_different_ones_are_not(library, family):
    """All 300 and 300 are right. math-verify alone is right on 255 and 290 of them: it reads no
    percentage in a box, and no unit.
    """
    missed = [equal for equal, _ in PAIRS[family] if not is_equivalent(*equal)]
    confused = [different for _, different in PAIRS[family] if is_equivalent(*different)]
    assert (missed, confused) == ([], [])


# Per family: the wanted answer, the one that is given, and whether they are equal.
ANSWERS = {
    "units, percentages and what is no formula": [
        ("6 cm^2", r"6\text{ cm}", False),
        ("5 apples", "5", True),
        ("5", r"50\%", False),
        (r"\text{Monday}", "Tuesday", False),
        ("$12$.", "12", True),
        ("12", "}{", False),
    ],
    "units by what they measure and how much it is": [
        ("2.54 cm", "1 in", True),
        ("1 in", r"\frac{1}{12} \text{ ft}", True),
        ("0.9144 m", "1 yd", True),
        ("1.609344 km", "1 mile", True),
        ("30.48 cm", "1 foot", True),
        ("1 m^2", r"10000\text{ cm}^2", True),
        ("1 week", "7 days", True),
        ("1 day", "24 hours", True),
        ("1 h", "3600000 ms", True),
        ("1 tonne", "1000 kg", True),
        ("5 g", "5000 mg", True),
        ("3 l", "300 cl", True),
        ("1 m", "1 g", False),
        ("1 ft", "1 s", False),
        ("5 cm", r"5\text{ cm}^2", False),
    ],
    "words as texts": [
        ("ABC", "CBA", False),
        ("ABC", r"\text{abc}", True),
        ("no", "on", False),
        ("no solution", r"\text{No}\ \text{solution}", True),
        ("east", "x+1", False),
        ("B", r"\text{(B)}", True),
        (r"\text{xy}", "yx", False),
        ("gcd", "x", False),
    ],
    "as people and models write them": [
        ("½", r"\frac{1}{2}", True),
        ("2½", "2.5", True),
        ("√2", r"\sqrt{2}", True),
        ("3√(x+1)", r"3\sqrt{x+1}", True),
        ("x²+1", "x^2+1", True),
        ("5 × 10³", "5000", True),
        ("10⁻²", "0.01", True),
        ("2π", r"2\pi", True),
        ("−7", "-7", True),
        ("-3", "–3", True),
        ("30°", "30", True),
        ("∞", r"\infty", True),
        ("x ≤ 3", r"x\le 3", True),
        ("±2", "2,-2", True),
        ("1000", "1 000", True),
        ("1000", r"1\,000", True),
        ("1000000.5", r"1\ 000\ 000.5", True),
        ("1000", "1 00", False),
        ("320000", "3.2e5", True),
        ("1.5e-3", "0.0015", True),
        ("7/3", "2 1/3", True),
        ("7/3", "2 1/4", False),
        (r"0.\overline{3}", r"\frac{1}{3}", True),
        (r"0.\overline{3}", "0.3", False),
        ("15 dollars", r"\$15", True),
        ("15 dollars", r"\$16", False),
    ],
    "neither a lost order nor a contradiction": [
        ("(1,2)", "1,2", False),
        ("(1,2)", "x=1, y=2", True),
        ("1,2", r"\{2,1\}", True),
        ("4", "5=4", False),
        ("4", "2+2=4", True),
        ("4", "2+2=5=4", False),
        ("50%", r"\frac{1}{2}=50\%", True),
        ("5", "5=", True),
        ("5", "4=?", False),
        ("4", "5=4=?", False),
        (r"2 \le x \le 5", "2 <= x <= 5", True),
        ("x=5", "5=x", True),
        ("x^2+y^2-1=0", "0=x^2+y^2-1", True),
        ("2", r"2=\text{two}", True),
    ],
    "two or three small letters, a product": [
        ("xy", "x y", True),
        ("xy", "yx", True),
        ("xy", r"x \cdot y", True),
        ("abc", "cba", True),
        ("xy", "x+y", False),
        ("xy", "xz", False),
        ("yes", "sey", False),
    ],
}


@pytest.mark.parametrize("family", ANSWERS)
def test_answers_are_equal_or_not(library, family):
    assert [row for row in ANSWERS[family] if is_equivalent(*row[:2]) != row[2]] == []


@pytest.mark.parametrize("side", ["", "?", r"\frac{", "()", r"\{1,2\}", "(1,2)%"])
def test_whatever_a_completion_puts_beside_an_equals_sign_is_no_error(library, side):
    for text in (f"4={side}", f"{side}=4", f"{side}={side}=50\\%", f"5=3={side}"):
        assert not is_equivalent("7", text)


def test_an_answer_that_is_a_number_is_compared_by_its_value(library):
    assert math_match("", r"\boxed{0.00001}", {"answer": 1e-05}) == 1.0
    assert math_match("", r"\boxed{42}", {"answer": 42.0}) == 1.0
    for answer in (["42"], True, {"value": 42}):
        with pytest.raises(ValueError, match="need a text, a whole number or a finite decimal"):
            math_match("", r"\boxed{42}", {"answer": answer})


def test_a_row_with_neither_a_formula_nor_words_is_an_error_and_not_a_wrong_answer(library):
    for answer in (r"\frac12", "north", r"\boxed{4}"):
        assert check_row("", "", {"answer": answer}) == 1.0
    without = {"answer": r"\frac{"}
    with pytest.raises(ValueError, match="is no formula"):
        check_row("", "", without)
    with pytest.raises(ValueError, match="is no formula; use exact_match"):
        math_match("", r"\boxed{4}", without)
    with pytest.raises(ValueError, match="set task.answer_key"):
        math_match("", r"\boxed{4}", {})


def test_the_last_box_counts_and_no_box_is_no_answer(library):
    meta = {"answer": "4"}
    assert math_match("", r"\boxed{5}, no: \boxed{\frac{8}{2}}", meta) == 1.0
    assert math_match("", r"\boxed{4}, no: \boxed{5}", meta) == 0.0
    assert math_match("", "The sum is 4.", meta) == 0.0
    assert math_match("", "The sum is $4$.", meta, boxed=False) == 1.0
    assert math_match("", "The sum is $5$.", meta, boxed=False) == 0.0
    assert math_match("", r"\boxed{4}", {"answer": r"so it is \boxed{4}"}) == 1.0


def test_what_is_thought_is_no_answer(library):
    meta = {"answer": "4"}
    right = r"<think>\boxed{5}?</think>\boxed{4}"
    assert math_match("", right, meta, thinking="opens") == 1.0
    for wrong in (r"<think>\boxed{4}</think>", r"\boxed{4}", f"{right}</think>", f"no {right}"):
        assert math_match("", wrong, meta, thinking="opens") == 0.0
    assert math_match("", r"5?</think>\boxed{4}", meta, thinking="opened") == 1.0
    assert math_match("", right, meta, thinking="opened") == 0.0
    # Marks that are special tokens are seen.
    meta |= {"sampled": {"raw_text": r"<think>5?</think>\boxed{4}</s>"}}
    assert math_match("", r"5?\boxed{4}", meta, thinking="opens") == 1.0


@settings(max_examples=40)
@given(
    inner=st.recursive(
        st.text("ab1 +", max_size=4), lambda some: st.tuples(some, some).map("{%s}%s".__mod__)
    ),
    before=st.text(r"a\{} ", max_size=8),
)
def test_a_box_holds_what_stands_between_its_braces(inner, before):
    assert last_boxed(rf"{before} \boxed{{{inner}}}. Done.") == inner


@settings(max_examples=40)
@given(text=st.text())
def test_any_text_has_a_box_or_none(text):
    found = last_boxed(text)
    assert found is None or f"{{{found}}}" in text
    assert last_boxed(rf"\boxed{{{text}") is None or "}" in text


WITHOUT_MARKS = st.text().filter(lambda text: "<think>" not in text and "</think>" not in text)


@settings(max_examples=40)
@given(thoughts=WITHOUT_MARKS, answer=WITHOUT_MARKS)
def test_thoughts_and_answer_are_what_the_marks_part(thoughts, answer):
    assert split_thoughts(f"<think>{thoughts}</think>{answer}", "opens") == (thoughts, answer)


def test_an_answer_that_takes_for_ever_is_killed_and_is_no_score(library):
    """99999999! has 756,570,549 digits."""
    meta = {"answer": "4"}
    items = [text_item("", rf"\boxed{{{x}}}", meta) for x in ("4", "99999999!", "5", "8/2")]
    with RewardPool("rewards:math_match", timeout_s=2.0) as pool:
        right, killed, wrong, equal = score_all(pool, items)
    assert (right.value, wrong.value, equal.value) == (1.0, 0.0, 1.0)
    assert killed.kind == "error" and "took longer than reward.timeout_s=2" in killed.reason


def test_without_the_package_the_start_ends_and_names_the_extra(tmp_path, monkeypatch):
    """A finder before all others says that there is no such package, as where it is absent."""
    write_modules(tmp_path, monkeypatch, absent=ABSENT)
    with pytest.raises(ValueError, match=re.escape("pip install 'llamarl[math]'")):
        check_reward("absent:math_match", [])


def test_a_module_that_math_verify_lacks_is_told_as_it_is(monkeypatch):
    """Only math-verify itself is named as missing, not what it needs in turn."""

    class Broken:
        def find_spec(self, name, *_):
            if name == "math_verify":
                raise ModuleNotFoundError("no sympy", name="sympy")

    monkeypatch.delitem(sys.modules, "math_verify", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    math_answers._math_verify.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="no sympy"):
        math_answers._math_verify()
    math_answers._math_verify.cache_clear()
