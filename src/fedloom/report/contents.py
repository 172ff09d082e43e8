"""From the files of a run to what the page says: plain numbers and sentences, no markup but the curves."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from fedloom.data.tasks import TASKS
from fedloom.evaluation.scores import scoring
from fedloom.methods import METHODS
from fedloom.report.figures import describe, loss_curve, traffic_bars, training_curve
from fedloom.report.folder import Bucket, RunFolder, a_model, is_routed
from fedloom.report.wording import change, listed, plural, privacy_words, spans, visible, whole

ROUTINGS = {"top1": "the one best expert answers", "soft": "all experts answer together"}


@dataclass(frozen=True)
class TaskResult:
    """One test task, or the mean over them.

    Attributes:
        bare: loss of the backbone alone.
        start: loss at round 0, with the experts as they were before the first round.
        loss: loss after the last round, under the default routing.
        score_before, score, score_error: score of the backbone alone, of the result, and its standard error.
        examples: test examples that were scored; None without scores.
    """

    name: str
    bare: float | None
    start: float | None
    loss: float | None
    score_before: float | None
    score: float | None
    score_error: float | None = None
    examples: int | None = None
    description: str = ""
    curve: Markup | None = None

    @property
    def change(self) -> str:
        return change(self.bare, self.loss)

    @property
    def trend(self) -> str:
        """``better`` or ``worse`` where the loss moved by as much as ``change`` shows."""
        return {"−": "better", "+": "worse"}.get(self.change[:1], "")


@dataclass
class ClientFacts:
    """What the log tells of one client over all rounds."""

    name: str
    examples: int = 0
    rounds: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float | None]] = field(default_factory=list)


def page_contents(run: RunFolder) -> dict[str, Any]:
    """Return everything the template names."""
    method = METHODS[run.config["method"]["name"]]
    clients = client_facts(run)
    tasks, macro = results(run)
    rounds, default_routing = run.rounds[1:], run.config["evaluation"]["routing"][0]
    exchanges = [r for r in run.rounds if "bytes_up" in r]
    return {
        "method": method,
        "backbone": run.manifest["backbone"],
        "seed": run.metrics["seed"],
        "rounds": rounds,
        "log": run.rounds,
        "experts": run.metrics["experts"],
        "client_count": len(clients) or len(known_clients(run)),
        "examples": sum(c.examples for c in clients),
        "clients": clients,
        "tasks": tasks,
        "macro": macro,
        "scoring": visible(scoring(task.name for task in tasks)) if macro and macro.score is not None else "",
        "traded": any(set(r.get("weights", "?")) != {"examples"} for r in rounds),
        "personalised": run.metrics.get("personalised"),
        "start_differs": any(t.start != t.bare for t in tasks),
        "default_routing": default_routing,
        "routed": is_routed(a_model(run.out)),
        "generation_seconds": run.metrics.get("routing", {}).get(default_routing, {}).get("generation_seconds"),
        "routings": routing_table(run, tasks),
        "routing_words": routing_words,
        "matrix": run.metrics.get("routing_matrix") or {},
        "buckets": run.buckets,
        "widest": max((sum(b.examples for b in found) for found in run.buckets.values()), default=0),
        "expert_examples": expert_examples(run.buckets),
        "bucket_words": bucket_words,
        "alignment": run.metrics.get("alignment"),
        "training": training_figure(clients, rounds),
        "traffic": traffic_figure(exchanges),
        "bytes_up": sum(r["bytes_up"] for r in exchanges),
        "bytes_down": sum(r["bytes_down"] for r in exchanges),
        "troubles": troubles(run),
        "left_out": left_out_clients(run, clients) if exchanges else [],
        "seconds": run.metrics["seconds"],
        "facts": facts(run),
        "commands": commands(run, [t.name for t in tasks]),
    }


def results(run: RunFolder) -> tuple[list[TaskResult], TaskResult | None]:
    """Return every test task and the macro mean; nothing for a run without test sets."""
    routing = run.metrics.get("routing")
    if not routing:
        return [], None
    final = routing[run.config["evaluation"]["routing"][0]]
    before = run.metrics.get("before") or {}
    bare, start = before.get("loss_backbone", {}), before.get("loss", {})
    score_before, score, each = before.get("score", {}), final.get("score", {}), final.get("each", {})
    found = []
    for index, (name, loss) in enumerate(final["loss"].items()):
        points = [(r["round"], r["evaluation"]["loss"].get(name)) for r in run.rounds if r.get("evaluation")]
        title = describe(f"Loss of {visible(name)}", points)
        found.append(
            TaskResult(
                name,
                bare.get(name),
                start.get(name),
                loss,
                score_before.get(name),
                score.get(name),
                standard_error(each.get(name, [])),
                len(each[name]) if name in each else None,
                TASKS[name].description if name in TASKS else "",
                loss_curve(f"task-{index}", title, points, bare.get(name)) if len(points) > 1 else None,
            )
        )
    return [t for t in found if t.name != "macro"], next(t for t in found if t.name == "macro")


def standard_error(values: list[float]) -> float | None:
    """Return the standard error of the mean, s / √n with s² over n − 1; None for fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)


