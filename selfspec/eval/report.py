"""Measured runs as one page: folders of `bench` come in, Markdown and HTML go out.

The HTML file stands alone: its pictures are inside. Called by `selfspec report`.
"""

from __future__ import annotations

import base64
import html
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from selfspec import files, pages
from selfspec.errors import InvalidData
from selfspec.eval import tables
from selfspec.eval.results import Results
from selfspec.eval.tables import Table

logger = logging.getLogger(__name__)

TITLE = "selfspec: measured"

DEFINITIONS = (
    "CR is tokens committed per verification; the prompt's own pass is not one. SD, the speed-up, "
    "is the ratio of total wall times over the same prompts and the same tokens, prompt pass "
    "included. Its 95 % interval is a paired bootstrap over prompts. Per prompt all methods ran in "
    "random order and wrote the tokens of plain decoding's answer, no more and no fewer; a second "
    "turn's prompt holds plain decoding's first answer for all. Tokens of a round arrive together: "
    "the time per token is an equal share of the round's. An answer loops when more than 30 % of "
    "its 8-grams are repeats; loops flatter every drafter. Peak memory is measured in a run of its "
    "own, on the longest first prompt: what the process's resident size (on CUDA: what is "
    "allocated) grows by. Weights, heads and packed copies are in what all methods share, since "
    "one process holds them for all: what one method alone would need cannot be told from it. "
    "The quality of texts is that of answers written once more, untimed, each up to its own end "
    "token; relative BLEU takes plain decoding's text as the reference. A method that is lossy "
    "says so."
)

_HOME = "selfspec.eval"

MARKDOWN, HTML = "report.md", "report.html"

PICTURES = ("methods", "profile")
"""Names of pictures, behind the number of their run."""


class Picture(NamedTuple):
    """A figure that lies beside the report."""

    title: str
    path: Path


class Section(NamedTuple):
    """One run."""

    title: str
    verdict: str
    paragraphs: Sequence[str]
    tables: Sequence[Table]
    pictures: Sequence[Picture] = ()


def write(runs: Sequence[Results], folder: Path) -> tuple[Path, Path]:
    """Write pictures, `report.md` and `report.html` to `folder`; returns the last two.

    Raises InvalidData for results that lack what a report shows, CannotWrite.
    """
    written = [section(run) for run in runs]  # all is read before anything is written
    sections = []
    for number, (run, words) in enumerate(zip(runs, written, strict=True), start=1):
        with _whole(run):
            sections.append(words._replace(pictures=pictures(run, folder, number)))
    made = folder / MARKDOWN, folder / HTML
    files.write(made[0], as_markdown(sections))
    files.write(made[1], as_html(sections))
    return made


def check_free(folder: str | Path, runs: int, *, overwrite: bool) -> Path:
    """The folder. Raises CannotWrite unless a report of so many runs may be written to `folder`."""
    numbered = (f"{n}-{name}.png" for n in range(1, runs + 1) for name in PICTURES)
    return files.check_folder(
        folder,
        (MARKDOWN, HTML, *numbered),
        lambda folder: files.written_here(folder / HTML) and (folder / HTML).exists(),
        overwrite=overwrite,
    )


def section(run: Results) -> Section:
    """A run's words and tables. Raises InvalidData."""
    with _whole(run):
        return Section(
            run.name, tables.verdict(run.summary), described(run), tables.tables(run.summary)
        )


