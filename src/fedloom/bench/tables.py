"""The paper's tables from a benchmark's results, with the paper's own numbers in columns of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedloom.bench import paper
from fedloom.bench.layout import (
    DIFFERENCE,
    STAT,
    Column,
    Entry,
    Table,
    difference,
    marked,
    ranks,
    signed,
    stat,
    value,
    words,
)
from fedloom.bench.results import ABLATIONS, AXES, MAIN, Cell, Results, Setting, Stat, mixture_notes
from fedloom.bench.significance import Comparisons
from fedloom.report.wording import MISSING, listed, number

INTERVALS = (
    "In brackets: 95 % interval of the paired bootstrap over test examples, with its two-sided p; it holds for the "
    "models of these seeds and says nothing of others. The report has the intervals over seeds."
)
MEANS = "Mean ± standard deviation (n − 1) over seeds; a single seed has none. – was not measured."
EXPERTS = "Experts: mean number over seeds × rank of each."
#: What the CSV file holds of a mixture's size.
MIXTURE = ("", "rank")
RANKED = (
    "Bold is best and underlined second, among rows with the most seeds of a column; "
    "values that print alike share a mark."
)


def all_tables(results: Results, comparisons: Comparisons) -> list[Table]:
    """Return every table about models that the results can fill, the main setting's Table 1 first."""
    found: list[Table | None] = []
    for index, setting in enumerate(results.settings):
        suffix = f"_{setting.slug}" if index else ""
        found += [global_table(results, setting, suffix), personalised_table(results, setting, suffix)]
    found += [
        granularity_table(results, comparisons),
        discovery_table(results, comparisons),
        routing_table(results, comparisons),
    ]
    return [table for table in found if table is not None]


def global_table(results: Results, setting: Setting, suffix: str = "") -> Table | None:
    """Table 1: one model for everyone, on every task's test set."""
    labels = [label for label in results.compared(setting) if results.has_global_model(label)]
    without = [results.title(label) for label in results.compared(setting) if not results.has_global_model(label)]
    if not labels:
        return None
    tasks = results.tasks(setting)
    measures = [(task, metric) for task in [*tasks, "macro"] for metric in ("score", "loss")]
    backbones = (paper.LLAMA, paper.GEMMA) if setting.get("alpha") == paper.ALPHA and results.main == MAIN else ()
    printed = [(backbone, metric) for backbone in backbones for metric in ("score", "loss")]
    columns = [
        Column("method"),
        Column("seeds"),
        Column("experts", MIXTURE),
        Column("routing"),
        *(Column(metric, STAT, group=task) for task, metric in measures),
        *(Column(f"macro {metric}", group=f"paper, {backbone}:") for backbone, metric in printed),
    ]
    stats = {
        measure: {
            label: results.stat(setting, label, lambda c, m=measure: c.measured(m[1], m[0]))  # type: ignore[misc]
            for label in labels
        }
        for measure in measures
    }
    ranked = [label for label in labels if not results.is_pooled(label)]
    marks = {measure: _marks(stats[measure], ranked, lowest=measure[1] == "loss") for measure in measures}
    rows: list[list[Entry]] = []
    for label in labels:
        seeds = len(results.of(setting, label))
        title = results.title(label) + (" (pooled data, not ranked)" if results.is_pooled(label) else "")
        rows.append(
            [
                words(title),
                value(seeds, str),
                mixture(results, setting, label),
                words(_routing_words(results, setting, label)),
                *(marked(stat(stats[m][label], seeds), marks[m].get(label, "")) for m in measures),
                *(_theirs(paper.MACRO.get((label, *key)), setting) for key in printed),
            ]
        )
        if label == MAIN and "soft" in results.modes(setting, label)[1:]:
            rows.append(_soft_row(results, setting, measures, len(printed)))
    rows.append(_backbone_row(results, setting, measures, len(printed)))
    if printed:
        theirs = [_theirs(paper.MACRO["best_baseline", *key], setting) for key in printed]
        paper_row = words("best baseline of the paper (the text does not name it)")
        rows.append([paper_row, value(None), *NO_MIXTURE, *(stat(Stat(), 0) for _ in measures), *theirs])
    notes = [MEANS, RANKED, EXPERTS, "Routing: how the row's model answers; only rows' first routing is ranked."]
    if without:
        has = "has" if len(without) == 1 else "have"
        notes.append(
            f"{listed(without)} {has} no global model, so this protocol does not apply: see the personalised one."
        )
    if hidden := [results.title(label) for label in results.labels(setting) if label not in results.compared(setting)]:
        notes.append(f"In tables of their own: {listed(hidden)}.")
    if len({tuple(c.seed for c in results.of(setting, label)) for label in labels}) > 1:
        notes.append("Not every row has the same seeds; means over different seeds are not a paired comparison.")
    if printed:
        notes.append(f"Paper: {next(iter(paper.MACRO.values())).where}; its other cells are not in the text.")
    notes += mixture_notes(results.among(setting, labels))
    return Table(f"table1{suffix}", f"Global protocol: one model for everyone ({setting.text})", columns, rows, notes)


