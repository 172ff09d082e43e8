"""The FC-MoE paper's tables, for methods that train a backbone's own experts; its numbers in columns of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedloom.bench import fcmoe_paper as paper
from fedloom.bench.layout import DIFFERENCE, STAT, Column, Entry, Table, difference, marked, marks, stat, value, words
from fedloom.bench.pairing import seed_words
from fedloom.bench.results import NATIVE_MAIN, Cell, Results, Setting, Stat
from fedloom.bench.significance import Comparisons
from fedloom.bench.tables import INTERVALS, MEANS, RANKED, on_fewer_seeds, run_notes, seed_notes, uneven
from fedloom.methods.fedmoe import FedMoEOptions
from fedloom.report.wording import listed, number

BASELINE = "fedavg_moe"
#: Share of the baseline's last accuracy that counts as converged (Figure 3a; the paper does not state its target).
TARGET = 0.95
MEASURES = ("accuracy", "precision", "recall")
AGAINST = f"Paper: {paper.BACKBONE}, of a size that it does not state"


def fcmoe_tables(results: Results, comparisons: Comparisons) -> list[Table]:
    """Return every table that the results can fill; none without a method for native experts."""
    tasks = dict.fromkeys(task for setting in native_settings(results) for task in classified(results, setting))
    found: list[Table | None] = [accuracy_table(results, comparisons, task) for task in tasks]
    found += [
        ablation_table(results, comparisons),
        local_table(results),
        convergence_table(results),
        conflict_table(results),
    ]
    return [table for table in found if table is not None]


def native_settings(results: Results) -> list[Setting]:
    """Return the settings with a method for native experts, by backbone, task and α."""
    found = [s for s in results.settings if any(results.is_native(label) for label in results.labels(s))]
    return sorted(found, key=lambda s: (s.backbone, str(s.get("tasks")), s.get("alpha") or 0.0, s.text))


def classified(results: Results, setting: Setting) -> list[str]:
    """Return the tasks whose generated labels were compared with the true ones."""
    cells = [cell for label in results.labels(setting) for cell in results.of(setting, label)]
    return list(dict.fromkeys(task for cell in cells for task in classes(cell)))


def classes(cell: Cell) -> Mapping[str, Mapping[str, float]]:
    """Return task → ``classification.label_metrics`` of a cell's global model."""
    return cell.get("routing", cell.mode or "", "classes") or {}


def native_labels(results: Results, setting: Setting) -> list[str]:
    """Return the labels of the main comparison that train native experts, FC-MoE last as in the paper."""
    labels = [label for label in results.compared(setting) if results.is_native(label)]
    return sorted(labels, key=lambda label: label == NATIVE_MAIN)


def ablated_labels(results: Results, setting: Setting) -> list[str]:
    """Return FC-MoE's ablations in the paper's order, its other variants, and FC-MoE; none without a variant."""
    variants = [x for x in results.labels(setting) if results.is_native(x) and results.is_variant(x)]
    order = list(paper.ABLATION["ag_news"])
    variants.sort(key=lambda label: order.index(label) if label in order else len(order))
    whole = [NATIVE_MAIN] if NATIVE_MAIN in results.labels(setting) else []
    return [*variants, *whole] if variants else []


def accuracy_table(results: Results, comparisons: Comparisons, task: str) -> Table | None:
    """Table I: the global model's accuracy, macro precision and macro recall of one task, for every α."""
    settings = [s for s in native_settings(results) if task in classified(results, s)]
    alone = all(results.tasks(s) == [task] for s in settings)  # then the macro score is this task's accuracy
    columns = [
        *_where(settings),
        Column("method"),
        Column("seeds"),
        *(Column(measure, STAT) for measure in MEASURES),
        *([Column("accuracy", DIFFERENCE, group="minus FC-MoE:")] if alone else []),
        *(Column(measure, group="paper:") for measure in MEASURES),
    ]
    rows: list[list[Entry]] = []
    for setting in settings:
        labels = native_labels(results, setting)
        stats = {
            measure: {
                label: results.stat(setting, label, lambda c, m=measure: classes(c).get(task, {}).get(m))  # type: ignore[misc]
                for label in labels
            }
            for measure in MEASURES
        }
        ranks = {measure: marks(found, lowest=False) for measure, found in stats.items()}
        for label in labels:
            seeds = len(results.of(setting, label))
            printed = paper.GLOBAL.get(task, {}).get(label, {}).get(setting.get("alpha"), (None, None, None))
            rows.append(
                [
                    *_place(setting, settings),
                    words(results.title(label)),
                    value(seeds, str),
                    *(marked(stat(stats[m][label], seeds), ranks[m].get(label, "")) for m in MEASURES),
                    *([_against(comparisons, setting, label)] if alone else []),
                    *(value(theirs) for theirs in printed),
                ]
            )
        theirs = paper.GLOBAL.get(task, {}).get("pfl_moe", {}).get(setting.get("alpha"))
        if labels and theirs and "pfl_moe" not in labels:
            title = words("PFL-MoE (paper only)")
            empty = [value(None), *(stat(Stat(), 0) for _ in MEASURES), *([difference(None)] if alone else [])]
            rows.append([*_place(setting, settings), title, *empty, *(value(v) for v in theirs)])
    notes = [MEANS, RANKED, *([INTERVALS] if alone else [])]
    notes.append("Precision and recall are plain means over labels; an answer that is no label counts as wrong.")
    notes.append(f"{AGAINST}. {paper.TABLE1}.")
    notes.append("PFL-MoE's global model is FedAvg's here; the paper does not say which of its models it tested.")
    notes += _seeds(results, settings, native_labels)
    notes += [*_capacity(results), *_mixed(results, settings)]
    return Table(f"fcmoe_table1_{task}", f"Global model by label skew: {task}", columns, rows, notes) if rows else None


