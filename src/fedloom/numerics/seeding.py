"""Random streams named by purpose, so that no draw depends on which other draws came before it."""

from __future__ import annotations

import hashlib
import json
import operator

import numpy as np
import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose: ``derive_seed(42, "fit", "client-3", 7)``.

    The parts are encoded as a JSON list before hashing, so ``("a", "bc")`` and ``("ab", "c")``, 1 and "1" differ.
    """
    parts = [operator.index(seed), *(part if isinstance(part, str) else operator.index(part) for part in purpose)]
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Return a CPU torch generator for one purpose."""
    return torch.Generator("cpu").manual_seed(derive_seed(seed, *purpose))


def numpy_generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return a numpy generator for one purpose."""
    return np.random.default_rng(derive_seed(seed, *purpose))
