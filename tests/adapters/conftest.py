"""Tiny random models of every architecture with default targets, and of OPT. Nothing here reaches for a network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import socket
from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_LLAMA_LIKE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CONFIGS = {
    "llama": _LLAMA_LIKE,
    "llama-untied": _LLAMA_LIKE | {"tie_word_embeddings": False},
    "llama-tied": _LLAMA_LIKE | {"tie_word_embeddings": True},
    "gemma2": _LLAMA_LIKE | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "qwen2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE | {"head_dim": 12},
    "mistral": _LLAMA_LIKE,
    "phi3": _LLAMA_LIKE,
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1},
    "opt": {
        "vocab_size": 64,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the same tiny random model at every call, in evaluation mode."""
    config = AutoConfig.for_model(name.partition("-")[0], **_CONFIGS[name])
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval()


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    return make_model


@pytest.fixture
def token_ids() -> torch.Tensor:
    """Token ids (4, 9)."""
    return torch.randint(3, 64, (4, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("network call")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
