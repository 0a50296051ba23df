"""The ledger: what is written stays written, whoever dies, and only one actor ever gets to rent for a run."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import postgres
import pytest
import sqlalchemy as sa
from fakes import offer
from pennypod import processes
from pennypod.errors import FencedError, InputError
from pennypod.ledger import (
    FINAL_STATES,
    ArtifactRecord,
    AttemptRecord,
    AttemptState,
    Ledger,
    LedgerError,
    Outcome,
    QuarantineRecord,
    RunRecord,
    open_ledger,
    schema,
)
from pennypod.model.ids import Lease
from pennypod.model.pod import SshAddress
from pennypod.receipts import seal_problems
from pennypod.settings import Settings

RUN = "demo-1201-abcde"
NOW = 1_764_600_000.0
ADDRESS = SshAddress("127.0.0.1", 2222)


def settings_in(home: Path, url: str | None = None) -> Settings:
    return Settings(home=home, database_url=url or f"sqlite:///{home / 'ledger.sqlite3'}")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path / "home")


@pytest.fixture
def ledger(settings: Settings) -> Iterator[Ledger]:
    opened = open_ledger(settings)
    yield opened
    opened.close()


def run_record(run: str = RUN, **changes: Any) -> RunRecord:
    values: dict[str, Any] = {
        "run": run,
        "job": run.split("-", maxsplit=1)[0],
        "controller": "1:1",
        "created": NOW,
        "artifacts_dir": "/tmp/artifacts",
    }
    return RunRecord(**(values | changes))


def lease(attempt: int = 1, run: str = RUN) -> Lease:
    return Lease(run, attempt, int(NOW) + 600, f"aaaa{'abcdefghij'[attempt % 10]}")


def open_attempt(ledger: Ledger, attempt: int = 1, run: str = RUN) -> AttemptRecord:
    return ledger.open_attempt(lease(attempt, run), offer(attempt), renter="1:1", at=NOW)


# --- runs and attempts ----------------------------------------------------------------------------------------------


def test_an_attempt_from_intent_to_receipt(ledger: Ledger) -> None:
    ledger.open_run(run_record())
    attempt = open_attempt(ledger)
    assert attempt.state is AttemptState.INTENT
    assert attempt.cost_micros(NOW + 3600) == 0  # an intent is no pod yet
    ledger.record_pod(attempt.id, "pod-1", NOW + 1)
    ledger.record_ready(attempt.id, ADDRESS, NOW + 5)
    (ready,) = ledger.pending_attempts()
    assert (ready.pod_id, ready.ssh_host, ready.ssh_port, ready.ssh_user) == ("pod-1", "127.0.0.1", 2222, "root")
    assert ready.cost_micros(NOW + 3600) == ready.price_micros_per_h
    ledger.record_destroying(attempt.id, "succeeded", "the job is done", NOW + 50)
    assert [a.state for a in ledger.pending_attempts()] == [AttemptState.DESTROYING]
    assert ledger.record_gone(attempt.id, {"proof": [1, 2]}, NOW + 60, 3_334)
    (gone,) = ledger.attempts(RUN)
    assert ledger.pending_attempts() == []
    assert gone.receipt is not None
    assert (gone.receipt["proof"], gone.receipt["chain"]["seq"], seal_problems(gone.receipt)) == ([1, 2], 1, [])
    assert gone.billed_seconds(NOW + 9999) == 60.0  # the meter has stopped


def test_the_first_reason_and_the_first_receipt_stay(ledger: Ledger) -> None:
    ledger.open_run(run_record())
    attempt = open_attempt(ledger)
    ledger.record_pod(attempt.id, "pod-1", NOW)
    ledger.record_destroying(attempt.id, "cancelled", "first", NOW + 1)
    ledger.record_destroying(attempt.id, "failed", "second", NOW + 2)
    assert ledger.record_gone(attempt.id, {"by": "first"}, NOW + 3, 1)
    assert not ledger.record_gone(attempt.id, {"by": "second"}, NOW + 4, 2)
    (record,) = ledger.attempts(RUN)
    assert (record.outcome, record.reason, record.destroy_requested) == ("cancelled", "first", NOW + 1)
    assert record.receipt is not None
    assert (record.receipt["by"], record.gone) == ("first", NOW + 3)
    assert len(ledger.receipts()[1]) == 1
    ledger.record_destroying(attempt.id, "failed", "too late", NOW + 5)
    assert ledger.attempts(RUN) == [record]


@pytest.mark.parametrize(
    ("before", "step"),
    [
        ("rented", "record_pod"),  # a create call has one answer
        ("never", "record_pod"),  # the late answer of a create that was given up
        ("gone", "record_pod"),
        ("intent", "record_ready"),  # no id yet
        ("destroying", "record_ready"),
        ("gone", "record_ready"),
        ("rented", "record_never"),  # there is an id, so there was a pod
        ("gone", "record_never"),
    ],
)
def test_no_step_goes_backwards(ledger: Ledger, before: str, step: str) -> None:
    ledger.open_run(run_record())
    attempt = open_attempt(ledger)
    if before in ("rented", "destroying", "gone"):
        ledger.record_pod(attempt.id, "pod-1", NOW)
    if before in ("destroying", "gone"):
        ledger.record_destroying(attempt.id, "failed", "x", NOW)
    if before == "gone":
        ledger.record_gone(attempt.id, {}, NOW, 0)
    if before == "never":
        ledger.record_never(attempt.id, "no_capacity", "x", NOW)
    (record,) = ledger.attempts(RUN)
    steps = {
        "record_pod": lambda: ledger.record_pod(attempt.id, "pod-2", NOW),
        "record_ready": lambda: ledger.record_ready(attempt.id, ADDRESS, NOW),
        "record_never": lambda: ledger.record_never(attempt.id, "no_capacity", "x", NOW),
    }
    with pytest.raises(FencedError):
        steps[step]()
    assert ledger.attempts(RUN) == [record]


def test_a_run_has_one_live_attempt(ledger: Ledger) -> None:
    ledger.open_run(run_record())
    first = open_attempt(ledger)
    with pytest.raises(FencedError, match="not proven gone"):
        open_attempt(ledger, 2)
    ledger.record_never(first.id, "no_capacity", "sold out", NOW)
    assert open_attempt(ledger, 2).attempt == 2


@pytest.mark.parametrize("taken", ["fenced", "closed"])
def test_a_run_that_was_taken_away_rents_nothing(ledger: Ledger, taken: str) -> None:
    ledger.open_run(run_record())
    if taken == "fenced":
        ledger.fence(RUN, "the terminal was closed")
        ledger.fence(RUN, "a later reason")
        assert ledger.run(RUN).fenced_reason == "the terminal was closed"
    else:
        assert ledger.close_run(RUN, Outcome.FAILED, "no data", NOW)
        assert not ledger.close_run(RUN, Outcome.SUCCEEDED, "", NOW + 1)
        assert (ledger.run(RUN).outcome, ledger.run(RUN).closed) == ("failed", NOW)
    with pytest.raises(FencedError):
        open_attempt(ledger)
    with pytest.raises(FencedError):
        ledger.raise_if_fenced(RUN)
    assert ledger.attempts(RUN) == []


def test_open_runs_are_those_not_closed_and_those_with_a_pod_not_proven_gone(ledger: Ledger) -> None:
    for number, run in enumerate(("demo-1201-aaaaa", "demo-1201-bbbbb", "demo-1201-ccccc")):
        ledger.open_run(run_record(run, controller=f"{number}:1", created=NOW + number))
        ledger.record_pod(open_attempt(ledger, run=run).id, f"pod-{number}", NOW)
    for run in ("demo-1201-bbbbb", "demo-1201-ccccc"):
        ledger.close_run(run, Outcome.FAILED, "x", NOW)
    (third,) = ledger.attempts("demo-1201-ccccc")
    ledger.record_gone(third.id, {}, NOW, 0)
    assert [record.run for record in ledger.open_runs()] == ["demo-1201-aaaaa", "demo-1201-bbbbb"]
    assert [record.run for record in ledger.open_runs("1:1")] == ["demo-1201-bbbbb"]


def test_runs_are_listed_by_job_and_by_a_half_open_range_of_time(ledger: Ledger) -> None:
    for number, run in enumerate(("demo-1201-aaaaa", "fdi-1201-bbbbb", "demo-1202-ccccc")):
        ledger.open_run(run_record(run, created=NOW + 100 * number))
    assert [r.run for r in ledger.runs(job="demo")] == ["demo-1201-aaaaa", "demo-1202-ccccc"]
    assert [r.run for r in ledger.runs(since=NOW + 100, until=NOW + 200)] == ["fdi-1201-bbbbb"]
    assert [r.run for r in ledger.runs(since=NOW + 100)] == ["fdi-1201-bbbbb", "demo-1202-ccccc"]


def test_an_unknown_run_is_an_input_error_everywhere(ledger: Ledger) -> None:
    for call in (
        lambda: ledger.run(RUN),
        lambda: ledger.raise_if_fenced(RUN),
        lambda: ledger.fence(RUN, "x"),
        lambda: ledger.set_verdict(RUN, "adopt", ""),
        lambda: ledger.start_stage(RUN, "rent", NOW),
        lambda: open_attempt(ledger),
        lambda: ledger.set_plan(RUN, deadline=NOW, worst_case_micros=1),
    ):
        with pytest.raises(InputError):
            call()


def test_the_stages_of_a_closed_run_stay_as_its_results_told_them(ledger: Ledger) -> None:
    ledger.open_run(run_record())
    ledger.start_stage(RUN, "teardown", NOW)
    ledger.finish_stage(RUN, "teardown", NOW + 16)
    ledger.close_run(RUN, Outcome.SUCCEEDED, "done", NOW + 16)
    ledger.finish_stage(RUN, "teardown", NOW + 19)  # the play's own end comes later
    assert [(s.stage, s.finished) for s in ledger.stages(RUN)] == [("teardown", NOW + 16)]


def test_stages_artifacts_verdict_and_quarantine_are_kept(ledger: Ledger) -> None:
    ledger.open_run(run_record())
    ledger.start_stage(RUN, "rent", NOW)
    ledger.start_stage(RUN, "rent", NOW + 5)  # the next rung belongs to the same stage
    ledger.finish_stage(RUN, "rent", NOW + 9)
    ledger.start_stage(RUN, "gate", NOW + 9)
    assert [(s.stage, s.started, s.finished) for s in ledger.stages(RUN)] == [
        ("rent", NOW, NOW + 9),
        ("gate", NOW + 9, None),
    ]
    ledger.record_artifacts([ArtifactRecord(RUN, "best.npz", 10, "a" * 64, "weights")])
    ledger.record_artifacts(
        [ArtifactRecord(RUN, "best.npz", 12, "b" * 64, "weights"), ArtifactRecord(RUN, "train.log", 5, "c" * 64, "log")]
    )
    assert [(a.path, a.bytes) for a in ledger.artifacts(RUN)] == [("best.npz", 12), ("train.log", 5)]
    ledger.set_verdict(RUN, "skip", "overfitted")
    assert (ledger.run(RUN).verdict, ledger.run(RUN).verdict_note) == ("skip", "overfitted")
    for until in (NOW + 10, NOW + 20):
        ledger.quarantine(QuarantineRecord("fake", "machine-1", NOW, until, "wrong result"))
    assert [record.until for record in ledger.quarantined(NOW + 15)] == [NOW + 20]
    assert ledger.quarantined(NOW + 20) == []


# --- the database ---------------------------------------------------------------------------------------------------


def test_only_the_owner_can_read_it(settings: Settings) -> None:
    before = os.umask(0)
    try:
        open_ledger(settings).open_run(run_record())
    finally:
        os.umask(before)
    assert settings.ledger_file is not None
    assert stat.S_IMODE(settings.ledger_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(settings.home.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "url", ["", "not a url", "postgresq://host/db", "mysql+nosuchdriver://host/db", "sqlite+nosuchdriver:///x"]
)
def test_a_url_that_is_none_is_one_clear_error_and_makes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LedgerError) as caught:
        open_ledger(Settings(home=tmp_path, database_url=url)).runs()
    assert caught.value.code == "ledger"
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_ledger_is_refused_and_left_alone(settings: Settings) -> None:
    assert settings.ledger_file is not None
    settings.home.mkdir(parents=True)
    settings.ledger_file.write_bytes(b"this was somebody's diary\n" * 100)
    before = settings.ledger_file.read_bytes()
    with pytest.raises(LedgerError):
        open_ledger(settings).runs()
    assert settings.ledger_file.read_bytes() == before


def test_a_home_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file in the way")
    with pytest.raises(LedgerError, match="PENNYPOD_HOME"):
        open_ledger(settings_in(tmp_path / "home"))


@pytest.mark.parametrize(("number", "advice"), [(errno.ENOSPC, "free some room"), (errno.EACCES, "set PENNYPOD_HOME")])
def test_a_home_that_cannot_be_written_says_what_would_help(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number), "home")

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(LedgerError, match=advice):
        open_ledger(settings)


def test_a_ledger_of_another_version_is_refused_and_left_alone(settings: Settings) -> None:
    opened = open_ledger(settings)
    opened.open_run(run_record())
    opened.close()
    assert settings.ledger_file is not None
    with sqlite3.connect(settings.ledger_file) as connection:
        connection.execute("UPDATE meta SET value = '999' WHERE key = 'schema_version'")
    connection.close()
    with pytest.raises(LedgerError, match="schema version 999"):
        open_ledger(settings).open_run(run_record("demo-1201-bbbbb"))
    with sqlite3.connect(settings.ledger_file) as connection:
        assert connection.execute("SELECT run FROM runs").fetchall() == [(RUN,)]
    connection.close()


def test_a_second_opening_sees_what_the_first_wrote(settings: Settings, ledger: Ledger) -> None:
    ledger.open_run(run_record())
    attempt = open_attempt(ledger)
    other = open_ledger(settings)
    assert other.attempts(RUN) == [attempt]
    other.close()


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("sqlite:////srv/ledger.sqlite3", "/srv/ledger.sqlite3"),
        ("sqlite+pysqlite:////srv/l.db?timeout=5", "/srv/l.db"),
        ("sqlite://", None),
        ("sqlite:///:memory:", None),
        ("postgresql://host/db", None),
    ],
)
def test_where_the_file_is_follows_from_the_url(tmp_path: Path, url: str, file: str | None) -> None:
    assert settings_in(tmp_path, url).ledger_file == (None if file is None else Path(file))


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql", "mysql"])
def test_moments_and_money_fit_their_columns_in_every_database(dialect: str) -> None:
    """A plain FLOAT has 24 bits in some databases: Unix time would come back minutes off."""
    spoken = sa.create_mock_engine(f"{dialect}://", lambda *_a, **_k: None).dialect
    for table in schema.metadata.tables.values():
        for column in table.columns:
            written = column.type.compile(spoken)
            if isinstance(column.type, sa.Float):
                assert written.startswith("DOUBLE"), f"{table.name}.{column.name}: {written}"
            if column.name.endswith(("_micros", "_micros_per_h", "bytes")):
                assert written == "BIGINT", f"{table.name}.{column.name}: {written}"


# --- kill -9, and several processes at once -------------------------------------------------------------------------

# Does every step of a run's life over and over, saying each one aloud after the ledger has returned from it.
WRITER = """
    import sys
    from pathlib import Path
    from pennypod.ledger import ArtifactRecord, Outcome, RunRecord, open_ledger
    from pennypod.model.ids import Lease
    from pennypod.model.offer import Offer
    from pennypod.model.pod import SshAddress
    from pennypod.settings import Settings

    home, first = Path(sys.argv[1]), int(sys.argv[2])
    ledger = open_ledger(Settings(home=home, database_url=f"sqlite:///{home / 'ledger.sqlite3'}"))
    offer = Offer("fake", "o", "m", "CPU", 1, 200_000, 20)
    letters = "abcdefghijklmnopqrstuvwxyz234567"

    def done(*words):
        sys.stdout.write(" ".join(map(str, words)) + "\\n")
        sys.stdout.flush()

    done("ready")
    for number in range(first, first + 1000):
        run = f"demo-1201-{letters[number // 1024 % 32]}{letters[number // 32 % 32]}{letters[number % 32]}aa"
        ledger.open_run(RunRecord(run, "demo", "1:1", 1.0, "/tmp"))
        done("run", run)
        lease = Lease(run, 1, 100, "aaaaa")
        attempt = ledger.open_attempt(lease, offer, renter="1:1", at=2.0)
        done("intent", lease.name)
        ledger.record_pod(attempt.id, f"pod-{number}", 3.0)
        done("rented", lease.name)
        ledger.start_stage(run, "training", 4.0)
        ledger.record_ready(attempt.id, SshAddress("h", 22), 4.0)
        done("ready", lease.name)
        ledger.record_artifacts([ArtifactRecord(run, name, 1, "a", "weights") for name in ("a", "b", "c")])
        done("artifacts", run)
        ledger.record_destroying(attempt.id, "succeeded", "done", 5.0)
        done("destroying", lease.name)
        ledger.record_gone(attempt.id, {"proof": [number]}, 6.0, 7)
        done("gone", lease.name)
        ledger.close_run(run, Outcome.SUCCEEDED, "", 7.0)
        done("closed", run)
