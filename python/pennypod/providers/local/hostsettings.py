"""What lets pip and apt on this host reach their indexes, read from the host's own configuration for use in a pod.

Only settings that say where packages come from and whom to trust are taken, each derived from the host; nothing else of
the host's environment ever reaches a pod. The result is a small folder tree that a pod mounts read-only and copies over
its own files at start, plus read-only mounts of local wheel folders at the same paths.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pennypod.errors import InvalidError
from pennypod.settings import home_advice

CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"

# Where a host keeps its bundle when no variable names one: Debian, Fedora, Alpine and macOS.
_BUNDLES = (CA_BUNDLE, "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
_BUNDLE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
_PROXY_NAMES = tuple(name for lower in _PROXY_VARIABLES for name in (lower, lower.upper()))

# `client-cert` is left out on purpose: it is a private key.
_PIP_KEYS = frozenset(
    (
        "index-url",
        "extra-index-url",
        "find-links",
        "no-index",
        "constraint",
        "cert",
        "trusted-host",
        "proxy",
        "timeout",
        "retries",
        "resume-retries",
        "disable-pip-version-check",
        "prefer-binary",
        "only-binary",
        "no-binary",
    )
)
_PIP_LISTS = frozenset({"extra-index-url", "find-links", "constraint", "trusted-host"})
_APT_KEYS = re.compile(
    r"Acquire::(https?|ftp)::(Proxy(::[^:]+)?|Timeout|Verify-Peer|Verify-Host|CaInfo|Pipeline-Depth|No-Cache|AllowRedirect)"
    r"|Acquire::(Check-Valid-Until|Check-Date|Retries|ForceIPv4|ForceIPv6)"
    r"|Acquire::Allow(InsecureRepositories|WeakRepositories)"
)
_LOOKED_AT = 40
_TOO_MUCH = frozenset(("/", "/root", "/home", "/etc", "/usr", "/var", "/tmp"))  # noqa: S108 - named to be refused
_SUITE_TAILS = ("", "-updates", "-security", "-backports")


@dataclass(frozen=True, slots=True)
class HostSettings:
    """`files` are put into every pod, `apt_files` only where it runs the host's own release; paths are absolute."""

    release: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    apt_files: dict[str, bytes] = field(default_factory=dict)
    mounts: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    apt_options: str = ""
    notes: tuple[str, ...] = ()


def read_host_settings(
    environ: Mapping[str, str], root: Path = Path("/"), *, prefix: str | None = None
) -> HostSettings:
    """Read the host below `root` (tests give a made-up one). `prefix` is the Python prefix whose pip.conf counts."""
    pip = pip_settings(environ, root, sys.prefix if prefix is None else prefix)
    files, env = certificates(environ, root, pip)
    notes: list[str] = []
    mounts = _take_pip_places(pip, root, files, notes)
    if pip:
        files["/etc/pip.conf"] = pip_conf(pip).encode()
    env |= {name: environ[name] for name in _PROXY_NAMES if environ.get(name)}
    release = host_release(root)
    options = apt_options(apt_config_dump() if root == Path("/") else "")
    if options:
        files["/etc/apt/apt.conf.d/95pennypod-host"] = options.encode()
        for path in re.findall(r'CaInfo "([^"]+)"', options):
            _take(path, root, files)
    # What lies in a mounted folder is there already, and cannot be written.
    files = {path: data for path, data in files.items() if not any(path.startswith(f"{m}/") for m in mounts)}
    return HostSettings(
        release=release,
        files=files,
        apt_files=apt_sources(root, release.partition(" ")[2]),
        mounts=tuple(sorted(mounts)),
        env=env,
        apt_options=options,
        notes=tuple(notes),
    )


def _take(path: str, root: Path, files: dict[str, bytes]) -> bool:
    with suppress(OSError):
        files[path] = _under(root, path).read_bytes()
        return True
    return False


