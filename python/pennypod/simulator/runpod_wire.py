"""What all of RunPod's REST v2 has in common: problem documents, checked bodies, and whose key may do what. Pure."""

from __future__ import annotations

from typing import Any

from pennypod.simulator.dispatch import Call
from pennypod.simulator.runpod_schema import Check
from pennypod.simulator.state import Credential
from pennypod.simulator.wire import Refusal, Reply

MAX_BODY = 102_400
_TITLES = {
    400: "Bad Request",
    401: "Unauthorized",
    402: "Payment Required",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    410: "Gone",
    413: "Content Too Large",
    422: "Unprocessable Entity",
    429: "Too Many Requests",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


def problem(code: int, detail: str, errors: list[str] | None = None) -> Reply:
    body: dict[str, Any] = {"title": _TITLES.get(code, "Error"), "status": code, "detail": detail}
    if errors:
        body["errors"] = errors
    return Reply(code, body, content_type="application/problem+json")


def body_of(call: Call, check: Check) -> dict[str, Any]:
    """The body of a call, as its schema has it. Raises Refusal for any other."""
    if len(call.request.body) > MAX_BODY:
        raise Refusal(problem(413, "request body too large"))
    try:
        body = call.request.json()
    except ValueError:
        raise Refusal(problem(400, "the body is not valid JSON")) from None
    errors = check(body, "$")
    if errors:
        raise Refusal(problem(422, "Request validation failed.", errors))
    assert isinstance(body, dict)
    return body


def whole_account(call: Call) -> None:
    """Raises Refusal for a pod's own key."""
    if call.identity.pod is not None:
        raise Refusal(problem(403, "this key may only act on its own pod"))


def credential_of(call: Call, number: str) -> Credential:
    """The account's registry login of that id. Raises Refusal when there is none."""
    for kept in call.identity.account.registries:
        if kept.id == number:
            return kept
    raise Refusal(problem(404, "registry not found"))
