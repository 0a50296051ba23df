#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: one pod for one run, or proof that there is none. Runs on localhost."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_pod
short_description: Rent one pod for a run, or prove that it is gone
description:
  - With C(state=present), walks the offers until one gives a pod that can be logged in to and passes the acceptance
    check. A pod that does not work out is destroyed and proven gone before the next offer is tried.
  - With C(state=resumed), finds the pod that an earlier controller of the run has left behind, by the lease in its
    name. Its address is read anew, its host key stays pinned, and a login proves that it is there. Rents nothing. The
    run must have been taken over with M(run_ledger) before.
  - With C(state=cleared), looks whether the run's pod was taken away by its provider. When it was, and the run may have
    another one, what is left of it is destroyed and proven gone; RV(again) says so. Otherwise nothing is touched.
  - With C(state=absent), destroys every pod of the run and waits until their absence is proven.
  - Idempotent by run id. The run must have been opened with M(run_ledger).
  - Before the first create a guard process is started which destroys the run's pods when the command that runs this
    module ends, however it ends.
options:
  run:
    description: The run id.
    type: str
    required: true
  state:
    description: Whether the run shall have a pod, and whether it may be a new one.
    type: str
    choices: [present, resumed, cleared, absent]
    default: present
  offers:
    description: The offers to try, in order, as M(gpu_offer_info) returns them. Needed for C(state=present).
    type: list
    elements: dict
    default: []
  image:
    description:
      - The image by provider name.
      - C(template:ID) starts the pod from a template of the account, which names the image and may bring a login for
        its registry and environment variables. The ID is the template's hash at Vast.ai, its id at RunPod.
    type: dict
    default: {}
  image_digest:
    description: The image's digest by provider name, where it is known; for the ledger and C(run.json).
    type: dict
    default: {}
  image_instead:
    description: The image by provider name that the next pods start from once one of C(image) gave no usable pod there.
    type: dict
    default: {}
  disk_gb:
    description: Disk to rent, in GB.
    type: float
    default: 20
  deadline_s:
    description: Seconds from now after which the pod is destroyed whatever it does. Needed for C(state=present).
    type: float
  worst_case_usd:
    description: What the run may cost at worst, for the ledger.
    type: float
    default: 0
  max_cost_usd:
    description:
      - Highest worst-case cost of the run, in dollars. What failed attempts have cost counts towards it, so an offer
        that fitted at first may be passed over later.
    type: float
  max_price_usd_per_h:
    description: Highest all-in price per hour, in dollars. A pod that turns out to be dearer is given back.
    type: float
  lease_minutes:
    description:
      - The pod ends itself when nobody has renewed its lease for so long; the guard does so while it lives. 0 means at
        the deadline only, which is also what a run with C(keep_on_disconnect) gets.
    type: float
    default: 60
  env:
    description: Environment variables of the pod. Never put a key here.
    type: dict
    default: {}
  min_memory_gb:
    description: Least memory the acceptance check asks for, in GB.
    type: float
    default: 0
  min_free_disk_gb:
    description: Least free disk the acceptance check asks for, in GB.
    type: float
    default: 0
  allow_no_torch:
    description: Accept a GPU on which nothing could be multiplied since the image has no torch.
    type: bool
    default: false
  gate_time_limits:
    description: Seconds that single parts of the acceptance check may take, by name.
    type: dict
    default: {}
  beside:
    description:
      - A standalone Python script on this machine, C(script), that runs on the pod with C(args) beside the acceptance
        check, which takes a second or more of a pod that bills. It is for what has to be asked anyway, and must not
        change anything; RV(beside) has what it said.
    type: dict
    default: {}
  pod_home:
    description: Our folder on the pod, in which C(state=resumed) looks for the training.
    type: str
    default: /root/pennypod
  login_s:
    description: How many seconds C(state=resumed) tries to log in.
    type: float
    default: 300
  restart:
    description: Whether C(state=resumed) may start a pod that was stopped, for what is on its disk.
    type: bool
    default: true
  max_evictions:
    description: How many pods a run may lose to their providers and still get another. Used with C(state=cleared).
    type: int
    default: 0
  after:
    description: The number of an attempt; with C(state=cleared), only the loss of a later one counts.
    type: int
    default: 0
  reason:
    description: Why the pod is destroyed, for the ledger. Used with C(state=absent).
    type: str
    default: asked for
  failed:
    description:
      - The run has failed. With C(state=absent), the provider is then asked what has become of the pod before it is
        destroyed; RV(cause) tells it.
    type: bool
    default: false
