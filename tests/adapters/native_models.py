"""Tiny random models of every family with native experts: widths all differ, so that no transposition goes unseen."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

HIDDEN, WIDTH, EXPERTS = 16, 12, 4

_CAUSAL = {
    "vocab_size": 40,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_QWEN = _CAUSAL | {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "intermediate_size": 20, "head_dim": 8}
_DEEPSEEK = _CAUSAL | {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 2,
    "moe_intermediate_size": WIDTH,
    "intermediate_size": 20,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "switch_transformers": {
        "vocab_size": 40,
        "d_model": HIDDEN,
        "d_kv": 8,
        "d_ff": WIDTH,
        "num_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_decoder_layers": 2,
        "num_sparse_decoder_layers": 1,
        "num_heads": 2,
        "num_experts": EXPERTS,
        "expert_capacity": 64,
        "router_jitter_noise": 0.0,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "mixtral": _CAUSAL | {"num_local_experts": EXPERTS, "tie_word_embeddings": True},
    "olmoe": _CAUSAL | {"num_experts": EXPERTS},
    "qwen2_moe": _QWEN | {"shared_expert_intermediate_size": 10},
    "qwen3_moe": _QWEN,
    "deepseek_v2": _DEEPSEEK | {"topk_method": "greedy"},
    "deepseek_v3": _DEEPSEEK,
}
FAMILIES = list(CONFIGS)
FUSED = [family for family in FAMILIES if family != "switch_transformers"]

#: Family → side of each mixture layer, by path.
LAYERS = {
    "switch_transformers": {"encoder.block.1.layer.1.mlp": "encoder", "decoder.block.1.layer.2.mlp": "decoder"},
    "deepseek_v2": {"model.layers.1.mlp": "causal"},
    "deepseek_v3": {"model.layers.1.mlp": "causal"},
}


def layers_of(family: str) -> dict[str, str]:
    return LAYERS.get(family, {"model.layers.0.mlp": "causal", "model.layers.1.mlp": "causal"})


def make_native(family: str, seed: int = 7, **changes: Any) -> PreTrainedModel:
    """Return a tiny model, in evaluation mode; routers are drawn too, where transformers begins them at zero."""
    config = AutoConfig.for_model(family, **(CONFIGS[family] | changes))
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 1.0 if name.endswith(("gate.weight", "router.classifier.weight")) else 0.2
                torch.nn.init.normal_(parameter, std=scale)
    return model.eval()


def inputs(family: str) -> dict[str, Tensor]:
    """Return a batch of three, padded on the right: ids and masks for encoder and decoder, or for a causal model."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 40, (3, 9), generator=draw)
    mask = (torch.arange(9) < torch.tensor([[9], [6], [4]])).long()
    if family != "switch_transformers":
        return {"input_ids": ids * mask, "attention_mask": mask}
    decoder_mask = (torch.arange(5) < torch.tensor([[2], [5], [3]])).long()
    decoder_ids = torch.randint(3, 40, (3, 5), generator=draw) * decoder_mask
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "decoder_input_ids": decoder_ids,
        "decoder_attention_mask": decoder_mask,
    }


def logits(model: PreTrainedModel, family: str) -> Tensor:
    return model(**inputs(family)).logits
