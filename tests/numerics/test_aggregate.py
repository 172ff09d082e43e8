import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedloom.errors import AdapterError, FedloomError
from fedloom.numerics.aggregate import (
    RunningMean,
    consensus_direction,
    project_conflicts,
    weighted_mean,
    weighted_mean_by_component,
)
from fedloom.types import Reply

VALUES = st.floats(-1e3, 1e3, width=32)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 12)), elements=VALUES)
WEIGHT = st.one_of(st.just(0.0), st.floats(1e-3, 1e6))


def tensors(rows: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(row.copy()) for row in rows]


def inner(a: torch.Tensor, b: torch.Tensor) -> float:
    return math.fsum((a.double() * b.double()).flatten().tolist())


# --- weighted_mean


def test_weighted_mean_by_hand() -> None:
    mean = weighted_mean([torch.tensor([1.0, 0.0]), torch.tensor([5.0, 8.0])], [3, 1])
    assert mean.tolist() == [2.0, 2.0]


@given(ROWS, st.data())
def test_weighted_mean_against_numpy(rows: np.ndarray, data: st.DataObject) -> None:
    weights = data.draw(st.lists(WEIGHT, min_size=len(rows), max_size=len(rows)))
    mean = weighted_mean(tensors(rows), weights)
    assert mean.dtype == torch.float32
    if sum(weights) == 0:
        assert torch.equal(mean, torch.zeros_like(mean))
    else:
        expected = np.average(rows.astype(np.float64), axis=0, weights=weights)
        np.testing.assert_allclose(mean, expected, rtol=1e-6, atol=1e-9)


@given(ROWS, st.data())
def test_scaling_all_weights_changes_nothing(rows: np.ndarray, data: st.DataObject) -> None:
    weights = data.draw(st.lists(WEIGHT, min_size=len(rows), max_size=len(rows)))
    factor = data.draw(st.sampled_from([2.0**-40, 0.5, 2.0**30]))
    a, b = weighted_mean(tensors(rows), weights), weighted_mean(tensors(rows), [factor * w for w in weights])
    assert torch.equal(a, b)


@given(ROWS, st.randoms())
def test_order_is_irrelevant_bitwise_after_sorting(rows: np.ndarray, random: object) -> None:
    named = [(f"c{i}", t, float(i + 1)) for i, t in enumerate(tensors(rows))]
    shuffled = named.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    _, updates, weights = zip(*named)
    expected = weighted_mean(updates, weights)
    _, updates, weights = zip(*sorted(shuffled, key=lambda item: item[0]))
    assert torch.equal(weighted_mean(updates, weights), expected)


def test_a_single_full_weight_returns_that_update_exactly() -> None:
    updates = list(torch.randn(4, 33, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(weighted_mean(updates, [0.0, 1.0, 0.0, 0.0]), updates[1])


def test_an_update_of_weight_zero_is_not_read() -> None:
    mean = weighted_mean([torch.tensor([1.0]), torch.tensor([float("nan")])], [1.0, 0.0])
    assert mean.tolist() == [1.0]


def test_weights_near_the_ends_of_float64() -> None:
    updates = [torch.tensor([2.0]), torch.tensor([4.0])]
    assert weighted_mean(updates, [1e308, 1e308]).tolist() == [3.0]
    assert weighted_mean(updates, [5e-324, 5e-324]).tolist() == [3.0]


def test_small_terms_survive_next_to_large_ones() -> None:
    # In float32, 2^24 + 1 = 2^24: a float32 accumulator would lose all but the first update.
    updates = [torch.tensor([2.0**24])] + [torch.tensor([1.0])] * 2**10
    assert weighted_mean(updates, [1.0] * len(updates)).item() == np.float32((2**24 + 2**10) / (1 + 2**10))


def test_bfloat16_stays_bfloat16() -> None:
    mean = weighted_mean([torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)], [1, 1])
    assert mean.dtype == torch.bfloat16
    assert mean.item() == 1.5


@pytest.mark.parametrize("weights", [[-1.0, 1.0], [float("nan"), 1.0], [float("inf"), 1.0], [1.0], [1.0, 1.0, 1.0]])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(FedloomError, match="weight"):
        weighted_mean([torch.zeros(2), torch.zeros(2)], weights)


def test_bad_updates_are_refused() -> None:
    with pytest.raises(FedloomError):
        weighted_mean([], [])
    with pytest.raises(AdapterError, match=r"Update 1 is \(1, 2\)"):
        weighted_mean([torch.zeros(2, 1), torch.zeros(1, 2)], [1, 1])
    with pytest.raises(AdapterError, match="bfloat16"):
        weighted_mean([torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)], [1, 1])
    with pytest.raises(AdapterError, match="int64"):
        weighted_mean([torch.tensor([1])], [1])


