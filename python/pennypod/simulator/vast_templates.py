"""Vast.ai's templates: kept, searched, edited, and filled into a create. Pure but for the clock of its world.

Paths, bodies and texts are those of Vast's own client; what it does not tell is listed in docs/simulator.md.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pennypod.simulator.dispatch import Call
from pennypod.simulator.state import Account, World
from pennypod.simulator.vast_search import BadQueryError, matches
from pennypod.simulator.vast_wire import body_of, failure, whole_account
from pennypod.simulator.wire import Refusal, Reply

_TEXTS = ("name", "image", "tag", "href", "repo", "env", "onstart", "runtype", "jupyter_dir", "readme", "desc")
_FLAGS = ("jup_direct", "ssh_direct", "use_ssh", "use_jupyter_lab", "readme_visible", "private")
_LOGIN = ("docker_login_repo", "docker_login_user", "docker_login_pass")
_FIELDS = (*_TEXTS, *_FLAGS, *_LOGIN, "extra_filters", "recommended_disk_space")
_OPTIONS = {"-e": "-e", "--env": "-e", "-p": "-p", "--publish": "-p", "-h": "-h", "--hostname": "-h"}


@dataclass(frozen=True, slots=True)
class Template:
    """One version. An edit makes another one; the old hash stays good in a create, and is not found any more."""

    number: int
    account: Account
    created: float
    fields: Mapping[str, Any] = field(repr=False)  # a login among them
    current: bool = True

    @property
    def hash_id(self) -> str:
        """Of the content, as the client's own text says: two accounts may have the same one."""
        return hashlib.md5(json.dumps(self.fields, sort_keys=True).encode(), usedforsecurity=False).hexdigest()

    def row(self) -> dict[str, Any]:
        shown = {name: self.fields.get(name) for name in _FIELDS if name != "docker_login_pass"}
        identity = {"id": self.number, "hash_id": self.hash_id, "creator_id": self.account.user_id}
        return {**shown, **identity, "created_at": self.created, "recommended": False, "count_created": 0}


class Templates:
    def __init__(self, world: World) -> None:
        self._world = world
        self._kept: list[Template] = []
        self._numbers = itertools.count(4001)

    # --- the endpoints ------------------------------------------------------------------------------------------------

    def create(self, call: Call) -> Reply:
        made = Template(next(self._numbers), _owner(call), self._world.clock.now(), _fields(body_of(call)))
        self._kept.append(made)
        msg = f"Template Created Successfully! New Template ID: {made.number}"
        return Reply(200, {"success": True, "msg": msg, "template": made.row()})

    def listing(self, call: Call) -> Reply:
        """GET with `select_filters`: one's own and the public ones."""
        account = _owner(call)
        try:
            filters = json.loads(call.request.get("select_filters") or "{}")
            rows = [one.row() for one in self._kept if one.current and _may_see(account, one)]
            found = [row for row in rows if all(matches(row, name, wish) for name, wish in filters.items())]
        except (ValueError, AttributeError, BadQueryError) as exc:
            raise Refusal(failure(400, "invalid_request", f"select_filters: {exc}")) from exc
        return Reply(200, {"success": True, "templates_found": len(found), "templates": found})

    def edit(self, call: Call) -> Reply:
        """Found by `hash_id`, and in v1 by `id`, too. What is not given is emptied, so clients send all of it."""
        body = body_of(call)
        before = self._mine(_owner(call), body.get("hash_id"), body.get("id"))
        if before is None or not before.current:
            raise Refusal(failure(404, "not_found", "Template not found"))
        after = replace(before, fields=_fields(body))
        self._kept[self._kept.index(before)] = replace(before, current=False)
        self._kept.append(after)
        return Reply(200, {"success": True, "msg": "Template updated", "template": after.row()})

    def delete(self, call: Call) -> Reply:
        body = body_of(call)
        found = self._mine(_owner(call), body.get("hash_id"), body.get("template_id"))
        if found is None:
            raise Refusal(failure(404, "not_found", "Template not found"))
        self._kept = [one for one in self._kept if one.number != found.number]
        return Reply(200, {"success": True, "msg": f"Template {found.number} Deleted Successfully"})

    def _mine(self, account: Account, hash_id: Any, number: Any) -> Template | None:
        if hash_id is None and number is None:
            return None
        for one in reversed(self._kept):
            if one.account is account and hash_id in (None, one.hash_id) and number in (None, one.number):
                return one
        return None

    # --- in a create --------------------------------------------------------------------------------------------------

    def filled(self, account: Account, body: Mapping[str, Any], ask: str) -> tuple[dict[str, Any], Template | None]:
        """A create's body with what its template brings. Scalars of the request win, `env` is merged name by name.

        Raises Refusal for a hash that nobody has.
        """
        wanted = body.get("template_hash_id")
        if not wanted:
            return dict(body), None
        known = [one for one in reversed(self._kept) if one.hash_id == wanted and _may_see(account, one)]
        if not known:
            msg = f"error 400: template {wanted} not found"
            raise Refusal(failure(400, "invalid_args", msg, ask_id=ask))
        template = known[0]
        given = {name: value for name, value in body.items() if value is not None}
        env = given.get("env")
        if env is None or isinstance(env, dict):
            given["env"] = {**env_of(str(template.fields.get("env") or "")), **(env or {})}
        return {**_brought(template.fields), **given}, template