def ablation_table(results: Results, comparisons: Comparisons) -> Table | None:
    """Table II: FC-MoE without one of its parts, by test and local accuracy."""
    settings = [s for s in native_settings(results) if ablated_labels(results, s)]
    if not settings:
        return None
    columns = [
        *_where(settings),
        Column("method"),
        Column("seeds"),
        Column("test accuracy", STAT),
        Column("local accuracy", STAT),
        Column("test accuracy", DIFFERENCE, group="minus FC-MoE:"),
        Column("test accuracy", group="paper:"),
        Column("local accuracy", group="paper:"),
    ]
    rows = []
    for setting in settings:
        labels = ablated_labels(results, setting)
        tests = {label: results.stat(setting, label, global_accuracy) for label in labels}
        homes = {label: results.stat(setting, label, local_accuracy) for label in labels}
        test_ranks, home_ranks = marks(tests, lowest=False), marks(homes, lowest=False)
        for label in labels:
            seeds = len(results.of(setting, label))
            same = setting.get("alpha") == paper.ALPHA and len(results.tasks(setting)) == 1
            printed = paper.ABLATION.get(results.tasks(setting)[0], {}).get(label) if same else None
            rows.append(
                [
                    *_place(setting, settings),
                    words(results.title(label)),
                    value(seeds, str),
                    marked(stat(tests[label], seeds), test_ranks.get(label, "")),
                    marked(stat(homes[label], seeds), home_ranks.get(label, "")),
                    _against(comparisons, setting, label),
                    *(value(theirs) for theirs in printed or (None, None)),
                ]
            )
        for title, part in on_fewer_seeds(results, setting, NATIVE_MAIN, labels):
            seeds = len(part.of(setting, NATIVE_MAIN))
            found = (stat(part.stat(setting, NATIVE_MAIN, get), seeds) for get in (global_accuracy, local_accuracy))
            empty = (difference(None), value(None), value(None))
            rows.append([*_place(setting, settings), words(title), value(seeds, str), *found, *empty])
    notes = [MEANS, RANKED, INTERVALS, LOCAL, f"{AGAINST}. {paper.TABLE2}."]
    notes += [*_seeds(results, settings, ablated_labels), *_mixed(results, settings)]
    return Table("fcmoe_table2", "FC-MoE without one of its parts", columns, rows, notes)


LOCAL = (
    "Local accuracy: each client's own model on test rows of its labels, weighed as its training rows are; "
    "a plain mean over clients. The paper does not say on which rows it measures it."
)


def local_table(results: Results) -> Table | None:
    """The numbers behind Figure 3b: local accuracy over clients."""
    keys = {"mean": "mean", "spread": "spread over clients", "worst": "worst client"}
    settings = [s for s in native_settings(results) if _any(results, s, local_accuracy)]
    columns = [*_where(settings), Column("method"), Column("seeds"), Column("client's model")]
    columns += [Column(head, STAT, group="local accuracy:") for head in keys.values()]
    rows = []
    for setting in settings:
        labels = native_labels(results, setting)
        stats = {key: {label: results.stat(setting, label, local(key)) for label in labels} for key in keys}
        ranks = {key: marks(found, lowest=key == "spread") for key, found in stats.items()}
        for label in labels:
            cells = results.of(setting, label)
            own = "its own" if cells[0].get("personal") else "the shared one"
            entries = (marked(stat(stats[k][label], len(cells)), ranks[k].get(label, "")) for k in keys)
            rows.append(
                [*_place(setting, settings), words(results.title(label)), value(len(cells), str), words(own), *entries]
            )
    notes = [MEANS, RANKED, LOCAL, "Spread: standard deviation (n − 1) over the clients of a run; 0 of a single one."]
    notes += _seeds(results, settings, native_labels)
    notes += [*_retention(results), *_capacity(results), *_mixed(results, settings)]
    return Table("fcmoe_local", "Local accuracy over clients", columns, rows, notes) if rows else None


