"""FC-MoE (arXiv 2606.15625): one round of one client by hand, and its model at home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.methods.fcmoe import NORMS, FCMoE
from fedloom.numerics.tree import norm
from fedloom.runtime.memory import ClientMemory
from fedloom.types import Order, State, Tensors, Training, component
from small_world import NATIVE, World, random_tensors, same


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
    during, tokens = counted(world, ours), counted(world, end)  # one step: in training all was counted with the start
    assert tokens != during  # Eq. 1 counts 'after each local training'
    idle = {unit for unit, n in tokens.items() if n == 0}
    assert "experts/encoder.block.1.layer.1.mlp.3" in idle
    assert answer.values == {"activations": {unit: n for unit, n in tokens.items() if n > 0}}
    difference = {name: end[name] - received[name] for name in received}
    assert close(answer.send, {name: t for name, t in difference.items() if component(name) not in idle})
    assert answer.counts == {"examples": 8} | {component(name): 8 for name in answer.send}
    assert close(answer.keep, {f"update/{n}": t for n, t in difference.items() if n.startswith("experts/")})
    assert all(answer.keep[f"update/{n}"].any() for n in last if component(n) in idle)  # the way to the start
    assert answer.metrics["retained_norm"] == pytest.approx(norm({n: ours[n] - received[n] for n in last}), rel=1e-4)
    assert answer.metrics["update_norm"] == pytest.approx(norm({n: difference[n] for n in last}), rel=1e-4)

    merged = FCMoE().merge(State(1, received, NATIVE), [answer])
    assert [merged.values["log"][name] for name in NORMS] == [answer.metrics[name] for name in NORMS]
    kept = {n.removeprefix("update/"): t for n, t in answer.keep.items()}
    home = FCMoE().personal_view(merged, "ann", ClientMemory(answer.keep))
    assert home.spec == NATIVE
    assert close(home.tensors, merged.tensors | head_start(merged.tensors, kept, 0.5))
    away = FCMoE().personal_view(merged, "bob", ClientMemory())  # never asked: the model for everyone
    assert same(away.tensors, merged.tensors)
