"""A method is one file, one line of the registry and one configuration."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import fedloom.methods
from fedloom.config import load_config
from fedloom.methods import METHODS
from fedloom.methods.base import Method

ROOT = Path(__file__).parents[2]
FOLDER = Path(fedloom.methods.__file__).parent


def code_lines(source: str) -> int:
    """Count lines that are neither blank nor of a docstring."""
    told: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            told |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(bool(line.strip()) and number not in told for number, line in enumerate(source.splitlines(), 1))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_is_one_short_file_one_line_and_one_configuration(name: str) -> None:
    kind = METHODS[name]
    assert Path(inspect.getfile(kind)) == FOLDER / f"{name}.py"
    source = (FOLDER / f"{name}.py").read_text()
    assert code_lines(source) <= 120
    assert len(re.findall(r"^class \w+(?<!Options)\(\w*\):", source, flags=re.M)) == 1
    registry = (FOLDER / "__init__.py").read_text()
    assert registry.count(f'"{name}": {kind.__name__},') == 1
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    assert config.method.name == name
    assert bool(config.method.model_extra) == bool(kind.Options.model_fields)  # options are there to be seen
    assert config.data.benchmark is not None


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_says_what_it_is(name: str) -> None:
    kind = METHODS[name]
    assert issubclass(kind, Method)
    assert kind.__doc__ or inspect.getmodule(kind).__doc__
    for text in ("title", "aggregated", "local_only", "exact"):
        assert getattr(kind, text), text
    assert kind.global_model or kind.personal
    assert kind.submodels == (kind.held is not Method.held)  # or its budget would be a whole model's
    assert kind.own_heads == (kind.head_rows is not Method.head_rows)


def test_the_registry_is_in_alphabetical_order_and_no_configuration_is_left_over() -> None:
    assert list(METHODS) == sorted(METHODS)
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == METHODS.keys()
