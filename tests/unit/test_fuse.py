"""Ring 3, the fuse on the pod: when it fires, what it asks for, and how it gets into a start command."""

from __future__ import annotations

import ast
import base64
import importlib.util
import json
import shlex
import shutil
import ssl
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pennypod import fuse
from pennypod.errors import SshError
from pennypod.model.ids import Lease
from pennypod.model.offer import FuseTerms, Order
from pennypod.providers import runpod, vast
from pennypod.ssh import Completed
from scripted_api import Answer, ScriptedApi, scripted_api

SOURCE = Path(fuse.__file__).parent / "onpod" / "fuse.py"
KEY = "canary-pod-key-51c7"
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0oxLPVh6nQ9xVU1h0Wl9M1s3JzYkq3TnWbBz4sXq1P pennypod demo-1201-abcde"
DEADLINE = 1_764_610_000
LEASE = Lease("demo-1201-abcde", 1, DEADLINE, "abcde").name
DELETE, STOP = "DELETE /pods/p1", "PUT /pods/p1"
ENDS = [["DELETE", "/pods/@ID", {}], ["PUT", "/pods/@ID", {"state": "stopped", "of": "@ID"}]]


class OverError(BaseException):
    """The fuse never returns; a test ends it from its sleep."""


class Pod:
    """The fuse as a module, with the pod's time and files made up. Sleeping is what moves the time."""

    def __init__(self, folder: Path, api: ScriptedApi, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = importlib.util.spec_from_file_location("fuse_on_pod", SOURCE)
        assert spec is not None
        assert spec.loader is not None
        self.fuse: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.fuse)
        self.wall, self.up, self.slept = 1000.0, 50.0, 0.0
        self.limit_s = 3600.0
        self.on_sleep: Callable[[], None] = lambda: None
        self.log, self.state, self.lease = folder / "log", folder / "state", folder / "lease"
        self.log.touch()
        self.settings = {"at": 10_000, "for": 9000, "lease": 0, "url": [api.url, "API_URL"], "id": "ID", "key": "KEY"}
        self.settings["ends"] = ENDS
        self.arguments: list[str] = []
        self.env = {"ID": "p1", "KEY": KEY}
        for name, path in (("LOG", self.log), ("STATE", self.state), ("LEASE", self.lease), ("NAME", folder / "comm")):
            monkeypatch.setattr(self.fuse, name, str(path))
        monkeypatch.setattr(self.fuse, "uptime", lambda: self.up)
        monkeypatch.setattr(self.fuse.time, "time", lambda: self.wall)
        monkeypatch.setattr(self.fuse.time, "sleep", self._sleep)
        monkeypatch.setattr(self.fuse, "environment", lambda: {**self.env, "C": json.dumps(self.settings)})
        self._monkeypatch = monkeypatch

    def _sleep(self, seconds: float) -> None:
        self.wall, self.up, self.slept = self.wall + seconds, self.up + seconds, self.slept + seconds
        self.on_sleep()
        if self.slept > self.limit_s:
            raise OverError

    def run(self) -> float | None:
        """Seconds until it fired, None when it had not by the limit."""
        self._monkeypatch.setattr(self.fuse.sys, "argv", ["fuse.py", *self.arguments])
        fired: list[float] = []

        def blow(*_arguments: Any) -> None:
            fired.append(self.slept)
            raise OverError

        self._monkeypatch.setattr(self.fuse, "blow", blow)
        with pytest.raises(OverError):
            self.fuse.main()
        return fired[0] if fired else None

    def blow(self) -> None:
        """Fire, and go on until the limit."""
        with pytest.raises(OverError):
            self.fuse.blow(self.settings["url"][0], KEY, "p1", ENDS)

    def said(self) -> str:
        return self.log.read_text()


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with scripted_api() as api:
        yield api


@pytest.fixture
def pod(tmp_path: Path, api: ScriptedApi, monkeypatch: pytest.MonkeyPatch) -> Pod:
    return Pod(tmp_path, api, monkeypatch)


# --- when it fires ----------------------------------------------------------------------------------------------------


