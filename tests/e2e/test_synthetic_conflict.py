"""Three patterns contradict each other inside every client: experts by prototype learn what one adapter does not."""

from pathlib import Path
from typing import Any

import pytest

from fedloom.config import parse_config
from fedloom.experiment import run

SHARED: dict[str, Any] = {
    "backbone": {"name": "tiny", "threads": 1},
    "data": {"synthetic": {"patterns": 3, "keys": 3, "clients": 2, "train": 90, "test": 20, "mixing": 1.0}},
    "training": {"steps": 36, "batch_size": 8, "lr": 1e-2, "router_lr": 5e-4},
    "evaluation": {"routing": ["soft"], "generate": False},
}


def final_loss(out: Path, **sections: Any) -> tuple[float, dict[str, Any]]:
    metrics = run(parse_config({**SHARED, **sections}), out)
    return metrics["routing"]["soft"]["loss"]["macro"], metrics


def test_at_full_mixing_experts_by_prototype_learn_sooner_than_one_adapter(tmp_path: Path) -> None:
    """Both take 288 local steps a client: three warm-ups of 60 and three rounds of 36; eight rounds of 36."""
    woven, metrics = final_loss(
        tmp_path / "fedweave", method={"name": "fedweave", "warmup_steps": 60}, federation={"rounds": 3}
    )
    one, _ = final_loss(tmp_path / "fedit", method={"name": "fedit"}, adapter={"rank": 24}, federation={"rounds": 8})
    assert metrics["experts"] == 3
    assert metrics["alignment"]["global"] == pytest.approx({"purity": 1.0, "nmi": 1.0, "ari": 1.0})
    assert one > 0.5  # a guess among three keys costs log(3) / 2 = 0.549: half the tokens are end tokens
    assert woven < 0.35
