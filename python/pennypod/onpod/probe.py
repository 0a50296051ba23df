#!/usr/bin/env python3
"""Says in one round trip what a pod still needs before a job can train on it: the state of all eight errata.

Standalone: Python 3.8+, standard library only; it changes nothing but the access time of what it reads.

    probe.py '{"pod_home": "/root/pennypod", "imports": ["cv2"], "requirements": ["ultralytics"]}'

Prints one line, ``@pennypod {...}``:

ok        nothing is missing and everything that was asked for imports
needs     what the bootstrap role must do: {"apt": [...], "pip": [...], "weights": [index, ...]}
problems  what it cannot repair, one sentence each; nothing is installed while there are any
errata    one row per erratum: number, name, ok, text
python    the interpreter jobs use (the one that has torch), module_python the one for Ansible's modules
data_yaml text of the data set's data.yaml and the paths around it; the control side rewrites it (it has a YAML parser)
"""

from __future__ import annotations

import base64
import concurrent.futures
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Iterable

MARK = "@pennypod "
OLDEST_PYTHON = (3, 8)  # what Ansible's modules still run on
TORCH_WITH_NUMPY_2 = (2, 3)  # torch is built against numpy 2 from here on; older builds call into the numpy 1 ABI
DATA_YAML_LIMIT = 1 << 20
ENTRIES_LIMIT = 5000
ENTRIES_DEPTH = 4

# A shell over SSH has none of the image's PATH, so the usual places are looked at by name.
PYTHONS = ("/opt/conda/bin/python", "/venv/main/bin/python")
SYSTEM_PYTHON = "/usr/bin/python3"  # the one that python3-apt and python3-pip serve

# soname -> Debian/Ubuntu package. Newer releases provide the same names for their *t64 packages.
PACKAGE_OF = {
    "libGL.so.1": "libgl1",
    "libGLX.so.0": "libglx0",
    "libEGL.so.1": "libegl1",
    "libOpenGL.so.0": "libopengl0",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libgthread-2.0.so.0": "libglib2.0-0",
    "libgobject-2.0.so.0": "libglib2.0-0",
    "libgio-2.0.so.0": "libglib2.0-0",
    "libgmodule-2.0.so.0": "libglib2.0-0",
    "libSM.so.6": "libsm6",
    "libICE.so.6": "libice6",
    "libX11.so.6": "libx11-6",
    "libX11-xcb.so.1": "libx11-xcb1",
    "libXext.so.6": "libxext6",
    "libXrender.so.1": "libxrender1",
    "libXi.so.6": "libxi6",
    "libXrandr.so.2": "libxrandr2",
    "libXcursor.so.1": "libxcursor1",
    "libXfixes.so.3": "libxfixes3",
    "libXinerama.so.1": "libxinerama1",
    "libXau.so.6": "libxau6",
    "libXdmcp.so.6": "libxdmcp6",
    "libxcb.so.1": "libxcb1",
    "libxkbcommon.so.0": "libxkbcommon0",
    "libfontconfig.so.1": "libfontconfig1",
    "libfreetype.so.6": "libfreetype6",
    "libdbus-1.so.3": "libdbus-1-3",
    "libgomp.so.1": "libgomp1",
    "libgfortran.so.5": "libgfortran5",
    "libquadmath.so.0": "libquadmath0",
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
    "libatomic.so.1": "libatomic1",
    "libopenblas.so.0": "libopenblas0",
    "libnuma.so.1": "libnuma1",
    "libsndfile.so.1": "libsndfile1",
    "libusb-1.0.so.0": "libusb-1.0-0",
    "libz.so.1": "zlib1g",
    "libbz2.so.1.0": "libbz2-1.0",
    "liblzma.so.5": "liblzma5",
    "libexpat.so.1": "libexpat1",
    "libcrypt.so.1": "libcrypt1",
    "libjpeg.so.62": "libjpeg62-turbo",
    "libjpeg.so.8": "libjpeg-turbo8",
    "libpng16.so.16": "libpng16-16",
    "libtiff.so.6": "libtiff6",
    "libtiff.so.5": "libtiff5",
    "libwebp.so.7": "libwebp7",
    "libopenjp2.so.7": "libopenjp2-7",
}
CV2_PACKAGES = ("libgl1", "libglib2.0-0")

