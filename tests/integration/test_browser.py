"""The whole thing at once: signed webhook, real pods, weights in the bucket and at home, seen with a real browser."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import browser as browsers
import canaries
import pytest
from browser import Browser
from pennypod.providers.registry import all_providers
from pennypod.store.embedded import EmbeddedStore
from pod_bucket import pod_bucket
from serving import ADMIN, SECRET, Rehearsal, Served, Serving
from workspace import BIN, TINY_JOB, Workspace, wait_until

pytest.importorskip("boto3", reason="the store extra is not installed")
pytestmark = [
    pytest.mark.pod,
    pytest.mark.heavy,
    pytest.mark.xdist_group("serve"),
    pytest.mark.skipif(
        bool(browsers.missing()),
        reason=f"no {browsers.missing()} here: `make test-tools` installs them where there is a package of them",
    ),
]

# As the tiny trainer, with its weights kept in the bucket before it ends.
KEEPS = (
    'sh "$PENNYPOD_CODE/train.sh" 2 0 &&'
    ' $PENNYPOD_CHECKPOINT_HOOK 2 "$PWD/runs/tiny/weights" best.npz &&'
    " for i in $(seq 300); do grep -qs '\"kept_epoch\": 2' ../store/state.json && break; sleep 0.1; done"
)
# Columns of the live pods, and of the ended runs.
RUN, PRICE, LEFT = 0, 5, 7
OUTCOME, PODS = 2, 3
SLOW_S = 200
# Of its own: other tests have the shared ones in processes of theirs.
KEYS = {"webhook": canaries.new_key("webhook"), "admin": canaries.new_key("admin")}


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path)
    jobs = workspace.root / "group_vars"
    command = next(line for line in TINY_JOB.splitlines() if line.startswith("training_command"))
    keeping = TINY_JOB.replace(command, f"training_command: {json.dumps(KEEPS)}")
    (jobs / "job_keeping.yml").write_text(keeping + "checkpoint_store: true\nwebhook_overrides: []\n")
    yield workspace
    for pod in workspace.pods():  # of a test that has failed
        all_providers(workspace.settings)["local"].destroy(pod.pod_id)


@pytest.fixture
def served(workspace: Workspace) -> Iterator[Serving]:
    secrets = f"{SECRET},{KEYS['webhook']}"
    serving = Served(workspace, PENNYPOD_WEBHOOK_SECRET=secrets, PENNYPOD_ADMIN_TOKEN=KEYS["admin"])
    serving.start()
    yield serving
    serving.close()


@pytest.fixture
def rehearsal(tmp_path: Path) -> Iterator[Rehearsal]:
    rehearsal = Rehearsal(tmp_path, "limits: {running: 1}")
    rehearsal.start()
    yield rehearsal
    rehearsal.close()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[browsers.Driver]:
    folder = tmp_path / "browser"
    folder.mkdir()
    with browsers.driver(folder) as driver:
        yield driver


def check_live_row(row: list[str]) -> None:
    assert row[PRICE].startswith("$")
    assert row[PRICE].endswith("/h")
    assert row[LEFT].endswith("s")
    assert row[LEFT] != "0s"


def check_forged_buttons(window: Browser, served: Serving, run: str) -> None:
    """Neither a script without the form's token nor a page of elsewhere can press a button."""
    script = "return fetch(`/runs/${arguments[0]}/cancel`, {method: 'POST'}).then(answer => answer.status)"
    assert window.evaluate(script, run) == 403
    form = f"<form method=post action={served.url}/runs/{run}/cancel><button>Cancel</button></form>"
    window.open(f"data:text/html,{form}")
    window.click("//button")
    wait_until(lambda: "login_required" in window.text(), 10, "the browser has sent no cookie from elsewhere")
    assert served.status(run)["cancel_requested"] is False
    window.complaints()  # the console tells of the refusals, as it should
    window.open(served.url)


def check_is_home_and_kept(workspace: Workspace, run: str) -> None:
    (document,) = [found for found in workspace.documents() if found["run"] == run]
    (weights,) = [item for item in document["artifacts"] if item["kind"] == "weights"]
    at_home = (workspace.artifacts / run / weights["path"]).read_bytes()
    kept = workspace.root / "kept.tar"
    pennypod(workspace, "store", "fetch", run, str(kept))
    with tarfile.open(kept) as tar:
        file = tar.extractfile("best.npz")
        assert file is not None
        assert file.read() == at_home