# --- FC-MoE consensus projection


def test_fcmoe_consensus_and_projection_by_hand() -> None:
    updates = [torch.tensor([3.0, 1.0]), torch.tensor([-1.0, 1.0])]
    consensus = consensus_direction(updates, [3.0, 1.0])
    assert consensus.tolist() == [2.0, 1.0]
    first, second = project_conflicts(updates, consensus)
    assert first is updates[0]  # 3·2 + 1·1 = 7
    # −1·2 + 1·1 = −1; (−1, 1) − (−1/5)·(2, 1) = (−0.6, 1.2), which is at a right angle to (2, 1).
    torch.testing.assert_close(second, torch.tensor([-0.6, 1.2]))


def test_projection_flattens_the_whole_tensor() -> None:
    update = torch.tensor([[-4.0, 0.0], [0.0, 1.0]])
    consensus = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # ⟨·,·⟩ = −3, ‖·‖² = 2
    assert project_conflicts([update], consensus)[0].tolist() == [[-2.5, 0.0], [0.0, 2.5]]


def test_opposite_clients() -> None:
    update = torch.tensor([1.0, -2.0, 4.0])
    equal = consensus_direction([update, -update], [1.0, 1.0])
    assert torch.equal(equal, torch.zeros(3))
    assert all(torch.equal(a, b) for a, b in zip(project_conflicts([update, -update], equal), [update, -update]))
    unequal = consensus_direction([update, -update], [3.0, 1.0])  # half of the first
    kept, erased = project_conflicts([update, -update], unequal)
    assert torch.equal(kept, update)
    assert torch.equal(erased, torch.zeros(3))


def test_orthogonal_update_is_untouched() -> None:
    update = torch.tensor([0.0, 5.0])
    assert torch.equal(project_conflicts([update], torch.tensor([1.0, 0.0]))[0], update)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1e-9])  # 1e-9 reaches the subnormals of float16
@given(rows=ROWS, data=st.data())
def test_no_projected_update_opposes_the_consensus(
    dtype: torch.dtype, scale: float, rows: np.ndarray, data: st.DataObject
) -> None:
    consensus = data.draw(hnp.arrays(np.float32, rows.shape[1:], elements=VALUES))
    updates, direction = [(scale * t).to(dtype) for t in tensors(rows)], torch.from_numpy(consensus).to(dtype)
    info = torch.finfo(dtype)
    for before, after in zip(updates, project_conflicts(updates, direction), strict=True):
        if inner(before, direction) >= 0:
            assert torch.equal(before, after)
        length, other = float(before.double().norm()), float(direction.double().norm())
        assert inner(after, direction) >= (-1e-15 * length * other if dtype == torch.float64 else 0.0)
        assert float(after.double().norm()) <= length + 8 * info.eps * (
            length + info.smallest_normal * len(before) ** 0.5
        )


def test_projection_in_many_dimensions_against_a_float64_oracle() -> None:
    rng = np.random.default_rng(0)
    consensus = rng.normal(size=100_000).astype(np.float32)
    for _ in range(20):
        update = (rng.normal(size=consensus.size) - 0.01 * consensus).astype(np.float32)
        u, c = update.astype(np.float64), consensus.astype(np.float64)
        (result,) = project_conflicts([torch.from_numpy(update)], torch.from_numpy(consensus))
        np.testing.assert_allclose(result, u - min(0.0, u @ c) / (c @ c) * c, atol=2e-5)
        assert float(result.numpy().astype(np.float64) @ c) >= 0


def test_projection_refuses_what_it_cannot_use() -> None:
    with pytest.raises(AdapterError, match="Update 0"):
        project_conflicts([torch.zeros(2, 1)], torch.zeros(1, 2))
    with pytest.raises(FedloomError, match="not finite"):
        project_conflicts([torch.zeros(2)], torch.tensor([1.0, float("nan")]))
    assert project_conflicts([], torch.ones(2)) == []


# --- streaming means


def reply(client: str, send: dict[str, torch.Tensor], **counts: int) -> Reply:
    return Reply(client, send, {name.replace("_", "/"): count for name, count in counts.items()})


