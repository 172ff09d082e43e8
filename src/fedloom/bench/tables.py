"""Table 1 from a benchmark's results, by both protocols, with the paper's own numbers in columns of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fedloom.bench import fedweave_paper as paper
from fedloom.bench.layout import (
    STAT,
    Column,
    Entry,
    Table,
    marked,
    marks,
    stat,
    value,
    words,
)
from fedloom.bench.pairing import seed_words
from fedloom.bench.results import MAIN, Cell, Results, Setting, Stat, mixture_notes
from fedloom.report.wording import MISSING, listed, number

INTERVALS = (
    "In brackets: 95 % interval of the paired bootstrap over test examples, with its two-sided p; it holds for the "
    "models of these seeds and says nothing of others. Rows that several seeds share count as independent, which makes "
    "it somewhat too narrow. These p are not adjusted for their number. The report has the intervals over seeds."
)
MEANS = "Mean ± standard deviation (n − 1) over seeds; a single seed has none. – was not measured."
EXPERTS = "Experts: mean number over seeds × rank of each."
#: What the CSV file holds of a mixture's size.
MIXTURE = ("", "rank")
RANKED = (
    "Bold is best and underlined second, among rows that have the most seeds of a column, and the same ones; "
    "values that print alike share a mark."
)


def model_tables(results: Results) -> list[Table]:
    """Return Table 1 of every setting that the results can fill, the main one first."""
    found: list[Table | None] = []
    for index, setting in enumerate(results.settings):
        suffix = f"_{setting.slug}" if index else ""
        found += [global_table(results, setting, suffix), personalised_table(results, setting, suffix)]
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
    ranks = {m: marks({x: stats[m][x] for x in ranked}, lowest=m[1] == "loss") for m in measures}
    rows: list[list[Entry]] = []
    for label in labels:
        seeds = len(results.of(setting, label))
        rows.append(
            [
                words(_title(results, label)),
                value(seeds, str),
                mixture(results, setting, label),
                words(routing_words(results, setting, label)),
                *(marked(stat(stats[m][label], seeds), ranks[m].get(label, "")) for m in measures),
                *(beside(paper.MACRO.get((label, *key)), setting) for key in printed),
            ]
        )
        if label == MAIN and "soft" in results.modes(setting, label)[1:]:
            rows.append(_soft_row(results, setting, measures, len(printed)))
    rows.append(_backbone_row(results, setting, measures, len(printed)))
    if printed:
        theirs = [beside(paper.MACRO["best_baseline", *key], setting) for key in printed]
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
    notes += [*seed_notes(results, [setting], labels), *capacity_notes(results, [setting], labels)]
    if printed:
        notes.append(f"Paper: {next(iter(paper.MACRO.values())).where}; its other cells are not in the text.")
    notes += run_notes(results.among(setting, labels))
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
    ranks = {key: marks({x: stats[key][x] for x in ranked}, lowest=True) for key in keys}
    rows = []
    for label in labels:
        cells = results.of(setting, label)
        own = "its own" if cells[0].get("personal") else "the shared one"
        entries = (marked(stat(stats[key][label], len(cells)), ranks[key].get(label, "")) for key in keys)
        routing = words(routing_words(results, setting, label, personal=True))
        rows.append([words(_title(results, label)), value(len(cells), str), words(own), routing, *entries])
    shown = sorted({c.get("personalised", "rows_per_kind") for c in results.cells if c.get("personalised")} - {None})
    notes = [
        MEANS,
        RANKED,
        "Loss of each client's model, on test rows of its tasks, weighed as the client's training rows are.",
        *([f"Test rows per task: {listed([str(n) for n in shown])}."] if shown else []),
        "Routing: how the row's models answer; rows with different routings differ in that, too.",
        *seed_notes(results, [setting], labels),
        *capacity_notes(results, [setting], labels),
        *run_notes(results.among(setting, labels)),
    ]
    columns = [Column("method"), Column("seeds"), Column("client's model"), Column("routing")]
    columns += [Column(head, STAT, group="loss") for head in keys.values()]
    return Table(
        f"table1_personalised{suffix}",
        f"Personalised protocol: each client's model ({setting.text})",
        columns,
        rows,
        notes,
    )


def _title(results: Results, label: str) -> str:
    return results.title(label) + (" (pooled data, not ranked)" if results.is_pooled(label) else "")


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


def seed_notes(results: Results, settings: Sequence[Setting], labels: Sequence[str]) -> list[str]:
    """Return a note if rows of a setting have different seeds."""
    return uneven([{label: [c.seed for c in results.of(setting, label)] for label in labels} for setting in settings])


def on_fewer_seeds(results: Results, setting: Setting, main: str, others: Sequence[str]) -> list[tuple[str, Results]]:
    """Return (title, results) of ``main`` on those of its seeds alone that one of ``others`` has, where it has more.

    A difference is one from these means.
    """
    whole = [cell.seed for cell in results.of(setting, main)]
    theirs = [{cell.seed for cell in results.of(setting, label)} for label in others]
    found = dict.fromkeys(tuple(seed for seed in whole if seed in seeds) for seeds in theirs)
    return [
        (f"{results.title(main)} ({seed_words(seeds)} only)", results.only(setting, main, seeds))
        for seeds in found
        if 0 < len(seeds) < len(whole)
    ]


def uneven(settings: Iterable[Mapping[str, Iterable[int]]]) -> list[str]:
    """Return the same note, given label → seeds of each setting's rows; a label without seeds has no row."""
    for by_label in settings:
        if len({tuple(sorted(seeds)) for seeds in by_label.values()} - {()}) > 1:
            return ["Not every row has the same seeds; means over different seeds are not a paired comparison."]
    return []


