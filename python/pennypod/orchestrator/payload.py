"""What a webhook may ask for. Floor 3: job files are the one outside thing, read through `JobCatalog`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pennypod.errors import InputError
from pennypod.jobs import job_file, load_job
from pennypod.orchestrator.problems import ProblemError

MAX_OVERRIDES = 32
OVERRIDES_KEY = "webhook_overrides"
# What belongs to the run itself and not to the job: no job can let these be overridden.
RESERVED = frozenset(
    {"job", "run", "run_id", "artifacts_dir", "plan_only", "keep_on_disconnect", "detach", "detach_to"}
)

Scalar = bool | int | float | Annotated[str, Field(max_length=1000)]
Overrides = Annotated[dict[str, Scalar | list[Scalar]], Field(max_length=MAX_OVERRIDES)]
Region = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")]
_Model = TypeVar("_Model")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
# Ansible would evaluate these, and the words come from outside.
_TEMPLATE = re.compile(r"\{\{|\{%|\{#")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class TrainStart(BaseModel):
    """`note` means nothing to us: it tells two wishes apart that would be signed alike within one second."""

    model_config = ConfigDict(extra="forbid", strict=True)

    action: Literal["train_start"]
    job: Annotated[str, Field(max_length=40)]
    region: Region | Annotated[list[Region], Field(max_length=16)] | None = None
    overrides: Annotated[dict[str, Scalar | list[Scalar]], Field(max_length=MAX_OVERRIDES)] = Field(
        default_factory=dict
    )
    priority: Annotated[int, Field(ge=0, le=9)] = 5
    note: Annotated[str, Field(max_length=200)] = ""

    @property
    def regions(self) -> list[str]:
        if self.region is None:
            return []
        return [self.region] if isinstance(self.region, str) else self.region


class TrainCancel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    action: Literal["train_cancel"]
    run: Annotated[str, Field(max_length=64)]
    job: Annotated[str, Field(max_length=40)] | None = None
    note: Annotated[str, Field(max_length=200)] = ""


Wish = Annotated[TrainStart | TrainCancel, Field(discriminator="action")]
_WISH: TypeAdapter[TrainStart | TrainCancel] = TypeAdapter(Wish)


class Callback(BaseModel):
    """What the training side may say. `data` is small and shown, never acted on."""

    model_config = ConfigDict(extra="forbid", strict=True)

    event: Literal["started", "epoch", "checkpoint", "success", "failure"]
    data: Annotated[dict[str, Scalar | None], Field(max_length=16)] = Field(default_factory=dict)


_CALLBACK = TypeAdapter(Callback)


@dataclass(frozen=True, slots=True)
class Order:
    """A checked wish to train: what the playbook gets."""

    job: str
    regions: tuple[str, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 5


def parse_wish(body: bytes) -> TrainStart | TrainCancel:
    """Raises ProblemError with one entry per fault under `errors`."""
    return _parse(_WISH, body)


def parse_callback(body: bytes) -> Callback:
    return _parse(_CALLBACK, body)


def _parse(adapter: TypeAdapter[_Model], body: bytes) -> _Model:
    try:
        return adapter.validate_python(_json(body))
    except ValidationError as exc:
        faults = [
            {"at": "/".join(str(part) for part in fault["loc"]), "what": fault["msg"]}
            for fault in exc.errors(include_url=False, include_input=False, include_context=False)[:20]
        ]
        raise ProblemError(
            "invalid_payload", f"{faults[0]['at'] or 'body'}: {faults[0]['what']}", {"errors": faults}
        ) from exc


def _json(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise ProblemError("invalid_payload", "the body is not valid JSON") from exc


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class JobCatalog:
    """Which jobs webhooks may start, and what of them they may override.

    A job is open to webhooks when its file has a `webhook_overrides` list, be it empty; `allowed` narrows that further.
    Files are read again when they change.
    """

    def __init__(self, folder: Path, allowed: frozenset[str] = frozenset()) -> None:
        self._folder = folder
        self._allowed = allowed
        self._read: dict[str, tuple[tuple[str, int, int], dict[str, Any]]] = {}

    def order(self, wish: TrainStart) -> Order:
        """The checked order. Raises ProblemError: unknown_job, override_forbidden, invalid_payload."""
        open_to = self._overridable(wish.job)
        for name, value in wish.overrides.items():
            if name not in open_to:
                may = ", ".join(sorted(open_to)) or "nothing"
                raise ProblemError(
                    "override_forbidden",
                    f"job {wish.job} does not let {name!r} be overridden; it allows: {may}",
                    {"override": name},
                )
            _refuse_code(name, value)
        return Order(wish.job, tuple(wish.regions), dict(wish.overrides), wish.priority)

    def _overridable(self, job: str) -> frozenset[str]:
        declared: Any = None
        if not self._allowed or job in self._allowed:
            declared = self.variables(job).get(OVERRIDES_KEY)
        if not isinstance(declared, list):
            raise ProblemError("unknown_job", f"there is no job {job!r} that webhooks may start", {"job": job})
        return frozenset(name for name in declared if isinstance(name, str) and _NAME.fullmatch(name)) - RESERVED

    def variables(self, job: str) -> dict[str, Any]:
        """The job's file as it is now; empty for one that is not there or cannot be read."""
        try:
            path = job_file(self._folder, job)
            stat = path.stat()
            version = (str(path), stat.st_mtime_ns, stat.st_size)
            known = self._read.get(job)
            if known is None or known[0] != version:
                known = self._read[job] = (version, load_job(self._folder, job))
            return known[1]
        except (InputError, OSError):
            return {}


def _refuse_code(name: str, value: Any) -> None:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and (_TEMPLATE.search(item) or _CONTROL.search(item)):
            raise ProblemError(
                "invalid_payload",
                f"overrides/{name}: templates and control characters are refused",
                {"override": name},
            )
