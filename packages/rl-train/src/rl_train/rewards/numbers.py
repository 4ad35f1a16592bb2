r"""Numbers in text, as people and models write them: thousands separators, fractions, currency and LaTeX's commands.

A minus is a sign where neither a letter, a digit nor a closing bracket stands before it: `5-10` has the numbers 5 and
10, and `COVID-19` has 19.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any, NamedTuple

# Longer numbers, and exponents beyond this, equal no answer: Python takes seconds to compute with such numbers.
_MOST_DIGITS = 300

_DASHES = str.maketrans(dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-"))
# In LaTeX: `5{,}000`, `5\,000`, `5,\!000`, `\$5`, `5\%`, `\(5\)` and `\[5\]`.
_COMMANDS = {"{,}": ",", r"\,": "\u2009", r"\!": "", r"\$": "$", r"\%": "%"} | dict.fromkeys(
    (r"\(", r"\)", r"\[", r"\]"), " "
)
_PART = r"\{\s*(-?[\d.]+)\s*\}|(\d)"
_FRACTION = re.compile(rf"(\d?)\\[dtc]?frac\s*(?:{_PART})\s*(?:{_PART})")
# Separators of thousands: commas, apostrophes, underscores, and spaces that do not break a line.
_GROUPED = r"(?<!\d,)\d{1,3}(?P<separator>[,'\u2019_\u00a0\u2007\u2009\u202f])\d{3}(?:(?P=separator)\d{3})*(?!,?\d)"
_LAKHS = r"(?<!\d,)\d{1,2}(?:,\d{2})+,\d{3}(?!,?\d)"  # India: 12,34,567
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}%-])[-+])?[$€£¥₹]?"
    rf"(?P<digits>(?:{_GROUPED}|{_LAKHS}|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?P<exponent>[eE][-+]?\d+(?!\d|\.\d))?"
)
_WORDS = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?")
_SLASH = re.compile(r" ?/ ?")


class Number(NamedTuple):
    """A number of a text, `start:end` in the text as `plain` returns it; `value` is None for one that is too long."""

    value: Fraction | None
    text: str
    start: int
    end: int


def plain(text: str) -> str:
    """Return a text with one kind of minus, and without LaTeX's commands around and in numbers."""
    text = text.translate(_DASHES)
    for command, sign in _COMMANDS.items():
        text = text.replace(command, sign)
    text = _DEGREES.sub("°", _WORDS.sub(r" \1 ", text))
    return _FRACTION.sub(
        lambda match: f"{match[1]}{' ' if match[1] else ''}{match[2] or match[3]}/{match[4] or match[5]}", text
    )


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{}` of a text, or None."""
    end = len(text)
    while (start := text.rfind(r"\boxed{", 0, end)) >= 0:
        depth = 0
        for place in range(start + len(r"\boxed"), end):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start + len(r"\boxed{") : place]
        end = start
    return None


def numbers_in(text: str) -> list[Number]:
    """Return the numbers of a text that `plain` has returned, in their order; `1/2` and `3 1/2` are one number each."""
    numbers: list[Number] = []
    for chain in _chains(text):
        if len(chain) == 2 and chain[1].value != 0:
            fraction = _number(text, _quotient(*chain), chain[0].start, chain[1].end)
            chain = [_mixed(text, numbers.pop(), fraction) if _is_mixed(text, numbers, chain) else fraction]
        numbers.extend(chain)  # longer chains are no fractions, such as the date 12/25/2020
    return numbers


def last_number(text: str) -> Number | None:
    r"""Return the last number of a text, or of the text in its last `\boxed{}`; None without numbers."""
    return next(reversed(numbers_in(plain(text if (inside := boxed(text)) is None else inside))), None)


def only_number(value: Any) -> Fraction:
    r"""Return the number of an answer in the data: a number, or a text with one number, such as `"$1,234"`.

    In a text with `\boxed{}` or `####`, only the content of the last box, or the text after the last `####`, counts.

    Raises:
        ValueError: The answer is no number, or a text with more than that one number.
    """
    if isinstance(value, Real | Decimal) and not isinstance(value, bool) and math.isfinite(value):
        return Fraction(str(value))
    if not isinstance(value, str):
        raise ValueError(f"the answer {value!r:.200} must be a finite number, or a text with one number")
    inside = boxed(value)
    text = plain(value.rpartition("####")[2] if inside is None else inside)
    numbers = numbers_in(text)
    if len(numbers) != 1:
        raise ValueError(
            f"the answer {value!r:.200} must have one number, and has {len(numbers)}; write the number alone, or take "
            "the reward exact-match or math-verify"
        )
    ((number, _, start, end),) = numbers
    if number is None:
        raise ValueError(f"the answer {value!r:.200} must be below 1e{_MOST_DIGITS}; take the reward exact-match")
    before, after = text[:start], text[end:]
    touching = before[-1:] + after[:1]
    operators = {before.rstrip()[-1:], after.lstrip()[:1]} & set("+-*/^_\\")
    if operators or any(map(str.isalnum, touching)) or after[:1] == "(" or "\\" in text:
        raise ValueError(
            f"the answer {value!r:.200} must be a number, and looks like an expression; write the number alone, or "
            "take the reward math-verify"
        )
    return number


def equal(answer: Fraction, right: Fraction, tolerance: Fraction | None) -> bool:
    """Say whether an answer is right. Without a tolerance, integers are compared exactly, other numbers within 1e-6.

    A tolerance is relative for numbers above 1, and absolute below.
    """
    if tolerance is None and right.denominator == 1:
        return answer == right
    tolerance = Fraction(1, 10**6) if tolerance is None else tolerance
    return abs(answer - right) <= tolerance * max(Fraction(1), abs(answer), abs(right))


def written(value: Fraction) -> str:
    """Return a number as text: integers with all digits, others with 12 digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _chains(text: str) -> list[list[Number]]:
    """Return the numbers of a text in chains; a single slash joins the numbers of a chain."""
    chains: list[list[Number]] = []
    for match in _NUMBER.finditer(text):
        number = _number(text, _value(match), *match.span())
        if chains and _SLASH.fullmatch(text, chains[-1][-1].end, number.start):
            chains[-1].append(number)
        else:
            chains.append([number])
    return chains


