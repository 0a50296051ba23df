"""Orchestrators that share their tables: who lives, who was given up, whose runs are whose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pennypod.orchestrator.payload import Order
from pennypod.orchestrator.scheduling import Limits
from pennypod.orchestrator.signing import Delivery
from pennypod.orchestrator.store import Start, Store, Taken, open_store

SILENT_S = 30.0
NOON = 1_764_590_400.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = open_store(f"sqlite:///{tmp_path / 'o.sqlite3'}")
    yield made
    made.close()


def accept(store: Store, run: str) -> None:
    delivery = Delivery("pennypod", "hash", f"sig:{run}", 600)
    start = Start(delivery, Order("demo", (), {}, 5), new_run=lambda: run, provider="auto")
    assert store.take_starts([start], Limits(queue=10), NOON) == [Taken(run, first=True)]


def never(_worker: str) -> bool:
    return False


def test_the_runs_of_one_that_is_silent_go_to_one_that_lives(store: Store) -> None:
    accept(store, "demo-1201-aaaaa")
    assert store.beat("dead", NOON)
    assert store.beat("living", NOON)
    assert store.admit(Limits(), "dead", NOON) == ["demo-1201-aaaaa"]
    assert store.give_up("living", SILENT_S, NOON + 29, never) == []
    assert store.take_ownerless("living") == ([], {"dead", "living"})
    assert store.give_up("living", SILENT_S, NOON + 31, never) == ["dead"]
    assert store.take_ownerless("living") == (["demo-1201-aaaaa"], {"living"})
    assert store.running_of("living") == ["demo-1201-aaaaa"]
    assert store.take_ownerless("living") == ([], {"living"})


def test_one_that_was_given_up_is_told_and_is_given_nothing_more(store: Store) -> None:
    store.beat("frozen", NOON)
    store.beat("living", NOON)
    assert not store.was_given_up("frozen")
    store.give_up("living", SILENT_S, NOON + 31, never)
    assert store.was_given_up("frozen")
    assert not store.was_given_up("never heard of")
    accept(store, "demo-1201-aaaaa")
    assert store.admit(Limits(), "frozen", NOON + 40) == []
    assert not store.beat("frozen", NOON + 40)
    assert store.admit(Limits(), "living", NOON + 40) == ["demo-1201-aaaaa"]


def test_nobody_waits_for_the_silence_of_one_that_is_known_to_have_ended(store: Store) -> None:
    store.beat("ended", NOON)
    assert store.give_up("living", SILENT_S, NOON, lambda worker: worker == "ended") == ["ended"]


def test_a_run_let_in_by_somebody_who_was_never_seen_is_nobodys(store: Store) -> None:
    accept(store, "demo-1201-aaaaa")
    store.beat("living", NOON)
    store.admit(Limits(), "unseen", NOON)
    assert store.take_ownerless("living")[0] == ["demo-1201-aaaaa"]


def test_a_notice_is_given_to_one_sender_and_again_when_nobody_says_that_it_arrived(store: Store) -> None:
    store.add_notices("demo-1201-aaaaa", "rented", ["ops"], {}, NOON)
    (notice,) = store.due_notices(NOON)
    assert store.due_notices(NOON + 59) == []
    assert [again.id for again in store.due_notices(NOON + 61)] == [notice.id]