def env_of(flags: str) -> dict[str, str]:
    """A template's environment, docker's flags in one string, as a create's object. Raises Refusal for open quotes."""
    try:
        words = iter(shlex.split(flags))
    except ValueError as exc:
        raise Refusal(failure(400, "invalid_args", f"env: {exc}")) from exc
    env: dict[str, str] = {}
    for word in words:
        option = _OPTIONS.get(word)
        value = next(words, "") if option else ""
        if option == "-e":
            name, _, text = value.partition("=")
            env[name] = text
        elif option:
            env[f"{option} {value}"] = "1"
    return env


def _brought(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a template says of a pod, in a create's own words; without what it leaves open."""
    image, tag = fields.get("image"), fields.get("tag")
    repository, user, password = (fields.get(name) for name in _LOGIN)
    brought = {
        "image": f"{image}:{tag}" if tag else image,
        "onstart": fields.get("onstart"),
        "runtype": _runtype(fields),
        "disk": fields.get("recommended_disk_space"),
        "image_login": f"-u {user} -p {password} {repository}" if repository and user and password else None,
    }
    return {name: value for name, value in brought.items() if value is not None}


def _runtype(fields: Mapping[str, Any]) -> str | None:
    kind, direct = fields.get("runtype"), bool(fields.get("ssh_direct") or fields.get("jup_direct"))
    if kind == "ssh":
        return "ssh_direc ssh_proxy" if direct else "ssh_proxy"
    if kind == "jupyter":
        return "jupyter_direc ssh_direc ssh_proxy" if direct else "jupyter_proxy ssh_proxy"
    return kind


def _fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body's fields. Raises Refusal for one of another kind, and without a name or an image."""
    for name in ("name", "image"):
        if not body.get(name):
            raise Refusal(failure(400, "invalid_args", f"Template {name} is required"))
    for names, kind in ((_TEXTS, str), (_LOGIN, str), (_FLAGS, bool)):
        wrong = [name for name in names if not isinstance(body.get(name), kind | None)]
        if wrong:
            raise Refusal(failure(400, "invalid_args", f"{wrong[0]}: Input should be a valid {kind.__name__}"))
    env_of(str(body.get("env") or ""))
    return {name: body.get(name) for name in _FIELDS}


def _may_see(account: Account, template: Template) -> bool:
    return template.account is account or template.fields.get("private") is False


def _owner(call: Call) -> Account:
    whole_account(call)
    return call.identity.account