extends_documentation_fragment:
  - pennypod.caps
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - pennypod
"""

EXAMPLES = r"""
- name: Rent a pod
  gpu_pod:
    run: demo-1201-k3f7q
    offers: "{{ plan.offers }}"
    deadline_s: "{{ plan.deadline_s }}"
    image:
      local: stock
  delegate_to: localhost
  register: pod

- name: Go on with the pod of a run whose controller has died
  gpu_pod:
    run: demo-1201-k3f7q
    state: resumed
  delegate_to: localhost
  register: pod

- name: Prove that it is gone
  gpu_pod:
    run: demo-1201-k3f7q
    state: absent
  delegate_to: localhost
"""

RETURN = r"""
pod:
  description: The run's pod, empty when there is none.
  returned: always
  type: dict
  sample:
    provider: local
    pod_id: 5f2c9d1e8a44
    name: pennypod-demo-1201-k3f7q-a1-tssb3kq-nq4z7m
    machine_id: local-1
    gpu: CPU
    price_usd_per_h: 0.2
    host: 127.0.0.1
    port: 40022
    user: root
    key_file: /home/me/.local/state/pennypod/runs/demo-1201-k3f7q/id_ed25519
    known_hosts: /home/me/.local/state/pennypod/runs/demo-1201-k3f7q/known_hosts
    control_path: /run/user/1000/pennypod/5d1c6e9a0b7f4821
    python: /usr/bin/python3
training:
  description:
    - Where the run's training stands on the pod - C(absent) when it was never started, C(running), C(finished), or
      C(over) when no pod is left and the weights have come home before.
  returned: state is resumed
  type: str
  sample: running
gate:
  description: The report of the acceptance check.
  returned: when a pod was rented
  type: dict
beside:
  description: C(rc), C(stdout) and C(stderr) of the script I(beside); empty when it has not answered in time.
  returned: when a pod was rented
  type: dict
attempts:
  description: Every attempt of the run with its outcome.
  returned: always
  type: list
  elements: dict
again:
  description: Whether the run may rent another pod for the one that it has lost, which is proven gone then.
  returned: state is cleared
  type: bool
why:
  description: What has become of the pod, and why there may or may not be another.
  returned: state is cleared
  type: str
  sample: "pod 5f2c9d1e8a44 is no longer listed at runpod; going on on another pod (loss 1 of at most 2)"
attempt:
  description: The number of the attempt that was lost, C(after) of the next look when there was none.
  returned: state is cleared
  type: int
receipts:
  description: The proof, for each pod that is gone.
  returned: state is absent
  type: list
  elements: dict
cause:
  description: What the provider said of the lost pod of a failed run, and what to do. Empty when there was none.
  returned: state is absent
  type: str
  sample: "vast shows pod 17000007 as stopped: exited evicted; start the run again to rent another one"
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
from pennypod import processes
from pennypod.acceptance import GateOptions, PodLogin, Script, run_key, run_target
from pennypod.ansible import run_module
from pennypod.clock import SystemClock
from pennypod.errors import FencedError, InputError, NotReadyError
from pennypod.escrow import Escrow
from pennypod.events import Events
from pennypod.eviction import LOST, look_for_loss
from pennypod.guard import ensure_guard
from pennypod.ledger import AttemptState, Ledger, open_ledger
from pennypod.model.image import RegistryLogin, registry_of
from pennypod.model.money import usd_to_micros
from pennypod.model.pod import SshAddress
from pennypod.oci.logins import pull_login
from pennypod.planning import caps_from, held, offer_from, terms_from
from pennypod.podwork import cause_of_loss, count_last, explained
from pennypod.providers.base import Provider
from pennypod.providers.registry import all_providers, is_rehearsal, prepare
from pennypod.rental import Rental, RentRequest, Tenancy
from pennypod.report import had_its_weights, run_document
from pennypod.settings import Settings, load_settings
from pennypod.ssh import Ssh, pinned_host_keys
from pennypod.training import would_launch

