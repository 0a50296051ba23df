"""The web application: routes, problems as answers, the service's life. Floor 3."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pennypod import __version__
from pennypod.errors import PennypodError
from pennypod.orchestrator.hooks import Hooks
from pennypod.orchestrator.metrics import Metrics
from pennypod.orchestrator.pages import Pages
from pennypod.orchestrator.problems import MEDIA_TYPE, ProblemError
from pennypod.orchestrator.service import Service

_LOG = logging.getLogger("pennypod.orchestrator")


def create_app(service: Service, address: str, on_stop: Callable[[], None]) -> FastAPI:
    """The application of one service. `on_stop` is called when the server has answered its last request."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        _LOG.info("serving on %s", address)
        yield
        _LOG.info("stopped; runs that are not over go on at the next start")
        on_stop()

    app = FastAPI(
        title="pennypod", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    metrics = Metrics(service)
    app.include_router(Hooks(service, metrics).router())
    app.include_router(Pages(service, metrics).router())

    @app.exception_handler(ProblemError)
    async def on_problem(_request: Request, problem: Exception) -> Response:
        assert isinstance(problem, ProblemError)
        return _answer(problem)

    @app.exception_handler(HTTPException)
    async def on_http_error(_request: Request, exc: Exception) -> Response:
        status = getattr(exc, "status_code", 404)
        code = {405: "method_not_allowed"}.get(status, "not_found")
        return _answer(ProblemError(code, "see docs/orchestrator.md for what there is"))

    @app.exception_handler(PennypodError)
    async def on_error(_request: Request, exc: Exception) -> Response:
        # What is wrong on our side is for our log: a caller learns that nothing was taken.
        _LOG.error("a request failed: %s", exc)
        return _answer(ProblemError("not_ready", "nothing was taken; try again later", retry_after_s=10))

    return app


def _answer(problem: ProblemError) -> Response:
    return JSONResponse(problem.body(), problem.status, problem.headers(), media_type=MEDIA_TYPE)
