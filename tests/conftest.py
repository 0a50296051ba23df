"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# A time limit per example fails tests for the sake of a busy machine; pytest's own limit ends what really hangs.
settings.register_profile("pennypod", deadline=None)
settings.load_profile("pennypod")
