"""What all of Vast.ai's API has in common: refusals, bodies, JSON in the query, and whose key may do what. Pure."""

from __future__ import annotations

import json
from typing import Any

from pennypod.simulator.dispatch import Call
from pennypod.simulator.wire import Refusal, Reply


def failure(status: int, code: str, msg: str, **extra: Any) -> Reply:
    return Reply(status, {"success": False, "error": code, "msg": msg} | extra)


def body_of(call: Call) -> dict[str, Any]:
    """The body of a call. Raises Refusal for one that is no object."""
    try:
        body = call.request.json()
    except ValueError:
        raise Refusal(failure(400, "bad_request", "the body is not JSON")) from None
    if not isinstance(body, dict):
        raise Refusal(failure(400, "bad_request", "body: Input should be a valid dictionary"))
    return body


def query_json(call: Call, name: str, default: Any) -> Any:
    """A parameter that is JSON inside the query string."""
    text = call.request.get(name)
    if not text:
        return default
    try:
        return json.loads(text)
    except ValueError:
        raise Refusal(failure(400, "invalid_request", f"{name} is not JSON")) from None


def whole_account(call: Call) -> None:
    """Raises Refusal for an instance's own key, which starts, stops, destroys and shows that instance and no more."""
    if call.identity.pod is not None:
        raise Refusal(failure(403, "auth_error", "This key may only act on its own instance."))
