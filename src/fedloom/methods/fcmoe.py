"""FC-MoE: conflict-aware federated fine-tuning of native mixture-of-experts models.

Y. Lu et al., "Conflict-aware federated fine-tuning of large language models with mixture-of-experts",
arXiv 2606.15625 (2026).

Differs from FedAvg: an expert's updates are weighted by importance, activations × norm (Eq. 1); what opposes the
weighted mean is projected off it (Eq. 2–4); a client starts the next round with a part of its last update (Eq. 5, 6).

What the projection amounts to: with Δ̄ = Σ c_i Δ_i / C and a_i = Δ_i·Δ̄, Eq. 3 and 4 give Σ c_i proj(Δ_i) / C =
Δ̄ · (1 + Σ_{a_i<0} c_i |a_i| / (C ‖Δ̄‖²)): the consensus itself, made longer. So one pass makes the consensus, a second
needs inner products only, and nothing but the consensus is held.

What the retention amounts to: R of Eq. 5 is parallel to Θ, so Eq. 6 multiplies all weights of an expert by one number,
1 + λ (Δ·Θ) / ‖Θ‖², close to 1: what the client learned in any other direction is not in its next start.

f of Eq. 1 is counted 'after each local training' on all of D_i, by one more pass under the gate that training left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from fedloom.methods.base import Method, MethodOptions, Schema, by_unit
from fedloom.methods.stated_activations import check_activations, check_tokens, gone_through
from fedloom.numerics.aggregate import RunningMean
from fedloom.numerics.conflict import Sizes, Weights, conflicts, sizes_of
from fedloom.numerics.tree import dot_and_norm, norm, place, subtract, take
from fedloom.types import Client, Memory, Order, Replies, Reply, State, Tensors, View, component

#: How long the experts' part of a client's head start is, and of its update; the log has their means over clients.
NORMS = ("retained_norm", "update_norm")


class FCMoEOptions(MethodOptions):
    """``importance``, ``projection`` and ``retention`` (λ, 0: none) are the three parts; off, they are the ablations.

    ``residual``: what is retained. Eq. 5 as printed projects the last update onto the new parameters
    (``parameter-projection``); the prose speaks of what the projection of Eq. 3 removed (``filtered``), which a client
    finds along the way that the server took since, where no server optimiser bends it. That is the
    consensus that the client's update was part of only in full participation and of experts that it sent: after rounds
    without the client it is the way over all of them, of an expert that it did not send the others' consensus.
    """

    importance: bool = True
    projection: bool = True
    retention: float = Field(0.5, ge=0, le=1)
    residual: Literal["parameter-projection", "filtered"] = "parameter-projection"


class FCMoE(Method):
    title = "FC-MoE"
    paper = "arXiv 2606.15625"
    aggregated = "each expert by activations × update norm, conflicts projected; the rest by sample count"
    local_only = "the last update of each expert, kept for the next start"
    exact = "yes: whole experts are averaged (of LoRAs on them, factors: no)"
    singles = "each update is projected on the consensus of all"
    native = True
    personal = True
    Options = FCMoEOptions
    options: FCMoEOptions

    def local(self, client: Client, order: Order) -> Reply:
        """Start from the retained knowledge (Eq. 5, 6), train, send the updates of activated experts (Eq. 1)."""
        start = order.tensors | retained(order.tensors, client.memory, self.options)
        client.load(start, order.spec)
        report = client.fit([range(client.size)] * client.steps(order.training), order.training)
        update = subtract(client.read(), order.tensors)  # from what was received, not from the retained start
        found = client.activations() if self.options.importance else report.activations  # f of Eq. 1, or who trained
        active = {unit: n for unit, n in found.items() if n > 0}
        send = {n: t for n, t in update.items() if not n.startswith("experts/") or component(n) in active}
        counts = {"examples": client.size} | {component(name): client.size for name in send}
        experts = {name: t for name, t in update.items() if name.startswith("experts/")}
        norms = norm(subtract(start, order.tensors)), norm(experts)
        metrics = report.metrics() | dict(zip(NORMS, norms, strict=True))
        keep = place(experts, "update")
        if self.options.residual == "filtered":
            keep |= place({name: t for name, t in order.tensors.items() if name.startswith("experts/")}, "received")
        return Reply(client.name, send, counts, metrics, {"activations": active}, keep=keep)

    def merge(self, state: State, replies: Replies) -> State:
        """Average what is no expert by sample count; experts by importance along their consensus (Eq. 2–4)."""
        means, weights, sizes, norms = RunningMean(), Weights(), Sizes(), []
        for reply in replies:
            sizes[reply.client] = sizes_of(reply.send)
            weights[reply.client] = self.importance(reply, sizes[reply.client])
            norms.append([reply.metrics.get(name, 0.0) for name in NORMS])
            means.add_each(reply.send, by_unit(weights[reply.client]))
            del reply  # so that it is gone when the next is read
        consensus = means.mean()  # Eq. 2
        del means
        log = conflicts(consensus, weights, sizes, replies)
        lengths = {name: sum(each[i] for each in norms) / len(norms) for i, name in enumerate(NORMS)}
        tensors = dict(state.tensors)
        for name in list(consensus):  # Eq. 4
            longer = log[component(name)]["length"] if component(name) in log else 1.0
            step = (longer if self.options.projection else 1.0) * consensus.pop(name)
            tensors[name] = state.tensors[name] + step
        return replace(state, tensors=tensors, values=state.values | {"log": {"conflict": log} | lengths})

    def importance(self, reply: Reply, sizes: dict[str, float]) -> dict[str, float]:
        """Return c_{i,k} = f_{i,k} ‖Δθ_{i,k}‖ of the experts (Eq. 1); the sample count of anything else."""
        weights = {unit: float(count) for unit, count in reply.counts.items()}
        if self.options.importance:
            active = reply.values["activations"]
            weights |= {unit: active[unit] * size for unit, size in sizes.items()}
        return weights

    def weights_refused(self) -> str:
        by = f"{self.title} weighs experts by activations × update norm: only the rest would change"
        return by if self.options.importance else ""

    def personal_view(self, state: State, client: str, memory: Memory) -> View:
        """Answer at home with the start of the next round (part 3)."""
        return View(state.tensors | retained(state.tensors, memory, self.options), state.spec)

    def steps_behind(self, order: Order, unit: str, examples: int) -> float:
        """Count, behind an expert, the steps of earlier rounds that its retained start can hold.

        An update is measured from what was received, so with S what a round's steps reach, ‖Δ_t‖ ≤ S + λ‖R_t‖. R_t is a
        projection of the client's last update, hence no longer: at worst ‖Δ_t‖ ≤ S (1 + λ + … + λ^(t−1)).
        """
        rounds = order.round if unit.startswith("experts/") else 1
        return sum(self.options.retention**k for k in range(rounds)) * super().steps_behind(order, unit, examples)

    def expected(self, order: Order, reply: Reply) -> Schema:
        schema = super().expected(order, reply)
        check_activations(reply, schema)
        return schema

    def plausible(self, order: Order, reply: Reply, max_length: int) -> None:
        rows = reply.counts["examples"] if self.options.importance else gone_through(order, reply)
        check_tokens(reply, rows, max_length)


def retained(current: Tensors, memory: Memory, options: FCMoEOptions) -> Tensors:
    """Return θ = Θ + λR of the experts that the client's last update holds (Eq. 5, 6)."""
    last, received = take(memory.tensors, "update"), take(memory.tensors, "received")
    start: Tensors = {}
    filtered = options.residual == "filtered"
    for unit in {component(name): None for name in last} if options.retention > 0 else {}:
        update, now = take(last, unit), take(current, unit)
        # Eq. 5 projects onto the parameters; what Eq. 3 removed lies along the way that the server took since.
        axis = subtract(now, take(received, unit)) if filtered else now
        inner, size = dot_and_norm(axis, update)
        squared = size**2
        part = inner / squared if squared > 0 and (inner < 0 or not filtered) else 0.0
        start |= {f"{unit}/{name}": t + options.retention * part * axis[name] for name, t in now.items()}
    return start
