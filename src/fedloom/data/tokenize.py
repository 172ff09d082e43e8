"""From messages to token ids: templates, labels, batches."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jinja2
import torch
from transformers import PreTrainedTokenizerBase

from fedloom.data.sources import Example
from fedloom.errors import BackboneError, DataError

Messages = Sequence[tuple[str, str]]
TemplateKind = Literal["chat", "plain"]

#: What goes before each message where the tokenizer has no chat template. The prompt ends with the assistant's heading.
PLAIN_HEADINGS = {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n"}


#: Goes before a chat template, so that one which writes the date (Llama 3 does) writes the same one every day: prompts,
#: and with them features and buckets, must not change overnight.
FIXED_DATE = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro -%}"


@dataclass(frozen=True)
class Encoded:
    """Token ids of one example.

    Attributes:
        ids: prompt, response and end token, cut at the maximum length.
        prompt_length: the labels are ``ids[prompt_length:]``.
        index: place of the example in the encoded list.
    """

    ids: tuple[int, ...]
    prompt_length: int
    index: int


@dataclass(frozen=True)
class EncodingReport:
    """Counts of one call of ``encode``.

    Attributes:
        template: ``chat`` (the tokenizer's own) or ``plain`` (it has none).
        kept: examples that give labels.
        empty_response: left out, nothing to learn.
        no_label_left: left out, the prompt fills the maximum length.
        truncated: kept, but the end of the response is cut off, so that its end token is no label.
        max_length: the maximum length in tokens.
    """

    template: TemplateKind
    kept: int
    empty_response: int
    no_label_left: int
    truncated: int
    max_length: int

    def summary(self) -> str:
        """Return one line for the log."""
        parts = [f"{self.kept} examples"]
        if self.empty_response:
            parts.append(f"{self.empty_response} left out with an empty response")
        if self.no_label_left:
            parts.append(f"{self.no_label_left} left out because the prompt fills {self.max_length} tokens")
        if self.truncated:
            parts.append(f"{self.truncated} responses cut at {self.max_length} tokens")
        kind = "the tokenizer's chat template" if self.template == "chat" else "plain template (no chat template)"
        return ", ".join(parts) + f"; {kind}"


def template_kind(tokenizer: PreTrainedTokenizerBase) -> TemplateKind:
    """Return whether prompts are written by the tokenizer's chat template or by the plain one."""
    return "chat" if tokenizer.chat_template else "plain"


def _chat(messages: Messages, tokenizer: PreTrainedTokenizerBase, *, prompt: bool) -> str:
    conversation = [{"role": role, "content": content} for role, content in messages]
    try:
        return str(
            tokenizer.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=prompt,
                chat_template=FIXED_DATE + tokenizer.get_chat_template(),
            )
        )
    except Exception as error:  # a template is foreign code: it can divide by zero, or call itself without end
        roles = ", ".join(role for role, _ in messages)
        why = error if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"the tokenizer's chat template refuses messages with the roles {roles}: {why}. "
            "Often it knows no system role: move that text into the first user message."
        ) from error


