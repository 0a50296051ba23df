#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: make a bootstrapped pod a golden image, or find the one to start from. Runs on localhost."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: golden_image
short_description: Make a bootstrapped pod a golden image of its job, or find the one to start from
description:
  - With C(state=baked), the run's pod becomes the image C(golden-<job>-v<N>), without keys, caches, history or anything
    else that is the pod's alone. The pod is left as it is. Its manifest is kept in the state folder and on the image.
  - With C(state=chosen), finds the newest image of the job that was baked for the same requirements and base and is
    there. Changes nothing.
options:
  run:
    description: The run id.
    type: str
    required: true
  state:
    description: Whether to make an image or to find one.
    type: str
    choices: [baked, chosen]
    default: baked
  provider:
    description: Whose images.
    type: str
    default: local
  image:
    description: The stock image by provider name, which the golden one is made from.
    type: dict
    default: {}
  requirements:
    description: What the job asks of a pod's software. An image that was baked for others is not taken.
    type: dict
    default: {}
  python:
    description: The interpreter that the job runs with. Its packages go into the manifest.
    type: str
    default: python3
  pod_home:
    description: Our folder on the pod; of it, only C(cache/) goes into the image.
    type: str
    default: /root/pennypod
  role_dir:
    description: The folder of the role that made the pod ready; its content's hash goes into the manifest.
    type: path
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - pennypod
"""

EXAMPLES = r"""
- name: Make the run's pod a golden image
  golden_image:
    run: demo-1201-k3f7q
    image: {local: stock}
    requirements: {requirements: [numpy]}
  delegate_to: localhost

- name: Find the image to start from
  golden_image:
    run: demo-1201-k3f7q
    state: chosen
    image: {local: stock}
    requirements: {requirements: [numpy]}
  delegate_to: localhost
  register: choice
"""

RETURN = r"""
name:
  description: The image's name, empty when there is none to start from.
  returned: always
  type: str
  sample: golden-demo-v3
golden:
  description: The image's manifest, empty when there is none.
  returned: always
  type: dict
image:
  description: What to start pods from, by provider name, for M(gpu_pod); empty when that is the stock image.
  returned: always
  type: dict
  sample: {local: "localhost/pennypod:golden-demo-v3"}
digest:
  description: Its digest, by provider name.
  returned: always
  type: dict
note:
  description: Why there is none, or not the newest one.
  returned: state is chosen
  type: str
failure:
  description: What went wrong, for programs - C(code), C(message), C(details).
  returned: failure
  type: dict
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from pennypod.ansible import run_module
from pennypod.clock import SystemClock
from pennypod.errors import InputError
from pennypod.events import Events
from pennypod.golden import Bake, Bakery, Recipe, content_hash, image_maker
from pennypod.ledger import open_ledger
from pennypod.providers.registry import all_providers
from pennypod.rental import Rental
from pennypod.settings import load_settings

ARGUMENT_SPEC: dict[str, Any] = {
    "run": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["baked", "chosen"], "default": "baked"},
    "provider": {"type": "str", "default": "local"},
    "image": {"type": "dict", "default": {}},
    "requirements": {"type": "dict", "default": {}},
    "python": {"type": "str", "default": "python3"},
    "pod_home": {"type": "str", "default": "/root/pennypod"},
    "role_dir": {"type": "path"},
}


def body(module: AnsibleModule) -> dict[str, Any]:
    """Make the image, or find one."""
    options, run = module.params, module.params["run"]
    settings = load_settings()
    providers = all_providers(settings)
    maker = image_maker(options["provider"], providers)
    ledger = open_ledger(settings)
    bakery = Bakery(settings, maker, SystemClock())
    recipe = Recipe(
        job=ledger.run(run).job,
        provider=options["provider"],
        base=maker.image_base(str(options["image"].get(options["provider"], ""))),
        requirements=options["requirements"],
    )
    events = Events(settings.run_dir(run), run)
    if options["state"] == "chosen":
        choice = bakery.choose(recipe)
        golden = choice.golden
        if choice.note:
            events.emit("rent", f"warning: {choice.note}")
        if golden is not None:
            events.emit("rent", f"starting from {golden.name}, {golden.digest[:19]}")
        return {**_result(golden.as_document() if golden else {}, changed=False), "note": choice.note}
    if module.check_mode:
        name = bakery.would_be(recipe.job)
        return {**_result({}, changed=True), "name": name, "diff": {"before": {}, "after": {"name": name}}}
    bake = Bake(
        run=run,
        pod_id=_pod_of(run, Rental(providers, ledger, SystemClock()), options["provider"]),
        recipe=recipe,
        role_hash=_role_hash(options["role_dir"]),
        python=options["python"],
        pod_home=options["pod_home"],
    )
    begun = SystemClock().now()
    golden = bakery.bake(bake, ledger, lambda text: events.emit("bootstrap", text))
    took = SystemClock().now() - begun
    _tell(events, golden.name, golden.bytes, golden.layer_bytes, took)
    return _result(golden.as_document(), changed=True)


def _tell(events: Events, name: str, size: int, added: int, took_s: float) -> None:
    sizes = f"{size / 1e6:.0f} MB, {added / 1e6:.0f} MB more than its base"
    events.emit("bootstrap", f"{name} is made after {took_s:.0f} s: {sizes}")


def _pod_of(run: str, rental: Rental, provider: str) -> str:
    found = rental.existing(run)
    if found is None or found.attempt.provider != provider:
        raise InputError(f"run {run} has no pod at {provider} to make an image of")
    return found.pod.pod_id


def _role_hash(folder: str | None) -> str:
    return content_hash(Path(folder)) if folder else ""


def _result(golden: dict[str, Any], *, changed: bool) -> dict[str, Any]:
    provider = golden.get("provider", "")
    return {
        "changed": changed,
        "name": golden.get("name", ""),
        "golden": golden,
        "image": {provider: golden["reference"]} if golden else {},
        "digest": {provider: golden["digest"]} if golden else {},
        "diff": {"before": {}, "after": {"name": golden["name"]}} if changed else {"before": {}, "after": {}},
    }


def main() -> None:
    run_module(ARGUMENT_SPEC, body)


if __name__ == "__main__":
    main()
