"""Generates parts of the site from the project: options, commands, linked files, the gallery.

Called by mkdocs. In pages `<!-- options: MODULE.CLASS -->` becomes a table, `<!-- settings: OPTION
-->` the tables of its kinds, `<!-- commands -->` the help of all commands. A project file that a
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

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from selfspec.cli.base import docstrings, part_settings
from selfspec.cli.main import app, main
from selfspec.options import PARTS, Part

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "docs" / "gallery"
"""Traces that `python -m eval.pictures gallery` writes."""

_MARK = re.compile(r"<!-- (options|settings|commands):? ?(\S*) -->")
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add linked files outside of docs/, and a page for each of the gallery's traces."""
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
    """Replace the marks by generated text, and the targets of links by places on the site."""
    made = _MARK.sub(lambda mark: MAKERS[mark[1]](mark[2]), markdown)
    made = _LINK.sub(lambda link: _target(page.file, link, files), made)
    return re.sub(r"\[([^\]]*)\]\(\)", r"\1", made)


def _linked(page: File) -> Iterator[str]:
    """Yield the targets of a page's links, as places on the site."""
    for link in _LINK.finditer(page.content_string):
        yield _place(page, link[1])


def _place(page: File, link: str) -> str:
    """The target of a page's link; docs/ is the site's root, and so is the project's root."""
    place = posixpath.normpath(posixpath.join(posixpath.dirname(page.src_uri), link))
    return place.removeprefix("../") if _is_docs(page) else place


def _target(page: File, link: re.Match[str], files: Files) -> str:
    place = _place(page, link[1])
    if files.get_file_from_path(place) is None and not _is_docs(page):
        return ""  # code and folders are not on the site: the link becomes plain text
    return posixpath.relpath(place, posixpath.dirname(page.src_uri) or ".") + (link[2] or "")


def _is_docs(page: File) -> bool:
    return not page.generated_by


def options(name: str) -> str:
    """A table of a dataclass of options: flags, built-in defaults and descriptions."""
    module, _, kind = name.rpartition(".")
    made = getattr(import_module(module), kind)
    texts, built_in = docstrings(made), made()
    rows = [
        (f"--{entry.name.replace('_', '-')}", _shown(value), texts[entry.name])
        for entry in fields(made)
        for value in [getattr(built_in, entry.name)]
        if not isinstance(value, Part) or entry.name in PARTS  # other parts are settings of these
    ]
    return _table(("flag", "default", "description"), rows)


def kinds(option: str) -> str:
    """A table for each kind that an option has, with its settings."""
    found = ""
    for kind, made in PARTS[option].items():
        text = " ".join((made.__doc__ or "").split())
        found += f"**`{kind}`** {text}\n\n" if kind else ""
        rows = list(part_settings({kind: made}))[bool(kind) :]
        found += _table(("setting", "description"), rows) + "\n" if rows else ""
    return found


def commands(_name: str) -> str:
    """The help of each command."""
    found = ""
    for words, command in _paths(app()):
        full = any(parameter.name == "help_all" for parameter in command.params)
        text = _said([*words, "--help-all" if full else "--help"])
        found += f"## selfspec {' '.join(words)}\n\n```text\n{text}\n```\n\n"
    return found


MAKERS = {"options": options, "settings": kinds, "commands": commands}


def _paths(group: Any) -> Iterator[tuple[list[str], Any]]:
    """Yield all commands with their words; a group's name comes before its commands."""
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
    """A value in words for readers."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Part):
        return value.kind if value.kind not in PARTS else "measured"
    return "none" if value is None else str(value)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *((f"`{row[0]}`", *row[1:]) for row in rows)]
    cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
