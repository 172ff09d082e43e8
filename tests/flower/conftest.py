"""For every test across sites: an app that seems to run, and one backbone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.runtime import flower, flower_site
from small_world import save_backbone


@pytest.fixture(autouse=True, scope="module")
def _inside_a_run() -> Iterator[None]:
    """Flower builds messages only inside a running app."""
    identity = pytest.importorskip("flwr.supercore.task_identity", reason="Flower is an option of its own").TaskIdentity
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_run_id", "_node_id", "_task_id"):
            patch.setattr(identity, name, 1)
        patch.setattr(flower, "POLL_SECONDS", 0.01)
        yield


@pytest.fixture(autouse=True)
def _new_sites() -> None:
    flower_site._site.cache_clear()


@pytest.fixture(scope="module")
def backbone_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_backbone(tmp_path_factory.mktemp("backbone"))
