from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from selfspec.cli import data
from selfspec.cli.main import main
from selfspec.training import selfgen
from selfspec.training.selfgen import Counts
from tests.authors import RECIPE as PROMPTS
from tests.authors import counted, read
from tests.cli.nexts import nexts
from tests.models import make_model
from tests.talks import WORDS, make_tokenizer

SETTINGS = """\
model: model
dtype: float32
batch-size: 6
question-temperature: [4.0, 6.0]
max-question-tokens: 12
max-new-tokens: 20
recipe: prompts.yaml
"""
COMMAND = ["data", "--config", "recipe.yaml", "--output", "out.jsonl"]
INVENT = [*COMMAND, "--tokens", "200"]
GIVEN = ["data", "--config", "given.yaml", "--output", "out.jsonl"]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model of ten words, prompts and a recipe; the current one."""
    make_model("llama", vocab_size=len(WORDS)).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(SETTINGS)
    (tmp_path / "given.yaml").write_text(SETTINGS.replace("recipe: prompts.yaml\n", ""))
    (tmp_path / "prompts.yaml").write_text(PROMPTS)
    talks = [{"conversations": [{"from": "human", "value": text}]} for text in ("a", "b", "c c")]
    for talk in talks:
        talk["conversations"].append({"from": "gpt", "value": "b"})
    (tmp_path / "talks.json").write_text(json.dumps(talks))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_record(output: str = "out.jsonl") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(output + ".run.json").read_text())
    return found


def test_the_model_writes_conversations_and_the_last_line_counts_them(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(INVENT) == 0
    output = capsys.readouterr()
    lines = read(workplace / "out.jsonl")
    counts = Counts(run_record()["counts"]["families"])
    assert output.out.splitlines()[-1] == f"out.jsonl: {data.described(counts)}"
    assert counts.total("rows") == len(lines)
    assert counts.answer_tokens >= 200
    assert "tokens/s" in output.err
    assert nexts(output.err, capsys) == [
        "selfspec fit --data out.jsonl --output heads --model model --dtype float32"
    ]
    recorded = run_record()
    assert recorded["options"]["max_new_tokens"] == 20
    assert recorded["options"]["model"] == "model"
    assert recorded["versions"].keys() >= {"torch", "transformers", "threads"}
    assert {line["seed"] for line in lines} <= set(recorded["seeds"])


def test_the_built_in_recipe_is_used_without_another(workplace: Path) -> None:
    (workplace / "recipe.yaml").write_text(SETTINGS.replace("recipe: prompts.yaml\n", ""))
    assert main(INVENT) == 0
    before = run_record()["options"]["recipe"]
    assert main([*INVENT, "--recipe", "prompts.yaml", "--output", "other.jsonl"]) == 0
    assert run_record("other.jsonl")["options"]["recipe"] != before


def test_own_prompts_passages_and_excluded_texts_are_taken(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "docs").mkdir()
    (workplace / "docs" / "a.txt").write_text("c c c a b\n\nb b a")
    (workplace / "own.jsonl").write_text('{"turns": ["a a a c"]}\n{"text": "b b b c"}\n')
    (workplace / "bench.jsonl").write_text('{"id": 3, "turns": ["b b b b b b b b"]}\n')
    given = ["--passages", "docs", "--questions", "own.jsonl", "--exclude", "bench.jsonl"]
    assert main([*INVENT, *given]) == 0
    lines = read(workplace / "out.jsonl")
    assert {"a a a c", "b b b c"} & {line["messages"][0]["content"] for line in lines}
    recorded = run_record()["options"]
    assert recorded["passages"]
    assert recorded["questions"].startswith("own.jsonl, ")
    (workplace / "bench.jsonl").write_text('{"turns": ["c c c c c c c c"]}\n')
    assert main([*INVENT, *given]) == 2
    assert "begun with excluded" in capsys.readouterr().err


def test_a_line_beside_the_file_says_how_far_it_is(workplace: Path) -> None:
    assert main(INVENT) == 0
    (line,) = (workplace / "out.jsonl.status").read_text().splitlines()
    tokens = Counts(run_record()["counts"]["families"]).answer_tokens
    assert line.startswith(f"{tokens:,} answer tokens, ")
    assert "left to 200" in line


def test_conversations_of_a_file_are_taken_over(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GIVEN, "--from", "talks.json"]) == 0
    assert [line["messages"][1]["content"] for line in read(workplace / "out.jsonl")] == ["b"] * 3
    assert capsys.readouterr().out == (
        "out.jsonl: 3 conversations, 6 answer tokens, 0 of 3 answers cut where they loop (0%)\n"
    )


def test_conversations_of_a_file_are_answered_anew(workplace: Path) -> None:
    assert main([*GIVEN, "--from", "talks.json", "--regenerate"]) == 0
    lines = read(workplace / "out.jsonl")
    assert {line["messages"][0]["content"] for line in lines} <= {"a", "b", "c c"}
    assert [line["messages"][1]["content"] for line in lines] != ["b"] * len(lines)
    assert run_record()["options"]["source"].startswith("talks.json, ")


def test_bad_rows_are_skipped_and_counted_if_asked_for(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "talks.json").write_text('[5, {"messages": []}, {"text": "a b"}]')
    assert main([*GIVEN, "--from", "talks.json", "--skip-bad-rows"]) == 0
    output = capsys.readouterr()
    assert output.out.endswith("; dropped: 2 bad rows\n")
    assert "talks.json: skipped 2 bad rows, the first: item 1 holds a int" in output.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["data", "--tokens", "5"], "no --output"),
        (COMMAND, "no --tokens"),
        ([*INVENT, "--regenerate"], "regenerate without --from"),
        ([*INVENT, "--shard", "2"], "shard is 2, expected I/N"),
        ([*INVENT, "--tokens", "many"], "Invalid value for '--tokens'"),
        ([*INVENT, "--recipe", "none.yaml"], "cannot read none.yaml"),
        ([*INVENT, "--passages", "none"], "none is no folder"),
        ([*INVENT, "--questions", "none.jsonl"], "none.jsonl"),
        ([*INVENT, "--exclude", "none.jsonl"], "none.jsonl"),
        ([*INVENT, "--from", "talks.json"], "recipe with --from"),
        ([*INVENT, "--max-new-tokens", "300"], "positions no 32 are left"),
        ([*INVENT, "--output", "talks.json"], "talks.json exists"),
        ([*GIVEN, "--from", "none.jsonl"], "none.jsonl"),
        ([*GIVEN, "--from", "bad.jsonl"], "bad.jsonl, line 2 is not JSON"),
        ([*GIVEN, "--from", "bad.jsonl", "--regenerate"], "bad.jsonl, line 2 is not JSON"),
        ([*COMMAND, "--config", "wrong.yaml"], "Did you mean tokens?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    workplace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    (workplace / "wrong.yaml").write_text("token: 3\n")
    good = {"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")]}
    (workplace / "bad.jsonl").write_text(json.dumps(good) + '\n{"messages": [\n')
    assert main(arguments) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
    assert reason in line


def test_other_options_for_the_same_file_are_refused_by_name(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(INVENT) == 0
    before = (workplace / "out.jsonl").read_bytes()
    for flag, value, reason in (
        ("--seed", "1", "begun with seed 0, not 1"),
        ("--system", "c", "begun with system None, not c"),
        ("--dtype", "float64", "begun with dtype float32, not float64"),
    ):
        assert main([*INVENT, flag, value]) == 2
        assert reason in capsys.readouterr().err
    (workplace / "prompts.yaml").write_text(PROMPTS + "# more\nwritten-share: 0.1\n")
    assert main(INVENT) == 2
    assert "begun with recipe" in capsys.readouterr().err
    assert (workplace / "out.jsonl").read_bytes() == before


def test_an_interrupted_run_says_how_to_go_on_and_does(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*INVENT, "--output", "whole.jsonl"]) == 0
    original = selfgen.Written.batch

    def once(*arguments: Any) -> Any:
        if run_record()["seeds"]:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(selfgen.Written, "batch", once)
    assert main(INVENT) == 130
    assert "out.jsonl: the same command continues it" in capsys.readouterr().err
    monkeypatch.undo()
    os.chdir(workplace)
    assert main(INVENT) == 0
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is a POSIX signal")
def test_a_killed_process_leaves_a_file_that_is_continued(workplace: Path) -> None:
    endless = [*COMMAND, "--tokens", "1000000"]
    child = subprocess.Popen(
        [sys.executable, "-c", f"from selfspec.cli.main import main; main({endless!r})"],
        env=os.environ
        | {"PYTHONPATH": str(Path(data.__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    while child.poll() is None and len(_seeds()) < 3:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    tokens = str(Counts(run_record()["counts"]["families"]).answer_tokens + 1)
    assert main([*COMMAND, "--tokens", tokens]) == 0
    assert main([*COMMAND, "--tokens", tokens, "--output", "whole.jsonl"]) == 0
    assert len(_seeds()) >= 4
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()


def _seeds() -> list[int]:
    """Of the batches that are written so far."""
    return run_record()["seeds"] if Path("out.jsonl.run.json").exists() else []


def test_counts_in_words_name_what_was_dropped() -> None:
    counts = counted(
        rows=3, duplicates=1, unfinished=2, too_long=5, answers=4, answer_tokens=1234, loops_cut=1
    )
    assert data.described(counts) == (
        "3 conversations, 1,234 answer tokens, 1 of 4 answers cut where they loop (25%); dropped: "
        "1 duplicates, 2 user turns without an end, 5 too long for the model"
    )


def test_rates_count_what_this_run_wrote_and_a_pause_counts_for_little() -> None:
    seconds = iter([0.0, 10.0, 20.0, 5000.0, 5010.0, 5020.0])
    rates = data.Rates(100, now=lambda: next(seconds))
    for written in (1100, 2100, 3100, 4100):
        rates.generated += 2000
        rates.add(written)
    assert rates.line() == "2 tokens/s, 1 answer tokens/s in the file"
    assert rates.status(14_100).startswith(
        "4,100 answer tokens, 100 a second, 0:01:40 left to 14,1"
    )
