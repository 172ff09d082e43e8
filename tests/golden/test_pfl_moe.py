"""PFL-MoE (arXiv 2012.15589): the blend of two heads by hand, what is trained on which rows, and FedAvg unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedloom.config import Config, parse_config
from fedloom.errors import AdapterError, ConfigError
from fedloom.methods.fedavg_moe import FedAvgMoE
from fedloom.methods.pfl_moe import PFLMoE, PFLMoEOptions
from fedloom.numerics.init import BIAS, DELTA, GATE, no_difference
from fedloom.numerics.tree import place
from fedloom.runtime.memory import ClientMemory
from fedloom.types import AdapterSpec, Order, State, Tensors
from small_world import NATIVE, TRAINING, World, same

BLENDED = replace(NATIVE, blend=True)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, spec=NATIVE)


def order_for(world: World, client: str, **training: Any) -> Order:
    return Order("fit", client, 1, world.setup.initial, NATIVE, replace(TRAINING, **training))


def random_blend(initial: Tensors) -> Tensors:
    source = torch.Generator().manual_seed(3)
    return {name: torch.randn(t.shape, generator=source) for name, t in no_difference(initial).items()}


class Watched:
    """What went into and came out of the model's head, in the last forward pass, without any blend."""

    def __init__(self, model: Any) -> None:
        self.head = model.get_output_embeddings()
        self.handle = self.head.register_forward_hook(self.see, prepend=True)
        self.x = self.h = torch.zeros(0)

    def see(self, head: Any, inputs: Any, output: torch.Tensor) -> None:
        self.x, self.h = inputs[0].detach().double(), output.detach().double()


def run(world: World, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return world.bench.backbone.model(input_ids=ids, decoder_input_ids=ids[:, :3]).logits


def test_the_blend_by_dense_algebra(world: World) -> None:
    """g·h(x) + (1 − g)·p(x) with p(x) = (H + D) x, in float64; the switch back leaves the model as it was."""
    ids = torch.arange(20).reshape(2, 10)
    bare = run(world, ids)
    own = random_blend(world.setup.initial)
    world.bench.load(world.setup.initial | own, BLENDED)
    watched = Watched(world.bench.backbone.model)
    mixed = run(world, ids)
    x, h = watched.x, watched.h
    p = x @ (watched.head.weight.detach().double() + own[DELTA].double()).T
    gate = 1 / (1 + torch.exp(-(x @ own[GATE].double().T + own[BIAS].double())))
    torch.testing.assert_close(mixed.double(), gate * h + (1 - gate) * p, rtol=1e-4, atol=1e-5)
    assert 0.01 < float(gate.min()) < float(gate.max()) < 0.99
    with world.bench.grafted.routing(None):
        assert torch.equal(run(world, ids), bare)
    assert torch.equal(run(world, ids), mixed)
    assert same(world.bench.grafted.read(), world.setup.initial | own)
    with pytest.raises(AdapterError, match="blended head"), world.bench.grafted.merged():
        pass
    world.bench.load(world.setup.initial, NATIVE)
    assert torch.equal(run(world, ids), bare)


def test_no_difference_changes_nothing(world: World) -> None:
    ids = torch.arange(20).reshape(2, 10)
    bare = run(world, ids)
    world.bench.load(world.setup.initial | no_difference(world.setup.initial), BLENDED)
    assert torch.equal(run(world, ids), bare)


def test_first_step_of_the_head_is_that_of_softmax_regression(world: World) -> None:
    """AdamW's first step is lr · sign of the gradient; that of cross-entropy is (p − one-hot) xᵀ, here by hand."""
    for module in world.bench.backbone.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    method, client = PFLMoE(), world.client("dan")  # one example: nothing for the gate
    order = order_for(world, "dan", lr=1e-2, clip=0.0)
    reply = method.local(client, order)
    row = world.clients["dan"].encoded[0]
    source, target = row.ids[: row.prompt_length], row.ids[row.prompt_length :]
    world.bench.load(world.setup.initial, NATIVE)
    model, watched = world.bench.backbone.model, Watched(world.bench.backbone.model)
    start = [model.config.decoder_start_token_id, *target[:-1]]
    with torch.no_grad():
        model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([start]))
    x, p = watched.x[0], watched.h[0].softmax(-1)
    gradient = (p - torch.nn.functional.one_hot(torch.tensor(target), p.shape[1])).T @ x / len(target)
    clear = gradient.abs() > 1e-5
    assert int(clear.sum()) > 100
    expected = -1e-2 * gradient.sign()
    torch.testing.assert_close(reply.keep[f"own/{DELTA}"].double()[clear], expected[clear], rtol=2e-2, atol=0)
    assert not reply.keep[f"own/{GATE}"].any()
    assert not reply.keep[f"own/{BIAS}"].any()


