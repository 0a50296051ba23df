"""Webhooks of GitHub and GitLab as wishes to train. Floor 3; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pennypod.orchestrator.config import Source
from pennypod.orchestrator.payload import TrainStart
from pennypod.orchestrator.problems import ProblemError

_PUSH = {"github": "push", "gitlab": "Push Hook"}
_EVENT_HEADER = {"github": "x-github-event", "gitlab": "x-gitlab-event"}


def wish_of(source: Source, headers: Mapping[str, str], body: bytes) -> TrainStart | str:
    """The wish to train that this event is, or why it is none. Raises ProblemError for what is no event at all."""
    event = headers.get(_EVENT_HEADER[source.kind], "")
    wanted = source.events or [_PUSH[source.kind]]
    if event not in wanted:
        return f"event {event!r} starts nothing here"
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise ProblemError("invalid_payload", "the body is not valid JSON: set the content type to JSON") from exc
    if not isinstance(document, dict):
        raise ProblemError("invalid_payload", "the body is not a JSON object")
    if _is_deletion(document):
        return "a branch was deleted"
    branch = str(document.get("ref", "")).removeprefix("refs/heads/")
    if source.branches and branch not in source.branches:
        return f"branch {branch!r} starts nothing here"
    return TrainStart(action="train_start", job=source.job, overrides=dict(source.overrides), priority=source.priority)


def _is_deletion(document: Mapping[str, Any]) -> bool:
    after = document.get("after")
    return bool(document.get("deleted")) or (isinstance(after, str) and bool(after) and set(after) == {"0"})
