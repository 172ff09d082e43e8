"""Parameters, bytes, steps, seconds and memory: the paper's Table 5 and Appendix B, the latter measured."""

from __future__ import annotations

from collections.abc import Callable

from fedloom.bench import paper
from fedloom.bench.layout import STAT, Column, Entry, Table, stat, value, words
from fedloom.bench.results import AXES, MAIN, Cell, Results, Stat
from fedloom.budget import Budget, budget
from fedloom.errors import FedloomError
from fedloom.methods import METHODS
from fedloom.report.wording import duration, listed, size, visible, whole

#: The number of experts that FedWeave and FedLEASE selected in the paper's reported runs.
EXPERTS = 4
NAMED = {"llama-3.2-3b": paper.LLAMA, "gemma-2-2b": paper.GEMMA}


def budget_table(results: Results) -> Table:
    """Table 5: trainable parameters of every method in the suite, from the architectures alone."""
    own = list(dict.fromkeys(s.backbone for s in results.settings))
    names = list(dict.fromkeys(results.method(label) for label in results.labels()))
    native = [name for name in names if name in METHODS and METHODS[name].native]
    # The paper's backbones have no experts of their own.
    backbones = list(dict.fromkeys([*(NAMED if len(native) < len(names) else ()), *own]))
    unknown = [name for name in names if name not in METHODS]
    columns = [
        Column("backbone"),
        Column("method"),
        Column("experts"),
        Column("rank"),
        Column("LoRA"),
        Column("routers and other"),
        Column("total"),
        Column("bytes, float32"),
        Column("signature, values"),
        Column("LoRA", group="paper:"),
        Column("total", group="paper:"),
    ]
    rows = []
    notes = [f"Counts exclude the frozen backbone and optimizer state; {EXPERTS} experts where a method has several."]
    if native:
        titles = listed([METHODS[name].title for name in native])
        notes.append(f"{titles}: the backbone's own experts, of each mixture layer, stand under LoRA, at rank 0.")
    for backbone in backbones:
        for method in (name for name in names if name in METHODS and (name not in native or backbone in own)):
            found = _budget(backbone, method)
            if isinstance(found, Budget):
                rows.append(_budget_row(found))
            else:
                notes.append(found)
    if unknown:
        notes.append(f"Not counted, for they are no registered method: {listed(unknown)}.")
    notes.append(f"Paper: {paper.place(paper.BUDGET)}, as it rounds them.")
    return Table("table5", "Trainable-parameter budget", columns, rows, notes)


def _budget(backbone: str, method: str) -> Budget | str:
    """Return a budget, or why there is none: a table shows what can be counted and names what cannot."""
    try:
        return budget(backbone, method, EXPERTS)
    except FedloomError as error:
        return f"Not counted: {visible(method)} on {visible(backbone)} ({error})"


def _budget_row(found: Budget) -> list[Entry]:
    theirs = [
        paper.BUDGET.get((found.method, what)) if NAMED.get(found.backbone) == paper.LLAMA else None
        for what in ("lora", "total")
    ]
    return [
        words(NAMED.get(found.backbone, found.backbone)),
        words(METHODS[found.method].title),
        value(found.experts, str),
        value(found.rank, str),
        *(value(n, _whole) for n in (found.lora, found.router, found.total)),
        value(found.round_bytes, size),
        value(found.signature or None, _whole),
        *(value(p.value if p else None, lambda v: f"{v / 1e6:.2f}M") for p in theirs),
    ]


def cost_table(results: Results) -> Table:
    """Appendix B: what a method costs in traffic, extra steps, time and memory, as measured."""
    settings = results.settings
    axes = [name for name in AXES if any(s.get(name) is not None for s in settings)] if len(settings) > 1 else []

    def cost(key: str) -> Callable[[Cell], float | None]:
        return lambda cell: cell.get("costs", key)

    measured: list[tuple[str, str, Callable[[Cell], float | None], Callable[[float], str]]] = [
        ("up", "per client and round:", cost("bytes_up"), size),
        ("down", "per client and round:", cost("bytes_down"), size),
        ("up", "probe, per client:", cost("probe_bytes_up"), size),
        ("down", "probe, per client:", cost("probe_bytes_down"), size),
        ("warm-up steps / local steps", "", warmup_share, lambda v: f"{100 * v:.1f} %"),
        ("probe", "time:", cost("probe_seconds"), duration),
        ("a round", "time:", cost("round_seconds"), duration),
        ("training", "time:", cost("train_seconds"), duration),
        ("with evaluation", "time:", lambda cell: cell.get("seconds"), duration),
        ("peak memory", "", cost("peak_bytes"), size),
    ]
    columns = [
        *([Column("backbone"), *(Column(AXES[name]) for name in axes)] if len(settings) > 1 else []),
        Column("method"),
        Column("seeds"),
        *(Column(head, STAT, group=group) for head, group, _, _ in measured),
        Column("warm-up share", group="paper, four buckets:"),
    ]
    rows = []
    for setting in settings:
        for label in results.labels(setting):
            cells = results.of(setting, label)
            share = paper.WARMUP_SHARE.value if label == MAIN else None
            rows.append(
                [
                    *([words(setting.backbone)] if len(settings) > 1 else []),
                    *(value(setting.get(name), str) for name in axes),
                    words(results.title(label)),
                    value(len(cells), str),
                    *(stat(Stat.of(get(c) for c in cells), len(cells), show) for _, _, get, show in measured),
                    value(share, lambda v: f"{100 * v:.0f} %"),
                ]
            )
    notes = [
        "Mean ± standard deviation (n − 1) over seeds. Bytes are of encoded messages. The CSV holds bytes and seconds.",
        "Time and memory are of the machine that ran it; other work there makes them larger.",
        f"Paper: {paper.WARMUP_SHARE.where}.",
    ]
    return Table("costs", "Measured costs", columns, rows, notes)


def warmup_share(cell: Cell) -> float | None:
    """Return steps of the probe over local steps of the rounds, C/20 in the paper (Appendix B); None without probe."""
    probe, steps = cell.get("costs", "probe_steps"), cell.get("costs", "steps")
    return probe / steps if probe and steps else None


def _whole(found: float) -> str:
    return whole(int(found))
