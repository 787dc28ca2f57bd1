"""What the site makes of the project when it is built: options, commands, results, the gallery.

Called by mkdocs. In a page `<!-- options: MODULE.CLASS -->` becomes a table, `<!-- settings: OPTION
-->` one of its kinds, `<!-- commands -->` the help of all commands. A file of the project that a
page links to becomes part of the site, with the files that it links to.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import posixpath
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from selfspec.cli.base import docstrings, part_settings
from selfspec.cli.main import app, main
from selfspec.options import PARTS, Part

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "docs" / "gallery"
"""What `python -m eval.pictures gallery` keeps."""

_MARK = re.compile(r"<!-- (options|settings|commands):? ?(\S*) -->")
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside of docs/, and the gallery's traces as pages to explore."""
    waiting = [file for file in files if file.src_uri.endswith(".md")]
    while waiting:
        for uri in _linked(waiting.pop()):
            if files.get_file_from_path(uri) is None and (ROOT / uri).is_file():
                found = File.generated(config, uri, abs_src_path=str(ROOT / uri))
                files.append(found)
                waiting += [found] if uri.endswith(".md") else []
    for kept in sorted(TRACES.glob("*.jsonl.xz")):
        place = f"gallery/{kept.name.removesuffix('.jsonl.xz')}.html"
        files.append(File.generated(config, place, content=_trace_page(kept)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_more: Any) -> str:
    """Fill in what is made, and let links lead to where files are on the site."""
    made = _MARK.sub(lambda mark: MAKERS[mark[1]](mark[2]), markdown)
    made = _LINK.sub(lambda link: _target(page.file, link, files), made)
    return re.sub(r"\[([^\]]*)\]\(\)", r"\1", made)


def _linked(page: File) -> Iterator[str]:
    """Files of the project that a page names, as places on the site."""
    for link in _LINK.finditer(page.content_string):
        yield _place(page, link[1])


def _place(page: File, link: str) -> str:
    """Where a link of a page leads: docs/ is the site's root, the project lies beside it."""
    place = posixpath.normpath(posixpath.join(posixpath.dirname(page.src_uri), link))
    return place.removeprefix("../") if _is_docs(page) else place


def _target(page: File, link: re.Match[str], files: Files) -> str:
    place = _place(page, link[1])
    if files.get_file_from_path(place) is None and not _is_docs(page):
        return ""  # code and folders, which are not on the site: no link is left
    return posixpath.relpath(place, posixpath.dirname(page.src_uri) or ".") + (link[2] or "")


def _is_docs(page: File) -> bool:
    return not page.generated_by


def options(name: str) -> str:
    """A table of a dataclass of options: what it is called as a flag, what is built in."""
    module, _, kind = name.rpartition(".")
    made = getattr(import_module(module), kind)
    texts, built_in = docstrings(made), made()
    rows = [
        (f"--{entry.name.replace('_', '-')}", _shown(value), texts[entry.name])
        for entry in fields(made)
        for value in [getattr(built_in, entry.name)]
        if not isinstance(value, Part) or entry.name in PARTS  # others are settings of these
    ]
    return _table(("flag", "built in", "what"), rows)


def kinds(option: str) -> str:
    """A table for each kind that an option has, with its settings."""
    found = ""
    for kind, made in PARTS[option].items():
        text = " ".join((made.__doc__ or "").split())
        found += f"**`{kind}`** {text}\n\n" if kind else ""
        rows = list(part_settings({kind: made}))[bool(kind) :]
        found += _table(("setting", "what"), rows) + "\n" if rows else ""
    return found


def commands(_name: str) -> str:
    """What each command says of itself."""
    found = ""
    for words, command in _paths(typer.main.get_command(app())):
        full = any(parameter.name == "help_all" for parameter in command.params)
        text = _said([*words, "--help-all" if full else "--help"])
        found += f"## selfspec {' '.join(words)}\n\n```text\n{text}\n```\n\n"
    return found


MAKERS = {"options": options, "settings": kinds, "commands": commands}


def _paths(group: Any) -> Iterator[tuple[list[str], Any]]:
    """All commands with their names, those in a group behind its name."""
    for name, inner in group.commands.items():
        below = _paths(inner) if hasattr(inner, "commands") else [([], inner)]
        yield from (([name, *rest], command) for rest, command in below)


def _trace_page(kept: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        trace, page = Path(folder, "trace.jsonl"), Path(folder, "page.html")
        trace.write_bytes(lzma.decompress(kept.read_bytes()))
        _said(["trace", "--from", str(trace), "--html", str(page)])
        return page.read_text(encoding="utf-8")


def _said(arguments: list[str]) -> str:
    """Standard output of a command. Raises RuntimeError if it fails."""
    shown, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
        code = main(arguments)
    if code:
        raise RuntimeError(f"selfspec {' '.join(arguments)}: {errors.getvalue()}")
    return shown.getvalue().rstrip()


def _shown(value: object) -> str:
    """As a person would say it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Part):
        return value.kind if value.kind not in PARTS else "measured"
    return "none" if value is None else str(value)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *((f"`{row[0]}`", *row[1:]) for row in rows)]
    cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
