"""A native mixture behind the interface of grafted LoRA experts: whole, by LoRA, and with some of its experts only."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from native_models import EXPERTS, layers_of, logits, make_native
from torch import Tensor
from transformers import PreTrainedModel

from fedloom.adapters.inject import Grafted
from fedloom.adapters.native import find_native
from fedloom.adapters.native_graft import NativeGraft
from fedloom.adapters.native_lora import WeightLoRA
from fedloom.backbones.load import Backbone, parameter_hash
from fedloom.config import parse_config
from fedloom.errors import AdapterError
from fedloom.experiment import adapter_spec, run
from fedloom.model import evaluate_files
from fedloom.runtime.client import LocalClient, Workbench
from fedloom.runtime.events import Observer
from fedloom.runtime.memory import ClientMemory
from fedloom.types import AdapterSpec, Tensors, Training, component
from small_world import SPEC, client_rows, random_tensors, rows, same, small_backbone, small_tokenizer

FULL = AdapterSpec((), native="full")
LORA = AdapterSpec((), native="lora", rank=3, alpha=5.0)
FAMILIES = ["switch_transformers", "mixtral", "olmoe"]
BOTH = pytest.mark.parametrize("spec", [FULL, LORA], ids=["full", "lora"])
EVERY = pytest.mark.parametrize("family", FAMILIES)
ON = torch.zeros(3, dtype=torch.int64)


def grafted(family: str, spec: AdapterSpec) -> NativeGraft:
    """Return a graft whose tensors are not those of its backbone."""
    found = NativeGraft(make_native(family), spec)
    before = found.read()
    moved = random_tensors(before, scale=0.1)
    found.load({name: tensor + moved[name] for name, tensor in before.items()})
    found.eval()
    return found


@torch.no_grad()
def answers(found: NativeGraft, family: str) -> Tensor:
    return logits(found.model, family)  # type: ignore[arg-type]


def test_the_interface_is_that_of_grafted_lora_experts() -> None:
    for name in ("load", "read", "respec", "parameters_by_name", "expert_parameters", "router_parameters", "route"):
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (NativeGraft, Grafted))
        assert list(ours.parameters) == list(theirs.parameters), name
        assert ours.return_annotation == theirs.return_annotation, name
    for name in ("routing", "train", "eval"):
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (NativeGraft, Grafted))
        assert list(ours.parameters) == list(theirs.parameters), name
    found = NativeGraft(make_native("mixtral"), FULL)
    assert (found.router, found.fan_in_fan_out, found.shapes, found.hidden_size) == (None, False, {}, 0)
    assert found.route(torch.zeros(2, 5), "off") is None
    assert found.route(torch.zeros(2, 5), "top1") is not None
    with pytest.raises(AdapterError, match="is fixed when it is grafted"):
        found.respec(LORA)
    with pytest.raises(AdapterError, match="not 'half'"):
        NativeGraft(make_native("mixtral"), AdapterSpec((), native="half"))


@BOTH
@EVERY
def test_off_computes_what_the_backbone_computed(family: str, spec: AdapterSpec) -> None:
    original = logits(make_native(family), family).detach()
    found = grafted(family, spec)
    trained, tensors = answers(found, family), found.read()
    assert not torch.allclose(trained, original, atol=1e-3)
    with found.routing(None):
        assert torch.equal(answers(found, family), original)
    with found.routing(ON):
        assert torch.equal(answers(found, family), trained)
    assert same(found.read(), tensors)
    with pytest.raises(ZeroDivisionError), found.routing(None):
        raise ZeroDivisionError
    assert same(found.read(), tensors)


@BOTH
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", ["switch_transformers", "mixtral", "olmoe", "qwen2_moe", "deepseek_v2"])
def test_what_is_trained_is_float32_whatever_the_backbone_is(family: str, kind: torch.dtype, spec: AdapterSpec) -> None:
    """At rate 0 nothing moves, so nothing is sent; at 1e-4, far below bfloat16's grid at 1, AdamW's step is whole."""
    more: dict[str, Any] = {} if family == "switch_transformers" else {"max_position_embeddings": 512}
    model = make_native(family, vocab_size=258, **more).to(kind)  # type: ignore[arg-type]
    if family != "switch_transformers":
        model.set_experts_implementation("eager")  # kernels for half precision want widths that are multiples of 8
    bench = Workbench(Backbone("small", model, small_tokenizer(), parameter_hash(model)), spec, None)
    found = bench.grafted
    assert all(slot.value.dtype == torch.float32 for slot in found.parameters_by_name().values())
    initial = found.read()
    moved = random_tensors(initial, scale=1e-3)  # as a merge leaves them: between the points of the coarse grid
    received = {name: tensor + moved[name] for name, tensor in initial.items()}
    client = LocalClient("ann", rows(client_rows()["ann"]), bench, ClientMemory(), 42, 0)
    for rate in (0.0, 1e-4):
        client.load(received, spec)
        report = client.fit([range(8)], Training(batch_size=4, lr=rate, router_lr=rate))
        assert 0 < report.loss < 20
        sent = {name: tensor - received[name] for name, tensor in client.read().items()}
        routed = [t for name, t in sent.items() if name.startswith("router/")]
        if rate == 0:
            assert not any(t.any() for t in sent.values())
        else:
            assert all(t.abs().max() == pytest.approx(rate, rel=0.02) for t in routed)
    with found.routing(None):
        assert same(found.read(), initial)


@EVERY
def test_lora_also_trains_the_routers_and_nothing_else(family: str) -> None:
    found = NativeGraft(make_native(family), LORA)
    native = find_native(make_native(family)).shapes()
    routers = {name for name in native if name.startswith("router/")}
    assert {name for name in found.read() if not name.startswith("experts/")} == routers
    assert {component(name) for name in found.read()} == {component(n) for n in native if not n.startswith("shared/")}
    trained = {id(p) for p in found.model.parameters() if p.requires_grad}
    assert trained == {id(p) for p in [*found.expert_parameters(), *found.router_parameters()]}
    assert len(found.router_parameters()) == len(layers_of(family))


@BOTH
@EVERY
def test_merged_is_a_plain_model_and_is_taken_back(family: str, spec: AdapterSpec) -> None:
    found = grafted(family, spec)
    adapted, tensors = answers(found, family), found.read()
    plain = make_native(family)
    with found.merged() as model:
        assert type(model) is type(plain)
        assert not any(isinstance(module, WeightLoRA) for module in model.modules())
        plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(plain, family).detach(), adapted, rtol=1e-4, atol=1e-5)
    assert same(found.read(), tensors)
    assert torch.equal(answers(found, family), adapted)
    if spec is LORA:  # W + s B A, in float64
        before, after = find_native(make_native(family)).read(), find_native(plain).read()
        for name in (n for n in before if n.startswith("experts/")):
            product = tensors[f"{name}.lora_B"].double() @ tensors[f"{name}.lora_A"].double()
            torch.testing.assert_close(after[name].double(), before[name].double() + 5 / 3 * product, atol=1e-6, rtol=0)
        with found.routing(None):  # the weights under the LoRAs are the backbone's again, bit by bit
            now = {n.replace(".base.", "."): p for n, p in found.model.named_parameters() if ".A." not in n}
            expected = dict(make_native(family).named_parameters())
            assert all(torch.equal(now[name], p) for name, p in expected.items())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of two clients and a test set, and a random backbone of each family."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("ann", "bob"):
        found = [{"prompt": e.prompt, "response": e.response} for e in client_rows()[name]]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    for family in ("switch_transformers", "mixtral"):
        longest = {} if family == "switch_transformers" else {"max_position_embeddings": 512}
        ids = {"pad_token_id": 257, "eos_token_id": 256, "decoder_start_token_id": 257, "bos_token_id": None}
        model = make_native(family, vocab_size=258, **longest, **ids)
        model.save_pretrained(folder / family)
        small_tokenizer().save_pretrained(folder / family)
    return folder


@pytest.mark.parametrize(
    ("family", "method", "native"),
    [
        ("mixtral", "fcmoe", "full"),
        ("mixtral", "fedavg_moe", "lora"),
        ("mixtral", "fedmoe", "full"),
        ("switch_transformers", "fcmoe", "lora"),
        ("switch_transformers", "fedmoe", "lora"),
    ],
)
def test_a_run_trains_a_model_that_its_folder_holds(
    family: str, method: str, native: str, files: Path, tmp_path: Path
) -> None:
    config = parse_config(
        {
            "method": {"name": method},
            "backbone": {"name": str(files / family), "threads": 1},
            "data": {
                "clients": {name: str(files / f"{name}.jsonl") for name in ("ann", "bob")},
                "test": {"mine": str(files / "ann.jsonl")},
            },
            "adapter": {"native": native, "rank": 2, "alpha": 6},
            "federation": {"rounds": 2},
            "training": {"steps": 4, "batch_size": 2, "lr": 0.01, "router_lr": 0.01},
            "evaluation": {"generate": False, "every": 1},
        }
    )
    metrics = run(config, tmp_path / "out")
    records = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    losses = [record["evaluation"]["loss"]["macro"] for record in records]
    assert losses[2] < losses[0]
    assert not any(record.get("quarantined") for record in records)
    watched = Mock(spec=Observer)
    found = evaluate_files(tmp_path / "out" / "model", {"mine": files / "ann.jsonl"}, generate=False, observer=watched)
    assert [call.args[0] for call in watched.phase.call_args_list] == ["evaluation"]  # no router, no prompts
    assert found["loss"]["mine"] == pytest.approx(metrics["routing"]["top1"]["loss"]["mine"], rel=1e-4)


# Some of the experts only.

#: Experts that stay, of 4, by place of the layer.
STAYING = [[0, 2, 3], [1, 2, 3]]


def kept_of(found: NativeGraft) -> tuple[str, ...]:
    return tuple(layer.component(e) for layer, es in zip(found.named.layers, STAYING, strict=True) for e in es)


def smaller(model: PreTrainedModel, family: str) -> PreTrainedModel:
    """Return a model with three experts a layer, cut from one with four."""
    count = "num_local_experts" if family == "mixtral" else "num_experts"
    small = make_native(family, **{count: 3})
    source, target = find_native(model), find_native(small)
    tensors: Tensors = {}
    for name, tensor in source.read().items():
        if not name.startswith("experts/"):
            tensors[name] = tensor
    for layer, staying in zip(source.layers, STAYING, strict=True):
        for router in (name for name in tensors if name.startswith(f"router/{layer.path}.")):
            tensors[router] = tensors[router][staying]
        for new, old in enumerate(staying):
            for name, tensor in source.read().items():
                if component(name) == layer.component(old):
                    tensors[name.replace(layer.component(old), layer.component(new))] = tensor
    target.load(tensors)
    return small


@EVERY
def test_kept_experts_make_the_model_that_has_no_others(family: str) -> None:
    found = grafted(family, FULL)
    everything, whole = found.read(), answers(found, family)
    kept = kept_of(found)
    found.respec(replace(FULL, kept=kept))
    small = smaller(found.model, family)  # type: ignore[arg-type]
    torch.testing.assert_close(answers(found, family), logits(small, family).detach(), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(answers(found, family), whole, atol=1e-3)
    with found.routing(None):  # the backbone has all its experts
        torch.testing.assert_close(answers(found, family), logits(make_native(family), family).detach())
    torch.testing.assert_close(answers(found, family), logits(small, family).detach(), rtol=1e-5, atol=1e-5)
    logits(found.model, family).square().mean().backward()  # type: ignore[arg-type]
    for layer, staying in zip(found.named.layers, STAYING, strict=True):
        (gone,) = set(range(EXPERTS)) - set(staying)
        for router in (p for p in layer.router.parameters()):
            assert router.grad is not None
            assert not router.grad[gone].any()
            assert router.grad[staying].any()
        for name, slot in found.named.slots().items():
            if component(name) == layer.component(gone):
                assert slot.grad is None or not slot.grad.any()
    found.respec(FULL)
    found.load(everything)
    assert torch.equal(answers(found, family), whole)


@BOTH
@EVERY
def test_only_kept_experts_are_read_and_loaded(family: str, spec: AdapterSpec) -> None:
    found = grafted(family, spec)
    everything, kept = found.read(), kept_of(found)
    optimised = [id(p) for p in found.expert_parameters()]
    found.respec(replace(spec, kept=kept))
    mine = found.read()
    assert {component(n) for n in mine if n.startswith("experts/")} == set(kept)
    assert mine.keys() == {n for n in everything if not n.startswith("experts/") or component(n) in kept}
    assert [id(p) for p in found.expert_parameters()] == optimised
    with pytest.raises(AdapterError, match=r"unknown: experts/.*1"):
        found.load(everything)
    missing = next(n for n in mine if n.startswith("experts/"))
    with pytest.raises(AdapterError, match=f"missing: {missing}"):
        found.load({n: t for n, t in mine.items() if n != missing})
    found.load({n: torch.zeros_like(t) for n, t in mine.items()})
    found.respec(spec)
    after = found.read()
    assert not any(after[n].any() for n in mine)
    assert all(torch.equal(after[n], everything[n]) for n in everything.keys() - mine.keys())
    found.respec(replace(spec, kept=kept))
    with pytest.raises(AdapterError, match="some experts only"), found.merged():
        pass


def test_fewer_kept_than_a_token_takes() -> None:
    """Mixtral's weights are normalised over the two best, of which one has weight 0."""
    found = grafted("mixtral", FULL)
    found.respec(replace(FULL, kept=tuple(layer.component(2) for layer in found.named.layers)))
    one = make_native("mixtral", num_local_experts=1, num_experts_per_tok=1)
    tensors = {n.replace(".mlp.2/", ".mlp.0/"): t for n, t in found.read().items()}
    find_native(one).load({n: t[2:3] if n.startswith("router/") else t for n, t in tensors.items()})
    torch.testing.assert_close(answers(found, "mixtral"), logits(one, "mixtral").detach(), rtol=1e-5, atol=1e-5)


