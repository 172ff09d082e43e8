"""What the differences say, in sentences made from the data alone; none is claimed without its interval."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.bench import paper
from fedloom.bench.layout import p_words, signed
from fedloom.bench.results import ABLATIONS, MAIN, Results, Setting
from fedloom.bench.significance import Comparisons, Difference
from fedloom.methods import METHODS
from fedloom.report.wording import number

METRICS = ("loss", "score")
#: The papers' closest baselines; where a suite lacks them, the trend over settings is against FedIT or FedAvg.
RIVALS = ("fedlease", "fedit", "fedmoe", "fedavg_moe")


@dataclass(frozen=True)
class Section:
    """Sentences under a heading."""

    title: str
    sentences: tuple[str, ...]


def sentence(a: str, b: str, metric: str, found: Difference | None, where: str = "") -> str:
    """Say how A differs from B, with the interval; a difference whose interval holds 0 is not called one.

    Args:
        a, b: what is compared, A − B.
        metric: ``loss`` or ``score``.
        found: the comparison; None where per-example numbers are not on file.
        where: words before it, as ``α = 0.1``.
    """
    start = f"{where}: " if where else ""
    if found is None:
        return f"{start}{a} and {b}: macro {metric} cannot be compared: no per-example numbers of a common seed."
    interval = f"95 % interval {signed(found.low)} to {signed(found.high)}, {p_words(found.p)}"
    seeds = f"{len(found.seeds)} seeds" if len(found.seeds) > 1 else f"seed {found.seeds[0]} only"
    if not found.distinguishable:
        return (
            f"{start}{a} and {b} are not distinguishable in macro {metric} "
            f"(difference {signed(found.estimate)}, {interval}; {seeds})."
        )
    side = "below" if found.estimate < 0 else "above"
    better = "better" if (found.estimate < 0) == (metric == "loss") else "worse"
    # Test rows alone can make an interval narrow; seeds that disagree say that it is not the method.
    split = found.agreeing < len(found.seeds)
    but = f", but only {found.agreeing} of {len(found.seeds)} seeds has this sign" if split else ""
    return (
        f"{start}{a} is {side} {b} by {number(abs(found.estimate))} in macro {metric}, which is {better} "
        f"({interval}; {seeds}){but}."
    )


def reading(results: Results, comparisons: Comparisons) -> list[Section]:
    """Return the sections for the main setting, and the main method against its rival over all settings."""
    main = results.settings[0]
    if results.main not in results.labels(main):
        title = METHODS[results.main].title
        return [Section(main.text, (f"{title} has no result in this setting, so nothing is compared with it.",))]
    sections = [
        _baselines(results, comparisons, main),
        _ablations(results, comparisons, main),
        _routing(results, comparisons, main),
        _trend(results, comparisons, main.backbone),
    ]
    return [section for section in sections if section.sentences]


def _baselines(results: Results, comparisons: Comparisons, setting: Setting) -> Section:
    title = results.title(results.main)
    found = []
    for label in results.compared(setting):
        if label != results.main and results.has_global_model(label) and not results.is_variant(label):
            other = results.title(label) + (" (pooled data)" if results.is_pooled(label) else "")
            found += [
                sentence(title, other, m, comparisons.labels(setting, results.main, label, m))
                for m in _measured(results, setting)
            ]
    return Section(f"{title} against each baseline ({setting.text})", tuple(found))


def _ablations(results: Results, comparisons: Comparisons, setting: Setting) -> Section:
    found = []
    for label in results.labels(setting):
        if results.is_variant(label):
            for metric in _measured(results, setting):
                difference = comparisons.labels(setting, label, results.main, metric)
                said = sentence(results.title(label), results.title(results.main), metric, difference)
                found.append(said + _printed(paper.ABLATION.get((label, metric)), setting))
    ablated = set(ABLATIONS) & set(results.labels(setting)) or results.main != MAIN
    words = "Ablations and variants" if ablated else f"Variants of {results.title(results.main)}"
    return Section(f"{words} ({setting.text})", tuple(found))


def _routing(results: Results, comparisons: Comparisons, setting: Setting) -> Section:
    modes = results.modes(setting, MAIN)
    found = []
    for mode in modes:
        if mode != "top1" and "top1" in modes:
            for metric in _measured(results, setting):
                difference = comparisons.modes(setting, MAIN, "top1", mode, metric)
                said = sentence("top1", mode, metric, difference)
                printed = [paper.ROUTING.get((m, "score")) for m in ("top1", mode)]
                if metric == "score" and printed[0] and printed[1]:
                    gap = paper.Printed(printed[0].value - printed[1].value, printed[0].where)
                    said += _printed(gap, setting)
                found.append(said)
    return Section(f"One expert against several, same FedWeave models ({setting.text})", tuple(found))


def _trend(results: Results, comparisons: Comparisons, backbone: str) -> Section:
    """The main method against its rival in every setting of the backbone; each setting is a comparison of its own."""
    settings = sorted(
        (s for s in results.settings if s.backbone == backbone and results.main in results.labels(s)),
        key=lambda s: [(name, value if isinstance(value, int | float) else 0.0, str(value)) for name, value in s.axes],
    )
    rival = next((r for r in RIVALS if sum(r in results.labels(s) for s in settings) > 1), None)
    if rival is None:
        return Section("", ())
    found = []
    for metric in METRICS:
        for setting in settings:
            if rival in results.labels(setting) and metric in _measured(results, setting):
                difference = comparisons.labels(setting, results.main, rival, metric)
                said = sentence(results.title(results.main), results.title(rival), metric, difference, setting.text)
                printed = paper.OVER_FEDLEASE.get((setting.get("alpha"), metric)) if rival == "fedlease" else None
                found.append(said + (f" Paper, {paper.LLAMA}: {signed(printed.value)}." if printed else ""))
    return Section(f"{results.title(results.main)} against {results.title(rival)} in every setting", tuple(found))


def _measured(results: Results, setting: Setting) -> list[str]:
    """Return the metrics that the main method has in this setting: without generation there is no score to miss."""
    return [m for m in METRICS if any(c.measured(m) is not None for c in results.of(setting, results.main))]


def _printed(printed: paper.Printed | None, setting: Setting) -> str:
    """Return the paper's difference, where the setting is the paper's main one."""
    same = printed is not None and setting.get("alpha") == paper.ALPHA
    return f" Paper, {paper.LLAMA}: {signed(printed.value)}." if printed and same else ""
