"""math_match: pairs of equal and different answers, marks of thoughts and boxes, and answers that
would take for ever.
"""

import re
import sys
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.scoring.pool import RewardPool, check_reward
from llamarl.scoring.scorer import score_all, text_item
from llamarl.tasks import math_answers
from llamarl.tasks.marked import last_boxed, split_thoughts
from llamarl.tasks.math_answers import is_equivalent, math_match
from tests.math_pairs import EACH, pairs

PAIRS = pairs()
REMEDY = "the package math-verify, of the extra math, is not installed"


@pytest.fixture
def library():
    return pytest.importorskip("math_verify", reason=REMEDY)


def test_there_are_300_pairs_of_each_sort():
    both = list(chain.from_iterable(PAIRS.values()))
    assert len(both) == 300 == EACH * len(PAIRS)
    alone = list(chain.from_iterable(both))
    assert len(set(alone)) == 600
    assert not any(wanted == given for wanted, given in alone)


@pytest.mark.parametrize("family", PAIRS)
def test_equal_answers_are_equal_and_different_ones_are_not(library, family):
    """All 300 and 300 are right. math-verify alone is right on 255 and 290 of them: it reads no
    percentage in a box, and no unit.
    """
    missed = [equal for equal, _ in PAIRS[family] if not is_equivalent(*equal)]
    confused = [different for _, different in PAIRS[family] if is_equivalent(*different)]
    assert (missed, confused) == ([], [])


@pytest.mark.parametrize(
    "wanted, given, is_equal",
    [
        ("5 cm", "50 mm", True),
        ("5 cm", "5 m", False),
        ("6 cm^2", r"600\text{ mm}^2", True),
        ("6 cm^2", r"6\text{ cm}", False),
        ("5 apples", "5", True),
        ("1/2", r"50\%", True),
        ("5", r"50\%", False),
        (r"\text{Monday}", "Monday", True),
        (r"\text{Monday}", "Tuesday", False),
        ("$12$.", "12", True),
        ("12", "", False),
        ("12", "}{", False),
        ("12", r"\frac{", False),
    ],
)
def test_units_percentages_words_and_what_is_no_formula(library, wanted, given, is_equal):
    assert is_equivalent(wanted, given) == is_equal


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


def test_marks_that_are_special_tokens_are_seen(library):
    sampled = {"raw_text": r"<think>5?</think>\boxed{4}</s>"}
    meta = {"answer": "4", "sampled": sampled}
    assert math_match("", r"5?\boxed{4}", meta, thinking="opens") == 1.0


def test_a_row_without_a_formula_is_an_error_and_not_a_wrong_answer(library):
    with pytest.raises(ValueError, match="set task.answer_key"):
        math_match("", r"\boxed{4}", {})
    with pytest.raises(ValueError, match="is no formula; use exact_match"):
        math_match("", r"\boxed{4}", {"answer": r"\frac{"})


@settings(deadline=None)
@given(
    inner=st.recursive(
        st.text("ab1 +", max_size=4), lambda some: st.tuples(some, some).map("{%s}%s".__mod__)
    ),
    before=st.text(r"a\{} ", max_size=8),
)
def test_a_box_holds_what_stands_between_its_braces(inner, before):
    assert last_boxed(rf"{before} \boxed{{{inner}}}. Done.") == inner


@given(text=st.text())
def test_any_text_has_a_box_or_none(text):
    found = last_boxed(text)
    assert found is None or f"{{{found}}}" in text
    assert last_boxed(rf"\boxed{{{text}") is None or "}" in text


WITHOUT_MARKS = st.text().filter(lambda text: "<think>" not in text and "</think>" not in text)


@given(thoughts=WITHOUT_MARKS, answer=WITHOUT_MARKS)
def test_thoughts_and_answer_are_what_the_marks_part(thoughts, answer):
    assert split_thoughts(f"<think>{thoughts}</think>{answer}", "opens") == (thoughts, answer)


def test_an_answer_that_takes_for_ever_is_killed_and_is_no_score(library):
    """99999999! has 756,570,549 digits."""
    meta = {"answer": "4"}
    items = [text_item("", rf"\boxed{{{x}}}", meta) for x in ("4", "99999999!", "5", "8/2")]
    with RewardPool("rewards:math_match", timeout_s=2.0) as pool:
        outcomes = score_all(pool, items)
    assert [(outcome.kind, outcome.value) for outcome in outcomes[::2]] == [
        ("score", 1.0),
        ("score", 0.0),
    ]
    assert outcomes[1].kind == "error"
    assert "took longer than reward.timeout_s=2" in outcomes[1].reason
    assert outcomes[3].value == 1.0


def test_without_the_package_the_start_ends_and_names_the_extra(tmp_path, monkeypatch):
    """A finder before all others says that there is no such package, as where it is absent."""
    (tmp_path / "absent.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'math_verify':\n"
        "            raise ModuleNotFoundError('no', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from llamarl.tasks.rewards import math_match\n"
    )
    monkeypatch.chdir(tmp_path)
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