def test_it_fires_at_the_deadline_of_the_clock(pod: Pod) -> None:
    pod.settings["at"] = 1100
    assert pod.run() == pytest.approx(100, abs=1)


def test_a_clock_that_is_behind_does_not_make_it_late(pod: Pod) -> None:
    pod.settings["for"] = 200
    assert pod.run() == pytest.approx(200, abs=1)


def test_the_count_goes_on_where_the_keeper_began_it(pod: Pod) -> None:
    pod.settings["for"], pod.arguments = 200, ["-100"]
    assert pod.run() == pytest.approx(50, abs=1)  # 150 s of the 200 were over when it came back


def test_a_restarted_container_gets_no_new_time_beyond_the_deadline(pod: Pod) -> None:
    pod.settings |= {"at": 900, "for": 9000}
    assert pod.run() == 0


def test_a_lease_that_nobody_renews_runs_out(pod: Pod) -> None:
    pod.settings["lease"] = 300
    assert pod.run() == pytest.approx(300, abs=1)
    assert "nobody has renewed the lease" in pod.said()


def test_without_a_lease_only_the_deadline_counts(pod: Pod) -> None:
    assert pod.run() is None


def test_a_lease_that_is_renewed_holds_up_to_the_deadline(pod: Pod) -> None:
    pod.settings |= {"lease": 300, "for": 2000}

    def renew() -> None:
        if pod.slept % 100 < 1:
            pod.lease.write_text(f"{int(pod.up) + 300:<15}\n")

    pod.on_sleep = renew
    assert pod.run() == pytest.approx(2000, abs=1)


def test_a_renewal_never_shortens_the_lease(pod: Pod) -> None:
    pod.settings["lease"] = 300
    pod.on_sleep = lambda: None if pod.slept > 10 else pod.lease.write_text("51\n") and None
    assert pod.run() == pytest.approx(300, abs=1)


def test_a_lease_file_that_is_taken_away_is_made_again(pod: Pod) -> None:
    pod.settings["lease"] = 300

    def take_away_then_renew() -> None:
        if pod.slept == 100:
            pod.lease.unlink()
        if pod.slept == 200:
            assert pod.lease.exists()
            pod.lease.write_text("450\n")

    pod.on_sleep = take_away_then_renew
    assert pod.run() == pytest.approx(400, abs=1)


def test_where_no_renewal_can_arrive_only_the_deadline_counts(pod: Pod) -> None:
    pod.lease.mkdir()
    pod.settings["lease"] = 300
    assert pod.run() is None
    assert json.loads(pod.state.read_text())["lease_s"] == 0


