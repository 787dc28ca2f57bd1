"""The folder of a measured run: what was asked and on which machine, then what was found.

Called by `selfspec bench`; `selfspec report` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from selfspec.errors import InvalidData, InvalidOption
from selfspec.eval.answers import ANSWERS, TUNING, replace
from selfspec.eval.tables import as_csv, markdown, tables

RUN, SUMMARY = "run.yaml", "summary.json"
FILES = (RUN, ANSWERS, TUNING, SUMMARY, "table.md", "table.csv")


class Results(NamedTuple):
    """What a finished folder holds."""

    name: str
    run: dict[str, Any]
    summary: dict[str, Any]


def check_free(folder: Path, *, overwrite: bool, resume: bool) -> None:
    """Raise InvalidOption where there are results already and nobody said what to do with them."""
    if overwrite and resume:
        raise InvalidOption("--overwrite and --resume at once, expected one")
    if not (overwrite or resume) and any((folder / name).exists() for name in FILES):
        raise InvalidOption(f"{folder} holds results. Give --resume, --overwrite or another folder")


def begin(folder: Path, run: Mapping[str, Any], *, resume: bool) -> None:
    """Make the folder and say what will be measured, or check that a run to go on with is the same.

    Without `resume` what an earlier run left is removed. Raises InvalidOption for another run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN
    if resume and path.exists():
        earlier = yaml.safe_load(path.read_text(encoding="utf-8"))
        for part, values in run.items():
            for name, value in values.items():
                if (before := earlier.get(part, {}).get(name)) != value:
                    raise InvalidOption(
                        f"cannot resume {folder}: {part} {name} was {before}, now it is {value}"
                    )
        return
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    replace(path, yaml.safe_dump(dict(run), sort_keys=False, allow_unicode=True))


def write(folder: Path, summary: Mapping[str, Any]) -> str:
    """Write the figures as JSON, Markdown and CSV; returns the Markdown."""
    text = "\n".join(markdown(table) for table in tables(summary))
    replace(folder / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    replace(folder / "table.csv", as_csv(summary))
    replace(folder / "table.md", text)
    return text


def read(folder: Path) -> Results:
    """Raises InvalidData where a finished run is expected and is none."""
    try:
        run = yaml.safe_load((folder / RUN).read_text(encoding="utf-8"))
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InvalidData(
            f"{folder} holds no finished run of selfspec bench: {' '.join(str(error).split())}"
        ) from error
    return Results(folder.resolve().name, run, summary)
