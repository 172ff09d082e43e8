"""Models that come with experts of their own (Switch, Mixtral, OLMoE, Qwen-MoE, DeepSeek), cut into named components.

Flat names, for a mixture layer (``MoELayer``) at module path ``p`` with experts ``e``:

- ``experts/<p>.<e>/<parameter>``: one expert's own parameter (``experts/encoder.block.1.layer.1.mlp.3/wi.weight``,
  ``experts/model.layers.0.mlp.2/gate_up_proj``). Its aggregation unit (``types.component``) is ``experts/<p>.<e>``.
- ``router/<parameter>``: the routers of all mixture layers.
- ``shared/<parameter>``: all the rest, so also experts that every token passes (DeepSeek, Qwen2-MoE); a tied parameter
  once, under its first name.

Buffers have no name here: they are the backbone's, as DeepSeek-V3's bias on the choice of experts.

Transformers stores experts in two ways: Switch as separate modules, the others fused, one Parameter with a leading
dimension of experts. A fused expert's slot is a slice of that Parameter; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fedloom.adapters.inject import Slot, unwrap
from fedloom.adapters.state import check_names_and_shapes, strip_wrapper_prefixes
from fedloom.errors import AdapterError
from fedloom.types import Tensors

#: Model type → name of the router inside a mixture layer; the experts beside it are always ``experts``.
ROUTERS: dict[str, str] = {
    "switch_transformers": "router",
    "mixtral": "gate",
    "olmoe": "gate",
    "qwen2_moe": "gate",
    "qwen3_moe": "gate",
    "deepseek_v2": "gate",
    "deepseek_v3": "gate",
}

#: What one expert consists of, fused or in a module of its own (Switch).
FUSED_WEIGHTS = {"gate_up_proj", "down_proj"}
SEPARATE_WEIGHTS = {"wi.weight", "wo.weight"}


@dataclass(frozen=True)
class MoELayer:
    """One mixture layer.

    Attributes:
        path: module path without wrapper prefixes (``model.layers.0.mlp``).
        experts: number of experts E.
        top_k: experts per token.
        side: ``encoder``, ``decoder`` or ``causal``: whose attention mask tells padding here.
        name: module path in the unwrapped model.
        block: the layer itself.
        router: the module that chooses experts, a child of ``block``.
        stack: the encoder, decoder or causal model around the layer.
    """

    path: str
    experts: int
    top_k: int
    side: str
    name: str = field(repr=False)
    block: nn.Module = field(repr=False)
    router: nn.Module = field(repr=False)
    stack: nn.Module = field(repr=False)

    @property
    def fused(self) -> bool:
        """Whether all experts share one Parameter per weight, stacked along dimension 0."""
        return not isinstance(self.block.experts, nn.ModuleDict)

    def component(self, expert: int) -> str:
        """Return the name of an expert, which is its aggregation unit."""
        return f"experts/{self.path}.{expert}"

    def expert_modules(self) -> dict[str, nn.Module]:
        """Return path in the model → module that holds expert weights: one if fused, else one per expert."""
        experts = cast(nn.Module, self.block.experts)
        if self.fused:
            return {f"{self.name}.experts": experts}
        return {f"{self.name}.experts.expert_{e}": experts.get_submodule(f"expert_{e}") for e in range(self.experts)}

    def expert_slots(self) -> Iterator[tuple[str, Slot]]:
        """Yield flat name and place of every expert's parameters, expert by expert."""
        modules = list(self.expert_modules().values())
        for e in range(self.experts):
            for name, parameter in modules[0 if self.fused else e].named_parameters():
                yield f"{self.component(e)}/{name}", Slot(parameter, e if self.fused else None)


class NamedTensors:
    """Tensors that live in a model, read and written by flat name."""

    def __init__(self, slots: dict[str, Slot]) -> None:
        self._slots = slots

    def slots(self) -> dict[str, Slot]:
        """Return flat name → where it lives: live views of values and gradients."""
        return dict(self._slots)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return flat name → shape."""
        return {name: tuple(slot.value.shape) for name, slot in self.slots().items()}

    def read(self) -> Tensors:
        """Return a detached copy of every tensor, on the CPU; half precision becomes float32, which loses nothing."""
        values = {name: slot.value for name, slot in self.slots().items()}
        return {n: v.to("cpu", torch.promote_types(v.dtype, torch.float32), copy=True) for n, v in values.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into the model; missing, unknown or misshapen keys are AdapterErrors and change nothing."""
        check_names_and_shapes(tensors, self.shapes())
        for name, slot in self.slots().items():
            slot.value.copy_(tensors[name])


