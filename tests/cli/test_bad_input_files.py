"""Prompts, traces, records and runs with wrong contents: refused with the file and the reason."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from selfspec.cli.main import main
from tests.bad_input import furnish, refused
from tests.test_untrusted import BOMB

MODEL = ["--model", "model", "--dtype", "float32"]
LENS = [*MODEL, "--heads", "logit-lens"]
SHORT = ["--max-new-tokens", "2"]
DEEP = "[" * 3000 + "]" * 3000

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a record and a finished run."""
    folder = tmp_path_factory.mktemp("place")
    furnish(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        suite = ["--suite", "prompts.jsonl"]
        assert main(["trace", *LENS, "--record", "record", *suite, *SHORT]) == 0
        bench = ["bench", *LENS, *suite, "--output", "run", *SHORT, "--drafter", "exit:layers=2"]
        assert main([*bench, "--methods", "plain"]) == 0
    return folder


@pytest.fixture
def place(furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the record, the run and the trace, and the model itself."""
    for name in ("record", "run"):
        shutil.copytree(furnished / name, tmp_path / name)
    shutil.copy(furnished / "trace.jsonl", tmp_path)
    shutil.copy(furnished / "prompts.jsonl", tmp_path)
    (tmp_path / "model").symlink_to(furnished / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    return tmp_path


SUITES: dict[str, str | bytes] = {
    "nothing": "",
    "blank lines": "\n\n \n",
    "no JSON": "prompt: a\n",
    "half a line": '{"prompt": "a"}\n{"prompt": ',
    "a list": '["a"]\n',
    "a number": "7\n",
    "null": "null\n",
    "no prompt": '{"id": 1}\n',
    "a prompt of a number": '{"prompt": 7}\n',
    "an empty prompt": '{"prompt": " "}\n',
    "turns of text": '{"turns": "a"}\n',
    "no turns": '{"turns": []}\n',
    "a turn of null": '{"turns": ["a", null]}\n',
    "an id twice": '{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}\n',
    "an id of a list": '{"id": [1], "prompt": "a"}\n',
    "a task of all": '{"task": "overall", "prompt": "a"}\n',
    "a task of a bool": '{"task": true, "prompt": "a"}\n',
    "a reference of numbers": '{"prompt": "a", "reference": [1]}\n',
    "deep": DEEP,
    "half a character": '{"prompt": "\\ud83d"}\n',
    "a huge number": '{"prompt": ' + "9" * 9000 + "}\n",
    "Latin": b'{"prompt": "\xe4"}\n',
    "zero bytes": bytes(100),
    "UTF-16": '{"prompt": "a"}\n'.encode("utf-16"),
    "a long line": '{"prompt": "' + "a" * (17 << 20) + '"}\n',
}


@pytest.mark.parametrize("kind", SUITES)
def test_prompts_that_are_none_are_refused(
    kind: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = SUITES[kind]
    data = content.encode() if isinstance(content, str) else content
    (place / "suite.jsonl").write_bytes(data)
    line = refused(["bench", "--suite", "suite.jsonl", "--output", "new"], place, capsys)
    assert "suite.jsonl" in line


def edited(name: str, *path: str | int, to: Any) -> Damage:
    """A value within a JSON file, or within a line of one, replaced."""

    def damage(folder: Path) -> None:
        lines = (folder / name).read_text().split("\n")
        whole = not name.endswith(".jsonl")
        values = json.loads("\n".join(lines)) if whole else [json.loads(x) for x in lines if x]
        inner: Any = values
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = to
        text = json.dumps(values) if whole else "\n".join(map(json.dumps, values)) + "\n"
        (folder / name).write_text(text)

    return damage


def holding(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


TRACES: dict[str, Damage] = {
    "a list": holding("trace.jsonl", "[]\n"),
    "deep": holding("trace.jsonl", DEEP),
    "cut off": lambda f: (f / "trace.jsonl").write_bytes((f / "trace.jsonl").read_bytes()[:3000]),
    "the future": edited("trace.jsonl", 0, "format_version", to=99),
    "a version of text": edited("trace.jsonl", 0, "format_version", to="1"),
    "no layers": edited("trace.jsonl", 0, "exit_layers", to=[]),
    "layers of text": edited("trace.jsonl", 0, "exit_layers", to="2,4"),
    "layers of lists": edited("trace.jsonl", 0, "exit_layers", to=[[2], [4]]),
    "a number of layers of text": edited("trace.jsonl", 0, "num_layers", to="six"),
    "settings of a list": edited("trace.jsonl", 0, "settings", to=[]),
    "settings of nothing": edited("trace.jsonl", 0, "settings", to={}),
    "a model of a number": edited("trace.jsonl", 0, "base_model", to=7),
    "a prompt of null": edited("trace.jsonl", 0, "prompt", to=None),
    "thresholds of text": edited("trace.jsonl", 0, "thresholds", to=["high", "low"]),
    "heads of numbers": edited("trace.jsonl", 0, "head_kinds", to=[1, 2]),
    "a token of text": edited("trace.jsonl", 1, "token", to="seven"),
    "a text of a number": edited("trace.jsonl", 1, "text", to=7),
    "places without layers": edited("trace.jsonl", 1, "layers", to=[]),
    "layers of a number": edited("trace.jsonl", 1, "layers", to=7),
    "probabilities of text": edited("trace.jsonl", 1, "final_top_probs", to=["a", "b", "c"]),
    "probabilities of null": edited("trace.jsonl", 1, "final_top_probs", to=None),
    "a round of text": edited("trace.jsonl", 1, "round", to="first"),
    "an exit of text": edited("trace.jsonl", 1, "exit_layer", to="deep"),
    "an index of a half": edited("trace.jsonl", 1, "index", to=0.5),
    "a last line of a list": edited("trace.jsonl", -1, "passes", to=[7]),
    "drafts of null": edited("trace.jsonl", -1, "draft_tokens", to=None),
    "a source of a number": edited("trace.jsonl", -1, "source", to=7),
    "tokens of text": edited("trace.jsonl", -1, "tokens", to="abc"),
    "texts of a number": edited("trace.jsonl", -1, "draft_texts", to=7),
}


@pytest.mark.parametrize("kind", TRACES)
@pytest.mark.parametrize("shown", ["text", "--html"])
def test_a_trace_that_is_none_is_refused(
    shown: str, kind: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TRACES[kind](place)
    flags = [] if shown == "text" else [shown, "new.html"]
    refused(["trace", "--from", "trace.jsonl", *flags], place, capsys)


def arrays(name: str, change: Callable[[Any], Any]) -> Damage:
    def damage(folder: Path) -> None:
        found = load_file(folder / "record/record.safetensors")
        found[name] = np.ascontiguousarray(change(found[name]))
        save_file(found, folder / "record/record.safetensors")

    return damage


INFO = "record/record.json"
RECORDS: dict[str, Damage] = {
    "a list": holding(INFO, "[]"),
    "deep": holding(INFO, DEEP),
    "empty": holding(INFO, ""),
    "the future": edited(INFO, "format_version", to=99),
    "no prompts": edited(INFO, "prompts", to=[]),
    "prompts of text": edited(INFO, "prompts", to="all"),
    "a prompt of a list": edited(INFO, "prompts", 0, to=[]),
    "tokens of text": edited(INFO, "prompts", 0, "new_tokens", to="two"),
    "negative tokens": edited(INFO, "prompts", 0, "new_tokens", to=-2),
    "a billion tokens": edited(INFO, "prompts", 0, "prompt_tokens", to=10**9),
    "layers of text": edited(INFO, "exit_layers", to="2"),
    "layers of null": edited(INFO, "exit_layers", to=None),
    "another model": edited(INFO, "base", to="another"),
    "a model of a number": edited(INFO, "base", to=7),
    "a dtype of a list": edited(INFO, "dtype", to=[]),
    "other heads": edited(INFO, "heads", to="another"),
    "a number of layers of text": edited(INFO, "num_layers", to="six"),
    "strengths of text": edited(INFO, "anneal_strengths", to=["a", "b"]),
    "no weights": lambda folder: (folder / "record/record.safetensors").unlink(),
    "weights of zeros": holding("record/record.safetensors", bytes(100)),
    "answers of halves": arrays("answers", lambda a: a.astype(np.float16)),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_that_is_none_is_refused(
    kind: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RECORDS[kind](place)
    refused(["tune", *LENS, "--record", "record"], place, capsys)


SUMMARY, RUN = "run/summary.json", "run/run.yaml"
RUNS: dict[str, Damage] = {
    "a list": holding(SUMMARY, "[]"),
    "a run of a list": holding(RUN, "[]"),
    "a run of aliases": holding(RUN, BOMB),
    "a run of nothing": holding(RUN, ""),
    "a run of one key": holding(RUN, "run: 1"),
    "deep": holding(SUMMARY, DEEP),
    "empty": holding(SUMMARY, "{}"),
    "cut off": holding(SUMMARY, '{"methods": '),
    "no methods": edited(SUMMARY, "methods", to=None),
    "methods of a list": edited(SUMMARY, "methods", to=[1]),
    "a method of nothing": edited(SUMMARY, "methods", to={"plain": {}}),
    "a method of null": edited(SUMMARY, "methods", to={"plain": None}),
    "answers of text": edited(SUMMARY, "new_tokens", to="many"),
    "failures of a number": edited(SUMMARY, "failures", to=7),
    "no summary": lambda folder: (folder / SUMMARY).unlink(),
    "no run": lambda folder: (folder / RUN).unlink(),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_that_is_none_makes_no_report(
    kind: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RUNS[kind](place)
    assert "run" in refused(["report", "run", "--output", "new"], place, capsys)


RESUMED: dict[str, Damage] = {
    "a run of a list": holding(RUN, "[]"),
    "a run of one key": holding(RUN, "run: 1"),
    "a run of aliases": holding(RUN, BOMB),
    "another run": lambda folder: (folder / RUN).write_text(
        (folder / RUN).read_text().replace("seed: 0", "seed: 1")
    ),
    "answers of text": holding("run/answers.jsonl", "mine\n"),
    "an answer of a list": holding("run/answers.jsonl", "[]\n"),
    "an answer of nothing": holding("run/answers.jsonl", "{}\n"),
    "runs of a list": edited("run/answers.jsonl", 0, "runs", to=[]),
    "arrivals of text": edited("run/answers.jsonl", 0, "runs", "plain", "arrivals", to="a"),
    "an unknown key": edited("run/answers.jsonl", 0, "colour", to="red"),
    "no run": lambda folder: (folder / RUN).unlink(),
}


@pytest.mark.parametrize("kind", RESUMED)
def test_a_run_that_is_another_is_not_gone_on_with(
    kind: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RESUMED[kind](place)
    bench = ["bench", *LENS, "--suite", "prompts.jsonl", "--output", "run", *SHORT]
    bench += ["--drafter", "exit:layers=2", "--methods", "plain", "--resume"]
    refused(bench, place, capsys)


@pytest.mark.parametrize("data", [b"\xff\n", b"a\n\xc3\n"])
def test_chat_takes_lines_of_text_only(
    data: bytes, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    refused(["chat", *MODEL, *SHORT], place, capsys)


@pytest.mark.parametrize("data", [b"", b"\n", b"\xff", b"a" * (5 << 20)])
def test_a_prompt_from_a_pipe_is_text_and_not_endless(
    data: bytes, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    refused(["generate", *MODEL], place, capsys)
