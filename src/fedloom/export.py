"""The model folder: plain PEFT adapters, a router, and one JSON file that says what belongs together.

``experts/<m>/adapter_model.safetensors`` and ``adapter_config.json`` load with ``PeftModel.from_pretrained``;
``router.safetensors`` holds the router; ``fedloom.json`` the rest. A model whose own experts were trained is one folder
``backbone/``, which ``transformers`` loads.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save as save_tensors

from fedloom.adapters.native_graft import NativeGraft
from fedloom.adapters.peft_io import save_expert
from fedloom.adapters.state import pick_expert
from fedloom.backbones.features import DEFINITION
from fedloom.backbones.hash import parameter_hash
from fedloom.backbones.load import Backbone, public_name, quiet_transformers
from fedloom.data.tokenize import template_kind, tokenizer_hash
from fedloom.files import sync_folder, write_atomic, write_json
from fedloom.runtime.client import Workbench
from fedloom.types import Plain, View
from fedloom.version import __version__

FORMAT = 1


def save_model(
    folder: Path,
    view: View,
    bench: Workbench,
    *,
    provenance: dict[str, Plain],
    max_length: int = 512,
    experts: Sequence[dict[str, Plain]] = (),
    routing: str = "top1",
) -> None:
    """Write a model folder; it appears whole or not at all, and replaces an older one.

    Args:
        folder: where.
        view: what evaluation sees: tensors and specification.
        bench: the backbone it was trained on.
        provenance: method, rounds, seed… of the run.
        max_length: most tokens of an example in training; evaluation cuts there too.
        experts: what is known of each expert (clients, buckets, examples).
        routing: default routing at inference.
    """
    backbone = bench.backbone
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        partial.chmod(0o755)
        native = isinstance(bench.grafted, NativeGraft)
        if isinstance(bench.grafted, NativeGraft):
            (digest, dtype), router = _save_backbone(partial / "backbone", bench.grafted, backbone), False
        else:
            digest, dtype, router = backbone.hash, backbone.model.dtype, _save_experts(partial, view, bench)
        write_json(
            partial / "fedloom.json",
            {
                "format": FORMAT,
                "fedloom": __version__,
                "backbone": {
                    "name": backbone.name,
                    "hash": digest,
                    "dtype": str(dtype).removeprefix("torch."),
                    "model_type": backbone.config.model_type,
                    "hidden_size": backbone.hidden_size,
                    "tokenizer_hash": tokenizer_hash(backbone.tokenizer),
                    "template": template_kind(backbone.tokenizer),
                },
                "adapter": (replace(view.spec, native="full") if native else view.spec).to_plain(),
                "router": {"features": DEFINITION, "activation": "gelu", "hidden": view.spec.router_hidden}
                if router
                else None,
                "routing": routing,
                "max_length": max_length,
                "experts": list(experts) or [{} for _ in range(view.spec.experts)],
                "provenance": provenance,
            },
        )
        if folder.exists():
            old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-old-"))
            folder.rename(old / folder.name)
            partial.rename(folder)
            shutil.rmtree(old)
        else:
            partial.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _save_experts(folder: Path, view: View, bench: Workbench) -> bool:
    """Write experts and what routes between them; return whether anything does."""
    for m in range(view.spec.experts):
        save_expert(
            folder / "experts" / str(m),
            pick_expert(view.tensors, m),
            view.spec,
            backbone=public_name(bench.backbone.name),
            fan_in_fan_out=bench.grafted.fan_in_fan_out,
        )
    router = {n.removeprefix("router/"): t for n, t in view.tensors.items() if not n.startswith("experts/")}
    if router:
        write_atomic(folder / "router.safetensors", save_tensors(router))
    return bool(router)


def _save_backbone(folder: Path, grafted: NativeGraft, backbone: Backbone) -> tuple[str, torch.dtype]:
    """Write the trained model, LoRAs merged into its experts, with its tokenizer; return its hash and its one type."""
    with grafted.merged() as model, quiet_transformers():
        model.save_pretrained(folder)  # type: ignore[operator]
        backbone.tokenizer.save_pretrained(folder)
        return parameter_hash(model), next(model.parameters()).dtype
