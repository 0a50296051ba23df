"""What the simulator would have answered to calls that were recorded elsewhere: the same requests, at the same times.

A fresh world with ghost pods, and no server. Ids differ between the two worlds, so each id that the record's answers
bring up for an offer or a pod is paired with one of the simulator's own, and requests are translated by that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pennypod.exchanges import Exchange
from pennypod.simulator.clock import VirtualClock
from pennypod.simulator.dispatch import Dispatcher, Outcome
from pennypod.simulator.pods import Ghosts
from pennypod.simulator.runpod_api import RunpodApi
from pennypod.simulator.runpod_graphql import GraphqlApi
from pennypod.simulator.state import Boot, World
from pennypod.simulator.vast_api import VastApi
from pennypod.simulator.wire import Reply, Request

_KEY = "replay"
_BEFORE_AN_ID = frozenset({"asks", "instances", "request_logs", "pods"})
_PAGE_QUERIES = frozenset({"after_token", "cursor"})


@dataclass(frozen=True, slots=True)
class Replayed:
    """A recorded call and the simulator's answer. Not `known`: it is about a pod that the record never made."""

    real: Exchange
    endpoint: str
    status: int
    content_type: str
    answer: Any
    known: bool = True

    def as_document(self) -> dict[str, Any]:
        real = self.real
        return {
            "endpoint": self.endpoint,
            "request": {
                "at": real.at,
                "method": real.method,
                "path": real.path,
                "query": real.query,
                "body": real.body,
            },
            "real": {
                "status": real.status,
                "content_type": real.content_type,
                "answer": real.answer,
                **({"trouble": real.trouble} if real.trouble else {}),
            },
            "simulated": {"status": self.status, "content_type": self.content_type, "answer": self.answer},
        }


def replay(exchanges: Sequence[Exchange], *, seed: int = 0) -> list[Replayed]:
    """Every recorded call with what the simulator answers to it."""
    if not exchanges:
        return []
    player = _Player(exchanges[0].at, seed)
    return [player.play(exchange) for exchange in exchanges]


class _Player:
    def __init__(self, start: float, seed: int) -> None:
        self._clock = VirtualClock(0, start=start)
        self._world = World(self._clock, Ghosts(), seed=seed, boot=Boot(loading_s=20.0))
        vast, runpod = Dispatcher(self._world, VastApi(self._world)), Dispatcher(self._world, RunpodApi(self._world))
        self._places = (
            ("/api/", vast.handle),
            ("/graphql", GraphqlApi(self._world).handle),
            ("/v2/", runpod.handle),
            ("/v1", runpod.handle),
        )
        self._ids: dict[str, str] = {}
        self._real_offers: list[dict[str, Any]] = []
        self._our_offers: list[dict[str, Any]] = []
        self._next_page = ""

    def play(self, exchange: Exchange) -> Replayed:
        self._clock.advance(max(0.0, exchange.at - self._clock.now()))
        path, known = self._path(exchange)
        request = Request(
            method=exchange.method,
            path=path,
            query={name: [value] for name, value in self._query(exchange).items()},
            headers={"authorization": f"Bearer {_KEY}", "host": "localhost"},
            body=b"" if exchange.body is None else json.dumps(self._body(exchange.body)).encode(),
        )
        outcome = self._ask(request)
        for job in self._world.take_jobs():
            job()
        answer = _plain(outcome.reply)
        self._learn(exchange, answer)
        kind = outcome.reply.content_type.partition(";")[0]
        return Replayed(exchange, outcome.endpoint, outcome.reply.status, kind, answer, known)

    def _ask(self, request: Request) -> Outcome:
        for prefix, handle in self._places:
            if request.path.startswith(prefix):
                return handle(request)
        return Outcome("unknown", Reply(404, {"error": "nothing here"}))

    # --- their ids and ours -------------------------------------------------------------------------------------------

    def _path(self, exchange: Exchange) -> tuple[str, bool]:
        parts = exchange.path.split("/")
        known = True
        for number, part in enumerate(parts):
            if number and part not in ("", "request_logs") and parts[number - 1] in _BEFORE_AN_ID:
                ours = self._offer_for(part) if parts[number - 1] == "asks" else self._ids.get(part)
                known = known and ours is not None
                parts[number] = ours or part
        return "/".join(parts), known

    def _offer_for(self, real_id: str) -> str | None:
        """The simulator's cheapest offer of the same GPU and count, else its cheapest."""
        wanted = next((row for row in self._real_offers if str(row.get("id")) == real_id), {})
        alike = [row for row in self._our_offers if all(row[n] == wanted.get(n) for n in ("gpu_name", "num_gpus"))]
        row = next(iter([*alike, *self._our_offers]), None)
        return None if row is None else str(row["id"])

    def _query(self, exchange: Exchange) -> dict[str, str]:
        query = dict(exchange.query)
        for name in _PAGE_QUERIES & set(query):
            query.pop(name)
            if self._next_page:
                query[name] = self._next_page
        return query

    def _body(self, body: Any) -> Any:
        """A GPU type of theirs that the simulator does not have is replaced by one that it has, wherever it lies."""
        if isinstance(body, dict) and isinstance(body.get("gpu"), dict):
            gpus = self._world.runpod.gpus
            gpu = body["gpu"] | ({} if body["gpu"].get("id") in gpus else {"id": next(iter(gpus))})
            body = {name: value for name, value in body.items() if name != "dataCenterIds"} | {"gpu": gpu}
        return body

    def _learn(self, exchange: Exchange, ours: Any) -> None:
        theirs = exchange.answer
        if not isinstance(theirs, dict) or not isinstance(ours, dict):
            return
        if isinstance(theirs.get("offers"), list) and isinstance(ours.get("offers"), list):
            self._real_offers, self._our_offers = list(_dicts(theirs["offers"])), list(_dicts(ours["offers"]))
        paging = ours.get("pagination")
        self._next_page = str(ours.get("next_token") or (paging or {}).get("nextCursor") or "")
        name = {"PUT": "new_contract", "POST": "id"}.get(exchange.method, "")
        if name and theirs.get(name) and ours.get(name):
            self._ids[str(theirs[name])] = str(ours[name])


def _dicts(rows: Iterable[Any]) -> Iterable[dict[str, Any]]:
    return (row for row in rows if isinstance(row, dict))


def _plain(reply: Reply) -> Any:
    """As a client reads it: JSON where it is some, else text, and None for nothing."""
    text = reply.payload().decode("utf-8", "replace")
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
