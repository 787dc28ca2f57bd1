from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from selfspec.backbone import Backbone
from selfspec.cli.main import main
from selfspec.heads import HeadsConfig
from tests.models import make_model
from tests.talks import make_talks, make_tokenizer


@pytest.fixture
def workplace(tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model, conversations and a recipe; the current one."""
    make_model("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    talks = make_talks(backbone.model)
    lines = [json.dumps({"input_ids": list(t.ids), "answer_start": 5}) for t in talks]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "recipe.yaml").write_text(
        "model: model\ndtype: float32\nbatch-tokens: 128\ndraft-vocab-size: null\nepochs: 3\n"
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
    assert "fit" in output.err
    run = yaml.safe_load((workplace / "out" / "run.yaml").read_text())["run"]
    assert (run["exit_layers"], run["batch_tokens"], run["epochs"]) == ([2, 3], 128, 1)
    assert (run["data"], run["dtype"]) == ("talks.jsonl", "float32")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["fit", "--data", "talks.jsonl"], "no --output"),
        (["fit", "--output", "out"], "no --data"),
        ([*COMMAND, "--epochs", "0"], "epochs is 0, expected at least 1"),
        ([*COMMAND, "--exit-layers", "two"], "exit_layers is 'two'"),
        ([*COMMAND, "--exit-layers", "6"], "exit layer 6"),
        ([*COMMAND, "--data", "none.jsonl"], "none.jsonl"),
        ([*COMMAND[:2], "wrong.yaml", *COMMAND[3:]], "Did you mean epochs?"),
        ([*COMMAND[:2], "list.yaml", *COMMAND[3:]], "no `option: value` lines"),
        ([*COMMAND[:2], "none.yaml", *COMMAND[3:]], "cannot read the config none.yaml"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    workplace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    (workplace / "wrong.yaml").write_text("epoch: 3\n")
    (workplace / "list.yaml").write_text("- epochs\n")
    assert main(arguments) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
    assert reason in line
    assert not (workplace / "out").exists()
