"""FedWeave without client router (arXiv 2607.26618, Table 2): a router per bucket, against plain PyTorch in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.adapters.state import initial_tensors
from fedloom.data.tokenize import Encoded
from fedloom.methods.fedweave import FedWeave, members_of, schedule
from fedloom.methods.fedweave_wo_client_router import FedWeaveWithoutClientRouter
from fedloom.numerics.tree import take
from fedloom.runtime import client as runtime_client
from fedloom.runtime.client import draw_batches
from fedloom.runtime.memory import ClientMemory
from fedloom.types import Order, Reply, Tensors, Training
from small_world import SPEC, World, examples, random_tensors, same
from straight_loop import StraightLoop, largest_difference

METHOD = FedWeaveWithoutClientRouter()
SPEC4 = replace(SPEC, experts=4, router_hidden=6, dropout=0.0)
TRAINING = Training(steps=7, batch_size=2, lr=2e-3, router_lr=1e-3, clip=1.0, weight_decay=0.01)
#: Sizes 6, 2, 1; with 7 steps the schedule is 0 0 0 1 2 0 0. Experts 1 and 3 have no bucket here.
LABELS = [0, 1, 0, 1, 0, 2, 0, 0, 0]
ASSIGNMENT = [2, 0, 2]


class Both:
    """The experts' optimiser, which lives on, and one router copy's."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class ResetLoop(StraightLoop):
    """One loop over the schedule in which every bucket has a router, and an AdamW for it, of its own."""

    def __init__(self, tensors: Tensors, training: Training) -> None:
        super().__init__(tensors, SPEC4, training)
        self.start = {n: t for n, t in tensors.items() if n.startswith("router/")}
        self.experts = [t for n, t in self.values.items() if n.startswith("experts/")]
        self.lasting = self._adam(self.experts, training.lr)
        self.copies: dict[int, tuple[dict[str, Tensor], torch.optim.Optimizer]] = {}

    def _adam(self, tensors: list[Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(tensors, lr=lr, weight_decay=self.training.weight_decay, foreach=False)

    def turn_to(self, bucket: int) -> None:
        if bucket not in self.copies:
            router = {n: t.double().clone().requires_grad_() for n, t in self.start.items()}
            self.copies[bucket] = (router, self._adam(list(router.values()), self.training.router_lr))
        router, optimizer = self.copies[bucket]
        self.values |= router
        self.trained = [*self.experts, *router.values()]
        self.optimizer = Both(self.lasting, optimizer)  # type: ignore[assignment]


def fitted(method: FedWeave, out: Path, training: Training, patch: pytest.MonkeyPatch) -> Any:
    """Return the order, the reply, the batches and the features of one round of local training."""
    world = World(out, clients={"ann": examples("sums", 5) + examples("shout", 4)})
    start = random_tensors(initial_tensors(SPEC4, world.setup.shapes, 32, torch.Generator()))
    sizes = [len(pool) for pool in members_of(LABELS, 3)]
    order = Order("fit", "ann", 1, start, SPEC4, training, {"assignment": ASSIGNMENT, "sizes": sizes})
    batches: list[list[Encoded]] = []

    def record(*args: Any, **named: Any) -> list[list[int]]:
        drawn = draw_batches(*args, **named)
        batches.extend([world.clients["ann"].encoded[i] for i in batch] for batch in drawn)
        return drawn

    patch.setattr(runtime_client, "draw_batches", record)
    reply = method.local(world.client("ann", memory=ClientMemory(values={"buckets": LABELS})), order)
    return order, reply, batches, world.clients["ann"].features(world.bench)


def straight(order: Order, batches: list[list[Encoded]], features: Tensor, visits: list[int]) -> ResetLoop:
    loop = ResetLoop(order.tensors, order.training)
    for batch, bucket in zip(batches, visits, strict=True):
        assert {LABELS[e.index] for e in batch} == {bucket}
        loop.turn_to(bucket)
        loop.step(batch, [features[e.index] for e in batch])
    return loop


def test_each_bucket_trains_a_router_of_its_own_and_the_client_returns_their_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts go on over the whole schedule; φ = (6 φ_0 + 2 φ_1 + 1 φ_2)/9."""
    order, reply, batches, features = fitted(METHOD, tmp_path, TRAINING, monkeypatch)
    loop = straight(order, batches, features, [0, 0, 0, 1, 2, 0, 0])
    expected = {}
    for name, start in order.tensors.items():
        if name.startswith("router/"):
            ends = [loop.copies[c][0][name].detach() for c in range(3)]
            expected[name] = (6 * ends[0] + 2 * ends[1] + ends[2]) / 9 - start.double()
        elif name.startswith(("experts/0/", "experts/2/")):
            expected[name] = loop.values[name].detach() - start.double()
    assert largest_difference(reply.send, expected) < 1e-6
    assert min(float(t.abs().max()) for t in expected.values()) > 1e-4
    assert reply.counts == {"examples": 9, "router": 9, "experts/2": 7, "experts/0": 2}


def test_it_is_not_the_router_that_persists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same batches as FedWeave, and in the first three steps, all of bucket 0, the same loop: then they part."""
    _, reset, first, _ = fitted(METHOD, tmp_path / "a", TRAINING, monkeypatch)
    _, persistent, second, _ = fitted(FedWeave(), tmp_path / "b", TRAINING, monkeypatch)
    assert [[e.index for e in batch] for batch in first] == [[e.index for e in batch] for batch in second]
    assert reset.send.keys() == persistent.send.keys()
    routers = [take(reply.send, "router") for reply in (reset, persistent)]
    assert largest_difference(*routers) > 5e-4


def test_with_one_bucket_it_is_fedweave(tmp_path: Path) -> None:
    replies: list[Reply] = []
    for method in (METHOD, FedWeave()):
        world = World(tmp_path / method.title.replace("/", "-"), clients={"ann": examples("sums", 5)})
        start = random_tensors(initial_tensors(SPEC4, world.setup.shapes, 32, torch.Generator()))
        order = Order("fit", "ann", 1, start, SPEC4, TRAINING, {"assignment": [1], "sizes": [5]})
        replies.append(method.local(world.client("ann", memory=ClientMemory(values={"buckets": [0] * 5})), order))
    assert largest_difference(replies[0].send, replies[1].send) < 1e-6
    assert replies[0].metrics["router_weight_mismatch"] == 0


def test_effective_weights_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """a = 6/9, 2/9, 1/9 and H = 5, 1, 1: π̃ = 30/33, 2/33, 1/33 (Eq. 40).

    ‖π̃ − π‖₁ = (30/33 − 6/9) + (2/9 − 2/33) + (1/9 − 1/33) = 16/33.
    """
    _, reply, _, _ = fitted(METHOD, tmp_path, TRAINING, monkeypatch)
    assert [reply.metrics[f"router_weight_{c}"] for c in range(3)] == pytest.approx([30 / 33, 2 / 33, 1 / 33])
    assert reply.metrics["router_weight_mismatch"] == pytest.approx(16 / 33)


def test_a_bucket_without_a_step_ends_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps for three buckets: the largest two get one each, and φ = (6 φ_0 + 2 φ_1 + 1 φ)/9."""
    training = replace(TRAINING, steps=2)
    order, reply, batches, features = fitted(METHOD, tmp_path, training, monkeypatch)
    assert schedule([6, 2, 1], 2) == [0, 1]
    loop = straight(order, batches, features, [0, 1])
    expected = {}
    for name, start in order.tensors.items():
        if name.startswith("router/"):
            ends = [loop.copies[c][0][name].detach() for c in (0, 1)]
            expected[name] = (6 * ends[0] + 2 * ends[1] + start.double()) / 9 - start.double()
    assert largest_difference({n: reply.send[n] for n in expected}, expected) < 1e-6
    assert reply.metrics["router_weight_2"] == 0


def test_kept_moments_of_an_earlier_round_do_not_reach_the_copies(tmp_path: Path) -> None:
    """Whatever the memory holds for the router, its copies begin without moments; the experts' moments go on."""
    world = World(tmp_path, clients={"ann": examples("sums", 5) + examples("shout", 4)})
    start = random_tensors(initial_tensors(SPEC4, world.setup.shapes, 32, torch.Generator()))
    training = replace(TRAINING, optimizer_state="keep", clip=0.0, lr=0.0)
    order = Order("fit", "ann", 1, start, SPEC4, training, {"assignment": ASSIGNMENT, "sizes": [6, 2, 1]})
    client = world.client("ann", memory=ClientMemory(values={"buckets": LABELS}))
    first = METHOD.local(client, order)
    known = ClientMemory(client.kept_optimizer, {"buckets": LABELS})
    again = METHOD.local(world.client("ann", memory=known), order)
    assert same(take(first.send, "router"), take(again.send, "router"))


def test_merging_is_fedweaves() -> None:
    assert FedWeaveWithoutClientRouter.merge is FedWeave.merge
    changed = {n for n in vars(FedWeaveWithoutClientRouter) if callable(getattr(METHOD, n)) and not n.startswith("__")}
    assert changed == {"take_steps", "Options"}