"""
ORDER = [AttemptState.INTENT, AttemptState.RENTED, AttemptState.READY, AttemptState.DESTROYING, AttemptState.GONE]


def python(code: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *args], stdout=subprocess.PIPE, text=True)


def test_kill_9_at_random_moments_loses_nothing_that_was_confirmed(settings: Settings) -> None:
    settings.home.mkdir(parents=True)
    rnd = random.Random(20261201)
    confirmed: list[list[str]] = []
    kills = 12
    for kill in range(kills):
        writer = python(WRITER, str(settings.home), str(kill * 1000))
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        # By what it has written and not by the clock, which on a busy machine would kill writers that wrote nothing.
        confirmed += [writer.stdout.readline().split() for _ in range(rnd.randrange(3, 20))]
        time.sleep(rnd.uniform(0.0, 0.02))
        writer.send_signal(signal.SIGKILL)
        # Lines that were complete in the pipe when it died were confirmed; half a line was not.
        confirmed += [line.split() for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()

    ledger = open_ledger(settings)
    runs = {record.run: record for record in ledger.runs()}
    attempts = {record.lease_name: record for run in runs for record in ledger.attempts(run)}
    for step, name in (words for words in confirmed if len(words) == 2):
        if step == "run":
            assert name in runs
        elif step == "artifacts":
            assert [artifact.path for artifact in ledger.artifacts(name)] == ["a", "b", "c"]
        elif step == "closed":
            assert runs[name].closed == 7.0
        else:
            # At least as far as it was confirmed; one step further is the state after the call it died in.
            assert ORDER.index(attempts[name].state) >= ORDER.index(AttemptState(step))
    for record in attempts.values():
        whole = {
            AttemptState.INTENT: (None, None, None),
            AttemptState.RENTED: (3.0, None, None),
            AttemptState.READY: (3.0, 4.0, None),
            AttemptState.DESTROYING: (3.0, 4.0, None),
            AttemptState.GONE: (3.0, 4.0, 6.0),
        }
        assert (record.rented, record.ready, record.gone) == whole[record.state], "half a write"
        assert (record.receipt is None) == (record.state is not AttemptState.GONE)
    for run in runs:
        assert len(ledger.artifacts(run)) in (0, 3), "half a list of artifacts"
    ledger.open_run(run_record("demo-1202-zzzzz"))  # and it can still be written to
    ledger.close()


RACER = """
    import sys, time
    from pathlib import Path
    from pennypod.errors import FencedError
    from pennypod.ledger import open_ledger
    from pennypod.model.ids import Lease
    from pennypod.model.offer import Offer
    from pennypod.settings import Settings

    home, me, start, runs = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4].split(",")
    ledger = open_ledger(Settings(home=home, database_url=f"sqlite:///{home / 'ledger.sqlite3'}"))
    ledger.runs()
    time.sleep(max(0.0, start - time.time()))
    for run in runs:
        try:
            ledger.open_attempt(
                Lease(run, int(me), 100, "aaaaa"), Offer("fake", "o", "m", "CPU", 1, 1, 20), renter=me, at=1.0
            )
        except FencedError:
            continue
        print(run)
