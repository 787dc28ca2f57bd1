"""`selfspec calibrate`: what it prints and writes, from text or a cache, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from selfspec.cli.main import main
from selfspec.config import SpeculationOptions
from selfspec.heads.exit_heads import HeadsConfig
from selfspec.model.backbone import Backbone
from tests.cli.nexts import nexts
from tests.models import make_model
from tests.talks import make_talks, make_tokenizer
from tests.training.test_calibrate import FLAT

MODEL = ["--model", "model", "--dtype", "float32"]


@pytest.fixture
def workplace(tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model, conversations, a cache of them, and heads; the current one."""
    make_model("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    lines = [
        json.dumps({"input_ids": list(t.ids), "answer_start": 5})
        for t in make_talks(backbone.model)
    ]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("selfspec.decoding.measure.measure", lambda *_, **__: FLAT)
    cache = ["cache", *MODEL, "--data", "talks.jsonl", "--batch-tokens", "64", "--deep"]
    assert main([*cache, "--exit-layers", "0,2,4", "--output", "features"]) == 0
    fit = ["fit", *MODEL, "--cache", "features", "--head-type", "deep-fused", "--output", "heads"]
    assert main([*fit, "--draft-vocab-size", "90", "--epochs", "6"]) == 0
    return tmp_path


def test_defaults_are_written_into_the_heads(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = HeadsConfig.read(workplace / "heads")
    assert main(["calibrate", *MODEL, "--heads", "heads", "--data", "talks.jsonl"]) == 0
    after = HeadsConfig.read(workplace / "heads")
    assert (before.defaults, before.temperatures) == ({"drafter": "ngram+exit"}, {})
    assert after.temperatures.keys() == {"0", "2", "4"}
    layers = SpeculationOptions().updated(after.defaults).exit.layers
    assert layers is not None
    assert set(layers) <= {0, 2, 4}
    said = capsys.readouterr()
    assert f"exit layers {list(layers)}" in said.out
    assert "210 held-out positions" in said.out
    assert "wrote heads/config.json" in said.err
    (tune,) = nexts(said.err, capsys)
    assert tune == "selfspec tune --heads heads --model model --dtype float32"


def test_a_dry_run_only_reports_and_a_cache_serves_as_text(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (workplace / "heads" / "config.json").read_bytes()
    command = ["calibrate", *MODEL, "--heads", "heads", "--dry-run", "--json"]
    reports = []
    for text in (["--data", "talks.jsonl"], ["--cache", "features"]):
        capsys.readouterr()
        assert main([*command, *text]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    for layer in ("0", "2", "4"):
        one, other = (report["layers"][layer]["agreement"] for report in reports)
        assert one == pytest.approx(other, abs=1 / 210)  # batched otherwise: a tie may fall
    assert (workplace / "heads" / "config.json").read_bytes() == before
    assert not (workplace / "heads" / "calibration.json").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--heads", "heads"], "no --data"),
        (["--data", "talks.jsonl"], "no --heads"),
        (["--heads", "nowhere", "--data", "talks.jsonl"], "'nowhere' is neither a folder"),
        (["--heads", "heads", "--data", "none.jsonl"], "none.jsonl"),
        (["--heads", "heads", "--data", "talks.jsonl", "--precision", "1.5"], "precision is 1.5"),
        (["--heads", "heads", "--cache", "shallow"], "not [0]"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    workplace: Path, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "shallow" in arguments:
        cache = ["cache", *MODEL, "--data", "talks.jsonl", "--exit-layers", "2,4"]
        assert main([*cache, "--output", "shallow"]) == 0
    capsys.readouterr()
    assert main(["calibrate", *MODEL, *arguments]) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
    assert reason in line
