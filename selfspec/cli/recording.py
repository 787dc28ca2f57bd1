"""A record for `selfspec tune`: prompts in, a folder of what exit layers would have drafted out.

Called by `selfspec trace --record` and by `selfspec tune` itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec import files
from selfspec.cli import common, progress, training
from selfspec.cli.flags import Flag
from selfspec.cli.settings import LOADING, Settings
from selfspec.errors import InvalidOption
from selfspec.eval.options import RecordOptions
from selfspec.eval.results import SIX_TASKS, Question, load_suite

if TYPE_CHECKING:
    from selfspec.api.speculator import Speculator
    from selfspec.eval.record import Record

SUITE = (
    Flag("suite", str, f"Prompts: {SIX_TASKS} (the default), spec-bench, or a .jsonl file."),
    Flag("questions", str, "The file of a suite that is not built in."),
    Flag("limit", int, "Questions to take, spread over the suite."),
)


def keep(prompt: str | None, asked: dict[str, Any], *, as_json: bool) -> None:
    """Decode plainly, record what every exit layer would have drafted, write `asked["record"]`."""
    from selfspec.eval import record

    folder = record.check_free(asked["record"], overwrite=asked.get("overwrite", False))
    options = training.options_of(RecordOptions, asked)
    chosen = questions(asked) if prompt is None else [alone(prompt, asked)]
    with files.locked(folder):
        found = made(load(asked), chosen, options)
        found.save(folder, overwrite=asked.get("overwrite", False))
    common.emit(json.dumps(facts(found)) + "\n" if as_json else described(found, folder))


def questions(asked: dict[str, Any], limit: int | None = None) -> list[Question]:
    """The suite that the flags ask for; `limit` where they do not say."""
    file = asked.get("questions")
    return load_suite(
        asked.get("suite", SIX_TASKS),
        None if file is None else Path(file),
        asked.get("limit", limit),
    )


def alone(prompt: str, asked: dict[str, Any]) -> Question:
    """One prompt as a question. Raises InvalidOption if a suite is asked for too."""
    for name in ("suite", "questions", "limit"):
        if name in asked:
            raise InvalidOption(f"a prompt and --{name} at once. Leave one of them out")
    return Question(
        id="prompt", task="prompts", turns=(common.read_prompt(prompt, None, raw=True),)
    )


def load(asked: dict[str, Any]) -> Speculator:
    """The model and heads that the flags ask for."""
    names = {flag.name for flag in LOADING}
    return common.load(Settings(loading={k: v for k, v in asked.items() if k in names}))


def made(speculator: Speculator, chosen: list[Question], options: RecordOptions) -> Record:
    """A record, with a progress bar while it is made."""
    from selfspec.eval.record import record

    with progress.bar("record", "questions") as show:
        return record(speculator, chosen, options, show)


def facts(record: Record) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "prompts": len(record.prompts),
        "tokens": len(record.answers),
        "nodes": len(record.tokens),
        "exit_layers": list(record.info.exit_layers),
        "anneal_strengths": list(record.info.anneal_strengths),
        "min_threshold": record.info.min_threshold,
        "max_draft_tokens": record.info.max_draft_tokens,
    }


def described(record: Record, folder: Path) -> str:
    """For people."""
    info = record.info
    return (
        f"{folder}: {len(record.prompts)} prompts, {len(record.answers):,} tokens, "
        f"{len(record.tokens):,} nodes\n"
        f"exit layers {list(info.exit_layers)}, alpha {list(info.anneal_strengths)}, thresholds "
        f"from {info.min_threshold:g}, up to {info.max_draft_tokens} draft tokens\n"
    )
