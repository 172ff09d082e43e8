"""PFL-MoE: FedAvg, then each client mixes the global head with a head of its own by a gate of its own.

B. Guo et al., "PFL-MoE: Personalized federated learning based on mixture of experts", arXiv 2012.15589 (2021).

Differs from FedAvg: in nothing that is sent. What a client answers with at home is g·h_g(φ(x)) + (1 − g)·h_p(φ(x)):
φ and the head h_g are global, the head h_p starts as h_g and is trained on three quarters of the client's rows with φ
frozen, and then the gate g = σ(w·φ(x) + b) is trained on the rest with both heads frozen.

Differs from the paper, whose models classify images: h is the output layer over the vocabulary, φ the decoder's last
state at each token to be written, which is also the gate's input (the paper's MFE gates on raw input). Heads and gates
are trained on what a client receives, in every round after ``after``, not once after the last, and by AdamW: so the
last ones are trained on the model before the last average and measured on the one after it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from fedloom.errors import ConfigError
from fedloom.methods.base import Effort
from fedloom.methods.fedavg_moe import FedAvgMoE, FedAvgMoEOptions
from fedloom.numerics.init import BIAS, DELTA, GATE, no_difference
from fedloom.numerics.tree import place, take
from fedloom.types import Client, Memory, Order, Reply, State, Tensors, View

#: A gate that is shut on the global head: σ(−100) is 4e-44.
OWN_ALONE = torch.tensor([-100.0])


class PFLMoEOptions(FedAvgMoEOptions):
    """``after``: rounds of plain FedAvg first (the paper: all; here at least one more follows). ``head_epochs``,
    ``gate_epochs``: passes over the rows of each, every time (the paper: 200). ``gate_every``: one row in so many is
    the gate's. Clients count alike, as in the paper, so that FLAME's rule, which counts rows, does not fit."""

    weighting: Literal["samples"] = "samples"
    after: int = Field(0, ge=0)
    head_epochs: int = Field(1, ge=1)
    gate_epochs: int = Field(1, ge=1)
    gate_every: int = Field(4, ge=2)


class PFLMoE(FedAvgMoE):
    title = "PFL-MoE"
    paper = "arXiv 2012.15589"
    local_only = "a head of the client's own and the gate between both heads"
    aggregated = "everything, all clients alike"
    weights = "uniform"
    whole = "the own head starts as the model's, which LoRAs are not trained on"
    personal = True
    own_heads = True
    keeps_moments = False
    Options = PFLMoEOptions
    options: PFLMoEOptions

    def local(self, client: Client, order: Order) -> Reply:
        """Train head and gate on what was received; then take part in FedAvg."""
        own = self.personalise(client, order) if order.round > self.options.after else {}
        return replace(super().local(client, order), keep=place(own, "own"))

    def personalise(self, client: Client, order: Order) -> Tensors:
        """Return the client's head (PFL-FB) and gate (PFL-MF), from what it has of them."""
        own = take(client.memory.tensors, "own") or no_difference(order.tensors)
        rows = range(client.size)
        for_gate = [i for i in rows if i % self.options.gate_every == self.options.gate_every - 1]
        for_head = [i for i in rows if i % self.options.gate_every != self.options.gate_every - 1]
        alone = {GATE: torch.zeros_like(own[GATE]), BIAS: OWN_ALONE}
        own |= self.trained(client, order, own | alone, for_head, self.options.head_epochs, (DELTA,))
        if for_gate:  # too few rows: half of each head
            own |= self.trained(client, order, own, for_gate, self.options.gate_epochs, (GATE, BIAS))
        return own

    def trained(
        self, client: Client, order: Order, own: Tensors, rows: list[int], epochs: int, names: tuple[str, ...]
    ) -> Tensors:
        """Return ``names`` trained on ``rows``; all else is frozen."""
        client.load(order.tensors | own, replace(order.spec, blend=True))
        training = replace(order.training, epochs=epochs, optimizer_state="reset")
        steps = epochs * math.ceil(len(rows) / training.batch_size)
        client.fit([rows] * steps, training, purpose=f"own {names[0]}", trainable=lambda name: name in names)
        found = client.read()
        return {name: found[name] for name in names}

    def effort(self, order: Order, size: int) -> Effort:
        own = self.options.head_epochs + self.options.gate_epochs if order.round > self.options.after else 0
        return Effort(self.local_steps(order) + own * math.ceil(size / order.training.batch_size))

    def head_rows(self, rows: int, clients: int, rounds: int) -> int:
        for_gate = rows // self.options.gate_every
        for_head = rows - max(0, for_gate - clients)  # each client rounds its gate's rows down
        passes = for_head * self.options.head_epochs + for_gate * self.options.gate_epochs
        return passes * max(0, rounds - self.options.after)

    def check_rounds(self, rounds: int) -> None:
        if self.options.after >= rounds > 0:
            raise ConfigError(
                f"method.after is {self.options.after}, so that no round of {rounds} is left to train heads and gates "
                f"in. Use at most {rounds - 1}."
            )

    def personal_view(self, state: State, client: str, memory: Memory) -> View:
        """Answer at home with both heads; a client that never trained its own has the global one."""
        own = take(memory.tensors, "own")
        return View(state.tensors | own, replace(state.spec, blend=True)) if own else View(state.tensors, state.spec)
