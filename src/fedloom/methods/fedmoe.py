"""FedMoE: every client trains a sub-model of the experts that its own tokens use, as many as it can hold.

H. Mei et al., "FedMoE: Personalized federated learning via heterogeneous mixture of experts", arXiv 2408.11304 (2024).

Differs from FedAvg: a client gets and sends only its experts, with their rows of the routers; each is averaged over the
clients that hold it. Here p_ij are counted on training rows by forward passes of the untrained model (the paper trains
LoRAs for some rounds first and counts on validation rows), a client's score is its training loss, and the loss has no
term that balances experts and no label smoothing, as theirs has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from fedloom.errors import ConfigError, UpdateRejected, nearest
from fedloom.methods.base import Method, MethodOptions, Schema, by_unit
from fedloom.methods.stated_activations import bounded_by_tokens, check_activations
from fedloom.numerics.aggregate import RunningMean
from fedloom.numerics.submodels import adjusted, choose, parts, shares_of, split, stalled, with_parts
from fedloom.numerics.tree import subtract
from fedloom.types import Client, Memory, Order, Plain, Replies, Reply, State, View, component


class FedMoEOptions(MethodOptions):
    """``capacity``: the share of all experts that a client can hold, ``capacities`` other clients' own, by name.

    ``patience``: after so many rounds without a better loss a client's experts are adjusted to those of its
    ``neighbours`` most similar clients; 0: never. The paper leaves all of these open.
    """

    capacity: float = Field(0.5, gt=0, le=1)
    capacities: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=dict)
    patience: int = Field(3, ge=0)
    neighbours: int = Field(3, ge=1)


class FedMoE(Method):
    title = "FedMoE"
    paper = "arXiv 2408.11304"
    aggregated = "each expert, with its row of the router, over the clients that hold it; the rest over all; by samples"
    exact = "yes: whole experts are averaged (of LoRAs on them, factors: no)"
    has_probe = True
    native = True
    submodels = True
    optimizer_refused = "rows of a router whose expert nobody trained would move on"
    personal = True
    keeps_moments = False
    Options = FedMoEOptions
    options: FedMoEOptions
    plausible = bounded_by_tokens

    def check_clients(self, clients: Sequence[str]) -> None:
        if unknown := sorted(self.options.capacities.keys() - set(clients)):
            near = nearest(unknown[0], clients)
            raise ConfigError(f"method.capacities names {unknown[0]!r}, who is no client of this run.{near}")

    # Stage 1, once.

    def probe(self, client: Client, order: Order) -> Reply:
        """Count how many of the client's tokens go to each expert; nothing else leaves."""
        client.load(order.tensors, order.spec)
        return Reply(client.name, {}, {"examples": client.size}, values={"activations": client.activations()})

    def discover(self, state: State, replies: Replies) -> State:
        """Give each client the experts of the largest θ that fit it."""
        shares = {reply.client: shares_of(reply.values["activations"]) for reply in replies}
        chosen = {client: choose(p, self.budget(state, client)) for client, p in shares.items()}
        found: dict[str, Plain] = {"shares": shares, "history": {}, "trial": {}, "frozen": []}
        found["kept"] = {client: kept for client, (kept, _) in chosen.items()}
        found["theta"] = {client: theta for client, (_, theta) in chosen.items()}
        return replace(state, values=state.values | found)

    def budget(self, state: State, client: str) -> int:
        """Return how many experts a client can hold, of all layers together."""
        return room(self.options.capacities.get(client, self.options.capacity), len(experts_in(state)))

    def held(self, units: Collection[str]) -> int:
        capacity = max([self.options.capacity, *self.options.capacities.values()])
        return max(len({split(unit)[0] for unit in units}), room(capacity, len(units)))  # each layer keeps one

    # Stage 2, every round.

    def view(self, state: State, client: str | None) -> View:
        """Give a client the dense layers, its experts and the routers, which choose among these only."""
        kept = state.values.get("kept", {}).get(client)
        if kept is None:
            return View(state.tensors, state.spec)
        held = {n: t for n, t in state.tensors.items() if not n.startswith("experts/") or component(n) in set(kept)}
        return View(held, replace(state.spec, kept=tuple(kept)))

    def local(self, client: Client, order: Order) -> Reply:
        """Train all it has; send it all and how many tokens each expert had."""
        client.load(order.tensors, order.spec)
        report = client.fit([range(client.size)] * client.steps(order.training), order.training)
        send = subtract(client.read(), order.tensors)
        counts = {"examples": client.size} | {component(name): client.size for name in send}
        active = {unit: report.activations[unit] for unit in order.spec.kept}
        return Reply(client.name, send, counts, report.metrics(), {"activations": active})

    def merge(self, state: State, replies: Replies) -> State:
        """Average modularly: what nobody holds stays, one holder's replaces, several holders' are averaged."""
        means, losses, shares = RunningMean(), dict[str, float](), dict(state.values["shares"])
        for reply in replies:
            held = {component(name) for name in reply.send if name.startswith("experts/")}
            means.add_each(parts(reply.send, held), by_unit(reply.counts))
            losses[reply.client] = reply.metrics["loss"]
            shares[reply.client] = shares_of(dict.fromkeys(experts_in(state), 0) | reply.values["activations"])
            del reply  # so that it is gone when the next is read
        tensors = with_parts(state.tensors, means.mean())
        return self.adjust(replace(state, tensors=tensors, values=state.values | {"shares": shares}), losses)

    def adjust(self, state: State, losses: dict[str, float]) -> State:
        """Change the experts of clients whose loss stalls; take a change back that did not help, and freeze them."""
        values, patience = state.values, self.options.patience
        kept, history, trial = (dict(values[key]) for key in ("kept", "history", "trial"))
        frozen = set(values["frozen"])
        for client in sorted(losses.keys() - frozen) if patience else []:
            past = history[client] = [*history.get(client, []), losses[client]]
            if client in trial and len(past) > patience:
                before = trial.pop(client)
                if stalled(past, patience):
                    kept[client] = before
                    frozen.add(client)
            elif client not in trial and stalled(past, patience):
                count, budget = self.options.neighbours, self.budget(state, client)
                changed = adjusted(client, values["kept"], values["shares"], count, budget)
                if changed != sorted(kept[client]):
                    kept[client], trial[client], history[client] = changed, kept[client], [min(past)]
        found: dict[str, Plain] = {"kept": kept, "history": history, "trial": trial, "frozen": sorted(frozen)}
        found["log"] = {"experts": {client: len(units) for client, units in kept.items()}, "frozen": len(frozen)}
        return replace(state, values=values | found)

    def personal_view(self, state: State, client: str, memory: Memory) -> View:
        """Answer with the experts from before a change that has not helped yet: some may never have been trained."""
        settled = state.values.get("kept", {}) | state.values.get("trial", {})
        return self.view(replace(state, values=state.values | {"kept": settled}), client)

    def admits(self, state: State, client: str) -> bool:
        return client in state.values["kept"]

    def expected(self, order: Order, reply: Reply) -> Schema:
        offered = {name: tuple(t.shape) for name, t in order.tensors.items()}
        if order.kind == "probe":
            if reply.counts.keys() != {"examples"}:
                raise UpdateRejected(f"a probe counts 'examples' only, not {sorted(reply.counts)}")
            check_activations(reply, offered)
            return {}
        schema = super().expected(order, reply)
        check_activations(reply, schema)
        if "loss" not in reply.metrics:
            raise UpdateRejected("it states no loss, by which its experts are adjusted")
        return schema


def room(capacity: float, experts: int) -> int:
    """Return how many of so many experts a share of them is."""
    return int(capacity * experts + 1e-9)


def experts_in(state: State) -> list[str]:
    return list(dict.fromkeys(component(name) for name in sorted(state.tensors) if name.startswith("experts/")))
