"""`selfspec bench`: the folder it writes, what it prints, what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from selfspec.cli.main import main
from selfspec.errors import InvalidOption
from selfspec.eval.methods import METHODS, Method, moved
from tests.models import make_model
from tests.talks import make_tokenizer

COMMAND = ["bench", "--model", "model", "--dtype", "float32", "--heads", "logit-lens"]
COMMAND += ["--drafter", "exit:layers=2/4,threshold=0.05", "--max-new-tokens", "6"]
PROMPTS = ["--suite", "prompts.jsonl", "--output", "out"]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model and eight prompts; the current one."""
    make_model("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    prompts = [" ".join(f"{number:03b}".replace("0", "a").replace("1", "b")) for number in range(8)]
    lines = [json.dumps({"prompt": prompt, "task": "QA"}) for prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_results_hold_the_run_the_answers_and_the_tables(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *PROMPTS, "--limit", "2", "--sweep", "exit.max_tokens=1,2"]) == 0
    printed = capsys.readouterr().out
    out = workplace / "out"
    assert printed == (out / "table.md").read_text()
    assert "| speculation(exit.max_tokens=2) |" in printed
    names = ["answers.jsonl", "run.yaml", "summary.json", "table.csv", "table.md"]
    assert sorted(path.name for path in out.iterdir()) == names
    run = yaml.safe_load((out / "run.yaml").read_text())
    assert run["run"]["suite"] == "prompts.jsonl"
    assert run["run"]["methods"] == ["hugging-face", "plain", "speculation", "ngram", "ngram+exit"]
    assert run["questions"] == {"reported": 2, "settings_chosen_on": []}
    assert run["speculation"]["drafter"] == "exit:layers=2/4,threshold=0.05"
    assert run["machine"]["threads"] == 1
    assert run["model"]["executor"] == (
        "generic" if run["machine"]["compiled"] is None else "fused"
    )
    assert str(workplace) not in (out / "run.yaml").read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["questions"], summary["failures"]) == (2, [])


