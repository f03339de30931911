r"""The reward math_match: whether a completion's formula has the value of its row's answer.

    "... so it is \boxed{\frac{2}{4}}."  --last box-->  "\frac{2}{4}"  --math-verify, sympy-->  1/2

Equal: the same number in another form, exact or to six decimal places; expressions that sympy
simplifies to each other; sets in any order; tuples and intervals in theirs. Answers that are words
are compared as texts (math_text.py, which also makes LaTeX of signs of Unicode and of numbers as
they are written elsewhere). What math-verify reads otherwise is done here: a percentage is its
number, and also that over 100, where the other side is none; lengths, masses, times and volumes are
compared with their units where both sides have one. A unit that one side leaves out does not count,
nor does one that is not known here.

sympy may take for ever or fill the memory, with what a completion puts into a box. Nothing here
guards against it: the worker that this runs in is killed (llamarl/scoring/pool.py), and the
completion is not trained on.
"""

from __future__ import annotations

import importlib
import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from llamarl.tasks.forms import Limits, checked_by
from llamarl.tasks.marked import THINKING, Thinking, answer_of, last_boxed
from llamarl.tasks.math_text import is_product, to_latex, words_of
from llamarl.tasks.options import need_flag, need_word
from llamarl.words.answers import answer_text

# As many of a base unit, which is the first of a line.
_UNITS: dict[str, dict[str, int | str]] = {
    "length": {
        "m": 1,
        "km": 1000,
        "dm": "0.1",
        "cm": "0.01",
        "mm": "0.001",
        "ft": "0.3048",
        "in": "0.0254",
        "yd": "0.9144",
        "mi": "1609.344",
    },
    "mass": {"g": 1, "kg": 1000, "mg": "0.001", "t": 1000000},
    "time": {"s": 1, "min": 60, "h": 3600, "day": 86400, "week": 604800, "ms": "0.001"},
    "volume": {"l": 1, "ml": "0.001", "cl": "0.01", "dl": "0.1"},
}
_NAMES = {
    "meter": "m",
    "metre": "m",
    "kilometer": "km",
    "kilometre": "km",
    "decimeter": "dm",
    "centimeter": "cm",
    "centimetre": "cm",
    "millimeter": "mm",
    "millimetre": "mm",
    "foot": "ft",
    "feet": "ft",
    "inch": "in",
    "inche": "in",  # inches without its s
    "yard": "yd",
    "mile": "mi",
    "gram": "g",
    "kilogram": "kg",
    "milligram": "mg",
    "tonne": "t",
    "second": "s",
    "sec": "s",
    "minute": "min",
    "hour": "h",
    "hr": "h",
    "liter": "l",
    "litre": "l",
    "milliliter": "ml",
    "millilitre": "ml",
}
_UNIT = re.compile(
    r"(?:\\[ ,;!]|~|\s)*"
    r"(?:\\(?:text|mathrm|textrm|mbox|operatorname)\s*\{\s*([A-Za-z]+)\.?\s*\}"
    r"|(?<=\s)([A-Za-z]{1,11}))"
    r"(\^\{?[23]\}?)?\s*$"
)
_PERCENT = re.compile(r"\s*(?:\\?%|\\?\s*\\text\s*\{\s*(?:\\?%|percent)\s*\}|\s+percent)\s*$")
_CURRENCY = re.compile(r"\s*(?:\\text\s*\{\s*dollars?\s*\}|(?<=\d)\s*dollars?)$")
# Members without brackets or names; and a letter that no command has.
_LISTED = re.compile(r"[^()\[\]{}=<>|a-zA-Z]+,[^()\[\]{}=<>|a-zA-Z]+")
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
_EQUALS = re.compile(r"(?<![<>!:])=")  # not that of <=
_DOLLARS = re.compile(r"^\s*(?:\\?\$|\\\(|\\\[)\s*|\s*(?:\\?\$|\\\)|\\\])\s*$")


@dataclass(frozen=True, slots=True)
class _Quantity:
    """An answer without its unit or percent sign."""

    formula: str
    unit: tuple[str, Fraction] | None  # what it measures, and how many of the base unit it is
    is_percentage: bool


def _check(limits: Limits, *, thinking: Thinking = "none", boxed: bool = True) -> None:
    """Raise ValueError for options that cannot be used, or without math-verify."""
    need_word("thinking", thinking, THINKING)
    need_flag("boxed", boxed)
    _math_verify()


@checked_by(_check)
def math_match(
    prompt: str,
    completion_text: str,
    meta: dict,
    *,
    thinking: Thinking = "none",
    boxed: bool = True,
) -> float:
    """Return 1 if the answer in the last box of a completion equals the row's, else 0.

    thinking: how the completion marks its thoughts, which are not looked at; wrong marks are 0.
    boxed: whether an answer needs a box; else the last formula or number of the text counts without
    one. ValueError if the row's answer is no formula.
    """
    wanted = _wanted(meta)
    text = answer_of(completion_text, meta, thinking)
    if text is None:
        return 0.0
    given = last_boxed(text)
    if given is None:
        if boxed:
            return 0.0
        given = text.replace("\\boxed", "")
    return float(is_equivalent(wanted, given))


def check_row(
    prompt: str,
    completion_text: str,
    meta: dict,
    *,
    thinking: Thinking = "none",
    boxed: bool = True,
) -> float:
    """Return 1 for a row whose answer other answers can be compared with, whatever the completion
    is. ValueError for one without, or whose answer is neither words nor a formula.
    """
    wanted = _wanted(meta)
    if words_of(wanted) is None:
        _target(_quantity(wanted).formula)
    return 1.0


