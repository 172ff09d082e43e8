"""Sampling, judging, bad rows of rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.errors import RoundError
from fedloom.methods.base import Method
from fedloom.methods.fedit import FedIT
from fedloom.numerics.tree import norm
from fedloom.runtime.loop import Federation, Receipt, judge, make_orders, sample_cohort
from fedloom.runtime.quarantine import absurd_norms
from fedloom.runtime.wire import encode_reply
from fedloom.types import Order, Replies, Reply, State, component
from small_world import SPEC, TRAINING, Wire, World, same

NAMES = st.lists(st.integers(0, 99), unique=True, min_size=1, max_size=30).map(
    lambda n: [f"c{i:02}" for i in sorted(n)]
)


@given(NAMES, st.floats(0.01, 1.0), st.integers(0, 5), st.integers(1, 5))
def test_a_cohort_is_a_sorted_share_of_at_least_one(names: list[str], share: float, seed: int, round: int) -> None:
    cohort = sample_cohort(names, share, seed, round)
    assert cohort == sorted(set(cohort))
    assert set(cohort) <= set(names)
    assert len(cohort) == max(1, int(share * len(names) + 0.5))
    assert cohort == sample_cohort(names, share, seed, round)


def test_A12_cohorts_differ_by_round_and_by_seed_and_reach_everyone_alike() -> None:
    names = [f"c{i}" for i in range(10)]
    cohorts = {
        (seed, round): tuple(sample_cohort(names, 0.3, seed, round)) for seed in range(40) for round in range(1, 26)
    }
    assert len({cohorts[0, r] for r in range(1, 26)}) > 15
    assert sum(cohorts[0, r] == cohorts[1, r] for r in range(1, 26)) < 5
    drawn = Counter(name for cohort in cohorts.values() for name in cohort)
    # 1000 cohorts, each name in 300 of them on average, standard deviation √(1000·0.3·0.7) = 14.5.
    assert all(abs(count - 300) < 5 * 14.5 for count in drawn.values())


def test_full_participation_is_everyone_in_order() -> None:
    assert sample_cohort(["a", "b", "c"], 1.0, 0, 1) == ["a", "b", "c"]
    assert sample_cohort([], 1.0, 0, 1) == []


def test_a_state_that_is_not_finite_is_not_kept_and_the_run_goes_on_from_the_round_before(tmp_path: Path) -> None:
    class Overflowing(FedIT):
        broken = True

        def merge(self, state: State, replies: Replies) -> State:
            merged = super().merge(state, replies)
            if not (self.broken and state.round == 2):
                return merged
            return replace(merged, kept={"control/x": torch.tensor([1.0, float("inf")])})

    method, world = Overflowing(), World(tmp_path / "one")
    with pytest.raises(RoundError, match=r"round 2 made 1 tensors .* NaN or infinity, first 'control/x'.*goes on from"):
        world.run(method, rounds=3)
    assert world.checkpoints.rounds() == [0, 1]
    assert [record["round"] for record in world.log.read()] == [0, 1]
    method.broken = False
    resumed = World(tmp_path / "one").run(method, rounds=3)
    assert same(resumed.tensors, World(tmp_path / "two").run(FedIT(), rounds=3).tensors)


def test_A10_the_norm_is_that_of_the_whole_vector() -> None:
    """√(3² + 4² + 12²) = 13; the sum of per-tensor norms would be 5 + 12 = 17."""
    tensors = {"a": torch.tensor([3.0, -4.0]), "b": torch.tensor([[12.0]])}
    assert norm(tensors) == 13.0
    assert norm(tensors) == torch.linalg.vector_norm(torch.cat([t.flatten() for t in tensors.values()])).item()
    assert norm({"x": torch.full((1000,), 3e38)}) == pytest.approx(3e38 * 1000**0.5)


def test_absurd_norms_by_hand() -> None:
    assert absurd_norms([1.0, 2.0, 3.0, 201.0], 100.0) == [3]  # lower median 2: the limit is 200
    assert absurd_norms([1.0, 2.0, 3.0, 200.0], 100.0) == []
    assert absurd_norms([1e-30, 0.4], 100.0) == []  # of two, neither judges the other
    assert absurd_norms([1e30], 100.0) == []
    assert absurd_norms([0.0, 0.0, 7.0], 100.0) == []  # silence does not judge
    assert absurd_norms([0.0, 0.0], 100.0) == []
    assert absurd_norms([1.0, 1.0, float("inf")], 100.0) == [2]
    assert absurd_norms([], 100.0) == []


#: Three steps at a rate of 0.01 can reach it.
SMALL = torch.tensor([0.1])


def receipts_of(folder: Path, sizes: dict[str, int]) -> list[Receipt]:
    found = []
    for client, size in sizes.items():
        path = folder / client
        path.write_bytes(
            encode_reply(Reply(client, {"w": SMALL}, {"examples": size, "w": size}, {"loss": 2.0 * size}), 1)
        )
        found.append(Receipt(client, path, 10, 20, 0.5))
    return found


STATE = State(1, {"w": torch.zeros(1)}, SPEC)


def test_judging_sorts_and_counts(tmp_path: Path) -> None:
    method = Method()
    orders = make_orders(method, "fit", STATE, ["c", "a", "b", "d"], TRAINING)
    assert [order.client for order in orders] == ["a", "b", "c", "d"]
    receipts = receipts_of(tmp_path, {"c": 1, "a": 3, "b": 0})
    answers = judge(method, orders, receipts, Federation(), 1.25)
    assert [reply.client for reply in answers.replies] == ["a", "c"]
    assert [reply.client for reply in answers.replies] == ["a", "c"]  # twice
    assert answers.quarantined == {"b": "it counts no examples"}
    assert answers.absent == ["d"]
    for receipt in receipts:
        receipt.path.unlink()  # the log needs no tensors
    record = answers.record()
    assert record["train_loss"] == (3 * 6.0 + 1 * 2.0) / 4
    assert record["weights"] == {"examples": 4, "w": 4}
    assert record["shares"] == {}  # both sent all there is
    assert (record["bytes_up"], record["bytes_down"], record["seconds"]) == (30, 60, 1.25)


def test_the_log_names_the_clients_of_what_not_all_sent(tmp_path: Path) -> None:
    class Parts(Method):
        def expected(self, order: Order, reply: Reply) -> dict[str, tuple[int, ...]]:
            return dict.fromkeys(reply.send, (1,))

    receipts = []
    for client, size, expert in (("a", 3, 0), ("b", 2, 1), ("c", 1, 1)):
        names = ["experts/p.0/w", f"experts/p.{expert}/w", "router/w"]
        counts = {"examples": size} | dict.fromkeys({component(name) for name in names}, size)
        path = tmp_path / client
        path.write_bytes(encode_reply(Reply(client, {name: SMALL.clone() for name in names}, counts, {}), 1))
        receipts.append(Receipt(client, path, 1, 1, 0.0))
    orders = make_orders(Parts(), "fit", STATE, ["a", "b", "c"], TRAINING)
    record = judge(Parts(), orders, receipts, Federation(), 0.0).record()
    assert record["weights"] == {"examples": 6, "experts/p.0": 6, "experts/p.1": 3, "router": 6}
    assert record["shares"] == {"experts/p.1": {"b": 2, "c": 1}}


def test_A8_too_few_replies_name_both_numbers(tmp_path: Path) -> None:
    orders = make_orders(Method(), "fit", STATE, ["a", "b", "c"], TRAINING)
    with pytest.raises(
        RoundError, match=r"got 1 usable replies of 3 asked; at least 2 .*'b'.*counts no examples.*Silent: \['c'\]"
    ):
        judge(Method(), orders, receipts_of(tmp_path, {"a": 3, "b": 0}), Federation(min_replies=2), 0.0)


def test_a_second_answer_of_one_client_and_one_nobody_asked_for_do_not_count(tmp_path: Path) -> None:
    method = Method()
    orders = make_orders(method, "fit", STATE, ["a", "b"], TRAINING)
    receipts = receipts_of(tmp_path, {"a": 3, "b": 1})
    uninvited = receipts_of(tmp_path, {"z": 1000})
    answers = judge(method, orders, [*receipts, receipts[0], *uninvited], Federation(), 0.0)
    assert [reply.client for reply in answers.replies] == ["a", "b"]
    assert answers.record()["weights"]["examples"] == 4
    assert answers.quarantined == {"z": "it was not asked"}


def test_a_reply_that_is_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = make_orders(Method(), "fit", STATE, ["a", "b"], TRAINING)
    receipts = receipts_of(tmp_path, {"a": 3, "b": 1})
    with open(tmp_path / "b", "ab") as file:
        file.truncate(3 << 30)  # a hole: takes no space, and could not be read
    answers = judge(Method(), orders, receipts, Federation(), 0.0)
    assert [reply.client for reply in answers.replies] == ["a"]
    assert answers.quarantined == {"b": f"it has {3 << 30} bytes; max_reply_bytes is {2 << 30}"}
    length = (tmp_path / "a").stat().st_size
    judge(Method(), orders, receipts, Federation(max_reply_bytes=length), 0.0)
    with pytest.raises(RoundError, match=f"it has {length} bytes; max_reply_bytes is {length - 1}"):
        judge(Method(), orders, receipts, Federation(max_reply_bytes=length - 1), 0.0)


def test_A7_a_dead_site_is_not_waited_for(tmp_path: Path) -> None:
    """Rounds 1 to 3 without bob: each closes with the three that answered."""
    world = World(tmp_path)
    alive = Wire(world.simulator, lambda orders, receipts: [r for r in receipts if r.client != "bob"])
    world.run(Method(), transport=alive, min_replies=2)
    assert [record["absent"] for record in world.log.read()[1:]] == [["bob"]] * 3


def test_orders_carry_the_view_and_the_training(tmp_path: Path) -> None:
    (order,) = make_orders(Method(), "fit", STATE, ["a"], TRAINING)
    assert order == Order("fit", "a", 1, STATE.tensors, SPEC, TRAINING, {})


def test_what_a_method_logs_stands_in_the_line_of_its_round(tmp_path: Path) -> None:
    class Talker(Method):
        def merge(self, state: State, replies: Replies) -> State:
            merged = super().merge(state, replies)
            return replace(merged, values=merged.values | {"log": {"heard": len(replies)}})

    world = World(tmp_path)
    world.run(Talker(), rounds=2)
    assert [record.get("method") for record in world.log.read()] == [None, {"heard": 4}, {"heard": 4}]
