"""The page's replay in a JavaScript engine without a browser: rounds and seconds are Python's."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import selfspec
from selfspec import pages
from selfspec.config import SpeculationOptions
from selfspec.eval import replay
from selfspec.eval.record import Record
from selfspec.options import Exit, Ngram
from selfspec.visualise.gain import gain
from selfspec.visualise.inspect import branches, inspect
from selfspec.visualise.page import most_rows, page_data
from selfspec.visualise.start import Start, start
from tests.api.test_default_model import pytestmark as default_model
from tests.pages import (
    COSTS,
    PROMPT,
    USED,
    as_choice,
    check_replayed,
    learning_settings,
    many_settings,
    plain,
    tiled,
    without_heads,
)
from tests.records import KINDS, recorded
from tests.traces import alone, make_trace, some_costs

QUESTION = "Write a line of thanks to Ann Miller of Miller & Son, then write the same line again."

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


def check(
    record: Record,
    options: Sequence[SpeculationOptions],
    node: str,
    folder: Path,
    used: SpeculationOptions = USED,
) -> Any:
    """What the scripts make of a record, which is what Python makes of it; a list per setting."""
    page = page_data(make_trace(record, used), record, COSTS, None)
    found = replayed(node, folder, page, [as_choice(record, setting) for setting in options])
    for setting, made in zip(options, found, strict=True):
        check_replayed(record, setting, made["rounds"], made["summary"])
    return [made["rounds"][1:] for made in found]


@pytest.mark.parametrize("kind", KINDS)
def test_the_script_replays_what_python_replays(kind: str, node: str, tmp_path: Path) -> None:
    record = alone(recorded(kind).record, PROMPT)
    options = learning_settings(record)
    check(record, [*many_settings(record), *options], node, tmp_path)
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


def test_a_record_without_heads_is_replayed_too(node: str, tmp_path: Path) -> None:
    record = without_heads(tiled(alone(recorded("translator").record, PROMPT), 60))
    plainly = SpeculationOptions(drafter="none", exit=Exit(anneal_strength=0.5))
    widths = [replace(plainly, drafter="ngram", ngram=Ngram(max_tokens=n)) for n in (2, 9)]
    assert all(start(make_trace(record, options), record).notes == () for options in widths)
    one, other, none = check(record, [*widths, plainly], node, tmp_path, used=widths[0])
    assert len(other) < len(one) < len(none)


@pytest.mark.parametrize("heads", [pytest.param("smollm2-135m-instruct", marks=default_model)])
def test_the_sliders_of_the_default_model_begin_at_the_decode(
    heads: str, node: str, tmp_path: Path
) -> None:
    """Trees around text already seen, under the never-slower rule: what the default drafts by."""
    speculator, tokens = selfspec.load(heads=heads), 40
    trace = inspect(speculator, QUESTION, all_layers=False, max_new_tokens=tokens)
    record = branches(speculator, QUESTION, tokens, trace.info.settings)
    begin = start(trace, record)
    assert begin.notes == ()
    costs = some_costs(30, most_rows(trace, record))
    page = page_data(trace, record, costs, begin)
    choices = default_choices(begin)
    (made, *others) = replayed(node, tmp_path, page, [asdict(choice) for choice in choices])
    assert made["rounds"] == [plain(entry) for entry in trace.rounds]
    assert {source for entry in made["rounds"] for source in entry["sources"]} == {"exit", "ngram"}
    assert made["summary"]["speed_up"] == pytest.approx(gain(trace, costs).speed_up, rel=1e-12)
    pauses = 0
    for choice, other in zip(choices[1:], others, strict=True):
        options = choice.options(record.info)
        expected = [plain(entry) for entry in replay.rounds(record, 0, options)]
        assert other["rounds"] == expected, choice
        if choice.drafter == "exit":  # whose last round has no room for drafts, paused or not
            pauses += sum(entry["ended"] == "off" for entry in expected[1:-1])
    assert pauses > 20


def default_choices(begin: Start) -> list[Start]:
    """The decode's setting, then others around it: trees and chains, with pauses and without."""
    dice = random.Random(0)
    found = [
        replace(
            begin,
            drafter=drafter,
            thresholds=(dice.choice([0.01, 0.05, dice.uniform(0.02, 0.6)]),),
            alpha=dice.randrange(4),
            width=dice.randint(1, 7),
            guesses=dice.choice([1, 2, 8]),
            max_rows=dice.randint(2, 16),
            ngram_width=dice.randint(1, 15),
            never_slower=dice.random() < 0.6,
            row_costs=dice.choice([begin.row_costs, (0.3,), (0.05, 0.3), (0.78, 0.08)]),
            head_cost=dice.choice([begin.head_cost, 0.34]),
        )
        for drafter in ("ngram+exit", "exit", "ngram", "none")
        for _ in range(1 if drafter == "none" else 12)
    ]
    return [begin, *found]
