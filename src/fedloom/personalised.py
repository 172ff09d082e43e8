"""The personalised protocol: every client's own model on the client's own mixture. Never mixed with the global one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from fedloom.data.sources import Example
from fedloom.evaluation.losses import example_losses, mean_loss
from fedloom.evaluation.scores import score_tasks
from fedloom.runtime.client import Rows
from fedloom.runtime.events import Observer
from fedloom.runtime.memory import ClientMemory
from fedloom.types import Memory, Plain, State
from fedloom.workload import Run

#: Measure → value, for one kind of rows.
Measured = dict[str, float | None]


def personalised(run: Run, state: State, memories: Mapping[str, Memory], observer: Observer) -> dict[str, Plain]:
    """Measure each client's own model on its own mixture of kinds (tasks or, under label skew, labels).

    A client's loss is Σ_k q_k loss_k, with q_k its share of training rows of kind k and loss_k measured on the first
    ``evaluation.personalised`` test rows of that kind; likewise its score. A global model is measured once and weighed
    for each client. The test rows are the same for all clients, as PFL-MoE's are (arXiv 2012.15589).

    Returns:
        ``mean``, ``weighted_mean`` (by rows), ``spread`` (standard deviation, n − 1, over clients) and ``worst`` of the
        loss, the same of the score under ``score`` if it is measured, and every client's.
    """
    config, method, bench, data = run.config, run.method, run.bench, run.data
    mode = config.evaluation.routing[0]
    rows: dict[str, tuple[str, Rows, list[Example]]] = {}
    for kind, (task, where) in data.kinds.items():
        first = where[: config.evaluation.personalised]
        encoded = Rows([data.test[task].encoded[i] for i in first])
        rows[kind] = task, encoded, [data.test_examples[task][i] for i in first]

    def measure(kind: str) -> Measured:
        task, encoded, examples = rows[kind]
        found: Measured = {"loss": mean_loss(*example_losses(bench, encoded, mode))}
        if config.evaluation.personalised_scores:
            found["score"] = score_tasks(bench, {task: encoded}, {task: examples}, mode)[0][task]
        return found

    observer.phase("personalised", len(data.mixes))
    shared: dict[str, Measured] = {}
    if not method.personal:
        view = method.assembled(state, memories)
        assert view is not None
        bench.load(view.tensors, view.spec)
        shared = {kind: measure(kind) for kind in rows}
    clients: dict[str, dict[str, Plain]] = {}
    for client, mix in data.mixes.items():
        there = {kind: share for kind, share in mix.items() if kind in rows and len(rows[kind][1])}
        if method.personal:
            own = method.personal_view(state, client, memories.get(client, ClientMemory()))
            bench.load(own.tensors, own.spec)
        kinds = {kind: measure(kind) if method.personal else shared[kind] for kind in there}
        clients[client] = {name: _weighed(there, kinds, name) for name in ("loss", "score")} | {"kinds": kinds}
        observer.advance()
    sizes = {client: data.sizes[client] for client in clients}
    result = {"rows_per_kind": config.evaluation.personalised, "routing": mode, **_summary(clients, sizes, "loss", max)}
    if config.evaluation.personalised_scores:
        result["score"] = _summary(clients, sizes, "score", min)
    return result | {"clients": clients}


def _weighed(mix: Mapping[str, float], kinds: Mapping[str, Measured], name: str) -> float | None:
    known = {kind: value for kind in mix if (value := kinds[kind].get(name)) is not None}
    whole = sum(mix[kind] for kind in known)
    return sum(mix[kind] / whole * value for kind, value in known.items()) if known else None


def _summary(
    clients: Mapping[str, Mapping[str, Plain]], sizes: Mapping[str, int], name: str, worst: Plain
) -> dict[str, float]:
    values = {client: found[name] for client, found in clients.items() if found[name] is not None}
    if not values:
        return {}
    return {
        "mean": statistics.fmean(values.values()),
        "weighted_mean": sum(sizes[c] * value for c, value in values.items()) / sum(sizes[c] for c in values),
        "spread": statistics.stdev(values.values()) if len(values) > 1 else 0.0,
        "worst": worst(values.values()),
    }
