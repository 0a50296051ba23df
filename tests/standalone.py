"""Loads the scripts that are no part of any package, as modules of their own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

TRAINERS = Path(__file__).parents[1] / "python/trainers"


def load_script(name: str) -> ModuleType:
    """A fresh module each time, so that no test sees what another changed in it."""
    spec = importlib.util.spec_from_file_location(name, TRAINERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
