"""A client's side: what its optimiser steps do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.adapters.state import initial_tensors
from fedloom.data.sources import Example, conversation
from fedloom.runtime import client as module
from fedloom.runtime.batches import draw_batches, split_by_length
from fedloom.runtime.client import LocalClient
from fedloom.runtime.memory import ClientMemory
from fedloom.types import Tensors, Training
from small_world import SPEC, World, examples, random_tensors
from straight_loop import StraightLoop, largest_difference


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SPEC2 = replace(SPEC, experts=2, router_hidden=6, dropout=0.0)
TRAINING = Training(steps=4, batch_size=3, lr=2e-3, router_lr=1e-3)
#: Two factors in four layers, and four router parameters.
MOMENTS = {f"optimizer/{i}/{key}" for i in range(12) for key in ("step", "exp_avg", "exp_avg_sq")}


def record_batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that fills with the mini-batches that clients draw."""
    batches: list[list[int]] = []

    def record(*args: Any, **named: Any) -> list[list[int]]:
        drawn = draw_batches(*args, **named)
        batches.extend(drawn)
        return drawn

    monkeypatch.setattr(module, "draw_batches", record)
    return batches


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, clients={"ann": examples("sums", 5) + examples("shout", 4)})


@pytest.fixture
def start(world: World) -> Tensors:
    return random_tensors(initial_tensors(SPEC2, world.setup.shapes, 32, source()))


def loaded(world: World, tensors: Tensors, *, round: int = 1, memory: ClientMemory | None = None) -> LocalClient:
    client = world.client("ann", round=round, memory=memory)
    client.load(tensors, SPEC2)
    return client


