"""`selfspec generate` and `demo`: sources of prompts, outputs, and files of many prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from selfspec.api.speculator import wrap
from selfspec.cli import base, generate
from selfspec.cli.main import main
from selfspec.config import SpeculationOptions
from selfspec.decoding import engine
from selfspec.hub import models as hub
from tests.api.test_text import byte_level_bpe
from tests.cli.fakes import Call, FakeAnswer, FakeSpeculator, FakeStream
from tests.models import make_model
from tests.talks import dialogue


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("arguments", "given", "prompt", "err"),
    [
        (["hi"], "", dialogue("hi"), ""),
        (["--stats", "hi"], "", dialogue("hi"), "2 tokens, 2.0 tokens per pass\n"),
        (["--stats=full", "hi"], "", dialogue("hi"), "2 tokens at 2.0 tokens/s; 1 thread\n"),
        (["--system", "Be brief.", "hi"], "", dialogue("hi", rule="Be brief."), ""),
        ([], "grüß\nmich\n", dialogue("grüß\nmich"), ""),
        (["--raw"], "def f():\n", "def f():\n", ""),
        (["--file", "prompt.txt"], "", dialogue("from a file"), ""),
    ],
)
def test_a_prompt_is_answered_on_stdout_and_statistics_go_to_stderr(
    arguments: list[str], given: str, prompt: Any, err: str, speculator: FakeSpeculator, call: Call
) -> None:
    Path("prompt.txt").write_text("from a file\n")
    captured = call(["generate", *arguments], given=given.encode())
    assert tuple(captured) == ("Hello you.\n", err)
    assert speculator.prompts == [prompt]
    assert speculator.given["raw"] is ("--raw" in arguments)


@pytest.mark.parametrize(
    ("folder", "flags", "heads"),
    [
        (hub.DEFAULT_HEADS, ["--seed", "7"], hub.DEFAULT_HEADS),
        ("/elsewhere/heads", ["--heads", "logit-lens"], "logit-lens"),
        ("/elsewhere/heads", ["--model", "own"], "/elsewhere/heads"),
        (None, [], None),
    ],
)
def test_json_is_one_object_and_nothing_else(
    folder: str | None, flags: list[str], heads: str | None, speculator: FakeSpeculator, call: Call
) -> None:
    speculator.heads = None if folder is None else SimpleNamespace(folder=Path(folder))
    captured = call(["generate", "--json", *flags, "hi"])
    assert captured.err == ""
    seed = {"seed": 7} if "--seed" in flags else {}
    assert json.loads(captured.out) == {
        **{"text": "Hello you.", "token_ids": [5, 6], "stop_reason": "eos"},
        **{"stats": {"new_tokens": 2}, "model": "fake", "heads": heads},
        "options": SpeculationOptions().described() | seed | {"raw": False},
    }


def test_a_newline_or_an_interrupt_ends_an_answer(speculator: FakeSpeculator, call: Call) -> None:
    speculator.answers = [["done\n"], ["Hel", KeyboardInterrupt()]]
    assert tuple(call(["generate", "hi"])) == ("done\n", "")
    assert tuple(call(["generate", "hi"], 130)) == ("Hel", "\nselfspec: interrupted\n")


def test_a_schema_or_a_grammar_is_read_from_a_file(
    speculator: FakeSpeculator, tmp_path: Path, call: Call
) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    speculator.answers = [["one"], ["two"]]
    schema.write_text('{"type": "string"}')
    grammar.write_text('start: "yes" | "no"')
    assert main(["generate", "hi", "--json-schema", str(schema)]) == 0
    assert speculator.given["json_schema"] == {"type": "string"}
    assert main(["generate", "hi", "--grammar", str(grammar)]) == 0
    assert speculator.given["grammar"] == 'start: "yes" | "no"'
    flags = ["--json-schema", str(schema), "--grammar", str(grammar)]
    assert "both given" in call(["generate", "hi", *flags], 2).err
    schema.write_text('{"type": "x"}')
    assert "Invalid type" in call(["generate", "hi", "--json-schema", str(schema)], 2).err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_cut_answer_is_reported_unless_its_length_was_given(
    command: str, speculator: FakeSpeculator, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setattr(FakeStream, "result", FakeAnswer(token_ids=[5], stop_reason="length"))
    for flags, warned in (([], True), (["--max-new-tokens", "2"], False), (["-q"], False)):
        speculator.answers = [["one"]]
        errors = call([command, *flags], given=b"a\n").err
        assert ("cut after 1 token; more: --max-new-tokens" in errors) is warned


# --- many prompts

LINES: list[dict[str, Any]] = [
    {"prompt": "one"},
    {"messages": dialogue("two")},
    {"prompt": "bad"},
    {"prompt": "four"},
]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    return ["generate", "--prompts", "prompts.jsonl", "--output", "out.jsonl"]


OUT, PARTIAL = Path("out.jsonl"), Path("out.jsonl.partial")


def texts() -> list[str | None]:
    lines = [json.loads(line) for line in OUT.read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    return [line.get("text") for line in lines]


def test_answers_are_in_order(speculator: FakeSpeculator, asked: list[str], call: Call) -> None:
    output = call([*asked, "--seed", "5", "--max-new-tokens", "9"]).out
    assert texts() == ["one 5", "two 6", None, "four 8"]
    first, _, third, _ = map(json.loads, OUT.read_text().splitlines())
    assert third["error"] == "no such prompt"
    assert (first["token_ids"], first["stats"]) == ([5, 6], {"new_tokens": 2})
    assert speculator.given == {"max_new_tokens": 9, "raw": False}
    assert speculator.room == (engine.MOST_TEXTS, None)
    failed = ", without an answer: 1; the first: no such prompt\n"
    assert re.search(rf"3 answers, 6 tokens \([\d.]+ tokens/s with prompts\){failed}", output)
    assert not PARTIAL.exists()


def test_a_stopped_run_resumes(speculator: FakeSpeculator, asked: list[str], call: Call) -> None:
    speculator.broken = {1: KeyboardInterrupt()}
    assert "2 of 4 answered; the same command continues" in call([*asked, "--seed", "5"], 130).err
    assert not OUT.exists()
    PARTIAL.write_text(PARTIAL.read_text() + '{"index": 3, "te')
    assert main([*asked, "--seed", "6"]) == 2  # other options
    speculator.broken, speculator.prompts = {}, []
    assert main([*asked, "--seed", "5"]) == 0
    assert len(speculator.prompts) == 2  # prompts 0 and 2 were done
    assert texts() == ["one 5", "two 6", None, "four 8"]


def test_overwrite_replaces_an_old_run_and_a_damaged_one_is_named(
    speculator: FakeSpeculator, asked: list[str], call: Call
) -> None:
    speculator.broken = {1: KeyboardInterrupt()}
    assert main([*asked, "--seed", "5"]) == 130
    head, line, *_ = lines = PARTIAL.read_text().splitlines()
    for damage in ("{", '{"text": "no index"}', "[]"):
        PARTIAL.write_text("\n".join((head, damage, line, "")))
        assert f"{PARTIAL} is damaged. Remove it" in call([*asked, "--seed", "5"], 2).err
    PARTIAL.write_text("mine\n")
    assert main([*asked, "--overwrite"]) == 2
    assert PARTIAL.read_text() == "mine\n"
    PARTIAL.write_text("\n".join((*lines, "")))
    speculator.broken = {}
    assert main([*asked, "--seed", "6", "--overwrite"]) == 0
    assert texts() == ["one 6", "two 7", None, "four 9"]
    # the output is not replaced without --overwrite, and never if selfspec did not write it
    assert "is there already. Give --overwrite" in call(asked, 2).err
    OUT.write_text("mine")
    assert main([*asked, "--overwrite"]) == 2
    assert OUT.read_text() == "mine"


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[1]", "{}", '{"prompt": "a", "seed": 1}', '{"prompt": 3}', '{"prompt": " "}'),
        '{"messages": "a"}',
    ],
)
def test_a_line_that_is_no_prompt_is_named_before_anything_is_loaded(
    line: str, speculator: FakeSpeculator, asked: list[str], call: Call
) -> None:
    Path("prompts.jsonl").write_text(f'{{"prompt": "a"}}\n{line}\n')
    reason = "not JSON" if line == "{" else f'{json.loads(line)}, expected only {{"prompt": "…"}}'
    assert f"line 2 is {reason}" in call(asked, 2).err
    Path("prompts.jsonl").write_text('{"messages": []}')
    assert '"messages" cannot go with --raw or --system' in call([*asked, "--system", "s"], 2).err
    assert speculator.loaded is None
    assert not PARTIAL.exists()


def test_room_for_many_prompts(speculator: FakeSpeculator, asked: list[str]) -> None:
    for size, room in (("500MB", 5 * 10**8), ("2 GiB", 2**31), ("1.5g", 15 * 10**8), ("7", 7)):
        flags = ["--kv-memory", size, "--concurrency", "3", "--overwrite"]
        assert main([*asked, *flags]) == 0
        assert speculator.room == (3, room)


# --- demo


def test_demo_says_whether_texts_are_the_same(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", torch.float64, vocab_size=300)
    speculator = wrap(model, byte_level_bpe(), drafter="ngram")
    monkeypatch.setattr(speculator.model.generation_config, "stop_strings", ["zzz"])
    monkeypatch.setattr(base, "load", lambda _, **__: speculator)
    demo = ["demo", "a", "--max-new-tokens", "12", "--raw"]
    reference, answer, verdict = call(demo).out.split("\n\n", 2)
    text = reference.splitlines()[1:-1]
    assert text  # of twelve tokens one has text
    assert answer.splitlines()[1:-1] == text
    numbers = re.sub(r"[\d.]+", "N", verdict)
    assert numbers.startswith("Hugging Face N tokens/s, selfspec N tokens/s: ")
    assert verdict.endswith("; same text: yes\n")
    real = generate.stream_hf
    monkeypatch.setattr(
        generate, "stream_hf", lambda *args: [*(found := real(*args))[:3], found[3] + 1, *found[4:]]
    )
    assert "same text: no, token 4 differs" in call(demo, 1).out
    assert "max_new_tokens is 0, expected" in call([*demo[:2], "--max-new-tokens", "0"], 2).err


def test_the_gain_is_the_measured_one() -> None:
    words = [generate.verdict(None, gain).partition(";")[0] for gain in (1.5, 1.01, 0.5)]
    assert words == ["1.5× faster", "about as fast", "2.0× slower"]
