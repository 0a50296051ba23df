"""Durations and dates as people type them. Floor 3; UTC throughout, as in the ledger."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import click

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")


def parse_duration(text: str) -> int | None:
    """`90s`, `30m`, `1d12h`, or plain seconds; None for anything else."""
    match = _DURATION.fullmatch(text)
    if match is None or not any(match.groups()):
        return None
    return sum(int(count) * unit for count, unit in zip(match.groups(default="0"), _UNITS.values(), strict=True))


def duration(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    """`5m`: a length of time in seconds, more than none."""
    seconds = parse_duration(value)
    if not seconds:
        raise click.BadParameter(f"{value!r} is no length of time: write 90s, 30m, 4h or 1d12h")
    return seconds


def ahead(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    """`+2h`: seconds from now on."""
    seconds = parse_duration(value[1:]) if value.startswith("+") else None
    if seconds is None:
        raise click.BadParameter(f"{value!r} is no time ahead: write +90s, +30m, +2h or +1d12h")
    return seconds


def moment(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """A day, a day with a time, or how long ago, as Unix time."""
    return None if value is None else _parse_moment(value, end_of_day=False)


def end_moment(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """The same as the end of a range: a bare day means all of it."""
    return None if value is None else _parse_moment(value, end_of_day=True)


def _parse_moment(text: str, *, end_of_day: bool) -> float:
    ago = parse_duration(text) if text[-1:] in _UNITS else None
    if ago is not None:
        return datetime.now(UTC).timestamp() - ago
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError as exc:
        raise click.BadParameter(
            f"{text!r} is no time: write 2026-12-01, 2026-12-01T18:30 (UTC) or 7d for a week ago"
        ) from exc
    parsed = parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
    if end_of_day and re.fullmatch(r"\d{4}-?\d\d-?\d\d", text):
        parsed += timedelta(days=1)
    return parsed.timestamp()


def format_moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"
