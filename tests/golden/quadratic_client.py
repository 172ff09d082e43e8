"""A client whose loss is a parabola per tensor, trained by plain SGD: everything about it can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fedloom.runtime.memory import ClientMemory
from fedloom.types import AdapterSpec, FitReport, Layer, Pooling, Tensors, Training


class QuadraticClient:
    """``types.Client`` with F(w) = h/2 ‖w − target‖², so that the gradient is h (w − target).

    Args:
        name: the client's.
        size: how many examples it claims to hold.
        target: by tensor name; what its data ask for.
        curvature: h.
        memory: from earlier rounds.
    """

    def __init__(
        self,
        name: str,
        size: int,
        target: Mapping[str, Tensor],
        curvature: float = 1.0,
        memory: ClientMemory | None = None,
    ) -> None:
        self.name, self.size, self.target, self.curvature = name, size, target, curvature
        self.memory = memory or ClientMemory()
        self.values: Tensors = {}

    def features(self, layer: Layer = "last", pooling: Pooling = "mean") -> Tensor:
        raise AssertionError("nothing here looks at features")

    def steps(self, training: Training) -> int:
        return training.steps

    def load(self, tensors: Tensors, spec: AdapterSpec) -> None:
        assert tensors.keys() == self.target.keys()
        self.values = {name: tensor.clone() for name, tensor in tensors.items()}

    def fit(
        self,
        pools: Sequence[Sequence[int]],
        training: Training,
        *,
        purpose: str = "fit",
        by_length: bool = False,
        trainable: Callable[[str], bool] | None = None,
        on_gradients: Callable[[Tensors, Tensors], None] | None = None,
    ) -> FitReport:
        assert all(pool == range(self.size) for pool in pools)
        for _ in pools:
            gradients = {
                name: self.curvature * (value - self.target[name])
                for name, value in self.values.items()
                if trainable is None or trainable(name)
            }
            if on_gradients is not None:
                on_gradients(self.values, gradients)
            for name, gradient in gradients.items():
                self.values[name] -= training.lr * gradient
        return FitReport([0.0] * len(pools), len(pools), 1)

    def read(self) -> Tensors:
        return {name: tensor.clone() for name, tensor in self.values.items()}

    def seed(self, purpose: str) -> int:
        return 0

    def remember(self, keep: Tensors, values: dict[str, Any]) -> None:
        """Do what the runtime does with a reply's ``keep``."""
        self.memory = self.memory.updated(keep, values)
