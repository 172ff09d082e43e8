"""The paper's figures from a benchmark's results, as SVG and PNG; the same results give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedloom.bench.drawing import DASHES, MARKERS, PAGE_STYLE, colours, end_labels, point_labels
from fedloom.bench.pairing import Paired, below, curves_of, paired, paired_curves, shared_seeds
from fedloom.bench.results import AXES, MAIN, Results, Setting, Stat, per_hundred
from fedloom.bench.tables import routings
from fedloom.report.figures import saved
from fedloom.report.wording import listed, number, visible

#: The two methods whose routing the paper's Figure 2 sets side by side.
ROUTED = (MAIN, "fedlease")


@dataclass(frozen=True)
class Picture:
    """A figure: ``name`` is the file's, ``title`` says what it shows, ``text`` describes it for who cannot see it."""

    name: str
    title: str
    text: str
    svg: bytes
    png: bytes


def all_figures(results: Results) -> list[Picture]:
    """Return every figure that the results can fill."""
    main = results.settings[0]
    found = [
        loss_bars(results, main),
        routing_maps(results, main),
        *(over_axis(results, main, axis) for axis in ("alpha", "mixing")),
        quality_against_time(results, main),
        loss_curves(results, main),
    ]
    return [picture for picture in found if picture is not None]


def hues(results: Results) -> dict[str, str]:
    """Return a colour per label; the main comparison first, so that it does not share any."""
    return colours(sorted(results.labels(), key=results.is_variant))


def caption(results: Results, setting: Setting, label: str, seeds: int) -> str:
    """Return a label's title, how its model routes, and of how many seeds the mean is: ``FedLEASE (soft, n = 1)``."""
    routing = listed(routings(results, setting, label))
    return visible(f"{results.title(label)} ({', '.join([*filter(None, [routing]), f'n = {seeds}'])})")


def loss_bars(results: Results, setting: Setting) -> Picture | None:
    """Draw Table 1's macro losses: bars from 0, and beside them the same numbers magnified, seeds as dots."""
    losses = {label: results.stat(setting, label, lambda c: c.measured("loss")) for label in results.compared(setting)}
    pairs = paired(losses, results.main)
    stats = pairs.shown
    if not stats:
        return None
    labels, hue = list(stats), hues(results)

    def draw(figure: Figure) -> None:
        bars, dots = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": (1, 1.35)})
        for row, label in enumerate(labels):
            found, colour = stats[label], hue[label]
            mean, spread_ = found.mean or 0.0, found.sd or 0.0
            bars.barh(row, mean, height=0.62, color=colour)
            dots.errorbar(mean, row, xerr=spread_ or None, color=colour, capsize=4, linewidth=2, zorder=2)
            dots.plot(mean, row, "|", color=colour, markersize=15, markeredgewidth=2.5, zorder=2)
            dots.plot(found.values, [row] * found.n, "o", color="white", markeredgecolor=colour, markersize=5, zorder=3)
            text = number(mean, 3) + (f" ± {number(found.sd, 3)}" if found.sd is not None else "")
            dots.annotate(text, (1.02, row), xycoords=("axes fraction", "data"), va="center", fontsize=9)
        bars.set_yticks(range(len(labels)), [caption(results, setting, x, stats[x].n) for x in labels])
        bars.invert_yaxis()  # shared: the first method on top
        bars.set_xlabel("macro loss, from 0")
        dots.set_xlabel("magnified: mean ± sd, ○ single seeds")
        dots.margins(x=0.08)
        for axes in (bars, dots):
            axes.grid(axis="y", visible=False)
            axes.grid(axis="x", visible=True)

    text = "; ".join(f"{results.title(label)} {number(found.mean, 3)}" for label, found in stats.items())
    title = f"Macro loss by method, lower is better ({setting.text})"
    return picture_of(
        "table1_loss", title, text, (8, 1.3 + 0.38 * len(labels)), draw, below(results.title, [("", pairs)])
    )


