"""Numbers, words and YAML that no option takes: refused on one line, before or behind the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input import GENERATE, refused
from tests.test_untrusted import BOMB

ROOT = Path(__file__).parents[2]

NUMBERS = {
    "--max-new-tokens": ["0", "-1", "x", "1.5", "nan", "1e400", ""],
    "--min-new-tokens": ["-1", "x", "1e9"],
    "--temperature": ["-1", "nan", "inf", "hot"],
    "--top-p": ["-0.5", "1.5", "nan", "x"],
    "--top-k": ["-1", "x", "1.5"],
    "--min-p": ["-1", "2", "nan"],
    "--repetition-penalty": ["0", "-1", "nan", "x"],
    "--seed": ["x", "1.5", "9" * 40],
    "--drafter": [
        *("", "exits", "ngram+", "draft-model", "exit:", "exit:2", "exit:layer=2", "exit+ngram"),
        *(f"exit:layers={value}" for value in ("0", "9", "2/2", "4/2", "x", "", "2//4", "9" * 40)),
        *(f"exit:threshold={value}" for value in ("0", "2", "-1", "nan", "x", "0.1/0.2/0.3")),
        *(f"exit:anneal_strength={value}" for value in ("-1", "nan", "inf", "x")),
        *(f"exit:max-depth={value}" for value in ("-1", "3", "99", "x")),
        *(f"exit:max_tokens={value}" for value in ("0", "-1", "x", "1.5", "none")),
        *(f"ngram:size={value}" for value in ("0", "x")),
    ],
    "--controller": [
        *("", "none", "threshold,fixed", "threshold+fixed", "fixed:longest=2"),
        *(f"gammatune:rate={value}" for value in ("0", "2", "nan")),
        *(f"cm-asd:weights={value}" for value in ("1", "1/1/1", "nan/0/1", "x/y/z")),
    ],
    "--acceptance": ["", "all", *(f"lenient:lenience={value}" for value in ("0", "1.5", "nan"))],
    "--prices": [
        *("", "0.3", "rows=1", "row=-1", "row=2", "row=nan"),
        *("head=-1", "head=nan", "row=0.1/-1", "block=0"),
    ],
    "--exit-layers": ["2"],
    "--pinned-rows": ["0", "-1", "x"],
    "--dtype": ["", "int8", "float31", "load", "__name__"],
    "--device": ["", "tpu", "cuda:99", "meta"],
    "--executor": ["", "quick"],
    "--attn-implementation": ["", "none", "flash_attention_2"],
    "--unknown": ["1"],
}


@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for flag, values in NUMBERS.items() for value in values]
)
def test_a_value_out_of_range_is_refused(
    flag: str, value: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused([*GENERATE, "--heads", "logit-lens", flag, value], place, capsys)


COMMANDS = [
    [],
    ["generate"],
    ["generate", ""],
    ["generate", " \n"],
    ["generate", "a", "b"],
    ["generate", "\udcff"],
    ["generate", "a", "--file", "text.txt"],
    ["generate", "a", "--raw", "--system", "s"],
    ["generate", "a", "--max-new-tokens"],
    ["nothing"],
    ["chat", "a"],
    ["env", "a"],
    ["report"],
    ["report", "--output", "new"],
    ["report", "dir"],
    ["report", "dir", "dir", "--output", "new"],
    ["heads", "nothing"],
    ["heads", "show"],
    ["heads", "show", "model"],
    ["heads", "pull", "model"],
    ["heads", "pull", ".."],
    ["heads", "pull", "."],
    ["heads", "pull", "/"],
    ["trace", "a", "--from", "trace.jsonl"],
    ["trace", "--from", "trace.jsonl", "--output", "new"],
    ["trace", "--from", "trace.jsonl", "--model", "model"],
    ["trace", "--from", "trace.jsonl", "--html", "new.txt"],
    ["trace", "--from", "trace.jsonl", "--card", "new.png", "--html", "nowhere/new.html"],
    ["trace", "--from", "trace.jsonl", "--card", "new.svg"],
    ["trace", "a", "--limit", "1"],
    ["trace", "a", "--record", "new", "--html", "new.html"],
    ["trace", "a", "--record", "new", "--suite", "prompts.jsonl"],
    ["trace", "a", "--output", "new.html", "--html", "new.html"],
    ["trace", "--record", "new", "--suite", "prompts.jsonl", "--limit", "0"],
    ["trace", "--record", "new", "--suite", "prompts.jsonl", "--min-threshold", "2"],
    ["tune", "--suite", "prompts.jsonl", "--limit", "1"],
    ["tune", "--suite", "nothing"],
    ["bench"],
    ["bench", "--output", "new", "--suite", "prompts.jsonl", "--overwrite", "--resume"],
    ["bench", "--output", "new", "--methods", ""],
    ["bench", "--output", "new", "--methods", "plain,nothing"],
    ["bench", "--output", "new", "--sweep", "exit.threshold"],
    ["bench", "--output", "new", "--sweep", "nothing=1"],
    ["bench", "--output", "new", "--sweep", "exit.threshold=x"],
    ["bench", "--output", "new", "--sweep", "exit.threshold="],
    ["bench", "--output", "new", "--repeats", "0"],
    ["bench", "--output", "new", "--max-new-tokens", "0"],
    ["bench", "--output", "new", "--tune-questions", "-1"],
    ["verify", "--limit", "0"],
    ["verify", "--max-copy-gb", "x"],
    ["verify", "--suite", "spec-bench"],
    ["verify", "--suite", "six-tasks", "--questions", "prompts.jsonl"],
    ["fit"],
    ["fit", "--output", "new"],
    ["fit", "--output", "new", "--data", "prompts.jsonl", "--preset", "nothing"],
    ["cache", "--output", "new"],
    ["calibrate"],
    ["data"],
    ["data", "--output", "new"],
]


@pytest.mark.parametrize("arguments", COMMANDS[1:], ids=" ".join)
def test_a_command_that_cannot_be_meant_is_refused(
    arguments: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(arguments, place, capsys)


YAML = {
    "nested aliases": BOMB,
    "a tag": "model: !!python/object/apply:os.system [touch owned]",
    "a list": "- model\n- heads\n",
    "a word": "model\n",
    "a number": "7",
    "a key twice": "max_new_tokens: 3\nmax_new_tokens: 4\n",
    "the same key": "max_new_tokens: 3\nmax-new-tokens: 4\n",
    "an unknown key": "max_new_token: 3\n",
    "a number as key": "1: 2\n",
    "null as key": "null: 2\n",
    "a list for a number": "max_new_tokens: [3]\n",
    "a mapping": "max_new_tokens: {a: 3}\n",
    "text for a number": "max_new_tokens: many\n",
    "a bool for a number": "max_new_tokens: true\n",
    "a number for text": "model: 3\n",
    "a list for text": "model: [model]\n",
    "null for text": "model: null\n",
    "a date": "model: 2024-01-01\n",
    "bytes": "model: !!binary aGVsbG8=\n",
    "a set": "drafter: {exit: {layers: !!set {2, 4}}}\n",
    "not a number": "temperature: .nan\n",
    "infinity": "temperature: .inf\n",
    "a half": "max_new_tokens: 1.5\n",
    "infinity for a count": "max_new_tokens: .inf\n",
    "a huge number": "drafter: {exit: {layers: 1" + "0" * 4000 + "}}\n",
    "too huge a number": "drafter: {exit: {layers: 1" + "0" * 5000 + "}}\n",
    "a zero byte": 'model: "a\\0b"\n',
    "half a character": 'model: "\\ud800"\n',
    "an escape": 'model: "\\e[2J"\n',
    "an empty list": "drafter: {exit: {layers: []}}\n",
    "nulls": "drafter: {exit: {layers: [null, null]}}\n",
    "a long line": "model: " + "x" * 200_000 + "\n",
    "a tab": "model:\tx\n\theads: y\n",
    "an open bracket": "drafter: {exit: {layers: [2, 4}}\n",
    "two documents": "model: a\n---\nmodel: b\n",
    "a nested list": "drafter: {exit: {layers: [[2], [4]]}}\n",
}


@pytest.mark.parametrize("kind", YAML)
def test_a_config_that_says_nothing_is_refused(
    kind: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(YAML[kind])
    flags = [] if "model" in YAML[kind] else ["--model", "model", "--dtype", "float32"]
    config = ["--config", str(tmp_path / "config.yaml")]
    refused(["generate", "a", "--heads", "logit-lens", *flags, *config], place, capsys)
