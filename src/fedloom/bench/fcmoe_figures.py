"""The FC-MoE paper's figures, for methods that train a backbone's own experts, and how much their experts conflict."""

from __future__ import annotations

import math
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
    untargeted,
)
from fedloom.bench.figures import Picture, caption, draw_line, hues, picture_of
from fedloom.bench.pairing import Paired, Points, below, curves_of, paired, paired_curves, shared_seeds
from fedloom.bench.results import NATIVE_MAIN, Cell, Results, Setting, Stat
from fedloom.report.wording import number, visible

#: Settings are in the order of α, so they get shades of one hue and not the methods' colours.
_SHADES = ("#08306b", "#2f7fbf", "#7fb2d9", "#8c2d04", "#d9661f", "#f0a868")


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
    shown = [s for s in settings if targets(results, s)]
    parts = {}
    for setting in shown:
        by_seed = {label: rounds_to_target(results, setting, label) for label in native_labels(results, setting)}
        parts[setting] = _reached(by_seed)
    found = _by_label(parts)
    if not found:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        grouped_bars(results, axes, found, _rounds)
        _name_groups(axes, shown)
        axes.set_ylabel("rounds")

    text = "; ".join(f"{results.title(label)}: {_said(stats, shown, _rounds)}" for label, stats in found.items())
    title = f"Rounds of training to {TARGET:.0%} of FedAvg's last accuracy, mean ± one sd where all seeds reach it"
    note = " ".join([_below(results, parts), *untargeted(results)])
    return picture_of("fcmoe_fig3a_rounds", title, text, _inches(len(shown), len(found)), draw, note)


def _reached(by_label: Mapping[str, Mapping[int, int | None]]) -> Paired[str, Stat]:
    """Return rounds over the seeds that labels share; a seed that never gets there has infinitely many."""
    measured = {label: rounds for label, rounds in by_label.items() if rounds}
    seeds = shared_seeds(measured, NATIVE_MAIN)
    shown = {
        label: Stat.by({s: math.inf if (at := rounds[s]) is None else at for s in seeds})
        for label, rounds in measured.items()
        if rounds.keys() >= set(seeds)
    }
    return Paired(seeds, shown, tuple(label for label in measured if label not in shown))


def _rounds(stat: Stat) -> str:
    if not stat.lost:
        return number(stat.mean, 1)
    return "never" if stat.lost == stat.n else f"{stat.n - stat.lost} of {stat.n}"


def local_bars(results: Results, settings: Sequence[Setting]) -> Picture | None:
    """Draw Figure 3b: accuracy of clients' own models: mean, spread over clients, worst client; means over seeds."""
    parts = {}
    for setting in settings:
        means = {label: results.stat(setting, label, local_accuracy) for label in native_labels(results, setting)}
        if (pairs := paired(means, NATIVE_MAIN)).shown:
            parts[setting] = pairs
    shown, found = list(parts), _by_label(parts)
    if not found:
        return None
    spreads, worsts = (
        {
            label: [
                results.stat(setting, label, local(key)).over(parts[setting].seeds) if at is not None else None
                for setting, at in zip(shown, stats, strict=True)
            ]
            for label, stats in found.items()
        }
        for key in ("spread", "worst")
    )

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        places = grouped_bars(results, axes, found, lambda s: number(s.mean, 2), errors=spreads)
        for label, stats in worsts.items():
            points = [(x, s.mean) for x, s in zip(places[label], stats, strict=True) if s is not None]
            axes.plot([x for x, _ in points], [y or 0.0 for _, y in points], "v", color="#1a1d21", markersize=5)
        _name_groups(axes, shown)
        axes.set_ylabel("local accuracy")

    text = "; ".join(
        f"{results.title(label)}: {_said(stats, shown, lambda s: number(s.mean, 2))}" for label, stats in found.items()
    )
    title = "Accuracy of clients' own models at home: mean, ± sd over clients, ▼ worst client (means over seeds)"
    inches = _inches(len(shown), len(found))
    return picture_of("fcmoe_fig3b_local", title, text, inches, draw, _below(results, parts))


