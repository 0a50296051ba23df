"""What a pod tells an orchestrator of its training: in order, to one address only, and never at the training's cost."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pennypod
import pytest
from pennypod.callbacks import CallbackAccess, give_access, plan_access, read_access, take_access, token_digest
from workspace import wait_until

ONPOD = Path(pennypod.__file__).parent / "onpod"
RUN = "demo-1201-aaaaa"
TOKEN = "token-of-this-run-only"


class Listener:
    """An orchestrator's end: keeps what it is told and answers as it is told to."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.tokens: list[str] = []
        self.answers: list[int] = []
        self.location = ""
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                listener.tokens.append(self.headers.get("Authorization", ""))
                code = listener.answers.pop(0) if listener.answers else 204
                if code == 204:
                    listener.heard.append(json.loads(body))
                self.send_response(code)
                if code == 307:
                    self.send_header("Location", listener.location)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/hooks/callback/{RUN}"

    @property
    def events(self) -> list[str]:
        return [line["event"] for line in self.heard]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


def tell(url: str, *events: dict[str, Any]) -> int:
    """The sender with these lines as its input; its exit code."""
    lines = [{"url": url, "token": TOKEN}, *events]
    sent = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run([sys.executable, ONPOD / "call_back.py"], input=sent, text=True, timeout=60, check=False)
    return done.returncode


def supervise(home: Path, command: str, **spec: Any) -> subprocess.CompletedProcess[bytes]:
    home.mkdir()
    (home / "launch.json").write_text(json.dumps({"run": RUN, "command": command, **spec}))
    return subprocess.run(
        [sys.executable, ONPOD / "supervise.py", home],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )


# --- the sender ------------------------------------------------------------------------------------------------------


def test_events_arrive_in_order_with_the_token_in_a_header(listener: Listener) -> None:
    told = [{"event": "started", "data": {}}, {"event": "success", "data": {"exit_code": 0}}]
    assert tell(listener.url, *told) == 0
    assert listener.heard == told
    assert set(listener.tokens) == {f"Bearer {TOKEN}"}


def test_a_fault_of_the_other_side_is_tried_again_and_a_refusal_is_not(listener: Listener) -> None:
    listener.answers = [503, 204, 401, 204]
    assert tell(listener.url, *({"event": name, "data": {}} for name in ("started", "checkpoint", "success"))) == 0
    assert listener.events == ["started", "success"]


def test_of_what_waits_only_the_newest_epoch_is_sent(listener: Listener) -> None:
    listener.answers = [503]  # all of them are there when it tries again
    epochs = [{"event": "epoch", "data": {"epoch": number}} for number in range(1, 6)]
    assert tell(listener.url, {"event": "started", "data": {}}, *epochs) == 0
    assert listener.heard[1:] == epochs[-1:]


def test_the_token_follows_no_redirect(listener: Listener) -> None:
    other = Listener()
    try:
        listener.answers, listener.location = [307], other.url
        assert tell(listener.url, {"event": "success", "data": {}}) == 0
        assert (other.heard, other.tokens) == ([], [])
    finally:
        other.close()


# --- the supervisor --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "last"), [("echo epoch 1/2; echo epoch 2/2", "success"), ("exit 3", "failure")])
def test_a_training_tells_its_start_how_far_it_is_and_its_end(
    listener: Listener, tmp_path: Path, command: str, last: str
) -> None:
    done = supervise(tmp_path / "pod", command, callback={"url": listener.url, "token": TOKEN})
    wait_until(lambda: last in listener.events, 20, "the end is told")
    assert listener.events[0] == "started"
    assert listener.heard[-1]["data"] == {"exit_code": done.returncode}
    if last == "success":
        assert {"event": "epoch", "data": {"epoch": 2, "epochs": 2}} in listener.heard
    left = "".join(path.read_text() for path in (tmp_path / "pod").rglob("*") if path.is_file())
    assert TOKEN not in left + done.stdout.decode() + done.stderr.decode()


def test_a_checkpoint_in_the_bucket_is_told(listener: Listener, tmp_path: Path) -> None:
    command = "mkdir ../store && echo '{\"kept_epoch\": 7}' > ../store/state.json"
    supervise(tmp_path / "pod", command, callback={"url": listener.url, "token": TOKEN})
    wait_until(lambda: "success" in listener.events, 20, "the end is told")
    assert {"event": "checkpoint", "data": {"epoch": 7}} in listener.heard


def test_nobody_who_answers_costs_the_training_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection, never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/hooks/callback/{RUN}"
        began = time.monotonic()
        assert supervise(tmp_path / "pod", "true", callback={"url": url, "token": TOKEN}).returncode == 0
        assert time.monotonic() - began < 5, "less than one answer's limit"
    status = json.loads((tmp_path / "pod" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("finished", 0)


def test_the_trainer_is_not_told_the_token(listener: Listener, tmp_path: Path) -> None:
    supervise(tmp_path / "pod", "env; cat /proc/self/environ", callback={"url": listener.url, "token": TOKEN})
    assert TOKEN not in (tmp_path / "pod" / "train.log").read_text()


# --- the run's own file ----------------------------------------------------------------------------------------------


def test_a_run_keeps_its_token_until_it_is_over(tmp_path: Path) -> None:
    given = plan_access(tmp_path, "https://pennypod.example/hooks/callback/x")
    assert list(tmp_path.iterdir()) == []
    give_access(tmp_path, given)
    again = plan_access(tmp_path, "https://moved.example/hooks/callback/x")
    assert again == CallbackAccess("https://moved.example/hooks/callback/x", given.token)
    give_access(tmp_path, again)
    assert read_access(tmp_path) == again
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert given.token not in repr(given)
    assert given.digest == token_digest(given.token) != given.token
    take_access(tmp_path)
    assert read_access(tmp_path) is None
    assert plan_access(tmp_path, "").token != given.token
