"""How pod images are named, found and built; the engine and the long commands are stand-ins."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from pennypod.errors import FencedError, InvalidError, NoCapacityError, TransientError
from pennypod.providers.local import image
from pennypod.providers.local.engine import Completed, Engine
from pennypod.providers.local.hostsettings import HostSettings


class Store:
    """An engine that is only its images."""

    def __init__(self, *images: str) -> None:
        self.images = set(images)
        self.calls: list[list[str]] = []

    def __call__(self, argv: Sequence[str], stdin: bytes | None, timeout_s: float) -> Completed:
        self.calls.append(list(argv[1:]))
        match argv[1]:
            case "image":
                known = argv[-1] in self.images
                return Completed(0, "sha256:1", "") if known else Completed(1, "", "Error: No such image: x")
            case "ps":
                return Completed(0, "[]", "")
            case "import" | "commit":
                self.images.add(argv[-1])
                return Completed(0, "", "")
            case "rm":
                return Completed(0, "", "")
        raise AssertionError(f"unexpected engine call {argv}")


def engine(store: Store) -> Engine:
    return Engine("podman", "/bin/podman", "4.3.1", False, "", runner=store)


def quiet(_text: str) -> None:
    pass


# --- names ---------------------------------------------------------------------------------------------------------


def test_a_changed_recipe_is_a_new_image_and_so_is_what_stands_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, torch = image.image_reference("stock"), image.image_reference("torch")
    assert stock.startswith("localhost/pennypod-stock:")
    assert stock == image.image_reference("stock")
    changed = image.Recipe("stock", None, image.PACKAGES, ("numpy<2",), 1800)
    monkeypatch.setitem(image.RECIPES, "stock", changed)
    assert image.image_reference("stock") != stock
    assert image.image_reference("torch") != torch


def test_requirements_reach_the_shell_whole(tmp_path: Path) -> None:
    script = tmp_path / "show.sh"
    script.write_text('printf "%s|" $PENNYPOD_REQUIREMENTS\n')
    recipe = image.Recipe("x", None, (), ("numpy>=2,<3", "a~=1"), 1, script=script)
    shown = image._watched(["sh", "-c", recipe.text()], "x", quiet, limit_s=10)
    assert shown.tail == "numpy>=2,<3|a~=1|"


# --- which image ---------------------------------------------------------------------------------------------------


def test_an_image_that_is_there_is_not_built(tmp_path: Path) -> None:
    store = Store(image.image_reference("stock"), "mine:1")
    for wanted, expected in (
        ("", image.image_reference("stock")),
        ("stock", image.image_reference("stock")),
        ("mine:1",) * 2,
    ):
        assert image.ensure_image(engine(store), wanted, HostSettings(), tmp_path, {}, quiet) == expected
    assert {call[0] for call in store.calls} == {"image"}


def test_an_unknown_image_is_no_reason_to_ask_a_registry(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="has no image 'mine:2'"):
        image.ensure_image(engine(Store()), "mine:2", HostSettings(), tmp_path, {}, quiet)


@pytest.fixture
def lock_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(image.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_two_at_once_build_once(lock_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, built = Store(), []

    def build(_engine: Engine, recipe: image.Recipe, *_rest: object) -> None:
        built.append(recipe.name)
        time.sleep(0.3)
        store.images.add(image.image_reference(recipe.name))

    monkeypatch.setattr(image, "_build", build)
    said: list[str] = []
    got: list[str] = []

    def ensure() -> None:
        got.append(image.ensure_image(engine(store), "stock", HostSettings(), tmp_path, {}, said.append))

    threads = [threading.Thread(target=ensure) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert built == ["stock"]
    assert got == [image.image_reference("stock")] * 3
    assert any("waiting for another run" in text for text in said)


def test_the_lock_is_not_left_to_strangers(lock_folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (lock_folder / f"pennypod-{image.os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(InvalidError, match="belongs to somebody else"), image.build_lock(quiet):
        pass


def test_what_a_killed_build_left_is_cleared_and_nothing_else(lock_folder: Path) -> None:
    (lock_folder / "pennypod-image-abc").mkdir()
    (lock_folder / "pennypod-image-abc/base.tar").write_text("half")
    (lock_folder / "other").mkdir()

    class WithLeftover(Store):
        def __call__(self, argv: Sequence[str], stdin: bytes | None, timeout_s: float) -> Completed:
            if argv[1] == "ps":
                rows = [
                    {"Id": "a" * 64, "Names": ["build-pennypod-stock-00"]},
                    {"Id": "b" * 64, "Names": ["my-build-pennypod-x"]},
                ]
                return Completed(0, json.dumps(rows), "")
            return super().__call__(argv, stdin, timeout_s)

    store = WithLeftover()
    image.sweep_leftovers(engine(store))
    assert [call[-1] for call in store.calls if call[0] == "rm"] == ["a" * 64]
    assert sorted(path.name for path in lock_folder.iterdir()) == ["other"]


# --- the base ------------------------------------------------------------------------------------------------------


def test_without_registry_and_without_mmdebstrap_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_registry_answers", lambda _environ: False)
    monkeypatch.setattr(image.shutil, "which", lambda _name: None)
    with pytest.raises(
        InvalidError, match=r"no image registry answers and mmdebstrap is not installed.*install mmdebstrap"
    ):
        image._base(engine(Store()), HostSettings(), {}, quiet)


def test_a_base_that_is_there_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_registry_answers", lambda _environ: pytest.fail("no need to ask"))
    assert image._base(engine(Store(image.REGISTRY_BASE)), HostSettings(), {}, quiet) == image.REGISTRY_BASE


def fake_mmdebstrap(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Stands in for the real one: `script` sees its arguments."""
    program = folder / "bin" / "mmdebstrap"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{image.os.environ['PATH']}")


