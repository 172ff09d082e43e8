"""Write the table of methods into README.md from what the methods say of themselves."""

from __future__ import annotations

from pathlib import Path

from fedloom.methods import METHODS
from fedloom.methods.base import Method

START, END = "<!-- methods: python scripts/methods_table.py -->", "<!-- methods:end -->"
HEAD = ("name", "method", "paper", "what the server averages", "stays with the client", "exact average", "ends with")


def ends_with(kind: type[Method]) -> str:
    """Say what is there after the last round."""
    if kind.pooled:
        return "one model; no federation"
    if not kind.global_model:
        return "a model per client"
    return "one model, and one per client" if kind.personal else "one model"


def row(name: str, kind: type[Method]) -> str:
    """Return a method's line."""
    number = kind.paper.removeprefix("arXiv ")
    paper = f"[{number}](https://arxiv.org/abs/{number})" if number else "–"
    cells = (f"`{name}`", kind.title, paper, kind.aggregated, kind.local_only, kind.exact, ends_with(kind))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def methods_table() -> str:
    """Return the whole table, LoRA methods first, then those for models with experts of their own."""
    ordered = sorted(METHODS.items(), key=lambda item: (item[1].native, item[0]))
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD), *(row(*item) for item in ordered)]
    return "\n".join(lines)


def main() -> None:
    readme = Path(__file__).resolve().parents[1] / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(START)
    text = f"{before}{START}\n{methods_table()}\n{END}{rest.partition(END)[2]}"
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
