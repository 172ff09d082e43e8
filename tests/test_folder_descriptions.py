"""What a model folder says of itself, ``fedloom.json``, is checked before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import ModelFolderError
from fedloom.model import load_model


def description() -> dict[str, Any]:
    """Return a description that names a hash no backbone has."""
    return {
        "format": 1,
        "backbone": {"name": "tiny", "hash": "0", "dtype": "float32", "tokenizer_hash": "0"},
        "adapter": {"targets": ["q_proj"], "rank": 8, "alpha": 16.0, "dropout": 0.0, "experts": 1, "router_hidden": 0},
        "routing": "top1",
        "max_length": 512,
        "experts": [{}],
    }


@pytest.mark.parametrize(
    ("section", "field", "value", "says"),
    [
        ("adapter", "experts", 10**9, "'adapter.experts' has a value"),
        ("adapter", "rank", "8", "'adapter.rank'"),
        ("adapter", "rank", True, "'adapter.rank'"),
        ("adapter", "rank", 65537, "'adapter.rank'"),
        ("adapter", "router_hidden", -1, "'adapter.router_hidden'"),
        ("adapter", "targets", 5, "not iterable"),
        ("adapter", "targets", [5], "'adapter.targets'"),
        ("adapter", "unknown", 1, "'unknown'"),
        ("adapter", "alpha", None, "'adapter.alpha'"),
        ("backbone", "name", ["x"], "'backbone.name'"),
        ("backbone", "dtype", "float3", "'backbone.dtype'"),
        ("backbone", "dtype", ["float32"], "'backbone.dtype'"),
        ("backbone", "hash", None, "'backbone.hash'"),
        (None, "experts", [{}, {}], "'experts'"),
        (None, "max_length", "512", "'max_length'"),
        (None, "routing", 1, "string"),
        (None, "routing", "top" + "9" * 5000, "'routing'"),
        (None, "experts", ["x"], "'experts.0.'"),
        (None, "experts", [{"examples": "[/x]"}], "'experts.0.'"),
        (None, "experts", [{"buckets": 5}], "'experts.0.'"),
        (None, "experts", 1, "not iterable"),
        ("adapter", "alpha", float("nan"), "'adapter.alpha'"),
        ("adapter", "alpha", 10**400, "'adapter.alpha'"),
        ("adapter", "dropout", 1.0, "'adapter.dropout'"),
        ("adapter", "slots", [0, 1], "'adapter.slots'"),
        ("adapter", "slots", 10**6 * "0", "'adapter.slots'"),
        ("adapter", "slot_top", 1, "'adapter.slot_top'"),
        ("adapter", "routers", 0, "'adapter.routers'"),
        ("adapter", "centroids", "yes", "'adapter.centroids'"),
        ("adapter", "base_delta", 1, "'adapter.base_delta'"),
        ("adapter", "native", "half", "'adapter.native'"),
        ("adapter", "native", ["full"], "'adapter.native'"),
        ("adapter", "kept", [1], "'adapter.kept'"),
        ("adapter", "blend", 1, "'adapter.blend'"),
        ("adapter", "router_weights", 1.0, "not iterable"),
    ],
)
def test_a_hostile_description_is_refused_before_anything_is_allocated(
    section: str | None, field: str, value: object, says: str, tmp_path: Path
) -> None:
    about = description()
    (about[section] if section else about)[field] = value
    (tmp_path / "fedloom.json").write_text(json.dumps(about))
    with pytest.raises(ModelFolderError, match=rf"fedloom\.json.*{says}"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "weights",
    [["a", "b"], [1.0], [1.0, 1.0, 1.0], [0, 0], [float("nan"), 1], [1e308, 1e308], [-1, 2], [True, 1], [10**400, 1]],
)
def test_weights_of_routers_that_no_model_has_are_refused(weights: list[Any], tmp_path: Path) -> None:
    about = description()
    about["adapter"] |= {"router_hidden": 4, "routers": 2, "router_weights": weights}
    (tmp_path / "fedloom.json").write_text(json.dumps(about))
    with pytest.raises(ModelFolderError, match=r"fedloom\.json: 'adapter.router_weights' has a value"):
        load_model(tmp_path)


@pytest.mark.parametrize("weights", [[], [0, 3.5], [7.0, 1.0]])
def test_weights_of_routers_that_a_model_has_are_taken(weights: list[float], tmp_path: Path) -> None:
    """Only the hash is wrong here."""
    about = description()
    about["adapter"] |= {"router_hidden": 4, "routers": 2, "router_weights": weights}
    (tmp_path / "fedloom.json").write_text(json.dumps(about))
    with pytest.raises(ModelFolderError, match="was trained on 'tiny' with hash"):
        load_model(tmp_path)


@pytest.mark.parametrize("rank", [5120, 8192])
def test_a_rank_as_wide_as_a_large_backbone_is_one_that_a_model_has(rank: int, tmp_path: Path) -> None:
    """FLoRA and FedEx-LoRA write min(out, in) as the rank; only the hash is wrong here."""
    about = description()
    about["adapter"]["rank"] = rank
    (tmp_path / "fedloom.json").write_text(json.dumps(about))
    with pytest.raises(ModelFolderError, match="was trained on 'tiny' with hash"):
        load_model(tmp_path)
