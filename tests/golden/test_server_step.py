"""The options around a method's server step, against dense float64 algebra and plain NumPy loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_world import COUNTS, SHAPES, SHARES, answers, assert_adds, ends, product, setup_of, total
from torch import Tensor

from fedloom.config import parse_config
from fedloom.errors import ConfigError
from fedloom.methods import METHODS
from fedloom.methods.fedit import FedIT
from fedloom.methods.server import ServerStep, server_step
from fedloom.types import Reply, State, Tensors
from small_world import TRAINING, World, outcome, random_tensors, same

METHOD = FedIT()
SCALING = 3.0  # alpha 6, rank 2


def started(rank: int = 2, alpha: float = 6.0) -> State:
    """Return a state whose two factors are both random, in round 1."""
    state = METHOD.init(setup_of(rank, alpha))
    return replace(state, round=1, tensors=random_tensors(state.tensors, scale=1.0))


def dense_mean(found: dict[str, Tensors], path: str, shares: dict[str, float], scaling: float = SCALING) -> Tensor:
    return total([shares[client] * product(end, path, scaling) for client, end in found.items()])


# --- Weights --------------------------------------------------------------------------------------------------------


def test_uniform_weights_are_a_plain_mean() -> None:
    state = started()
    replies = answers(METHOD, state)
    merged = server_step(METHOD, state, replies, ServerStep(weights="uniform"))
    for name, tensor in merged.tensors.items():
        mean = np.mean([(state.tensors[name] + r.send[name]).double().numpy() for r in replies], axis=0)
        np.testing.assert_allclose(tensor.numpy(), mean, rtol=1e-5, atol=1e-6)
    sample = server_step(METHOD, state, replies, ServerStep(weights="sample"))
    assert same(sample.tensors, METHOD.merge(state, replies).tensors)
    assert not same(sample.tensors, merged.tensors)


def test_a_component_that_a_client_has_nothing_of_stays_without_its_weight() -> None:
    """Counts 3 and 0 for the expert: under uniform weights it is the first client's, 1 + 4 = 5, not 1 + 4 / 2."""
    name = "experts/0/v.lora_A"
    state = State(1, {name: torch.tensor([[1.0]])}, METHOD.init(setup_of()).spec)
    replies = [
        Reply("a", {name: torch.tensor([[4.0]])}, {"examples": 3, "experts/0": 3}),
        Reply("b", {name: torch.tensor([[-9.0]])}, {"examples": 5, "experts/0": 0}),
    ]
    merged = server_step(METHOD, state, replies, ServerStep(weights="uniform"))
    assert merged.tensors[name].tolist() == [[5.0]]


def test_a_papers_own_weights_can_be_overruled() -> None:
    class Alike(FedIT):
        weights = "uniform"

    state = started()
    replies = answers(METHOD, state)
    steps = {w: server_step(Alike(), state, replies, ServerStep(weights=w)) for w in ("method", "sample", "uniform")}
    assert same(steps["method"].tensors, steps["uniform"].tensors)
    assert same(steps["sample"].tensors, METHOD.merge(state, replies).tensors)


# --- Products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["sample", "uniform"])
def test_product_svd_is_the_truncated_dense_mean(weights: Any) -> None:
    """Three clients of rank 1 on layers of 5 × 3 and 2 × 4, counts 7, 2, 1, s = 6; a fourth never answers."""
    state = started(rank=1)
    replies = answers(METHOD, state)
    merged = server_step(METHOD, state, replies, ServerStep(weights=weights, aggregation="product-svd"))
    shares = SHARES if weights == "sample" else dict.fromkeys(COUNTS, 1 / 3)
    dense = {}
    for path in SHAPES:
        mean = dense_mean(ends(METHOD, state, replies), path, shares, scaling=6.0).numpy()
        U, S, Vt = np.linalg.svd(mean)
        dense[path] = torch.from_numpy(S[0] * np.outer(U[:, 0], Vt[0]))
        found = product(merged.tensors, path, 6.0)
        torch.testing.assert_close(found, dense[path], atol=1e-5, rtol=1e-5)
        error = np.linalg.norm(mean - found.numpy())
        np.testing.assert_allclose(error, np.sqrt((S[1:] ** 2).sum()), rtol=1e-4)  # Eckart–Young
        plain = product(METHOD.merge(state, replies).tensors, path, 6.0).numpy()
        assert error < np.linalg.norm(mean - plain)
    assert_adds(METHOD.view(merged, None), dense)


