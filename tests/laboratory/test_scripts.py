"""Scripts of eval/ on a tiny model: they run, and what they compute is right."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from eval import agreement, families, lab, memory
from selfspec.errors import CannotWrite
from selfspec.hub.models import load_model
from selfspec.model import fingerprint
from selfspec.model.backbone import Backbone


def test_a_record_says_how_it_was_made_without_this_machines_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "x.py"), "--model", str(tmp_path / "m b")])
    spec = importlib.util.find_spec("eval.papers.lossy")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert lab.command() == "python -m eval.papers.lossy --model 'm b'"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert lab.command() == "python x.py --model 'm b'"


# --- memory


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
    case = {"dtype": "bfloat16", "executor": "fused", "model_mb": 200.0}
    table = memory.load_table([case | {"loading_mb": 250.0, "generating_mb": 300.0}])
    last = "| bfloat16, fused | 200 MB | 250 MB = 1.25 x | 300 MB = 1.50 x |"
    assert table.splitlines()[-1] == last


def test_an_engine_keeps_a_common_prefix_once(tiny_model: str, tmp_path: Path) -> None:
    sizes = {"texts": 3, "prefix": 80, "length": 100, "requests": 10}
    memory.engine(tmp_path, model=tiny_model, dtype="float32", **sizes)
    found = json.loads((tmp_path / "summary.json").read_text())
    shared = found["shared"]
    assert 0 < shared["bytes"] < shared["bytes_without_sharing"]
    assert [entry[0] for entry in found["short"]] == list(range(1, 11))


# --- families


def test_the_page_of_families_says_what_runs_on_which_executor_and_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "families.md"
    families.main(out, only="llama,opt,mamba")
    lines = out.read_text(encoding="utf-8").splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    columns, *rows = table
    assert columns == list(families.COLUMNS)
    found = {row[0]: dict(zip(columns, row, strict=False)) for row in rows}
    assert found.keys() == {"llama", "opt", "mamba"}
    assert found["llama"]["text"] == found["opt"]["text"] == "exact"
    assert found["opt"]["executor"] == "generic"
    assert found["opt"]["why"] == "not fused: positions are not rotated"
    assert found["mamba"]["text"] == "refused"
    assert "cannot be rewound" in found["mamba"]["why"]
    assert "3 families: 2 exact, 1 refused." in lines
    assert capsys.readouterr().out.count("\n") == 3
    with pytest.raises(CannotWrite, match="is there already"):
        families.main(out, only="llama")


def test_a_family_whose_text_differs_is_wrong_and_not_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "_theirs", lambda *_: [0] * families.NEW_TOKENS)
    row = families.tried("llama")
    assert row.verdict == "WRONG"
    assert "another text from token" in row.reason
    with pytest.raises(typer.Exit):
        families.main(tmp_path / "page.md", only="llama")
