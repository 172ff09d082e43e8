"""Native experts behind the same interface as grafted LoRA experts (``inject.Grafted``), for runtime and evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedloom.adapters.activations import Activations
from fedloom.adapters.inject import Slot, unwrap
from fedloom.adapters.moe_lora import Routing
from fedloom.adapters.native import NamedTensors, NativeModel, find_native
from fedloom.adapters.native_blend import Blend
from fedloom.adapters.native_lora import NativeLoRA, WeightLoRA, graft_expert_lora
from fedloom.adapters.native_mask import check_kept, open_only
from fedloom.adapters.state import check_names_and_shapes
from fedloom.errors import AdapterError
from fedloom.types import AdapterSpec, Tensors, component


class NativeGraft:
    """A mixture-of-experts model that is trained whole (``full``), or LoRAs on its experts and its routers (``lora``).

    A specification that names experts in ``kept`` makes it a model of these experts only: the others' tensors are not
    read or loaded, and routers do not choose them. One with ``blend`` has a head of its own beside the model's.

    What is trained is float32, whatever the backbone came in: in half precision small steps round away, and what a
    client sends would hold the rounding of what it got. So ``full`` makes the whole model float32; under ``lora`` all
    but factors and routers stays as it came.

    Args:
        model: the model, changed in place.
        spec: what is trained.
        answers_in: for a trained model that only answers: the type that it computes in. Its routers stay float32, as in
            training, so that they choose the experts that they chose there.

    Attributes:
        model: the model, trained in place.
        spec: what is trained.
        initial: all tensors as they were in the backbone; ``routing(None)`` computes with them. None where the model
            only answers, which then holds no copy of itself.
        router: always None: the model's own routers choose experts.
    """

    router: nn.Module | None = None
    fan_in_fan_out = False

    def __init__(self, model: nn.Module, spec: AdapterSpec, answers_in: torch.dtype | None = None) -> None:
        self.model = model
        self.spec = replace(spec, kept=(), blend=False)
        self.shapes: dict[str, tuple[int, int]] = {}
        self.hidden_size = 0
        self.named: NativeModel | NativeLoRA
        if spec.native == "full":
            self.named = find_native(model)
        elif spec.native == "lora":
            self.named = graft_expert_lora(model, spec.rank, spec.alpha, train_routers=True)
        else:
            raise AdapterError(f"Native experts are trained 'full' or by 'lora', not {spec.native!r}.")
        if spec.native == "full" and answers_in is None:
            unwrap(model).requires_grad_(True).float()
        else:
            for layer in self.named.layers:
                layer.router.float().register_forward_pre_hook(_in_float32)
        if answers_in is not None:
            routing = {id(p) for layer in self.named.layers for p in layer.router.parameters()}
            _retype((p for p in unwrap(model).parameters() if id(p) not in routing), answers_in)
        for module in unwrap(model).modules():
            if hasattr(module, "jitter_noise"):  # transformers multiplies the experts' input by it, too, in place
                module.jitter_noise = 0.0  # type: ignore[assignment]
        self.initial: Tensors | None = self.named.read() if answers_in is None else None
        self.blend = Blend(model)
        self.respec(spec)

    def respec(self, spec: AdapterSpec) -> None:
        """Change which experts are kept and whether heads are blended; what is new holds no agreed values yet: load."""
        if replace(spec, kept=(), blend=False) != replace(self.spec, kept=(), blend=False):
            raise AdapterError("All but kept experts and the blend of a native model is fixed when it is grafted.")
        check_kept(self.named.layers, spec.kept)
        self.spec = spec
        self._open()

    def _open(self) -> None:
        """Let routers and heads act as the specification says."""
        open_only(self.named.layers, self.spec.kept)
        if self.spec.blend:
            self.blend.attach()
        else:
            self.blend.detach()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy flat tensors into the model; missing, unknown or misshapen keys are AdapterErrors."""
        slots = self.parameters_by_name()
        check_names_and_shapes(tensors, {name: tuple(slot.value.shape) for name, slot in slots.items()})
        for name, slot in slots.items():
            slot.value.copy_(tensors[name])

    def read(self) -> Tensors:
        """Return a detached float32 copy of every trained tensor by flat name."""
        return NamedTensors(self.parameters_by_name()).read()

    def parameters_by_name(self) -> dict[str, Slot]:
        """Return flat name → where it lives, without experts that are not kept."""
        kept = self.spec.kept
        slots = self._slots().items()
        return {n: s for n, s in slots if not kept or not n.startswith("experts/") or component(n) in kept}

    def _slots(self) -> dict[str, Slot]:
        return self.named.slots() | (self.blend.slots() if self.spec.blend else {})

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return all trained Parameters but the routers', each once, kept or not: their order does not change."""
        return self._parameters(routing=False)

    def router_parameters(self) -> list[nn.Parameter]:
        """Return the routers' Parameters."""
        return self._parameters(routing=True)

    def _parameters(self, *, routing: bool) -> list[nn.Parameter]:
        slots = self._slots().items()
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
        """Compute with the trained tensors inside or, for None, with those of the backbone and all its experts.

        Raises:
            AdapterError: for None, where the model only answers.
        """
        if routing is not None:
            yield
            return
        if self.initial is None:
            raise AdapterError(
                "Routing 'off' means the backbone before training, but this model was trained whole and holds only "
                "what it became: load that backbone itself."
            )
        trained = self.named.read()
        self.named.load(self.initial)
        open_only(self.named.layers, ())
        self.blend.detach()
        try:
            yield
        finally:
            self.named.load(trained)
            self._open()

    def train(self) -> None:
        """Train as the model's authors do, with its own dropout; where only LoRAs are trained there is none."""
        self.model.train(self.spec.native == "full")

    def eval(self) -> None:
        """Switch dropout off."""
        self.model.eval()

    @contextmanager
    def merged(self) -> Iterator[nn.Module]:
        """Give the bare model with the trained tensors in its own weights, to be saved; restored afterwards.

        Each weight is the one that a forward pass computes with. Where some parameters are float32 and others are not,
        all are: nothing is lost, and a model of one type is saved.
        """
        if self.spec.kept:
            raise AdapterError("A model of some experts only cannot be saved as a model of its family.")
        if self.spec.blend:
            raise AdapterError("A model with a blended head cannot be saved as a model of its family.")
        if self.spec.native == "full":
            with _of_one_type(self.model):
                yield self.model
            return
        factors = self.read()
        wrapped = [module for module in self.model.modules() if isinstance(module, WeightLoRA)]
        before = [(W, W.detach().clone()) for module in wrapped for W in module.base.parameters()]
        with torch.no_grad():
            for module in wrapped:
                for name, weight in module.adapted().items():
                    module.base.get_parameter(name).copy_(weight)
        self.named.remove()  # type: ignore[union-attr]
        try:
            with _of_one_type(self.model):
                yield self.model
        finally:
            with torch.no_grad():
                for W, value in before:
                    W.copy_(value)
            self.named = graft_expert_lora(self.model, self.spec.rank, self.spec.alpha, train_routers=True)
            self.load(factors)


def _retype(tensors: Iterable[Tensor], kind: torch.dtype) -> None:
    """Cast tensors of a model in place."""
    for tensor in tensors:
        tensor.data = tensor.data.to(kind)


@contextmanager
def _of_one_type(model: nn.Module) -> Iterator[None]:
    """Let parameters and floating-point buffers be float32 inside where the parameters are not all of one type."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    kinds = [t.dtype for t in tensors]
    if len({p.dtype for p in model.parameters()}) > 1:
        _retype(tensors, torch.float32)
    try:
        yield
    finally:
        for tensor, kind in zip(tensors, kinds, strict=True):
            _retype([tensor], kind)


def _in_float32(router: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Let a float32 router read activations of half precision; experts turn its weights into their own type."""
    return tuple(x.float() for x in inputs)