# Run inside each candidate interpreter: only it knows what it has installed. Packaging comes with pip.
INSPECT = r"""
import importlib.util, json, os, re, sys, sysconfig
asked = json.loads(sys.argv[1])
try:
    from importlib import metadata
except ImportError:
    metadata = None
try:
    from packaging.requirements import Requirement
except ImportError:
    try:
        from pip._vendor.packaging.requirements import Requirement
    except ImportError:
        Requirement = None
def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()
def spec(module):
    try:
        return importlib.util.find_spec(module)
    except Exception:
        return None
installed = {}
for dist in metadata.distributions() if metadata else []:
    name = dist.metadata["Name"]
    if name:
        installed.setdefault(canonical(name), dist)
def edges(name, extras=()):
    # What an installed distribution asks for here and now, as Requirements.
    found = []
    for line in (installed[name].requires or []) if name in installed and Requirement else []:
        try:
            need = Requirement(line)
            wanted = any(need.marker.evaluate({"extra": e}) for e in ("", *extras)) if need.marker else True
        except Exception:
            continue
        if wanted:
            found.append(need)
    return found
states, queue = [], []
for text in asked["requirements"]:
    name = canonical(re.split(r"[\s\[<>=!~;@(]", text.strip(), maxsplit=1)[0])
    state = {"text": text, "name": name, "ok": False, "why": "not installed"}
    states.append(state)
    if Requirement is None:
        state["why"] = "pip is missing, so nothing can be compared"
        continue
    try:
        need = Requirement(text)
        if need.marker and not need.marker.evaluate({"extra": ""}):
            state.update(ok=True, why="not for this interpreter")
            continue
    except Exception as exc:
        state.update(error=" ".join(str(exc).split()))
        continue
    queue.append((name, tuple(sorted(need.extras))))
    if name not in installed:
        continue
    version = installed[name].version
    state["why"] = "%s is installed" % version
    if need.url:
        direct = json.loads(installed[name].read_text("direct_url.json") or "{}")
        state["ok"] = direct.get("url") == need.url
    else:
        state["ok"] = need.specifier.contains(version, prereleases=True)
    for extra in need.extras:
        for inner in edges(name, (extra,)):
            if inner.marker and "extra" in str(inner.marker) and canonical(inner.name) not in installed:
                state.update(ok=False, why="%s of its extra %s is not installed" % (inner.name, extra))
closure = set()
while queue:
    name, extras = queue.pop()
    if (name, extras) not in closure:
        closure.add((name, extras))
        queue += [(canonical(need.name), tuple(sorted(need.extras))) for need in edges(name, extras)]
reached = {name for name, _ in closure}
NUMPY_1 = ["1.%d.0" % minor for minor in range(16, 27)] + ["1.26.4"]
demands = []
for name in installed:
    for need in edges(name):
        if canonical(need.name) == "numpy" and not any(need.specifier.contains(v, prereleases=True) for v in NUMPY_1):
            if any(s.operator in (">=", ">", "~=", "==", "===") and s.version.split(".")[0].isdigit()
                   and int(s.version.split(".")[0]) >= 2 for s in need.specifier):
                demands.append({"name": name, "version": installed[name].version, "requires": str(need),
                                "asked": name in reached})
modules = {}
for module in asked["modules"]:
    found = spec(module.split(".")[0])
    modules[module] = None if found is None else (found.origin or next(iter(found.submodule_search_locations or [""])))
def version_of(name):
    return installed[name].version if name in installed else None
print(json.dumps({
    "version": list(sys.version_info[:3]), "prefix": sys.prefix, "executable": sys.executable,
    "numpy": version_of("numpy"), "torch": version_of("torch"), "has_torch": spec("torch") is not None,
    "pip": spec("pip") is not None, "requirements": states, "demands_numpy_2": demands, "modules": modules,
    "managed": os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")),
}))
"""
# torch imports even when it cannot talk to numpy, so numpy has to be handed to it.
TRY_TORCH = "import numpy, torch; torch.from_numpy(numpy.zeros(1, dtype=numpy.float32))"
TRY_MODULE = "import importlib, sys; importlib.import_module(sys.argv[1])"

_BUILT_FOR_1 = re.compile(
    r"compiled using NumPy 1|_ARRAY_API not found|numpy\.core\.multiarray failed to import|Numpy is not available"
    r"|Failed to initialize NumPy|compiled against (ABI|API) version|numpy\.\w+ size changed"
)
_BUILT_FOR_2 = re.compile(
    r"compiled against (ABI|API) version 0x2\w+ but this version of numpy is 0x1|No module named 'numpy\._core"
)
_LIBRARY = re.compile(r"(?:ImportError|OSError): (lib[^:\s]+\.so[.\w]*): cannot open shared object file")


