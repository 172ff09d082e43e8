"""FedWeave without a client router: every bucket trains a router of its own, and the client returns their mean.

D. Duan et al., FedWeave, arXiv 2607.26618 (2026), 'Ablation Study', Table 2: *w/o client-router* (prototype/prototype).

Differs from FedWeave: the router's state does not persist over the client's schedule. Each bucket c trains a copy of
the broadcast router on its own H_c steps; the client returns the mean of the endpoints, weighted by a_c = |B_c| / |D|.
Experts see the same interleaved steps as in FedWeave.
"""

from __future__ import annotations

from pydantic import Field

from fedloom.methods.fedweave import FedWeave, FedWeaveOptions
from fedloom.numerics.aggregate import weighted_mean
from fedloom.types import Client, Order, Tensors


class ResetRouterOptions(FedWeaveOptions):
    """FedWeave's; each bucket's weight is a metric, of which a reply holds only so many."""

    max_buckets: int = Field(8, ge=1, le=32)


class FedWeaveWithoutClientRouter(FedWeave):
    title = "FedWeave w/o client-router"
    aggregated = "expert m by the examples of its aligned buckets; the mean of the buckets' routers by client size"
    Options = ResetRouterOptions

    def take_steps(
        self, client: Client, order: Order, members: list[list[int]], visits: list[int]
    ) -> tuple[Tensors, dict[str, float]]:
        """Take the same steps, with a router copy per bucket; one without a step ends where it began."""
        report = client.fit(
            [members[c] for c in visits], order.training, by_length=self.options.by_length, router_copies=visits
        )
        router = {name for name in order.tensors if name.startswith("router/")}
        ends = [report.routers.get(c, order.tensors) for c in range(len(members))]
        sizes = [len(pool) for pool in members]
        mean = {name: weighted_mean([end[name] for end in ends], sizes) for name in router}
        pull = [size * visits.count(c) for c, size in enumerate(sizes)]  # a_c H_c
        shares = [weight / sum(pull) for weight in pull]  # π̃_c, Eq. 40
        mismatch = sum(abs(share - size / client.size) for share, size in zip(shares, sizes, strict=True))  # Eq. 41
        metrics = {f"router_weight_{c}": share for c, share in enumerate(shares)}
        return client.read() | mean, report.metrics() | metrics | {"router_weight_mismatch": mismatch}
