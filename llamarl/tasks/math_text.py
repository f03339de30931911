r"""Answers of mathematics as people and models write them, as LaTeX or as words.

    "2½"  "√2"  "3×10⁵"  "1 000"  "1.5e-3"  "2 1/3"    --to_latex-->  what math-verify reads
    r"\text{North}"  "no solution"                     --words_of-->  "north"  "no solution"

Standard library only.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

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
