"""The CI examples, as they stand in the repository, against a real server."""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import canaries
import pytest
import yaml
from serving import SECRET, Rehearsal
from workspace import REPOSITORY, wait_until

EXAMPLES = REPOSITORY / "examples" / "ci"
SCRIPT = "train-and-wait.sh"
READ_TOKEN = "read-token-of-these-tests"
# Every program that the script may start. Its shell finds no other.
PROGRAMS = ("cat", "curl", "cut", "date", "mktemp", "od", "openssl", "rm", "sed", "sh", "sleep")
LONG_SECRET = (
    "a secret of more bytes than one block of the hash has, %s 6 \\n \"'$HOME`\xfc\xdf, is hashed before it is a key"
)
# What the two systems would put in place of their own expressions.
GITHUB = {"${{ github.sha }}": "c0ffee", "${{ github.run_id }}": "7", "${{ github.run_attempt }}": "1"}
# Another commit than above: the same payload signed in the same second is a replay.
GITLAB = {"CI_COMMIT_SHA": "decaf", "CI_JOB_ID": "9"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    rehearsal = Rehearsal(tmp_path_factory.mktemp("ci"), "poll_s: 0.5")
    rehearsal.write_job("demo", "webhook_overrides: [smoke]")
    rehearsal.http.headers["Authorization"] = f"Bearer {READ_TOKEN}"
    rehearsal.start(PENNYPOD_READ_TOKEN=READ_TOKEN)
    yield rehearsal
    rehearsal.close()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the programs that the script needs, which write down their arguments before they do their work."""
    folder = tmp_path_factory.mktemp("programs")
    for name in PROGRAMS:
        real = shutil.which(name)
        (folder / name).write_text(f"""#!/bin/sh\necho {name} "$@" >> "$0.arguments"\nexec {real} "$@"\n""")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def no_secret_is_an_argument(programs: Path) -> Iterator[None]:
    """Whatever a test lets the script do: arguments are for every user of the machine to see."""
    yield
    for file in programs.glob("*.arguments"):
        assert canaries.in_texts([SECRET, LONG_SECRET, READ_TOKEN], {file.name: file.read_text()}) == []
    assert (programs / "openssl.arguments").exists()


def shell(served: Rehearsal, command: str, where: Path, programs: Path, **more: str) -> subprocess.Popen[str]:
    environment = {
        "PATH": str(programs),
        "PENNYPOD_URL": served.url,
        "PENNYPOD_WEBHOOK_SECRET": SECRET,
        "PENNYPOD_READ_TOKEN": READ_TOKEN,
        "PENNYPOD_POLL_S": "0.2",
        **more,
    }
    return subprocess.Popen(
        ["/bin/sh", "-euc", command],
        cwd=where,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launched(served: Rehearsal) -> set[str]:
    return {entry["run"] for entry in served.journal("launch")}


def play(
    served: Rehearsal, command: str, where: Path, programs: Path, event: str = "success", **more: str
) -> tuple[int, str, str]:
    """Start the script and let the training of its run end; its exit code, the run, and what it has said."""
    before = launched(served)
    running = shell(served, command, where, programs, **more)
    wait_until(lambda: launched(served) - before or running.poll() is not None, 60, "a run is launched")
    if running.poll() is not None:
        raise AssertionError(f"the script ended with {running.returncode} before its run: {running.communicate()[0]}")
    (run,) = launched(served) - before
    served.wait_for(run, stage="watch")
    if event == "cancel":
        served.post({"action": "train_cancel", "run": run})
    else:
        served.call_back(run, event)
    said, _ = running.communicate(timeout=60)
    return running.returncode, run, said


def github_command() -> str:
    workflow = yaml.safe_load((EXAMPLES / "github-actions.yml").read_text())
    (job,) = workflow["jobs"].values()
    command = str(job["steps"][-1]["run"])
    for expression, value in GITHUB.items():
        command = command.replace(expression, value)
    return command


def gitlab_command() -> str:
    document: dict[str, Any] = yaml.safe_load((EXAMPLES / "gitlab-ci.yml").read_text())
    return "\n".join(document["train"]["script"])


def test_github_actions(served: Rehearsal, programs: Path, tmp_path: Path) -> None:
    (tmp_path / ".github").mkdir()
    shutil.copy(EXAMPLES / SCRIPT, tmp_path / ".github")
    rc, run, said = play(served, github_command(), tmp_path, programs)
    assert rc == 0, said
    assert f"{run}: succeeded" in said


def test_gitlab_ci(served: Rehearsal, programs: Path, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / SCRIPT, tmp_path)
    rc, run, said = play(served, gitlab_command(), tmp_path, programs, **GITLAB)
    assert rc == 0, said
    assert f"{run}: succeeded" in said


def test_a_run_that_does_not_succeed_fails_the_job(served: Rehearsal, programs: Path) -> None:
    command = f"""sh {SCRIPT} '{{"action": "train_start", "job": "tiny"}}'"""
    rc, _, said = play(served, command, EXAMPLES, programs, "cancel")
    assert rc == 1
    assert "cancelled by pennypod" in said


def test_what_is_not_accepted_fails_the_job_at_once(served: Rehearsal, programs: Path) -> None:
    for secret, payload, why in (
        ("wrong", '{"action": "train_start", "job": "tiny"}', "signature_invalid"),
        (SECRET, '{"action": "train_start", "job": "nosuch"}', "unknown_job"),
    ):
        running = shell(served, f"sh {SCRIPT} '{payload}'", EXAMPLES, programs, PENNYPOD_WEBHOOK_SECRET=secret)
        said, _ = running.communicate(timeout=60)
        assert running.returncode == 2
        assert why in said


@pytest.mark.parametrize("program", ["sh", "bash --posix"])
@pytest.mark.parametrize("secret", [SECRET, "0123456789abcdef" * 4, LONG_SECRET, "x"])
def test_its_signature_is_the_one_that_is_wanted(programs: Path, program: str, secret: str) -> None:
    """For a secret shorter than a block, as long as one, and longer, whatever characters it is of."""
    script = (EXAMPLES / SCRIPT).read_text()
    functions = script[script.index("hmac()") : script.index("timestamp=")]
    body = b"1700000000." + bytes(range(256)) * 3
    done = subprocess.run(
        [*program.split(), "-euc", f"LC_ALL=C; export LC_ALL\n{functions}\nhmac"],
        env={"PATH": f"{programs}:{os.environ['PATH']}", "PENNYPOD_WEBHOOK_SECRET": secret},
        input=body,
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().strip() == hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
