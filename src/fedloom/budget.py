"""Parameters and bytes of a method on an architecture, from the architecture alone; nothing is downloaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedloom.adapters.inject import default_targets, target_modules
from fedloom.adapters.state import expected_shapes
from fedloom.errors import ConfigError, nearest
from fedloom.methods import METHODS
from fedloom.types import AdapterSpec

#: What decides the number of parameters, as published in the models' configurations.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama-3.2-3b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "gemma-2-2b": {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Budget:
    """Trainable parameters and float32 bytes (FedWeave, Table 5 and Appendix B).

    Attributes:
        lora: parameters of all experts.
        router: parameters of all routers.
        total: what the server keeps, and the most a client sends per round.
        signature: values of one bucket's signature, the B factors of one expert; 0 for methods without a probe.
    """

    backbone: str
    method: str
    experts: int
    rank: int
    backbone_parameters: int
    lora: int
    router: int
    total: int
    signature: int

    @property
    def round_bytes(self) -> int:
        return 4 * self.total

    def to_plain(self) -> dict[str, Any]:
        return asdict(self) | {"round_bytes": self.round_bytes, "signature_bytes": 4 * self.signature}


def budget(backbone: str, method: str, experts: int, rank: int | None = None) -> Budget:
    """Count parameters on the meta device.

    Args:
        backbone: a name of ``ARCHITECTURES``, or a folder or hub name whose configuration can be read.
        method: a registered method.
        experts: number of experts, for methods that have more than one.
        rank: rank per expert; default the method's own.

    Raises:
        ConfigError: an unknown method or backbone.
    """
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}.{nearest(method, METHODS)}")
    if experts < 1:
        raise ConfigError(f"--experts is {experts}; it must be at least 1.")
    config, model = architecture(backbone)
    targets = default_targets(config)
    shapes = target_modules(model, targets)
    kind = METHODS[method]
    plain = AdapterSpec(targets, rank or kind.default_rank)
    spec = kind().deployed(plain, experts)
    sizes = {n: torch.Size(s).numel() for n, s in expected_shapes(spec, shapes, config.hidden_size).items()}
    lora = sum(n for name, n in sizes.items() if name.startswith("experts/"))
    router = sum(n for name, n in sizes.items() if not name.startswith("experts/"))
    signature = sum(n for name, n in sizes.items() if name.startswith("experts/0/") and name.endswith(".lora_B"))
    return Budget(
        backbone=backbone,
        method=method,
        experts=spec.experts,
        rank=spec.rank,
        backbone_parameters=sum(p.numel() for p in model.parameters()),
        lora=lora,
        router=router,
        total=lora + router,
        signature=signature if kind.has_probe else 0,
    )


def architecture(backbone: str) -> tuple[Any, Any]:
    """Return a backbone's transformers configuration and its model on the meta device.

    Raises:
        ConfigError: the name is unknown and no configuration can be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = _config(backbone, AutoConfig)
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config)


def _config(backbone: str, loader: Any) -> Any:
    if backbone in ARCHITECTURES:
        fields = dict(ARCHITECTURES[backbone])
        return loader.for_model(fields.pop("model_type"), **fields)
    if backbone == "tiny":
        from fedloom.backbones.load import source_of

        return loader.from_pretrained(source_of("tiny"))
    try:
        return loader.from_pretrained(backbone)
    except (OSError, ValueError) as error:
        raise ConfigError(f"unknown backbone {backbone!r}.{nearest(backbone, [*ARCHITECTURES, 'tiny'])}") from error
