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
    """Route every example: gates (n, M), expert indices (n,), or None for ``off``. Features only where a router is."""
    if bench.grafted.router is None or mode == "off":
        return bench.grafted.route(torch.zeros(len(rows), 1, device=bench.backbone.device), mode)
    return bench.grafted.route(rows.features(bench).to(bench.backbone.device), mode)


@torch.no_grad()
def example_losses(
    bench: Workbench, rows: Rows, mode: str, advance: Callable[[int], None] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (summed negative log-likelihood (n,) float64, supervised tokens (n,) int64) of each example.

    Args:
        mode: ``top1``, ``top2``…, ``soft``, or ``off`` for the bare backbone.
        advance: called with the number of examples done.
    """
    bench.grafted.eval()
    routing = gates_for(bench, rows, mode)
    pad = bench.backbone.tokenizer.pad_token_id
    sums = torch.zeros(len(rows), dtype=torch.float64)
    tokens = torch.zeros(len(rows), dtype=torch.int64)
    for group in batches_by_length(rows.lengths):
        batch = collate([rows.encoded[i] for i in group], pad)
        with bench.grafted.routing(None if routing is None else routing[group]):
            losses = token_losses(bench.backbone, batch).double().cpu()
        owners = torch.tensor(group, dtype=torch.int64)[batch.rows]
        sums.index_add_(0, owners, losses)
        tokens.index_add_(0, owners, torch.ones_like(owners))
        if advance:
            advance(len(group))
    return sums, tokens


def mean_loss(sums: torch.Tensor, tokens: torch.Tensor) -> float | None:
    """Return the mean loss per supervised token; None without any."""
    total = int(tokens.sum())
    return float(sums.sum()) / total if total else None


def losses_by_task(
    bench: Workbench, tasks: Mapping[str, Rows], mode: str, advance: Callable[[int], None] | None = None
) -> tuple[dict[str, float | None], dict[str, list[list[float]]]]:
    """Return task → mean loss per supervised token with ``macro``, and task → [summed loss, tokens] of each example.

    ``macro`` is the plain mean over tasks. A task without supervised tokens has the loss None, and so has a macro mean
    without any task.

    Raises:
        DataError: there is no test example at all.
    """
    if not any(len(rows) for rows in tasks.values()):
        raise DataError("there is no example to evaluate on: every test set is empty.")
    losses: dict[str, float | None] = {}
    each: dict[str, list[list[float]]] = {}
    for task, rows in tasks.items():
        sums, tokens = example_losses(bench, rows, mode, advance)
        losses[task] = mean_loss(sums, tokens)
        each[task] = [[round(s, 5), n] for s, n in zip(sums.tolist(), tokens.tolist(), strict=True)]
    return losses | {"macro": macro(list(losses.values()))}, each


def loss_per_task(
    bench: Workbench, tasks: Mapping[str, Rows], mode: str, advance: Callable[[int], None] | None = None
) -> dict[str, float | None]:
    """Return the first part of ``losses_by_task``."""
    return losses_by_task(bench, tasks, mode, advance)[0]


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