def test_product_svd_is_exact_where_the_rank_allows() -> None:
    """Rank 4 holds any matrix of 5 × 3 or 2 × 4, which averaging the factors misses."""
    state = started(rank=4, alpha=12.0)
    replies = answers(METHOD, state)
    merged = server_step(METHOD, state, replies, ServerStep(aggregation="product-svd"))
    for path in SHAPES:
        mean = dense_mean(ends(METHOD, state, replies), path, SHARES)
        torch.testing.assert_close(product(merged.tensors, path, SCALING), mean, atol=1e-5, rtol=1e-5)
        assert (product(METHOD.merge(state, replies).tensors, path, SCALING) - mean).norm() > 0.1 * mean.norm()


def test_with_a_common_A_both_aggregations_give_the_dense_mean() -> None:
    state = started()
    replies = [
        replace(r, send={n: torch.zeros_like(t) if n.endswith("lora_A") else t for n, t in r.send.items()})
        for r in answers(METHOD, state)
    ]
    merged = server_step(METHOD, state, replies, ServerStep(aggregation="product-svd"))
    for path in SHAPES:
        mean = dense_mean(ends(METHOD, state, replies), path, SHARES)
        torch.testing.assert_close(product(merged.tensors, path, SCALING), mean, atol=1e-5, rtol=1e-5)
        factors = product(METHOD.merge(state, replies).tensors, path, SCALING)
        torch.testing.assert_close(factors, mean, atol=1e-5, rtol=1e-5)


def test_each_expert_has_its_own_product_and_weights() -> None:
    """Expert 0 by counts 7 and 1, expert 1 by the second client alone; expert 2, which nobody trained, stays."""
    plain = started()
    spec = replace(plain.spec, experts=3)
    like = {n.replace("/0/", f"/{m}/"): t for m in range(3) for n, t in plain.tensors.items()}
    state = State(1, random_tensors(like, 1, 1.0), spec)
    updates = [random_tensors(like, seed, 1.0) for seed in (2, 3)]
    counts = [{"examples": 7, "experts/0": 7}, {"examples": 4, "experts/0": 1, "experts/1": 3}]
    replies = [
        Reply(name, {n: t for n, t in update.items() if "/".join(n.split("/")[:2]) in count}, count)
        for name, update, count in zip("ab", updates, counts, strict=True)
    ]
    merged = server_step(METHOD, state, replies, ServerStep(aggregation="product-svd")).tensors
    ended = [{n: state.tensors[n].double() + t for n, t in update.items()} for update in updates]
    for path in SHAPES:
        mean = 7 / 8 * product(ended[0], path, SCALING, 0) + 1 / 8 * product(ended[1], path, SCALING, 0)
        U, S, Vt = np.linalg.svd(mean.numpy())
        np.testing.assert_allclose(product(merged, path, SCALING, 0), (U[:, :2] * S[:2]) @ Vt[:2], atol=1e-5)
        alone = product(ended[1], path, SCALING, 1)
        torch.testing.assert_close(product(merged, path, SCALING, 1), alone, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(merged[n], t) for n, t in state.tensors.items() if n.startswith("experts/2/"))


def test_a_zero_product_keeps_its_factors() -> None:
    state = replace(METHOD.init(setup_of()), round=1)
    still = [replace(r, send={n: 0 * t for n, t in r.send.items()}) for r in answers(METHOD, state)]
    merged = server_step(METHOD, state, still, ServerStep(aggregation="product-svd"))
    assert same(merged.tensors, state.tensors)


# --- Optimisers -----------------------------------------------------------------------------------------------------


def numpy_optimizer(kind: str, x: np.ndarray, targets: list[np.ndarray], step: ServerStep) -> np.ndarray:
    """Follow Reddi et al., Algorithm 2 (and FedAvgM) for the means that the clients would give, one a round.

    The algorithm asks for v₋₁ ≥ τ².
    """
    m, v = np.zeros_like(x), np.full_like(x, step.tau**2)
    for change in targets:
        if kind == "fedavgm":
            m = step.beta1 * m + change
            x = x + step.lr * m
            continue
        m = step.beta1 * m + (1 - step.beta1) * change
        if kind == "fedadam":
            v = step.beta2 * v + (1 - step.beta2) * change**2
        else:
            v = v - (1 - step.beta2) * change**2 * np.sign(v - change**2)
        x = x + step.lr * m / (np.sqrt(v) + step.tau)
    return x


