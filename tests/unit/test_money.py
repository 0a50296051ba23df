"""Micro-dollars: sums never drift, and a meter never rounds in our favour."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pennypod.model.money import cost_micros, format_usd, micros_to_usd, usd_to_micros

amounts = st.integers(-(10**12), 10**12)
prices = st.integers(0, 10**9)
seconds = st.floats(0, 10**8, allow_nan=False)


@given(amounts)
def test_dollars_and_back_is_exact(micros: int) -> None:
    assert usd_to_micros(micros_to_usd(micros)) == micros


@given(st.lists(st.integers(0, 10**7), max_size=200))
def test_a_sum_of_dollar_amounts_is_the_sum_of_its_parts(parts: list[int]) -> None:
    total = sum(usd_to_micros(Decimal(part) / 1_000_000) for part in parts)
    assert total == sum(parts)


@given(prices, seconds)
def test_a_cost_is_the_exact_one_rounded_up_by_less_than_a_micro_dollar(price: int, spent: float) -> None:
    exact = Fraction(price) * Fraction(repr(spent)) / 3600
    cost = cost_micros(price, spent)
    assert exact <= cost < exact + 1


@given(prices, seconds, seconds)
def test_two_bills_are_never_less_than_one_for_the_same_time(price: int, first: float, second: float) -> None:
    together = cost_micros(price, first + second)
    apart = cost_micros(price, first) + cost_micros(price, second)
    assert apart >= together - 1  # first + second is itself rounded, in binary
    assert apart <= together + 2


@given(prices, st.floats(max_value=0, allow_nan=False))
def test_time_that_has_not_passed_costs_nothing(price: int, spent: float) -> None:
    assert cost_micros(price, spent) == 0


@pytest.mark.parametrize(
    ("usd", "micros"),
    [
        (0.1, 100_000),  # not 99999.99...: the text of the number counts
        ("0.0000005", 1),  # half a micro-dollar goes up
        ("0.0000004999", 0),
        (1, 1_000_000),
        (Decimal("0.123456"), 123_456),
        ("1e-6", 1),
        (-0.25, -250_000),
    ],
)
def test_dollars_become_micro_dollars_by_their_decimal_text(usd: float | str | Decimal, micros: int) -> None:
    assert usd_to_micros(usd) == micros


@pytest.mark.parametrize("usd", ["", "free", "1,5", "nan", "inf", float("nan"), float("inf"), "-Infinity"])
def test_what_is_no_amount_is_refused(usd: float | str) -> None:
    with pytest.raises(ValueError, match="not an amount of dollars"):
        usd_to_micros(usd)


def test_an_hour_costs_the_hourly_price_and_a_second_at_least_something() -> None:
    assert cost_micros(250_000, 3600) == 250_000
    assert cost_micros(1, 0.001) == 1


def test_dollars_are_shown_with_four_digits_unless_asked_otherwise() -> None:
    assert format_usd(12_345) == "$0.0123"
    assert format_usd(1_500_000, digits=2) == "$1.50"
