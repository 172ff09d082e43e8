"""Whole runs with secure aggregation: the plain result to rounding, and nothing of a single client at the server."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is an option of its own")

from fedloom.config import parse_config
from fedloom.errors import ConfigError, RoundError
from fedloom.methods import METHODS
from fedloom.methods.base import Method
from fedloom.methods.protection import Privacy, SecureAggregation
from fedloom.methods.server import ServerStep
from fedloom.numerics.fixed import LARGEST
from fedloom.numerics.init import router_init
from fedloom.numerics.seeding import generator
from fedloom.runtime import secure_round
from fedloom.runtime.leaving import Leaving
from fedloom.runtime.loop import Receipt
from fedloom.runtime.secure_client import frame, unframe
from fedloom.types import Client, Order, Reply, Tensors
from marker import MARK, Marked, traces
from small_world import TRAINING, Wire, World, client_rows, tree, world_of

SECAGG = SecureAggregation(min_contributors=2, reveal_signatures=True)
ROUNDING = 2.0**-24  # of float32 values up to 1, after integers of 2⁻³³ each

Change = Callable[[str, str, bytes], bytes | None]


class Between:
    """A transport that changes what a client answers in a stage of a secure round; None is no answer."""

    def __init__(self, inner: Any, change: Change) -> None:
        self.inner, self.change = inner, change
        self.exchange, self.committed = inner.exchange, inner.committed

    def ask(self, method: Method, round: int, messages: dict[str, bytes], *rest: Any) -> list[Receipt]:
        found = []
        for receipt in self.inner.ask(method, round, messages, *rest):
            stage = unframe(messages[receipt.client])[0]["stage"]
            data = self.change(stage, receipt.client, receipt.path.read_bytes())
            if data is not None:
                receipt.path.write_bytes(data)
                found.append(receipt)
        return found


def go(out: Path, name: str, secagg: SecureAggregation | None, change: Change | None = None, **more: Any) -> World:
    method = more.pop("method", None) or METHODS[name]()
    found = world_of(method, out, clients=more.pop("clients", None))
    found.simulator.leaving = Leaving(privacy=more.get("privacy"), uniform=bool(more.get("server")))
    transport = Between(found.simulator, change) if change else found.simulator
    transport = more.pop("transport", transport)
    found.run(method, secagg=secagg, transport=transport, **{"rounds": 2, **more})
    return found


def difference(a: World, b: World, round: int) -> float:
    first, second = (world.checkpoints.load(round).state.tensors for world in (a, b))
    assert first.keys() == second.keys()
    return max(float((tensor - second[name]).abs().max()) for name, tensor in first.items())


def silent(client: str, at: str) -> Change:
    return lambda stage, name, data: None if (stage, name) == (at, client) else data


def test_the_result_is_the_plain_one_to_rounding(tmp_path: Path) -> None:
    plain, secure = (go(tmp_path / str(s is None), "ffa_lora", s, rounds=1) for s in (None, SECAGG))
    assert difference(plain, secure, 1) < ROUNDING
    one, other = plain.log.read()[1], secure.log.read()[1]
    assert other["weights"] == {"experts/0": one["weights"]["experts/0"]}
    assert other["train_loss"] == pytest.approx(one["train_loss"], abs=1e-6)
    assert not other["quarantined"]
    assert not other["absent"]
    assert all(client["examples"] == 0 and "loss" not in client for client in other["clients"].values())
    assert other["bytes_up"] > 8 * sum(t.numel() for t in plain.checkpoints.load(1).state.tensors.values()) * 2


def test_one_that_drops_out_after_sharing_its_keys_is_as_one_that_was_not_there(tmp_path: Path) -> None:
    def without_bob(orders: Any, receipts: list[Receipt]) -> list[Receipt]:
        return [receipt for receipt in receipts if receipt.client != "bob"]

    plain = world_of(METHODS["fedit"](), tmp_path / "plain")
    plain.run(METHODS["fedit"](), rounds=1, transport=Wire(plain.simulator, without_bob))
    for stage in ("shares", "mask"):
        secure = go(tmp_path / stage, "fedit", SECAGG, silent("bob", stage), rounds=1)
        assert difference(plain, secure, 1) < ROUNDING
        assert secure.log.read()[1]["absent"] == ["bob"]
    late = go(tmp_path / "late", "fedit", SECAGG, silent("bob", "unmask"), rounds=1)  # its update is in the sum
    assert difference(go(tmp_path / "all", "fedit", None, rounds=1), late, 1) < ROUNDING


def test_a_vector_of_another_length_is_left_out_by_name(tmp_path: Path) -> None:
    def shorter(stage: str, name: str, data: bytes) -> bytes:
        return data[:-8] if (stage, name) == ("mask", "bob") else data

    secure = go(tmp_path / "short", "fedit", SECAGG, shorter, rounds=1)
    gone = go(tmp_path / "gone", "fedit", SECAGG, silent("bob", "mask"), rounds=1)
    assert difference(secure, gone, 1) == 0.0  # masks leave no trace: two runs with other keys agree bit by bit
    assert "in stage 'mask': its masked vector has" in secure.log.read()[1]["quarantined"]["bob"]


def test_one_that_contributes_what_it_was_not_asked_for_ends_the_round_by_name(tmp_path: Path) -> None:
    """Adding to the masked integers adds to the sum: here a second contributor to the first unit."""

    def one_more(stage: str, name: str, data: bytes) -> bytes:
        if (stage, name) != ("mask", "bob"):
            return data
        header, body = unframe(data)
        vector = np.frombuffer(body, "<i8").copy()
        vector[1] += 1
        return frame(header, vector.tobytes())

    with pytest.raises(RoundError, match="5 clients say that they contributed to 'experts/0', but 4 were asked"):
        go(tmp_path, "fedit", SECAGG, one_more, rounds=1)


def test_a_sum_beyond_what_steps_can_reach_ends_the_round(tmp_path: Path) -> None:
    class Huge(METHODS["fedit"]):  # type: ignore[misc]
        def local(self, client: Client, order: Order) -> Reply:
            reply: Reply = super().local(client, order)
            if client.name != "bob":
                return reply
            return replace(reply, send={n: torch.full_like(t, LARGEST) for n, t in reply.send.items()})

    with pytest.raises(RoundError, match=r"the norm .* of the clients' sum in 'experts/0' exceeds"):
        go(tmp_path, "fedit", SECAGG, method=Huge(), rounds=1)


@pytest.mark.parametrize(("times", "refused"), [(8.3, False), (8.5, True)])
def test_a_mean_is_no_longer_than_one_honest_update_can_be(tmp_path: Path, times: float, refused: bool) -> None:
    """Each value moves by rate · steps · 7.27 at most, and rounding adds 15 %: 8.36 in all."""

    class Far(METHODS["fedit"]):  # type: ignore[misc]
        def local(self, client: Client, order: Order) -> Reply:
            reply: Reply = super().local(client, order)
            rate = max(order.training.lr, order.training.router_lr)
            moved = times * rate * order.training.steps
            return replace(reply, send={n: torch.full_like(t, moved) for n, t in reply.send.items()})

    ends = pytest.raises(RoundError, match="more than honest ones can reach") if refused else nullcontext()
    with ends:
        go(tmp_path, "fedit", SECAGG, method=Far(), rounds=1)


def test_diverged_training_leaves_its_own_site_out(tmp_path: Path) -> None:
    class Diverged(METHODS["fedit"]):  # type: ignore[misc]
        def local(self, client: Client, order: Order) -> Reply:
            reply: Reply = super().local(client, order)
            value = float("nan") if client.name == "bob" else 1.0
            return replace(reply, send={n: t * value for n, t in reply.send.items()})

    found = go(tmp_path / "nan", "fedit", SECAGG, method=Diverged(), rounds=1)
    gone = go(tmp_path / "gone", "fedit", SECAGG, silent("bob", "mask"), rounds=1)
    assert "not within" in found.log.read()[1]["quarantined"]["bob"]
    assert difference(found, gone, 1) == 0.0


# FedWeave: per expert and router.


def alike(assignment: dict[str, list[int]]) -> Method:
    """Return FedWeave with the experts of each client's buckets prescribed; a bucket is a pattern."""

    class Fixed(METHODS["fedweave"]):  # type: ignore[misc]
        def buckets(self, client: Client) -> list[int]:
            return [i % len(assignment[client.name]) for i in range(client.size)]

        def discover(self, state: Any, replies: Any) -> Any:
            found = super().discover(state, replies)
            count = 1 + max(m for experts in assignment.values() for m in experts)
            experts = {
                n.replace("experts/0/", f"experts/{m}/"): t.clone()
                for m in range(count)
                for n, t in found.tensors.items()
                if n.startswith("experts/0/")
            }
            router = router_init(found.values["hidden_size"], 8, count, generator(0, "r"))
            spec = replace(self.deployed(found.spec, count), router_hidden=8)
            return replace(found, tensors=experts | router, spec=spec, values=found.values | {"assignment": assignment})

    return Fixed()


