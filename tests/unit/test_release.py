"""What scripts/release.py packs for a server: this checkout as it is, the packages that runs need, and nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with a job that is not committed, a secret that git ignores, a test, and a file that was removed."""
    root = tmp_path / "clone"
    for name in ("train.yml", "tests/test_x.py", "gone.yml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name, "utf-8")
    (root / ".gitignore").write_text(".env\n", "utf-8")
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    (root / "gone.yml").unlink()
    (root / "group_vars").mkdir()
    (root / "group_vars/job_mine.yml").write_text("pod_gpu: H100\n", "utf-8")
    (root / ".env").write_text("VAST_API_KEY=secret\n", "utf-8")
    return root


def test_it_has_jobs_that_are_not_committed_and_nothing_that_git_ignores(release: ModuleType, clone: Path) -> None:
    assert release.files(clone) == [".gitignore", "group_vars/job_mine.yml", "train.yml"]


def test_the_same_files_are_the_same_bytes(release: ModuleType, clone: Path, tmp_path: Path) -> None:
    names = release.files(clone)
    release.pack(clone, names, tmp_path / "first.tar.gz")
    (clone / "train.yml").touch()
    (clone / "train.yml").chmod(0o600)
    release.pack(clone, names, tmp_path / "second.tar.gz")
    assert (tmp_path / "first.tar.gz").read_bytes() == (tmp_path / "second.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "first.tar.gz") as tar:
        assert {(entry.name, entry.mode, entry.uname) for entry in tar} == {(name, 0o644, "") for name in names}


def test_packages_are_those_that_runs_need_on_any_python(release: ModuleType) -> None:
    asked = {
        "pennypod": ["Alpha[fast]", "mypy ; extra == 'dev'", "web ; extra == 'serve'"],
        "alpha": ["speed ; extra == 'fast'", "slow ; extra == 'lazy'", "old ; python_version < '3.9'"],
        "web": ["later ; python_version >= '3.13'", "pennypod"],
    }
    found = release.closure(("pennypod[serve]",), lambda name: asked.get(name, []))
    assert found == {"alpha", "speed", "web", "later"}


def test_the_lock_gives_each_of_them_with_its_hashes(release: ModuleType) -> None:
    lock = dict(release.entries((ROOT / "requirements.lock").read_text("utf-8")))
    needed = release.closure(release.NEEDED, release.installed)
    assert {"ansible-core", "dbos", "boto3", "psycopg", "uvicorn"} <= needed
    assert needed.isdisjoint({"mypy", "molecule", "pytest"})
    assert not [name for name in ("dbos", "uvicorn", "psycopg") if "--hash=sha256:" not in lock[name]]
