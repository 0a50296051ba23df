"""`pennypod doctor`: every illness it knows is seen, named and given a remedy, and health is left alone."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import stat
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner
from fakes import FakeClock, FakeProvider, offer
from pennypod.cli import main
from pennypod.cli.app import App
from pennypod.doctor import FAIL, OK, WARN, Doctor, Finding
from pennypod.errors import AuthError, EngineError, PennypodError, TransientError
from pennypod.fuse import FuseState
from pennypod.ledger import RunRecord, open_ledger
from pennypod.model.ids import Lease
from pennypod.providers.base import Reach
from pennypod.providers.servertime import told_time
from pennypod.sentinel import look
from pennypod.settings import Settings

CANARY = "canary-key-0123456789"
NO_KEYS: dict[str, str] = {}
WITH_KEY = {"VAST_API_KEY": CANARY, "VAST_URL": "https://vast.example"}


class Account(FakeProvider):
    """A provider whose balance call answers `answer`, or raises it."""

    def __init__(self, answer: int | PennypodError | None) -> None:
        super().__init__(FakeClock(), "vast")
        self.answer = answer

    def balance_micros(self) -> int | None:
        if isinstance(self.answer, PennypodError):
            raise self.answer
        return self.answer


class Scoped(Account):
    """A provider that knows what its key may do."""

    def __init__(self, answer: int | PennypodError | None, *allowed: bool | None) -> None:
        super().__init__(answer)
        self.allowed = allowed

    def reach(self) -> list[Reach]:
        names = ("searches the market", "sees instances", "sees the bill")
        scopes = ("misc", "instance_read and instance_write", "billing_read")
        rows = zip(names, scopes, self.allowed, strict=True)
        return [Reach(name, scope, allowed, name != names[2]) for name, scope, allowed in rows]


class World:
    def __init__(self, home: Path) -> None:
        self.clock = FakeClock()
        self.settings = Settings(home, f"sqlite:///{home / 'ledger.sqlite3'}")
        self.asked: list[str] = []

    def findings(self, environ: Mapping[str, str] = NO_KEYS, **outside: Any) -> dict[str, Finding]:
        healthy: dict[str, Any] = {
            "open_named": lambda *_a: Account(12_340_000),
            "which": lambda name: f"/usr/bin/{name}",
            "server_time": self.server_time(0.0),
            "engine": lambda *_a: "podman 4.3.1 starts containers",
            "free_bytes": lambda _path: 50_000_000_000,
            "versions": lambda _name: "2.19.14",
            "python": (3, 12, 1),
        }
        doctor = Doctor(self.settings, environ, self.clock, **(healthy | outside))
        return {finding.name: finding for finding in doctor.findings()}

    def looked(self, provider: FakeProvider | None = None) -> None:
        """A sentinel has looked just now."""
        providers: Any = {"fake": provider or FakeProvider(self.clock)}
        with contextlib.closing(open_ledger(self.settings)) as ledger:
            look(providers, lambda: ledger, self.settings, self.clock)

    def server_time(self, behind_us: float) -> Any:
        def told(url: str) -> float:
            self.asked.append(url)
            return float(int(self.clock.now() - behind_us))

        return told


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "home")


def test_a_healthy_machine_has_nothing_to_do(world: World) -> None:
    world.looked()
    found = world.findings(WITH_KEY)
    assert {finding.level for finding in found.values()} == {OK}
    assert [finding.advice for finding in found.values() if finding.advice] == []
    assert found["vast"].seen == "the key works; balance $12.34"
    assert found["runpod"].seen == "not used: RUNPOD_API_KEY is not set"
    assert found["provider=auto"].seen == "the cheapest of vast"
    assert world.asked == ["https://vast.example"]
    assert stat.S_IMODE(world.settings.home.stat().st_mode) == 0o700
    assert sorted(path.name for path in world.settings.home.glob(".doctor*")) == []


def test_a_machine_on_which_no_sentinel_looks_is_told(world: World) -> None:
    assert world.findings()["sentinel"].level == OK, "local pods alone cost nothing"
    found = world.findings(WITH_KEY)["sentinel"]
    assert (found.level, "yet" in found.seen) == (WARN, True)
    assert "control_node.yml" in found.advice
    world.looked()
    world.clock.time += 1200
    assert world.findings(WITH_KEY)["sentinel"] == Finding("sentinel", OK, "looked 20 min ago")
    world.clock.time += 3 * 3600
    late = world.findings()["sentinel"]
    assert (late.level, late.seen) == (WARN, "no sentinel has looked since 2025-12-01 14:40 UTC")


def test_a_sentinel_that_looks_in_vain_is_told(world: World) -> None:
    provider = FakeProvider(world.clock)
    provider.list_faults = [TransientError("no")]
    world.looked(provider)
    found = world.findings()["sentinel"]
    assert (found.level, found.seen) == (WARN, "looked 0 min ago, in vain at: fake")


def missing(_name: str) -> str:
    raise importlib.metadata.PackageNotFoundError


def no_engine(*_args: object) -> str:
    raise EngineError("neither podman nor docker is installed")


@pytest.mark.parametrize(
    ("name", "level", "outside"),
    [
        ("python", FAIL, {"python": (3, 10, 9)}),
        ("python", FAIL, {"python": (3, 14, 0)}),
        ("ansible-core", WARN, {"versions": lambda _name: "2.20.1"}),
        ("ansible-core", FAIL, {"versions": missing}),
        ("ssh tools", FAIL, {"which": lambda name: None if name == "ssh-keygen" else name}),
        ("free disk", WARN, {"free_bytes": lambda _path: 1_000_000_000}),
        ("free disk", FAIL, {"free_bytes": lambda _path: 1_000}),
    ],
)
def test_an_ill_machine_is_told_what_to_do(world: World, name: str, level: str, outside: dict[str, Any]) -> None:
    world.looked()
    found = world.findings(WITH_KEY, **outside)
    assert found[name].level == level
    assert found[name].advice
    assert {finding.level for finding in found.values() if finding.name != name} == {OK}


def test_an_engine_is_needed_only_where_nothing_else_is(world: World) -> None:
    assert world.findings(WITH_KEY, engine=no_engine)["container engine"].level == WARN
    assert world.findings(NO_KEYS, engine=no_engine)["container engine"].level == FAIL


def test_without_any_key_it_says_that_pods_are_local_and_asks_nobody(world: World) -> None:
    found = world.findings(NO_KEYS)
    assert (found["provider=auto"].level, world.asked) == (WARN, [])
    assert "VAST_API_KEY" in found["provider=auto"].advice


@pytest.mark.parametrize(
    ("answer", "level"),
    [
        (AuthError("vast: the key was refused"), FAIL),
        (TransientError("502"), FAIL),
        (0, FAIL),
        (-5, FAIL),
        (990_000, WARN),
        (None, OK),
    ],
)
def test_the_key_is_tried_and_the_balance_judged(world: World, answer: Any, level: str) -> None:
    account = Account(answer)
    found = world.findings(WITH_KEY, open_named=lambda *_a: account)["vast"]
    assert (found.level, bool(found.advice)) == (level, level != OK)
    assert account.created == []


@pytest.mark.parametrize(("behind", "level"), [(4.0, OK), (-4.0, OK), (30.0, WARN), (-30.0, WARN), (600.0, FAIL)])
def test_the_clock_is_held_against_theirs(world: World, behind: float, level: str) -> None:
    found = world.findings(WITH_KEY, server_time=world.server_time(behind))["clock"]
    assert found.level == level
    if level != OK:
        assert ("ahead of" if behind > 0 else "behind") in found.seen


def test_no_date_is_no_finding(world: World) -> None:
    assert "clock" not in world.findings(WITH_KEY, server_time=lambda _url: None)


def test_a_state_folder_for_everybody_is_a_warning_and_one_that_cannot_be_is_a_failure(world: World) -> None:
    world.settings.home.mkdir(mode=0o755)
    found = world.findings()["state folder"]
    assert (found.level, "chmod 700" in found.advice) == (WARN, True)
    blocked = World(world.settings.home / "file" / "home")
    (world.settings.home / "file").write_text("in the way")
    found_there = blocked.findings()
    assert [found_there[name].level for name in ("state folder", "ledger")] == [FAIL, FAIL]


def test_a_pod_past_its_deadline_is_a_warning(world: World) -> None:
    ledger = open_ledger(world.settings)
    run = "demo-1201-abcde"
    ledger.open_run(RunRecord(run, "demo", "1:1", world.clock.now(), "/tmp", deadline=world.clock.now() + 60))
    lease = Lease(run, 1, int(world.clock.now()) + 60, "aaaaa")
    ledger.open_attempt(lease, offer(1), renter="1:1", at=world.clock.now())
    assert world.findings()["ledger"].level == OK
    world.clock.sleep(61)
    found = world.findings()["ledger"]
    assert (found.level, found.advice) == (WARN, "pennypod sweep")
    assert lease.name in found.seen


@pytest.mark.parametrize(("armed", "level"), [(True, OK), (False, WARN)])
def test_a_pod_that_cannot_end_itself_is_a_warning(world: World, armed: bool, level: str) -> None:
    with contextlib.closing(open_ledger(world.settings)) as ledger:
        now = world.clock.now()
        ledger.open_run(RunRecord("demo-1201-abcde", "demo", "1:1", now, "/nowhere", deadline=now + 600))
        lease = Lease("demo-1201-abcde", 1, int(now + 600), "abcde")
        attempt = ledger.open_attempt(lease, offer(1), renter="1:1", at=now)
        ledger.record_fuse(attempt.id, FuseState(armed).as_document())
    finding = world.findings(WITH_KEY)["fuses"]
    assert finding.level == level
    assert (lease.name in finding.seen) is not armed


def test_the_command_prints_every_line_and_exits_1_on_a_failure(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [Finding("one", OK, "fine"), Finding("two", WARN, "so so", "mend it")]
    monkeypatch.setattr("pennypod.doctor.Doctor.findings", lambda _self: iter(lines))

    def call(*args: str) -> Any:
        return CliRunner().invoke(main, ["doctor", *args], obj=App(world.settings, world.clock))

    assert call().exit_code == 0
    assert call().stdout == "ok    one: fine\nwarn  two: so so\n      mend it\n"
    lines.append(Finding("three", FAIL, "broken", "repair it"))
    assert call().exit_code == 1
    document = json.loads(call("--json").stdout)
    assert document["ok"] is False
    assert [check["level"] for check in document["checks"]] == [OK, WARN, FAIL]


# --- what a real answer says ------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tuple[str, list[Mapping[str, str]]]]:
    seen: list[Mapping[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(dict(self.headers))
            self.send_response_only(404)
            if self.path != "/dateless":
                self.send_header("Date", "Tue, 01 Dec 2026 12:00:00 GMT")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            return None

    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}", seen
        httpd.shutdown()
        thread.join()


def test_the_time_is_read_from_any_answer_and_no_key_is_sent(
    server: tuple[str, list[Mapping[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAST_API_KEY", CANARY)
    url, seen = server
    assert told_time(url) == 1_796_126_400.0
    assert told_time(f"{url}/dateless") is None
    assert CANARY not in str(seen)
    assert "Authorization" not in str(seen)


def test_no_answer_is_no_time() -> None:
    assert told_time("http://127.0.0.1:1") is None
    assert told_time("no url at all") is None


# --- what the key may do ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "level", "words", "advice"),
    [
        ((True, True, True), OK, "sees the bill; that it may rent and destroy shows only when it does", ""),
        ((True, True, False), WARN, "may not do this: sees the bill", "give the key billing_read"),
        ((True, False, True), FAIL, "may not do this: sees instances", "give the key instance_read and instance_write"),
        ((True, None, True), WARN, "could not be found out whether it sees instances", "try again later"),
    ],
)
def test_what_a_key_may_do_is_said_with_the_scope_that_it_lacks(
    world: World, allowed: tuple[bool | None, ...], level: str, words: str, advice: str
) -> None:
    found = world.findings(WITH_KEY, open_named=lambda *_a: Scoped(12_340_000, *allowed))["vast key"]
    assert (found.level, found.advice) == (level, advice)
    assert words in found.seen


def test_a_key_that_may_not_see_the_balance_is_not_called_wrong(world: World) -> None:
    found = world.findings(WITH_KEY, open_named=lambda *_a: Scoped(AuthError("not for you"), True, True, True))
    assert (found["vast"].level, found["vast key"].level) == (WARN, OK)
    assert "user_read" in found["vast"].advice
    wrong = world.findings(WITH_KEY, open_named=lambda *_a: Scoped(AuthError("no such key"), False, False, False))
    assert wrong["vast"].level == FAIL
    assert "make a new key" in wrong["vast"].advice
    assert "vast key" not in wrong
