"""What a client trains, sends and gets per round, by hand on two small layers and as the paper prints it."""

from unittest.mock import patch

import pytest

from fedloom.bench.dry import SUSTAINED, forecast
from fedloom.bench.suite import Cell
from fedloom.budget import architecture, budget, held, payload
from fedloom.config import parse_config
from fedloom.errors import AdapterError, ConfigError
from fedloom.methods import METHODS
from fedloom.methods.base import Method, WarmUp
from fedloom.types import AdapterSpec

SHAPES, HIDDEN, RANK = {"q": (6, 4), "v": (3, 4)}, 5, 3
A, B, DENSE = RANK * (4 + 4), RANK * (6 + 3), 6 * 4 + 3 * 4
LORA = A + B


def router(experts):
    return 512 * HIDDEN + 512 + experts * 512 + experts


@pytest.mark.parametrize(
    ("method", "trained", "up", "down"),
    [
        ("fedit", LORA, LORA, LORA),
        ("fedprox", LORA, LORA, LORA),
        ("flexlora", LORA, LORA, LORA),
        ("ffa_lora", B, B, LORA),  # A is frozen, yet goes down
        ("fedsa_lora", LORA, A, LORA),  # B stays at home
        ("rolora", B, B, LORA),  # the larger factor's round
        ("scaffold", LORA, 2 * LORA, 2 * LORA),  # a control variate beside every value
        ("flora", LORA, LORA, LORA + DENSE),
        ("fedex_lora", LORA, LORA, LORA + DENSE),
        ("fedlease", LORA + router(3), LORA + router(3), 3 * LORA + router(3)),  # one expert and one router up
        ("fedlease_adaptive", LORA + 40, LORA + 40, 3 * LORA + 40),  # 5 slots × width 4, of two layers
        ("fedweave", 3 * LORA + router(3), 3 * LORA + router(3), 3 * LORA + router(3)),
        ("fedweave_wo_prototype_expert", 3 * LORA + router(3), LORA + router(3), 3 * LORA + router(3)),
        ("fedrouter", LORA, LORA, LORA),  # one cluster's expert a round, without its centroids
        ("fedalt", LORA + 16, LORA, 2 * LORA + 16),  # mixers of 2 slots stay at home
        ("local", LORA, 0, 0),
        ("centralised", LORA, 0, 0),
    ],
)
def test_traffic_by_hand(method, trained, up, down):
    found = payload(METHODS[method](), AdapterSpec(("q", "v"), RANK), SHAPES, HIDDEN, 3)
    assert (found.trained, found.up, found.down) == (trained, up, down)


def test_a_client_sends_no_more_experts_than_it_may_have_buckets():
    found = payload(METHODS["fedweave"](), AdapterSpec(("q", "v"), RANK), SHAPES, HIDDEN, 10)
    assert (found.up, found.down) == (8 * LORA + router(10), 10 * LORA + router(10))


def test_every_method_for_lora_experts_is_counted():
    for name, kind in METHODS.items():
        if not kind.native:
            found = payload(kind(), AdapterSpec(("q", "v"), RANK), SHAPES, HIDDEN, 1)
            assert found.trained > 0, name
            assert (found.up == 0) == (name in ("local", "centralised")), name