ARGUMENT_SPEC: dict[str, Any] = {
    "run": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["present", "resumed", "cleared", "absent"], "default": "present"},
    "offers": {"type": "list", "elements": "dict", "default": []},
    "image": {"type": "dict", "default": {}},
    "image_digest": {"type": "dict", "default": {}},
    "image_instead": {"type": "dict", "default": {}},
    "disk_gb": {"type": "float", "default": 20},
    "deadline_s": {"type": "float"},
    "worst_case_usd": {"type": "float", "default": 0},
    "max_cost_usd": {"type": "float"},
    "max_cost_usd_per_job": {"type": "float"},
    "max_cost_usd_per_day": {"type": "float"},
    "max_cost_usd_account": {"type": "float"},
    "max_price_usd_per_h": {"type": "float"},
    "lease_minutes": {"type": "float", "default": 60},
    "env": {"type": "dict", "default": {}},
    "min_memory_gb": {"type": "float", "default": 0},
    "min_free_disk_gb": {"type": "float", "default": 0},
    "allow_no_torch": {"type": "bool", "default": False},
    "gate_time_limits": {"type": "dict", "default": {}},
    "beside": {"type": "dict", "default": {}},
    "pod_home": {"type": "str", "default": "/root/pennypod"},
    "login_s": {"type": "float", "default": 300},
    "restart": {"type": "bool", "default": True},
    "max_evictions": {"type": "int", "default": 0},
    "after": {"type": "int", "default": 0},
    "reason": {"type": "str", "default": "asked for"},
    "failed": {"type": "bool", "default": False},
}


def body(module: AnsibleModule) -> dict[str, Any]:
    """Bring the run's pod to the wanted state."""
    settings = load_settings()
    ledger = open_ledger(settings)
    clock = SystemClock()
    providers = all_providers(settings)
    rental = Rental(providers, ledger, clock)
    ledger.run(module.params["run"])
    if module.params["state"] == "absent":
        return _absent(module, settings, ledger, rental, providers)
    if module.params["state"] == "cleared":
        return _cleared(module, settings, ledger, rental, providers)
    if module.params["state"] == "resumed":
        return _resumed(module, settings, ledger, rental)
    return _present(module, settings, ledger, rental, providers)


def _present(
    module: AnsibleModule, settings: Settings, ledger: Ledger, rental: Rental, providers: dict[str, Provider]
) -> dict[str, Any]:
    options, run = module.params, module.params["run"]
    if options["deadline_s"] is None:
        raise InputError("deadline_s is needed with state=present: a pod without a deadline is a forgotten pod")
    if options["lease_minutes"] < 0:
        raise InputError("lease_minutes is a time: 0 or more")
    offers = [offer_from(document) for document in options["offers"]]
    if module.check_mode:
        found = rental.existing(run)
        pod = _pod(settings, found) if found else {}
        return _result(
            ledger, run, changed=found is None, before=pod, after=pod or {"run": run, "state": "rented"}, pod=pod
        )
    clock = SystemClock()
    events = Events(settings.run_dir(run), run)
    deadline = clock.now() + options["deadline_s"]
    _, public_key = run_key(settings, run)
    record = ledger.run(run)
    controller = record.controller
    if record.deadline is None:
        ledger.set_plan(run, deadline=deadline, worst_case_micros=usd_to_micros(options["worst_case_usd"]))
    else:
        deadline = record.deadline  # a second call never buys more time
    ledger.finish_stage(run, "plan", clock.now())
    ledger.start_stage(run, "rent", clock.now())

    def tell(text: str) -> None:
        if not processes.is_alive(controller):  # a build may take minutes, and there is no guard yet that would end it
            raise FencedError("the command that started this run has ended")
        events.emit("rent", text)

    # Whatever has to exist before the first create is made now: with an intent open, minutes of building would count.
    prepare({offer.provider for offer in offers}, options["image"], providers, tell)
    gate = _gate(options, [(offer.provider, offer.gpu, offer.gpu_count) for offer in offers])
    login = PodLogin(settings, run, gate, clock, lambda _why: ledger.raise_if_fenced(run), partial(events.emit, "rent"))
    request = RentRequest(
        run=run,
        offers=offers,
        images=options["image"],
        disk_gb=options["disk_gb"],
        deadline=deadline,
        public_key=public_key,
        renter=processes.own_identity(),
        controller=controller,
        max_attempts=max(1, len(offers)),
        terms={offer.offer_id: terms_from(item) for offer, item in zip(offers, options["offers"], strict=True)},
        caps=held(caps_from(options), ledger.attempts(run)),
        env={str(name): str(value) for name, value in options["env"].items()},
        lease_s=0 if record.keep_on_disconnect else round(options["lease_minutes"] * 60),
        instead={str(name): str(image) for name, image in options["image_instead"].items()},
        logins=_logins([*options["image"].values(), *options["image_instead"].values()]),
    )
    tenancy = rental.rent(request, login, events.emit, before_create=lambda: ensure_guard(settings, controller))
    if tenancy.created:
        provider = tenancy.attempt.provider
        as_planned = tenancy.image == options["image"].get(provider, "")
        digest = options["image_digest"].get(provider) if as_planned else None
        ledger.record_image(tenancy.attempt.id, tenancy.image, digest)
    pod = _pod(settings, tenancy)
    result = _result(ledger, run, changed=tenancy.created, before={} if tenancy.created else pod, after=pod, pod=pod)
    return {**result, "gate": tenancy.gate, "beside": _beside(login)}


