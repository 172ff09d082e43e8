"""Every architecture with default targets: learns, saves, reloads, and PEFT reads the same expert."""

import json

import pytest
import torch
from peft import PeftModel

from fedloom.adapters import default_targets, graft
from fedloom.adapters.peft_io import load_expert, save_expert
from fedloom.adapters.state import pick_expert, place_expert
from fedloom.types import AdapterSpec

ARCHITECTURES = ["llama-untied", "llama-tied", "gemma2", "qwen2", "qwen3", "mistral", "phi3", "gpt2"]


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_m8_one_step_then_save_reload_and_peft_agree_offline(tiny, token_ids, tmp_path, name: str) -> None:
    model = tiny(name)
    bare = model(token_ids).logits
    spec = AdapterSpec(default_targets(model.config), rank=3, alpha=7.5, dropout=0.0, experts=2, router_hidden=6)
    grafted = graft(model, spec)
    features = torch.randn(4, 32)
    with grafted.routing(None):
        assert torch.equal(model(token_ids).logits, bare)

    grafted.train()
    optimizer = torch.optim.AdamW([*grafted.expert_parameters(), *grafted.router_parameters()], lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with grafted.routing(grafted.route(features, "soft")):
            loss = model(token_ids, labels=token_ids).loss
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert all(layer.B.flatten(1).any(dim=1).all() for layer in grafted.layers.values())

    grafted.eval()
    tensors = grafted.read()
    loaded = {key: t for key, t in tensors.items() if key.startswith("router/")}
    for m in range(2):
        folder = tmp_path / "experts" / str(m)
        save_expert(folder, pick_expert(tensors, m), spec, backbone="tiny/base", fan_in_fan_out=grafted.fan_in_fan_out)
        bare_tensors, fields = load_expert(folder, grafted.shapes)
        assert (fields["r"], fields["lora_alpha"], fields["fan_in_fan_out"]) == (3, 7.5, name == "gpt2")
        loaded |= place_expert(bare_tensors, m)

    fresh = graft(tiny(name), spec)
    fresh.load(loaded)
    fresh.eval()
    with torch.no_grad():
        gates = grafted.route(features, "soft")
        with grafted.routing(gates), fresh.routing(gates):
            assert torch.equal(model(token_ids).logits, fresh.model(token_ids).logits)
        for m in range(2):
            theirs = PeftModel.from_pretrained(tiny(name), tmp_path / "experts" / str(m)).eval()
            with fresh.routing(torch.full((4,), m)):
                ours = fresh.model(token_ids).logits
            torch.testing.assert_close(theirs(token_ids).logits, ours, rtol=0, atol=1e-5)
            assert not torch.allclose(ours, bare, atol=1e-3)
    assert torch.equal(grafted.ungraft()(token_ids).logits, bare)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_adapter_that_peft_wrote_loads(tiny, token_ids, tmp_path, name: str) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny(name)
    targets = default_targets(model.config)
    config = LoraConfig(r=3, lora_alpha=7.5, target_modules=list(targets), init_lora_weights=False)
    config.fan_in_fan_out = name == "gpt2"
    theirs = get_peft_model(model, config).eval()
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    spec = AdapterSpec(targets, rank=3, alpha=7.5)
    ours = graft(tiny(name), spec)
    tensors, fields = load_expert(tmp_path / "theirs", ours.shapes)
    assert fields["target_modules"] == list(targets) or set(fields["target_modules"]) == set(targets)
    ours.load(place_expert(tensors, 0))
    with torch.no_grad():
        torch.testing.assert_close(ours.model(token_ids).logits, theirs(token_ids).logits, rtol=0, atol=1e-5)


def test_the_config_is_plain_json_that_names_the_backbone(tiny, tmp_path) -> None:
    spec = AdapterSpec(("q_proj", "v_proj"), rank=3, alpha=7.5)
    grafted = graft(tiny("llama"), spec)
    save_expert(tmp_path / "0", pick_expert(grafted.read(), 0), spec, backbone="org/model")
    assert sorted(p.name for p in (tmp_path / "0").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    fields = json.loads((tmp_path / "0" / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": 3, "lora_alpha": 7.5}
    assert expected.items() <= fields.items()
    assert fields["base_model_name_or_path"] == "org/model"
    assert fields["target_modules"] == ["q_proj", "v_proj"]