def test_rows_of_the_head_and_of_the_gate(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight rows, 3 and 7 are the gate's; the head learns alone, with the gate shut; only what is named moves."""
    client, order = world.client("ann"), order_for(world, "ann")
    seen: list[tuple[str, list[int], int, float, set[str]]] = []
    fit = type(client).fit

    def watch(self: Any, pools: Any, training: Any, **more: Any) -> Any:
        before = self.read()
        report = fit(self, pools, training, **more)
        moved = {name for name, t in self.read().items() if not torch.equal(t, before[name])}
        if more:
            seen.append((more["purpose"], list(pools[0]), len(pools), float(before[BIAS]), moved))
        return report

    monkeypatch.setattr(type(client), "fit", watch)
    PFLMoE(PFLMoEOptions(head_epochs=2, gate_epochs=3)).local(client, order)
    assert seen == [
        (f"own {DELTA}", [0, 1, 2, 4, 5, 6], 6, -100.0, {DELTA}),
        (f"own {GATE}", [3, 7], 3, 0.0, {GATE, BIAS}),
    ]


def test_what_is_sent_and_merged_is_fedavgs(world: World) -> None:
    order = order_for(world, "ann")
    theirs = FedAvgMoE().local(world.client("ann"), order)
    ours = PFLMoE().local(world.client("ann"), order)
    assert same(ours.send, theirs.send)
    assert (ours.counts, ours.metrics, ours.values) == (theirs.counts, theirs.metrics, theirs.values)
    state = State(0, world.setup.initial, NATIVE)
    merged = [kind().merge(state, [ours, replace(ours, client="bob")]).tensors for kind in (FedAvgMoE, PFLMoE)]
    assert same(*merged)


def test_head_and_gate_stay_and_go_on_from_where_they_were(world: World) -> None:
    method, order = PFLMoE(), order_for(world, "ann")
    keep = method.local(world.client("ann"), order).keep
    assert set(keep) == {f"own/{name}" for name in (DELTA, GATE, BIAS)}
    again = method.local(world.client("ann", memory=ClientMemory(keep, {})), order).keep
    assert all(not torch.equal(again[name], keep[name]) for name in keep)


def test_personal_views() -> None:
    """An own head is added to the newest model; a client that has none answers with the global one."""
    state = State(3, {"shared/shared.weight": torch.ones(4, 2)}, AdapterSpec((), native="full"))
    own = random_blend(state.tensors)
    view = PFLMoE().personal_view(state, "ann", ClientMemory(place(own, "own"), {}))
    assert same(view.tensors, state.tensors | own)
    assert view.spec.blend
    bare = PFLMoE().personal_view(state, "bob", ClientMemory())
    assert same(bare.tensors, state.tensors)
    assert not bare.spec.blend


def test_rounds_before_the_own_heads(world: World) -> None:
    method = PFLMoE(PFLMoEOptions(after=1))
    assert method.local(world.client("ann"), order_for(world, "ann")).keep == {}


def test_rounds_that_leave_none_for_own_heads_are_refused() -> None:
    def parse(after: int) -> Config:
        method = {"name": "pfl_moe", "after": after}
        plain = {"method": method, "federation": {"rounds": 25}, "data": {"clients": {"ann": "ann.jsonl"}}}
        return parse_config(plain)

    assert parse(24).build_method().options == PFLMoEOptions(after=24)
    with pytest.raises(ConfigError, match=r"method\.after is 25, so that no round of 25 is left .*Use at most 24"):
        parse(25)


def test_loras_are_refused_before_any_round() -> None:
    """The head of which every client gets its own is not among the tensors that ``lora`` trains."""

    def parse(native: str) -> Config:
        data = {"clients": {"ann": "ann.jsonl"}}
        return parse_config({"method": {"name": "pfl_moe", "after": 2}, "adapter": {"native": native}, "data": data})

    assert isinstance(parse("full").build_method(), PFLMoE)
    with pytest.raises(ConfigError, match=r"adapter\.native is 'lora', but PFL-MoE needs .* Set it to 'full'"):
        parse("lora")


def test_loras_have_no_head() -> None:
    with pytest.raises(AdapterError, match=r"adapter\.native to 'full'"):
        no_difference({"experts/x.0/wi.lora_A": torch.zeros(1, 1)})


def test_activations_do_not_weigh_clients_that_count_alike() -> None:
    """FLAME's rule is (activations / steps)^t · n_i, and here no client has an n_i."""
    with pytest.raises(ValidationError, match="weighting"):
        PFLMoEOptions.model_validate({"weighting": "activations"})
