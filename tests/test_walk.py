"""A token's way through the code is the one that CONTRIBUTING tells, and it never goes back up."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from selfspec.api.speculator import Speculator, wrap
from tests import house
from tests.house import PACKAGE
from tests.models import make_model, random_ids

STEP = re.compile(r"^\d+\. `(?P<file>[a-z_/]+\.py)` `(?P<name>[\w.]+)`:", re.MULTILINE)
STEPS = STEP.findall((PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8"))

Step = tuple[str, str]


def step_of(code: CodeType) -> Step | None:
    """File and function of ours; None for others' code."""
    path = Path(code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return None
    return path.relative_to(PACKAGE).as_posix(), code.co_name


def room(step: Step) -> str:
    return step[0].removesuffix(".py").split("/")[0]


@contextmanager
def followed() -> Iterator[list[tuple[Step | None, Step]]]:
    """Every call of a function of ours while open, with who called it: the last of ours before."""
    calls: list[tuple[Step | None, Step]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (step := step_of(frame.f_code)) is None:
            return
        above = frame.f_back
        while above is not None and step_of(above.f_code) is None:
            above = above.f_back
        calls.append((None if above is None else step_of(above.f_code), step))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    drafter = "exit:layers=2/4,threshold=0.05"
    made = wrap(make_model("llama"), heads="logit-lens", drafter=drafter)
    made.generate(random_ids(5), max_new_tokens=6)  # probes and packs
    return made


def test_the_steps_are_taken_in_this_order(speculator: Speculator) -> None:
    assert 10 <= len(STEPS) <= 15
    with followed() as calls:
        answer = speculator.generate(random_ids(9), max_new_tokens=12)
    assert answer.stats.drafted > answer.stats.accepted > 0
    taken = iter([step for _, step in calls])
    for file, name in STEPS:
        assert (file, name.split(".")[-1]) in taken, f"{file} {name} does not follow"


def test_no_call_goes_to_a_room_above(speculator: Speculator) -> None:
    floors = house.floors(house.room_arrows())
    with followed() as calls:
        session = speculator.session()
        for count in (9, 14):
            session.generate(random_ids(count), max_new_tokens=12, drafter="ngram+exit")
        speculator.generate(random_ids(9), max_new_tokens=8, do_sample=True, seed=1)
    assert len(calls) > 1000
    upward = {
        (caller, step)
        for caller, step in calls
        if caller is not None and floors[room(step)] > floors[room(caller)]
    }
    assert not upward