"""


def test_of_several_processes_exactly_one_gets_to_rent_for_a_run(settings: Settings) -> None:
    ledger = open_ledger(settings)
    runs = [f"demo-1201-{letter}aaaa" for letter in "abcdefghijklmnop"]
    for run in runs:
        ledger.open_run(run_record(run))
    racers = [python(RACER, str(settings.home), str(me), str(time.time() + 2.5), ",".join(runs)) for me in (1, 2, 3)]
    won = [(me, run) for me, racer in enumerate(racers, start=1) for run in racer.communicate()[0].split()]
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert sorted(run for _, run in won) == runs
    for run in runs:
        (attempt,) = ledger.attempts(run)
        assert (int(attempt.renter), run) in won
    ledger.close()


def test_fence_and_rent_at_once_never_leave_both_a_fence_and_a_later_intent(settings: Settings) -> None:
    ledger = open_ledger(settings)
    runs = [f"demo-1201-{letter}bbbb" for letter in "abcdefghijklmnop"]
    for run in runs:
        ledger.open_run(run_record(run))
    racer = python(RACER, str(settings.home), "1", str(time.time() + 1.5), ",".join(runs))
    time.sleep(1.5)
    seen_by_fence = {}
    for run in runs:
        ledger.fence(run, "taken away")
        seen_by_fence[run] = len(ledger.attempts(run))
    won = racer.communicate()[0].split()
    # Whoever fences and then looks must see every intent there will ever be: otherwise a pod could be missed.
    assert {run: len(ledger.attempts(run)) for run in runs} == seen_by_fence
    assert sorted(won) == sorted(run for run, count in seen_by_fence.items() if count)
    ledger.close()


def test_final_states_are_exactly_those_with_proof() -> None:
    assert set(FINAL_STATES) == {AttemptState.GONE, AttemptState.NEVER}


def test_receipts_survive_as_json(ledger: Ledger) -> None:
    ledger.open_run(run_record())
    attempt = open_attempt(ledger)
    ledger.record_pod(attempt.id, "pod-1", NOW)
    receipt = {"proof": [{"at": 1.5, "answer": "absent: «gone»"}], "cost_micros": 2**40}
    ledger.record_gone(attempt.id, receipt, NOW, 2**40)
    (record,) = ledger.attempts(RUN)
    assert record.receipt is not None
    assert record.receipt | receipt == record.receipt
    assert seal_problems(json.loads(json.dumps(record.receipt))) == []
    assert record.estimated_micros == 2**40


def test_opening_again_and_again_in_one_process_still_sees_what_others_write(settings: Settings) -> None:
    """Closing a descriptor of the file would drop SQLite's locks in this process; then old pages are read for ever."""
    opened = [open_ledger(settings)]
    opened[0].runs()
    writer = "from pennypod.ledger import *; from pennypod.settings import *; import sys; from pathlib import Path\n"
    writer += "ledger = open_ledger(Settings(Path(sys.argv[1]), sys.argv[2]))\n"
    writer += "ledger.open_run(RunRecord(sys.argv[3], 'demo', '1:1', 1.0, '/tmp')); ledger.close()\n"
    for count, letter in enumerate("abcdef", start=1):
        process = python(writer, str(settings.home), settings.database_url, f"demo-1201-{letter * 5}")
        assert process.wait(timeout=60) == 0
        opened.append(open_ledger(settings))
        assert [len(ledger.runs()) for ledger in opened] == [count] * len(opened)
    for ledger in opened:
        ledger.close()


