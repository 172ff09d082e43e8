"""Close native experts: their routers never choose them, as if the model had only the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedloom.adapters.native import MoELayer
from fedloom.errors import AdapterError


class _Masked(TorchFunctionMode):
    """Inside, a linear layer's outputs at ``closed`` (E,) are −∞: their softmax is 0 and they get no gradient."""

    def __init__(self, closed: Tensor) -> None:
        super().__init__()
        self.closed = closed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.masked_fill(self.closed, -torch.inf) if func is nn.functional.linear else found


def check_kept(layers: Sequence[MoELayer], kept: Collection[str]) -> None:
    """Refuse names that are no experts, a layer without any, and routers that ``check_choosing`` refuses.

    Raises:
        AdapterError: naming the expert or the layer.
    """
    if not kept:
        return
    check_choosing(layers)
    known = {layer.component(e) for layer in layers for e in range(layer.experts)}
    if unknown := [name for name in kept if name not in known]:
        raise AdapterError(f"There is no expert {unknown[0]!r} to keep, among {len(known)}.")
    for layer in layers:
        if not any(layer.component(e) in kept for e in range(layer.experts)):
            raise AdapterError(f"{layer.path} keeps none of its {layer.experts} experts; it needs one.")


def check_choosing(layers: Sequence[MoELayer]) -> None:
    """Refuse routers that choose groups of experts first: DeepSeek-V3's, and V2's of that ``topk_method``.

    Raises:
        AdapterError: naming the layer.
    """
    for layer in layers:
        limited = hasattr(layer.router, "topk_group")  # V2's has it whatever it does, and says which of two it does
        if limited and getattr(layer.router, "topk_method", "group_limited_greedy") == "group_limited_greedy":
            raise AdapterError(
                f"{layer.path} chooses groups of experts first, as DeepSeek-V3 and the large DeepSeek-V2 do: single "
                "experts cannot be kept there. Take a method that gives every client all experts."
            )


def open_only(layers: Sequence[MoELayer], kept: Collection[str]) -> None:
    """Let routers choose only experts in ``kept`` from now on; empty: all.

    A layer that keeps fewer than its top-k gives the missing ones weight 0.
    """
    for layer in layers:
        layer.router.__dict__.pop("forward", None)  # what an earlier call put over the class's own
        closed = torch.tensor([bool(kept) and layer.component(e) not in kept for e in range(layer.experts)])
        if closed.any():
            device = next(layer.router.parameters()).device
            layer.router.forward = _masked(layer.router.forward, _Masked(closed.to(device)))


def _masked(forward: Callable[..., Any], mask: _Masked) -> Callable[..., Any]:
    def masked(*args: Any, **kwargs: Any) -> Any:
        with mask:
            return forward(*args, **kwargs)

    return masked
