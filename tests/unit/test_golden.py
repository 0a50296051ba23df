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
from pennypod.errors import FencedError, InputError, TransientError
from pennypod.golden import (
    Bake,
    Bakery,
    Golden,
    GoldenStore,
    Recipe,
    choose,
    content_hash,
    next_version,
    superseded,
    unbake,
)
from pennypod.ledger import RunRecord, open_ledger
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
    assert choose(baked, RECIPE, lambda _item: True).golden == golden(10)


def test_a_missing_one_is_told_and_the_next_taken() -> None:
    choice = choose([golden(1), golden(2)], RECIPE, lambda item: item.version == 1)
    assert choice.golden == golden(1)
    assert choice.note == "golden-demo-v2 is missing, golden-demo-v1 is used"
    choice = choose([golden(2)], RECIPE, lambda _item: False)
    assert choice.golden is None
    assert choice.note.startswith("golden-demo-v2 is missing on the engine, the stock image is used; bake it again: ")


def test_other_requirements_or_another_base_need_another_image() -> None:
    for other in (replace(RECIPE, base="localhost/pennypod-stock:2"), replace(RECIPE, requirements={})):
        choice = choose([golden(1)], other, lambda _item: True)
        assert choice.golden is None
        assert "other requirements" in choice.note


def test_a_job_that_was_never_baked_is_no_reason_to_warn() -> None:
    assert choose([], RECIPE, lambda _item: True).note == ""


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
