"""FedWeave (arXiv 2607.26618) in numbers: Eq. 1, 2 and 4 by hand, local training against plain PyTorch."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.adapters.state import initial_tensors
from fedloom.data.tokenize import Encoded
from fedloom.errors import FedloomError, UpdateRejected
from fedloom.methods.fedweave import FedWeave, FedWeaveOptions, members_of, schedule, weights
from fedloom.runtime import client as runtime_client
from fedloom.runtime.batches import draw_batches
from fedloom.runtime.memory import ClientMemory
from fedloom.types import AdapterSpec, Order, Reply, State, Tensors, Training
from small_world import SPEC, World, examples, random_tensors, rows
from straight_loop import StraightLoop, largest_difference

# --- Eq. 4 ----------------------------------------------------------------------------------------------------------

A, B = "q_proj.lora_A", "q_proj.lora_B"
MIXTURE = AdapterSpec(("q_proj",), rank=1, experts=4, router_hidden=1)


def state_of(tensors: Tensors, **values: Any) -> State:
    return State(1, tensors, MIXTURE, values)


def test_eq4_by_hand() -> None:
    """Clients i, j, k; l is not sampled. Experts 0 and 1 are shared, 2 is i's alone, 3 is nobody's.

    θ_0: n_i = 3, n_j = 1 → (3·1 + 1·9)/4 = 3.    θ_1: n_j = 2, n_k = 6 → (2·(−4) + 6·4)/8 = 2.    θ_2: 5.
    φ: |D| = 10, 3, 7 → (10·1 + 3·4 + 7·(−6))/20 = −1.
    """
    start = {f"experts/{m}/{B}": torch.tensor([[10.0 * m], [0.1]]) for m in range(4)} | {"router/0.bias": torch.ones(1)}

    def reply(client: str, size: int, experts: dict[int, tuple[int, float]], router: float) -> Reply:
        send = {f"experts/{m}/{B}": torch.tensor([[u], [2 * u]]) for m, (_, u) in experts.items()}
        counts = {"examples": size, "router": size} | {f"experts/{m}": n for m, (n, _) in experts.items()}
        return Reply(client, send | {"router/0.bias": torch.tensor([router])}, counts)

    replies = [
        reply("i", 10, {0: (3, 1.0), 2: (7, 5.0)}, 1.0),
        reply("j", 3, {0: (1, 9.0), 1: (2, -4.0)}, 4.0),
        reply("k", 7, {1: (6, 4.0)}, -6.0),
    ]
    merged = FedWeave().merge(state_of(start), replies).tensors
    assert merged[f"experts/0/{B}"].tolist() == [[3.0], [pytest.approx(6.1)]]
    assert merged[f"experts/1/{B}"].tolist() == [[12.0], [pytest.approx(4.1)]]
    assert merged[f"experts/2/{B}"].tolist() == [[25.0], [pytest.approx(10.1)]]
    assert torch.equal(merged[f"experts/3/{B}"], start[f"experts/3/{B}"])
    assert merged["router/0.bias"].tolist() == [0.0]
    assert merged.keys() == start.keys()


def test_eq4_expert_weights_are_not_client_sizes() -> None:
    """A client of 100 examples with one in the pattern counts 1 against a client of 9 whose 9 are in it."""
    start = {f"experts/0/{B}": torch.zeros(1, 1)}
    replies = [
        Reply("big", {f"experts/0/{B}": torch.full((1, 1), 10.0)}, {"examples": 100, "experts/0": 1}),
        Reply("small", {f"experts/0/{B}": torch.full((1, 1), 20.0)}, {"examples": 9, "experts/0": 9}),
    ]
    merged = FedWeave().merge(state_of(start), replies).tensors
    assert merged[f"experts/0/{B}"].item() == pytest.approx((10 + 9 * 20) / 10)


def test_weights_are_sums_over_the_buckets_of_an_expert() -> None:
    """a = (2, 0, 2), sizes 5, 3, 4: n_2 = 9, n_0 = 3, |D| = 12."""
    assert weights([2, 0, 2], [5, 3, 4]) == {"examples": 12, "router": 12, "experts/2": 9, "experts/0": 3}


# --- Eq. 1 and 2 ----------------------------------------------------------------------------------------------------

#: Two B blocks of three directions each. Angles inside a pattern are small, across patterns right angles.
ANGLES = {"u": 0.0, "v": math.pi / 2}


def warmed_up(pattern: str, tilt: float, scale: float, a: float) -> Tensors:
    """Return an adapter whose B blocks point at ``pattern`` plus ``tilt``; length does not matter to Eq. 1."""
    angle = ANGLES[pattern] + tilt
    block = scale * torch.tensor([[math.cos(angle)], [math.sin(angle)], [0.0]])
    return {
        "experts/0/k_proj.lora_A": torch.full((1, 2), a),
        "experts/0/k_proj.lora_B": block,
        f"experts/0/{A}": torch.full((1, 2), -a),
        f"experts/0/{B}": 2 * block,
    }


BUCKETS: dict[str, list[Tensors]] = {
    "i": [warmed_up("u", 0.00, 1.0, 1.0), warmed_up("v", 0.00, 3.0, 5.0)],
    "j": [warmed_up("v", 0.10, 1.0, 7.0)],
    "k": [warmed_up("u", 0.05, 9.0, 2.0), warmed_up("v", 0.02, 1.0, 0.0), warmed_up("u", -0.05, 1.0, 6.0)],
}


def probe_reply(client: str, adapters: list[Tensors], sizes: list[int] | None = None) -> Reply:
    send = {f"buckets/{c}/{n}": t for c, adapter in enumerate(adapters) for n, t in adapter.items()}
    sizes = sizes or [4] * len(adapters)
    return Reply(client, send, {"examples": sum(sizes)}, values={"sizes": sizes})


def discovered(**buckets: list[Tensors]) -> State:
    start = State(0, {}, AdapterSpec(("q_proj",), rank=1), {"seed": 1, "hidden_size": 3})
    method = FedWeave(FedWeaveOptions(router_hidden=2))
    return method.discover(start, [probe_reply(client, found) for client, found in sorted(buckets.items())])


def test_eq1_buckets_of_one_pattern_share_an_expert() -> None:
    state = discovered(**BUCKETS)
    assert state.values["assignment"] == {"i": [0, 1], "j": [1], "k": [0, 1, 0]}
    assert state.spec.experts == 2
    # Silhouette of M = 2 by hand: a and b are mean distances 1 − cos inside and to the other pattern.
    points = {"u": [0.0, 0.05, -0.05], "v": [0.0, 0.1, 0.02]}
    angles = {p: [ANGLES[p] + t for t in tilts] for p, tilts in points.items()}
    scores = []
    for p, q in (("u", "v"), ("v", "u")):
        for x in angles[p]:
            a = sum(1 - math.cos(x - y) for y in angles[p]) / 2
            b = sum(1 - math.cos(x - y) for y in angles[q]) / 3
            scores.append((b - a) / max(a, b))
    assert state.values["silhouette"] == pytest.approx(sum(scores) / 6, abs=1e-6)
    assert set(state.values["scores"]) == {"2", "3", "4", "5"}


def test_eq2_experts_start_at_the_unweighted_mean_of_their_buckets() -> None:
    """Bucket sizes must not weigh: u has A = 1, 2, 6 → 3; v has 5, 7, 0 → 4."""
    tensors = discovered(**BUCKETS).tensors
    assert tensors["experts/0/k_proj.lora_A"].tolist() == [[3.0, 3.0]]
    assert tensors[f"experts/0/{A}"].tolist() == [[-3.0, -3.0]]
    assert tensors["experts/1/k_proj.lora_A"].tolist() == [[4.0, 4.0]]
    u = [1 * math.cos(0) + 9 * math.cos(0.05) + math.cos(-0.05), 9 * math.sin(0.05) + math.sin(-0.05), 0.0]
    assert tensors["experts/0/k_proj.lora_B"].flatten().tolist() == pytest.approx([x / 3 for x in u], abs=1e-6)
    assert tensors[f"experts/0/{B}"].flatten().tolist() == pytest.approx([2 * x / 3 for x in u], abs=1e-6)
    assert {name: tuple(t.shape) for name, t in tensors.items() if name.startswith("router/")} == {
        "router/0.weight": (2, 3),
        "router/0.bias": (2,),
        "router/2.weight": (2, 2),
        "router/2.bias": (2,),
    }
    assert all(t.dtype == torch.float32 for t in tensors.values())


def test_one_bucket_in_all_gives_one_expert() -> None:
    state = discovered(i=BUCKETS["i"][:1])
    assert state.spec.experts == 1
    assert state.values["assignment"] == {"i": [0]}
    assert torch.equal(state.tensors[f"experts/0/{B}"], BUCKETS["i"][0][f"experts/0/{B}"])


def test_no_signature_is_a_clear_error() -> None:
    with pytest.raises(FedloomError, match=r"[Ss]ignature"):
        discovered()


def test_members_of_by_hand() -> None:
    assert members_of([0, 2, 0, 1, 2, 2], 3) == [[0, 2], [3], [1, 4, 5]]
    assert members_of([], 0) == []


def test_D10_ten_thousand_identical_examples_are_one_bucket(tmp_path: Path) -> None:
    world = World(tmp_path, clients={"ann": examples("sums", 1) * 10_000})
    order = Order("probe", "ann", 0, FedWeave().init(world.setup).tensors, SPEC, Training(steps=1))
    reply = FedWeave(FedWeaveOptions(warmup_steps=1)).probe(world.client("ann", round=0), order)
    assert reply.values == {"sizes": [10_000]}
    assert reply.keep_values == {"buckets": [0] * 10_000}


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (2, [2])])
def test_D9_one_or_two_examples_are_one_bucket(count: int, sizes: list[int], tmp_path: Path) -> None:
    world = World(tmp_path, clients={"ann": examples("sums", count)})
    order = Order("probe", "ann", 0, FedWeave().init(world.setup).tensors, SPEC, Training())
    reply = FedWeave().probe(world.client("ann", round=0), order)
    assert reply.values == {"sizes": sizes}
    assert reply.metrics["steps"] == 10


# --- Local training (lines 10 to 12) --------------------------------------------------------------------------------

SPEC4 = replace(SPEC, experts=4, router_hidden=6, dropout=0.0)
TRAINING = Training(steps=7, batch_size=2, lr=2e-3, router_lr=1e-3, clip=1.0, weight_decay=0.01)
#: Bucket of each of ann's nine examples, and expert of each bucket. Expert 1 has no bucket here.
LABELS = [0, 1, 0, 1, 0, 2, 0, 0, 0]
ASSIGNMENT = [2, 0, 2]


@pytest.fixture
def fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[World, Order, Reply, list[list[Encoded]]]:
    """One round of local training with every batch recorded."""
    world = World(tmp_path, clients={"ann": examples("sums", 5) + examples("shout", 4)})
    start = random_tensors(initial_tensors(SPEC4, world.setup.shapes, 32, torch.Generator()))
    sizes = [len(pool) for pool in members_of(LABELS, 3)]
    order = Order("fit", "ann", 1, start, SPEC4, TRAINING, {"assignment": ASSIGNMENT, "sizes": sizes})
    batches: list[list[Encoded]] = []

    def record(*args: Any, **named: Any) -> list[list[int]]:
        drawn = draw_batches(*args, **named)
        batches.extend([world.clients["ann"].encoded[i] for i in batch] for batch in drawn)
        return drawn

    monkeypatch.setattr(runtime_client, "draw_batches", record)
    client = world.client("ann", memory=ClientMemory(values={"buckets": LABELS}))
    return world, order, FedWeave().local(client, order), batches


def test_local_steps_are_the_schedule_and_each_batch_is_of_one_bucket(fitted: Any) -> None:
    """Sizes 6, 2, 1 and 7 steps: quotas 4.67, 1.56, 0.78, so 4, 1, 1 and one more for the largest remainder, bucket 0.

    Spread over the round, bucket 0 stands at .1 .3 .5 .7 .9, buckets 1 and 2 at .5: 0 0 0 1 2 0 0.
    """
    _, _, _, batches = fitted
    assert schedule([6, 2, 1], 7) == [0, 0, 0, 1, 2, 0, 0]
    assert [{LABELS[e.index] for e in batch} for batch in batches] == [{0}, {0}, {0}, {1}, {2}, {0}, {0}]
    assert [len(batch) for batch in batches] == [2, 2, 2, 2, 1, 2, 2]
    assert sorted(e.index for batch in batches[:3] for e in batch) == [0, 2, 4, 6, 7, 8]  # a pass over bucket 0


def test_local_training_equals_the_straight_loop(fitted: Any) -> None:
    """Same batches, soft gates, one AdamW and one router over the whole schedule, clipping: the same tensors."""
    world, order, reply, batches = fitted
    features = world.clients["ann"].features(world.bench)
    loop = StraightLoop(order.tensors, SPEC4, TRAINING)
    losses = [loop.step(batch, [features[e.index] for e in batch]) for batch in batches]
    end, mine = loop.read(), ("experts/0/", "experts/2/", "router/")
    expected = {n: end[n] - start.double() for n, start in order.tensors.items() if n.startswith(mine)}
    assert largest_difference(reply.send, expected) < 1e-6
    assert min(float(t.abs().max()) for t in expected.values()) > 1e-4
    assert reply.metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert max(loop.norms) > TRAINING.clip > min(loop.norms)  # clipping was at work, and not always


def test_router_state_persists_over_the_schedule(fitted: Any) -> None:
    """A router that began anew with each bucket would end elsewhere: the comparison above can tell."""
    world, order, reply, batches = fitted
    features = world.clients["ann"].features(world.bench)
    loop = StraightLoop(order.tensors, SPEC4, TRAINING)
    buckets = [LABELS[batch[0].index] for batch in batches]
    for (before, bucket), batch in zip(pairwise([buckets[0], *buckets]), batches, strict=True):
        if bucket != before:
            loop.set(loop.read() | {n: order.tensors[n].double() for n in order.tensors if n.startswith("router/")})
        loop.step(batch, [features[e.index] for e in batch])
    delta = {n: loop.read()[n] - order.tensors[n] for n in order.tensors if n.startswith("router/")}
    assert largest_difference({n: reply.send[n] for n in delta}, delta) > 1e-3


def test_updates_of_experts_without_a_bucket_stay_home(fitted: Any) -> None:
    """Soft routing moves experts 1 and 3 too, but n_{i,1} = n_{i,3} = 0."""
    _, order, reply, _ = fitted
    sent = {name for name in order.tensors if name.startswith(("experts/0/", "experts/2/", "router/"))}
    assert reply.send.keys() == sent
    assert reply.counts == {"examples": 9, "router": 9, "experts/2": 7, "experts/0": 2}
    assert not reply.keep
    assert not reply.keep_values


# --- What the server believes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ({"experts/0": 1}, "not those of its buckets"),
        ({"experts/0": 0, "experts/1": 2}, "not those of its buckets"),
        ({"router": 0}, "not those of its buckets"),
        ({"examples": 10, "router": 10}, "not those of its buckets"),
        ({"experts/0": 3}, None),
    ],
)
def test_weights_in_rounds_are_those_of_discovery(counts: dict[str, int], reason: str | None) -> None:
    tensors = {f"experts/{m}/{B}": torch.zeros(2, 1) for m in range(4)} | {"router/0.bias": torch.zeros(1)}
    order = Order("fit", "i", 1, tensors, MIXTURE, Training(), {"assignment": [0, 2], "sizes": [3, 5]})
    reply = Reply("i", {}, {"examples": 8, "router": 8, "experts/0": 3, "experts/2": 5} | counts)
    if reason is None:
        schema = {f"experts/0/{B}": (2, 1), f"experts/2/{B}": (2, 1), "router/0.bias": (1,)}
        assert FedWeave().expected(order, reply) == schema
    else:
        with pytest.raises(UpdateRejected, match=reason):
            FedWeave().expected(order, reply)


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ([3, 4], {"examples": 8}),
        ([8, 0], {"examples": 8}),
        ([9, -1], {"examples": 8}),
        ([7.0, 1.0], {"examples": 8}),
        ([True, 7], {"examples": 8}),
        ([1] * 9, {"examples": 9}),
        ([], {"examples": 8}),
        ("8", {"examples": 8}),
        (None, {"examples": 8}),
        ([8], {"examples": 8, "experts/0": 8}),
    ],
)
def test_impossible_bucket_sizes_are_rejected(sizes: Any, counts: dict[str, int]) -> None:
    order = Order("probe", "i", 0, {f"experts/0/{B}": torch.zeros(2, 1)}, MIXTURE, Training())
    with pytest.raises(UpdateRejected):
        FedWeave().expected(order, Reply("i", {}, counts, values={"sizes": sizes}))


def test_a_probe_must_hold_one_adapter_per_bucket() -> None:
    order = Order("probe", "i", 0, {f"experts/0/{B}": torch.zeros(2, 1)}, MIXTURE, Training())
    schema = FedWeave().expected(order, Reply("i", {}, {"examples": 8}, values={"sizes": [5, 3]}))
    assert schema == {f"buckets/{c}/experts/0/{B}": (2, 1) for c in (0, 1)}


def test_a_client_outside_the_discovery_is_not_asked() -> None:
    state = state_of({}, assignment={"i": [0]}, sizes={"i": [3]})
    assert FedWeave().admits(state, "i")
    assert not FedWeave().admits(state, "z")
    assert FedWeave().view(state, "i").values == {"assignment": [0], "sizes": [3]}
    assert FedWeave().view(state, None).values == {}


def test_soft_gates_are_those_of_the_cached_features(fitted: Any) -> None:
    """The router reads features of the frozen backbone, which local training does not move."""
    world, order, _, _ = fitted
    found = world.clients["ann"].features(world.bench)
    fresh = rows(examples("sums", 5) + examples("shout", 4)).features(World(world.out / "fresh").bench)
    assert torch.equal(found, fresh)
    assert order.spec.experts == 4
