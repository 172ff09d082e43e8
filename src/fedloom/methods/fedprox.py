"""FedProx: clients are pulled towards the server's model while they train.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated optimization in heterogeneous networks",
arXiv 1812.06127 (2020), Algorithm 2, here on both factors of one LoRA.

Differs from FedAvg: a client minimises F_k(w) + μ/2 ‖w − wᵗ‖² (Eq. 2). The paper samples clients by their size and
averages alike; here, as everywhere, they are sampled alike and averaged by size.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field

from fedloom.methods.base import Method, MethodOptions
from fedloom.types import Order, Tensors


class FedProxOptions(MethodOptions):
    """The paper tries 0.001, 0.01, 0.1 and 1."""

    mu: float = Field(0.01, ge=0)


class FedProx(Method):
    title = "FedProx"
    paper = "arXiv 1812.06127"
    aggregated = "A and B of one LoRA, by sample count"
    exact = "no: mean(B)·mean(A) ≠ mean(B·A)"
    averages_factors = True
    summed = True
    Options = FedProxOptions
    options: FedProxOptions

    def correction(self, order: Order) -> Callable[[Tensors, Tensors], None]:
        def add_pull(values: Tensors, gradients: Tensors) -> None:
            """Add the proximal term's gradient, μ (w − wᵗ)."""
            for name, gradient in gradients.items():
                start = order.tensors[name].to(gradient.device)
                gradient.add_(values[name] - start, alpha=self.options.mu)

        return add_pull
