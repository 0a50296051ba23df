"""What a person sees: live lines, thinned progress, status lines, failures in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pennypod.console import (
    Event,
    Failure,
    Failures,
    Live,
    RunView,
    Tail,
    Thinner,
    describe,
    failure_of,
    format_bytes,
    format_seconds,
    frame,
    one_line,
    parse_event,
)
from pennypod.events import Events
from terminal import Screen

RUN = "demo-1201-abcde"
OTHER = "demo-1201-fghij"


def event(text: str = "x", stage: str = "training", at: float = 100.0, run: str = RUN, **numbers: Any) -> Event:
    return Event(at, run, stage, text, numbers)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_what_events_writes_is_what_parse_event_reads(tmp_path: Path) -> None:
    Events(tmp_path, RUN).emit("dataset", "sending", bytes=5, total_bytes=10)
    (line,) = Tail(tmp_path / "events.jsonl").new_lines()
    read = parse_event(line)
    assert read is not None
    assert (read.run, read.stage, read.text, read.numbers) == (
        RUN,
        "dataset",
        "sending",
        {"bytes": 5, "total_bytes": 10},
    )


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'{"t": 1}',
        b'{"t": "soon", "run": "demo-1201-abcde", "stage": "rent", "text": ""}',
        b'{"t": 1, "run": "../../etc", "stage": "rent", "text": ""}',
        b"\xff\xfe",
    ],
)
def test_a_line_that_is_no_event_is_none(line: bytes) -> None:
    assert parse_event(line) is None


@given(st.lists(st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b" ")), max_size=20), st.data())
def test_a_tail_gives_every_line_once_whole_however_the_writes_are_cut(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("tail") / "events.jsonl"
    tail = Tail(path)
    assert tail.new_lines() == []  # it need not be there yet
    whole = b"".join(line + b"\n" for line in lines)
    seen: list[bytes] = []
    while whole:
        count = data.draw(st.integers(1, len(whole)))
        with path.open("ab") as file:
            file.write(whole[:count])
        whole = whole[count:]
        seen += tail.new_lines()
    assert seen == lines
    assert tail.new_lines() == []


# --- seconds and dollars ----------------------------------------------------------------------------------------------


def test_dollars_run_from_the_question_to_the_proof_of_the_end() -> None:
    view = RunView(RUN, 100.0)
    view.take(event("asking", "rent", 110.0, usd_per_h=3.6))
    assert view.usd(115.0) == 0.0  # asked, not rented
    view.take(event("rented", "rent", 112.0, pod_id="a"))
    assert view.usd(120.0) == pytest.approx(0.010)
    view.take(event("destroying", "teardown", 125.0, pod_id="a"))
    assert view.usd(130.0) == pytest.approx(0.020)
    view.take(event("gone", "teardown", 131.0, pod_id="a", gone=True, usd=0.021))
    assert view.usd(9999.0) == pytest.approx(0.021)
    assert view.over


def test_a_second_rung_adds_to_the_first() -> None:
    view = RunView(RUN, 100.0)
    for start, price in ((100.0, 3.6), (200.0, 7.2)):
        view.take(event("asking", "rent", start, usd_per_h=price))
        view.take(event("rented", "rent", start + 1, pod_id="a"))
        assert not view.over
        if start == 100.0:
            view.take(event("gone", "teardown", 110.0, pod_id="a", gone=True, usd=0.01))
    assert view.usd(205.0) == pytest.approx(0.01 + 0.01)


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_event", "text"),
    [
        (event("sending data", bytes=12_345_678), "sending data 12.3 MB"),
        (
            event("sending data", bytes=1_000, total_bytes=2_000_000, rate_bytes_per_s=5e6),
            "sending data 1.0 kB of 2.0 MB, 5.0 MB/s",
        ),
        (event("sent 12 MB of 30 MB", bytes=12_000_000, total_bytes=30_000_000), "sent 12 MB of 30 MB"),
        (event("loss 0.3", epoch=2, epochs=9), "epoch 2/9: loss 0.3"),
        (event("loss 0.3", epoch=2), "epoch 2: loss 0.3"),
        (event("Epoch 2/9 loss 0.3", epoch=2, epochs=9), "Epoch 2/9 loss 0.3"),
        (event("a\x1b[31m red\r\nline\tof a log"), "a [31m red line of a log"),
    ],
)
def test_an_events_text_says_its_numbers_once(given_event: Event, text: str) -> None:
    assert describe(given_event) == text


def test_a_line_never_holds_a_control_character_or_grows_without_end() -> None:
    for text in ("\x00\x07\x1b]0;title\x07", "x" * 10_000, "a\u0085b\x9bc"):
        shown = one_line(text)
        assert len(shown) <= 600
        assert all(ord(char) >= 32 and not 0x7F <= ord(char) <= 0x9F for char in shown)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_300_000, "12.3 MB"), (5e13, "50000.0 GB")]
)
def test_bytes_are_readable(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0s"), (0.9, "0s"), (59.9, "59s"), (60, "1m00s"), (3599, "59m59s"), (7620, "2h07m")]
)
def test_seconds_are_readable(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_progress_is_thinned_and_changes_are_not() -> None:
    thinner = Thinner(every_s=5.0)
    shown = [
        now
        for now in range(20)
        if thinner.lets_through(event("sending", "dataset", bytes=now * 10, total_bytes=190), float(now))
    ]
    assert shown == [0, 5, 10, 15, 19]  # the last one is complete, so it is not held back
    assert thinner.lets_through(event("uploaded", "dataset"), 19.0)
    assert not thinner.lets_through(event("uploaded", "dataset"), 19.5)  # the very same words again
    assert thinner.lets_through(event("uploaded", "dataset", run=OTHER), 19.5)
    assert thinner.lets_through(event("one", "training", epoch=1), 19.6)  # another stage has its own time


def test_held_back_progress_is_shown_when_nothing_newer_comes() -> None:
    thinner = Thinner(every_s=5.0)
    assert thinner.lets_through(event("a", epoch=1), 0.0)
    assert not thinner.lets_through(event("b", epoch=2), 1.0)
    assert not thinner.lets_through(event("c", epoch=3), 2.0)
    assert thinner.due(4.9) == []
    assert [held.text for held in thinner.due(5.0)] == ["c"]
    assert thinner.due(100.0) == []


# --- live -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("color", [False, True])
def test_status_lines_update_in_place_and_permanent_lines_stay(color: bool) -> None:
    screen = Screen()
    screen.write("before\n")
    screen.write(frame(["one"], ["status a", "status b"], color))
    assert screen.text == ["before", "one", "status a", "status b"]
    screen.write(frame(["two"], ["s a", "s b"], color))
    assert screen.text == ["before", "one", "two", "s a", "s b"]
    screen.write(frame([], [], color))
    screen.write("after\n")
    assert screen.text == ["before", "one", "two", "after"]


def test_color_only_when_asked_for() -> None:
    assert "m" not in frame([], ["0"], color=False).replace("\x1b[J", "").replace("\x1b[1A", "")
    assert "\x1b[2m" in frame([], ["0"], color=True)


class World:
    def __init__(self, home: Path, **options: Any) -> None:
        self.home = home
        self.screen = Screen()
        self.written: list[str] = []
        self.live = Live(home, self.write, since=100.0, **options)

    def write(self, text: str) -> None:
        self.written.append(text)
        self.screen.write(text)

    def emit(self, stage: str, text: str, at: float, run: str = RUN, **numbers: Any) -> None:
        folder = self.home / run
        folder.mkdir(exist_ok=True)
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"t": at, "run": run, "stage": stage, "text": text, **numbers}) + "\n")


def test_plain_lines_of_every_followed_run_and_of_no_other(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.emit("rent", "of yesterday", 50.0)
    world.emit("rent", "asking", 101.0, usd_per_h=3.6)
    world.emit("rent", "somebody else's", 101.0, run=OTHER)
    world.live.follow(RUN)
    world.live.follow(RUN)
    world.live.tick(102.0)
    world.emit("rent", "rented", 103.0, pod_id="a")
    world.emit("training", "loss 1", 111.0, epoch=1, epochs=3)
    world.emit("training", "loss 2", 112.0, epoch=2, epochs=3)
    world.live.tick(112.0)
    world.live.tick(117.0)
    assert world.screen.text == [
        f"{RUN}      1s  $0.0000  rent       asking",
        f"{RUN}      3s  $0.0020  rent       rented",
        f"{RUN}     11s  $0.0100  training   epoch 1/3: loss 1",
        f"{RUN}     12s  $0.0110  training   epoch 2/3: loss 2",
    ]
    assert "\x1b" not in "".join(world.written)


def test_on_a_terminal_progress_lives_in_one_line_per_run_that_fits_the_width(tmp_path: Path) -> None:
    world = World(tmp_path, terminal=True, size=lambda: (60, 24))
    for run in (RUN, OTHER):
        world.live.follow(run)
        world.emit("rent", f"asking for {run}", 101.0, run=run, usd_per_h=3.6)
        world.emit("rent", "rented", 101.0, run=run, pod_id="a")
    world.live.tick(102.0)
    for number in range(50):
        world.emit("dataset", "sending " + "x" * 100, 103.0 + number, bytes=number, total_bytes=49)
        world.live.tick(103.0 + number)
    rows = world.screen.text
    assert rows[:4] == [
        f"{RUN}      1s  $0.0000  rent       asking for {RUN}",
        f"{RUN}      1s  $0.0000  rent       rented",
        f"{OTHER}      1s  $0.0000  rent       asking for {OTHER}",
        f"{OTHER}      1s  $0.0000  rent       rented",
    ]
    assert rows[4].startswith(f"{RUN}     52s  $0.0510  dataset    sending xxx")
    assert rows[5].startswith(f"{OTHER}     52s  $0.0510  rent       rented")
    assert len(rows) == 6
    assert max(len(row) for row in rows[4:]) < 60
    world.live.clear()
    assert len(world.screen.text) == 4


def test_more_runs_than_rows_are_counted_and_not_drawn(tmp_path: Path) -> None:
    world = World(tmp_path, terminal=True, size=lambda: (80, 8))
    runs = [f"demo-1201-{letter}aaaa" for letter in "abcdefgh"]
    for run in runs:
        world.live.follow(run)
        world.emit("dataset", "sending", 101.0, run=run, bytes=1)
    world.live.tick(102.0)
    assert [row.split()[0] for row in world.screen.text] == [*runs[:4], "..."]
    assert world.screen.text[-1] == "... and 4 more runs"


def test_a_terminal_is_not_written_to_when_nothing_has_changed(tmp_path: Path) -> None:
    world = World(tmp_path, terminal=True)
    world.live.follow(RUN)
    world.emit("rent", "asking", 101.0)
    world.live.tick(102.0)
    count = len(world.written)
    world.live.tick(102.4)
    assert len(world.written) == count
    world.live.tick(103.1)
    assert len(world.written) == count + 1


def test_the_status_line_names_the_task_until_an_event_says_more(tmp_path: Path) -> None:
    world = World(tmp_path, terminal=True)
    world.live.follow(RUN)
    world.live.at_task(RUN, "pod", "Rent a pod")  # its events say which of its three stages it is in
    world.live.tick(101.0)
    assert world.screen.text == []
    world.live.at_task(RUN, "bootstrap", "Install the packages")
    world.live.at_task(OTHER, "bootstrap", "of a run that nobody follows")
    world.live.tick(102.0)
    assert world.screen.text == [f"{RUN}      2s  $0.0000  bootstrap  Install the packages"]
    world.emit("bootstrap", "package 3 of 9", 103.0, bytes=1)
    world.live.tick(103.0)
    assert world.screen.text == [f"{RUN}      3s  $0.0000  bootstrap  package 3 of 9 1 B"]


def test_a_run_that_is_over_has_no_status_line(tmp_path: Path) -> None:
    world = World(tmp_path, terminal=True)
    world.live.follow(RUN)
    world.emit("rent", "rented", 101.0, pod_id="a")
    world.live.tick(102.0)
    world.emit("teardown", "gone", 103.0, pod_id="a", gone=True, usd=0.1)
    world.live.tick(104.0)
    assert world.screen.text == [
        f"{RUN}      1s  $0.0000  rent       rented",
        f"{RUN}      3s  $0.1000  teardown   gone",
    ]


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (
            {"msg": "no offer fits", "failure": {"code": "no_capacity", "message": "no offer fits", "details": {}}},
            "error: no offer fits [no_capacity]",
        ),
        ({"msg": "two\nlines", "failure": {"code": "input", "message": "two\nlines"}}, "error: two lines [input]"),
        (
            {
                "msg": "Validation of arguments failed:\nmissing required arguments: r_a",
                "argument_errors": ["missing required arguments: r_a", "value of r_b must be one of: x, y, got: z"],
                "validate_args_context": {"type": "role", "name": "bootstrap", "argument_spec_name": "main"},
            },
            "error: role bootstrap: missing required arguments: r_a; value of r_b must be one of: x, y, got: z",
        ),
        (
            {
                "msg": "Task failed: Finalization of task args for 'bad' failed: Error while resolving value for 'how':"
                " 'nope' is undefined"
            },
            "error: Do it: Error while resolving value for 'how': 'nope' is undefined",
        ),
        ({"msg": "Task failed: Module failed: crashed hard"}, "error: Do it: crashed hard"),
        (
            {"msg": "non-zero return code", "rc": 3, "cmd": ["/bin/sh", "-c", "x"], "stderr": "a\nb\n", "stdout": "c"},
            "error: Do it: sh ended with exit status 3: b",
        ),
        (
            {"msg": "non-zero return code", "rc": 1, "cmd": "pip install x", "stderr": "", "stdout": ""},
            "error: Do it: pip ended with exit status 1: it said nothing",
        ),
        (
            {
                "msg": "Module result deserialization failed: x",
                "module_stderr": "Killed\n",
                "module_stdout": "",
                "rc": 137,
            },
            "error: Do it: the module ended without a result: Killed",
        ),
        ({"msg": "the run did not succeed"}, "error: the run did not succeed"),
        ({}, "error: Do it: failed without a reason"),
        (
            {"msg": "One or more items failed", "results": [{"msg": "fine"}, {"failed": True, "msg": "second is bad"}]},
            "error: second is bad",
        ),
    ],
)
def test_a_failure_is_one_line(result: dict[str, Any], told: str) -> None:
    assert str(failure_of(result, "Do it")) == told


@given(st.dictionaries(st.sampled_from(["msg", "stderr", "rc", "cmd", "results", "failure"]), st.text() | st.none()))
def test_no_result_upsets_it(result: dict[str, Any]) -> None:
    told = str(failure_of(result, "Do it"))
    assert told.startswith("error: ")
    assert "\n" not in told


def test_a_failure_is_told_once() -> None:
    failures = Failures()
    assert failures.is_new(Failure("no data", "input"))
    assert not failures.is_new(Failure("no data", "input"))
    assert not failures.is_new(Failure("no data"))  # repeated by a later task that has only the words
    assert failures.is_new(Failure("other"))


def test_a_value_of_the_wrong_type_is_told_without_the_names_of_classes() -> None:
    wrong = "argument '{}' is of type str and we were unable to convert to {}: <class 'x._Tagged'> cannot be converted"
    both = failure_of({"argument_errors": [wrong.format("a_usd", "float"), wrong.format("b", "int")]})
    assert both.message == "a_usd must be a number; b must be a whole number"
    assert failure_of({"msg": wrong.format("c", "float")}).message == "c must be a number"
