"""Where a model's positions end: what it cannot compute is refused before training and before an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import (  # fmt: skip
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from fedloom.backbones.context import position_limit
from fedloom.backbones.load import Backbone
from fedloom.config import parse_config
from fedloom.data.tokenize import encode_prompt
from fedloom.errors import ConfigError
from fedloom.model import LoadedModel, evaluate_files
from fedloom.runtime.client import Workbench
from fedloom.runtime.events import Observer
from fedloom.types import AdapterSpec
from fedloom.workload import load_data, read_data
from small_world import small_backbone, small_llama, small_switch, small_tokenizer

#: "### Instruction:\n…\n\n### Response:\n" around a prompt, one id per byte.
AROUND = 33
SMALL: dict[str, Any] = {"vocab_size": 258, "eos_token_id": 256, "bos_token_id": None, "pad_token_id": 257}


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=16, n_layer=1, n_head=2, **SMALL)).eval()


def opt() -> OPTForCausalLM:
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_hidden_layers": 1}
    return OPTForCausalLM(OPTConfig(max_position_embeddings=64, num_attention_heads=2, **sizes, **SMALL)).eval()


def gptj() -> GPTJForCausalLM:
    return GPTJForCausalLM(GPTJConfig(n_positions=64, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, **SMALL)).eval()


def bloom() -> BloomForCausalLM:
    return BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=2, **SMALL)).eval()


def backbone() -> Backbone:
    return Backbone("small-gpt2", gpt2().requires_grad_(False), small_tokenizer(), "")


@pytest.mark.parametrize("make", [gpt2, opt, gptj])
@torch.no_grad()
def test_the_limit_is_where_the_model_itself_ends(make: Any) -> None:
    model = make()
    assert position_limit(model) == 64
    assert model(input_ids=torch.ones(1, 64, dtype=torch.int64)).logits.shape == (1, 64, 258)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.ones(1, 65, dtype=torch.int64))


@pytest.mark.parametrize("make", [small_llama, small_switch, bloom])
def test_positions_that_are_computed_have_no_end(make: Any) -> None:
    assert position_limit(make()) is None


def loaded(folder: Path, backbone: Backbone, prompt: int = 5, **plain: Any) -> list[str]:
    """Load one client and one test row with a prompt of so many letters; return what was said."""
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "x" * prompt, "response": "y"}) + "\n")
    length = {"max_length": plain.pop("max_length")}
    data = {"clients": {"ann": str(file)}, "test": {"mine": str(file)}} | length
    observer = Mock(spec=Observer)
    config = parse_config({"data": data, **plain})
    load_data(config, read_data(config), backbone, observer)
    return [call.args[0] for call in observer.say.call_args_list]


def test_a_length_beyond_the_table_is_refused_before_training(tmp_path: Path) -> None:
    loss_only = {"evaluation": {"generate": False}}
    loaded(tmp_path, backbone(), max_length=64, **loss_only)
    with pytest.raises(ConfigError, match=r"data\.max_length is 65, but the backbone 'small-gpt2' has .* 64 tokens"):
        loaded(tmp_path, backbone(), max_length=65, **loss_only)


def test_a_length_beyond_what_rotary_positions_were_trained_on_is_said(tmp_path: Path) -> None:
    assert loaded(tmp_path, small_backbone(), max_length=512) == []
    assert loaded(tmp_path, small_backbone(), max_length=513) == [
        "data.max_length is 513, beyond the 512 tokens that the backbone 'small' was trained on."
    ]
    assert loaded(tmp_path, small_backbone(native=True), max_length=4096) == []


def test_test_rows_that_could_not_be_answered_after_training_are_refused_before_it(tmp_path: Path) -> None:
    """An answer to a task that is not known has up to 64 tokens: none is left for a prompt."""
    with pytest.raises(ConfigError, match=r"38 tokens .* up to 64 need 102 positions, .*has 64\..*'mine' cannot be"):
        loaded(tmp_path, backbone(), max_length=64)


def test_an_answer_beyond_the_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Workbench(backbone(), AdapterSpec(("c_attn",), rank=2), None)
    model = LoadedModel({"routing": "off", "max_length": 64}, bench)
    room = 64 - AROUND - 5
    assert isinstance(model.generate("x" * 5, max_new_tokens=room), str)
    with pytest.raises(ConfigError, match=rf"38 tokens and an answer of up to {room + 1} need 65 positions.*has 64"):
        model.generate("x" * 5, max_new_tokens=room + 1)
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"prompt": "xxxxx", "response": "y"}) + "\n")
    monkeypatch.setattr("fedloom.model.load_model", lambda *_, **__: model)
    with pytest.raises(ConfigError, match=r"need 102 positions.*Leave mine out, or measure the loss only"):
        evaluate_files(tmp_path, {"mine": file})
    assert "macro" in evaluate_files(tmp_path, {"mine": file}, generate=False)["loss"]


def test_an_answer_beyond_what_rotary_positions_were_trained_on_is_said() -> None:
    model = LoadedModel({"routing": "off"}, Workbench(small_backbone(), AdapterSpec(("q_proj",), rank=2), None))
    said: list[str] = []
    model.generate("x" * (511 - AROUND), max_new_tokens=1, say=said.append)
    assert said == []
    model.generate("x" * (512 - AROUND), max_new_tokens=1, say=said.append)
    (words,) = said
    assert words.startswith(
        "a prompt of 512 tokens and an answer of up to 1 are beyond the 512 tokens that the backbone"
    )
    with pytest.warns(UserWarning, match="beyond the 512 tokens"):
        model.generate("x" * (512 - AROUND), max_new_tokens=1)


def test_messages_in_place_of_a_prompt_are_refused() -> None:
    model = LoadedModel({"routing": "off"}, Workbench(small_backbone(), AdapterSpec(("q_proj",), rank=2), None))
    with pytest.raises(ConfigError, match=r"of type dict\. .*give the content of the user's"):
        model.generate([{"role": "user", "content": "x"}])  # type: ignore[list-item]


def test_the_tokenizer_foretells_no_indexing_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its maximum is 8 here; ``transformers`` says it once for each tokenizer."""
    warned = Mock()
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", warned)
    tokenizer = small_tokenizer()
    tokenizer.model_max_length = 8
    assert len(encode_prompt([("user", "x" * 5)], tokenizer)) == 5 + AROUND
    assert not warned.called
