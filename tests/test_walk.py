"""Calls follow the paths described in CONTRIBUTING, and a token's path never goes up a floor."""

from __future__ import annotations

import functools
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import selfspec
from selfspec.api.speculator import Speculator
from selfspec.api.tuned import first_costs
from selfspec.cli.main import main
from tests import house
from tests.api.test_text import byte_level_bpe
from tests.house import PACKAGE
from tests.models import make_model, random_ids
from tests.serve.live import TEXT, running
from tests.talks import make_talks, make_tokenizer

STEP = re.compile(r"^\d+\. `(?P<file>[a-z_/]+\.py)` `(?P<name>[\w.]+)`:", re.MULTILINE)
SECTIONS = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## ")
WAYS = {text.split("\n")[0]: steps for text in SECTIONS if (steps := STEP.findall(text))}

Step = tuple[str, str]


@functools.cache  # runs at every call of any Python function
def file_of_ours(name: str) -> str | None:
    path = Path(name)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


def step_of(code: CodeType) -> Step | None:
    """File and function within selfspec; None for other code."""
    file = file_of_ours(code.co_filename)
    return None if file is None else (file, code.co_name)


def room(step: Step) -> str:
    return step[0].removesuffix(".py").split("/")[0]


@contextmanager
def followed() -> Iterator[list[tuple[Step | None, Step]]]:
    """Record (caller, callee) within selfspec while open, also in threads started then."""
    calls: list[tuple[Step | None, Step]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (step := step_of(frame.f_code)) is None:
            return
        caller = frame.f_back
        while caller is not None and step_of(caller.f_code) is None:
            caller = caller.f_back
        calls.append((None if caller is None else step_of(caller.f_code), step))

    profile = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(profile)
        threading.setprofile(profile)


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    drafter = "exit:layers=2/4,threshold=0.05"
    instance = selfspec.wrap(make_model("llama"), heads="logit-lens", drafter=drafter)
    instance.generate(random_ids(5), max_new_tokens=6)  # runs probes and packs weights
    return instance


def token(speculator: Speculator, _: Path) -> None:
    answer = speculator.generate(random_ids(9), max_new_tokens=12)
    assert answer.stats.drafted > answer.stats.accepted > 0


def request(_: Speculator, __: Path) -> None:
    model, tokenizer = make_model("llama", vocab_size=288), byte_level_bpe()
    with running(selfspec.wrap(model, tokenizer, drafter="ngram")) as server:
        assert server.post({"prompt": "one", "max_tokens": 8}, TEXT).status_code == 200


def cost(speculator: Speculator, _: Path) -> None:
    costs = first_costs(speculator.backbone, speculator.heads)
    other = selfspec.wrap(make_model("llama"), heads="logit-lens", **costs)
    # for any measured costs
    drafts: dict[str, Any] = {"drafter": "ngram+successors", "never_slower": False}
    other.generate(random_ids(9), max_new_tokens=12, **drafts)


def fit(_: Speculator, folder: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    talks = [{"input_ids": list(talk.ids), "answer_start": 5} for talk in make_talks(model)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    flags = "--exit-layers 2 --head-type translator --draft-vocab-size 20 --epochs 1"
    words = f"fit --model {folder}/model --data {folder}/talks.jsonl --output {folder}/heads"
    assert main([*words.split(), *flags.split()]) == 0


@pytest.mark.parametrize(
    ("name", "go"),
    [
        ("A token's way through the code", token),
        ("A request's way through the server", request),
        ("A cost's way", cost),
        ("A fit's way", fit),
    ],
)
def test_the_steps_are_taken_in_this_order(
    name: str, go: Callable[[Speculator, Path], None], speculator: Speculator, tmp_path: Path
) -> None:
    assert 5 <= len(WAYS[name]) <= 15
    with followed() as calls:
        go(speculator, tmp_path)
    steps = iter([step for _, step in calls])
    for file, function in WAYS[name]:
        assert (file, function.split(".")[-1]) in steps, f"{file} {function} does not follow"


def test_no_call_goes_to_a_higher_floor(speculator: Speculator) -> None:
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