@pytest.mark.parametrize("kind", ["fedavgm", "fedadam", "fedyogi"])
def test_three_rounds_of_an_optimiser_are_the_papers_loop(kind: Any) -> None:
    step = ServerStep(optimizer=kind, lr=0.3, beta1=0.8, beta2=0.9, tau=1e-2)
    state = first = started()
    changes: dict[str, list[np.ndarray]] = {name: [] for name in state.tensors}
    for round in (1, 2, 3):
        replies = answers(METHOD, replace(state, round=round), seed=round)
        for name, seen in changes.items():
            seen.append(sum(SHARES[r.client] * r.send[name].double().numpy() for r in replies))
        state = server_step(METHOD, replace(state, round=round), replies, step)
    for name, tensor in state.tensors.items():
        expected = numpy_optimizer(kind, first.tensors[name].double().numpy(), changes[name], step)
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_two_rounds_by_hand() -> None:
    """x = 1, changes 2 and −1. FedAvgM, β = ½, lr = 1: m = 2, 0; x = 3, 3.

    FedAdam, β₁ = β₂ = ½, τ ≈ 0, lr = ½: m = 1, 0; v = 2, 1.5; x = 1 + ½/√2, the same. FedYogi: v = 2, then
    2 − ½·1·sign(2 − 1) = 1.5. From v = 0 it is 0 − ½·4·sign(−4) = 2.
    """
    name = "experts/0/v.lora_A"
    adaptive = 1 + 0.5 * 0.5**0.5
    cases = (("fedavgm", 1.0, [3.0, 3.0]), ("fedadam", 0.5, [adaptive] * 2), ("fedyogi", 0.5, [adaptive] * 2))
    for kind, lr, ends_at in cases:
        step = ServerStep(optimizer=kind, lr=lr, beta1=0.5, beta2=0.5, tau=1e-12)
        state = State(1, {name: torch.tensor([[1.0]])}, METHOD.init(setup_of()).spec)
        for change, end in zip((2.0, -1.0), ends_at, strict=True):
            reply = Reply("a", {name: torch.tensor([[change]])}, {"examples": 1, "experts/0": 1})
            state = server_step(METHOD, state, [reply], step)
            assert state.tensors[name].item() == pytest.approx(end)
        if kind != "fedavgm":
            assert state.kept[f"server/v/{name}"].item() == pytest.approx(1.5)


def test_the_first_step_by_hand_with_tau() -> None:
    """β₁ = 0, β₂ = ½, τ = 1, lr = 3, change 7: v = ½·1 + ½·49 = 25, x = 3·7 / (5 + 1); FedYogi: 1 + ½·49 = 25.5."""
    name = "experts/0/v.lora_A"
    for kind, v in (("fedadam", 25.0), ("fedyogi", 25.5)):
        state = State(1, {name: torch.zeros(1, 1)}, METHOD.init(setup_of()).spec)
        reply = Reply("a", {name: torch.tensor([[7.0]])}, {"examples": 1, "experts/0": 1})
        moved = server_step(METHOD, state, [reply], ServerStep(optimizer=kind, lr=3.0, beta1=0.0, beta2=0.5, tau=1.0))
        assert moved.kept[f"server/v/{name}"].item() == pytest.approx(v)
        assert moved.tensors[name].item() == pytest.approx(21 / (v**0.5 + 1))


def test_without_momentum_at_rate_one_fedavgm_is_the_plain_merge() -> None:
    state = started()
    replies = answers(METHOD, state)
    plain = server_step(METHOD, state, replies, ServerStep())
    moved = server_step(METHOD, state, replies, ServerStep(optimizer="fedavgm", lr=1.0, beta1=0.0))
    for name, tensor in plain.tensors.items():
        torch.testing.assert_close(moved.tensors[name], tensor, atol=1e-6, rtol=1e-6)
    assert same(plain.tensors, METHOD.merge(state, replies).tensors)


@pytest.mark.parametrize("kind", ["fedavgm", "fedadam", "fedyogi"])
def test_a_run_with_moments_resumes_bitwise(kind: Any, tmp_path: Path) -> None:
    step = ServerStep(optimizer=kind, lr=0.01 if kind != "fedavgm" else 0.5)
    straight, stopped = World(tmp_path / "straight"), World(tmp_path / "stopped")
    state = straight.run(METHOD, training=TRAINING, server=step)
    stopped.run(METHOD, training=TRAINING, server=step, rounds=2)
    again = World(tmp_path / "stopped").run(METHOD, training=TRAINING, server=step)
    assert same(again.tensors, state.tensors)
    assert same(again.kept, state.kept)
    assert any(t.any() for t in state.kept.values())
    assert outcome(straight.out) == outcome(stopped.out)


# --- Refusals -------------------------------------------------------------------------------------------------------


