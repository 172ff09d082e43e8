"""What is measured of a run: the model for everyone, clients' own models, and what discovery found."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fedloom.evaluation.alignment import alignment_report, purity
from fedloom.evaluation.classification import classify
from fedloom.evaluation.losses import loss_per_task, losses_by_task, routing_matrix
from fedloom.evaluation.scores import answer_tasks, score_answers, score_tasks
from fedloom.personalised import personalised
from fedloom.runtime.events import Observer
from fedloom.types import Memory, Plain, State
from fedloom.workload import Data, Run


def evaluate_round(run: Run, state: State, memories: Mapping[str, Memory]) -> dict[str, Plain] | None:
    """Measure the global model before round 1, every ``evaluation.every`` rounds, and after the last.

    Returns:
        ``loss`` and, with ``evaluation.every_score``, ``score_model``, of the global model; before round 1 also
        ``loss_backbone`` and, with ``evaluation.generate_before``, ``score``, of the bare backbone.
    """
    config, bench, data = run.config, run.bench, run.data
    every = config.evaluation.every
    wanted = state.round in (0, config.federation.rounds) or (every and state.round % every == 0)
    if not wanted or not any(map(len, data.test.values())):
        return None
    result: dict[str, Plain] = {}
    if (view := run.method.assembled(state, memories)) is not None:
        bench.load(view.tensors, view.spec)
        result["loss"] = loss_per_task(bench, data.test, config.evaluation.routing[0])
        if config.evaluation.every_score:
            mode = config.evaluation.routing[0]
            result["score_model"] = score_tasks(bench, data.test, data.test_examples, mode)[0]
    if state.round == 0:
        result["loss_backbone"] = loss_per_task(bench, data.test, "off")
        if config.evaluation.generate_before:
            result["score"] = score_tasks(bench, data.test, data.test_examples, "off")[0]
    return result


def evaluate_final(run: Run, state: State, memories: Mapping[str, Memory], observer: Observer) -> dict[str, Plain]:
    """Measure everything that the configuration asks for.

    Returns:
        ``routing``: mode → loss, score and both of each example, and ``classes`` (``classification.classify``), of the
        global model (empty for a method without one);
        ``routing_matrix``; ``personalised``: see ``personalised.personalised``; both protocols on the same rows.
    """
    config, bench, data = run.config, run.bench, run.data
    metrics: dict[str, Plain] = {"method": config.method.name, "seed": config.seed, "experts": state.spec.experts}
    if not any(map(len, data.test.values())):
        return metrics
    metrics["routing"] = {}
    if (view := run.method.assembled(state, memories)) is not None:
        bench.load(view.tensors, view.spec)
        modes = config.evaluation.routing if bench.grafted.router is not None else config.evaluation.routing[:1]
        total = sum(map(len, data.test.values())) * len(modes) * (2 if config.evaluation.generate else 1)
        observer.phase("evaluation", total)
        for mode in modes:
            start = time.perf_counter()
            loss, each_loss = losses_by_task(bench, data.test, mode, observer.advance)
            result: dict[str, Plain] = {"loss": loss, "each_loss": each_loss}
            result["loss_seconds"] = round(time.perf_counter() - start, 2)
            if config.evaluation.generate:
                start = time.perf_counter()
                answers = answer_tasks(bench, data.test, mode, observer.advance)
                score, each = score_answers(answers, data.test_examples)
                result |= {"score": score, "each": each, "classes": classify(answers, data.test_examples)}
                result["generation_seconds"] = round(time.perf_counter() - start, 2)
            metrics["routing"][mode] = result
        metrics["routing_matrix"] = routing_matrix(bench, data.test)
    if config.evaluation.personalised:
        metrics["personalised"] = personalised(run, state, memories, observer)
    return metrics


def audit(state: State, memories: Mapping[str, Memory], data: Data) -> dict[str, Plain] | None:
    """Compare buckets and experts with the task labels that training never saw (FedWeave, Appendix A)."""
    assignment = state.values.get("assignment")
    if assignment is None or not any(label for labels in data.labels.values() for label in labels):
        return None
    buckets = {client: memories[client].values["buckets"] for client in sorted(assignment)}
    labels = {client: data.labels[client] for client in buckets}
    clients = {
        client: {
            "purity": purity(found, labels[client]),
            "buckets": [
                {"examples": found.count(c), "expert": m, "tasks": _counted(labels[client], found, c)}
                for c, m in enumerate(assignment[client])
            ],
        }
        for client, found in buckets.items()
    }
    return {**alignment_report(buckets, labels, assignment), "clients": clients}


def _counted(labels: list[str], buckets: list[int], bucket: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    for label, found in zip(labels, buckets, strict=True):
        if found == bucket:
            counts[label] = counts.get(label, 0) + 1
    return dict(sorted(counts.items()))


def experts_of(state: State) -> list[dict[str, Plain]]:
    """Return for each expert the client buckets that share it and their examples."""
    assignment: Mapping[str, list[int]] = state.values.get("assignment", {})
    sizes: Mapping[str, list[int]] = state.values.get("sizes", {})
    found: list[dict[str, Any]] = [{"expert": m, "examples": 0, "buckets": {}} for m in range(state.spec.experts)]
    for client, experts in sorted(assignment.items()):
        for c, m in enumerate(experts):
            found[m]["examples"] += sizes[client][c]
            found[m]["buckets"].setdefault(client, []).append(c)
    return found
