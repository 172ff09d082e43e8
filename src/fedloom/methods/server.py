"""What any method's server step can be given: other client weights, exact products, a server optimiser.

Product averaging: Bai et al., "Federated fine-tuning of large language models under heterogeneous tasks and client
resources" (FlexLoRA), arXiv 2402.11505, used here per expert. Optimisers: Hsu, Qi, Brown, "Measuring the effects of
non-identical data distribution" (FedAvgM), arXiv 1909.06335; Reddi et al., "Adaptive federated optimization" (FedAdam,
FedYogi), arXiv 2003.00295, Algorithm 2. Conflicts and importance: FC-MoE's rules, arXiv 2606.15625, Eq. 1–4, for the
LoRA experts of other methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from fedloom.errors import ConfigError
from fedloom.methods.base import Method, Section
from fedloom.numerics.aggregate import weighted_mean_by_component
from fedloom.numerics.conflict import Sizes, Weights, conflicts, sizes_of
from fedloom.numerics.lowrank import delta, truncate
from fedloom.types import Replies, Reply, State, Tensors, component


class ServerStep(Section):
    """The section ``server``: how the server turns replies into the next state.

    Attributes:
        weights: ``method`` (its own default), ``sample`` or ``uniform``.
        aggregation: ``factors`` averages A and B as the method does; ``product-svd`` averages each expert's B·A and
            takes the best approximation of the same rank, which removes the bias of averaging factors.
        conflict: ``project`` takes off an expert's updates what opposes their weighted mean.
        importance: ``norm`` weighs an update of an expert by its examples × its norm: gates are not counted here.
        optimizer: ``none`` takes the merged tensors; the others see merged − previous as the gradient to ascend.
        lr: server learning rate of the optimiser. FedAdam and FedYogi move each entry by about so much a round.
        beta1: momentum.
        beta2: decay of the second moment.
        tau: added to its root.
    """

    weights: Literal["method", "sample", "uniform"] = "method"
    aggregation: Literal["factors", "product-svd"] = "factors"
    conflict: Literal["none", "project"] = "none"
    importance: Literal["samples", "norm"] = "samples"
    optimizer: Literal["none", "fedavgm", "fedadam", "fedyogi"] = "none"
    lr: float = Field(1.0, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0)

    @model_validator(mode="after")
    def _rate(self) -> ServerStep:
        if self.optimizer == "none" and self.lr != 1.0:
            raise ValueError("lr is the rate of a server optimizer, and optimizer is none")
        if self.optimizer in ("fedadam", "fedyogi") and self.lr == 1.0:  # the default, which is FedAvgM's
            raise ValueError(
                f"{self.optimizer} needs lr: each entry moves by about so much a round; near what clients move it"
            )
        return self

    def uniform(self, method: Method) -> bool:
        """Return whether all clients weigh the same."""
        return (method.weights if self.weights == "method" else self.weights) == "uniform"

    def check(self, method: Method) -> None:
        """Refuse what makes no sense together.

        Raises:
            ConfigError: naming both sides.
        """
        if self.weights != "method" and (why := method.weights_refused()):
            raise ConfigError(f"server.weights {self.weights!r} says how clients weigh; {why}. Leave it at 'method'.")
        if self.optimizer != "none" and (why := method.optimizer_refused):
            raise ConfigError(
                f"server.optimizer {self.optimizer} takes what the average moved for a gradient; with {method.title} "
                f"{why}. Leave it at 'none'."
            )
        if self.aggregation == "product-svd" and not method.averages_factors:
            raise ConfigError(
                "server.aggregation product-svd averages B·A where a method averages both factors; "
                f"{method.title} does not, so there is nothing to correct. Leave it at 'factors'."
            )
        if self.aggregation == "product-svd" and (kept := method.coordinates):
            raise ConfigError(
                f"server.aggregation product-svd draws new factors each round; {method.title} keeps {kept} in the "
                "coordinates of the old ones. Leave it at 'factors'."
            )
        if (self.conflict, self.importance) != ("none", "samples") and type(method).merge is not Method.merge:
            raise ConfigError(
                "server.conflict and server.importance change the weighted mean of experts' updates; "
                f"{method.title} merges by a rule of its own. Leave them at 'none' and 'samples'."
            )
        if self.conflict == "project" and self.aggregation == "product-svd":
            raise ConfigError("server.conflict projects updates of factors, which product-svd replaces: use one.")
        if self.aggregation == "product-svd" and self.optimizer != "none":
            raise ConfigError(
                f"server.optimizer {self.optimizer} needs tensors that move a little each round; product-svd draws new "
                "factors each round. Use one of the two."
            )


def server_step(method: Method, state: State, replies: Replies, step: ServerStep) -> State:
    """Return the state after a round: ``method.merge`` with the options applied around it."""
    weighed = Uniform(replies) if step.uniform(method) else replies
    if step.importance == "norm":
        weighed = ByNorm(weighed)
    merged = method.merge(state, weighed)
    if step.conflict == "project":
        merged = without_conflicts(state, merged, weighed)
    if step.aggregation == "product-svd":
        merged = replace(merged, tensors=merged.tensors | mean_products(state, weighed))
    return merged if step.optimizer == "none" else optimize(state, merged, step)


class Uniform:
    """The same replies, in which every component counts one example (``types.Replies``)."""

    def __init__(self, replies: Replies) -> None:
        self.replies = replies

    def __iter__(self) -> Iterator[Reply]:
        for reply in self.replies:
            yield replace(reply, counts={unit: min(count, 1) for unit, count in reply.counts.items()})
            del reply  # so that it is gone when the next is read

    def __len__(self) -> int:
        return len(self.replies)


class ByNorm:
    """The same replies, in which an expert counts its examples × the norm of its update (``types.Replies``)."""

    def __init__(self, replies: Replies) -> None:
        self.replies = replies

    def __iter__(self) -> Iterator[Reply]:
        for reply in self.replies:
            sizes = sizes_of(reply.send)
            counts: Any = {unit: count * sizes.get(unit, 1.0) for unit, count in reply.counts.items()}
            yield replace(reply, counts=counts)
            del reply  # so that it is gone when the next is read

    def __len__(self) -> int:
        return len(self.replies)


def without_conflicts(state: State, merged: State, replies: Replies) -> State:
    """Lengthen each expert's mean update as the projection of opposing updates does; see ``numerics.conflict``."""
    means, _ = weighted_mean_by_component(replies)
    consensus = {name: mean for name, mean in means.items() if name.startswith("experts/")}
    weights, sizes = Weights(), Sizes()
    for reply in replies:
        weights[reply.client] = {unit: float(count) for unit, count in reply.counts.items()}
        sizes[reply.client] = sizes_of(reply.send)
        del reply  # so that it is gone when the next is read
    log = conflicts(consensus, weights, sizes, replies)
    longer = {n: state.tensors[n] + log[component(n)]["length"] * mean for n, mean in consensus.items()}
    tensors = merged.tensors | longer
    return replace(merged, tensors=tensors, values=merged.values | {"log": {"conflict": log}})