def _logins(images: list[Any]) -> dict[str, RegistryLogin]:
    """Who pods may pull these images as, by registry, where that was set."""
    registries = {registry_of(str(image)) for image in images}
    found = {registry: pull_login(registry, os.environ) for registry in registries}
    return {registry: login for registry, login in found.items() if login is not None}


def _resumed(module: AnsibleModule, settings: Settings, ledger: Ledger, rental: Rental) -> dict[str, Any]:
    options, run = module.params, module.params["run"]
    found = rental.existing(run)
    before = _pod(settings, found) if found else {}
    if module.check_mode:
        return {**_result(ledger, run, changed=False, before=before, after=before, pod=before), "training": "absent"}
    controller = ledger.run(run).controller
    pending = [attempt for attempt in ledger.attempts(run) if not attempt.final]
    over = {**_result(ledger, run, changed=False, before={}, after={}, pod={}), "training": "over"}
    if all(attempt.state is AttemptState.DESTROYING for attempt in pending) and had_its_weights(ledger, run):
        return over
    clock = SystemClock()
    events = Events(settings.run_dir(run), run)
    known_hosts = settings.run_dir(run) / "known_hosts"
    pinned = [
        key
        for attempt in pending
        if attempt.ssh_host is not None and attempt.ssh_port is not None
        for key in pinned_host_keys(known_hosts, attempt.ssh_host, attempt.ssh_port)
    ]
    _, public_key = run_key(settings, run)
    gate = _gate(options, [(attempt.provider, attempt.gpu, attempt.gpu_count) for attempt in pending])
    login = PodLogin(
        settings, run, gate, clock, lambda _why: ledger.raise_if_fenced(run, controller), partial(events.emit, "rent")
    )
    try:
        tenancy = rental.resume(
            run,
            public_key,
            login,
            events.emit,
            pinned=pinned,
            limit_s=options["login_s"],
            restart=options["restart"],
        )
    except NotReadyError:
        if had_its_weights(ledger, run):
            return over
        raise
    pod = _pod(settings, tenancy)
    ssh = Ssh(run_target(settings, run, tenancy.address))
    training = would_launch(ssh, options["pod_home"], "true", {}, run=run).state or "absent"
    events.emit("rent", f"the training on it is {training}")
    result = _result(ledger, run, changed=pod != before, before=before, after=pod, pod=pod)
    return {**result, "gate": tenancy.gate, "training": training}


def _cleared(
    module: AnsibleModule, settings: Settings, ledger: Ledger, rental: Rental, providers: dict[str, Provider]
) -> dict[str, Any]:
    options, run = module.params, module.params["run"]
    pending = [attempt for attempt in ledger.attempts(run) if not attempt.final]
    before = {"pods": [attempt.lease_name for attempt in pending]}
    found = look_for_loss(
        ledger,
        providers,
        run,
        most=options["max_evictions"],
        after=options["after"],
        now=SystemClock().now(),
    )
    ends = found.lost if found.again and found.lost is not None and not found.lost.final else None
    if found.again and not module.check_mode:
        events = Events(settings.run_dir(run), run)
        events.emit("rent", found.why)
        if ends is not None:
            rental.destroy(ends, outcome=LOST, reason=found.said, report=events.emit)
    result = _result(
        ledger, run, changed=ends is not None, before=before, after={"pods": []} if ends else before, pod={}
    )
    number = options["after"] if found.lost is None else found.lost.attempt
    return {**result, "again": found.again, "why": found.why, "attempt": number}


