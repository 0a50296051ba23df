"""What an upload consists of: which files of which trees, as they are on disk now."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pennypod.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_CODE_LIMIT_BYTES = 200_000_000

# Left out of the code: history, caches, environments and outputs (a .git alone can take longer than the training),
# and whatever looks like a key, since keys never go to a pod.
DEFAULT_EXCLUDES = (
    ".git",
    ".hg",
    ".svn",
    ".jj",
    "__pycache__",
    "*.pyc",
    "*.pyo",
    ".venv/",
    "venv/",
    ".tox/",
    ".nox/",
    ".eggs/",
    "*.egg-info/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    ".hypothesis/",
    ".ipynb_checkpoints/",
    ".cache/",
    ".dvc/cache/",
    "node_modules/",
    ".idea/",
    ".vscode/",
    ".DS_Store",
    "/artifacts/",
    "/runs/",
    "/wandb/",
    "/mlruns/",
    "/lightning_logs/",
    "*.part",
    ".env",
    ".env.*",
    ".netrc",
    ".ssh/",
    ".aws/",
    "id_rsa*",
    "id_ed25519*",
)


class SourceFile(NamedTuple):  # a dataclass takes several times as long to make, and there may be very many
    """One file to send. `path` is relative; `content`, when set, is sent in place of what is on disk."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    executable: bool
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One tree that the pod gets under `name`. `root` is a folder or a single file; paths start at `base`."""

    name: str
    root: Path
    base: str
    excludes: tuple[str, ...]
    compressed: bool
    files: tuple[SourceFile, ...]
    directories: tuple[str, ...]
    replacements: Mapping[str, bytes]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def source(self, file: SourceFile) -> str:
        """The path of a file here."""
        return f"{self.base}/{file.path}"

    def rescan(self) -> Part:
        """The same tree as it is on disk now."""
        return _scan(self.name, self.root, self.excludes, self.compressed, self.replacements)


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """The trees of one upload."""

    parts: tuple[Part, ...]

    @property
    def files(self) -> int:
        return sum(len(part.files) for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def rescan(self) -> UploadPlan:
        return UploadPlan(tuple(part.rescan() for part in self.parts))


def plan_upload(
    code: Path | None,
    data: Path | None,
    excludes: Sequence[str] = (),
    *,
    data_excludes: Sequence[str] = (),
    replacements: Mapping[str, bytes] | None = None,
    code_limit_bytes: int = DEFAULT_CODE_LIMIT_BYTES,
) -> UploadPlan:
    """Look at the trees and say what an upload would send.

    `excludes` adds to DEFAULT_EXCLUDES for the code. From the data only `data_excludes` are left out: a data set is
    never shortened by a rule made for code. `replacements` are contents sent in place of files of the data set.
    Raises InputError when a path is missing, empty, unreadable or holds something that cannot be sent, and when the
    code is over `code_limit_bytes`.
    """
    parts = []
    if code is not None:
        rules = (*DEFAULT_EXCLUDES, *excludes)
        code_root, data_root = _resolved(code, "code"), data.resolve() if data is not None else None
        if data_root is not None and data_root != code_root and data_root.is_relative_to(code_root):
            # The data set lies inside the code folder: it goes once, as data.
            rules = (*rules, "/" + str(data_root.relative_to(code_root)))
        part = _scan("code", code_root, rules, compressed=True, replacements={})
        if part.bytes > code_limit_bytes:
            raise InputError(_too_much_code(part, code_limit_bytes), bytes=part.bytes, limit_bytes=code_limit_bytes)
        parts.append(part)
    if data is not None:
        root = _resolved(data, "data set")
        parts.append(_scan("data", root, tuple(data_excludes), compressed=False, replacements=replacements or {}))
    if not parts:
        raise InputError("nothing to upload: give a code folder, a data set or both")
    return UploadPlan(tuple(parts))


def excluded(path: str, is_dir: bool, rules: Sequence[str]) -> bool:
    """Whether a rule leaves `path` out: a plain rule fits a name anywhere, one with a slash the path from the root, one
    that ends in a slash fits folders only."""
    for rule in rules:
        if rule.endswith("/") and not is_dir:
            continue
        bare = rule.rstrip("/")
        if fnmatch.fnmatchcase(path if "/" in bare else path.rpartition("/")[2], bare.lstrip("/")):
            return True
    return False


def _resolved(path: Path, what: str) -> Path:
    try:
        return path.resolve(strict=True)
    except FileNotFoundError as exc:
        raise InputError(f"the {what} does not exist: {path}", path=str(path)) from exc
    except OSError as exc:
        raise InputError(f"the {what} cannot be read: {path} ({exc.strerror})", path=str(path)) from exc


def _scan(name: str, root: Path, rules: tuple[str, ...], compressed: bool, replacements: Mapping[str, bytes]) -> Part:
    if root.is_dir():
        walk = _Walk(root, rules)
        walk.folder("", (os.path.realpath(root),))
        base, files, directories = str(root), walk.files, walk.directories
    else:
        info = root.stat()
        if not stat.S_ISREG(info.st_mode):
            raise InputError(f"neither a file nor a folder: {root}", path=str(root))
        base, files, directories = str(root.parent), [_source_file(root.name, info)], []
    known = {file.path for file in files}
    for path in replacements:
        if path not in known:
            raise InputError(f"{path!r} is to be replaced but is not in {root}", path=path)
    files = [_replaced(file, replacements.get(file.path)) for file in files]
    if not files:
        raise InputError(f"nothing to upload in {root}: it holds no file that is not left out", path=str(root))
    files.sort(key=lambda file: file.path)
    return Part(name, root, base, rules, compressed, tuple(files), tuple(sorted(directories)), dict(replacements))


def _source_file(path: str, info: os.stat_result) -> SourceFile:
    return SourceFile(path, info.st_size, info.st_mtime_ns, info.st_ino, bool(info.st_mode & stat.S_IXUSR))


def _replaced(file: SourceFile, content: bytes | None) -> SourceFile:
    return file if content is None else file._replace(size=len(content), content=content)


class _Walk:
    def __init__(self, root: Path, rules: tuple[str, ...]) -> None:
        self.root = str(root)
        self.rules = rules
        self.files: list[SourceFile] = []
        self.directories: list[str] = []

    def folder(self, folder: str, above: tuple[str, ...]) -> None:
        """Take in a folder; `above` are the real paths on the way to it, so that a loop of links is seen."""
        full = f"{self.root}/{folder}" if folder else self.root
        try:
            with os.scandir(full) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as exc:
            raise InputError(f"cannot read the folder {shown(full)}: {exc.strerror}", path=shown(full)) from exc
        for entry in found:
            self._entry(entry, f"{folder}/{entry.name}" if folder else entry.name, above)

    def _entry(self, entry: os.DirEntry[str], path: str, above: tuple[str, ...]) -> None:
        try:
            if entry.is_symlink():
                self._link(entry, path, above)
            elif entry.is_dir(follow_symlinks=False):
                self._directory(entry.path, path, (*above, f"{above[-1]}/{entry.name}"))
            elif not excluded(path, is_dir=False, rules=self.rules):
                self._file(path, entry.stat(follow_symlinks=False))
        except FileNotFoundError:
            return  # gone since the folder was listed; an upload compares with a later look
        except OSError as exc:
            raise InputError(f"cannot read {shown(entry.path)}: {exc.strerror}", path=shown(entry.path)) from exc

    def _link(self, entry: os.DirEntry[str], path: str, above: tuple[str, ...]) -> None:
        if excluded(path, is_dir=False, rules=self.rules) or excluded(path, is_dir=True, rules=self.rules):
            return
        target = os.path.realpath(entry.path)
        link = shown(entry.path)
        if target != above[0] and not target.startswith(above[0] + "/"):
            raise InputError(f"the link {link} leads out of the tree, to {shown(target)}: copy it in or exclude it")
        try:
            info = os.stat(target)
        except OSError as exc:
            raise InputError(f"the link {link} leads nowhere: {shown(target)} ({exc.strerror})") from exc
        if not stat.S_ISDIR(info.st_mode):
            self._file(path, info)
        elif target in above:
            raise InputError(f"the link {link} leads back to {shown(target)}, in a circle: remove or exclude it")
        else:
            self._directory(entry.path, path, (*above, target))

    def _directory(self, full: str, path: str, above: tuple[str, ...]) -> None:
        # A folder with pyvenv.cfg is a virtual environment whatever its name; only code has rules, data goes as it is.
        if excluded(path, is_dir=True, rules=self.rules) or (
            ".venv/" in self.rules and os.access(f"{full}/pyvenv.cfg", os.F_OK)
        ):
            return
        self.directories.append(path)
        self.folder(path, above)

    def _file(self, path: str, info: os.stat_result) -> None:
        full = f"{self.root}/{path}"
        if not stat.S_ISREG(info.st_mode):
            raise InputError(f"{shown(full)} is neither a file nor a folder: remove or exclude it", path=shown(full))
        # The mode answers for most files; asking the system costs a call for each.
        if not info.st_mode & stat.S_IROTH and not os.access(full, os.R_OK):
            raise InputError(f"cannot read {shown(full)}: permission denied", path=shown(full))
        self.files.append(_source_file(path, info))


def _too_much_code(part: Part, limit: int) -> str:
    sizes: Counter[str] = Counter()
    for file in part.files:
        sizes[file.path.split("/", 1)[0]] += file.size
    largest = ", ".join(f"{shown(name)} {megabytes(size)}" for name, size in sizes.most_common(3))
    return (
        f"the code is {megabytes(part.bytes)} in {len(part.files)} files, over the limit of {megabytes(limit)}; "
        f"largest: {largest}. Exclude what the pod does not need, or ship it as data"
    )


def megabytes(count: int) -> str:
    """A size for people."""
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def shown(path: str) -> str:
    """A path that can be printed: no control characters, no stray surrogates."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return text if text.isprintable() else ascii(text)[1:-1]
