"""Updates as integers that add up without rounding: the form in which they can be masked and summed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.errors import UpdateRejected
from fedloom.types import Tensors, component

#: Binary places. Rounding moves a value by at most 2⁻³³: less than float32 does, of values beyond 2⁻⁹.
PLACES = 32
#: A value's largest magnitude, and the largest weight of all clients together: 2⁶ · 2²⁴ · 2³² = 2⁶² fits into int64.
LARGEST, HEAVIEST = 64.0, 1 << 24


@dataclass(frozen=True)
class Layout:
    """Where what stands in a vector: for each component its weight and 1, a loss and its weight, then all tensors."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def units(self) -> list[str]:
        return sorted({component(name) for name in self.shapes})

    @property
    def length(self) -> int:
        return 2 * len(self.units) + 2 + sum(math.prod(shape) for shape in self.shapes.values())

    def write(self, tensors: Tensors, counts: Mapping[str, int], loss: float | None, most: int) -> NDArray[np.int64]:
        """Return one client's vector: weight · value for each tensor, zero for what it does not send.

        Args:
            tensors: float32, of some of the components.
            counts: component → weight.
            loss: mean training loss, weighted by ``counts["examples"]``; None leaves it out.
            most: the largest weight that one client may have.

        Raises:
            UpdateRejected: a value or weight does not fit.
        """
        sent = {component(name) for name in tensors}
        for unit in sorted(sent):
            if not 0 <= counts[unit] <= most:
                raise UpdateRejected(f"the weight of {unit!r} is beyond {most}")
        head = [number for unit in self.units for number in ((counts[unit], 1) if unit in sent else (0, 0))]
        head += [0, 0] if loss is None else [_whole(loss) * counts["examples"], counts["examples"]]
        parts = [np.array(head, np.int64)]
        for name, shape in sorted(self.shapes.items()):
            if name not in tensors:
                parts.append(np.zeros(math.prod(shape), np.int64))
                continue
            values = tensors[name].detach().cpu().double().flatten()
            if not bool((values.abs() <= LARGEST).all()):  # also for NaN
                raise UpdateRejected(f"{name!r} holds values that are not within ±{LARGEST:g}")
            whole = torch.round(values * 2.0**PLACES).to(torch.int64)
            parts.append((whole * counts[component(name)]).numpy())
        return np.concatenate(parts)

    def read(self, total: NDArray[np.int64]) -> tuple[dict[str, int], dict[str, int], tuple[float, int], Tensors]:
        """Return what a sum of vectors says: weights, numbers of clients, the loss with its weight, weighted sums."""
        units = self.units
        weights = {unit: int(total[2 * i]) for i, unit in enumerate(units)}
        clients = {unit: int(total[2 * i + 1]) for i, unit in enumerate(units)}
        loss = float(total[2 * len(units)]) / 2.0**PLACES, int(total[2 * len(units) + 1])
        sums: Tensors = {}
        start = 2 * len(units) + 2
        for name, shape in sorted(self.shapes.items()):
            end = start + math.prod(shape)
            part = torch.from_numpy(total[start:end].copy()).double() / 2.0**PLACES
            sums[name], start = part.view(shape), end
        return weights, clients, loss, sums


def layout_of(schemas: Iterable[Mapping[str, tuple[int, ...]]], units: Sequence[str]) -> Layout:
    """Return the layout of all tensors of ``units`` in the schemas."""
    wanted = set(units)
    return Layout({n: tuple(s) for schema in schemas for n, s in schema.items() if component(n) in wanted})


def _whole(value: float) -> int:
    if not abs(value) <= LARGEST:
        raise UpdateRejected(f"the loss is not within ±{LARGEST:g}")  # its words reach the server
    return round(value * 2.0**PLACES)
