"""Two orchestrators on one PostgreSQL, as if on two machines: whichever is killed, and whenever, the other one ends
every accepted run, once, with no pod left. Promises and limits hold over both."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import postgres
import pytest
import requests
from pennypod import processes
from pennypod.orchestrator.store import open_store
from serving import Rehearsal, check_all_ended_once, signature
from workspace import wait_until

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(postgres.binaries() is None, reason="PostgreSQL is not installed"),
]

# One of each step; tests/chaos/test_kill_orchestrator.py goes through all of them, and a restart costs seconds.
MOMENTS = ("opened", "created", "finishing", "gone", "closed")


class Pair:
    """Two servers that cannot see each other's processes."""

    def __init__(self, root: Path, config: str, database_url: str) -> None:
        self.one = Rehearsal(root, config, database_url)
        self.one._environment["REHEARSAL_PLACE"] = "one"
        self.two = self.one.beside(REHEARSAL_PLACE="two")

    @property
    def both(self) -> tuple[Rehearsal, Rehearsal]:
        return self.one, self.two

    def start(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Rehearsal.start, self.both))

    def dead(self) -> list[Rehearsal]:
        return [server for server in self.both if server.has_ended()]

    def survivor(self) -> Rehearsal:
        (living,) = (server for server in self.both if not server.has_ended())
        return living


@contextlib.contextmanager
def pair_of(root: Path, config: str) -> Iterator[Pair]:
    with postgres.server() as database_url:
        pair = Pair(root, f"poll_s: 0.5\nsilent_s: 5\n{config}", database_url)
        try:
            pair.start()
            yield pair
        finally:
            for server in pair.both:
                server.close()


def test_one_is_killed_at_any_moment_and_the_other_takes_over(tmp_path: Path) -> None:
    with pair_of(tmp_path, "") as pair:
        runs: list[str] = []
        survivor = pair.one
        for moment in MOMENTS:
            for server in pair.dead():
                server.start()
            pair.one.die_at(moment)
            runs.append(pair.one.start_run())
            wait_until(lambda run=runs[-1]: pair.dead() or _call_back(pair.two, run), 30, f"one dies at {moment}")
            wait_until(pair.dead, 30, f"one dies at {moment}")
            survivor = pair.survivor()
            wait_until(lambda by=survivor, run=runs[-1]: _call_back(by, run), 30, "the run can be told to end")
            survivor.wait_for(runs[-1])
            assert pair.survivor() is survivor
        check_all_ended_once(survivor, runs)
        taken = [run for run in runs if "takeover" in {entry["name"] for entry in survivor.status(run)["timeline"]}]
        assert taken, "no run has changed hands"


def _call_back(server: Rehearsal, run: str) -> bool:
    """Say that the training has succeeded as soon as it is watched; whether the run has got so far, or over it."""
    try:
        status = server.status(run)
        if status["stage"] == "watch":
            server.call_back(run, "success")
        return status["stage"] not in ("admit", "launch", "watch")
    except requests.ConnectionError:
        return False  # killed just now


def test_limits_and_promises_hold_over_both_and_a_kill(tmp_path: Path) -> None:
    with pair_of(tmp_path, "limits: {running: 3, per_job: 3, queue: 4}") as pair:
        runs = [pair.both[number % 2].start_run() for number in range(3)]
        for run in runs:
            pair.one.wait_for(run, stage="watch")
        wishes = [json.dumps({"action": "train_start", "job": "tiny", "note": f"{n}"}).encode() for n in range(12)]
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda n: pair.both[n % 2].post(wishes[n]), range(len(wishes))))
        runs += [answer.json()["run"] for answer in answers if answer.status_code == 202]
        refused = [answer.json()["code"] for answer in answers if answer.status_code != 202]
        assert (len(runs), set(refused)) == (3 + 4, {"queue_full"})

        pair.one.kill()
        most, over = 0, set()

        def all_have_ended() -> bool:
            nonlocal most
            most = max(most, len(pair.two.pods()))
            over.update(run for run in runs if run not in over and pair.two.status(run)["state"] == "ended")
            for run in set(runs) - over:
                _call_back(pair.two, run)
            return len(over) == len(runs)

        wait_until(all_have_ended, 90, "the other one carries out what both have accepted")
        check_all_ended_once(pair.two, runs)
        assert most == 3


def test_a_delivery_to_both_at_once_is_one_run(tmp_path: Path) -> None:
    with pair_of(tmp_path, "") as pair, ThreadPoolExecutor(8) as pool:
        body = b'{"action": "train_start", "job": "tiny"}'
        stamp = str(int(time.time()))
        signed = {"X-Pennypod-Timestamp": stamp, "X-Pennypod-Signature": signature(body, stamp)}

        def send(number: int, headers: dict[str, str]) -> requests.Response:
            return requests.post(f"{pair.both[number % 2].url}/hooks/train", data=body, headers=headers, timeout=30)

        same_bytes = list(pool.map(lambda n: send(n, signed), range(8)))
        assert sorted(answer.status_code for answer in same_bytes) == [202] + [409] * 7
        other = b'{"action": "train_start", "job": "tiny", "note": "other"}'
        stamps = [str(int(stamp) - number) for number in range(8)]
        same_key = list(pool.map(lambda n: pair.both[n % 2].post(other, timestamp=stamps[n], key="k"), range(8)))
        assert {answer.status_code for answer in same_key} == {202}
        assert len({answer.json()["run"] for answer in same_key}) == 1
        assert sum("Idempotent-Replayed" not in answer.headers for answer in same_key) == 1


def test_one_that_was_given_up_ends_itself_when_it_wakes(tmp_path: Path) -> None:
    with pair_of(tmp_path, "") as pair:
        run = pair.one.start_run()
        pair.one.wait_for(run, stage="watch")
        os.kill(pair.one.pid, signal.SIGSTOP)
        try:
            store = open_store(pair.one.settings.database_url)
            frozen = f"{processes.identity(pair.one.pid).rsplit(':', 1)[0]}:one.boot.1"
            wait_until(lambda: store.was_given_up(frozen), 30, "the other one gives it up")
            store.close()
        finally:
            os.kill(pair.one.pid, signal.SIGCONT)
        wait_until(pair.one.has_ended, 30, "it ends itself")
        assert "given this one up" in pair.one.log()
        wait_until(lambda: _call_back(pair.two, run), 30, "the run can be told to end")
        check_all_ended_once(pair.two, [run])
