"""Asks an OCI registry whether it has an image. Floor 1: the network is its one outside thing.

One question of the distribution API: GET /v2/<name>/manifests/<digest>, whose body must have that very hash. One that
wants a login answers 401 and names the way: Basic, or Bearer with a token from the address that it names. Passwords go
in the Authorization header only, and except to this machine itself over TLS only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

import requests
from requests.auth import AuthBase, HTTPBasicAuth

from pennypod import __version__
from pennypod.errors import AuthError, InvalidError, TransientError
from pennypod.model.image import HUB, RegistryLogin, Repository, is_loopback

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


class Registry:
    """One registry, asked as one person or, without a login, as nobody."""

    def __init__(self, host: str, login: RegistryLogin | None, session: requests.Session | None = None) -> None:
        self.host = host
        self._login = login
        self._session = requests.Session() if session is None else session
        scheme = "http" if is_loopback(host) else "https"
        self._base = f"{scheme}://{_HUB_API if host == HUB else host}"

    def has(self, repository: Repository, digest: str) -> bool:
        """Whether the registry has the manifest of that digest, whole.

        Raises AuthError when it does not let us see it, InvalidError when it tells another content, TransientError when
        it does not answer.
        """
        path = f"/v2/{repository.path}/manifests/{digest}"
        reply = self._get(self._base + path, None)
        if reply.status_code == 401:
            reply = self._get(self._base + path, self._proof(reply, repository))
        if reply.status_code == 404:
            return False
        if reply.status_code in (401, 403):
            who = f"the login of {self._login.user}" if self._login else "anybody without a login"
            raise AuthError(f"{self.host} refuses {who}")
        if reply.status_code != 200:
            raise TransientError(f"{self.host} answered {reply.status_code}")
        if f"sha256:{hashlib.sha256(reply.content).hexdigest()}" != digest:
            raise InvalidError(f"{self.host} has another image than {digest[:19]} under that digest")
        return True

    def _proof(self, refused: requests.Response, repository: Repository) -> AuthBase | None:
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
        wanted = {"service": told.get("service", ""), "scope": f"repository:{repository.path}:pull"}
        reply = self._get(realm, basic, wanted)
        try:
            fields = reply.json()
            token = str(fields.get("token") or fields.get("access_token") or "") if reply.ok else ""
        except (ValueError, AttributeError):
            token = ""
        return _Bearer(token) if token else None

    def _get(self, url: str, auth: AuthBase | None, params: Mapping[str, str] | None = None) -> requests.Response:
        """No redirects: a password stays with its host."""
        try:
            reply = self._session.get(
                url,
                params=dict(params) if params else None,
                headers={"Accept": ", ".join(_TYPES), "User-Agent": f"pennypod/{__version__}"},
                auth=auth or _nobody,
                timeout=_LIMIT_S,
                allow_redirects=False,
            )
        except requests.RequestException as exc:
            raise TransientError(f"{self.host} does not answer ({type(exc).__name__})") from None
        if len(reply.content) > _MOST_BYTES:
            raise InvalidError(f"{self.host} answers with something that is no manifest")
        return reply


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
