"""Filter: a failed task's result as the one line that the screen shows, so that the ledger says the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pennypod.console import failure_of


class FilterModule:
    def filters(self) -> dict[str, Callable[..., str]]:
        return {"pennypod_failure": failure_line}


def failure_line(result: Mapping[str, Any], task: str = "") -> str:
    """`ansible_failed_result | pennypod_failure(ansible_failed_task.name)`"""
    return failure_of(result, task).message
