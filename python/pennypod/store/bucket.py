"""One S3-compatible bucket, by boto3. Its keys are given to boto3 and are in no argument, message or URL of ours."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pennypod.errors import StoreError
from pennypod.store.config import StoreConfig
from pennypod.store.layout import StoredObject

_CHUNK = 1 << 20
_CONNECT_S, _READ_S = 10, 60


class Bucket:
    """Puts, gets, lists, deletes and signs. Names are without the configured prefix. Every fault is a StoreError."""

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self._client = _client(config, config.endpoint)
        # The host is part of what is signed, so URLs for pods are made for the address that pods use.
        self._signer = _client(config, config.pod_endpoint) if config.pod_endpoint else self._client

    def put(self, name: str, content: bytes) -> None:
        with _said(f"cannot store {name}"):
            self._client.put_object(Bucket=self.config.bucket, Key=self.config.key(name), Body=content)

    def put_stream(self, name: str, content: IO[bytes]) -> None:
        """From where the stream stands to its end, in several parts where that is long."""
        with _said(f"cannot store {name}"):
            self._client.upload_fileobj(content, self.config.bucket, self.config.key(name))

    def size(self, name: str) -> int | None:
        """Bytes, None when there is no such object."""
        with _said(f"cannot look for {name}"):
            try:
                found = self._client.head_object(Bucket=self.config.bucket, Key=self.config.key(name))
            except Exception as exc:
                if _status(exc) == 404:
                    return None
                raise
        return int(found["ContentLength"])

    def get(self, name: str, limit: int) -> bytes | None:
        """The content of a small object, None when there is none. Raises StoreError when it is larger than `limit`."""
        with _said(f"cannot read {name}"):
            try:
                found = self._client.get_object(Bucket=self.config.bucket, Key=self.config.key(name))
            except Exception as exc:
                if _status(exc) == 404:
                    return None
                raise
            with contextlib.closing(found["Body"]) as body:
                content: bytes = body.read(limit + 1)
        if len(content) > limit:
            raise StoreError(f"{name} is larger than {limit} bytes")
        return content

    def fetch(self, name: str, target: Path, size: int, sha256: str) -> None:
        """Into `target`, which appears only when it is whole and right. Raises StoreError otherwise."""
        part = target.with_name(f"{target.name}.part")
        digest, count = hashlib.sha256(), 0
        try:
            with _said(f"cannot fetch {name}"):
                found = self._client.get_object(Bucket=self.config.bucket, Key=self.config.key(name))
                with contextlib.closing(found["Body"]) as body, part.open("wb") as file:
                    while count <= size and (data := body.read(_CHUNK)):
                        file.write(data)
                        digest.update(data)
                        count += len(data)
                    file.flush()
                    os.fsync(file.fileno())
            if count != size or digest.hexdigest() != sha256:
                raise StoreError(f"{name} is not what its marker says")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Every object whose name begins so."""
        before = len(self.config.prefix)
        with _said(f"cannot list {prefix}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.config.bucket, Prefix=self.config.key(prefix)
            )
            for page in pages:
                for item in page.get("Contents", ()):
                    yield StoredObject(item["Key"][before:], int(item["Size"]))

    def delete(self, name: str) -> None:
        """No error when there is no such object."""
        with _said(f"cannot delete {name}"):
            self._client.delete_object(Bucket=self.config.bucket, Key=self.config.key(name))

    def put_url(self, name: str, seconds: float) -> str:
        """Whoever has it may PUT this one object until then. It is a secret of its run: not for logs."""
        return self._sign("put_object", name, seconds)

    def get_url(self, name: str, seconds: float) -> str:
        """Whoever has it may GET this one object until then."""
        return self._sign("get_object", name, seconds)

    def _sign(self, what: str, name: str, seconds: float) -> str:
        if seconds < 1:
            raise StoreError(f"no time is left for a URL of {name}")
        with _said(f"cannot sign a URL of {name}"):
            url: str = self._signer.generate_presigned_url(
                what, Params={"Bucket": self.config.bucket, "Key": self.config.key(name)}, ExpiresIn=int(seconds)
            )
        return url


def open_bucket(config: StoreConfig) -> Bucket:
    """Raises StoreError when the bucket cannot be used: wrong keys, no such bucket, nobody there."""
    bucket = Bucket(config)
    with _said(f"the object store does not let us into the bucket {config.bucket}"):
        bucket._client.list_objects_v2(Bucket=config.bucket, Prefix=config.prefix, MaxKeys=1)  # noqa: SLF001
    return bucket


def _client(config: StoreConfig, endpoint: str) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ModuleNotFoundError as exc:
        raise StoreError(f"object storage needs {exc.name}: install pennypod[store]") from exc
    with _said("the object store's settings are not usable"):
        return boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint or None,
            region_name=config.region,
            aws_access_key_id=config.access_key,
            aws_secret_access_key=config.secret_key,
            config=Config(
                signature_version="s3v4",
                connect_timeout=_CONNECT_S,
                read_timeout=_READ_S,
                retries={"mode": "standard", "total_max_attempts": 4},
                # Checksums that boto3 adds by itself are refused by several other stores, and by a bare PUT of a pod.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path" if endpoint else "auto"},
            ),
        )


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    """Whatever boto3 raises, as one line of ours. Its own text may hold a URL with a signature: it is not repeated."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as exc:
        error = exc.response.get("Error", {})
        raise StoreError(f"{what}: {error.get('Code')}: {error.get('Message')}", status=_status(exc)) from exc
    except (BotoCoreError, Boto3Error, OSError) as exc:
        raise StoreError(f"{what}: {type(exc).__name__}") from exc


def _status(exc: Exception) -> int | None:
    response = getattr(exc, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return int(status) if status is not None else None
