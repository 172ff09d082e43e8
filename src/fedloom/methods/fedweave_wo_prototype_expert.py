"""FedWeave without prototype experts: the unit of warm-up, alignment and expert weighting is the whole client.

D. Duan et al., FedWeave, arXiv 2607.26618 (2026), 'Ablation Study', Table 2: *w/o prototype-expert* (client/client).

Differs from FedWeave: each client has one bucket, all its examples. So it warms up one LoRA, trains on mini-batches of
all its patterns, and sends the update of one expert, weighted by its size. The router is FedWeave's.

The paper compares at FedWeave's expert capacity. Clients fall into fewer clusters than buckets do where silhouette
chooses, so set ``experts`` to what FedWeave found.
"""

from __future__ import annotations

from typing import ClassVar

from fedloom.methods.fedweave import FedWeave, MixtureOptions
from fedloom.types import Client


class WholeClientOptions(MixtureOptions):
    """FedWeave's, but for what concerns buckets inside a client, which is fixed."""

    max_buckets: ClassVar[int] = 1
    by_length: ClassVar[bool] = False  # on a mixed bucket it would make mini-batches purer than chance


class FedWeaveWithoutPrototypeExpert(FedWeave):
    title = "FedWeave w/o prototype-expert"
    aggregated = "expert of the client's cluster by client size; the router by client size"
    local_only = "nothing"
    Options = WholeClientOptions

    def buckets(self, client: Client) -> list[int]:
        """Put all examples into one bucket."""
        return [0] * client.size
