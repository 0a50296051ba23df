"""Filter: the answer of gpu_offer_info as the table that `pennypod offers` prints."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from pennypod.report import offers_table, offers_words
from rich.console import Console

_WIDTH = 120


class FilterModule:
    def filters(self) -> dict[str, Callable[..., str]]:
        return {"pennypod_offers": offers_text}


def offers_text(plan: Mapping[str, Any]) -> str:
    """`pod_plan | pennypod_offers`"""
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, highlight=False, markup=False, color_system=None)
    console.print(offers_table(plan))
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    return "\n".join([*lines, *offers_words(plan)])