def config(method: str, **server: Any) -> Any:
    return parse_config({"method": {"name": method}, "data": {"clients": {"a": "a.jsonl"}}, "server": server})


def test_products_need_two_averaged_factors() -> None:
    step = ServerStep(aggregation="product-svd")
    with pytest.raises(ConfigError, match=r"FFA-LoRA does not, so there is nothing to correct\. Leave it at 'factors'"):
        step.check(METHODS["ffa_lora"]())
    with pytest.raises(ConfigError, match="FFA-LoRA"):
        config("ffa_lora", aggregation="product-svd")
    assert config("fedit", aggregation="product-svd").server == step


@pytest.mark.parametrize("kind", ["fedavgm", "fedadam", "fedyogi"])
def test_products_and_an_optimiser_exclude_each_other(kind: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{kind} .*product-svd draws new factors.*Use one of the two"):
        ServerStep(aggregation="product-svd", optimizer=kind, lr=0.5).check(METHOD)
    with pytest.raises(ConfigError, match="Use one of the two"):
        config("fedit", aggregation="product-svd", optimizer=kind, lr=0.5)
    assert config("fedit", optimizer=kind, lr=0.01).server.optimizer == kind


@pytest.mark.parametrize("name", [n for n, kind in METHODS.items() if kind.averages_factors and not kind.coordinates])
def test_whoever_averages_factors_can_have_their_products(name: str, tmp_path: Path) -> None:
    """Also a method whose replies hold more than factors."""
    state = World(tmp_path).run(METHODS[name](), rounds=1, server=ServerStep(aggregation="product-svd"))
    A = [t for n, t in state.tensors.items() if n.endswith("lora_A")]
    assert A
    for tensor in A:  # the rows of V are orthonormal
        gram = tensor.double() @ tensor.double().T
        torch.testing.assert_close(gram, torch.eye(len(tensor)).double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["fedavgm", "fedadam", "fedyogi"])
@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("flexlora", "each round draws new factors"),
        ("fedex_lora", "base and factors make the mean together only"),
        ("fedmoe", "rows of a router whose expert nobody trained"),
        ("fedalt", "no client goes on from an average"),
        ("local", "nothing is averaged"),
    ],
)
def test_an_optimiser_that_would_break_a_method_or_do_nothing_is_refused(method: str, why: str, kind: Any) -> None:
    with pytest.raises(ConfigError, match=f"server.optimizer {kind} .*{METHODS[method].title} {why}"):
        config(method, optimizer=kind, lr=0.01)


@pytest.mark.parametrize("weights", ["sample", "uniform"])
@pytest.mark.parametrize(("method", "why"), [("fedalt", "all others alike"), ("local", "nothing is averaged")])
def test_weights_that_would_change_nothing_are_refused(method: str, why: str, weights: str) -> None:
    with pytest.raises(ConfigError, match=f"server.weights '{weights}' .*{why}"):
        config(method, weights=weights)


def test_products_would_turn_what_scaffold_keeps() -> None:
    with pytest.raises(ConfigError, match="SCAFFOLD keeps control variates in the coordinates of the old ones"):
        config("scaffold", aggregation="product-svd")


@pytest.mark.parametrize(
    ("method", "server", "who"),
    [("fedit", {"aggregation": "product-svd"}, "product-svd"), ("rolora", {}, "RoLoRA"), ("flexlora", {}, "FlexLoRA")],
)
def test_moments_of_factors_that_are_drawn_anew_or_rest_are_not_kept(method: str, server: Any, who: str) -> None:
    plain = {"method": {"name": method}, "data": {"clients": {"a": "a.jsonl"}}, "server": server}
    parse_config(plain)
    with pytest.raises(ConfigError, match=f"optimizer_state keep .*{who} a client does not train the same tensors"):
        parse_config(plain | {"training": {"optimizer_state": "keep"}})


def test_adaptive_optimisers_need_a_rate_and_no_optimiser_has_one() -> None:
    assert config("fedit", optimizer="fedavgm").server.lr == 1.0
    for kind in ("fedadam", "fedyogi"):
        for given in ({}, {"lr": 1.0}):  # a run's own config.yaml holds every default
            with pytest.raises(ConfigError, match=f"{kind} needs lr: each entry moves by about so much a round"):
                config("fedit", optimizer=kind, **given)
            with pytest.raises(ValueError, match=f"{kind} needs lr"):
                ServerStep(optimizer=kind, **given)
    with pytest.raises(ConfigError, match="lr is the rate of a server optimizer, and optimizer is none"):
        config("fedit", lr=0.1)
