"""Compressed replies: bytes, error feedback, damaged forms, and runs that were killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import UpdateRejected
from fedloom.methods import METHODS
from fedloom.numerics.tree import norm, subtract, take
from fedloom.runtime.compression import compress, expand
from fedloom.runtime.leaving import Leaving, shaped
from fedloom.runtime.loop import Receipt
from fedloom.runtime.wire import decode_reply, encode_reply
from fedloom.types import Order, Reply, Tensors
from small_world import Wire, World, client_rows, outcome, world_of

INT8 = Leaving("int8", feedback=True)


def normal(seed: int, scale: float = 1.0, shape: tuple[int, ...] = (40, 13)) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(1e-6, 1e3)), min_size=1, max_size=12))
def test_after_T_rounds_the_sums_differ_by_the_last_residual(rounds: list[tuple[int, float]]) -> None:
    """Σ received = Σ updates − e_T, with sums in float64 and float32 rounding of each addition allowed for."""
    residual: Tensors = {}
    true, received, largest = torch.zeros(40, 13).double(), torch.zeros(40, 13).double(), 0.0
    for seed, scale in rounds:
        update = {"x": normal(seed, scale)}
        packed, residual = shaped(update, residual, INT8)
        true += update["x"].double()
        received += expand(packed, "int8")["x"].double()
        largest = max(largest, float(update["x"].abs().max()))
    assert (true - received - residual["x"].double()).abs().max() <= len(rounds) * largest * 2.0**-22
    assert residual["x"].abs().max() <= (largest * 1.01) / 127 / 2 * 1.01


def test_without_feedback_errors_add_up() -> None:
    """A constant update of 1 beside 1000: scale 1000/127 = 7.9, so a 1 is never received, unless it is saved up."""
    update = {"x": torch.tensor([1000.0, 1.0])}
    residual: Tensors = {}
    plain = fed = 0.0
    for _ in range(50):
        plain += float(expand(compress(update, "int8"), "int8")["x"][1])
        packed, residual = shaped(update, residual, INT8)
        fed += float(expand(packed, "int8")["x"][1])
    assert plain == 0.0
    assert abs(fed - 50) <= 1000 / 127


def test_bf16_loses_nothing_of_bf16_values() -> None:
    values = normal(1).to(torch.bfloat16).float()
    assert torch.equal(expand(compress({"x": values}, "bf16"), "bf16")["x"], values)
    other = normal(2)
    error = (expand(compress({"x": other}, "bf16"), "bf16")["x"] - other).abs() / other.abs()
    assert 0 < error.max() <= 2.0**-8  # 8 significant bits, rounded to nearest


def test_a_residual_of_diverged_training_is_forgotten() -> None:
    _, residual = shaped({"x": torch.tensor([float("nan"), 1.0])}, {}, INT8)
    assert torch.isfinite(residual["x"]).all()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda packed: packed.pop("x:scales"), "has no scales"),
        (lambda packed: packed.update({"y:scales": torch.ones(1)}), "scales of no tensor"),
        (lambda packed: packed.update(x=packed["x"].float()), "not int8"),
        (lambda packed: packed.update({"x:scales": torch.ones(1)}), "3 float32 scales"),
    ],
)
def test_a_damaged_form_is_rejected_by_name(change: Any, why: str) -> None:
    packed = compress({"x": normal(0)}, "int8")  # 520 values, 3 blocks
    change(packed)
    with pytest.raises(UpdateRejected, match=why):
        expand(packed, "int8")
    with pytest.raises(UpdateRejected, match="the wire carries bfloat16"):
        expand({"x": torch.ones(1)}, "bf16")


def test_a_reply_must_be_encoded_as_ordered() -> None:
    reply = Reply("a", compress({"w": normal(0)}, "int8"), {"examples": 1})
    data = encode_reply(reply, 1, "int8")
    assert decode_reply(data, "a", 1, "int8").send["w"].dtype == torch.float32
    with pytest.raises(UpdateRejected, match="encoded as 'int8', but 'none' was ordered"):
        decode_reply(data, "a", 1)


def world(out: Path, name: str, leaving: Leaving) -> World:
    found = world_of(METHODS[name](), out)
    found.simulator.leaving = leaving
    return found


def go(out: Path, name: str, leaving: Leaving, **more: Any) -> World:
    found = world(out, name, leaving)
    found.run(METHODS[name](), wire=leaving.wire, **more)
    return found


@pytest.mark.parametrize("name", ["fedit", "fedlease"])
def test_none_is_bitwise_the_plain_run(name: str, tmp_path: Path) -> None:
    go(tmp_path / "none", name, Leaving("none", feedback=True), rounds=1)
    world_of(METHODS[name](), tmp_path / "plain").run(METHODS[name](), rounds=1)
    for part in ("checkpoints", "memory", "log"):
        assert outcome(tmp_path / "none")[part] == outcome(tmp_path / "plain")[part]


def test_bytes_shrink_as_reported_and_the_model_stays_near(tmp_path: Path) -> None:
    """Per value 4, 2 and 1 + 4/256 bytes; the small tensors of a test pay their names and headers on top."""
    sent: dict[str, int] = {}
    models: dict[str, Tensors] = {}
    for wire in ("none", "bf16", "int8"):
        found = go(tmp_path / wire, "fedit", Leaving(wire, feedback=wire == "int8"), rounds=2)  # type: ignore[arg-type]
        sent[wire] = found.log.read()[2]["bytes_up"]
        assert sent[wire] == sum(path.stat().st_size for path in found.simulator.spool.iterdir())
        models[wire] = found.checkpoints.load(2).state.tensors
    header = 1200  # of names, shapes and offsets, and the plain numbers, per client
    values = sum(tensor.numel() for tensor in models["none"].values())
    assert sent["none"] - 4 * header < 4 * 4 * values < sent["none"]
    assert sent["bf16"] - 4 * header < 4 * 2 * values < sent["bf16"]
    assert sent["int8"] - 4 * 2 * header < 4 * values * (1 + 4 / 256) < sent["int8"]
    start = METHODS["fedit"]().init(found.setup).tensors
    moved = norm(subtract(models["none"], start))
    assert norm(subtract(models["bf16"], models["none"])) < 0.05 * moved
    assert norm(subtract(models["int8"], models["none"])) < 0.1 * moved


def test_the_server_adds_up_what_the_clients_saw_leave(tmp_path: Path) -> None:
    """FedIT with one client: the model after T rounds is the first plus the true updates, but for the last residual."""
    true: list[Tensors] = []

    class Seen(METHODS["fedit"]):  # type: ignore[misc]
        def local(self, client: Any, order: Order) -> Reply:
            reply: Reply = super().local(client, order)
            true.append(reply.send)
            return reply

    found = World(tmp_path, clients={"ann": client_rows()["ann"]})
    found.simulator.leaving = INT8
    state = found.run(Seen(), rounds=4, wire="int8")
    start = METHODS["fedit"]().init(found.setup).tensors
    residual = take(found.memory.read(found.checkpoints.load(4).memories["ann"]).tensors, "residual")
    for name, first in start.items():
        expected = first.double() + sum(update[name].double() for update in true) - residual[name].double()
        assert (state.tensors[name].double() - expected).abs().max() < 1e-6
        assert residual[name].abs().max() > 0


def test_a_reply_in_another_form_is_quarantined(tmp_path: Path) -> None:
    def change(orders: Sequence[Order], receipts: list[Receipt]) -> list[Receipt]:
        for receipt in receipts:
            if receipt.client == "bob":
                reply = decode_reply(receipt.path, "bob", orders[0].round, "int8")
                receipt.path.write_bytes(encode_reply(reply, orders[0].round))
        return receipts

    found = world(tmp_path, "fedit", INT8)
    found.run(METHODS["fedit"](), rounds=1, transport=Wire(found.simulator, change), wire="int8")
    assert found.log.read()[1]["quarantined"] == {"bob": "it is encoded as 'none', but 'int8' was ordered"}


def test_after_a_quarantined_reply_all_is_as_if_it_had_not_come(tmp_path: Path) -> None:
    """Round 2 of three: what rounding left over in round 1 is still there in round 3."""

    def spoilt(orders: Sequence[Order], receipts: list[Receipt]) -> list[Receipt]:
        for receipt in receipts:
            if (orders[0].round, receipt.client) == (2, "bob"):
                receipt.path.write_bytes(b"no reply")
        return receipts

    def lost(orders: Sequence[Order], receipts: list[Receipt]) -> list[Receipt]:
        return [receipt for receipt in receipts if (orders[0].round, receipt.client) != (2, "bob")]

    found = {}
    for change in (spoilt, lost):
        known = world(tmp_path / change.__name__, "fedit", INT8)
        known.run(METHODS["fedit"](), rounds=3, transport=Wire(known.simulator, change), wire="int8")
        found[change] = outcome(known.out)
        second, third = (known.checkpoints.load(round).memories for round in (2, 3))
        assert (second["bob"], second["ann"]) == ("bob-r1.safetensors", "ann-r2.safetensors")
        assert third["bob"] == "bob-r3.safetensors"
    assert found[spoilt]["log"][2]["quarantined"].keys() == {"bob"}
    for what in ("checkpoints", "memory"):
        assert found[spoilt][what] == found[lost][what]
