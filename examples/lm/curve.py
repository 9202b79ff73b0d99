"""A loss curve as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

__all__ = ["write_curve"]

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 56, 52  # margins round the plot
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #44546a }
  .title { font-size: 16px; font-weight: 600; fill: #1f2937 }
  .grid { stroke: #e5e9f0 }
  .axis { stroke: #94a3b8 }
  .train { fill: none; stroke: #93b4d8; stroke-width: 1.2 }
  .held { fill: none; stroke: #d9480f; stroke-width: 2.2; stroke-linejoin: round }
  .dot { fill: #d9480f }
"""


def write_curve(path: Path, title: str, train: Points, held_out: Points) -> None:
    """Write both curves, given as points (step, loss), to `path`; makes its folder. Raises `OSError` where that can't be."""
    last = max(step for step, _ in [*train, *held_out])
    top = max(loss for _, loss in [*train, *held_out])
    steps, losses = _ticks(last), _ticks(top)
    across = max(last, steps[-1]) or 1
    up = losses[-1] or 1

    def x(step: float) -> float:
        return round(LEFT + step / across * (WIDTH - LEFT - RIGHT), 1)

    def y(loss: float) -> float:
        return round(HEIGHT - BOTTOM - loss / up * (HEIGHT - TOP - BOTTOM), 1)

    def line(points: Points) -> str:
        return " ".join(f"{x(step)},{y(loss)}" for step, loss in points)

    end = WIDTH - RIGHT
    parts = [f'<text class="title" x="{LEFT}" y="28">{escape(title)}</text>']
    for loss in losses:
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y(loss)}" x2="{end}" y2="{y(loss)}"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{y(loss) + 4}" text-anchor="end">{loss:g}</text>')
    for step in steps:
        parts.append(f'<text x="{x(step)}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{step:g}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{y(0)}" x2="{end}" y2="{y(0)}"/>')
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{y(0)}"/>')
    parts.append(f'<text x="{(LEFT + end) / 2}" y="{HEIGHT - 12}" text-anchor="middle">step</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text transform="translate(20 {middle}) rotate(-90)" text-anchor="middle">loss (nats per character)</text>')
    parts.append(f'<polyline class="train" points="{line(train)}"/>')
    parts.append(f'<polyline class="held" points="{line(held_out)}"/>')
    parts += [f'<circle class="dot" cx="{x(step)}" cy="{y(loss)}" r="3"/>' for step, loss in held_out]
    for row, (name, label) in enumerate([("train", "training"), ("held", "held out")]):
        height = TOP + 12 + 20 * row
        parts.append(f'<line class="{name}" x1="{end - 110}" y1="{height}" x2="{end - 82}" y2="{height}"/>')
        parts.append(f'<text x="{end - 74}" y="{height + 4}">{label}</text>')
    body = "\n".join(parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">\n'
        f'<style>{STYLE}</style>\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n',
        encoding="utf-8",
    )


def _ticks(largest: float) -> list[float]:
    """Round numbers from 0 to `largest` or just above it, about six of them."""
    rough = max(largest, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(step * index, 10) for index in range(math.ceil(largest / step) + 1)]
