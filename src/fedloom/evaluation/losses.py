"""Teacher-forced loss per task, and how the router spreads each task over the experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fedloom.adapters.moe_lora import Routing
from fedloom.backbones.features import batches_by_length
from fedloom.backbones.loss import token_losses
from fedloom.data.tokenize import collate
from fedloom.errors import DataError
from fedloom.runtime.client import Rows, Workbench


@torch.no_grad()
def gates_for(bench: Workbench, rows: Rows, mode: str) -> Routing:
    """Route every example: gates (n, M), expert indices (n,), or None for ``off``."""
    if mode == "off":
        return None
    if bench.grafted.router is None:
        # One expert: no features needed.
        return torch.zeros(len(rows), dtype=torch.int64) if bench.grafted.spec.experts == 1 else _no_router(bench)
    return bench.grafted.route(rows.features(bench).to(bench.backbone.device), mode)


def _no_router(bench: Workbench) -> Routing:
    raise DataError(f"{bench.grafted.spec.experts} experts without a router cannot be evaluated.")


@torch.no_grad()
def task_loss(
    bench: Workbench, rows: Rows, mode: str, advance: Callable[[int], None] | None = None
) -> tuple[float, int]:
    """Return (summed negative log-likelihood, supervised tokens) of ``rows`` under a routing mode.

    Args:
        mode: ``top1``, ``top2``…, ``soft``, or ``off`` for the bare backbone.
        advance: called with the number of examples done.
    """
    bench.grafted.eval()
    routing = gates_for(bench, rows, mode)
    pad = bench.backbone.tokenizer.pad_token_id
    total, tokens = 0.0, 0
    for group in batches_by_length(rows.lengths):
        batch = collate([rows.encoded[i] for i in group], pad)
        with bench.grafted.routing(None if routing is None else routing[group]):
            losses = token_losses(bench.backbone, batch)
        total += float(losses.double().sum())
        tokens += len(losses)
        if advance:
            advance(len(group))
    return total, tokens


def loss_per_task(
    bench: Workbench, tasks: Mapping[str, Rows], mode: str, advance: Callable[[int], None] | None = None
) -> dict[str, float | None]:
    """Return task → mean loss per supervised token, and ``macro``, the plain mean over tasks.

    A task without supervised tokens has the loss None, and so has a macro mean without any task.

    Raises:
        DataError: there is no test example at all.
    """
    if not any(len(rows) for rows in tasks.values()):
        raise DataError("there is no example to evaluate on: every test set is empty.")
    losses: dict[str, float | None] = {}
    for task, rows in tasks.items():
        total, tokens = task_loss(bench, rows, mode, advance) if len(rows) else (0.0, 0)
        losses[task] = total / tokens if tokens else None
    return losses | {"macro": macro(list(losses.values()))}


def macro(values: Sequence[float | None]) -> float | None:
    """Return the plain mean of what is there."""
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


@torch.no_grad()
def routing_matrix(bench: Workbench, tasks: Mapping[str, Rows]) -> dict[str, dict[str, list[float]]]:
    """Return task → ``gate`` (mean softmax gate of each expert) and ``top1`` (share of examples sent to each).

    Rows sum to 1 (FedWeave, Fig. 2). Empty without a router.
    """
    matrix: dict[str, dict[str, list[float]]] = {}
    if bench.grafted.router is None:
        return matrix
    for task, rows in tasks.items():
        if len(rows):
            gates = gates_for(bench, rows, "soft")
            assert gates is not None
            chosen = torch.bincount(gates.argmax(1), minlength=gates.shape[1]).double() / len(rows)
            matrix[task] = {"gate": gates.double().mean(0).tolist(), "top1": chosen.tolist()}
    return matrix
