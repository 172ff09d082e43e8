"""FedEx-LoRA: factors are averaged, and what that misses of the mean product is added to the frozen base.

R. Singhal, K. Ponkshe, P. Vepakomma, "FedEx-LoRA: exact aggregation for federated and efficient fine-tuning of
foundation models", arXiv 2410.09432 (2024).

Differs from FedAvg: by the residual s (Σ p_k B_k A_k − B̄ Ā), dense, in the base. A client gets the sum of all
residuals, out·in numbers per module, whenever it is asked.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedloom.methods.base import Method
from fedloom.methods.products import factors, mean_delta, plain_lora
from fedloom.numerics.lowrank import delta
from fedloom.types import Order, Replies, Setup, State, View


class FedExLoRA(Method):
    title = "FedEx-LoRA"
    paper = "arXiv 2410.09432"
    aggregated = "A and B of one LoRA, by sample count; the residual of their product into the frozen base"
    exact = "yes: base and B̄ Ā together move by Σ p_k s B_k A_k"
    optimizer_refused = "base and factors make the mean together only, and would be moved apart"

    def init(self, setup: Setup) -> State:
        """Start from one LoRA and no residual."""
        state = super().init(setup)
        zeros = {f"base/{path}.delta": torch.zeros(shape) for path, shape in setup.shapes.items()}
        return replace(state, tensors=state.tensors | zeros, spec=replace(setup.spec, base_delta=True))

    def view(self, state: State, client: str | None) -> View:
        """Give a client factors and base; evaluation gets one plain LoRA equal to base + s B̄ Ā."""
        if client is not None:
            return View(state.tensors, state.spec)
        whole = {
            path: state.tensors[f"base/{path}.delta"].double() + delta(A, B, state.spec.scaling)
            for path, A, B in factors(state.tensors)
        }
        return plain_lora(whole, state.spec)

    def trains(self, name: str, order: Order) -> bool:
        return not name.startswith("base/")

    def merge(self, state: State, replies: Replies) -> State:
        """Average the factors, then add s (Σ p_k B_k A_k − B̄ Ā) to the base, with Ā and B̄ as clients get them."""
        merged = super().merge(state, replies)
        tensors = dict(merged.tensors)
        mean = mean_delta(replies, lambda client: self.view(state, client))  # Σ p_k s B_k A_k
        for path, A, B in factors(merged.tensors):
            if path in mean:
                name = f"base/{path}.delta"
                residual = mean[path] - delta(A, B, state.spec.scaling)
                tensors[name] = (tensors[name].double() + residual).float()
        return replace(merged, tensors=tensors)