def client_facts(run: RunFolder) -> list[ClientFacts]:
    """Sum up the log per client, by name. Quarantined answers count as traffic, not as rounds."""
    found: dict[str, ClientFacts] = {}
    for record in run.rounds:
        for name, entry in record.get("clients", {}).items():
            client = found.setdefault(name, ClientFacts(name))
            client.examples = max(client.examples, entry["examples"])
            client.bytes_up += entry["bytes_up"]
            client.bytes_down += entry["bytes_down"]
            client.seconds += entry["seconds"]
            if record["round"] > 0 and name not in record["quarantined"]:
                client.rounds += 1
                client.losses.append((record["round"], entry.get("loss")))
    for client in found.values():
        if client.losses:
            client.first_loss, client.last_loss = client.losses[0][1], client.losses[-1][1]
    return [found[name] for name in sorted(found)]


def training_figure(clients: list[ClientFacts], rounds: list[dict[str, Any]]) -> Markup | None:
    """Draw the training loss; None for a run of no round."""
    mean = [(r["round"], r["train_loss"]) for r in rounds]
    if not any(value is not None for _, value in mean):
        return None
    return training_curve("training", describe("Training loss", mean), mean, {c.name: c.losses for c in clients})


def traffic_figure(exchanges: list[dict[str, Any]]) -> Markup | None:
    """Draw the bytes of every exchange; None without any."""
    if not exchanges:
        return None
    numbers = [r["round"] for r in exchanges]
    up, down = [r["bytes_up"] for r in exchanges], [r["bytes_down"] for r in exchanges]
    title = f"Bytes to the server and to the clients in rounds {spans(numbers)}."
    return traffic_bars("traffic", title, numbers, up, down)


def routing_words(mode: str) -> str:
    """Explain a routing mode."""
    return ROUTINGS.get(mode) or f"the {mode.removeprefix('top')} best experts answer together"


def routing_table(run: RunFolder, tasks: list[TaskResult]) -> dict[str, Any] | None:
    """Return loss and score under every routing, row by row; None where there are not two to compare."""
    routing = run.metrics.get("routing", {})
    modes = list(routing)
    if len(modes) < 2:
        return None
    return {
        "modes": modes,
        "scored": all("score" in routing[mode] for mode in modes),
        "rows": [
            {
                "task": name,
                "loss": [routing[mode]["loss"].get(name) for mode in modes],
                "score": [routing[mode].get("score", {}).get(name) for mode in modes],
            }
            for name in [*(t.name for t in tasks), "macro"]
        ],
        "seconds": [routing[mode].get("generation_seconds") for mode in modes],
    }


def expert_examples(buckets: dict[str, list[Bucket]]) -> dict[int, int]:
    """Return the training examples behind each expert."""
    counts: Counter[int] = Counter()
    for found in buckets.values():
        for bucket in found:
            counts[bucket.expert] += bucket.examples
    return dict(sorted(counts.items()))


def bucket_words(index: int, bucket: Bucket) -> str:
    """Say what a bucket holds."""
    tasks = ", ".join(f"{visible(task)} {whole(n)}" for task, n in sorted(bucket.tasks.items(), key=lambda t: -t[1]))
    return f"Bucket {index} → expert {bucket.expert}: {plural(bucket.examples, 'example')}" + (tasks and f" ({tasks})")


def troubles(run: RunFolder) -> list[tuple[str, str, str]]:
    """Return (client, rounds, what happened) for every quarantine and absence; the same reason once."""
    found: dict[tuple[str, str], list[int]] = {}
    for record in run.rounds:
        for client, reason in record.get("quarantined", {}).items():
            found.setdefault((client, f"Quarantined: {reason}."), []).append(record["round"])
        for client in record.get("absent", []):
            found.setdefault((client, "Absent: it was asked and did not answer."), []).append(record["round"])
    return [(client, spans(rounds), what) for (client, what), rounds in sorted(found.items())]


