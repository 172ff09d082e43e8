from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.errors import FedloomError
from fedloom.numerics.schedule import allocate, schedule

SIZES = st.lists(st.integers(0, 500), min_size=1, max_size=8)
STEPS = st.integers(0, 60)


@pytest.mark.parametrize(
    ("sizes", "steps", "expected"),
    [
        ([60, 40], 5, [3, 2]),  # quotas exact
        ([56, 36, 8], 10, [6, 3, 1]),  # quotas 5.6 3.6 0.8 → 5 3 1, one left: tie at 0.6, lower index
        ([97, 1, 1, 1], 10, [7, 1, 1, 1]),  # quotas 9.7 0.1 0.1 0.1: the minimum wins
        ([50, 47, 1, 1, 1], 10, [4, 3, 1, 1, 1]),  # 5 4 1 1 1 is two too many: one from each large bucket
        ([1, 1, 1], 10, [4, 3, 3]),  # equal remainders: lower index
        ([0, 5, 0, 5], 3, [0, 2, 0, 1]),  # empty buckets get nothing
        ([3, 0, 3, 5], 2, [1, 0, 0, 1]),  # more buckets than steps: the largest, ties to the lower index
        ([7], 10, [10]),
        ([0, 0], 10, [0, 0]),
        ([4, 4], 0, [0, 0]),
        ([], 3, []),
        ([10**15 + 1, 10**15], 3, [2, 1]),  # float quotas would tie
    ],
)
def test_allocation_worked_by_hand(sizes: list[int], steps: int, expected: list[int]) -> None:
    assert allocate(sizes, steps) == expected


@given(SIZES, STEPS)
def test_allocation_spends_the_budget_and_serves_every_filled_bucket(sizes: list[int], steps: int) -> None:
    counts = allocate(sizes, steps)
    filled = [c for c, size in enumerate(sizes) if size]
    assert sum(counts) == (steps if filled else 0)
    assert all(counts[c] == 0 for c in range(len(sizes)) if sizes[c] == 0)
    if len(filled) <= steps:
        assert all(counts[c] >= 1 for c in filled)
    quotas = [steps * size / max(1, sum(sizes)) for size in sizes]
    if all(quotas[c] >= 1 for c in filled):  # then it is plain largest remainder, which keeps quota
        assert all(quota - 1 < count < quota + 1 for count, quota in zip(counts, quotas))


@given(SIZES, STEPS)
def test_larger_buckets_never_get_fewer_steps(sizes: list[int], steps: int) -> None:
    counts = allocate(sizes, steps)
    ranked = [count for _, count in sorted(zip(sizes, counts, strict=True))]
    assert ranked == sorted(ranked)


@pytest.mark.parametrize(
    ("sizes", "steps", "expected"),
    [
        ([60, 40], 5, [0, 1, 0, 1, 0]),  # 1/6 1/2 5/6 and 1/4 3/4
        ([1, 1], 4, [0, 1, 0, 1]),  # ties to the lower index
        ([97, 1, 1, 1], 10, [0, 0, 0, 0, 1, 2, 3, 0, 0, 0]),  # 7/14 = 1/2 four times: lower index first
        ([0, 3], 2, [1, 1]),
        ([0, 0], 5, []),
    ],
)
def test_schedule_worked_by_hand(sizes: list[int], steps: int, expected: list[int]) -> None:
    assert schedule(sizes, steps) == expected


@given(SIZES, STEPS)
def test_schedule_visits_each_bucket_as_often_as_allocated_and_evenly(sizes: list[int], steps: int) -> None:
    order = schedule(sizes, steps)
    counts = allocate(sizes, steps)
    assert [order.count(c) for c in range(len(sizes))] == counts
    others = sum(count > 0 for count in counts) - 1
    for c in set(order):
        visits = [t for t, bucket in enumerate(order) if bucket == c]
        gaps = [after - before for before, after in pairwise(visits)]
        # Between two visits every other bucket comes ⌊H_b/H_c⌋ or ⌈H_b/H_c⌉ times.
        assert not gaps or max(gaps) - min(gaps) <= others


@pytest.mark.parametrize(("sizes", "steps"), [([1, -1], 3), ([1, 1], -1)])
def test_negative_numbers_are_refused(sizes: list[int], steps: int) -> None:
    with pytest.raises(FedloomError, match="negative"):
        allocate(sizes, steps)
