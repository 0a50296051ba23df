"""GPU names: one word of ours for each type, and what every provider calls it. Floor 0.

Providers name the same card differently ("RTX 4090", "NVIDIA GeForce RTX 4090"), and new cards appear without notice:
a name that is not in the catalogue passes through as it is, so that nothing has to be released before it can be rented.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Gpu:
    name: str
    vast: str
    runpod: str
    also: tuple[str, ...] = ()


# Our name, Vast's `gpu_name`, RunPod's GPU type id, what it is called besides. "" means that it is not there.
_CATALOGUE = (
    _Gpu("RTX 3060", "RTX 3060", ""),
    _Gpu("RTX 3070", "RTX 3070", "NVIDIA GeForce RTX 3070"),
    _Gpu("RTX 3080", "RTX 3080", "NVIDIA GeForce RTX 3080"),
    _Gpu("RTX 3080 Ti", "RTX 3080 Ti", "NVIDIA GeForce RTX 3080 Ti", ("NVIDIA GeForce RTX 3080TI",)),
    _Gpu("RTX 3090", "RTX 3090", "NVIDIA GeForce RTX 3090", ("3090",)),
    _Gpu("RTX 3090 Ti", "RTX 3090 Ti", "NVIDIA GeForce RTX 3090 Ti"),
    _Gpu("RTX 4070 Ti", "RTX 4070 Ti", "NVIDIA GeForce RTX 4070 Ti"),
    _Gpu("RTX 4080", "RTX 4080", "NVIDIA GeForce RTX 4080"),
    _Gpu("RTX 4080 SUPER", "RTX 4080S", "NVIDIA GeForce RTX 4080 SUPER"),
    _Gpu("RTX 4090", "RTX 4090", "NVIDIA GeForce RTX 4090", ("4090",)),
    _Gpu("RTX 5080", "RTX 5080", "NVIDIA GeForce RTX 5080"),
    _Gpu("RTX 5090", "RTX 5090", "NVIDIA GeForce RTX 5090", ("5090",)),
    _Gpu("RTX A2000", "RTX A2000", "NVIDIA RTX A2000"),
    _Gpu("RTX A4000", "RTX A4000", "NVIDIA RTX A4000", ("A4000",)),
    _Gpu("RTX A4500", "RTX A4500", "NVIDIA RTX A4500", ("A4500",)),
    _Gpu("RTX A5000", "RTX A5000", "NVIDIA RTX A5000", ("A5000",)),
    _Gpu("RTX A6000", "RTX A6000", "NVIDIA RTX A6000", ("A6000",)),
    _Gpu("RTX 2000 Ada", "RTX 2000Ada", "NVIDIA RTX 2000 Ada Generation"),
    _Gpu("RTX 4000 Ada", "RTX 4000Ada", "NVIDIA RTX 4000 Ada Generation"),
    _Gpu("RTX 4000 Ada SFF", "", "NVIDIA RTX 4000 SFF Ada Generation"),
    _Gpu("RTX 4500 Ada", "RTX 4500Ada", ""),
    _Gpu("RTX 5000 Ada", "RTX 5000Ada", "NVIDIA RTX 5000 Ada Generation", ("NVIDIA A5000 Ada",)),
    _Gpu("RTX 6000 Ada", "RTX 6000Ada", "NVIDIA RTX 6000 Ada Generation"),
    _Gpu("RTX PRO 4500", "RTX PRO 4500", "NVIDIA RTX PRO 4500 Blackwell"),
    _Gpu("RTX PRO 6000", "RTX PRO 6000 S", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    _Gpu("RTX PRO 6000 WK", "RTX PRO 6000 WS", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
    _Gpu(
        "RTX PRO 6000 Max-Q",
        "RTX PRO 6000 Max-Q",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        ("RTX PRO 6000 MaxQ",),
    ),
    _Gpu("A10", "A10", ""),
    _Gpu("A30", "A30", "NVIDIA A30", ("NVIDIA RTX A30",)),
    _Gpu("A40", "A40", "NVIDIA A40"),
    _Gpu("L4", "L4", "NVIDIA L4"),
    _Gpu("L40", "L40", "NVIDIA L40"),
    _Gpu("L40S", "L40S", "NVIDIA L40S"),
    _Gpu("T4", "Tesla T4", "Tesla T4"),
    _Gpu("V100", "Tesla V100", "Tesla V100-SXM2-16GB", ("V100 SXM2",)),
    _Gpu("A100 PCIe", "A100 PCIE", "NVIDIA A100 80GB PCIe"),
    _Gpu("A100 SXM", "A100 SXM4", "NVIDIA A100-SXM4-80GB"),
    _Gpu("H100 PCIe", "H100 PCIE", "NVIDIA H100 PCIe"),
    _Gpu("H100 SXM", "H100 SXM", "NVIDIA H100 80GB HBM3", ("H100 SXM5",)),
    _Gpu("H100 NVL", "H100 NVL", "NVIDIA H100 NVL"),
    _Gpu("H200", "H200", "NVIDIA H200", ("H200 SXM",)),
    _Gpu("H200 NVL", "H200 NVL", "NVIDIA H200 NVL"),
    _Gpu("B200", "B200", "NVIDIA B200"),
    _Gpu("B300", "B300", "NVIDIA B300 SXM6 AC"),
    _Gpu("MI300X", "", "AMD Instinct MI300X OAM"),
)

# A wish for the family is a wish for any of its members; an offer always names the member.
_FAMILIES = {
    "a100": ("A100 SXM", "A100 PCIe"),
    "h100": ("H100 SXM", "H100 PCIe", "H100 NVL"),
}
ANY = frozenset({"", "any", "cheapest"})
_NOISE = re.compile(r"\b(?:nvidia|amd|geforce|tesla|quadro|generation)\b")
_CUDA_TAG = re.compile(r"(?<![a-z0-9])cu(?:da)?[-_]?(?:(\d{1,2})\.(\d+)|(\d{2})(\d)(?:\d)?(?![\d.]))", re.IGNORECASE)


def _key(name: str) -> str:
    """What is left of a name when makers, case, blanks and joining marks are ignored."""
    words = _NOISE.sub(" ", name.casefold().replace("_", " "))
    return re.sub(r"[\s-]+", "", words)


_BY_KEY = {_key(name): gpu for gpu in _CATALOGUE for name in (gpu.name, gpu.vast, gpu.runpod, *gpu.also) if name}


def canonical(name: str) -> str:
    """Our name for a GPU, whoever named it; an unknown name comes back with only its blanks tidied."""
    found = _BY_KEY.get(_key(name))
    return found.name if found else " ".join(name.replace("_", " ").split())


def wanted(names: Iterable[str]) -> tuple[str, ...]:
    """A job's GPU wishes in our names, families spelled out, order kept; empty means that any GPU will do."""
    found: list[str] = []
    for name in names:
        if name.strip().casefold() in ANY:
            return ()
        found += _FAMILIES.get(_key(name), (canonical(name),))
    return tuple(dict.fromkeys(found))


