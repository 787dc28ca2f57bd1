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
from selfspec.eval import results
from selfspec.eval.answers import Answer, Run
from selfspec.eval.summary import summarise
from tests.models import make_model
from tests.packing import EXACT
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


# --- two_runs


def finished(folder: Path, seconds: dict[str, list[float]], **run: Any) -> Path:
    """A folder of a bench with such seconds by method and prompt."""
    answers = [
        Answer(
            id=str(at),
            task="math",
            turn=1,
            repeat=1,
            new_tokens=2,
            runs={
                label: Run(seconds=times[at], arrivals=[(1, 1.0), (1, 1.0)])
                for label, times in seconds.items()
            },
        )
        for at in range(len(seconds["plain"]))
    ]
    described = {
        name: {"method": name, "source": "", "setting": {}, "chosen_from": []} for name in seconds
    }
    facts: dict[str, Any] = {part: {} for part in ("questions", "model", "speculation")}
    machine = {"threads": len(folder.name)}
    results.begin(folder, {"run": run, "machine": machine, **facts}, resume=False)
    results.write(folder, summarise(answers, described))
    return folder


def test_runs_agree_where_their_intervals_meet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = [4.0, 4.0, 4.0]
    first = finished(tmp_path / "a", {"plain": plain, "fast": [2.0, 3.0, 4.0]})
    second = finished(tmp_path / "bb", {"plain": plain, "fast": [2.0, 2.5, 3.5]})
    script("two_runs").main(first, second)
    printed = capsys.readouterr().out
    assert "machine threads: 1, then 2" in printed
    # overall and math, all answers and those without loops
    assert "4 of 4 speed-ups agree within their intervals" in printed
    assert "furthest apart: fast over plain" in printed
    assert "1.333 (" in printed
    assert "1.500 (" in printed
    assert "12.5% apart" in printed


def test_runs_whose_intervals_do_not_meet_give_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = [4.0, 4.0]
    first = finished(tmp_path / "a", {"plain": plain, "fast": [2.0, 2.1]})
    second = finished(tmp_path / "b", {"plain": plain, "fast": [1.0, 1.1]})
    with pytest.raises(SystemExit) as caught:
        script("two_runs").main(first, second)
    assert caught.value.code == 1
    printed = capsys.readouterr().out
    assert printed.count("no overlap: fast over plain") == 4
    assert "0 of 4 speed-ups agree" in printed


def test_single_prompts_have_no_interval_and_other_commands_are_refused(tmp_path: Path) -> None:
    one = finished(tmp_path / "a", {"plain": [4.0], "fast": [2.0]}, limit=1)
    same = finished(tmp_path / "b", {"plain": [4.0], "fast": [1.0]}, limit=1)
    other = finished(tmp_path / "c", {"plain": [4.0, 4.0], "fast": [2.0, 2.0]}, limit=2)
    with pytest.raises(SystemExit, match="no speed-up over several prompts"):
        script("two_runs").main(one, same)
    with pytest.raises(InvalidOption, match="two commands: run limit is 1 in a, 2 in c"):
        script("two_runs").main(one, other)


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
    for (kind, name), right in EXACT.items():

        def depends_on_rows(self: Any, rows: Tensor, exact: Any = right) -> Tensor:
            product: Tensor = exact(self, rows)
            return product * (1 + 2**-22 * (len(rows) >= 4))

        monkeypatch.setattr(kind, name, depends_on_rows)
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
    case = {"dtype": "bfloat16", "executor": "packed", "model_mb": 200.0}
    table = script("load_memory").table([case | {"loading_mb": 250.0, "generating_mb": 300.0}])
    last = "| bfloat16 | packed | 200 MB | 250 MB = 1.25 x | 300 MB = 1.50 x |"
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
