"""The quickstart's configuration, and the words at the end of a run: what happened and what to type next."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedloom.config import Config, parse_config
from fedloom.evaluation.scores import scoring
from fedloom.report.folder import a_model, is_routed
from fedloom.types import Plain

#: A loss of one expert alone that is this many times the mixture's is worth a word.
NOTICEABLE = 1.02
TASKS = ("gsm8k", "arc_challenge", "tweet_eval_sentiment", "text_edit")


def quickstart_config(backbone: str) -> Config:
    """Return FedWeave on the packaged rows: three clients that mix four tasks, sized for minutes on two cores."""
    return parse_config(
        {
            "seed": 7,
            "method": {"name": "fedweave", "warmup_steps": 4, "warmup_batch": 4},
            "backbone": {"name": backbone},
            "data": {
                "benchmark": {
                    "tasks": list(TASKS),
                    "root": str(files("fedloom") / "assets" / "quickstart"),
                    "clients": 3,
                    "alpha": 1.0,
                    "train": 24,
                    "val": 0,
                    "test": 6,
                }
            },
            "federation": {"rounds": 3},
            # Experts at ten times the paper's rate: the paper takes 200 local steps, this run 15. The router stays near
            # the paper's: at 1e-3 its large inputs pushed all gates to one expert within the first steps.
            "training": {"steps": 5, "batch_size": 4, "lr": 1e-3, "router_lr": 1e-4},
            "evaluation": {"routing": ["top1", "soft"], "generate_before": True},
        },
        where="quickstart",
    )


def explain(console: Console, out: Path, metrics: dict[str, Plain]) -> None:
    """Say what a run found and did, in words and two tables."""
    alignment = metrics.get("alignment")
    model = a_model(out)
    routed = is_routed(model)
    if alignment:
        _explain_buckets(console, alignment)
    if metrics.get("routing"):
        _explain_scores(console, metrics, routed)
        _explain_sparsity(console, metrics)
    if metrics.get("routing_matrix"):
        _explain_routing(console, metrics["routing_matrix"])
    console.print(f"\nDone in {metrics['seconds'] / 60:.1f} minutes.", style="bold", highlight=False)
    _whole(console, f"  model   {model}")
    if model.parent != out:
        _whole(console, f"          (every client has its own in {model.parent})")
    _whole(console, f"  report  {out / 'report.html'}  (open it in a browser)")
    console.print("\nNext:", style="bold")
    question = "Sam has 3 boxes of 4 pens and gives 5 pens away. How many are left?"
    gates = ["--explain"] if routed else []
    _whole(console, "  " + shlex.join(["fedloom", "generate", str(model), *gates, "--prompt", question]))
    _whole(console, "  " + shlex.join(["fedloom", "evaluate", str(model), "--task", "mine=FILE.jsonl"]))


def results(console: Console, out: Path, metrics: dict[str, Plain]) -> None:
    """Print what ``--quiet`` asks for: the table of results, and the model's folder."""
    model = a_model(out)
    if metrics.get("routing"):
        _explain_scores(console, metrics, is_routed(model))
    _whole(console, str(model))


def _whole(console: Console, line: str) -> None:
    """Print a line to copy from: as it stands, not folded at the console's width."""
    console.print(Text(line), soft_wrap=True)


def _explain_buckets(console: Console, alignment: dict[str, Plain]) -> None:
    clients = alignment["clients"]
    buckets = sum(len(found["buckets"]) for found in clients.values())
    experts = 1 + max(bucket["expert"] for found in clients.values() for bucket in found["buckets"])
    console.print(
        f"\nEach client sorted its own examples, without labels: {buckets} buckets in {len(clients)} clients. The "
        f"server matched them into {experts} experts. (Purity against the hidden task names: "
        f"{alignment['local']['purity']:.2f} in buckets, {alignment['global']['purity']:.2f} in experts.)",
        highlight=False,
    )
    if len(clients) > 6:
        return
    table = Table("client", "bucket", "examples", "shares expert", "what is in it (hidden from training)")
    for name, found in clients.items():
        for c, bucket in enumerate(found["buckets"]):
            inside = Text(", ".join(f"{count} {task}" for task, count in bucket["tasks"].items()))
            table.add_row(name if c == 0 else "", str(c), str(bucket["examples"]), str(bucket["expert"]), inside)
    console.print(table)


def _explain_scores(console: Console, metrics: dict[str, Plain], routed: bool) -> None:
    mode, after = next(iter(metrics["routing"].items()))
    before = metrics.get("before") or {}
    bare, start = before.get("loss_backbone", {}), before.get("loss", {})
    scores, old_scores = after.get("score", {}), before.get("score", {})
    counted = Text(scoring(task for task in after["loss"] if task != "macro")) if scores else None
    table = Table(title=f"Test rows, {mode} routing" if routed else "Test rows", caption=counted)
    for heading in ("task", "loss: backbone", "before round 1", "after", "score: backbone", "after"):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for task in after["loss"]:
        table.add_row(
            Text(task),
            *(_number(values.get(task)) for values in (bare, start, after["loss"], old_scores, scores)),
            style="bold" if task == "macro" else None,
        )
    console.print(table)


def _explain_routing(console: Console, matrix: dict[str, Plain]) -> None:
    experts = len(next(iter(matrix.values()))["gate"])
    table = Table(title="Where the router sends each task (share of test rows; mean gate in brackets)")
    table.add_column("task")
    for m in range(experts):
        table.add_column(f"expert {m}", justify="right")
    for task, row in matrix.items():
        cells = [f"{share:.0%} ({gate:.2f})" for share, gate in zip(row["top1"], row["gate"], strict=True)]
        table.add_row(Text(task), *cells)
    console.print(table)
    favourites = {max(range(experts), key=row["top1"].__getitem__) for row in matrix.values()}
    if len(matrix) > 1 and experts > 1 and len(favourites) == 1:
        console.print(
            "The router prefers one expert for every task: it has not learnt yet to tell them apart, though the "
            "experts differ. It needs more rounds than this run had.",
            highlight=False,
        )


def _explain_sparsity(console: Console, metrics: dict[str, Plain]) -> None:
    """Say so where one expert alone answers clearly worse than the mixture of all."""
    found = metrics["routing"]
    if not {"top1", "soft"} <= found.keys():
        return
    one, all_of_them = (found[mode]["loss"]["macro"] for mode in ("top1", "soft"))
    if one is None or all_of_them is None or one <= NOTICEABLE * all_of_them:
        return
    soft = found["soft"]["loss"]
    more = {
        task: loss - soft[task]
        for task, loss in found["top1"]["loss"].items()
        if task != "macro" and None not in (loss, soft[task])
    }
    worst = max(more, key=more.__getitem__)
    console.print(
        f"One expert alone (top-1) has {one / all_of_them - 1:.0%} more loss than the soft mixture of all, mostly on "
        f"{worst}: the router is not sure there. --routing top2 or soft answers better, more slowly.",
        markup=False,
        highlight=False,
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
