"""The probe of the bootstrap: what it sees on pods with the errata, and what it concludes."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import packaging
import pytest

SCRIPT = Path(__file__).parents[2] / "python/pennypod/onpod/probe.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("probe", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


probe = load()


class FakeRun:
    """Stands in for child processes: answers by the first words of the command, and remembers what was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[list[str]] = []

    def __call__(self, argv: list[str], timeout_s: float = 0.0) -> Any:
        self.asked.append(argv)
        answer = self.answers.get(Path(argv[0]).name.replace("-", "_"), (127, "", "not found"))
        return probe.Done(*(answer(argv) if callable(answer) else answer))


# --- a pod's Python, made of a folder --------------------------------------------------------------------------------


class Site:
    """An interpreter that sees only the packages a test puts into its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "site"
        self.folder.mkdir()
        (self.folder / "packaging").symlink_to(Path(packaging.__file__).parent)
        (self.folder / "pip").mkdir()
        (self.folder / "pip/__init__.py").touch()
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nPYTHONPATH={self.folder} exec {sys.executable} -S "$@"\n')
        self.python.chmod(0o755)

    def add(self, name: str, version: str, code: str = "", requires: tuple[str, ...] = (), module: str = "") -> None:
        package = self.folder / (module or name.replace("-", "_"))
        package.mkdir()
        (package / "__init__.py").write_text(code)
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {need}" for need in requires)]) + "\n")

    def numpy(self, version: str) -> None:
        self.add("numpy", version, "float32 = 'float32'\n\ndef zeros(*shape, dtype=None):\n    return 0\n")

    def inspect(self, requirements: list[str] = [], imports: list[str] = []) -> dict[str, Any]:  # noqa: B006
        found = probe.inspect(str(self.python), {"requirements": requirements, "imports": imports})
        assert found is not None
        return dict(found)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


NUMPY_1_BUILD = """
import sys
sys.stderr.write("A module that was compiled using NumPy 1.x cannot be run in NumPy 2.2 as it may crash.\\n")
raise ImportError("numpy.core.multiarray failed to import")
"""
TORCH_OF_NUMPY_1 = "def from_numpy(array):\n    raise RuntimeError('Numpy is not available')\n"
TORCH = "def from_numpy(array):\n    return array\n"


def test_requirements_are_compared_by_version_marker_extra_and_url(site: Site) -> None:
    site.add("Some.Thing", "2.1", requires=("inner; extra == 'all'",))
    wanted = {
        "some-thing": True,
        "some_thing>=2,<3": True,
        "some-thing>=3": False,
        "some-thing==2.*": True,
        "some-thing[all]": False,
        "absent": False,
        "absent; python_version < '3'": True,
        "some-thing @ https://example.org/x.whl": False,
    }
    states = site.inspect(requirements=list(wanted))["requirements"]
    assert {state["text"]: state["ok"] for state in states} == wanted


def test_a_text_that_is_no_requirement_is_named(site: Site) -> None:
    states = site.inspect(requirements=["-r requirements.txt"])["requirements"]
    assert "error" in states[0]


def test_packages_that_demand_numpy_2_are_found_and_told_from_the_jobs_own(site: Site) -> None:
    site.numpy("2.2.0")
    site.add("stranger", "1.0", requires=("numpy>=2",))
    site.add("job", "1.0", requires=("dependency",))
    site.add("dependency", "4.12", requires=("numpy<2.3,>=2",))
    site.add("either", "1.0", requires=("numpy>=1.21,<3",))
    site.add("ancient", "1.0", requires=("numpy<1.10",))
    site.add("elsewhere", "1.0", requires=("numpy>=2; sys_platform == 'win32'",))
    demands = site.inspect(requirements=["job"])["demands_numpy_2"]
    assert {row["name"]: row["asked"] for row in demands} == {"stranger": False, "dependency": True}


def test_without_packaging_every_requirement_counts_as_missing(site: Site) -> None:
    (site.folder / "packaging").unlink()
    site.add("thing", "1.0")
    found = site.inspect(requirements=["thing"])
    assert not found["requirements"][0]["ok"]


def test_torch_that_cannot_take_a_numpy_array_was_built_against_numpy_1(site: Site) -> None:
    site.numpy("2.2.0")
    site.add("torch", "2.4.0", TORCH_OF_NUMPY_1)
    assert site.inspect()["has_torch"]
    assert probe.try_import(str(site.python), "torch", "2.2.0", 30)["kind"] == "numpy1"


def test_torch_that_can_is_fine(site: Site) -> None:
    site.numpy("2.2.0")
    site.add("torch", "2.6.0", TORCH)
    assert probe.try_import(str(site.python), "torch", "2.2.0", 30)["kind"] == "ok"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("", "ok"),
        (NUMPY_1_BUILD, "numpy1"),
        # Goes on without numpy, and would fail in the middle of the training.
        ("import warnings; warnings.warn('Failed to initialize NumPy: _ARRAY_API not found')", "numpy1"),
        ("raise ImportError('libGL.so.1: cannot open shared object file: No such file or directory')", "library"),
        ("import not_there", "missing"),
        ("import os; os._exit(3)", "error"),
        ("import os; os.kill(os.getpid(), 11)", "error"),
        ("import time; time.sleep(60)", "timeout"),
    ],
)
def test_how_an_import_ends(site: Site, code: str, kind: str) -> None:
    site.add("thing", "1.0", code)
    result = probe.try_import(str(site.python), "thing", "2.2.0", 1 if kind == "timeout" else 30)
    assert result["kind"] == kind
    assert (result["error"] == "") == (kind == "ok")


def test_the_library_an_import_misses_is_named(site: Site) -> None:
    site.add("cv2", "4", "raise ImportError('libGL.so.1: cannot open shared object file: No such file')")
    assert probe.try_import(str(site.python), "cv2", None, 30)["library"] == "libGL.so.1"


def test_under_numpy_1_a_module_built_for_2_is_told_apart() -> None:
    text = "RuntimeError: module compiled against ABI version 0x2000009 but this version of numpy is 0x1000009"
    assert probe.classify_import(probe.Done(1, "", text), "1.26.4", 9)["kind"] == "numpy2"
    assert probe.classify_import(probe.Done(1, "", text), "2.0.0", 9)["kind"] != "numpy2"


def test_a_hanging_child_dies_with_its_helpers(tmp_path: Path) -> None:
    sign = tmp_path / "alive"
    code = f"(sleep 2; touch {sign}) & sleep 60"
    started = time.monotonic()
    assert probe.run(["sh", "-c", code], timeout_s=0.3).rc is None
    assert time.monotonic() - started < 1.5
    time.sleep(2)
    assert not sign.exists()


def test_a_program_that_is_not_there() -> None:
    assert probe.run(["/no/such/program"]).rc == 127


# --- which Python ----------------------------------------------------------------------------------------------------


def test_the_images_path_is_read_from_process_1(tmp_path: Path) -> None:
    environ = tmp_path / "environ"
    environ.write_bytes(b"HOME=/root\0PATH=/opt/conda/bin:/usr/bin\0X=1\0")
    assert probe.image_path(str(environ)) == ["/opt/conda/bin", "/usr/bin"]
    assert probe.image_path(str(tmp_path / "absent")) == []


def test_candidates_are_the_known_places_then_the_path(tmp_path: Path) -> None:
    for name in ("conda/python", "bin/python3", "bin/python", "plain/python3"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755 if "plain" not in name else 0o644)
    search = [str(tmp_path / "bin"), str(tmp_path / "bin"), str(tmp_path / "plain"), "relative", ""]
    found = probe.candidates("auto", search, [str(tmp_path / "conda/python"), str(tmp_path / "none")])
    assert [Path(path).relative_to(tmp_path).as_posix() for path in found] == [
        "conda/python",
        "bin/python3",
        "bin/python",
    ]
    assert probe.candidates("/my/python", search) == ["/my/python"]


def test_the_same_interpreter_is_looked_into_once_and_a_virtual_environment_is_another(tmp_path: Path) -> None:
    for folder in ("usr/bin", "venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    python = tmp_path / "usr/bin/python3"
    python.write_text("")
    python.chmod(0o755)
    (tmp_path / "usr/bin/python").symlink_to("python3")
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "venv/bin/python3").symlink_to(python)
    search = [str(tmp_path / folder) for folder in ("usr/bin", "bin", "venv/bin")]
    assert probe.candidates("auto", search, []) == [str(python), str(tmp_path / "venv/bin/python3")]


def test_the_python_with_torch_is_chosen() -> None:
    plain: dict[str, Any] = {"version": [3, 11, 2], "has_torch": False}
    torch: dict[str, Any] = {"version": [3, 10, 1], "has_torch": True}
    old: dict[str, Any] = {"version": [3, 7, 0], "has_torch": True}
    assert probe.choose_python("auto", [("a", plain), ("b", torch)])[0] == "b"
    assert probe.choose_python("auto", [("old", old), ("a", plain)])[0] == "a"
    assert probe.choose_python("/old", [("/old", old)])[0] == "/old"
    assert probe.choose_python("auto", []) is None


def test_an_interpreter_that_chatters_or_crashes() -> None:
    request = {"requirements": [], "imports": []}
    assert probe.inspect("p", request, FakeRun(p=(0, 'welcome\n{"version": [3, 11, 0]}\n', ""))) == {
        "version": [3, 11, 0]
    }
    assert probe.inspect("p", request, FakeRun(p=(1, "", "boom"))) is None
    assert probe.inspect("p", request, FakeRun(p=(0, "only noise\n", ""))) is None


@pytest.mark.parametrize(
    ("mode", "torch", "broken", "pin"),
    [
        ("auto", None, False, False),
        ("auto", "2.6.0", False, False),
        ("auto", "2.2.2+cu121", False, True),
        ("auto", "1.13.1", False, True),
        ("auto", None, True, True),
        ("auto", "2.6.0", True, True),
        ("<2", None, False, True),
        ("ignore", "1.13.1", True, False),
    ],
)
def test_when_numpy_is_pinned(mode: str, torch: str | None, broken: bool, pin: bool) -> None:
    imports = {"thing": {"kind": "numpy1" if broken else "ok"}}
    assert probe.decide_pin(mode, torch, imports)[0] is pin


# --- libraries and packages ------------------------------------------------------------------------------------------


def test_ldd_is_asked_about_extension_modules_but_not_about_qts_plugins(tmp_path: Path) -> None:
    for name in ("cv2/__init__.py", "cv2/cv2.abi3.so", "cv2/qt/plugins/platforms/libqxcb.so", "cv2/python/x.so.1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files = probe.shared_objects(str(tmp_path / "cv2/__init__.py"))
    assert [Path(file).name for file in files] == ["cv2.abi3.so", "x.so.1"]
    said = "\tlibGL.so.1 => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x1)\n\tlibgthread-2.0.so.0 => not found\n"
    assert probe.missing_libraries(files, FakeRun(ldd=(1, said, ""))) == ["libGL.so.1", "libgthread-2.0.so.0"]
    assert probe.missing_libraries([], FakeRun()) == []


def test_libraries_become_packages_and_unknown_ones_stay_named() -> None:
    asked = ["libGL.so.1", "libglib-2.0.so.0", "libgthread-2.0.so.0", "libodd.so.7"]
    assert probe.packages_for(asked) == (["libgl1", "libglib2.0-0"], ["libodd.so.7"])


def test_what_a_package_provides_counts_as_installed() -> None:
    said = (
        "installed\tlibglib2.0-0t64\tlibglib2.0-0 (= 2.80.0)\n"
        "config-files\ttree\t\n"
        "installed\ttmux\t\n"
        "installed\tmail\tmta, other-name\n"
    )
    found = probe.installed_packages(FakeRun(dpkg_query=(0, said, "")))
    assert found == {"libglib2.0-0t64", "libglib2.0-0", "tmux", "mail", "mta", "other-name"}
    assert probe.installed_packages(FakeRun()) is None


# --- tmux, weights, data.yaml ----------------------------------------------------------------------------------------


def test_tmux_is_tried_on_a_socket_of_its_own_with_start_server_first() -> None:
    fake = FakeRun(tmux=(0, "tmux 3.3a\n", ""))
    assert probe.tmux_state(fake) == {"present": True, "works": True, "version": "3.3a", "error": ""}
    tried = fake.asked[1]
    assert tried.index("start-server") < tried.index("new-session")
    assert all(argv[1] == "-L" for argv in fake.asked[1:])
    assert fake.asked[-1][-1] == "kill-server"


def test_tmux_that_loses_its_session() -> None:
    fake = FakeRun(tmux=lambda argv: (1, "", "no server running") if "has-session" in argv else (0, "tmux 3.3a", ""))
    state = probe.tmux_state(fake)
    assert (state["present"], state["works"], state["error"]) == (True, False, "no server running")


def test_tmux_that_is_not_there() -> None:
    assert not probe.tmux_state(FakeRun())["present"]


def test_base_weights_must_have_size_and_hash(tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    file.write_bytes(b"weights")
    weight = {"path": str(file), "sha256": hashlib.sha256(b"weights").hexdigest().upper(), "bytes": 7}
    assert probe.weight_state(weight)["ok"]
    assert probe.weight_state(dict(weight, bytes=None))["ok"]
    assert probe.weight_state(dict(weight, sha256="0" * 64))["error"].startswith("its sha256 is")
    file.write_bytes(b"weight")
    assert probe.weight_state(weight)["error"] == "6 bytes instead of 7"
    assert not probe.weight_state(dict(weight, path=str(tmp_path)))["ok"]
    file.unlink()
    assert probe.weight_state(weight)["error"] == "No such file or directory"


def test_a_wrong_size_in_the_job_file_is_told_from_a_damaged_file(tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    file.write_bytes(b"weights")
    weight = {"path": str(file), "sha256": hashlib.sha256(b"weights").hexdigest(), "bytes": 9}
    state = probe.weight_state(weight)
    assert not state["ok"]
    assert "the job's bytes: is wrong" in state["wrong_size"]


def test_data_yaml_comes_back_byte_for_byte_with_the_folders_around_it(tmp_path: Path) -> None:
    (tmp_path / "train/images/deep/deeper/deepest").mkdir(parents=True)
    (tmp_path / "train.txt").touch()
    (tmp_path / "train/images/a.jpg").touch()
    raw = b"\xef\xbb\xbfpath: /x\r\nnames: [\xc3\xa9]\r\n"
    (tmp_path / "data.yaml").write_bytes(raw)
    state = probe.data_yaml_state(str(tmp_path), "data.yaml")
    assert base64.b64decode(state["text"]) == raw
    assert state["entries"] == ["train", "train.txt", "train/images", "train/images/deep", "train/images/deep/deeper"]


def test_data_yaml_that_is_absent_unasked_or_unreadable(tmp_path: Path) -> None:
    assert not probe.data_yaml_state(str(tmp_path), "")["asked"]
    absent = probe.data_yaml_state(str(tmp_path), "data.yaml")
    assert (absent["asked"], absent["present"], absent["error"]) == (True, False, "")
    (tmp_path / "latin.yaml").write_bytes(b"names: [\xe9]\n")
    assert "not UTF-8" in probe.data_yaml_state(str(tmp_path), "latin.yaml")["error"]
    (tmp_path / "big.yaml").write_bytes(b"#" * (probe.DATA_YAML_LIMIT + 1))
    assert "larger" in probe.data_yaml_state(str(tmp_path), "big.yaml")["error"]
    (tmp_path / "folder.yaml").mkdir()
    assert "Is a directory" in probe.data_yaml_state(str(tmp_path), "folder.yaml")["error"]


# --- conclusions -----------------------------------------------------------------------------------------------------


def facts(**changes: Any) -> dict[str, Any]:
    """A pod that is ready, but for `changes`."""
    python = {
        "path": "/py",
        "executable": "/py",
        "numpy": "2.2.0",
        "torch": None,
        "pip": True,
        "requirements": [],
        "demands_numpy_2": [],
        "modules": {"cv2": "/cv2/__init__.py"},
    }
    ready = {
        "python": {**python, **changes.pop("python", {})},
        "imports": {},
        "cv2_missing": [],
        "tmux": {"present": True, "works": True, "version": "3", "error": ""},
        "packages": set(),
        "base_weights": [],
        "data_yaml": {"asked": False, "present": False, "error": ""},
        "login": "root",
        "free_bytes": 10**9,
    }
    return {**ready, **changes}


def conclude(request: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return dict(probe.plan(facts(**changes), probe.with_defaults(request or {})))


def requirement(name: str, ok: bool) -> dict[str, Any]:
    return {"text": name, "name": name, "ok": ok, "why": ""}


def test_a_ready_pod_needs_nothing() -> None:
    done = conclude()
    assert done["ok"]
    assert done["problems"] == []
    assert done["needs"] == {"apt": [], "pip": [], "weights": []}
    assert [row["number"] for row in done["errata"]] == list(range(1, 9))
    assert all(row["ok"] for row in done["errata"])


def test_one_missing_requirement_sends_all_of_them_to_pip() -> None:
    states = [requirement("a", True), requirement("b", False)]
    done = conclude({"requirements": ["a", "b"]}, python={"requirements": states})
    assert done["needs"]["pip"] == ["a", "b"]


def test_the_pin_goes_into_the_same_resolution() -> None:
    done = conclude(
        {"requirements": ["a"], "imports": ["a"]},
        python={"requirements": [requirement("a", True)]},
        imports={"a": {"kind": "numpy1", "error": "x"}},
    )
    assert done["needs"]["pip"] == ["numpy<2", "a"]
    assert not done["errata"][0]["ok"]


def test_numpy_below_2_needs_no_pip() -> None:
    assert conclude({"numpy": "<2"}, python={"numpy": "1.26.4"})["ok"]
    assert conclude({"numpy": "<2"}, python={"numpy": None})["ok"]


def test_a_package_that_demands_numpy_2_is_named_and_nothing_is_installed() -> None:
    row = {"name": "stranger", "version": "1.0", "requires": "numpy>=2", "asked": False}
    done = conclude({"numpy": "<2"}, python={"demands_numpy_2": [row]})
    assert not done["ok"]
    assert done["needs"]["pip"] == []
    assert "stranger 1.0 (numpy>=2) needs numpy 2" in done["problems"][0]


def test_a_demanding_package_of_the_job_itself_is_left_to_pip() -> None:
    row = {"name": "opencv-python", "version": "4.12", "requires": "numpy>=2", "asked": True}
    done = conclude(
        {"numpy": "<2", "requirements": ["opencv-python"]},
        python={"demands_numpy_2": [row], "requirements": [requirement("opencv-python", True)]},
    )
    assert done["problems"] == []
    assert done["needs"]["pip"] == ["numpy<2", "opencv-python"]


def test_numpy_1_builds_are_a_problem_when_numpy_must_be_left_alone() -> None:
    done = conclude({"numpy": "ignore", "imports": ["a"]}, imports={"a": {"kind": "numpy1", "error": "x"}})
    assert not done["ok"]
    assert "bootstrap_numpy is ignore" in done["problems"][0]


def test_missing_libraries_become_apt_packages() -> None:
    done = conclude(
        {"imports": ["cv2"]},
        cv2_missing=["libGL.so.1", "libgthread-2.0.so.0"],
        imports={"cv2": {"kind": "library", "library": "libGL.so.1", "error": "libGL.so.1: ..."}},
        packages={"tmux"},
    )
    assert done["needs"]["apt"] == ["libgl1", "libglib2.0-0"]
    assert done["problems"] == []
    assert not done["errata"][1]["ok"]


def test_a_library_of_an_unknown_package_is_a_problem_at_once() -> None:
    done = conclude({"imports": ["cv2"]}, cv2_missing=["libodd.so.7"], imports={"cv2": {"kind": "ok", "error": ""}})
    assert "libodd.so.7 is missing" in done["problems"][0]
    assert "bootstrap_packages" in done["problems"][0]


def test_the_drivers_library_is_never_installed() -> None:
    done = conclude({"imports": ["x"]}, imports={"x": {"kind": "library", "library": "libcuda.so.1", "error": "e"}})
    assert "driver" in done["problems"][0]


@pytest.mark.parametrize(("name", "apt"), [("ultralytics", ["libgl1", "libglib2.0-0"]), ("opencv-python-headless", [])])
def test_cv2s_libraries_come_along_with_a_cv2_that_pip_brings(name: str, apt: list[str]) -> None:
    done = conclude(
        {"imports": ["cv2"], "requirements": [name]},
        python={"modules": {"cv2": None}, "requirements": [requirement(name, False)]},
        imports={"cv2": {"kind": "missing", "error": "not installed"}},
    )
    assert done["needs"] == {"apt": apt, "pip": [name], "weights": []}
    assert done["problems"] == []


def test_asked_packages_tmux_and_what_is_there_already() -> None:
    tmux = {"present": False, "works": False, "version": "", "error": "not installed"}
    done = conclude({"packages": ["git", "tree=2.1", "vim/stable"]}, tmux=tmux, packages={"tree", "vim"})
    assert done["needs"]["apt"] == ["git", "tmux"]


def test_an_image_without_apt_says_so() -> None:
    done = conclude({"packages": ["git"]}, packages=None)
    assert "no apt" in done["problems"][0]
    assert done["needs"]["apt"] == []


def test_pip_comes_from_apt_for_the_systems_python_only(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"pip": False, "requirements": [requirement("a", False)]}
    done = conclude({"requirements": ["a"]}, python=missing)
    assert "has no pip" in done["problems"][0]
    monkeypatch.setattr(probe, "SYSTEM_PYTHON", "/py")
    done = conclude({"requirements": ["a"]}, python=missing)
    assert done["problems"] == []
    assert done["needs"] == {"apt": ["python3-pip"], "pip": ["a"], "weights": []}


def test_a_failing_import_is_a_problem_only_when_nothing_is_left_to_install() -> None:
    imports = {"a": {"kind": "missing", "error": "No module named 'a'"}}
    assert conclude({"imports": ["a"], "packages": ["git"]}, imports=imports)["problems"] == []
    done = conclude({"imports": ["a"]}, imports=imports)
    assert "add its package to bootstrap_requirements" in done["problems"][0]


def test_weights_that_are_missing_are_counted_and_need_room() -> None:
    weights = [{"path": "/a", "sha256": "0", "bytes": 5}, {"path": "/b", "sha256": "0", "bytes": 2 * 10**9}]
    states = [{"path": "/a", "ok": True, "error": ""}, {"path": "/b", "ok": False, "error": "gone"}]
    done = conclude({"base_weights": weights}, base_weights=states)
    assert done["needs"]["weights"] == [1]
    assert "2000000000 bytes" in done["problems"][0]
    assert done["errata"][6]["text"] == "1 of 2 there and whole"


def test_a_tmux_that_does_not_work_cannot_be_repaired() -> None:
    done = conclude(tmux={"present": True, "works": False, "version": "3", "error": "no space"})
    assert done["problems"] == ["tmux cannot keep a session: no space"]


# --- the whole script ------------------------------------------------------------------------------------------------


def test_the_script_on_stdin_reports_a_pod_with_numpy_1_builds(site: Site, tmp_path: Path) -> None:
    site.numpy("2.2.0")
    site.add("oldbuild", "1.0", NUMPY_1_BUILD)
    request = {
        "pod_home": str(tmp_path / "pod"),
        "python": str(site.python),
        "imports": ["oldbuild", "absent"],
        "requirements": ["oldbuild"],
        "base_weights": [{"path": str(tmp_path / "w"), "sha256": "0" * 64}],
    }
    done = subprocess.run(
        [sys.executable, "-", json.dumps(request)], input=SCRIPT.read_bytes(), capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert len(lines) == 1
    report = json.loads(lines[0].removeprefix("@pennypod "))
    assert report["numpy"] == {"version": "2.2.0", "pin": True, "why": "oldbuild was built against numpy 1"}
    assert report["needs"]["pip"] == ["numpy<2", "oldbuild"]
    assert report["needs"]["weights"] == [0]
    assert report["imports"]["absent"]["kind"] == "missing"
    assert report["python"]["path"] == str(site.python)
    assert not report["ok"]


def test_the_script_reports_only_data_yaml_when_asked(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("path: /x\n")
    request = {"only": "data_yaml", "data_dir": str(tmp_path), "data_yaml": "data.yaml"}
    done = subprocess.run([sys.executable, str(SCRIPT), json.dumps(request)], capture_output=True, timeout=60)
    report = json.loads(done.stdout.decode().removeprefix("@pennypod "))
    assert set(report) == {"data_yaml", "seconds"}
    assert report["data_yaml"]["present"]


def test_a_python_that_does_not_exist_ends_the_script_with_its_name(tmp_path: Path) -> None:
    request = {"python": "/no/python", "pod_home": str(tmp_path)}
    done = subprocess.run([sys.executable, str(SCRIPT), json.dumps(request)], capture_output=True, timeout=60)
    assert done.returncode == 1
    assert b"no usable Python on the pod: looked at /no/python" in done.stderr
    assert done.stdout == b""