class Done:
    """How a child process ended; `rc` is None when it ran into its time limit."""

    def __init__(self, rc: int | None, stdout: str, stderr: str) -> None:
        self.rc = rc
        self.stdout = stdout
        self.stderr = stderr


Run = Callable[..., Done]


def run(argv: list[str], timeout_s: float = 30.0) -> Done:
    """A child in its own process group, so that a hanging import's helpers die with it."""
    env = dict(os.environ, LC_ALL="C.UTF-8", MPLBACKEND="Agg", QT_QPA_PLATFORM="offscreen", PYTHONDONTWRITEBYTECODE="1")
    env.pop("TMUX", None)
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
    except OSError as exc:
        return Done(127, "", str(exc))
    try:
        out, err = child.communicate(timeout=timeout_s)
        rc: int | None = child.returncode
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        rc = None
    return Done(rc, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def release(version: str | None) -> tuple[int, ...]:
    """The leading numbers of a version: 2.1.0+cu118 -> (2, 1, 0); empty when there is none."""
    match = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(int(part) for part in match.group().split(".")) if match else ()


# --- which Python ----------------------------------------------------------------------------------------------------


def image_path(environ_file: str = "/proc/1/environ") -> list[str]:
    """The PATH the image was built with: process 1 still has it."""
    try:
        with open(environ_file, "rb") as file:
            pairs = file.read().split(b"\0")
    except OSError:
        return []
    return next((pair[5:].decode("utf-8", "replace").split(":") for pair in pairs if pair.startswith(b"PATH=")), [])


def candidates(asked: str, search: Iterable[str], known: Iterable[str] = PYTHONS) -> list[str]:
    """Interpreters to look into, best first, each once: /bin is often /usr/bin, and python the same file as python3.

    The same file in another folder is another interpreter: in a virtual environment it is a link to the system's.
    """
    if asked != "auto":
        return [asked]
    names = [
        os.path.join(folder, name) for folder in search for name in ("python3", "python") if folder.startswith("/")
    ]
    found = [path for path in [*known, *names] if os.access(path, os.X_OK) and not os.path.isdir(path)]
    by_place: dict[tuple[str, str], str] = {}
    for path in found:
        by_place.setdefault((os.path.realpath(os.path.dirname(path)), os.path.realpath(path)), path)
    return list(by_place.values())


def choose_python(asked: str, inspected: list[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]] | None:
    """The first interpreter with torch, else the first that is new enough."""
    usable = [row for row in inspected if tuple(row[1]["version"]) >= OLDEST_PYTHON or asked != "auto"]
    return next((row for row in usable if row[1]["has_torch"]), usable[0] if usable else None)


def choose_module_python(chosen: str, runner: Run = run) -> str:
    """The interpreter for Ansible's own modules: the system's, since apt's bindings are made for it."""
    new_enough = "import sys; sys.exit(sys.version_info < %r)" % (OLDEST_PYTHON,)
    return SYSTEM_PYTHON if runner([SYSTEM_PYTHON, "-c", new_enough]).rc == 0 else chosen


def inspect(python: str, request: dict[str, Any], runner: Run = run) -> dict[str, Any] | None:
    asked = {"requirements": request["requirements"], "modules": [*request["imports"], "cv2"]}
    done = runner([python, "-c", INSPECT, json.dumps(asked)], timeout_s=60.0)
    if done.rc != 0:
        return None
    try:
        # Start-up hooks (sitecustomize, conda) may print; ours is the last line.
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


# --- do modules import -----------------------------------------------------------------------------------------------


def classify_import(done: Done, numpy_version: str | None, limit_s: float) -> dict[str, Any]:
    """What an import's end means: kind is ok, numpy1, numpy2, library, missing, timeout or error."""
    text = done.stderr
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    if done.rc is None:
        return {"kind": "timeout", "error": "no end after %d s" % limit_s}
    if _BUILT_FOR_2.search(text) and release(numpy_version)[:1] < (2,):
        return {"kind": "numpy2", "error": last}
    # Some modules only warn and go on without numpy; that fails later, in the middle of the training.
    if _BUILT_FOR_1.search(text) and release(numpy_version)[:1] >= (2,):
        return {"kind": "numpy1", "error": last}
    if done.rc == 0:
        return {"kind": "ok", "error": ""}
    library = _LIBRARY.search(text)
    if library:
        return {"kind": "library", "error": last, "library": library.group(1)}
    if "ModuleNotFoundError" in last:
        return {"kind": "missing", "error": last}
    died = "killed by signal %d" % -done.rc if done.rc < 0 else "exit code %d" % done.rc
    return {"kind": "error", "error": last or died}


def try_import(
    python: str, module: str, numpy_version: str | None, limit_s: float, runner: Run = run
) -> dict[str, Any]:
    if module == "torch" and numpy_version:
        done = runner([python, "-c", TRY_TORCH], timeout_s=limit_s)
    else:
        done = runner([python, "-c", TRY_MODULE, module], timeout_s=limit_s)
    return classify_import(done, numpy_version, limit_s)


def decide_pin(mode: str, torch_version: str | None, imports: dict[str, dict[str, Any]]) -> tuple[bool, str]:
    """Whether numpy must stay below 2, and why."""
    if mode == "ignore":
        return False, "left alone as asked"
    if mode == "<2":
        return True, "pinned as asked"
    if torch_version and release(torch_version) < TORCH_WITH_NUMPY_2:
        return True, "torch %s was built against numpy 1" % torch_version
    broken = sorted(name for name, result in imports.items() if result["kind"] == "numpy1")
    if broken:
        return True, "%s built against numpy 1" % (", ".join(broken) + (" was" if len(broken) == 1 else " were"))
    return False, "whatever was tried works with it"


# --- shared libraries, packages --------------------------------------------------------------------------------------


def shared_objects(origin: str | None) -> list[str]:
    """Extension modules of a package. Qt's plugins are left out: they serve windows, and a pod has none."""
    if not origin:
        return []
    top = os.path.dirname(origin)
    found = []
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if name != "qt"]
        found += [os.path.join(folder, name) for name in files if name.endswith(".so") or ".so." in name]
    return sorted(found)


