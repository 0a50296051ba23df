"""A `pennypod serve` for tests: start it, sign webhooks for it, kill it, start it again on the same state."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import hmac
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
import requests
from pennypod.callbacks import read_access
from pennypod.ledger import open_ledger
from pennypod.model.ids import parse_lease
from pennypod.settings import Settings, load_settings
from workspace import BIN, Workspace, wait_until

TESTS = Path(__file__).resolve().parent
SECRET = "first-secret-of-these-tests"
OLD_SECRET = "second-secret-being-rotated-out"
ADMIN = "admin-token-of-these-tests"
_RUNNING_ON = re.compile(r"http://127\.0\.0\.1:(\d+)")


def signature(body: bytes, timestamp: str, secret: str = SECRET) -> str:
    """Written anew here, from the contract alone: what the server has in common with it is the contract."""
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


class Serving:
    """One server process at a time over one state folder."""

    def __init__(self, command: list[str], cwd: Path, environment: Mapping[str, str], log: Path) -> None:
        self._command = command
        self._cwd = cwd
        self._environment = dict(environment)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.http = requests.Session()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_file(self) -> Path:
        return self._log

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, **environment: str) -> None:
        """Start it and wait until it lets runs in."""
        self._spawn(environment)
        wait_until(self._is_ready, 60, f"the server is ready:\n{self.log()}")

    def _spawn(self, environment: Mapping[str, str]) -> None:
        before = len(self.log())
        with self._log.open("ab") as file:
            self._process = subprocess.Popen(
                [part.replace("PORT", str(self.port)) for part in self._command],
                cwd=self._cwd,
                env=self._environment | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        if self.port == 0:
            wait_until(lambda: self.has_ended() or _RUNNING_ON.search(self.log()[before:]), 60, "a port")
            found = _RUNNING_ON.search(self.log()[before:])
            assert found, self.log()
            self.port = int(found[1])

    def _is_ready(self) -> bool:
        assert not self.has_ended(), self.log()
        try:
            return self.http.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except requests.ConnectionError:
            return False

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL, as the kernel does when memory is short."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)

    def close(self) -> None:
        """At the end of a test: the server, and the playbooks and guards of what it has left unfinished."""
        self.kill()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("PENNYPOD_HOME") == self._environment["PENNYPOD_HOME"]:
                    process.kill()

    def terminate(self) -> int:
        """SIGTERM, as systemd does; the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(20)

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    # --- talking to it --------------------------------------------------------------------------------------------

    def post(
        self,
        payload: Any,
        *,
        secret: str = SECRET,
        timestamp: str | None = None,
        key: str | None = None,
        path: str = "/hooks/train",
        **headers: str,
    ) -> requests.Response:
        """A signed webhook. `payload` is sent as it is when it is bytes."""
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        stamp = str(int(time.time())) if timestamp is None else timestamp
        signed = {"X-Pennypod-Timestamp": stamp, "X-Pennypod-Signature": signature(body, stamp, secret)}
        if key is not None:
            signed["Idempotency-Key"] = key
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.post(f"{self.url}{path}", data=body, headers={**signed, **given}, timeout=30)

    def start_run(self, job: str = "tiny", **more: Any) -> str:
        """Ask for a run; its id."""
        note = f"{time.time_ns()}"  # two within one second would be signed alike
        answer = self.post({"action": "train_start", "job": job, "note": note, **more})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["run"])

    def status(self, run: str) -> dict[str, Any]:
        answer = self.http.get(f"{self.url}/runs/{run}", timeout=30)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def wait_for(self, run: str, *, stage: str | None = None, limit_s: float = 60) -> dict[str, Any]:
        """Until the run has come to that stage, or to its end."""

        def there() -> bool:
            status = self.status(run)
            return status["state"] == "ended" or (stage is not None and status["stage"] == stage)

        wait_until(there, limit_s, f"{run} is at {stage or 'its end'}; it is at {self.status(run)['stage']}")
        return self.status(run)

    def metrics(self) -> str:
        return self.http.get(f"{self.url}/metrics", timeout=30).text

    def shown(self, run: str, *, admin: str = ADMIN, read: str = "") -> dict[str, str]:
        """Whatever it shows to somebody who may see all, and to everybody, by path."""
        pages = ("/", "/fragment", "/metrics", "/healthz", "/readyz", f"/runs/{run}", f"/runs/{run}/receipt.json")
        everybody, reader, owner = requests.Session(), requests.Session(), requests.Session()
        reader.headers["Authorization"] = f"Bearer {read}"
        # Not followed: it may lead to the public address, which another host answers.
        owner.post(f"{self.url}/login", data={"token": admin}, timeout=30, allow_redirects=False)
        found = {f"{path} as text": _shown(reader, f"{self.url}{path}", Accept="text/plain") for path in pages}
        for who, session in (("everybody", everybody), ("reader", reader), ("owner", owner)):
            found |= {f"{path} to {who}": _shown(session, f"{self.url}{path}") for path in pages}
        assert "Log out" in found["/ to owner"]
        return found


def _shown(session: requests.Session, url: str, **headers: str) -> str:
    answer = session.get(url, headers=headers, timeout=30)
    return "\n".join([*(f"{name}: {value}" for name, value in answer.headers.items()), answer.text])


