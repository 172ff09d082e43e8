"""A client's side: which batches, and what one optimiser step does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.adapters.state import initial_tensors
from fedloom.data.sources import Example, conversation
from fedloom.errors import DataError
from fedloom.runtime import client as module
from fedloom.runtime.batches import draw_batches, split_by_length
from fedloom.runtime.client import LocalClient
from fedloom.runtime.memory import ClientMemory
from fedloom.types import Tensors, Training
from small_world import SPEC, World, examples, random_tensors
from straight_loop import StraightLoop, largest_difference

# --- Batches --------------------------------------------------------------------------------------------------------


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


POOLS = st.lists(st.integers(1, 9), min_size=1, max_size=4).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=20))
)


def pools_of(sizes: list[int], visits: list[int]) -> list[list[int]]:
    """Return the pool of each visit; pools hold different examples, not in order."""
    starts = [sum(sizes[:c]) for c in range(len(sizes))]
    pools = [list(range(start, start + size))[::-1] for start, size in zip(starts, sizes, strict=True)]
    return [pools[c] for c in visits]


@given(POOLS, st.integers(1, 5), st.booleans(), st.integers(0, 3))
def test_batches_are_full_and_without_replacement_inside_a_pass(
    problem: tuple[list[int], list[int]], batch_size: int, by_length: bool, seed: int
) -> None:
    sizes, visits = problem
    pools = pools_of(sizes, visits)
    batches = draw_batches(pools, list(range(40)), batch_size, source(seed), by_length)
    assert len(batches) == len(pools)
    for pool, batch in zip(pools, batches, strict=True):
        assert len(batch) == min(batch_size, len(pool))
        assert len(set(batch)) == len(batch)
        assert set(batch) <= set(pool)
    for c, size in enumerate(sizes):
        mine = [batch for visit, batch in zip(visits, batches, strict=True) if visit == c]
        take = min(batch_size, size)
        per_pass = size // take
        for start in range(0, len(mine), per_pass):
            drawn = [i for batch in mine[start : start + per_pass] for i in batch]
            assert len(set(drawn)) == len(drawn)  # inside a pass nothing comes twice


@given(POOLS, st.integers(1, 5), st.integers(0, 3))
def test_by_length_keeps_the_multiset_and_sorts_what_one_pass_drew(
    problem: tuple[list[int], list[int]], batch_size: int, seed: int
) -> None:
    sizes, visits = problem
    pools = pools_of(sizes, visits)
    lengths = torch.randint(1, 99, (40,), generator=source(9)).tolist()
    plain = draw_batches(pools, lengths, batch_size, source(seed), False)
    sorted_ = draw_batches(pools, lengths, batch_size, source(seed), True)
    if len(sizes) == 1:  # with several pools the later ones draw after another number of draws
        assert Counter(i for b in plain for i in b) == Counter(i for b in sorted_ for i in b)
    for c, size in enumerate(sizes):
        mine = [batch for visit, batch in zip(visits, sorted_, strict=True) if visit == c]
        if mine and min(batch_size, size) * len(mine) <= size:
            spans = sorted((min(lengths[i] for i in b), max(lengths[i] for i in b)) for b in mine)
            assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_a_pool_of_one_example() -> None:
    for by_length in (False, True):
        assert draw_batches([[5]] * 3, [0] * 6, 4, source(), by_length) == [[5], [5], [5]]


def test_an_empty_pool_is_a_clear_error() -> None:
    with pytest.raises(DataError, match="there is no example to train on"):
        draw_batches([[0], []], [1], 2, source())


def test_no_steps_no_batches() -> None:
    assert draw_batches([], [], 2, source()) == []


def test_batches_depend_on_the_stream_alone() -> None:
    pools = [range(9)] * 4
    assert draw_batches(pools, [1] * 9, 3, source(1)) == draw_batches(pools, [1] * 9, 3, source(1))
    assert draw_batches(pools, [1] * 9, 3, source(1)) != draw_batches(pools, [1] * 9, 3, source(2))


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


# --- Steps ----------------------------------------------------------------------------------------------------------

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


# --- Parts of a mini-batch ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(0, 80))
def test_parts_hold_every_example_once_and_cost_least(lengths: list[int], overhead: int) -> None:
    """Against every way to cut the sorted mini-batch."""
    indices = list(range(len(lengths)))[::-1]
    parts = split_by_length(indices, lengths, overhead)
    assert sorted(i for part in parts for i in part) == sorted(indices)
    assert all(max(lengths[i] for i in a) <= min(lengths[i] for i in b) for a, b in pairwise(parts))

    def cost(cut: Sequence[Sequence[int]]) -> int:
        return sum(overhead + len(part) * max(part) for part in cut)

    ordered, n = sorted(lengths), len(lengths)
    every = []
    for mask in range(1 << (n - 1)):
        ends = [k + 1 for k in range(n - 1) if mask >> k & 1]
        every.append([ordered[a:b] for a, b in pairwise([0, *ends, n])])
    assert cost([[lengths[i] for i in part] for part in parts]) == min(map(cost, every))


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


def test_a_whole_pass_holds_every_example_once() -> None:
    """20 examples in batches of 8: 8, 8 and 4, then a new pass; without ``whole`` the last four are thrown away."""
    pool = list(range(20))
    drawn = draw_batches([pool] * 6, [1] * 20, 8, torch.Generator().manual_seed(1), whole=True)
    assert [len(batch) for batch in drawn] == [8, 8, 4, 8, 8, 4]
    for start in (0, 3):
        assert sorted(i for batch in drawn[start : start + 3] for i in batch) == pool
    assert [len(b) for b in draw_batches([pool] * 3, [1] * 20, 8, torch.Generator().manual_seed(1))] == [8, 8, 8]


def test_an_epoch_is_as_many_steps_as_a_pass_takes(world: World) -> None:
    client = world.client("ann")  # eight examples
    assert client.steps(Training(steps=50, batch_size=3, epochs=2)) == 6
    assert client.steps(Training(steps=4, batch_size=3, epochs=2)) == 4
    assert client.steps(Training(steps=50, batch_size=3)) == 50
