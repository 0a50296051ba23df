#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: bring a run's weights, log and other results home. Runs on localhost."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: run_weights
short_description: Bring a run's weights, log and other results home
description:
  - Finds the best checkpoint wherever the trainer nested it. Of the files that match, the newest one that is whole
    wins - not empty, not half-written, at rest, with an intact container (zip, safetensors, ONNX, HDF5).
  - Brings it home before anything else, compares its hash with the pod's and renames it into place in
    C(weights/) of I(artifacts_dir). Then come C(train.log) and what I(extra) names, into C(extra/).
  - Fails when no checkpoint is whole. A file of I(extra) that cannot be fetched is only a warning.
  - Nothing on the pod is changed. Files that are here already are not fetched again. What is home is in the ledger.
options:
  artifacts_dir:
    description: The run's folder for results.
    type: path
    required: true
  patterns:
    description:
      - Globs under C(out/) that find the best checkpoint, in order of preference. The first one with a whole match
        counts.
    type: list
    elements: str
    default: ["**/best.pt"]
  extra:
    description: Globs under C(out/) of other files to bring home.
    type: list
    elements: str
    default: []
extends_documentation_fragment:
  - pennypod.pod
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - pennypod
"""

EXAMPLES = r"""
- name: Bring the weights home
  run_weights:
    run: demo-1201-k3f7q
    host: 127.0.0.1
    port: 40022
    key_file: /home/me/.local/state/pennypod/runs/demo-1201-k3f7q/id_ed25519
    known_hosts: /home/me/.local/state/pennypod/runs/demo-1201-k3f7q/known_hosts
    artifacts_dir: artifacts/demo-1201-k3f7q
    patterns: ["**/best.pt"]
    extra: ["**/results.csv"]
  delegate_to: localhost
  register: weights
"""

RETURN = r"""
weights:
  description:
    - The best checkpoint - path here, bytes, sha256, remote path on the pod, mtime on the pod.
    - C(early) says that it is a verified copy from during the training, since the pod has no whole one any more.
  returned: success
  type: dict
  sample:
    path: artifacts/demo-1201-k3f7q/weights/best.pt
    bytes: 5364112
    sha256: 6d2f0a...
    remote: /root/pennypod/out/runs/detect/train/weights/best.pt
    mtime: 1764602291.5
    early: false
artifacts:
  description:
    - Everything that is home and verified - path, bytes, sha256, kind (weights, log or extra).
  returned: success
  type: list
  elements: dict
problems:
  description: What could not be fetched and why.
  returned: success
  type: list
  elements: str
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
from pennypod.errors import PennypodError, SshError, WeightsError
from pennypod.events import Events
from pennypod.podwork import (
    POD_OPTIONS,
    Fence,
    GuardWatch,
    artifact,
    connect,
    counted,
    note_artifacts,
    show_bytes,
)
from pennypod.settings import load_settings
from pennypod.transfer import Fetched
from pennypod.weights import (
    Found,
    RemoteFile,
    Search,
    already_here,
    bring_extras,
    bring_home,
    bring_log,
    brought_home,
    check_patterns,
    find_all,
    find_files,
    log_search,
    no_weights,
    weights_target,
)

ARGUMENT_SPEC: dict[str, Any] = {
    **POD_OPTIONS,
    "artifacts_dir": {"type": "path", "required": True},
    "patterns": {"type": "list", "elements": "str", "default": ["**/best.pt"]},
    "extra": {"type": "list", "elements": "str", "default": []},
}