class Served(Serving):
    """`pennypod serve` with the project's own playbooks over a workspace; `environment` is what differs from that."""

    def __init__(self, workspace: Workspace, config: str = "poll_s: 2\nprovider: local", **environment: str) -> None:
        file = workspace.root / "serve.yml"
        file.write_text(f"{config}\nartifacts_dir: {workspace.artifacts}\n")
        own = {"PENNYPOD_WEBHOOK_SECRET": SECRET, "PENNYPOD_SERVE_CONFIG": str(file)}
        command = [str(BIN / "pennypod"), "serve", "--port", "PORT"]
        super().__init__(
            command, workspace.root, workspace.environment | own | environment, workspace.root / "serve.log"
        )


class Rehearsal(Serving):
    """The orchestrator of tests/rehearsal.py, on a folder of its own, and on SQLite unless told otherwise."""

    def __init__(self, root: Path, config: str = "", database_url: str | None = None) -> None:
        self.root = root
        self.folder = root / "rehearsal"
        self.folder.mkdir()
        (root / "group_vars").mkdir()
        for name in ("train.yml", "ansible.cfg"):
            (root / name).touch()
        self.write_job("tiny", "webhook_overrides: [smoke, max_cost_usd, training_args, run_id]")
        self.write_job("closed", "")
        (root / "serve.yml").write_text(config)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PENNYPOD")}
        environment |= {
            "PENNYPOD_HOME": str(root / "home"),
            "PENNYPOD_WEBHOOK_SECRET": f"{SECRET},{OLD_SECRET}",
            "PENNYPOD_ADMIN_TOKEN": ADMIN,
            "PENNYPOD_SERVE_CONFIG": str(root / "serve.yml"),
            "PYTHONPATH": str(TESTS),
        }
        if database_url is not None:
            environment["PENNYPOD_DATABASE_URL"] = database_url
        command = [sys.executable, str(TESTS / "rehearsal.py"), str(self.folder), str(root), "PORT"]
        super().__init__(command, root, environment, root / "serve.log")

    def beside(self, **environment: str) -> Self:
        """A second server that shares home, pods and database with this one."""
        second = copy.copy(self)
        second.port, second._process, second.http = 0, None, requests.Session()
        second._log = self.root / "serve-beside.log"
        second._environment = self._environment | environment
        return second

    @property
    def settings(self) -> Settings:
        return load_settings(self._environment)

    def die_at(self, moment: str) -> None:
        """Whichever server comes first to that moment of tests/rehearsal.py dies there, once."""
        (self.folder / "die_at").write_text(moment)

    def write_job(self, name: str, more: str) -> None:
        (self.root / "group_vars" / f"job_{name}.yml").write_text(f"training_command: sh train.sh\n{more}\n")

    def pods(self) -> list[str]:
        """Every pod that lives."""
        return sorted(path.name for path in (self.folder / "pods").glob("*"))

    def created(self) -> list[str]:
        """The name of every pod that was ever made."""
        log = self.folder / "created.log"
        return log.read_text().splitlines() if log.exists() else []

    def journal(self, what: str) -> list[dict[str, Any]]:
        """The playbooks that were played, by kind."""
        file = self.folder / "journal.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line for line in lines if line["what"] == what]

    def call_back(self, run: str, event: str, token: str | None = None, **data: Any) -> requests.Response:
        body = json.dumps({"event": event, "data": data})
        headers = {"Authorization": f"Bearer {token or self.token(run)}"}
        return self.http.post(f"{self.url}/hooks/callback/{run}", data=body, headers=headers, timeout=30)

    def token(self, run: str) -> str:
        """The run's callback token, from its folder, once it may call back: nobody outside the pod is told."""
        folder = self.settings.home / "runs" / run
        wait_until(lambda: read_access(folder), 30, f"{run} may call back")
        access = read_access(folder)
        assert access is not None
        return access.token


def check_ended_once(rehearsal: Rehearsal, run: str, outcome: str = "succeeded") -> None:
    """Ended as it should, it and nothing else here, never two pods for it, none alive, one row in the ledger, every pod
    with its receipt."""
    check_all_ended_once(rehearsal, [run], outcome)


def check_all_ended_once(rehearsal: Rehearsal, runs: Sequence[str], outcome: str = "succeeded") -> None:
    """The same of all the runs there have ever been."""
    for run in runs:
        status = rehearsal.wait_for(run)
        assert (status["state"], status["outcome"]) == ("ended", outcome), status
        assert [entry["name"] for entry in status["timeline"]].count("report") == 1
    assert rehearsal.pods() == []
    assert sorted(lease.run for name in rehearsal.created() if (lease := parse_lease(name))) == sorted(runs)
    ledger = open_ledger(rehearsal.settings)
    try:
        records = ledger.runs()
        assert sorted(record.run for record in records) == sorted(runs)
        for record in records:
            attempts = ledger.attempts(record.run)
            assert record.outcome == outcome
            assert record.closed is not None
            assert all(attempt.final for attempt in attempts)
            assert all(attempt.receipt for attempt in attempts if attempt.pod_id)
    finally:
        ledger.close()
