"""Which hosts a pod is held to, and what is said where it cannot be held. No rule is loaded on this machine."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pennypod import isolation
from pennypod.callbacks import CallbackAccess, give_access
from pennypod.errors import InputError
from pennypod.fuse import Ending, part
from pennypod.isolation import Isolation, allowed, isolate, parse_host, urls_in
from pennypod.model.offer import FuseTerms
from pennypod.providers import runpod, vast
from pennypod.settings import load_settings
from pennypod.ssh import Completed

RUN = "demo-1201-aaaaa"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """isolate.py, which can run no program here and knows a hosts file of its own."""
    spec = importlib.util.spec_from_file_location("isolate", isolation.SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.subprocess, "run", lambda *_a, **_k: pytest.fail("a program was started"))
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.0.0.9 mine")
    monkeypatch.setattr(module, "HOSTS", str(tmp_path / "hosts"))
    return module


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("huggingface.co", ("huggingface.co", 443)),
        ("10.1.2.3:9000", ("10.1.2.3", 9000)),
        ("[2001:db8::1]:80", ("2001:db8::1", 80)),
        ("http://10.88.0.1:8400/v2", ("10.88.0.1", 8400)),
        ("https://example.org/x", ("example.org", 443)),
    ],
)
def test_a_host_may_be_written_in_several_ways(text: str, target: tuple[str, int]) -> None:
    assert parse_host(text) == target


@pytest.mark.parametrize("text", ["", "a b", "host:0", "host:70000", "x; flush ruleset", "host:port"])
def test_what_is_no_host_is_refused_before_a_pod_is_asked(text: str) -> None:
    with pytest.raises(InputError, match="no host"):
        parse_host(text)


def test_the_run_may_reach_its_store_and_its_callback(tmp_path: Path) -> None:
    pytest.importorskip("boto3", reason="the store extra is not installed")
    settings = load_settings({"PENNYPOD_HOME": str(tmp_path)})
    give_access(settings.run_dir(RUN), CallbackAccess("https://pods.example:8443/hooks/callback/x", "token"))
    keys = {"PENNYPOD_S3_ACCESS_KEY_ID": "AKIAOFTHISTEST", "PENNYPOD_S3_SECRET_ACCESS_KEY": "secret-of-this-test"}
    aws = {**keys, "PENNYPOD_S3_BUCKET": "weights", "PENNYPOD_S3_REGION": "eu-west-1"}
    found = allowed(settings, aws, RUN, ["wandb.ai"], store=True)
    assert found[:2] == [("wandb.ai", 443), ("pods.example", 8443)]
    assert found[2][0].endswith("amazonaws.com")
    assert found[2][1] == 443
    own = {**aws, "PENNYPOD_S3_ENDPOINT": "http://127.0.0.1:9", "PENNYPOD_S3_POD_ENDPOINT": "http://10.88.0.1:9000"}
    assert allowed(settings, own, RUN, [], store=True)[1] == ("10.88.0.1", 9000), "where pods find it, not we"
    assert len(allowed(settings, {}, RUN, [], store=True)) == 1, "without a bucket there is nothing to reach"
    assert urls_in(["--index-url", "https://download.pytorch.org/whl/cpu"]) == ["https://download.pytorch.org/whl/cpu"]


class Pod:
    """Answers as a pod does, and keeps what it was asked."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.order: dict[str, Any] = {}

    def run_script(self, path: Path, args: list[str], timeout_s: float, *, stdin: bytes) -> Completed:
        self.order = json.loads(stdin)
        return Completed(0, self.answer.encode(), b"")


def put_in_force(answer: str) -> tuple[Isolation, dict[str, Any]]:
    pod = Pod(answer)
    found = isolate(pod, "closed", [("a", 1)], [], 2000.0, 1000.0)  # type: ignore[arg-type]
    return found, pod.order


def test_the_answer_of_a_pod_is_taken_for_no_more_than_it_says() -> None:
    found, order = put_in_force('motd\n@pennypod {"enforced": true, "hosts": ["a:1"], "changed": true}\n')
    assert found == Isolation(True, "closed", "", ("a:1",), True)
    assert (order["allow"], order["until"]) == ([["a", 1]], 2000.0)
    assert found.as_document() == {"enforced": True, "phase": "closed", "reason": "", "hosts": ["a:1"]}
    for answer in ("", "@pennypod {}", '@pennypod {"enforced": "yes", "reason": "\\u001b[2J"}'):
        other, _ = put_in_force(answer)
        assert not other.enforced
        assert other.reason
        assert other.reason.isprintable()


