"""A head of a client's own beside the model's, and a gate between both (PFL-MoE, arXiv 2012.15589).

Where the model's head gives h(x), the output is g·h(x) + (1 − g)·p(x) with g = σ(w·x + b). The own head is kept as its
difference from the model's: p(x) = h(x) + D x, so the output is h(x) + (1 − g)·D x. ``personal/delta.weight`` is D
(vocabulary, hidden), ``personal/gate.weight`` is w (1, hidden), ``personal/gate.bias`` is b (1,). With D = 0 the model
is as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedloom.adapters.inject import Slot, unwrap
from fedloom.numerics.init import BIAS, DELTA, GATE


class Blend:
    """The own head and the gate of one model; acts between ``attach`` and ``detach``."""

    def __init__(self, model: nn.Module) -> None:
        self._head: nn.Module = unwrap(model).get_output_embeddings()  # type: ignore[operator]
        weight: Tensor = self._head.weight
        shapes = {DELTA: tuple(weight.shape), GATE: (1, weight.shape[1]), BIAS: (1,)}
        self.parameters = {name: nn.Parameter(weight.new_zeros(shape)) for name, shape in shapes.items()}
        self._handle: Any = None

    def slots(self) -> dict[str, Slot]:
        """Return flat name → where it lives."""
        return {name: Slot(parameter) for name, parameter in self.parameters.items()}

    def attach(self) -> None:
        """Mix from now on."""
        if self._handle is None:
            self._handle = self._head.register_forward_hook(self._mix)

    def detach(self) -> None:
        """Let the model's head answer alone."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _mix(self, head: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        x, own = inputs[0], self.parameters  # (…, hidden)
        gate = torch.sigmoid(nn.functional.linear(x, own[GATE], own[BIAS]))  # (…, 1)
        return logits + (1 - gate) * nn.functional.linear(x, own[DELTA])
