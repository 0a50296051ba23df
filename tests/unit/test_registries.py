"""Images in OCI registries: their names, who may log in, what a registry has, and a push that shows no password."""

from __future__ import annotations

import base64
import hashlib
import json
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pennypod.errors import AuthError, InputError, InvalidError, TransientError
from pennypod.model.image import (
    RegistryLogin,
    Repository,
    is_loopback,
    parse_pinned,
    parse_repository,
    registry_of,
    template_of,
)
from pennypod.oci.client import Registry
from pennypod.oci.logins import (
    LOGIN_VARIABLE,
    PULL_VARIABLE,
    SNAPSHOT_VARIABLE,
    auth_document,
    pull_login,
    push_login,
    snapshot_login,
)
from pennypod.providers.local.engine import Completed, Engine
from pennypod.providers.local.pushing import push_image
from pennypod.snapshots import cleaned
from scripted_api import Answer, ScriptedApi, scripted_api

MANIFEST = '{"schemaVersion": 2}'
DIGEST = f"sha256:{hashlib.sha256(MANIFEST.encode()).hexdigest()}"
PASSWORD = "canary-registry-51c7"
ASKED = f"GET /v2/me/golden/manifests/{DIGEST}"


# --- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["ghcr.io/me/golden", "127.0.0.1:5000/golden", "localhost/a__b/c-d.e", "[::1]:5000/a"])
def test_a_repository_is_a_host_and_a_path(text: str) -> None:
    assert str(parse_repository(text)) == text
    assert parse_pinned(f"{text}@{DIGEST}") == (parse_repository(text), DIGEST)


