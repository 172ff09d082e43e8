"""The numbers that the FedWeave paper prints (arXiv 2607.26618), with where each stands.

Only what its running text says. Its tables per task are not in the text that we have, so those cells stay empty.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The paper's main setting, which all its tables but Figure 3 are of.
ALPHA = 0.3
LLAMA, GEMMA = "Llama-3.2-3B", "Gemma-2-2B"


@dataclass(frozen=True)
class Printed:
    """A number of the paper and the place that prints it."""

    value: float
    where: str


_OVERALL = "Overall Effectiveness, on Table 1, α = 0.3"
#: (row of Table 1, backbone, metric) → macro average. The text does not name the best baseline.
MACRO: dict[tuple[str, str, str], Printed] = {
    ("fedweave", LLAMA, "score"): Printed(0.5872, _OVERALL),
    ("fedweave", LLAMA, "loss"): Printed(0.7264, _OVERALL),
    ("fedweave", GEMMA, "score"): Printed(0.5163, _OVERALL),
    ("fedweave", GEMMA, "loss"): Printed(0.6954, _OVERALL),
    ("best_baseline", LLAMA, "score"): Printed(0.5673, _OVERALL),
    ("best_baseline", LLAMA, "loss"): Printed(0.7496, _OVERALL),
    ("best_baseline", GEMMA, "score"): Printed(0.4839, _OVERALL),
    ("best_baseline", GEMMA, "loss"): Printed(0.7443, _OVERALL),
}

_ROBUST = "Robustness to Client Heterogeneity, on Figure 3, Llama-3.2-3B"
#: (α, metric) → FedWeave − FedLEASE, macro average.
OVER_FEDLEASE: dict[tuple[float, str], Printed] = {
    (0.1, "score"): Printed(0.0150, _ROBUST),
    (0.3, "score"): Printed(0.0223, _ROBUST),
    (0.5, "score"): Printed(0.0106, _ROBUST),
    (0.1, "loss"): Printed(-0.0256, _ROBUST),
    (0.3, "loss"): Printed(-0.0336, _ROBUST),
    (0.5, "loss"): Printed(-0.0245, _ROBUST),
}

_GRANULARITY = "Aggregation Granularity, on Table 2, Llama-3.2-3B, α = 0.3"
#: (label, metric) → ablation − FedWeave, macro average.
ABLATION: dict[tuple[str, str], Printed] = {
    ("fedweave_wo_prototype_expert", "score"): Printed(-0.0223, _GRANULARITY),
    ("fedweave_wo_prototype_expert", "loss"): Printed(0.0336, _GRANULARITY),
    ("fedweave_wo_client_router", "score"): Printed(-0.0294, _GRANULARITY),
    ("fedweave_wo_client_router", "loss"): Printed(0.0428, _GRANULARITY),
}

_DISCOVERY = "Prototype Discovery, on Table 3, Llama-3.2-3B, α = 0.3"
#: (clusterer, what) → global purity and macro score.
CLUSTERER: dict[tuple[str, str], Printed] = {
    ("kmeans", "purity"): Printed(0.9515, _DISCOVERY),
    ("kmeans", "score"): Printed(0.5872, _DISCOVERY),
    ("spectral", "purity"): Printed(0.9499, _DISCOVERY),
    ("spectral", "score"): Printed(0.5889, _DISCOVERY),
}

_SPARSE = "Sparse Inference, on Figure 4, Llama-3.2-3B, α = 0.3"
#: (routing, what) → macro score and mean latency in milliseconds.
ROUTING: dict[tuple[str, str], Printed] = {
    ("top1", "score"): Printed(0.5872, _SPARSE),
    ("top1", "ms"): Printed(2147, _SPARSE),
    ("top2", "score"): Printed(0.5890, _SPARSE),
    ("top2", "ms"): Printed(2587, _SPARSE),
    ("soft", "score"): Printed(0.5883, _SPARSE),
    ("soft", "ms"): Printed(3177, _SPARSE),
}

_COSTS = "Appendix B, Llama-3.2-3B, four experts"
#: (method, what) → millions of parameters, and values of one bucket's signature.
BUDGET: dict[tuple[str, str], Printed] = {
    ("fedit", "lora"): Printed(9.18e6, _COSTS),
    ("fedweave", "lora"): Printed(9.18e6, _COSTS),
    ("fedlease", "lora"): Printed(9.18e6, _COSTS),
    ("fedweave", "total"): Printed(10.75e6, _COSTS),
    ("fedlease", "total"): Printed(15.48e6, _COSTS),
    ("fedweave", "signature"): Printed(917_504, _COSTS),
}
#: Warm-up steps over local steps, for four buckets per client.
WARMUP_SHARE = Printed(0.20, "Appendix B")


def place(*tables: dict[tuple[str, str], Printed] | dict[tuple[float, str], Printed]) -> str:
    """Return where numbers stand, for the note below a table."""
    return "; ".join(dict.fromkeys(printed.where for table in tables for printed in table.values()))
