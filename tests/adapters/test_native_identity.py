"""The hash of a model with experts of its own changes with whatever changes its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_models import inputs, make_native
from torch import Tensor
from transformers import PreTrainedModel

from fedloom.backbones.load import parameter_hash


@torch.no_grad()
def answers(model: PreTrainedModel, family: str) -> Tensor:
    """Return logits; a decoder begins with its own first token."""
    given = inputs(family)
    if "decoder_input_ids" in given:
        given = {"input_ids": given["input_ids"], "labels": given["decoder_input_ids"]}
    return model(**given).logits


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("mixtral", {}, {"num_experts_per_tok": 1}),
        ("olmoe", {}, {"norm_topk_prob": True}),
        ("olmoe", {}, {"clip_qkv": 0.05}),
        ("qwen2_moe", {}, {"norm_topk_prob": True}),
        ("qwen3_moe", {}, {"norm_topk_prob": True}),
        ("deepseek_v2", {}, {"routed_scaling_factor": 2.0}),
        ("deepseek_v2", {"topk_group": 1}, {"topk_method": "group_limited_greedy"}),
        ("deepseek_v3", {}, {"routed_scaling_factor": 2.0}),
        ("deepseek_v3", {}, {"norm_topk_prob": False}),
        ("deepseek_v3", {}, {"topk_group": 1}),
        ("deepseek_v3", {"topk_group": 1}, {"n_group": 1}),
        ("deepseek_v3", {}, {"rope_interleave": False}),
        ("switch_transformers", {}, {"expert_capacity": 1}),
        ("switch_transformers", {}, {"router_dtype": "bfloat16"}),
        ("switch_transformers", {}, {"decoder_start_token_id": 1}),
        ("switch_transformers", {}, {"dense_act_fn": "gelu"}),
        ("switch_transformers", {"relative_attention_num_buckets": 8}, {"relative_attention_max_distance": 8}),
    ],
)
def test_the_hash_knows_what_equal_experts_compute(family: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Each pair has equal weights and answers otherwise."""
    one, other = make_native(family, **first), make_native(family, **first | second)
    other.load_state_dict(one.state_dict())
    assert parameter_hash(one) == parameter_hash(make_native(family, **first))
    assert parameter_hash(one) != parameter_hash(other)  # first: Switch casts a router's parameters when it is used
    assert not torch.allclose(answers(one, family), answers(other, family), atol=1e-5)


def test_the_hash_knows_a_bias_that_chooses_experts_and_is_no_parameter() -> None:
    one, other = make_native("deepseek_v3"), make_native("deepseek_v3")
    (bias,) = (b for n, b in other.named_buffers() if n.endswith("e_score_correction_bias"))
    assert parameter_hash(one) == parameter_hash(other)
    bias.copy_(torch.tensor([3.0, -2.0, 1.0, 0.0]))
    assert not torch.allclose(answers(one, "deepseek_v3"), answers(other, "deepseek_v3"), atol=1e-5)
    assert parameter_hash(one) != parameter_hash(other)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [("switch_transformers", "num_heads", 4), ("switch_transformers", "d_kv", 4), ("deepseek_v3", "scoring_func", "x")],
)
def test_the_hash_knows_fields_that_no_other_pair_shows(family: str, field: str, value: Any) -> None:
    model = make_native(family)
    before = parameter_hash(model)
    setattr(model.config, field, value)
    assert parameter_hash(model) != before


def test_a_field_that_says_nothing_is_as_good_as_none() -> None:
    model = make_native("olmoe")
    before = parameter_hash(model)
    model.config.scoring_func = None
    assert parameter_hash(model) == before
