"""`selfspec demo`: both texts, whether they are the same, and what that means for the exit code."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from selfspec.api.speculator import Speculator, wrap
from selfspec.cli import common, demo, panels
from selfspec.cli.main import main
from tests.cli.fakes import FakeAnswer
from tests.models import make_model
from tests.talks import make_tokenizer


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Speculator:
    model = make_model("llama", torch.float64)
    speculator = wrap(model, make_tokenizer(), drafter="ngram")
    monkeypatch.setattr(common, "load", lambda settings: speculator)
    return speculator


def test_the_same_text_is_said_to_be_the_same(
    tiny: Speculator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "a", "--max-new-tokens", "12"]) == 0
    said = capsys.readouterr().out
    theirs, ours, verdict = said.split("\n\n", 2)
    text = theirs.splitlines()[1:-1]
    assert text  # of twelve tokens one has text
    assert ours.splitlines()[1:-1] == text
    assert verdict.startswith("12 tokens, ")
    assert "guess" not in verdict
    assert "\nsame text: yes; " in verdict


def test_no_tokens_are_refused(tiny: Speculator, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--max-new-tokens", "0"]) == 2
    assert "max_new_tokens is 0, expected at least 1" in capsys.readouterr().err


def test_another_text_is_a_failure(
    tiny: Speculator, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = demo.theirs
    monkeypatch.setattr(
        demo, "theirs", lambda *given: [*(found := right(*given))[:3], found[3] + 1, *found[4:]]
    )
    assert main(["demo", "a", "--max-new-tokens", "12"]) == 1
    assert "same text: no, token 4 is another one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("theirs_s", "words"),
    [(3.0, "1.5× faster"), (2.02, "about as fast"), (1.0, "2.0× slower")],
)
def test_the_gain_is_what_was_measured(theirs_s: float, words: str) -> None:
    found = demo.Compared([5, 6], theirs_s, FakeAnswer(), 2.0)  # type: ignore[arg-type]  # a fake
    assert found.verdict().endswith(f"same text: yes; {words}")
    shorter = demo.Compared([5], theirs_s, FakeAnswer(), 2.0)  # type: ignore[arg-type]  # a fake
    assert shorter.differs_at == 2


def test_on_a_terminal_both_stand_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, legacy_windows=False)
    monkeypatch.setattr(panels, "Console", lambda **_: console)
    with panels.panels(("one", "two"), 8) as panel:
        for title in ("one", "two"):
            with panel(title) as show:
                show(f"text of {title}", "model", 0)
    shown = file.getvalue()
    assert any("text of one" in line and "text of two" in line for line in shown.splitlines())
    assert "the model" in shown