def test_a_run_whose_command_died_before_it_rented_is_closed_and_no_other(ledger: Ledger) -> None:
    for letter, controller in (("a", "1:1"), ("b", "2:2"), ("c", "1:1")):
        ledger.open_run(run_record(f"demo-1201-{letter * 5}", controller=controller))
    rented = open_attempt(ledger, run="demo-1201-ccccc")
    closed = ledger.close_abandoned(lambda controller: controller == "2:2", NOW + 60)
    assert closed == ["demo-1201-aaaaa"]
    assert ledger.run("demo-1201-aaaaa").outcome == Outcome.CANCELLED
    assert "before anything was rented" in (ledger.run("demo-1201-aaaaa").reason or "")
    assert ledger.run("demo-1201-bbbbb").closed is None
    assert not next(a for a in ledger.attempts("demo-1201-ccccc") if a.id == rented.id).final
    with pytest.raises(FencedError):
        open_attempt(ledger, run="demo-1201-aaaaa")


@pytest.mark.skipif(postgres.binaries() is None, reason="PostgreSQL is not installed")
def test_in_a_shared_ledger_only_who_can_be_judged_from_here_is(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    with subprocess.Popen(["sleep", "60"]) as child:
        dead = processes.identity(child.pid)
        child.kill()
    pid, ticks, place = dead.split(":")
    elsewhere = f"{pid}:{ticks}:ffffffff.{place.partition('.')[2]}"
    controllers = {"a": dead, "b": elsewhere, "c": f"{pid}:{ticks}", "d": processes.own_identity()}
    with postgres.server() as url:
        ledger = open_ledger(settings_in(tmp_path, url))
        for letter, controller in controllers.items():
            ledger.open_run(run_record(f"demo-1201-{letter * 5}", controller=controller))
        assert ledger.close_abandoned(processes.is_alive, NOW + 60) == ["demo-1201-aaaaa"]
        assert ledger.close_abandoned(processes.is_alive, NOW + 60) == []
        ledger.close()
