"""Which bucket, read from the environment or from what the embedded server left. Touches nothing but that one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pennypod.errors import StoreError

EMBEDDED_FILE = "store/embedded.json"
"""Under PENNYPOD_HOME: how to reach the embedded server while it runs."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """`endpoint` is empty for AWS itself. `pod_endpoint` is where pods find the same store, when that differs."""

    bucket: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    endpoint: str = ""
    region: str = "us-east-1"
    prefix: str = ""
    pod_endpoint: str = ""

    def key(self, name: str) -> str:
        """The object's whole key."""
        return f"{self.prefix}{name}"


def load_config(environ: Mapping[str, str], home: Path) -> StoreConfig:
    """The bucket of PENNYPOD_S3_*, else that of the embedded server. Raises StoreError when there is neither."""
    if not environ.get("PENNYPOD_S3_BUCKET"):
        found = read_embedded(home / EMBEDDED_FILE)
        if found is None:
            raise StoreError(
                "no object store: set PENNYPOD_S3_BUCKET, PENNYPOD_S3_ACCESS_KEY_ID and PENNYPOD_S3_SECRET_ACCESS_KEY"
                " (and PENNYPOD_S3_ENDPOINT unless it is AWS), or start the embedded one: pennypod store serve"
            )
        return found
    names = ("PENNYPOD_S3_ACCESS_KEY_ID", "PENNYPOD_S3_SECRET_ACCESS_KEY")
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise StoreError(f"PENNYPOD_S3_BUCKET is set, but {' and '.join(missing)} is not")
    prefix = environ.get("PENNYPOD_S3_PREFIX", "").strip("/")
    return StoreConfig(
        bucket=environ["PENNYPOD_S3_BUCKET"],
        access_key=environ[names[0]],
        secret_key=environ[names[1]],
        endpoint=_address(environ, "PENNYPOD_S3_ENDPOINT"),
        region=environ.get("PENNYPOD_S3_REGION") or "us-east-1",
        prefix=f"{prefix}/" if prefix else "",
        pod_endpoint=_address(environ, "PENNYPOD_S3_POD_ENDPOINT"),
    )


def read_embedded(path: Path) -> StoreConfig | None:
    """None when no embedded server has left word."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return StoreConfig(
            bucket=str(found["bucket"]),
            access_key=str(found["access_key"]),
            secret_key=str(found["secret_key"]),
            endpoint=str(found["endpoint"]),
            pod_endpoint=str(found["pod_endpoint"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _address(environ: Mapping[str, str], name: str) -> str:
    url = (environ.get(name) or "").rstrip("/")
    if not url:
        return ""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query
    except ValueError:
        usable = False
        parts = urlsplit("")
    # The address itself is not repeated: somebody may have put keys into it.
    if not usable:
        raise StoreError(f"{name} is not an http(s) address")
    if parts.username or parts.password:
        raise StoreError(f"{name} must not hold keys: they belong in PENNYPOD_S3_ACCESS_KEY_ID and _SECRET_ACCESS_KEY")
    return url
