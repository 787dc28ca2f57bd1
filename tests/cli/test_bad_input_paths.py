"""Every option that names a file, with what is none; every output, with what is in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input import GENERATE, furnish, refused

MODEL = ["--model", "model", "--dtype", "float32"]
LENS = [*MODEL, "--heads", "logit-lens"]
QUICK = ["--limit", "1", "--max-new-tokens", "2"]

READERS: dict[str, list[str]] = {
    "generate --config": ["generate", "a", *MODEL, "--config", "@"],
    "generate --file": ["generate", *MODEL, "--file", "@"],
    "generate --json-schema": ["generate", "a", *MODEL, "--json-schema", "@"],
    "generate --grammar": ["generate", "a", *MODEL, "--grammar", "@"],
    "generate --model": ["generate", "a", "--model", "@"],
    "generate --heads": [*GENERATE, "--heads", "@"],
    "generate --draft-model": [*GENERATE, "--draft-model", "@"],
    "chat --config": ["chat", *MODEL, "--config", "@"],
    "chat --model": ["chat", "--model", "@"],
    "trace --from": ["trace", "--from", "@"],
    "trace --config": ["trace", "a", *LENS, "--config", "@"],
    "trace --suite": ["trace", *LENS, "--record", "new", "--suite", "@.jsonl"],
    "trace --questions": [
        *("trace", *LENS, "--record", "new"),
        *("--suite", "spec-bench", "--questions", "@"),
    ],
    "tune --record": ["tune", *LENS, "--record", "@"],
    "tune --config": ["tune", *LENS, "--config", "@"],
    "tune --questions": ["tune", *LENS, "--suite", "spec-bench", "--questions", "@"],
    "bench --config": ["bench", *LENS, "--output", "new", "--config", "@"],
    "bench --suite": ["bench", *LENS, "--output", "new", "--suite", "@.jsonl"],
    "bench --questions": [
        *("bench", *LENS, "--output", "new"),
        *("--suite", "spec-bench", "--questions", "@"),
    ],
    "bench --tune-on": [
        *("bench", *LENS, "--output", "new", "--suite", "prompts.jsonl", "--tune-on", "@.jsonl"),
        *("--methods", "plain,speculation", "--max-new-tokens", "1"),
    ],
    "bench --model": ["bench", "--output", "new", "--model", "@", "--suite", "prompts.jsonl"],
    "verify --suite": ["verify", *LENS, "--suite", "@.jsonl"],
    "verify --questions": ["verify", *LENS, "--suite", "spec-bench", "--questions", "@"],
    "verify --model": ["verify", "--model", "@", "--suite", "prompts.jsonl"],
    "report": ["report", "@", "--output", "new"],
    "heads show": ["heads", "show", "@"],
    "heads check": ["heads", "check", "@", "--model", "model"],
    "heads pull": ["heads", "pull", "@"],
    "fit --data": ["fit", *MODEL, "--output", "new", "--data", "@.jsonl"],
    "fit --validation": [
        *("fit", *MODEL, "--output", "new", "--data", "prompts.jsonl", "--validation", "@.jsonl")
    ],
    "cache --data": ["cache", *MODEL, "--output", "new", "--data", "@.jsonl"],
    "calibrate --data": ["calibrate", *MODEL, "--heads", "logit-lens", "--data", "@.jsonl"],
    "data --from": ["data", *MODEL, "--output", "new.jsonl", "--from", "@.jsonl"],
    "data --recipe": [*("data", *MODEL, "--output", "new.jsonl", "--tokens", "9", "--recipe", "@")],
    "fit --cache": ["fit", *MODEL, "--output", "new", "--cache", "@"],
    "fit --config": ["fit", *MODEL, "--output", "new", "--config", "@"],
    "calibrate --heads": ["calibrate", *MODEL, "--data", "prompts.jsonl", "--heads", "@"],
}

NO_FILES = (
    *("nowhere/at/all", "dir", "empty", "garbage", "zeros", "pipe", "loop", "/dev/zero"),
    *("text.txt/below", "x" * 300, "~nobody-here/x", ""),
)


TAKEN = {("generate --file", "zeros"), ("heads check", "dir")}
"""Zero bytes are text; what is checked and fails is said on standard output, with code 1."""


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    furnish(folder)
    for name in ("dir", "empty", "garbage", "zeros", "pipe", "loop"):
        (folder / f"{name}.jsonl").symlink_to(name)
    return folder


@pytest.mark.parametrize("name", NO_FILES, ids=lambda name: name[:20] or "nameless")
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_such_file_is_refused(
    reader: str, name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [word.replace("@", name) for word in READERS[reader]]
    if reader.endswith("--config") and name in ("empty", "pipe", ""):
        pytest.skip("an empty config asks for nothing")
    if (reader, name) in TAKEN:
        pytest.skip("that is refused in another way, or is none to refuse")
    refused(arguments, place, capsys)


WRITERS: dict[str, list[str]] = {
    "trace --output": ["trace", "--model", "missing", "a", "--output", "@"],
    "trace --html": ["trace", "--model", "missing", "a", "--html", "@.html"],
    "trace --card": ["trace", "--model", "missing", "a", "--card", "@.png"],
    "trace --from --html": ["trace", "--from", "trace.jsonl", "--html", "@.html"],
    "trace --from --card": ["trace", "--from", "trace.jsonl", "--card", "@.png"],
    "trace --record": ["trace", "--model", "missing", "a", "--record", "@"],
    "bench --output": ["bench", "--model", "missing", "--suite", "prompts.jsonl", "--output", "@"],
    "report --output": ["report", "missing", "--output", "@"],
}

IN_THE_WAY = {
    "stranger": "was not written by selfspec",
    "link": "is a link",
    "dangling": "is a link",
    "pipe": "is a pipe",
    "device": "is a link",
    "text.txt/below": "",
    "hidden/nowhere\0": "zero byte",
}


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crowded")
    furnish(folder)
    for suffix in (".html", ".png", ".svg", ""):
        (folder / f"stranger{suffix}").write_text("somebody else's")
        (folder / f"device{suffix}").symlink_to("/dev/full")
        if suffix:
            for name in ("link", "dangling", "pipe"):
                (folder / f"{name}{suffix}").symlink_to(name)
    return folder


@pytest.mark.parametrize("way", IN_THE_WAY)
@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_in_the_way_of_an_output_stays(
    writer: str,
    way: str,
    overwrite: bool,
    crowded: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(crowded)
    arguments = [word.replace("@", way) for word in WRITERS[writer]]
    line = refused([*arguments, *(["--overwrite"] if overwrite else [])], crowded, capsys)
    assert "missing" not in line  # refused before a model or a run is looked for


@pytest.mark.parametrize("name", ["/dev/null", "/dev/full", "", " ", ".", "dir", "model"])
@pytest.mark.parametrize("writer", ["trace --output", "trace --record", "bench --output", "fit"])
def test_no_output_takes_the_place_of_a_device_a_model_or_nothing(
    writer: str,
    name: str,
    crowded: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(crowded)
    fit = ["fit", "--model", "missing", "--data", "prompts.jsonl", "--output", "@"]
    arguments = [word.replace("@", name) for word in WRITERS.get(writer, fit)]
    refused(arguments, crowded, capsys)
