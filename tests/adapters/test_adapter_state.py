"""Flat tensors: names, checks, prefixes, first values."""

import pytest
import torch

from fedloom.adapters import check_expert_name, check_tensors, initial_tensors
from fedloom.adapters.state import pick_expert, place_expert, stack, strip_prefixes, strip_wrapper_prefixes
from fedloom.errors import AdapterError
from fedloom.types import AdapterSpec, component

SHAPES = {"model.layers.0.q_proj": (6, 4), "model.layers.1.q_proj": (5, 4)}
SPEC = AdapterSpec(("q_proj",), rank=2, experts=3, router_hidden=7)


def tensors() -> dict[str, torch.Tensor]:
    return initial_tensors(SPEC, SHAPES, 8, torch.Generator().manual_seed(0))


def test_names_and_shapes_follow_the_convention() -> None:
    shapes = {name: tuple(t.shape) for name, t in tensors().items()}
    assert len(shapes) == 3 * 2 * 2 + 4
    assert shapes["experts/1/model.layers.0.q_proj.lora_A"] == (2, 4)
    assert shapes["experts/2/model.layers.1.q_proj.lora_B"] == (5, 2)
    assert shapes["router/0.weight"] == (7, 8)
    assert shapes["router/2.bias"] == (3,)
    assert {component(name) for name in shapes} == {"experts/0", "experts/1", "experts/2", "router"}
    check_tensors(tensors(), SPEC, SHAPES, 8)


def test_stack_puts_experts_first() -> None:
    flat = {name: torch.randn_like(t) for name, t in tensors().items()}
    stacked = stack(flat, SPEC, SHAPES)
    A, B = stacked["model.layers.1.q_proj"]
    assert A.shape == (3, 2, 4)
    assert B.shape == (3, 5, 2)
    assert torch.equal(A[2], flat["experts/2/model.layers.1.q_proj.lora_A"])


def test_pick_and_place_one_expert() -> None:
    flat = tensors()
    bare = pick_expert(flat, 1)
    assert next(iter(bare)) == "model.layers.0.q_proj.lora_A"
    assert place_expert(bare, 1).keys() == {name for name in flat if name.startswith("experts/1/")}
    with pytest.raises(AdapterError, match="no expert 9"):
        pick_expert(flat, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("experts/1/model.layers.0.q_proj.lora_A"), "missing: experts/1/model.layers.0.q_proj.lora_A"),
        (lambda t: t.update({"experts/3/x.lora_A": torch.zeros(1)}), "unknown: experts/3/x.lora_A"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(1)}), "unknown: lm_head.weight"),
        (lambda t: t.update({"router/0.bias": torch.zeros(6)}), r"router/0.bias is \(6,\), expected \(7,\)"),
    ],
)
def test_m2_key_mismatch_names_the_keys(change, message: str) -> None:
    broken = tensors()
    change(broken)
    with pytest.raises(AdapterError, match=message):
        check_tensors(broken, SPEC, SHAPES, 8)


def test_m2_a_renamed_key_is_named_with_its_nearest() -> None:
    broken = tensors()
    broken["router/0.weights"] = broken.pop("router/0.weight")
    with pytest.raises(AdapterError, match=r"missing: router/0.weight; unknown: .* Did you mean 'router/0.weight'"):
        check_tensors(broken, SPEC, SHAPES, 8)


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("experts/0/_orig_mod.model.q.lora_A", "experts/0/model.q.lora_A"),
        ("experts/0/module._orig_mod.model.q.lora_A", "experts/0/model.q.lora_A"),
        ("experts/0/_orig_mod.module.model.q.lora_A", "experts/0/model.q.lora_A"),
        ("experts/0/model.layers.0._orig_mod.q.lora_A", "experts/0/model.layers.0.q.lora_A"),
        ("router/_orig_mod.0.weight", "router/0.weight"),
        ("router/module.0.weight", "router/0.weight"),
        ("experts/0/model.module.q.lora_A", "experts/0/model.module.q.lora_A"),  # a model's own "module" stays
        ("experts/0/model.my_orig_mod.q.lora_A", "experts/0/model.my_orig_mod.q.lora_A"),
    ],
)
def test_m1_wrapper_prefixes_are_stripped(name: str, clean: str) -> None:
    assert strip_wrapper_prefixes(name) == clean
    assert list(strip_prefixes({name: torch.zeros(1)})) == [clean]


def test_m1_two_names_for_one_tensor_are_refused() -> None:
    with pytest.raises(AdapterError, match="Two tensors"):
        strip_prefixes({"router/0.bias": torch.zeros(1), "router/module.0.bias": torch.zeros(1)})


@pytest.mark.parametrize(
    "name",
    [
        "",
        "lora",
        "LoRA",
        "lora_A",
        "base",
        "base_model",
        "weight",
        "a.b",
        "../x",
        "..",
        "a/b",
        "a\\b",
        ".x",
        "-x",
    ],
)
@pytest.mark.parametrize("ending", ["", " b", "\n", "\0", "é", "x" * 65])
def test_m6_names_that_break_keys_or_folders_are_refused(name: str, ending: str) -> None:
    with pytest.raises(AdapterError, match="cannot name an expert"):
        check_expert_name(name + ending)


@pytest.mark.parametrize("name", ["0", "12", "default", "radiology", "site_3-v2", "explorart"])
def test_m6_plain_names_are_allowed(name: str) -> None:
    assert check_expert_name(name) == name
