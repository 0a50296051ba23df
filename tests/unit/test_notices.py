"""Notices out: sent once they are due, signed, in the recipient's own way, again when it does not answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from fakes import FakeClock
from pennypod.orchestrator.config import load_config
from pennypod.orchestrator.notices import Notices
from pennypod.orchestrator.store import Store, open_store
from serving import signature

FILE = """\
notify:
  hook: {kind: webhook, url_env: HOOK_URL, secret_env: HOOK_SECRET}
  chat: {kind: slack, url_env: CHAT_URL, events: [failed]}
  phone: {kind: ntfy, url_env: PHONE_URL, events: [failed, over_budget]}
"""
URLS = {"HOOK_URL": "http://hook.test/", "CHAT_URL": "http://chat.test/", "PHONE_URL": "http://phone.test/"}


class Outside:
    """Stands in for the recipients; `down` do not answer."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.got: list[tuple[str, bytes, dict[str, str]]] = []

    def post(self, url: str, *, data: bytes, headers: dict[str, str], **_: Any) -> requests.Response:
        if url in self.down:
            raise requests.ConnectionError("down")
        self.got.append((url, data, headers))
        answer = requests.Response()
        answer.status_code = 200
        return answer


class World:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "group_vars").mkdir()
        for name in ("train.yml", "ansible.cfg"):
            (folder / name).touch()
        (folder / "serve.yml").write_text(FILE)
        environment = {
            "PENNYPOD_WEBHOOK_SECRET": "x",
            "PENNYPOD_SERVE_CONFIG": str(folder / "serve.yml"),
            "HOOK_SECRET": "hook-secret",
            **URLS,
        }
        self.clock = FakeClock()
        self.store: Store = open_store(f"sqlite:///{folder / 'o.sqlite3'}")
        self.outside = Outside()
        monkeypatch.setattr(requests, "post", self.outside.post)
        self.notices = Notices(load_config(environment, folder), self.store, self.clock)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path, monkeypatch)
    yield made
    made.store.close()


def test_each_recipient_gets_its_events_in_its_own_way(world: World) -> None:
    world.notices.tell("demo-1201-abcde", "failed", {"reason": "out of memory", "cost_usd": 0.5})
    world.notices.tell("demo-1201-abcde", "rented", {"gpu": "L4", "provider": "vast"})
    assert world.notices.send_due() == 4
    by_url = {url: (data, headers) for url, data, headers in world.outside.got if b"rented" not in data}
    assert json.loads(by_url[URLS["CHAT_URL"]][0]) == {"text": "demo-1201-abcde failed; $0.5000; out of memory"}
    phone = by_url[URLS["PHONE_URL"]]
    assert (phone[1]["Title"], phone[1]["Priority"]) == ("pennypod failed", "high")
    data, headers = by_url[URLS["HOOK_URL"]]
    assert json.loads(data)["event"] == "failed"
    assert headers["X-Pennypod-Signature"] == signature(data, headers["X-Pennypod-Timestamp"], "hook-secret")


def test_an_event_of_a_run_is_told_once_however_often_it_is_seen(world: World) -> None:
    for _ in range(3):
        world.notices.tell("demo-1201-abcde", "rented", {})
        world.notices.send_due()
    assert len(world.outside.got) == 1


def test_a_recipient_that_is_down_is_tried_again_later_and_holds_up_nobody(world: World) -> None:
    world.outside.down = {URLS["HOOK_URL"]}
    world.notices.tell("demo-1201-abcde", "failed", {})
    assert world.notices.send_due() == 2
    assert world.notices.send_due() == 0, "not at once"
    world.outside.down = set()
    world.clock.time += 3600
    assert world.notices.send_due() == 1
    assert len({headers["Idempotency-Key"] for _, _, headers in world.outside.got}) == 3


def test_a_recipient_that_never_answers_is_given_up(world: World) -> None:
    world.outside.down = set(URLS.values())
    world.notices.tell("demo-1201-abcde", "rented", {})
    for _ in range(20):
        world.notices.send_due()
        world.clock.time += 86_400
    assert world.store.due_notices(world.clock.now()) == []
