"""`pennypod images`: golden images, what is in them, and the end of old ones. Floor 3."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from pennypod.cli.app import FAILED, OK, App, json_option, pass_app

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pennypod.golden import Golden

dry_run_option = click.option("--dry-run", is_flag=True, help="Say what would be removed, remove nothing.")


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def images(context: click.Context, as_json: bool) -> int | None:
    """Golden images: what ansible-playbook bake.yml -e job=NAME has made.

    A run of the job starts from the newest one that fits its requirements and is there: on this machine for local pods,
    in a registry for others. With --json, the manifests: packages with their versions, sizes, digests.
    """
    if context.invoked_subcommand is not None:
        return None
    app = context.ensure_object(App)
    from pennypod.golden import GoldenStore

    baked = GoldenStore(app.settings.home).all()
    there = _there(app, baked)
    if as_json:
        app.print_json([{**item.as_document(), "there": item.name in there} for item in baked])
        return OK
    if not baked:
        app.say("there is no golden image yet: ansible-playbook bake.yml -e job=NAME makes one")
        return OK
    _print(app, baked, there)
    return OK


@images.command()
@click.argument("name")
@click.argument("repository", metavar="HOST/REPO")
@pass_app
def push(app: App, name: str, repository: str) -> int:
    """Send an image to a registry, for pods on other machines; again after a push that failed.

    The login is PENNYPOD_REGISTRY_LOGIN=USER:TOKEN@HOST, or what `podman login` or `docker login` has left. One that is
    there already is not sent again.
    """
    import os

    from pennypod.golden import Bakery, image_maker
    from pennypod.model.image import parse_repository
    from pennypod.oci.client import Registry
    from pennypod.oci.logins import push_login

    golden, to = _named(app, name), parse_repository(repository)
    login = push_login(to.host, os.environ)
    bakery = Bakery(app.settings, image_maker(golden.provider, app.providers), app.clock)
    pushed = bakery.push(golden, to, login, Registry(to.host, login), app.say)
    click.echo(pushed.remote)
    return OK


@images.command()
@click.argument("name")
@dry_run_option
@pass_app
def rm(app: App, name: str, dry_run: bool) -> int:
    """Remove one image, with its manifest. One that a pod was started from stays until that is gone.

    What is in a registry stays there, and no run takes it any more.
    """
    return _remove(app, [_named(app, name)], dry_run)


@images.command()
@click.option("--keep", type=click.IntRange(min=0), default=1, show_default=True, help="How many of each job stay.")
@dry_run_option
@pass_app
def prune(app: App, keep: int, dry_run: bool) -> int:
    """Remove all images of each job but the newest, and the newest in a registry."""
    from pennypod.golden import GoldenStore, superseded

    return _remove(app, superseded(GoldenStore(app.settings.home).all(), keep), dry_run)


def _named(app: App, name: str) -> Golden:
    from pennypod.errors import InputError
    from pennypod.golden import GoldenStore

    for item in GoldenStore(app.settings.home).all():
        if item.name == name:
            return item
    raise InputError(f"there is no golden image {name}: `pennypod images` shows them")


def _remove(app: App, goldens: Sequence[Golden], dry_run: bool) -> int:
    from pennypod.errors import PennypodError
    from pennypod.golden import Bakery, GoldenStore, image_maker

    code = OK
    for item in goldens:
        if dry_run:
            click.echo(f"would remove {item.name}")
            continue
        try:
            if item.only_remote:
                GoldenStore(app.settings.home).remove(item.name)
            else:
                Bakery(app.settings, image_maker(item.provider, app.providers), app.clock).remove(item)
            click.echo(f"removed {item.name}")
            if item.remote:
                app.say(f"it is still in the registry, as {item.remote}")
        except PennypodError as exc:
            app.say(f"error: {item.name}: {exc}")
            code = FAILED
    return code


def _there(app: App, baked: Sequence[Golden]) -> set[str]:
    from pennypod.golden import image_maker, is_there

    here = [item for item in baked if not item.only_remote]
    saved = {name: image_maker(name, app.providers).saved_images() for name in {item.provider for item in here}}
    return {item.name for item in here if is_there(item, saved[item.provider])}


def _print(app: App, baked: Sequence[Golden], there: set[str]) -> None:
    from rich.table import Table

    table = Table(show_edge=False)
    pushed = any(item.remote for item in baked)
    for title in ("image", "provider", "baked", "size", "added", "packages", "digest", *["registry"] * pushed, ""):
        table.add_column(title)
    for item in baked:
        packages = f"{len(item.debian_packages)} Debian, {len(item.python_packages)} Python"
        row: list[Any] = [item.name, item.provider, f"{datetime.fromtimestamp(item.baked, UTC):%Y-%m-%d %H:%M}"]
        row += [_mb(item.bytes), _mb(item.layer_bytes), packages, item.digest[:19]]
        row += [item.remote.partition("@")[0]] * pushed
        table.add_row(*row, "" if item.name in there else "only in the registry" if item.remote else "missing")
    app.out.print(table)


def _mb(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
