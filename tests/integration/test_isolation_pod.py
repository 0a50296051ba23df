"""A real pod is held to what its run needs, where it may set up rules at all; where it may not, the record says so."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pennypod
import pytest
from pennypod.providers.local.image import image_reference
from pennypod.providers.local.provider import LocalProvider
from workspace import Workspace

pytestmark = [pytest.mark.pod, pytest.mark.heavy]

SCRIPT = Path(pennypod.__file__).parent / "onpod" / "isolate.py"
# Tries an address that nobody has named, and one that the job has. Nobody is there in either case.
TRY = """\
import errno, socket, time
for name, place in (("others", ("192.0.2.7", 80)), ("named", ("192.0.2.8", 81))):
    started = time.monotonic()
    try:
        with socket.create_connection(place, timeout=1.5):
            found = "open"
    except OSError as exc:
        found = "refused" if exc.errno == errno.EHOSTUNREACH and time.monotonic() - started < 1 else "sent"
    print(name, found)
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path)
    yield workspace
    assert workspace.pods() == []


def test_a_training_reaches_only_what_its_job_has_named(workspace: Workspace) -> None:
    (workspace.root / "code" / "try.py").write_text(TRY)
    train = 'python3 "$PENNYPOD_CODE/try.py"; sh "$PENNYPOD_CODE/train.sh" 1 0'
    given = {"training_command": train, "isolation_hosts": ["192.0.2.8:81"], "isolate": True}
    done = workspace.play("-e", json.dumps(given), env={"PENNYPOD_LOCAL_NET_ADMIN": "1"}, job="tiny", smoke="true")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    document = workspace.document()
    isolation = document["isolation"]
    assert (isolation["enforced"], isolation["phase"], isolation["reason"]) == (True, "closed", "")
    assert isolation["hosts"] == ["192.0.2.8:81"]
    log = (workspace.artifacts / document["run"] / "train.log").read_text()
    assert "others refused" in log
    assert "named sent" in log
    assert "the pod could talk to what it needs" in done.stdout


def test_a_pod_without_the_capability_says_so_and_is_left_as_it_is(workspace: Workspace) -> None:
    provider = LocalProvider(workspace.settings, os.environ)
    provider.prepare("stock", lambda _said: None)
    order = {"phase": "setup", "allow": [], "setup": [], "until": 0, "install": 60}
    args = ["run", "--rm", "-i", "--pull", "never", *provider.engine.flags, "--network", "none"]
    source = SCRIPT.read_text()
    program = ["--entrypoint", "python3", image_reference("stock"), "-c", source, "apply"]
    told = provider.engine.check(*args, *program, stdin=json.dumps(order).encode() + b"\n", timeout_s=60)
    answer: dict[str, Any] = json.loads(told.removeprefix("@pennypod "))
    assert (answer["enforced"], answer["changed"]) == (False, False)
    assert "no NET_ADMIN" in answer["reason"]
