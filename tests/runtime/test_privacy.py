"""Differential privacy: clipping as it arrives, noise as stated, ε as computed elsewhere, refusals by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import integrate, special

pytest.importorskip("opacus", reason="Opacus is an option of its own")

from fedloom.config import parse_config
from fedloom.errors import ConfigError
from fedloom.methods import METHODS
from fedloom.methods.protection import Privacy
from fedloom.methods.server import ServerStep
from fedloom.numerics.privacy import clip, gaussian, stretched
from fedloom.numerics.tree import norm
from fedloom.runtime.compression import compress, expand
from fedloom.runtime.events import Observer
from fedloom.runtime.leaving import Leaving, shaped, within
from fedloom.runtime.private import epsilon, poisson_cohort, privatised
from fedloom.runtime.totals import totals_of
from fedloom.runtime.wire import decode_reply
from fedloom.types import Order, Reply, Tensors
from small_world import SECRET, SPEC, TRAINING, World, random_tensors, same, world_of

UNIFORM = ServerStep(weights="uniform")
HUGE = Privacy(clip=1e6, noise=0.0, reproducible=True)


# ε, against other computations.

ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64)) + [2**x for x in range(6, 13)]


def convert(rdp: dict[float, float], delta: float) -> float:
    """Canonne, Kamath, Steinke (2020), Proposition 12: from Rényi divergences to ε at δ."""
    return min(r + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1) for a, r in rdp.items())


@pytest.mark.parametrize(("noise", "rounds", "delta"), [(1.0, 1, 1e-5), (4.0, 20, 1e-6), (0.7, 3, 1e-3)])
def test_without_sampling_epsilon_is_the_closed_form(noise: float, rounds: int, delta: float) -> None:
    """D_α(N(0, σ²) ‖ N(1, σ²)) = α / 2σ², and divergences of rounds add up (Mironov 2017, Table II)."""
    expected = convert({a: rounds * a / (2 * noise**2) for a in ORDERS}, delta)
    found = epsilon(Privacy(clip=1.0, noise=noise, delta=delta), 1.0, rounds, probed=False)
    assert found == pytest.approx(expected, rel=1e-9)
    # Balle and Wang (2018), Theorem 8: the exact δ of that ε; composition of Gaussians is one with μ = √T / σ.
    mu = math.sqrt(rounds) / noise
    exact = special.ndtr(mu / 2 - found / mu) - math.exp(found) * special.ndtr(-mu / 2 - found / mu)
    assert exact <= delta


def sampled_divergence(a: float, noise: float, rate: float) -> float:
    """log E_{x ~ N(0, σ²)} [(1 − q + q exp((2x − 1) / 2σ²))^α] / (α − 1), integrated (Mironov et al. 2019)."""

    def log_integrand(x: float) -> float:
        ratio = special.logsumexp([math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2)])
        return a * ratio - x**2 / (2 * noise**2) - math.log(noise * math.sqrt(2 * math.pi))

    peak = max(log_integrand(x / 50 * (a + 1)) for x in range(-50, 101))
    total, _ = integrate.quad(
        lambda x: math.exp(log_integrand(x) - peak), -12 * noise, a + 12 * noise, limit=2000, points=[0.0, 0.5, a]
    )
    return (math.log(total) + peak) / (a - 1)


@pytest.mark.parametrize(("noise", "rate", "rounds"), [(1.1, 0.1, 30), (2.0, 0.5, 10)])
def test_with_sampling_epsilon_is_that_of_numerical_integration(noise: float, rate: float, rounds: int) -> None:
    few = [a for a in ORDERS if 1.5 <= a <= 32]
    expected = convert({a: rounds * sampled_divergence(a, noise, rate) for a in few}, 1e-5)
    assert epsilon(Privacy(clip=1.0, noise=noise), rate, rounds, probed=False) == pytest.approx(expected, rel=1e-4)


def test_the_probe_is_counted_without_sampling() -> None:
    privacy = Privacy(clip=1.0, noise=2.0, probe_clip=1.0, probe_noise=3.0)
    both = convert({a: a / (2 * 3.0**2) + 5 * a / (2 * 2.0**2) for a in ORDERS}, 1e-5)
    assert epsilon(privacy, 1.0, 5, probed=True) == pytest.approx(both)
    assert epsilon(privacy, 1.0, 0, probed=True) == pytest.approx(convert({a: a / 18 for a in ORDERS}, 1e-5))
    assert epsilon(privacy, 1.0, 0, probed=False) == 0.0
    assert epsilon(privacy.model_copy(update={"noise": 0.0}), 1.0, 1, probed=True) == math.inf


def test_the_other_accountant_is_tighter_and_still_honest() -> None:
    rdp, prv = (epsilon(Privacy(clip=1.0, noise=2.0, accountant=a), 1.0, 10, probed=False) for a in ("rdp", "prv"))
    mu = math.sqrt(10) / 2.0
    exact = special.ndtr(mu / 2 - prv / mu) - math.exp(prv) * special.ndtr(-mu / 2 - prv / mu)
    assert prv < rdp
    assert exact <= 1e-5


# Clipping.


def test_the_whole_vector_is_clipped_by_hand() -> None:
    """(3, 4, 12) has norm 13: clipped to 6.5 every number is halved; a shorter one is left as it is, bit by bit."""
    update = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[12.0]])}
    found = clip(update, 6.5)
    assert found["a"].tolist() == [1.5, 2.0]
    assert found["b"].tolist() == [[6.0]]
    assert clip(update, 13.0) is update


@pytest.mark.parametrize("wire", ["none", "bf16", "int8"])
@pytest.mark.parametrize("bound", [1e-3, 0.37, 5.0])
def test_what_arrives_is_within_the_bound_however_it_is_encoded(wire: Any, bound: float) -> None:
    """Rounding lengthens vectors: the encoding of the clipped vector alone does break the bound for some of these."""
    longer = 0
    for seed in range(40):
        update = random_tensors({"a": torch.empty(7, 3), "b": torch.empty(300)}, seed, scale=10.0)
        assert norm(expand(within(clip(update, bound), bound, wire), wire)) <= bound
        assert norm(expand(within(clip(update, bound), bound, wire), wire)) > 0.98 * bound
        longer += norm(expand(compress(clip(update, bound), wire), wire)) > bound
    assert longer > 0


def test_clipped_off_is_not_saved_up() -> None:
    leaving = Leaving("int8", feedback=True, privacy=Privacy(clip=1.0, noise=1.0))
    residual: Tensors = {}
    for _ in range(20):
        packed, residual = shaped({"x": torch.full((64,), 100.0)}, residual, leaving)
        assert norm(expand(packed, "int8")) <= 1.0
        assert norm(residual) < 0.02


def test_buckets_are_stretched_to_one_length() -> None:
    groups = [{"a": torch.tensor([3.0, 4.0])}, {"a": torch.tensor([0.0, 0.1])}, {"a": torch.zeros(2)}]
    found = stretched(groups, 3.0)  # √3 each
    assert [norm(group) for group in found] == pytest.approx([math.sqrt(3), math.sqrt(3), 0.0])
    assert found[0]["a"].tolist() == pytest.approx([0.6 * math.sqrt(3), 0.8 * math.sqrt(3)])


# Noise.


def test_noise_has_the_stated_deviation() -> None:
    drawn = gaussian({"x": torch.empty(200_000)}, 2.5, torch.Generator().manual_seed(0))["x"]
    assert float(drawn.std()) == pytest.approx(2.5, rel=0.01)
    assert float(drawn.mean()) == pytest.approx(0.0, abs=0.03)
    assert drawn.dtype == torch.float64


def test_the_denominator_is_fixed_and_noise_enters_the_sum() -> None:
    """Four clients may be drawn at rate 0.5, so Σ is divided by 2, though three answered, one of them with nothing."""
    method = METHODS["fedit"]()
    tensors = {"experts/0/x.lora_A": torch.zeros(20_000)}
    orders = [Order("fit", client, 1, tensors, SPEC, TRAINING) for client in "abcd"]
    update = [{name: torch.full((20_000,), value) for name in tensors} for value in (1.0, 2.0, 0.0)]
    replies = [Reply(c, u, {"examples": 1, "experts/0": 1}) for c, u in zip("abd", update, strict=True)]
    source = torch.Generator().manual_seed(1)
    quiet, factor = privatised(method, orders, totals_of(replies), Privacy(clip=1.0, noise=0.0), 0.5, source)
    assert torch.equal(quiet.send["experts/0/x.lora_A"], torch.full((20_000,), 1.5))
    assert factor == 0.0
    noisy, factor = privatised(method, orders, totals_of(replies), Privacy(clip=6.0, noise=0.5), 0.5, source)
    assert float(noisy.send["experts/0/x.lora_A"].std()) == pytest.approx(3.0 / 2, rel=0.02)
    assert factor == pytest.approx(3.0 / 3.0, rel=0.02)  # noise of 3 per number on a sum of 3 per number
    nobody, factor = privatised(method, orders, totals_of([]), Privacy(clip=6.0, noise=0.5), 0.5, source)
    assert float(nobody.send["experts/0/x.lora_A"].std()) == pytest.approx(1.5, rel=0.02)
    assert factor == math.inf


def test_clients_are_drawn_one_by_one() -> None:
    names = [f"c{i}" for i in range(50)]
    sizes = [len(poisson_cohort(names, 0.3, HUGE, 1, round)) for round in range(400)]
    assert sum(sizes) / 400 == pytest.approx(15, abs=0.5)
    assert max(sizes) > min(sizes) + 8  # not of one size
    assert poisson_cohort(names, 1.0, HUGE, 1, 1) == names
    secret = HUGE.model_copy(update={"reproducible": False})
    assert poisson_cohort(names, 0.5, secret, 1, 1) != poisson_cohort(names, 0.5, secret, 1, 1)


# Whole runs.


def go(out: Path, name: str, privacy: Privacy | None, method: Any = None, **more: Any) -> World:
    method = method or METHODS[name]()
    found = world_of(method, out)
    found.simulator.leaving = Leaving(more.get("wire", "none"), privacy=privacy)
    found.run(method, server=UNIFORM, privacy=privacy, **{"rounds": 2, **more})
    return found


@pytest.mark.parametrize("name", ["fedit", "ffa_lora"])
def test_without_noise_and_clipping_it_is_bitwise_the_plain_run(name: str, tmp_path: Path) -> None:
    plain, private = go(tmp_path / "plain", name, None), go(tmp_path / "private", name, HUGE)
    assert same(private.checkpoints.load(2).state.tensors, plain.checkpoints.load(2).state.tensors)
    record = private.log.read()[2]
    assert record["privacy"] == {"epsilon": None, "delta": 1e-5, "noise_to_signal": 0.0}
    assert [client["examples"] for client in record["clients"].values()] == [1, 1, 1, 1]
    assert record["train_loss"] is None


def test_fedweave_says_nothing_of_sizes_and_counts_its_probe(tmp_path: Path) -> None:
    kind = METHODS["fedweave"]
    method = kind(kind.Options(buckets="max", max_buckets=2))
    privacy = HUGE.model_copy(update={"noise": 1.0, "probe_clip": 1.0, "probe_noise": 0.5})
    found = go(tmp_path, "fedweave", privacy, method, rounds=1)
    state = found.checkpoints.load(1).state
    assert all(size == 1 for sizes in state.values["sizes"].values() for size in sizes)
    start, first = found.log.read()
    assert start["privacy"]["epsilon"] == pytest.approx(convert({a: a / 0.5 for a in ORDERS}, 1e-5))
    assert first["privacy"]["epsilon"] == pytest.approx(convert({a: a / 0.5 + a / 2 for a in ORDERS}, 1e-5))
    assert not start["quarantined"]
    assert not first["quarantined"]
    for path in found.simulator.spool.iterdir():
        assert SECRET.encode() not in path.read_bytes()


def test_every_reply_of_a_clipped_run_is_within_the_bound(tmp_path: Path) -> None:
    found = go(tmp_path, "fedit", Privacy(clip=0.01, noise=0.1, reproducible=True), rounds=1, wire="int8")
    assert found.log.read()[1]["quarantined"] == {}
    for path in found.simulator.spool.iterdir():
        reply = decode_reply(path, path.stem, 1, "int8")
        assert 0.0098 < norm(reply.send) <= 0.01
        assert reply.metrics == {}
        assert reply.values == {}


def test_a_reply_beyond_the_bound_is_quarantined(tmp_path: Path) -> None:
    privacy = Privacy(clip=1e-3, noise=0.1, reproducible=True)
    found = world_of(METHODS["fedit"](), tmp_path)
    found.simulator.leaving = Leaving(privacy=privacy.model_copy(update={"clip": 1.0}))  # the clients do not keep to it
    observer = Told()
    found.run(METHODS["fedit"](), rounds=1, server=UNIFORM, privacy=privacy, min_replies=0, observer=observer)
    quarantined = found.log.read()[1]["quarantined"]
    assert len(quarantined) == 4
    assert all("to which it was to be clipped" in why for why in quarantined.values())


class Told(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)


def test_a_target_ends_the_run_before_it_is_passed_and_noise_is_warned_of(tmp_path: Path) -> None:
    base = Privacy(clip=0.01, noise=3.0, reproducible=True)
    limit = (epsilon(base, 1.0, 2, False) + epsilon(base, 1.0, 3, False)) / 2
    observer = Told()
    found = go(tmp_path, "fedit", base.model_copy(update={"target": limit}), rounds=5, observer=observer)
    records = found.log.read()
    assert [record["round"] for record in records] == [0, 1, 2]
    assert records[-1]["privacy"]["epsilon"] < limit
    assert any("ends after round 2" in line and f"target {limit:g}" in line for line in observer.said)
    factor = records[1]["privacy"]["noise_to_signal"]
    assert factor > 1
    assert any(f"Round 1: the noise is {factor:.3g} times" in line for line in observer.said)
    with pytest.raises(ConfigError, match="round 1 alone cost"):
        go(tmp_path / "none", "fedit", base.model_copy(update={"target": 0.01}))


def test_the_same_seed_gives_the_same_noise_only_if_asked(tmp_path: Path) -> None:
    runs = [
        go(tmp_path / str(i), "fedit", Privacy(clip=0.01, noise=1.0, reproducible=i < 2), rounds=1)
        .checkpoints.load(1)
        .state
        for i in range(4)
    ]
    assert same(runs[0].tensors, runs[1].tensors)
    assert not same(runs[2].tensors, runs[3].tensors)


def test_a_round_without_anybody_is_noise(tmp_path: Path) -> None:
    found = go(tmp_path, "fedit", Privacy(clip=0.01, noise=1.0, reproducible=True), rounds=1, participation=1e-9)
    record = found.log.read()[1]
    assert record["cohort"] == []
    assert record["privacy"]["noise_to_signal"] is None
    start = METHODS["fedit"]().init(found.setup).tensors
    assert not same(found.checkpoints.load(1).state.tensors, start)


def test_M10_with_reproducible_noise_resume_equals_the_straight_run(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    class Fatal(Observer):
        def round(self, record: dict[str, Any]) -> None:
            if record["round"] == 1:
                raise Killed

    privacy = Privacy(clip=0.01, noise=1.0, reproducible=True)
    straight = go(tmp_path / "straight", "fedit", privacy, participation=0.75)
    with pytest.raises(Killed):
        go(tmp_path / "killed", "fedit", privacy, participation=0.75, observer=Fatal())
    killed = go(tmp_path / "killed", "fedit", privacy, participation=0.75)
    assert same(straight.checkpoints.load(2).state.tensors, killed.checkpoints.load(2).state.tensors)
    assert straight.log.read()[2]["privacy"] == killed.log.read()[2]["privacy"]


# Refusals.


def refused(**changes: Any) -> str:
    plain: dict[str, Any] = {
        "data": {"synthetic": {}},
        "method": {"name": "fedit"},
        "server": {"weights": "uniform"},
        "privacy": {"clip": 1.0, "noise": 1.0},
    }
    with pytest.raises(ConfigError) as found:
        parse_config({**plain, **changes})
    return str(found.value)


def test_what_cannot_be_protected_is_refused_by_name_and_reason() -> None:
    assert "Set server.weights to 'uniform'" in refused(server={"weights": "sample"})
    assert "FedLEASE cannot be run so: experts are single clients' updates" in refused(method={"name": "fedlease"})
    assert "FC-MoE cannot be run so: each update is projected" in refused(method={"name": "fcmoe"})
    assert "privacy.probe_clip" in refused(method={"name": "fedweave", "buckets": "max"})
    veiled = {"clip": 1.0, "noise": 1.0, "probe_clip": 1.0, "probe_noise": 1.0}
    assert "set method.buckets to 'max'" in refused(method={"name": "fedweave"}, privacy=veiled)
    uniform = {"weights": "uniform"}
    assert "server.conflict 'project' works on single updates" in refused(server={**uniform, "conflict": "project"})
    assert "'privacy.clip' is 0" in refused(privacy={"clip": 0, "noise": 1})
    assert "unknown key 'privacy.noize'. Did you mean 'noise'" in refused(privacy={"clip": 1, "noize": 1})
