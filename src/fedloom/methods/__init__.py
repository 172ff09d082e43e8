"""One file per paper. ``METHODS`` is the registry: a method exists by its line here."""

from __future__ import annotations

from fedloom.methods.base import Method
from fedloom.methods.centralised import Centralised
from fedloom.methods.fcmoe import FCMoE
from fedloom.methods.fedalt import FedALT
from fedloom.methods.fedavg_moe import FedAvgMoE
from fedloom.methods.fedex_lora import FedExLoRA
from fedloom.methods.fedit import FedIT
from fedloom.methods.fedlease import FedLEASE
from fedloom.methods.fedlease_adaptive import FedLEASEAdaptive
from fedloom.methods.fedmoe import FedMoE
from fedloom.methods.fedprox import FedProx
from fedloom.methods.fedrouter import FedRouter
from fedloom.methods.fedsa_lora import FedSALoRA
from fedloom.methods.fedweave import FedWeave
from fedloom.methods.fedweave_wo_client_router import FedWeaveWithoutClientRouter
from fedloom.methods.fedweave_wo_prototype_expert import FedWeaveWithoutPrototypeExpert
from fedloom.methods.ffa_lora import FFALoRA
from fedloom.methods.flexlora import FlexLoRA
from fedloom.methods.flora import FLoRA
from fedloom.methods.local import Local
from fedloom.methods.lora_fair import LoRAFair
from fedloom.methods.pfl_moe import PFLMoE
from fedloom.methods.rolora import RoLoRA
from fedloom.methods.scaffold import Scaffold

METHODS: dict[str, type[Method]] = {
    "centralised": Centralised,
    "fcmoe": FCMoE,
    "fedalt": FedALT,
    "fedavg_moe": FedAvgMoE,
    "fedex_lora": FedExLoRA,
    "fedit": FedIT,
    "fedlease": FedLEASE,
    "fedlease_adaptive": FedLEASEAdaptive,
    "fedmoe": FedMoE,
    "fedprox": FedProx,
    "fedrouter": FedRouter,
    "fedsa_lora": FedSALoRA,
    "fedweave": FedWeave,
    "fedweave_wo_client_router": FedWeaveWithoutClientRouter,
    "fedweave_wo_prototype_expert": FedWeaveWithoutPrototypeExpert,
    "ffa_lora": FFALoRA,
    "flexlora": FlexLoRA,
    "flora": FLoRA,
    "local": Local,
    "lora_fair": LoRAFair,
    "pfl_moe": PFLMoE,
    "rolora": RoLoRA,
    "scaffold": Scaffold,
}
