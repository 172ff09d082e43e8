"""FedWeave's analyses as tables: aggregation granularity, prototype discovery, sparse and soft routing (Tables 2-4)."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.bench import fedweave_paper as paper
from fedloom.bench.layout import (
    DIFFERENCE,
    STAT,
    Column,
    Entry,
    Table,
    difference,
    signed,
    stat,
    value,
    words,
)
from fedloom.bench.results import ABLATIONS, AXES, MAIN, Cell, Results, Setting, Stat, per_hundred
from fedloom.bench.significance import Comparisons
from fedloom.bench.tables import (
    EXPERTS,
    INTERVALS,
    MEANS,
    MIXTURE,
    beside,
    capacity_notes,
    mixture,
    on_fewer_seeds,
    run_notes,
    seed_notes,
)
from fedloom.report.wording import number


def analysis_tables(results: Results, comparisons: Comparisons) -> list[Table]:
    """Return the tables of this file that the results can fill."""
    found = [
        granularity_table(results, comparisons),
        discovery_table(results, comparisons),
        routing_table(results, comparisons),
    ]
    return [table for table in found if table is not None]


def granularity_table(results: Results, comparisons: Comparisons) -> Table | None:
    """Table 2: FedWeave without one of its two aggregation units."""
    settings = [s for s in results.settings if set(ABLATIONS) & set(results.labels(s))]
    if not settings:
        return None
    columns = [
        *_setting_columns(settings),
        Column("method"),
        Column("seeds"),
        Column("experts", MIXTURE),
        Column("routing"),
        Column("score", STAT, group="macro"),
        Column("loss", STAT, group="macro"),
        Column("score", DIFFERENCE, group="minus FedWeave:"),
        Column("loss", DIFFERENCE, group="minus FedWeave:"),
        Column("score", group=f"minus FedWeave, paper, {paper.LLAMA}:"),
        Column("loss", group=f"minus FedWeave, paper, {paper.LLAMA}:"),
    ]
    rows = []
    for setting in settings:
        shown = [label for label in (MAIN, *ABLATIONS) if label in results.labels(setting)]
        lines = [(label, results.title(label), results) for label in shown]
        fewer = on_fewer_seeds(results, setting, MAIN, shown) if MAIN in shown else []
        lines[1:1] = [(MAIN, title, part) for title, part in fewer]
        for label, title, part in lines:
            first = part.modes(setting, label)[:1]
            for mode in first + [m for m in part.modes(setting, label)[1:] if m == "soft"]:
                _, seeds, *macro = _method_and_macro(part, setting, label, mode)
                printed = [paper.ABLATION.get((label, m)) if [mode] == first else None for m in ("score", "loss")]
                rows.append(
                    [
                        *_setting_entries(setting, settings),
                        *(words(title), seeds, mixture(part, setting, label), words(mode), *macro),
                        *_against(comparisons, setting, label, MAIN, mode),
                        *(beside(number_, setting, signed) for number_ in printed),
                    ]
                )
    notes = [MEANS, INTERVALS, EXPERTS, "Routing: the same in both models that a difference compares."]
    notes.append(f"Paper, with one expert active: {paper.place(paper.ABLATION)}.")
    labels = (MAIN, *ABLATIONS)
    notes += [*seed_notes(results, settings, labels), *capacity_notes(results, settings, labels)]
    notes += run_notes([cell for s in settings for cell in results.among(s, labels)])
    return Table("table2", "Aggregation granularity", columns, rows, notes)


def discovery_table(results: Results, comparisons: Comparisons) -> Table | None:
    """Table 3: how well variants of FedWeave recover the tasks, and what comes of it."""
    settings = [s for s in results.settings if any(c.get("alignment") for c in _discovered(results, s))]
    if not settings:
        return None
    pairs = [(level, metric) for level in ("local", "global") for metric in ("purity", "nmi", "ari")]
    shown = [cell for s in settings for cell in _discovered(results, s)]
    times = {
        key: head
        for key, head in PROBE_TIMES.items()
        if key == "probe_seconds" or any(c.get("costs", key) is not None for c in shown)
    }
    columns = [
        *_setting_columns(settings),
        Column("method"),
        Column("seeds"),
        *(Column("purity" if m == "purity" else m.upper(), STAT, group=level) for level, m in pairs),
        Column("experts", STAT),
        Column("score", STAT, group="macro"),
        Column("loss", STAT, group="macro"),
        Column("score", DIFFERENCE, group="minus FedWeave:"),
        Column("loss", DIFFERENCE, group="minus FedWeave:"),
        *(Column(head, STAT) for head in times.values()),
        Column("global purity", group=f"paper, {paper.LLAMA}:"),
        Column("score", group=f"paper, {paper.LLAMA}:"),
    ]
    rows = []
    for setting in settings:
        for label in dict.fromkeys(c.label for c in _discovered(results, setting)):
            cells = results.of(setting, label)
            clusterer = "kmeans" if label == MAIN else "spectral" if "spectral" in label else ""
            title, seeds, score, loss = _method_and_macro(results, setting, label)
            rows.append(
                [
                    *_setting_entries(setting, settings),
                    title,
                    seeds,
                    *(stat(Stat.of(c.get("alignment", *pair) for c in cells), len(cells)) for pair in pairs),
                    stat(Stat.of(c.get("experts") for c in cells), len(cells), _two),
                    score,
                    loss,
                    *_against(comparisons, setting, label, MAIN),
                    *(stat(Stat.of(c.get("costs", key) for c in cells), len(cells), _two) for key in times),
                    *(beside(paper.CLUSTERER.get((clusterer, what)), setting) for what in ("purity", "score")),
                ]
            )
    notes = [
        MEANS,
        INTERVALS,
        "Task labels serve here only, to check what was found without. Local: buckets in a client; global: experts.",
        *_time_notes(shown),
        f"Paper: {paper.place(paper.CLUSTERER)}; its k-means stands beside FedWeave.",
        *seed_notes(results, settings, [x for x in results.labels() if results.method(x) == MAIN]),
        *run_notes(shown),
    ]
    return Table("table3", "Prototype discovery", columns, rows, notes)


#: What discovery took, by its key in a record's costs; columns that no record fills are left out.
PROBE_TIMES = {
    "probe_seconds": "probe, s",
    "cluster_seconds": "clustering, s",
    "probe_server_seconds": "alignment, s",
}


def _time_notes(cells: Sequence[Cell]) -> list[str]:
    """Say what each of the times holds, and what no run or not every one measured."""
    said = {
        "cluster_seconds": "Clustering: finding one client's buckets, mean over clients; a part of the probe.",
        "probe_server_seconds": "Alignment: what the server makes of all replies, after the probe.",
    }
    known = {key: sum(cell.get("costs", key) is not None for cell in cells) for key in said}
    missing = {
        "cluster_seconds": " These runs did not measure clustering apart.",
        "probe_server_seconds": " Nor is the server's alignment, which these runs did not measure.",
    }
    lacking = [what for key, what in reversed(missing.items()) if not known[key]]
    notes = [
        "Probe: buckets, warm-ups and what is sent for them, of all clients one after another. Embedding the prompts "
        "comes before and is not in it." + "".join(lacking)
    ]
    for key, what in said.items():
        if known[key]:
            some = f" Known of {known[key]} of {len(cells)} runs." if known[key] < len(cells) else ""
            notes.append(what + some)
    return notes


def routing_table(results: Results, comparisons: Comparisons) -> Table | None:
    """Table 4 (the paper's Figure 4): one expert, two, or all, from the same trained models."""
    found = [(s, label) for s in results.settings for label in results.compared(s) if len(results.modes(s, label)) > 1]
    if not found:
        return None
    settings = list(dict.fromkeys(s for s, _ in found))
    columns = [
        *_setting_columns(settings),
        Column("method"),
        Column("routing"),
        Column("seeds"),
        Column("score", STAT, group="macro"),
        Column("loss", STAT, group="macro"),
        Column("score", DIFFERENCE, group="minus top1:"),
        Column("loss", DIFFERENCE, group="minus top1:"),
        Column("generation", STAT, group="s per 100 examples:"),
        Column("loss", STAT, group="s per 100 examples:"),
        Column("score", group=f"paper, {paper.LLAMA}:"),
        Column("latency, ms", group=f"paper, {paper.LLAMA}:"),
    ]
    rows = []
    for setting, label in found:
        cells = results.of(setting, label)
        for mode in results.modes(setting, label):
            n = sum(mode in (c.get("routing") or {}) for c in cells)
            macro = (Stat.of(c.measured(metric, mode=mode) for c in cells) for metric in ("score", "loss"))
            seconds = (Stat.of(per_hundred(c, mode, key) for c in cells) for key in ("generation", "loss"))
            against = (
                comparisons.modes(setting, label, mode, "top1", metric) if mode != "top1" else None
                for metric in ("score", "loss")
            )
            printed = [paper.ROUTING.get((mode, what)) if label == MAIN else None for what in ("score", "ms")]
            rows.append(
                [
                    *_setting_entries(setting, settings),
                    words(results.title(label)),
                    words(mode),
                    value(n, str),
                    *(stat(s, n) for s in macro),
                    *(difference(d, n) for d in against),
                    *(stat(s, n, _two) for s in seconds),
                    beside(printed[0], setting),
                    beside(printed[1], setting, lambda v: f"{v:.0f}"),
                ]
            )
    notes = [
        MEANS,
        INTERVALS,
        "Seconds are wall-clock of the whole test set on the machine that ran it; other work there makes them longer.",
        "They do not hold the frozen backbone's pass over each prompt that routing needs: it was made once, before.",
        f"Paper: {paper.place(paper.ROUTING)}; it prints a mean latency without naming its unit of work.",
        *run_notes([cell for setting, label in found for cell in results.of(setting, label)]),
    ]
    return Table("table4", "Sparse and soft routing", columns, rows, notes)


def _discovered(results: Results, setting: Setting) -> list[Cell]:
    labels = [label for label in results.labels(setting) if results.method(label) == MAIN]
    return [cell for label in labels for cell in results.of(setting, label)]


def _method_and_macro(results: Results, setting: Setting, label: str, mode: str | None = None) -> list[Entry]:
    cells = results.of(setting, label)
    found = (Stat.of(c.measured(metric, mode=mode) for c in cells) for metric in ("score", "loss"))
    return [words(results.title(label)), value(len(cells), str), *(stat(each, len(cells)) for each in found)]


def _against(
    comparisons: Comparisons, setting: Setting, label: str, other: str, mode: str | None = None
) -> list[Entry]:
    """Return the differences of score and loss from ``other``, both with ``mode`` or each with its first."""
    if label == other:
        return [difference(None), difference(None)]
    seeds = len(comparisons.results.of(setting, label))
    found = (comparisons.labels(setting, label, other, metric, mode, mode) for metric in ("score", "loss"))
    return [difference(each, seeds) for each in found]


def _setting_columns(settings: Sequence[Setting]) -> list[Column]:
    """Return a column for the backbone and each axis, where there is more than one setting to tell apart."""
    if len(settings) < 2:
        return []
    return [Column("backbone"), *(Column(AXES[name]) for name in _axes(settings))]


def _setting_entries(setting: Setting, settings: Sequence[Setting]) -> list[Entry]:
    if len(settings) < 2:
        return []
    return [words(setting.backbone), *(value(setting.get(name), str) for name in _axes(settings))]


def _axes(settings: Sequence[Setting]) -> list[str]:
    return [name for name in AXES if any(s.get(name) is not None for s in settings)]


def _two(found: float) -> str:
    return number(found, 2)
