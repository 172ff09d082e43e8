"""The sum of a round's replies, which may be all that the server knows of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fedloom.types import Replies, Reply, Tensors, component

#: Stands where a client's name would.
ALL = "all clients"


@dataclass
class Totals:
    """What the server may know of a round's replies.

    Attributes:
        sums: name → Σ weight · update, float64.
        weights: component → Σ weight.
        contributors: component → how many clients sent it.
        loss: Σ examples · loss and Σ examples, where only the sum is known.
    """

    sums: Tensors = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    contributors: dict[str, int] = field(default_factory=dict)
    loss: tuple[float, int] = (0.0, 0)

    def take_in(self, reply: Reply) -> None:
        """Add one reply."""
        for unit in {component(name) for name in reply.send}:
            self.weights[unit] = self.weights.get(unit, 0.0) + reply.counts[unit]
            self.contributors[unit] = self.contributors.get(unit, 0) + 1
        for name, tensor in reply.send.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(tensor, dtype=torch.float64)
            self.sums[name].add_(tensor.double(), alpha=reply.counts[component(name)])


def totals_of(replies: Replies) -> Totals:
    """Return the totals, reading the replies one at a time in the order given."""
    totals = Totals()
    for reply in replies:
        totals.take_in(reply)
        del reply  # so that it is gone when the next is read
    return totals


def mean_reply(sums: Tensors, divisors: Mapping[str, float]) -> Reply:
    """Return the one reply whose merge is what merging all would be: Σ / divisor of each component, weight 1."""
    send = {name: (total / divisors[component(name)]).float() for name, total in sums.items()}
    return Reply(ALL, send, {"examples": 1} | {component(name): 1 for name in send})
