"""The ready rewards: what is right, what is wrong, and rows that they cannot read."""

from __future__ import annotations

import importlib
import math
import sys
import time
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rl_train.rewards.numbers import last_number, only_number, written
from rl_train.rewards.ready import READY


def ready(name: str) -> Any:
    """Return the function of a ready reward."""
    module, _, function = READY[name].function.partition(":")
    return getattr(importlib.import_module(module), function)


@pytest.mark.parametrize(
    ("name", "response", "row", "expected", "answer"),
    [
        ("exact-match", " 12\n", {"answer": 12}, 1, "12"),
        ("exact-match", "12.0", {"answer": 12}, 0, "12.0"),
        ("number-match", "7 * 8 is 56.", {"answer": "56"}, 1, "56"),
        ("number-match", "56, no, 57", {"answer": 56}, 0, "57"),
        ("number-match", "It is 1,234.50", {"answer": 1234.5}, 1, "1234.5"),
        ("number-match", "about -3.1e2", {"answer": -300, "tolerance": 0.05}, 1, "-310"),
        ("number-match", "about -3.1e2", {"answer": -300}, 0, "-310"),
        ("number-match", "none", {"answer": 0}, 0, None),
        ("exact-match", "5", {"answer": 5.0}, 1, "5"),
        ("exact-match", "5.0", {"answer": 5.0}, 1, "5.0"),
        # Integers are equal or not, however large; a tolerance in the row is asked for.
        ("number-match", "56088122", {"answer": 56088123}, 0, "56088122"),
        ("number-match", "56088122.5", {"answer": "56088123"}, 0, "56088122.5"),
        ("number-match", "56088122", {"answer": 56088123, "tolerance": 1e-6}, 1, "56088122"),
        ("number-match", "18", {"answer": 18.000000000000004}, 1, "18"),
        ("number-match", "5.0", {"answer": 5}, 1, "5"),
        ("number-match", "0.333333", {"answer": "1/3"}, 1, "0.333333"),
        ("number-match", "so -1/3", {"answer": -0.33333333}, 1, "-0.333333333333"),
        # Answers are read like responses.
        ("number-match", "18", {"answer": "48/2 = 24\n24 - 6 = 18\n#### 18"}, 1, "18"),
        ("number-match", r"It is \boxed{18}, since 3 are left.", {"answer": r"\boxed{18}"}, 1, "18"),
        ("number-match", "$1,234", {"answer": "1234"}, 1, "1234"),
        ("number-match", "50 %", {"answer": "50%"}, 1, "50"),
        # Numbers beyond any answer cost no time and no error.
        ("number-match", "9e999999999", {"answer": 1}, 0, "9e999999999"),
        ("number-match", "7" * 5000, {"answer": 1}, 0, "7" * 5000),
        ("number-match", "1" + "0" * 299 + "e290/7", {"answer": 1}, 0, "1" + "0" * 299 + "e290/7"),
        ("regex", "<answer>4</answer>", {"pattern": r"<answer>\d+</answer>$"}, 1, "<answer>4</answer>"),
        ("regex", "<answer>4</answer>", {"pattern": r"<answer>(\d+)</answer>$"}, 1, "4"),
        ("regex", "4", {"pattern": "[a-z]"}, 0, None),
    ],
)
def test_scores_and_answers(name: str, response: str, row: dict[str, Any], expected: float, answer: str | None) -> None:
    assert ready(name)("", response, row) == (expected, answer)


