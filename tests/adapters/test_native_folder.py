"""The folder of a model whose own experts were trained: it answers as measured in the run, in any type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import FAMILIES, layers_of, logits, make_native
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fedloom.adapters.native import find_native
from fedloom.adapters.native_graft import NativeGraft
from fedloom.backbones.load import DTYPES, load_backbone
from fedloom.errors import AdapterError, ConfigError, ModelFolderError
from fedloom.export import save_model
from fedloom.model import LoadedModel, load_model
from fedloom.runtime.client import Workbench
from fedloom.types import AdapterSpec, View
from small_world import random_tensors, same, small_tokenizer

FULL = AdapterSpec((), native="full")
LORA = AdapterSpec((), native="lora", rank=8, alpha=5.0)

#: Tensors of a file may lie elsewhere in memory than a model's own, and sums round otherwise there: one step of a type.
CLOSE = {
    "float32": {"rtol": 1e-5, "atol": 1e-5},
    "bfloat16": {"rtol": 2**-7, "atol": 2**-7},
    "float16": {"rtol": 2**-10, "atol": 2**-10},
}


def trained(family: str, spec: AdapterSpec, kind: str, folder: Path) -> Workbench:
    """Return a bench whose tensors lie between the points of half precision, on a backbone loaded in ``kind``."""
    more: dict[str, Any] = {}
    if family != "switch_transformers":  # kernels for half precision want widths that are multiples of 8
        fused = "intermediate_size" if family in ("mixtral", "olmoe") else "moe_intermediate_size"
        more = {"max_position_embeddings": 512, fused: 16}
    model = make_native(family, vocab_size=258, **more)
    if family == "deepseek_v3":
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):
                module.e_score_correction_bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    bench = Workbench(load_backbone(str(folder), dtype=kind, device="cpu"), spec, None)
    start = bench.grafted.read()
    moved = random_tensors(start)
    bench.grafted.load({name: tensor + moved[name] for name, tensor in start.items()})
    bench.grafted.eval()
    return bench


@torch.no_grad()
def answers(bench: Workbench, family: str) -> Tensor:
    return logits(bench.backbone.model, family)


def kinds(bench: Workbench, family: str) -> dict[bool, set[torch.dtype]]:
    """Return the types of routers' parameters (True) and of all others."""
    found: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    for name, parameter in bench.backbone.model.named_parameters():
        found[any(name.startswith((f"{p}.gate.", f"{p}.router.")) for p in layers_of(family))].add(parameter.dtype)
    return found


def load(folder: Path, **more: Any) -> LoadedModel:
    return load_model(folder, device="cpu", **more)


@pytest.mark.parametrize("spec", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_folder_computes_what_was_trained(family: str, kind: str, spec: AdapterSpec, tmp_path: Path) -> None:
    bench = trained(family, spec, kind, tmp_path / "start")
    measured, tensors, before = answers(bench, family), bench.grafted.read(), kinds(bench, family)
    save_model(tmp_path / "model", View(tensors, spec), bench, provenance={})
    assert torch.equal(answers(bench, family), measured)
    assert same(bench.grafted.read(), tensors)
    assert kinds(bench, family) == before
    about = json.loads((tmp_path / "model" / "fedloom.json").read_text())
    assert about["backbone"]["dtype"] == "float32"
    assert about["adapter"]["native"] == "full"
    assert {t.dtype for t in load_file(tmp_path / "model/backbone/model.safetensors").values()} == {torch.float32}
    assert json.loads((tmp_path / "model/backbone/config.json").read_text())["dtype"] == "float32"

    computed = kind if spec is LORA else "float32"  # ``full`` makes the whole model float32
    loaded = load(tmp_path / "model", dtype=computed)
    torch.testing.assert_close(answers(loaded.bench, family), measured, **CLOSE[computed])
    assert kinds(loaded.bench, family) == {True: {torch.float32}, False: {DTYPES[computed]}}
    with bench.grafted.merged() as model:  # type: ignore[union-attr]
        held = find_native(model).read()
    assert same(find_native(loaded.bench.backbone.model).read(), held)
    if computed != "float32":
        whole = load(tmp_path / "model")
        assert kinds(whole.bench, family) == {True: {torch.float32}, False: {torch.float32}}
        assert same(find_native(whole.bench.backbone.model).read(), held)


def test_a_folder_is_loaded_in_the_type_that_is_asked_for(tmp_path: Path) -> None:
    """Against the saved model as ``transformers`` loads it in bfloat16, routers put back to float32."""
    family = "mixtral"
    bench = trained(family, FULL, "float32", tmp_path / "start")
    save_model(tmp_path / "model", View(bench.grafted.read(), FULL), bench, provenance={})
    loaded = load(tmp_path / "model", dtype="bfloat16")
    assert kinds(loaded.bench, family) == {True: {torch.float32}, False: {torch.bfloat16}}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model" / "backbone", dtype=torch.bfloat16).eval()
    routers = {n: t for n, t in bench.grafted.read().items() if n.startswith("router/")}
    for name, weight in routers.items():
        gate = plain.get_submodule(name.removeprefix("router/").removesuffix(".weight"))
        gate.weight.data = weight
        gate.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    with torch.no_grad():
        torch.testing.assert_close(answers(loaded.bench, family), logits(plain, family), **CLOSE["bfloat16"])
    assert not any(p.requires_grad for p in loaded.bench.backbone.model.parameters())


def test_a_loaded_model_holds_no_copy_of_itself_and_no_backbone_before_training(tmp_path: Path) -> None:
    bench = trained("mixtral", FULL, "float32", tmp_path / "start")
    save_model(tmp_path / "model", View(bench.grafted.read(), FULL), bench, provenance={})
    loaded = load(tmp_path / "model")
    assert isinstance(loaded.bench.grafted, NativeGraft)
    assert loaded.bench.grafted.initial is None
    assert loaded.generate("x", max_new_tokens=2) is not None
    with pytest.raises(AdapterError, match="holds only what it became"):
        loaded.generate("x", routing="off", max_new_tokens=2)


def test_a_changed_folder_is_refused_with_advice_that_helps(tmp_path: Path) -> None:
    bench = trained("mixtral", FULL, "float32", tmp_path / "start")
    save_model(tmp_path / "model", View(bench.grafted.read(), FULL), bench, provenance={})
    with pytest.raises(ConfigError, match="holds its whole model, so it takes no other backbone"):
        load(tmp_path / "model", backbone=str(tmp_path / "start"))
    weights = tmp_path / "model" / "backbone" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"It was changed since.*or run again") as caught:
        load(tmp_path / "model")
    assert "--backbone" not in str(caught.value)
