"""The FC-MoE paper's figures, for methods that train a backbone's own experts, and how much their experts conflict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedloom.bench.drawing import end_labels
from fedloom.bench.fcmoe_tables import (
    TARGET,
    ablated_labels,
    global_accuracy,
    local,
    local_accuracy,
    native_labels,
    native_settings,
    rounds_to_target,
    targets,
)
from fedloom.bench.figures import Picture, caption, draw_line, hues, picture_of
from fedloom.bench.results import NATIVE_MAIN, Cell, Results, Setting, Stat
from fedloom.report.wording import number, visible

Points = list[tuple[int, float]]


def fcmoe_figures(results: Results) -> list[Picture]:
    """Return every figure that the results can fill; none without a method for native experts."""
    settings = native_settings(results)
    if not settings:
        return []
    found = [rounds_bars(results, settings), local_bars(results, settings), conflict_lines(results, settings)]
    for setting in settings:
        found += [accuracy_curves(results, setting), ablation_bars(results, setting)]
    return [picture for picture in found if picture is not None]


def rounds_bars(results: Results, settings: Sequence[Setting]) -> Picture | None:
    """Draw Figure 3a: rounds until the global model has nearly FedAvg's last accuracy, for every setting."""
    found: dict[str, list[Stat | None]] = {}
    shown = [s for s in settings if targets(results, s)]
    for at, setting in enumerate(shown):
        for label in native_labels(results, setting):
            by_seed = rounds_to_target(results, setting, label)
            if by_seed:
                found.setdefault(label, [None] * len(shown))[at] = Stat.of(by_seed.values())
    if not found:
        return None

    most = max(stat.n for stats in found.values() for stat in stats if stat is not None)

    def show(stat: Stat) -> str:
        return number(stat.mean, 1) + _fewer(stat, most) if stat.n else "never"

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        grouped_bars(results, axes, found, show)
        _name_groups(axes, shown)
        axes.set_ylabel("rounds")

    text = "; ".join(f"{results.title(label)}: {_said(stats, shown)}" for label, stats in found.items())
    title = f"Rounds to {TARGET:.0%} of FedAvg's last accuracy, mean of the seeds that reach it, ± one sd"
    return picture_of("fcmoe_fig3a_rounds", title, text, _inches(len(shown), len(found)), draw)


def local_bars(results: Results, settings: Sequence[Setting]) -> Picture | None:
    """Draw Figure 3b: accuracy of clients' own models: mean, spread over clients, worst client; means over seeds."""
    shown = [s for s in settings if any(_means(results, s, local_accuracy).values())]
    found: dict[str, list[Stat | None]] = {}
    spreads: dict[str, list[Stat | None]] = {}
    worsts: dict[str, list[Stat | None]] = {}
    for at, setting in enumerate(shown):
        for label, mean in _means(results, setting, local_accuracy).items():
            for place, stat in (
                (found, mean),
                (spreads, results.stat(setting, label, local("spread"))),
                (worsts, results.stat(setting, label, local("worst"))),
            ):
                place.setdefault(label, [None] * len(shown))[at] = stat
    if not found:
        return None
    most = max(stat.n for stats in found.values() for stat in stats if stat is not None)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        places = grouped_bars(
            results, axes, found, lambda s: number(s.mean or 0.0, 2) + _fewer(s, most), errors=spreads
        )
        for label, stats in worsts.items():
            points = [(x, s.mean) for x, s in zip(places[label], stats, strict=True) if s is not None]
            axes.plot(*zip(*points, strict=True), "v", color="#1a1d21", markersize=5, linestyle="none")
        _name_groups(axes, shown)
        axes.set_ylabel("local accuracy")

    text = "; ".join(f"{results.title(label)}: {_said(stats, shown)}" for label, stats in found.items())
    title = "Accuracy of clients' own models at home: mean, ± sd over clients, ▼ worst client (means over seeds)"
    return picture_of("fcmoe_fig3b_local", title, text, _inches(len(shown), len(found)), draw)