def _gate(options: dict[str, Any], machines: list[tuple[str, str, int]]) -> GateOptions:
    """What to ask of machines given as (provider, gpu, count). Who pays for a GPU gets one, or the pod goes back."""
    device = "cuda"
    if all(gpu == "CPU" for _, gpu, _ in machines):
        device = "cpu"
    elif all(is_rehearsal(provider) for provider, _, _ in machines):
        device = "auto"
    return GateOptions(
        device=device,
        gpu_count=max((count for _, _, count in machines), default=1),
        min_disk_gb=options["min_free_disk_gb"],
        min_memory_gb=options["min_memory_gb"],
        allow_no_torch=options["allow_no_torch"],
        time_limits={str(name): float(seconds) for name, seconds in options["gate_time_limits"].items()},
        beside=_script(options["beside"]),
    )


def _script(asked: dict[str, Any]) -> Script | None:
    if not asked:
        return None
    if set(asked) - {"script", "args"} or not Path(str(asked.get("script", ""))).is_file():
        raise InputError(f"beside is no script of this machine, like {{script: PATH, args: []}}: {asked}")
    return Script(Path(asked["script"]), tuple(str(word) for word in asked.get("args") or []))


def _beside(login: PodLogin) -> dict[str, Any]:
    said = login.beside
    if said is None:
        return {}
    stdout, stderr = (output.decode("utf-8", "replace") for output in (said.stdout, said.stderr))
    return {"rc": said.rc, "stdout": stdout, "stderr": stderr}


def _absent(
    module: AnsibleModule, settings: Settings, ledger: Ledger, rental: Rental, providers: dict[str, Provider]
) -> dict[str, Any]:
    run = module.params["run"]
    pending = [attempt for attempt in ledger.attempts(run) if not attempt.final]
    before = {"pods": [attempt.lease_name for attempt in pending]}
    cause, reason = "", module.params["reason"]
    if not module.check_mode:
        events = Events(settings.run_dir(run), run)
        if module.params["failed"]:
            told = (cause_of_loss(providers[a.provider], a) for a in pending if a.provider in providers)
            cause = "; ".join(text for text in told if text)
        for attempt in Escrow(settings, ledger, SystemClock()).release(pending, events.emit):
            if not cause and attempt.ssh_host is not None and attempt.ssh_port is not None:
                address = SshAddress(attempt.ssh_host, attempt.ssh_port, attempt.ssh_user or "root")
                count_last(ledger, attempt, Ssh(run_target(settings, run, address)), SystemClock())
            rental.destroy(attempt, outcome="done", reason=explained(reason, cause), report=events.emit)
    result = _result(ledger, run, changed=bool(pending), before=before, after={"pods": []}, pod={})
    receipts = [attempt.receipt for attempt in ledger.attempts(run) if attempt.receipt is not None]
    return {**result, "receipts": receipts, "cause": cause}


def _pod(settings: Settings, tenancy: Tenancy) -> dict[str, Any]:
    target = run_target(settings, tenancy.attempt.run, tenancy.address)
    return {
        "provider": tenancy.attempt.provider,
        "pod_id": tenancy.pod.pod_id,
        "name": tenancy.attempt.lease_name,
        "machine_id": tenancy.attempt.machine_id,
        "gpu": tenancy.attempt.gpu,
        "price_usd_per_h": tenancy.attempt.price_micros_per_h / 1_000_000,
        "host": target.host,
        "port": target.port,
        "user": target.user,
        "key_file": str(target.key_file),
        "known_hosts": str(target.known_hosts),
        "control_path": str(target.control_path),
        "python": tenancy.gate.get("executable") or "auto_silent",
    }


def _result(
    ledger: Ledger, run: str, *, changed: bool, before: dict[str, Any], after: dict[str, Any], pod: dict[str, Any]
) -> dict[str, Any]:
    return {
        "changed": changed,
        "pod": pod,
        "attempts": run_document(ledger, run, SystemClock().now())["attempts"],
        "diff": {"before": before, "after": after},
    }


def main() -> None:
    run_module(ARGUMENT_SPEC, body)


if __name__ == "__main__":
    main()
