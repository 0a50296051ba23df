"""What holds for every test."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

_TESTS = Path(__file__).parent

# A time limit per example fails tests for the sake of a busy machine; pytest's own limit ends what really hangs.
settings.register_profile("pennypod", deadline=None)
settings.load_profile("pennypod")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for browsers, sshd and containers gets a second try, which the summary tells as RERUN.

    The chaos tests get none: a pod that outlives its run once is a fault, however busy the machine.
    """
    for item in items:
        if any(item.path.is_relative_to(_TESTS / group) for group in ("contract", "integration")):
            item.add_marker(pytest.mark.flaky(reruns=1))
