"""Federated fine-tuning of language models whose capacity is a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedloom.experiment import run as run
    from fedloom.export import load_model as load_model
    from fedloom.methods import METHODS as METHODS

_HOMES = {"run": "fedloom.experiment", "load_model": "fedloom.export", "METHODS": "fedloom.methods"}
__all__ = ["METHODS", "__version__", "load_model", "run"]


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that ``import fedloom`` and ``fedloom --help`` stay quick."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedloom' has no attribute {name!r}")