def ablation_bars(results: Results, setting: Setting) -> Picture | None:
    """Draw Figure 4: accuracy of FC-MoE and of its ablations, over the rounds and at the end."""
    labels = ablated_labels(results, setting)
    finals = paired({label: results.stat(setting, label, global_accuracy) for label in labels}, NATIVE_MAIN)
    homes = {label: results.stat(setting, label, local_accuracy).over(finals.seeds) for label in finals.shown}
    bars: dict[str, list[Stat | None]] = {label: [final, homes[label]] for label, final in finals.shown.items()}
    if not bars:
        return None
    curves = curves_of(results, setting, list(bars), "score_curve")
    lines = paired_curves({x: {s: c for s, c in found.items() if s in finals.seeds} for x, found in curves.items()})

    def draw(figure: Figure) -> None:
        panels = list(figure.subplots(1, 2, squeeze=False, gridspec_kw={"width_ratios": (1, 1.2)})[0])
        if lines.seeds == finals.seeds:
            _draw_curves(results, setting, figure, panels[0], lines)
        panels[0].set_title("global model over the rounds", fontsize=10)
        grouped_bars(results, panels[1], bars, lambda s: number(s.mean, 3), wide=2)
        panels[1].set_xticks((0, 1), ["test accuracy", "local accuracy"])
        panels[1].set_title("at the end, ± one sd over seeds", fontsize=10)

    text = "; ".join(f"{results.title(label)} {number(final.mean, 3)}" for label, final in finals.shown.items())
    title = f"FC-MoE without one of its parts ({setting.text})"
    name, note = f"fcmoe_fig4_ablations_{setting.slug}", below(results.title, [("", finals)])
    return picture_of(name, title, text, (11.5, 4.6), draw, note)


def accuracy_curves(results: Results, setting: Setting) -> Picture | None:
    """Draw the global model's accuracy over the rounds, mean over seeds; what Figure 3a is read from."""
    curves = curves_of(results, setting, native_labels(results, setting), "score_curve")
    lines = paired_curves(curves, NATIVE_MAIN)
    if not lines.shown:
        return None

    def draw(figure: Figure) -> None:
        _draw_curves(results, setting, figure, figure.subplots(), lines)

    text = "; ".join(
        f"{results.title(label)} {number(points[0][1], 3)} → {number(points[-1][1], 3)}"
        for label, points in lines.shown.items()
    )
    title = f"Test accuracy of the global model over the rounds, mean over seeds ({setting.text})"
    return picture_of(
        f"fcmoe_accuracy_{setting.slug}", title, text, (7.5, 3.8), draw, below(results.title, [("", lines)])
    )


