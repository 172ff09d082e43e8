"""Read rows: the user's own JSON Lines or CSV files, and datasets from the hub."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.errors import DataError, nearest

JSON_LINES = (".jsonl", ".ndjson", ".json")
ROLES = ("system", "user", "assistant")
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Example:
    """One conversation whose last message is the answer to learn.

    Attributes:
        messages: (role, content) pairs; the last one is the assistant's.
        task: name of the task it belongs to; only for building, auditing and scoring, never for training.
        references: all accepted answers; empty means that the response is the only one.
        source: the file or the hub dataset that it came from.
        split: split of that source.
        row: index of the row in that split, from 0.
    """

    messages: tuple[tuple[str, str], ...]
    task: str = ""
    references: tuple[str, ...] = ()
    source: str = ""
    split: str = ""
    row: int = -1

    @property
    def prompt(self) -> str:
        """Content of the last user message."""
        return next((content for role, content in reversed(self.messages) if role == "user"), "")

    @property
    def response(self) -> str:
        """Content of the last message."""
        return self.messages[-1][1]


def conversation(prompt: str, response: str) -> tuple[tuple[str, str], ...]:
    """Return the messages of a single question and its answer."""
    return (("user", prompt), ("assistant", response))


def field(row: Mapping[str, Any], name: str) -> Any:
    """Return ``row[name]``; a missing or null field is a DataError (which the reader prefixes with file and row)."""
    if name not in row:
        raise DataError(f"field '{name}' is missing.{nearest(name, row)} Add it, or remove the row.")
    if row[name] is None:
        raise DataError(f"field '{name}' is null. Give it a value, or remove the row.")
    return row[name]


def text_field(row: Mapping[str, Any], name: str) -> str:
    """Return a field that must be text, exactly as it stands."""
    return as_text(field(row, name), name)


def as_text(value: Any, name: str) -> str:
    """Return ``value`` if it is a string that UTF-8 can hold."""
    if not isinstance(value, str):
        raise DataError(f"field '{name}' must be text, not {type(value).__name__}. Write it as a string.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"field '{name}' holds half of a surrogate pair at character {error.start}, which is no valid text. "
            "Write the whole character (an emoji, usually) or remove it."
        ) from error
    return value


def read_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ``(line number from 1, row)`` of a JSON Lines or CSV file (told apart by the extension), in UTF-8.

    A byte-order mark, CRLF line ends and raw control characters inside strings (NUL too) are read as they are meant;
    blank lines are passed over.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file. Check the path.")
    extension = path.suffix.lower()
    if extension == ".csv":
        return _read_csv(path)
    if extension in JSON_LINES:
        return _read_json_lines(path)
    raise DataError(f"{path}: unknown extension '{extension}'. fedloom reads {', '.join(JSON_LINES)} and .csv.")


def _decode(line: bytes, path: Path, number: int) -> str:
    if number == 1:
        if line.startswith(_UTF16_BOMS):
            raise DataError(f"{path}, row 1: the file is UTF-16. Save it as UTF-8.")
        line = line.removeprefix(_UTF8_BOM)
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, row {number}: byte {error.start + 1} of the line is not UTF-8. Save the file as UTF-8."
        ) from error


def _lines(path: Path) -> Iterator[str]:
    # Bytes are split at \n only: str.splitlines would also break at U+2028 and other characters inside a text.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield _decode(line, path, number)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # JSON readers keep the last, which may be the wrong one to train on
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise DataError(f"key '{repeated}' stands twice in one object. Keep one.")
    return found


def _read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            # not strict: raw control characters inside strings are text
            row = json.loads(line, strict=False, object_pairs_hook=_each_key_once)
        except DataError as error:
            raise DataError(f"{path}, row {number}: {error}") from error
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(
                f"{path}, row {number}: not valid JSON ({reason}). Write one JSON object on each line."
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, row {number}: a JSON {type(row).__name__}, not an object. "
                'Write one object on each line, like {"prompt": "…", "response": "…"}.'
            )
        yield number, row


def _read_csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(_lines(path), strict=True)
    header: list[str] | None = None
    start = 1  # a quoted cell may span lines: a row is named by its first line
    try:
        for cells in reader:
            if not any(cells):
                pass
            elif header is None:
                header = cells
                repeated = [name for name, count in Counter(header).items() if count > 1]
                if repeated:
                    raise DataError(f"{path}, row {start}: column '{repeated[0]}' stands twice. Rename one.")
            elif len(cells) > len(header):
                raise DataError(
                    f"{path}, row {start}: {len(cells)} cells for {len(header)} columns. "
                    "Put quotes around a text that holds a comma."
                )
            else:
                yield start, {name: cells[i] if i < len(cells) else None for i, name in enumerate(header)}
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, row {start}: not valid CSV ({error}). Mend it, or use JSON Lines.") from error


def example_from_row(row: Mapping[str, Any]) -> Example:
    """Return the example of a user's row: ``messages``, or ``prompt`` and ``response``; optional ``references``.

    Where a row has both, ``messages`` is used. Other fields are ignored.
    """
    if "messages" in row:
        messages = _messages(field(row, "messages"))
    else:
        messages = conversation(text_field(row, "prompt"), text_field(row, "response"))
    return Example(messages=messages, references=_references(row.get("references")))


def _messages(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise DataError("field 'messages' must be a list of {role, content} objects with at least one of them.")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise DataError(f"field 'messages[{i}]' must be an object with 'role' and 'content'.")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise DataError(f"field 'messages[{i}].role' is {role!r}. Use {', '.join(ROLES)}.")
        if content is None:
            raise DataError(f"field 'messages[{i}].content' is missing or null. Give it a value, or remove the row.")
        messages.append((role, as_text(content, f"messages[{i}].content")))
    if messages[-1][0] != "assistant":
        raise DataError("field 'messages' must end with an assistant message: it is the answer to learn.")
    if not any(role == "user" for role, _ in messages):
        raise DataError("field 'messages' has no user message. Add the question.")
    return tuple(messages)


def _references(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise DataError("field 'references' must be a text or a list of texts.")
    return tuple(as_text(text, f"references[{i}]") for i, text in enumerate(texts))


def read_examples(path: str | Path, *, task: str = "", strict: bool = False) -> tuple[list[Example], Counter[str]]:
    """Read a user's own file.

    Args:
        path: JSON Lines or CSV.
        task: a name for these rows.
        strict: an unusable row is a DataError instead of being left out and counted.

    Returns:
        The usable examples, and counts ``rows``, ``kept``, ``empty_response``, ``empty_prompt``.
    """
    return examples_of(read_rows(path), Path(path), task=task, strict=strict)


def examples_of(
    rows: Iterable[tuple[int, Mapping[str, Any]]], path: Path, *, task: str = "", strict: bool = False
) -> tuple[list[Example], Counter[str]]:
    """Return what ``read_examples`` does, from the rows that ``read_rows`` gave of ``path``."""
    counts: Counter[str] = Counter(rows=0, kept=0, empty_response=0, empty_prompt=0)
    examples = []
    for number, row in rows:
        with located(path, number):
            example = example_from_row(row)
            empty = next((name for name in ("response", "prompt") if not getattr(example, name).strip()), None)
            if empty and strict:
                raise DataError(f"field '{empty}' is empty. Fill it, or remove the row.")
        index = counts["rows"]
        counts["rows"] += 1
        if empty:
            counts[f"empty_{empty}"] += 1
            continue
        counts["kept"] += 1
        examples.append(
            Example(example.messages, task=task, references=example.references, source=path.name, row=index)
        )
    if not counts["rows"]:
        raise DataError(f"{path}: the file holds no rows. Write one JSON object on each line.")
    return examples, counts


@contextmanager
def located(place: str | Path, row: int) -> Iterator[None]:
    """Prefix a DataError raised inside with the file and the row."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{place}, row {row}: {error}") from error


def load_hub(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
    """Return all rows of one split of a hub dataset, by the ``datasets`` library (from its cache when offline)."""
    import datasets  # imported here: it takes a second, and most commands never need it

    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(
            f"dataset {name}{f' ({config})' if config else ''}, split '{split}', cannot be loaded: {first} "
            "Check the network (or download it once, for its cache), or give a folder with <task>/<split>.jsonl files."
        ) from error
    return [dict(row) for row in loaded]
