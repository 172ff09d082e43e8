"""Parameters, bytes, steps, seconds and memory: the paper's Table 5 and Appendix B, the latter measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from fedloom.bench import fedweave_paper as paper
from fedloom.bench.layout import STAT, Column, Entry, Table, stat, value, words
from fedloom.bench.results import AXES, MAIN, Cell, Results, Stat, mixture_notes
from fedloom.budget import HUB_NAMES, Budget, budget, payload
from fedloom.errors import FedloomError
from fedloom.methods import METHODS
from fedloom.report.wording import duration, listed, number, plural, size, visible, whole
from fedloom.types import AdapterSpec

#: The number of experts that FedWeave and FedLEASE selected in the paper's reported runs.
EXPERTS = 4
NAMED = {"llama-3.2-3b": paper.LLAMA, "gemma-2-2b": paper.GEMMA}


def budget_table(results: Results) -> Table:
    """Table 5: trainable parameters of every method in the suite, from the architectures alone."""
    own = list(dict.fromkeys(_short(s.backbone) for s in results.settings))
    names = list(dict.fromkeys(results.method(label) for label in results.labels()))
    native = [name for name in names if name in METHODS and METHODS[name].native]
    # The paper's backbones have no experts of their own.
    backbones = list(dict.fromkeys([*(NAMED if len(native) < len(names) else ()), *own]))
    unknown = [name for name in names if name not in METHODS]
    columns = [
        Column("backbone"),
        Column("method"),
        Column("experts"),
        Column("experts found", STAT),
        Column("rank"),
        Column("LoRA"),
        Column("routers and other"),
        Column("total"),
        Column("trained", group="per client and round:"),
        Column("up", group="per client and round:"),
        Column("down", group="per client and round:"),
        Column("signature, values"),
        Column("probe up, values"),
        Column("LoRA", group="paper:"),
        Column("total", group="paper:"),
    ]
    rows = []
    uncounted = "Optimizer state is" if len(native) == len(names) else "The frozen backbone and optimizer state are"
    notes = [
        f"Numbers of values, float32: times 4 for bytes. {uncounted} not counted.",
        f"Experts: {EXPERTS} on the paper's backbones, as many as it found; else the most that a run here found. "
        "Beside: the mean of the runs here, of all settings and seeds, ± standard deviation (n − 1) over these runs.",
        "Per client and round, at most: what a client trains, and what the method's own rules send up and down. Dense "
        "additions to the weights (FLoRA, FedEx-LoRA) go down, frozen factors too.",
        "A signature is the B factors of one warm-up, of each bucket, once. A goes with it: experts start from both.",
    ]
    bare, partial = False, dict[str, None]()
    for backbone in backbones:
        for method in (name for name in names if name in METHODS and (name not in native or backbone in own)):
            runs = [c for c in results.cells if _short(c.setting.backbone) == backbone and c.record["method"] == method]
            bare = bare or not runs
            groups = budgets_of(backbone, method, runs)
            for found, cells in groups.items():
                if isinstance(found, str):
                    notes.append(found)
                    continue
                title = METHODS[method].title
                if len(groups) > 1:
                    title = listed(list(dict.fromkeys(str(cell.record["title"]) for cell in cells)))
                counts = Stat.of(c.get("experts") for c in cells if method not in native)
                rows.append(_budget_row(found, title, counts))
                if method in native and found.trained < found.total:
                    partial[title] = None
    notes += _default_notes(results.cells, bare)
    if native:
        titles = listed([METHODS[name].title for name in native])
        notes.append(
            f"{titles}: counted as the whole backbone, trained without LoRA (rank 0). Its own experts, of all mixture "
            "layers, stand in the column LoRA, all else under routers and other."
        )
        if any(_asked(cell)["native"] == "lora" for cell in results.cells):
            notes.append("Where the rank is not 0, a LoRA on each of these experts is trained instead, nothing else.")
    if partial:
        notes.append(f"A client of {listed(list(partial))} gets, trains and sends a part of the experts only.")
    if unknown:
        notes.append(f"Not counted, for they are no registered method: {listed(unknown)}.")
    notes.append(f"Paper: {paper.place(paper.BUDGET)}, as it rounds them.")
    notes += mixture_notes(results.cells)
    return Table("table5", "Trainable-parameter budget", columns, rows, notes)


def _short(backbone: str) -> str:
    """Return the name of ``budget.ARCHITECTURES`` of a backbone that has one."""
    return HUB_NAMES.get(backbone, backbone)


def budgets_of(backbone: str, method: str, runs: Sequence[Cell]) -> dict[Budget | str, list[Cell]]:
    """Return a method's budgets on a backbone as its runs have it, each with its runs; without runs, by defaults.

    A text in place of a budget says why there is none: a table shows what can be counted and names what cannot.
    """
    found = Stat.of(c.get("experts") for c in runs)
    most = EXPERTS if backbone in NAMED or METHODS[method].native else int(max(found.values, default=EXPERTS))
    asked: dict[str, list[Cell]] = {}
    for cell in runs:
        asked.setdefault(json.dumps(_asked(cell), sort_keys=True), []).append(cell)
    groups: dict[Budget | str, list[Cell]] = {}
    for how, cells in (asked or {"{}": []}).items():
        groups.setdefault(_budget(backbone, method, most, json.loads(how)), []).extend(cells)
    return groups


def _asked(cell: Cell) -> dict[str, Any]:
    """Return what a record says of rank, targets and options; old ones hold the rank alone."""
    adapter, method = (cell.get("config", section) or {} for section in ("adapter", "method"))
    return {
        "rank": adapter.get("rank", cell.get("rank")),
        "targets": adapter.get("targets"),
        "native": adapter.get("native") or "full",
        "options": {name: option for name, option in method.items() if name != "name"},
    }


def _budget(backbone: str, method: str, experts: int, asked: Mapping[str, Any]) -> Budget | str:
    try:
        return budget(backbone, method, experts, **asked)
    except FedloomError as error:
        return f"Not counted: {visible(method)} on {visible(backbone)} ({error})"


def _default_notes(cells: Sequence[Cell], bare: bool) -> list[str]:
    """Say which rows are counted by defaults: of records that do not say more and, if ``bare``, those without runs."""
    cells = [cell for cell in cells if cell.record["method"] in METHODS]
    silent = sum(cell.get("config") is None for cell in cells)
    notes = []
    if silent:
        some = "" if silent == len(cells) else f" in {silent} of {len(cells)} runs"
        notes.append(f"Adapted modules and methods' options{some}: defaults, not this suite's; the records do not say.")
    if bare:
        notes.append("On backbones without runs here: each method's default rank, modules and options.")
    return notes


def _budget_row(found: Budget, title: str, counts: Stat) -> list[Entry]:
    theirs = [
        paper.BUDGET.get((found.method, what)) if NAMED.get(found.backbone) == paper.LLAMA else None
        for what in ("lora", "total")
    ]
    return [
        words(NAMED.get(found.backbone, found.backbone)),
        words(title),
        value(found.experts, str),
        stat(counts, counts.n, lambda v: number(v, 2)),
        value(found.rank, str),
        *(value(n, _whole) for n in (found.lora, found.router, found.total, found.trained, found.up, found.down)),
        *(value(n or None, _whole) for n in (found.signature, found.probe)),
        *(value(p.value if p else None, lambda v: f"{v / 1e6:.2f}M") for p in theirs),
    ]


def cost_table(results: Results) -> Table:
    """Appendix B: what a method costs in traffic, extra steps, time and memory, as measured."""
    settings = results.settings
    axes = [name for name in AXES if any(s.get(name) is not None for s in settings)] if len(settings) > 1 else []

    def cost(key: str) -> Callable[[Cell], float | None]:
        return lambda cell: cell.get("costs", key)

    def traffic(key: str) -> Callable[[Cell], float | None]:
        return lambda cell: cell.get("costs", key) if has_traffic(cell.record["method"]) else None

    measured: list[tuple[str, str, Callable[[Cell], float | None], Callable[[float], str]]] = [
        ("up", "per client and round:", traffic("bytes_up"), size),
        ("down", "per client and round:", traffic("bytes_down"), size),
        ("up", "probe, per client:", traffic("probe_bytes_up"), size),
        ("down", "probe, per client:", traffic("probe_bytes_down"), size),
        ("warm-up steps / local steps", "", warmup_share, lambda v: f"{100 * v:.1f} %"),
        ("probe", "time:", cost("probe_seconds"), duration),
        ("a round", "time:", cost("round_seconds"), duration),
        ("training", "time:", cost("train_seconds"), duration),
        *([("server", "time:", cost("server_seconds"), duration)] if timed(results.cells) else []),
        ("with evaluation", "time:", whole_seconds, duration),
        ("peak resident memory of the process", "", cost("peak_bytes"), size),
    ]
    on_device = any(cell.get("costs", "peak_device_bytes") is not None for cell in results.cells)
    if on_device:
        measured.append(("peak memory on the accelerator", "", cost("peak_device_bytes"), size))
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
        "Probe, a round, training: from the first order to the last reply, of clients that work one after another. "
        "Embedding the prompts comes before the probe and is not in its time.",
        *_server_notes(results.cells),
        "Memory: the most that the host process ever held, evaluation included; that of an accelerator is not in it"
        + (", but beside it: the most that its tensors took at once." if on_device else "."),
        *_traffic_notes(results),
        f"Paper: {paper.WARMUP_SHARE.where}.",
    ]
    if resumed := sum(bool(cell.get("resumed")) for cell in results.cells):
        notes.append(
            f"{plural(resumed, 'run')} went on from a checkpoint: its time with evaluation is known only since then "
            "and is left out of the mean; its memory is that of the last process."
        )
    notes += mixture_notes(results.cells)
    return Table("costs", "Measured costs", columns, rows, notes)


def timed(cells: Sequence[Cell]) -> int:
    """Return of how many runs the server's time is known."""
    return sum(cell.get("costs", "server_seconds") is not None for cell in cells)