def conflict_lines(results: Results, settings: Sequence[Setting]) -> Picture | None:
    """Draw, for every α, how many updates of experts oppose their consensus under FC-MoE, and their mean cosine."""
    panels_of = {
        what: paired_curves(
            {s: {c.seed: _column(c, at) for c in results.of(s, NATIVE_MAIN)} for s in settings},
        )
        for at, what in {1: "share in conflict", 2: "mean cosine, all pairs"}.items()
    }
    shares = panels_of["share in conflict"]
    if not shares.shown:
        return None

    def draw(figure: Figure) -> None:
        panels = list(figure.subplots(2, 1, sharex=True))
        for axes, (what, lines) in zip(panels, panels_of.items(), strict=True):
            ends = {}
            for setting, points in lines.shown.items():
                at = settings.index(setting)
                colour = _SHADES[at % len(_SHADES)]
                xs, ys = [x for x, _ in points], [y for _, y in points]
                draw_line(axes, xs, ys, colour, at, main=False)
                ends[visible(f"{_group(setting, settings)} (n = {len(lines.seeds)})")] = (*points[-1], colour)
            axes.set_ylabel(what)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            end_labels(figure, axes, ends)
        panels[-1].set_xlabel("round")

    text = "; ".join(
        f"{s.text}: share {number(points[0][1], 2)} → {number(points[-1][1], 2)}" for s, points in shares.shown.items()
    )
    title = "Updates of an expert against their consensus, over pairs of client and expert (FC-MoE, mean over seeds)"
    note = below(lambda s: _group(s, settings), [("", shares)])
    return picture_of("fcmoe_conflict", title, text, (7.5, 5.2), draw, note)


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
        show: what stands above a bar, which is drawn where the mean is finite.
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
            height = 0.0 if stat.mean is None or stat.lost else stat.mean
            other = errors[label][at] if errors else None
            error = (other.mean if other else None) if errors else stat.sd
            axes.bar(x, height, width=0.9 * width, color=hue[label])
            if error:
                axes.errorbar(x, height, yerr=error, color="#1a1d21", capsize=3, linewidth=1)
            axes.annotate(show(stat), (x, height + (error or 0.0)), (0, 3), textcoords="offset points",
                          ha="center", va="bottom", fontsize=8)  # fmt: skip
        axes.bar(0, 0, color=hue[label], label=visible(f"{results.title(label)} (n = {_counts(stats)})"))
    axes.margins(y=0.12)
    axes.legend(fontsize=9, frameon=False, ncols=min(wide, len(found)), loc="upper center", bbox_to_anchor=(0.5, -0.12))
    return places


def _counts(stats: Sequence[Stat | None]) -> str:
    """Return of how many seeds a label's bars are: ``3``, or ``1–3`` where they differ."""
    found = [stat.n for stat in stats if stat is not None]
    return f"{min(found)}–{max(found)}" if min(found) < max(found) else str(found[0])


def _draw_curves(results: Results, setting: Setting, figure: Figure, axes: Axes, lines: Paired[str, Points]) -> None:
    order, hue = results.labels(), hues(results)
    for label, points in lines.shown.items():
        xs, ys = [x for x, _ in points], [y for _, y in points]
        draw_line(axes, xs, ys, hue[label], order.index(label), main=label == NATIVE_MAIN)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy")
    n = len(lines.seeds)
    ends = {caption(results, setting, k, n): (*points[-1], hue[k]) for k, points in lines.shown.items()}
    end_labels(figure, axes, ends)


def _column(cell: Cell, index: int) -> list[list[float | None]]:
    """Return [round, one entry] of each line of the record's ``conflict``."""
    return [[line[0], line[index]] for line in cell.get("conflict") or []]


def _by_label(parts: Mapping[Setting, Paired[str, Stat]]) -> dict[str, list[Stat | None]]:
    """Return label → for each setting, what is drawn of it there."""
    labels = dict.fromkeys(label for part in parts.values() for label in part.shown)
    return {label: [part.shown.get(label) for part in parts.values()] for label in labels}


def _below(results: Results, parts: Mapping[Setting, Paired[str, Stat]]) -> str:
    return below(results.title, [(_group(setting, list(parts)), part) for setting, part in parts.items()])


def _group(setting: Setting, settings: Sequence[Setting]) -> str:
    """Return what tells a setting from the others shown."""
    parts = [setting.backbone] if len({s.backbone for s in settings}) > 1 else []
    parts += [str(setting.get("tasks"))] if len({s.get("tasks") for s in settings}) > 1 else []
    return ", ".join([*parts, f"α = {setting.get('alpha')}"])


def _name_groups(axes: Axes, settings: Sequence[Setting]) -> None:
    axes.set_xticks(range(len(settings)), [visible(_group(s, settings)) for s in settings])


def _said(stats: Sequence[Stat | None], settings: Sequence[Setting], show: Callable[[Stat], str]) -> str:
    said = [(_group(s, settings), stat) for s, stat in zip(settings, stats, strict=True) if stat is not None]
    return ", ".join(f"{show(stat)} at {name}" for name, stat in said)


def _inches(groups: int, bars: int) -> tuple[float, float]:
    return max(6.0, 1.5 + 0.5 * groups * bars), 4.2
