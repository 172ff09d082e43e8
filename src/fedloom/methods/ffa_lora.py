"""FFA-LoRA: the A factors are frozen and the same everywhere; only B is trained, sent and averaged.

Y. Sun, Z. Li, Y. Li, B. Ding, "Improving LoRA in privacy-preserving federated learning", arXiv 2403.12313 (2024).

Differs from FedAvg: half of each LoRA never moves. With a common A the mean of B is exact, Σ p B_k A = (Σ p B_k) A, and
half as much goes up. A, drawn once from the run's seed, goes down with every order, so that a site without memory can
take part at any time.
"""

from __future__ import annotations

from fedloom.methods.base import Method
from fedloom.types import Order


class FFALoRA(Method):
    title = "FFA-LoRA"
    paper = "arXiv 2403.12313"
    aggregated = "B, by sample count"
    exact = "yes: A is common"
    summed = True

    def trains(self, name: str, order: Order) -> bool:
        return not name.endswith(".lora_A")