def routing_maps(results: Results, setting: Setting) -> Picture | None:
    """Draw mean gates, task × expert, of FedWeave and FedLEASE side by side (Figure 2), from one seed that both have.

    Experts have no common order over seeds, so a mean over seeds would mean nothing.
    """
    cells = {
        label: {c.seed: c for c in results.of(setting, label) if c.get("routing_matrix")}
        for label in ROUTED
        if label in results.labels(setting)
    }
    cells = {label: by_seed for label, by_seed in cells.items() if by_seed}
    if not cells:
        return None
    common = set.intersection(*(set(by_seed) for by_seed in cells.values()))
    seeds = {label: min(common or by_seed) for label, by_seed in cells.items()}
    gates: dict[str, Mapping[str, Sequence[float]]] = {
        label: {task: row["gate"] for task, row in by_seed[seeds[label]].get("routing_matrix").items()}
        for label, by_seed in cells.items()
    }
    widths = [len(next(iter(rows.values()))) for rows in gates.values()]
    tasks = list(next(iter(gates.values())))

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(gates), squeeze=False, sharey=True, gridspec_kw={"width_ratios": widths})[0]
        for axes, (label, rows) in zip(panels, gates.items(), strict=True):
            values = [list(rows.get(task, [])) for task in tasks]
            experts = len(values[0])
            axes.pcolormesh(range(experts), range(len(tasks)), values, cmap="Blues", vmin=0, vmax=1,
                            edgecolors="white", linewidth=2)  # fmt: skip
            axes.set_title(f"{visible(results.title(label))}, seed {seeds[label]}", fontsize=10.5)
            axes.set_xticks(range(experts), [f"E{m}" for m in range(experts)])
            axes.set_yticks(range(len(tasks)), [visible(task) for task in tasks])
            axes.tick_params(length=0)
            axes.grid(visible=False)
            axes.spines[:].set_visible(False)
            for row, line in enumerate(values):
                for column, gate in enumerate(line):
                    ink = "white" if gate > 0.6 else "#111111"
                    axes.text(column, row, f"{gate:.2f}", ha="center", va="center", color=ink, fontsize=9.5)
        panels[0].invert_yaxis()

    text = "; ".join(
        f"{results.title(label)}: "
        + ", ".join(f"{task} mostly E{max(range(len(row)), key=lambda m: row[m])}" for task, row in rows.items())
        for label, rows in gates.items()
    )
    inches = (1.9 + 0.72 * sum(widths), 1.1 + 0.5 * len(tasks))
    title = f"Mean gate of each expert, per task ({setting.text})"
    if "fedlease" in gates:
        title += f". {results.title('fedlease')}: mean over its clusters' routers, weighted by their examples"
    return picture_of("fig2_routing", title, text, inches, draw)


def over_axis(results: Results, main: Setting, axis: str) -> Picture | None:
    """Draw macro score and loss over an axis with bands of one standard deviation (Figure 3)."""
    same = [s for s in results.settings if s.get(axis) is not None and s.differs(main) <= {axis}]
    same.sort(key=lambda s: (str(type(s.get(axis))), s.get(axis)))
    parts: dict[str, Paired[str, list[tuple[int, Stat]]]] = {}
    for metric in ("score", "loss"):
        points = {label: paired_points(results, same, label, metric) for label in results.labels()}
        if (drawn := paired_lines({k: v for k, v in points.items() if len(v) > 1}, results.main)).shown:
            parts[metric] = drawn
    lines = {metric: part.shown for metric, part in parts.items()}
    if not lines:
        return None
    order, hue = results.labels(), hues(results)

    def draw(figure: Figure) -> None:
        for axes, (metric, found) in zip(_rows(figure, len(lines)), lines.items(), strict=True):
            for label, points in found.items():
                xs, means = [at for at, _ in points], [s.mean or 0.0 for _, s in points]
                draw_line(axes, xs, means, hue[label], order.index(label), main=label == results.main)
                if (edges := band([s for _, s in points])) is not None:
                    axes.fill_between(xs, *edges, color=hue[label], alpha=0.13, linewidth=0)
            axes.set_xticks(range(len(same)), [str(s.get(axis)) for s in same])
            axes.set_ylabel(f"macro {metric}")
            axes.set_xlabel(f"{AXES[axis]} (even steps)")
        for axes, found in zip(figure.axes, lines.values(), strict=True):
            ends = {label: (points[-1][0], points[-1][1].mean or 0.0) for label, points in found.items()}
            said = {k: caption(results, same[found[k][-1][0]], k, found[k][-1][1].n) for k in ends}
            end_labels(figure, axes, {said[k]: (*v, hue[k]) for k, v in ends.items()})

    named = list(dict.fromkeys(results.title(label) for found in lines.values() for label in found))
    banded = any(band([s for _, s in points]) is not None for found in lines.values() for points in found.values())
    title = f"Macro {' and '.join(lines)} over {AXES[axis]}{', band: ± one sd' * banded} ({main.backbone})"
    inches = (7.5, 0.4 + len(lines) * max(2.7, 0.24 * max(map(len, lines.values()))))
    text, note = f"Lines of {', '.join(named)}", below(results.title, list(parts.items()))
    return picture_of(f"fig3_{axis}", title, text, inches, draw, note)


