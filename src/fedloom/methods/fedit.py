"""FedIT: federated instruction tuning of one shared LoRA.

J. Zhang et al., "Towards building the federated GPT: federated instruction tuning", arXiv 2305.05644 (2023); in the
form that FedWeave (arXiv 2607.26618, 'Baselines and Comparison Scope') compares with: both factors of one rank-32 LoRA
on query and value projections are trained, and client deltas are averaged by sample count.

Differs from FedAvg: not at all, but for what is averaged. The factors are averaged, not their product, so the mean of
B·A is met only approximately when clients differ.
"""

from __future__ import annotations

from fedloom.methods.base import Method


class FedIT(Method):
    title = "FedIT"
    paper = "arXiv 2305.05644"
    aggregated = "A and B of one LoRA, by sample count"
    exact = "no: mean(B)·mean(A) ≠ mean(B·A)"
    averages_factors = True
    summed = True
