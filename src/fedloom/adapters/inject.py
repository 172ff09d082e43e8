"""Graft mixtures of LoRA experts onto a frozen model, in place, and take them off again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fedloom.adapters.moe_lora import Gates, Mixer, MoELoRALinear, Routing, check_dropout, linear_shape
from fedloom.adapters.router import build_router, route, router_names
from fedloom.adapters.state import check_tensors, initial_tensors, stack, strip_prefixes, strip_wrapper_prefixes
from fedloom.errors import AdapterError, nearest
from fedloom.types import AdapterSpec, Tensors

#: Query and value projections by architecture. Phi-3 and GPT-2 fuse them with the key projection in one layer, so
#: there q, k and v are adapted together.
DEFAULT_TARGETS: dict[str, tuple[str, ...]] = {
    "llama": ("q_proj", "v_proj"),
    "gemma2": ("q_proj", "v_proj"),
    "qwen2": ("q_proj", "v_proj"),
    "qwen3": ("q_proj", "v_proj"),
    "mistral": ("q_proj", "v_proj"),
    "phi3": ("qkv_proj",),
    "gpt2": ("c_attn",),
}


def default_targets(config: Any) -> tuple[str, ...]:
    """Return the targets for a transformers config; an unknown architecture is an AdapterError."""
    if config.model_type not in DEFAULT_TARGETS:
        raise AdapterError(
            f"No default targets are known for {config.model_type!r} models (only for {', '.join(DEFAULT_TARGETS)}). "
            "Name them yourself: targets are the endings of linear layers' names, such as 'q_proj'."
        )
    return DEFAULT_TARGETS[config.model_type]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside ``torch.compile`` and DDP wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _matched(model: nn.Module, targets: Sequence[str]) -> dict[str, tuple[str, nn.Module]]:
    """Return clean path → (path in the model, module) of the linear layers that end in a target, in model order."""
    if isinstance(targets, str) or not targets:
        raise AdapterError(f"Targets must be a list of one or more names, got {targets!r}.")
    linear = {name: m for name, m in model.named_modules() if linear_shape(m) is not None}
    unmatched = set(targets)
    found: dict[str, tuple[str, nn.Module]] = {}
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for name, module in linear.items():
        path = strip_wrapper_prefixes(name)
        hits = {t for t in targets if path == t or path.endswith("." + t)}
        if hits and module is head:
            raise AdapterError(f"{path!r} is the output embedding, which cannot carry experts: drop the target.")
        if hits:
            unmatched -= hits
            found[path] = (name, module)
    for target in sorted(unmatched):
        endings = {strip_wrapper_prefixes(name).rpartition(".")[2] for name in linear}
        raise AdapterError(f"Target {target!r} matches no linear layer of the model.{nearest(target, endings)}")
    return found


def target_modules(model: nn.Module, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return path → (out, in) of every linear layer whose dotted path ends in one of ``targets``, in model order.

    ``q_proj`` matches ``model.layers.0.self_attn.q_proj``. A target that matches nothing is an AdapterError.
    """
    shapes = {}
    for path, (_, module) in _matched(unwrap(model), targets).items():
        shape = linear_shape(module)
        assert shape is not None
        shapes[path] = shape
    return shapes


@dataclass(frozen=True)
class Slot:
    """Where a flat tensor name lives: a Parameter, and which expert's slice of it (None: all of it)."""

    parameter: nn.Parameter
    expert: int | None = None

    @property
    def value(self) -> Tensor:
        """A live, detached view."""
        return self._slice(self.parameter.detach())

    @property
    def grad(self) -> Tensor | None:
        """A live view of the gradient, if there is one."""
        return None if self.parameter.grad is None else self._slice(self.parameter.grad)

    def _slice(self, tensor: Tensor) -> Tensor:
        return tensor if self.expert is None else tensor[self.expert]