def test_a_draft_model_beside_the_heads_has_a_method_of_its_own(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model("llama", num_hidden_layers=1).save_pretrained(workplace / "small")
    make_tokenizer().save_pretrained(workplace / "small")
    asked = ["--draft-model", "small", "--drafter", "exit", "--limit", "1"]
    asked += ["--methods", "plain,speculation,draft-model", "--json"]
    assert main([*COMMAND, *PROMPTS, *asked]) == 0
    assert json.loads(capsys.readouterr().out)["failures"] == []
    run = yaml.safe_load((workplace / "out" / "run.yaml").read_text())
    assert run["model"]["draft_model"] == "small"


def test_settings_of_a_peer_are_chosen_on_other_prompts(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--methods", "plain,prompt-lookup", "--tune-questions", "2", "--json"]
    assert main([*COMMAND, *PROMPTS, *asked]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["questions"] == 6
    peer = summary["methods"]["prompt-lookup"]
    assert len(peer["chosen_from"]) == 3
    assert peer["setting"]["prompt_lookup_num_tokens"] in (2, 4, 10)
    run = yaml.safe_load((workplace / "out" / "run.yaml").read_text())
    assert run["questions"]["settings_chosen_on"] == ["1", "5"]
    lines = (workplace / "out" / "tuning.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["1", "5"]


def test_a_lossy_method_is_marked_and_its_texts_are_judged(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*COMMAND, *PROMPTS, "--limit", "2", "--methods", "plain,cm-asd"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "| cm-asd (lossy) | overall | 2 |" in printed
    assert "| cm-asd |" not in printed
    summary = json.loads((workplace / "out" / "summary.json").read_text())
    assert list(summary["quality"]) == ["cm-asd"]
    assert main([*command, "--overwrite", "--quality"]) == 0
    summary = json.loads((workplace / "out" / "summary.json").read_text())
    assert list(summary["quality"]) == ["plain", "cm-asd"]
    assert summary["quality"]["plain"]["overall"]["exact_share"] == 1.0
    assert summary["harness"]["methods_s"] > 0.0


def test_a_missing_package_for_texts_is_told_before_any_work(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfspec.eval.results.find_spec", lambda name: None)
    assert main([*COMMAND, *PROMPTS, "--sweep", "acceptance=cm-asd"]) == 2
    assert "needs sacrebleu: pip install 'selfspec[eval]'" in capsys.readouterr().err
    assert not (workplace / "out").exists()


def test_results_are_neither_overwritten_nor_continued_unasked(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*COMMAND, *PROMPTS, "--methods", "plain"]
    assert main([*command, "--limit", "1"]) == 0
    answers = workplace / "out" / "answers.jsonl"
    before = answers.read_text()
    assert main([*command, "--limit", "1"]) == 2
    assert "out holds results. Give --resume, --overwrite" in capsys.readouterr().err
    assert main([*command, "--limit", "1", "--resume"]) == 0
    assert answers.read_text() == before
    assert main([*command, "--limit", "2", "--resume"]) == 2
    assert "cannot resume out: run limit was 1, now it is 2" in capsys.readouterr().err
    assert main([*command, "--limit", "2", "--overwrite"]) == 0
    assert len(answers.read_text().splitlines()) == 2


def test_a_failing_method_gives_exit_code_1_and_the_rest_of_the_table(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: Any) -> Any:
        raise RuntimeError("no luck")

    broken = Method(source="broken", decode=decode, settings=lambda _: [{}])
    monkeypatch.setitem(METHODS, "broken", broken)
    command = [*COMMAND, *PROMPTS, "--limit", "1"]
    assert main([*command, "--methods", "plain,broken"]) == 1
    captured = capsys.readouterr()
    assert "failed: 1, turn 1, broken: RuntimeError: no luck" in captured.err
    assert "| plain | 1.00 | 1.00 |" in captured.out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--suite", "six-tasks"], "no --output"),
        ([*PROMPTS, "--methods", "plain,specualtion"], "Did you mean speculation?"),
        ([*PROMPTS, "--limit", "0"], "limit is 0, expected at least 1"),
        ([*PROMPTS, "--sweep", "tau=1"], "unknown option to sweep 'tau'"),
        ([*PROMPTS, "--sweep", "exit.max_depth=3"], "exit:max_depth 3 is not among"),
        ([*PROMPTS, "--overwrite", "--resume"], "--overwrite and --resume at once"),
        (["--suite", "six", "--output", "out"], "unknown suite 'six'"),
        (["--suite", "broken.jsonl", "--output", "out"], "broken.jsonl, line 1 is not JSON"),
        (
            [*PROMPTS, "--methods", "no-depth-bound", "--drafter", "exit:layers=1/2/3/4/5"],
            "is the same",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    workplace: Path, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "broken.jsonl").write_text("{\n")
    assert main([*COMMAND, *arguments]) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
    assert reason in line
    assert not (workplace / "out").exists()


def test_a_sweep_is_one_setting_per_value() -> None:
    assert moved("exit.threshold = 0.1, 0.3") == [
        ("exit.threshold", 0.1, {"drafter": "exit:threshold=0.1"}),
        ("exit.threshold", 0.3, {"drafter": "exit:threshold=0.3"}),
    ]
    found = [entry.setting for name in SWEEPS for entry in moved(name)]
    assert found == list(SWEEPS.values())


SWEEPS: dict[str, dict[str, Any]] = {
    "exit.layers=2/4": {"drafter": "exit:layers=2/4"},
    "draft-model.max_tokens=2": {"drafter": "draft-model:max_tokens=2"},
    "gammatune.rate=0.5": {"controller": "gammatune:rate=0.5"},
    "controller.cm-asd.scale=0.5": {"controller": "cm-asd:scale=0.5"},
    "acceptance.cm-asd.tolerance=0": {"acceptance": "cm-asd:tolerance=0.0"},
    "prices.head=none": {"prices": "head=none"},
    "acceptance=easd": {"acceptance": "easd"},
    "pinned_rows=4": {"pinned_rows": 4},
}


@pytest.mark.parametrize("text", ["exit.threshold", "exit.threshold=", "exit.threshold=high"])
def test_a_broken_sweep_says_what_is_expected(text: str) -> None:
    with pytest.raises(InvalidOption, match="expected"):
        moved(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exit.treshold=1", "Did you mean exit.threshold?"),
        ("exit_threshold=1", "Did you mean exit.threshold?"),
    ],
)
def test_an_unknown_name_to_sweep_names_the_nearest(text: str, words: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(words)):
        moved(text)


def test_help_says_how_a_list_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "--methods TEXT[,TEXT..] Some of hugging-face, plain, speculation" in words
    assert main(["bench", "--help-all"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "exit:threshold=X[/X..]" in words
    assert "exit:layers=N[/N..]" in words