def _wanted(meta: dict) -> str:
    """Return the row's answer, without a box. ValueError if there is none, or no text or number."""
    if meta.get("answer") is None:
        raise ValueError("the prompt's meta has no 'answer'; set task.answer_key")
    wanted = answer_text(meta["answer"])
    inner = last_boxed(wanted)
    return wanted if inner is None else inner


def is_equivalent(wanted: str, given: str) -> bool:
    """Whether two formulas have the same value, or the same words. ValueError if the wanted one is
    neither.
    """
    if _bare(wanted) == _bare(given):
        return True
    words = words_of(wanted)
    if words is not None and words == words_of(given):
        return True
    if words is not None and not (is_product(_bare(wanted)) and _is_formula(wanted)):
        return False
    if _loses_its_order(wanted, given) or _contradicts_itself(given):
        return False
    want = _quantity(wanted)
    give = _quantity(given)
    if want.unit is not None and give.unit is not None:
        return _is_same_amount(want, give)
    if _is_equal(want.formula, give.formula):
        return True
    if want.is_percentage == give.is_percentage:
        return False
    # One of them is a percentage: 50 % is also 0.5.
    wanted_value = _over_100(want.formula) if want.is_percentage else want.formula
    given_value = _over_100(give.formula) if give.is_percentage else give.formula
    return _is_equal(wanted_value, given_value)


def _loses_its_order(wanted: str, given: str) -> bool:
    """Whether a tuple in brackets is asked for and its members are given without any."""
    asked = _bare(wanted)
    members = _bare(given)
    is_tuple = asked.startswith("(") and asked.endswith(")") and "," in asked
    return is_tuple and _LISTED.fullmatch(members) is not None


def _contradicts_itself(given: str) -> bool:
    """Whether a chain of equations has numbers that are not equal: 5=4."""
    sides = _EQUALS.split(_bare(given))
    numbers = [side for side in sides if not _LETTER.search(side) and _is_formula(side)]
    try:
        return not all(is_equivalent(numbers[-1], number) for number in numbers[:-1])
    except ValueError:  # nothing that a completion says is an error of its row
        return False


def _is_same_amount(want: _Quantity, give: _Quantity) -> bool:
    """Whether two numbers with units are as much."""
    assert want.unit is not None and give.unit is not None, "both have units"
    measured, factor = want.unit
    given_measured, given_factor = give.unit
    if measured != given_measured:
        return False
    ratio = given_factor / factor
    given = give.formula
    if ratio != 1:
        given = rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}} \cdot ({given})"
    return _is_equal(want.formula, given)


def _over_100(formula: str) -> str:
    return rf"\frac{{{formula}}}{{100}}"


def _is_equal(wanted: str, given: str) -> bool:
    """Whether math-verify finds two formulas equal."""
    return _math_verify().verify(_target(wanted), _parsed(given), timeout_seconds=None)


def _target(wanted: str) -> list:
    """Return what math-verify reads in a row's answer. ValueError if it is no formula."""
    target = _parsed(wanted)
    if not _is_read(target):
        raise ValueError(f"the answer {wanted[:60]!r} is no formula; use exact_match for this task")
    return target


def _is_formula(text: str) -> bool:
    """Whether math-verify finds a formula in an answer."""
    return bool(text.strip()) and _is_read(_parsed(_quantity(text).formula))


def _is_read(parsed: list) -> bool:
    """Whether what math-verify reads is more than a text."""
    return not all(isinstance(one, str) for one in parsed)


@lru_cache(maxsize=512)
def _parsed(formula: str) -> list:
    """Return what math-verify reads in a formula: an expression of sympy's and a text, or less."""
    library = _math_verify()
    config = (library.LatexExtractionConfig(), library.ExprExtractionConfig())
    return library.parse(f"${to_latex(formula)}$", extraction_config=config, parsing_timeout=None)


def _quantity(text: str) -> _Quantity:
    """Take a formula and its unit or percent sign apart."""
    formula = _bare(text)
    found = _PERCENT.search(formula)
    if found:
        return _Quantity(formula=formula[: found.start()], unit=None, is_percentage=True)
    found = _UNIT.search(formula)
    if found and formula[: found.start()].strip():
        unit = _unit_named(found[1] or found[2], power=found[3])
        if unit is not None:
            return _Quantity(formula=formula[: found.start()], unit=unit, is_percentage=False)
    return _Quantity(formula=formula, unit=None, is_percentage=False)


def _unit_named(name: str, *, power: str | None) -> tuple[str, Fraction] | None:
    """Return what a unit measures, and how many of the base unit it is; None for no unit."""
    exponent = int(power.strip("^{}")) if power else 1
    lower = name.lower()
    singular = lower.removesuffix("s") if len(lower) > 2 else lower
    for spelling in (name, lower, singular):
        short = _NAMES.get(spelling, spelling)
        for measured, units in _UNITS.items():
            if short in units:
                return f"{measured}^{exponent}", Fraction(units[short]) ** exponent
    return None


def _bare(text: str) -> str:
    """Return a formula without marks of mathematics around it, a full stop behind it, and double
    blanks.
    """
    bare = " ".join(text.split()).removesuffix(".")
    bare = _CURRENCY.sub("", bare)
    while (shorter := _DOLLARS.sub("", bare)) != bare:
        bare = shorter
    return bare


@lru_cache(maxsize=1)
def _math_verify():
    """Return the module math_verify. ValueError that names the extra if it is not there."""
    try:
        library = importlib.import_module("math_verify")
    except ModuleNotFoundError as error:
        if error.name != "math_verify":
            raise
        remedy = "pip install 'llamarl[math]'"
        raise ValueError(f"math_match needs the package math-verify: {remedy}") from error
    # It warns that it has no time limit; the worker's is in force.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library