class Grafted:
    """A frozen model that carries a mixture of LoRA experts. Made by ``graft``.

    Attributes:
        model: the model, changed in place.
        spec: what is grafted now.
        shapes: module path → (out, in).
        hidden_size: width of the router's input.
        layers: module path → mixture layer.
        gates: the routing that all layers share.
        router: the router, or None; it is not a part of ``model``.
    """

    def __init__(self, model: nn.Module, spec: AdapterSpec, hidden_size: int | None = None) -> None:
        inner = unwrap(model)
        if any(isinstance(m, MoELoRALinear) for m in inner.modules()):
            raise AdapterError("This model already carries experts. Use respec() on it, or ungraft() it first.")
        matched = _matched(inner, spec.targets)
        self.model = model
        self.shapes = target_modules(inner, spec.targets)
        self.hidden_size = hidden_size or 0
        self.layers: dict[str, MoELoRALinear] = {}
        self.router: nn.Module | None = None
        self._given_hidden_size = hidden_size
        self._names = {path: name for path, (name, _) in matched.items()}
        self._bases = {path: module for path, (_, module) in matched.items()}
        self._trained_before = [p for p in inner.parameters() if p.requires_grad]
        _check_spec(spec)
        inner.requires_grad_(False)
        self.spec = spec
        self._build(spec)

    def _build(self, spec: AdapterSpec) -> None:
        """Put freshly drawn mixture layers around the base layers."""
        self.spec = spec
        self.gates = Gates(spec.experts, spec.rank, per_token=bool(spec.slots))
        inner = unwrap(self.model)
        for path, base in self._bases.items():
            width = self.shapes[path][1]
            mixer = Mixer(width, spec.slots, spec.slot_top, spec.experts) if spec.slots else None
            layer = MoELoRALinear(base, self.gates, spec.alpha, spec.dropout, mixer, spec.base_delta)
            self.layers[path] = layer
            inner.set_submodule(self._names[path], layer)
        if spec.router_hidden or spec.centroids:
            self.hidden_size = _hidden_size(inner, self._given_hidden_size)
        self.router = build_router(spec, self.hidden_size)
        if self.router is not None:
            self.router.to(next(iter(self.layers.values())).A.device)
        self.load(initial_tensors(spec, self.shapes, self.hidden_size, torch.Generator().manual_seed(0)))

    def respec(self, spec: AdapterSpec) -> None:
        """Change experts, rank, alpha, dropout or router; the base is not touched.

        Tensors keep their values when only alpha and dropout change; otherwise all are drawn anew, and optimisers
        that hold the old Parameters must be made again.
        """
        self._check_grafted()
        if tuple(spec.targets) != tuple(self.spec.targets):
            raise AdapterError(f"Targets are fixed at graft: {self.spec.targets}, not {spec.targets}. Ungraft first.")
        _check_spec(spec)
        same_tensors = replace(spec, alpha=self.spec.alpha, dropout=self.spec.dropout)
        if same_tensors == self.spec:
            self.spec = spec
            for layer in self.layers.values():
                layer.scaling, layer.dropout = spec.scaling, spec.dropout
        else:
            self._build(spec)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy flat tensors into the layers and the router; missing, unknown or misshapen keys are AdapterErrors."""
        self._check_grafted()
        clean = strip_prefixes(tensors)
        check_tensors(clean, self.spec, self.shapes, self.hidden_size)
        with torch.no_grad():
            for path, (A_Mri, B_Mor) in stack(clean, self.spec, self.shapes).items():
                self.layers[path].A.copy_(A_Mri)
                self.layers[path].B.copy_(B_Mor)
            for name, parameter in self._other_parameters().items():
                parameter.copy_(clean[name])

    def read(self) -> Tensors:
        """Return a detached float32 copy of every adapter tensor by flat name, on the CPU wherever the model is."""
        return {n: slot.value.to("cpu", torch.float32, copy=True) for n, slot in self.parameters_by_name().items()}

    def parameters_by_name(self) -> dict[str, Slot]:
        """Return flat name → where it lives, expert by expert in model order, then routers, mixers and additions."""
        slots: dict[str, Slot] = {}
        for m in range(self.spec.experts):
            for path, layer in self.layers.items():
                slots[f"experts/{m}/{path}.lora_A"] = Slot(layer.A, m)
                slots[f"experts/{m}/{path}.lora_B"] = Slot(layer.B, m)
        return slots | {name: Slot(parameter) for name, parameter in self._other_parameters().items()}

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return the stacked Parameters of all experts, in model order."""
        return [p for layer in self.layers.values() for p in (layer.A, layer.B)]

    def router_parameters(self) -> list[nn.Parameter]:
        """Return the Parameters that route, of routers and mixers, as far as they are trained."""
        return [p for p in self._other_parameters().values() if p.requires_grad]

    def _other_parameters(self) -> dict[str, nn.Parameter]:
        found = router_names(self.spec, self.router)
        for path, layer in self.layers.items():
            if layer.mixer is not None:
                found[f"mixers/{path}.weight"] = layer.mixer.weight
        for path, layer in self.layers.items():
            if layer.delta is not None:
                found[f"base/{path}.delta"] = layer.delta
        return found

    def route(self, features: Tensor, mode: str) -> Routing:
        """Route each example by its features (b, hidden_size); see ``router.route`` for the modes and results.

        A single expert without a router gets every example, whatever the mode (unless ``off``). A model that routes
        per token does so whatever the mode, and the result only says that its adapters are on.
        """
        if mode == "off":
            return None
        if self.router is not None:
            return route(self.router(features.float()), mode)
        if self.spec.experts > 1 and not self.spec.slots:
            raise AdapterError(f"{self.spec.experts} experts without a router: give the gates yourself.")
        return route(features.new_zeros(features.shape[0], 1), mode)

    @contextmanager
    def routing(self, routing: Routing) -> Iterator[Gates]:
        """Route forward passes inside by gates (b, M) or expert index (b,), or switch the adapters off (None)."""
        self._check_grafted()
        gates, before = self.gates, vars(self.gates).copy()
        gates.set(routing)
        try:
            yield gates
        finally:
            vars(gates).update(before)

    def train(self) -> None:
        """Switch dropout on, on the LoRA path only: the frozen backbone keeps computing as in evaluation."""
        self.eval()
        for layer in self.layers.values():
            layer.training = True
        if self.router is not None:
            self.router.train()

    def eval(self) -> None:
        """Switch dropout off."""
        self.model.eval()
        if self.router is not None:
            self.router.eval()

    def _check_grafted(self) -> None:
        if not self.layers:
            raise AdapterError("The experts were taken off this model by ungraft(): graft it again.")

    @property
    def fan_in_fan_out(self) -> bool:
        """Whether the adapted layers store their weight as (in, out), as GPT-2's Conv1D does."""
        return any(isinstance(base, Conv1D) for base in self._bases.values())

    def ungraft(self) -> nn.Module:
        """Put the original layers back, restore which parameters train, and return the bare model."""
        inner = unwrap(self.model)
        for path, base in self._bases.items():
            inner.set_submodule(self._names[path], base)
        for parameter in self._trained_before:
            parameter.requires_grad_(True)
        self.layers.clear()
        return self.model