WHERE = {"ann": [0, 1], "bob": [0], "cyd": [0], "dan": [0]}


def test_fedweave_sums_each_expert_and_the_router(tmp_path: Path) -> None:
    plain = go(tmp_path / "plain", "fedweave", None, method=alike(WHERE), rounds=1)
    secure = go(tmp_path / "secure", "fedweave", SECAGG, method=alike(WHERE), rounds=1)
    one, other = (world.checkpoints.load(1).state.tensors for world in (plain, secure))
    start = secure.checkpoints.load(0).state.tensors
    for name, tensor in other.items():
        if name.startswith("experts/1/"):  # ann alone: her update would be the sum
            assert torch.equal(tensor, start[name])
            assert not torch.equal(one[name], start[name]) or name.endswith("lora_A")
        else:
            assert (tensor - one[name]).abs().max() < ROUNDING
    assert secure.log.read()[1]["weights"].keys() == {"experts/0", "router"}


def test_an_expert_that_loses_a_contributor_on_the_way_is_not_uncovered(tmp_path: Path) -> None:
    """Expert 1 has ann and bob; bob drops out. The first sum stays masked; expert 0 and the router get a second one."""
    where = {"ann": [0, 1], "bob": [1], "cyd": [0], "dan": [0]}
    uncovered: list[list[str]] = []
    inner = secure_round.Attempt.uncover

    def uncover(self: Any, contributors: dict[str, int]) -> Any:
        uncovered.append(self.units)
        return inner(self, contributors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure_round.Attempt, "uncover", uncover)
        found = go(tmp_path, "fedweave", SECAGG, silent("bob", "mask"), method=alike(where), rounds=1)
    assert uncovered == [["experts/0", "router"]]
    start, end = found.checkpoints.load(0).state.tensors, found.checkpoints.load(1).state.tensors
    assert all(torch.equal(tensor, start[name]) for name, tensor in end.items() if name.startswith("experts/1/"))
    assert not all(torch.equal(tensor, start[name]) for name, tensor in end.items() if name.startswith("experts/0/"))


