"""A late joiner's experts by hand: Eq. 1 between its warm-ups and the experts' starts."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.errors import UpdateRejected
from fedloom.methods import METHODS
from fedloom.methods.fedweave import FedWeave, FedWeaveOptions
from fedloom.types import AdapterSpec, Reply, State, Tensors
from small_world import same

START = State(0, {}, AdapterSpec(("q_proj",), rank=1), {"seed": 1, "hidden_size": 3})


def adapter(q: float, k: float, scale: float = 1.0) -> Tensors:
    """Return a warm-up of two B blocks at these angles; their lengths do not matter, nor does A."""
    found: Tensors = {}
    for path, angle in (("q_proj", q), ("k_proj", k)):
        found[f"experts/0/{path}.lora_A"] = torch.full((1, 2), 5 * scale)
        found[f"experts/0/{path}.lora_B"] = scale * torch.tensor([[math.cos(angle)], [math.sin(angle)]])
    return found


def reply_of(client: str, *adapters: Tensors, sizes: list[int]) -> Reply:
    send = {f"buckets/{c}/{n}": t for c, found in enumerate(adapters) for n, t in found.items()}
    return Reply(client, send, {"examples": sum(sizes)}, values={"sizes": sizes})


def discovered(name: str = "fedweave") -> tuple[FedWeave, State]:
    """Two patterns at right angles: expert 0 starts at 0, expert 1 at π/2, in both blocks."""
    kind = METHODS[name]
    method = kind(kind.Options.model_validate({"router_hidden": 2}))
    assert isinstance(method, FedWeave)
    u, v = adapter(0.0, 0.0), adapter(math.pi / 2, math.pi / 2, scale=3.0)
    replies = [reply_of(c, x, sizes=[4]) for c, x in (("i", u), ("j", v), ("k", u), ("l", v))]
    state = method.discover(START, replies)
    assert state.values["assignment"] == {"i": [0], "j": [1], "k": [0], "l": [1]}
    return method, state


def test_each_bucket_goes_to_the_nearest_expert() -> None:
    """Mean of 1 − cos over both blocks, to experts 0 and 1, of a bucket at angles (q, k).

    (1.2, 1.3): (0.638 + 0.733) / 2 = 0.685 and (0.068 + 0.036) / 2 = 0.052 → 1.
    (0.1, 0.0): 0.002 and 0.950 → 0.
    (0.0, 1.0): (0 + 0.460) / 2 = 0.230 and (1 + 0.159) / 2 = 0.579 → 0: no single block decides.
    (π, π): 2 and 1 → 1: opposite is further than at a right angle.
    """
    method, state = discovered()
    buckets = [
        adapter(1.2, 1.3),
        adapter(0.1, 0.0, scale=0.01),
        adapter(0.0, 1.0, scale=50.0),
        adapter(math.pi, math.pi),
    ]
    joined = method.join(state, "z", reply_of("z", *buckets, sizes=[7, 2, 1, 3]))
    assert joined.values["assignment"] == state.values["assignment"] | {"z": [1, 0, 0, 1]}
    assert joined.values["sizes"] == {**{client: [4] for client in "ijkl"}, "z": [7, 2, 1, 3]}
    assert {k: v for k, v in joined.values.items() if k not in ("assignment", "sizes")} == {
        k: v for k, v in state.values.items() if k not in ("assignment", "sizes")
    }
    assert same(joined.tensors, state.tensors)
    assert same(joined.kept, state.kept)
    assert (joined.round, joined.spec) == (state.round, state.spec)
    assert "z" not in state.values["assignment"]  # a new state; the old one is as it was
    assert method.admits(joined, "z")
    assert method.view(joined, "z").values == {"assignment": [1, 0, 0, 1], "sizes": [7, 2, 1, 3]}


def test_of_equals_the_first() -> None:
    """A warm-up without direction is at distance 1 from both."""
    method, state = discovered()
    joined = method.join(state, "z", reply_of("z", adapter(0.0, 0.0, scale=0.0), sizes=[1]))
    assert joined.values["assignment"]["z"] == [0]


def test_it_is_the_starts_that_count_not_what_training_made_of_them() -> None:
    """Experts that have swapped places since."""
    method, state = discovered()
    swapped = {
        n.translate(str.maketrans("01", "10")) if n.startswith("experts/") else n: t for n, t in state.tensors.items()
    }
    trained = State(5, swapped, state.spec, state.values, state.kept)
    joined = method.join(trained, "z", reply_of("z", adapter(1.5, 1.5), sizes=[2]))
    assert joined.values["assignment"]["z"] == [1]


def test_kept_signatures_are_the_mean_warm_ups_b_factors() -> None:
    _, state = discovered()
    assert state.kept.keys() == {f"start/experts/{m}/{p}.lora_B" for m in (0, 1) for p in ("q_proj", "k_proj")}
    for name, tensor in state.kept.items():
        assert torch.equal(tensor, state.tensors[name.removeprefix("start/")])
    torch.testing.assert_close(state.kept["start/experts/1/k_proj.lora_B"], torch.tensor([[0.0], [3.0]]))


@pytest.mark.parametrize("name", ["fedweave_wo_client_router", "fedweave_wo_prototype_expert"])
def test_ablations_take_in_late_joiners_too(name: str) -> None:
    method, state = discovered(name)
    assert method.closed() is None
    assert method.join(state, "z", reply_of("z", adapter(1.5, 1.5), sizes=[3])).values["assignment"]["z"] == [1]


def test_a_state_without_signatures_takes_in_nobody() -> None:
    _, state = discovered()
    old = State(state.round, state.tensors, state.spec, state.values)
    with pytest.raises(UpdateRejected, match="kept no signatures"):
        FedWeave(FedWeaveOptions()).join(old, "z", reply_of("z", adapter(0.0, 0.0), sizes=[1]))
