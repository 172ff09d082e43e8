"""Features of any layer and pooling, against transformers' hidden states."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedloom.backbones.features import layer_index, prompt_features
from fedloom.backbones.load import Backbone, load_backbone
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


def cached(backbone: Backbone, cache: Path) -> tuple[torch.Tensor, Path]:
    found = prompt_features(backbone, PROMPTS, cache=cache)
    return found, next(cache.rglob("*.safetensors"))


@pytest.mark.parametrize("damage", ["cut", "zeros", "empty", "another key", "another shape", "another type"])
def test_a_damaged_file_of_the_cache_is_computed_again_and_replaced(tmp_path: Path, damage: str) -> None:
    backbone = small_backbone()
    expected, path = cached(backbone, tmp_path)
    whole = path.read_bytes()
    if damage in ("cut", "zeros", "empty"):
        path.write_bytes({"cut": whole[:-5], "zeros": bytes(len(whole)), "empty": b""}[damage])
    elif damage == "another key":
        save_file({"x": expected}, path)
    else:
        save_file({"features": expected[:2] if damage == "another shape" else expected.half()}, path)
    assert torch.equal(prompt_features(backbone, PROMPTS, cache=tmp_path), expected)
    assert path.read_bytes() == whole
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


def test_a_failed_write_to_the_cache_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        prompt_features(small_backbone(), PROMPTS, cache=tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_features_are_synced_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, call=call: (done.append(name), call(*a))[1])
    cached(small_backbone(), tmp_path)
    assert done[:2] == ["fsync", "replace"]


def test_a_backbone_that_was_cast_after_loading_has_features_of_its_own(tmp_path: Path) -> None:
    backbone = small_backbone()
    full, _ = cached(backbone, tmp_path)
    for parameter in backbone.model.parameters():  # as load_model(dtype=…) does, which leaves the hash
        parameter.data = parameter.data.to(torch.bfloat16)
    half = prompt_features(backbone, PROMPTS, cache=tmp_path)
    assert torch.equal(half, prompt_features(backbone, PROMPTS))
    assert not torch.equal(half, full)


def test_an_encoder_decoder_has_no_hidden_states_of_a_prompt_for_a_router() -> None:
    with pytest.raises(ConfigError, match="'tiny-switch' is an encoder-decoder"):
        prompt_features(load_backbone("tiny-switch"), PROMPTS)
