"""A frozen linear layer with M stacked LoRA experts, mixed by one gate vector per example.

LoRA: Hu et al. 2021 (arXiv 2106.09685), y = W0 x + s B A x with s = alpha / rank. Mixture: FedWeave
(arXiv 2607.26618), y = W0 x + s Σ_m g_m B_m A_m x. The mixture is computed as one LoRA of rank M·r whose rank dimension
is multiplied by the gates, so its cost does not depend on how the total rank is cut into experts, and no B·A is formed.

Shape letters: b examples, t tokens, n = b·t rows, i in, o out, M experts, r rank, R = M·r.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedloom.errors import AdapterError

#: What a forward pass may be told: gates (b, M) float, an expert index (b,) int64, or ``None``: adapters off.
Routing = Tensor | None


@dataclass
class Gates:
    """The routing of the current forward pass, shared by every mixture layer of a model.

    Modes: ``unset`` (plain LoRA; only a single expert can do without gates), ``off``, ``soft``, ``top1``.

    Attributes:
        per_token: the layers route by mixers of their own; all that can be said here is ``off``.
        soft_bR: gates repeated over each expert's rank, so that layers need one multiplication.
        index_b: chosen expert of each example.
        shared: the expert that all examples chose, if they did.
    """

    experts: int
    rank: int
    mode: str = "unset"
    per_token: bool = False
    soft_bR: Tensor | None = field(default=None, repr=False)
    index_b: Tensor | None = field(default=None, repr=False)
    shared: int | None = None

    def set(self, routing: Routing) -> None:
        """Route the next forward passes by gates (b, M), by expert index (b,), or switch the adapters off (None).

        One-hot gates that need no gradient are taken as an index: exactly that expert's output, and less work.
        """
        self.unset()
        if routing is None:
            self.mode = "off"
        elif self.per_token:
            return
        elif not routing.is_floating_point():
            self._set_index(routing)
        elif routing.dim() != 2 or routing.shape[1] != self.experts:
            raise AdapterError(f"Gates must be (batch, {self.experts}), got {tuple(routing.shape)}.")
        elif not routing.requires_grad and _one_hot(routing):
            self._set_index(routing.argmax(1))
        else:
            self.mode = "soft"
            self.soft_bR = routing.float().repeat_interleave(self.rank, dim=1)

    def _set_index(self, index_b: Tensor) -> None:
        if index_b.dim() != 1 or index_b.numel() == 0:
            raise AdapterError(f"An expert index must be (batch,), got {tuple(index_b.shape)}.")
        chosen = set(index_b.tolist())  # the one device-to-host copy of a top-1 forward pass
        if not chosen <= set(range(self.experts)):
            raise AdapterError(f"Expert index outside 0…{self.experts - 1}: {sorted(chosen)}.")
        self.mode = "top1"
        self.index_b = index_b.long()
        self.shared = chosen.pop() if len(chosen) == 1 else None

    def unset(self) -> None:
        """Forget the routing."""
        self.mode, self.soft_bR, self.index_b, self.shared = "unset", None, None, None


def dropped_positions(n: int, p: float) -> Tensor:
    """Draw which of ``n`` positions an i.i.d. Bernoulli(p) mask drops, ascending, from the global CPU generator.

    Gaps between successes of a Bernoulli process are geometric, ⌊ln U / ln(1−p)⌋ + 1, so about n·p random numbers do
    where a mask needs n. Exactly the same distribution as a mask.
    """
    parts, last = [torch.empty(0, dtype=torch.float64)], -1
    while last < n - 1:
        size = int((n - 1 - last) * p + 5 * math.sqrt((n - 1 - last) * p) + 16)
        gaps = torch.rand(size, dtype=torch.float64).neg_().log1p_().div_(math.log1p(-p)).floor_().add_(1)
        positions = gaps.cumsum_(0).add_(last)
        parts.append(positions)
        last = int(positions[-1])
    dropped = torch.cat(parts)
    return dropped[: int(torch.searchsorted(dropped, float(n)))].long()


def dropout(x: Tensor, p: float) -> tuple[Tensor, float]:
    """Return ``(y, scale)`` with ``y * scale`` distributed as ``F.dropout(x, p)``; products can absorb the scale.

    A CPU draws Bernoulli masks one by one (slower than the LoRA path's matmuls); for the small p of LoRA, drawing the
    dropped positions is about six times faster.
    """
    if x.device.type == "cpu" and p < 0.25 and not torch.compiler.is_compiling():
        flat = x.reshape(-1)
        return flat.index_fill(0, dropped_positions(flat.numel(), p), 0.0).view_as(x), 1.0 / (1.0 - p)
    return F.dropout(x, p), 1.0


def check_dropout(p: float) -> None:
    """Refuse what is no dropout probability."""
    if not 0.0 <= p < 1.0:
        raise AdapterError(f"LoRA dropout must be in [0, 1), got {p}.")


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """Return (out, in) of a linear layer, ``None`` for any other module. Conv1D (GPT-2) has an (in, out) weight."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, Conv1D):
        return module.nf, module.nx
    return None


class Mixer(nn.Module):
    """Token-level routing at one layer: softmax over slots, the top slots kept and renormalised, summed per expert.

    FedLEASE (arXiv 2509.15087) gives a client's own expert M of 2M − 1 slots and keeps M; FedALT gives its two adapters
    one slot each and keeps both.

    Args:
        in_features: width of the layer's input.
        slots: expert of each slot.
        top: slots kept per token; 0 keeps all.
        experts: M.
    """

    def __init__(self, in_features: int, slots: tuple[int, ...], top: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(slots), in_features))
        self.top = top
        self.register_buffer("expert_SM", F.one_hot(torch.tensor(slots), experts).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gates (…, M) of each token of ``x`` (…, in), float32."""
        gates_S = F.linear(x, self.weight).softmax(dim=-1)
        if 0 < self.top < gates_S.shape[-1]:
            chosen = gates_S.sort(dim=-1, descending=True, stable=True).indices[..., : self.top]
            gates_S = gates_S * torch.zeros_like(gates_S).scatter(-1, chosen, 1.0)
            gates_S = gates_S / gates_S.sum(-1, keepdim=True)
        return gates_S @ cast(Tensor, self.expert_SM)


class MoELoRALinear(nn.Module):
    """``y = base(x) + s Σ_m g_m B_m A_m dropout(x)`` with frozen ``base``; one expert is plain LoRA.

    The LoRA path runs in float32 whatever the base's type; the sum is cast to the type of the base's output.

    Args:
        base: frozen linear layer, ``nn.Linear`` or transformers' ``Conv1D``.
        gates: routing shared with the model's other layers; it also says M and r.
        alpha: LoRA alpha, s = alpha / rank.
        dropout: dropout probability before A, in training only.
        mixer: routes each token by its undropped input, in place of ``gates``.
        delta: whether a frozen dense addition to the weight, (out, in), is part of the layer.
    """

    def __init__(
        self,
        base: nn.Module,
        gates: Gates,
        alpha: float,
        dropout: float = 0.0,
        mixer: Mixer | None = None,
        delta: bool = False,
    ) -> None:
        super().__init__()
        shape = linear_shape(base)
        if shape is None:
            raise AdapterError(f"Only linear layers can carry LoRA experts, not {type(base).__name__}.")
        check_dropout(dropout)
        out_features, in_features = shape
        device = cast(Tensor, base.weight).device
        self.base = base
        self.gates = gates
        self.scaling = alpha / gates.rank
        self.dropout = dropout
        self.A = nn.Parameter(torch.zeros(gates.experts, gates.rank, in_features, device=device))
        self.B = nn.Parameter(torch.zeros(gates.experts, out_features, gates.rank, device=device))
        self.mixer = mixer if mixer is None else mixer.to(device)
        zeros = torch.zeros(out_features, in_features, device=device) if delta else None
        self.delta = None if zeros is None else nn.Parameter(zeros, requires_grad=False)
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, t, in) or (b, in) to (b, t, out) or (b, out); the first dimension counts examples."""
        y = self.base(x)
        gates = self.gates
        if gates.mode == "off":
            return y
        if gates.mode == "unset" and gates.experts > 1 and self.mixer is None:
            raise AdapterError(
                f"A model with {gates.experts} experts needs gates: run the forward pass (and, under gradient "
                "checkpointing, the backward pass too) inside `with grafted.routing(gates):`."
            )
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self._add_experts(x, y)
        return self._add_experts(x, y)

    def _add_experts(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``y`` plus the experts' outputs in ``y``'s type."""
        gates, scale = self.gates, self.scaling
        z = x.float()
        if self.delta is not None:
            y = y + F.linear(z, self.delta).to(y.dtype)
        mixed_R = None if self.mixer is None else self.mixer(z).repeat_interleave(gates.rank, dim=-1)  # (b, t, R)
        if self.training and self.dropout > 0.0:
            z, keep = dropout(z, self.dropout)
            scale *= keep
        if gates.index_b is not None and gates.shared is None:
            return self._add_chosen(z, y.float(), gates.index_b, scale).to(y.dtype)

        A_Mri: Tensor = self.A
        B_Mor: Tensor = self.B
        if gates.shared is not None:  # one expert serves all rows
            A_Mri, B_Mor = A_Mri[gates.shared, None], B_Mor[gates.shared, None]
        A_Ri = A_Mri.flatten(0, 1)
        B_oR = B_Mor.permute(1, 0, 2).flatten(1)
        h = F.linear(z, A_Ri)  # (b, t, R)
        if mixed_R is not None:
            h = h * (mixed_R * scale)
        else:
            h = h * (scale if gates.soft_bR is None else _per_example(gates.soft_bR * scale, h))
        y_no = y.float().flatten(0, -2)
        return torch.addmm(y_no, h.flatten(0, -2), B_oR.t()).view(y.shape).to(y.dtype)

    def _add_chosen(self, z: Tensor, y: Tensor, index_b: Tensor, scale: float) -> Tensor:
        """Add to ``y`` the output of each example's own expert."""
        if index_b.shape[0] != z.shape[0]:
            raise AdapterError(f"Routing is for {index_b.shape[0]} examples, the batch has {z.shape[0]}.")
        z_bti = z.reshape(z.shape[0], -1, z.shape[-1])
        y_bto = y.reshape(y.shape[0], -1, y.shape[-1])
        h_btr = z_bti @ self.A[index_b].transpose(1, 2)
        return torch.baddbmm(y_bto, h_btr, self.B[index_b].transpose(1, 2), alpha=scale).view(y.shape)

    def extra_repr(self) -> str:
        M, r, _ = self.A.shape
        return f"experts={M}, rank={r}, scaling={self.scaling:g}, dropout={self.dropout:g}"


def _one_hot(gates_bM: Tensor) -> bool:
    return bool((((gates_bM == 0) | (gates_bM == 1)).all() & (gates_bM.sum(1) == 1).all()).item())


def _per_example(gates_bR: Tensor, h: Tensor) -> Tensor:
    """Shape gates (b, R) to multiply ``h`` (b, …, R); a single row of gates serves every example."""
    if gates_bR.shape[0] not in (1, h.shape[0]):
        raise AdapterError(f"Routing is for {gates_bR.shape[0]} examples, the batch has {h.shape[0]}.")
    return gates_bR.view(gates_bR.shape[0], *([1] * (h.dim() - 2)), gates_bR.shape[1])