@pytest.mark.parametrize(
    ("method", "lora", "router_", "signature"),
    [
        ("fedit", 9_175_040, 0, 0),
        ("fedweave", 9_175_040, 1_575_428, 917_504),
        ("fedlease", 9_175_040, 4 * 1_575_428, 917_504),
    ],
)
def test_the_papers_counts(method, lora, router_, signature):
    """Appendix B: 9.18M, 10.75M and 15.48M; a bucket's probe holds A beside the signature: a quarter of the experts."""
    found = budget("llama-3.2-3b", method, 4)
    assert (found.lora, found.router, found.total, found.signature) == (lora, router_, lora + router_, signature)
    assert found.probe == (lora // 4 if signature else 0)
    assert found.to_plain() | {"round_bytes": 4 * found.total, "up_bytes": 4 * found.up} == found.to_plain()


def test_a_probe_may_be_one_centroid():
    """FedRouter's clients send the mean of each of their clusters' features: Llama-3.2-3B's have 3,072 values."""
    assert budget("llama-3.2-3b", "fedrouter", 4).probe == 3072


def cell(method):
    benchmark = {"tasks": ["gsm8k"], "clients": 20}
    plain = {"method": {"name": method}, "data": {"benchmark": benchmark, "max_length": 100}}
    training = {"steps": 10, "batch_size": 8}
    return Cell("x", method, method, parse_config(plain | {"federation": {"rounds": 20}, "training": training}))


@pytest.mark.parametrize(("method", "buckets"), [("fedweave", 8), ("fedlease", 1), ("fedit", 0)])
def test_a_forecast_holds_the_warm_ups(method, buckets):
    """Ten warm-up steps of eight examples per bucket; one adapter down and one per bucket up."""
    found, one = forecast(cell(method)), budget("tiny", method, 4)
    whole = sum(p.numel() for p in architecture("tiny")[1].parameters())
    tokens = 100 * (20 * 20 * 10 * 8 + 20 * buckets * 10 * 8)
    assert found.probe_steps == 10 * buckets
    assert found.hours == pytest.approx(4 * whole * tokens / SUSTAINED / 3600)
    assert found.total_bytes == 4 * 20 * (20 * (one.up + one.down) + (1 + buckets) * one.probe)


def test_no_traffic_is_forecast_where_there_is_none():
    for method in ("local", "centralised"):
        found = forecast(cell(method))
        assert (found.up_bytes, found.down_bytes, found.total_bytes) == (0, 0, 0)


def test_a_suites_rank_targets_and_options_count():
    """Llama-3.2-3B's q_proj is square: 28 layers × rank 4 × (3072 + 3072); a router of width 16 has four gates."""
    found = budget("llama-3.2-3b", "fedweave", 4, 4, targets=["q_proj"], options={"router_hidden": 16})
    assert (found.rank, found.lora) == (4, 4 * 28 * 4 * (3072 + 3072))
    assert found.router == 16 * 3072 + 16 + 4 * 16 + 4
    with pytest.raises(ConfigError, match=r"fedweave: unknown key 'method.router_hiden'.*router_hidden"):
        budget("llama-3.2-3b", "fedweave", 4, options={"router_hiden": 16})
    with pytest.raises(AdapterError, match="q_prj"):
        budget("tiny", "fedit", 1, targets=["q_prj"])


def test_what_a_client_of_native_experts_holds():
    """switch-base-16: 12 layers × 16 experts of two matrices 768 × 3072; FedMoE's clients hold half of them."""
    experts = 12 * 16 * 2 * 768 * 3072
    everyone, part = (budget("switch-base-16", name, 1) for name in ("fedavg_moe", "fedmoe"))
    assert (everyone.lora, everyone.trained, everyone.total) == (experts, everyone.total, part.total)
    assert (part.trained, part.up, part.down) == (part.total - experts // 2,) * 3
    eighth = budget("switch-base-16", "fedmoe", 1, options={"capacity": 0.125})
    assert eighth.trained == part.total - 7 * experts // 8
    lora = budget("switch-base-16", "fedmoe", 1, 4, native="lora")
    factors = 12 * 16 * 2 * 4 * (768 + 3072)
    assert (lora.rank, lora.lora) == (4, factors)
    assert lora.trained == lora.total - factors // 2
    assert lora.backbone_parameters == everyone.total


def test_held_by_hand():
    """Two layers of two experts; a quarter of four is one, but each layer keeps one."""
    sizes = {"experts/a.0/w": 5, "experts/a.1/w": 5, "experts/b.0/w": 7, "experts/b.1/w": 7, "rest": 3}
    kind = METHODS["fedmoe"]
    assert held(METHODS["fcmoe"](), sizes) == 27
    assert held(kind(kind.Options(capacity=0.25)), sizes) == 3 + 7 + 7
    assert held(kind(kind.Options(capacity=0.75)), sizes) == 3 + 7 + 7 + 5


def test_what_a_method_says_of_itself_is_counted_whatever_its_options_are():
    """One of four experts by 5, 5, 7, 7 is 7; twenty clients warm up three buckets in two steps of five examples."""

    class Single(Method):
        native = submodels = True

        def held(self, units):
            return 1

    class Warm(Method):
        title = "Warm"
        has_probe = True

        def warms_up(self):
            return WarmUp(buckets=3, steps=2, batch=5)

    sizes = {"experts/a.0/w": 5, "experts/a.1/w": 5, "experts/b.0/w": 7, "experts/b.1/w": 7, "rest": 3}
    assert held(Single(), sizes) == 3 + 7
    with patch.dict(METHODS, warm=Warm):
        found, one = forecast(cell("warm")), budget("tiny", "warm", 4)
    whole = sum(p.numel() for p in architecture("tiny")[1].parameters())
    assert found.probe_steps == 3 * 2
    assert found.hours == pytest.approx(4 * whole * 100 * (20 * 20 * 10 * 8 + 20 * 3 * 2 * 5) / SUSTAINED / 3600)
    assert found.total_bytes == 4 * one.total * 20 * (2 * 20 + 1 + 3)
    assert one.probe == one.lora > one.signature > 0
