"""Money as integer micro-dollars, so that sums never drift. Floor 0."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

MICROS_PER_USD = 1_000_000
SECONDS_PER_HOUR = 3600


def usd_to_micros(usd: float | int | str | Decimal) -> int:
    """Dollars to micro-dollars, rounded half up. Raises ValueError when `usd` is not a finite number."""
    try:
        amount = Decimal(str(usd))
    except ArithmeticError as exc:
        raise ValueError(f"not an amount of dollars: {usd!r}") from exc
    if not amount.is_finite():
        raise ValueError(f"not an amount of dollars: {usd!r}")
    return int((amount * MICROS_PER_USD).to_integral_value(rounding=ROUND_HALF_UP))


def cap_micros(name: str, usd: float | int | str | Decimal) -> int:
    """A cap in dollars as micro-dollars. Raises ValueError naming it for what is no number of dollars, 0 or more."""
    try:
        micros = usd_to_micros(usd)
    except ValueError:
        micros = -1
    if micros < 0 or isinstance(usd, bool):
        raise ValueError(f"{name} is {usd}: give a number of dollars, 0 or more")
    return micros


def micros_to_usd(micros: int) -> float:
    """Micro-dollars to dollars, for JSON and for people; never for arithmetic."""
    return micros / MICROS_PER_USD


def cost_micros(price_micros_per_h: int, seconds: float) -> int:
    """What `seconds` cost at an hourly price, rounded up: a meter never rounds in our favour."""
    billed = max(0.0, seconds)
    exact = Decimal(price_micros_per_h) * Decimal(repr(billed)) / SECONDS_PER_HOUR
    return int(exact.to_integral_value(rounding="ROUND_CEILING"))


def format_usd(micros: int, digits: int = 4) -> str:
    """`$0.0123`; four digits since runs cost cents."""
    return f"${micros_to_usd(micros):.{digits}f}"
