"""One name for each GPU, whoever named it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pennypod import gpus

# Vast's gpu_name, RunPod's GPU type id, RunPod's short name.
PAIRS = [
    ("RTX 3090", "NVIDIA GeForce RTX 3090", "RTX 3090"),
    ("RTX 3090 Ti", "NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
    ("RTX 4080S", "NVIDIA GeForce RTX 4080 SUPER", "RTX 4080 SUPER"),
    ("RTX 4090", "NVIDIA GeForce RTX 4090", "RTX 4090"),
    ("RTX 5090", "NVIDIA GeForce RTX 5090", "RTX 5090"),
    ("RTX A6000", "NVIDIA RTX A6000", "RTX A6000"),
    ("RTX 6000Ada", "NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
    ("RTX PRO 6000 S", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
    ("L4", "NVIDIA L4", "L4"),
    ("L40S", "NVIDIA L40S", "L40S"),
    ("A40", "NVIDIA A40", "A40"),
    ("A100 PCIE", "NVIDIA A100 80GB PCIe", "A100 PCIe"),
    ("A100 SXM4", "NVIDIA A100-SXM4-80GB", "A100 SXM"),
    ("H100 PCIE", "NVIDIA H100 PCIe", "H100 PCIe"),
    ("H100 SXM", "NVIDIA H100 80GB HBM3", "H100 SXM"),
    ("H100 NVL", "NVIDIA H100 NVL", "H100 NVL"),
    ("H200", "NVIDIA H200", "H200 SXM"),
    ("H200 NVL", "NVIDIA H200 NVL", "NVIDIA H200 NVL"),
    ("B200", "NVIDIA B200", "B200"),
    ("B300", "NVIDIA B300 SXM6 AC", "B300"),
]


@pytest.mark.parametrize(("vast", "runpod", "short"), PAIRS)
def test_both_providers_names_are_one_gpu(vast: str, runpod: str, short: str) -> None:
    name = gpus.canonical(vast)
    assert gpus.canonical(runpod) == gpus.canonical(short) == gpus.canonical(name) == name
    assert gpus.vast_names([name]) == (vast,)
    assert gpus.runpod_ids([name]) == (runpod,)


@pytest.mark.parametrize("spelling", ["RTX_4090", "rtx 4090", "RTX-4090", "GeForce RTX 4090", "4090", " RTX  4090 "])
def test_people_spell_a_gpu_in_many_ways(spelling: str) -> None:
    assert gpus.wanted([spelling]) == ("RTX 4090",)


def test_neighbours_are_not_mixed_up() -> None:
    names = [gpus.canonical(vast) for vast, _, _ in PAIRS]
    assert len(set(names)) == len(PAIRS)


def test_a_family_is_any_of_its_members() -> None:
    assert gpus.wanted(["H100"]) == ("H100 SXM", "H100 PCIe", "H100 NVL")
    assert gpus.wanted(["A100", "A100 PCIe"]) == ("A100 SXM", "A100 PCIe")
    assert gpus.wanted(["H100 NVL"]) == ("H100 NVL",)


@pytest.mark.parametrize("wish", [[], ["cheapest"], ["any"], ["RTX 4090", "Cheapest"]])
def test_no_wish_is_any_gpu(wish: list[str]) -> None:
    assert gpus.wanted(wish) == ()


def test_an_unknown_name_passes_through() -> None:
    assert gpus.canonical("RTX_9090  Ultra") == "RTX 9090 Ultra"
    assert gpus.vast_names(["RTX 9090 Ultra"]) == gpus.runpod_ids(["RTX 9090 Ultra"]) == ("RTX 9090 Ultra",)


def test_a_gpu_that_a_provider_lacks_is_not_asked_for_there() -> None:
    assert gpus.runpod_ids(["RTX 3060", "L4"]) == ("NVIDIA L4",)
    assert gpus.vast_names(["MI300X"]) == ()


@given(st.text(max_size=40))
def test_a_name_settles_at_once(name: str) -> None:
    assert gpus.canonical(gpus.canonical(name)) == gpus.canonical(name)


@pytest.mark.parametrize(
    ("image", "cuda"),
    [
        ("runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404", "12.8"),
        ("runpod/pytorch:1.0.2-cu1300-torch291-ubuntu2404", "13.0"),
        ("pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime", "12.8"),
        ("ghcr.io/me/golden:cu118", "11.8"),
        ("me/cu128-tools:latest", "12.8"),
        ("vastai/pytorch:@vastai-automatic-tag", None),
        ("ubuntu:24.04", None),
        ("", None),
    ],
)
def test_an_image_may_name_its_cuda(image: str, cuda: str | None) -> None:
    assert gpus.cuda_of_image(image) == cuda


def test_cuda_versions_are_compared_part_by_part() -> None:
    assert gpus.cuda_at_least(12.8, "12.8")
    assert gpus.cuda_at_least("12.10", "12.8")
    assert gpus.cuda_at_least(13.0, "12.8")
    assert not gpus.cuda_at_least(12.2, "12.8")
