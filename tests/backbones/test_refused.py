"""Backbones and devices that are not there: words, before anything is loaded."""

import pytest

from fedloom.backbones.load import load_backbone, load_tokenizer
from fedloom.errors import BackboneError


@pytest.mark.parametrize("device", ["banana", "meta", "cuda:4096", ""])
def test_a_device_that_cannot_be_used_is_refused(device: str) -> None:
    with pytest.raises(BackboneError, match=rf"the device '{device}' cannot be used: .*Give auto, cpu"):
        load_backbone("tiny", device=device)


@pytest.mark.parametrize("load", [load_backbone, load_tokenizer])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("~nobody-of-that-name/x", "there is no home folder"),
        ("/dev/zero", "there is no model folder"),
        ("./x", "there is no model folder"),
        ("x.gguf", "there is no GGUF file"),
        ("[/x]", "cannot load"),
        ("\udcff", "cannot load"),
        ("a\0b", "cannot load"),
    ],
)
def test_a_backbone_that_is_not_there_is_refused(load, name: str, says: str) -> None:
    with pytest.raises(BackboneError, match=says):
        load(name)
