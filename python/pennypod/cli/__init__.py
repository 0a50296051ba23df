"""The `pennypod` command. Floor 3: options in, text out; the work is done below."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from pennypod import __version__
from pennypod.cli.app import FAILED, MAY_STILL_BILL, OK, USAGE, App
from pennypod.cli.doctor import doctor
from pennypod.cli.images import images
from pennypod.cli.ledger import ledger
from pennypod.cli.live import live
from pennypod.cli.offers import offers
from pennypod.cli.runs import report, ssh
from pennypod.cli.sample_data import sample_data
from pennypod.cli.serve import serve
from pennypod.cli.store import store
from pennypod.cli.sweep import sentinel, sweep
from pennypod.cli.verify import verify
from pennypod.errors import PennypodError, UnprovenError, no_room
from pennypod.settings import disk_is_full
from pennypod.simulator.command import simulate

_INTERRUPTED = 130


class Commands(click.Group):
    """A group in which every error is one line on stderr and every exit code is documented."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        app = extra.pop("obj", None) or App()
        code = OK
        try:
            result = super().main(args, prog_name, complete_var, False, obj=app, **extra)
            code = result if isinstance(result, int) else OK
        except click.UsageError as exc:
            where = exc.ctx.command_path if exc.ctx is not None else "pennypod"
            app.say(f"error: {exc.format_message()} (see: {where} --help)")
            code = USAGE
        except click.ClickException as exc:
            app.say(f"error: {exc.format_message()}")
            code = FAILED
        except PennypodError as exc:
            app.say(f"error: {exc}")
            code = MAY_STILL_BILL if isinstance(exc, UnprovenError) else FAILED
        except OSError as exc:
            if not disk_is_full(exc):
                raise
            app.say(f"error: {no_room(exc)}")
            code = FAILED
        except (click.Abort, KeyboardInterrupt):
            app.say("error: interrupted")
            code = _INTERRUPTED
        app.last_words()
        if not standalone_mode:
            return code
        sys.exit(code)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 3 something may still be billing.",
)
@click.version_option(__version__, prog_name="pennypod")
def main() -> None:
    """Rent a GPU for the minutes a job needs, and prove that the meter stopped.

    Runs are started with ansible-playbook train.yml -e job=NAME. This command looks after them.
    """


for command in (
    doctor,
    images,
    ledger,
    live,
    offers,
    report,
    sample_data,
    sentinel,
    serve,
    store,
    simulate,
    ssh,
    sweep,
    verify,
):
    main.add_command(command)
