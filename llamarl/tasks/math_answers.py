r"""The reward math_match: whether a completion's formula has the value of its row's answer.

    "... so it is \boxed{\frac{2}{4}}."  --last box-->  "\frac{2}{4}"  --math-verify, sympy-->  1/2
    "2½"  "√2"  "3×10⁵"  "1 000"  "1.5e-3"  "2 1/3"    --to_latex-->  what math-verify reads
    r"\text{North}"  "no solution"                     --words_of-->  "north"  "no solution"

Equal are the same number in another form, exact or to six decimal places; expressions that sympy
simplifies to each other; sets in any order; tuples and intervals in theirs. Words are compared as
texts. We add percentages, which may equal their number or that over 100, and units of length,
mass, time and volume, which count where both sides have one.

sympy may run for ever or fill the memory. The pool kills the worker then, and the completion is
not trained on.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from types import ModuleType

from llamarl.tasks.forms import (
    WorkerLimits,
    answer_in,
    checked_by,
    import_package,
    need_flag,
    need_word,
)
from llamarl.tasks.thinking import THINKING, Thinking, answer_of, last_boxed

_SIGNS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "\N{DOT OPERATOR}": r"\cdot ",
        "÷": r"\div ",
        "±": r"\pm ",
        "°": r"^{\circ}",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}",
        "\N{NO-BREAK SPACE}": " ",
        "\N{THIN SPACE}": " ",
        "\N{NARROW NO-BREAK SPACE}": " ",
    }
)
_GREEK = re.compile(r"[\u0370-\u03ff]")
_RAISED = re.compile(r"[⁰¹²³⁴-⁹⁺⁻ⁿ]+")
_LOWERED = re.compile(r"[₀-₉]+")
_VULGAR = re.compile(r"[¼-¾⅐-⅞]")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")
_LEADING_DASH = re.compile(r"(^|[\s({\[,=])\N{EN DASH}(?=[\d.\\])")
_BOLD = re.compile(r"\\(?:boldsymbol|mathbf|bm)\s*\{([^{}]*)\}")
# Whole answers. Longer numbers are left as they are.
_GROUPED = re.compile(r"(-?)(\d{1,3}(?:(?:\\[,; ]|[\s~])\d{3})+)(\.\d+)?")
_SCIENTIFIC = re.compile(r"(-?\d{1,40}(?:\.\d{1,40})?)[eE]([+-]?\d{1,4})")
_MIXED = re.compile(r"(-?)(\d{1,40})\s+(\d{1,40})\s*/\s*(\d{1,40})")
_REPEATING = re.compile(r"(-?)(\d{0,40})\.(\d{0,40})\\(?:overline|bar)\s*\{(\d{1,40})\}")
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
)
_BLANK = re.compile(r"(?:\\[,;! ]|~|\s)+")
_PRODUCT = re.compile(r"[a-z]{2,3}|[a-z](?: [a-z]){1,2}")
_SHORT_WORDS = frozenset(
    "act all and any art bad big cat day dog eat end few god his how its low man may new no not "
    "now odd of off old on one or our out own red six ten the top two war was way won yes".split()
)
_WORDS = re.compile(r"[^\W\d_]+(?:[ '\u2019-][^\W\d_]+)*")


def to_latex(text: str) -> str:
    """Return a formula as LaTeX: without signs of Unicode, and as one number where it is a number
    with blanks, an exponent, a fraction behind it or decimals that repeat.
    """
    text = _VULGAR.sub(_vulgar, text)
    text = _RAISED.sub(lambda found: f"^{{{_plain(found[0])}}}", text)
    text = _LOWERED.sub(lambda found: f"_{{{_plain(found[0])}}}", text)
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2] or found[3]}}}", text)
    text = _LEADING_DASH.sub(r"\1-", text)
    text = _GREEK.sub(_letter, text.translate(_SIGNS))
    return _number(_BOLD.sub(r"\1", text).strip())


def _plain(signs: str) -> str:
    """Return raised or lowered signs as plain ones."""
    return unicodedata.normalize("NFKD", signs).replace("\N{MINUS SIGN}", "-")


def _vulgar(found: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKD", found[0]).partition("\N{FRACTION SLASH}")
    return rf"\frac{{{above}}}{{{below}}}"


def _letter(found: re.Match[str]) -> str:
    """Return a Greek letter's command; the letter itself where it has none of that name."""
    name = unicodedata.name(found[0], "").lower()
    kind, _, letter = name.removeprefix("greek ").partition(" letter ")
    if not letter.isalpha() or kind not in ("small", "capital"):
        return found[0]
    letter = "lambda" if letter == "lamda" else letter
    return f"\\{letter.capitalize() if kind == 'capital' else letter} "


