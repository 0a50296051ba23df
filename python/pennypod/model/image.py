"""Names of images in OCI registries, and who may log in there. Floor 0: pure.

A reference as pods are started from it is `HOST/REPOSITORY@sha256:...`: its content never changes, whoever moves a tag.
`template:ID` stands in an image's place for a template of the account at Vast or RunPod, which names the image.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pennypod.errors import InputError

HUB = "docker.io"
"""The registry that a reference without a host means."""

_TEMPLATE = re.compile(r"template:(?P<id>[A-Za-z0-9_-]{1,128})")
_LOCAL = "localhost"
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d+)?")
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::\d{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"(?P<host>{_HOST})/(?P<path>{_PART}(?:/{_PART})*)")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RegistryLogin:
    """Who may pull from a registry. The password is in no repr, and goes to that registry and to providers only."""

    registry: str
    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Repository:
    """A place for images: `host` with its port, and `path` in that registry."""

    host: str
    path: str

    def __str__(self) -> str:
        return f"{self.host}/{self.path}"

    def at(self, digest: str) -> str:
        """The reference of one image in it."""
        return f"{self}@{digest}"


def parse_repository(text: str) -> Repository:
    """From "HOST/REPO", a host with a dot, a port, or localhost. Raises InputError for anything else."""
    found = _REPOSITORY.fullmatch(text.strip())
    if found is None or not _is_host(found["host"]):
        raise InputError(f"{text!r} is no repository: give HOST/REPO, as in ghcr.io/me/golden, without a tag")
    return Repository(found["host"], found["path"])


def parse_pinned(reference: str) -> tuple[Repository, str]:
    """Repository and digest of "HOST/REPO@sha256:...". Raises InputError for anything else."""
    where, _, digest = reference.partition("@")
    if not is_digest(digest):
        raise InputError(f"{reference!r} names no image by its digest")
    return parse_repository(where), digest


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def template_of(reference: str) -> str:
    """The ID in "template:ID", "" for an image. Raises InputError for a template without an ID that could be one."""
    found = _TEMPLATE.fullmatch(reference.strip())
    if found is None and reference.strip().startswith("template:"):
        raise InputError(f"{reference!r} names no template: give template:ID, the hash at Vast.ai, the id at RunPod")
    return found["id"] if found else ""


def registry_of(reference: str) -> str:
    """The registry that an image is pulled from, by the rule that docker and podman share.

    "" for an empty name, and for a template, which brings a login of its own.
    """
    first, slash, _ = reference.strip().partition("/")
    if not reference.strip() or template_of(reference):
        return ""
    return first if slash and _is_host(first) else HUB


def is_loopback(host: str) -> bool:
    """Whether a registry is on this machine: reached without TLS, and by no other machine."""
    return _LOOPBACK.fullmatch(host) is not None


def _is_host(text: str) -> bool:
    return "." in text or ":" in text or text == _LOCAL
