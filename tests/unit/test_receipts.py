"""Receipts: whatever is changed in one after it was sealed, `pennypod verify` says no."""

from __future__ import annotations

import copy
import json
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fakes import FakeClock, FakeLogin, FakeProvider, offer
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pennypod.cli import main
from pennypod.cli.app import App
from pennypod.errors import UnprovenError
from pennypod.ledger import RunRecord, open_ledger
from pennypod.model.ids import Lease
from pennypod.model.pod import Pod, PodState
from pennypod.receipts import ReceiptError, Sealer, check_chain, check_document, content_problems, read_document
from pennypod.rental import Rental, RentRequest
from pennypod.report import write_results
from pennypod.settings import Settings
from pennypod.sweep import survey, sweep

RUN = "demo-1201-abcde"


def quiet(*_args: object, **_numbers: object) -> None:
    return None


class World:
    """A home with a ledger, and runs that were rented, trained and ended in it."""

    def __init__(self, home: Path) -> None:
        self.clock = FakeClock()
        self.provider = FakeProvider(self.clock)
        self.settings = Settings(home=home, database_url=f"sqlite:///{home / 'ledger.sqlite3'}")
        self.ledger = open_ledger(self.settings)
        self.rental = Rental({"fake": self.provider}, self.ledger, self.clock)
        self.artifacts = home / "artifacts"

    def finished(self, run: str = RUN, pods: int = 1) -> Path:
        """A run with `pods` proven ends; its receipt.json."""
        self.ledger.open_run(RunRecord(run, "demo", "1:1", self.clock.now(), str(self.artifacts / run)))
        for _ in range(pods):
            request = RentRequest(run, [offer(1)], {}, 20, self.clock.now() + 600, "key", "1:1")
            self.rental.rent(request, FakeLogin(), quiet, lambda: None)
            self.clock.sleep(33.25)
            for attempt in self.ledger.attempts(run):
                self.rental.destroy(attempt, outcome="done", reason="the run is over", report=quiet)
        return self.written(run)

    def written(self, run: str = RUN) -> Path:
        write_results(self.ledger, run, self.clock.now())
        return self.artifacts / run / "receipt.json"

    def verify(self, *arguments: str | Path, settings: Settings | None = None) -> int:
        app = App(settings=settings or self.settings, clock=self.clock, providers=lambda _s: {"fake": self.provider})
        code = main.main(["verify", *map(str, arguments)], standalone_mode=False, obj=app)
        assert isinstance(code, int)
        return code

    def sql(self, statement: str, **values: Any) -> None:
        engine = sa.create_engine(self.settings.database_url)
        with engine.begin() as connection:
            connection.execute(sa.text(statement), values)
        engine.dispose()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a receipt.json with two pods."""
    return World(tmp_path_factory.mktemp("home")).finished(pods=2).read_text()


def problems_of(text: str | bytes, folder: Path) -> list[str]:
    """What an offline check of a file with this content finds."""
    file = folder / "receipt.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        document, as_written = read_document(file)
    except ValueError as exc:
        return [str(exc)]
    return check_document(document, as_written=as_written).problems


# --- offline ----------------------------------------------------------------------------------------------------------


def test_a_receipt_checks_where_nothing_else_is(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = world.finished(pods=2)
    elsewhere = Settings(home=tmp_path / "empty", database_url=f"sqlite:///{tmp_path / 'empty' / 'ledger.sqlite3'}")
    assert world.verify(receipt, settings=elsewhere) == 0
    said = capsys.readouterr().out
    assert f"{RUN}: 2 pods proven gone" in said
    assert "unknown here" in said
    assert not elsewhere.home.exists(), "checking makes no key and no ledger"


def test_it_says_what_was_asked_every_answer_times_price_and_total(world: World) -> None:
    (pod,) = json.loads(world.finished().read_text())["pods"]
    assert {step["asked"] for step in pod["proof"]} == {"destroy", "is it there", "is it listed"}
    assert all(step["answer"] for step in pod["proof"])
    assert pod["rented_at"] < pod["gone_at"] < pod["proven_at"]
    assert pod["price_usd_per_h"] == 0.2
    assert pod["cost_micros"] == -(-200_000 * (pod["gone_at"] - pod["rented_at"]) // 3600)
    assert pod["absence"] == {"checks": 3, "spacing_s": 1, "views": ["is it there", "is it listed"]}
    assert pod["reason"] == "the run is over"
    assert content_problems(pod) == []


@hypothesis_settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_changed_byte_is_noticed(sample: str, tmp_path: Path, data: st.DataObject) -> None:
    raw = sample.encode()
    place = data.draw(st.integers(0, len(raw) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[place]))
    assert problems_of(raw, tmp_path) == []
    assert problems_of(raw[:place] + bytes([other]) + raw[place + 1 :], tmp_path) != []


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_byte_added_or_taken_is_noticed(sample: str, tmp_path: Path, data: st.DataObject) -> None:
    raw = sample.encode()
    place = data.draw(st.integers(0, len(raw) - 1))
    added = data.draw(st.binary(min_size=1, max_size=3))
    assert problems_of(raw[:place] + added + raw[place:], tmp_path) != []
    assert problems_of(raw[:place] + raw[place + 1 :], tmp_path) != []
    assert problems_of(raw[:place], tmp_path) != []


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_in(inner, (*path, key))


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-5, 10), st.floats(0, 10), st.text(max_size=3), st.just([]))


@hypothesis_settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_changed_missing_or_doubled_field_is_noticed(sample: str, tmp_path: Path, data: st.DataObject) -> None:
    """Even when the file is written anew, neatly."""
    document = json.loads(sample)
    path = data.draw(st.sampled_from(list(paths_in(document))[1:]))
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    before = holder[path[-1]]
    kind = data.draw(st.sampled_from(["change", "drop", "double"]))
    if kind == "change":
        holder[path[-1]] = data.draw(VALUES.filter(lambda value: json.dumps(value) != json.dumps(before)))
    elif kind == "drop":
        del holder[path[-1]]
    elif isinstance(holder, list):
        holder.insert(path[-1], copy.deepcopy(before))
    else:
        holder[f"{path[-1]}2"] = before
    assert problems_of(json.dumps(document, indent=2) + "\n", tmp_path) != []


def sealed_anew(world: World, change: Any) -> list[str]:
    """The problems of a receipt that says something else, sealed by the very same key: only its content can tell."""
    document = json.loads(world.finished().read_text())
    pod = document["pods"][0]
    change(pod)
    document["pods"][0] = world.ledger.sealer.seal(pod)
    return check_document(world.ledger.sealer.seal(document), as_written=True).problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda pod: pod.update(cost_micros=pod["cost_micros"] - 1), "price times time"),
        (lambda pod: pod.update(billed_seconds=1.0), "billed_seconds"),
        (lambda pod: pod.update(gone_at=pod["gone_at"] - 5), "gone_at"),
        (lambda pod: pod.update(proven_at=pod["proven_at"] + 5), "times contradict"),
        (lambda pod: pod.update(rented_at=pod["gone_at"] + 5), "times contradict"),
        (lambda pod: pod["proof"].pop(), "does not end with them"),
        (lambda pod: pod["proof"].pop(1), "does not end with them"),
        (lambda pod: pod["proof"].pop(0), "nobody asked for the end"),
        (lambda pod: pod["proof"][-1].update(answer="still listed"), "answers of absence"),
        (lambda pod: pod["proof"][2].update(at=pod["proof"][2]["at"] + 1000), "go back"),
        (lambda pod: [step.update(at=pod["proof"][0]["at"]) for step in pod["proof"]], "apart"),
        (lambda pod: pod["absence"].update(checks=1), "absence needs"),
        (lambda pod: pod["absence"].update(views=["is it there"]), "absence needs"),
        (lambda pod: pod["absence"].update(checks=4), "claims 4 checks"),
        (lambda pod: pod.update(run="demo-1201-other"), "another run"),
        (lambda pod: pod.pop("meter"), "does not say meter"),
        (lambda pod: pod.update(comment="all well"), "says comment"),
        (lambda pod: pod.update(cost_micros="5"), "no whole number"),
    ],
)
def test_what_does_not_agree_is_noticed_whoever_sealed_it(world: World, change: Any, problem: str) -> None:
    assert any(problem in found for found in sealed_anew(world, change))


def test_a_lost_pod_has_cost_at_least_what_its_receipt_says(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    world.ledger.open_run(RunRecord(RUN, "demo", "1:1", world.clock.now(), str(world.artifacts / RUN)))
    dear = replace(offer(1), traffic_down_micros_per_gb=30_000)
    request = RentRequest(RUN, [dear], {}, 20, world.clock.now() + 600, "key", "1:1")
    world.rental.rent(request, FakeLogin(), quiet, lambda: None)
    world.clock.sleep(60)
    world.provider.live.clear()  # evicted
    [attempt] = world.ledger.attempts(RUN)
    world.rental.destroy(attempt, outcome="done", reason="lost", report=lambda _stage, text, **_n: said.append(text))
    path = world.written()
    assert json.loads(path.read_text())["pods"][0]["traffic_known"] is False
    assert json.loads((path.parent / "run.json").read_text())["traffic_known"] is False
    assert said[-1].endswith(" and its traffic, which it could no longer tell")
    assert world.verify(path) == 0
    assert "1 pod proven gone, at least $" in capsys.readouterr().out


def test_receipts_from_before_traffic_was_judged_still_hold(world: World) -> None:
    def older(pod: dict[str, Any]) -> None:
        del pod["traffic_known"]

    def odd(pod: dict[str, Any]) -> None:
        pod["traffic_known"] = "perhaps"

    [pod] = json.loads(world.finished().read_text())["pods"]
    older(pod)
    assert content_problems(pod) == []
    odd(pod)
    assert content_problems(pod) == ["traffic_known is neither true nor false"]


def test_a_receipt_that_nothing_was_done_to_is_sealed_anew_without_a_problem(world: World) -> None:
    assert sealed_anew(world, lambda pod: None) == []


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"run": "x", "pods": []}', "[" * 100_000, "\x00\xff"])
def test_what_is_no_receipt_is_called_that(world: World, tmp_path: Path, text: str) -> None:
    file = tmp_path / "receipt.json"
    file.write_text(text)
    assert world.verify(file) == 1


def test_a_receipt_without_seals_is_not_believed(world: World, tmp_path: Path) -> None:
    document = json.loads(world.finished().read_text())
    file = tmp_path / "old.json"
    file.write_text(json.dumps({"run": RUN, "pods": document["pods"]}, indent=2) + "\n")
    assert world.verify(file) == 1


# --- keys -------------------------------------------------------------------------------------------------------------


def test_the_key_is_for_its_owner_alone_and_stays_the_same(world: World) -> None:
    world.finished()
    key = world.settings.home / "receipt-key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert Sealer(world.settings.home).public_key == world.ledger.sealer.public_key
    assert list(world.settings.home.glob(".receipt-key*")) == []


def test_the_private_key_is_in_no_receipt_and_no_ledger(world: World) -> None:
    receipt = world.finished()
    secret = (world.settings.home / "receipt-key").read_text().strip()
    assert secret not in receipt.read_text()
    assert world.settings.ledger_file is not None
    assert secret.encode() not in world.settings.ledger_file.read_bytes()


def test_processes_that_need_a_key_at_once_get_the_same_one(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from pennypod.receipts import Sealer
        sys.stdin.read()
        print(Sealer(Path(sys.argv[1])).seal({"a": 1})["seal"]["public_key"])
    """
    argv = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "home")]
    makers = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    for maker in makers:
        assert maker.stdin is not None
        maker.stdin.close()
        maker.stdin = None
    keys = {maker.communicate(timeout=60)[0] for maker in makers}
    assert len(keys) == 1
    assert keys != {""}