def vast_names(names: Iterable[str]) -> tuple[str, ...]:
    """What to ask Vast for, for names of ours; a type Vast does not have is left out, an unknown one passes through."""
    return tuple(name for name in (_there(name, "vast") for name in names) if name)


def runpod_ids(names: Iterable[str]) -> tuple[str, ...]:
    """RunPod's GPU type ids for names of ours; types it does not have are left out, unknown ones pass through."""
    return tuple(name for name in (_there(name, "runpod") for name in names) if name)


def _there(name: str, provider: str) -> str:
    found = _BY_KEY.get(_key(name))
    if found is None:
        return " ".join(name.replace("_", " ").split())
    return found.vast if provider == "vast" else found.runpod


def cuda_of_image(image: str) -> str | None:
    """The CUDA version in an image's tag ("12.8"), which the host's driver must support; None if it names none."""
    match = _CUDA_TAG.search(image.rpartition("/")[2].partition("@")[0])
    if match is None:
        return None
    major, minor = match[1] or match[3], match[2] or match[4]
    return f"{int(major)}.{int(minor)}"


def cuda_at_least(have: str | float, need: str | float) -> bool:
    """Whether CUDA `have` covers `need`, compared part by part: 12.10 is newer than 12.8."""
    return _version(have) >= _version(need)


def _version(text: str | float) -> tuple[int, int]:
    parts = [int(part) for part in re.findall(r"\d+", str(text))[:2]]
    return (parts[0] if parts else 0, parts[1] if len(parts) > 1 else 0)
