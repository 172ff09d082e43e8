"""LoRA on a model's own experts: each expert's weight W becomes W + s B A, with s = alpha / rank.

LoRA: Hu et al. 2021 (arXiv 2106.09685). The sum is formed once per forward pass of the module that holds W, and the
module runs with it in W's place, so that transformers' own expert kernels (eager, batched, grouped) apply unchanged,
for fused experts as for separate ones. There is no dropout: it would act between x and A, which are never multiplied.
PEFT does the same for ``target_parameters``; its factors of one fused parameter are A (E·r, in), rows expert-major, and
B (out, r·E), columns rank-major, where each expert's own are kept here.

Shape letters: E experts, r rank, i in, o out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.adapters.inject import Slot, unwrap
from fedloom.adapters.native import MoELayer, NamedTensors, find_native
from fedloom.adapters.state import pick_expert
from fedloom.errors import AdapterError
from fedloom.numerics.init import lora_init


class WeightLoRA(nn.Module):
    """A module that runs with W + s B A in place of each of its weights W, (o, i) or stacked (E, o, i).

    Factors are float32; they are cast to W's type for the sum.

    Args:
        base: frozen module; all its parameters are weights.
        rank: r.
        scaling: s.
    """

    def __init__(self, base: nn.Module, rank: int, scaling: float) -> None:
        super().__init__()
        weights = dict(base.named_parameters())
        self.base = base
        self.scaling = scaling
        self.names = tuple(weights)
        self.A = nn.ParameterList(_zeros(W, (*W.shape[:-2], rank, W.shape[-1])) for W in weights.values())
        self.B = nn.ParameterList(_zeros(W, (*W.shape[:-1], rank)) for W in weights.values())
        self.train(base.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``base`` with the adapted weights."""
        return functional_call(self.base, self.adapted(), args, kwargs)

    def adapted(self) -> dict[str, Tensor]:
        """Return W + s B A by name of the weight, (o, i) or (E, o, i), in W's type."""
        adapted = {}
        for name, A, B in zip(self.names, self.A, self.B, strict=True):
            W = self.base.get_parameter(name)
            add_product = torch.baddbmm if W.dim() == 3 else torch.addmm
            adapted[name] = add_product(W, B.to(W.dtype), A.to(W.dtype), alpha=self.scaling)
        return adapted

    def extra_repr(self) -> str:
        return f"rank={self.A[0].shape[-2]}, scaling={self.scaling:g}"


def _zeros(weight: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, device=weight.device))


class NativeLoRA(NamedTensors):
    """A frozen model whose own experts carry LoRA. Made by ``graft_expert_lora``.

    Tensors: ``<name>.lora_A`` (r, in) and ``<name>.lora_B`` (out, r) for every expert's ``<name>``
    (``experts/model.layers.0.mlp.2/gate_up_proj``); with ``train_routers`` also ``router/<parameter>``, whole.

    Attributes:
        model: the model, changed in place.
        layers: its mixture layers, in model order.
    """

    def __init__(
        self, model: nn.Module, rank: int, alpha: float, generator: torch.Generator, *, train_routers: bool
    ) -> None:
        native = find_native(model)
        inner = unwrap(model)
        self.model = model
        self.layers: list[MoELayer] = native.layers
        self._trained_before = [p for p in inner.parameters() if p.requires_grad]
        self._bases = {path: m for layer in self.layers for path, m in layer.expert_modules().items()}
        inner.requires_grad_(False)
        factors: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for path, base in self._bases.items():
            wrapped = WeightLoRA(base, rank, alpha / rank)
            weights = [base.get_parameter(name) for name in wrapped.names]
            factors |= {id(W): AB for W, AB in zip(weights, zip(wrapped.A, wrapped.B, strict=True), strict=True)}
            inner.set_submodule(path, wrapped)
        slots: dict[str, Slot] = {}
        shapes: dict[str, tuple[int, int]] = {}
        for name, slot in native.slots().items():
            if name.startswith("experts/"):
                A, B = factors[id(slot.parameter)]
                slots[f"{name}.lora_A"] = Slot(A, slot.expert)
                slots[f"{name}.lora_B"] = Slot(B, slot.expert)
                shapes[name] = (slot.value.shape[0], slot.value.shape[1])
        routers = {n: slot for n, slot in native.slots().items() if n.startswith("router/")} if train_routers else {}
        for slot in routers.values():
            slot.parameter.requires_grad_(True)
        super().__init__(slots | routers)
        drawn = pick_expert(lora_init(shapes, rank, 1, generator), 0)
        self.load(drawn | {name: slot.value for name, slot in routers.items()})

    def slots(self) -> dict[str, Slot]:
        if not self._bases:
            raise AdapterError("The LoRA was taken off this model by remove(): graft it again.")
        return super().slots()

    def remove(self) -> nn.Module:
        """Put the original experts back, restore which parameters train, and return the bare model.

        Trained routers stay as they are: ``load`` what they were first to have the model back.
        """
        inner = unwrap(self.model)
        inner.requires_grad_(False)
        for path, base in self._bases.items():
            inner.set_submodule(path, base)
        for parameter in self._trained_before:
            parameter.requires_grad_(True)
        self._bases.clear()
        return self.model


def graft_expert_lora(
    model: nn.Module,
    rank: int,
    alpha: float,
    generator: torch.Generator | None = None,
    *,
    train_routers: bool = False,
) -> NativeLoRA:
    """Freeze ``model`` and put a LoRA on every weight of its own experts, in place.

    A is drawn as LoRA does and B is zero, so the model's output is unchanged. A forward pass forms every adapted
    weight, so training holds each fused parameter a second time.

    Args:
        model: a model that ``find_native`` knows.
        rank: rank per expert and weight.
        alpha: LoRA alpha.
        generator: source of the first A; default seed 0. A run loads what ``Method.init`` draws.
        train_routers: also train the routers themselves: without, new experts are chosen as the old ones were.
    """
    if rank < 1:
        raise AdapterError(f"A LoRA needs rank ≥ 1, got {rank}.")
    return NativeLoRA(model, rank, alpha, generator or torch.Generator().manual_seed(0), train_routers=train_routers)
