#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: make a bootstrapped pod a golden image, or find the one to start from. Runs on localhost."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: golden_image
short_description: Make a bootstrapped pod a golden image of its job, push it, or find the one to start from
description:
  - With C(state=baked), the run's pod becomes the image C(golden-<job>-v<N>), without keys, caches, history or anything
    else that is the pod's alone. The pod is left as it is. Its manifest is kept in the state folder and on the image.
  - With C(state=pushed), sends that image to a registry, and writes the place into its manifest once the registry has
    confirmed the digest. One that is there is not sent again.
  - With C(state=chosen), finds for each provider the newest image of the job that was baked for the same requirements
    and is there. On local pods the base must be the same, too; elsewhere it must be in a registry. Changes nothing.
options:
  run:
    description: The run id.
    type: str
    required: true
  state:
    description: Whether to make an image, to push it, or to find one.
    type: str
    choices: [baked, pushed, chosen]
    default: baked
  provider:
    description: Whose pod becomes an image.
    type: str
    default: local
  providers:
    description: Whose pods are to start from an image, for C(state=chosen).
    type: list
    elements: str
    default: [local]
  registry:
    description:
      - Where to push, as HOST/REPO. Needed for C(state=pushed), and for C(state=baked) at a provider whose hosts push
        themselves, with the login in C(PENNYPOD_REGISTRY_SNAPSHOT_LOGIN).
      - The login for C(state=pushed) is taken from the environment (C(PENNYPOD_REGISTRY_LOGIN)) or the auth file of
        podman or docker.
    type: str
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

- name: Push it for pods elsewhere
  golden_image:
    run: demo-1201-k3f7q
    state: pushed
    registry: ghcr.io/me/golden
  delegate_to: localhost

- name: Find the image to start from
  golden_image:
    run: demo-1201-k3f7q
    state: chosen
    providers: [local, vast]
    image: {local: stock}
    requirements: {requirements: [numpy]}
  delegate_to: localhost
  register: choice
"""

RETURN = r"""
name:
  description: The image's name.
  returned: state is baked or pushed
  type: str
  sample: golden-demo-v3
golden:
  description: The image's manifest.
  returned: state is baked or pushed
  type: dict
image:
  description: What to start pods from, by provider name, for M(gpu_pod). The stock image where none is named.
  returned: always
  type: dict
  sample: {local: "localhost/pennypod:golden-demo-v3"}
digest:
  description: Its digest, by provider name.
  returned: always
  type: dict
instead:
  description: The stock image, by the names of the providers that are to pull another one.
  returned: state is chosen
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

import os
from functools import partial
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from pennypod.acceptance import run_target
from pennypod.ansible import run_module
from pennypod.clock import SystemClock
from pennypod.errors import InputError
from pennypod.events import Events
from pennypod.golden import Bake, Bakery, Choice, Golden, GoldenStore, Pulls, Recipe, content_hash, image_maker
from pennypod.ledger import Ledger, open_ledger
from pennypod.model.image import RegistryLogin, parse_repository
from pennypod.oci.logins import pull_login, push_login, snapshot_login
from pennypod.providers.base import Provider, SavesImages, TakesSnapshots
from pennypod.providers.registry import LOCAL, all_providers, is_rehearsal
from pennypod.rental import Rental, Tenancy
from pennypod.settings import Settings, load_settings
from pennypod.snapshots import Place, Snapshots
from pennypod.ssh import Ssh

ARGUMENT_SPEC: dict[str, Any] = {
    "run": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["baked", "pushed", "chosen"], "default": "baked"},
    "provider": {"type": "str", "default": "local"},
    "providers": {"type": "list", "elements": "str", "default": ["local"]},
    "registry": {"type": "str"},
    "image": {"type": "dict", "default": {}},
    "requirements": {"type": "dict", "default": {}},
    "python": {"type": "str", "default": "python3"},
    "pod_home": {"type": "str", "default": "/root/pennypod"},
    "role_dir": {"type": "path"},
}


def body(module: AnsibleModule) -> dict[str, Any]:
    """Make the image, push it, or find one."""
    options, run = module.params, module.params["run"]
    settings = load_settings()
    ledger = open_ledger(settings)
    providers = all_providers(settings)
    events = Events(settings.run_dir(run), run)
    if options["state"] == "chosen":
        return _chosen(options, settings, providers, ledger.run(run).job, events)
    if options["state"] == "pushed":
        return _pushed(module, settings, providers, events)
    return _baked(module, settings, providers, ledger, events)


def _baked(
    module: AnsibleModule, settings: Settings, providers: dict[str, Provider], ledger: Ledger, events: Events
) -> dict[str, Any]:
    options, run = module.params, module.params["run"]
    clock, name = SystemClock(), options["provider"]
    recipe = _recipe(options, name, ledger.run(run).job, providers)
    maker: object = providers.get(name)
    place = _place(options["registry"] or "") if isinstance(maker, TakesSnapshots) else None
    if module.check_mode:
        saved = maker.saved_images() if isinstance(maker, SavesImages) else {}
        would_be, _ = GoldenStore(settings.home).would_take(recipe.job, saved)
        return {**_result({}, changed=True), "name": would_be, "diff": {"before": {}, "after": {"name": would_be}}}
    tenancy = _tenancy_of(run, Rental(providers, ledger, clock), name)
    bake = Bake(
        run=run,
        pod_id=tenancy.pod.pod_id,
        recipe=recipe,
        role_hash=_role_hash(options["role_dir"]),
        python=options["python"],
        pod_home=options["pod_home"],
    )
    begun = clock.now()

    def tell(text: str) -> None:
        events.emit("bootstrap", text)

    if isinstance(maker, TakesSnapshots) and place is not None:
        ssh = Ssh(run_target(settings, run, tenancy.address))
        golden = Snapshots(settings, maker, clock).bake(bake, ssh, place, ledger, tell)
    else:
        golden = Bakery(settings, image_maker(name, providers), clock).bake(bake, ledger, tell)
    took = clock.now() - begun
    _tell(events, golden.name, golden.bytes, golden.layer_bytes, took)
    return _result(golden.as_document(), changed=True)


