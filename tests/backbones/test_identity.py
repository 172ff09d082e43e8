"""A backbone's hash, and the cache keyed by it, change with whatever changes its numbers."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GraniteConfig,
    Qwen2Config,
)

from fedloom.backbones.features import prompt_features
from fedloom.backbones.hash import COMPUTING, parameter_hash
from fedloom.backbones.load import Backbone, load_backbone
from fedloom.data.tokenize import prompt_text
from small_world import small_backbone, small_llama, small_tokenizer


def test_the_hash_knows_parameters_and_what_the_configuration_computes() -> None:
    model = small_llama()
    assert parameter_hash(model) == parameter_hash(copy.deepcopy(model))
    other = copy.deepcopy(model)
    other.config.rms_norm_eps = 1.0
    assert parameter_hash(other) != parameter_hash(model)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved.model.norm.weight[0] += 1e-3
    assert parameter_hash(moved) != parameter_hash(model)
    renamed = copy.deepcopy(model)
    renamed.config._name_or_path = "elsewhere"
    assert parameter_hash(renamed) == parameter_hash(model)


def small_neo() -> GPTNeoForCausalLM:
    """Return a model whose heads are called as those of encoder-decoders."""
    sizes = {"hidden_size": 8, "num_heads": 2, "num_layers": 2, "vocab_size": 16, "max_position_embeddings": 8}
    return GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]])).requires_grad_(False)


@pytest.mark.parametrize("make", [small_llama, small_neo])
def test_a_model_without_experts_of_its_own_is_hashed_by_what_all_models_have(make: Any) -> None:
    model = make()
    # GPT-Neo alone says layer by layer how far attention looks back.
    named = (*COMPUTING, "attention_layers")
    fields = {key: value for key, value in model.config.to_dict().items() if key in named}
    expected = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for name, weight in sorted(model.named_parameters()):
        shape = ", ".join(map(str, weight.shape)) + ("," if weight.dim() == 1 else "")
        expected.update(f"{name}|torch.float32|({shape})|".encode() + weight.numpy().tobytes())
    assert parameter_hash(model) == expected.hexdigest()


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.5}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("kind", "field", "usual", "other"),
    [
        (Gemma2Config, "hidden_activation", "gelu_pytorch_tanh", "relu"),
        (GPT2Config, "scale_attn_weights", True, False),
        (GraniteConfig, "embedding_multiplier", 1.0, 12.0),
        (GraniteConfig, "attention_multiplier", 1.0, 0.25),
        (GraniteConfig, "residual_multiplier", 1.0, 0.5),
        (GraniteConfig, "logits_scaling", 1.0, 4.0),
    ],
)
def test_two_models_that_compute_differently_from_the_same_parameters_have_two_hashes(
    kind: Any, field: str, usual: Any, other: Any
) -> None:
    sizes = {"head_dim": 16} | SMALL
    models = []
    for value in (usual, other):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(kind(**sizes, **{field: value})).eval())
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        one, two = (model(torch.arange(8)[None]).logits for model in models)
    assert not torch.allclose(one, two)
    assert parameter_hash(models[0]) != parameter_hash(models[1])


def test_a_field_with_its_usual_value_changes_no_hash() -> None:
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SMALL))
    before = parameter_hash(model)
    model.config.residual_multiplier = 1.0
    assert parameter_hash(model) == before
    model.config.residual_multiplier = 0.5
    assert parameter_hash(model) != before


@pytest.mark.parametrize(("name", "starts"), [("tiny", "ada9facf7b731a40"), ("tiny-switch", "4e78e68403cde5c3")])
def test_the_shipped_backbones_keep_the_hashes_that_committed_results_name(name: str, starts: str) -> None:
    assert load_backbone(name, dtype="float32", device="cpu").hash.startswith(starts)


def test_features_of_another_model_are_not_taken_from_the_cache(tmp_path: Path) -> None:
    first = small_backbone()
    config = copy.deepcopy(first.model.config)
    config.rms_norm_eps = 1.0
    changed = type(first.model)(config).eval()
    changed.load_state_dict(first.model.state_dict())
    second = Backbone("changed", changed, first.tokenizer, parameter_hash(changed))
    prompts = [[3, 4, 5], [6, 7]]
    cached = prompt_features(first, prompts, cache=tmp_path)
    assert torch.equal(prompt_features(first, prompts, cache=tmp_path), cached)
    fresh = prompt_features(second, prompts)
    assert torch.equal(prompt_features(second, prompts, cache=tmp_path), fresh)
    assert not torch.allclose(fresh, cached)


def test_a_template_that_writes_the_date_gives_the_same_prompt_every_day() -> None:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }} {{ strftime_now('%Y-%m-%d') }} {{ messages[0]['content'] }}"
    )
    assert prompt_text([("user", "hi")], tokenizer) == "26 Jul 2024 26 Jul 2024 hi"