def paired_lines(lines: Mapping[str, Sequence[tuple[int, Stat]]], main: str) -> Paired[str, list[tuple[int, Stat]]]:
    """Return lines of ``paired_points`` over the seeds that they share, without those that are not finite."""
    finite = {label: points for label, points in lines.items() if not any(found.lost for _, found in points)}
    seeds = shared_seeds({label: points[0][1].seeds for label, points in finite.items()}, main)
    over = {label: [(at, found.over(seeds)) for at, found in points] for label, points in finite.items()}
    shown = {label: [(at, s) for at, s in points if s is not None] for label, points in over.items() if points[0][1]}
    return Paired(seeds, shown, tuple(label for label in lines if label not in shown))


def paired_points(results: Results, settings: Sequence[Setting], label: str, metric: str) -> list[tuple[int, Stat]]:
    """Return (index of the setting, measured) of a line, of the seeds that the label has everywhere on it.

    Means over different seeds would show the seeds' difference as a trend. Settings without the label have no point.
    """
    by_seed = [{c.seed: c.measured(metric) for c in results.of(s, label)} for s in settings]
    has = [{seed for seed, v in found.items() if v is not None} for found in by_seed]
    common = set.intersection(*(seeds for seeds in has if seeds)) if any(has) else set()
    places = [at for at, seeds in enumerate(has) if common & seeds]
    return [(at, Stat.by({seed: by_seed[at][seed] for seed in common})) for at in places]


def band(stats: Sequence[Stat]) -> tuple[list[float], list[float]] | None:
    """Return mean − sd and mean + sd of a line's points; one seed has none."""
    pairs = [(s.mean, s.sd) for s in stats if s.mean is not None and s.sd is not None]
    if len(pairs) < len(stats):
        return None
    return [mean - sd for mean, sd in pairs], [mean + sd for mean, sd in pairs]


def quality_against_time(results: Results, setting: Setting) -> Picture | None:
    """Draw top-1, top-2 and soft routing: score (or else loss) over seconds per 100 examples (Figure 4)."""
    metric, what = ("score", "generation")
    pairs = _quality_points(results, setting, metric, what)
    if not pairs.shown:
        metric, what = ("loss", "loss")
        pairs = _quality_points(results, setting, metric, what)
    if not pairs.shown:
        return None
    points, hue = pairs.shown, hues(results)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        bars = []
        for label, found in points.items():
            xs, ys = [t.mean or 0.0 for t, _ in found.values()], [q.mean or 0.0 for _, q in found.values()]
            axes.plot(xs, ys, color=hue[label], linewidth=1, alpha=0.5)
            for (seconds, quality), x, y in zip(found.values(), xs, ys, strict=True):
                axes.errorbar(x, y, xerr=seconds.sd, yerr=quality.sd, color=hue[label], capsize=3, linewidth=1.2)
                axes.plot(x, y, "o", color=hue[label], markersize=8 if label == results.main else 6)
                across, up = seconds.sd or 0.0, quality.sd or 0.0
                bars += [(x - across, y, x + across, y), (x, y - up, x, y + up)]
        axes.margins(0.16)
        named = [(x.mean or 0.0, y.mean or 0.0, f"{visible(results.title(label))} {mode} (n = {y.n})", hue[label])
                 for label, found in points.items() for mode, (x, y) in found.items()]  # fmt: skip
        point_labels(figure, axes, named, bars)
        axes.set_xlabel(f"{what}, seconds per 100 test examples")
        axes.set_ylabel(f"macro {metric}")

    text = "; ".join(
        f"{results.title(label)} {mode}: {metric} {number(q.mean, 3)} at {number(t.mean, 2)} s"
        for label, found in points.items()
        for mode, (t, q) in found.items()
    )
    title = f"One expert or several: macro {metric} against time, ± one sd ({setting.text})"
    return picture_of("fig4_routing_cost", title, text, (7, 4.4), draw, below(results.title, [("", pairs)]))


