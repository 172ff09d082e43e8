"""FC-MoE (arXiv 2606.15625): the server's rules against dense float64 vectors, and retention by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.config import parse_config
from fedloom.errors import ConfigError, UpdateRejected
from fedloom.methods.activations import check_tokens
from fedloom.methods.base import Method
from fedloom.methods.fcmoe import NORMS, FCMoE, FCMoEOptions, retained
from fedloom.methods.fedavg_moe import FedAvgMoE, FedAvgMoEOptions
from fedloom.numerics.aggregate import project_conflicts
from fedloom.numerics.tree import norm
from fedloom.runtime.memory import ClientMemory
from fedloom.runtime.quarantine import check_reply
from fedloom.runtime.wire import decode, encode
from fedloom.types import AdapterSpec, Order, Reply, State, Tensors, Training, component
from small_world import NATIVE, TRAINING, Wire, World, random_tensors, same

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


# One client, by hand.


def head_start(now: Tensors, last: Tensors, rate: float) -> Tensors:
    """Return Θ + λ (Δ·Θ) / ‖Θ‖² Θ of every expert of ``last``, in float64."""
    units = {component(name) for name in last}
    start = {}
    for unit in units:
        names = [name for name in now if component(name) == unit]
        theta = torch.cat([now[name].double().flatten() for name in names])
        update = torch.cat([last[name].double().flatten() for name in names])
        factor = 1 + rate * torch.dot(update, theta) / torch.dot(theta, theta)
        start |= {name: (factor * now[name].double()).float() for name in names}
    return start


def counted(world: World, tensors: Tensors) -> dict[str, int]:
    """Return tokens per expert of ann's rows one by one: the first largest logit takes a token, 64 a row at most."""
    world.bench.load(tensors, NATIVE)
    model = world.bench.backbone.model.eval()
    found: dict[str, int] = {}
    for row in world.clients["ann"].encoded:
        response = row.ids[row.prompt_length :]
        written = [model.config.decoder_start_token_id, *response[:-1]]
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor([row.ids[: row.prompt_length]]),
                decoder_input_ids=torch.tensor([written]),
                output_router_logits=True,
            )
        layers = {
            "encoder.block.1.layer.1.mlp": output.encoder_router_logits,
            "decoder.block.1.layer.2.mlp": output.decoder_router_logits,
        }
        for path, logits in layers.items():
            chosen = next(x for x in flattened(logits) if x.shape[-1] == 4).reshape(-1, 4).argmax(-1)
            for expert in range(4):
                unit = f"experts/{path}.{expert}"
                found[unit] = found.get(unit, 0) + min(int((chosen == expert).sum()), 64)
    return found


def flattened(nested: Any) -> list[Tensor]:
    return [nested] if isinstance(nested, Tensor) else [t for each in nested for t in flattened(each)]


def close(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(t, b[n], rtol=1e-6, atol=1e-7) for n, t in a.items())


