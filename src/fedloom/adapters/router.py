"""The router: frozen sentence features → gates over the experts (FedWeave, arXiv 2607.26618, section on routing)."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from fedloom.errors import AdapterError
from fedloom.types import AdapterSpec


class Router(nn.Sequential):
    """Two-layer perceptron, hidden_size → width → M, with GELU between and no dropout, in float32.

    Its input is the un-normalised, attention-masked mean of the frozen backbone's last hidden layer, (b, hidden_size).
    """

    def __init__(self, hidden_size: int, width: int, experts: int) -> None:
        super().__init__(
            nn.Linear(hidden_size, width, dtype=torch.float32),
            nn.GELU(),
            nn.Linear(width, experts, dtype=torch.float32),
        )


class Routers(nn.ModuleList):
    """Several routers over the same experts; their gates are averaged, so logits are the log of the mean gate.

    FedLEASE in the form of arXiv 2607.26618 keeps one router per client cluster and the paper does not say which one
    answers for the global model; the weighted mean asks every cluster.

    Args:
        weights: what each router counts, not negative, not all zero; empty: all alike.
    """

    def __init__(self, count: int, hidden_size: int, width: int, experts: int, weights: tuple[float, ...] = ()) -> None:
        super().__init__(Router(hidden_size, width, experts) for _ in range(count))
        self.shares = [weight / sum(weights) for weight in weights] or [1 / count] * count

    def forward(self, features: Tensor) -> Tensor:
        gates = [share * router(features).softmax(dim=-1) for share, router in zip(self.shares, self, strict=True)]
        return torch.stack(gates).sum(0).log()


class CentroidRouter(nn.Module):
    """Logits are minus the squared distance of the ℓ2-normalised feature to each expert's centroid (M, hidden).

    FedRouter (arXiv 2604.00050): an example goes to the nearest centroid. Nothing here is trained.
    """

    def __init__(self, hidden_size: int, experts: int) -> None:
        super().__init__()
        self.centroids = nn.Parameter(torch.zeros(experts, hidden_size), requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        unit_bh = nn.functional.normalize(features, dim=-1)
        return -(unit_bh[:, None, :] - self.centroids).square().sum(-1)


def build_router(spec: AdapterSpec, hidden_size: int) -> nn.Module | None:
    """Return the sentence router that ``spec`` asks for, if any."""
    if spec.centroids:
        return CentroidRouter(hidden_size, spec.experts)
    if spec.router_hidden and spec.routers > 1:
        return Routers(spec.routers, hidden_size, spec.router_hidden, spec.experts, spec.router_weights)
    return Router(hidden_size, spec.router_hidden, spec.experts) if spec.router_hidden else None


def router_names(spec: AdapterSpec, router: nn.Module | None) -> dict[str, nn.Parameter]:
    """Return flat name → Parameter: ``router/<name>``, or ``routers/<j>/<name>`` for several."""
    if router is None:
        return {}
    if isinstance(router, Routers):
        return {f"routers/{n.replace('.', '/', 1)}": p for n, p in router.named_parameters()}
    return {f"router/{n}": p for n, p in router.named_parameters()}


def router_shapes(spec: AdapterSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the flat names and shapes of a specification's sentence router; empty without one."""
    with torch.device("meta"):
        named = router_names(spec, build_router(spec, hidden))
    return {name: tuple(parameter.shape) for name, parameter in named.items()}


def route(logits: Tensor, mode: str) -> Tensor | None:
    """Turn router logits (b, M) into what ``Grafted.routing`` takes.

    Args:
        logits: (b, M).
        mode: ``soft`` (softmax over all experts), ``top1``, ``top2``, ``top3``… or ``off``.

    Returns:
        ``soft`` and ``topk``: gates (b, M), rows summing to 1; top-k keeps the k largest, renormalised, zeros elsewhere
        (k ≥ M keeps all). ``top1``: the expert's index (b,). ``off``: None. Ties go to the lowest index.
    """
    if mode == "off":
        return None
    if mode == "soft":
        return logits.float().softmax(dim=-1)
    if mode == "top1":
        return logits.argmax(dim=-1)
    if not re.fullmatch(r"top[1-9]\d{0,3}", mode):
        raise AdapterError(f"Unknown routing {mode!r}. Use 'top1', 'top2', …, 'soft' or 'off'.")
    k = int(mode.removeprefix("top"))
    chosen = logits.sort(dim=-1, descending=True, stable=True).indices[
        ..., :k
    ]  # topk does not promise an order of ties
    closed = torch.full_like(logits, -torch.inf, dtype=torch.float32)
    return closed.scatter(-1, chosen, logits.float().gather(-1, chosen)).softmax(dim=-1)
