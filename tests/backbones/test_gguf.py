"""A GGUF file is read alone: nothing that lies beside it is read, run or kept, and junk is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedloom.backbones.load import load_backbone
from fedloom.errors import BackboneError

gguf = pytest.importorskip("gguf")

HIDDEN, WIDE = 32, 64
WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "ab", "▁a"]


def write_gguf(path: Path) -> None:
    """Write a Llama of one layer with a sentencepiece tokenizer."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(WORDS)
    writer.add_token_scores([float(-i) for i in range(len(WORDS))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (HIDDEN, HIDDEN))
    shapes |= {"ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN), "ffn_down": (HIDDEN, WIDE)}
    tensors = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    tensors |= {"token_embd.weight": (len(WORDS), HIDDEN), "output.weight": (len(WORDS), HIDDEN)}
    for name, shape in tensors.items():
        writer.add_tensor(name, 0.02 * rng.standard_normal(shape, dtype=np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_lies_beside_a_gguf_is_not_read_run_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, ran = tmp_path / "foreign", tmp_path / "ran"
    folder.mkdir()
    write_gguf(folder / "m.gguf")
    beside = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "chat_template": "FOREIGN"}
    (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    (folder / "chat_template.jinja").write_text("FOREIGN")
    (folder / "generation_config.json").write_text('{"max_new_tokens": 7}')
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x"}')
    (folder / "evil.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\nclass Evil(PreTrainedTokenizerFast): pass\n"
    )
    monkeypatch.setattr("builtins.input", lambda *args: "y")  # whoever is asked says yes
    backbone = load_backbone(str(folder / "m.gguf"), cache=tmp_path / "cache")
    assert not ran.exists()
    assert type(backbone.tokenizer).__name__ != "Evil"
    assert backbone.tokenizer.chat_template != "FOREIGN"
    assert backbone.tokenizer.eos_token_id == 2
    assert backbone.model.generation_config.max_new_tokens is None
    (converted,) = (tmp_path / "cache" / "backbones").iterdir()
    assert not any(b"FOREIGN" in path.read_bytes() or b"evil" in path.read_bytes() for path in converted.iterdir())
    write_gguf(tmp_path / "m.gguf")  # the same bytes in a folder of their own
    assert load_backbone(str(tmp_path / "m.gguf"), cache=tmp_path / "other").hash == backbone.hash


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 64, b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_junk_that_is_called_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "junk.gguf").write_bytes(content)
    with pytest.raises(BackboneError, match=r"cannot read the GGUF file .*junk\.gguf: ."):
        load_backbone(str(tmp_path / "junk.gguf"), cache=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "backbones").iterdir())