def ablation_bars(results: Results, setting: Setting) -> Picture | None:
    """Draw Figure 4: accuracy of FC-MoE and of its ablations, over the rounds and at the end."""
    labels = ablated_labels(results, setting)
    finals = {label: results.stat(setting, label, global_accuracy) for label in labels}
    homes = {label: results.stat(setting, label, local_accuracy) for label in labels}
    bars: dict[str, list[Stat | None]] = {label: [finals[label], homes[label]] for label in labels if finals[label].n}
    if not bars:
        return None
    lines = score_curves(results, setting, list(bars))

    def draw(figure: Figure) -> None:
        panels = list(figure.subplots(1, 2, squeeze=False, gridspec_kw={"width_ratios": (1, 1.2)})[0])
        if lines:
            _draw_curves(results, setting, figure, panels[0], lines)
        panels[0].set_title("global model over the rounds", fontsize=10)
        grouped_bars(results, panels[1], bars, lambda s: number(s.mean or 0.0, 3), wide=2)
        panels[1].set_xticks((0, 1), ["test accuracy", "local accuracy"])
        panels[1].set_title("at the end, ± one sd over seeds", fontsize=10)

    text = "; ".join(f"{results.title(label)} {number(finals[label].mean, 3)}" for label in bars)
    title = f"FC-MoE without one of its parts ({setting.text})"
    return picture_of(f"fcmoe_fig4_ablations_{setting.slug}", title, text, (11.5, 4.6), draw)


def accuracy_curves(results: Results, setting: Setting) -> Picture | None:
    """Draw the global model's accuracy over the rounds, mean over seeds; what Figure 3a is read from."""
    lines = score_curves(results, setting, native_labels(results, setting))
    if not lines:
        return None

    def draw(figure: Figure) -> None:
        _draw_curves(results, setting, figure, figure.subplots(), lines)

    text = "; ".join(
        f"{results.title(label)} {number(points[0][1], 3)} → {number(points[-1][1], 3)}"
        for label, points in lines.items()
    )
    title = f"Test accuracy of the global model over the rounds, mean over seeds ({setting.text})"
    return picture_of(f"fcmoe_accuracy_{setting.slug}", title, text, (7.5, 3.8), draw)


def conflict_lines(results: Results, settings: Sequence[Setting]) -> Picture | None:
    """Draw, for every α, how many updates of experts oppose their consensus under FC-MoE, and their mean cosine."""
    lines: dict[int, dict[Setting, Points]] = {1: {}, 2: {}}
    for setting in settings:
        cells = results.of(setting, NATIVE_MAIN)
        for index, found in lines.items():
            points = _mean_points([[(line[0], line[index]) for line in c.get("conflict") or []] for c in cells])
            if len(points) > 1:
                found[setting] = points
    if not lines[1]:
        return None
    order = list(lines[1])

    def draw(figure: Figure) -> None:
        panels = list(figure.subplots(2, 1, sharex=True))
        for axes, (index, found) in zip(panels, lines.items(), strict=True):
            ends = {}
            for setting, points in found.items():
                at = order.index(setting)
                colour = _SHADES[at % len(_SHADES)]
                xs, ys = [x for x, _ in points], [y for _, y in points]
                draw_line(axes, xs, ys, colour, at, main=False)
                runs = sum(bool(c.get("conflict")) for c in results.of(setting, NATIVE_MAIN))
                ends[visible(f"{_group(setting, order)} (n = {runs})")] = (*points[-1], colour)
            axes.set_ylabel({1: "share in conflict", 2: "mean cosine"}[index])
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            end_labels(figure, axes, ends)
        panels[-1].set_xlabel("round")

    text = "; ".join(
        f"{s.text}: share {number(points[0][1], 2)} → {number(points[-1][1], 2)}" for s, points in lines[1].items()
    )
    title = "Updates of an expert against their consensus, over pairs of client and expert (FC-MoE, mean over seeds)"
    return picture_of("fcmoe_conflict", title, text, (7.5, 5.2), draw)


