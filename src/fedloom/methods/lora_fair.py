"""LoRA-FAIR: factors are averaged, then B̄ is corrected on the server so that its product with Ā nears the mean product.

J. Bian et al., "LoRA-FAIR: federated LoRA fine-tuning with aggregation and initialization refinement",
arXiv 2411.14961 (2024).

Differs from FedAvg: by ΔB, at the same payload. The paper minimises a similarity term between Σ p_k B_k A_k and
(B̄ + ΔB) Ā, plus λ‖ΔB‖, by gradient steps. Here the similarity is the squared Frobenius distance and the penalty λ‖ΔB‖²,
a ridge regression whose minimum is known in closed form, so that nothing depends on a step size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import Field

from fedloom.methods.base import Method, MethodOptions
from fedloom.methods.products import LORA, factors, mean_delta
from fedloom.numerics.lowrank import delta
from fedloom.types import Replies, State


class LoRAFairOptions(MethodOptions):
    """``ridge``: the paper's λ."""

    ridge: float = Field(0.01, gt=0)


class LoRAFair(Method):
    title = "LoRA-FAIR"
    paper = "arXiv 2411.14961"
    aggregated = "A and B of one LoRA, by sample count; B is then corrected towards the mean product"
    exact = "no: mean(B·A) is met as nearly as the row space of mean(A) and the ridge allow"
    Options = LoRAFairOptions
    options: LoRAFairOptions

    def merge(self, state: State, replies: Replies) -> State:
        """Keep Ā; B̄ + ΔB with ΔB = (W − B̄ Ā) Āᵀ (Ā Āᵀ + λI)⁻¹ and W = Σ p_k B_k A_k, unscaled, in float64.

        The server holds one dense (out, in) sum per module.
        """
        merged = super().merge(state, replies)
        tensors = dict(merged.tensors)
        mean = mean_delta(replies, lambda client: self.view(state, client))  # s W
        for path, A, B in factors(merged.tensors):
            if path in mean:
                residual = mean[path] / state.spec.scaling - delta(A, B, 1.0)  # (out, in)
                gram = A @ A.T + self.options.ridge * torch.eye(A.shape[0], dtype=A.dtype)  # (r, r), symmetric
                correction = torch.linalg.solve(gram, A @ residual.T).T  # (out, r)
                tensors[f"{LORA}/{path}.lora_B"] = (B + correction).float()
        return replace(merged, tensors=tensors)
