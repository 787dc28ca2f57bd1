"""`adapt`: from a model to heads that draft for it, with a simulated clock."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import selfspec
from selfspec.adaptation import BEFORE, HEADS, REPORT, STATE, TEXT, WAYS, Report, Row, _Adaptation
from selfspec.cli.main import main
from selfspec.errors import CannotWrite, InvalidData, InvalidOption, SelfspecError
from selfspec.heads.folder import known_folders, read_config
from selfspec.hub.models import CHECKPOINT
from selfspec.training import records, selfgen
from selfspec.training.options import seconds_of
from tests.authors import RECIPE
from tests.talks import WORDS, save_tiny


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `chat` and `base` (no chat template) of ten words, a recipe, and questions."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("chat", "base"):
        save_tiny(folder / name, vocab_size=len(WORDS))
    (folder / "base" / "chat_template.jinja").unlink()
    (folder / "recipe.yaml").write_text(RECIPE)
    rows = [{"turns": [f"a {'b ' * n}c"]} for n in range(7)]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def place_and_clock(monkeypatch: pytest.MonkeyPatch, models: Path) -> None:
    """Work in the folder of models; each reading of the clock advances it by 0.05 s."""
    monkeypatch.chdir(models)
    clock = itertools.count(step=0.05)
    monkeypatch.setattr("selfspec.adaptation.time.monotonic", lambda: next(clock))


def made(output: Path, **options: Any) -> Report:
    keywords = {"budget": "20s", "recipe": "recipe.yaml", "dtype": "float32"} | options
    return selfspec.adapt(keywords.pop("model", "chat"), output=output, **keywords)


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    """A finished output folder: a copy of one that is made once."""
    kept = models / "kept"
    if not kept.exists():
        made(kept)
    shutil.copytree(kept, tmp_path / "out")
    return tmp_path / "out"


def test_one_call_gives_text_heads_and_a_report(folder: Path) -> None:
    report = made(folder)  # a second run has nothing left to do
    assert {TEXT, HEADS, REPORT, STATE} <= {file.name for file in folder.iterdir()}
    assert report.answer_tokens > 0
    assert len(report.rows) >= 6
    # the kept folder's report names itself
    expected = report.markdown().replace(str(folder), str(Path("kept").absolute()))
    assert (folder / REPORT).read_text() == expected
    assert all(row.same for row in report.rows)
    positions, share = report.agreement["all"]
    assert positions == sum(n for kind, (n, _) in report.agreement.items() if kind != "all")
    assert 0.0 <= share <= 1.0
    speculator = selfspec.load("chat", heads=folder / HEADS, dtype="float32")
    assert speculator.heads is not None
    assert speculator.heads.config.temperatures
    plain = speculator.generate("a b c", max_new_tokens=12, speculate=False)
    assert speculator.generate("a b c", max_new_tokens=12).token_ids == plain.token_ids


def test_more_time_gives_more_text_and_further_fitted_heads(folder: Path) -> None:
    state = json.loads((folder / STATE).read_text())
    text = (folder / TEXT).read_bytes()
    report = made(folder, budget="40s")
    assert report.answer_tokens > state["tokens"]
    assert (folder / TEXT).read_bytes().startswith(text)
    assert report.spent_s > state["spent_s"]
    old, new = (read_config(folder / name)["training"] for name in (BEFORE, HEADS))
    assert new["before"] == old


def test_a_killed_run_resumes(tmp_path: Path) -> None:
    steps = ("writing", "fitting: step", "calibrating", "comparing")
    for step in steps:

        def killed(_spent: float, _budget: float, line: str, step: str = step) -> None:
            if line.startswith(step):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            made(tmp_path / "out", show=killed)
    lines: list[str] = []
    report = made(tmp_path / "out", show=lambda _spent, _budget, line: lines.append(line))
    assert not any(line.startswith(steps[:3]) for line in lines), "finished steps are not repeated"
    assert len(report.rows) >= 6


def test_more_time_resumes_after_a_killed_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(records, "write", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path / "out")
    assert (tmp_path / "out" / HEADS / CHECKPOINT).exists()
    assert made(tmp_path / "out", budget="30s").answer_tokens > 0


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        ({"budget": "20"}, InvalidOption, "budget"),
        ({"budget": "1s"}, InvalidOption, "budget"),
        ({"model": "base"}, InvalidData, "--raw"),
        ({"seed": 1}, InvalidOption, "seed"),
        ({"questions": "own.jsonl"}, InvalidOption, "questions"),
        ({"questions": "nothing.jsonl"}, InvalidData, "nothing.jsonl"),
    ],
)
def test_invalid_requests_are_refused_by_name(
    folder: Path, options: dict[str, Any], error: type[SelfspecError], field: str
) -> None:
    with pytest.raises(error, match=field):
        made(folder.parent / "new" if "model" in options else folder, **options)
    assert not (folder.parent / "new").exists()


@pytest.mark.parametrize("damage", ["{", '{"spent_s": "long"}'])
def test_a_damaged_state_is_named(folder: Path, damage: str) -> None:
    (folder / STATE).write_text(damage)
    with pytest.raises(InvalidData, match=STATE):
        made(folder)


def test_a_users_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / TEXT).write_text("mine")
    with pytest.raises(CannotWrite, match=TEXT):
        made(tmp_path)
    assert (tmp_path / TEXT).read_text() == "mine"
    (tmp_path / TEXT).write_text("")
    with pytest.raises(InvalidData, match=r"^0 answers could be written in this time.*--budget"):
        _Adaptation._features(Mock(folder=tmp_path))


def test_a_base_model_writes_continuations_of_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows so far are enough if the recipe has no more."""
    admits: Any = iter((selfgen.Admission.admit, Mock(side_effect=InvalidOption("no more rows"))))
    monkeypatch.setattr(selfgen.Admission, "admit", lambda *batch: next(admits)(*batch))
    report = made(tmp_path / "out", model="base", raw=True)
    rows = [json.loads(line) for line in (tmp_path / "out" / TEXT).read_text().splitlines()]
    assert {"prompt", "completion"} <= rows[0].keys()
    assert all("messages" not in row for row in rows)
    assert report.rows[0].task == "held out"


