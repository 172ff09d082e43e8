"""Features of any layer and pooling, against transformers' hidden states."""

from pathlib import Path

import pytest
import torch

from fedloom.backbones.features import layer_index, prompt_features
from fedloom.errors import ConfigError
from fedloom.types import Layer, Pooling
from small_world import World, examples, rows, small_backbone

PROMPTS = [[3, 4, 5, 6], [7, 8], [9], [10, 11, 12]]


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize(("layer", "index"), [("last", 2), (0, 0), (1, 1), (2, 2), (0.5, 1), (0.66, 1), (1.0, 2)])
def test_features_are_transformers_hidden_states(layer: Layer, index: int, pooling: Pooling) -> None:
    backbone = small_backbone()
    found = prompt_features(backbone, PROMPTS, layer=layer, pooling=pooling)
    with torch.no_grad():
        for feature, prompt in zip(found, PROMPTS, strict=True):
            states = backbone.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[index][0]
            expected = states.mean(dim=0) if pooling == "mean" else states[-1]
            torch.testing.assert_close(feature, expected, atol=1e-6, rtol=1e-5)


def test_the_cache_tells_layers_and_poolings_apart(tmp_path: Path) -> None:
    backbone = small_backbone()
    kinds: list[tuple[Layer, Pooling]] = [("last", "mean"), ("last", "last"), (1, "mean"), (1, "last"), (0, "mean")]
    for _ in range(2):  # written, then read
        for layer, pooling in kinds:
            found = prompt_features(backbone, PROMPTS, layer=layer, pooling=pooling, cache=tmp_path)
            assert torch.equal(found, prompt_features(backbone, PROMPTS, layer=layer, pooling=pooling))
    assert len(list(tmp_path.rglob("*.safetensors"))) == len(kinds)
    prompt_features(backbone, PROMPTS, layer=2, cache=tmp_path)  # another name of the last layer
    assert len(list(tmp_path.rglob("*.safetensors"))) == len(kinds)


def test_rows_keep_features_of_each_kind_and_the_router_reads_the_default(tmp_path: Path) -> None:
    bench, mine = World(tmp_path).bench, rows(examples("sums", 3))
    first = mine.features(bench)
    assert torch.equal(mine.features(bench, layer=1.0), first)
    assert not torch.equal(mine.features(bench, layer=1), first)
    assert mine.features(bench) is first


def test_a_layer_that_is_not_there_is_refused() -> None:
    assert [layer_index(x, 30) for x in ("last", 0, 7, 0.0, 0.66, 1.0)] == [30, 0, 7, 0, 20, 30]
    for wrong in (31, -1, 1.2):
        with pytest.raises(ConfigError, match=r"backbone has 30 layers.*0 to 30"):
            layer_index(wrong, 30)
