"""Flat adapter tensors: their names, their shapes, their first values, and stacking by expert.

A *bare* name is the part after ``experts/<m>/``: ``<module path>.lora_A`` (rank, in) or ``.lora_B`` (out, rank).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedloom.adapters.router import router_shapes
from fedloom.errors import AdapterError, nearest
from fedloom.numerics.init import lora_init, mixer_init, router_init
from fedloom.types import AdapterSpec, Tensors

#: Module path → (out, in) of every targeted linear layer, in model order.
Shapes = Mapping[str, tuple[int, int]]

_RESERVED = ("lora", "base", "model", "weight", "bias", "router", "experts", "modules_to_save")


def check_expert_name(name: str) -> str:
    """Return ``name`` if it can name an expert or adapter; tensor names and folders are built from it, so it is strict.

    Allowed: letters, digits, ``_`` and ``-``, starting with a letter or digit, at most 64. Names that are part of
    tensor names (``lora``, ``lora_A``, ``base``, ``weight``) are refused, for tools that edit keys by substring.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        raise AdapterError(
            f"{name!r} cannot name an expert. Use letters, digits, '_' and '-', starting with a letter or digit, "
            "at most 64 characters."
        )
    if name.lower() in _RESERVED or name.lower().startswith(("lora_", "base_")):
        raise AdapterError(f"{name!r} cannot name an expert: it is part of tensor names. Choose another name.")
    return name


def strip_wrapper_prefixes(name: str) -> str:
    """Remove what ``torch.compile`` (``_orig_mod.``, anywhere) and DDP (leading ``module.``) add to names.

    ``experts/0/module._orig_mod.model.x.lora_A`` → ``experts/0/model.x.lora_A``.
    """
    head, slash, path = name.rpartition("/")
    clean = re.sub(r"(^|\.)(_orig_mod\.)+", r"\1", path)
    while clean.startswith("module."):
        clean = re.sub(r"(^|\.)(_orig_mod\.)+", r"\1", clean.removeprefix("module."))
    return head + slash + clean


def strip_prefixes(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors under their clean names; the input is left alone. Two names that become one are an error."""
    clean: Tensors = {}
    for name, tensor in tensors.items():
        stripped = strip_wrapper_prefixes(name)
        if stripped in clean:
            raise AdapterError(f"Two tensors are both named {stripped!r} once wrapper prefixes are removed.")
        clean[stripped] = tensor
    return clean


def bare_shapes(shapes: Shapes, rank: int) -> dict[str, tuple[int, ...]]:
    """Return bare name → shape of one expert, in model order."""
    expected: dict[str, tuple[int, ...]] = {}
    for path, (out_features, in_features) in shapes.items():
        expected[f"{path}.lora_A"] = (rank, in_features)
        expected[f"{path}.lora_B"] = (out_features, rank)
    return expected


def expected_shapes(spec: AdapterSpec, shapes: Shapes, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return flat name → shape of everything that ``spec`` grafts: experts, router, mixers, frozen additions."""
    one = bare_shapes(shapes, spec.rank)
    expected = {f"experts/{m}/{name}": shape for m in range(spec.experts) for name, shape in one.items()}
    expected |= router_shapes(spec, hidden)
    if spec.slots:
        expected |= {f"mixers/{path}.weight": (len(spec.slots), width) for path, (_, width) in shapes.items()}
    if spec.base_delta:
        expected |= {f"base/{path}.delta": shape for path, shape in shapes.items()}
    return expected


def check_names_and_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise an AdapterError that names missing, unknown and misshapen keys."""
    faults = []
    missing = [name for name in expected if name not in tensors]
    unknown = [name for name in tensors if name not in expected]
    wrong = [name for name, shape in expected.items() if name in tensors and tuple(tensors[name].shape) != shape]
    if missing:
        faults.append(f"missing: {_some(missing)}")
    if unknown:
        faults.append(f"unknown: {_some(unknown)}{nearest(unknown[0], missing) if missing else ''}")
    if wrong:
        details = [f"{name} is {tuple(tensors[name].shape)}, expected {expected[name]}" for name in wrong]
        faults.append(f"wrong shape: {_some(details)}")
    if faults:
        raise AdapterError("Adapter tensors do not fit: " + "; ".join(faults) + ".")


def check_tensors(tensors: Mapping[str, Tensor], spec: AdapterSpec, shapes: Shapes, hidden: int = 0) -> None:
    """Raise an AdapterError unless ``tensors`` are exactly those that ``spec`` grafts onto these layers."""
    check_names_and_shapes(tensors, expected_shapes(spec, shapes, hidden))


def _some(names: Iterable[str], limit: int = 4) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


def stack(tensors: Mapping[str, Tensor], spec: AdapterSpec, shapes: Shapes) -> dict[str, tuple[Tensor, Tensor]]:
    """Stack flat expert tensors per module: path → (A (M, r, in), B (M, out, r))."""

    def stacked(bare: str) -> Tensor:
        return torch.stack([tensors[f"experts/{m}/{bare}"] for m in range(spec.experts)])

    return {path: (stacked(f"{path}.lora_A"), stacked(f"{path}.lora_B")) for path in shapes}


def pick_expert(tensors: Mapping[str, Tensor], expert: int) -> Tensors:
    """Return expert ``expert``'s tensors under bare names."""
    prefix = f"experts/{expert}/"
    picked = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    if not picked:
        raise AdapterError(f"There is no expert {expert} in these tensors.")
    return picked


def place_expert(bare: Mapping[str, Tensor], expert: int) -> Tensors:
    """Return bare-named tensors under the flat names of expert ``expert``."""
    return {f"experts/{expert}/{name}": tensor for name, tensor in bare.items()}


def initial_tensors(spec: AdapterSpec, shapes: Shapes, hidden: int, generator: torch.Generator) -> Tensors:
    """Draw all that ``spec`` grafts: each expert its own, then routers and mixers; centroids and additions are zero."""
    tensors = lora_init(shapes, spec.rank, spec.experts, generator)
    for name, shape in expected_shapes(spec, shapes, hidden).items():
        if not name.startswith("experts/"):
            tensors[name] = torch.zeros(shape)
    if spec.router_hidden:
        drawn = [router_init(hidden, spec.router_hidden, spec.experts, generator) for _ in range(spec.routers)]
        if spec.routers == 1:
            tensors |= drawn[0]
        else:
            for j, router in enumerate(drawn):
                tensors |= {name.replace("router/", f"routers/{j}/", 1): tensor for name, tensor in router.items()}
    if spec.slots:
        tensors |= mixer_init(shapes, len(spec.slots), generator)
    return tensors
