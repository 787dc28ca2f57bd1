"""`selfspec tune`: the settings that suit this machine, found, kept and used from then on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.cli import common, progress, recording, training
from selfspec.cli.flags import Flag, grouped, merged, option_flags, with_flags
from selfspec.cli.settings import LOADING
from selfspec.eval.options import RecordOptions, TuneOptions

if TYPE_CHECKING:
    from selfspec.api.speculator import Speculator
    from selfspec.eval.record import Record
    from selfspec.eval.tune import Tuned

QUESTIONS = 12
"""Without --limit: two of each task, a few minutes for the default model."""

FLAGS = (
    Flag("record", str, "A record of these heads, from selfspec trace; instead of a suite."),
    *recording.SUITE,
    *LOADING,
    *grouped("Record", option_flags(RecordOptions), ("max_new_tokens",)),
    *grouped("Choice", option_flags(TuneOptions), ("objective",)),
    Flag("dry_run", bool, "Report only."),
    Flag("forget", bool, "Remove what was found for this model on this machine."),
)


@with_flags(*FLAGS)
def tune(
    *, config: common.ConfigFile = None, as_json: common.AsJson = False, flags: dict[str, Any]
) -> None:
    """Find the settings that suit this machine. Commands use them by themselves from then on.

    Without exit heads: how text already seen drafts. Layers and heads are timed, so nothing else
    should run meanwhile. Then a cost model screens thousands of settings on recorded prompts, the
    best are replayed, and what is promised is measured on prompts held out.
    """
    asked = merged(config, flags, FLAGS)
    options = training.options_of(TuneOptions, asked)
    noted = training.options_of(RecordOptions, asked)
    chosen = [] if "record" in asked else recording.questions(asked, QUESTIONS)
    from selfspec.api import tuned
    from selfspec.decoding.measure import measure
    from selfspec.eval import tune as choosing

    if "record" not in asked:
        choosing.require_two(len(chosen))
    speculator = recording.load(asked)

    backbone, heads = speculator.backbone, speculator.heads
    if asked.get("forget", False):
        forget(tuned.path(backbone, heads))
        return
    record = read(asked["record"], speculator) if "record" in asked else None
    record = record or recording.made(speculator, chosen, noted)
    costs = measure(backbone, heads, rows=record.widest, context=record.mean_context)
    with progress.bar("replay", "settings") as show:
        found = choosing.tune(record, costs, options, show)
    file = None
    if not asked.get("dry_run", False):
        known = {**asdict(found), "costs": asdict(costs)}
        file = tuned.write(backbone, heads, found.options, known)
    if as_json:
        values = {**asdict(found), "costs": asdict(costs), "file": file and str(file)}
        common.emit(json.dumps(values) + "\n")
    else:
        common.emit(described(found, file))
    if file is not None:
        own = ["--heads", str(asked["heads"])] if "heads" in asked else []
        training.say_next("generate", asked, "--stats", *own, "Name three rivers.")


def read(folder: str, speculator: Speculator) -> Record:
    """A record of these very heads. Raises InvalidData, HeadsMismatch."""
    from selfspec.eval.record import Record

    record = Record.load(Path(folder))
    record.require_heads(speculator.backbone, speculator.heads)
    return record


def forget(file: Path) -> None:
    """Remove a file of settings, if it is there."""
    if file.is_file():
        file.unlink()
        common.emit(f"removed {file}\n")
    else:
        common.emit("nothing was tuned for this model and its heads on this machine\n")


def described(found: Tuned, file: Path | None) -> str:
    """For people."""
    lines = [f"{found.settings:,} settings tried on {found.prompts} prompts"]
    if found.speculates:
        lines += [
            f"drafter {found.options['drafter']}",
            f"prices {found.options['prices']}",
            f"{found.compression_rate:.2f} tokens per verification, worst prompt "
            f"{found.worst:.2f} x",
        ]
    lines.append(found.sentence())
    if file is not None:
        lines.append(f"kept in {file}; selfspec tune --forget removes it")
    return "\n".join(lines) + "\n"
