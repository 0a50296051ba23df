"""Job files: `group_vars/job_<name>.yml`. Floor 1: that folder is its one outside thing.

Ansible loads these files itself; they are read here too so that a wrong name or a malformed file is one clear line
before anything else happens, and so that programs other than Ansible can plan a job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pennypod.errors import InputError
from pennypod.model.ids import check_job_name

_PREFIX = "job_"
_SUFFIXES = (".yml", ".yaml")


def known_jobs(folder: Path) -> list[str]:
    """The names of all jobs in a group_vars folder."""
    files = [path for suffix in _SUFFIXES for path in folder.glob(f"{_PREFIX}*{suffix}")]
    return sorted({path.stem.removeprefix(_PREFIX) for path in files})


def job_file(folder: Path, name: str) -> Path:
    """Where a job is written down. Raises InputError for an unknown name."""
    check_job_name(name)
    path = next((p for s in _SUFFIXES if (p := folder / f"{_PREFIX}{name}{s}").is_file()), None)
    if path is None:
        known = ", ".join(known_jobs(folder)) or "none"
        raise InputError(f"unknown job {name!r}: known jobs are {known}; a job is a file {folder}/{_PREFIX}NAME.yml")
    return path


def load_job(folder: Path, name: str) -> dict[str, Any]:
    """The variables of one job. Raises InputError for an unknown name or a malformed file, naming file and line."""
    path = job_file(folder, name)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark else "?"
        raise InputError(f"{path}, line {line}: not valid YAML: {exc.problem or exc}") from exc
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as exc:
        raise InputError(f"{path}: cannot be read: {exc}") from exc
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InputError(f"{path}: a job file is a mapping of variable names to values")
    if not content.get("training_command"):
        raise InputError(f"{path}: training_command is missing: say what to run on the pod")
    return content


def read_mapping(path: Path) -> dict[str, Any]:
    """The variables in a YAML file; none where it is missing or holds something else. Raises InputError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError) as exc:
        raise InputError(f"{path} cannot be read: {' '.join(str(exc).split())}") from exc
    return content if isinstance(content, dict) else {}