class Weights:
    """One call of the module."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.options: dict[str, Any] = module.params
        settings = self.settings = load_settings()
        run = self.options["run"]
        self.clock = SystemClock()
        self.events = Events(settings.run_dir(run), run)
        self.fence = Fence(settings, run, self.clock)
        self.keep_guard = GuardWatch(settings, run, "weights", self.events, self.clock, module.warn)
        self.ssh = connect(self.options, settings, self.clock)
        self.artifacts_dir = Path(self.options["artifacts_dir"])
        self.changed = False
        self.problems: list[str] = []

    def body(self) -> dict[str, Any]:
        """Checkpoint first; then, whether or not there was one, the log and the rest."""
        check_patterns([*self.options["patterns"], *self.options["extra"]])
        self.on_tick()
        here = brought_home(self.artifacts_dir)
        try:
            best, log, extras = self.look()
        except SshError as exc:
            if here is not None:
                exc.details["early"] = artifact(here[1], "weights")
            raise
        missing: WeightsError | None = None
        weights: tuple[RemoteFile, Fetched] | None = None
        early = False
        try:
            weights, early = self.checkpoint(best, here)
        except WeightsError as exc:
            missing = exc
        artifacts = [artifact(weights[1], "weights")] if weights else []
        if not self.module.check_mode:
            artifacts += self.rest(log, extras, weights[0].path if weights else "")
            note_artifacts(self.settings, self.options["run"], artifacts)
        if weights is None:
            assert missing is not None
            missing.details["artifacts"] = artifacts
            raise missing
        remote, fetched = weights
        for problem in self.problems:
            self.module.warn(problem)
        after = {"weights": str(fetched.path), "sha256": fetched.sha256}
        return {
            "changed": self.changed,
            "weights": {
                "path": str(fetched.path),
                "bytes": fetched.bytes,
                "sha256": fetched.sha256,
                "remote": remote.path,
                "mtime": remote.mtime,
                "early": early,
            },
            "artifacts": artifacts,
            "problems": self.problems,
            "diff": {"before": {} if self.changed else after, "after": after},
        }

    def look(self) -> list[Found]:
        """Checkpoint, log and extras. Of the last only what is small: reading large ones must not delay the first."""
        o = self.options
        best = Search(o["patterns"], best=True, deep=True, inline=True)
        return find_all(self.ssh, o["pod_home"], [best, log_search(), Search(o["extra"], small=True)])

    def on_tick(self) -> None:
        """Raises FencedError when the run is not ours any more."""
        self.fence()
        if not self.module.check_mode:
            self.keep_guard()

    def checkpoint(
        self, found: Found, here: tuple[RemoteFile, Fetched] | None
    ) -> tuple[tuple[RemoteFile, Fetched], bool]:
        """The best checkpoint, home. Raises WeightsError when there is none anywhere."""
        if not found.files:
            error = no_weights(self.options["patterns"], found.rejected)
            if here is None:
                raise error
            self.problems.append(f"{error}; the copy from during the training is used instead: {here[1].path}")
            return here, True
        remote = found.files[0]
        target = weights_target(remote, self.artifacts_dir)
        known = already_here(target, remote)
        self.changed = known is None
        if self.module.check_mode:
            return (remote, known or Fetched(target, remote.bytes, remote.sha256)), False
        self.events.emit("weights", f"best checkpoint: {remote.relative}", total_bytes=remote.bytes)
        show = show_bytes(self.events, "weights", remote.relative, self.clock, self.on_tick)
        content = found.contents.get(remote.path)
        fetched = bring_home(self.ssh, remote, self.artifacts_dir, on_progress=show, content=content)
        text = f"{target.name} is home and verified, sha256 {fetched.sha256[:12]}"
        self.events.emit("weights", text, bytes=fetched.bytes, total_bytes=fetched.bytes)
        return (remote, fetched), False

    def rest(self, found_log: Found, found: Found, checkpoint: str) -> list[dict[str, Any]]:
        """Log and extras: each failure is a problem to mention, never the end."""
        o = self.options
        artifacts: list[dict[str, Any]] = []
        try:
            show = show_bytes(self.events, "weights", "train.log", self.clock, self.on_tick)
            log = bring_log(self.ssh, found_log, self.artifacts_dir, on_progress=show)
            if log is not None:
                artifacts.append(artifact(log[0], "log"))
                self.changed = self.changed or log[1]
            extras = bring_extras(
                self.ssh,
                find_files(self.ssh, o["pod_home"], o["extra"]) if found.left else found,
                self.artifacts_dir,
                skip=frozenset([checkpoint]),
                should_stop=self.on_tick,
                on_progress=show_bytes(self.events, "weights", "other results", self.clock, self.on_tick),
            )
        except PennypodError as exc:
            if exc.code == "fenced":
                raise
            self.problems.append(f"log and other results are not all here: {exc}")
            return artifacts
        self.changed = self.changed or extras.changed
        self.problems += extras.problems
        return artifacts + [artifact(fetched, "extra") for fetched in extras.files]


def body(module: AnsibleModule) -> dict[str, Any]:
    weights = Weights(module)
    with counted(weights.settings, module.params["run"], weights.ssh):
        return weights.body()


def main() -> None:
    run_module(ARGUMENT_SPEC, body)


if __name__ == "__main__":
    main()
