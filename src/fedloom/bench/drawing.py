"""What the figures share: colours that the colour-blind tell apart, and labels at the ends of lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

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


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Move values apart, as little as needed, until neighbours are ``gap`` apart; their order stays.

    Values that would overlap form a block, laid out around the mean of its members; blocks that meet are joined.
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    blocks: list[list[int]] = []

    def centre(block: list[int]) -> float:
        return sum(values[i] for i in block) / len(block)

    for index in order:
        blocks.append([index])
        while len(blocks) > 1:
            low, high = blocks[-2], blocks[-1]
            room = centre(high) - centre(low) - gap * (len(low) + len(high)) / 2
            if room >= 0:
                break
            blocks[-2:] = [low + high]
    placed = [0.0] * len(values)
    for block in blocks:
        start = centre(block) - gap * (len(block) - 1) / 2
        for step, index in enumerate(block):
            placed[index] = start + gap * step
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
    for text, (x, y, colour), height in zip(
        texts, ends.values(), spread([e[1] for e in ends.values()], gap), strict=True
    ):
        text.xy = (1.03, height)
        text.set_y(height)
        axes.annotate("", (1.025, height), (x, y), xycoords=("axes fraction", "data"), textcoords="data",
                      arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6})  # fmt: skip
    axes.set_ylim(low, high)


def point_labels(figure: Figure, axes: Axes, points: Sequence[tuple[float, float, str, str]], size: float = 9) -> None:
    """Write a name beside each point, towards the middle of the axes; names of neighbours are moved apart in height.

    Args:
        figure: the figure, to lay out.
        axes: where the points are.
        points: (x, y, name, colour).
        size: of the letters, in points.
    """
    figure.draw_without_rendering()
    unit = figure.dpi / 72
    box = axes.get_window_extent()
    at = [axes.transData.transform((x, y)) for x, y, _, _ in points]
    columns: list[list[int]] = []
    for index in sorted(range(len(points)), key=lambda i: at[i][0]):
        near = bool(columns) and at[index][0] - at[columns[-1][-1]][0] < 130 * unit
        columns[-1].append(index) if near else columns.append([index])
    for column in columns:
        heights = spread([float(at[i][1]) for i in column], 1.4 * size * unit)
        for index, height in zip(column, heights, strict=True):
            x, y, name, colour = points[index]
            right = at[index][0] > (box.x0 + box.x1) / 2
            offset = (-9 if right else 9, (height - at[index][1]) / unit + 8)
            axes.annotate(name, (x, y), offset, textcoords="offset points", ha="right" if right else "left",
                          va="center", color=colour, fontsize=size)  # fmt: skip
