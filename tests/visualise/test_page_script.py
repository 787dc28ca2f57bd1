"""The page's replay in a JavaScript engine without a browser: rounds and seconds are Python's."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from selfspec.eval.record import Record
from selfspec.eval.replay import Setting
from selfspec.visualise.page import page_data
from tests.pages import COSTS, USED, check_replayed, many_settings
from tests.records import KINDS, recorded
from tests.traces import alone, make_trace

PROMPT = 1

DRIVER = """
import { readFileSync } from "node:fs";
const asked = JSON.parse(readFileSync(process.argv[2], "utf-8"));
const record = await unpackRecord(asked.record);
const found = asked.settings.map((setting) => {
  const rounds = replayRounds(record, setting);
  return { rounds, summary: summary(rounds, asked.prices) };
});
process.stdout.write(JSON.stringify(found));
"""


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


def replayed(node: str, folder: Path, record: Record, settings: list[Setting]) -> Any:
    """What replay.js makes of a record and prices as the page has them."""
    script, asked = folder / "replay.mjs", folder / "asked.json"
    source = files("selfspec.visualise") / "assets" / "replay.js"
    script.write_text(source.read_text(encoding="utf-8") + DRIVER, encoding="utf-8")
    page = page_data(make_trace(record, USED), record, COSTS, None)
    known = {"record": page["record"], "prices": page["prices"]}
    asked.write_text(
        json.dumps(known | {"settings": [asdict(setting) for setting in settings]}),
        encoding="utf-8",
    )
    result = subprocess.run([node, script, asked], capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_the_script_replays_what_python_replays(kind: str, node: str, tmp_path: Path) -> None:
    record = alone(recorded(kind).record, PROMPT)
    options = many_settings(record)
    settings = [Setting.of(record, setting) for setting in options]
    for setting, found in zip(options, replayed(node, tmp_path, record, settings), strict=True):
        check_replayed(record, setting, found["rounds"], found["summary"])
