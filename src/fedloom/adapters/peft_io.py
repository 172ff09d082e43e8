"""One expert as a plain PEFT adapter folder: ``adapter_model.safetensors`` and ``adapter_config.json``, nothing else.

The folder loads with ``peft.PeftModel.from_pretrained(base, folder)`` and in the servers that read PEFT adapters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from fedloom.adapters.state import (
    Shapes,
    bare_shapes,
    check_expert_name,
    check_names_and_shapes,
    strip_prefixes,
    strip_wrapper_prefixes,
)
from fedloom.errors import AdapterError
from fedloom.files import write_atomic
from fedloom.types import AdapterSpec, Tensors

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."

#: LoraConfig fields that change what the adapter computes, and the only values of them that an expert can have.
_PLAIN_FIELDS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "target_parameters": ([], None),
    "trainable_token_indices": ({}, [], None),
    "layer_replication": ([], None),
}


def save_expert(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    spec: AdapterSpec,
    *,
    backbone: str,
    fan_in_fan_out: bool = False,
) -> None:
    """Write one expert as a PEFT adapter; each file appears whole or not at all.

    Args:
        folder: where to write; made if absent. Its name must be able to name an adapter.
        tensors: bare name (``<path>.lora_A``, see ``state.pick_expert``) → tensor.
        spec: rank, alpha, dropout and targets.
        backbone: id of the base model, for people and servers; never looked up here.
        fan_in_fan_out: the adapted layers are Conv1D (``Grafted.fan_in_fan_out``).
    """
    folder = Path(folder)
    check_expert_name(folder.name)
    clean = strip_prefixes(tensors)
    paths = {name.removesuffix(".lora_A").removesuffix(".lora_B") for name in clean}
    foreign = sorted(p for p in paths if not any(p == t or p.endswith("." + t) for t in spec.targets))
    if foreign:
        raise AdapterError(f"An expert holds only LoRA tensors of {spec.targets}; refused: {', '.join(foreign[:4])}.")
    shapes = {p: (_size(clean, f"{p}.lora_B", 0), _size(clean, f"{p}.lora_A", 1)) for p in paths}
    check_names_and_shapes(clean, bare_shapes(shapes, spec.rank))

    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": backbone,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": sorted(spec.targets),
        "fan_in_fan_out": fan_in_fan_out,
        "bias": "none",
        "modules_to_save": None,
    }
    weights = {f"{_PREFIX}{name}.weight": t.detach().float().cpu().contiguous() for name, t in clean.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / WEIGHTS, save_bytes(weights, metadata={"format": "pt"}))
    write_atomic(folder / CONFIG, (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode())


def load_expert(folder: str | Path, shapes: Shapes) -> tuple[Tensors, dict[str, Any]]:
    """Read one expert that fits the layers ``shapes``; reads safetensors and JSON only.

    Returns:
        Bare name → float32 tensor, and the fields of ``adapter_config.json``.
    """
    folder = Path(folder)
    fields = _read_config(folder / CONFIG)
    if not (folder / WEIGHTS).is_file():
        pickled = sorted(p.name for p in folder.glob("*") if p.suffix in {".bin", ".pt", ".pth", ".pkl", ".ckpt"})
        hint = f" {pickled[0]} can run code and is not read: save it again as safetensors." if pickled else ""
        raise AdapterError(f"{folder} has no {WEIGHTS}.{hint}")
    try:
        stored = load_bytes((folder / WEIGHTS).read_bytes())
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise AdapterError(f"{folder / WEIGHTS} is not a readable safetensors file: {error}.") from error
    bare = {}
    for key, tensor in stored.items():
        clean = strip_wrapper_prefixes(key)  # a wrapper may sit outside PEFT's prefix, or between it and the model
        inner = clean.removeprefix(_PREFIX).removesuffix(".weight")
        if clean != f"{_PREFIX}{inner}.weight" or not inner.endswith((".lora_A", ".lora_B")):
            raise AdapterError(f"{folder / WEIGHTS} holds {key!r}, which is not a LoRA tensor of a linear layer.")
        name = strip_wrapper_prefixes(inner)
        if name in bare:
            raise AdapterError(f"{folder / WEIGHTS} holds {name!r} twice, once under a wrapper prefix.")
        bare[name] = tensor.to(torch.float32)
    try:
        check_names_and_shapes(bare, bare_shapes(shapes, fields["r"]))
    except AdapterError as error:
        raise AdapterError(f"{folder / WEIGHTS}: {error}") from error
    return bare, fields


def _read_config(file: Path) -> dict[str, Any]:
    """Read ``adapter_config.json`` and refuse what an expert cannot represent."""
    if not file.is_file():
        raise AdapterError(f"{file} does not exist: {file.parent} is not a PEFT adapter folder.")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{file} is not JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{file} must hold a JSON object.")
    for name in ("peft_type", "r", "lora_alpha", "target_modules"):
        if name not in fields:
            raise AdapterError(f"{file} lacks {name!r}.")
    for name, plain in _PLAIN_FIELDS.items():
        if name in fields and fields[name] not in plain:
            raise AdapterError(f"{file}: {name} = {fields[name]!r} is not supported: an expert is plain LoRA.")
    if not isinstance(fields["r"], int) or fields["r"] < 1:
        raise AdapterError(f"{file}: r = {fields['r']!r} must be a positive integer.")
    if not isinstance(fields["lora_alpha"], int | float):
        raise AdapterError(f"{file}: lora_alpha = {fields['lora_alpha']!r} must be a number.")
    return fields


def _size(tensors: Mapping[str, Tensor], name: str, dim: int) -> int:
    """Return a dimension of a two-dimensional tensor that must be there."""
    if name not in tensors or tensors[name].dim() != 2:
        raise AdapterError(f"An expert needs {name} as a matrix.")
    return tensors[name].shape[dim]
