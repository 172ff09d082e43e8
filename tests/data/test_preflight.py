from __future__ import annotations

import json

import pytest

from byte_tokenizer import byte_tokenizer
from fedloom.data.preflight import check_file
from fedloom.data.tokenize import encode_prompt
from fedloom.errors import DataError

SECRET = "Zanzibar"


def row(prompt, response):
    return {"prompt": prompt, "response": response}


@pytest.fixture
def path(write_jsonl):
    rows = [row("x" * n, SECRET) for n in (1, 2, 3, 80)]
    return write_jsonl("site.jsonl", *rows, rows[0], rows[0], row("a\0b", "c"), row("x", ""), row(" ", "x"))


def test_counts_without_a_tokenizer(path):
    report = check_file(path)
    assert report.to_plain() == {
        "file": "site.jsonl", "rows": 9, "usable": 7, "empty_response": 1, "empty_prompt": 1, "duplicates": 2,
        "controls": 1, "unit": "characters", "lengths": {"p50": 9, "p90": 88, "p99": 88, "p100": 88},
        "template": None, "max_length": None, "no_label_left": 0, "truncated": 0,
    }  # fmt: skip


def test_d3_counts_against_the_limit(path):
    tokenizer = byte_tokenizer()
    frame = len(encode_prompt([("user", "")], tokenizer))
    report = check_file(path, tokenizer, max_length=frame + 11)  # the name and its end token are 9 ids
    assert (report.usable, report.no_label_left, report.truncated) == (6, 1, 1)
    assert (report.unit, report.template, report.max_length) == ("tokens", "plain", frame + 11)
    assert report.lengths["p100"] == frame + 80 + 9


def test_report_is_json_and_shows_no_text(path):
    report = check_file(path, byte_tokenizer())
    for shown in (json.dumps(report.to_plain()), str(report)):
        assert SECRET not in shown
        assert str(path.parent) not in shown


def test_printed_report(path):
    tokenizer = byte_tokenizer()
    frame = len(encode_prompt([("user", "")], tokenizer))
    assert str(check_file(path, tokenizer, max_length=frame + 11)).splitlines() == [
        "site.jsonl: 6 of 9 rows usable",
        "  1 empty response, left out",
        "  1 empty prompt, left out",
        f"  1 prompt fills {frame + 11} tokens, left out",
        f"  1 response cut at {frame + 11} tokens",
        "  2 equal to an earlier row",
        "  1 with control characters",
        f"  length in tokens: 50 % up to {frame + 10}, 90 % up to {frame + 89}, 99 % up to {frame + 89}, "
        f"100 % up to {frame + 89}",
        "  template: plain",
    ]


def test_d2_and_d8_bad_rows_are_errors(write_jsonl, tmp_path):
    with pytest.raises(DataError, match=r"bad\.jsonl, row 2: field 'response' is null"):
        check_file(write_jsonl("bad.jsonl", row("a", "b"), row("a", None)))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "é", "response": "x"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl, row 1: .*not UTF-8"):
        check_file(latin)


def test_file_with_no_usable_row(write_jsonl):
    report = check_file(write_jsonl("a.jsonl", row("a", "")))
    assert (report.usable, report.lengths) == (0, {})
    assert str(report) == "a.jsonl: 0 of 1 rows usable\n  1 empty response, left out"
