"""Figures and the report: what is picked and computed, then that files hold it, escaped."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from selfspec.cli.main import main
from selfspec.errors import InvalidData
from selfspec.eval import plots, report, results, tables
from selfspec.eval.answers import Answer, Run
from selfspec.eval.results import Results
from selfspec.eval.summary import summarise
from selfspec.eval.tables import Table

READ = "How to read this"
BEST = (
    "Fastest of 2, speculation: 2.00 times as fast as plain decoding on our runtime "
    "(95 %: 2.00 to 2.00), 2 prompts, all 2 texts equal."
)
PNG = b"\x89PNG"
SWEPT = [f"speculation(exit.threshold={tau})" for tau in (0.9, 0.1)]
LABELS = ["plain", "speculation", "no-width-bound", *SWEPT]
SECONDS = dict(zip(LABELS, (4.0, 2.0, 5.0, 3.2, 2.5), strict=True))
COUNTS: dict[str, dict[str, float]] = {
    "drafted_by_layer": {"2": 4, "10": 1},
    "accepted_by_layer": {"2": 3},
    "drafted_by_index": {"1": 5},
    "accepted_by_index": {"1": 3},
}


def described(label: str) -> dict[str, Any]:
    value = re.search(r"=(.*)\)", label)
    return {
        "method": label.split("(")[0],
        "source": "<source> & more",
        "setting": {"drafter": f"exit:threshold={value[1]}"} if value else {},
        "swept": {"exit.threshold": float(value[1])} if value else {},
        "chosen_from": [],
    }


@pytest.fixture
def summary() -> dict[str, Any]:
    """Two prompts; three methods and a sweep of two values, in falling order."""
    runs = {
        label: Run(
            seconds=seconds,
            arrivals=[(1, 1.0), (3, 1.0)] if label != "plain" else [(1, 1.0)] * 4,
            equal=True,
            counts={} if label == "plain" else COUNTS,
        )
        for label, seconds in SECONDS.items()
    }
    answers = [
        Answer(id=name, task="math", turn=1, repeat=1, new_tokens=4, runs=runs) for name in "ab"
    ]
    return summarise(answers, {label: described(label) for label in LABELS})


@pytest.fixture
def run(summary: dict[str, Any]) -> Results:
    record = {
        "run": {"suite": "s.jsonl", "max_new_tokens": 4, "repeats": 1, "seed": 0},
        "questions": {"reported": 2, "settings_chosen_on": ["x"]},
        "model": {"name": "<b>model", "dtype": "float32", "device": "cpu", "heads": "h"},
        "speculation": {"drafter": "exit:threshold=0.9"},
        "machine": {"threads": 1},
    }
    return Results("first", record, summary)


# --- figures


def test_the_chart_holds_all_methods_but_no_sweep(summary: dict[str, Any]) -> None:
    found = plots.methods_statistic(plots.methods_data(summary), "plain")
    assert (found.unit, found.prompts) == ("× plain", 2)
    assert found.at == ["plain", "speculation", "no-width-bound"]
    assert found.speed_up == [1.0, 2.0, 0.8]
    assert found.low == found.high == found.speed_up  # both prompts took the same time


def test_where_the_time_goes_in_percent_of_plain_decoding(summary: dict[str, Any]) -> None:
    seconds = {"prefill": 1.0, "verify": 3.0}
    summary["parts_s"] = {"plain": seconds, "speculation": seconds | {"verify": 2.0, "heads": 0.5}}
    summary["parts_s"][SWEPT[0]] = seconds
    data = plots.profile_data(summary)
    assert list(data) == ["plain", "speculation"]
    found = plots.profile_statistic(data, "plain", 2)
    assert found is not None
    assert found.names == ["plain", "speculation"]
    assert found.percent["prefill"] == [25.0, 25.0]
    assert found.percent["verify"] == [75.0, 50.0]
    assert found.percent["heads"] == [0.0, 12.5]
    assert plots.profile_statistic(data, "hugging-face", 2) is None


def test_lossy_methods_are_marked(summary: dict[str, Any]) -> None:
    summary["methods"]["speculation"]["lossy"] = True
    label = "speculation (lossy)"
    assert plots.methods_data(summary)[1][0] == label
    assert tables.acceptance_table(summary).rows[0][0] == label


def test_acceptance_in_percent_of_what_was_drafted(summary: dict[str, Any]) -> None:
    rows = tables.acceptance_table(summary).rows
    assert [row[0] for row in rows] == LABELS[1:]
    assert rows[0][1:] == ["2: 75%, 10: 0%", "1: 60%"]


def test_speed_ups_are_shown_over_plain_decoding_where_it_was_measured(
    summary: dict[str, Any],
) -> None:
    assert tables.base_of(summary) == "plain"
    for found in summary["all"]["overall"].values():
        found["over_plain"] = None
    assert tables.base_of(summary) is None
    assert tables.base_of({"all": {}}) is None


def test_the_verdict_is_the_fastest_lossless_method_or_says_that_none_is(
    summary: dict[str, Any],
) -> None:
    assert tables.verdict(summary) == BEST
    summary["unequal"]["speculation"] = 1
    assert tables.verdict(summary).endswith("1 of 2 texts differ.")
    summary["methods"]["speculation"]["lossy"] = True
    words = "Nothing was faster than plain decoding on our runtime; no-width-bound: 0.80 times"
    assert tables.verdict(summary).startswith(words)
    assert tables.verdict({**summary, "all": {}}).startswith("No speed-up can be told")


def test_each_figure_is_a_file(tmp_path: Path) -> None:
    gains = plots.Gains("× plain", 2, ["a", "b"], [1.0, 2.0], [0.9, 1.5], [1.1, 2.2])
    plots.save_methods(gains, tmp_path / "a.png")
    plots.save_profile(plots.Profile("plain", 2, ["a"], {"verify": [90.0]}), tmp_path / "b.png")
    for name in "ab":
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)


# --- the report


def test_the_report_holds_every_table_and_picture(run: Results, tmp_path: Path) -> None:
    pages = report.write([run, run._replace(name="second")], tmp_path / "out")
    assert [page.name for page in pages] == ["report.md", "report.html"]
    pictures = [f"{number}-methods.png" for number in (1, 2)]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *pictures,
        "report.md",
        "report.html",
    }
    markdown = pages[0].read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)", markdown, re.MULTILINE) == ["first", "second", READ]
    assert markdown.split("\n\n")[2:4] == [f"**{BEST}**", "![Methods](1-methods.png)"]
    assert re.findall(r"\]\((.*?)\)", markdown) == pictures
    assert "chosen on 1 questions that are not among those reported: x." in markdown
    for table in tables.tables(run.summary):
        assert f"### {table.title}" in markdown or not table.rows


def test_the_page_stands_alone_and_is_escaped(run: Results, tmp_path: Path) -> None:
    _, page = report.write([run], tmp_path)
    text = page.read_text(encoding="utf-8")
    sources = re.findall(r'src="(.{0,30})', text)
    assert len(sources) == 1
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "<b>" not in text
    assert "&lt;b&gt;model" in text
    assert "&lt;source&gt; &amp; more" in text


def test_names_of_tables_and_pictures_are_escaped_too(tmp_path: Path) -> None:
    picture = report.Picture('"><i>', tmp_path / "p.png")
    picture.path.write_bytes(PNG)
    table = Table("<t>", ["<h>"], [["<c>"]])
    text = report.as_html([report.Section("<s>", "<v>", ["<w>"], [table], [picture])])
    for letter in "itchsvw":
        assert f"<{letter}>" not in text
        assert f"&lt;{letter}&gt;" in text


def test_without_matplotlib_a_notice_takes_the_place_of_pictures(
    run: Results,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "selfspec.eval.plots", None)
    monkeypatch.delattr("selfspec.eval.plots")
    with caplog.at_level(logging.INFO, "selfspec"):
        assert report.pictures(run, tmp_path, 1) == []
    assert "they need matplotlib" in caplog.text


def test_failures_are_in_the_report(run: Results) -> None:
    run.summary["failures"].append("q4, turn 1: too long")
    assert report.described(run)[-1] == "Failed: q4, turn 1: too long"


# --- the command


def test_the_command_reads_folders_of_bench_and_names_its_pages(
    run: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        results.begin(tmp_path / name, run.run, resume=False)
        results.write(tmp_path / name, run.summary)
    folders = [str(tmp_path / name) for name in ("one", "two")]
    assert main(["report", *folders, "--output", str(tmp_path / "out")]) == 0
    pages = capsys.readouterr().out.split()
    assert [Path(page).name for page in pages] == ["report.md", "report.html"]
    assert re.findall(r"^## (.*)", Path(pages[0]).read_text(), re.MULTILINE) == ["one", "two", READ]


def test_a_folder_without_a_finished_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "holds no finished run of selfspec bench" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text("a: [")
    with pytest.raises(InvalidData, match="holds no finished run"):
        results.read(tmp_path)