def personalised_table(results: Results, setting: Setting, suffix: str = "") -> Table | None:
    """Every client's model on its own mixture of tasks; never beside the global protocol."""
    labels = [
        label for label in results.compared(setting) if any(c.get("personalised") for c in results.of(setting, label))
    ]
    if not labels:
        return None
    keys = {"mean": "mean over clients", "weighted_mean": "weighted by examples", "worst": "worst client"}
    stats = {
        key: {
            label: results.stat(setting, label, lambda c, k=key: c.get("personalised", k))  # type: ignore[misc]
            for label in labels
        }
        for key in keys
    }
    ranked = [label for label in labels if not results.is_pooled(label)]
    marks = {key: _marks(stats[key], ranked, lowest=True) for key in keys}
    rows = []
    for label in labels:
        cells = results.of(setting, label)
        own = "its own" if cells[0].get("personal") else "the shared one"
        entries = (marked(stat(stats[key][label], len(cells)), marks[key].get(label, "")) for key in keys)
        rows.append([words(results.title(label)), value(len(cells), str), words(own), *entries])
    shown = sorted({c.get("personalised", "rows_per_kind") for c in results.cells if c.get("personalised")} - {None})
    notes = [
        MEANS,
        RANKED,
        "Loss of each client's model, on test rows of its tasks, weighed as the client's training rows are.",
        *([f"Test rows per task: {listed([str(n) for n in shown])}."] if shown else []),
        *mixture_notes(results.among(setting, labels)),
    ]
    columns = [Column("method"), Column("seeds"), Column("client's model")]
    columns += [Column(head, STAT, group="loss") for head in keys.values()]
    return Table(
        f"table1_personalised{suffix}",
        f"Personalised protocol: each client's model ({setting.text})",
        columns,
        rows,
        notes,
    )


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
        Column("score", STAT, group="macro"),
        Column("loss", STAT, group="macro"),
        Column("score", DIFFERENCE, group="minus FedWeave:"),
        Column("loss", DIFFERENCE, group="minus FedWeave:"),
        Column("score", group=f"minus FedWeave, paper, {paper.LLAMA}:"),
        Column("loss", group=f"minus FedWeave, paper, {paper.LLAMA}:"),
    ]
    rows = []
    for setting in settings:
        for label in (x for x in (MAIN, *ABLATIONS) if x in results.labels(setting)):
            title, seeds, *macro = _method_and_macro(results, setting, label)
            rows.append(
                [
                    *_setting_entries(setting, settings),
                    *(title, seeds, mixture(results, setting, label), *macro),
                    *_against(comparisons, setting, label, MAIN),
                    *(_theirs(paper.ABLATION.get((label, metric)), setting, signed) for metric in ("score", "loss")),
                ]
            )
    notes = [MEANS, INTERVALS, EXPERTS, f"Paper: {paper.place(paper.ABLATION)}."]
    notes += mixture_notes([cell for s in settings for cell in results.among(s, (MAIN, *ABLATIONS))])
    return Table("table2", "Aggregation granularity", columns, rows, notes)


def discovery_table(results: Results, comparisons: Comparisons) -> Table | None:
    """Table 3: how well variants of FedWeave recover the tasks, and what comes of it."""
    settings = [s for s in results.settings if any(c.get("alignment") for c in _discovered(results, s))]
    if not settings:
        return None
    pairs = [(level, metric) for level in ("local", "global") for metric in ("purity", "nmi", "ari")]
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
        Column("probe, s", STAT),
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
                    stat(Stat.of(c.get("costs", "probe_seconds") for c in cells), len(cells), _two),
                    *(_theirs(paper.CLUSTERER.get((clusterer, what)), setting) for what in ("purity", "score")),
                ]
            )
    notes = [
        MEANS,
        INTERVALS,
        "Task labels serve here only, to check what was found without. Local: buckets in a client; global: experts.",
        "Probe: warm-ups, alignment and what is sent for them; embedding the prompts comes before and is not in it.",
        f"Paper: {paper.place(paper.CLUSTERER)}; its k-means stands beside FedWeave.",
        *mixture_notes([cell for s in settings for cell in _discovered(results, s)]),
    ]
    return Table("table3", "Prototype discovery", columns, rows, notes)


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
                    *(difference(d) for d in against),
                    *(stat(s, n, _two) for s in seconds),
                    _theirs(printed[0], setting),
                    _theirs(printed[1], setting, lambda v: f"{v:.0f}"),
                ]
            )
    notes = [
        MEANS,
        INTERVALS,
        "Seconds are wall-clock of the whole test set on the machine that ran it; other work there makes them longer.",
        "They do not hold the frozen backbone's pass over each prompt that routing needs: it was made once, before.",
        f"Paper: {paper.place(paper.ROUTING)}; it prints a mean latency without naming its unit of work.",
        *mixture_notes([cell for setting, label in found for cell in results.of(setting, label)]),
    ]
    return Table("table4", "Sparse and soft routing", columns, rows, notes)