def test_a_users_questions_are_asked_or_held_out(tmp_path: Path) -> None:
    report = made(tmp_path / "out", questions="own.jsonl")
    assert [row.task for row in report.rows] == ["your questions"] * 2
    assert not report.used, "two prompts show nothing"
    rows = Path("own.jsonl").read_text().splitlines(keepends=True)
    Path("others.jsonl").write_text("".join(rows[::-1]))
    with pytest.raises(InvalidOption, match="questions"):  # held-out questions would be fitted now
        made(tmp_path / "out", questions="others.jsonl", budget="60s")
    assert tmp_path / "out" / HEADS not in known_folders()


@pytest.mark.parametrize(
    ("seconds", "drafts", "faster"),
    [
        ((1.0, 0.9, 0.5), True, True),
        ((1.0, 0.9, 0.5), False, False),  # both sides are prompt lookup: a difference is noise
        ((1.0, 0.4, 0.5), True, False),
        ((0.4, 0.9, 0.5), True, False),
    ],
)
def test_slower_heads_are_not_reported_as_faster(seconds: Any, drafts: bool, faster: bool) -> None:
    common: dict[str, Any] = {"model": "chat", "heads": Path(HEADS), "used": False, "spent_s": 1.0}
    common["drafts"] = drafts
    rows = [Row("task", 10, list(seconds), 5, same=True)] * 6
    report = Report(**common, answer_tokens=1, epochs=1, agreement={}, rows=rows)
    assert report.faster is faster
    assert report.tokens_per_s("without drafts") == pytest.approx(10 / seconds[0])
    assert report.gain("prompt lookup").ratio == pytest.approx(seconds[1] / seconds[2])


def test_differing_texts_are_compared_by_tokens_per_second() -> None:
    stats = Mock(decode_s=1.0, rounds=3)
    answers = [Mock(token_ids=[7] * (count + 1), stats=stats) for count in (8, 4, 16)]
    adaptation = Mock(_state=Mock(asked=0), _answer=Mock(side_effect=answers))
    row = _Adaptation._time_prompt(adaptation, Mock(), "task", "a", 64)
    assert row == Row("task", 16, [2.0, 4.0, 1.0], 3, same=False)


def test_faster_heads_are_used_by_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = json.loads((folder / STATE).read_text()) | {"finished": False}
    (folder / STATE).write_text(json.dumps(state))  # as before its last step
    monkeypatch.setattr(Report, "faster", True)
    assert made(folder).used
    assert folder / HEADS in known_folders()
    assert selfspec.load("chat", dtype="float32").heads is not None


def test_the_command_prints_the_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "chat", "--dtype", "float32", "--recipe", "recipe.yaml", "--budget", "20s"]
    assert main(["adapt", *flags, "--output", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# Heads for chat\n")
    assert all(way in out for way in WAYS)


def test_budgets_in_seconds() -> None:
    assert [seconds_of(text) for text in ("90s", "30m", "1.5h")] == [90.0, 1800.0, 5400.0]
