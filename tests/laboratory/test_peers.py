"""The comparison with llama.cpp, on a tiny file, with a stand-in for llama-cpp-python."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from eval import micro
from eval.peers import DEFAULT, LLAMA, LOOKUP, NUMBERS, PLAIN, THEIRS, main
from tests.gguf_models import write_model

_STAND_IN = """
class Llama:
    def __init__(self, model_path, draft_model=None, **options):
        assert model_path.endswith(".gguf") and options["n_threads"] == 1
        print("what libraries print")
        self.first = 0 if draft_model is None else 100

    def reset(self):
        self.n_tokens = 0

    def eval(self, ids):
        assert self.n_tokens == (0 if len(ids) == 20 else 20)
        self.n_tokens += len(ids)

    def generate(self, ids, temp, **options):
        assert temp == 0.0 and all(isinstance(one, int) for one in ids)
        yield from range(self.first, 1000)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package, and a file for it."""
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text(_STAND_IN, encoding="utf-8")
    (package / "llama_speculative.py").write_text("LlamaPromptLookupDecoding = dict\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    write_model(tmp_path / "it.gguf")


@pytest.mark.usefixtures("stand_in")
def test_all_methods_answer_in_turns(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "two words", "task": "chat"}\n' * 2, encoding="utf-8")
    main(
        python=sys.executable,
        output=tmp_path / "results",
        model=tmp_path / "it.gguf",
        suite=str(questions),
        new_tokens=6,
        threads=1,
        numbers=True,
        in_front=20,
    )
    answers = [json.loads(line) for line in (tmp_path / "results/answers.jsonl").open()]
    for answer in answers:
        assert answer["prompt_tokens"] == 20
        count = len(answer[PLAIN]["token_ids"])
        assert answer[LLAMA]["token_ids"] == list(range(count))
        assert answer[LOOKUP]["token_ids"] == list(range(100, 100 + count))
        for name in (PLAIN, DEFAULT, NUMBERS, THEIRS):
            assert answer[name]["token_ids"] == answer[PLAIN]["token_ids"], name
            assert 0 < answer[name]["first_s"] < answer[name]["seconds"]
    found = json.loads((tmp_path / "results/summary.json").read_text())["tables"]
    assert found[LLAMA]["whole"]["ratio"] == 1
    assert found[PLAIN]["equal_to_plain"] == 2
    assert found[LLAMA]["equal_to_plain"] == 0
    assert "| default |" in (tmp_path / "results/table.md").read_text()


@pytest.mark.usefixtures("stand_in")
def test_passes_of_all_are_timed(tmp_path: Path) -> None:
    micro.passes(
        python=sys.executable,
        output=tmp_path / "passes",
        model=tmp_path / "it.gguf",
        rows="1,3",
        in_front=20,
        threads=1,
        repeats=1,
    )
    found = json.loads((tmp_path / "passes/summary.json").read_text())
    assert found["seconds"].keys() == {"blocks", "numbers", LLAMA}
    assert all(seconds.keys() == {"1", "3"} for seconds in found["seconds"].values())
    assert found["limit_s"]["blocks"] < found["limit_s"]["numbers"]