def test_mean_by_component_with_an_absent_client_and_unequal_counts() -> None:
    def t(value: float) -> torch.Tensor:
        return torch.tensor([value])

    replies = [
        reply("a", {"experts/0/q.lora_B": t(1.0), "router/w": t(10.0)}, experts_0=3, router=5),
        reply("b", {"experts/1/q.lora_B": t(7.0), "router/w": t(20.0)}, experts_1=2, router=15),
        reply("c", {"experts/0/q.lora_B": t(5.0), "experts/2/q.lora_B": t(9.0)}, experts_0=1, experts_2=0),
    ]
    means, totals = weighted_mean_by_component(replies)
    assert {name: mean.item() for name, mean in means.items()} == {
        "experts/0/q.lora_B": 2.0,  # (3·1 + 1·5) / 4
        "experts/1/q.lora_B": 7.0,  # only b
        "router/w": 17.5,  # (5·10 + 15·20) / 20
    }
    assert totals == {"experts/0": 4.0, "router": 20.0, "experts/1": 2.0, "experts/2": 0.0}


def test_mean_by_component_against_weighted_mean() -> None:
    torch.manual_seed(0)
    names = [f"experts/{m}/{p}.lora_{f}" for m in range(3) for p in "qv" for f in "AB"] + ["router/a", "router/b"]
    replies = []
    for i in range(7):
        counts = {"experts/0": i, "experts/1": 2 * i + 1, "experts/2": 0, "router": 10 + i}
        replies.append(Reply(f"c{i}", {name: torch.randn(4, 3) for name in names}, counts))
    means, _ = weighted_mean_by_component(replies)
    assert set(means) == {name for name in names if not name.startswith("experts/2/")}
    for name, mean in means.items():
        unit = "router" if name.startswith("router") else name[: len("experts/0")]
        dense = weighted_mean([r.send[name] for r in replies], [r.counts[unit] for r in replies])
        torch.testing.assert_close(mean, dense, rtol=1e-6, atol=0)


def test_replies_are_read_once_and_one_at_a_time() -> None:
    alive = 0
    most = 0

    class Tracked(Reply):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def stream() -> Iterator[Reply]:
        nonlocal alive, most
        for i in range(50):
            alive += 1
            most = max(most, alive)
            yield Tracked(f"c{i}", {"router/w": torch.full((4,), float(i))}, {"router": 1})

    means, totals = weighted_mean_by_component(stream())
    assert means["router/w"].tolist() == [24.5] * 4
    assert totals == {"router": 50.0}
    assert most <= 2  # the one in hand and the one being made


def test_another_component_rule() -> None:
    replies = [
        reply("a", {"x/1": torch.tensor([1.0])}, examples=1),
        reply("b", {"x/1": torch.tensor([4.0])}, examples=2),
    ]
    means, totals = weighted_mean_by_component(replies, component=lambda name: "examples")
    assert means["x/1"].item() == 3.0
    assert totals == {"examples": 3.0}


def test_a_missing_count_and_a_misfit_are_named() -> None:
    good = reply("a", {"router/w": torch.zeros(2)}, router=1)
    with pytest.raises(AdapterError, match="Client 'b' sent 'router/w' without a count of examples for 'router'"):
        weighted_mean_by_component([good, reply("b", {"router/w": torch.zeros(2)}, examples=1)])
    with pytest.raises(AdapterError, match="'router/w' is \\(3,\\)"):
        weighted_mean_by_component([good, reply("b", {"router/w": torch.zeros(3)}, router=1)])
    with pytest.raises(FedloomError, match="negative"):
        weighted_mean_by_component([reply("a", {"router/w": torch.zeros(2)}, router=-1)])


def test_nobody_replied() -> None:
    assert weighted_mean_by_component([]) == ({}, {})


def test_running_mean_of_a_transposed_tensor() -> None:
    running, one = RunningMean(), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    running.add("x", one.T, 1)
    running.add("x", torch.zeros(3, 2), 1)
    assert running.mean()["x"].tolist() == [[0.5, 2.0], [1.0, 2.5], [1.5, 3.0]]


def test_running_mean_keeps_bfloat16_and_accumulates_in_float64() -> None:
    running = RunningMean()
    for value in [256.0] + [1.0] * 255:  # in bfloat16, 256 + 1 = 256
        running.add("x", torch.tensor([value], dtype=torch.bfloat16), 1)
    assert running.mean()["x"].dtype == torch.bfloat16
    assert running.mean()["x"].item() == 2.0  # 511 / 256 = 1.996, nearest bfloat16