def certificates(
    environ: Mapping[str, str], root: Path, pip: Mapping[str, str]
) -> tuple[dict[str, bytes], dict[str, str]]:
    """The host's bundle at Debian's usual place, its own authorities beside it, and the variables that point there."""
    files: dict[str, bytes] = {}
    env: dict[str, str] = {}
    named = [environ.get(name, "") for name in _BUNDLE_VARIABLES]
    for path in [*named, *_BUNDLES, pip.get("cert", "")]:
        if path.startswith("/") and _under(root, path).is_file() and _take(path, root, files):
            files = {CA_BUNDLE: files[path]}
            break
    local = sorted(_under(root, "/usr/local/share/ca-certificates").rglob("*.crt"))
    for authority in local:
        _take("/" + str(authority.relative_to(root)), root, files)
    if CA_BUNDLE in files and (local or any(named)):
        # Python's ssl reads a folder of hashes, not the bundle; requests brings its own: both need to be told.
        env = {"SSL_CERT_FILE": CA_BUNDLE, "REQUESTS_CA_BUNDLE": CA_BUNDLE}
    return files, env


def _take_pip_places(pip: dict[str, str], root: Path, files: dict[str, bytes], notes: list[str]) -> set[str]:
    """Copy the files pip's settings name and return the folders to mount; what cannot work in a pod is noted."""
    mounts: set[str] = set()
    for name in ("find-links", "index-url", "extra-index-url", "constraint"):
        for place in pip.get(name, "").split():
            path = _local_path(place)
            if path is None:
                if re.match(r"https?://([^/@]*@)?(localhost|127\.|\[::1\])", place):
                    shown = re.sub(r"//[^/@]*@", "//", place)
                    notes.append(f"pip's {name} {shown} is on this host's loopback: a pod cannot reach it")
            elif not _under(root, path).exists():
                notes.append(f"pip's {name} {path} does not exist")
            elif _under(root, path).is_file():
                _take(path, root, files)
            else:
                mounts |= wheel_folders(path, root)
    cert = pip.get("cert", "")
    if cert and cert != CA_BUNDLE and not _take(cert, root, files):
        notes.append(f"pip's cert {cert} cannot be read")
        del pip["cert"]
    return mounts


# --- pip ----------------------------------------------------------------------------------------------------------


def pip_settings(environ: Mapping[str, str], root: Path, prefix: str) -> dict[str, str]:
    """pip's own merge: global files, user's, the environment's, `PIP_CONFIG_FILE`, then `PIP_*`; later ones win."""
    merged: dict[str, str] = {}
    for path in _pip_files(environ, root, prefix):
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue
        for section in ("global", "install", "download"):
            if parser.has_section(section):
                merged |= {_pip_key(key): " ".join(value.split()) for key, value in parser.items(section)}
    for name, value in environ.items():
        if name.startswith("PIP_") and name != "PIP_CONFIG_FILE" and value:
            merged[_pip_key(name[4:])] = value
    return {key: value for key, value in merged.items() if key in _PIP_KEYS and value}


def _pip_key(name: str) -> str:
    key = name.lower().replace("_", "-")
    return "timeout" if key == "default-timeout" else key


def _pip_files(environ: Mapping[str, str], root: Path, prefix: str) -> Iterator[Path]:
    chosen = environ.get("PIP_CONFIG_FILE", "")
    if chosen == os.devnull:
        return
    for folder in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":"):
        if folder.startswith("/"):
            yield _under(root, f"{folder}/pip/pip.conf")
    yield _under(root, "/etc/pip.conf")
    if not (chosen and _under(root, chosen).is_file()):
        home = environ.get("HOME") or ""
        if home:
            yield _under(root, f"{home}/.pip/pip.conf")
            yield _under(root, f"{environ.get('XDG_CONFIG_HOME') or home + '/.config'}/pip/pip.conf")
    yield _under(root, f"{prefix}/pip.conf")
    if chosen:
        yield _under(root, chosen)


def pip_conf(pip: Mapping[str, str]) -> str:
    """A pip.conf with these settings, lists one value a line."""
    lines = ["# Written by pennypod: what pip on the host that started this pod uses.", "[global]"]
    for key in sorted(pip):
        values = pip[key].split() if key in _PIP_LISTS else [pip[key]]
        lines.append(
            f"{key} =" + ("".join(f"\n    {value}" for value in values) if len(values) > 1 else f" {values[0]}")
        )
    return "\n".join(lines) + "\n"