def test_it_runs_without_any_place_to_write(pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOG", "STATE", "LEASE", "NAME"):
        monkeypatch.setattr(pod.fuse, name, str(tmp_path / "nowhere" / name))
    pod.settings["for"] = 100
    assert pod.run() == pytest.approx(100, abs=1)


def test_it_says_how_it_is_armed_without_the_key(pod: Pod) -> None:
    pod.limit_s, pod.settings["lease"] = 2, 300
    assert pod.run() is None
    text = pod.state.read_text()
    state = fuse.parse_state(True, text)
    assert (state.armed, state.has_key, state.renewable) == (True, True, True)
    assert "armed: 9000 s left, a lease of 300 s" in state.said[0]
    assert KEY not in text + pod.said()


def test_a_pod_without_a_key_says_so(pod: Pod) -> None:
    pod.limit_s = 2
    del pod.env["KEY"]
    pod.run()
    assert fuse.parse_state(True, pod.state.read_text()).has_key is False


# --- what it asks for -------------------------------------------------------------------------------------------------


def test_it_deletes_the_pod_with_the_pods_own_key_and_asks_until_it_is_gone(pod: Pod, api: ScriptedApi) -> None:
    api.on(DELETE, Answer(200, {"success": True}))
    pod.limit_s = 10
    pod.blow()
    assert len(api.calls(DELETE)) > 2
    assert api.calls(STOP) == []
    assert api.asked[0].headers["authorization"] == f"Bearer {KEY}"
    assert "ython" not in api.asked[0].headers["user-agent"]  # Cloudflare turns Python's own away


@pytest.mark.parametrize(
    "answer",
    [
        Answer(403, {"detail": "forbidden"}),
        Answer(404, {"success": False, "error": "auth_error", "msg": "Invalid user key"}),
        Answer(200, {"success": False, "msg": "no"}),
        Answer(200, {"errors": [{"message": "Unauthorized"}], "data": None}),
        Answer(405, "not here"),
    ],
    ids=lambda answer: str(answer.status),
)
def test_a_key_that_may_not_delete_stops_the_pod_and_says_so(pod: Pod, api: ScriptedApi, answer: Answer) -> None:
    api.on(DELETE, answer)
    api.on(STOP, Answer(200, {"success": True}))
    pod.limit_s = 0
    pod.blow()
    assert [asked.method for asked in api.asked] == ["DELETE", "PUT"]
    assert api.calls(STOP)[0].body == {"state": "stopped", "of": "p1"}
    assert "MAY GO ON BILLING" in pod.said()
    assert str(answer.status) in pod.said()


@pytest.mark.parametrize("answer", [Answer(500, "oops"), Answer(429, {"detail": "slow down"}), Answer(fault="drop")])
def test_a_passing_fault_is_no_reason_to_stop_instead(pod: Pod, api: ScriptedApi, answer: Answer) -> None:
    api.on(DELETE, answer, answer, Answer(200, {"success": True}))
    pod.limit_s = 7
    pod.blow()
    assert len(api.calls(DELETE)) >= 3
    assert api.calls(STOP) == []


def test_a_delete_that_says_yes_and_does_nothing_ends_in_a_stop(pod: Pod, api: ScriptedApi) -> None:
    api.on(DELETE, Answer(200, {"success": True}))
    api.on(STOP, Answer(200, {"success": True}))
    pod.limit_s = 300
    pod.blow()
    assert len(api.calls(DELETE)) > pod.fuse.PATIENCE
    assert api.calls(STOP)


def test_it_never_gives_up_and_never_hammers(pod: Pod) -> None:
    pod.settings["url"] = ["http://127.0.0.1:9", ""]  # nobody listens there
    pod.limit_s = 24 * 3600
    pod.blow()
    tries = pod.fuse.state["said"]
    assert len(tries) == 10  # it keeps only its last words
    assert pod.slept > 24 * 3600


def test_the_key_is_in_no_word_of_it(pod: Pod, api: ScriptedApi) -> None:
    api.on(DELETE, Answer(403, {"detail": f"key {KEY} may not"}))
    api.on(STOP, Answer(200, {}))
    pod.limit_s = 0
    pod.blow()
    assert "key *** may not" in pod.said()
    assert KEY not in pod.said() + pod.state.read_text()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_certificate_that_its_clock_or_image_refuses_does_not_stop_it(pod: Pod, tmp_path: Path) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_arguments: Any) -> None:
            pass

    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run([*made, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_arguments: None  # type: ignore[method-assign] # the refused handshake is no event
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        answer = pod.fuse.ask(f"https://127.0.0.1:{server.server_address[1]}", KEY, "DELETE", "/pods/p1", {})
    finally:
        server.shutdown()
        server.server_close()
    assert answer == (204, "")
    assert asked == ["/pods/p1"]


# --- in a start command -----------------------------------------------------------------------------------------------


def order(env: dict[str, str] | None = None, lease_s: int = 3600) -> Order:
    return Order(LEASE, "", 20, PUBLIC_KEY, DEADLINE, env or {}, FuseTerms(72_000, lease_s))


def test_what_is_packed_is_the_program_itself_for_old_pythons_too() -> None:
    text = zlib.decompress(base64.b85decode(fuse.packed()), -15).decode()
    tree = ast.parse(text, feature_version=(3, 8))
    whole = ast.parse(SOURCE.read_text())
    functions = [node.name for node in whole.body if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == functions
    assert "Standalone" not in text
    assert "->" not in text


def test_it_fits_vasts_start_script_and_leaves_room_for_the_jobs_variables() -> None:
    script = vast.onstart_script(order({"HF_HOME": "/workspace/hf"}))
    assert len(script) < 4000 - 500
    assert subprocess.run(["sh", "-n", "-c", script]).returncode == 0


def test_it_is_the_first_thing_that_starts_and_nothing_waits_for_it() -> None:
    script = vast.onstart_script(order())
    first = script.splitlines()[0]
    assert "pennypod-fuse" in first
    assert first.endswith("&")


def test_runpods_own_images_start_as_ever_after_it() -> None:
    shell, option, inner = shlex.split(runpod.start_command(order()))
    assert (shell, option) == ("bash", "-c")
    fuse_line, rest = inner.split("\n", 1)
    assert "podTerminate" in fuse_line
    assert "\n[ -x /start.sh ] && exec /start.sh" in rest
    assert subprocess.run(["bash", "-n", "-c", inner]).returncode == 0


def test_the_settings_arrive_whole_whatever_the_url_holds(tmp_path: Path) -> None:
    ending = fuse.Ending(ENDS, "https://example.org/it's?$HOME", "URL", "ID", "KEY")
    part = fuse.part(FuseTerms(100, 20), DEADLINE, ending)
    # In place of the keeper's shell something that shows what it was given.
    shown = part.replace("$(command -v setsid) sh -c", "sh -c 'printf %s \"$C\" >settings; :'; : sh -c").replace(
        " &", ""
    )
    subprocess.run(["sh", "-c", shown], cwd=tmp_path, check=True)
    settings = json.loads((tmp_path / "settings").read_text())
    assert settings["url"] == ["https://example.org/it's?$HOME", "URL"]
    assert (settings["at"], settings["for"], settings["lease"]) == (DEADLINE, 100, 20)
    assert settings["ends"] == ENDS


# --- asking and renewing ----------------------------------------------------------------------------------------------


class Shell:
    """An `Ssh` that runs its commands here, with the pod's files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, remote: str, *, timeout_s: float = 60) -> Completed:
        here = remote.replace("/dev/shm/pennypod-", f"{self._folder}/").replace("/proc/[0-9]*/", f"{self._folder}/")
        done = subprocess.run(["sh", "-c", here], capture_output=True, timeout=timeout_s)
        return Completed(done.returncode, done.stdout, done.stderr)


def test_a_renewal_overwrites_the_lease_in_place(tmp_path: Path) -> None:
    lease = tmp_path / "lease"
    lease.write_text(f"{0:<15}\n")
    inode = lease.stat().st_ino
    with Path("/proc/uptime").open() as file:
        up = float(file.read().split()[0])
    fuse.renew(Shell(tmp_path), 600)  # type: ignore[arg-type]
    assert float(lease.read_text()) == pytest.approx(up + 600, abs=5)
    assert (lease.stat().st_ino, lease.stat().st_size) == (inode, 16)


def test_a_pod_without_a_fuse_cannot_be_renewed(tmp_path: Path) -> None:
    with pytest.raises(SshError, match="no fuse"):
        fuse.renew(Shell(tmp_path), 600)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_pod_on_which_it_does_not_run_says_so(tmp_path: Path) -> None:
    assert fuse.ask(Shell(tmp_path), wait_s=1).armed is False  # type: ignore[arg-type]


def test_a_pod_on_which_it_runs_says_how(tmp_path: Path) -> None:
    (tmp_path / "comm").write_text("pennypod-fuse\n")
    (tmp_path / "fuse").write_text('{"said": ["armed"], "key": true, "lease_s": 60}')
    state = fuse.ask(Shell(tmp_path), wait_s=1)  # type: ignore[arg-type]
    assert state == fuse.FuseState(True, True, True, ("armed",))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"said": 1}', '{"said": [], "key": true}'])
def test_half_a_word_from_a_running_fuse_is_no_alarm(text: str) -> None:
    state = fuse.parse_state(True, text)
    assert state.armed
    assert state.has_key is None
