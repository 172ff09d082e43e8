"""Adapter folders: what is refused, and that a failed write harms nothing."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedloom.adapters.peft_io import load_expert, save_expert
from fedloom.errors import AdapterError
from fedloom.types import AdapterSpec

SHAPES = {"model.layers.0.q_proj": (6, 4), "model.layers.1.q_proj": (5, 4)}
SPEC = AdapterSpec(("q_proj",), rank=2, alpha=3.0)


def bare() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {}
    for path, (out_features, in_features) in SHAPES.items():
        tensors[f"{path}.lora_A"] = torch.randn(2, in_features)
        tensors[f"{path}.lora_B"] = torch.randn(out_features, 2)
    return tensors


@pytest.fixture
def folder(tmp_path):
    save_expert(tmp_path / "e0", bare(), SPEC, backbone="b")
    return tmp_path / "e0"


def test_round_trip_is_bitwise_under_peft_keys(folder) -> None:
    loaded, fields = load_expert(folder, SHAPES)
    assert loaded.keys() == bare().keys()
    assert all(torch.equal(loaded[name], t) for name, t in bare().items())
    assert fields["r"] == 2
    assert "base_model.model.model.layers.1.q_proj.lora_B.weight" in load_file(folder / "adapter_model.safetensors")


def test_saving_twice_gives_the_same_bytes(folder, tmp_path) -> None:
    save_expert(tmp_path / "e1", bare(), SPEC, backbone="b")
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "e1" / file.name).read_bytes()


def test_m1_saving_strips_wrapper_prefixes(tmp_path) -> None:
    wrapped = {f"module._orig_mod.{name}": t for name, t in bare().items()}
    save_expert(tmp_path / "e0", wrapped, SPEC, backbone="b")
    loaded, _ = load_expert(tmp_path / "e0", SHAPES)
    assert all(torch.equal(loaded[name], t) for name, t in bare().items())


@pytest.mark.parametrize("prefix", ["base_model.model._orig_mod.", "module._orig_mod.base_model.model."])
def test_m1_loading_strips_wrapper_prefixes(folder, prefix: str) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({k.replace("base_model.model.", prefix): t for k, t in load_file(file).items()}, file)
    loaded, _ = load_expert(folder, SHAPES)
    assert all(torch.equal(loaded[name], t) for name, t in bare().items())


@pytest.mark.parametrize("name", ["lora", "a.b", "base"])
def test_m6_a_folder_name_that_cannot_name_an_adapter_is_refused(tmp_path, name: str) -> None:
    with pytest.raises(AdapterError, match="cannot name an expert"):
        save_expert(tmp_path / name, bare(), SPEC, backbone="b")
    assert not (tmp_path / name).exists()


def test_m6_a_parent_path_is_refused(tmp_path) -> None:
    with pytest.raises(AdapterError, match="cannot name an expert"):
        save_expert(f"{tmp_path}/x/..", bare(), SPEC, backbone="b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"lm_head.weight": torch.zeros(3, 3)}), "refused: lm_head.weight"),
        (lambda t: t.update({"model.embed_tokens.lora_A": torch.zeros(2, 3)}), "refused: model.embed_tokens"),
        (lambda t: t.pop("model.layers.0.q_proj.lora_B"), "needs model.layers.0.q_proj.lora_B"),
        (lambda t: t.update({"model.layers.0.q_proj.lora_A": torch.zeros(3, 4)}), r"is \(3, 4\), expected \(2, 4\)"),
    ],
)
def test_s2_saving_refuses_anything_but_the_expert(tmp_path, change, message: str) -> None:
    tensors = bare()
    change(tensors)
    with pytest.raises(AdapterError, match=message):
        save_expert(tmp_path / "e0", tensors, SPEC, backbone="b")
    assert not (tmp_path / "e0").exists()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("base_model.model.lm_head.weight", "not a LoRA tensor"),
        ("base_model.model.model.layers.0.k_proj.lora_A.weight", "unknown: model.layers.0.k_proj.lora_A"),
        ("model.layers.0.q_proj.lora_A.weight", "not a LoRA tensor"),
        ("base_model.model.model.layers.0.q_proj.lora_magnitude_vector", "not a LoRA tensor"),
    ],
)
def test_m2_loading_refuses_foreign_keys(folder, key: str, message: str) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {key: torch.zeros(2, 4)}, file)
    with pytest.raises(AdapterError, match=message):
        load_expert(folder, SHAPES)


def test_m2_loading_names_missing_and_misshapen_keys(folder) -> None:
    with pytest.raises(AdapterError, match=r"missing: model\.layers\.2\.q_proj\.lora_A, model"):
        load_expert(folder, SHAPES | {"model.layers.2.q_proj": (5, 4)})
    with pytest.raises(AdapterError, match=r"model.layers.1.q_proj.lora_B is \(5, 2\), expected \(7, 2\)"):
        load_expert(folder, SHAPES | {"model.layers.1.q_proj": (7, 4)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 4}, r"is \(2, 4\), expected \(4, 4\)"),
        ({"r": "2"}, "positive integer"),
        ({"lora_alpha": None}, "lora_alpha = None must be a number"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported"),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"use_rslora": True}, "use_rslora = True is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias = 'all' is not supported"),
    ],
)
def test_loading_refuses_configs_that_mean_something_else(folder, fields, message: str) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(AdapterError, match=message):
        load_expert(folder, SHAPES)


def test_pickles_and_broken_files_are_refused(folder) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(b"\x80\x04not safetensors")
    with pytest.raises(AdapterError, match="not a readable safetensors file"):
        load_expert(folder, SHAPES)
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin can run code and is not read"):
        load_expert(folder, SHAPES)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match="is not JSON"):
        load_expert(folder, SHAPES)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match="not a PEFT adapter folder"):
        load_expert(folder, SHAPES)


def test_a_failed_write_keeps_the_old_file_and_leaves_no_litter(folder, monkeypatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_expert(folder, {name: t + 1 for name, t in bare().items()}, SPEC, backbone="b")
    monkeypatch.undo()
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded, _ = load_expert(folder, SHAPES)
    assert all(torch.equal(loaded[name], t) for name, t in bare().items())
