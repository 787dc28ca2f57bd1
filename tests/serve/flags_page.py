"""The flags of a server as docs/serving.md lists them. Run: python -m tests.serve.flags_page."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from selfspec.cli.help import docstrings
from selfspec.serve.options import ServeOptions

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"

_PLACE = re.compile(r"(<!-- flags: .*? -->\n).*?(<!-- end -->\n)", re.DOTALL)


def table() -> str:
    """A row per option: flag, what is built in, what it does."""
    texts, built_in = docstrings(ServeOptions), ServeOptions()
    rows = [
        f"| `--{entry.name.replace('_', '-')}` | {shown(getattr(built_in, entry.name))} "
        f"| {texts[entry.name]} |\n"
        for entry in fields(ServeOptions)
    ]
    return "| flag | built in | what |\n|---|---|---|\n" + "".join(rows)


def shown(value: object) -> str:
    """As a person would say it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def with_flags(page: str) -> str:
    """The page with the table of today."""
    return _PLACE.sub(lambda found: found[1] + table() + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(with_flags(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
