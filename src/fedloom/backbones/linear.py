"""Frozen float32 linear layers on a CPU, computed by oneDNN instead of the BLAS library.

Same numbers to float rounding. PyTorch sends float32 matrix products to MKL, which uses half the vector width on
processors that are not Intel's and is slow for the few rows of a decoding step; oneDNN is about twice as fast there.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

#: oneDNN compiles and keeps a kernel (about 0.6 MB) per number of rows, so rows are cut into blocks of this many, and
#: the rest is padded to one of few sizes.
BLOCK_ROWS = 256

#: Below this many multiplications, finding the kernel costs more than it saves.
SMALL = 1 << 19

#: Up to this many rows it pays to let the weight be the left factor of the product.
FEW_ROWS = 16


def quicken(model: nn.Module) -> None:
    """Make every frozen float32 ``nn.Linear`` of a model on a CPU compute through oneDNN, in place.

    Parameters keep their identity, names and values. Weights that no other module shares are stored transposed, which
    is faster with few rows.
    """
    if not torch.backends.mkldnn.is_available():
        return
    shared = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        weight = module.weight
        if (
            any(p.requires_grad for p in module.parameters())
            or weight.dtype != torch.float32
            or weight.device.type != "cpu"
        ):
            continue
        module.__class__ = FrozenLinear
        if id(weight) not in shared:
            weight.data = weight.data.t().contiguous().t()


class FrozenLinear(nn.Linear):
    """``x W^T + b`` with frozen W and b; the gradient goes to x alone. Made by ``quicken``."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        plain = input.dtype != torch.float32 or self.weight.dtype != torch.float32 or input.device.type != "cpu"
        if plain or input.numel() == 0 or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
            return F.linear(input, self.weight, self.bias)
        if torch.is_grad_enabled() and input.requires_grad:
            return cast(Tensor, _FrozenProduct.apply(input, self.weight, self.bias))
        return product(input, self.weight, self.bias)


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return product(grad, weight.t(), None), None, None


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x W^T + b`` (…, out) for x (…, in) with at least one row; float32, on a CPU, without a gradient."""
    rows_ni = x.reshape(-1, x.shape[-1])
    n, out_features = rows_ni.shape[0], weight.shape[0]
    if n * weight.numel() < SMALL:
        return F.linear(x, weight, bias)
    if 1 < n <= FEW_ROWS < out_features and weight.is_contiguous():
        y_no = _onednn(weight, rows_ni.contiguous(), None).t().contiguous()
        y_no = y_no if bias is None else y_no.add_(bias)
    elif n <= BLOCK_ROWS:
        y_no = _onednn(_padded(rows_ni), weight, bias)[:n]
    else:
        y_no = x.new_empty(n, out_features)
        for start in range(0, n, BLOCK_ROWS):
            block = rows_ni[start : start + BLOCK_ROWS]
            y_no[start : start + BLOCK_ROWS] = _onednn(_padded(block), weight, bias)[: block.shape[0]]
    return y_no.view(*x.shape[:-1], out_features)


def _padded(rows: Tensor) -> Tensor:
    """Add rows of zeros, so that there are 1, 2, 3, 4, 6, 8, 12, 16, 24, 32 … of them."""
    n = rows.shape[0]
    step = 1 << max(0, (n - 1).bit_length() - 2)
    missing = -n % step
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of PyTorch's own compiler for frozen models; it keeps no reference and has no gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
