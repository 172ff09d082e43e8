"""Which examples a client draws, and how a mini-batch is cut into parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.errors import DataError
from fedloom.runtime.batches import draw_batches, split_by_length


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


def test_a_whole_pass_holds_every_example_once() -> None:
    """20 examples in batches of 8: 8, 8 and 4, then a new pass; without ``whole`` the last four are thrown away."""
    pool = list(range(20))
    drawn = draw_batches([pool] * 6, [1] * 20, 8, torch.Generator().manual_seed(1), whole=True)
    assert [len(batch) for batch in drawn] == [8, 8, 4, 8, 8, 4]
    for start in (0, 3):
        assert sorted(i for batch in drawn[start : start + 3] for i in batch) == pool
    assert [len(b) for b in draw_batches([pool] * 3, [1] * 20, 8, torch.Generator().manual_seed(1))] == [8, 8, 8]
