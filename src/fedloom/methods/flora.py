"""FLoRA: the exact mean of the clients' products is added to the frozen base, and every round starts a new LoRA.

Z. Wang et al., "FLoRA: federated fine-tuning large language models with heterogeneous low-rank adaptations",
arXiv 2409.05976 (2024); here with one rank for all.

Differs from FedAvg: A and B are stacked, not averaged. The stack of p_k A_k times that of B_k is Σ p_k B_k A_k exactly.
It goes into the base, and the next round's LoRA is drawn anew.

What is sent: the paper broadcasts the stacks, K·r·(out + in) numbers per module and round, which a client must have of
every round it missed. Here a client gets the dense sum of all rounds, out·in numbers per module whenever it is asked:
more for a small cohort (K·r < out·in / (out + in)), but a newcomer needs no history. Logged bytes are those sent.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedloom.methods.base import Method
from fedloom.methods.products import mean_delta, plain_lora
from fedloom.numerics.init import lora_init
from fedloom.numerics.seeding import generator
from fedloom.numerics.tree import take
from fedloom.types import Order, Replies, Setup, State, Tensors, View


class FLoRA(Method):
    """The state's tensors are the dense additions to the base; a round's LoRA is drawn from seed and round number."""

    title = "FLoRA"
    paper = "arXiv 2409.05976"
    aggregated = "the product s B_k A_k of each client, by sample count, into the frozen base"
    keeps_moments = False
    exact = "yes: Σ p_k B_k A_k is added to the base as it is"

    def init(self, setup: Setup) -> State:
        """Start from the bare backbone."""
        tensors = {f"base/{path}.delta": torch.zeros(shape) for path, shape in setup.shapes.items()}
        return State(0, tensors, replace(setup.spec, base_delta=True), {"seed": setup.seed})

    def view(self, state: State, client: str | None) -> View:
        """Give a client the base of this round with a new LoRA, the same to all; evaluation gets one plain LoRA.

        Every round's LoRA is already in the base, so the base is the whole model.
        """
        if client is None:
            return plain_lora(additions(state), state.spec)
        return View(new_lora(state) | state.tensors, state.spec)

    def trains(self, name: str, order: Order) -> bool:
        return not name.startswith("base/")

    def merge(self, state: State, replies: Replies) -> State:
        """Add Σ p_k s B_k A_k to the base, computed in float64; the server holds a dense (out, in) sum per module."""
        start = View(new_lora(state), state.spec)
        tensors = dict(state.tensors)
        for path, dense in mean_delta(replies, lambda client: start).items():
            name = f"base/{path}.delta"
            tensors[name] = (tensors[name].double() + dense).float()
        return replace(state, tensors=tensors)


def additions(state: State) -> Tensors:
    """Return module path → what was added to the base so far, (out, in)."""
    return {name.removesuffix(".delta"): dense for name, dense in take(state.tensors, "base").items()}


def new_lora(state: State) -> Tensors:
    """Draw the LoRA of the state's round: A random, B zero. Modules in name order, which a checkpoint keeps."""
    shapes = {path: (dense.shape[0], dense.shape[1]) for path, dense in sorted(additions(state).items())}
    return lora_init(shapes, state.spec.rank, 1, generator(state.values["seed"], "adapter-init", state.round))
