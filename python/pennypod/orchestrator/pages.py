"""The routes that people look at: status page, status URL, buttons. Floor 3: HTTP in, rendered views out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse
from jinja2 import Environment, FileSystemLoader, select_autoescape

from pennypod.orchestrator.hooks import bearer, read_body
from pennypod.orchestrator.limits import Buckets, Rate
from pennypod.orchestrator.metrics import Metrics
from pennypod.orchestrator.problems import ProblemError
from pennypod.orchestrator.service import Service
from pennypod.orchestrator.sessions import COOKIE, SESSION_S, Sessions
from pennypod.orchestrator.views import page, receipt_text, status_document, status_text

_WEB = Path(__file__).parent / "web"
_TYPES = {"style.css": "text/css; charset=utf-8", "live.js": "text/javascript; charset=utf-8"}
_MAX_FORM_BYTES = 4096
_LOGINS = Rate(burst=10, per_second=0.2)
SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; form-action 'self';"
        " base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class Pages:
    """The status page of one service, and what monitoring asks."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics
        self._config = service.config
        self._base = (service.config.file.public_url or "").rstrip("/")
        self._sessions = Sessions(service.config.admin_token)
        self._logins = Buckets(_LOGINS)
        self._templates = Environment(loader=FileSystemLoader(_WEB), autoescape=select_autoescape(default=True))

    def router(self) -> APIRouter:
        router = APIRouter()
        for path, answer in (
            ("/", self.status_page),
            ("/fragment", self.fragment),
            ("/web/{name}", self.web_file),
            ("/runs/{run}", self.run_status),
            ("/runs/{run}/receipt.json", self.receipt),
            ("/healthz", self.healthz),
            ("/readyz", self.readyz),
            ("/metrics", self.prometheus),
        ):
            router.add_api_route(path, answer, methods=["GET"])
        for path, answer in (
            ("/login", self.login),
            ("/logout", self.logout),
            ("/runs/{run}/cancel", self.cancel),
            ("/runs/{run}/destroy", self.destroy),
        ):
            router.add_api_route(path, answer, methods=["POST"])
        return router

    # --- reading ----------------------------------------------------------------------------------------------------

    async def status_page(self, request: Request) -> Response:
        if self._sessions.can_log_in and not self._may_read(request):
            return self._html(request, "login.html.j2", {}, 401)
        return await self._live(request, "page.html.j2")

    async def fragment(self, request: Request) -> Response:
        """The part of the page that changes."""
        return await self._live(request, "fragment.html.j2")

    async def web_file(self, name: str) -> Response:
        if name not in _TYPES:
            raise ProblemError("not_found", "there is no such file")
        headers = {"X-Content-Type-Options": "nosniff"}
        return Response((_WEB / name).read_bytes(), media_type=_TYPES[name], headers=headers)

    async def run_status(self, run: str, request: Request) -> Response:
        self._check_may_read(request)
        document = await asyncio.to_thread(status_document, self._service, run)
        headers = {"Cache-Control": "no-store", "Vary": "Accept"}
        if request.headers.get("accept", "").startswith("text/plain"):
            return PlainTextResponse(status_text(document), headers=headers)
        return JSONResponse(document, headers=headers)

    async def receipt(self, run: str, request: Request) -> Response:
        """The proof that the run's pods are gone, to keep or to check with `pennypod verify`."""
        self._check_may_read(request)
        text = await asyncio.to_thread(receipt_text, self._service, run)
        return Response(text, media_type="application/json", headers=SECURITY_HEADERS)

    async def healthz(self) -> Response:
        """The process answers."""
        return PlainTextResponse("ok\n")

    async def readyz(self) -> Response:
        """Runs are being let in and watched."""
        if not self._service.is_ready():
            raise ProblemError("not_ready", "the orchestrator is not letting runs in just now")
        return PlainTextResponse("ready\n")

    async def prometheus(self, request: Request) -> Response:
        self._check_may_read(request)
        text = await asyncio.to_thread(self._metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    # --- pressing buttons ---------------------------------------------------------------------------------------------

    async def login(self, request: Request) -> Response:
        form = await self._form(request)
        caller = request.client.host if request.client else ""
        wait_s = self._logins.take(caller, self._now())
        if wait_s:
            raise ProblemError("rate_limited", "too many logins: wait a little", retry_after_s=wait_s)
        if not self._sessions.token_fits(form.get("token", "")):
            raise ProblemError("token_invalid", "this is not the admin token")
        answer = self._home()
        value, secure = self._sessions.new(self._now()), self._base.startswith("https:")
        answer.set_cookie(COOKIE, value, max_age=SESSION_S, httponly=True, samesite="strict", secure=secure)
        return answer

    async def logout(self, request: Request) -> Response:
        await self._check_form(request)
        answer = self._home()
        answer.delete_cookie(COOKIE)
        return answer

    async def cancel(self, run: str, request: Request) -> Response:
        await self._check_form(request)
        await self._service.cancel(run, "cancelled on the status page")
        return self._home()

    async def destroy(self, run: str, request: Request) -> Response:
        await self._check_form(request)
        await self._service.destroy(run, "destroyed on the status page")
        return self._home()

    # --- shared -------------------------------------------------------------------------------------------------------

    async def _live(self, request: Request, template: str) -> Response:
        self._check_may_read(request)
        return self._html(request, template, await asyncio.to_thread(page, self._service))

    def _html(self, request: Request, template: str, view: Mapping[str, Any], status: int = 200) -> Response:
        session = self._session(request)
        text = self._templates.get_template(template).render(
            base=self._base,
            can_log_in=self._sessions.can_log_in,
            logged_in=session is not None,
            form_token=self._sessions.form_token(session) if session else "",
            **view,
        )
        return HTMLResponse(text, status, SECURITY_HEADERS)

    def _session(self, request: Request) -> str | None:
        cookie = request.cookies.get(COOKIE)
        return cookie if cookie and self._sessions.is_good(cookie, self._now()) else None

    def _may_read(self, request: Request) -> bool:
        wanted = self._config.read_token
        if wanted is None or self._session(request) is not None:
            return True
        return self._sessions.same(bearer(request) or "", wanted)

    def _check_may_read(self, request: Request) -> None:
        if not self._may_read(request):
            raise ProblemError("login_required", "log in, or send the read token as Authorization: Bearer TOKEN")

    async def _form(self, request: Request) -> dict[str, str]:
        body = await read_body(request, _MAX_FORM_BYTES, self._config.body_timeout_s)
        return {name: values[0] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}

    async def _check_form(self, request: Request) -> None:
        """Only a form of our own page, in a browser that has logged in."""
        session = self._session(request)
        if session is None:
            raise ProblemError("login_required", "log in first")
        form = await self._form(request)
        crossed = request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")
        if crossed or not self._sessions.form_fits(session, form.get("form_token", "")):
            raise ProblemError("csrf", "load the page again and repeat")

    def _home(self) -> Response:
        return RedirectResponse(f"{self._base}/", 303)

    def _now(self) -> float:
        return self._service.clock.now()
