"""RunPod's templates: kept, changed, and copied once into a create. Pure but for the world it is given.

Source: the description of REST v2, `/v2/templates` and `templateId` of `POST /v2/pods`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pennypod.simulator import runpod_schema as schema
from pennypod.simulator.dispatch import Call
from pennypod.simulator.runpod_wire import MAX_BODY, body_of, credential_of, problem, whole_account
from pennypod.simulator.state import RUNPOD, Account, World
from pennypod.simulator.wire import Refusal, Reply

# What a template says of a container, and what it says for itself, with the service's defaults: SSH and Jupyter are on
# here and off in a create.
_CONTAINER: dict[str, Any] = {"args": "", "disk": 20, "mounts": {}, "ports": [], "env": {}, "registry": None}
_OWN: dict[str, Any] = {
    "serverless": False,
    "public": False,
    "category": "NVIDIA",
    "startSsh": True,
    "startJupyter": True,
    "allowedCudaVersions": [],
}
_COPIED = ("image", "args", "cmd", "entrypoint", "disk", "mounts", "ports", "registry", "startSsh", "startJupyter")


@dataclass(slots=True)
class Template:
    id: str
    account: Account
    given: dict[str, Any]

    def row(self, reader: Account) -> dict[str, Any]:
        row = {"id": self.id, **_CONTAINER, **_OWN, **self.given}
        return row if reader is self.account else {**row, "registry": None}


class Templates:
    def __init__(self, world: World) -> None:
        self._world = world
        self._kept: dict[str, Template] = {}

    # --- the endpoints ------------------------------------------------------------------------------------------------

    def listing(self, call: Call) -> Reply:
        whole_account(call)
        account = call.identity.account
        rows = [kept.row(account) for kept in self._kept.values() if kept.account is account]
        return Reply(200, {"templates": rows})

    def create(self, call: Call) -> Reply:
        whole_account(call)
        given = self._checked(call, body_of(call, schema.CREATE_TEMPLATE))
        made = Template(f"tpl_{secrets.token_hex(5)}", call.identity.account, given)
        self._kept[made.id] = made
        return Reply(201, made.row(made.account))

    def show(self, call: Call) -> Reply:
        whole_account(call)
        account = call.identity.account
        return Reply(200, self._readable(account, call.match["template"]).row(account))

    def update(self, call: Call) -> Reply:
        """Only what is in the body changes; an empty `mounts` is no change, either."""
        kept = self._mine(call)
        body = self._checked(call, body_of(call, schema.UPDATE_TEMPLATE))
        kept.given |= {name: value for name, value in body.items() if name != "mounts" or value}
        return Reply(200, kept.row(kept.account))

    def delete(self, call: Call) -> Reply:
        kept = self._mine(call)
        pods = self._world.listing(RUNPOD, call.identity)
        if any(pod.alive and pod.details.get("template") == kept.id for pod in pods):
            return problem(400, "template is in use by a pod and cannot be deleted")
        del self._kept[kept.id]
        return Reply(204)

    @staticmethod
    def _checked(call: Call, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("registry") is not None:
            credential_of(call, body["registry"])
        return body

    def _readable(self, account: Account, number: str) -> Template:
        kept = self._kept.get(number)
        if kept is None or (kept.account is not account and not kept.given.get("public")):
            raise Refusal(problem(404, "template not found"))
        return kept

    def _mine(self, call: Call) -> Template:
        whole_account(call)
        kept = self._readable(call.identity.account, call.match["template"])
        if kept.account is not call.identity.account:
            raise Refusal(problem(404, "template not found"))
        return kept

    # --- in a create --------------------------------------------------------------------------------------------------

    def filled(self, call: Call, body: Mapping[str, Any]) -> dict[str, Any]:
        """A create's body with what its template brings. The body wins; `env` is merged name by name.

        Raises Refusal for a template that this account cannot read, and for one that is for serverless workers.
        """
        if "templateId" not in body:
            return dict(body)
        account = call.identity.account
        row = self._readable(account, body["templateId"]).row(account)
        if row["serverless"]:
            raise Refusal(problem(422, "template is for serverless workers and cannot be used for a pod"))
        filled = {name: row[name] for name in _COPIED if name in row} | dict(body)
        filled["env"] = {**row["env"], **(body.get("env") or {})}
        gpu = body.get("gpu")
        if gpu and row["allowedCudaVersions"] and not {"allowedCudaVersions", "minCudaVersion"} & set(gpu):
            filled["gpu"] = {**gpu, "allowedCudaVersions": row["allowedCudaVersions"]}
        if len(json.dumps(filled)) > MAX_BODY:
            raise Refusal(problem(413, "request body too large"))
        return filled
