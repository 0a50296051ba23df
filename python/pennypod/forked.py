"""Runs a piece of work in a fork of this process, and takes what it wrote. Floor 1: processes and pipes.

A fork has every import of its parent already. What the work does to its process - signals, environment, a crash - stays
in the fork.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Done:
    """How a fork has ended; `rc` is minus the number of the signal that ended it, as with subprocess."""

    rc: int
    stdout: str
    stderr: str


def run_in_fork(work: Callable[[], object]) -> Done:
    """Run `work` as a program of its own would be run: until it returns, raises, or calls sys.exit.

    For a process with a single thread: a fork takes no others along, but the locks that they hold. Handlers of atexit
    are the parent's and are not called. Whatever ends the wait ends the fork as well.
    """
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_a_program(work, out_write, err_write)
    os.close(out_write)
    os.close(err_write)
    try:
        stdout, stderr = _read_all(out_read, err_read)
        _, status = os.waitpid(pid, 0)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise
    return Done(os.waitstatus_to_exitcode(status), stdout, stderr)


def _read_all(*pipes: int) -> list[str]:
    """What comes out of several pipes at once, until all are closed; they are closed here, too."""
    said = {pipe: bytearray() for pipe in pipes}
    try:
        with selectors.DefaultSelector() as selector:
            for pipe in pipes:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, _CHUNK)
                    if data:
                        said[key.fd] += data
                    else:
                        selector.unregister(key.fd)
    finally:
        for pipe in pipes:
            os.close(pipe)
    return [data.decode(errors="replace") for data in said.values()]


def _be_a_program(work: Callable[[], object], stdout: int, stderr: int) -> NoReturn:
    """The fork's whole life: it must not get back into the code of its parent, whatever happens."""
    code = 1
    try:
        gc.freeze()  # the parent's objects are not looked through, which would copy the pages they lie on
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        work()
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does for a program
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