def _value(match: re.Match[str]) -> Fraction | None:
    digits, power = match["digits"], (match["exponent"] or "e0")[1:]
    if len(digits) > _MOST_DIGITS or len(power) > 4 or abs(int(power)) > _MOST_DIGITS:
        return None
    value = Fraction(re.sub(r"[^\d.]", "", digits) + f"e{power}")
    return -value if match["sign"] == "-" else value


def _quotient(above: Number, below: Number) -> Fraction | None:
    return None if above.value is None or below.value is None else above.value / below.value


def _number(text: str, value: Fraction | None, start: int, end: int) -> Number:
    too_large = value is not None and abs(value) >= 10**_MOST_DIGITS
    return Number(None if too_large else value, text[start:end], start, end)


def _is_mixed(text: str, before: list[Number], fraction: list[Number]) -> bool:
    """Say whether an integer and a fraction below 1 follow each other, as in `3 1/2`."""
    above, below = fraction
    numbers = before[-1:] + fraction
    return (
        len(numbers) == 3
        and numbers[0].text.lstrip("+-").isdecimal()
        and above.text.isdecimal()
        and below.text.isdecimal()
        and None not in (numbers[0].value, above.value, below.value)
        and text[numbers[0].end : above.start] == " "
        and int(above.text) < int(below.text)
    )


def _mixed(text: str, whole: Number, fraction: Number) -> Number:
    assert whole.value is not None
    assert fraction.value is not None
    fraction_value = -fraction.value if whole.text.startswith("-") else fraction.value
    return _number(text, whole.value + fraction_value, whole.start, fraction.end)
