"""Vast.ai's price requests: a host asks for more, the renter accepts or rejects. Pure but for the world it is given.

Paths, bodies and texts are those that Vast's own client uses; a request is asked for by `/_sim/price_request`.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from pennypod.simulator.dispatch import Call
from pennypod.simulator.state import VAST, Pod, World
from pennypod.simulator.vast_wire import failure
from pennypod.simulator.wire import Refusal, Reply

_ids = itertools.count(701)


class PriceRequests:
    """One request at most waits for each pod; a newer one takes its place."""

    def __init__(self, world: World) -> None:
        self._world = world

    def ask(self, pod: Pod, usd_per_h: float) -> int:
        """The host of a live pod asks for that price for its GPUs; its disk stays. Returns the request's id."""
        number = next(_ids)
        pod.details["price_request"] = {"id": number, "usd_per_h": usd_per_h, "at": self._world.clock.now()}
        return number

    def listing(self, call: Call) -> Reply:
        rows = [_row(pod) for pod in self._waiting(call)]
        return Reply(200, {"success": True, "count": len(rows), "truncated": False, "pending_price_increases": rows})

    def accept(self, call: Call) -> Reply:
        pod, number = self._asked(call)
        self._world.set_price(pod, pod.details.pop("price_request")["usd_per_h"])
        return Reply(200, {"success": True, "pending_price_increase_id": number, "contract_id": int(pod.id)})

    def reject(self, call: Call) -> Reply:
        pod, number = self._asked(call)
        del pod.details["price_request"]
        return Reply(200, {"success": True, "pending_price_increase_id": number, "contract_id": int(pod.id)})

    def _waiting(self, call: Call) -> list[Pod]:
        pods = (pod for pod in self._world.all_pods() if pod.provider == VAST and pod.account is call.identity.account)
        return [pod for pod in pods if pod.alive and "price_request" in pod.details]

    def _asked(self, call: Call) -> tuple[Pod, int]:
        """The pod whose request the body names. Raises Refusal: the body holds that number and nothing else."""
        if call.identity.pod is not None:
            raise Refusal(failure(403, "auth_error", "This action requires login."))
        try:
            body = json.loads(call.request.body or b"null")
        except ValueError:
            body = None
        number = body.get("pending_price_increase_id") if isinstance(body, dict) and len(body) == 1 else None
        if not isinstance(number, int):
            msg = "pending_price_increase_id: Input should be a valid integer, and nothing beside it"
            raise Refusal(failure(400, "bad_request", msg))
        for pod in self._waiting(call):
            if pod.details["price_request"]["id"] == number:
                return pod, number
        raise Refusal(failure(404, "no_pending_price_increase", "No pending price increase."))


def _row(pod: Pod) -> dict[str, Any]:
    asked = pod.details["price_request"]
    row: dict[str, Any] = {
        "pending_price_increase_id": asked["id"],
        "contract_id": int(pod.id),
        "host_id": getattr(pod.machine, "host_id", None),
        "new_gpu_costpersec": asked["usd_per_h"] / 3600,
        "old_gpu_costpersec": float(pod.details["dph_base"]) / 3600,
        "old_disk_ram_costpersec": float(pod.details["storage_cost"]) * pod.disk_gb / 720 / 3600,
        "contract_end_date": None,
        "ask_end_date": None,
        "created_at": asked["at"],
    }
    unchanged = ("new_disk_ram_costpersec", "new_bwu_cost", "new_bwd_cost", "new_platform_fee")
    return row | dict.fromkeys((*unchanged, "old_bwu_cost", "old_bwd_cost", "old_platform_fee"))
