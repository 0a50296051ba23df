"""What an upload takes and what it leaves here; nothing is sent."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
from pennypod.errors import InputError
from pennypod.transfer import plan_upload
from pennypod.transfer.plan import UploadPlan, excluded


def tree(root: Path, *paths: str, content: bytes = b"x") -> Path:
    for path in paths:
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith("/"):
            target.mkdir(exist_ok=True)
        else:
            target.write_bytes(content)
    return root


def names(plan: UploadPlan, part: str) -> list[str]:
    return [file.path for found in plan.parts if found.name == part for file in found.files]


def test_code_comes_without_history_caches_outputs_and_keys(tmp_path: Path) -> None:
    wanted = ["train.py", "pkg/__init__.py", "pkg/runs/keep.py", ".env_reader.py", "pkg/venv.py"]
    unwanted = [
        ".git/objects/aa/bb",
        "pkg/__pycache__/a.cpython-311.pyc",
        "stray.pyc",
        ".venv/bin/python",
        "node_modules/x/index.js",
        "runs/detect/best.pt",
        "artifacts/demo/weights.pt",
        ".env",
        ".env.local",
        "id_ed25519",
        "big.tar.part",
        ".DS_Store",
    ]
    root = tree(tmp_path, *wanted, *unwanted)
    assert names(plan_upload(root, None), "code") == sorted(wanted)


def test_a_virtual_environment_is_recognised_by_what_it_holds(tmp_path: Path) -> None:
    root = tree(tmp_path, "train.py", "my-environment/pyvenv.cfg", "my-environment/bin/python")
    assert names(plan_upload(root, None), "code") == ["train.py"]


def test_a_data_set_is_never_shortened_by_the_rules_for_code(tmp_path: Path) -> None:
    paths = [".git/a", "__pycache__/b", "runs/c", "artifacts/d", "e.pyc", "pyvenv.cfg", "venv/pyvenv.cfg", ".env"]
    root = tree(tmp_path, *paths)
    assert names(plan_upload(None, root, excludes=["*.pyc"]), "data") == sorted(paths)
    assert "runs/c" not in names(plan_upload(None, root, data_excludes=["/runs/"]), "data")


def test_own_rules_add_to_the_default_ones(tmp_path: Path) -> None:
    root = tree(tmp_path, "a.py", "notes.txt", "sub/notes.txt", "sub/deep/b.py", ".git/c")
    assert names(plan_upload(root, None, excludes=["notes.txt"]), "code") == ["a.py", "sub/deep/b.py"]
    assert names(plan_upload(root, None, excludes=["/notes.txt"]), "code") == ["a.py", "sub/deep/b.py", "sub/notes.txt"]
    assert names(plan_upload(root, None, excludes=["sub/deep/"]), "code") == ["a.py", "notes.txt", "sub/notes.txt"]


@pytest.mark.parametrize(
    ("path", "is_dir", "rule", "fits"),
    [
        ("a/b/c.pyc", False, "*.pyc", True),
        ("a/b", True, "b/", True),
        ("a/b", False, "b/", False),
        ("runs", True, "/runs/", True),
        ("a/runs", True, "/runs/", False),
        ("a/runs/x", False, "a/runs/*", True),
        ("A.PYC", False, "*.pyc", False),
    ],
)
def test_rules(path: str, is_dir: bool, rule: str, fits: bool) -> None:
    assert excluded(path, is_dir, [rule]) is fits


def test_too_much_code_is_refused_with_the_largest_parts_named(tmp_path: Path) -> None:
    root = tree(tmp_path, "train.py", "checkpoints/a.bin", "checkpoints/b.bin", content=b"x" * 600_000)
    with pytest.raises(
        InputError, match=r"1\.8 MB in 3 files, over the limit of 1\.0 MB; largest: checkpoints 1\.2 MB"
    ):
        plan_upload(root, None, code_limit_bytes=1_000_000)
    assert plan_upload(root, None, code_limit_bytes=2_000_000).bytes == 1_800_000


def test_data_inside_the_code_folder_goes_once(tmp_path: Path) -> None:
    root = tree(tmp_path, "train.py", "datasets/teeth/a.jpg", "datasets/other.txt")
    plan = plan_upload(root, root / "datasets/teeth")
    assert names(plan, "code") == ["datasets/other.txt", "train.py"]
    assert names(plan, "data") == ["a.jpg"]


def test_a_single_file_is_a_tree_of_one(tmp_path: Path) -> None:
    tree(tmp_path, "train.py", "set.npz", "other")
    plan = plan_upload(tmp_path / "train.py", tmp_path / "set.npz")
    assert (names(plan, "code"), names(plan, "data")) == (["train.py"], ["set.npz"])


def test_empty_folders_are_kept(tmp_path: Path) -> None:
    root = tree(tmp_path, "a.jpg", "empty/", "deep/er/")
    assert plan_upload(None, root).parts[0].directories == ("deep", "deep/er", "empty")


def test_links_inside_the_tree_are_followed(tmp_path: Path) -> None:
    root = tree(tmp_path / "set", "images/a.jpg")
    (root / "first.jpg").symlink_to("images/a.jpg")
    (root / "val").symlink_to(root / "images")
    (tmp_path / "way").symlink_to(root)
    for start in (root, tmp_path / "way"):
        assert names(plan_upload(None, start), "data") == ["first.jpg", "images/a.jpg", "val/a.jpg"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("../outside", "leads out of the tree"),
        ("/etc/passwd", "leads out of the tree"),
        ("missing", "leads nowhere"),
        (".", "in a circle"),
        ("../set", "in a circle"),
        ("link", "leads nowhere"),
    ],
)
def test_a_link_that_cannot_be_followed_is_named(tmp_path: Path, target: str, message: str) -> None:
    root = tree(tmp_path / "set", "a.jpg")
    tree(tmp_path, "outside/secret")
    (root / "link").symlink_to(target)
    with pytest.raises(InputError, match=message) as caught:
        plan_upload(None, root)
    assert "/set/link" in caught.value.message
    assert names(plan_upload(None, root, data_excludes=["link"]), "data") == ["a.jpg"]


def test_what_is_neither_file_nor_folder_is_named(tmp_path: Path) -> None:
    root = tree(tmp_path, "a.jpg")
    os.mkfifo(root / "pipe")
    with pytest.raises(InputError, match="pipe is neither a file nor a folder"):
        plan_upload(None, root)
    (root / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(root / "s"))
        with pytest.raises(InputError, match="s is neither a file nor a folder"):
            plan_upload(None, root)


def test_unreadable_sources_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, "a.jpg", "sub/b.jpg")
    (root / "a.jpg").chmod(0o600)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)  # root reads everything, so pretend
    with pytest.raises(InputError, match=r"cannot read .*a\.jpg: permission denied"):
        plan_upload(None, root)


def test_unreadable_folders_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, "a.jpg", "sub/b.jpg")
    real = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("/sub"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match=r"cannot read the folder .*/sub: Permission denied"):
        plan_upload(None, root)


def test_missing_and_empty_sources_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"the data set does not exist: {tmp_path}/none"):
        plan_upload(None, tmp_path / "none")
    tree(tmp_path, "code/.git/x", "code/empty/")
    with pytest.raises(InputError, match="nothing to upload in"):
        plan_upload(tmp_path / "code", None)
    with pytest.raises(InputError, match="nothing to upload: give"):
        plan_upload(None, None)


def test_replaced_contents_count_with_their_own_size(tmp_path: Path) -> None:
    root = tree(tmp_path, "data.yaml", "a.jpg")
    plan = plan_upload(None, root, replacements={"data.yaml": b"path: /data\n"})
    assert plan.bytes == 1 + 12
    assert plan.rescan() == plan
    with pytest.raises(InputError, match=r"'other.yaml' is to be replaced but is not in"):
        plan_upload(None, root, replacements={"other.yaml": b""})


def test_names_are_printable_in_messages(tmp_path: Path) -> None:
    root = tree(tmp_path, "a.jpg")
    (root / os.fsdecode(b"bad\n\xff\x1b[31m")).symlink_to("/nowhere")
    with pytest.raises(InputError) as caught:
        plan_upload(None, root)
    assert caught.value.message.isprintable()
