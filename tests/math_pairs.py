r"""Pairs of mathematical answers that are equal, and pairs that are not, by family.

Each pair is made from numbers whose relation is arithmetic: a fraction and its multiple, a square
root and its square. No program that compares formulas took part. A different pair is the equal one
with one number changed, so that the forms of both are alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

EACH = 30  # pairs of a family
Pair = tuple[str, str]  # the wanted answer, and the one that is given
Both = tuple[Pair, Pair]  # an equal pair, and a different one


def pairs() -> dict[str, list[Both]]:
    """Return the pairs by family, EACH of them an equal and a different one."""
    made = {}
    for name, family in _FAMILIES.items():
        made[name] = list(family())
        assert len(made[name]) == EACH, (name, len(made[name]))
    return made


def _frac(top: object, bottom: object, command: str = r"\frac") -> str:
    return f"{command}{{{top}}}{{{bottom}}}"


def _root(square: int) -> str:
    return rf"\sqrt{{{square}}}"


def _styled(style: str, top: int, bottom: int) -> str:
    """Return a fraction by its command, or with a slash."""
    return f"{top}/{bottom}" if style == "/" else _frac(top, bottom, style)


def _fractions() -> Iterator[Both]:
    styles = (r"\frac", r"\dfrac", "/", r"-\frac", r"\tfrac")
    for n in range(EACH):
        top = 1 + n
        bottom = 7 + n % 11
        times = 2 + n % 5
        wanted = _styled(styles[n % 5], top, bottom)
        style = styles[(n + 1) % 5]
        if n % 5 in (2, 3):  # the minus on both sides
            style = styles[3 if n % 5 == 3 else 0]
        yield (
            (wanted, _styled(style, top * times, bottom * times)),
            (wanted, _styled(style, top * times + 1, bottom * times)),
        )


def _mixed_numbers() -> Iterator[Both]:
    for n in range(EACH):
        whole = 1 + n
        top = 1 + n % 3
        bottom = 4 + n % 4
        wanted = _frac(whole * bottom + top, bottom)
        part = _frac(top, bottom)
        yield (wanted, f"{whole}{part}"), (wanted, f"{whole + 1}{part}")


def _decimals() -> Iterator[Both]:
    for n in range(EACH):
        value = Fraction(3 * n + 1, (2, 4, 5, 8, 10)[n % 5])
        shown = f"{float(value):g}"
        wanted = _frac(value.numerator, value.denominator)
        if n % 3 == 1:  # many digits, with separators
            wanted = str(12345 * (n + 1))
            shown = f"{12345 * (n + 1):,}" if n % 2 else f"{12345 * (n + 1)}.00"
        changed = shown[:-1] + str((int(shown[-1]) + 1) % 10)
        yield (wanted, shown), (wanted, changed)


def _percentages() -> Iterator[Both]:
    for n in range(EACH):
        number = 3 + 2 * n
        percent = rf"{number}\%" if n % 2 else f"{number}%"
        wanted = (str(number), rf"{number}\%", _frac(number, 100))[n % 3]
        given = percent if n % 3 != 1 else f"0.{number:02d}"
        changed = given.replace(f"{number:02d}" if n % 3 == 1 else str(number), str(number + 1))
        if n % 3 == 1:
            changed = f"0.{number + 1:02d}"
        yield (wanted, given), (wanted, changed)


def _sets() -> Iterator[Both]:
    for n in range(EACH):
        numbers = [n - 10, n, n + 3, 2 * n + 20][: 2 + n % 3]
        turned = numbers[1:] + numbers[:1]
        other = [*turned[:-1], turned[-1] + 100]
        if n % 4 == 3:
            other = turned[:-1]  # one of them is missing
        wanted = _set(numbers, "")
        size = "" if n % 2 else r"\left"
        yield (wanted, _set(turned, size)), (wanted, _set(other, size))


def _set(numbers: list[int], left: str) -> str:
    right = r"\right" if left else ""
    return rf"{left}\{{ {', '.join(map(str, numbers))} {right}\}}"


def _intervals() -> Iterator[Both]:
    for n in range(EACH):
        low, high = n - 15, n + 4
        left, right = "[(["[n % 3], "])"[n % 2]
        wanted = f"{left}{low}, {high}{right}"
        opened, closed = (rf"\left{left}", r"\right") if n % 2 else (left, "")
        equal = f"{opened}{low},{high}{closed}{right}"
        other = f"{opened}{low},{high + 1}{closed}{right}"
        if n % 3 == 1:  # the end belongs to it, or not
            turned = ")" if right == "]" else "]"
            other = f"{opened}{low},{high}{closed}{turned}"
        if n % 5 == 4:
            wanted = rf"(-\infty, {low}{right} \cup ({high}, \infty)"
            equal = rf"({high}, \infty) \cup (-\infty, {low}{right}"
            other = rf"({high}, \infty) \cup (-\infty, {low + 1}{right}"
        yield (wanted, equal), (wanted, other)


def _surds() -> Iterator[Both]:
    primes = (2, 3, 5, 7, 11, 13)
    for n in range(EACH):
        root, times = primes[n % 6], 2 + n // 3
        wanted = f"{times}{_root(root)}"
        equal = _root(times * times * root)
        other = _root(times * times * root + 1)
        if n % 3 == 1:  # the root leaves the denominator
            wanted = _frac(f"{times}{_root(root)}", root)
            equal = _frac(times, _root(root))
            other = _frac(times + 1, _root(root))
        if n % 3 == 2:  # (a + sqrt b)(a - sqrt b) = a^2 - b
            wanted = _frac(1, f"{times + 2}+{_root(root)}")
            difference = (times + 2) ** 2 - root
            equal = _frac(f"{times + 2}-{_root(root)}", difference)
            other = _frac(f"{times + 2}-{_root(root)}", difference + 1)
        yield (wanted, equal), (wanted, other)


def _polynomials() -> Iterator[Both]:
    for n in range(EACH):
        a, b = 1 + n, 2 + n % 7
        # (x + a)(x + b) and (2x - a)(x + b)
        wanted = f"x^2+{a + b}x+{a * b}"
        equal = f"(x+{a})(x+{b})"
        other = f"(x+{a})(x+{b + 1})"
        if n % 3 == 1:
            wanted = f"2x^2{2 * b - a:+d}x-{a * b}" if 2 * b != a else f"2x^2-{a * b}"
            equal = f"(x+{b})(2x-{a})"
            other = f"(x+{b})(2x+{a})"
        if n % 3 == 2:  # another order of terms
            wanted = f"{a}x^3 - {b}y + 7"
            equal = f"7 + {a} x^{{3}} - {b} y"
            other = f"7 + {a} x^{{3}} + {b} y"
        yield (wanted, equal), (wanted, other)


def _units() -> Iterator[Both]:
    conversions = (("m", "cm", 100), ("kg", "g", 1000), ("h", "min", 60), ("km", "m", 1000))
    words = {"m": "meters", "kg": "kilograms", "h": "hours", "km": "kilometers"}
    for n in range(EACH):
        large, small, factor = conversions[n % 4]
        number = 2 + n
        wanted = rf"{number}\text{{ {large}}}"
        equal = rf"{number * factor}\ \mathrm{{{small}}}"
        other = rf"{number}\ \mathrm{{{small}}}"  # the number alone is the same
        if n % 3 == 1:  # without a unit
            equal, other = f"{number}", f"{number + 1}"
        if n % 3 == 2:
            equal = f"{number} {words[large]}"
            other = f"{number + 1} {words[large]}"
        yield (wanted, equal), (wanted, other)


def _values() -> Iterator[Both]:
    """Powers, logarithms, constants, points and equations."""
    for n in range(EACH):
        a = 2 + n // 5
        made = (
            ((f"{2**a}", f"2^{{{a}}}"), (f"{2**a}", f"2^{{{a + 1}}}")),
            ((f"{a}", rf"\log_2 {2**a}"), (f"{a}", rf"\log_2 {2 ** (a + 1)}")),
            (
                (rf"\frac{{{a}\pi}}{{6}}", rf"\frac{{{2 * a}\pi}}{{12}}"),
                (rf"\frac{{{a}\pi}}{{6}}", rf"\frac{{{a}\pi}}{{12}}"),
            ),
            (
                (f"({a}, {a + 3})", rf"\left({a}, \frac{{{2 * a + 6}}}{{2}}\right)"),
                (f"({a}, {a + 3})", f"({a + 3}, {a})"),
            ),
            ((f"{a}", f"x = {a}"), (f"{a}", f"x = -{a}")),
        )
        yield made[n % 5]


_FAMILIES = {
    "fractions": _fractions,
    "mixed numbers": _mixed_numbers,
    "decimals": _decimals,
    "percentages": _percentages,
    "sets": _sets,
    "intervals": _intervals,
    "surds": _surds,
    "polynomials": _polynomials,
    "units": _units,
    "values": _values,
}
