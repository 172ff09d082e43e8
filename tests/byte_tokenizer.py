"""A tokenizer small enough to count ids by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>")

#: ChatML, as SmolLM2 and Qwen write it.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(
    template: str | None = None, *, special: Sequence[str] = SPECIAL, adds_bos: bool = False, **names: Any
) -> PreTrainedTokenizerFast:
    """One id per UTF-8 byte, so that ids can be counted by hand; special tokens come after the 256 bytes.

    Args:
        template: of chats.
        special: the special tokens, in order.
        adds_bos: put ``<s>`` before each text.
        names: which of them are what: ``bos_token`` and so on; None for none.
    """
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    names = {"eos_token": "</s>", "pad_token": "<pad>", **names}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{k: v for k, v in names.items() if v})
    tokenizer.chat_template = template
    return tokenizer