def test_whoever_is_asked_again_goes_on_from_the_memory_before_the_round(tmp_path: Path) -> None:
    where = {"ann": [0, 1], "bob": [1], "cyd": [0], "dan": [0]}
    keep = replace(TRAINING, optimizer_state="keep")
    found = go(tmp_path, "fedweave", SECAGG, silent("bob", "mask"), method=alike(where), rounds=1, training=keep)
    memories = found.checkpoints.load(1).memories
    taken = {name: float(found.memory.read(memories[name]).tensors["optimizer/0/step"]) for name in ("ann", "cyd")}
    assert taken == {"ann": 3.0, "cyd": 3.0}  # they trained twice, for one round
    assert memories["bob"] == "bob-r0.safetensors"


def test_too_few_sites_end_the_round_by_name(tmp_path: Path) -> None:
    few = {name: client_rows()[name] for name in ("ann", "bob")}
    with pytest.raises(RoundError, match=r"needs 3 sites .* 2 sites are left, of 2 asked"):
        go(tmp_path, "fedit", SECAGG, clients=few, rounds=1)


def test_fewer_than_the_threshold_are_asked_again(tmp_path: Path) -> None:
    """All four must stay; three do, at whatever stage: the second try is of three, and all of those stay."""
    everyone = SECAGG.model_copy(update={"threshold": 1.0})
    for stage in ("shares", "mask"):
        found = go(tmp_path / stage, "fedit", everyone, silent("bob", stage), rounds=1)
        gone = go(tmp_path / f"{stage}-gone", "fedit", SECAGG, silent("bob", stage), rounds=1)
        assert difference(found, gone, 1) == 0.0
        assert found.log.read()[1]["absent"] == ["bob"]

    def two(stage: str, name: str, data: bytes) -> bytes | None:
        return None if stage == "mask" and name in ("bob", "cyd") else data

    with pytest.raises(RoundError, match=r"needs 3 sites .* 2 sites are left, of 4 asked"):
        go(tmp_path / "two", "fedit", everyone, two, rounds=1)


# A planted marker.


