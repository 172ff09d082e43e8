"""What a run keeps when it cannot be measured as asked, and what may change when it goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedloom
from fedloom.config import Config, parse_config
from fedloom.errors import ConfigError
from fedloom.experiment import run
from fedloom.model import load_model
from fedloom.types import Training
from fedloom.workload import cut_epochs
from small_world import save_backbone

SYNTHETIC = {"synthetic": {"patterns": 2, "clients": 2, "train": 4, "val": 0, "test": 2, "keys": 4}}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_backbone(tmp_path_factory.mktemp("small") / "backbone"))


def config(backbone: str, data: dict[str, Any], **evaluation: Any) -> Config:
    return parse_config(
        {
            "method": {"name": "fedit"},
            "backbone": {"name": backbone, "threads": 1},
            "data": data,
            "adapter": {"rank": 2},
            "federation": {"rounds": 1},
            "training": {"steps": 1, "batch_size": 2},
            "evaluation": {"generate": False, **evaluation},
        }
    )


def test_clients_without_tasks_are_not_trained_for_a_personalised_measure(backbone: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    own = {"clients": {"ann": str(rows)}, "test": {"mine": str(rows)}}
    with pytest.raises(ConfigError, match=r"evaluation\.personalised .*no client's rows name a task"):
        run(config(backbone, own, personalised=5), tmp_path / "out")
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_failure_to_measure_costs_neither_the_model_nor_new_training(
    backbone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def fail(*_: object) -> None:
        raise ConfigError("cannot be measured")

    with monkeypatch.context() as patch:
        patch.setattr("fedloom.measure.personalised", fail)
        with pytest.raises(ConfigError, match="cannot be measured"):
            run(config(backbone, SYNTHETIC, personalised=1), out)
    assert load_model(out / "model").about["experts"]
    assert not (out / "metrics.json").exists()
    log = (out / "rounds.jsonl").read_text()

    metrics = run(config(backbone, SYNTHETIC, routing=["top1", "soft"]), out, resume=True)
    assert "personalised" not in metrics
    assert yaml.safe_load((out / "config.yaml").read_text())["evaluation"]["personalised"] == 0
    metrics = run(config(backbone, SYNTHETIC, personalised=2, personalised_scores=True), out, resume=True)
    assert metrics["personalised"]["rows_per_kind"] == 2
    assert yaml.safe_load((out / "config.yaml").read_text())["evaluation"]["personalised"] == 2
    assert (out / "rounds.jsonl").read_text() == log


@pytest.mark.parametrize("change", [{"limit": 1}, {"split": "validation"}, {"routing": ["soft"]}])
def test_what_is_measured_during_the_rounds_does_not_change(
    change: dict[str, Any], backbone: str, tmp_path: Path
) -> None:
    run(config(backbone, SYNTHETIC), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"written with another .*evaluation"):
        run(config(backbone, SYNTHETIC, **change), tmp_path / "out", resume=True)


def test_a_run_takes_a_path_a_mapping_or_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Config] = []
    monkeypatch.setattr("fedloom.experiment._run", lambda config, *_: ran.append(config))
    plain = {"seed": 43, "data": {"clients": {"ann": "a.jsonl"}}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(plain))
    monkeypatch.chdir(tmp_path)
    for given in ("c.yaml", tmp_path / "c.yaml", plain, fedloom.load_config("c.yaml", ["seed=43"])):
        fedloom.run(given, "out")
    assert [c.seed for c in ran] == [43] * 4
    assert {c.data.clients["ann"] for c in ran} == {str(tmp_path / "a.jsonl")}
    with pytest.raises(ConfigError, match="a path, a mapping or a Config, not of type list"):
        fedloom.run([plain], "other")  # type: ignore[arg-type]
    assert not Path("other").exists()


def test_epochs_that_the_most_steps_cut_short_are_told() -> None:
    """Three passes over 100 and 20 rows in batches of 8 are 39 and 9 steps."""
    training = Training(epochs=3, steps=10, batch_size=8)
    told = cut_epochs(training, {"ann": 20, "bob": 100})
    assert told == "training.steps 10 cuts the epochs of 1 of 2 clients short; bob would need 39."
    assert cut_epochs(replace(training, steps=39), {"ann": 20, "bob": 100}) == ""
    assert cut_epochs(Training(steps=10), {"bob": 100}) == ""