def follow(loop: StraightLoop, world: World, batches: list[list[int]]) -> None:
    mine = world.clients["ann"]
    features = mine.features(world.bench)
    for batch in batches:
        loop.step([mine.encoded[i] for i in batch], [features[i] for i in batch])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_kept_moments_make_two_rounds_one_longer_run(
    weight_decay: float, world: World, start: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One AdamW over both rounds, whose values the server moves in between."""
    batches = record_batches(monkeypatch)
    training = replace(TRAINING, optimizer_state="keep", weight_decay=weight_decay)
    one = loaded(world, start)
    one.fit([range(9)] * 4, training)
    served = {n: t + 0.01 for n, t in one.read().items()}
    assert one.kept_optimizer.keys() == {
        f"optimizer/{i}/{k}" for i in range(12) for k in ("step", "exp_avg", "exp_avg_sq")
    }
    two = loaded(world, served, round=2, memory=ClientMemory(one.kept_optimizer))
    two.fit([range(9)] * 4, training)
    assert two.kept_optimizer["optimizer/0/step"] == 8

    loop = StraightLoop(start, SPEC2, training)
    follow(loop, world, batches[:4])
    loop.set(served)
    follow(loop, world, batches[4:])
    assert largest_difference(two.read(), loop.read()) < 2e-6


def test_reset_moments_begin_anew(world: World, start: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments in the memory are not used, and none are kept; a kept run ends elsewhere."""
    batches = record_batches(monkeypatch)
    memory = ClientMemory({name: torch.ones(1) for name in MOMENTS})
    client = loaded(world, start, memory=memory)
    client.fit([range(9)] * 4, TRAINING)
    assert client.kept_optimizer == {}
    loop = StraightLoop(start, SPEC2, TRAINING)
    follow(loop, world, batches)
    assert largest_difference(client.read(), loop.read()) < 2e-6


def test_kept_moments_do_not_reach_the_memory_they_came_from(world: World, start: Tensors) -> None:
    training = replace(TRAINING, optimizer_state="keep")
    one = loaded(world, start)
    one.fit([range(9)], training)
    stored = {n: t.clone() for n, t in one.kept_optimizer.items()}
    loaded(world, start, memory=ClientMemory(one.kept_optimizer)).fit([range(9)] * 2, training)
    assert all(torch.equal(t, stored[n]) for n, t in one.kept_optimizer.items())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kept", [False, True])
def test_frozen_slices_stay_bitwise_where_they_were(
    weight_decay: float, kept: bool, world: World, start: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expert 1 and every A are frozen: slices of one stacked Parameter train beside slices that do not.

    With ``kept``, the moments are of a round in which everything was trained.
    """
    training = replace(TRAINING, weight_decay=weight_decay, optimizer_state="keep")
    memory = ClientMemory()
    if kept:
        before = loaded(world, start)
        before.fit([range(9)] * 3, training)
        memory = ClientMemory(before.kept_optimizer)

    def trainable(name: str) -> bool:
        return name.startswith("router/") or (name.startswith("experts/0/") and name.endswith("lora_B"))

    batches = record_batches(monkeypatch)
    client = loaded(world, start, memory=memory)
    client.fit([range(9)] * 4, training, trainable=trainable)
    end = client.read()
    for name, tensor in start.items():
        assert torch.equal(end[name], tensor) == (not trainable(name)), name
    if not kept:
        loop = StraightLoop(start, SPEC2, training, trainable)
        follow(loop, world, batches)
        assert largest_difference(end, loop.read()) < 2e-6


def test_gradients_are_shown_by_name_before_clipping_and_may_be_changed(
    world: World, start: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook sees the loss's own gradients; what it zeroes does not move; what it sees is not yet clipped."""
    batches = record_batches(monkeypatch)
    seen: list[Tensors] = []

    def hook(values: Tensors, gradients: Tensors) -> None:
        assert values.keys() == gradients.keys() == start.keys()
        if not seen:
            assert all(torch.equal(values[n], start[n]) for n in start)
        seen.append({n: g.clone() for n, g in gradients.items()})
        for name in gradients:
            if name.startswith("router/"):
                gradients[name].zero_()

    client = loaded(world, start)
    client.fit([range(9)] * 2, replace(TRAINING, clip=1e-3), on_gradients=hook)
    loop = StraightLoop(start, SPEC2, TRAINING)
    mine = world.clients["ann"]
    features = mine.features(world.bench)
    torch.cat([loop.loss(mine.encoded[i], features[i]) for i in batches[0]]).mean().backward()
    expected = {n: t.grad for n, t in loop.values.items() if t.grad is not None}
    assert largest_difference(seen[0], expected) < 1e-5 * max(float(g.abs().max()) for g in expected.values())
    end = client.read()
    assert all(torch.equal(end[n], start[n]) for n in start if n.startswith("router/"))
    assert not any(torch.equal(end[n], start[n]) for n in start if n.startswith("experts/"))


@pytest.mark.parametrize("clip", [0.0, 1e-2, 1e6])
def test_the_global_norm_is_clipped(clip: float, world: World, start: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[float] = []
    after: list[float] = []
    step = torch.optim.AdamW.step

    def norm(gradients: Sequence[torch.Tensor]) -> float:
        return float(torch.cat([g.flatten().double() for g in gradients]).norm())

    def measured(self: torch.optim.AdamW, *args: Any) -> Any:
        after.append(norm([p.grad for group in self.param_groups for p in group["params"]]))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", measured)

    def before_clipping(values: Tensors, gradients: Tensors) -> None:
        before.append(norm(list(gradients.values())))

    loaded(world, start).fit([range(9)] * 3, replace(TRAINING, clip=clip), on_gradients=before_clipping)
    assert min(before) > 0.1
    expected = [1e-2] * 3 if clip == 1e-2 else before
    assert after == pytest.approx(expected, rel=1e-4)


def test_frozen_gradients_do_not_count_in_the_norm(world: World, start: Tensors) -> None:
    """With all but the router frozen, the router is clipped by its own norm alone: clipping far above it is idle."""
    ends = []
    for clip in (0.0, 1.0):
        client = loaded(world, {n: 5 * t if n.endswith("lora_B") else t for n, t in start.items()})
        client.fit([range(9)] * 3, replace(TRAINING, clip=clip), trainable=lambda name: name == "router/2.bias")
        ends.append(client.read()["router/2.bias"])
    assert torch.equal(ends[0], ends[1])


def test_the_report_counts_steps_and_supervised_tokens(
    world: World, start: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = record_batches(monkeypatch)
    told: list[float] = []
    client = loaded(world, start)
    client.on_step = told.append
    report = client.fit([range(9)] * 3, TRAINING)
    assert report.steps == 3
    assert report.losses == told
    encoded = world.clients["ann"].encoded
    assert report.tokens == sum(len(encoded[i].ids) - encoded[i].prompt_length for batch in batches for i in batch)
    assert report.loss == pytest.approx(sum(told) / 3)


def test_dropout_is_drawn_from_the_clients_own_stream(world: World, start: Tensors) -> None:
    """The global generator is neither read nor moved."""
    spec = replace(SPEC2, dropout=0.2)
    ends = []
    for outer in (1, 2):
        torch.manual_seed(outer)
        client = world.client("ann")
        client.load(start, spec)
        before = torch.get_rng_state()
        client.fit([range(9)] * 2, TRAINING)
        assert torch.equal(torch.get_rng_state(), before)
        ends.append(client.read())
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in start)
    plain = loaded(world, start)
    plain.fit([range(9)] * 2, TRAINING)
    assert not torch.equal(plain.read()["router/0.bias"], ends[0]["router/0.bias"])


def test_what_is_read_is_a_copy(world: World, start: Tensors) -> None:
    client = loaded(world, start)
    first = client.read()
    first["router/2.bias"].fill_(9)
    assert torch.equal(client.read()["router/2.bias"], start["router/2.bias"])
    client.fit([range(9)], TRAINING)
    assert not torch.equal(client.read()["router/2.bias"], start["router/2.bias"])
    assert all(torch.equal(t, random_tensors(start)[n]) for n, t in start.items())  # the input is as it was


def test_purpose_client_and_round_have_streams_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_batches(monkeypatch)
    world = World(tmp_path, clients={"ann": examples("sums", 9), "bob": examples("sums", 9)})
    tensors = initial_tensors(SPEC, world.setup.shapes, 0, source())

    def drawn(name: str, round: int, purpose: str) -> list[list[int]]:
        seen.clear()
        client = world.client(name, round=round)
        client.load(tensors, SPEC)
        client.fit([range(9)] * 3, Training(batch_size=3), purpose=purpose)
        return list(seen)

    first = drawn("ann", 1, "fit")
    assert drawn("ann", 1, "fit") == first
    assert all(
        other != first for other in (drawn("bob", 1, "fit"), drawn("ann", 2, "fit"), drawn("ann", 1, "warmup-0"))
    )


def test_a_mini_batch_in_parts_is_one_mini_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples of unlike length, computed in two parts, take the step of their common mean over tokens."""
    long = [Example(conversation("count " + "up " * 90, f"{i} and on")) for i in range(2)]
    world = World(tmp_path, clients={"ann": examples("sums", 4) + long})
    mine = world.clients["ann"]
    assert [len(part) for part in split_by_length(range(6), mine.lengths)] == [4, 2]
    start = random_tensors(initial_tensors(SPEC2, world.setup.shapes, 32, source()))
    client = loaded(world, start)
    report = client.fit([range(6)] * 2, replace(TRAINING, batch_size=6))
    loop = StraightLoop(start, SPEC2, TRAINING)
    features = mine.features(world.bench)
    losses = [loop.step(mine.encoded, list(features)) for _ in range(2)]
    assert report.losses == pytest.approx(losses, rel=1e-5)
    assert largest_difference(client.read(), loop.read()) < 2e-6


def test_an_epoch_is_as_many_steps_as_a_pass_takes(world: World) -> None:
    client = world.client("ann")  # eight examples
    assert client.steps(Training(steps=50, batch_size=3, epochs=2)) == 6
    assert client.steps(Training(steps=4, batch_size=3, epochs=2)) == 4
    assert client.steps(Training(steps=50, batch_size=3)) == 50
