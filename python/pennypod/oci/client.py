"""Asks an OCI registry for images' manifests and blobs, and writes small ones. Floor 1: the network is its one outside
thing.

By the distribution API: /v2/<name>/manifests/<digest or tag> and /v2/<name>/blobs/<digest>, whose bodies must have that
very hash. A registry that wants a login answers 401 and names the way: Basic, or Bearer with a token from the address
that it names. Passwords go in the Authorization header only, and except to this machine itself over TLS only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import requests
from requests.auth import AuthBase, HTTPBasicAuth

from pennypod import __version__
from pennypod.errors import AuthError, InvalidError, TransientError
from pennypod.model.image import HUB, RegistryLogin, Repository, is_digest, is_loopback

_HUB_API = "registry-1.docker.io"
_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_LIMIT_S = (10.0, 30.0)
_MOST_BYTES = 4 * 1024 * 1024  # what the specification says a registry should take at least
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a registry has under a digest or a tag."""

    digest: str
    media_type: str
    content: bytes


class Registry:
    """One registry, asked as one person or, without a login, as nobody."""

    def __init__(self, host: str, login: RegistryLogin | None, session: requests.Session | None = None) -> None:
        self.host = host
        self._login = login
        self._session = requests.Session() if session is None else session
        scheme = "http" if is_loopback(host) else "https"
        self._base = f"{scheme}://{_HUB_API if host == HUB else host}"
        self._known: dict[Repository, AuthBase] = {}  # what it has asked for before

    def has(self, repository: Repository, digest: str) -> bool:
        """Whether the registry has the manifest of that digest, whole.

        Raises AuthError when it does not let us see it, InvalidError when it tells another content, TransientError when
        it does not answer.
        """
        return self.manifest(repository, digest) is not None

    def manifest(self, repository: Repository, reference: str) -> Manifest | None:
        """The manifest of a digest or a tag, None when there is none. Raises as `has` does."""
        reply = self._ask("GET", f"/v2/{repository.path}/manifests/{reference}", repository)
        if reply.status_code == 404:
            return None
        self._expect(reply, 200)
        found = Manifest(_digest_of(reply.content), reply.headers.get("Content-Type", ""), reply.content)
        if is_digest(reference) and found.digest != reference:
            raise InvalidError(f"{self.host} has another image than {reference[:19]} under that digest")
        return found

    def blob(self, repository: Repository, digest: str) -> bytes:
        """A small blob, such as an image's configuration. Raises as `has` does, and InvalidError when it is missing."""
        reply = self._ask("GET", f"/v2/{repository.path}/blobs/{digest}", repository)
        if reply.is_redirect:  # to where its content is kept, which the login is none of the business of
            reply = self._send("GET", urljoin(self._base, reply.headers["Location"]), None)
        self._expect(reply, 200)
        if _digest_of(reply.content) != digest:
            raise InvalidError(f"{self.host} has another content than {digest[:19]} under that digest")
        return reply.content

    def put_blob(self, repository: Repository, content: bytes) -> str:
        """Write a small blob; its digest. Raises as `has` does."""
        digest = _digest_of(content)
        begun = self._ask("POST", f"/v2/{repository.path}/blobs/uploads/", repository)
        self._expect(begun, 202)
        place = urljoin(self._base, begun.headers.get("Location", ""))
        if urlsplit(place)[:2] != urlsplit(self._base)[:2]:
            raise InvalidError(f"{self.host} wants an upload to go to {urlsplit(place).netloc}")
        self._expect(self._ask("PUT", place, repository, content, params={"digest": digest}), 201)
        return digest

    def put_manifest(self, repository: Repository, tag: str, content: bytes, media_type: str) -> str:
        """Write a manifest under a tag, which moves; its digest. Raises as `has` does."""
        path = f"/v2/{repository.path}/manifests/{tag}"
        self._expect(self._ask("PUT", path, repository, content, media_type=media_type), 201)
        return _digest_of(content)

    def _ask(
        self,
        method: str,
        path: str,
        repository: Repository,
        content: bytes | None = None,
        *,
        media_type: str = "application/octet-stream",
        params: Mapping[str, str] | None = None,
    ) -> requests.Response:
        """One request, and again with what a 401 asks for."""
        url = urljoin(self._base, path)
        reply = self._send(method, url, self._known.get(repository), params, content, media_type)
        if reply.status_code == 401:
            proof = self._proof(reply, repository, "pull" if method == "GET" else "pull,push")
            if proof is not None:
                self._known[repository] = proof
            reply = self._send(method, url, proof, params, content, media_type)
        return reply

    def _expect(self, reply: requests.Response, status: int) -> None:
        if reply.status_code in (401, 403):
            who = f"the login of {self._login.user}" if self._login else "anybody without a login"
            raise AuthError(f"{self.host} refuses {who}")
        if reply.status_code == 404:
            raise InvalidError(f"{self.host} does not have what its manifest names")
        if reply.status_code != status:
            raise TransientError(f"{self.host} answered {reply.status_code}")

    def _proof(self, refused: requests.Response, repository: Repository, actions: str) -> AuthBase | None:
        """What the challenge of a 401 asks for, None when we have nothing to say to it."""
        challenge = refused.headers.get("WWW-Authenticate", "")
        kind = challenge.partition(" ")[0].casefold()
        basic = _Basic(self._login) if self._login else None
        if kind != "bearer":
            return basic
        told = dict(_PARAMETER.findall(challenge))
        realm = told.get("realm", "")
        parts = urlsplit(realm)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.netloc)):
            raise AuthError(f"{self.host} sends logins to {parts.scheme}://{parts.netloc}, which is not safe")
        wanted = {"service": told.get("service", ""), "scope": f"repository:{repository.path}:{actions}"}
        reply = self._send("GET", realm, basic, wanted)
        try:
            fields = reply.json()
            token = str(fields.get("token") or fields.get("access_token") or "") if reply.ok else ""
        except (ValueError, AttributeError):
            token = ""
        return _Bearer(token) if token else None

    def _send(
        self,
        method: str,
        url: str,
        auth: AuthBase | None,
        params: Mapping[str, str] | None = None,
        content: bytes | None = None,
        media_type: str = "",
    ) -> requests.Response:
        """No redirects: a password stays with its host."""
        headers = {"Accept": ", ".join(_TYPES), "User-Agent": f"pennypod/{__version__}"}
        try:
            reply = self._session.request(
                method,
                url,
                params=dict(params) if params else None,
                data=content,
                headers=headers | ({"Content-Type": media_type} if content is not None else {}),
                auth=auth or _nobody,
                timeout=_LIMIT_S,
                allow_redirects=False,
            )
        except requests.RequestException as exc:
            raise TransientError(f"{self.host} does not answer ({type(exc).__name__})") from None
        if len(reply.content) > _MOST_BYTES:
            raise InvalidError(f"{self.host} answers with something that is no manifest")
        return reply


def _digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class _Basic(HTTPBasicAuth):
    """Hides the password from a repr."""

    def __init__(self, login: RegistryLogin) -> None:
        super().__init__(login.user.encode(), login.password.encode())

    def __repr__(self) -> str:
        return "<basic>"


class _Bearer(AuthBase):
    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request

    def __repr__(self) -> str:
        return "<bearer>"


def _nobody(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """An `auth` that adds nothing, so that no ~/.netrc does either."""
    return request
