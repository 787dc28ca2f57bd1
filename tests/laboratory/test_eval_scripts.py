"""Scripts of eval/ on a tiny model: they run, and what they compute is right."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml
from torch import Tensor

from selfspec.errors import CannotWrite, InvalidOption
from selfspec.eval.results import Answer, Run
from selfspec.model.executors.fused_cpu import FusedExecutor
from tests.models import make_model
from tests.talks import make_tokenizer


def script(name: str) -> ModuleType:
    """A script as a module."""
    return importlib.import_module(f"eval.{name}")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model, heads and eight prompts; the current folder."""
    model = make_model("llama")
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    prompts = [" ".join(f"{number:03b}".replace("0", "a").replace("1", "b")) for number in range(8)]
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_record_says_how_it_was_made_without_this_machines_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "x.py"), "--model", str(tmp_path / "m b")])
    made_by = script("called").command
    spec = importlib.util.find_spec("eval.dialled.__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert made_by() == "python -m eval.dialled --model 'm b'"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert made_by() == "python x.py --model 'm b'"


# --- tuned_against_grid


def run_grid(output: Path, **options: Any) -> None:
    asked = {"model": "model", "heads": "logit-lens", "dtype": "float32", "suite": "prompts.jsonl"}
    small = {"limit": 2, "tune_limit": 3, "new_tokens": 6, "points": 4}
    script("tuned_against_grid").main(output, **asked, **small, **options)


@pytest.mark.parametrize(
    "found", [{"speculate": True, "drafter": "exit:layers=2,max_tokens=2"}, {"speculate": False}]
)
def test_the_tuned_setting_and_the_grid_answer_prompts_that_were_not_tuned_on(
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    found: dict[str, Any],
) -> None:
    """Whatever `tune` finds to pay on this machine, drafts or none."""
    grid = script("tuned_against_grid")
    tune = grid.tune
    monkeypatch.setattr(grid, "tune", lambda *given: replace(tune(*given), options=found))
    out = workplace / "out"
    run_grid(out)
    names = ["answers.jsonl", "run.yaml", "summary.json", "table.md"]
    assert sorted(path.name for path in out.iterdir()) == names
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    run = yaml.safe_load((out / "run.yaml").read_text())
    assert len(answers) == 2
    assert not {answer["id"] for answer in answers} & set(run["tuned_on"])
    assert run["tuned"]["options"] == found
    for answer in answers:
        assert len(answer["runs"]) == 2 + 4
        assert {"plain", "tuned"} <= answer["runs"].keys()
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["prompts"], summary["points"]) == (2, 4)
    assert capsys.readouterr().out.rstrip() == (out / "table.md").read_text().rstrip()
    with pytest.raises(InvalidOption, match="holds results"):
        run_grid(out)


def test_the_grids_best_is_found_with_hindsight_and_on_the_other_half() -> None:
    """By prompt a, b, c, d: one point is fast on a and c, the other on b and d, the first more."""
    seconds = {
        "plain": (4.0, 4.0, 4.0, 4.0),
        "tuned": (2.0, 2.0, 2.0, 2.0),
        "first": (1.0, 4.0, 1.0, 4.0),
        "second": (3.0, 3.0, 4.0, 2.0),
    }
    answers = [
        Answer(
            id=name,
            task="t",
            turn=1,
            repeat=1,
            runs={label: Run(seconds=times[at]) for label, times in seconds.items()},
        )
        for at, name in enumerate("abcd")
    ]
    found = script("tuned_against_grid").compared(answers, ["first", "second"], 0)
    assert found["best"] == "first"
    assert found["tuned_over_plain"]["ratio"] == 2.0
    assert found["best_over_plain"]["ratio"] == 16 / 10
    assert found["tuned_over_best"]["ratio"] == 10 / 8
    # b and d find the second, a and c the first: a 3, b 4, c 4, d 4
    assert found["searched_over_plain"]["ratio"] == 16 / 15
    assert found["tuned_over_searched"]["ratio"] == 15 / 8


# --- width_cost


def test_a_draft_tokens_time_is_measured_for_every_width(workplace: Path) -> None:
    script("width_cost").main(workplace / "out", model="model", dtype="float32", widths="8,32")
    found = json.loads((workplace / "out" / "width.json").read_text())["widths"]
    assert [row["width"] for row in found] == [8, 32, make_model("llama").config.vocab_size]
    assert all(row["draft_s"] > 0 and row["share_of_step"] > 0 for row in found)
    assert (workplace / "out" / "width.md").read_text().count("\n") == 5


# --- draft_invariance


def run_invariance(output: Path) -> None:
    asked = {"model": "model", "heads": "logit-lens", "dtype": "float32", "suite": "prompts.jsonl"}
    script("draft_invariance").main(output, **asked, questions=None, limit=2, new_tokens=8)


def test_no_draft_moves_a_bit(workplace: Path) -> None:
    run_invariance(workplace / "out")
    drafts = json.loads((workplace / "out" / "summary.json").read_text())["drafts"]
    assert {name: found["differing"] for name, found in drafts.items()} == {"default": 0, "bold": 0}
    assert all(found["positions"] == 16 for found in drafts.values())


def test_kernels_that_depend_on_the_number_of_rows_are_found(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = FusedExecutor.logits

    def depends_on_rows(self: FusedExecutor, rows: Tensor) -> Tensor:
        return exact(self, rows) * (1 + 2**-22 * (len(rows) >= 4))

    monkeypatch.setattr(FusedExecutor, "logits", depends_on_rows)
    with pytest.raises(SystemExit):
        run_invariance(workplace / "out")
    drafts = json.loads((workplace / "out" / "summary.json").read_text())["drafts"]
    assert drafts["bold"]["differing"] > 0


# --- load_memory


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's figures are Linux's")
def test_peaks_of_loading_are_those_of_the_kernel(workplace: Path) -> None:
    found = script("load_memory").loaded("model", "float32", "generic")
    assert found["executor"] == "generic"
    assert 0.0 < found["model_mb"] < 1.0
    assert found["loading_mb"] <= found["generating_mb"]


def test_peaks_are_shown_beside_the_weights() -> None:
    case = {"dtype": "bfloat16", "executor": "fused", "model_mb": 200.0}
    table = script("load_memory").table([case | {"loading_mb": 250.0, "generating_mb": 300.0}])
    last = "| bfloat16 | fused | 200 MB | 250 MB = 1.25 x | 300 MB = 1.50 x |"
    assert table.splitlines()[-1] == last


# --- families


def test_the_page_of_families_says_what_runs_on_which_executor_and_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    families, out = script("families"), tmp_path / "families.md"
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
    families = script("families")
    monkeypatch.setattr(families, "_theirs", lambda *_: [0] * families.NEW_TOKENS)
    row = families.tried("llama")
    assert row.verdict == "WRONG"
    assert "another text from token" in row.reason
    with pytest.raises(typer.Exit):
        families.main(tmp_path / "page.md", only="llama")


# --- many_texts


def test_a_step_of_many_texts_is_measured_by_how_many_there_are(workplace: Path) -> None:
    asked = {"dtypes": "float32", "texts": "1,3", "in_front": 5, "repeats": 1}
    script("many_texts").main(workplace / "found", model="model", **asked)
    found = json.loads((workplace / "found" / "summary.json").read_text())["found"]
    assert [entry["weights"] for entry in found] == ["as in the file", "numbers"]
    assert all(set(entry["ms"]) == {"1", "3"} for entry in found)
    table = (workplace / "found" / "table.md").read_text()
    assert "(1.00)" in table
    assert "| texts | 1 | 3 |" in table
