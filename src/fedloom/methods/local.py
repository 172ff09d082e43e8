"""Local: each client alone, the lower end of every table.

Differs from FedAvg: nothing is sent and nothing is averaged; a client goes on from its own adapter. There is no global
model, so it stands in the personalised protocol only.
"""

from __future__ import annotations

from fedloom.methods.base import Method
from fedloom.numerics.tree import place, take
from fedloom.types import Client, Memory, Order, Replies, Reply, State, View


class Local(Method):
    title = "Local"
    aggregated = "nothing"
    local_only = "the whole adapter"
    exact = "nothing is averaged"
    unweighed = "with Local nothing is averaged"
    optimizer_refused = "nothing is averaged"
    global_model = False
    personal = True

    def sends(self, name: str, order: Order) -> bool:
        return False

    def local(self, client: Client, order: Order) -> Reply:
        """Go on from the client's own adapter, which starts as everyone's."""
        client.load(order.tensors | take(client.memory.tensors, "own"), order.spec)
        report = client.fit([range(client.size)] * client.steps(order.training), order.training)
        return Reply(client.name, {}, {"examples": client.size}, report.metrics(), keep=place(client.read(), "own"))

    def merge(self, state: State, replies: Replies) -> State:
        return state

    def personal_view(self, state: State, client: str, memory: Memory) -> View:
        return View(state.tensors | take(memory.tensors, "own"), state.spec)