def mean_products(state: State, replies: Replies) -> Tensors:
    """Return new factors of each expert whose product is the truncated mean product, at the rank they have.

    ΔW = Σ n_i s (B + ΔB_i)(A + ΔA_i) / Σ n_i over the replies that trained the expert; A = Vᵀ, B = U Σ / s. Holds one
    dense (out, in) sum per module and expert.
    """
    sums: Tensors = {}  # of dense (out, in), by the name of A
    totals: dict[str, float] = {}
    for reply in replies:
        for name in reply.send:
            weight = reply.counts.get(component(name), 0)
            if name in state.tensors and name.endswith(".lora_A") and weight > 0:
                other = name.removesuffix("A") + "B"
                A = state.tensors[name].double() + reply.send[name].double()
                B = state.tensors[other].double() + reply.send[other].double()
                dense = weight * delta(A, B, state.spec.scaling)
                sums[name] = sums[name] + dense if name in sums else dense
                totals[name] = totals.get(name, 0.0) + weight
        del reply  # so that it is gone when the next is read
    found: Tensors = {}
    for name, total in sums.items():
        if bool(total.any()):  # a zero product has no directions: the factors stay
            A, B = truncate(total / totals[name], state.spec.rank, state.spec.scaling)
            found |= {name: A.float(), name.removesuffix("A") + "B": B.float()}
    return found


def optimize(state: State, merged: State, step: ServerStep) -> State:
    """Take one step of the server optimiser from ``state`` along merged − state; tensors that did not move stay.

    First moments start at zero, second ones at τ² (Reddi et al., Algorithm 2: v₋₁ ≥ τ²), without bias correction; they
    live in ``State.kept``.
    """
    tensors, kept = dict(merged.tensors), dict(merged.kept)
    for name, before in state.tensors.items():
        if torch.equal(merged.tensors[name], before):
            continue
        change = merged.tensors[name] - before
        first = kept.get(f"server/m/{name}", torch.zeros_like(before))
        second = kept.get(f"server/v/{name}", torch.full_like(before, step.tau**2))
        if step.optimizer == "fedavgm":
            kept[f"server/m/{name}"] = first = step.beta1 * first + change
            tensors[name] = before + step.lr * first
            continue
        kept[f"server/m/{name}"] = first = step.beta1 * first + (1 - step.beta1) * change
        squared = change.square()
        if step.optimizer == "fedadam":
            second = step.beta2 * second + (1 - step.beta2) * squared
        else:
            second = second - (1 - step.beta2) * squared * torch.sign(second - squared)
        kept[f"server/v/{name}"] = second
        tensors[name] = before + step.lr * first / (second.sqrt() + step.tau)
    return replace(merged, tensors=tensors, kept=kept)
