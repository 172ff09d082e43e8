"""Figures by matplotlib: curves as inline SVG that takes its colours from the page, and the heat map for a README."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedloom.report.wording import number, visible

#: Stand-ins that matplotlib draws with; the page's style sheet gives the real colours, for light and dark.
INK, MUTED, LINE, FIRST, SECOND = "#010101", "#020202", "#030303", "#040404", "#050505"
VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line", FIRST: "--accent", SECOND: "--accent-2"}

#: ``svg.hashsalt`` makes element names repeatable, ``fonttype`` none keeps text as text.
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fedloom",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "text.color": INK,
    "text.parse_math": False,
    "lines.solid_capstyle": "round",
}

Points = Sequence[tuple[int, float | None]]


def loss_curve(name: str, title: str, points: Points, baseline: float | None) -> Markup:
    """Draw one loss over the rounds, with the bare backbone's loss as a dashed line."""

    def draw(axes: Axes) -> None:
        if baseline is not None and math.isfinite(baseline):
            axes.axhline(baseline, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
        axes.plot(*_finite(points), color=FIRST, linewidth=2, marker="o", markersize=3.5 if len(points) < 15 else 0)
        low, high = axes.get_ylim()
        # A curve that hardly moves must not look as if it did: the axis spans 2 % of the loss at least.
        room = max(0.0, 0.01 * abs(low + high) - (high - low)) / 2
        axes.set_ylim(low - room, high + room)

    return _inline(name, title, (2.7, 1.4), draw, font=9.5)


def training_curve(name: str, title: str, mean: Points, clients: Mapping[str, Points]) -> Markup:
    """Draw the mean training loss over thin lines of the clients."""

    def draw(axes: Axes) -> None:
        for points in clients.values():
            marker = "." if len(points) == 1 else None  # a line of one point is invisible
            axes.plot(*_finite(points), color=MUTED, linewidth=0.8, alpha=0.45, marker=marker)
        axes.plot(*_finite(mean), color=FIRST, linewidth=2.2, marker="o", markersize=3.5 if len(mean) < 15 else 0)

    return _inline(name, title, (4.4, 2.3), draw)


def traffic_bars(name: str, title: str, rounds: Sequence[int], up: Sequence[int], down: Sequence[int]) -> Markup:
    """Draw bytes to the server above the axis and bytes to the clients below it."""
    unit, scale = next(
        ((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if max(*up, *down) >= s), ("B", 1)
    )

    def draw(axes: Axes) -> None:
        axes.bar(rounds, [b / scale for b in up], color=FIRST, width=0.72)
        axes.bar(rounds, [-b / scale for b in down], color=SECOND, width=0.72)
        axes.axhline(0, color=MUTED, linewidth=0.8)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{abs(value):g}"))
        axes.set_ylabel(unit)

    return _inline(name, title, (4.4, 2.3), draw)


def heat_map(matrix: Mapping[str, Mapping[str, Sequence[float]]], kind: str) -> bytes:
    """Draw mean gate and top-1 share, task × expert, with the number in every cell.

    Args:
        matrix: task → ``gate`` and ``top1``, each (M,).
        kind: ``svg`` or ``png``.
    """
    tasks = list(matrix)
    experts = len(next(iter(matrix.values()))["gate"])
    style = STYLE | {"axes.grid": False, "axes.edgecolor": "white", "xtick.major.size": 0, "axes.spines.bottom": False}
    style |= {"font.size": 9} | {f"{axis}tick.{key}": "#333333" for axis in "xy" for key in ("color", "labelcolor")}
    with rc_context(style):
        figure = Figure(figsize=(2.6 + 2 * max(0.62 * experts, 1.7), 1.1 + 0.42 * len(tasks)), layout="constrained")
        figure.set_facecolor("white")
        for axes, (key, title) in zip(
            figure.subplots(1, 2, sharey=True), (("gate", "mean gate"), ("top1", "share sent to it (top-1)"))
        ):
            values = [list(matrix[task][key]) for task in tasks]
            centres = (range(experts), range(len(tasks)))
            axes.pcolormesh(*centres, values, cmap="Blues", vmin=0, vmax=1, edgecolors="white", linewidth=2)
            axes.set_title(title, color="#111111", fontsize=10)
            axes.set_xticks(centres[0], [f"E{m}" for m in centres[0]])
            axes.set_yticks(centres[1], [visible(task) for task in tasks])
            for row, line in enumerate(values):
                for column, value in enumerate(line):
                    colour = "white" if value > 0.65 else "#111111"
                    axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
        axes.invert_yaxis()  # shared: the first task on top
        return saved(figure, kind)


def _finite(points: Points) -> tuple[list[int], list[float]]:
    """Return rounds and values without what was not measured or is not a number."""
    there = [(r, v) for r, v in points if v is not None and math.isfinite(v)]
    return [r for r, _ in there], [v for _, v in there]


def _inline(
    name: str, title: str, inches: tuple[float, float], draw: Callable[[Axes], None], font: float = 9
) -> Markup:
    with rc_context(STYLE | {"font.size": font}):
        figure = Figure(figsize=inches, layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        draw(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, min_n_ticks=3))
        axes.margins(x=0.03)
        axes.set_xlabel("round")
        svg = saved(figure, "svg").decode()
    return Markup(_for_page(svg, name, title))  # matplotlib's own text; the title is escaped


def saved(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    # No date and no version: the same run gives the same bytes.
    empty = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    figure.savefig(buffer, format=kind, dpi=200, metadata=empty)
    return buffer.getvalue()


def _for_page(svg: str, name: str, title: str) -> str:
    """Make matplotlib's SVG part of a page: no namespaces, unique names, the page's colours and font, a title."""
    box = re.search(r'viewBox="[^"]+"', svg)
    assert box is not None
    body = svg[svg.index(">", box.end()) + 1 :]
    body = re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", body)
    for stand_in, variable in VARIABLES.items():
        body = body.replace(stand_in, f"var({variable})")
    return f'<svg {box.group()} role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>{body}'


def describe(what: str, points: Points) -> str:
    """Say what a curve shows: the alternative text."""
    rounds, values = _finite(points)
    if not values:
        return f"{what}: not measured."
    return f"{what}: {number(values[0], 3)} at round {rounds[0]}, {number(values[-1], 3)} at round {rounds[-1]}."
