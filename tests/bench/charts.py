"""Pictures of measurements as SVG text, without a library: groups of bars, and bars made of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_LEFT, _WIDTH, _RIGHT, _BAR = 180, 480, 70, 16
OURS, THEIRS = "#1a7f37", "#8c959f"
_COLOURS = (
    "#0969da",
    "#54aeff",
    "#bf8700",
    "#8250df",
    "#e16f24",
    "#1a7f37",
    "#1b7c83",
    "#cf222e",
    "#8c959f",
    "#57606a",
)


@dataclass(frozen=True, slots=True)
class Bar:
    """`share` is its length, 1.0 the whole width; `text` stands behind it."""

    name: str
    share: float
    text: str
    colour: str = THEIRS


@dataclass(frozen=True, slots=True)
class Stack:
    """A bar of parts by name, all of them in the same unit."""

    name: str
    parts: Mapping[str, float]
    text: str


def bars(title: str, groups: Mapping[str, Sequence[Bar]]) -> str:
    """For each heading its bars, one below the other."""
    parts, y = [], 0
    for heading, members in groups.items():
        y += 22
        parts.append(f'<text x="{_LEFT}" y="{y}" fill="#222222" font-weight="bold">{escape(heading)}</text>')
        y += 6
        for bar in members:
            wide = _WIDTH * min(bar.share, 1.0)
            parts += _row(y, bar.name, wide, bar.text)
            parts.append(f'<rect x="{_LEFT}" y="{y + 3}" width="{wide:.1f}" height="{_BAR - 4}" fill="{bar.colour}"/>')
            y += _BAR
    return _svg(title, parts, y + 20, _RIGHT)


def stacks(title: str, groups: Mapping[str, Sequence[Stack]]) -> str:
    """The same with bars of parts, all on one scale, and what colour is which part."""
    every = [stack for members in groups.values() for stack in members]
    names = list(dict.fromkeys(name for stack in every for name in stack.parts))
    colour = dict(zip(names, _COLOURS * len(names), strict=False))
    scale = _WIDTH / max(sum(stack.parts.values()) for stack in every)
    parts, y = [], 0
    for heading, members in groups.items():
        y += 22
        parts.append(f'<text x="{_LEFT}" y="{y}" fill="#222222" font-weight="bold">{escape(heading)}</text>')
        y += 6
        for stack in members:
            x = float(_LEFT)
            for name, value in stack.parts.items():
                wide = value * scale
                parts.append(
                    f'<rect x="{x:.1f}" y="{y + 3}" width="{wide:.1f}" height="{_BAR - 4}" fill="{colour[name]}">'
                    f"<title>{escape(name)} {value:.1f}</title></rect>"
                )
                x += wide
            parts += _row(y, stack.name, x - _LEFT, stack.text)
            y += _BAR
    y += 14
    for number, name in enumerate(names):
        x, line = _LEFT + number % 5 * 96, y + number // 5 * _BAR
        parts.append(f'<rect x="{x}" y="{line}" width="10" height="10" fill="{colour[name]}"/>')
        parts.append(f'<text x="{x + 14}" y="{line + 9}" fill="#222222">{escape(name)}</text>')
    return _svg(title, parts, y + (len(names) + 4) // 5 * _BAR + 10, 4 * _RIGHT)


def _row(y: int, name: str, wide: float, text: str) -> list[str]:
    return [
        f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end" fill="#222222">{escape(name)}</text>',
        f'<text x="{_LEFT + wide + 5:.0f}" y="{y + 12}" fill="#555555">{escape(text)}</text>',
    ]


def _svg(title: str, parts: Sequence[str], height: int, right: int) -> str:
    size = f'width="{_LEFT + _WIDTH + right}" height="{height}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])
