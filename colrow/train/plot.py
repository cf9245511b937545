"""The loss curve as a PNG, for those who cannot look at the SVG: drawn by matplotlib, which is an extra and is imported when it draws.

The same picture as curve.py's, which needs no package: every step (light), the running mean (dark), evaluations as dots.
"""

from __future__ import annotations

import math
from pathlib import Path

from .curve import COLORS, Points, smoothed


def draw(path: Path, title: str, points: Points, evaluations: Points = ()) -> None:
    """Writes the picture, whatever the suffix says, and nothing where there are no steps yet."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    points, evaluations = ([p for p in some if math.isfinite(p[1])] for some in (points, evaluations))
    if not points and not evaluations:
        return
    figure = Figure(figsize=(8.6, 3.6), dpi=150, layout="constrained")  # no pyplot: it would choose a window system
    axes = figure.subplots()
    mark = "." if len(points) == 1 else ""
    axes.plot(*_columns(points), color=COLORS[0], linewidth=0.8, alpha=0.35, marker=mark, label="step")
    axes.plot(*_columns(smoothed(points)), color=COLORS[0], linewidth=1.8, label="running mean")
    if evaluations:
        axes.plot(*_columns(evaluations), "o", color="#c33", markersize=5, label="evaluation")
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#ddd")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(path)


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [loss for _, loss in points]
