"""The six nouns. Only ``Order``, ``Reply`` and ``State`` cross between server and clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import torch

#: Flat name → tensor. Expert ``m`` of module ``p`` is ``experts/<m>/<p>.lora_A`` (rank, in) and
#: ``experts/<m>/<p>.lora_B`` (out, rank); router parameters are ``router/<name>``, or ``routers/<j>/<name>`` where a
#: model has several; ``mixers/<p>.weight`` (slots, in) routes each token at module ``p``; ``base/<p>.delta`` (out, in)
#: is a frozen addition to the weight of ``p``.
Tensors = dict[str, torch.Tensor]

#: Anything JSON can hold.
Plain = Any

#: Which hidden layer to look at: the last one; by index, 0 being the embeddings; or by a fraction of the depth.
Layer = Literal["last"] | int | float
#: What becomes of a prompt's tokens: their mean, or the last token's state.
Pooling = Literal["mean", "last"]

#: How what a client sends is compressed.
Wire = Literal["none", "bf16", "int8"]


#: Fields of ``AdapterSpec`` that JSON holds as lists.
LISTS = ("targets", "slots", "kept", "router_weights")


def component(name: str) -> str:
    """Return the aggregation unit of a name: ``experts/3/x.lora_A`` → ``experts/3``; ``router/w`` → ``router``."""
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] in ("experts", "routers") else parts[0]


@dataclass(frozen=True)
class AdapterSpec:
    """What to graft onto the frozen backbone, declaratively.

    Attributes:
        targets: suffixes of the linear modules that get a mixture of LoRA experts (``q_proj``, ``v_proj``).
        rank: rank of each expert.
        alpha: LoRA alpha; the path is scaled by ``alpha / rank``.
        dropout: dropout probability on the LoRA path, before A.
        experts: number of experts M. One expert is plain LoRA.
        router_hidden: width of the router's hidden layer; 0 means no such router.
        routers: number of routers; the gates of several are averaged (FedLEASE: one router per client cluster).
        router_weights: how much each of several routers counts in that mean; empty: all alike.
        centroids: route by the nearest centroid in feature space (FedRouter) instead of a learned router.
        slots: route each token at each module by a linear mixer with these slots: slot j feeds expert ``slots[j]``, and
            an expert's weight is the sum over its slots (FedLEASE's adaptive top-M, FedALT). Empty: no mixers.
        slot_top: how many slots a token keeps, renormalised; 0 keeps all.
        base_delta: every targeted module has a frozen dense addition to its weight (FLoRA, FedEx-LoRA).
        native: the model's own experts are trained, and all of the above but ``rank`` and ``alpha`` is unused: ``full``
            trains every parameter of the model, ``lora`` a LoRA on every expert and the routers. Empty: LoRA experts,
            as above.
        kept: components of the native experts that this model has; its routers do not choose others. Empty: all.
        blend: the native model has a head of the client's own beside its own, and a gate mixes both (PFL-MoE).
    """

    targets: tuple[str, ...]
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.05
    experts: int = 1
    router_hidden: int = 0
    routers: int = 1
    router_weights: tuple[float, ...] = ()
    centroids: bool = False
    slots: tuple[int, ...] = ()
    slot_top: int = 0
    base_delta: bool = False
    native: str = ""
    kept: tuple[str, ...] = ()
    blend: bool = False

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    @property
    def routed(self) -> bool:
        """Whether a prompt chooses among experts: not one expert alone, nor such as are weighed for each token."""
        return self.experts > 1 and not (self.native or self.slots)

    def to_plain(self) -> dict[str, Plain]:
        return {**asdict(self), **{name: list(getattr(self, name)) for name in LISTS}}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Plain]) -> AdapterSpec:
        return cls(**{**plain, **{name: tuple(plain[name]) for name in LISTS if name in plain}})


@dataclass(frozen=True)
class Training:
    """Local optimisation, as the server orders it.

    Attributes:
        steps: local optimiser steps per round, in all.
        epochs: passes over the client's examples, in place of ``steps``, which then are the most; 0 takes ``steps``.
        batch_size: examples per step.
        lr: AdamW learning rate of the experts.
        router_lr: AdamW learning rate of the router.
        weight_decay: AdamW decoupled weight decay.
        clip: global gradient-norm limit; 0 switches it off.
        optimizer_state: ``reset`` (new moments every round) or ``keep`` (in the client's memory).
    """

    steps: int = 10
    batch_size: int = 8
    lr: float = 1e-4
    router_lr: float = 5e-5
    weight_decay: float = 0.0
    clip: float = 1.0
    optimizer_state: str = "reset"
    epochs: int = 0

    def steps_of(self, size: int) -> int:
        """Return how many steps a client of ``size`` examples takes."""
        return min(self.steps, self.passes_of(size)) if self.epochs else self.steps

    def passes_of(self, size: int) -> int:
        """Return how many steps ``epochs`` passes over ``size`` examples are, whatever the most."""
        return self.epochs * math.ceil(size / self.batch_size)


@dataclass(frozen=True)
class View:
    """What one client (or, for ``client=None``, evaluation and export) gets to see of the server's state."""

    tensors: Tensors
    spec: AdapterSpec
    values: dict[str, Plain] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """Server → client."""

    kind: str  # "probe" or "fit"
    client: str
    round: int
    tensors: Tensors
    spec: AdapterSpec
    training: Training
    values: dict[str, Plain] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """Client → server. ``send`` leaves the client, with the plain numbers beside it; ``keep`` never does.

    Attributes:
        send: tensors for the server.
        counts: examples behind each component of ``send`` (``experts/0``, ``router``), and ``examples`` in all.
        metrics: numbers for the log (``loss``, ``steps``, ``tokens``).
        values: plain values that the server rule needs (bucket sizes), never text of the client.
        keep: tensors for the client's own memory.
        keep_values: plain values for the client's own memory.
    """

    client: str
    send: Tensors
    counts: dict[str, int]
    metrics: dict[str, float] = field(default_factory=dict)
    values: dict[str, Plain] = field(default_factory=dict)
    keep: Tensors = field(default_factory=dict)
    keep_values: dict[str, Plain] = field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """The server's whole state: tensors and plain values, nothing else, so that a checkpoint misses nothing.

    Attributes:
        round: the last round merged; 0 before the first.
        tensors: the model that ``spec`` grafts.
        spec: what to graft.
        values: plain values.
        kept: tensors beside the model: control variates, moments of a server optimiser, single clients' adapters.
    """

    round: int
    tensors: Tensors
    spec: AdapterSpec
    values: dict[str, Plain] = field(default_factory=dict)
    kept: Tensors = field(default_factory=dict)


class Replies(Protocol):
    """Replies of one round in client order. May be read from disk one by one, and be iterated more than once."""

    def __iter__(self) -> Iterator[Reply]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Setup:
    """What a method may know when it makes its initial state.

    Attributes:
        seed: the run's seed.
        spec: one plain LoRA with the run's targets, rank, alpha and dropout.
        shapes: module path → (out, in) of every targeted linear module, in model order.
        hidden_size: width of the router's input features.
        initial: the tensors that ``spec`` grafts as they are in the backbone, where it names native experts.
        clients: names of all clients that hold examples, sorted.
    """

    seed: int
    spec: AdapterSpec
    shapes: dict[str, tuple[int, int]]
    hidden_size: int
    clients: tuple[str, ...]
    initial: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class FitReport:
    """What local training did.

    Attributes:
        losses: one entry per step.
        steps: their number.
        tokens: supervised tokens.
        routers: where each copy of the router ended, with ``router_copies``.
        activations: tokens that each native expert processed, by component, without padding.
    """

    losses: list[float]
    steps: int
    tokens: int
    routers: dict[int, Tensors] = field(default_factory=dict)
    activations: dict[str, int] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses) if self.losses else float("nan")

    def metrics(self) -> dict[str, float]:
        """Return what a reply says of the training."""
        return {"loss": self.loss, "steps": self.steps, "tokens": self.tokens}


