"""How `pennypod serve` is set up: environment for keys and everyday settings, one YAML file for the rest. Floor 3."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pennypod.errors import InputError
from pennypod.orchestrator.limits import Rate
from pennypod.orchestrator.scheduling import Limits

SECRET_VARIABLE = "PENNYPOD_WEBHOOK_SECRET"  # noqa: S105 - its name
ADMIN_VARIABLE = "PENNYPOD_ADMIN_TOKEN"
READ_VARIABLE = "PENNYPOD_READ_TOKEN"
CONFIG_VARIABLE = "PENNYPOD_SERVE_CONFIG"

_Count = Annotated[int, Field(ge=1, le=10_000)]
_Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,39}$")]
_Variable = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LimitsSection(_Section):
    """Runs at once, in all and by job and provider; how many may wait; starts accepted per minute and source."""

    running: _Count = 8
    per_job: _Count = 4
    per_provider: dict[str, _Count] = Field(default_factory=dict)
    queue: _Count = 100
    starts_per_minute: _Count = 600

    def as_limits(self) -> Limits:
        return Limits(self.running, self.per_job, self.queue, dict(self.per_provider))

    def as_rate(self) -> Rate:
        return Rate(burst=max(20.0, self.starts_per_minute / 6), per_second=self.starts_per_minute / 60)


class Source(_Section):
    """A webhook of GitHub or GitLab that starts one job. `secret_env` names the variable that holds its secrets."""

    kind: Literal["github", "gitlab"]
    secret_env: _Variable
    job: str
    events: list[str] = Field(default_factory=list)
    branches: list[str] = Field(default_factory=list)
    overrides: dict[str, Any] = Field(default_factory=dict)
    priority: Annotated[int, Field(ge=0, le=9)] = 5


class Recipient(_Section):
    """Where notices go. `url_env` names the variable that holds the address, since such addresses are keys."""

    kind: Literal["webhook", "ntfy", "slack"]
    url_env: _Variable
    secret_env: _Variable | None = None
    events: list[Literal["rented", "ready", "failed", "destroyed", "over_budget"]] = Field(default_factory=list)


class File(_Section):
    """The whole of the YAML file."""

    provider: Literal["auto", "vast", "runpod", "local"] = "auto"
    jobs: list[str] = Field(default_factory=list)
    artifacts_dir: str | None = None
    public_url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    poll_s: Annotated[float, Field(ge=0.2, le=3600)] = 30.0
    # Those who share a database: one that has said nothing for so long is given up by the others.
    silent_s: Annotated[float, Field(ge=2, le=3600)] = 30.0
    limits: LimitsSection = Field(default_factory=LimitsSection)
    sources: dict[_Name, Source] = Field(default_factory=dict)
    notify: dict[_Name, Recipient] = Field(default_factory=dict)


class Config(_Section):
    """Everything the service needs to know. Secrets are left out of its representation."""

    secrets: tuple[str, ...] = Field(repr=False)
    admin_token: str | None = Field(default=None, repr=False)
    read_token: str | None = Field(default=None, repr=False)
    source_secrets: dict[str, tuple[str, ...]] = Field(default_factory=dict, repr=False)
    recipient_urls: dict[str, str] = Field(default_factory=dict, repr=False)
    recipient_secrets: dict[str, str] = Field(default_factory=dict, repr=False)
    file: File
    root: Path
    max_body_bytes: int = 64 * 1024
    body_timeout_s: float = 10.0

    @property
    def limits(self) -> Limits:
        return self.file.limits.as_limits()


def load_config(environ: MutableMapping[str, str], root: Path) -> Config:
    """Read the set-up and take every key out of `environ`, so that no playbook inherits one.

    Raises InputError with the variable or the place in the file that is wrong.
    """
    file = _read_file(environ.get(CONFIG_VARIABLE))
    missing = [name for name in ("train.yml", "ansible.cfg", "group_vars") if not (root / name).exists()]
    if missing:
        raise InputError(f"{root} has no {missing[0]}: start pennypod serve in the repository's root, or say --root")
    names = {source.secret_env for source in file.sources.values()}
    names |= {part for item in file.notify.values() for part in (item.url_env, item.secret_env) if part}
    own = {SECRET_VARIABLE, ADMIN_VARIABLE, READ_VARIABLE}
    taken = {name: environ.pop(name, "").strip() for name in names | own}
    secrets = _split(taken[SECRET_VARIABLE])
    if not secrets:
        raise InputError(
            f"set {SECRET_VARIABLE}: webhooks are signed with it; `openssl rand -hex 32` makes one;"
            " several, separated by commas, are all valid while you rotate them"
        )
    _refuse_missing(taken, names)
    return Config(
        secrets=secrets,
        admin_token=taken[ADMIN_VARIABLE] or None,
        read_token=taken[READ_VARIABLE] or None,
        source_secrets={name: _split(taken[source.secret_env]) for name, source in file.sources.items()},
        recipient_urls={name: taken[item.url_env] for name, item in file.notify.items()},
        recipient_secrets={name: taken[item.secret_env] for name, item in file.notify.items() if item.secret_env},
        file=file,
        root=root,
    )


def _read_file(path: str | None) -> File:
    if not path:
        return File()
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        return File.model_validate({} if content is None else content)
    except OSError as exc:
        raise InputError(f"{CONFIG_VARIABLE}: {path} cannot be read: {exc.strerror}") from exc
    except yaml.YAMLError as exc:
        raise InputError(f"{path}: not valid YAML: {exc}") from exc
    except ValidationError as exc:
        fault = exc.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in fault["loc"]) or "the file"
        raise InputError(f"{path}: {place}: {fault['msg']}") from exc


def _split(text: str) -> tuple[str, ...]:
    return tuple(part for part in re.split(r"[\s,]+", text) if part)


def _refuse_missing(taken: Mapping[str, str], names: set[str]) -> None:
    empty = sorted(name for name in names if not taken[name])
    if empty:
        raise InputError(f"{empty[0]} is not set, and {CONFIG_VARIABLE} names it")
