"""A client: its adapter tensors, its memory and its data, on a backbone that all clients of a machine share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedloom.adapters.activations import Activations
from fedloom.adapters.inject import Grafted, Slot, graft
from fedloom.adapters.native_graft import NativeGraft
from fedloom.backbones.features import batches_by_length, layer_index, prompt_features
from fedloom.backbones.linear import quicken
from fedloom.backbones.load import Backbone
from fedloom.backbones.loss import token_losses, token_masks
from fedloom.data.tokenize import Encoded, collate
from fedloom.errors import AdapterError
from fedloom.methods.base import Method
from fedloom.numerics.seeding import derive_seed, generator
from fedloom.runtime.batches import draw_batches, split_by_length
from fedloom.runtime.memory import ClientMemory
from fedloom.types import AdapterSpec, FitReport, Layer, Order, Pooling, Reply, Tensors, Training


class Rows:
    """Encoded examples with their frozen features, which are computed once, on first use."""

    def __init__(self, encoded: Sequence[Encoded]) -> None:
        self.encoded = list(encoded)
        self.lengths = [len(e.ids) for e in self.encoded]
        self._features: dict[tuple[int, Pooling], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.encoded)

    def features(
        self,
        bench: Workbench,
        advance: Callable[[int], None] | None = None,
        *,
        layer: Layer = "last",
        pooling: Pooling = "mean",
    ) -> torch.Tensor:
        """Return the features (n, hidden), float32; see ``backbones.features``. The router's input is the default."""
        kind = layer_index(layer, bench.backbone.layers), pooling
        if kind not in self._features:
            prompts = [e.ids[: e.prompt_length] for e in self.encoded]
            with bench.grafted.routing(None):
                self._features[kind] = prompt_features(
                    bench.backbone, prompts, layer=layer, pooling=pooling, cache=bench.cache, advance=advance
                )
        return self._features[kind]


class Workbench:
    """One backbone with one graft, on which clients take turns and evaluation runs.

    ``answers_in`` is for native experts that are not to be trained; see ``NativeGraft``.
    """

    def __init__(
        self, backbone: Backbone, spec: AdapterSpec, cache: Path | None, *, answers_in: torch.dtype | None = None
    ) -> None:
        self.backbone = backbone
        self.grafted: Grafted | NativeGraft
        if spec.native:
            self.grafted = NativeGraft(backbone.model, spec, answers_in)
        else:
            quicken(backbone.model)
            self.grafted = graft(backbone.model, spec, backbone.hidden_size)
        self.cache = cache

    def load(self, tensors: Tensors, spec: AdapterSpec) -> None:
        """Make the graft be ``tensors`` under ``spec``."""
        if spec != self.grafted.spec:
            self.grafted.respec(spec)
        self.grafted.load(tensors)