def missing_libraries(files: list[str], runner: Run = run) -> list[str]:
    if not files:
        return []
    done = runner(["ldd", *files], timeout_s=30.0)
    return sorted({match.group(1) for match in re.finditer(r"^\s*(\S+) => not found", done.stdout, re.MULTILINE)})


def packages_for(libraries: Iterable[str]) -> tuple[list[str], list[str]]:
    """Debian packages that carry the libraries, and the libraries nobody here knows."""
    known = sorted({PACKAGE_OF[name] for name in libraries if name in PACKAGE_OF})
    return known, sorted(name for name in libraries if name not in PACKAGE_OF)


def installed_packages(runner: Run = run) -> set[str] | None:
    """Names of installed Debian packages and what they provide; None where there is no dpkg."""
    done = runner(["dpkg-query", "-W", "-f", "${db:Status-Status}\\t${Package}\\t${Provides}\\n"])
    if done.rc != 0:
        return None
    names = set()
    for line in done.stdout.splitlines():
        status, package, provides = [*line.split("\t"), "", ""][:3]
        if status == "installed":
            names.add(package)
            names.update(part.split("(")[0].strip() for part in provides.split(",") if part.strip())
    return names


# --- tmux, weights, data.yaml ----------------------------------------------------------------------------------------


def tmux_state(runner: Run = run) -> dict[str, Any]:
    """Whether tmux is there and really keeps a session, tried on a socket of its own."""
    version = runner(["tmux", "-V"])
    if version.rc != 0:
        return {"present": False, "works": False, "version": "", "error": "not installed"}
    base = ["tmux", "-L", "pennypod-probe-%d" % os.getpid(), "-f", "/dev/null"]
    # Without start-server first, new-session -d fails silently on some images (erratum 5).
    made = runner([*base, "start-server", ";", "new-session", "-d", "-s", "probe", "sleep 60"])
    alive = runner([*base, "has-session", "-t", "probe"])
    runner([*base, "kill-server"])
    works = made.rc == 0 and alive.rc == 0
    error = "" if works else (made.stderr or alive.stderr).strip() or "the session was gone at once"
    return {"present": True, "works": works, "version": version.stdout.strip().replace("tmux ", ""), "error": error}


