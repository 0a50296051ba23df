"""Filters of the bootstrap role: thin, the work is in pennypod.datayaml."""  # noqa: INP001 - Ansible loads it by path

from __future__ import annotations

import base64
import json
import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ansible.errors import AnsibleFilterError
from pennypod.datayaml import rewrite
from pennypod.errors import InputError

MARK = "@pennypod "


def report(result: dict[str, Any]) -> dict[str, Any]:
    """What a script on the pod printed after its mark, `{"error": ...}` when it printed none."""
    for line in reversed(str(result.get("stdout", "")).splitlines()):
        if line.startswith(MARK):
            return dict(json.loads(line[len(MARK) :]))
    said = str(result.get("stderr") or result.get("stdout") or result.get("msg") or "no answer").strip()
    return {"error": said.splitlines()[-1] if said else "no answer"}


def weights(asked: Iterable[dict[str, Any]], cache: str) -> list[dict[str, Any]]:
    """Base weights with their absolute `path` on the pod, and whether the pod can fetch them by itself (`direct`)."""
    return [
        {
            "url": item["url"],
            "sha256": str(item["sha256"]).lower(),
            "bytes": item.get("bytes"),
            "path": posixpath.join(cache, item["dest"]),
            "direct": urlsplit(item["url"]).scheme in ("http", "https"),
        }
        for item in asked
    ]


def apt_error(result: dict[str, Any]) -> str:
    """Why apt failed, in one line."""
    said = [line.strip() for line in str(result.get("stderr", "")).splitlines() if line.strip()]
    errors = [line.removeprefix("E: ") for line in said if line.startswith("E: ")]
    return "; ".join(dict.fromkeys(errors)) or (said or [str(result.get("msg", "no message"))])[-1]


def pip_error(result: dict[str, Any]) -> str:
    """Why pip failed, in one line: its errors, and the conflict it explains on stdout."""
    said = [line.strip() for line in str(result.get("stderr", "")).splitlines()]
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    explained = str(result.get("stdout", "")).partition("The conflict is caused by:\n")[2].partition("\n\n")[0]
    why = [re.sub(r" \(from versions: [^)]*\)", "", line) for line in errors]
    why += [line.strip() for line in explained.splitlines()]
    return "; ".join(why) or next((line for line in reversed(said) if line), "") or str(result.get("msg", "no message"))


def fetch_error(wanted: Iterable[dict[str, Any]], cache_dir: str, tried: Iterable[dict[str, Any]]) -> str:
    """Which base weights the control side's cache does not hold under their hash, and what was said; empty when all."""
    lost = [item["url"] for item in wanted if not (Path(cache_dir) / item["sha256"]).is_file()]
    said = [result["msg"] for result in tried if result.get("msg") and result.get("item", {}).get("url") in lost]
    return f"{', '.join(lost)} ({'; '.join(dict.fromkeys(said)) or 'no message'})" if lost else ""


def point_data_yaml(state: dict[str, Any], data_dir: str) -> dict[str, Any]:
    """The data.yaml a probe read, pointed at `data_dir`: {"text", "differs", "error"}."""
    try:
        old = base64.b64decode(state["text"], validate=True).decode("utf-8")
        new = rewrite(old, data_dir, state["entries"])
    except InputError as exc:
        return {"text": "", "differs": False, "error": exc.message}
    except (KeyError, ValueError) as exc:
        raise AnsibleFilterError(f"not the data_yaml part of a probe: {exc}") from exc
    return {"text": new, "differs": new != old, "error": ""}


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "bootstrap_report": report,
            "bootstrap_weights": weights,
            "bootstrap_apt_error": apt_error,
            "bootstrap_pip_error": pip_error,
            "bootstrap_fetch_error": fetch_error,
            "bootstrap_point_data_yaml": point_data_yaml,
        }