def wheel_folders(path: str, root: Path) -> set[str]:
    """The folders to mount so that a local wheel folder or index works: itself, and where its files really lie.

    An index's pages link to files beside it ("../../files/x.whl") and wheels may be links into another disk, so a few
    pages and files are looked at; no parent folder is mounted just because it is a parent.
    """
    folders = {path}
    real = os.path.realpath(_under(root, path))
    if real != str(_under(root, path)):
        folders.add(_outside(root, real))
    targets = set(_wheel_targets(path, root))
    targets |= {_outside(root, os.path.realpath(_under(root, target))) for target in targets}
    for target in sorted(targets):
        if not any(target.startswith(f"{folder}/") for folder in folders):
            folders.add(_beside(path, target))
    return folders - _TOO_MUCH


def _wheel_targets(path: str, root: Path) -> Iterator[str]:
    """Some of the files that a wheel folder or an index leads to, as absolute paths."""
    with suppress(OSError):
        for entry in sorted(_under(root, path).iterdir())[:_LOOKED_AT]:
            page = entry / "index.html" if entry.is_dir() else entry
            if page.suffix == ".html" and page.is_file():
                text = page.read_text(encoding="utf-8", errors="replace")[:20_000]
                for href in re.findall(r'href="([^"#]+)', text)[:5]:
                    target = _local_path(href)
                    if target is None and not re.match(r"\w+:", href):
                        base = f"{path}/{entry.name}/" if entry.is_dir() else f"{path}/"
                        target = os.path.normpath(base + urllib.parse.unquote(href))
                    if target and _under(root, target).is_file():
                        yield target
            elif entry.is_symlink() and entry.is_file():
                yield _outside(root, os.path.realpath(entry))


def _beside(path: str, target: str) -> str:
    """The folder to mount for `target`: the branch that leads to it from where its path and the index's part."""
    parts, others = Path(target).parent.parts, Path(path).parts
    shared = 0
    while shared < min(len(parts), len(others)) and parts[shared] == others[shared]:
        shared += 1
    # Nothing shared but "/" says nothing about the branch: only the very folder then.
    return str(Path(*parts[: shared + 1])) if shared > 1 else str(Path(*parts))


def _local_path(place: str) -> str | None:
    """The path a pip setting names, when it is on this machine's disk."""
    if place.startswith("file:"):
        return urllib.parse.unquote(urllib.parse.urlsplit(place).path).rstrip("/") or None
    if place.startswith(("/", "~")):
        return str(Path(place).expanduser()).rstrip("/") or None
    return None


# --- apt ----------------------------------------------------------------------------------------------------------


def host_release(root: Path) -> str:
    """ "debian bookworm", or "" where the host is something else than Debian or Ubuntu."""
    with suppress(OSError):
        pairs = dict(
            line.partition("=")[::2]
            for line in _under(root, "/etc/os-release").read_text(encoding="utf-8").splitlines()
        )
        name, code = pairs.get("ID", "").strip('"'), pairs.get("VERSION_CODENAME", "").strip('"')
        if name in ("debian", "ubuntu") and code:
            return f"{name} {code}"
    return ""


def apt_config_dump() -> str:
    """apt's merged configuration, "" where there is no apt."""
    if shutil.which("apt-config") is None:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["apt-config", "dump"], capture_output=True, text=True, timeout=10, check=True).stdout
    return ""


def apt_options(dump: str) -> str:
    """Of apt's configuration, what decides whether its sources can be reached: proxies, checks, trust."""
    kept = [
        line for line in dump.splitlines() if _APT_KEYS.fullmatch(line.partition(" ")[0]) and not line.endswith('"";')
    ]
    return "".join(f"{line}\n" for line in kept)