def weight_state(weight: dict[str, Any]) -> dict[str, Any]:
    """Whether one base-weights file is there, whole and the right one."""
    path = weight["path"]
    state = {"path": path, "ok": False, "error": ""}
    try:
        size = os.path.getsize(path)
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
    except OSError as exc:
        return dict(state, error=exc.strerror or str(exc))
    same = digest.hexdigest() == weight["sha256"].lower()
    if weight.get("bytes") is not None and size != weight["bytes"]:
        error = "%d bytes instead of %d" % (size, weight["bytes"])
        # Fetching it again cannot help then.
        wrong = "%s has the right sha256 and %s: the job's bytes: is wrong" % (path, error) if same else ""
        return dict(state, error=error, wrong_size=wrong)
    if not same:
        return dict(state, error="its sha256 is %s" % digest.hexdigest())
    return dict(state, ok=True)


def data_entries(top: str) -> list[str]:
    """Folders and text lists near the top of the data set: what a split of data.yaml may name."""
    found: list[str] = []
    queue = [("", 0)]
    while queue and len(found) < ENTRIES_LIMIT:
        folder, depth = queue.pop(0)
        try:
            with os.scandir(os.path.join(top, folder)) as entries:
                for entry in sorted(entries, key=lambda item: item.name):
                    relative = folder + "/" + entry.name if folder else entry.name
                    if entry.is_dir():
                        found.append(relative)
                        if depth + 1 < ENTRIES_DEPTH:
                            queue.append((relative, depth + 1))
                    elif entry.name.endswith(".txt") and len(found) < ENTRIES_LIMIT and depth < 2:
                        found.append(relative)
        except OSError:
            continue
    return found[:ENTRIES_LIMIT]


def data_yaml_state(data_dir: str, name: str) -> dict[str, Any]:
    state: dict[str, Any] = {"asked": bool(name), "present": False, "text": "", "entries": [], "error": ""}
    if not name:
        return state
    path = os.path.join(data_dir, name)
    state["path"] = path
    try:
        with open(path, "rb") as file:
            raw = file.read(DATA_YAML_LIMIT + 1)
    except FileNotFoundError:
        return state
    except OSError as exc:
        return dict(state, error="%s: %s" % (path, exc.strerror))
    if len(raw) > DATA_YAML_LIMIT:
        return dict(state, present=True, error="%s is larger than %d bytes" % (path, DATA_YAML_LIMIT))
    try:
        # Base64 keeps line endings and a byte order mark through every layer between here and the control side.
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return dict(state, present=True, error="%s is not UTF-8" % path)
    return dict(state, present=True, text=base64.b64encode(raw).decode("ascii"), entries=data_entries(data_dir))


# --- putting it together ---------------------------------------------------------------------------------------------