def convergence_table(results: Results) -> Table | None:
    """The numbers behind Figure 3a: rounds until the global model is nearly as good as FedAvg's last one."""
    settings = [s for s in native_settings(results) if any(targets(results, s).values())]
    columns = [*_where(settings), Column("method"), Column("seeds"), Column("target accuracy", STAT)]
    columns += [Column("seeds that reach it"), Column("rounds", STAT)]
    rows, seeds = [], []
    for setting in settings:
        goals = targets(results, setting)
        found = {label: rounds_to_target(results, setting, label) for label in native_labels(results, setting)}
        stats = {label: Stat.by(by_seed) for label, by_seed in found.items()}
        ranks = marks(stats, lowest=True)
        seeds.append(found)
        for label, by_seed in found.items():
            if by_seed:
                rows.append(
                    [
                        *_place(setting, settings),
                        words(results.title(label)),
                        value(len(by_seed), str),
                        stat(Stat.of(goals[seed] for seed in by_seed), len(by_seed)),
                        value(stats[label].n, str),
                        marked(stat(stats[label], len(by_seed), lambda v: number(v, 1)), ranks.get(label, "")),
                    ]
                )
    notes = [
        MEANS,
        RANKED,
        f"Target: {TARGET:.0%} of the accuracy that FedAvg has after its last round, of each seed.",
        *untargeted(results),
        "Rounds: the first measured round of training whose global model has it; the mean is over seeds that reach it.",
        "The paper's Figure 3a states neither its target nor its numbers.",
        *uneven(seeds),
        *_capacity(results),
        *_mixed(results, settings),
    ]
    return Table("fcmoe_fig3a", "Rounds to a target accuracy", columns, rows, notes) if rows else None


def conflict_table(results: Results) -> Table | None:
    """How often clients' updates of an expert oppose their consensus, over all rounds."""
    heads = {1: "in conflict", 2: "cosine, all pairs", 3: "length"}
    settings = [s for s in native_settings(results) if any(c.get("conflict") for c in _cells(results, s))]
    columns = [*_where(settings), Column("method"), Column("seeds"), *(Column(h, STAT) for h in heads.values())]
    rows, seeds = [], []
    for setting in settings:
        measured = {x: [c for c in results.of(setting, x) if c.get("conflict")] for x in results.labels(setting)}
        seeds.append({label: [c.seed for c in cells] for label, cells in measured.items()})
        for label, cells in measured.items():
            stats = [Stat.of(over_rounds(c, index) for c in cells) for index in heads]
            if cells:
                entries = (stat(found, len(cells)) for found in stats)
                rows.append([*_place(setting, settings), words(results.title(label)), value(len(cells), str), *entries])
    notes = [
        "Mean over rounds, ± standard deviation (n − 1) over seeds.",
        "In conflict: share of pairs of a client and an expert whose update has a negative cosine with the consensus. "
        "Cosine: its mean over all pairs, in conflict or not. "
        "Length: factor by which projection lengthens the consensus, mean over experts (1: nothing opposes it).",
        *uneven(seeds),
        *_mixed(results, settings),
    ]
    return Table("fcmoe_conflict", "Expert conflict", columns, rows, notes) if rows else None


def global_accuracy(cell: Cell) -> float | None:
    """Return the global model's accuracy after the last round, the plain mean over tasks."""
    return cell.measured("score")


def local_accuracy(cell: Cell) -> float | None:
    """Return the mean over clients of the accuracy of their own models."""
    return cell.get("personalised", "score", "mean")


def local(key: str) -> Callable[[Cell], float | None]:
    """Return a getter of a summary over clients: ``mean``, ``spread`` or ``worst``."""
    return spread_over_clients if key == "spread" else lambda cell: cell.get("personalised", "score", key)


def spread_over_clients(cell: Cell) -> float | None:
    """Return the standard deviation (n − 1) over clients of their accuracy; 0 of one client.

    From each client's own number: a record's ``spread`` was divided by n in older versions.
    """
    clients = (cell.get("personalised", "clients") or {}).values()
    found = Stat.of(client.get("score") for client in clients)
    return 0.0 if found.n == 1 else found.sd


