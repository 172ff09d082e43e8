from __future__ import annotations

import json

import pytest

from fedloom.data.sources import Example, load_hub, read_examples, read_rows
from fedloom.errors import DataError

# Curly quotes, emoji with a skin tone, Arabic and Hebrew, a line separator inside a string.
HARD = "“it’s” 👍🏽 مرحبا שלום a\u2028b"


def row(prompt="p", response="r"):
    return {"prompt": prompt, "response": response}


def test_example_prompt_is_the_last_user_message():
    turns = (("system", "s"), ("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2"))
    assert (Example(turns).prompt, Example(turns).response) == ("two", "2")


def test_prompt_and_response_or_messages(write_jsonl):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write_jsonl(
        "a.jsonl",
        {**row(), "references": ["r", "R"], "anything": {"else": 1}},
        {"messages": [*messages, {"role": "assistant", "content": "x"}], "references": "only"},
    )
    examples, counts = read_examples(path, task="mine")
    assert examples == [
        Example((("user", "p"), ("assistant", "r")), "mine", ("r", "R"), "a.jsonl", "", 0),
        Example((("system", "s"), ("user", "u"), ("assistant", "x")), "mine", ("only",), "a.jsonl", "", 1),
    ]
    assert counts == {"rows": 2, "kept": 2, "empty_response": 0, "empty_prompt": 0}


def test_d1_empty_response_is_skipped_with_a_count(write_jsonl):
    path = write_jsonl("a.jsonl", row("x", ""), row(), row("x", " \n"), row("", "y"))
    examples, counts = read_examples(path)
    assert [e.row for e in examples] == [1]
    assert counts == {"rows": 4, "kept": 1, "empty_response": 2, "empty_prompt": 1}


def test_d1_empty_response_is_an_error_when_strict(write_jsonl):
    path = write_jsonl("a.jsonl", row(), row("x", ""))
    with pytest.raises(DataError, match=r"a\.jsonl, row 2: field 'response' is empty"):
        read_examples(path, strict=True)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"prompt": "x", "response": None}, "field 'response' is null"),
        ({"prompt": None, "response": "x"}, "field 'prompt' is null"),
        ({"prompt": "x"}, "field 'response' is missing"),
        ({"prompt": "x", "respons": "y"}, "field 'response' is missing. Did you mean 'respons'"),
        ({"prompt": "x", "response": 5}, "field 'response' must be text, not int"),
        ({"prompt": "x", "response": "\ud83d"}, "field 'response' holds half of a surrogate pair"),
        ({"messages": None}, "field 'messages' is null"),
        ({"messages": []}, "field 'messages' must be a list"),
        ({"messages": [{"role": "user", "content": "x"}]}, "must end with an assistant message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "has no user message"),
        ({"messages": [{"role": "human", "content": "x"}]}, r"field 'messages\[0\].role' is 'human'"),
        ({"messages": [{"role": "user", "content": None}]}, r"field 'messages\[0\].content' is missing or null"),
        ({"prompt": "x", "response": "y", "references": [None]}, r"field 'references\[0\]' must be text"),
    ],
)
def test_d2_null_or_missing_names_file_row_and_field(write_jsonl, bad, says):
    path = write_jsonl("site.jsonl", row(), row(), bad)
    with pytest.raises(DataError, match=rf"site\.jsonl, row 3: .*{says}"):
        read_examples(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[1, 2]", "a JSON list, not an object"),
        ("null", "a JSON NoneType, not an object"),
        ('{"prompt": "x"', "not valid JSON"),
        ("{'prompt': 'x'}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path, line, says):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row()) + "\n" + line + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, row 2: .*{says}"):
        read_examples(path)


def test_blank_lines_are_passed_over_and_keep_line_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + json.dumps(row()) + "\n  \n\n" + json.dumps(row("q")))
    assert [(n, r["prompt"]) for n, r in read_rows(path)] == [(2, "p"), (5, "q")]


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("ascii_only", [True, False], ids=["escaped", "raw"])
def test_d8_bom_crlf_quotes_emoji_rtl_json_lines(tmp_path, bom, end, ascii_only):
    text = "".join(json.dumps(row(HARD, f"{HARD}{i}"), ensure_ascii=ascii_only) + end for i in range(2))
    path = tmp_path / "a.jsonl"
    path.write_bytes(bom + text.encode("utf-8"))
    examples, _ = read_examples(path)
    assert [(e.prompt, e.response) for e in examples] == [(HARD, HARD + "0"), (HARD, HARD + "1")]


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_d8_bom_crlf_quotes_emoji_rtl_csv(tmp_path, bom, end):
    text = end.join(["prompt,response,id", f'"{HARD}, ""so""","two\nlines",1', f"{HARD},x\0y,2", ""])
    path = tmp_path / "a.CSV"
    path.write_bytes(bom + text.encode("utf-8"))
    rows = list(read_rows(path))
    assert [number for number, _ in rows] == [2, 4]
    assert rows[0][1] == {"prompt": f'{HARD}, "so"', "response": "two\nlines", "id": "1"}
    assert rows[1][1] == {"prompt": HARD, "response": "x\0y", "id": "2"}


@pytest.mark.parametrize("written", [b"a\x00b", b"a\\u0000b"], ids=["raw", "escaped"])
def test_d8_nul_byte_inside_a_string(tmp_path, written):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "' + written + b'", "response": "r"}\n')
    assert read_examples(path)[0][0].prompt == "a\0b"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"prompt": "x", "response": "café"}\n'.encode("latin-1"), r"row 1: byte 33 of the line is not UTF-8"),
        ('{"prompt": "x"}\n'.encode("utf-16"), r"row 1: the file is UTF-16"),
    ],
    ids=["latin-1", "utf-16"],
)
def test_d8_other_encodings_are_refused(tmp_path, content, says):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says):
        read_examples(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("prompt,response\na,b\nc\n", r"a\.csv, row 3: field 'response' is null"),
        ("prompt,response\na, b,c\n", r"a\.csv, row 2: 3 cells for 2 columns"),
        ("prompt,prompt\na,b\n", r"a\.csv, row 1: column 'prompt' stands twice"),
        ('prompt,response\n"a,b\n', r"a\.csv, row 2: not valid CSV"),
        ("", "the file holds no rows"),
        ("prompt,response\n", "the file holds no rows"),
    ],
)
def test_bad_csv_is_named(tmp_path, content, says):
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=says):
        read_examples(path)


def test_missing_file_and_unknown_extension(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl: no such file"):
        read_rows(tmp_path / "nowhere.jsonl")
    (tmp_path / "a.parquet").touch()
    with pytest.raises(DataError, match=r"unknown extension '\.parquet'"):
        read_rows(tmp_path / "a.parquet")


def test_hub_failure_names_the_dataset_and_what_to_do(monkeypatch):
    import datasets

    def refuse(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match=r"dataset a/b \(c\), split 'train', cannot be loaded: Couldn't reach the Hub"):
        load_hub("a/b", "c", "train")


def test_a_key_that_stands_twice_is_named_with_its_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "response": "x"}\n{"prompt":"a","response":"RIGHT","response":"WRONG"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, row 2: key 'response' stands twice in one object\. Keep one\."):
        list(read_rows(path))
    path.write_text('{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}')
    with pytest.raises(DataError, match=r"row 1: key 'role' stands twice"):
        list(read_rows(path))
