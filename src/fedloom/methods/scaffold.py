"""SCAFFOLD: control variates take the clients' drift out of every local step.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "SCAFFOLD: stochastic controlled averaging
for federated learning", arXiv 1910.06378 (2020), Algorithm 1, here on both factors of one LoRA, with AdamW.

Differs from FedAvg: c − c_i is added to each gradient, where c_i estimates the client's own gradient and c their mean
over all clients. c_i becomes the mean of the raw gradients of the round's steps; under plain SGD that is option II,
c_i − c + (x − y_i) / (K η), exactly, and unlike it does not depend on the optimiser. Means are over clients, all alike.

No step bounds a mean of raw gradients, so one site could make c anything, for good. Here no c_i is longer than
``LONGEST``, and so no Δc_i than twice that, and no c than it: the server refuses the one and shortens the other.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedloom.errors import UpdateRejected
from fedloom.methods.base import Method, Schema, by_unit
from fedloom.numerics.aggregate import RunningMean
from fedloom.numerics.tree import norm, place, subtract, take
from fedloom.types import Client, Order, Replies, Reply, Setup, State, Tensors, View

#: ℓ2 norm beyond which a mean gradient is cut: training that goes well has gradients of a hundredth of it.
LONGEST = 100.0
#: The same for the change of one: its two ends, and what rounding on the wire adds (``runtime.quarantine.ROUNDING``).
LONGEST_CHANGE = 2.5 * LONGEST


class Scaffold(Method):
    title = "SCAFFOLD"
    paper = "arXiv 1910.06378"
    aggregated = "A and B of one LoRA, and the change of each control variate, all clients alike"
    local_only = "each step's gradients"
    exact = "no: mean(B)·mean(A) ≠ mean(B·A)"
    weights = "uniform"
    averages_factors = True
    coordinates = "control variates"

    def init(self, setup: Setup) -> State:
        """Start all control variates at zero; c needs N, the number of all clients."""
        state = super().init(setup)
        zeros = {name: torch.zeros_like(tensor) for name, tensor in state.tensors.items()}
        return replace(state, kept=place(zeros, "control"), values={"clients": len(setup.clients)})

    def join(self, state: State, client: str, reply: Reply | None) -> State:
        """Keep c the mean over all N + 1 clients; the late joiner's c_i is zero."""
        count = state.values["clients"]
        kept = {n: t * (count / (count + 1)) if is_control(n) else t for n, t in state.kept.items()}
        return replace(state, kept=kept, values=state.values | {"clients": count + 1})

    def view(self, state: State, client: str | None) -> View:
        """Give a client c beside the model (line 3)."""
        controls = {name: tensor for name, tensor in state.kept.items() if is_control(name)}
        return View(state.tensors if client is None else state.tensors | controls, state.spec)

    def local(self, client: Client, order: Order) -> Reply:
        """Take corrected steps (line 10), then renew c_i (lines 12–14)."""
        shared = take(order.tensors, "control")
        start = {name: order.tensors[name] for name in shared}
        zeros = {name: torch.zeros_like(tensor) for name, tensor in shared.items()}
        own = zeros | take(client.memory.tensors, "own")
        drift = subtract(shared, own)  # c − c_i
        seen = {name: tensor.double() for name, tensor in zeros.items()}  # sum of raw gradients

        def correct(values: Tensors, gradients: Tensors) -> None:
            for name, gradient in gradients.items():
                seen[name] += gradient.cpu()
                gradient.add_(drift[name].to(gradient.device))

        client.load(start, order.spec)
        report = client.fit([range(client.size)] * client.steps(order.training), order.training, on_gradients=correct)
        renewed = cut({name: (total / report.steps).float() for name, total in seen.items()})
        send = subtract(client.read(), start) | place(subtract(renewed, own), "control")
        counts = dict.fromkeys(("examples", "experts/0", "control"), client.size)
        return Reply(client.name, send, counts, report.metrics(), keep=place(renewed, "own"))

    def merge(self, state: State, replies: Replies) -> State:
        """Average the models; c += Σ Δc_i / N over the replies: who is absent changes nothing (lines 16–17).

        The mean of vectors that are no longer than ``LONGEST`` is not either, so cutting c changes it only where some
        Δc_i did not come from such.
        """
        mean = RunningMean()
        for reply in replies:
            mean.add_each(reply.send, by_unit(reply.counts | {"control": 1}))
            del reply  # so that it is gone when the next is read
        update, answered = mean.mean(), len(replies) / state.values["clients"]
        tensors = {name: tensor + update[name] for name, tensor in state.tensors.items()}
        controls = {name: t + answered * update[name] for name, t in state.kept.items() if is_control(name)}
        return replace(state, tensors=tensors, kept=state.kept | cut(controls))

    def stepped(self, name: str) -> bool:
        return not is_control(name)

    def plausible(self, order: Order, reply: Reply, max_length: int) -> None:
        size = norm({name: tensor for name, tensor in reply.send.items() if is_control(name)})
        if size > LONGEST_CHANGE:
            raise UpdateRejected(
                f"its norm {size:.3g} in 'control' exceeds {LONGEST_CHANGE:g}: no control variate changes by so much"
            )

    def expected(self, order: Order, reply: Reply) -> Schema:
        """Ask for the model's update and Δc_i, both whole."""
        schema = super().expected(order, reply)
        if schema.keys() != order.tensors.keys():
            raise UpdateRejected("it must count examples for the adapter and for its control variate")
        return schema


def is_control(name: str) -> bool:
    return name.startswith("control/")


def cut(controls: Tensors) -> Tensors:
    """Return a control variate, shortened to ``LONGEST`` where it is longer."""
    size = norm(controls)
    return {name: t * (LONGEST / size) for name, t in controls.items()} if size > LONGEST else controls
