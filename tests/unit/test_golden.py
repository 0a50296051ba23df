"""Golden images without an engine: what goes into one, which one is taken, and what is left of one that was cut off."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from fakes import FakeClock
from pennypod import processes
from pennypod.cli import main
from pennypod.cli.app import App
from pennypod.clock import SystemClock
from pennypod.errors import AuthError, FencedError, InputError, ProviderError, TransientError
from pennypod.golden import (
    Bake,
    Bakery,
    Golden,
    GoldenStore,
    Pulls,
    Recipe,
    choose,
    content_hash,
    next_version,
    superseded,
    unbake,
)
from pennypod.ledger import RunRecord, open_ledger
from pennypod.model.image import RegistryLogin, Repository, parse_repository
from pennypod.providers.base import SavedImage
from pennypod.providers.local.saving import layer_of, parse_changes
from pennypod.settings import Settings, load_settings

RUN = "demo-1201-aaaaa"
HOME = "/root/pennypod"
RECIPE = Recipe("demo", "local", "localhost/pennypod-stock:1", {"requirements": ["numpy"]})


def golden(version: int, recipe: Recipe = RECIPE, run: str = RUN) -> Golden:
    return Golden(
        name=f"golden-{recipe.job}-v{version}",
        job=recipe.job,
        version=version,
        provider=recipe.provider,
        run=run,
        baked=1.0,
        base=recipe.base,
        requirements_hash=recipe.hash,
        role_hash="",
        pennypod="0",
        python="python3",
    )


# --- the layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/etc/ssh/ssh_host_ed25519_key",
        "/etc/ssh/pennypod_sshd_config",
        "/etc/ssh/pennypod_key_of",
        "/root/.ssh/authorized_keys",
        "/home/me/.ssh/authorized_keys",
        "/root/.cache/pip/http/a",
        *(f"/root/{hidden}" for hidden in (".bash_history", ".python_history", ".ansible/tmp/x", ".netrc")),
        "/home/me/.bash_history",
        "/root/pennypod/out/train.log",
        "/root/pennypod/data/a.jpg",
        "/root/pennypod/cached",
        "/var/cache/apt/archives/rsync.deb",
        "/var/lib/apt/lists/a_Packages",
        "/var/log/apt/history.log",
        "/etc/apt/auth.conf.d/private.conf",
        "/etc/pip.conf",
        "/etc/resolv.conf",
        "/run/sshd",
        "/tmp/left",
    ],
)
def test_what_is_the_pods_own_stays_with_the_pod(path: str) -> None:
    assert layer_of([("A", path), ("A", "/usr/bin/rsync")], [], HOME).taken == ("/usr/bin/rsync",)


@pytest.mark.parametrize(
    "path",
    ["/root/pennypod", "/root/pennypod/cache/yolov8n.pt", "/usr/lib/python3/a.py", "/var/lib/dpkg/status", "/runner/a"],
)
def test_what_the_next_pod_needs_goes_into_the_image(path: str) -> None:
    assert layer_of([("C", path)], [], HOME).taken == (path,)


def test_what_the_host_lends_to_a_pod_is_not_given_away() -> None:
    changes = [("C", "/etc/ssl/certs/ca-certificates.crt"), ("A", "/usr/bin/rsync")]
    assert layer_of(changes, ["/etc/ssl/certs/ca-certificates.crt"], HOME).taken == ("/usr/bin/rsync",)


def test_a_folder_that_was_made_anew_is_deleted_and_copied() -> None:
    layer = layer_of(parse_changes("D /opt/old\nD /opt/a b\nA /opt/a b/new\nnoise\n"), [], HOME)
    assert layer.deleted == ("/opt/a b", "/opt/old")
    assert layer.taken == ("/opt/a b", "/opt/a b/new")


# --- which one ----------------------------------------------------------------------------------------------------


def test_the_newest_that_fits_and_is_there_is_taken() -> None:
    others = replace(RECIPE, requirements={"requirements": ["torch"]})
    baked = [golden(1), golden(2), golden(10), golden(11, others), golden(12, replace(RECIPE, job="other"))]
    assert choose(baked, RECIPE, lambda _item: "").golden == golden(10)


def test_a_missing_one_is_told_and_the_next_taken() -> None:
    choice = choose(
        [golden(1), golden(2)], RECIPE, lambda item: "" if item.version == 1 else "is missing on the engine"
    )
    assert choice.golden == golden(1)
    assert choice.note == "golden-demo-v2 is missing on the engine, golden-demo-v1 is used"
    choice = choose([golden(2)], RECIPE, lambda _item: "is missing on the engine")
    assert choice.golden is None
    assert choice.note.startswith("golden-demo-v2 is missing on the engine, the stock image is used; bake it again: ")


def test_other_requirements_or_another_base_need_another_image() -> None:
    for other in (replace(RECIPE, base="localhost/pennypod-stock:2"), replace(RECIPE, requirements={})):
        choice = choose([golden(1)], other, lambda _item: "")
        assert choice.golden is None
        assert "other requirements" in choice.note


def test_a_job_that_was_never_baked_is_no_reason_to_warn() -> None:
    assert choose([], RECIPE, lambda _item: "").note == ""


def test_requirements_are_compared_whatever_their_order() -> None:
    one = replace(RECIPE, requirements={"a": 1, "b": [1]})
    assert one.hash == replace(RECIPE, requirements={"b": [1], "a": 1}).hash
    assert one.hash != replace(RECIPE, requirements={"b": [2], "a": 1}).hash


def test_a_version_is_given_once() -> None:
    names = ["golden-demo-v2", "golden-demo-v10", "golden-demo_two-v50", "latest", "golden-demo-v3x"]
    assert next_version("demo", names) == 11
    assert next_version("demo", []) == 1
    assert next_version("demo", ["golden-demo-v2"], last=7) == 8


def test_pruning_keeps_the_newest_of_each_job() -> None:
    other = replace(RECIPE, job="other")
    baked = [golden(1), golden(2), golden(3), golden(1, other)]
    assert [item.name for item in superseded(baked, 1)] == ["golden-demo-v2", "golden-demo-v1"]
    assert len(superseded(baked, 0)) == 4


def test_a_roles_hash_is_that_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("a")
    before = content_hash(tmp_path)
    assert content_hash(tmp_path) == before
    (tmp_path / "a.yml").write_text("b")
    assert content_hash(tmp_path) != before


# --- the bake ----------------------------------------------------------------------------------------------------


class Maker:
    """Images by name, with the run that each was made of; drafts are named by their run."""

    def __init__(self) -> None:
        self.images: dict[str, str] = {}
        self.labels: dict[str, str] = {}
        self.pushed: list[str] = []
        self.busy = False
        self.while_saving: Callable[[], None] = lambda: None

    @contextmanager
    def saving(self, on_progress: Callable[[str], None]) -> Iterator[None]:
        while self.busy:
            on_progress("waiting")
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def image_base(self, image: str) -> str:
        return image

    def save_image(
        self, pod_id: str, run: str, labels: Mapping[str, str], pod_home: str, on_progress: Callable[[str], None]
    ) -> SavedImage:
        self.images[f"draft of {run}"], self.labels = run, dict(labels)
        self.while_saving()
        return SavedImage("draft", "sha256:1", "sha256:2", 20, "sha256:0", 5)

    def publish_image(self, run: str, name: str) -> str:
        self.images[name] = self.images.pop(f"draft of {run}")
        return f"local/{name}"

    def discard_images(self, run: str) -> None:
        self.images = {name: made_of for name, made_of in self.images.items() if made_of != run}

    def saved_images(self) -> dict[str, str]:
        return dict.fromkeys(self.images, "sha256:1")

    def push_image(self, name: str, to: Repository, tag: str, login: RegistryLogin | None) -> str:
        assert name in self.images
        self.pushed.append(f"{to}:{tag}")
        return DIGEST

    def remove_image(self, name: str) -> None:
        self.images.pop(name, None)

    def ask_pod(self, pod_id: str, argv: Sequence[str]) -> str:
        return "rsync 3.2\n" if argv[0] == "dpkg-query" else '{"numpy": "2.1"}'


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings({"PENNYPOD_HOME": str(tmp_path)})


def open_run(settings: Settings, run: str = RUN) -> None:
    ledger = open_ledger(settings)
    ledger.open_run(RunRecord(run, "demo", processes.own_identity(), 1.0, str(settings.home / "artifacts")))


def bake(settings: Settings, maker: Maker, run: str = RUN) -> Golden:
    order = Bake(run, "pod", RECIPE, "role", "python3", HOME)
    return Bakery(settings, maker, SystemClock()).bake(order, open_ledger(settings), lambda _text: None)


def test_a_bake_is_an_image_with_its_manifest(settings: Settings) -> None:
    open_run(settings)
    maker = Maker()
    made = bake(settings, maker)
    assert GoldenStore(settings.home).all() == [made]
    assert maker.images == {"golden-demo-v1": RUN}
    assert (made.name, made.digest, made.layer_bytes) == ("golden-demo-v1", "sha256:2", 5)
    assert (made.debian_packages, made.python_packages) == ({"rsync": "3.2"}, {"numpy": "2.1"})
    assert maker.labels["pennypod.golden.requirements"] == RECIPE.hash


def test_a_version_is_not_given_again_after_its_image_was_removed(settings: Settings) -> None:
    open_run(settings)
    maker = Maker()
    Bakery(settings, maker, SystemClock()).remove(bake(settings, maker))
    assert (maker.images, GoldenStore(settings.home).all()) == ({}, [])
    assert bake(settings, maker).name == "golden-demo-v2"


def test_two_bakes_at_once_have_two_names_wherever_they_are_made(settings: Settings) -> None:
    open_run(settings)
    maker = Maker()
    elsewhere: list[str] = []
    maker.while_saving = lambda: elsewhere.append(GoldenStore(settings.home).take_name("demo")[0])
    assert (bake(settings, maker).name, elsewhere) == ("golden-demo-v1", ["golden-demo-v2"])


def test_a_name_that_means_another_image_by_now_is_not_taken(settings: Settings) -> None:
    open_run(settings)
    maker = Maker()
    made = bake(settings, maker)
    bakery = Bakery(settings, maker, SystemClock())
    assert bakery.choose(RECIPE).golden == made
    GoldenStore(settings.home).write(replace(made, image_id="sha256:another"))
    assert bakery.choose(RECIPE).golden is None


def test_a_run_that_was_taken_away_while_it_saved_leaves_nothing(settings: Settings) -> None:
    open_run(settings)
    maker = Maker()
    maker.while_saving = lambda: open_ledger(settings).fence(RUN, "its command has ended") and None
    with pytest.raises(FencedError):
        bake(settings, maker)
    assert (maker.images, GoldenStore(settings.home).all()) == ({}, [])


def test_the_guard_takes_away_what_was_published_last(settings: Settings) -> None:
    for run in (RUN, "demo-1201-bbbbb"):
        open_run(settings, run)
    maker = Maker()
    bake(settings, maker, "demo-1201-bbbbb")
    bake(settings, maker)
    for _twice in range(2):
        unbake(settings, {"local": maker}, SystemClock(), RUN)  # type: ignore[dict-item] # a part of a provider
    assert list(maker.images) == ["golden-demo-v1"]
    assert [item.run for item in GoldenStore(settings.home).all()] == ["demo-1201-bbbbb"]


def test_the_guard_does_not_wait_for_ever_for_somebody_elses_build(settings: Settings) -> None:
    open_run(settings)
    maker = Maker()
    bake(settings, maker)
    maker.busy = True
    with pytest.raises(TransientError):
        unbake(settings, {"local": maker}, SystemClock(), RUN)  # type: ignore[dict-item]


def test_a_run_that_bakes_nothing_has_nothing_to_take_away(settings: Settings) -> None:
    unbake(settings, {}, SystemClock(), RUN)


def test_a_file_that_is_no_manifest_is_named(settings: Settings) -> None:
    folder = GoldenStore(settings.home).folder
    folder.mkdir(parents=True)
    (folder / "golden-demo-v1.json").write_text("{}")
    with pytest.raises(InputError, match=r"golden-demo-v1\.json is no manifest"):
        GoldenStore(settings.home).all()


# --- a registry --------------------------------------------------------------------------------------------------

TO = parse_repository("ghcr.io/me/golden")
DIGEST = f"sha256:{'5' * 64}"
LOGIN = RegistryLogin("ghcr.io", "pods", "secret")


class FakeRegistry:
    """A registry that answers every question alike, and counts them."""

    def __init__(self, answer: bool | Exception = True) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def has(self, repository: Repository, digest: str) -> bool:
        self.asked.append(repository.at(digest))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def push(settings: Settings, maker: Maker, made: Golden, registry: FakeRegistry) -> Golden:
    return Bakery(settings, maker, SystemClock()).push(made, TO, LOGIN, registry, lambda _text: None)


def test_a_push_is_known_when_the_registry_has_confirmed_it(settings: Settings) -> None:
    open_run(settings)
    maker, registry = Maker(), FakeRegistry()
    made = bake(settings, maker)
    pushed = push(settings, maker, made, registry)
    assert pushed == replace(made, remote=f"ghcr.io/me/golden@{DIGEST}")
    assert GoldenStore(settings.home).all() == [pushed]
    assert maker.pushed == ["ghcr.io/me/golden:golden-demo-v1-aaaaa"]
    assert push(settings, maker, pushed, registry) == pushed
    assert len(maker.pushed) == 1, "what is there is not sent again"


@pytest.mark.parametrize("answer", [False, TransientError("down"), AuthError("no")])
def test_a_push_that_is_not_confirmed_leaves_the_image_as_it_was(
    settings: Settings, answer: bool | ProviderError
) -> None:
    open_run(settings)
    maker = Maker()
    made = bake(settings, maker)
    with pytest.raises(ProviderError):
        push(settings, maker, made, FakeRegistry(answer))
    assert GoldenStore(settings.home).all() == [made]
    assert push(settings, maker, made, FakeRegistry()).remote


def test_an_image_that_was_removed_while_it_was_pushed_stays_removed(settings: Settings) -> None:
    open_run(settings)
    maker, registry = Maker(), FakeRegistry()
    made = bake(settings, maker)
    Bakery(settings, maker, SystemClock()).remove(made)
    maker.images[made.name] = RUN
    with pytest.raises(InputError, match="removed"):
        push(settings, maker, made, registry)
    assert GoldenStore(settings.home).all() == []
    maker.images.clear()
    with pytest.raises(InputError, match="missing on the engine"):
        push(settings, maker, made, registry)


def pulls(registry: FakeRegistry, login: RegistryLogin | None = LOGIN, *, beside_us: bool = False) -> Pulls:
    return Pulls("vast", lambda _host: login, lambda _host, _login: registry, beside_us=beside_us)


def in_registry(version: int, host: str = "ghcr.io", recipe: Recipe = RECIPE) -> Golden:
    return replace(golden(version, recipe), remote=f"{host}/me/golden@{DIGEST}")


def test_elsewhere_the_newest_one_in_a_registry_is_taken_by_its_digest() -> None:
    baked = [in_registry(1), in_registry(2), golden(3)]
    elsewhere = replace(RECIPE, base="whatever is stock there", provider="vast")
    choice = pulls(FakeRegistry()).choose(baked, elsewhere)
    assert choice.golden is not None
    assert (choice.golden.name, choice.golden.provider) == ("golden-demo-v2", "vast")
    assert (choice.golden.reference, choice.golden.digest) == (f"ghcr.io/me/golden@{DIGEST}", DIGEST)
    assert pulls(FakeRegistry()).choose(baked, replace(elsewhere, requirements={})).golden is None


@pytest.mark.parametrize(
    ("registry", "login", "why"),
    [
        (FakeRegistry(False), LOGIN, "is missing in ghcr.io, the stock image is used; bake it again"),
        (FakeRegistry(AuthError("x")), None, "is in ghcr.io, which lets no pods in: set PENNYPOD_REGISTRY_PULL_LOGIN"),
        (FakeRegistry(AuthError("ghcr.io refuses me")), LOGIN, "cannot be pulled: ghcr.io refuses me, the stock image"),
        (FakeRegistry(TransientError("down")), LOGIN, "cannot be confirmed: down, the stock image is used"),
    ],
)
def test_an_image_that_a_pod_could_not_pull_is_not_rented_for(
    registry: FakeRegistry, login: RegistryLogin | None, why: str
) -> None:
    choice = pulls(registry, login).choose([in_registry(1)], RECIPE)
    assert choice.golden is None
    assert choice.note.startswith(f"golden-demo-v1 {why}")


def test_a_silent_registry_is_asked_once() -> None:
    registry = FakeRegistry(TransientError("down"))
    pulls(registry).choose([in_registry(version) for version in range(1, 9)], RECIPE)
    assert len(registry.asked) == 1


def test_a_registry_on_this_machine_is_for_pods_on_this_machine() -> None:
    baked, registry = [in_registry(1, "127.0.0.1:5000")], FakeRegistry()
    assert "on this machine, which vast cannot reach" in pulls(registry).choose(baked, RECIPE).note
    assert registry.asked == []
    assert pulls(registry, beside_us=True).choose(baked, RECIPE).golden is not None


def test_an_image_in_no_registry_is_told_with_how_to_send_it() -> None:
    note = pulls(FakeRegistry()).choose([golden(1), golden(2)], RECIPE).note
    assert note.startswith("golden-demo-v2 is in no registry that vast could pull it from, the stock image is used; ")
    assert note.endswith("pennypod images push golden-demo-v2 HOST/REPO")
    assert pulls(FakeRegistry()).choose([golden(1, replace(RECIPE, job="other"))], RECIPE).note == ""


def test_pruning_keeps_the_newest_in_a_registry_too() -> None:
    assert [item.name for item in superseded([in_registry(1), in_registry(2), golden(3), golden(4)], 1)] == [
        "golden-demo-v3",
        "golden-demo-v1",
    ]


# --- the command --------------------------------------------------------------------------------------------


def pennypod(settings: Settings, maker: Maker, *args: str) -> tuple[int, str]:
    app = App(settings, FakeClock(), lambda _settings: {"local": maker})  # type: ignore[dict-item]
    result = CliRunner().invoke(main, ["images", *args], obj=app)
    return result.exit_code, result.output


@pytest.fixture
def two(settings: Settings) -> Maker:
    """Two images, the older of which has gone."""
    open_run(settings)
    maker = Maker()
    bake(settings, maker)
    bake(settings, maker)
    del maker.images["golden-demo-v1"]
    return maker


def test_the_table_says_which_images_are_missing(settings: Settings, two: Maker) -> None:
    code, text = pennypod(settings, two)
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip().startswith("golden-")}
    assert code == 0
    assert {name: "missing" in row for name, row in rows.items()} == {"golden-demo-v1": True, "golden-demo-v2": False}
    assert [(item["name"], item["there"]) for item in json.loads(pennypod(settings, two, "--json")[1])] == [
        ("golden-demo-v1", False),
        ("golden-demo-v2", True),
    ]


def test_removing_can_be_tried_first(settings: Settings, two: Maker) -> None:
    assert pennypod(settings, two, "prune", "--dry-run") == (0, "would remove golden-demo-v1\n")
    assert len(GoldenStore(settings.home).all()) == 2
    assert pennypod(settings, two, "prune") == (0, "removed golden-demo-v1\n")
    assert pennypod(settings, two, "rm", "golden-demo-v2") == (0, "removed golden-demo-v2\n")
    assert (two.images, GoldenStore(settings.home).all()) == ({}, [])
    assert pennypod(settings, two, "rm", "golden-demo-v2")[0] == 1


def test_an_image_in_use_stays_with_its_manifest(
    settings: Settings, two: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_name: str) -> None:
        raise TransientError("image is in use by a container")

    monkeypatch.setattr(two, "remove_image", refuse)
    code, text = pennypod(settings, two, "rm", "golden-demo-v2")
    assert (code, text) == (1, "error: golden-demo-v2: image is in use by a container\n")
    assert len(GoldenStore(settings.home).all()) == 2
