"""FedALT: a client's own LoRA beside a frozen LoRA of the rest of the world, mixed for every token.

J. Bian, L. Wang, L. Zhang, J. Xu, "FedALT: federated fine-tuning through adaptive local training with rest-of-world
LoRA", AAAI 2026, arXiv 2503.11880.

Differs from FedAvg: no client ever goes on from an average. Expert 0 is its own LoRA, expert 1 the uniform mean of the
latest LoRAs of the *other* clients (factor by factor; zero until another has sent), frozen in training. A softmax mixer
per module weighs the two for each token and never leaves the client. Two LoRAs of rank 16 make the capacity of the
single rank-32 baselines.

What others can see: a client gets a mean, but the mean over one other client is that client's LoRA. So with two
clients, or while only one other has sent, nothing is hidden between them.

An order also brings the client's own LoRA as the server last had it, and the initial mixers, which the paper does not
send: the reply is an update of that LoRA, so that the server can judge how far it moved. The client itself goes on from
its memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedloom.methods.base import Method
from fedloom.numerics.aggregate import RunningMean
from fedloom.numerics.init import mixer_init
from fedloom.numerics.seeding import generator
from fedloom.numerics.tree import add, place, subtract, take
from fedloom.types import AdapterSpec, Client, Memory, Order, Replies, Reply, Setup, State, Tensors, View

OWN, REST = "experts/0", "experts/1"


class FedALT(Method):
    title = "FedALT"
    paper = "arXiv 2503.11880"
    aggregated = "for each client, A and B of all other clients' latest LoRAs, uniformly"
    local_only = "the token mixers; no client trains on from an average"
    exact = "no: mean(B)·mean(A) ≠ mean(B·A) in the rest-of-world LoRA"
    default_rank = 16
    weights = "uniform"
    unweighed = "FedALT's clients get the mean of all others alike"
    optimizer_refused = "no client goes on from an average"
    global_model = False
    personal = True

    def init(self, setup: Setup) -> State:
        """Draw everyone's first LoRA and mixers; the rest of the world is zero."""
        own = super().init(setup).tensors
        rest = {name.replace(OWN, REST, 1): torch.zeros_like(tensor) for name, tensor in own.items()}
        mixers = mixer_init(setup.shapes, 2, generator(setup.seed, "mixer-init"))
        return State(0, own | rest | mixers, self.deployed(setup.spec, 2))

    def view(self, state: State, client: str | None) -> View:
        """Give a client the rest of the world, its own LoRA as last received, and the initial mixers.

        For None, of whom nothing was received, the rest of the world is everyone.
        """
        return View(state.tensors | own_lora(state, client) | rest_of_world(state, client), state.spec)

    def trains(self, name: str, order: Order) -> bool:
        return not name.startswith(f"{REST}/")

    def sends(self, name: str, order: Order) -> bool:
        return name.startswith(f"{OWN}/")

    def local(self, client: Client, order: Order) -> Reply:
        """Go on from the client's own LoRA and mixers, which start as everyone's."""
        client.load(order.tensors | take(client.memory.tensors, "own"), order.spec)
        pools = [range(client.size)] * client.steps(order.training)
        report = client.fit(pools, order.training, trainable=lambda name: self.trains(name, order))
        after = client.read()
        send = {name: t for name, t in subtract(after, order.tensors).items() if self.sends(name, order)}
        keep = {name: tensor for name, tensor in after.items() if self.trains(name, order)}
        counts = {"examples": client.size, OWN: client.size}
        return Reply(client.name, send, counts, report.metrics(), keep=place(keep, "own"))

    def merge(self, state: State, replies: Replies) -> State:
        """Take note of each client's latest LoRA; nothing is averaged yet, and an absent client's stays."""
        kept = dict(state.kept)
        for reply in replies:
            now = add(own_lora(state, reply.client), reply.send)
            kept |= place(now, f"clients/{reply.client}")
            del reply  # so that it is gone when the next is read
        return replace(state, kept=kept)

    def personal_view(self, state: State, client: str, memory: Memory) -> View:
        view = self.view(state, client)
        return replace(view, tensors=view.tensors | take(memory.tensors, "own"))

    def deployed(self, spec: AdapterSpec, experts: int) -> AdapterSpec:
        return replace(spec, experts=2, slots=(0, 1))


def own_lora(state: State, client: str | None) -> Tensors:
    """Return expert 0 of ``client`` as the server has it: as last received, or everyone's first."""
    first = {name: tensor for name, tensor in state.tensors.items() if name.startswith(f"{OWN}/")}
    return first if client is None else first | take(state.kept, f"clients/{client}")


def rest_of_world(state: State, client: str | None) -> Tensors:
    """Return expert 1 of ``client``: the others' mean, float64 sums in client order; empty while no other has sent."""
    mean = RunningMean()
    for other in sorted({name.split("/")[1] for name in state.kept if name.startswith("clients/")} - {client}):
        for name, tensor in take(state.kept, f"clients/{other}").items():
            mean.add(name.replace(OWN, REST, 1), tensor, 1.0)
    return mean.mean()
