"""Each row of the list of inputs that broke other programs has a test that bears its number."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LIST = TESTS.parent.parent / "shared" / "specs" / "bad-inputs.md"
#: Exporting to inference servers is not part of this version.
NOT_YET = re.compile("S[0-9]+")


@pytest.mark.skipif(not LIST.is_file(), reason="the list is not beside this checkout")
def test_every_row_has_its_test() -> None:
    rows = re.findall(r"^\| ([A-Z]\d+) \|", LIST.read_text(encoding="utf-8"), re.MULTILINE)
    assert {"A1", "D10", "M9"} <= set(rows)
    sources = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    named = {row.upper() for row in re.findall(r"(?<=_)[A-Za-z]\d+(?=_)", " ".join(re.findall(r"def (\w+)", sources)))}
    assert [row for row in rows if row not in named and not NOT_YET.fullmatch(row)] == []