class NativeModel(NamedTensors):
    """A model with experts of its own. Made by ``find_native``.

    Attributes:
        model: the model, unchanged.
        layers: its mixture layers, in model order.
    """

    def __init__(self, model: nn.Module, layers: list[MoELayer]) -> None:
        self.model = model
        self.layers = layers
        slots = dict(pair for layer in layers for pair in layer.expert_slots())
        owned = {id(slot.parameter) for slot in slots.values()}
        routing = {id(p) for layer in layers for p in layer.router.parameters()}
        shared: dict[str, Slot] = {}
        for name, parameter in unwrap(model).named_parameters():  # a tied parameter comes once
            clean = strip_wrapper_prefixes(name)
            if id(parameter) in routing:
                slots[f"router/{clean}"] = Slot(parameter)
            elif id(parameter) not in owned:
                shared[f"shared/{clean}"] = Slot(parameter)
        super().__init__(slots | shared)


def find_native(model: nn.Module) -> NativeModel:
    """Name the components of a model that comes with experts of its own; the model is not changed.

    Args:
        model: a transformers model of a family in ``ROUTERS``; may be wrapped by ``torch.compile`` or DDP.

    Raises:
        AdapterError: another family, no mixture layer in this model, or LoRA on its experts already.
    """
    inner = unwrap(model)
    family = getattr(getattr(inner, "config", None), "model_type", None)
    if family not in ROUTERS:
        raise AdapterError(
            f"No native experts are known in {family or type(inner).__name__!r} models, only in "
            f"{', '.join(ROUTERS)}. Take such a backbone, or leave adapter.native out and take a method of "
            "LoRA experts (fedweave)."
        )
    layers = []
    for name, module in inner.named_modules():
        router = getattr(module, ROUTERS[family], None)
        if isinstance(router, nn.Module) and isinstance(getattr(module, "experts", None), nn.Module):
            layers.append(_layer(inner, name, module, router))
    if not layers:
        raise AdapterError(
            f"This {family} model has no mixture layer: its configuration makes every layer dense. "
            f"Native experts are supported in {', '.join(ROUTERS)}."
        )
    return NativeModel(model, layers)


def _layer(model: nn.Module, name: str, block: nn.Module, router: nn.Module) -> MoELayer:
    stack = _stack(model, name)
    side = "causal"
    if model.config.model_type == "switch_transformers":  # type: ignore[union-attr]
        side = "decoder" if stack.is_decoder else "encoder"
    experts = cast(int, router.num_experts)
    layer = MoELayer(
        path=strip_wrapper_prefixes(name),
        experts=experts,
        top_k=cast(int, getattr(router, "top_k", 1)),
        side=side,
        name=name,
        block=block,
        router=router,
        stack=stack,
    )
    expected = FUSED_WEIGHTS if layer.fused else SEPARATE_WEIGHTS
    for path, module in layer.expert_modules().items():
        found = {name for name, _ in module.named_parameters()}
        if found != expected:
            raise AdapterError(
                f"{path} holds {', '.join(sorted(found))} where its family has {', '.join(sorted(expected))}. "
                "If the experts already carry LoRA, remove() it first."
            )
    for slot_name, slot in layer.expert_slots():
        if slot.value.dim() != 2:
            shape = tuple(slot.parameter.shape)
            raise AdapterError(f"{slot_name} is no matrix in a parameter of shape {shape}: load it unquantised.")
    return layer


def _stack(model: nn.Module, name: str) -> nn.Module:
    """Return the innermost transformers model around the module at ``name``."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        ancestor = model.get_submodule(".".join(parts[:length]))
        if isinstance(ancestor, PreTrainedModel):
            return ancestor
    return model
