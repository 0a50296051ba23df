"""What every command shares: state folder, ledger, providers, output. Floor 3.

The heavy parts are imported when a command asks for them, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

from pennypod.settings import Settings, load_settings

if TYPE_CHECKING:
    from rich.console import Console

    from pennypod.clock import Clock
    from pennypod.ledger import Ledger, RunRecord
    from pennypod.providers.base import Provider
    from pennypod.unwatched import Neglect

OK, FAILED, USAGE, MAY_STILL_BILL = 0, 1, 2, 3
_WIDTH_WITHOUT_TERMINAL = 180


class App:
    """One invocation. Tests pass their own clock and providers."""

    def __init__(
        self,
        settings: Settings | None = None,
        clock: Clock | None = None,
        providers: Callable[[Settings], Mapping[str, Provider]] | None = None,
    ) -> None:
        self.settings = settings or load_settings()
        self._clock = clock
        self._make_providers = providers

    @cached_property
    def clock(self) -> Clock:
        from pennypod.clock import SystemClock

        return self._clock or SystemClock()

    @cached_property
    def ledger(self) -> Ledger:
        from pennypod.ledger import open_ledger

        return open_ledger(self.settings)

    @cached_property
    def providers(self) -> Mapping[str, Provider]:
        """Every provider at which something of ours may exist."""
        from pennypod.providers.registry import all_providers

        return (self._make_providers or all_providers)(self.settings)

    @property
    def has_own_providers(self) -> bool:
        return self._make_providers is not None

    @property
    def out(self) -> Console:
        """Tables are as wide as the terminal, and wide enough for every column where there is none."""
        from rich.console import Console

        width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
        return Console(width=width, highlight=False, markup=False)

    def print_json(self, document: Any) -> None:
        click.echo(json.dumps(document, indent=2))

    def say(self, text: str) -> None:
        """A remark for people: on stderr, so that stdout stays what was asked for."""
        click.echo(text, err=True)

    def close_abandoned(self) -> None:
        """Close the runs whose command died before it rented, or when its pod was gone: it could not any more.

        They are shown as they are when the ledger cannot be written: a full disk may be what they died of.
        """
        from pennypod import processes
        from pennypod.ledger import LedgerError

        now = self.clock.now()
        with contextlib.suppress(LedgerError):
            self.ledger.close_abandoned(processes.is_alive, now)
            if self.ledger.open_runs():  # else there is no need for what knows guards and providers
                from pennypod.unwatched import close_over, somebody_watches

                close_over(self.ledger, now, now, lambda run: somebody_watches(self.settings, run))

    def neglect(self, run: RunRecord) -> Neglect | None:
        """What is wrong with an open run that nobody sees to any more; None for every other one."""
        attempts = self.ledger.attempts(run.run)
        if run.closed is not None or all(attempt.final for attempt in attempts):
            return None
        from pennypod.unwatched import neglect, somebody_watches

        return neglect(run, attempts, self.clock.now(), lambda record: somebody_watches(self.settings, record))

    def last_words(self) -> None:
        """Whatever the command was about: what may still be billing is said last."""
        from pennypod.glance import nothing_open

        if "ledger" not in self.__dict__ and nothing_open(self.settings.ledger_file):
            return
        from pennypod.errors import PennypodError
        from pennypod.report import still_billing_line

        try:
            text = still_billing_line(self.ledger.pending_attempts(), self.clock.now())
        except PennypodError:
            return  # the command itself has met this error
        finally:
            self.ledger.close()
        if text:
            self.say(text)


pass_app = click.make_pass_decorator(App, ensure=True)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
