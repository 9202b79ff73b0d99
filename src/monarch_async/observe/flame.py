"""Collapsed stacks as a flame graph: an SVG without scripts, the widest calls at the bottom, with the share of each as its tooltip."""

from __future__ import annotations

import zlib
from html import escape

__all__ = ["flame_graph"]

WIDTH, HEIGHT = 1200.0, 18
NARROWEST = 0.5
"""Points below which a call is left out."""
_CHARACTER = 7.0


class _Call:
    def __init__(self) -> None:
        self.count = 0
        self.below: dict[str, _Call] = {}


def flame_graph(folded: str, title: str) -> str:
    """`folded` has a stack a line, outermost call first: ``a;b;c 12``."""
    root = _Call()
    for line in folded.splitlines():
        names, _, number = line.rpartition(" ")
        call, times = root, int(number)
        root.count += times
        for name in names.split(";"):
            call = call.below.setdefault(name, _Call())
            call.count += times
    boxes: list[tuple[int, float, float, str, int]] = []
    _lay(root, 0, 0.0, WIDTH / max(1, root.count), boxes)
    height = (max((depth for depth, *_ in boxes), default=0) + 2) * HEIGHT + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:g}" height="{height}" font-family="monospace" font-size="11">',
        f'<text x="4" y="{HEIGHT - 5}">{escape(title)}, {root.count} samples</text>',
    ]
    for depth, x, width, name, count in boxes:
        y = height - (depth + 1) * HEIGHT
        room = int((width - 4) / _CHARACTER)
        shown = name if len(name) <= room else name[: max(0, room - 1)] + "…" if room > 2 else ""
        hue = zlib.crc32(name.encode()) % 50
        parts.append(
            f"<g><title>{escape(name)}: {count} ({100 * count / root.count:.1f} %)</title>"
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT - 1}" fill="hsl({hue},80%,65%)"/>'
            f'<text x="{x + 2:.1f}" y="{y + HEIGHT - 6}">{escape(shown)}</text></g>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _lay(call: _Call, depth: int, x: float, scale: float, boxes: list[tuple[int, float, float, str, int]]) -> None:
    for name, below in sorted(call.below.items()):
        width = below.count * scale
        if width >= NARROWEST:
            boxes.append((depth, x, width, name, below.count))
            _lay(below, depth + 1, x, scale, boxes)
        x += width
