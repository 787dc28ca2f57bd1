"""`selfspec generate --prompts FILE --output FILE`: many prompts, answers in order, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfspec.cli.main import main
from selfspec.decoding import engine
from tests.cli.fakes import FakeSpeculator, user

LINES: list[dict[str, Any]] = [
    {"prompt": "one"},
    {"messages": [user("two")]},
    {"prompt": "bad"},
    {"prompt": "four"},
]


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in LINES), encoding="utf-8")
    return ["generate", "--prompts", str(file), "--output", str(tmp_path / "out.jsonl")]


def read(asked: list[str]) -> list[dict[str, Any]]:
    text = Path(asked[4]).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_answers_come_in_the_order_of_their_prompts(
    speculator: FakeSpeculator, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*asked, "--seed", "5", "--max-new-tokens", "9"]) == 0
    lines = read(asked)
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    assert [line.get("text") for line in lines] == ["one 5", "two 6", None, "four 8"]
    assert lines[2]["error"] == "no such prompt"
    assert lines[0]["token_ids"] == [5, 6]
    assert lines[0]["stats"] == {"new_tokens": 2}
    assert speculator.given == {"max_new_tokens": 9, "raw": False}
    assert "4 answers, 6 tokens, 1 without an answer" in capsys.readouterr().out
    assert not list(Path(asked[4]).parent.glob("*.partial"))


def test_the_same_command_goes_on_where_a_run_was_stopped(
    speculator: FakeSpeculator, asked: list[str]
) -> None:
    speculator.broken = {1: KeyboardInterrupt()}
    assert main([*asked, "--seed", "5"]) == 130
    assert not Path(asked[4]).exists()
    partial = Path(f"{asked[4]}.partial")
    partial.write_text(partial.read_text(encoding="utf-8") + '{"index": 3, "te', encoding="utf-8")
    assert main([*asked, "--seed", "6"]) == 2  # other options
    speculator.broken, speculator.prompts = {}, []
    assert main([*asked, "--seed", "5"]) == 0
    assert len(speculator.prompts) == 2  # numbers 0 and 2 were there
    assert [line.get("text") for line in read(asked)] == ["one 5", "two 6", None, "four 8"]


def test_an_old_run_gives_way_on_request_and_a_damaged_one_is_named(
    speculator: FakeSpeculator, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    speculator.broken = {1: KeyboardInterrupt()}
    assert main([*asked, "--seed", "5"]) == 130
    partial = Path(f"{asked[4]}.partial")
    head, line, *_ = whole = partial.read_text(encoding="utf-8").splitlines()
    for damage in ("{", '{"text": "no index"}', "[]"):
        partial.write_text("\n".join((head, damage, line, "")), encoding="utf-8")
        assert main([*asked, "--seed", "5"]) == 2
        assert f"{partial} is damaged. Remove it" in capsys.readouterr().err
    partial.write_text("mine\n", encoding="utf-8")
    assert main([*asked, "--overwrite"]) == 2
    assert partial.read_text(encoding="utf-8") == "mine\n"
    partial.write_text("\n".join((*whole, "")), encoding="utf-8")
    speculator.broken = {}
    assert main([*asked, "--seed", "6", "--overwrite"]) == 0
    assert [line.get("text") for line in read(asked)] == ["one 6", "two 7", None, "four 9"]


def test_an_output_is_replaced_on_request_only(
    speculator: FakeSpeculator, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked) == 0
    assert main(asked) == 2
    assert "is there already. Give --overwrite" in capsys.readouterr().err
    assert main([*asked, "--overwrite"]) == 0
    Path(asked[4]).write_text("mine", encoding="utf-8")
    assert main([*asked, "--overwrite"]) == 2
    assert Path(asked[4]).read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 holds no object"),
        ("{}", "line 2 holds the keys none"),
        ('{"prompt": "a", "seed": 1}', "line 2 holds the keys prompt, seed"),
        ('{"prompt": 3}', 'line 2: "prompt" is no text'),
        ('{"prompt": " "}', 'line 2: "prompt" is no text, or empty'),
        ('{"messages": "a"}', 'line 2: "messages" is no list'),
    ],
)
def test_a_bad_line_is_named_before_anything_is_loaded(
    speculator: FakeSpeculator,
    asked: list[str],
    capsys: pytest.CaptureFixture[str],
    line: str,
    reason: str,
) -> None:
    Path(asked[2]).write_text(f'{{"prompt": "a"}}\n{line}\n', encoding="utf-8")
    assert main(asked) == 2
    assert reason in capsys.readouterr().err
    assert speculator.loaded is None
    assert not Path(f"{asked[4]}.partial").exists()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["hi"], "--prompts and another prompt at once"),
        (["--system", "Be brief."], '"messages" stand beside --raw or --system'),
    ],
)
def test_what_does_not_go_with_many_prompts_is_refused(
    speculator: FakeSpeculator,
    asked: list[str],
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    reason: str,
) -> None:
    assert main([*asked, *more]) == 2
    assert reason in capsys.readouterr().err
    assert speculator.loaded is None


@pytest.mark.parametrize(
    ("size", "expected"),
    [("500MB", 5 * 10**8), ("2 GiB", 2**31), ("1.5g", 15 * 10**8), ("7", 7)],
)
def test_room_for_many_prompts(
    speculator: FakeSpeculator, asked: list[str], size: str, expected: int
) -> None:
    assert main([*asked, "--kv-memory", size, "--concurrency", "3"]) == 0
    assert speculator.room == (3, expected)


@pytest.mark.parametrize("size", ["", "2 gigs", "-1GB", "0", "1e9"])
def test_what_is_no_size_is_refused(
    speculator: FakeSpeculator, asked: list[str], capsys: pytest.CaptureFixture[str], size: str
) -> None:
    assert main([*asked, "--kv-memory", size]) == 2
    assert "expected a size like 500MB or 2GB" in capsys.readouterr().err
    assert main(["generate", "hi", "--kv-memory", "1GB"]) == 2
    assert speculator.loaded is None


def test_the_built_in_number_of_texts_is_the_engines(
    speculator: FakeSpeculator, asked: list[str]
) -> None:
    assert main(asked) == 0
    assert speculator.room == (engine.MOST_TEXTS, None)


def test_prompts_and_output_go_together(
    speculator: FakeSpeculator, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked[:3]) == 2
    assert "--prompts and --output go together" in capsys.readouterr().err
    empty = Path(asked[2])
    empty.write_text("", encoding="utf-8")
    assert main(asked) == 2
    assert "holds no prompts" in capsys.readouterr().err
    assert speculator.loaded is None