class Watching:
    """A transport that looks for traces of Bob in all that has come to the server, after every stage."""

    def __init__(self, world: World, weight: int) -> None:
        self.world, self.weight, self.looked, self.found = world, weight, 0, False
        self.committed, self.exchange = world.simulator.committed, world.simulator.exchange

    def ask(self, method: Method, round: int, messages: dict[str, bytes], *rest: Any) -> list[Receipt]:
        self.look(b"".join(messages.values()))
        receipts = self.world.simulator.ask(method, round, messages, *rest)
        self.look(b"".join(receipt.path.read_bytes() for receipt in receipts))
        return receipts

    def look(self, passing: bytes) -> None:
        self.looked += 1
        held = [sum_.total.tobytes() for sum_ in gc.get_objects() if isinstance(sum_, secure_round.SecureSum)]
        for content in [passing, *held, *tree(self.world.out).values()]:
            self.found |= any(trace in content for trace in traces(self.weight))


def test_nothing_at_the_server_holds_a_planted_marker(tmp_path: Path) -> None:
    world = world_of(Marked(), tmp_path / "secure")
    watching = Watching(world, weight=5)  # bob has five examples
    world.run(Marked(), rounds=2, secagg=SECAGG, transport=watching)
    watching.look(b"")
    assert watching.looked == 17
    assert not watching.found
    assert not list(world.simulator.spool.iterdir())

    plain = world_of(Marked(), tmp_path / "plain")  # the same look does find him there
    plain.run(Marked(), rounds=1)
    beside = Watching(plain, weight=5)
    beside.look(b"")
    assert beside.found


# Together with privacy, and after a kill.


def test_with_privacy_that_adds_nothing_it_is_the_plain_uniform_mean(tmp_path: Path) -> None:
    uniform = ServerStep(weights="uniform")
    quiet = Privacy(clip=1e3, noise=0.0, reproducible=True)
    plain = go(tmp_path / "plain", "fedit", None, server=uniform, rounds=1)
    both = go(tmp_path / "both", "fedit", SECAGG, server=uniform, privacy=quiet, rounds=1)
    assert difference(plain, both, 1) < ROUNDING
    record = both.log.read()[1]
    assert record["weights"] == {"experts/0": 4}
    assert record["train_loss"] is None
    tighter = quiet.model_copy(update={"clip": 1e-3})
    tight = go(tmp_path / "tight", "fedit", SECAGG, server=uniform, privacy=tighter, rounds=1)
    start = METHODS["fedit"]().init(tight.setup).tensors
    change = {n: t - start[n] for n, t in tight.checkpoints.load(1).state.tensors.items()}
    assert 0 < sum(float(t.double().square().sum()) for t in change.values()) ** 0.5 <= 1e-3 * (1 + 1e-3)


def test_M10_a_run_that_was_killed_ends_where_the_straight_one_does(tmp_path: Path) -> None:
    straight = go(tmp_path / "straight", "fedit", SECAGG)

    class Killed(BaseException):
        pass

    def kill(stage: str, name: str, data: bytes) -> bytes:
        if (stage, name) == ("mask", "cyd"):
            raise Killed
        return data

    with pytest.raises(Killed):
        go(tmp_path / "killed", "fedit", SECAGG, kill)
    killed = go(tmp_path / "killed", "fedit", SECAGG)
    assert difference(straight, killed, 2) == 0.0


def refused(**changes: Any) -> str:
    plain: dict[str, Any] = {"data": {"synthetic": {}}, "method": {"name": "fedit"}, "secagg": {}}
    with pytest.raises(ConfigError) as found:
        parse_config({**plain, **changes})
    return str(found.value)


def test_what_cannot_be_summed_is_refused_by_name_and_reason() -> None:
    assert "FC-MoE cannot be run so: each update is projected" in refused(method={"name": "fcmoe"})
    assert "FedLEASE cannot be run so: experts are single clients' updates" in refused(method={"name": "fedlease"})
    assert "server.importance 'norm' works on single updates" in refused(server={"importance": "norm"})
    assert "Leave federation.wire ('int8') at 'none'" in refused(federation={"wire": "int8"})
    assert "Set secagg.reveal_signatures" in refused(method={"name": "fedweave"})
    private = {"privacy": {"clip": 1, "noise": 1}, "server": {"weights": "uniform"}}
    assert "Set federation.participation to 1" in refused(**private, federation={"participation": 0.5})
    assert "'secagg.threshold' is 0.5" in refused(secagg={"threshold": 0.5})
    parse_config({"data": {"synthetic": {}}, "method": {"name": "fedweave"}, "secagg": {"reveal_signatures": True}})


def test_bits_of_a_tensor_are_where_the_trace_says() -> None:
    tensors: Tensors = {"w": torch.full((3,), MARK)}
    assert traces(5)[0] == tensors["w"].numpy().tobytes()
