"""Tensors in fewer bits: integers of 8 bits with one scale per block."""

from __future__ import annotations

import math

import torch

from fedloom.errors import AdapterError

#: Values that share one scale. A scale of four bytes costs 1/64 of a block of 256.
BLOCK = 256


def to_int8(tensor: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each block of values to multiples of its largest magnitude / 127.

    Args:
        tensor: float32 of any shape; flattened, its values fall into blocks in order, the last one may be short.
        block: values per block.

    Returns:
        The multiples, int8 in the shape of ``tensor``, and the scales (blocks,), float32. A block's error is at most
        half its scale per value. A block with NaN or infinity has such a scale, so that it comes back as NaN.
    """
    flat = tensor.detach().float().flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    largest = padded.abs().amax(dim=1) if len(padded) else padded.new_zeros(0)
    scales = largest / 127
    divisor = torch.where(scales > 0, scales, torch.inf)[:, None]  # zero, or too small for a scale: zeros
    multiples = (padded / divisor).round().clamp(-127, 127).nan_to_num(0.0).to(torch.int8)
    return multiples.flatten()[: len(flat)].view(tensor.shape), scales


def from_int8(multiples: torch.Tensor, scales: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Undo ``to_int8``: float32 in the shape of ``multiples``.

    Raises:
        AdapterError: the two do not belong together.
    """
    count = math.ceil(multiples.numel() / block)
    if multiples.dtype != torch.int8 or scales.dtype != torch.float32 or tuple(scales.shape) != (count,):
        raise AdapterError(
            f"{multiples.numel()} values in blocks of {block} need int8 and {count} float32 scales; got "
            f"{multiples.dtype} and {tuple(scales.shape)} of {scales.dtype}."
        )
    each = scales.repeat_interleave(block)[: multiples.numel()]
    return (multiples.flatten().float() * each).view(multiples.shape)
