"""The inventory plugin inside real Ansible objects; only the asking itself is replaced."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible import constants
from ansible.errors import AnsibleParserError
from ansible.inventory.data import InventoryData
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import inventory_loader
from fakes import FakeClock, FakeProvider
from pennypod import inventory
from pennypod.errors import TransientError
from pennypod.ledger import RunRecord, open_ledger
from pennypod.model.ids import Lease
from pennypod.model.pod import Pod, PodState, SshAddress
from pennypod.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
RUN = "demo-1201-abcde"
LEASE = Lease(RUN, 1, int(time.time()) + 600, "aaaaa")

Parse = Callable[..., InventoryData]


class CountingProvider(FakeProvider):
    listings = 0

    def pods(self) -> list[Pod]:
        self.listings += 1
        return super().pods()


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CountingProvider:
    provider = CountingProvider(FakeClock())
    provider.live["pod-1"] = Pod(
        provider="fake",
        pod_id="pod-1",
        name=LEASE.name,
        state=PodState.RUNNING,
        created=time.time() - 60,
        price_micros_per_h=360_000,
        machine_id="{{ lookup('pipe', 'id') }}",
        gpu="RTX 4090",
        address=SshAddress("127.0.0.1", 2222),
    )
    monkeypatch.setenv("PENNYPOD_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PENNYPOD_DATABASE_URL", raising=False)
    monkeypatch.setattr(inventory, "all_providers", lambda _settings: {"fake": provider})
    return provider


@pytest.fixture
def parse(tmp_path: Path, provider: CountingProvider) -> Parse:
    inventory_loader.add_directory(str(ROOT / "inventory_plugins"))

    def run(text: str = "", cache: bool = True) -> InventoryData:
        source = tmp_path / "pods.pennypod.yml"
        source.write_text(f"plugin: pennypod\n{text}")
        plugin = inventory_loader.get("pennypod")
        assert plugin.verify_file(str(source))
        data = InventoryData()
        plugin.parse(data, DataLoader(), str(source), cache=cache)
        if "cache: true" in text:
            plugin.update_cache_if_changed()
        return data

    return run


def cached(tmp_path: Path) -> str:
    return f"cache: true\ncache_plugin: jsonfile\ncache_timeout: 3600\ncache_connection: {tmp_path / 'cache'}\n"


def test_hosts_groups_and_variables_arrive(parse: Parse) -> None:
    data = parse()
    groups = data.get_groups_dict()
    assert groups["billing"] == groups["provider_fake"] == groups["job_demo"] == groups["gpu_rtx_4090"] == [RUN]
    assert {"stopped", "orphans", "unproven"} <= set(data.groups)
    variables = data.hosts[RUN].vars
    assert variables["ansible_port"] == 2222
    assert 60 <= variables["pennypod_age_s"] < 120
    assert variables["pennypod_deadline"] == LEASE.deadline


def test_what_a_provider_answers_is_never_a_template(parse: Parse) -> None:
    from ansible.template import Templar

    variables = parse().hosts[RUN].vars
    text = variables["pennypod_machine_id"]
    assert Templar(loader=DataLoader()).template(text) == "{{ lookup('pipe', 'id') }}"


@pytest.mark.parametrize("text", ["{{ 1 }}", "{% if x %}", "{# x #}", "#jinja2: x", "a\n{{ 1 }}", "{", "}", "\x1b"])
def test_only_what_cannot_be_a_template_is_marked_as_harmless(
    parse: Parse, provider: CountingProvider, text: str
) -> None:
    from ansible.template import is_trusted_as_template

    provider.live["pod-1"] = replace(provider.live["pod-1"], machine_id=text, gpu="RTX 4090 (24 GB)")
    data = parse()
    variables = {**data.groups["all"].vars, **data.hosts[RUN].vars}
    assert not is_trusted_as_template(variables["pennypod_machine_id"])
    for name in ("pennypod_gpu", "ansible_host", "pennypod_pod_name", "ansible_ssh_common_args", "pennypod_root"):
        assert is_trusted_as_template(variables[name]), name


def test_constructed_features_work(parse: Parse) -> None:
    data = parse(
        "compose:\n  cents: (pennypod_price_usd_per_h * 100) | round | int\n"
        "groups:\n  cheap: pennypod_price_usd_per_h < 1\n"
        "keyed_groups:\n  - {prefix: state, key: pennypod_state}\n"
    )
    assert data.hosts[RUN].vars["cents"] == 36
    assert data.get_groups_dict()["cheap"] == data.get_groups_dict()["state_running"] == [RUN]


def test_a_failed_listing_is_a_parser_error_that_says_what_to_do(parse: Parse, provider: CountingProvider) -> None:
    provider.list_faults = [TransientError("HTTP 500")]
    with pytest.raises(AnsibleParserError) as caught:
        parse()
    text = str(caught.value)
    assert "the pods of fake cannot be listed: HTTP 500" in text
    assert "providers:" in text


def test_other_files_are_left_to_other_plugins(tmp_path: Path, provider: CountingProvider) -> None:
    inventory_loader.add_directory(str(ROOT / "inventory_plugins"))
    (tmp_path / "hosts.yml").write_text("all: {}")
    assert not inventory_loader.get("pennypod").verify_file(str(tmp_path / "hosts.yml"))


def test_a_cache_hit_asks_nobody_and_still_tells_the_present_age(
    parse: Parse, provider: CountingProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = parse(cached(tmp_path)).hosts[RUN].vars
    assert provider.listings == 1
    later = time.time() + 100
    monkeypatch.setattr(time, "time", lambda: later)
    second = parse(cached(tmp_path)).hosts[RUN].vars
    assert provider.listings == 1
    assert second["pennypod_age_s"] >= first["pennypod_age_s"] + 99
    assert second["pennypod_cost_so_far_usd"] > first["pennypod_cost_so_far_usd"]


def test_flushing_the_cache_asks_again(parse: Parse, provider: CountingProvider, tmp_path: Path) -> None:
    parse(cached(tmp_path))
    provider.live.clear()
    assert RUN in parse(cached(tmp_path)).hosts
    assert RUN not in parse(cached(tmp_path), cache=False).hosts
    assert provider.listings == 2
    assert RUN not in parse(cached(tmp_path)).hosts  # the fresh answer is what is cached now
    assert provider.listings == 2


def test_a_write_to_the_ledger_ends_the_cached_answer(parse: Parse, provider: CountingProvider, tmp_path: Path) -> None:
    parse(cached(tmp_path))
    ledger = open_ledger(load_settings())
    ledger.open_run(RunRecord(RUN, "demo", "1:1", 0.0, "/tmp/artifacts"))
    ledger.close()
    parse(cached(tmp_path))
    assert provider.listings == 2
    parse(cached(tmp_path))
    assert provider.listings == 2


def test_another_state_folder_is_not_served_from_the_same_cache(
    parse: Parse, provider: CountingProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse(cached(tmp_path))
    monkeypatch.setenv("PENNYPOD_HOME", str(tmp_path / "other"))
    parse(cached(tmp_path))
    assert provider.listings == 2


def test_the_cache_holds_no_key_material(parse: Parse, provider: CountingProvider, tmp_path: Path) -> None:
    run_dir = load_settings().run_dir(RUN)
    (run_dir / "id_ed25519").write_text("PRIVATE KEY MATERIAL")
    (run_dir / "known_hosts").write_text("[127.0.0.1]:2222 ssh-ed25519 HOSTKEY")
    parse(cached(tmp_path))
    (file,) = (tmp_path / "cache").iterdir()
    text = file.read_text()
    assert LEASE.name in text
    assert "KEY" not in text
    assert json.loads(text)


def test_options_in_the_documentation_are_those_the_plugin_reads(parse: Parse) -> None:
    options: dict[str, Any] = constants.config.get_configuration_definitions("inventory", "pennypod")
    assert {"plugin", "providers", "strict", "compose", "groups", "keyed_groups", "cache"} <= set(options)
