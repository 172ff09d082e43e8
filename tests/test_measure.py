"""What a run measures on its way and at its end, on the small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedloom.config import parse_config
from fedloom.experiment import run
from small_world import save_backbone

ROWS = [{"prompt": f"news {i}", "response": label} for i, label in enumerate(["world", "sports", "sports"])]


@pytest.mark.parametrize("every_score", [False, True])
def test_scores_over_the_rounds_and_classes_at_the_end(every_score: bool, tmp_path: Path) -> None:
    backbone, ann, test = (str(tmp_path / name) for name in ("backbone", "ann.jsonl", "test.jsonl"))
    save_backbone(tmp_path / "backbone")
    for name in ("ann", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = parse_config(
        {
            "method": {"name": "fedit"},
            "backbone": {"name": backbone, "threads": 1},
            "data": {"clients": {"ann": ann}, "test": {"ag_news": test}},
            "adapter": {"rank": 2},
            "federation": {"rounds": 3},
            "training": {"steps": 2, "batch_size": 2},
            "evaluation": {"every": 2, "every_score": every_score},
        }
    )
    metrics = run(config, tmp_path / "out")
    rounds = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    looked = [r["round"] for r in rounds if "score_model" in (r.get("evaluation") or {})]
    assert looked == ([0, 2, 3] if every_score else [])
    final = metrics["routing"]["top1"]
    if every_score:
        assert rounds[3]["evaluation"]["score_model"] == final["score"]
    assert final["classes"]["ag_news"]["labels"] == ["sports", "world"]
    assert final["classes"]["ag_news"]["accuracy"] == final["score"]["ag_news"]
    assert [sum(line) for line in final["classes"]["ag_news"]["confusion"]] == [2, 1]
