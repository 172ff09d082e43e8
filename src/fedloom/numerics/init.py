"""Initial adapter and router tensors, from an explicit generator."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fedloom.errors import AdapterError
from fedloom.types import Tensors

#: Flat names of PFL-MoE's own head, as its difference from the model's, and of the gate between both.
DELTA, GATE, BIAS = "personal/delta.weight", "personal/gate.weight", "personal/gate.bias"

#: Names of a model's head among its tensors; a head that is tied to the embeddings is there under their name.
HEADS = ("shared/lm_head.weight", "shared/shared.weight", "shared/model.embed_tokens.weight")


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def lora_init(shapes: Mapping[str, tuple[int, int]], rank: int, experts: int, generator: torch.Generator) -> Tensors:
    """Draw LoRA factors: A Kaiming-uniform with a = √5 (that is U(±1/√in)), B zero (Hu et al. 2022).

    Args:
        shapes: module path → (out, in), in model order.
        rank: rank of each expert.
        experts: how many experts to draw, one after the other.
        generator: source of randomness.

    Returns:
        ``experts/<m>/<path>.lora_A`` (rank, in) and ``experts/<m>/<path>.lora_B`` (out, rank), float32.
    """
    tensors: Tensors = {}
    for m in range(experts):
        for path, (out, width) in shapes.items():
            tensors[f"experts/{m}/{path}.lora_A"] = _uniform((rank, width), 1 / math.sqrt(width), generator)
            tensors[f"experts/{m}/{path}.lora_B"] = torch.zeros(out, rank)
    return tensors


def router_init(hidden: int, width: int, experts: int, generator: torch.Generator) -> Tensors:
    """Draw the two-layer router hidden → width → experts as ``torch.nn.Linear`` would: all U(±1/√fan_in).

    Returns:
        ``router/0.weight`` (width, hidden), ``router/0.bias`` (width,), ``router/2.weight`` (experts, width),
        ``router/2.bias`` (experts,), float32.
    """
    first, second = 1 / math.sqrt(hidden), 1 / math.sqrt(width)
    return {
        "router/0.weight": _uniform((width, hidden), first, generator),
        "router/0.bias": _uniform((width,), first, generator),
        "router/2.weight": _uniform((experts, width), second, generator),
        "router/2.bias": _uniform((experts,), second, generator),
    }


def mixer_init(shapes: Mapping[str, tuple[int, int]], slots: int, generator: torch.Generator) -> Tensors:
    """Draw one token mixer per module, Kaiming-uniform with a = √5 and without bias: U(±1/√in).

    Returns:
        ``mixers/<path>.weight`` (slots, in), float32.
    """
    return {
        f"mixers/{path}.weight": _uniform((slots, width), 1 / math.sqrt(width), generator)
        for path, (_, width) in shapes.items()
    }


def no_difference(tensors: Tensors) -> Tensors:
    """Return a blend that changes nothing yet, of the size of the head among a model's ``tensors``."""
    head = next((tensors[name] for name in HEADS if name in tensors), None)
    if head is None:
        raise AdapterError("An own head needs the model's among what is trained: set adapter.native to 'full'.")
    return {DELTA: torch.zeros_like(head), GATE: torch.zeros(1, head.shape[1]), BIAS: torch.zeros(1)}
