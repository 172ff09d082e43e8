"""Every command that the documentation shows exists, with its options; every link to a file leads somewhere."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from fedloom.bench.dry import forecast
from fedloom.bench.suite import load_suite
from fedloom.cli import app
from fedloom.config import parse_config
from fedloom.methods import METHODS
from fedloom.methods.base import Method

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"),
                *(ROOT / "experiments").rglob("README.md"), *(ROOT / "benchmarks").glob("*.md")])  # fmt: skip


def shown_commands(page: Path) -> list[list[str]]:
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_links_lead_somewhere(page: Path) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for words in shown_commands(page):
        if not words:
            continue
        if words[0] == "make":
            assert words[1] in targets, words
        if words[0] == "fedloom" and not words[1].startswith("-"):
            assert words[1] in commands, words
            command = commands[words[1]]
            if hasattr(command, "commands"):
                command = command.commands[words[2]]
            known = {option for p in command.params for option in [*p.opts, *p.secondary_opts]}
            assert {w.partition("=")[0] for w in words if w.startswith("--")} <= known | {"--help"}, words
        if words[0] in ("python", "python3") and not words[1].startswith("-"):
            assert (ROOT / words[1]).is_file(), words
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_readmes_configuration_is_valid_and_its_method_table_complete() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert parse_config(yaml.safe_load(block)).federation.rounds == 20
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for name, kind in METHODS.items():
        (row,) = [line for line in rows if line.startswith(f"| `{name}` |")]
        for fact in (kind.title, kind.paper.removeprefix("arXiv "), kind.aggregated, kind.local_only, kind.exact):
            assert fact in row, f"README's row of {name} is old: python scripts/methods_table.py"


def test_the_page_on_adding_a_method_names_every_function_of_one() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)[`(]", page))
    functions = {name for name, found in vars(Method).items() if inspect.isfunction(found) and name[0] != "_"}
    assert functions <= named, functions - named
    attributes = set(re.findall(r"`(\w+) = ", page)) | set(re.findall(r"^ {7}(\w+) = ", page, flags=re.MULTILINE))
    assert attributes <= Method.__annotations__.keys()


CONFIGURATIONS = sorted([*(ROOT / "experiments").rglob("*.yaml"), *(ROOT / "configs").glob("*.yaml")])


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda p: str(p.relative_to(ROOT)))
def test_experiment_configurations_are_valid(path: Path) -> None:
    if path.name == "suite.yaml":
        assert load_suite(path)[1]
    else:
        parse_config(yaml.safe_load(path.read_text()), where=path.name)


def test_the_papers_suite_is_complete_and_fits_what_the_paper_says() -> None:
    """Every model is built on the meta device; the counts are the paper's (Table 5), and nothing is downloaded."""
    _, cells = load_suite(ROOT / "experiments" / "paper" / "suite.yaml")
    assert len(cells) == 5 * 3 * 2 + 2 * 3 * 2 + 5 * 3
    sizes = {(c.label, c.config.backbone.name): forecast(c).trainable for c in cells if c.config.seed == 42}
    llama, gemma = "meta-llama/Llama-3.2-3B", "google/gemma-2-2b"
    assert sizes["fedweave", llama] == 10_750_468
    assert sizes["fedweave", gemma] == 7_571_972
    # A FedLEASE client trains one of the four experts and one router; Table 5 counts all four of both.
    assert sizes["fedlease", llama] == 9_175_040 // 4 + (15_476_752 - 9_175_040) // 4
    assert sizes["fedlease", gemma] == 6_389_760 // 4 + (11_118_608 - 6_389_760) // 4
    assert sizes["fedit", llama] == 9_175_040
