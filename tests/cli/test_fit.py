"""`selfspec cache` and `selfspec fit`: recipes, flags, kills, two processes, bad input."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.progress import Progress

from selfspec.cli.cache import Rate
from selfspec.cli.fit import UNFINISHED
from selfspec.cli.main import main
from selfspec.cli.progress import bar
from selfspec.heads.exit_heads import HeadsConfig
from selfspec.model.backbone import Backbone
from selfspec.training import features as store
from tests.cli.nexts import nexts
from tests.models import make_model
from tests.talks import make_talks, make_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workplace(tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model, conversations and a recipe; the current one."""
    make_model("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    talks = make_talks(backbone.model)
    lines = [json.dumps({"input_ids": list(t.ids), "answer_start": 5}) for t in talks]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "recipe.yaml").write_text(
        "model: model\ndtype: float32\nbatch-tokens: 64\ndraft-vocab-size: null\nepochs: 3\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMAND = ["fit", "--config", "recipe.yaml", "--data", "talks.jsonl", "--output", "out"]


def test_the_command_fits_as_recipe_and_flags_say(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [
        "--exit-layers",
        "2,3",
        "--validation",
        "talks.jsonl",
        "--max-tokens",
        "60",
        "--epochs",
        "1",
    ]
    assert main([*COMMAND, *more]) == 0
    config = HeadsConfig.read(workplace / "out")
    assert (config.base_model, config.exit_layers) == ("model", (2, 3))
    assert config.draft_vocab_size is None
    assert 60 <= config.training["answer_tokens"] < 80
    output = capsys.readouterr()
    assert output.out.count("agreement") == 2
    assert output.out.endswith("\nout: exit heads at 2 layers\n")
    (calibrate,) = nexts(output.err, capsys)
    assert "calibrate --heads out --data talks.jsonl --model model" in calibrate
    run = yaml.safe_load((workplace / "out" / "run.yaml").read_text())["run"]
    assert (run["exit_layers"], run["batch_tokens"], run["epochs"]) == ([2, 3], 64, 1)
    assert (run["data"], run["dtype"]) == ("talks.jsonl", "float32")


CACHE = ["cache", "--model", "model", "--dtype", "float32", "--batch-tokens", "64"]
CACHE += ["--data", "talks.jsonl", "--output", "features"]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_features_are_cached_and_fitted_to(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CACHE, "--exit-layers", "0,2,3", "--deep"]) == 0
    output = capsys.readouterr()
    assert "258 positions at" in output.err
    assert "features: 258 positions, 210 of them answers" in output.out
    (fit,) = nexts(output.err, capsys)
    assert fit == "selfspec fit --cache features --output heads --model model --dtype float32"
    shared = ["fit", "--model", "model", "--dtype", "float32", "--draft-vocab-size", "90"]
    shared += ["--exit-layers", "0,3", "--head-type", "deep-fused"]
    assert main([*shared, "--cache", "features", "--output", "cached"]) == 0
    output = capsys.readouterr()
    assert output.out.count("second draft") == 2
    make, calibrate = nexts(output.err, capsys)
    assert make.startswith("selfspec data --output held-out.jsonl --tokens ")
    assert "calibrate --heads cached --data held-out.jsonl" in calibrate
    more = ["--validation", "talks.jsonl", "--batch-tokens", "64"]
    for folder, text in (("a", ["--cache", "features"]), ("b", ["--data", "talks.jsonl"])):
        assert main([*shared, *text, *more, "--output", folder]) == 0
    assert weights(workplace / "a") == weights(workplace / "b")
    assert not (workplace / "a" / UNFINISHED).exists()
    assert HeadsConfig.read(workplace / "a").exit_layers == (0, 3)


def test_the_rate_of_a_cache_counts_what_this_run_computes() -> None:
    """Two seconds to look at what is there, then 100 positions a second."""
    clock = iter([0.0, 2.0, 3.0, 5.0])
    rate = Rate(now=clock.__next__)
    rate.add(5000, computed=False)
    assert (rate.done, rate.line()) == (5000, "")
    rate.add(100, computed=True)
    rate.add(200, computed=True)
    assert (rate.done, rate.line()) == (5300, "100 tok/s")


def test_what_was_found_says_nothing_about_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks: list[Any] = []
    stop = Progress.stop

    def watched(self: Progress) -> None:
        tasks.extend(self.tasks)
        stop(self)

    monkeypatch.setattr(Progress, "stop", watched)
    with bar("cache", "tokens") as show:
        for done in (0, 400, 800):
            show(done, 1000, found=True)
    assert (tasks[0].completed, tasks[0].total, tasks[0].speed) == (800, 1000, None)
    with bar("cache", "tokens") as show:
        for done in (0, 400, 800):
            show(done, 1000)
    assert tasks[1].speed > 0


def test_the_paper_preset_is_under_the_flags(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fit", "--model", "model", "--dtype", "float32", "--preset", "specbound"]
    command += ["--data", "talks.jsonl", "--output", "out", "--batch-tokens", "64"]
    assert main([*command, "--epochs", "2"]) == 0
    run = yaml.safe_load((workplace / "out" / "run.yaml").read_text())["run"]
    assert (run["head_type"], run["learning_rate"], run["epochs"]) == ("linear", 3e-5, 2)
    assert run["draft_vocab_size"] is None
    assert main([*command, "--preset", "specbond"]) == 2
    assert "Did you mean specbound?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [[*COMMAND[:-2], "--epochs", "40", "--checkpoint-steps", "1", *COMMAND[-2:]], CACHE],
)
def test_killed_six_times_it_still_ends_as_if_never_killed(
    workplace: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_SHARD_BYTES", 20_000)
    expected = workplace / "expected"
    assert main([*command[:-1], str(expected)]) == 0
    moments = random.Random(0)
    for _ in range(6):
        child = os.fork()
        if child == 0:
            main(command)
            os._exit(0)
        time.sleep(moments.uniform(0.05, 0.6))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert main(command) in (0, 2)  # 2: one of them had ended before it was killed
    found = workplace / command[-1]
    assert {file.name for file in found.iterdir()} == {file.name for file in expected.iterdir()}
    for file in found.glob("*.safetensors"):
        assert file.read_bytes() == (expected / file.name).read_bytes()


def test_two_processes_take_the_steps_of_one(workplace: Path) -> None:
    """The same batches per step, shared by two: the same losses and, up to rounding, heads."""
    alone = [*COMMAND[:-1], "alone", "--accumulate", "2", "--exit-layers", "2"]
    together = [*COMMAND[:-1], "together", "--accumulate", "2", "--exit-layers", "2"]
    assert main(alone) == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "selfspec", *together],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = json.loads((workplace / "together" / "metrics.json").read_text())
    assert metrics["processes"] == 2
    one, two = (
        [json.loads(line) for line in (workplace / folder / "metrics.jsonl").open()]
        for folder in ("alone", "together")
    )
    for ours, theirs in zip(one, two, strict=True):
        # float32 sums in another order; largest relative difference measured: 4e-7
        assert theirs["train_loss"] == pytest.approx(ours["train_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["fit", "--data", "talks.jsonl"], "no --output"),
        (["fit", "--output", "out"], "no --data"),
        (["fit", "--cache", "nowhere", "--output", "out"], "nowhere is no feature cache"),
        (["fit", "--cache", "half", "--output", "out"], "half is unfinished"),
        ([*CACHE[:-1], "out", "--max-size", "0.00001"], "more than max_size 1e-05"),
        ([*CACHE[:-1], "out", "--exit-layers", "0,2"], "exit layer 0 is not among"),
        ([*COMMAND, "--draft-vocab-size", "97"], "the model has 96 tokens"),
        ([*COMMAND, "--batch-tokens", "8"], "at most 8 fit into a batch"),
        ([*COMMAND, "--epochs", "0"], "epochs is 0, expected at least 1"),
        ([*COMMAND, "--exit-layers", "two"], "exit_layers is 'two'"),
        ([*COMMAND, "--exit-layers", "6"], "exit layer 6"),
        ([*COMMAND, "--data", "none.jsonl"], "none.jsonl"),
        ([*COMMAND[:2], "wrong.yaml", *COMMAND[3:]], "Did you mean epochs?"),
        ([*COMMAND[:2], "list.yaml", *COMMAND[3:]], "expected `option: value` lines"),
        ([*COMMAND[:2], "none.yaml", *COMMAND[3:]], "none.yaml"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    workplace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    (workplace / "wrong.yaml").write_text("epoch: 3\n")
    (workplace / "list.yaml").write_text("- epochs\n")
    (workplace / "half").mkdir()
    (workplace / "half" / "manifest.json").write_text('{"format_version": 3}')
    assert main(arguments) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
    assert reason in line
    assert not (workplace / "out").exists()