def grouped_bars(
    results: Results,
    axes: Axes,
    found: Mapping[str, Sequence[Stat | None]],
    show: Callable[[Stat], str],
    errors: Mapping[str, Sequence[Stat | None]] | None = None,
    wide: int = 4,
) -> dict[str, list[float]]:
    """Draw a group of bars per place in the sequences and a bar in it per label; return label → centres.

    The legend says of how many seeds a label's bars are.

    Args:
        found: label → for each group, what is drawn; None leaves a gap.
        show: what stands above a bar.
        errors: label → for each group, a length whose mean is drawn as ± line; default the standard deviation.
        wide: most names beside each other in the legend.
    """
    hue, width = hues(results), 0.8 / len(found)
    places: dict[str, list[float]] = {}
    for index, (label, stats) in enumerate(found.items()):
        places[label] = [group - 0.4 + (index + 0.5) * width for group in range(len(stats))]
        for at, (x, stat) in enumerate(zip(places[label], stats, strict=True)):
            if stat is None:
                continue
            other = errors[label][at] if errors else None
            error = other.mean if other else stat.sd
            axes.bar(x, stat.mean or 0.0, width=0.9 * width, color=hue[label])
            if error:
                axes.errorbar(x, stat.mean or 0.0, yerr=error, color="#1a1d21", capsize=3, linewidth=1)
            axes.annotate(show(stat), (x, (stat.mean or 0.0) + (error or 0.0)), (0, 3), textcoords="offset points",
                          ha="center", va="bottom", fontsize=8)  # fmt: skip
        axes.bar(0, 0, color=hue[label], label=visible(f"{results.title(label)} (n = {_counts(stats)})"))
    axes.margins(y=0.12)
    axes.legend(fontsize=9, frameon=False, ncols=min(wide, len(found)), loc="upper center", bbox_to_anchor=(0.5, -0.12))
    return places


def _fewer(stat: Stat, most: int) -> str:
    return f" (n = {stat.n})" if stat.n < most else ""


def _counts(stats: Sequence[Stat | None]) -> str:
    """Return of how many seeds a label's bars are: ``3``, or ``1–3`` where they differ."""
    found = [stat.n for stat in stats if stat is not None]
    return f"{min(found)}–{max(found)}" if min(found) < max(found) else str(found[0])


def score_curves(results: Results, setting: Setting, labels: Sequence[str]) -> dict[str, Points]:
    """Return label → (round, mean accuracy over seeds), where it was measured more than once."""
    lines = {}
    for label in labels:
        curves = [[(r, v) for r, v in c.get("score_curve") or []] for c in results.of(setting, label)]
        points = _mean_points([curve for curve in curves if curve])
        if len(points) > 1:
            lines[label] = points
    return lines


#: Settings are in the order of α, so they get shades of one hue and not the methods' colours.
_SHADES = ("#08306b", "#2f7fbf", "#7fb2d9", "#8c2d04", "#d9661f", "#f0a868")


def _draw_curves(results: Results, setting: Setting, figure: Figure, axes: Axes, lines: Mapping[str, Points]) -> None:
    order, hue = results.labels(), hues(results)
    for label, points in lines.items():
        xs, ys = [x for x, _ in points], [y for _, y in points]
        draw_line(axes, xs, ys, hue[label], order.index(label), main=label == NATIVE_MAIN)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy")
    runs = {label: sum(bool(c.get("score_curve")) for c in results.of(setting, label)) for label in lines}
    end_labels(
        figure, axes, {caption(results, setting, k, runs[k]): (*points[-1], hue[k]) for k, points in lines.items()}
    )


def _mean_points(curves: Sequence[Sequence[tuple[float, float | None]]]) -> Points:
    """Return the mean over curves at each round that all of them have."""
    by_round: dict[int, list[float]] = {}
    for curve in curves:
        for at, found in curve:
            if found is not None:
                by_round.setdefault(int(at), []).append(found)
    return [(at, sum(v) / len(v)) for at, v in sorted(by_round.items()) if len(v) == len(curves)]


def _means(results: Results, setting: Setting, get: Callable[[Cell], float | None]) -> dict[str, Stat]:
    found = {label: results.stat(setting, label, get) for label in native_labels(results, setting)}
    return {label: stat for label, stat in found.items() if stat.n}


def _group(setting: Setting, settings: Sequence[Setting]) -> str:
    """Return what tells a setting from the others shown."""
    parts = [setting.backbone] if len({s.backbone for s in settings}) > 1 else []
    parts += [str(setting.get("tasks"))] if len({s.get("tasks") for s in settings}) > 1 else []
    return ", ".join([*parts, f"α = {setting.get('alpha')}"])


def _name_groups(axes: Axes, settings: Sequence[Setting]) -> None:
    axes.set_xticks(range(len(settings)), [visible(_group(s, settings)) for s in settings])


def _said(stats: Sequence[Stat | None], settings: Sequence[Setting]) -> str:
    said = [(_group(s, settings), stat) for s, stat in zip(settings, stats, strict=True) if stat is not None]
    return ", ".join(f"{number(stat.mean, 2) if stat.n else 'never'} at {name}" for name, stat in said)


def _inches(groups: int, bars: int) -> tuple[float, float]:
    return max(6.0, 1.5 + 0.5 * groups * bars), 4.2
