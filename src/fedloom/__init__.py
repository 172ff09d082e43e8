"""Federated fine-tuning of language models whose capacity is a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedloom.version import __version__

if TYPE_CHECKING:
    from fedloom.config import load_config as load_config
    from fedloom.experiment import run as run
    from fedloom.methods import METHODS as METHODS
    from fedloom.model import load_model as load_model

_HOMES = {
    "run": "fedloom.experiment",
    "load_config": "fedloom.config",
    "load_model": "fedloom.model",
    "METHODS": "fedloom.methods",
}
__all__ = ["METHODS", "__version__", "load_config", "load_model", "run"]


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that ``import fedloom`` and ``fedloom --help`` stay quick."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedloom' has no attribute {name!r}")