def capacity_notes(results: Results, settings: Sequence[Setting], labels: Sequence[str]) -> list[str]:
    """Return a note if models of one setting and seed that have experts differ in experts × rank."""
    for setting in settings:
        sizes: dict[int, set[int]] = {}
        for cell in results.among(setting, [x for x in labels if x in results.labels() and not results.is_native(x)]):
            if (count := cell.get("experts")) is not None and (rank := cell.get("rank")) is not None:
                sizes.setdefault(cell.seed, set()).add(count * rank)
        if any(len(found) > 1 for found in sizes.values()):
            return ["Models of one seed differ in experts × rank, and so in capacity: methods choose how many experts."]
    return []


def run_notes(cells: Sequence[Cell]) -> list[str]:
    """Return what a table of test results says of the runs it comes from: rows left out, versions that differ."""
    return [*length_notes(cells), *mixture_notes(cells)]


def length_notes(cells: Sequence[Cell]) -> list[str]:
    """Return a note if test rows were left out because their prompts fill all tokens; old records do not say."""
    counts: dict[str, set[int]] = {}
    for cell in cells:
        for task, count in (cell.get("test_rows_too_long") or {}).items():
            counts.setdefault(task, set()).add(count)
    found = [
        f"{min(each)}{f'–{max(each)}' if len(each) > 1 else ''} of {task}" for task, each in counts.items() if any(each)
    ]
    return [f"Test rows left out of a run because their prompts fill all tokens: {listed(found)}."] if found else []


def routings(results: Results, setting: Setting, label: str, *, personal: bool = False) -> list[str]:
    """Return how a label's global model, or its clients' models, chose among experts; nothing where there is one."""
    cells = [c for c in results.of(setting, label) if (c.get("experts") or 1) > 1 and not results.is_native(label)]
    used = (c.get("personalised", "routing") if personal else c.mode for c in cells)
    return list(dict.fromkeys(str(mode) for mode in used if mode))


def routing_words(results: Results, setting: Setting, label: str, *, personal: bool = False) -> str:
    """Return a table's words for ``routings``."""
    if results.is_native(label):
        return "the backbone's own, of every token"
    return listed(routings(results, setting, label, personal=personal)) or "none, one adapter"


def beside(printed: paper.Printed | None, setting: Setting, show: Callable[[float], str] = number) -> Entry:
    """Return the paper's number beside ours of its setting, α = 0.3; beside others it would mislead."""
    return value(printed.value if printed and setting.get("alpha") == paper.ALPHA else None, show)
