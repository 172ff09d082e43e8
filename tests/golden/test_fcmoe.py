"""FC-MoE (arXiv 2606.15625): the server's rules against dense float64 vectors, and retention by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.errors import UpdateRejected
from fedloom.methods.base import Method
from fedloom.methods.fcmoe import FCMoE, FCMoEOptions, retained
from fedloom.methods.fedavg_moe import FedAvgMoE, FedAvgMoEOptions
from fedloom.numerics.aggregate import project_conflicts
from fedloom.runtime.memory import ClientMemory
from fedloom.runtime.quarantine import check_reply
from fedloom.types import AdapterSpec, Order, Reply, State, Tensors, Training

SPEC = AdapterSpec((), native="full")
UNITS = ("experts/a.mlp.0", "experts/a.mlp.1", "experts/b.mlp.0")
PARTS = {"wi": (4, 3), "wo": (3, 4)}


def tensors(source: torch.Generator, units: tuple[str, ...] = UNITS, scale: float = 1.0) -> Tensors:
    found = {f"{u}/{p}": scale * torch.randn(shape, generator=source) for u in units for p, shape in PARTS.items()}
    return found | {"shared/norm": scale * torch.randn(5, generator=source)}


def vector(found: Tensors, unit: str) -> Tensor:
    return torch.cat([found[f"{unit}/{part}"].double().flatten() for part in PARTS])


def reply(client: str, send: Tensors, examples: int, active: dict[str, int]) -> Reply:
    sent = {n: t for n, t in send.items() if n.startswith("shared/") or n.rpartition("/")[0] in active}
    counts = {"examples": examples, "shared": examples} | dict.fromkeys(active, examples)
    return Reply(client, sent, counts, values={"activations": active})


def oracle(before: Tensor, updates: list[Tensor], weights: list[float], *, project: bool) -> Tensor:
    """Eq. 2, 3 and 4 as printed, over flattened float64 vectors."""
    total = sum(weights)
    if total == 0:
        return before
    consensus = sum((c / total * u for c, u in zip(weights, updates, strict=True)), torch.zeros_like(before))
    if not project or not consensus.any():
        return before + consensus
    projected = []
    for update in updates:
        cosine = torch.dot(update, consensus) / (update.norm() * consensus.norm()) if update.any() else 0.0
        along = torch.dot(update, consensus) / consensus.norm() ** 2 * consensus
        projected.append(update - along if cosine < 0 else update)
    return before + sum((c / total * u for c, u in zip(weights, projected, strict=True)), torch.zeros_like(before))


#: client → (examples, tokens per expert); "cid" did not use the second expert, nobody but "ann" the third.
CLIENTS: dict[str, tuple[int, dict[str, int]]] = {
    "ann": (50, {UNITS[0]: 900, UNITS[1]: 3, UNITS[2]: 7}),
    "bob": (10, {UNITS[0]: 20, UNITS[1]: 500}),
    "cid": (25, {UNITS[0]: 333}),
}


def scene(case: str) -> tuple[State, list[Reply]]:
    source = torch.Generator().manual_seed(3)
    state = State(4, tensors(source), SPEC)
    updates = {client: tensors(source, scale=0.1) for client in CLIENTS}
    if case == "all conflicting":  # three vectors at 120 degrees, a little apart from balance
        base = [torch.tensor([1.0, 0.0]), torch.tensor([-0.5, 0.87]), torch.tensor([-0.5, -0.86])]
        for send, direction in zip(updates.values(), base, strict=True):
            for unit in UNITS:
                for part, shape in PARTS.items():
                    send[f"{unit}/{part}"] = torch.zeros(shape)
                    send[f"{unit}/{part}"].view(-1)[:2] = direction
    elif case == "opposite":
        for name, tensor in updates["ann"].items():
            updates["bob"][name] = -tensor
    elif case == "zero update":
        for name in updates["bob"]:
            updates["bob"][name] = torch.zeros_like(updates["bob"][name])
    return state, [reply(c, updates[c], *CLIENTS[c]) for c in CLIENTS]


@pytest.mark.parametrize("case", ["random", "all conflicting", "opposite", "zero update"])
@pytest.mark.parametrize("options", [{}, {"projection": False}, {"importance": False}])
def test_the_server_step_is_the_dense_rule(case: str, options: dict[str, Any]) -> None:
    state, replies = scene(case)
    method = FCMoE(FCMoEOptions(**options))
    merged = method.merge(state, replies).tensors
    for unit in UNITS:
        there = [r for r in replies if unit in r.counts]
        updates = [vector(r.send, unit) for r in there]
        tokens = [r.values["activations"][unit] for r in there]
        weights = [f * float(u.norm()) for f, u in zip(tokens, updates, strict=True)]
        if not method.options.importance:
            weights = [float(r.counts["examples"]) for r in there]
        expected = oracle(vector(state.tensors, unit), updates, weights, project=method.options.projection)
        assert torch.allclose(vector(merged, unit), expected, atol=1e-6), unit
    shares = torch.tensor([r.counts["examples"] for r in replies], dtype=torch.float64)
    stacked = torch.stack([r.send["shared/norm"].double() for r in replies])
    mean = (shares[:, None] * stacked).sum(0) / shares.sum()
    assert torch.allclose(merged["shared/norm"].double(), state.tensors["shared/norm"].double() + mean, atol=1e-6)


def test_exactly_opposite_clients_of_equal_weight_leave_the_expert() -> None:
    state, replies = scene("opposite")
    two = [reply(c, r.send, 10, {UNITS[0]: 5}) for c, r in zip("ab", replies[:2], strict=True)]
    merged = FCMoE().merge(state, two).tensors
    assert torch.equal(vector(merged, UNITS[0]), vector(state.tensors, UNITS[0]))
    assert torch.equal(vector(merged, UNITS[1]), vector(state.tensors, UNITS[1]))  # nobody used it


def test_two_clients_by_hand() -> None:
    """c = 3·2 = 6 and 2·1 = 2 (norms 2 and 1): Δ̄ = (6·(2,0) + 2·(−1,0))/8 = (1.25, 0); the second is projected to 0."""
    name = "experts/m.0/w"
    state = State(1, {name: torch.tensor([[10.0, 10.0]])}, SPEC)
    unit = "experts/m.0"

    def says(client: str, update: list[float], examples: int, tokens: int) -> Reply:
        counts = {"examples": examples, unit: examples}
        return Reply(client, {name: torch.tensor([update])}, counts, values={"activations": {unit: tokens}})

    replies = [says("a", [2.0, 0.0], 1, 3), says("b", [-1.0, 0.0], 9, 2)]
    merged = FCMoE().merge(state, replies)
    assert merged.tensors[name].tolist() == [[11.5, 10.0]]  # 10 + 6/8·2
    log = merged.values["log"]["conflict"][unit]
    assert (log["clients"], log["conflicting"], log["cosine"]) == (2, 0.5, 0.0)
    assert log["removed"] == pytest.approx(0.25)  # 2/8 · 1
    assert log["length"] == pytest.approx(1.2)  # 1.5 / 1.25


vectors = st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3)


@settings(max_examples=60, deadline=None)
@given(updates=st.lists(vectors, min_size=1, max_size=5), tokens=st.lists(st.integers(1, 1000), min_size=5, max_size=5))
def test_properties_of_the_rule(updates: list[list[float]], tokens: list[int]) -> None:
    name, unit = "experts/m.0/w", "experts/m.0"
    state = State(1, {name: torch.zeros(1, 3)}, SPEC)

    def merged(factor: int) -> Tensor:
        counts = {"examples": 1, unit: 1}
        replies = [
            Reply(f"c{i}", {name: torch.tensor([u])}, counts, values={"activations": {unit: factor * f}})
            for i, (u, f) in enumerate(zip(updates, tokens, strict=False))
        ]
        return FCMoE().merge(state, replies).tensors[name].double()

    step = merged(1)
    assert torch.allclose(merged(7), step, atol=1e-6)  # scaling all importances changes nothing
    dense = [torch.tensor(u, dtype=torch.float64) for u in updates]
    weights = [f * float(u.norm()) for f, u in zip(tokens, dense, strict=False)]
    total = sum(weights)
    if total == 0:
        assert not step.any()
        return
    consensus = sum((c / total * u for c, u in zip(weights, dense, strict=True)), torch.zeros(3, dtype=torch.float64))
    if consensus.norm() <= 1e-6 * sum(c * float(u.norm()) for c, u in zip(weights, dense, strict=True)) / total:
        return  # what is left is rounding
    after = project_conflicts(dense, consensus)
    assert all(float(torch.dot(u, consensus)) >= -1e-12 for u in after)  # no update opposes the consensus any more
    if all(float(torch.dot(u, consensus)) >= 0 for u in dense):
        assert torch.allclose(step[0], consensus, atol=1e-6)  # without conflict: importance-weighted averaging


def test_retention_is_eq_5_and_6() -> None:
    source = torch.Generator().manual_seed(9)
    now, last = tensors(source), tensors(source, units=UNITS[:1], scale=0.1)
    memory = ClientMemory({f"update/{n}": t for n, t in last.items() if n.startswith("experts/")})
    start = retained(now, memory, FCMoEOptions(retention=0.5))
    assert {n.rpartition("/")[0] for n in start} == {UNITS[0]}  # experts of the last update only
    theta, update = vector(now, UNITS[0]), vector(last, UNITS[0])
    expected = theta + 0.5 * torch.dot(update, theta) / theta.norm() ** 2 * theta
    assert torch.allclose(vector(start, UNITS[0]), expected, atol=1e-6)


def test_filtered_retention_brings_back_what_the_projection_removed() -> None:
    """The client sees only Θ before and after; Δθ − Δθ^proj of Eq. 3 is worked out densely from all updates."""
    state, replies = scene("all conflicting")
    after = FCMoE().merge(state, replies).tensors
    unit = UNITS[0]
    updates = [vector(r.send, unit) for r in replies]
    weights = [r.values["activations"][unit] * float(u.norm()) for r, u in zip(replies, updates, strict=True)]
    shares = [c / sum(weights) for c in weights]
    consensus = sum((c * u for c, u in zip(shares, updates, strict=True)), torch.zeros_like(updates[0]))
    opposing = 0
    for sent, update in zip(replies, updates, strict=True):
        inner = torch.dot(update, consensus)
        removed = inner / consensus.norm() ** 2 * consensus if inner < 0 else torch.zeros_like(update)
        opposing += int(inner < 0)
        kept = {f"update/{n}": t for n, t in sent.send.items() if n.startswith(f"{unit}/")}
        kept |= {f"received/{n}": t for n, t in state.tensors.items() if n.startswith(f"{unit}/")}
        start = retained(after, ClientMemory(kept), FCMoEOptions(retention=0.5, residual="filtered"))
        assert torch.allclose(vector(start, unit), vector(after, unit) + 0.5 * removed, atol=1e-5)
    assert opposing > 0


def test_nothing_is_retained_without_a_last_update_or_with_zero_parameters() -> None:
    now = {name: torch.zeros_like(t) for name, t in tensors(torch.Generator().manual_seed(1)).items()}
    assert retained(now, ClientMemory(), FCMoEOptions()) == {}
    memory = ClientMemory({f"update/{UNITS[0]}/wi": torch.ones(4, 3), f"update/{UNITS[0]}/wo": torch.ones(3, 4)})
    assert not any(t.any() for t in retained(now, memory, FCMoEOptions()).values())
    assert retained(now, memory, FCMoEOptions(retention=0.0)) == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r.send.update({"experts/a.mlp.9/wi": torch.ones(4, 3)}), r"unknown, first 'experts/a\.mlp\.9/wi'"),
        (lambda r: [r.send.pop(f"{UNITS[1]}/{part}") for part in PARTS], r"missing, first 'experts/a\.mlp\.1/wi'"),
        (lambda r: r.counts.update({"experts/a.mlp.9": 5}), r"unknown component 'experts/a\.mlp\.9'"),
        (lambda r: r.values["activations"].update({"experts/a.mlp.9": 5}), r"not send: 'experts/a\.mlp\.9'"),
        (lambda r: r.values["activations"].pop(UNITS[2]), r"it sends: 'experts/b\.mlp\.0'"),
        (lambda r: r.values["activations"].update({UNITS[0]: 1.5}), r"'experts/a\.mlp\.0' are 1\.5, not a number"),
    ],
)
@pytest.mark.parametrize("method", [FCMoE(), FedAvgMoE(FedAvgMoEOptions(weighting="activations"))])
def test_an_expert_that_is_not_there_or_not_sent_is_refused_by_name(method: Method, change: Any, reason: str) -> None:
    state, replies = scene("random")
    order = Order("fit", "ann", 5, state.tensors, SPEC, Training())
    active = {"activations": dict(CLIENTS["ann"][1])}
    spoilt = Reply("ann", dict(replies[0].send), dict(replies[0].counts), {"steps": 10}, active)
    check_reply(spoilt, method.expected(order, spoilt))
    change(spoilt)
    with pytest.raises(UpdateRejected, match=reason):
        check_reply(spoilt, method.expected(order, spoilt))
