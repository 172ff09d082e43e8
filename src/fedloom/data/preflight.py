"""Counts for ``fedloom check``: what a site may say about its rows without showing one."""

from __future__ import annotations

import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from fedloom.data.sources import Example, read_examples
from fedloom.data.tokenize import encode, template_kind

PERCENTILES = (50, 90, 99, 100)
_NO_LIMIT = 2**31


@dataclass(frozen=True)
class Report:
    """Counts of one file; nothing in it is text of a row.

    Attributes:
        file: the file's name, without its folder.
        rows: rows in the file.
        usable: rows that give something to learn.
        empty_response: rows left out because the response is empty.
        empty_prompt: rows left out because the prompt is empty.
        duplicates: rows equal to an earlier one.
        controls: rows that hold control characters other than tab and line ends (NUL, for one).
        unit: what lengths count, ``tokens`` or (without a tokenizer) ``characters``.
        lengths: percentile → length of prompt and response together; ``p100`` is the longest.
        template: ``chat``, ``plain``, or None without a tokenizer.
        max_length: the limit that the next two refer to; None without a tokenizer.
        no_label_left: rows left out because the prompt alone fills the limit.
        truncated: rows whose response will be cut.
    """

    file: str
    rows: int
    usable: int
    empty_response: int
    empty_prompt: int
    duplicates: int
    controls: int
    unit: str
    lengths: dict[str, int]
    template: str | None = None
    max_length: int | None = None
    no_label_left: int = 0
    truncated: int = 0

    def to_plain(self) -> dict[str, Any]:
        """Return the report as JSON can hold it."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.file}: {self.usable} of {self.rows} rows usable"]
        notes = {
            "empty response, left out": self.empty_response,
            "empty prompt, left out": self.empty_prompt,
            f"prompt fills {self.max_length} tokens, left out": self.no_label_left,
            f"response cut at {self.max_length} tokens": self.truncated,
            "equal to an earlier row": self.duplicates,
            "with control characters": self.controls,
        }
        lines += [f"  {count} {note}" for note, count in notes.items() if count]
        if self.lengths:
            spread = ", ".join(f"{name[1:]} % up to {length}" for name, length in self.lengths.items())
            lines.append(f"  length in {self.unit}: {spread}")
        if self.template:
            lines.append(f"  template: {self.template}")
        return "\n".join(lines)


def check_file(path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None, max_length: int = 512) -> Report:
    """Read a file as training would, and count. A malformed row is a DataError that names it.

    Args:
        path: JSON Lines or CSV.
        tokenizer: the backbone's; without it, lengths are in characters and nothing is said about the limit.
        max_length: the limit in tokens.
    """
    path = Path(path)
    examples, counts = read_examples(path)
    no_label_left = truncated = 0
    if tokenizer is None:
        lengths = [sum(len(content) for _, content in example.messages) for example in examples]
    else:
        encoded, _ = encode(examples, tokenizer, max_length=_NO_LIMIT)
        lengths = [len(item.ids) for item in encoded]
        no_label_left = sum(item.prompt_length >= max_length for item in encoded)
        truncated = sum(item.prompt_length < max_length < len(item.ids) for item in encoded)
    return Report(
        file=path.name,
        rows=counts["rows"],
        usable=counts["kept"] - no_label_left,
        empty_response=counts["empty_response"],
        empty_prompt=counts["empty_prompt"],
        duplicates=len(examples) - len({example.messages for example in examples}),
        controls=sum(_has_controls(example) for example in examples),
        unit="characters" if tokenizer is None else "tokens",
        lengths=_percentiles(lengths),
        template=None if tokenizer is None else template_kind(tokenizer),
        max_length=None if tokenizer is None else max_length,
        no_label_left=no_label_left,
        truncated=truncated,
    )


def _has_controls(example: Example) -> bool:
    return any(
        unicodedata.category(character) == "Cc" and character not in "\t\n\r"
        for _, content in example.messages
        for character in content
    )


def _percentiles(lengths: list[int]) -> dict[str, int]:
    if not lengths:
        return {}
    # "higher" gives a length that occurs: so many per cent of the rows are no longer than it.
    values = np.percentile(lengths, PERCENTILES, method="higher")
    return {f"p{p}": int(value) for p, value in zip(PERCENTILES, values, strict=True)}