def check_receipt(workspace: Workspace, text: str) -> None:
    """Whoever has the file from the page can check it, with this home's ledger beside it or without."""
    file = workspace.root / "from-the-page.json"
    file.write_text(text)
    assert "1 pod" in pennypod(workspace, "verify", str(file))
    pennypod(workspace, "verify", str(file), "--offline")


def check_no_key_is_left(workspace: Workspace, served: Serving, store: EmbeddedStore, run: str) -> None:
    """The keys of the bucket, which is served from the home, are in two files there for their owner, and only there."""
    keys = [*KEYS.values(), store.config.secret_key]
    private = [workspace.home / "store" / name for name in ("keys.json", "embedded.json")]
    places = [workspace.home, workspace.artifacts, served.log_file]
    assert canaries.in_files(keys, places, allowed=private) == []
    assert sorted(canaries.in_files(keys, places)) == sorted(map(str, private))
    assert canaries.in_texts(keys, served.shown(run, admin=KEYS["admin"])) == []
    assert canaries.in_process_arguments(keys) == set()


def check_without_javascript(driver: browsers.Driver, served: Serving, ended: list[str]) -> None:
    with driver.window(javascript=False) as window:
        window.open("data:text/html,<noscript>scripts are off</noscript>")
        assert window.text() == "scripts are off"
        window.open(served.url)
        assert window.cells("ended", ended[RUN]) == ended
        assert "Nothing bills." in window.text()
        assert window.complaints() == []


def pennypod(workspace: Workspace, *arguments: str) -> str:
    done = subprocess.run(
        [str(BIN / "pennypod"), *arguments], env=workspace.environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def log_in(window: Browser) -> None:
    window.type("input[name=token]", ADMIN)
    window.click("//button[text()='Log in']")


def test_a_browser_sees_a_webhooks_run_from_its_pod_to_its_receipt(
    served: Serving, workspace: Workspace, driver: browsers.Driver
) -> None:
    with driver.window() as window:
        window.open(served.url)
        for shown in ("Nothing bills.", "No run.", "Nobody waits.", "None yet."):
            assert shown in window.text()
        with pod_bucket(workspace.settings, workspace.home) as store:
            run = served.start_run("keeping")
            wait_until(lambda: window.cells("pods", run), SLOW_S, "the page shows a pod without being loaded again")
            check_live_row(window.cells("pods", run))
            wait_until(lambda: window.cells("ended", run), SLOW_S, "the run has ended")
            ended = window.cells("ended", run)
            assert ended[OUTCOME : PODS + 1] == ["succeeded", "1 proven gone"], served.status(run)
            assert "Nothing bills." in window.text()
            assert workspace.pods() == []
            check_is_home_and_kept(workspace, run)
            check_no_key_is_left(workspace, served, store, run)
        window.click(f"//table[@id='ended']//tr[td='{run}']//a")
        check_receipt(workspace, window.json_text())
        assert window.complaints() == []
        assert window.hosts() == {f"127.0.0.1:{served.port}"}


def test_buttons_work_in_a_browser_and_from_no_other_page(rehearsal: Rehearsal, driver: browsers.Driver) -> None:
    running, waiting = rehearsal.start_run(), rehearsal.start_run()
    rehearsal.wait_for(running, stage="watch")
    with driver.window() as window:
        window.open(rehearsal.url)
        log_in(window)
        assert window.complaints() == []
        check_forged_buttons(window, rehearsal, waiting)
        window.click(f"//table[@id='queue']//tr[td='{waiting}']//button[text()='Cancel']")
        wait_until(lambda: window.cells("ended", waiting), 30, "the run that waited has ended")
        window.click(f"//table[@id='pods']//tr[td='{running}']//button[text()='Destroy']")
        wait_until(lambda: window.cells("ended", running), 30, "the run whose pod was destroyed has ended")
        assert [window.cells("ended", run)[OUTCOME] for run in (running, waiting)] == ["cancelled"] * 2
        ended = window.cells("ended", running)
        window.click(f"//table[@id='ended']//tr[td='{running}']//a")
        assert [pod["run"] for pod in json.loads(window.json_text())["pods"]] == [running]
        assert rehearsal.pods() == []
        assert window.complaints() == []
        assert window.hosts() == {f"127.0.0.1:{rehearsal.port}"}
    check_without_javascript(driver, rehearsal, ended)
