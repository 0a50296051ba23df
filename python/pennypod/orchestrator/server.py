"""`pennypod serve`: one uvicorn process on one address. Floor 3."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import MutableMapping
from pathlib import Path

import uvicorn

from pennypod.errors import InputError
from pennypod.orchestrator.app import create_app
from pennypod.orchestrator.config import load_config
from pennypod.orchestrator.service import Service
from pennypod.settings import Settings

_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {
        "uvicorn": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
        "pennypod": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
    },
}


def serve(host: str, port: int, root: Path, settings: Settings, environ: MutableMapping[str, str]) -> None:
    """Listen, set the service up from the environment, and run it; does not return."""
    listener = listen(host, port)
    run(Service(load_config(environ, root.resolve()), settings), listener)


def run(service: Service, listener: socket.socket) -> None:
    """Serve until a signal ends it; does not return.

    The process then ends at once, whatever its playbooks are doing: they go on, and the next start takes the runs up
    again. So a stop is the same as a crash, and the way back from it is the one that is always used.
    """
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        create_app(service, f"http://{f'[{host}]' if ':' in host else host}:{port}", _end),
        log_config=_LOGGING,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=5,
        limit_concurrency=1024,
        h11_max_incomplete_event_size=16_384,
    )
    uvicorn.Server(config).run([listener])
    _end(1)  # it never came up: the log says why


def _end(code: int = 0) -> None:
    """End the process without unwinding: a workflow must not be told that it was cancelled, for it was not."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def listen(host: str, port: int) -> socket.socket:
    """Raises InputError when the address is not to be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as exc:
        raise InputError(f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another with --port") from exc
    listener.set_inheritable(False)
    return listener