def test_whose_key_it_is_is_told(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    receipt = world.finished()
    key = world.ledger.sealer.public_key
    assert key is not None
    assert world.verify(receipt) == 0
    assert "this home's own" in capsys.readouterr().out
    assert world.verify(receipt, "--public-key", key, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["receipts"]
    assert found["keys"] == [{"public_key": key, "whose": "given"}]
    file = tmp_path / "key.pub"
    file.write_text(key + "\n")
    assert world.verify(receipt, "--public-key", str(file)) == 0


def test_a_receipt_by_another_key_than_the_one_given_is_refused(world: World, tmp_path: Path) -> None:
    """Whoever changes a receipt can seal it with a key of their own; not with the owner's."""
    key = world.finished() and world.ledger.sealer.public_key
    forger = Sealer(tmp_path / "forger")
    document = json.loads(world.written().read_text())
    document["pods"] = [forger.seal(pod) for pod in document["pods"]]
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(forger.seal(document), indent=2) + "\n")
    assert world.verify(forged, "--offline") == 0
    assert world.verify(forged, "--offline", "--public-key", str(key)) == 1
    assert world.verify(forged) == 1, "the ledger here has another receipt in that place"


def forged(world: World, folder: Path, sealer: Sealer, **changes: Any) -> Path:
    """The run's receipt.json with some of it changed, sealed anew."""
    document = {**json.loads(world.written().read_text()), **changes}
    document["pods"] = [sealer.seal(pod) for pod in document["pods"]]
    file = folder / "forged.json"
    file.write_text(json.dumps(sealer.seal(document), indent=2) + "\n")
    return file


@pytest.mark.parametrize("changes", [{"pods": []}, {}, {"pods": [], "written_at": 0}], ids=["no pods", "same", "early"])
def test_a_forgery_for_a_run_that_the_ledger_knows_is_no_before_anything_else(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    world.finished()
    forger = Sealer(tmp_path / "forger")
    assert world.verify(forged(world, tmp_path, forger, **changes)) == 1
    said = capsys.readouterr().out
    assert said.startswith("NO ")
    assert "yes" not in said
    assert f"it is signed with {forger.public_key}, and neither this home nor its ledger signs" in said
    assert world.verify(tmp_path / "forged.json", "--json") == 1
    assert [receipt["ok"] for receipt in json.loads(capsys.readouterr().out)["receipts"]] == [False]


def test_a_receipt_by_a_given_key_must_tell_of_the_pods_that_the_ledger_knows(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.finished()
    forger = Sealer(tmp_path / "forger")
    file = forged(world, tmp_path, forger, pods=[])
    assert world.verify(file, "--public-key", str(forger.public_key)) == 1
    assert capsys.readouterr().out.startswith(
        f"NO   {file}: {world.ledger.attempts(RUN)[0].lease_name}: the ledger has"
    )


def test_a_pod_that_still_bills_cannot_be_left_out(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.finished()
    request = RentRequest(RUN, [offer(1)], {}, 20, world.clock.now() + 600, "key", "1:1")
    tenancy = world.rental.rent(request, FakeLogin(), quiet, lambda: None)
    own = world.ledger.sealer
    assert world.verify(forged(world, tmp_path, own)) == 3
    capsys.readouterr()
    assert world.verify(forged(world, tmp_path, own, open=[])) == 1
    assert f"{tenancy.attempt.lease_name}: the ledger does not call this pod gone" in capsys.readouterr().out


def test_an_older_copy_of_a_run_that_went_on_holds(world: World, tmp_path: Path) -> None:
    copied = tmp_path / "first.json"
    copied.write_text(world.finished().read_text())
    world.clock.sleep(5)
    request = RentRequest(RUN, [offer(1)], {}, 20, world.clock.now() + 600, "key", "1:1")
    tenancy = world.rental.rent(request, FakeLogin(), quiet, lambda: None)
    assert world.verify(copied) == 0, "it was written before the second pod"
    world.rental.destroy(tenancy.attempt, outcome="done", reason="over", report=quiet)
    assert world.verify(copied) == 0
    assert world.verify(world.written()) == 0


def test_homes_that_share_a_ledger_believe_each_other(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = world.finished()
    other = Settings(home=tmp_path / "other", database_url=world.settings.database_url)
    Sealer(other.home).seal({})
    assert world.verify(receipt, settings=other) == 0
    assert "unknown here" not in capsys.readouterr().out


@pytest.mark.parametrize("target", ["demo-1201-zzzzz", "demo-9999-x1", "nonesuch"])
def test_a_run_that_nobody_knows_is_called_that_and_the_others_are_checked_all_the_same(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    receipt = world.finished()
    assert world.verify(target, receipt) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"NO   {target}: the ledger has no such run")
    assert f"yes  {receipt}" in said
    elsewhere = Settings(home=tmp_path / "empty", database_url=f"sqlite:///{tmp_path / 'empty' / 'ledger.sqlite3'}")
    assert world.verify(target, settings=elsewhere) == 1
    assert "no ledger here" in capsys.readouterr().out
    assert not elsewhere.home.exists(), "asking makes no ledger"


def test_a_key_that_is_none_says_what_to_do(world: World) -> None:
    world.settings.home.mkdir(exist_ok=True)
    (world.settings.home / "receipt-key").write_text("not a key\n")
    with pytest.raises(ReceiptError, match="move it away"):
        Sealer(world.settings.home).seal({})


# --- the chain --------------------------------------------------------------------------------------------------------


def test_every_receipt_of_a_ledger_is_in_one_chain(world: World) -> None:
    first, second = world.finished(), world.finished("demo-1201-fghij", pods=2)
    ledger, rows = world.ledger.receipts()
    assert [seq for seq, _, _ in rows] == [1, 2, 3]
    assert check_chain(ledger, rows) == []
    assert world.verify(first, second, RUN, second.parent) == 0


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM receipts WHERE seq = 1",
        "DELETE FROM receipts WHERE seq = 2",
        "DELETE FROM receipts WHERE seq = 3",
        "UPDATE receipts SET seq = 99 WHERE seq = 2",
        'UPDATE receipts SET document = replace(document, \'"gpu": "CPU"\', \'"gpu": "H100"\') WHERE seq = 2',
        "UPDATE receipts SET hash = 'f' || substr(hash, 2) || 'x' WHERE seq = 2",
        "UPDATE receipts SET seq = -seq; UPDATE receipts SET seq = 4 + seq",
    ],
    ids=["first gone", "middle gone", "last gone", "moved", "changed", "another hash", "swapped"],
)
def test_a_chain_with_a_row_missing_moved_or_changed_is_noticed(
    world: World, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = world.finished(pods=3)
    assert world.verify(receipt) == 0
    for statement in damage.split(";"):
        world.sql(statement)
    assert world.verify(receipt) == 1
    assert "NO" in capsys.readouterr().out
    assert world.verify(receipt, "--offline") == 0


def test_two_receipts_for_one_place_are_noticed(world: World, tmp_path: Path) -> None:
    """A ledger that was put back to an older state hands the same place out again."""
    first = world.finished()
    copied = tmp_path / "first.json"
    copied.write_text(first.read_text())
    world.sql("DELETE FROM receipts")
    world.finished("demo-1201-fghij")
    assert world.verify(copied, world.artifacts / "demo-1201-fghij", "--offline") == 1


# --- what is not proven, and what is not ours by the ledger -----------------------------------------------------------


def test_a_run_with_a_pod_that_is_not_proven_gone_is_no_success(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.finished()
    request = RentRequest(RUN, [offer(1)], {}, 20, world.clock.now() + 600, "key", "1:1")
    world.rental.rent(request, FakeLogin(), quiet, lambda: None)
    world.provider.ignored_destroys = 10_000
    last = world.ledger.attempts(RUN)[-1]
    with pytest.raises(UnprovenError):
        world.rental.destroy(last, outcome="done", reason="over", report=quiet, patience_s=20)
    assert world.verify(world.written()) == 3
    assert last.lease_name in capsys.readouterr().err


def test_a_pod_that_no_ledger_knows_leaves_a_receipt_too(world: World) -> None:
    lease = Lease(RUN, 1, int(world.clock.now()) - 10, "aaaaa")
    pod = Pod("fake", "pod-9", lease.name, PodState.RUNNING, world.clock.now() - 3600, 360_000)
    world.provider.live["pod-9"] = pod
    providers = {"fake": world.provider}
    found = survey(providers, world.ledger, world.clock.now())
    (swept,) = sweep(found, providers, world.ledger, world.clock, dry_run=False, report=quiet)
    assert swept.error == ""
    (file,) = (world.settings.home / "receipts").iterdir()
    (receipt,) = json.loads(file.read_text())["pods"]
    assert (receipt["pod_id"], receipt["run"], receipt["reason"]) == ("pod-9", RUN, "the deadline passed")
    assert receipt["cost_micros"] == pytest.approx(360_000, rel=0.01)
    assert world.verify(file) == 0
    _, rows = world.ledger.receipts()
    assert len(rows) == 1
    world.finished()
    assert world.verify(file) == 0, "nor does it matter that the ledger knows another pod of the run"


def test_a_receipt_that_cannot_be_sealed_leaves_the_pod_on_the_books(world: World) -> None:
    """It is destroyed all the same; what nobody can prove is not called proven."""
    world.ledger.open_run(RunRecord(RUN, "demo", "1:1", world.clock.now(), str(world.artifacts)))
    request = RentRequest(RUN, [offer(1)], {}, 20, world.clock.now() + 600, "key", "1:1")
    tenancy = world.rental.rent(request, FakeLogin(), quiet, lambda: None)
    key = world.settings.home / "receipt-key"
    key.write_text("not a key\n")
    with pytest.raises(ReceiptError):
        world.rental.destroy(tenancy.attempt, outcome="done", reason="over", report=quiet)
    assert world.provider.live == {}
    assert len(world.ledger.pending_attempts()) == 1
    key.unlink()
    world.rental.destroy(world.ledger.attempts(RUN)[0], outcome="done", reason="over", report=quiet)
    assert world.ledger.pending_attempts() == []
