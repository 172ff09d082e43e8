"""Count how many tokens each native expert gets: the f of FC-MoE's importance c = f·‖Δθ‖ (arXiv 2606.15625).

What is counted is what the router did in the pass, with its capacity and its jitter (``router_jitter_noise``: in
training Switch and Mixtral multiply the layer's input by noise in place, so experts see it too; set it to 0 for counts
that a second pass repeats).
"""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedloom.adapters.native import MoELayer, NativeModel
from fedloom.adapters.native_lora import NativeLoRA
from fedloom.errors import AdapterError


class Activations:
    """Counts tokens per expert in the forward passes inside ``with``; padding is left out.

    ::

        with Activations(native) as seen:
            for batch in batches:
                seen.masks(encoder=batch.mask, decoder=batch.decoder_mask)
                model(...)
        seen.counts()

    A token of a top-k layer counts for each of its k experts. A token that Switch drops, because its expert's capacity
    is used up, counts as dropped and for no expert. Layers that gradient checkpointing computes again in the backward
    pass count once. Each forward pass needs its own masks, so that none is counted by those of another; token-by-token
    generation is not counted.
    """

    def __init__(self, native: NativeModel | NativeLoRA) -> None:
        self._model = native.model
        self._layers = list(native.layers)
        self._sides = {layer.side for layer in self._layers}
        self._masks: dict[str, Tensor] = {}  # for the next forward pass, by side
        self._valid: dict[str, Tensor] = {}  # of the current forward pass, by side
        self._awaited: set[str] = set()  # layers that the current forward pass has not reached
        self._handles: list[RemovableHandle] = []
        devices = {layer.path: next(layer.router.parameters()).device for layer in self._layers}
        self._chosen = {
            layer.path: torch.zeros(layer.experts, dtype=torch.long, device=devices[layer.path])
            for layer in self._layers
        }
        self._dropped = {path: torch.zeros((), dtype=torch.long, device=device) for path, device in devices.items()}

    def __enter__(self) -> Activations:
        if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in self._model.modules()):
            raise AdapterError("Activations cannot be counted in a compiled model: count before torch.compile.")
        for side, stack in {layer.side: layer.stack for layer in self._layers}.items():
            self._handles.append(stack.register_forward_pre_hook(partial(self._begin, side)))
        for layer in self._layers:
            self._handles.append(layer.router.register_forward_hook(partial(self._count, layer)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._masks.clear()
        self._awaited.clear()

    def masks(
        self, causal: Tensor | None = None, *, encoder: Tensor | None = None, decoder: Tensor | None = None
    ) -> None:
        """Say which tokens the next forward pass has.

        Args:
            causal: attention mask (b, t) of a causal model, nonzero at tokens.
            encoder: attention mask (b, t) of the encoder.
            decoder: attention mask (b, u) of the decoder's inputs.
        """
        given = {"causal": causal, "encoder": encoder, "decoder": decoder}
        self._masks = {side: mask != 0 for side, mask in given.items() if mask is not None}
        if not self._masks or ("causal" in self._masks) != ("causal" in self._sides):
            raise AdapterError(
                f"Masks are given for {', '.join(self._masks) or 'nothing'}, the mixture layers are: "
                f"{', '.join(sorted(self._sides))}."
            )
        for side, mask in self._masks.items():
            if mask.dim() != 2:
                raise AdapterError(f"The {side} mask must be (batch, tokens), got {tuple(mask.shape)}.")

    def counts(self) -> dict[str, int]:
        """Return component (``experts/<path>.<e>``) → tokens it computed, for every expert, in model order."""
        return {
            layer.component(e): n for layer in self._layers for e, n in enumerate(self._chosen[layer.path].tolist())
        }

    def dropped(self) -> dict[str, int]:
        """Return layer path → tokens that no expert had room for; 0 in layers without a capacity."""
        return {path: int(n) for path, n in self._dropped.items()}

    def _begin(self, side: str, stack: nn.Module, args: Any) -> None:
        """Take the masks when a forward pass starts."""
        if side not in self._masks:
            raise AdapterError(f"A forward pass begins without its {side} mask: call masks() before each pass.")
        self._valid[side] = self._masks.pop(side)
        self._awaited |= {layer.path for layer in self._layers if layer.side == side}

    def _count(self, layer: MoELayer, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Add one layer's choices to the counts."""
        if layer.path not in self._awaited:
            return  # gradient checkpointing runs the layer again
        self._awaited.remove(layer.path)
        valid_bt = self._valid[layer.side].to(output[0].device)
        if layer.fused:
            index_nk = output[2]
            self._check_fit(layer, valid_bt.flatten(), index_nk.shape[:1])
            weight_nk = valid_bt.reshape(-1, 1).expand_as(index_nk)
            self._chosen[layer.path].scatter_add_(0, index_nk.flatten(), weight_nk.flatten().long())
        else:
            dispatch_btE = output[0]  # one-hot, and zero for a dropped token: the logits do not know of capacity
            self._check_fit(layer, valid_bt, dispatch_btE.shape[:2])
            kept_E = (dispatch_btE * valid_bt[..., None]).sum((0, 1))
            self._chosen[layer.path] += kept_E
            self._dropped[layer.path] += valid_bt.sum() - kept_E.sum()

    def _check_fit(self, layer: MoELayer, valid: Tensor, tokens: torch.Size) -> None:
        if valid.shape != tokens:
            shape = tuple(self._valid[layer.side].shape)
            raise AdapterError(f"The {layer.side} mask is {shape}, {layer.path} has tokens {tuple(tokens)}.")
