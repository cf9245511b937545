"""A loss curve that one can look at: as lines of text for a terminal, as an SVG, and as a page of HTML. No dependencies."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

Points = Sequence[tuple[int, float]]  # (step, loss)
LEVELS = " ▁▂▃▄▅▆▇█"
WIDTH, HEIGHT, LEFT = 860, 360, 60
COLORS = ("#247", "#c60", "#283", "#92a")


def smoothed(points: Points, part: float = 0.9) -> list[tuple[int, float]]:
    """The running mean in which each step counts 1 - `part`, started without bias."""
    out, mean, weight = [], 0.0, 0.0
    for step, loss in points:
        mean, weight = part * mean + (1 - part) * loss, part * weight + (1 - part)
        out.append((step, mean / weight))
    return out


def terminal(points: Points, width: int = 60, height: int = 8) -> str:
    """The curve as text: `height` lines, the largest and smallest loss at the left, first and last step below."""
    points = [p for p in points if math.isfinite(p[1])]
    if len(points) < 2:
        return ""
    columns = min(width, len(points))
    means = []
    for column in range(columns):
        part = [loss for _, loss in points[column * len(points) // columns : (column + 1) * len(points) // columns]]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    filled = [round((m - low) / ((high - low) or 1) * (height * 8 - 1)) + 1 for m in means]
    lines = []
    for line in reversed(range(height)):
        label = f"{high:8.3f}" if line == height - 1 else f"{low:8.3f}" if line == 0 else " " * 8
        lines.append(f"{label} │" + "".join(LEVELS[min(8, max(0, n - 8 * line))] for n in filled))
    first, last = f"{points[0][0]}", f"{points[-1][0]}"
    return "\n".join([*lines, " " * 9 + "└" + "─" * columns, " " * 10 + first + last.rjust(max(1, columns - len(first)))])


def picture(curves: Mapping[str, Points], evaluations: Points = ()) -> str:
    """An SVG, complete in itself: of each curve every step (light) and the running mean (dark), evaluations as dots. "" without steps."""
    finite = {name: [p for p in points if math.isfinite(p[1])] for name, points in curves.items()}
    dots = [p for p in evaluations if math.isfinite(p[1])]
    every = [p for points in (*finite.values(), dots) for p in points]
    if not every:
        return ""
    losses, steps = [loss for _, loss in every], [step for step, _ in every]
    low, high, first, last = min(losses), max(losses), min(steps), max(steps)

    def at(point: tuple[int, float]) -> tuple[float, float]:
        x = LEFT + (point[0] - first) / ((last - first) or 1) * (WIDTH - LEFT - 20)
        y = 20 + (high - point[1]) / ((high - low) or 1) * (HEIGHT - 60)
        return round(x, 1), round(y, 1)

    def path(of: Points, color: str, style: str) -> str:
        corners = " ".join(f"{x},{y}" for x, y in map(at, of))
        return f'<polyline points="{corners}" fill="none" stroke="{color}" {style}/>'

    marks = []
    for n in range(5):
        loss, step = low + (high - low) * n / 4, first + (last - first) * n // 4
        y, x = at((first, loss))[1], at((step, low))[0]
        marks.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        marks.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{loss:.3f}</text>')
        marks.append(f'<text x="{x}" y="{HEIGHT - 14}" text-anchor="middle">{step}</text>')
    for n, ((name, points), color) in enumerate(zip(finite.items(), COLORS * len(finite), strict=False)):
        dashes = 'stroke-dasharray="7 5"' if n else ""  # a curve that lies on another one leaves it to be seen
        marks.append(path(points, color, f'stroke-width="1" stroke-opacity="0.35" {dashes}'))
        marks.append(path(smoothed(points), color, f'stroke-width="2.5" {dashes}'))
        if len(finite) > 1:
            marks.append(f'<text x="{WIDTH - 30}" y="{36 + 18 * n}" text-anchor="end" style="fill:{color}">{html.escape(name)}</text>')
    marks += [f'<circle cx="{x}" cy="{y}" r="4" fill="#c33"><title>evaluation</title></circle>' for x, y in map(at, dots)]
    style = "<style>text{font:12px sans-serif;fill:#555}</style>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="loss by step">'
    return f'{head}{style}<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{"".join(marks)}</svg>'


def page(title: str, points: Points, evaluations: Points = (), lines: Sequence[str] = ()) -> str:
    """A page of HTML: the picture, and `lines` of text below."""
    drawn = picture({"loss": points}, evaluations)
    if not drawn:
        return f"<!doctype html><title>{html.escape(title)}</title><p>no steps yet"
    words = "".join(f"<p>{html.escape(line)}" for line in lines)
    return (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>body{{font:15px sans-serif;margin:2em;color:#222}}</style><h1>{html.escape(title)}</h1>{drawn}"
        f"<p>Loss by step: each step (light), running mean (dark), evaluations (dots).{words}\n"
    )
