"""One file per paper. ``METHODS`` is the registry: a method exists by its line here."""

from __future__ import annotations

from fedloom.methods.base import Method
from fedloom.methods.centralised import Centralised
from fedloom.methods.fedalt import FedALT
from fedloom.methods.fedex_lora import FedExLoRA
from fedloom.methods.fedit import FedIT
from fedloom.methods.fedlease import FedLEASE
from fedloom.methods.fedlease_adaptive import FedLEASEAdaptive
from fedloom.methods.fedrouter import FedRouter
from fedloom.methods.fedweave import FedWeave
from fedloom.methods.fedweave_wo_client_router import FedWeaveWithoutClientRouter
from fedloom.methods.fedweave_wo_prototype_expert import FedWeaveWithoutPrototypeExpert
from fedloom.methods.flexlora import FlexLoRA
from fedloom.methods.flora import FLoRA
from fedloom.methods.local import Local
from fedloom.methods.lora_fair import LoRAFair

METHODS: dict[str, type[Method]] = {
    "centralised": Centralised,
    "fedalt": FedALT,
    "fedex_lora": FedExLoRA,
    "fedit": FedIT,
    "fedlease": FedLEASE,
    "fedlease_adaptive": FedLEASEAdaptive,
    "fedrouter": FedRouter,
    "fedweave": FedWeave,
    "fedweave_wo_client_router": FedWeaveWithoutClientRouter,
    "fedweave_wo_prototype_expert": FedWeaveWithoutPrototypeExpert,
    "flexlora": FlexLoRA,
    "flora": FLoRA,
    "local": Local,
    "lora_fair": LoRAFair,
}