def _server_notes(cells: Sequence[Cell]) -> list[str]:
    """Say what the server's time holds, and of how many runs it is known."""
    known = timed(cells)
    if not known:
        return [
            "What the server does (reading replies, aligning buckets, merging) was not measured apart in these runs: "
            "it is in the time with evaluation alone."
        ]
    older = f" {plural(len(cells) - known, 'older run')} did not measure it." if known < len(cells) else ""
    return [
        "Server: what it does beside that, in the probe and all rounds: making orders, reading and checking replies, "
        "aligning buckets, merging. It is not in the times before it." + older
    ]


@cache
def has_traffic(method: str) -> bool:
    """Return whether a method's clients send anything to a server; a method that is not registered may."""
    if method not in METHODS or METHODS[method].native:
        return True
    return payload(METHODS[method](), AdapterSpec(("x",), rank=1), {"x": (1, 1)}, 1, 1).up > 0


def whole_seconds(cell: Cell) -> float | None:
    """Return a run's time with evaluation; None where it was resumed, whose clock began in the middle."""
    return None if cell.get("resumed") else cell.get("seconds")


def _traffic_notes(results: Results) -> list[str]:
    """Say what the bytes of some methods hold that a leaner exchange would not, and why others have none."""
    titles = {str(c.record["method"]): c.record["title"] for c in results.cells}
    notes = []
    if silent := [title for method, title in titles.items() if not has_traffic(method)]:
        notes.append(
            f"{listed(silent)}: no traffic, so no bytes. The simulation's orders bring the first adapter all the "
            "same, of which Local makes no use after a client's first round."
        )
    idle = {"ffa_lora": "the frozen A", "fedsa_lora": "the first B, which a client with one of its own does not use"}
    if held := [f"{titles[method]} {what}" for method, what in idle.items() if method in titles]:
        notes.append(f"Down is what is sent here with every order; it holds of {'; of '.join(held)}.")
    return notes


def warmup_share(cell: Cell) -> float | None:
    """Return steps of the probe over local steps of the rounds, C/20 in the paper (Appendix B); None without probe."""
    probe, steps = cell.get("costs", "probe_steps"), cell.get("costs", "steps")
    return probe / steps if probe and steps else None


def _whole(found: float) -> str:
    return whole(int(found))