def test_deepseek_v2_that_is_greedy_keeps_single_experts() -> None:
    """Its router is one softmax over all experts: without expert 1 it is the model that never had it."""
    found = grafted("deepseek_v2", FULL)
    everything, (layer,) = found.read(), found.named.layers
    found.respec(replace(FULL, kept=tuple(layer.component(e) for e in (0, 2, 3))))
    small = make_native("deepseek_v2", n_routed_experts=3, n_group=1, topk_group=1)
    tensors: Tensors = {}
    for name, tensor in everything.items():
        old = int(component(name)[-1]) if name.startswith("experts/") else 0
        if name.startswith("router/"):
            tensors[name] = tensor[[0, 2, 3]]
        elif old != 1:
            tensors[name.replace(f".mlp.{old}/", f".mlp.{max(old - 1, 0)}/")] = tensor
    find_native(small).load(tensors)
    expected = logits(small, "deepseek_v2").detach()
    torch.testing.assert_close(answers(found, "deepseek_v2"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes"), [("deepseek_v3", {}), ("deepseek_v2", {"topk_method": "group_limited_greedy"})]
)
def test_groups_of_experts_are_refused_before_anything_is_asked(family: str, changes: dict[str, Any]) -> None:
    model = make_native(family, **changes)
    backbone = Backbone("small", model, small_tokenizer(), "")
    for method in ("fedmoe", "fcmoe"):
        plain = {"method": {"name": method}, "adapter": {"native": "full"}, "data": {"clients": {"ann": "ann.jsonl"}}}
        config = parse_config(plain)
        if method == "fedmoe":
            with pytest.raises(AdapterError, match=r"model\.layers\.1\.mlp chooses groups of experts first"):
                adapter_spec(config, config.build_method(), backbone)
        else:
            assert adapter_spec(config, config.build_method(), backbone).native == "full"


def test_what_cannot_be_kept_is_named() -> None:
    found = NativeGraft(make_native("mixtral"), FULL)
    first, second = (layer.component(0) for layer in found.named.layers)
    with pytest.raises(AdapterError, match=r"no expert 'experts/nowhere\.0' to keep"):
        found.respec(replace(FULL, kept=(first, second, "experts/nowhere.0")))
    with pytest.raises(AdapterError, match=r"model\.layers\.1\.mlp keeps none of its 4 experts"):
        NativeGraft(make_native("mixtral"), replace(FULL, kept=(first,)))
    deep = NativeGraft(make_native("deepseek_v3"), FULL)
    with pytest.raises(AdapterError, match="chooses groups of experts first"):
        deep.respec(replace(FULL, kept=(deep.named.layers[0].component(0),)))
    assert found.spec == FULL  # a refused specification changes nothing


@pytest.mark.parametrize("family", ["switch_transformers", "mixtral"])
def test_a_clients_activations_are_those_of_its_examples_one_by_one(family: str) -> None:
    more: dict[str, Any] = {} if family == "switch_transformers" else {"max_position_embeddings": 512}
    model = make_native(family, vocab_size=258, **more)
    bench = Workbench(Backbone("small", model, small_tokenizer(), parameter_hash(model)), FULL, None)
    mine = rows(client_rows()["ann"])

    def client(part: Any) -> LocalClient:
        return LocalClient("ann", part, bench, ClientMemory(), 42, 0)

    total: dict[str, int] = {}
    for example in client_rows()["ann"]:
        for unit, tokens in client(rows([example])).activations().items():
            total[unit] = total.get(unit, 0) + tokens
    assert client(mine).activations() == total
    if family == "mixtral":  # two experts a token
        assert sum(total.values()) == 2 * sum(mine.lengths) * len(layers_of(family))
    kept = tuple(sorted(unit for unit in total if unit[-1] in "13"))
    bench.grafted.respec(replace(FULL, kept=kept))
    if family == "switch_transformers":
        assert {unit for unit, tokens in client(mine).activations().items() if tokens} <= set(kept)
    other = LocalClient("ann", mine, Workbench(small_backbone(), SPEC, None), ClientMemory(), 42, 0)
    with pytest.raises(AdapterError, match="carries LoRA experts"):
        other.activations()
    report = client(mine).fit([range(8)] * 2, Training(batch_size=4))
    assert set(report.activations) == set(total)
