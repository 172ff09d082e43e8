"""A backbone's hash: sha256 over what it computes, so that sites, caches and model folders know it again."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

#: Configuration that changes what the same parameters compute. Named one by one, because a newer ``transformers`` adds
#: fields of its own and must not make a model another one.
COMPUTING = (
    "model_type",
    "hidden_act",
    "activation_function",
    "rms_norm_eps",
    "layer_norm_epsilon",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "sliding_window",
    "layer_types",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "scale_attn_by_inverse_layer_idx",
)

#: The same of models with experts of their own: how these are chosen and weighed. Hashed only where set, so that other
#: models keep their hash.
COMPUTING_EXPERTS = (
    "num_experts_per_tok",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "rope_interleave",
    "clip_qkv",
    "expert_capacity",
    "router_dtype",
)

#: What encoder-decoders call their own way; other models have some of these names for something else.
COMPUTING_BOTH_SIDES = (
    "decoder_start_token_id",
    "dense_act_fn",
    "num_heads",
    "d_kv",
    "relative_attention_max_distance",
)

#: Fields that few families have, each with the value that most models give it. That is not hashed, so that those models
#: keep the hash they had before the field was named here. (Not a class's own default: ``transformers`` may change it.)
COMPUTING_UNUSUAL: dict[str, Any] = {
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_chunk_size": None,
    "attention_layers": None,
    "attention_multiplier": 1.0,
    "attn_temperature_tuning": False,
    "do_layer_norm_before": True,
    "embedding_multiplier": 1.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-5,
    "logits_scaling": 1.0,
    "max_window_layers": 28,
    "mlp_hidden_act": None,
    "no_rope_layers": None,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "parallel_attn": True,
    "reorder_and_upcast_attn": False,
    "residual_multiplier": 1.0,
    "rotary_dim": 64,
    "scale_attn_weights": True,
    "scale_embedding": False,
    "swiglu_limit": 7.0,
    "use_bidirectional_attention": False,
    "use_parallel_residual": True,
    "use_sliding_window": False,
    "window_size": 256,
}


def parameter_hash(model: nn.Module) -> str:
    """Return sha256 over what the model computes.

    That is the ``COMPUTING…`` fields of its configuration, and name, dtype, shape and bytes of each parameter and of
    each buffer that is saved with them (DeepSeek-V3's bias on the choice of experts).
    """
    digest = hashlib.sha256()
    config = model.config.to_dict()  # type: ignore[operator, union-attr]
    fields = {key: config[key] for key in COMPUTING if key in config}
    apart = COMPUTING_BOTH_SIDES if config.get("is_encoder_decoder") else ()
    fields |= {key: config[key] for key in (*COMPUTING_EXPERTS, *apart) if config.get(key) is not None}
    fields |= {key: config[key] for key, usual in COMPUTING_UNUSUAL.items() if config.get(key, usual) != usual}
    digest.update(json.dumps(fields, sort_keys=True).encode())
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    for name, tensor in sorted((dict(model.named_parameters()) | buffers).items()):
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        digest.update(value.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
