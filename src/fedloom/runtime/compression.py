"""Fewer bytes for what a client sends: bfloat16, or 8-bit integers whose error the next round makes good.

Compressed is the update: what is sent, minus what the client received where it is sent whole (``Method.origin``). An
update is small and shrinks with training, so that the same bits describe it more finely than they would the tensor.
Routers are compressed like experts: they are a third or more of what FedWeave sends. Counts stay as they are.

Error feedback: F. Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; S. P. Karimireddy et al., "Error
feedback fixes SignSGD and other gradient compression schemes", arXiv 1901.09847, Algorithm 1.
"""

from __future__ import annotations

import torch

from fedloom.errors import AdapterError, UpdateRejected
from fedloom.numerics.quantize import from_int8, to_int8
from fedloom.types import Tensors, Wire

_SCALES = ":scales"  # stands behind the name of the tensor that the scales belong to


def compress(tensors: Tensors, wire: Wire) -> Tensors:
    """Return the tensors that go over the wire in place of float32 ones."""
    if wire == "none":
        return dict(tensors)
    if wire == "bf16":
        return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    packed: Tensors = {}
    for name, tensor in tensors.items():
        packed[name], packed[name + _SCALES] = to_int8(tensor)
    return packed


def expand(packed: Tensors, wire: Wire) -> Tensors:
    """Undo ``compress``: float32 tensors, exactly as everyone else will see them.

    Raises:
        UpdateRejected: the tensors have not the form that ``wire`` gives them.
    """
    if wire == "none":
        return packed
    if wire == "bf16":
        for name, tensor in packed.items():
            if tensor.dtype != torch.bfloat16:
                raise UpdateRejected(f"{name!r} has dtype {tensor.dtype}; the wire carries bfloat16")
        return {name: tensor.float() for name, tensor in packed.items()}
    tensors: Tensors = {}
    for name, multiples in packed.items():
        if name.endswith(_SCALES):
            if name.removesuffix(_SCALES) not in packed:
                raise UpdateRejected(f"{name!r} are the scales of no tensor")
            continue
        if name + _SCALES not in packed:
            raise UpdateRejected(f"{name!r} has no scales; the wire carries int8")
        try:
            tensors[name] = from_int8(multiples, packed[name + _SCALES])
        except AdapterError as error:
            raise UpdateRejected(f"{name!r} is not int8 with scales: {error}") from error
    return tensors


def saved_up(wanted: Tensors, received: Tensors) -> Tensors:
    """Return what compression left over: the next update is compressed together with it.

    After T rounds the sum of what was received differs from the sum of the updates by the last rest only. Training that
    diverged is quarantined; its NaN must not come again with every later round.
    """
    return {name: torch.nan_to_num(t - received[name], 0.0, 0.0, 0.0) for name, t in wanted.items()}
