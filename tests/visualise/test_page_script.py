"""The page's replay in a JavaScript engine without a browser: rounds and seconds are Python's."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from selfspec import pages
from selfspec.config import SpeculationOptions
from selfspec.eval.record import Record
from selfspec.visualise.page import page_data
from tests.pages import (
    COSTS,
    USED,
    as_choice,
    check_replayed,
    learning_settings,
    many_settings,
    tiled,
)
from tests.records import KINDS, recorded
from tests.traces import alone, make_trace

PROMPT = 1

DRIVER = """
import { readFileSync } from "node:fs";
const asked = JSON.parse(readFileSync(process.argv[2], "utf-8"));
const record = await unpackRecord(asked.record);
const found = asked.choices.map((choice) => {
  const rounds = replayRounds(record, settingOf(choice));
  return { rounds, summary: summary(rounds, asked.prices) };
});
process.stdout.write(JSON.stringify(found));
"""

SCRIPTS = ("prices.js", "drafts.js", "ngram.js", "paying.js", "tree.js", "replay.js", "settings.js")


@pytest.fixture(scope="module")
def node() -> str:
    """Node.js, new enough to unpack a record."""
    found = shutil.which("node") or shutil.which("nodejs")
    if found is None:
        pytest.skip("needs a JavaScript engine: node or nodejs")
    modern = subprocess.run([found, "-e", "new DecompressionStream('deflate')"], check=False)
    if modern.returncode:
        pytest.skip(f"needs Node.js 18 or newer, {found} is older")
    return found


def replayed(
    node: str,
    folder: Path,
    page: dict[str, Any],
    choices: Sequence[dict[str, Any]],
) -> Any:
    """What the scripts make of a page's data and choices of settings."""
    script, asked = folder / "replay.mjs", folder / "asked.json"
    script.write_text(pages.assets("selfspec.visualise", SCRIPTS) + DRIVER, encoding="utf-8")
    known = {"record": page["record"], "prices": page["prices"], "choices": choices}
    asked.write_text(json.dumps(known), encoding="utf-8")
    result = subprocess.run([node, script, asked], capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def check(record: Record, options: Sequence[SpeculationOptions], node: str, folder: Path) -> Any:
    """What the scripts make of a record, which is what Python makes of it; a list per setting."""
    page = page_data(make_trace(record, USED), record, COSTS, None)
    found = replayed(node, folder, page, [as_choice(record, setting) for setting in options])
    for setting, made in zip(options, found, strict=True):
        check_replayed(record, setting, made["rounds"], made["summary"])
    return [made["rounds"][1:] for made in found]


@pytest.mark.parametrize("kind", KINDS)
def test_the_script_replays_what_python_replays(kind: str, node: str, tmp_path: Path) -> None:
    record = alone(recorded(kind).record, PROMPT)
    check(record, many_settings(record), node, tmp_path)
    options = learning_settings(record)
    found = check(tiled(record, 60), options, node, tmp_path)
    rounds = [entry for made in found for entry in made]
    assert {source for entry in rounds for source in entry["sources"]} == {"exit", "ngram"}
    assert any(entry["parents"] for entry in rounds) == (0 in record.info.exit_layers)
    pauses = [
        [entry["ended"] == "off" for entry in made]
        for setting, made in zip(options, found, strict=True)
        if setting.drafter == "exit"
    ]
    assert any(True in off and False in off[off.index(True) :] for off in pauses)
