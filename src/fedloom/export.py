"""The model folder: plain PEFT adapters, a router, and one JSON file that says what belongs together.

``experts/<m>/adapter_model.safetensors`` and ``adapter_config.json`` load with ``PeftModel.from_pretrained``;
``router.safetensors`` holds the router; ``fedloom.json`` the rest.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save as save_tensors

from fedloom.adapters.peft_io import save_expert
from fedloom.adapters.state import pick_expert
from fedloom.backbones.features import DEFINITION
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
        for m in range(view.spec.experts):
            expert = pick_expert(view.tensors, m)
            save_expert(
                partial / "experts" / str(m),
                expert,
                view.spec,
                backbone=backbone.name,
                fan_in_fan_out=bench.grafted.fan_in_fan_out,
            )
        router = {n.removeprefix("router/"): t for n, t in view.tensors.items() if not n.startswith("experts/")}
        if router:
            write_atomic(partial / "router.safetensors", save_tensors(router))
        write_json(
            partial / "fedloom.json",
            {
                "format": FORMAT,
                "fedloom": __version__,
                "backbone": {
                    "name": backbone.name,
                    "hash": backbone.hash,
                    "dtype": str(backbone.model.dtype).removeprefix("torch."),
                    "model_type": backbone.config.model_type,
                    "hidden_size": backbone.hidden_size,
                    "tokenizer_hash": tokenizer_hash(backbone.tokenizer),
                    "template": template_kind(backbone.tokenizer),
                },
                "adapter": view.spec.to_plain(),
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