def prompt_text(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that the model answers to: ``messages`` in the template, ready for the assistant to begin."""
    if template_kind(tokenizer) == "chat":
        return _chat(messages, tokenizer, prompt=True)
    turns = [PLAIN_HEADINGS[role] + content for role, content in messages]
    return "\n\n".join([*turns, PLAIN_HEADINGS["assistant"]])


def _token_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not texts:
        return []
    # Not verbose: it would foretell indexing errors for long texts, before they are cut or refused.
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]


def _with_one_bos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Begin with exactly one BOS, whether the template, the tokenizer, both or neither wrote it."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    start = next((i for i, token in enumerate(ids) if token != bos), len(ids))
    return [bos, *ids[start:]]


@functools.cache
def _one_object(token: int) -> int:
    """Return the one ``int`` kept of a token id: 8 bytes a token in memory instead of 40."""
    return token


def encode_prompt(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids to generate from. ``messages`` hold the conversation up to the last user message."""
    return _with_one_bos(_token_ids([prompt_text(messages, tokenizer)], tokenizer)[0], tokenizer)


def end_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that ends a response: what the chat template writes after one, else the tokenizer's EOS."""
    if template_kind(tokenizer) == "chat":
        answer = "fedloom"
        _, found, tail = _chat([("user", "a"), ("assistant", answer)], tokenizer, prompt=False).rpartition(answer)
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        special.update(tokenizer.all_special_ids)
        ends = [i for i in _token_ids([tail], tokenizer)[0] if i in special] if found else []
        if ends:
            return ends[0]
    if tokenizer.eos_token_id is None:
        raise BackboneError("the tokenizer has no end-of-sequence token. Set tokenizer.eos_token.")
    return int(tokenizer.eos_token_id)


def stop_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an answer: that of training, and the EOS with which an untrained model may end."""
    return sorted({end_token_id(tokenizer), tokenizer.eos_token_id} - {None})


def encode(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, *, max_length: int = 512, strict: bool = False
) -> tuple[list[Encoded], EncodingReport]:
    """Tokenise examples for training.

    The prompt is tokenised by itself, so that training sees the very ids that generation starts from. The end token is
    a label, also where it is the padding token too. What is too long is cut on the right.

    Args:
        examples: conversations that end with the assistant.
        tokenizer: the backbone's.
        max_length: the most ids of one example.
        strict: an example without labels is a DataError instead of being left out and counted.
    """
    prompts = _token_ids([prompt_text(example.messages[:-1], tokenizer) for example in examples], tokenizer)
    responses = _token_ids([example.response for example in examples], tokenizer)
    end = end_token_id(tokenizer)
    counts: Counter[str] = Counter()
    kept = []
    for index, (example, written, response) in enumerate(zip(examples, prompts, responses, strict=True)):
        prompt = _with_one_bos(written, tokenizer)
        problem = None
        if not example.response.strip():
            problem = "empty_response"
        elif len(prompt) >= max_length:
            problem = "no_label_left"
        if problem and strict:
            why = "its response is empty" if problem == "empty_response" else f"its prompt has {len(prompt)} tokens"
            place = f" ({example.source}, row {example.row + 1})" if example.source else ""
            raise DataError(
                f"example {index + 1}{place} has no label: {why}, and the maximum is {max_length}. Mend or remove it."
            )
        if problem:
            counts[problem] += 1
            continue
        ids = tuple(map(_one_object, (*prompt, *response, end)))
        counts["truncated"] += len(ids) > max_length
        kept.append(Encoded(ids[:max_length], len(prompt), index))
    report = EncodingReport(
        template=template_kind(tokenizer),
        kept=len(kept),
        empty_response=counts["empty_response"],
        no_label_left=counts["no_label_left"],
        truncated=counts["truncated"],
        max_length=max_length,
    )
    return kept, report


@dataclass(frozen=True)
class Batch:
    """Examples padded on the right to the longest of them.

    Attributes:
        ids: (b, t) int64.
        lengths: (b,) int64, ids of each example before the padding.
        rows: (n,) int64, and
        columns: (n,) int64: ``hidden[rows, columns]`` (n, d) are the states that predict a label.
        labels: (n,) int64, what they must predict.
        prompts: (b,) int64, ids of each example's prompt: an encoder-decoder model reads those and writes the rest.
        index: (b,) int64, ``Encoded.index`` of each example.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    labels: torch.Tensor
    prompts: torch.Tensor
    index: torch.Tensor

    @property
    def positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, columns) of the states that predict a label."""
        return self.rows, self.columns

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def collate(encoded: Sequence[Encoded], pad_id: int) -> Batch:
    """Pad examples to their own maximum and find their labels. State ``t − 1`` predicts id ``t``."""
    if not encoded:
        raise DataError("a batch needs at least one example.")
    longest = max(len(item.ids) for item in encoded)
    targets = [(b, t) for b, item in enumerate(encoded) for t in range(max(item.prompt_length, 1), len(item.ids))]
    rows, columns = torch.tensor(targets, dtype=torch.int64).reshape(-1, 2).unbind(1)
    ids = torch.tensor([[*item.ids, *[pad_id] * (longest - len(item.ids))] for item in encoded], dtype=torch.int64)
    return Batch(
        ids=ids,
        lengths=torch.tensor([len(item.ids) for item in encoded], dtype=torch.int64),
        rows=rows,
        columns=columns - 1,
        labels=ids[rows, columns],
        prompts=torch.tensor([item.prompt_length for item in encoded], dtype=torch.int64),
        index=torch.tensor([item.index for item in encoded], dtype=torch.int64),
    )


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sha256 over what decides the ids of a conversation: vocabulary, rules, template, special ids.

    Padding and truncation settings are left out: a call may change them, and they change no id here.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {"vocab": tokenizer.get_vocab()}
    for setting in ("padding", "truncation"):
        rules.pop(setting, None)
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    everything = json.dumps([rules, tokenizer.chat_template, special], sort_keys=True)
    return hashlib.sha256(everything.encode()).hexdigest()