def known_clients(run: RunFolder) -> list[str]:
    """Return the names of all clients that stand in the data."""
    data = run.manifest["data"]
    return sorted(data["mix"] if "mix" in data else run.config["data"]["clients"])


def left_out_clients(run: RunFolder, clients: list[ClientFacts]) -> list[tuple[str, str]]:
    """Return clients that stand in the data but in no round, and why."""
    seen = {c.name for c in clients} | {name for r in run.rounds for name in r.get("absent", [])}
    empty = set(run.manifest["data"].get("empty_clients", []))
    drawn = "was given no example by the draw"
    other = "has no usable example, or was never sampled"
    return [(name, drawn if name in empty else other) for name in known_clients(run) if name not in seen]


def facts(run: RunFolder) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the run's facts in groups of (name, value)."""
    config, manifest = run.config, run.manifest
    method, training, federation = METHODS[config["method"]["name"]], config["training"], config["federation"]
    adapter, machine, backbone = config["adapter"], manifest["machine"], manifest["backbone"]
    options = {key: value for key, value in config["method"].items() if key != "name"}
    protocol = [
        ("method", f"{method.title} ({method.paper})" if method.paper else method.title),
        *((f"method.{key}", str(value)) for key, value in options.items()),
        *([("privacy", words)] if (words := privacy_words(run.rounds)) else []),
        ("aggregated", method.aggregated),
        ("stays with the client", "its text" + ("" if method.local_only == "nothing" else f"; {method.local_only}")),
        ("participation", f"{federation['participation']:.0%} of the clients each round"),
        ("quarantine", f"updates beyond {federation['norm_factor']:g} × the round's lower median norm"),
        ("local training", f"{training['steps']} steps of {training['batch_size']} examples, AdamW"),
        ("learning rate", f"{training['lr']:g}, router {training['router_lr']:g}"),
        ("adapters", f"rank {adapter['rank'] or method.default_rank}, alpha {adapter['alpha']:g}"),
        ("dropout", f"{adapter['dropout']:g}"),
    ]
    hardware = machine["gpu"] or machine["cpu_capability"]
    identity = [
        ("name", backbone["name"]),
        ("hash", backbone["hash"]),
        ("tokenizer hash", backbone["tokenizer_hash"]),
    ]
    data = [("seed", str(manifest["seed"])), *data_facts(manifest["data"])]
    software = [
        ("fedloom", manifest["fedloom"]),
        ("Python", manifest["python"]),
        *manifest["packages"].items(),
        ("machine", f"{machine['processor']}, {hardware}, {plural(machine['threads'], 'thread')}"),
    ]
    return [("Protocol", protocol), ("Data", data), ("Backbone", identity), ("Software and machine", software)]


def data_facts(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Return how the data was drawn or made up, or how many of the user's rows were left out."""
    if "dials" in data:
        dials = ", ".join(f"{name} {value:g}" for name, value in data["dials"].items())
        return [("made up", f"{len(data['rules'])} contradictory patterns; {dials}")]
    if "pools" in data:
        rows = [
            (visible(task), f"{whole(p['train'])} training and {whole(p['test'])} test rows of {whole(p['usable'])}")
            for task, p in data["pools"].items()
        ]
        return [("spread over clients", f"Dirichlet, α = {data['alpha']:g}"), *rows]
    left_out: Counter[str] = Counter()
    for counts in data["rows"].values():
        left_out.update({why: n for why, n in counts.items() if why not in ("rows", "kept") and n})
    if not left_out:
        return [("rows left out", "none")]
    return [
        (
            "rows left out",
            listed([f"{whole(n)} {visible(why.replace('_', ' '))}" for why, n in sorted(left_out.items())]),
        )
    ]


def commands(run: RunFolder, tasks: list[str]) -> list[tuple[str, str]]:
    """Return (what for, what to type)."""
    model = shlex.quote(visible(a_model(run.out)))
    named = shlex.quote(f"{visible(tasks[0]) if tasks else 'my-task'}=rows.jsonl")
    ask = f"fedloom generate {model} --prompt 'Your question'"
    method = METHODS[run.config["method"]["name"]]
    found = [("Ask the trained model" if method.global_model else "Ask a client's model", ask)]
    if is_routed(a_model(run.out)):
        found.append(("Ask, and see the gate of every expert", f"{ask} --explain"))
    found.append(("Measure it on your own rows (prompt and response)", f"fedloom evaluate {model} --task {named}"))
    return found
