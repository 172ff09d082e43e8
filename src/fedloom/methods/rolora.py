"""RoLoRA: rounds alternate between the factors, so that every round's average is exact.

S. Chen, Y. Guo, Y. Ju, H. Dalal, A. Khisti, "Robust federated finetuning of LLMs via alternating optimization of LoRA",
arXiv 2409.02346 (2024), Algorithm 1.

Differs from FedAvg: in odd rounds B is trained and averaged under a common A, in even rounds A under a common B. B goes
first: it starts at zero, where A has no gradient.
"""

from __future__ import annotations

from fedloom.methods.base import Method
from fedloom.types import Order


class RoLoRA(Method):
    title = "RoLoRA"
    paper = "arXiv 2409.02346"
    aggregated = "B in odd rounds, A in even ones, by sample count"
    exact = "yes: the other factor is common"
    summed = True
    keeps_moments = False

    def trains(self, name: str, order: Order) -> bool:
        return not name.endswith(".lora_A" if order.round % 2 else ".lora_B")
