#!/usr/bin/env python3
"""Runs the training command on the pod, inside tmux. Standalone: Python 3.8+, standard library only.

    supervise.py POD_HOME

Reads POD_HOME/launch.json (``{"run", "command", "env", "python"}``, and perhaps ``"callback": {"url", "token"}``), runs
the command in POD_HOME/out, copies its output to POD_HOME/train.log and to its own standard output, and keeps
POD_HOME/status.json true until the very end.

The command's exit code is this program's exit code; 75 = another supervisor works here, 76 = this run was started
before, 78 = it could not be started.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

HEARTBEAT_S = 5.0
# Time a trainer gets between TERM and KILL to write its last checkpoint.
KILL_AFTER_S = 20.0
# Time that processes the command left behind get to finish their output.
DRAIN_S = 2.0
# Both status slots have this size from the first write on, so that a full disk cannot stop a later write.
SLOT_BYTES = 16384
TAIL_BYTES = 2048
CHUNK_BYTES = 65536
# "epoch 3/8", "Epoch [3/8]", and the table of ultralytics: "      1/100      2.31G ..."
EPOCHS = re.compile(rb"(?im)\bepoch\b[\s:=#\[(]*(\d+)\s*(?:/|\bof\b)\s*(\d+)|^ {2,}(\d+)/(\d+) {2,}\S")

EX_BUSY = 75
EX_REPEATED = 76
EX_UNSTARTABLE = 78


class StatusFile:
    """status.json, replaced atomically in two slots of fixed size that swap their names.

    A write goes into the spare slot, whose blocks are already ours, and then becomes status.json by a rename. So no
    reader sees half a status, and no write needs a new block when the disk is full.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.spare = path + ".spare"
        self.old = path + ".old"
        self.errors = 0

    def write(self, fields: dict[str, Any]) -> bool:
        body = json.dumps(fields).encode()
        if len(body) >= SLOT_BYTES:
            body = json.dumps(dict(fields, command=["(too long to show)"], tail="")).encode()
        try:
            self._swap_in(body.ljust(SLOT_BYTES - 1) + b"\n")
        except OSError as exc:
            self.errors += 1
            say("cannot write %s: %s" % (self.path, exc))
            return False
        return True

    def _swap_in(self, data: bytes) -> None:
        slot = os.open(self.spare, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(slot, data[done:], done)
            os.ftruncate(slot, len(data))
        finally:
            os.close(slot)
        kept = self._keep_old()
        os.replace(self.spare, self.path)
        if kept:
            os.replace(self.old, self.spare)

    def _keep_old(self) -> bool:
        try:
            if os.path.exists(self.old):
                os.unlink(self.old)
            os.link(self.path, self.old)
        except OSError:
            return False  # the first write, or a file system without hard links: only the reserve is lost
        return True


class Tee:
    """Copies output to the log and to our terminal. Neither may ever stop the trainer."""

    def __init__(self, log_path: str) -> None:
        self.log_path = log_path
        self.log = -1
        self.lost = 0
        self.lost_now = 0
        self.disk_full = False
        self.total = 0
        self.tail = b""
        self.last_output = time.time()
        self._to_log(b"")  # the log is there from the start, whatever the command prints
        # A terminal that does not keep up (a stopped tmux) must not hold the trainer back.
        os.set_blocking(sys.stdout.fileno(), False)

    def write(self, data: bytes) -> None:
        self.total += len(data)
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        self.last_output = time.time()
        self._to_log(data)
        with contextlib.suppress(OSError):  # no reader, or a slow one: the log is the record
            os.write(sys.stdout.fileno(), data)

    def _to_log(self, data: bytes) -> None:
        done = 0
        try:
            if self.log < 0:
                self.log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            if self.lost_now:
                note = "\n[pennypod] %d bytes of output are missing here: the log could not be written\n"
                os.write(self.log, (note % self.lost_now).encode())
                self.lost_now = 0
            while done < len(data):
                done += os.write(self.log, data[done:])
            self.disk_full = False
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                self.disk_full = True
            self.lost += len(data) - done
            self.lost_now += len(data) - done


class Messenger:
    """Word to an orchestrator, where there is one: a process beside us does the talking, and we never wait for it."""

    def __init__(self, access: dict[str, Any]) -> None:
        self.pipe = -1
        self.epoch = b""
        self.kept: Any = None
        if not access:
            return
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "call_back.py")
        ours, theirs = -1, -1
        try:
            theirs, ours = os.pipe()
            os.set_blocking(ours, False)
            # Its own session: it has a minute to deliver the last word when we and tmux are gone.
            subprocess.Popen(
                [sys.executable, script],
                cwd="/",
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self.pipe = ours
        except OSError as exc:
            say("nobody will be called back: %s" % exc)
        finally:
            if theirs >= 0:
                os.close(theirs)
        self.put(access)

    def tell(self, event: str, **data: Any) -> None:
        self.put({"event": event, "data": data})

    def put(self, line: dict[str, Any]) -> None:
        if self.pipe < 0:
            return
        with contextlib.suppress(OSError):  # it has ended, or is far behind: then this is not heard
            os.write(self.pipe, json.dumps(line).encode() + b"\n")

    def tell_progress(self, home: str, tail: bytes) -> None:
        """The newest epoch in the log, and the newest checkpoint in the bucket, when they are new."""
        if self.pipe < 0:
            return
        found = EPOCHS.findall(tail)
        if found and found[-1] != self.epoch:
            self.epoch = found[-1]
            number, total = [int(part) for part in found[-1] if part]
            self.tell("epoch", epoch=number, epochs=total)
        kept = read_json(os.path.join(home, "store", "state.json")).get("kept_epoch")
        if kept is not None and kept != self.kept:
            self.kept = kept
            self.tell("checkpoint", epoch=kept)


class Supervisor:
    def __init__(self, home: str, spec: dict[str, Any], status: StatusFile) -> None:
        self.home = home
        self.spec = spec
        self.status = status
        self.tee = Tee(os.path.join(home, "train.log"))
        self.messenger = Messenger(spec.get("callback") or {})
        self.started = time.time()
        self.child: subprocess.Popen[bytes] | None = None
        self.stopped_by = ""
        self.stop_signal = 0
        self.kill_at = 0.0

    def fields(self, state: str, **more: Any) -> dict[str, Any]:
        pid = self.child.pid if self.child else None
        return dict(
            {
                "version": 1,
                "run": self.spec["run"],
                "state": state,
                "pid": pid,
                "pid_start": start_ticks(pid) if pid and state == "running" else None,
                "supervisor_pid": os.getpid(),
                "supervisor_start": start_ticks(os.getpid()),
                "started": self.started,
                "heartbeat": time.time(),
                "finished": None,
                "exit_code": None,
                "signal": None,
                "command": self.argv(),
                "stopped_by": self.stopped_by,
                "output_bytes": self.tee.total,
                "last_output": self.tee.last_output,
                "log_lost_bytes": self.tee.lost,
                "disk_full": self.tee.disk_full,
                "status_errors": self.status.errors,
                "tail": self.tee.tail.decode("utf-8", "replace"),
                "error": "",
            },
            **more,
        )

    def argv(self) -> list[str]:
        bash = shutil.which("bash")
        # pipefail: `train.py | tee x` must not end with tee's exit code.
        return [bash, "-o", "pipefail", "-c", self.spec["command"]] if bash else ["/bin/sh", "-c", self.spec["command"]]

    def environment(self) -> dict[str, str]:
        env = dict(os.environ)
        python = self.spec.get("python") or shutil.which("python3") or sys.executable
        if os.path.dirname(python):
            env["PATH"] = os.path.dirname(python) + os.pathsep + env.get("PATH", os.defpath)
        env.update(
            PYTHONUNBUFFERED="1",
            PENNYPOD_DATA=os.path.join(self.home, "data"),
            PENNYPOD_CODE=os.path.join(self.home, "code"),
            PENNYPOD_OUT=os.path.join(self.home, "out"),
            PENNYPOD_PYTHON=python,
        )
        env.update(self.spec.get("env") or {})
        return env

    def on_signal(self, number: int, _frame: object) -> None:
        self.stopped_by = signal.Signals(number).name
        # A hang-up means that tmux is gone; the trainer would not expect HUP, every trainer understands TERM.
        self.stop_signal = signal.SIGTERM if number == signal.SIGHUP else number

    def run(self) -> int:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.on_signal)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self.status.write(self.fields("running"))
        try:
            self.child = subprocess.Popen(
                self.argv(),
                cwd=os.path.join(self.home, "out"),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as exc:
            self.status.write(self.fields("failed_to_start", finished=time.time(), error=str(exc)))
            self.messenger.tell("failure", error="the command cannot be started")
            say("cannot start the command: %s" % exc)
            return EX_UNSTARTABLE
        # Twice, so that both slots of the status file exist before the disk can fill up.
        self.status.write(self.fields("running"))
        self.messenger.tell("started")
        self.follow(wake_read)
        return self.finish()

    def follow(self, wake: int) -> None:
        """Copy output and beat until the command is over and its output is drained."""
        assert self.child is not None
        assert self.child.stdout is not None
        output = self.child.stdout.fileno()
        watched = [wake, output]
        beat_at = time.monotonic() + HEARTBEAT_S
        give_up_at = 0.0
        while True:
            now = time.monotonic()
            times = [at for at in (beat_at, give_up_at, self.kill_at) if at]
            ready = select.select(watched, [], [], max(0.0, min(times) - now))[0]
            if wake in ready:
                drain(wake)
            if output in ready:
                data = os.read(output, CHUNK_BYTES)
                if data:
                    self.tee.write(data)
                else:
                    watched.remove(output)
            now = time.monotonic()
            self.stop_if_asked(now)
            if now >= beat_at:
                self.status.write(self.fields("running"))
                self.messenger.tell_progress(self.home, self.tee.tail)
                beat_at = now + HEARTBEAT_S
            if not give_up_at and has_ended(self.child.pid):
                give_up_at = now + DRAIN_S
            if give_up_at and (output not in watched or now >= give_up_at):
                return

    def stop_if_asked(self, now: float) -> None:
        assert self.child is not None
        if self.stop_signal:
            self.signal_group(self.stop_signal)
            self.stop_signal = 0
            self.kill_at = self.kill_at or now + KILL_AFTER_S
        if self.kill_at and now >= self.kill_at:
            self.signal_group(signal.SIGKILL)
            self.kill_at = now + KILL_AFTER_S

    def signal_group(self, number: int) -> None:
        assert self.child is not None
        with contextlib.suppress(OSError):  # nobody left in it
            os.killpg(self.child.pid, number)

    def finish(self) -> int:
        assert self.child is not None
        # Before the leader is reaped, so that the group's number cannot have been given to somebody else. A trainer
        # whose shell was killed would otherwise go on writing after we called it finished.
        self.signal_group(signal.SIGKILL)
        code = self.child.wait()
        ended = {"exit_code": code} if code >= 0 else {"signal": -code}
        final = self.fields("finished", finished=time.time(), **ended)
        for _ in range(5):
            if self.status.write(final):
                break
            time.sleep(1.0)
        # After the status: whoever looks because of this must find it. Who has stopped us needs no word of it.
        if not self.stopped_by:
            self.messenger.tell_progress(self.home, self.tee.tail)
            self.messenger.tell("success" if code == 0 else "failure", **ended)
        say("the command ended with %s" % ("exit code %d" % code if code >= 0 else "signal %d" % -code))
        return code if code >= 0 else 128 - code


def has_ended(pid: int) -> bool:
    """Whether our child is over, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with the pid it names a process for good."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def drain(pipe: int) -> None:
    try:
        while os.read(pipe, 512):
            pass
    except BlockingIOError:
        pass


def say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), ("[pennypod] %s\r\n" % text).encode())


def read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def take_lock(path: str) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def main(argv: list[str]) -> int:
    home = os.path.abspath(argv[1])
    os.makedirs(os.path.join(home, "out"), exist_ok=True)
    lock = take_lock(os.path.join(home, "supervise.lock"))
    if lock is None:
        say("a supervisor already works in %s" % home)
        return EX_BUSY
    launch = os.path.join(home, "launch.json")
    spec = read_json(launch)
    if not spec.get("command") or not spec.get("run"):
        say("%s is missing or says nothing to run" % launch)
        return EX_UNSTARTABLE
    status = StatusFile(os.path.join(home, "status.json"))
    before = read_json(status.path)
    if before.get("run") == spec["run"] and before.get("state") in ("running", "finished"):
        say("run %s was started before" % spec["run"])
        return EX_REPEATED
    if before:
        set_aside(home)
    os.unlink(launch)  # its environment may hold tokens: it lives no longer than needed
    return Supervisor(home, spec, status).run()


def set_aside(home: str) -> None:
    """Keep the log of an earlier run in the same place, so that the new one starts empty."""
    log = os.path.join(home, "train.log")
    if os.path.exists(log):
        os.replace(log, log + ".before")
    for leftover in ("status.json", "status.json.spare", "status.json.old"):
        if os.path.exists(os.path.join(home, leftover)):
            os.unlink(os.path.join(home, leftover))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
