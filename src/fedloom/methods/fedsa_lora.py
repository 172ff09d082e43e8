"""FedSA-LoRA: both factors are trained, A is shared, B stays with the client.

P. Guo, S. Zeng, Y. Wang, H. Fan, F. Wang, L. Qu, "Selective aggregation for low-rank adaptation in federated
learning", arXiv 2410.01463 (2024); measured in the form of FedWeave (arXiv 2607.26618, 'Baselines and Comparison
Scope').

Differs from FedAvg: only A's update is sent and averaged. A client's B goes on from its own memory, round after round;
a client that was absent finds its B as it left it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedloom.methods.base import Method
from fedloom.numerics.aggregate import RunningMean
from fedloom.numerics.tree import place, subtract, take
from fedloom.types import Client, Memory, Order, Replies, Reply, State, View, component


class FedSALoRA(Method):
    title = "FedSA-LoRA"
    paper = "arXiv 2410.01463"
    aggregated = "A, by sample count"
    local_only = "B of the LoRA"
    exact = "every client has its own B, so there is no one product to be exact about"
    personal = True

    def sends(self, name: str, order: Order) -> bool:
        return name.endswith(".lora_A")

    def local(self, client: Client, order: Order) -> Reply:
        """Pair the shared A with the client's own B, train both, send A's update, keep B."""
        start = order.tensors | take(client.memory.tensors, "own")  # B as ordered, zero, the first time
        client.load(start, order.spec)
        report = client.fit([range(client.size)] * client.steps(order.training), order.training)
        end = client.read()
        send = {name: delta for name, delta in subtract(end, start).items() if self.sends(name, order)}
        own = {name: tensor for name, tensor in end.items() if not self.sends(name, order)}
        counts = {"examples": client.size} | {component(name): client.size for name in send}
        return Reply(client.name, send, counts, report.metrics(), keep=place(own, "own"))

    def merge(self, state: State, replies: Replies) -> State:
        """Average A; remember the sizes of those who answered."""
        sizes = dict(state.values.get("sizes", {}))
        for reply in replies:
            sizes[reply.client] = reply.counts["examples"]
            del reply  # so that it is gone when the next is read
        return replace(super().merge(state, replies), values=state.values | {"sizes": sizes})

    def assembled(self, state: State, memories: Mapping[str, Memory]) -> View:
        """Pair the shared A with the mean of the clients' B, weighted by the sizes of those who ever answered.

        That is FedWeave's global FedSA-LoRA. No server could build it: B is read from the clients' own memories.
        """
        mean = RunningMean()
        for client, size in sorted(state.values.get("sizes", {}).items()):
            for name, tensor in take(memories[client].tensors, "own").items():
                mean.add(name, tensor, size)
        return View(state.tensors | mean.mean(), state.spec)

    def personal_view(self, state: State, client: str, memory: Memory) -> View:
        return View(state.tensors | take(memory.tensors, "own"), state.spec)