def test_a_clients_round_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load Θ + λR, train, send end − Θ of experts with tokens, keep that of all; answer at home with the next start."""
    world = World(tmp_path, spec=NATIVE)
    for module in world.bench.backbone.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]
    moved = random_tensors(world.setup.initial, seed=5, scale=0.01)
    received = {name: t + moved[name] for name, t in world.setup.initial.items()}
    router = received["router/encoder.block.1.layer.1.mlp.router.classifier.weight"]
    router[3] = router[2]  # of equals the first is chosen: nothing for the encoder's last expert
    noise = random_tensors(received, seed=6, scale=0.02)
    last = {n: 0.3 * t + noise[n] for n, t in received.items() if n.startswith("experts/")}
    client = world.client("ann", round=2, memory=ClientMemory({f"update/{n}": t for n, t in last.items()}))
    loaded: list[Tensors] = []
    ends: list[Tensors] = []
    load, read = type(client).load, type(client).read
    monkeypatch.setattr(type(client), "load", lambda self, t, spec: (loaded.append(dict(t)), load(self, t, spec))[1])
    monkeypatch.setattr(type(client), "read", lambda self: ends.append(read(self)) or dict(ends[-1]))
    order = Order("fit", "ann", 2, received, NATIVE, Training(steps=9, epochs=1, batch_size=8, lr=1e-2, router_lr=1e-2))
    answer = FCMoE().local(client, order)

    (start,), (end,) = loaded, ends
    ours = received | head_start(received, last, 0.5)
    assert close(start, ours)
    tokens = counted(world, ours)  # one step: all was counted with the start
    idle = {unit for unit, n in tokens.items() if n == 0}
    assert "experts/encoder.block.1.layer.1.mlp.3" in idle
    assert answer.values == {"activations": {unit: n for unit, n in tokens.items() if n > 0}}
    difference = {name: end[name] - received[name] for name in received}
    assert close(answer.send, {name: t for name, t in difference.items() if component(name) not in idle})
    assert answer.counts == {"examples": 8} | {component(name): 8 for name in answer.send}
    assert close(answer.keep, {f"update/{n}": t for n, t in difference.items() if n.startswith("experts/")})
    assert all(answer.keep[f"update/{n}"].any() for n in last if component(n) in idle)  # the way to the start
    assert answer.metrics["retained_norm"] == pytest.approx(norm({n: ours[n] - received[n] for n in last}), rel=1e-4)
    assert answer.metrics["update_norm"] == pytest.approx(norm(difference), rel=1e-4)

    merged = FCMoE().merge(State(1, received, NATIVE), [answer])
    assert [merged.values["log"][name] for name in NORMS] == [answer.metrics[name] for name in NORMS]
    kept = {n.removeprefix("update/"): t for n, t in answer.keep.items()}
    home = FCMoE().personal_view(merged, "ann", ClientMemory(answer.keep))
    assert home.spec == NATIVE
    assert close(home.tensors, merged.tensors | head_start(merged.tensors, kept, 0.5))
    away = FCMoE().personal_view(merged, "bob", ClientMemory())  # never asked: the model for everyone
    assert same(away.tensors, merged.tensors)


def lying(client: str, tell: Any) -> Any:
    """Return what a transport does to replies so that ``client`` states other activations."""

    def change(orders: Any, receipts: list[Any]) -> list[Any]:
        for receipt in receipts:
            if receipt.client == client:
                tensors, header = decode(receipt.path.read_bytes())
                header["values"]["activations"] = tell(header["values"]["activations"])
                receipt.path.write_bytes(encode(tensors, header))
        return receipts

    return change


EPOCH = replace(TRAINING, epochs=1, steps=1000)


@pytest.mark.parametrize("method", [FCMoE(), FedAvgMoE(FedAvgMoEOptions(weighting="activations"))])
@pytest.mark.parametrize(
    ("tell", "reason"),
    [
        (lambda found: dict.fromkeys(found, 1 << 39), r"are 549755813888; at most 1 × 512"),
        (lambda found: {**found, next(iter(found)): -1}, r"are -1, not a number of tokens"),
    ],
)
def test_one_example_cannot_have_the_tokens_of_many(method: Method, tell: Any, reason: str, tmp_path: Path) -> None:
    """A client with one example that states 2^39 tokens an expert would be the whole mean of every expert."""
    worlds = [World(tmp_path / name, spec=NATIVE) for name in ("without", "with")]
    silent = Wire(worlds[0].simulator, lambda orders, receipts: [r for r in receipts if r.client != "dan"])
    loud = Wire(worlds[1].simulator, lying("dan", tell))
    states = [
        world.run(method, rounds=1, training=EPOCH, transport=wire)
        for world, wire in zip(worlds, (silent, loud), strict=True)
    ]
    (why,) = worlds[1].log.read()[-1]["quarantined"].items()
    assert why[0] == "dan"
    assert re.search(reason, why[1])
    assert same(states[0].tensors, states[1].tensors)


@pytest.mark.parametrize(
    ("training", "kind", "rows"),
    [
        (Training(steps=3, batch_size=4), "fit", 3 * 4),
        (Training(steps=3, batch_size=8), "fit", 3 * 5),  # five examples fill no batch of eight
        (Training(steps=100, batch_size=4, epochs=2), "fit", 2 * 5),
        (Training(steps=2, batch_size=4, epochs=2), "fit", 2 * 4),
        (Training(steps=3, batch_size=4), "probe", 5),
    ],
)
def test_the_most_tokens_by_hand(training: Training, kind: Any, rows: int) -> None:
    """An expert has each of 10 tokens once at most; the experts of one layer each token 8 times at most."""
    order = Order(kind, "ann", 1, {}, SPEC, training)

    def check(*tokens: int) -> None:
        active = {f"experts/m.{e}": n for e, n in enumerate(tokens)}
        check_tokens(order, Reply("ann", {}, {"examples": 5}, values={"activations": active}), 10)

    most = 10 * rows
    check(most, most)
    check(*[most] * 8, 0)
    with pytest.raises(UpdateRejected, match=r"experts/m\.1"):
        check(most, most + 1)
    with pytest.raises(UpdateRejected, match=f"experts/m' are {8 * most + 1} in all"):
        check(*[most] * 8, 1)


def test_fedavg_sends_activations_only_where_they_count(tmp_path: Path) -> None:
    world = World(tmp_path, spec=NATIVE)
    order = Order("fit", "ann", 1, world.setup.initial, NATIVE, TRAINING)
    plain = FedAvgMoE().local(world.client("ann"), order)
    assert plain.values == {}
    check_reply(plain, FedAvgMoE().expected(order, plain))
    weighed = FedAvgMoE(FedAvgMoEOptions(weighting="activations"))
    reply = weighed.local(world.client("ann"), order)
    assert len(reply.values["activations"]) == 8
    check_reply(reply, weighed.expected(order, reply))
    with pytest.raises(UpdateRejected, match="states no 'activations'"):
        weighed.expected(order, plain)
    for steps in (0.001, 4.0, None):  # activations are divided by steps: few of them would weigh much
        metrics = {name: value for name, value in (reply.metrics | {"steps": steps}).items() if value is not None}
        with pytest.raises(UpdateRejected, match=f"states {steps} steps.*; 3 were asked"):
            weighed.expected(order, replace(reply, metrics=metrics))


@pytest.mark.parametrize("weights", ["sample", "uniform"])
@pytest.mark.parametrize(
    ("method", "refused"),
    [
        ({"name": "fcmoe"}, "FC-MoE weighs experts by activations × update norm"),
        ({"name": "fcmoe", "importance": False}, None),
        ({"name": "fedavg_moe", "weighting": "activations"}, "FedAvg weighs experts by activations × examples"),
        ({"name": "pfl_moe", "weighting": "activations"}, "PFL-MoE weighs experts by activations × examples"),
        ({"name": "fedavg_moe"}, None),
    ],
)
def test_weights_that_would_count_for_a_part_only_are_refused(
    method: dict[str, Any], refused: str | None, weights: str
) -> None:
    plain = {"method": method, "server": {"weights": weights}, "data": {"clients": {"ann": "ann.jsonl"}}}
    if refused is None:
        parse_config(plain)
    else:
        with pytest.raises(ConfigError, match=f"server.weights '{weights}'.*{refused}"):
            parse_config(plain)
