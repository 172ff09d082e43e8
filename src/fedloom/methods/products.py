"""For methods that average the product B·A of one plain LoRA: mean dense updates, and LoRAs equal to a dense matrix.

Everything is keyed by module path; sums run over replies in the order given, one at a time, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from fedloom.numerics.aggregate import RunningMean
from fedloom.numerics.lowrank import delta
from fedloom.numerics.tree import add
from fedloom.types import AdapterSpec, Reply, Tensors, View

LORA = "experts/0"


def factors(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (module path, A (r, in), B (out, r)) of the one LoRA in ``tensors``, in float64."""
    for name, A in tensors.items():
        if name.startswith(f"{LORA}/") and name.endswith(".lora_A"):
            pair = name.removesuffix(".lora_A")
            yield pair.removeprefix(f"{LORA}/"), A.double(), tensors[f"{pair}.lora_B"].double()


def mean_delta(replies: Iterable[Reply], start: Callable[[str], View]) -> Tensors:
    """Return module path → Σ p_k s_k B_k A_k, dense (out, in) in float64.

    Args:
        replies: each holds the updates of both factors; p_k is its share of the examples.
        start: client → what its updates start from, and its scaling s_k = alpha / r_k.
    """
    mean = RunningMean()
    for reply in replies:
        begin = start(reply.client)
        end = add({name: begin.tensors[name] for name in reply.send}, reply.send)
        for path, A, B in factors(end):
            mean.add(path, delta(A, B, begin.spec.scaling), reply.counts[LORA])
        del reply  # so that it is gone when the next is read
    return mean.mean()


def plain_lora(dense: Mapping[str, torch.Tensor], spec: AdapterSpec) -> View:
    """Return one plain LoRA whose B·A is exactly ``dense`` (module path → (out, in)).

    Its rank is the largest min(out, in), its scaling 1. The smaller side's factor is the identity, the other is the
    matrix itself: bitwise exact, and free, where an SVD of every module would take minutes on a large model.
    """
    rank = max(min(matrix.shape) for matrix in dense.values())
    tensors: Tensors = {}
    for path, matrix in dense.items():
        out, width = matrix.shape
        A, B = torch.zeros(rank, width), torch.zeros(out, rank)
        if out <= width:
            A[:out], B[:, :out] = matrix, torch.eye(out)
        else:
            A[:width], B[:, :width] = torch.eye(width), matrix
        tensors |= {f"{LORA}/{path}.lora_A": A, f"{LORA}/{path}.lora_B": B}
    return View(tensors, replace(spec, rank=rank, alpha=float(rank), base_delta=False))
