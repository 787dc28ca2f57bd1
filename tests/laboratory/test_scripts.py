"""Scripts of eval/ on a tiny model: they run, and what they compute is right."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from eval import agreement, compare, families, lab, memory, micro, two_versions
from eval.compare import ASSISTED, INT4, LLAMA, LOOKUP, NUMBERS, OPENVINO, THEIRS
from selfspec.errors import CannotWrite, InvalidOption
from selfspec.hub.models import load_model
from selfspec.model import fingerprint
from selfspec.model.backbone import Backbone
from tests.gguf_models import write_model


def test_a_record_says_how_it_was_made_without_this_machines_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "x.py"), "--model", str(tmp_path / "m b")])
    spec = importlib.util.find_spec("eval.papers.specbound")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert lab.command() == "python -m eval.papers.specbound --model 'm b'"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert lab.command() == "python x.py --model 'm b'"


def test_agreement_is_counted_by_kind_and_place(
    tiny_model: str, prompts: str, tmp_path: Path
) -> None:
    loaded, _, files = load_model(tiny_model, dtype="float32")
    backbone = Backbone(loaded, fingerprint=fingerprint.of_loaded(loaded, files.stamps))
    heads = lab.untrained(backbone, 0, "deep-fused")
    heads.config = replace(heads.config, base_fingerprint=backbone.fingerprint)
    heads.save(tmp_path / "heads")
    agreement.main([str(tmp_path / "heads")], tmp_path / "out", tiny_model, prompts, new_tokens=9)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    ((right,),) = (found.values() for found in summary["right"].values())
    numbers = [number for _, number in right["all"]]
    assert numbers[0] > numbers[1] > numbers[2] > 0, "answers of at least three tokens"
    assert all(0 <= count <= number for count, number in right["all"])
    assert "/" in (tmp_path / "out" / "table.md").read_text()


# --- memory


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's figures are Linux's")
def test_peaks_of_loading_are_those_of_the_kernel(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "apart", lambda work, *given: work(*given))
    memory.load(tmp_path, model=tiny_model, dtypes="float32", executors="generic")
    (found,) = json.loads((tmp_path / "summary.json").read_text())["cases"]
    assert found["executor"] == "generic"
    assert 0.0 < found["model_mb"] < 1.0
    assert found["loading_mb"] <= found["generating_mb"]


# --- families


def test_the_page_of_families_says_what_runs_on_which_executor_and_why_not(tmp_path: Path) -> None:
    out = tmp_path / "families.md"
    families.main(out, only="llama,opt,mamba")
    lines = out.read_text(encoding="utf-8").splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    columns, *rows = table
    found = {row[0]: dict(zip(columns, row, strict=False)) for row in rows}
    assert found.keys() == {"llama", "opt", "mamba"}
    assert found["llama"]["text"] == found["opt"]["text"] == "exact"
    assert found["opt"]["executor"] == "generic"
    assert found["opt"]["why"] == "not fused: positions are not rotated"
    assert found["mamba"]["text"] == "refused"
    assert "cannot be rewound" in found["mamba"]["why"]
    assert "3 families: 2 exact, 1 refused." in lines
    with pytest.raises(CannotWrite, match="is there already"):
        families.main(out, only="llama")


def test_a_family_whose_text_differs_is_wrong_and_not_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "hugging_face", lambda *_: ([0] * families.NEW_TOKENS, None))
    with pytest.raises(typer.Exit):
        families.main(tmp_path / "page.md", only="llama")
    assert re.search(r"\| WRONG \|.*another text from token", (tmp_path / "page.md").read_text())


# --- ways of decoding


def test_a_setting_without_a_name_is_refused() -> None:
    for text in ("ngram", "=ngram", "a=", "plain=ngram"):
        with pytest.raises(InvalidOption, match="is not NAME=DRAFTER"):
            compare.named_settings([text])


# --- versions


class Fake:
    """Answers with as many seconds as it is told, and with a part of its own for one prompt."""

    def __init__(self, seconds: float, odd: str = "", part: str = "") -> None:
        self.seconds, self.odd, self.part = seconds, odd, part
        self.asked: list[Mapping[str, Any]] = []

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        own = {self.part: [3, 4]} if request["prompt"] == self.odd else {}
        counts = {"rounds": len(request["prompt"])}
        answer = {"ids": [1, 2], "logits": "ab", "counts": counts, "seconds": self.seconds}
        return answer | own


def test_every_prompt_is_asked_plainly_and_with_drafts_of_both() -> None:
    versions = [Fake(2.0), Fake(1.0)]
    found = two_versions.answers([one.ask for one in versions], ["a", "bc"], 7)
    assert list(zip(found.prompt, found.way, strict=True)) == [
        *(("a", "plain"), ("a", "default"), ("bc", "plain"), ("bc", "default"))
    ]
    for version in versions:
        assert [request.get("speculate") for request in version.asked] == [False, None] * 2
        assert all(request["max_new_tokens"] == 7 for request in version.asked)
    assert set(found.differ) == {""}
    assert two_versions.different(found).empty
    for row in two_versions.speeds(found).itertuples(index=False):
        assert tuple(row) == (1.0, 2.0, 2.0, 2.0, 2.0, 2.0)


@pytest.mark.parametrize("part", ["ids", "logits", "counts"])
def test_what_differs_is_named(part: str) -> None:
    found = two_versions.answers([Fake(1.0).ask, Fake(1.0, "bc", part).ask], ["a", "bc"], 7)
    assert list(found.differ) == ["", "", part, part]
    unlike = [("plain", part, "bc"), ("default", part, "bc")]
    assert [*two_versions.different(found).itertuples(index=False, name=None)] == unlike


# --- llama.cpp and OpenVINO, by stand-ins

_LLAMA = """
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