def graft(model: nn.Module, spec: AdapterSpec, hidden_size: int | None = None) -> Grafted:
    """Freeze ``model`` and wrap its targeted linear layers with ``spec``'s experts, in place.

    Args:
        model: a causal language model; may be wrapped by ``torch.compile`` or DDP.
        spec: what to graft. Experts start as LoRA does (A random, B zero), so the model's output is unchanged.
        hidden_size: width of the router's input; default the model's own.
    """
    return Grafted(model, spec, hidden_size)


def _hidden_size(model: nn.Module, given: int | None) -> int:
    """Return the router's input width."""
    if given:
        return given
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "hidden_size"):
        raise AdapterError("The model's config names no hidden_size, which the router needs: give it to graft().")
    return int(config.hidden_size)


def _check_spec(spec: AdapterSpec) -> None:
    """Refuse sizes that make no adapter."""
    if spec.rank < 1 or spec.experts < 1 or spec.router_hidden < 0:
        raise AdapterError(
            f"An adapter needs rank ≥ 1, experts ≥ 1 and router_hidden ≥ 0, "
            f"got {spec.rank}, {spec.experts}, {spec.router_hidden}."
        )
    if spec.routers < 1 or (spec.centroids and spec.router_hidden):
        raise AdapterError("An adapter needs routers ≥ 1, and has centroids or learned routers, not both.")
    weights = spec.router_weights
    if weights and (len(weights) != spec.routers or min(weights) < 0 or not 0 < sum(weights) < float("inf")):
        raise AdapterError(f"router_weights {weights} must be {spec.routers} numbers, not negative, not all zero.")
    if any(not 0 <= expert < spec.experts for expert in spec.slots) or not 0 <= spec.slot_top <= len(spec.slots):
        raise AdapterError(f"Mixer slots {spec.slots} (top {spec.slot_top}) do not fit {spec.experts} experts.")
    check_dropout(spec.dropout)
