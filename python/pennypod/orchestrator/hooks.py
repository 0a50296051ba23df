"""The routes that machines call: webhooks in, callbacks back. Floor 3: HTTP in, the service's answers out.

In the order of what it costs: headers first, then at most `max_body_bytes` of body, then the signature, and only then
anything that touches the disk. A bad signature is counted apart and takes nothing from any caller's limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from pennypod.orchestrator.limits import Buckets, Rate
from pennypod.orchestrator.metrics import Metrics
from pennypod.orchestrator.payload import TrainStart, parse_callback, parse_wish
from pennypod.orchestrator.problems import ProblemError
from pennypod.orchestrator.service import Service
from pennypod.orchestrator.signing import NATIVE, check_stamp, verify_github, verify_gitlab, verify_native
from pennypod.orchestrator.sources import wish_of
from pennypod.orchestrator.store import Taken

_LOG = logging.getLogger("pennypod.orchestrator")
_MAX_CALLBACK_BYTES = 4096
_LET_PASS_BYTES = 512 * 1024
# A trainer that calls back once a second for hours is fine, one that floods is not.
_CALLBACKS = Rate(burst=60, per_second=2)
_COMPLAINTS = Rate(burst=10, per_second=0.2)


class Hooks:
    """Webhooks and callbacks of one service."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics
        self._config = service.config
        self._callbacks = Buckets(_CALLBACKS)
        self._complaints = Buckets(_COMPLAINTS)

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/hooks/train", self.train, methods=["POST"])
        router.add_api_route("/hooks/sources/{name}", self.from_source, methods=["POST"])
        router.add_api_route("/hooks/callback/{run}", self.callback, methods=["POST"])
        return router

    async def train(self, request: Request) -> Response:
        """Our own scheme: start or cancel a run."""

        async def answer() -> tuple[str, Response]:
            check_stamp(request.headers, self._now())
            body = await self._body(request)
            delivery = verify_native(request.headers, body, self._config.secrets, self._now())
            return self._answered(request, await self._service.take(delivery, parse_wish(body)))

        return await self._counted(NATIVE, answer)

    async def from_source(self, name: str, request: Request) -> Response:
        """A webhook of GitHub or GitLab, by the name that it was set up under."""
        source = self._config.file.sources.get(name)
        if source is None:
            raise ProblemError("unknown_source", "there is no such webhook source")

        async def answer() -> tuple[str, Response]:
            body = await self._body(request)
            verify = verify_github if source.kind == "github" else verify_gitlab
            delivery = verify(name, request.headers, body, self._config.source_secrets[name])
            wish = wish_of(source, request.headers, body)
            if not isinstance(wish, TrainStart):
                return "ignored", JSONResponse({"ignored": wish})
            return self._answered(request, await self._service.take(delivery, wish))

        return await self._counted(name, answer)

    async def callback(self, run: str, request: Request) -> Response:
        """What the training side says of its own run; its token opens nothing else."""
        token = bearer(request)
        if token is None:
            raise ProblemError("token_invalid", "send the run's token as Authorization: Bearer TOKEN")
        body = await read_body(request, _MAX_CALLBACK_BYTES, self._config.body_timeout_s)
        await self._service.check_callback_token(run, token)
        wait_s = self._callbacks.take(run, self._now())
        if wait_s:
            raise ProblemError("rate_limited", "too many callbacks of this run", retry_after_s=wait_s)
        await self._service.take_callback(run, parse_callback(body))
        return Response(status_code=204)

    async def _counted(self, source: str, answer: Callable[[], Awaitable[tuple[str, Response]]]) -> Response:
        with self._metrics.seconds.time():
            try:
                result, response = await answer()
            except ProblemError as problem:
                self._metrics.webhooks.labels(source, problem.code).inc()
                if problem.status == 401 and not self._complaints.take(source, self._now()):
                    _LOG.warning("a webhook of source %s was refused: %s", source, problem.code)
                raise
        self._metrics.webhooks.labels(source, result).inc()
        return response

    def _answered(self, request: Request, taken: Taken) -> tuple[str, Response]:
        status_url = f"{base_url(self._service, request)}/runs/{taken.run}"
        headers = {"Location": status_url}
        if not taken.first:
            headers["Idempotent-Replayed"] = "true"
        content = {"run": taken.run, "status_url": status_url, "state": "accepted"}
        return "accepted" if taken.first else "repeated", JSONResponse(content, 202, headers)

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._config.max_body_bytes, self._config.body_timeout_s)

    def _now(self) -> float:
        return self._service.clock.now()


async def read_body(request: Request, most_bytes: int, limit_s: float) -> bytes:
    """The body, never more than `most_bytes` of it in memory. Raises ProblemError: too_large, body_timeout."""
    declared = request.headers.get("content-length", "")
    length = int(declared) if declared.isascii() and declared.isdigit() else 0
    if length > most_bytes:
        if length <= _LET_PASS_BYTES:
            await _let_pass(request, limit_s)
        raise ProblemError("too_large", f"at most {most_bytes} bytes are read")
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            async for chunk in request.stream():
                if len(body) + len(chunk) > most_bytes:
                    raise ProblemError("too_large", f"at most {most_bytes} bytes are read")
                body += chunk
    except TimeoutError as exc:
        raise ProblemError("body_timeout", f"the body did not arrive within {limit_s:.0f} s") from exc
    return bytes(body)


async def _let_pass(request: Request, limit_s: float) -> None:
    """Throw a body away as it comes: a client that is still sending when we hang up loses our answer."""
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(limit_s):
            async for _ in request.stream():
                pass


def bearer(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def base_url(service: Service, request: Request) -> str:
    """Where this server is reached from outside: as configured, else as it was addressed."""
    configured = service.config.file.public_url
    return configured.rstrip("/") if configured else f"{request.url.scheme}://{request.url.netloc}"