def per_hundred(cell: Cell, mode: str, what: str) -> float | None:
    """Return seconds per 100 test examples of generation or loss; None where either number is not on file."""
    seconds = cell.get("routing", mode, f"{what}_seconds")
    each = (cell.examples.get(mode) or {}).get("each" if what == "generation" else "each_loss") or {}
    count = sum(len(rows) for rows in each.values())
    return 100 * seconds / count if seconds is not None and count else None


def _marks(stats: Mapping[str, Stat], ranked: Sequence[str], *, lowest: bool) -> dict[str, str]:
    most = max((stats[label].n for label in ranked), default=0)
    return ranks({label: stats[label].mean for label in ranked if stats[label].n == most}, lowest=lowest)


def _backbone_row(results: Results, setting: Setting, measures: Sequence[tuple[str, str]], printed: int) -> list[Entry]:
    """Return the frozen backbone's row: one measurement per seed, whichever method's run made it."""
    by_seed = {c.seed: c for c in results.cells if c.setting == setting and c.get("before")}
    keys = {"score": "score", "loss": "loss_backbone"}
    found = [Stat.of(c.get("before", keys[m], task) for c in by_seed.values()) for task, m in measures]
    entries = (stat(s, len(by_seed)) for s in found)
    seeds = value(len(by_seed), str)
    return [words("backbone alone (not ranked)"), seeds, *NO_MIXTURE, *entries, *[value(None)] * printed]


def _soft_row(results: Results, setting: Setting, measures: Sequence[tuple[str, str]], printed: int) -> list[Entry]:
    """Return the main method's row with all experts mixed, as FedLEASE answers by design."""
    cells = results.of(setting, MAIN)
    found = [Stat.of(c.measured(metric, task, "soft") for c in cells) for task, metric in measures]
    title, seeds = f"{results.title(MAIN)} (its mixture, not ranked)", value(len(cells), str)
    entries = (stat(s, len(cells)) for s in found)
    return [words(title), seeds, mixture(results, setting, MAIN), words("soft"), *entries, *[value(None)] * printed]


def mixture(results: Results, setting: Setting, label: str) -> Entry:
    """Return mean number of experts × rank; the rank alone is missing where a record does not hold it."""
    if results.is_native(label):
        return Entry("the backbone's own", (None, None))
    cells = results.of(setting, label)
    count = Stat.of(c.get("experts") for c in cells).mean
    ranks_ = list(dict.fromkeys(rank for c in cells if (rank := c.get("rank")) is not None))
    if count is None:
        return Entry(MISSING, (None, None))
    shown = f"{count:.0f}" if count == round(count) else number(count, 2)
    return Entry(shown + (f" × {listed([str(r) for r in ranks_])}" if ranks_ else ""), (count, *(ranks_ or [None])[:1]))


#: No experts and no routing.
NO_MIXTURE = (Entry(MISSING, (None, None)), words(MISSING))


def _routing_words(results: Results, setting: Setting, label: str) -> str:
    """Return how a label's global model chose among experts where it has several."""
    cells = [cell for cell in results.of(setting, label) if cell.mode]
    if results.is_native(label):
        return "the backbone's own, of every token"
    modes = dict.fromkeys(str(c.mode) for c in cells if (c.get("experts") or 1) > 1)
    return listed(list(modes)) if modes else "none, one adapter"


def _discovered(results: Results, setting: Setting) -> list[Cell]:
    labels = [label for label in results.labels(setting) if results.method(label) == MAIN]
    return [cell for label in labels for cell in results.of(setting, label)]


def _method_and_macro(results: Results, setting: Setting, label: str) -> list[Entry]:
    seeds = len(results.of(setting, label))
    macro: list[Callable[[Cell], float | None]] = [lambda c: c.measured("score"), lambda c: c.measured("loss")]
    found = [stat(results.stat(setting, label, get), seeds) for get in macro]
    return [words(results.title(label)), value(seeds, str), *found]


def _against(comparisons: Comparisons, setting: Setting, label: str, other: str) -> list[Entry]:
    if label == other:
        return [difference(None), difference(None)]
    return [difference(comparisons.labels(setting, label, other, metric)) for metric in ("score", "loss")]


def _theirs(printed: paper.Printed | None, setting: Setting, show: Callable[[float], str] = number) -> Entry:
    """Return the paper's number beside ours of its setting, α = 0.3; beside others it would mislead."""
    return value(printed.value if printed and setting.get("alpha") == paper.ALPHA else None, show)


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