@pytest.mark.parametrize(
    ("name", "response", "row", "error"),
    [
        ("exact-match", "4", {"text": "2+2"}, "the row has no 'answer'; its entries are 'text'"),
        ("exact-match", "None", {"answer": None}, "the answer None must be a text or a number"),
        ("number-match", "4", {"answer": "four"}, "the answer 'four' must have one number, and has 0"),
        ("number-match", "3", {"answer": "1,2,3"}, "must have one number, and has 3; write the number alone"),
        ("number-match", "3", {"answer": None}, "the answer None must be a finite number, or a text with one number"),
        ("number-match", "3", {"answer": float("nan")}, "the answer nan must be a finite number"),
        ("number-match", "3", {"answer": "- 3"}, "looks like an expression; write the number alone, or take the"),
        ("number-match", "3", {"answer": "3", "tolerance": "some"}, "the tolerance 'some' must be a number"),
        ("regex", "3", {"pattern": "("}, "the pattern .* must be a regular expression: missing"),
        ("regex", [4], {"pattern": "4"}, "ready rewards read text"),
    ],
)
def test_a_row_that_a_reward_cannot_read_is_named(name: str, response: Any, row: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ready(name)("", response, row)


@pytest.mark.parametrize("answer", [r"3\pi", "3x", "x^2", r"\sqrt{3}", r"2 \cdot x", "5(x)", "10²", "COVID-19x"])
def test_an_answer_that_is_an_expression_is_refused(answer: str) -> None:
    with pytest.raises(ValueError, match="looks like an expression; write the number alone, or take the reward math-v"):
        only_number(answer)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is \u22125", "-5"),  # a minus sign
        ("it is \u20135.5", "-5.5"),  # an en dash
        ("12\u2009345", "12345"),  # a thin space
        ("12\u202f345\u202f678.5", "12345678.5"),
        (r"$12\,345$", "12345"),
        (r"5{,}000", "5000"),
        (r"5,\!000", "5000"),
        ("1'234", "1234"),
        ("₹1,50,000", "150000"),  # India
        ("1,2,3", "3"),
        ("1,2,345", "345"),
        ("[1234,567]", "567"),
        ("5-10", "10"),
        ("5\u201310", "10"),
        ("5 - 10", "10"),
        ("= -10", "-10"),
        ("(-10)", "-10"),
        ("-$10", "-10"),
        (r"-\$10", "-10"),
        ("COVID-19", "19"),
        ("**-19**.", "-19"),
        ("1/2", "0.5"),
        ("3 1/2 cups", "3.5"),
        ("-3 1/2", "-3.5"),
        ("on 12/25/2020", "2020"),
        (r"\frac{1}{2}", "0.5"),
        (r"-\dfrac12", "-0.5"),
        (r"3\frac{1}{2}", "3.5"),
        ("5/0", "0"),
        ("56.", "56"),
        ("2.5e3.", "2500"),
        (r"\(90^\circ\)", "90"),
        (r"\boxed{\text{5 apples}}, not 6", "5"),
        (r"\boxed{5} and then \boxed{6", "5"),
        ("答案是5。", "5"),
    ],
)
def test_numbers_are_read_as_people_and_models_write_them(text: str, number: str) -> None:
    last = last_number(text)
    assert last is not None
    assert last.value is not None
    assert written(last.value) == number


@given(
    st.integers(),
    st.sampled_from([",", "_", "'", "\u2009", "\u202f", "{,}", r"\,", ""]),
    st.sampled_from("-\u2212\u2013"),
)
def test_an_integer_is_read_in_every_spelling(number: int, separator: str, minus: str) -> None:
    text = f"It is {number:,}.".replace(",", separator).replace("-", minus)
    last = last_number(text)
    assert last is not None
    assert last.value == number == only_number(text)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_read_as_python_writes_it(number: float) -> None:
    last = last_number(f"{number!r}")
    assert last is not None
    assert last.value is None or float(last.value) == number == float(only_number(number))
    assert last.value is not None or abs(math.log10(abs(number))) > 280


@given(st.text("0123456789.,-+/ eE{}\\$%\u2212\u2009boxedfrac", max_size=60))
def test_no_text_is_an_error(text: str) -> None:
    last = last_number(text)
    if last is not None and last.value is not None:
        written(last.value)


@pytest.mark.parametrize(
    "text",
    [
        *("1" * 100_000, "1/" * 50_000),
        *(pytest.param(text, marks=pytest.mark.slow) for text in ("1," * 50_000, r"\boxed{" * 20_000, "-" * 100_000)),
    ],
)
def test_long_responses_cost_no_time(text: str) -> None:
    began = time.process_time()  # other work on the machine does not count
    last_number(text)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"so \boxed{\frac{36}{2}}", "18", 1),
        (r"$x = \sqrt{12}$", r"2\sqrt{3}", 1),
        (r"\boxed{(1, 2]}", "(1,2]", 1),
        ("it is 17", "#### 18", 0),
        ("no idea", 18, 0),
    ],
)
def test_math_verify_compares_mathematics(response: str, answer: Any, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert ready("math-verify")("", response, {"answer": answer})[0] == expected


def test_a_row_without_mathematics_is_refused() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="math-verify cannot read the answer ''"):
        READY["math-verify"].check({"answer": ""})


def test_math_verify_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"math-verify is not installed .*; pip install math-verify"):
        READY["math-verify"].check({"answer": "18"})
