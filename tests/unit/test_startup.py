"""What a pod does at its start: the parts run as the shell of a pod would run them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pennypod.startup import host_keys_told, tell_host_keys
from workspace import wait_until

NAME = "pennypod-demo-1201-k3f7q-a1-tssb3kq-nq4z7m"
OTHER = NAME.replace("nq4z7m", "nq4z7n")
FIRST = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0oxLPVh6nQ9xVU1h0Wl9M1s3JzYkq3TnWbBz4sXq1P"
SECOND = FIRST.replace("J0ox", "XXXX")
RSA = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABgQC7o1+/Nbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb=="


class Teller:
    """The part at work on a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.keys = folder / "ssh"
        self.keys.mkdir()
        self.log = folder / "log"
        self.log.touch()
        part = tell_host_keys(NAME).replace("/etc/ssh", str(self.keys)).replace(">/proc/1/fd/1", f">>{self.log}")
        part = part.replace("sleep 2", f"[ ! -e {folder}/stop ] || exit; sleep 0.05")
        self.stop = folder / "stop"
        started = time.monotonic()
        # As a start command is run: whoever runs it must not wait for its background.
        subprocess.run(["sh", "-ec", part], check=True, timeout=20)
        assert time.monotonic() - started < 5

    def make(self, kind: str, key: str) -> None:
        (self.keys / f"ssh_host_{kind}_key.pub").write_text(f"{key} root@pod\n")

    def told(self) -> list[str]:
        return host_keys_told(self.log.read_text(), NAME)


@pytest.fixture
def teller(tmp_path: Path) -> Iterator[Teller]:
    made = Teller(tmp_path)
    yield made
    made.stop.touch()


def test_keys_that_are_made_late_are_told_and_new_ones_replace_them(teller: Teller) -> None:
    assert teller.told() == []
    teller.make("ed25519", FIRST)
    wait_until(lambda: teller.told() == [FIRST], 10, "the first key is told")
    teller.make("rsa", RSA)
    wait_until(lambda: teller.told() == [FIRST, RSA], 10, "both keys are told")
    teller.make("ed25519", SECOND)
    wait_until(lambda: teller.told() == [SECOND, RSA], 10, "the new key is told in place of the old one")


def block(name: str, *keys: str, end: bool = True) -> list[str]:
    mark = f"2026-12-01T19:00:00Z pennypod-host-keys {name}"
    return [f"{mark} begin", *(f"{mark} {key}" for key in keys), *([f"{mark} end"] if end else [])]


def test_only_the_last_whole_block_of_this_very_lease_counts() -> None:
    lines = [*block(NAME, FIRST), "Server listening on :: port 22.", *block(OTHER, RSA), *block(NAME, SECOND)]
    assert host_keys_told("\r\n".join(lines), NAME) == [SECOND]
    assert host_keys_told("\n".join([*lines, *block(NAME, RSA, end=False)]), NAME) == [], "asked again, not guessed"
    assert host_keys_told("\n".join(lines), NAME[:-1]) == []


@pytest.mark.parametrize(
    "key", ["ssh-ed25519 short", "ssh-ed25519 " + "A" * 50 + " @cert-authority", "x " + "A" * 60, ""]
)
def test_what_is_no_key_is_no_key(key: str) -> None:
    assert host_keys_told("\n".join(block(NAME, key, FIRST)), NAME) == [FIRST]
