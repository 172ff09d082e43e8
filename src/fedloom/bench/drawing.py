"""What the figures share: colours that the colour-blind tell apart, and labels at the ends of lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from fedloom.bench.results import MAIN
from fedloom.report.figures import STYLE

_INK, _MUTED, _LINE = "#1a1d21", "#4a525b", "#dcdcd6"

#: The reports' style with colours of its own, for files that stand alone on white.
PAGE_STYLE: dict[Any, Any] = STYLE | {
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _LINE,
    "grid.color": _LINE,
    "axes.labelcolor": _MUTED,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _INK,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
}

#: M. Okabe and K. Ito's palette without its yellow, which is too light for lines; FedWeave has the first.
_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b0568b", "#b87a00", "#3f9fd8", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))


def colours(labels: Sequence[str]) -> dict[str, str]:
    """Return a colour for each label, the same in every figure of a report."""
    others = [label for label in labels if label != MAIN]
    rest = _PALETTE[1:]
    return {MAIN: _PALETTE[0]} | {label: rest[i % len(rest)] for i, label in enumerate(others)}


def spread(values: Sequence[float], gap: float, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """Move values apart, as little as needed, until neighbours are ``gap`` apart; their order stays.

    Values that would overlap form a block, laid out around the mean of its members; blocks that meet are joined.
    Blocks stay between ``low`` and ``high``; where there is not room for all, they pass ``high``.
    """
    blocks: list[list[int]] = []

    def start(block: list[int]) -> float:
        length = gap * (len(block) - 1)
        return max(low, min(sum(values[i] for i in block) / len(block) - length / 2, high - length))

    for index in sorted(range(len(values)), key=lambda i: values[i]):
        blocks.append([index])
        while len(blocks) > 1 and start(blocks[-1]) - start(blocks[-2]) < gap * len(blocks[-2]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    placed = [0.0] * len(values)
    for block in blocks:
        for step, index in enumerate(block):
            placed[index] = start(block) + gap * step
    return placed


def end_labels(figure: Figure, axes: Axes, ends: Mapping[str, tuple[float, float, str]], size: float = 9.5) -> None:
    """Write each line's name at the right of the axes, at the height where it ends; no two on top of each other.

    Args:
        figure: the figure, to lay out.
        axes: where the lines are.
        ends: name → (x, y, colour) of the line's last point.
        size: of the letters, in points.
    """
    texts = [
        axes.annotate(name, (1.03, y), xycoords=("axes fraction", "data"), va="center", color=colour, fontsize=size)
        for name, (_, y, colour) in ends.items()
    ]
    axes.margins(x=0.02)
    figure.draw_without_rendering()  # lays out, so that heights are known
    low, high = axes.get_ylim()
    gap = size * 1.2 * figure.dpi / 72 / axes.get_window_extent().height * (high - low)
    heights = spread([y for _, y, _ in ends.values()], gap, low + gap / 2, high - gap / 2)
    for text, (x, y, colour), height in zip(texts, ends.values(), heights, strict=True):
        text.xy = (1.03, height)
        text.set_y(height)
        axes.annotate("", (1.025, height), (x, y), xycoords=("axes fraction", "data"), textcoords="data",
                      arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6})  # fmt: skip
    axes.set_ylim(low, high)


def point_labels(
    figure: Figure,
    axes: Axes,
    points: Sequence[tuple[float, float, str, str]],
    bars: Sequence[tuple[float, float, float, float]] = (),
    size: float = 9,
) -> None:
    """Write a name beside each point, where it hides the least: other names, points, bars, the end of the axes.

    Args:
        figure: the figure, to lay out.
        axes: where the points are.
        points: (x, y, name, colour).
        bars: (x, y) of the two ends of each error bar, level or upright.
        size: of the letters, in points.
    """
    figure.draw_without_rendering()
    inside = axes.get_window_extent()
    dots = [axes.transData.transform((x, y)) for x, y, _, _ in points]
    middle = sum(y for _, y in dots) / max(1, len(dots))
    taken: list[Any] = []
    strokes = [Bbox(axes.transData.transform([(x0, y0), (x1, y1)])).padded(1) for x0, y0, x1, y1 in bars]

    def hidden(text: Text) -> float:
        box = text.get_window_extent()
        out = not (inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1)
        covered = sum(box.contains(x, y) for x, y in dots) + sum(box.overlaps(stroke) for stroke in strokes)
        return 4 * out + 4 * sum(box.overlaps(other) for other in taken) + covered

    for (x, y, name, colour), (_, height) in zip(points, dots, strict=True):
        text = axes.annotate(name, (x, y), (7, 9), textcoords="offset points", va="center", color=colour, fontsize=size)
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])
        first = 1 if height >= middle else -1  # off its own line: upper points are named above, lower ones below
        places = [(across, first * up) for up in (9, -9, 21, -21, 36, -36) for across in (7, -7)]

        def place(at: tuple[int, int], text: Annotation = text) -> float:
            text.xyann = at
            text.set_horizontalalignment("left" if at[0] > 0 else "right")
            return hidden(text)

        place(min(places, key=place))
        taken.append(text.get_window_extent())