def test_the_rules_allow_what_was_asked_for_and_refuse_the_rest(script: ModuleType) -> None:
    rules = script.ruleset({("store", 9000): ["10.0.0.1", "2001:db8::1"]}, ["10.0.0.53"], 2222, 1_900_000_000.5)
    lines = [line.strip() for line in rules.splitlines()]
    assert lines[0:2] == ["add table inet pennypod", "delete table inet pennypod"], "in one step, in place of the old"
    assert "type filter hook output priority 0; policy drop;" in lines
    assert "ip daddr 10.0.0.1 tcp dport 9000 accept" in lines
    assert "ip6 daddr 2001:db8::1 tcp dport 9000 accept" in lines
    assert "ip daddr 10.0.0.53 meta l4proto { tcp, udp } th dport 53 accept" in lines
    assert "tcp sport 2222 accept" in lines
    assert 'meta time >= "2030-03-17 17:46:40" accept' in lines, "at the deadline nothing is in a fuse's way"
    assert [line for line in lines if "accept" not in line][-3] == "counter reject with icmpx type admin-prohibited"
    with pytest.raises(ValueError, match="does not appear"):
        script.ruleset({("x", 1): ["1.2.3.4 accept; flush"]}, [], 22, 0.0)


def test_names_are_pinned_to_the_addresses_of_the_rules_and_again_in_place_of_those(script: ModuleType) -> None:
    script.pin({("store", 9000): ["10.0.0.1", "10.0.0.2"], ("10.0.0.3", 80): ["10.0.0.3"]})
    script.pin({("store", 443): ["10.0.0.4"]})
    lines = Path(script.HOSTS).read_text().splitlines()
    assert lines == ["127.0.0.1 localhost", "10.0.0.9 mine", "10.0.0.4 store # pennypod-isolation"]


def test_the_hosts_of_packages_are_read_from_the_settings_of_the_pod(script: ModuleType) -> None:
    texts = [
        "deb [signed-by=/x] http://mirror.example/debian bookworm main",
        "index-url = https://user:pw@pip.example:8080/s",
    ]
    assert script.targets(texts) == [("mirror.example", 80), ("pip.example", 8080)]
    assert script.targets(["https://[bad", "file:///opt/wheels"]) == []


def test_a_fuse_whose_way_cannot_be_kept_open_keeps_the_rules_away(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "refuse_where_it_makes_no_sense", lambda: None)
    monkeypatch.setattr(script, "find_nft", lambda _install_s: "/bin/false")
    monkeypatch.setattr(script, "fuse_api", lambda: [("api.example", 443)])
    monkeypatch.setattr(script, "addresses", lambda _host: [])
    with pytest.raises(script.NotPossibleError, match=r"api\.example"):
        script.apply({"phase": "closed", "allow": [], "setup": [], "until": 0, "install": 0})


def process(folder: Path, pid: int, **env: str) -> None:
    (folder / str(pid)).mkdir(parents=True)
    (folder / str(pid) / "environ").write_text("".join(f"{key}={value}\0" for key, value in env.items()))


@pytest.mark.parametrize(
    ("ending", "told", "target"),
    [
        (vast.ending("https://console.vast.ai"), {}, [("console.vast.ai", 443)]),
        (vast.ending("https://console.vast.ai"), {"VAST_URL": "http://10.88.0.1:8400"}, [("10.88.0.1", 8400)]),
        (runpod.ending("https://rest.example/v2"), {}, [("rest.example", 443)]),
        (Ending(ends=(("KILL", "1", None),)), {}, []),
    ],
)
def test_the_api_of_the_fuse_is_found_where_the_fuse_finds_it(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ending: Ending,
    told: dict[str, str],
    target: list[tuple[str, int]],
) -> None:
    terms = FuseTerms(after_s=10, seconds_left=100, lease_s=60)
    start = shlex.split(part(terms, 1_900_000_000, ending).partition(" PATH=")[0])
    env = dict(word.split("=", 1) for word in start)
    process(tmp_path / "proc", 1, **told)
    process(tmp_path / "proc", 7, C="{}")
    process(tmp_path / "proc", 8, **env)
    monkeypatch.setattr(script, "PROC", str(tmp_path / "proc"))
    for name in ("VAST_URL", "RUNPOD_API_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert script.fuse_api() == target
    process(tmp_path / "proc", 9, **{**env, "C": "no settings"})
    (tmp_path / "proc/8/environ").unlink()
    with pytest.raises(script.NotPossibleError, match="fuse"):
        script.fuse_api()


def test_a_proxy_is_a_reason_not_to_pretend(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "environment", lambda: {"HTTPS_PROXY": "http://proxy:3128"})
    monkeypatch.setattr(script, "NET_ADMIN", 0)  # which root has, wherever this runs
    with pytest.raises(script.NotPossibleError, match=r"proxy decides|no NET_ADMIN"):
        script.refuse_where_it_makes_no_sense()
