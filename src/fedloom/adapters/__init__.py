"""Model surgery: mixtures of LoRA experts on frozen linear layers. Knows models, not federation."""

from fedloom.adapters.inject import DEFAULT_TARGETS, Grafted, Slot, default_targets, graft, target_modules
from fedloom.adapters.moe_lora import Gates, MoELoRALinear
from fedloom.adapters.router import Router, route
from fedloom.adapters.state import check_expert_name, check_tensors, initial_tensors

__all__ = [
    "DEFAULT_TARGETS",
    "Gates",
    "Grafted",
    "MoELoRALinear",
    "Router",
    "Slot",
    "check_expert_name",
    "check_tensors",
    "default_targets",
    "graft",
    "initial_tensors",
    "route",
    "target_modules",
]