@pytest.mark.parametrize(
    "text", ["", "golden", "me/golden", "ghcr.io/me/golden:v1", f"ghcr.io/me/g@{DIGEST}", "https://ghcr.io/me", "a.b/C"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="HOST/REPO"):
        parse_repository(text)


def test_a_reference_without_a_digest_may_be_another_image_tomorrow() -> None:
    for text in ("ghcr.io/me/golden:v1", "ghcr.io/me/golden@sha256:12"):
        with pytest.raises(InputError):
            parse_pinned(text)


def test_a_reference_without_a_host_is_of_the_hub() -> None:
    names = ("vastai/pytorch:1", "python", "ghcr.io/a/b:1", f"localhost:5000/a@{DIGEST}", "")
    assert [registry_of(name) for name in names] == ["docker.io", "docker.io", "ghcr.io", "localhost:5000", ""]


def test_a_template_names_no_registry_and_one_without_an_id_is_refused() -> None:
    assert (template_of("template:4e17788f"), template_of("me/template:4e17788f"), template_of("")) == (
        "4e17788f",
        "",
        "",
    )
    assert registry_of("template:4e17788f") == ""
    for wrong in ("template:", "template:a b", "template:me/train:latest"):
        with pytest.raises(InputError, match="give template:ID"):
            template_of(wrong)


def test_only_this_machines_own_registry_goes_without_tls() -> None:
    assert all(map(is_loopback, ("localhost", "localhost:5000", "127.0.0.1:5000", "127.1.2.3", "[::1]:5000")))
    assert not any(map(is_loopback, ("ghcr.io", "127.0.0.1.example.com", "localhost.example.com:5000")))


# --- what is written there -------------------------------------------------------------------------------------------

CONFIG = {
    "architecture": "amd64",
    "os": "linux",
    "rootfs": {"type": "layers", "diff_ids": ["sha256:1", "sha256:2"]},
    "container": "3f2a",
    "container_config": {"Env": ["CONTAINER_API_KEY=canary"]},
    "config": {
        "Hostname": "C.1",
        "User": "root",
        "Env": ["PATH=/bin", "CUDA_VERSION=12", "CONTAINER_API_KEY=canary", "PYTHONPATH=/x", "MY_TOKEN=canary", "X=1"],
        "Cmd": ["sh", "-c", "echo canary"],
        "Entrypoint": ["/canary"],
        "Labels": {"canary": "canary"},
    },
    "history": [{"created": "2026", "created_by": "canary"}, {"created_by": "canary", "empty_layer": True}],
}


def test_a_containers_configuration_loses_all_that_was_one_pods() -> None:
    done = cleaned(CONFIG, {"pennypod.golden.name": "golden-demo-v1"})
    assert "canary" not in json.dumps(done)
    assert done["config"]["Env"] == ["PATH=/bin", "CUDA_VERSION=12", "PYTHONPATH=/x"]
    assert (done["rootfs"], done["architecture"], done["os"]) == (CONFIG["rootfs"], "amd64", "linux")
    assert done["history"] == [{"created": "2026"}, {"empty_layer": True}], (
        "as many as there were: layers are counted by it"
    )
    assert done["config"]["Labels"] == {"pennypod.golden.name": "golden-demo-v1"}


@pytest.mark.parametrize("location", ["https://elsewhere.example/upload", "//elsewhere.example/upload"])
def test_what_is_written_goes_to_the_registry_and_nowhere_else(location: str) -> None:
    with scripted_api() as api:
        host = api.url.removeprefix("http://")
        api.on("POST /v2/me/golden/blobs/uploads/", Answer(202, headers={"Location": location}))
        with pytest.raises(InvalidError, match=r"wants an upload to go to elsewhere\.example"):
            Registry(host, RegistryLogin(host, "me", PASSWORD)).put_blob(Repository(host, "me/golden"), b"x")


# --- logins ------------------------------------------------------------------------------------------------------


def test_pods_pull_with_their_own_login_where_there_is_one() -> None:
    both = {LOGIN_VARIABLE: "me:push:it@ghcr.io", PULL_VARIABLE: f"pods:{PASSWORD}@ghcr.io"}
    assert push_login("ghcr.io", both) == RegistryLogin("ghcr.io", "me", "push:it")
    assert pull_login("ghcr.io", both) == RegistryLogin("ghcr.io", "pods", PASSWORD)
    assert pull_login("ghcr.io", {LOGIN_VARIABLE: both[LOGIN_VARIABLE]}) == push_login("ghcr.io", both)
    assert pull_login("quay.io", both) is None, "a password is for one registry"
    with pytest.raises(InputError, match=SNAPSHOT_VARIABLE):
        snapshot_login("ghcr.io", both)
    assert snapshot_login("ghcr.io", {SNAPSHOT_VARIABLE: both[PULL_VARIABLE]}).user == "pods"
    assert PASSWORD not in repr(pull_login("ghcr.io", both))


@pytest.mark.parametrize("text", ["me@ghcr.io", f"me:{PASSWORD}", f"me:{PASSWORD} @ghcr.io", f":{PASSWORD}@ghcr.io"])
def test_half_a_login_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(InputError, match=LOGIN_VARIABLE) as refused:
        push_login("ghcr.io", {LOGIN_VARIABLE: text})
    assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize("place", ["run/containers/auth.json", ".config/containers/auth.json", ".docker/config.json"])
def test_a_push_uses_what_podman_and_docker_know_and_a_pod_does_not(tmp_path: Path, place: str) -> None:
    file = tmp_path / place
    file.parent.mkdir(parents=True)
    environ = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    for registry in ("ghcr.io", "docker.io"):
        login = RegistryLogin(registry, "me", PASSWORD)
        file.write_text(auth_document(login))
        assert push_login(registry, environ) == login
        assert pull_login(registry, environ) is None
    assert push_login("quay.io", environ) is None


@pytest.mark.parametrize("text", ["", "[]", '{"auths": {"ghcr.io": {"auth": "x"}}}', '{"auths": {"ghcr.io": 1}}'])
def test_a_file_that_is_no_auth_file_holds_no_login(tmp_path: Path, text: str) -> None:
    (tmp_path / "auth.json").write_text(text)
    environ = {"REGISTRY_AUTH_FILE": str(tmp_path / "auth.json"), "HOME": str(tmp_path)}
    assert push_login("ghcr.io", environ) is None


# --- a registry ----------------------------------------------------------------------------------------------------


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with scripted_api() as api:
        yield api


def host(api: ScriptedApi) -> str:
    return api.url.removeprefix("http://")


def has(api: ScriptedApi, login: bool = True) -> bool:
    who = RegistryLogin(host(api), "me", PASSWORD) if login else None
    return Registry(host(api), who).has(Repository(host(api), "me/golden"), DIGEST)


def basic() -> str:
    return "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()


def test_an_image_is_there_when_its_manifest_has_that_very_digest(api: ScriptedApi) -> None:
    api.on(ASKED, Answer(200, MANIFEST))
    assert has(api)
    assert "oci.image.manifest" in api.asked[0].headers["accept"]
    api.on(ASKED, Answer(404, {"errors": [{"code": "MANIFEST_UNKNOWN"}]}))
    assert not has(api)
    api.on(ASKED, Answer(200, MANIFEST + " "))
    with pytest.raises(InvalidError):
        has(api)


def test_the_password_is_told_only_when_it_is_asked_for(api: ScriptedApi) -> None:
    api.on(ASKED, Answer(401, {}, {"WWW-Authenticate": 'Basic realm="here"'}), Answer(200, MANIFEST))
    assert has(api)
    assert [asked.headers.get("authorization") for asked in api.asked] == [None, basic()]


def test_a_token_is_fetched_where_the_registry_says(api: ScriptedApi) -> None:
    challenge = f'Bearer realm="{api.url}/token",service="here",scope="repository:other:push"'
    for login, proof in ((True, basic()), (False, None)):
        api.asked.clear()
        api.on("GET /token", Answer(200, {"token": "t0k"}))
        api.on(ASKED, Answer(401, {}, {"WWW-Authenticate": challenge}), Answer(200, MANIFEST))
        assert has(api, login)
        (fetched,) = api.calls("GET /token")
        assert fetched.query == {"service": "here", "scope": "repository:me/golden:pull"}
        assert fetched.headers.get("authorization") == proof
        assert api.asked[-1].headers["authorization"] == "Bearer t0k"


def test_a_password_goes_nowhere_without_tls(api: ScriptedApi) -> None:
    challenge = {"WWW-Authenticate": 'Bearer realm="http://evil.example/token"'}
    api.on(ASKED, Answer(401, {}, challenge))
    with pytest.raises(AuthError, match="not safe"):
        has(api)


def test_a_password_is_not_taken_along_by_a_redirect(api: ScriptedApi) -> None:
    api.on(ASKED, Answer(307, None, {"Location": f"{api.url}/elsewhere"}))
    with pytest.raises(TransientError, match="307"):
        has(api)
    assert len(api.asked) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_login_that_is_refused_is_told_by_its_name(api: ScriptedApi, status: int) -> None:
    api.on(ASKED, Answer(status, {}, {"WWW-Authenticate": "Basic"}))
    with pytest.raises(AuthError, match="refuses the login of me") as refused:
        has(api)
    assert PASSWORD not in str(refused.value)
    with pytest.raises(AuthError, match="without a login"):
        has(api, login=False)


def test_a_registry_that_is_down_says_nothing_about_the_image(api: ScriptedApi) -> None:
    for answer in (Answer(500), Answer(fault="drop")):
        api.on(ASKED, answer)
        with pytest.raises(TransientError):
            has(api)


# --- a push ----------------------------------------------------------------------------------------------------------


class Pushing:
    """An engine's runner that pushes: keeps every command, and what the file with the login held meanwhile."""

    def __init__(self, kind: str, rc: int = 0) -> None:
        self.engine = Engine(kind=kind, path=kind, version="5", rootless=False, storage="", runner=self)
        self.commands: list[list[str]] = []
        self.login = ""
        self.folder = Path()
        self._rc = rc

    def __call__(self, argv: Sequence[str], stdin: bytes | None, timeout_s: float) -> Completed:
        words = list(argv)[1:]
        self.commands.append(words)
        if "push" not in words:
            return Completed(0, "", "")
        if "--authfile" in words or "--config" in words:
            named = Path(words[words.index("--authfile" if "--authfile" in words else "--config") + 1])
            file = named if named.is_file() else named / "config.json"
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            self.login, self.folder = file.read_text(), file.parent
        if "--digestfile" in words:
            Path(words[words.index("--digestfile") + 1]).write_text(DIGEST)
        said = f"golden: digest: {DIGEST} size: 528\n" if self.engine.kind == "docker" else ""
        return Completed(self._rc, said, "Error: denied" if self._rc else "")


@pytest.mark.parametrize("kind", ["podman", "docker"])
def test_a_push_tells_the_digest_and_no_process_the_password(kind: str) -> None:
    pushing = Pushing(kind)
    login = RegistryLogin("127.0.0.1:5000", "me", PASSWORD)
    to = parse_repository("127.0.0.1:5000/me/golden")
    assert push_image(pushing.engine, "localhost/pennypod:golden-demo-v1", to, "v1", login) == DIGEST
    assert json.loads(pushing.login)["auths"].keys() == {"127.0.0.1:5000"}
    assert PASSWORD not in json.dumps(pushing.commands)
    assert not pushing.folder.exists()
    (push,) = [words for words in pushing.commands if "push" in words]
    assert push[-1].removeprefix("docker://") == "127.0.0.1:5000/me/golden:v1"
    if kind == "docker":
        assert pushing.commands[-1] == ["rmi", "127.0.0.1:5000/me/golden:v1"]


def test_a_registry_elsewhere_is_reached_by_tls_with_the_logins_of_the_engine() -> None:
    pushing = Pushing("podman")
    push_image(pushing.engine, "a", parse_repository("ghcr.io/me/golden"), "v1", None)
    assert not {"--tls-verify=false", "--authfile"} & set(pushing.commands[0])


@pytest.mark.parametrize("kind", ["podman", "docker"])
def test_a_push_that_fails_says_where_to(kind: str) -> None:
    pushing = Pushing(kind, rc=125)
    with pytest.raises(TransientError, match=r"could not push ghcr\.io/me/golden:v1: denied"):
        push_image(pushing.engine, "a", parse_repository("ghcr.io/me/golden"), "v1", None)
