"""Backbones and devices that are not there, or whose files do not fit each other: words, not tracebacks."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import OPTConfig, OPTForCausalLM

from fedloom.backbones.load import load_backbone, load_tokenizer, source_of
from fedloom.data.tokenize import end_token_id
from fedloom.errors import BackboneError
from small_world import save_backbone


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


def change(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    found = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vocab_size": 300}, r"in 1 weights: 'model.embed_tokens.weight' has shape \(258, 32\).* wants \(300, 32\)"),
        ({"vocab_size": 100}, "Padding_idx must be within num_embeddings"),
        # 2 heads of 4 are left, of 8 values each: o_proj reads 16 of 32.
        (
            {"num_attention_heads": 2},
            r"'model.layers.0.self_attn.o_proj.weight' .* \(32, 32\).* wants \(32, 16\)",
        ),
        ({"hidden_size": 30}, r"config\.json: .*hidden size \(30\) is not a multiple"),
        ({"num_attention_heads": "4"}, r"config\.json: .*'num_attention_heads' expected int, got str"),
        ({"num_hidden_layers": 3}, "lacks 9 weights, first 'model.layers.2.input_layernorm.weight'"),
        ({"hidden_act": "nope"}, "KeyError: 'nope'"),
    ],
)
def test_a_configuration_that_does_not_fit_its_weights_is_refused(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    folder = save_backbone(tmp_path / "model")
    change(folder / "config.json", **fields)
    with pytest.raises(BackboneError, match=rf"'{folder}'.*{says}"):
        load_backbone(str(folder))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("name", ["some-org/kernel", "kernels-community/flash-attn", "nonsense", "paged|eager"])
def test_an_attention_that_a_configuration_would_fetch_is_refused(tmp_path: Path, key: str, name: str) -> None:
    folder = save_backbone(tmp_path / "model")
    change(folder / "config.json", **{key: name})
    with pytest.raises(BackboneError, match=rf"asks for the attention '{re.escape(name)}', .*eager, sdpa"):
        load_backbone(str(folder))


def test_an_attention_that_is_here_is_taken(tmp_path: Path) -> None:
    folder = save_backbone(tmp_path / "model")
    change(folder / "config.json", attn_implementation="eager")
    assert load_backbone(str(folder)).config._attn_implementation == "eager"


def test_a_package_that_transformers_lacks_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*args: Any, **kwargs: Any) -> None:
        raise ImportError("this model needs the package 'spam'")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lacks)
    with pytest.raises(BackboneError, match=r"cannot load the backbone .*needs the package 'spam'"):
        load_backbone(str(save_backbone(tmp_path / "model")))


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    """``transformers`` would add it to the model without a word, under a name of its own."""
    folder = save_backbone(tmp_path / "model")
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}'
    )
    with pytest.raises(BackboneError, match=rf"'{folder}' has an adapter beside .*merge_and_unload"):
        load_backbone(str(folder))


@pytest.mark.parametrize("load", [load_backbone, load_tokenizer])
@pytest.mark.parametrize(("name", "meant"), [("tinny", "tiny"), ("smolm2-135m", "smollm2-135m")])
def test_a_slip_in_a_known_name_is_refused_before_a_hub_is_asked(
    load: Any, name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked in ("AutoConfig", "AutoTokenizer"):
        monkeypatch.setattr(f"transformers.{asked}.from_pretrained", Mock(side_effect=AssertionError("asked a hub")))
    with pytest.raises(BackboneError, match=rf"there is no backbone '{name}'\. Did you mean '{meant}'"):
        load(name)
    monkeypatch.chdir(save_backbone(tmp_path / name).parent)
    assert source_of(name) == name  # unless a folder has that name


def test_a_tokenizer_that_is_not_there_is_refused_with_the_names_that_are() -> None:
    with pytest.raises(BackboneError, match=r"cannot load the tokenizer of 'org/none'.*Give one of tiny, tiny-switch"):
        load_tokenizer("org/none")


@pytest.mark.parametrize("load", [load_backbone, load_tokenizer])
@pytest.mark.parametrize(
    "content", ["{{", '{"a": 1}', '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE"}}', "[]", ""]
)
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, load, content: str) -> None:
    folder = save_backbone(tmp_path / "model")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(BackboneError, match=f"cannot load the tokenizer of '{folder}': ."):
        load(str(folder))


def without_ends(folder: Path, template: str) -> Path:
    """Save a backbone whose tokenizer names no special token; ``</s>`` and ``<pad>`` stay in its vocabulary."""
    save_backbone(folder)
    change(folder / "tokenizer_config.json", eos_token=None, pad_token=None)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_d5_the_token_that_ends_an_answer_pads_where_nothing_else_does(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    tokenizer = load_backbone(str(without_ends(tmp_path / "model", template))).tokenizer
    assert tokenizer.eos_token_id is None
    assert tokenizer.pad_token_id == end_token_id(tokenizer) == 256
    with pytest.raises(BackboneError, match=r"has no pad token, no end-of-sequence token and no chat template"):
        load_backbone(str(without_ends(tmp_path / "other", template.replace("</s>", "."))))


def test_a_last_state_of_another_width_is_refused(tmp_path: Path) -> None:
    """The shape of OPT-350m: blocks are 32 wide, what the head reads 16."""
    config = OPTConfig(
        vocab_size=258, hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, do_layer_norm_before=False, bos_token_id=None, eos_token_id=256, pad_token_id=257,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(save_backbone(tmp_path))
    with pytest.raises(BackboneError, match="is 16 wide and its other layers 32"):
        load_backbone(str(tmp_path))