def loss_curves(results: Results, setting: Setting) -> Picture | None:
    """Draw macro test loss over the rounds, mean over seeds."""
    lines = paired_curves(curves_of(results, setting, results.compared(setting), "curve"), results.main)
    if not lines.shown:
        return None
    order, hue, n = results.labels(), hues(results), len(lines.seeds)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for label, points in lines.shown.items():
            rounds, losses = [at for at, _ in points], [loss for _, loss in points]
            draw_line(axes, rounds, losses, hue[label], order.index(label), main=label == results.main)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("round")
        axes.set_ylabel("macro test loss")
        ends = {caption(results, setting, x, n): (*points[-1], hue[x]) for x, points in lines.shown.items()}
        end_labels(figure, axes, ends)

    text = "; ".join(
        f"{results.title(label)} {number(points[0][1], 3)} → {number(points[-1][1], 3)}"
        for label, points in lines.shown.items()
    )
    title = f"Macro test loss over the rounds, mean over seeds ({setting.text})"
    inches = (7.5, max(3.8, 1.0 + 0.24 * len(lines.shown)))
    return picture_of("loss_curves", title, text, inches, draw, below(results.title, [("", lines)]))


def _quality_points(
    results: Results, setting: Setting, metric: str, what: str
) -> Paired[str, dict[str, tuple[Stat, Stat]]]:
    """Return label → mode → (seconds per 100 examples, quality) of labels with several modes, variants left out.

    A mode that lacks one of the seeds has no point.
    """
    points: dict[str, dict[str, tuple[Stat, Stat]]] = {}
    for label in results.compared(setting):
        found = {
            mode: (
                results.stat(setting, label, lambda c, m=mode: per_hundred(c, m, what)),  # type: ignore[misc]
                results.stat(setting, label, lambda c, m=mode: c.measured(metric, mode=m)),  # type: ignore[misc]
            )
            for mode in results.modes(setting, label)
        }
        found = {mode: pair for mode, pair in found.items() if pair[0].n and pair[1].n}
        if len(found) > 1:
            points[label] = found
    finite = {
        label: found for label, found in points.items() if not any(s.lost for pair in found.values() for s in pair)
    }
    seeds = shared_seeds(
        {x: set.intersection(*(set(s.seeds) for pair in f.values() for s in pair)) for x, f in finite.items()},
        results.main,
    )
    shown: dict[str, dict[str, tuple[Stat, Stat]]] = {}
    for label, found in finite.items():
        for mode, (seconds, quality) in found.items():
            if (x := seconds.over(seeds)) and (y := quality.over(seeds)):
                shown.setdefault(label, {})[mode] = (x, y)
    return Paired(seeds, shown, tuple(label for label in points if label not in shown))


def _rows(figure: Figure, count: int) -> list[Axes]:
    return list(figure.subplots(count, 1, squeeze=False)[:, 0])


def draw_line(axes: Axes, xs: Sequence[Any], ys: Sequence[Any], colour: str, index: int, *, main: bool) -> None:
    """Draw a line told apart by colour, dash and marker; the main method's is the thick one."""
    axes.plot(xs, ys, color=colour, linewidth=2.6 if main else 1.5, marker=MARKERS[index % len(MARKERS)],
              markersize=6 if main else 4.5, linestyle="-" if main else DASHES[index % len(DASHES)],
              zorder=3 if main else 2)  # fmt: skip


def picture_of(
    name: str, title: str, text: str, inches: tuple[float, float], draw: Callable[[Figure], None], note: str = ""
) -> Picture:
    """Draw a figure under its title and above a note, which belongs to the text, too."""
    with rc_context(PAGE_STYLE):
        figure = Figure(figsize=inches, layout="constrained", facecolor="white")
        figure.suptitle(visible(title), fontsize=11, fontweight="bold", x=0.01, ha="left", wrap=True)
        if note:
            figure.supxlabel(visible(note), fontsize=8.5, x=0.01, ha="left", wrap=True)
        draw(figure)
        return Picture(name, title, f"{text}. {note}" if note else text, saved(figure, "svg"), saved(figure, "png"))
