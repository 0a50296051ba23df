"""One HTTP API behind one key. Floor 1: the network is its one outside thing; session, clock and chance are passed in.

Two kinds of call, and the difference is money. `request` is for what may be repeated: it retries passing faults, each
named here, with growing pauses. `create` is for what rents: it is sent once, and when nobody can say whether it took
effect it raises AmbiguousError, which the caller settles by looking.

The key travels in the Authorization header only. It is in no URL, no message, no repr; texts that come back from the
other side are scrubbed of it.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.auth import AuthBase
from urllib3.exceptions import HTTPError, MaxRetryError, NewConnectionError

from pennypod import __version__
from pennypod.clock import Clock
from pennypod.errors import AmbiguousError, AuthError, InputError, InvalidError, RateLimitedError, TransientError
from pennypod.exchanges import Exchange
from pennypod.model.account import mark

USER_AGENT = f"pennypod/{__version__}"
CONNECT_S = 10.0
READ_S = 60.0
CREATE_S = 90.0
ATTEMPTS = 5
RETRY_AFTER_LIMIT_S = 30.0
"""A longer wait than this is the caller's to decide on: it gets RateLimitedError at once."""

LISTEN_QUIET_S, LISTEN_S = 2.0, 10.0
"""A stream that says nothing for so long is over for us; however much it says, it is left after so long."""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
_MAX_BYTES = 64 * 1024 * 1024
_MAX_HEARD = 256 * 1024
_TOO_MANY = 429
# The request never reached the service, or the service says itself that it is passing. 520-527, 530: Cloudflare.
_TRANSIENT = frozenset({408, 425, 500, 502, 503, 504, *range(520, 528), 530})
_KEY = re.compile(r"[\x21-\x7e]+")
# What cannot even be sent, or is no HTTP. OSError and ValueError are not named where a call may be repeated.
_REFUSED = (requests.RequestException, HTTPError, UnicodeError)
_FAULTS = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    requests.exceptions.ContentDecodingError,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. `body` is the parsed JSON, None when the answer is no JSON; header names are lower case."""

    status: int
    headers: Mapping[str, str]
    text: str
    body: Any = None

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip()

    @property
    def fields(self) -> dict[str, Any]:
        """The body when it is a JSON object, else an empty one."""
        return self.body if isinstance(self.body, dict) else {}

    def retry_after_s(self, now: float) -> float | None:
        """The wait the service asks for, from Retry-After (seconds or a date) or X-RateLimit-Reset (epoch)."""
        told = self.headers.get("retry-after", "").strip()
        if told:
            try:
                return max(0.0, float(told))
            except ValueError:
                return _until(told, now)
        reset = self.headers.get("x-ratelimit-reset", "").strip()
        if reset.replace(".", "", 1).isdigit():
            return max(0.0, float(reset) - now)
        return None


class _Bearer(AuthBase):
    """The key as a bearer token. Given as `auth`, it also keeps a ~/.netrc from taking the header over."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def __repr__(self) -> str:
        return "<bearer>"


@dataclass(slots=True)
class _Pace:
    """When an endpoint may be called next."""

    last: float | None = None
    not_before: float = 0.0


@dataclass(frozen=True, slots=True)
class Pacing:
    """Seconds between two calls of one endpoint, by the label the caller gives the endpoint."""

    spacing_s: Mapping[str, float] = field(default_factory=dict)


