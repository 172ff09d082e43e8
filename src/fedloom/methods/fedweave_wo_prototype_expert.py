"""FedWeave without prototype experts: the unit of warm-up, alignment and expert weighting is the whole client.

D. Duan et al., FedWeave, arXiv 2607.26618 (2026), 'Ablation Study', Table 2: *w/o prototype-expert* (client/client).

Differs from FedWeave: each client has one bucket, all its examples. So it warms up one LoRA, trains on mini-batches of
all its patterns, and sends the update of one expert, weighted by its size. The router is FedWeave's.
"""

from __future__ import annotations

from typing import Literal

from fedloom.methods.fedweave import FedWeave, FedWeaveOptions


class WholeClientOptions(FedWeaveOptions):
    """FedWeave's. One bucket leaves nothing to ``clusterer`` and ``restarts``."""

    max_buckets: Literal[1] = 1
    by_length: Literal[False] = False  # on a mixed bucket it would make mini-batches purer than chance


class FedWeaveWithoutPrototypeExpert(FedWeave):
    title = "FedWeave w/o prototype-expert"
    aggregated = "expert of the client's cluster by client size; the router by client size"
    local_only = "nothing"
    Options = WholeClientOptions