def _number(text: str) -> str:
    """Return a text that is one number as LaTeX; others as they are."""
    found = _GROUPED.fullmatch(text)
    if found:
        return found[1] + re.sub(r"\D", "", found[2]) + (found[3] or "")
    found = _SCIENTIFIC.fullmatch(text)
    if found:
        return rf"{found[1]} \cdot 10^{{{int(found[2])}}}"
    found = _MIXED.fullmatch(text)
    if found and int(found[4]):
        return _fraction(found[1], int(found[2]) + Fraction(int(found[3]), int(found[4])))
    found = _REPEATING.fullmatch(text)
    if found:
        fixed = found[3]
        period = Fraction(int(found[4]), 10 ** len(found[4]) - 1)
        value = int(f"0{found[2]}{fixed}") + period
        return _fraction(found[1], value / 10 ** len(fixed))
    return text


def _fraction(sign: str, value: Fraction) -> str:
    return rf"{sign}\frac{{{value.numerator}}}{{{value.denominator}}}"


def words_of(text: str) -> str | None:
    """Return an answer that is words, without marks of LaTeX and in lower case; None for others. A
    single letter is a name of a formula or of a choice, and not a word.
    """
    bare = _BLANK.sub(" ", _TEXT.sub(r"\1", text).replace("$", " ")).strip().removesuffix(".")
    bare = bare.removeprefix("{").removesuffix("}").strip()
    if len(bare) < 2 or not _WORDS.fullmatch(bare) or _GREEK.search(bare):
        return None
    return bare.casefold()


def is_product(text: str) -> bool:
    """Whether an answer of words may be a product of variables: two or three lower-case letters
    that are no common word. Upper case names points or choices, whose order counts.
    """
    letters = _BLANK.sub(" ", text).strip()
    return bool(_PRODUCT.fullmatch(letters)) and letters not in _SHORT_WORDS


def _table(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


# Units of each quantity, with how many base units each one is.
_UNITS = {
    "length": _table(
        "m=1 km=1000 dm=0.1 cm=0.01 mm=0.001 ft=0.3048 in=0.0254 yd=0.9144 mi=1609.344"
    ),
    "mass": _table("g=1 kg=1000 mg=0.001 t=1000000"),
    "time": _table("s=1 min=60 h=3600 day=86400 week=604800 ms=0.001"),
    "volume": _table("l=1 ml=0.001 cl=0.01 dl=0.1"),
}
# "inche" is inches without its s.
_NAMES = _table(
    "meter=m metre=m kilometer=km kilometre=km decimeter=dm centimeter=cm centimetre=cm "
    "millimeter=mm millimetre=mm foot=ft feet=ft inch=in inche=in yard=yd mile=mi gram=g "
    "kilogram=kg milligram=mg tonne=t second=s sec=s minute=min hour=h hr=h liter=l litre=l "
    "milliliter=ml millilitre=ml"
)
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


def _check(limits: WorkerLimits, *, thinking: Thinking = "none", boxed: bool = True) -> None:
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


def check_row(prompt: str, completion_text: str, meta: dict, **options: object) -> float:
    """Return 1 for a row whose answer other answers can be compared with, whatever the completion
    is. ValueError for one without, or whose answer is neither words nor a formula.
    """
    wanted = _wanted(meta)
    if words_of(wanted) is None:
        _target(_quantity(wanted).formula)
    return 1.0


def _wanted(meta: dict) -> str:
    """Return the row's answer, without a box. ValueError if there is none, or no text or number."""
    wanted = answer_in(meta)
    inner = last_boxed(wanted)
    return wanted if inner is None else inner


def is_equivalent(wanted: str, given: str) -> bool:
    """Whether two formulas have the same value, or the same words. ValueError if the wanted one is
    neither.
    """
    if _bare(wanted) == _bare(given):  # sympy need not be asked
        return True
    words = words_of(wanted)
    if words is not None and words == words_of(given):
        return True
    if words is not None and not (is_product(_bare(wanted)) and _is_formula(wanted)):
        return False
    # math-verify would accept both: a tuple without its brackets, and a chain of unequal numbers.
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
def _math_verify() -> ModuleType:
    """Return the module math_verify."""
    library = import_package("math_verify", user="math_match", package="math-verify", extra="math")
    # It warns that it has no time limit; the worker's is in force.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library
