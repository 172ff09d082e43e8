"""Native experts behind the same interface as grafted LoRA experts (``inject.Grafted``), for runtime and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.adapters.activations import Activations
from fedloom.adapters.inject import Slot, unwrap
from fedloom.adapters.moe_lora import Routing
from fedloom.adapters.native import find_native
from fedloom.adapters.native_lora import WeightLoRA, graft_expert_lora
from fedloom.errors import AdapterError
from fedloom.types import AdapterSpec, Tensors


class NativeGraft:
    """A mixture-of-experts model whose own parameters (``full``) or LoRAs on its experts (``lora``) are trained.

    Attributes:
        model: the model, trained in place.
        spec: what is trained.
        initial: the tensors as they were in the backbone; ``routing(None)`` computes with them.
        router: always None: the model's own routers choose experts.
    """

    router: nn.Module | None = None
    fan_in_fan_out = False

    def __init__(self, model: nn.Module, spec: AdapterSpec) -> None:
        self.model = model
        self.spec = spec
        self.shapes: dict[str, tuple[int, int]] = {}
        self.hidden_size = 0
        if spec.native == "full":
            unwrap(model).requires_grad_(True)
            self.named: Any = find_native(model)
        elif spec.native == "lora":
            self.named = graft_expert_lora(model, spec.rank, spec.alpha)
        else:
            raise AdapterError(f"Native experts are trained 'full' or by 'lora', not {spec.native!r}.")
        self.initial: Tensors = self.named.read()

    def respec(self, spec: AdapterSpec) -> None:
        """Accept the specification it was made with."""
        if spec != self.spec:
            raise AdapterError("What is trained of a native model is fixed when it is grafted.")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy flat tensors into the model; missing, unknown or misshapen keys are AdapterErrors."""
        self.named.load(tensors)

    def read(self) -> Tensors:
        """Return a detached float32 copy of every trained tensor by flat name."""
        found: Tensors = self.named.read()
        return found

    def parameters_by_name(self) -> dict[str, Slot]:
        """Return flat name → where it lives."""
        slots: dict[str, Slot] = self.named.slots()
        return slots

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return all trained Parameters but the routers', each once."""
        return self._parameters(routing=False)

    def router_parameters(self) -> list[nn.Parameter]:
        """Return the routers' Parameters; empty where only LoRAs are trained."""
        return self._parameters(routing=True)

    def _parameters(self, *, routing: bool) -> list[nn.Parameter]:
        slots = self.parameters_by_name().items()
        chosen = {id(s.parameter): s.parameter for name, s in slots if name.startswith("router/") == routing}
        return list(chosen.values())

    def activations(self) -> Activations:
        """Return a counter of the tokens that each expert processes."""
        return Activations(self.named)

    def route(self, features: Tensor, mode: str) -> Routing:
        """Say only whether the trained tensors are used: the model routes each token itself."""
        return None if mode == "off" else torch.zeros(features.shape[0], dtype=torch.int64, device=features.device)

    @contextmanager
    def routing(self, routing: Routing) -> Iterator[None]:
        """Compute with the trained tensors inside or, for None, with those of the backbone."""
        if routing is not None:
            yield
            return
        trained = self.read()
        self.load(self.initial)
        try:
            yield
        finally:
            self.load(trained)

    def train(self) -> None:
        """Train as the model's authors do, with its own dropout; where only LoRAs are trained there is none."""
        self.model.train(self.spec.native == "full")

    def eval(self) -> None:
        """Switch dropout off."""
        self.model.eval()

    @contextmanager
    def merged(self) -> Iterator[nn.Module]:
        """Give the bare model with the trained tensors in its own weights, to be saved; restored afterwards."""
        if self.spec.native == "full":
            yield self.model
            return
        factors = self.read()
        wrapped = [module for module in self.model.modules() if isinstance(module, WeightLoRA)]
        before = [(W, W.detach().clone()) for module in wrapped for W in module.base.parameters()]
        with torch.no_grad():
            for module in wrapped:
                for name, A, B in zip(module.names, module.A, module.B, strict=True):
                    W = module.base.get_parameter(name)
                    W.add_((B @ A).to(W.dtype), alpha=module.scaling)
        self.named.remove()
        try:
            yield self.model
        finally:
            with torch.no_grad():
                for W, value in before:
                    W.copy_(value)
            self.named = graft_expert_lora(self.model, self.spec.rank, self.spec.alpha)
            self.load(factors)
