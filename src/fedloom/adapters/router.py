"""The router: frozen sentence features → gates over the experts (FedWeave, arXiv 2607.26618, section on routing)."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from fedloom.errors import AdapterError


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


def router_shapes(hidden: int, width: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Return the flat names and shapes of a router's tensors."""
    return {
        "router/0.weight": (width, hidden),
        "router/0.bias": (width,),
        "router/2.weight": (experts, width),
        "router/2.bias": (experts,),
    }


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
    if not re.fullmatch(r"top[1-9]\d*", mode):
        raise AdapterError(f"Unknown routing {mode!r}. Use 'top1', 'top2', …, 'soft' or 'off'.")
    k = int(mode.removeprefix("top"))
    chosen = logits.sort(dim=-1, descending=True, stable=True).indices[
        ..., :k
    ]  # topk does not promise an order of ties
    closed = torch.full_like(logits, -torch.inf, dtype=torch.float32)
    return closed.scatter(-1, chosen, logits.float().gather(-1, chosen)).softmax(dim=-1)
