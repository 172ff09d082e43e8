"""A backbone's hash, and the cache keyed by it, change with whatever changes its numbers."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from fedloom.backbones.features import prompt_features
from fedloom.backbones.load import COMPUTING, Backbone, parameter_hash
from fedloom.data.tokenize import prompt_text
from small_world import byte_tokenizer, small_backbone, small_llama


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
    fields = {key: value for key, value in model.config.to_dict().items() if key in COMPUTING}
    expected = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for name, weight in sorted(model.named_parameters()):
        shape = ", ".join(map(str, weight.shape)) + ("," if weight.dim() == 1 else "")
        expected.update(f"{name}|torch.float32|({shape})|".encode() + weight.numpy().tobytes())
    assert parameter_hash(model) == expected.hexdigest()


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
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }} {{ strftime_now('%Y-%m-%d') }} {{ messages[0]['content'] }}"
    )
    assert prompt_text([("user", "hi")], tokenizer) == "26 Jul 2024 26 Jul 2024 hi"