def targets(results: Results, setting: Setting) -> dict[int, float]:
    """Return seed → the accuracy that counts as converged, from FedAvg's run of the same seed.

    There is none where the model before training has it already: what is reached then is not what training does.
    """
    found = {cell.seed: cell.get("score_curve") for cell in results.of(setting, BASELINE)}
    goals = {seed: (TARGET * curve[-1][1], curve[0]) for seed, curve in found.items() if curve}
    return {seed: goal for seed, (goal, (at, before)) in goals.items() if at > 0 or before < goal}


def untargeted(results: Results) -> list[str]:
    """Name the seeds without a target."""
    found: dict[Setting, list[int]] = {}
    for setting in native_settings(results):
        goals = targets(results, setting)
        found[setting] = [c.seed for c in results.of(setting, BASELINE) if c.get("score_curve") and c.seed not in goals]
    said = [f"{seed_words(seeds)} of {setting.text}" for setting, seeds in found.items() if seeds]
    if not said:
        return []
    why = f"there {TARGET:.0%} of FedAvg's last accuracy is not above that of the model before training"
    return [f"No target for {listed(said)}: {why}."]


def rounds_to_target(results: Results, setting: Setting, label: str) -> dict[int, int | None]:
    """Return seed → first measured round at the target, None where it is never reached; only seeds with a target.

    Round 0, before training, does not count.
    """
    goals = targets(results, setting)
    curves = {cell.seed: cell.get("score_curve") for cell in results.of(setting, label)}
    return {
        seed: next((int(at) for at, accuracy in curve if at > 0 and accuracy >= goals[seed]), None)
        for seed, curve in curves.items()
        if curve and seed in goals
    }


def over_rounds(cell: Cell, index: int) -> float | None:
    """Return the mean over rounds of one entry of the record's ``conflict``."""
    found = [line[index] for line in cell.get("conflict") or [] if line[index] is not None]
    return sum(found) / len(found) if found else None


def _against(comparisons: Comparisons, setting: Setting, label: str) -> Entry:
    if label == NATIVE_MAIN:
        return difference(None)
    found = comparisons.labels(setting, label, NATIVE_MAIN, "score")
    return difference(found, len(comparisons.results.of(setting, label)))


def _capacity(results: Results) -> list[str]:
    """Say what FedMoE's clients hold, which is less than the others' do."""
    capacity = FedMoEOptions().capacity
    if not any(results.method(label) == "fedmoe" for label in results.labels()):
        return []
    return [f"A client of FedMoE holds and trains {capacity:.0%} of the experts unless its suite says otherwise."]


def _retention(results: Results) -> list[str]:
    """Say what FC-MoE's retention is as printed."""
    if not any(results.method(label) == NATIVE_MAIN for label in results.labels()):
        return []
    return [
        "FC-MoE's retention as printed (Eq. 5, 6) is parallel to an expert's parameters Θ: a client's model differs "
        "from the global one by a factor of each expert, 1 + λ(Δ·Θ)/‖Θ‖², and by nothing else."
    ]


def _seeds(results: Results, settings: Sequence[Setting], labels: Callable[[Results, Setting], list[str]]) -> list[str]:
    return next(filter(None, (seed_notes(results, [s], labels(results, s)) for s in settings)), [])


def _mixed(results: Results, settings: Sequence[Setting]) -> list[str]:
    return run_notes([cell for setting in settings for cell in _cells(results, setting)])


def _any(results: Results, setting: Setting, get: Callable[[Cell], float | None]) -> bool:
    return any(get(cell) is not None for cell in _cells(results, setting))


def _cells(results: Results, setting: Setting) -> list[Cell]:
    return [cell for label in results.labels(setting) for cell in results.of(setting, label)]


def _where(settings: Sequence[Setting]) -> list[Column]:
    """Return columns for what tells the settings apart, and always α."""
    heads = [Column("backbone")] if len({s.backbone for s in settings}) > 1 else []
    heads += [Column("task")] if len({s.get("tasks") for s in settings}) > 1 else []
    return [*heads, Column("α")]


def _place(setting: Setting, settings: Sequence[Setting]) -> list[Entry]:
    heads = [words(setting.backbone)] if len({s.backbone for s in settings}) > 1 else []
    heads += [words(str(setting.get("tasks")))] if len({s.get("tasks") for s in settings}) > 1 else []
    return [*heads, value(setting.get("alpha"), str)]
