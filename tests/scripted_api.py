"""A small HTTP server on loopback that answers as it is told and remembers what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

KEY = "canary-key-6f1d9c"


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any
    line: str
    client_port: int


@dataclass(frozen=True)
class Answer:
    """`fault`: "drop" closes without a word, "half" breaks off in the body, "late" answers after `after_s`."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    fault: str = ""
    after_s: float = 0.0


class ScriptedApi:
    """Answers per "METHOD /path", consumed one by one; the last one stays."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self._answers: dict[str, list[Answer]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def on(self, call: str, *answers: Answer) -> None:
        self._answers[call] = list(answers)

    def calls(self, call: str) -> list[Asked]:
        return [asked for asked in self.asked if f"{asked.method} {asked.path}" == call]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _next(self, asked: Asked) -> Answer:
        answers = self._answers.get(f"{asked.method} {asked.path}")
        if not answers:
            return Answer(404, {"error": "not scripted", "detail": f"{asked.method} {asked.path}"})
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                parts = urlsplit(self.path)
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                asked = Asked(
                    self.command,
                    parts.path,
                    dict(parse_qsl(parts.query)),
                    {name.lower(): value for name, value in self.headers.items()},
                    json.loads(raw) if raw else None,
                    self.path,
                    self.client_address[1],
                )
                api.asked.append(asked)
                self.give(api._next(asked))

            def give(self, answer: Answer) -> None:
                time.sleep(answer.after_s)
                if answer.fault == "drop":
                    self.close_connection = True
                    return
                text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
                data = b"" if answer.body is None else text.encode()
                self.send_response(answer.status)
                sent = {"Content-Type": "application/json", **answer.headers}
                for name, value in sent.items():
                    self.send_header(name, value)
                missing = 50 if answer.fault == "half" else 0
                self.send_header("Content-Length", str(len(data) + missing))
                self.end_headers()
                if answer.fault == "drip":
                    for byte in data:
                        self.wfile.write(bytes([byte]))
                        time.sleep(0.05)
                    return
                with suppress(OSError):  # whoever asked may have stopped waiting
                    self.wfile.write(data)
                if answer.fault == "half":
                    self.close_connection = True

            do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

            def log_message(self, *_args: object) -> None:
                return None

        return Handler


@contextmanager
def scripted_api() -> Iterator[ScriptedApi]:
    api = ScriptedApi()
    try:
        yield api
    finally:
        api.stop()
