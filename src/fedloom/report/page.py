"""The templates of the self-contained HTML pages."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from fedloom.report.wording import FILTERS

ASSETS = Path(__file__).parent.parent / "assets"


def template(name: str) -> Template:
    """Return ``assets/<name>``; it escapes what is put in, and refuses a name that it is not given."""
    pages = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    pages.filters.update(FILTERS)
    return pages.get_template(name)
