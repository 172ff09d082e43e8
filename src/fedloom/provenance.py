"""What a result says of itself: what must be the same to go on with a run, and what was run on what."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import sys
from pathlib import Path

import torch

from fedloom.backbones.load import Backbone
from fedloom.config import Config
from fedloom.data.tokenize import tokenizer_hash
from fedloom.types import Plain
from fedloom.version import __version__
from fedloom.workload import Data


def identity(config: Config, backbone: Backbone, data: Data) -> dict[str, Plain]:
    """Return what must be the same for a run to be resumed.

    That is all but how often one looks, whether one generates, and what is measured at the end only (other routings
    than the first, clients' own models): so what cannot be measured in the end can be left out, without new training.
    """
    sections = config.model_dump()
    sections["evaluation"] = {
        "split": config.evaluation.split,
        "limit": config.evaluation.limit,
        "routing": config.evaluation.routing[:1],
    }
    if sections["federation"]["wire"] == "none":  # a checkpoint from before the key
        del sections["federation"]["wire"]
    benchmark = sections["data"]["benchmark"]
    if benchmark is not None and benchmark["min_per_client"] == 0:  # likewise
        del benchmark["min_per_client"]
    for section in ("privacy", "secagg"):
        if sections[section] is None:
            del sections[section]
    return sections | {
        "backbone_hash": backbone.hash,
        "tokenizer_hash": tokenizer_hash(backbone.tokenizer),
        **_row_hashes(data),
    }


def _row_hashes(data: Data) -> dict[str, Plain]:
    """Return sha256 over all training and over all test rows, as token ids."""
    return {
        name: _hash([[[*e.ids, e.prompt_length] for e in rows.encoded] for rows in parts.values()])
        for name, parts in (("rows", data.clients), ("test_rows", data.test))
    }


def _hash(value: Plain) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def source_hash() -> str:
    """Return sha256 over the package's own Python files, so that a result says which code made it."""
    package = Path(__file__).parent
    parts = [[str(path.relative_to(package)), path.read_text("utf-8")] for path in sorted(package.rglob("*.py"))]
    return _hash(parts)


def manifest(
    config: Config, backbone: Backbone, data: Data, earlier: dict[str, Plain] | None = None
) -> dict[str, Plain]:
    """Return what was run on what; after a resume also with which other code, from the ``earlier`` manifest."""
    now = source_hash()
    before = [h for h in (earlier or {}).get("source_hashes", []) if h != now]
    packages = ("torch", "transformers", "peft", "scikit-learn", "numpy", "safetensors", "tokenizers")
    return {
        "fedloom": __version__,
        "source_hash": now,
        "source_hashes": [*before, now],
        "python": sys.version.split()[0],
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "machine": {
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "backbone": {
            "name": backbone.name,
            "hash": backbone.hash,
            "tokenizer_hash": tokenizer_hash(backbone.tokenizer),
        },
        "seed": config.seed,
        **_row_hashes(data),
        "data": data.manifest,
    }