HOST = HostSettings(
    release="debian trixie",
    apt_files={
        "/etc/apt/sources.list.d/debian.sources": b"Types: deb\nSuites: trixie\nURIs: http://mirror/\n",
        "/usr/share/keyrings/k.gpg": b"K",
    },
    apt_options='Acquire::http::Proxy "http://proxy/";\n',
)


def test_the_bootstrap_uses_the_hosts_release_sources_and_proxy(
    lock_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    # The tar file is the argument after the suite.
    cases = '*.tar) echo x >"$a" ;; *.sources) cat "$a" ;; --aptopt=*) cat "${a#*=}" ;;'
    body = f'for a; do case "$a" in {cases} esac; done >{seen}'
    fake_mmdebstrap(tmp_path, monkeypatch, f'echo "$@" >{seen}.args\n{body}')
    store = Store()
    image._bootstrap(engine(store), HOST, "localhost/base:1", quiet)
    args = Path(f"{seen}.args").read_text()
    assert " trixie " in args
    assert "--include=openssh-server," in args
    assert "http://mirror/" in seen.read_text()
    assert "http://proxy/" in seen.read_text()
    assert "localhost/base:1" in store.images
    assert not list(lock_folder.glob("pennypod-image-*"))


def test_a_bootstrap_that_fails_imports_nothing(
    lock_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_mmdebstrap(tmp_path, monkeypatch, 'echo "I: ok"; echo "E: Unable to fetch the thing" >&2; exit 25')
    store = Store()
    with pytest.raises(TransientError, match=r"could not be built \(Debian packages\): E: Unable to fetch the thing"):
        image._bootstrap(engine(store), HOST, "localhost/base:1", quiet)
    assert store.images == set()
    assert not list(lock_folder.glob("pennypod-image-*"))


def test_a_full_disk_is_told_from_other_failures(
    lock_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_mmdebstrap(tmp_path, monkeypatch, 'echo "tar: write error: No space left on device" >&2; exit 2')
    with pytest.raises(NoCapacityError, match="free some disk"):
        image._bootstrap(engine(Store()), HOST, "localhost/base:1", quiet)


# --- a command that ends with us --------------------------------------------------------------------------------------


def start_on_a_lifeline(work: Path, code: str) -> subprocess.Popen[bytes]:
    work.mkdir()
    argv = image.lifeline(work, [sys.executable, "-c", code])
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_cut_lifeline_ends_the_command_and_removes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespaces: bool
) -> None:
    if not namespaces:
        monkeypatch.setattr(image, "_works", lambda _argv: False)
    work, beat = tmp_path / "work", tmp_path / "beat"
    code = f"""
import pathlib, time
pathlib.Path({str(work)!r}, "half.tar").write_text("half")
pathlib.Path({str(beat)!r}).write_text("first")
print("begun", flush=True)
while True:
    pathlib.Path({str(beat)!r}).write_text(str(time.time()))
    time.sleep(0.05)
"""
    process = start_on_a_lifeline(work, code)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"begun\n"
    process.stdin.close()
    assert process.wait(timeout=20) != 0
    deadline = time.monotonic() + 15
    while work.exists():
        assert time.monotonic() < deadline, "its files stayed"
        time.sleep(0.1)
    last = beat.read_text()
    time.sleep(0.3)
    assert beat.read_text() == last, "it still runs"
    process.stdout.close()


def test_a_command_that_ends_by_itself_keeps_its_files_and_status(tmp_path: Path) -> None:
    work = tmp_path / "work"
    process = start_on_a_lifeline(work, f"open({str(work / 'base.tar')!r}, 'w').write('whole'); raise SystemExit(7)")
    # stdin stays open until it has ended: that is what keeps it alive.
    assert process.wait(timeout=20) == 7
    process.communicate()
    time.sleep(0.5)
    assert (work / "base.tar").read_text() == "whole"


@pytest.mark.skipif(image.os.geteuid() != 0, reason="only root can mount")
def test_mounts_of_the_command_are_its_own(tmp_path: Path) -> None:
    work = tmp_path / "work"
    if "unshare" not in image.lifeline(work, []):
        pytest.skip("this machine gives nobody a mount namespace")
    target = tmp_path / "target"
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "x", str(target)]
    process = start_on_a_lifeline(work, f"import subprocess as s; s.run({mount!r}, check=True); print('mounted')")
    assert process.wait(timeout=20) == 0
    assert process.communicate()[0] == b"mounted\n"
    assert not target.is_mount()


def test_old_images_go_and_the_newest_stay() -> None:
    class WithImages(Store):
        def __call__(self, argv: Sequence[str], stdin: bytes | None, timeout_s: float) -> Completed:
            if argv[1] == "images":
                return Completed(0, "".join(f"localhost/pennypod-stock:{n}\n" for n in range(5)), "")
            if argv[1] == "rmi":
                self.calls.append(list(argv[1:]))
                return Completed(0, "", "")
            return super().__call__(argv, stdin, timeout_s)

    store = WithImages()
    image._forget_old_images(engine(store), "stock")
    assert [call[-1] for call in store.calls] == ["localhost/pennypod-stock:3", "localhost/pennypod-stock:4"]


# --- watching a long command ---------------------------------------------------------------------------------------


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_work_is_saved_between_its_mark_and_the_end() -> None:
    order: list[str] = []
    code = "import sys; print('pennypod-build-exit 0', flush=True); sys.stdin.read(); print('ended')"
    done = image._watched(python(code), "x", quiet, limit_s=20, at_exit_mark=lambda: order.append("saved"))
    assert order == ["saved"], "stdin stays open until the work is saved"
    assert (done.rc, done.marked) == (0, 0)
    assert "ended" in done.tail


def test_work_that_failed_is_not_saved() -> None:
    code = "import sys; print('E: no', flush=True); print('pennypod-build-exit 7', flush=True); sys.stdin.read()"
    done = image._watched(python(code), "x", quiet, limit_s=20, at_exit_mark=lambda: pytest.fail("saved"))
    assert done.marked == 7


def test_work_that_was_cut_off_has_no_mark() -> None:
    done = image._watched(python("print('half')"), "x", quiet, limit_s=20, at_exit_mark=lambda: pytest.fail("saved"))
    assert done.marked is None


def test_progress_is_told_and_may_stop_the_work() -> None:
    def stop(text: str) -> None:
        assert "x, 2 s: working" in text
        raise FencedError("taken away")

    began = time.monotonic()
    with pytest.raises(FencedError):
        image._watched(python("import time; print('working', flush=True); time.sleep(60)"), "x", stop, limit_s=60)
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("limits", [{"limit_s": 1.0}, {"limit_s": 60.0, "stall_s": 1.0}])
def test_nothing_is_waited_for_without_a_limit(limits: dict[str, float]) -> None:
    began = time.monotonic()
    with pytest.raises(TransientError, match="given up"):
        image._watched(python("import time; time.sleep(60)"), "x", quiet, **limits)
    assert time.monotonic() - began < 20