def plan(facts: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """From what was seen to what is needed. Pure."""
    python = facts["python"]
    imports: dict[str, dict[str, Any]] = facts["imports"]
    problems: list[str] = []
    pin, why = decide_pin(request["numpy"], python["torch"], imports)
    too_new = pin and release(python["numpy"])[:1] >= (2,)
    pip = pip_needs(python, request, pin, too_new, problems, why)
    apt = apt_needs(facts, request, bool(pip), problems)
    weights = [index for index, state in enumerate(facts["base_weights"]) if not state["ok"]]
    problems += [state["wrong_size"] for state in facts["base_weights"] if state.get("wrong_size")]
    room_problem(facts, request, weights, problems)
    if facts["tmux"]["present"] and not facts["tmux"]["works"]:
        problems.append("tmux cannot keep a session: %s" % facts["tmux"]["error"])
    if facts["data_yaml"]["error"]:
        problems.append(facts["data_yaml"]["error"])
    if not (pip or apt):
        problems += import_problems(request, python, imports)
    needs = {"apt": apt, "pip": pip, "weights": weights}
    return {
        "needs": needs,
        "problems": problems,
        "numpy": {"version": python["numpy"], "pin": pin, "why": why},
        "errata": errata(facts, request, why, too_new),
        "ok": not problems and not any(needs.values()),
    }


def pip_needs(
    python: dict[str, Any], request: dict[str, Any], pin: bool, too_new: bool, problems: list[str], why: str
) -> list[str]:
    """Arguments for one `pip install`. All requirements go in, not only the missing ones: pip then sees the whole
    picture and may move one of them down to a version that goes with numpy 1."""
    for state in python["requirements"]:
        if "error" in state:
            problems.append("bootstrap_requirements: %r is not a requirement: %s" % (state["text"], state["error"]))
    missing = [state for state in python["requirements"] if not state["ok"] and "error" not in state]
    if not missing and not too_new:
        return []
    foreign = [row for row in python["demands_numpy_2"] if not row["asked"]] if too_new else []
    if foreign:
        names = ", ".join("%(name)s %(version)s (%(requires)s)" % row for row in foreign)
        problems.append(
            "numpy must be below 2 (%s), but %s needs numpy 2: name a version of it that does not in "
            "bootstrap_requirements, use another image, or set bootstrap_numpy: ignore" % (why, names)
        )
        return []
    if not python["pip"] and python["executable"] != os.path.realpath(SYSTEM_PYTHON):
        problems.append("%s has no pip, so nothing can be installed for it" % python["path"])
        return []
    return [*(["numpy<2"] if pin else []), *request["requirements"]]


def apt_needs(facts: dict[str, Any], request: dict[str, Any], pip_runs: bool, problems: list[str]) -> list[str]:
    python, imports, installed = facts["python"], facts["imports"], facts["packages"]
    libraries = set(facts["cv2_missing"]) | {row["library"] for row in imports.values() if row["kind"] == "library"}
    wanted, unknown = packages_for(libraries)
    for name in unknown:
        what = (
            "the NVIDIA driver is not visible in the pod"
            if name.startswith(("libcuda.", "libnvidia"))
            else ("add the package that carries it to bootstrap_packages")
        )
        problems.append("%s is missing and no package is known for it: %s" % (name, what))
    wanted = [*request["packages"], *wanted]
    if not facts["tmux"]["present"]:
        wanted.append("tmux")
    if pip_runs and not python["pip"]:
        wanted.append("python3-pip")
    headless = any("headless" in state["name"] for state in python["requirements"])
    if "cv2" in request["imports"] and python["modules"].get("cv2") is None and not headless:
        wanted += CV2_PACKAGES  # cv2 comes with pip in this very pass; ldd can look at it only in the next one
    have = installed if installed is not None else set()
    needed = [name for name in dict.fromkeys(wanted) if re.split(r"[=/:]", name)[0] not in have]
    if needed and installed is None:
        problems.append(
            "no apt on this image, so %s cannot be installed: use a Debian or Ubuntu image" % ", ".join(needed)
        )
        return []
    return needed


def room_problem(facts: dict[str, Any], request: dict[str, Any], weights: list[int], problems: list[str]) -> None:
    size = sum(request["base_weights"][index].get("bytes") or 0 for index in weights)
    if size > facts["free_bytes"]:
        problems.append("base weights need %d bytes, the pod has %d free" % (size, facts["free_bytes"]))


def import_problems(request: dict[str, Any], python: dict[str, Any], imports: dict[str, dict[str, Any]]) -> list[str]:
    """Imports that still fail when there is nothing left to install."""
    found = []
    for name, result in sorted(imports.items()):
        if result["kind"] == "ok" or (
            name == "torch" and name not in request["imports"] and result["kind"] != "numpy1"
        ):
            continue
        hint = {
            "missing": "add its package to bootstrap_requirements",
            "numpy1": "it was built against numpy 1 and bootstrap_numpy is %s" % request["numpy"],
            "numpy2": "it was built against numpy 2 and numpy is %s" % python["numpy"],
            "library": "a shared library is missing",
        }.get(result["kind"], "see the error")
        found.append("%s cannot be imported by %s: %s (%s)" % (name, python["path"], result["error"], hint))
    return found


def errata(facts: dict[str, Any], request: dict[str, Any], why: str, too_new: bool) -> list[dict[str, Any]]:
    """The eight, in their order, as rows a person can read."""
    imports, tmux, data = facts["imports"], facts["tmux"], facts["data_yaml"]
    broken = [name for name, result in imports.items() if result["kind"] in ("numpy1", "numpy2")]
    numpy_text = "numpy %s: %s" % (facts["python"]["numpy"] or "is not installed", why)
    cv2 = imports.get("cv2")
    cv2_ok = cv2 is None or cv2["kind"] == "ok"
    if cv2 is None:
        cv2_text = "cv2 is not asked for"
    else:
        cv2_text = "cv2 imports" if cv2_ok else "cv2 does not import: %s" % cv2["error"]
    if facts["cv2_missing"]:
        cv2_text += "; ldd misses %s" % ", ".join(facts["cv2_missing"])
    lost = [state["path"] for state in facts["base_weights"] if not state["ok"]]
    weights_text = "%d of %d there and whole" % (len(facts["base_weights"]) - len(lost), len(facts["base_weights"]))
    rows = [
        ("numpy", not too_new and (request["numpy"] == "ignore" or not broken), numpy_text),
        ("cv2 libraries", cv2_ok and not facts["cv2_missing"], cv2_text),
        (
            "data.yaml",
            not data["error"],
            data["error"]
            or ("not asked for" if not data["asked"] else "present" if data["present"] else "not here yet"),
        ),
        ("ssh", True, "logged in as %s" % facts["login"]),
        ("tmux", tmux["works"], "tmux %s keeps a session" % tmux["version"] if tmux["works"] else tmux["error"]),
        ("nested weights", True, "found by pattern after the training"),
        ("base weights", not lost, weights_text if facts["base_weights"] else "none asked for"),
        ("wallclock budget", True, "set by the plan, before anything was rented"),
    ]
    return [
        {"number": i, "name": name, "ok": ok, "text": text, "line": "erratum %d, %s: %s" % (i, name, text)}
        for i, (name, ok, text) in enumerate(rows, 1)
    ]


def with_defaults(request: dict[str, Any]) -> dict[str, Any]:
    home = request.get("pod_home", "/root/pennypod")
    full = {
        "pod_home": home,
        "only": "",
        "python": "auto",
        "numpy": "auto",
        "packages": [],
        "requirements": [],
        "imports": [],
        "base_weights": [],
        "data_dir": os.path.join(home, "data"),
        "data_yaml": "",
        "import_timeout_s": 120,
    }
    full.update({key: value for key, value in request.items() if value is not None})
    return full


def free_bytes(path: str) -> int:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


def observe(request: dict[str, Any]) -> dict[str, Any]:
    """Look at everything, side by side: start-up times of interpreters would otherwise add up."""
    limit_s = float(request["import_timeout_s"])
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
        tmux = pool.submit(tmux_state)
        packages = pool.submit(installed_packages)
        weights = [pool.submit(weight_state, weight) for weight in request["base_weights"]]
        data = pool.submit(data_yaml_state, request["data_dir"], request["data_yaml"])
        search = [*image_path(), *os.environ.get("PATH", "").split(":"), "/usr/local/bin", "/usr/bin"]
        paths = candidates(request["python"], search)
        looked = list(pool.map(lambda path: (path, inspect(path, request)), paths))
        chosen = choose_python(request["python"], [(path, found) for path, found in looked if found is not None])
        if chosen is None:
            raise SystemExit("no usable Python on the pod: looked at %s" % (", ".join(paths) or "nothing"))
        path, python = chosen
        python["path"] = path
        python["executable"] = os.path.realpath(python["executable"])
        modules = [name for name in request["imports"] if python["modules"].get(name)]
        torch_matters = request["numpy"] == "auto" and python["has_torch"] and release(python["numpy"])[:1] >= (2,)
        if torch_matters and "torch" not in modules:
            modules.append("torch")
        tried = pool.map(lambda name: (name, try_import(path, name, python["numpy"], limit_s)), modules)
        imports = dict(tried)
        for name in request["imports"]:
            imports.setdefault(name, {"kind": "missing", "error": "not installed"})
        wants_cv2 = "cv2" in request["imports"]
        cv2_missing = missing_libraries(shared_objects(python["modules"].get("cv2"))) if wants_cv2 else []
        return {
            "python": python,
            "module_python": choose_module_python(path),
            "imports": imports,
            "cv2_missing": cv2_missing,
            "tmux": tmux.result(),
            "packages": packages.result(),
            "base_weights": [weight.result() for weight in weights],
            "data_yaml": data.result(),
            "login": os.environ.get("USER") or os.environ.get("LOGNAME") or "user %d" % os.getuid(),
            "free_bytes": free_bytes(request["pod_home"]),
        }


def main(argv: list[str]) -> int:
    started = time.monotonic()
    request = with_defaults(json.loads(argv[1]) if len(argv) > 1 else {})
    if request["only"] == "data_yaml":
        report: dict[str, Any] = {"data_yaml": data_yaml_state(request["data_dir"], request["data_yaml"])}
    else:
        facts = observe(request)
        report = dict(facts, **plan(facts, request))
        del report["packages"]
    report["seconds"] = round(time.monotonic() - started, 3)
    print(MARK + json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
