"""FedLEASE with its authors' routing: every adapted layer chooses experts for every token.

L. Wang et al., FedLEASE, arXiv 2509.15087 (2025); public code lei-wang-link/FedLEASE.

Differs from ``fedlease``: in place of a sentence router, each layer has a linear mixer over 2M − 1 slots, of which the
first M are the client's own expert and the rest the others in order. A token keeps its top M slots, renormalised, so
its own expert always answers. Mixers are averaged inside a cluster, since slots mean other experts elsewhere; there is
no model for everyone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedloom.methods.fedlease import ClusterOptions, FedLEASE
from fedloom.numerics.init import mixer_init
from fedloom.numerics.seeding import generator
from fedloom.numerics.tree import place, take
from fedloom.types import AdapterSpec, Order, State, Tensors, View, component


class FedLEASEAdaptive(FedLEASE):
    title = "FedLEASE (adaptive top-M)"
    aggregated = "expert and token mixers of a cluster over its clients, all alike"
    global_model = False
    Options = ClusterOptions

    def routing(self, state: State) -> Tensors:
        """Draw one mixer per layer, Kaiming-uniform, without bias."""
        shapes = {
            name.removesuffix(".lora_A"): (0, tensor.shape[1])  # a mixer does not depend on the layer's output
            for name, tensor in take(state.tensors, "experts/0").items()
            if name.endswith(".lora_A")
        }
        return mixer_init(shapes, len(state.spec.slots), generator(state.values["seed"], "mixer-init"))

    def view(self, state: State, client: str | None) -> View:
        """Give all experts and the mixers of the client's cluster; outside of all clusters, the backbone alone."""
        experts = place(take(state.tensors, "experts"), "experts")
        if "assignment" not in state.values:
            return View(experts, state.spec)
        if client not in state.values["assignment"]:
            nothing = {n: torch.zeros_like(t) for n, t in experts.items() if n.startswith("experts/0/")}
            return View(nothing, replace(state.spec, experts=1, slots=(), slot_top=0))
        values = {key: state.values[key][client] for key in ("assignment", "sizes")}
        (own,) = values["assignment"]
        spec = replace(state.spec, slots=slots(own, state.spec.experts))
        return View(experts | take(state.tensors, f"routers/{own}"), spec, values)

    def trains(self, name: str, order: Order) -> bool:
        """Train the mixers and the cluster's own expert; other experts stay frozen in the mixture."""
        return component(name) in ("mixers", f"experts/{order.values['assignment'][0]}")

    def home(self, name: str, cluster: int) -> str:
        return f"routers/{cluster}/{name}"

    def deployed(self, spec: AdapterSpec, experts: int) -> AdapterSpec:
        return replace(spec, experts=experts, slots=slots(0, experts), slot_top=experts)


def slots(own: int, experts: int) -> tuple[int, ...]:
    """Return the expert of each slot: M times one's own, then the others in order."""
    return (own,) * experts + tuple(m for m in range(experts) if m != own)
