"""What time a service says it is. Floor 1: one request without a key; the answer's Date header is all that is read."""

from __future__ import annotations

from email.utils import parsedate_to_datetime

LIMIT_S = 10.0


def told_time(url: str) -> float | None:
    """The Date header of whatever `url` answers, as Unix time; None when there is no answer or no date in it."""
    import requests  # a tenth of a second that only those who ask should pay

    try:
        with requests.get(url, timeout=LIMIT_S, allow_redirects=False, stream=True) as answer:
            return parsedate_to_datetime(answer.headers.get("Date", "")).timestamp()
    except (requests.RequestException, ValueError, OverflowError, UnicodeError):
        return None