_OPENVINO = """
from types import SimpleNamespace

GenerationConfig, StreamerBase = SimpleNamespace, object
StreamingStatus, TokenizedInputs = SimpleNamespace(RUNNING=0), lambda ids, mask: (ids, mask)

class LLMPipeline:
    def __init__(self, model, device, INFERENCE_NUM_THREADS, prompt_lookup=False):
        assert device == "CPU" and INFERENCE_NUM_THREADS == 1
        self.first, self.lookup = 100 * model.endswith("int4"), prompt_lookup

    def generate(self, inputs, config, streamer):
        ids, mask = inputs
        assert ids.shape == mask.shape == (1, len(ids[0])) and mask.all()
        assert config.ignore_eos and not config.do_sample
        assert getattr(config, "num_assistant_tokens", 0) == 10 * self.lookup
        tokens = range(self.first, self.first + config.max_new_tokens)
        for token in tokens:
            assert streamer.write(token) == StreamingStatus.RUNNING
        streamer.end()
        return SimpleNamespace(tokens=[[*tokens]])
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text(_LLAMA, encoding="utf-8")
    (package / "llama_speculative.py").write_text("LlamaPromptLookupDecoding = dict\n")
    (tmp_path / "openvino_genai.py").write_text(_OPENVINO, encoding="utf-8")
    (tmp_path / "openvino.py").write_text("def Tensor(array): return array\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    write_model(tmp_path / "it.gguf")


@pytest.mark.usefixtures("stand_in")
def test_all_ways_answer_in_turns(tmp_path: Path) -> None:
    questions, out = tmp_path / "questions.jsonl", tmp_path / "results"
    questions.write_text('{"prompt": "two words", "task": "chat"}\n' * 2, encoding="utf-8")
    compare.main(
        out,
        ["chain=exit:layers=1,max_tokens=1", "text=ngram;row=0"],
        llama_cpp=sys.executable,
        openvino=sys.executable,
        int4=tmp_path / "int4",
        model=str(tmp_path / "it.gguf"),
        heads="logit-lens",
        suite=str(questions),
        new_tokens=6,
        threads=1,
        numbers=True,
        in_front=20,
    )
    answers = [json.loads(line) for line in (out / "answers.jsonl").open()]
    theirs = [name + drafts for name in (LLAMA, OPENVINO, INT4) for drafts in ("", LOOKUP)]
    more = [THEIRS, *(THEIRS + name for name in ASSISTED)]
    ours = ["plain", "chain", "text"]
    for answer in answers:
        assert answer["prompt_tokens"] >= 20
        runs = answer["runs"]
        assert runs.keys() == {*theirs, *ours, *more, *(NUMBERS + name for name in ours)}
        assert {name for name, run in runs.items() if not run["equal"]} == {*theirs}
        assert all(len(run["arrivals"]) > 1 for run in runs.values())
    summary = json.loads((out / "summary.json").read_text())
    assert summary["methods"]["text"]["setting"] == {"drafter": "ngram", "costs": "row=0"}
    assert summary["all"]["overall"][THEIRS]["over_plain"]["ratio"] > 0
    page = (out / "table.md").read_text().split("## Over llama.cpp")[1]
    assert re.search(r"\| llama.cpp +\| 1.000 \(1.000 to 1.000\) +\| 1.00 ", page)
    assert "| numbers, chain " in page


def test_who_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="Give --openvino"):
        compare.main(tmp_path, int4=tmp_path)
    nowhere = str(tmp_path / "python")
    with pytest.raises(InvalidOption, match="python: No such file"), lab.answering([nowhere]):
        pass


@pytest.mark.usefixtures("stand_in")
def test_passes_of_all_are_timed(tmp_path: Path) -> None:
    files: dict[str, Any] = {"output": tmp_path / "passes", "model": tmp_path / "it.gguf"}
    micro.passes(python=sys.executable, rows="1,3", in_front=20, threads=1, repeats=1, **files)
    found = json.loads((tmp_path / "passes/summary.json").read_text())
    assert found["seconds"].keys() == {"blocks", "numbers", LLAMA}
    assert all(seconds.keys() == {"1", "3"} for seconds in found["seconds"].values())
    assert found["limit_s"]["blocks"] < found["limit_s"]["numbers"]