def apt_sources(root: Path, codename: str) -> dict[str, bytes]:
    """The host's enabled sources for its own release, with their keyrings and, for just those hosts, their logins."""
    if not codename:
        return {}
    suites = {codename + tail for tail in _SUITE_TAILS}
    found: dict[str, bytes] = {}
    text = ""
    folder = _under(root, "/etc/apt/sources.list.d")
    for path in [
        _under(root, "/etc/apt/sources.list"),
        *sorted(folder.glob("*.list")),
        *sorted(folder.glob("*.sources")),
    ]:
        try:
            whole = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        kept = _deb822(whole, suites) if path.suffix == ".sources" else _one_line(whole, suites)
        if kept:
            found["/" + str(path.relative_to(root))] = kept.encode()
            text += kept
    if not found:
        return {}
    keyrings = set(re.findall(r"/[\w./+-]+\.(?:gpg|asc|pgp)", text))
    keyrings |= {"/" + str(p.relative_to(root)) for p in sorted(_under(root, "/etc/apt/trusted.gpg.d").glob("*.*"))}
    for ring in keyrings | {"/etc/apt/trusted.gpg"}:
        with suppress(OSError):
            content = _under(root, ring).read_bytes()
            if content:
                found[ring] = content
    hosts = {urllib.parse.urlsplit(url).hostname for url in re.findall(r"\w+://[^\s\]]+", text)}
    logins = "".join(_apt_logins(root, hosts))
    if logins:
        found["/etc/apt/auth.conf.d/pennypod-host.conf"] = logins.encode()
    return found


def _deb822(text: str, suites: set[str]) -> str:
    kept = []
    for stanza in re.split(r"\n\s*\n", text):
        lines = [line for line in stanza.splitlines() if not line.startswith("#")]
        fields = {
            k.strip().lower(): v.strip() for k, s, v in (line.partition(":") for line in lines if line[:1].strip()) if s
        }
        wanted = fields.get("suites", "").split()
        if fields.get("enabled", "yes").lower() in ("no", "false", "0") or "deb" not in fields.get("types", "").split():
            continue
        if wanted and all(suite.partition("/")[0] in suites for suite in wanted):
            kept.append("\n".join(lines) + "\n")
    return "\n".join(kept)


def _one_line(text: str, suites: set[str]) -> str:
    kept = []
    for line in text.splitlines():
        match = re.match(r"deb\s+(?:\[[^\]]*\]\s+)?\S+\s+(\S+)", line.strip())
        if match and match[1].partition("/")[0] in suites:
            kept.append(line.strip() + "\n")
    return "".join(kept)


def _apt_logins(root: Path, hosts: set[str | None]) -> Iterator[str]:
    folder = _under(root, "/etc/apt/auth.conf.d")
    for path in [_under(root, "/etc/apt/auth.conf"), *sorted(folder.glob("*.conf"))]:
        with suppress(OSError, UnicodeDecodeError):
            words = path.read_text(encoding="utf-8").split()
            for entry in re.findall(r"machine (\S+) login (\S+) password (\S+)", " ".join(words)):
                host = urllib.parse.urlsplit(entry[0] if "//" in entry[0] else f"//{entry[0]}").hostname
                if host in hosts:
                    yield f"machine {entry[0]} login {entry[1]} password {entry[2]}\n"


# --- the folder a pod mounts -----------------------------------------------------------------------------------------


def write_tree(settings: HostSettings, cache_dir: Path, scripts: Mapping[str, str]) -> Path:
    """Write the folder a pod mounts, once per content; safe against two writers at once.

    root/ and apt/ are trees laid over the pod's own files, release names what apt/ is for, scripts stand beside them.
    """
    content: dict[str, bytes] = {f"root{path}": data for path, data in settings.files.items()}
    content |= {f"apt{path}": data for path, data in settings.apt_files.items()}
    content |= {name: text.encode() for name, text in scripts.items()}
    content["release"] = settings.release.encode() + b"\n"
    digest = hashlib.sha256(repr(sorted(content.items())).encode()).hexdigest()[:16]
    final = cache_dir / f"host-{digest}"
    if final.is_dir():
        return final
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=cache_dir, prefix="host-new-"))
        for name, data in content.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o600 if "auth.conf" in name else 0o644)
        temporary.chmod(0o755)
        _rename(temporary, final)
    except OSError as exc:
        raise InvalidError(f"cannot write below {cache_dir} ({exc.strerror}): {home_advice(exc)}") from exc
    return final


def _rename(temporary: Path, final: Path) -> None:
    try:
        temporary.rename(final)
    except OSError:
        # Another writer was faster with the same content.
        shutil.rmtree(temporary, ignore_errors=True)
        if not final.is_dir():
            raise


def _under(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _outside(root: Path, path: str) -> str:
    """A real path as seen from the host's own root."""
    top = os.path.realpath(root)
    return path if top == "/" else "/" + os.path.relpath(path, top)