@dataclass
class LocalClient:
    """What a method's client side sees (``types.Client``), for one order."""

    name: str
    rows: Rows
    bench: Workbench
    memory: ClientMemory
    run_seed: int
    round: int
    on_step: Callable[[float], None] = lambda loss: None
    kept_optimizer: Tensors = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.rows)

    def steps(self, training: Training) -> int:
        return training.steps_of(self.size)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.times[what] = time.perf_counter() - start

    def features(self, layer: Layer = "last", pooling: Pooling = "mean") -> torch.Tensor:
        return self.rows.features(self.bench, layer=layer, pooling=pooling)

    @torch.no_grad()
    def activations(self) -> dict[str, int]:
        grafted, backbone = self.bench.grafted, self.bench.backbone
        if not isinstance(grafted, NativeGraft):
            raise AdapterError("Activations are counted of native experts; this backbone carries LoRA experts.")
        grafted.eval()
        with grafted.activations() as seen:
            for group in batches_by_length(self.rows.lengths):
                batch = collate([self.rows.encoded[i] for i in group], backbone.tokenizer.pad_token_id)
                seen.masks(**token_masks(backbone, batch))
                token_losses(backbone, batch)
        return seen.counts()

    def seed(self, purpose: str) -> int:
        return derive_seed(self.run_seed, purpose, self.name, self.round)

    def load(self, tensors: Tensors, spec: AdapterSpec) -> None:
        self.bench.load(tensors, spec)

    def read(self) -> Tensors:
        return self.bench.grafted.read()

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
        """See ``types.Client.fit``."""
        grafted = self.bench.grafted
        slots = grafted.parameters_by_name()
        frozen = [
            s for n, s in slots.items() if trainable is not None and s.parameter.requires_grad and not trainable(n)
        ]
        optimizer = self._optimizer(grafted, training)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        draws = draw_batches(
            pools,
            self.rows.lengths,
            training.batch_size,
            generator(self.run_seed, "batches", purpose, self.name, self.round),
            by_length,
            whole=training.epochs > 0,
        )
        copies = None if router_copies is None else RouterCopies(slots, optimizer, router_copies)
        losses: list[float] = []
        tokens = 0
        grafted.train()
        counting = grafted.activations() if isinstance(grafted, NativeGraft) else nullcontext()
        with torch.random.fork_rng(devices=_cuda_devices(self.bench.backbone.device)), counting as seen:
            torch.manual_seed(derive_seed(self.run_seed, "dropout", purpose, self.name, self.round))
            for step, indices in enumerate(draws):
                if copies is not None:
                    copies.take_turn(step)
                loss, labels = self._backward(indices, seen)
                for slot in frozen:
                    if slot.grad is not None:
                        slot.grad.zero_()
                if on_gradients is not None:
                    on_gradients(_values(slots), _gradients(slots))
                if training.clip > 0:
                    nn.utils.clip_grad_norm_(parameters, training.clip, foreach=True)
                held = [slot.value.clone() for slot in frozen]
                optimizer.step()
                for slot, value in zip(frozen, held, strict=True):
                    slot.value.copy_(value)  # weight decay and kept moments move what has no gradient
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss)
                tokens += labels
                self.on_step(loss)
        grafted.eval()
        if training.optimizer_state == "keep":
            self.kept_optimizer = _moments(optimizer)
        routers = {} if copies is None else copies.ends()
        return FitReport(losses, len(losses), tokens, routers, {} if seen is None else seen.counts())

    def _backward(self, indices: Sequence[int], seen: Activations | None) -> tuple[float, int]:
        """Add the gradient of a mini-batch's mean token loss; return that loss and the number of supervised tokens.

        On a CPU, examples of very different lengths are computed in parts, which is the same sum with less padding.
        """
        backbone, grafted, encoded = self.bench.backbone, self.bench.grafted, self.rows.encoded
        parts = [list(indices)]
        if backbone.device.type == "cpu":
            parts = split_by_length(indices, self.rows.lengths)
        batches = [collate([encoded[i] for i in part], backbone.tokenizer.pad_token_id) for part in parts]
        labels = sum(len(batch.labels) for batch in batches)
        total = 0.0
        for part, batch in zip(parts, batches, strict=True):
            routing: AbstractContextManager[Any] = nullcontext()
            if grafted.router is not None:
                routing = grafted.routing(grafted.route(self.features()[part].to(backbone.device), "soft"))
            if seen is not None:
                seen.masks(**token_masks(backbone, batch))
            with routing:
                loss = token_losses(backbone, batch).sum() / labels
                loss.backward()
            total += float(loss.detach())
        return total, labels

    def _optimizer(self, grafted: Grafted | NativeGraft, training: Training) -> torch.optim.AdamW:
        """Make AdamW with one rate for experts and one for the router; ``keep`` restores the client's moments."""
        groups = [
            {"params": grafted.expert_parameters(), "lr": training.lr},
            {"params": grafted.router_parameters(), "lr": training.router_lr},
        ]
        optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], weight_decay=training.weight_decay, foreach=True
        )
        stored = {n: t for n, t in self.memory.tensors.items() if n.startswith("optimizer/")}
        if training.optimizer_state == "keep" and stored:
            for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                if f"optimizer/{index}/step" not in stored:
                    continue  # an expert that has had no token yet
                moments = {key: stored[f"optimizer/{index}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {
                    key: value.clone() if key == "step" else value.to(parameter.device, copy=True)
                    for key, value in moments.items()
                }
        return optimizer


def carry_out(method: Method, client: LocalClient, order: Order) -> tuple[Reply, ClientMemory | None]:
    """Do what an order asks; return the reply, and the client's memory afterwards if it has changed."""
    reply: Reply = method.probe(client, order) if order.kind == "probe" else method.local(client, order)
    keep = reply.keep | client.kept_optimizer
    changed = bool(keep or reply.keep_values)
    return reply, client.memory.updated(keep, reply.keep_values) if changed else None


class RouterCopies:
    """Copies of the router that take turns in one model and its optimiser; each has values and moments of its own.

    Args:
        slots: every tensor by name.
        optimizer: it holds the routing parameters among others.
        turns: copy of each step.
    """

    def __init__(self, slots: dict[str, Slot], optimizer: torch.optim.Optimizer, turns: Sequence[int]) -> None:
        routing = {name: slot for name, slot in slots.items() if not name.startswith("experts/")}
        self.slots = {name: slot for name, slot in routing.items() if slot.parameter.requires_grad}
        self.optimizer = optimizer
        self.turns = turns
        self.start = {name: slot.value.clone() for name, slot in self.slots.items()}
        self.now: int | None = None
        self.values: dict[int, Tensors] = {}
        self.moments: dict[int, dict[str, Any]] = {}

    def take_turn(self, step: int) -> None:
        """Put the copy of this step into the model; it starts as the router that was loaded, without moments."""
        if (copy := self.turns[step]) == self.now:
            return
        self._set_aside()
        values, moments = self.values.get(copy, self.start), self.moments.get(copy, {})
        for name, slot in self.slots.items():
            slot.value.copy_(values[name])
            self.optimizer.state[slot.parameter] = moments.get(name, {})
        self.now = copy

    def ends(self) -> dict[int, Tensors]:
        """Return where each copy that had a turn is now."""
        self._set_aside()
        return {copy: {name: t.float().cpu() for name, t in found.items()} for copy, found in self.values.items()}

    def _set_aside(self) -> None:
        if self.now is not None:
            self.values[self.now] = {name: slot.value.clone() for name, slot in self.slots.items()}
            self.moments[self.now] = {n: self.optimizer.state[slot.parameter] for n, slot in self.slots.items()}


def _moments(optimizer: torch.optim.AdamW) -> Tensors:
    moments: Tensors = {}
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for key, value in optimizer.state[parameter].items():
            moments[f"optimizer/{index}/{key}"] = value.detach().cpu().clone()
    return moments


def _values(slots: dict[str, Slot]) -> Tensors:
    return {name: slot.value for name, slot in slots.items()}


def _gradients(slots: dict[str, Slot]) -> Tensors:
    return {name: slot.grad for name, slot in slots.items() if slot.grad is not None}


def _cuda_devices(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type == "cuda" else []