class Http:
    """Calls one API. One per provider and thread; keeps nothing but when each endpoint was last called."""

    def __init__(
        self,
        name: str,
        base_url: str,
        key: str,
        clock: Clock,
        *,
        session: requests.Session | None = None,
        pacing: Pacing | None = None,
        attempts: int = ATTEMPTS,
        retry_after_limit_s: float = RETRY_AFTER_LIMIT_S,
        quiet_s: float = LISTEN_QUIET_S,
        record: Callable[[Exchange], None] | None = None,
        chance: Callable[[], float] = random.random,
        address_variable: str = "",
    ) -> None:
        self._name = name
        self._address = address_variable or f"the address of {name}"
        self._base = checked_base(self._address, base_url)
        self._auth = _Bearer(_checked_key(name, key))
        self._secret = key.strip()
        self._secrets = {self._secret}
        self._clock = clock
        self._session = requests.Session() if session is None else session
        self._pacing = pacing or Pacing()
        self._attempts = max(1, attempts)
        self._limit = retry_after_limit_s
        self._quiet_s = quiet_s
        self._record = record
        self._chance = chance
        self._paces: dict[str, _Pace] = {}

    def __repr__(self) -> str:
        return f"<Http {self._name} {self._base}>"

    @property
    def url(self) -> str:
        """The API's base address."""
        return self._base

    @property
    def key_mark(self) -> str:
        """A one-way mark of the key."""
        return self.mark_of()

    def mark_of(self, *parts: str) -> str:
        """A one-way mark of anything, which nobody can find out by guessing without the key."""
        return mark(self._name, self._secret, *parts)

    def hide(self, secret: str) -> None:
        """From now on another secret is scrubbed from what comes back, too."""
        self._secrets.add(secret)

    @property
    def _host(self) -> str:
        return urlsplit(self._base).netloc

    # --- calls that may be repeated -----------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        *,
        endpoint: str = "",
        params: Mapping[str, str] | None = None,
        body: Any = None,
        final_errors: Sequence[str] = (),
        attempts: int | None = None,
    ) -> Reply:
        """A call that may be made again: reads, deletes, searches. Any answer but a passing fault is returned.

        `attempts` bounds how often; 1 where the caller has a pace of its own.

        Raises TransientError when the fault does not pass, RateLimitedError when the service wants a longer pause than
        this transport waits, or answers 429 with an `error` of `final_errors` (a used-up daily quota, say).
        """
        last = self._attempts if attempts is None else attempts
        for attempt in range(1, last + 1):
            try:
                reply = self._send(method, path, endpoint, params, body, READ_S)
            except _FAULTS as exc:
                if attempt == last:
                    raise TransientError(f"{self._what(method, path)}: {self._fault(exc)}, {attempt} times") from None
                self._clock.sleep(self._pause(attempt))
                continue
            except _REFUSED as exc:
                raise InvalidError(f"{self._what(method, path)}: cannot be asked: {self.clean(str(exc))}") from None
            if reply.status != _TOO_MANY and reply.status not in _TRANSIENT:
                return reply
            told = reply.retry_after_s(self._clock.now())
            wait = self._pause(attempt) if told is None else max(0.1, told)
            over = wait > self._limit or attempt == last
            if reply.status == _TOO_MANY:
                if over or str(reply.fields.get("error")) in final_errors:
                    raise self.rate_limited(reply, endpoint)
            elif over:
                raise TransientError(f"{self._what(method, path)}: {reply.status} {self.say(reply)}")
            self._clock.sleep(wait)
        raise AssertionError("unreachable")  # pragma: no cover

    # --- streams ------------------------------------------------------------------------------------------------------

    def listen(self, path: str, *, endpoint: str = "", params: Mapping[str, str] | None = None) -> Reply:
        """What a stream of events says until it falls silent: it stays open for ever, and what came by then counts.

        Asked once, since its text is nice to have and nobody should wait for it. Raises TransientError.
        """
        try:
            return self._send("GET", path, endpoint, params, None, self._quiet_s, stream=True)
        except (*_REFUSED, OSError) as exc:
            raise TransientError(f"{self._what('GET', path)}: {self._fault(exc)}") from None

    # --- calls that rent ----------------------------------------------------------------------------------------------

    def create(self, method: str, path: str, *, body: Any, endpoint: str = "") -> Reply:
        """A call that is sent exactly once. Returns any answer that says what happened.

        Raises TransientError only when the request cannot have arrived (no connection was ever made), AmbiguousError
        when it may have taken effect: no answer, half an answer, a server error, an answer that is no JSON.
        """
        what = self._what(method, path)
        # A new connection: one kept from before may be dead, and that would look like a lost answer.
        self._session.close()
        try:
            reply = self._send(method, path, endpoint, None, body, CREATE_S)
        except (*_REFUSED, OSError) as exc:  # whatever broke: it may already have been on its way
            if _never_connected(exc):
                raise TransientError(f"{what}: {self._fault(exc)}: nothing was asked for") from None
            raise AmbiguousError(f"{what}: {self._fault(exc)}: it may have taken effect") from None
        if reply.status in _TRANSIENT or reply.status >= 500:
            raise AmbiguousError(f"{what}: {reply.status} {self.say(reply)}: it may have taken effect")
        if reply.ok and not isinstance(reply.body, dict):
            raise AmbiguousError(f"{what}: {reply.status}, and the answer is no JSON: it may have taken effect")
        return reply

    def rate_limited(self, reply: Reply, endpoint: str) -> RateLimitedError:
        """The error for a 429; until the time it names, calls of that endpoint wait or fail at once."""
        now = self._clock.now()
        told = reply.retry_after_s(now)
        wait = max(1.0, self._pacing.spacing_s.get(endpoint, 1.0)) if told is None else told
        self._pace(endpoint).not_before = now + wait
        return RateLimitedError(f"{self._name}: too many calls, wait {wait:.0f} s: {self.say(reply)}", wait)

    # --- words --------------------------------------------------------------------------------------------------------

    def say(self, reply: Reply) -> str:
        """What an answer says for people: its error code and message, one short line, without the key."""
        fields = reply.fields
        words = [str(fields[name]) for name in ("error", "title", "msg", "message", "detail") if fields.get(name)]
        errors = fields.get("errors")
        if isinstance(errors, list):
            words += [str(error) for error in errors[:3]]
        return self.clean(": ".join(words) or reply.text) or "without a reason"

    def clean(self, text: str) -> str:
        """One short line of somebody else's text, scrubbed of our key."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        line = " ".join(text.split())
        return line if len(line) <= 300 else line[:297] + "..."

    def _what(self, method: str, path: str) -> str:
        return f"{self._name}: {method} {path}"

    def _fault(self, exc: Exception) -> str:
        if isinstance(exc, requests.ConnectTimeout):
            return f"no connection within {CONNECT_S:.0f} s"
        if isinstance(exc, requests.Timeout):
            return "no answer in time"
        if isinstance(exc, requests.exceptions.ProxyError):
            return "the proxy did not let us through"
        if isinstance(exc, requests.exceptions.SSLError):
            return self._unsafe(str(exc))
        if _never_connected(exc):
            return f"no connection to {self._host}"
        if "BadStatusLine" in str(exc) and self._base.startswith("http:"):
            return f"{self._host} answers, but not in http: should {self._address} begin with https://?"
        return f"the connection broke ({type(exc).__name__})"

    def _unsafe(self, why: str) -> str:
        """What broke a TLS connection. A service that speaks plain http sends what is no TLS record at all."""
        if "CERTIFICATE_VERIFY_FAILED" in why:
            reason = re.search(r"certificate verify failed: ([^(\n]+)", why)
            told = self.clean(reason[1]) if reason else "it is not trusted here"
            return f"no safe connection to {self._host}, its certificate is refused ({told}): look at {self._address}"
        return f"no safe connection to {self._host}: should {self._address} begin with http:// instead of https://?"

    # --- one exchange -------------------------------------------------------------------------------------------------

    def _send(
        self,
        method: str,
        path: str,
        endpoint: str,
        params: Mapping[str, str] | None,
        body: Any,
        limit_s: float,
        *,
        stream: bool = False,
    ) -> Reply:
        self._keep_pace(endpoint)
        exchange = Exchange(self._name, self._clock.now(), method, path, dict(params or {}), body)
        try:
            reply = self._exchange(method, path, params, body, limit_s, stream=stream)
        except Exception as exc:
            self._keep(replace(exchange, trouble=type(exc).__name__))
            raise
        answer = reply.text if reply.body is None else reply.body
        self._keep(replace(exchange, status=reply.status, content_type=reply.content_type, answer=answer))
        return reply

    def _keep(self, exchange: Exchange) -> None:
        if self._record is not None:
            self._record(exchange)

    def _exchange(
        self, method: str, path: str, params: Mapping[str, str] | None, body: Any, limit_s: float, *, stream: bool
    ) -> Reply:
        started = time.monotonic()
        # No redirects: a rented machine must not hang on a second, silent request, and a key stays with its host.
        response = self._session.request(
            method,
            self._base + path,
            params=dict(params) if params else None,
            data=None if body is None else json.dumps(body),
            headers={
                "User-Agent": USER_AGENT,
                "Accept": "text/event-stream" if stream else "application/json",
                **({"Accept-Encoding": "identity"} if stream else {}),
                **({} if body is None else {"Content-Type": "application/json"}),
            },
            auth=self._auth,
            timeout=(CONNECT_S, limit_s),
            allow_redirects=False,
            stream=True,
        )
        try:
            text = _overhear(response, started + LISTEN_S) if stream else _read(response, started + limit_s)
        finally:
            response.close()
        if response.is_redirect or 300 <= response.status_code < 400:
            where = urlsplit(response.headers.get("Location", ""))
            raise InvalidError(
                f"{self._what(method, path)}: sent on to {where.scheme}://{where.hostname}: correct {self._address}"
            )
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Reply(response.status_code, headers, text, _json(text))

    def _keep_pace(self, endpoint: str) -> None:
        pace = self._pace(endpoint)
        spacing = self._pacing.spacing_s.get(endpoint, 0.0)
        now = self._clock.now()
        wait = pace.not_before - now
        if wait > self._limit:
            raise RateLimitedError(f"{self._name}: asked to leave this call alone for {wait:.0f} s more", wait)
        if pace.last is not None:
            # At most the spacing: a clock that was set back must not turn a pause of seconds into hours.
            wait = max(wait, min(spacing, pace.last + spacing - now))
        if wait > 0:
            self._clock.sleep(wait)
        pace.last = self._clock.now()

    def _pace(self, endpoint: str) -> _Pace:
        return self._paces.setdefault(endpoint, _Pace())

    def _pause(self, attempt: int) -> float:
        """Twice as long each time up to a cap, and a random half of it, so that clients do not march in step."""
        full = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * float(2 ** (attempt - 1)))
        return full / 2 + full / 2 * self._chance()

    # --- another place, without the key -------------------------------------------------------------------------------

    def fetch_plain(self, url: str, limit_bytes: int = 1024 * 1024) -> str | None:
        """A text from an address the service gave us, asked for without our key; None while it is not there yet."""
        if urlsplit(url).scheme not in ("http", "https"):
            raise InvalidError(f"{self._name}: not a web address: {self.clean(url)}")
        try:
            response = self._session.get(
                url,
                headers={"User-Agent": USER_AGENT},
                auth=_no_key,
                timeout=(CONNECT_S, READ_S),
                allow_redirects=False,
                stream=True,
            )
            with response:
                if response.status_code != 200:
                    return None
                return _read(response, time.monotonic() + READ_S, limit_bytes)
        except requests.RequestException:
            return None


def checked_base(called: str, base_url: str) -> str:
    """A base address without its trailing slash. Raises InputError when it is no plain http(s) address."""
    parts = urlsplit(base_url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise InputError(f"{called} is not a plain http(s) address")
    return base_url.strip().rstrip("/")


def _checked_key(name: str, key: str) -> str:
    key = key.strip()
    if not _KEY.fullmatch(key):
        raise AuthError(f"the key of {name} is empty or holds characters that no key has: set it again")
    return key


def _no_key(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """An `auth` that adds nothing, so that no ~/.netrc does either."""
    return request


def _read(response: requests.Response, end: float, limit_bytes: int = _MAX_BYTES) -> str:
    """The whole body, within a limit of time and size: a server that drips bytes is cut off."""
    pieces, size = [], 0
    for piece in response.iter_content(64 * 1024):
        pieces.append(piece)
        size += len(piece)
        if size > limit_bytes:
            raise requests.exceptions.ContentDecodingError("the answer is too large")
        if time.monotonic() > end:
            raise requests.Timeout("the answer took too long")
    return b"".join(pieces).decode("utf-8", "replace")


def _overhear(response: requests.Response, end: float) -> str:
    """What a stream has said when it breaks off or falls silent, byte by byte so that nothing read is lost."""
    heard = bytearray()
    with suppress(requests.RequestException, HTTPError, OSError):
        for piece in response.iter_content(1):
            heard += piece
            if len(heard) >= _MAX_HEARD or time.monotonic() > end:
                break
    return heard.decode("utf-8", "replace")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _never_connected(exc: Exception) -> bool:
    """Whether no connection was ever made, so that not one byte of the request can have arrived."""
    if isinstance(exc, requests.ConnectTimeout):
        return True
    if isinstance(exc, (requests.exceptions.InvalidURL, requests.exceptions.InvalidHeader)):
        return True
    cause = exc.args[0] if exc.args else None
    if isinstance(exc, requests.exceptions.ProxyError):
        return False
    return isinstance(cause, MaxRetryError) and isinstance(cause.reason, NewConnectionError)


def _until(date: str, now: float) -> float | None:
    try:
        parsed = parsedate_to_datetime(date)
    except (TypeError, ValueError):
        return None
    if parsed.tzinfo is None:
        parsed = parsed.replace(tzinfo=UTC)
    return max(0.0, (parsed - datetime.fromtimestamp(now, UTC)).total_seconds())
