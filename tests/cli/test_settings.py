"""Flags and the YAML file: what they set, and which of them wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from selfspec.cli.base import SHARED, merged
from selfspec.cli.main import main
from selfspec.config import SpeculationOptions
from selfspec.options import Costs, Easd, Exit, GammaTune
from tests.cli.fakes import FakeSpeculator

Capture = pytest.CaptureFixture[str]

Written = Callable[[str], Path]


@pytest.fixture
def config(tmp_path: Path) -> Written:
    """Writes a YAML file."""

    def write(text: str) -> Path:
        file = tmp_path / "run.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_flags_have_no_defaults_of_their_own_and_reach_who_takes_them(
    speculator: FakeSpeculator,
) -> None:
    assert main(["generate", "hi"]) == 0
    assert (speculator.loaded, speculator.given) == ({}, {"raw": False})
    speculator.answers = [["one"]]
    arguments = ["--model", "m", "--dtype", "float32", "--no-speculate", "--pinned"]
    arguments += ["--drafter", "exit:layers=4/8", "--costs", "row=0.1", "--pinned-rows", "4"]
    arguments += ["--max-new-tokens", "9", "--stop", "a", "--stop-strings", "b", "--top-k", "5"]
    assert main(["generate", *arguments, "hi"]) == 0
    generation = {"max_new_tokens": 9, "stop_strings": ["a", "b"], "top_k": 5}
    assert speculator.given == generation | {"raw": False}
    assert speculator.loaded == generation | {
        "model": "m",
        "dtype": "float32",
        "speculate": False,
        "drafter": "exit:layers=4/8",
        "costs": "row=0.1",
        "pinned": True,
        "pinned_rows": 4,
    }


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        ("# nothing\n", {}, {}),
        (
            "drafter: exit:threshold=0.5\npinned-rows: 4\npinned: true\nmodel: m\n",
            {"pinned_rows": 6, "pinned": False},
            {"drafter": "exit:threshold=0.5", "pinned_rows": 6, "pinned": False, "model": "m"},
        ),
        ("stop_strings: a,b\n", {}, {"stop_strings": ["a,b"]}),
        ("temperature: 5e-1\n", {}, {"temperature": 0.5}),
    ],
)
def test_a_flag_wins_over_yaml(
    text: str, given: dict[str, object], expected: dict[str, object], config: Written
) -> None:
    assert merged(config(text), given, SHARED) == expected


def test_of_an_option_with_settings_each_is_taken_from_the_flag_or_else_the_file(
    config: Written,
) -> None:
    file = config(
        "drafter: {exit: {layers: [4, 8], threshold: 5e-1, max-tokens: 3}}\n"
        "controller: gammatune:rate=0.5\nacceptance: cm-asd\ncosts: row=0.1,head=0.2\n"
    )
    given = {
        "drafter": "ngram+exit:max_tokens=2",
        "controller": "gammatune:step=1",
        "acceptance": "easd:tokens=3",
        "costs": "row=0.3",
    }
    options = SpeculationOptions().updated(merged(file, given, SHARED))
    assert options.drafter == "ngram+exit"
    assert options.exit == Exit(layers=(4, 8), threshold=0.5, max_tokens=2)
    assert options.controller == GammaTune(rate=0.5, step=1.0)
    assert options.acceptance == Easd(tokens=3)
    assert options.costs == Costs(row=0.3, head=0.2)
    alone = merged(config("drafter: {exit: {layers: 4}}"), {}, SHARED)
    assert SpeculationOptions().updated(alone).exit == Exit(layers=(4,))


def test_the_environment_stands_for_flags_between_these_and_a_file(
    speculator: FakeSpeculator, config: Written, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    file = config("max_new_tokens: 7\nseed: 1\ntop_k: 2\n")
    for name, value in (
        ("CONFIG", str(file)),
        ("SEED", "2"),
        ("TOP_K", "3"),
        ("SPECULATE", "false"),
        ("STOP_STRINGS", "a"),
    ):
        monkeypatch.setenv(f"SELFSPEC_{name}", value)
    assert main(["generate", "--top-k", "4", "hi"]) == 0
    generation = {"max_new_tokens": 7, "seed": 2, "top_k": 4, "stop_strings": ["a"]}
    assert speculator.given == generation | {"raw": False}
    assert speculator.loaded == generation | {"speculate": False, "config": str(file)}
    monkeypatch.setenv("SELFSPEC_SEED", "x")
    assert main(["generate", "hi"]) == 2
    assert "(of SELFSPEC_SEED in the environment)" in capsys.readouterr().err


def test_the_default_file_stands_below_all_others(
    speculator: FakeSpeculator,
    config: Written,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    file = tmp_path / "home" / "selfspec" / "config.yaml"
    file.parent.mkdir(parents=True)
    # of these, epochs is a key of other commands
    file.write_text("seed: 1\ntop_k: 2\nmin_p: 0.5\nepochs: 1\ndrafter: ngram:size=2\n")
    given = config("top_k: 3\nmin_p: 0.25\ndrafter: ngram:max_tokens=4\n")
    assert main(["generate", "--config", str(given), "--min-p", "0.1", "hi"]) == 0
    assert speculator.given == {"seed": 1, "top_k": 3, "min_p": 0.1, "raw": False}
    assert speculator.loaded is not None
    assert speculator.loaded["drafter"] == {"ngram": {"size": "2", "max_tokens": "4"}}
    # what a mode has no use for is left out there, not refused
    file.write_text("model: m\ntemperature: 0.5\n")
    assert main(["trace", "--from", "nowhere"]) == 2
    refused = capsys.readouterr().err
    assert "means nothing" not in refused
    assert main(["env"]) == 0
    assert f"{file}\n" in capsys.readouterr().out
    file.write_text("seeed: 1\n")
    assert main(["generate", "hi"]) == 2
    assert f"unknown key in {file}: 'seeed'. Did you mean seed?" in capsys.readouterr().err
