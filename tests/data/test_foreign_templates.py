"""A chat template comes with a tokenizer, so it is foreign code: what it raises is told in words."""

from __future__ import annotations

import pytest

from byte_tokenizer import byte_tokenizer
from fedloom.data.tokenize import encode_prompt, end_token_id
from fedloom.errors import DataError


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 1/0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages + 1 }}", "TypeError: can only concatenate list"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion depth"),
        ("{{ 'é'.encode('ascii') }}", "UnicodeEncodeError: "),
        ("{{ messages.x.y }}", "no attribute 'x'"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_what_a_template_raises_is_told_in_words(template: str, says: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    for call in (lambda: encode_prompt([("user", "a")], tokenizer), lambda: end_token_id(tokenizer)):
        with pytest.raises(DataError, match=f"chat template refuses messages with the roles user.*: .*{says}"):
            call()