class Memory(Protocol):
    """A client's own memory from earlier rounds, read-only: write by returning ``Reply.keep``."""

    @property
    def tensors(self) -> Tensors: ...

    @property
    def values(self) -> dict[str, Plain]: ...


class Client(Protocol):
    """What a method's client side may use: load, fit, read, memory, data."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int:
        """Number of usable examples."""
        ...

    @property
    def memory(self) -> Memory: ...

    def steps(self, training: Training) -> int:
        """Return how many local steps an order asks of this client."""
        ...

    def timed(self, what: str) -> AbstractContextManager[None]:
        """Time what happens inside, for a simulation's log: no clock reading leaves a client."""
        ...

    def features(self, layer: Layer = "last", pooling: Pooling = "mean") -> torch.Tensor:
        """Return a hidden layer of the frozen backbone, pooled over each prompt's tokens, (n, hidden), float32."""
        ...

    def activations(self) -> dict[str, int]:
        """Return how many tokens of all its examples each native expert processes under what is loaded, untrained."""
        ...

    def load(self, tensors: Tensors, spec: AdapterSpec) -> None:
        """Graft ``tensors``; a missing, unknown or misshapen key is an AdapterError."""
        ...

    def fit(
        self,
        pools: Sequence[Sequence[int]],
        training: Training,
        *,
        purpose: str = "fit",
        by_length: bool = False,
        trainable: Callable[[str], bool] | None = None,
        on_gradients: Callable[[Tensors, Tensors], None] | None = None,
        router_copies: Sequence[int] | None = None,
    ) -> FitReport:
        """Take one optimiser step per pool, each on a mini-batch drawn from that pool of example indices.

        Args:
            pools: example indices to draw from, one pool per step.
            training: rates, batch size, clipping.
            purpose: names the random stream, so that warm-up and rounds draw independently.
            by_length: put examples of like length into one mini-batch (for pools of one pattern only: on a mixed
                pool it would make the mini-batches purer than chance).
            trainable: which tensor names are trained; default all.
            on_gradients: called with (values, gradients) by name before clipping; may change gradients in place.
            router_copies: copy of the router that each step uses and trains, default the same. All start as the router
                that was loaded, each with optimiser moments of its own; ``FitReport.routers`` has their ends.
        """
        ...

    def read(self) -> Tensors:
        """Return a copy of the grafted tensors by name."""
        ...

    def seed(self, purpose: str) -> int:
        """Return an integer seed derived from (run seed, purpose, client, round)."""
        ...
