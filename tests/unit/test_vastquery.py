"""The official search language, against what the official client was seen to send."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pennypod.errors import InputError
from pennypod.vastquery import parse

DEFAULTS = {"verified": {"eq": True}, "external": {"eq": False}, "rentable": {"eq": True}}


def test_the_example_of_the_documentation_is_what_the_official_client_sends() -> None:
    assert parse("gpu_name=RTX_3090 reliability>0.98 inet_down>200 disk_space>60", DEFAULTS) == {
        **DEFAULTS,
        "gpu_name": {"eq": "RTX 3090"},
        "reliability": {"gt": "0.98"},
        "inet_down": {"gt": "200"},
        "disk_space": {"gt": "60"},
    }


@pytest.mark.parametrize(
    ("text", "body"),
    [
        ("cuda_vers>=12.4", {"cuda_max_good": {"gte": "12.4"}}),
        ("dph<0.5", {"dph_total": {"lt": "0.5"}}),
        ("dlperf_usd>100", {"dlperf_per_dphtotal": {"gt": "100"}}),
        ("flops_usd>10", {"flops_per_dphtotal": {"gt": "10"}}),
        ("display_active=false", {"gpu_display_active": {"eq": False}}),
        ("gpu_ram>=24", {"gpu_ram": {"gte": 24000.0}}),
        ("gpu_total_ram > 80", {"gpu_total_ram": {"gt": 80000.0}}),
        ("cpu_ram>=32", {"cpu_ram": {"gte": 32000.0}}),
        ("duration>2", {"duration": {"gt": 172800.0}}),
        ("driver_version>=535.86.05", {"driver_version": {"gte": 535086005}}),
        ("driver_version=535086005", {"driver_version": {"eq": "535086005"}}),
        ("gpu_name in [RTX_4090,RTX_3090]", {"gpu_name": {"in": ["RTX 4090", "RTX 3090"]}}),
        ("geolocation notin [CN,VN]", {"geolocation": {"notin": ["CN", "VN"]}}),
        ("geolocation nin [CN]", {"geolocation": {"notin": ["CN"]}}),
        ("geolocation not in [CN, VN]", {"geolocation": {"notin": ["CN", "VN"]}}),
        ("geolocation=US", {"geolocation": {"eq": "US"}}),
        ('gpu_name="RTX 4090"', {"gpu_name": {"eq": "RTX 4090"}}),
        ("gpu_name=H100_SXM", {"gpu_name": {"eq": "H100 SXM"}}),
        ("gpu_name!=H100_SXM", {"gpu_name": {"neq": "H100 SXM"}}),
        ("gpu_name neq H100_SXM", {"gpu_name": {"neq": "H100 SXM"}}),
        ("num_gpus==1", {"num_gpus": {"eq": "1"}}),
        ("num_gpus gte 1 num_gpus lt 4", {"num_gpus": {"gte": "1", "lt": "4"}}),
        ("inet_up >= 100 inet_up <= 900", {"inet_up": {"gte": "100", "lte": "900"}}),
        ("cluster_id!=None", {"cluster_id": {"neq": None}}),
        ("static_ip=True", {"static_ip": {"eq": True}}),
        ("gpu_ram in [24,48]", {"gpu_ram": {"in": [24000.0, 48000.0]}}),
        ("brand_new_field=x_y", {"brand_new_field": {"eq": "x y"}}),
        ("", {}),
    ],
)
def test_each_rule_of_the_language(text: str, body: dict[str, Any]) -> None:
    assert parse(text) == body


@pytest.mark.parametrize("wildcard", ["any", "?", "*"])
def test_a_wildcard_takes_a_filter_away(wildcard: str) -> None:
    assert parse(f"verified={wildcard} rentable={wildcard}", DEFAULTS) == {"external": {"eq": False}}
    assert parse(f"dph={wildcard}", {"dph_total": {"lt": 1}}) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu_name", "no operator"),
        ("gpu_name=", "missing"),
        ("gpu_name in []", "missing"),
        ("gpu_name => x", "use one of"),
        ("verified!=any", "wildcard"),
        ("gpu_ram>=lots", "is a number"),
        ("driver_version>=535.86", "looks like"),
        ("gpu_ram>=24 ; rm", "from here on"),
        ("&& x", "from here on"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse(text)


def test_the_defaults_stay_as_they_were() -> None:
    parse("verified=any reliability>0.9 external=true", DEFAULTS)
    assert DEFAULTS == {"verified": {"eq": True}, "external": {"eq": False}, "rentable": {"eq": True}}


@given(st.text(max_size=60))
def test_any_text_is_a_query_or_an_error_of_ours(text: str) -> None:
    query: dict[str, Any] = {}
    with contextlib.suppress(InputError):
        query = parse(text)
    assert all(isinstance(filters, dict) and filters for filters in query.values())
