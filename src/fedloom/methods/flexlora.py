"""FlexLoRA: each client has a LoRA of the rank that it can afford, and the server averages the products.

J. Bai et al., "Federated fine-tuning of large language models under heterogeneous tasks and client resources",
arXiv 2402.11505 (2024).

Differs from FedAvg: the mean is that of the dense updates s_k B_k A_k, so ranks may differ; its SVD, cut to a client's
rank, is what the client goes on from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from fedloom.methods.base import Method, MethodOptions
from fedloom.methods.products import LORA, mean_delta
from fedloom.numerics.lowrank import truncate
from fedloom.types import AdapterSpec, Replies, Reply, Setup, State, Tensors, View


class FlexLoRAOptions(MethodOptions):
    """``ranks``: client k in name order gets ``ranks[k mod len]``; empty: all get the run's rank."""

    ranks: list[Annotated[int, Field(ge=1)]] = []


class FlexLoRA(Method):
    title = "FlexLoRA"
    paper = "arXiv 2402.11505"
    aggregated = "the product s_k B_k A_k of each client, by sample count; its SVD is cut to each client's rank"
    exact = "up to the SVD's cut: of all matrices of the largest rank the nearest to mean(B·A)"
    optimizer_refused = "each round draws new factors, and the way to them from the old ones is none"
    keeps_moments = False
    Options = FlexLoRAOptions
    options: FlexLoRAOptions

    def init(self, setup: Setup) -> State:
        """Start at the largest rank; a client of smaller rank starts from the first rows of A."""
        ranks = self.options.ranks or [setup.spec.rank]
        state = super().init(replace(setup, spec=self.deployed(setup.spec, 1)))
        return replace(state, values={"ranks": {c: ranks[k % len(ranks)] for k, c in enumerate(setup.clients)}})

    def join(self, state: State, client: str, reply: Reply | None) -> State:
        """Give a late joiner the next rank of the list."""
        ranks, known = self.options.ranks or [state.spec.rank], state.values["ranks"]
        return replace(state, values=state.values | {"ranks": known | {client: ranks[len(known) % len(ranks)]}})

    def view(self, state: State, client: str | None) -> View:
        """Give a client its first r_k directions; B is rescaled so that s_k B A of them is what it was."""
        if client is None:
            return View(state.tensors, state.spec)
        spec = replace(state.spec, rank=state.values["ranks"][client])
        tensors: Tensors = {}
        for name, tensor in state.tensors.items():
            if name.endswith(".lora_A"):
                tensors[name] = tensor[: spec.rank].clone()
            else:
                tensors[name] = tensor[:, : spec.rank] * (state.spec.scaling / spec.scaling)
        return View(tensors, spec)

    # local is the default. Its reply has the shapes of the client's own order, and is checked against them.

    def merge(self, state: State, replies: Replies) -> State:
        """ΔW = Σ p_k s_k B_k A_k = U Σ Vᵀ, cut to the largest rank: A = Vᵀ, B = U Σ / s.

        The server holds one dense (out, in) sum per module.
        """
        tensors = dict(state.tensors)
        for path, dense in mean_delta(replies, lambda client: self.view(state, client)).items():
            if bool(dense.any()):  # a zero product has no directions: the factors stay
                A, B = truncate(dense, state.spec.rank, state.spec.scaling)
                tensors |= {f"{LORA}/{path}.lora_A": A.float(), f"{LORA}/{path}.lora_B": B.float()}
        return replace(state, tensors=tensors)

    def deployed(self, spec: AdapterSpec, experts: int) -> AdapterSpec:
        return replace(spec, experts=1, rank=max(self.options.ranks, default=spec.rank))
