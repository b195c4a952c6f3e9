"""Milliseconds a step by batch, a line a context, as SVG: solid measured, dashed the roofline."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b")
_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 240, 46, 30


class Cell(NamedTuple):
    model: str
    batch: int
    context: int
    ms: float
    roofline_ms: float


class _Axis(NamedTuple):
    """Logarithmic, from low to high, over `length` from `start`; a negative length goes up."""

    low: float
    high: float
    start: float
    length: float

    def __call__(self, value: float) -> float:
        span = math.log(self.high / self.low) or 1.0
        return self.start + self.length * math.log(value / self.low) / span


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def _line(points: Sequence[tuple[float, float]], colour: str, dashed: bool) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>'


def _panel(cells: list[Cell], left: float, limits: tuple[float, float]) -> list[str]:
    batches = sorted({c.batch for c in cells})
    x = _Axis(batches[0], max(batches[-1], 2 * batches[0]), left, _WIDTH - 20)
    y = _Axis(*limits, _TOP + _HEIGHT, -_HEIGHT)
    parts = [_text(left + _WIDTH / 2, _TOP - 12, cells[0].model)]
    parts.append(f'<rect x="{left}" y="{_TOP}" width="{_WIDTH - 20}" height="{_HEIGHT}" '
                 'fill="none" stroke="#999"/>')  # fmt: skip
    parts += [_text(x(b), _TOP + _HEIGHT + 14, str(b)) for b in batches]
    for power in range(math.ceil(math.log2(limits[0])), math.floor(math.log2(limits[1])) + 1):
        at = y(2.0**power)
        parts.append(f'<path d="M{left} {at:.1f}h{_WIDTH - 20}" stroke="#eee"/>')
        parts.append(_text(left - 4, at + 4, f"{2.0**power:g}", "end"))
    for i, context in enumerate(sorted({c.context for c in cells})):
        line = sorted(c for c in cells if c.context == context)
        colour = _COLOURS[i % len(_COLOURS)]
        parts.append(_line([(x(c.batch), y(c.ms)) for c in line], colour, False))
        parts.append(_line([(x(c.batch), y(c.roofline_ms)) for c in line], colour, True))
        parts += [f'<circle cx="{x(c.batch):.1f}" cy="{y(c.ms):.1f}" r="2.5" fill="{colour}"/>'
                  for c in line]  # fmt: skip
        parts.append(_text(left + 8, _TOP + 14 + 13 * i, f"{context:,}", "start", colour))
    return parts


def write_svg(cells: Sequence[Cell], path: Path) -> None:
    """A panel a model, with one scale of time."""
    models = list(dict.fromkeys(c.model for c in cells))
    times = [t for c in cells for t in (c.ms, c.roofline_ms)]
    limits = min(times) / 1.2, max(times) * 1.2
    width = _LEFT + len(models) * (_WIDTH + 20)
    height = _TOP + _HEIGHT + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, model in enumerate(models):
        of_model = [c for c in cells if c.model == model]
        parts += _panel(of_model, _LEFT + i * (_WIDTH + 20), limits)
    parts.append(_text(width / 2, height - 6,
                       "requests; ms a step by context, dashed: the roofline"))  # fmt: skip
    path.write_text("\n".join([*parts, "</svg>", ""]))