@contextmanager
def _whole(run: Results) -> Iterator[None]:
    """Raises InvalidData where results lack what is looked for."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InvalidData(
            f"the results {run.name} lack what a report shows: {type(error).__name__} {error}. "
            "Measure again: selfspec bench"
        ) from error


def described(run: Results) -> list[str]:
    """What was measured, where, on what, and what went wrong, in words."""
    asked, model, machine = (run.run[part] for part in ("run", "model", "machine"))
    summary = run.summary
    others = run.run["questions"]["settings_chosen_on"]
    words = [
        f"{model['name']}, {model['dtype']}, on {model['device']}; heads: {model['heads']}. Suite "
        f"{asked['suite']}: {summary['questions']} questions, {summary['answers']} answers, "
        f"{summary['new_tokens']:,} new tokens, at most {asked['max_new_tokens']} each, greedy. "
        f"{asked['repeats']} time(s), seed {asked['seed']}.",
        "Machine: " + ", ".join(f"{name} {value}" for name, value in machine.items()) + ".",
        "Speculation: "
        + ", ".join(f"{name} {value}" for name, value in run.run["speculation"].items())
        + ".",
    ]
    if others:
        words.append(
            f"Settings of methods with a grid were chosen on {len(others)} questions that are not "
            f"among those reported: {', '.join(others)}."
        )
    return words + [f"Failed: {line}" for line in summary["failures"]]


def pictures(run: Results, folder: Path, number: int) -> list[Picture]:
    """Those that the run has figures for; without matplotlib a notice takes their place."""
    try:
        from selfspec.eval import plots
    except ImportError:
        logger.info("no pictures: they need matplotlib (pip install 'selfspec[eval]')")
        return []
    summary, base = run.summary, tables.base_of(run.summary)
    made: list[Picture] = []

    def path(title: str, name: str) -> Path:
        made.append(Picture(title, folder / f"{number}-{name}.png"))
        return made[-1].path

    if base is not None:
        points = plots.methods_data(summary)
        if len(points) > 1:
            plots.save_methods(plots.methods_statistic(points, base), path("Methods", "methods"))
        profile = plots.profile_statistic(plots.profile_data(summary), base, summary["answers"])
        if profile is not None:
            plots.save_profile(profile, path("Where the time goes", "profile"))
    return made


def as_markdown(sections: Sequence[Section]) -> str:
    """Each run begins with its verdict and a chart. Pictures are named, not included."""
    parts = [f"# {TITLE}"]
    for section in sections:
        first, *others = [f"![{each.title}]({each.path.name})" for each in section.pictures] or [""]
        parts += [f"## {section.title}", f"**{section.verdict}**", first, *section.paragraphs]
        parts += [f"#{tables.markdown(table)}".rstrip() for table in section.tables if table.rows]
        for picture, words in zip(section.pictures[1:], others, strict=True):
            parts += [f"### {picture.title}", words]
    return "\n\n".join(filter(None, [*parts, "## How to read this", DEFINITIONS])) + "\n"


def as_html(sections: Sequence[Section]) -> str:
    """One file with everything in it; all words are escaped."""
    style = pages.style_of(_HOME, "report.css")
    head = (
        '<meta charset="utf-8"><meta name="generator" content="selfspec">'
        f'<meta http-equiv="Content-Security-Policy" content="{pages.policy("", style)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{_tag('title', TITLE)}<style>{style}</style>"
    )
    told = "\n".join(map(_html_section, sections))
    end = f"<section>{_tag('h2', 'How to read this')}{_tag('p', DEFINITIONS)}</section>"
    body = f"<header>{_tag('h1', TITLE)}</header>\n<main>\n{told}\n{end}\n</main>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _html_section(section: Section) -> str:
    """The verdict and a chart come first."""
    parts = [_tag("h2", section.title), f'<p class="verdict">{html.escape(section.verdict)}</p>']
    parts += map(_html_picture, section.pictures[:1])
    parts += [_tag("p", words) for words in section.paragraphs]
    for table in section.tables:
        if table.rows:
            parts += [_tag("h3", table.title), _html_table(table)]
    for picture in section.pictures[1:]:
        parts += [_tag("h3", picture.title), _html_picture(picture)]
    return "\n".join(["<section>", *parts, "</section>"])


def _html_picture(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode()
    alt = html.escape(picture.title)
    return f'<p><img alt="{alt}" src="data:image/png;base64,{data}"></p>'


def _html_table(table: Table) -> str:
    lines = ["".join(_tag("th", cell) for cell in table.header)]
    lines += ["".join(_tag("td", cell) for cell in row) for row in table.rows]
    rows = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>\n{rows}\n</table>"


def _tag(name: str, words: Any) -> str:
    return f"<{name}>{html.escape(str(words))}</{name}>"