def _pushed(
    module: AnsibleModule, settings: Settings, providers: dict[str, Provider], events: Events
) -> dict[str, Any]:
    options, run = module.params, module.params["run"]
    to = parse_repository(options["registry"] or "")
    made = [golden for golden in GoldenStore(settings.home).all() if golden.run == run]
    if not made:
        raise InputError(f"run {run} has baked no image that could be pushed")
    golden = made[-1]
    if golden.remote.startswith(f"{to}@") and golden.only_remote:
        return _result(golden.as_document(), changed=False)  # its host has pushed it
    if module.check_mode:
        changed = not golden.remote.startswith(f"{to}@")
        return _result(golden.as_document(), changed=changed, before={"remote": golden.remote})
    bakery = Bakery(settings, image_maker(golden.provider, providers), SystemClock())
    login, begun = push_login(to.host, os.environ), SystemClock().now()
    pushed = bakery.push(golden, to, login, _registry(to.host, login), lambda text: events.emit("teardown", text))
    took = SystemClock().now() - begun
    events.emit("teardown", f"{to.host} has confirmed {pushed.name} after {took:.0f} s: {pushed.remote}")
    return _result(pushed.as_document(), changed=pushed != golden, before={"remote": golden.remote})


def _chosen(
    options: dict[str, Any], settings: Settings, providers: dict[str, Provider], job: str, events: Events
) -> dict[str, Any]:
    found: dict[str, Golden] = {}
    notes = []
    for name in options["providers"]:
        choice = _choice(options, settings, providers, job, name)
        if choice.note:
            notes.append(choice.note)
            events.emit("rent", f"warning: {choice.note}")
        if choice.golden is not None:
            found[name] = choice.golden
            where = "" if name == LOCAL else f", at {name} from {choice.golden.reference.partition('@')[0]}"
            events.emit("rent", f"starting from {choice.golden.name}, {choice.golden.digest[:19]}{where}")
    return {
        "changed": False,
        "image": {name: golden.reference for name, golden in found.items()},
        "digest": {name: golden.digest for name, golden in found.items()},
        "instead": {name: str(options["image"].get(name, "")) for name in found if name != LOCAL},
        "note": "; ".join(notes),
        "diff": {"before": {}, "after": {}},
    }


def _choice(options: dict[str, Any], settings: Settings, providers: dict[str, Provider], job: str, name: str) -> Choice:
    """Where pods are made on this machine its engine has the images, elsewhere a registry has."""
    if name == LOCAL:
        bakery = Bakery(settings, image_maker(name, providers), SystemClock())
        return bakery.choose(_recipe(options, name, job, providers))
    pulls = Pulls(name, partial(pull_login, environ=os.environ), _registry, beside_us=is_rehearsal(name))
    return pulls.choose(GoldenStore(settings.home).all(), Recipe(job, name, "", options["requirements"]))


def _registry(host: str, login: RegistryLogin | None) -> Any:
    from pennypod.oci.client import Registry  # its HTTP library costs a tenth of a second

    return Registry(host, login)


def _recipe(options: dict[str, Any], name: str, job: str, providers: dict[str, Provider]) -> Recipe:
    image = str(options["image"].get(name, ""))
    provider: object = providers.get(name)
    base = image if isinstance(provider, TakesSnapshots) else image_maker(name, providers).image_base(image)
    return Recipe(job, name, base, options["requirements"])


def _place(registry: str) -> Place:
    """Where a pod's host is to push."""
    if not registry:
        raise InputError("the pod's host pushes the image itself: say where to, with -e registry=HOST/REPO")
    to = parse_repository(registry)
    login = snapshot_login(to.host, os.environ)
    return Place(to, login, _registry(to.host, login))


def _tell(events: Events, name: str, size: int, added: int, took_s: float) -> None:
    sizes = f"{size / 1e6:.0f} MB, {added / 1e6:.0f} MB more than its base"
    events.emit("bootstrap", f"{name} is made after {took_s:.0f} s: {sizes}")


def _tenancy_of(run: str, rental: Rental, provider: str) -> Tenancy:
    found = rental.existing(run)
    if found is None or found.attempt.provider != provider:
        raise InputError(f"run {run} has no pod at {provider} to make an image of")
    return found


def _role_hash(folder: str | None) -> str:
    return content_hash(Path(folder)) if folder else ""


def _result(golden: dict[str, Any], *, changed: bool, before: dict[str, Any] | None = None) -> dict[str, Any]:
    provider = golden.get("provider", "")
    after = {"name": golden.get("name", ""), "remote": golden.get("remote", "")} if changed else {}
    return {
        "changed": changed,
        "name": golden.get("name", ""),
        "golden": golden,
        "image": {provider: golden["reference"]} if golden else {},
        "digest": {provider: golden["digest"]} if golden else {},
        "diff": {"before": (before or {}) if changed else {}, "after": after},
    }


def main() -> None:
    run_module(ARGUMENT_SPEC, body)


if __name__ == "__main__":
    main()
