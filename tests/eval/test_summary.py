"""Figures and tables of answers written by hand: eight answers, two methods and a base."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest

from selfspec.errors import InvalidData
from selfspec.eval import answers, tables
from selfspec.eval.answers import Answer, Run
from selfspec.eval.quality import Quality
from selfspec.eval.quality import summary as quality_summary
from selfspec.eval.summary import by_task, seconds_by_prompt, summarise
from selfspec.eval.tables import Table

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "plain", "source": "by hand", "setting": {}, "chosen_from": []},
    "fast": {
        "method": "fast",
        "source": "by hand",
        "setting": {"speed": 2, "exit_layers": [4, 20]},
        "chosen_from": ["fast(speed=1)", "fast(speed=2)"],
    },
}


def run(seconds: float, *arrivals: tuple[int, float], **values: Any) -> Run:
    return Run(seconds=seconds, arrivals=list(arrivals), equal=True, **values)


PLAIN = run(4.0, (1, 1.0), (1, 1.0), (1, 1.0), (1, 1.0))
FAST = run(
    2.0,
    (1, 1.0),
    (3, 0.9),
    counts={
        "seconds": {"prefill": 1.0, "draft": 0.25, "verify": 0.5},
        "drafted_by_layer": {"2": 1, "4": 2},
        "accepted_by_layer": {"2": 1, "4": 1},
        "drafted_by_index": {"1": 1, "2": 1, "3": 1},
        "accepted_by_index": {"1": 1, "2": 1},
    },
)


def answer(name: str = "q", task: str = "math", turn: int = 1, **values: Any) -> Answer:
    given: dict[str, Any] = {"repeat": 1, "new_tokens": 4, "runs": {"plain": PLAIN, "fast": FAST}}
    return Answer(id=name, task=task, turn=turn, **given | values)


ANSWERS = [
    answer("q1"),
    answer("q2", "chat"),
    answer("q2", "chat", 2, runs={"fast": run(8.0, (1, 1.0), (3, 7.0)), "plain": PLAIN}),
    answer("q3", "chat", repeated=0.31),
]


@pytest.fixture
def summary() -> dict[str, Any]:
    return summarise(ANSWERS, METHODS)


def test_a_speed_up_sums_the_turns_of_a_question(summary: dict[str, Any]) -> None:
    gain = summary["all"]["overall"]["fast"]["over_plain"]
    assert gain["ratio"] == 16.0 / 14.0
    assert gain["prompts"] == 3
    assert gain["worst"] == 8.0 / 10.0
    assert gain["low"] <= gain["ratio"] <= gain["high"]
    assert summary["all"]["math"]["fast"]["over_plain"]["ratio"] == 2.0
    assert summary["all"]["overall"]["plain"]["over_plain"]["ratio"] == 1.0


def test_figures_over_a_base_that_was_not_measured_are_missing(summary: dict[str, Any]) -> None:
    assert summary["all"]["overall"]["fast"]["over_hugging-face"] is None
    titles = [table.title for table in tables.tables(summary)]
    assert not [title for title in titles if "Hugging Face" in title]


def test_looping_answers_are_counted_and_left_out_of_the_second_headline(
    summary: dict[str, Any],
) -> None:
    assert summary["loop_share"] == {"math": 0.0, "chat": 1 / 3, "overall": 0.25}
    assert summary["without_loops"]["overall"]["fast"]["over_plain"]["ratio"] == 12.0 / 12.0
    assert summary["without_loops"]["chat"]["fast"]["answers"] == 2


def test_compression_and_acceptance(summary: dict[str, Any]) -> None:
    assert summary["all"]["overall"]["fast"]["compression_rate"] == 12 / 4
    assert summary["all"]["overall"]["fast"]["acceptance_rate"] == 6 / 9
    assert summary["all"]["overall"]["plain"]["acceptance_rate"] is None
    assert summary["acceptance"]["fast"] == {
        "by_layer": {"2": [3, 3], "4": [6, 3]},
        "by_index": {"1": [3, 3], "2": [3, 3], "3": [3, 0]},
    }


def test_latency(summary: dict[str, Any]) -> None:
    found = summary["latency"]["fast"]
    assert found["first_token_s"] == 1.0
    assert found["token_p50_s"] == pytest.approx(0.3)
    assert found["token_mean_s"] == pytest.approx((9 * 0.3 + 7.0) / 12)
    assert found["answer_s"] == 14.0 / 4
    assert found["tokens_per_s"] == 16 / 14.0
    assert summary["parts_s"]["fast"] == {"prefill": 3.0, "draft": 0.75, "verify": 1.5}
    assert summary["parts_s"]["plain"] == {}


def test_a_failed_run_is_left_out_for_both_and_reported() -> None:
    broken = answer("q4", runs={"plain": PLAIN, "fast": Run(error="ValueError: no")})
    unmeasured = Answer(id="q5", task="QA", turn=1, repeat=1, error="too long")
    found = summarise([*ANSWERS, broken, unmeasured], METHODS)
    assert found["all"]["overall"]["fast"]["over_plain"]["prompts"] == 3
    assert found["all"]["overall"]["plain"]["over_plain"]["prompts"] == 4
    assert found["failures"] == ["q4, turn 1, fast: ValueError: no", "q5, turn 1: too long"]
    assert found["answers"] == 5
    assert seconds_by_prompt([broken], "fast", "plain") == ({}, {})


def test_outputs_that_differ_from_plain_decoding_are_counted() -> None:
    odd = answer("q4", runs={"plain": PLAIN, "fast": Run(seconds=1.0, arrivals=[(4, 1.0)])})
    assert summarise([*ANSWERS, odd], METHODS)["unequal"] == {"plain": 0, "fast": 1}


def test_groups_keep_spec_benchs_order_and_end_with_all() -> None:
    found = by_task([answer(task="law"), answer(task="QA"), answer(task="math")])
    assert list(found) == ["math", "QA", "law", "overall"]
    assert len(found["overall"]) == 3


def test_nothing_measured_gives_empty_tables() -> None:
    summary = summarise([Answer(id="q", task="QA", turn=1, repeat=1, error="too long")], METHODS)
    assert summary["all"] == {}
    rows = {table.title: table.rows for table in tables.tables(summary)}
    assert len(rows.pop("Methods")) == 2
    assert not any(cell for lines in rows.values() for line in lines for cell in line)


# --- texts, memory, the harness

TEXT = Quality(
    text="the cat sat on the rug",
    plain_text="the cat sat on the mat",
    reference="the cat sat on the mat",
    tokens=6,
    plain_tokens=6,
    first_divergence=5,
    edit_distance=1,
    log_likelihood=-9.0,
    plain_log_likelihood=-6.0,
)
LOSSY = METHODS | {"fast": METHODS["fast"] | {"lossy": True}}


@pytest.fixture
def judged() -> dict[str, Any]:
    """One answer of two was looked at."""
    fast = dataclasses.replace(FAST, quality=TEXT)
    pair = [answer("q1", runs={"plain": PLAIN, "fast": fast}), answer("q2", "chat")]
    memory = {
        "prompt_tokens": 9,
        "new_tokens": 4,
        "device": "cpu",
        "before_bytes": 2**30,
        "growth_bytes": {"plain": 2**20, "fast": 3 * 2**19},
    }
    return summarise(
        [dataclasses.replace(entry, outside_s=0.03) for entry in pair], LOSSY, memory=memory
    )


def table_of(summary: dict[str, Any], start: str) -> Table:
    (found,) = [table for table in tables.tables(summary) if table.title.startswith(start)]
    return found


def test_quality_is_summed_up_by_task_for_methods_that_were_looked_at(
    judged: dict[str, Any],
) -> None:
    assert list(judged["quality"]) == ["fast"]
    assert list(judged["quality"]["fast"]) == ["math", "overall"]
    assert judged["quality"]["fast"]["overall"] == quality_summary([TEXT])
    table = table_of(judged, "Quality")
    assert table.rows[1][:7] == ["fast (lossy)", "overall", "1", "0%", "5", "0.17", "-1.50 (-1.00)"]
    assert table.rows[1][8:] == ["1", "76.0 (100.0)", "0.83 (1.00)"]


def test_a_lossy_method_is_marked_in_every_table_and_no_other_is(judged: dict[str, Any]) -> None:
    for table in tables.tables(judged):
        cells = [row[0] for row in table.rows if table.header[0] == "method"]
        assert "fast" not in cells
        assert "plain (lossy)" not in cells
    lines = list(csv.DictReader(io.StringIO(tables.as_csv(judged))))
    assert {(line["method"], line["lossy"]) for line in lines} == {
        ("plain", "False"),
        ("fast", "True"),
    }


def test_memory_says_how_it_was_measured(judged: dict[str, Any]) -> None:
    table = table_of(judged, "Peak memory")
    assert "resident beyond the 1,024 MiB that all methods share, 4 tokens behind" in table.title
    assert table.rows == [["plain", "1.0"], ["fast (lossy)", "1.5"]]
    assert table_of(summarise(ANSWERS, METHODS), "Peak memory").rows == []


def test_the_harness_is_held_against_the_methods(judged: dict[str, Any]) -> None:
    assert judged["harness"]["share"] == pytest.approx(0.06 / 12.0)
    assert table_of(judged, "The harness").rows == [["12.0", "0.060", "0.500%"]]


def test_results_from_before_these_figures_still_have_tables(judged: dict[str, Any]) -> None:
    for name in ("quality", "memory", "harness"):
        del judged[name]
    del judged["methods"]["fast"]["lossy"]
    for start in ("Quality", "Peak memory", "The harness"):
        assert table_of(judged, start).rows == []


# --- tables


def test_the_first_table_is_laid_out_as_the_papers(summary: dict[str, Any]) -> None:
    table = tables.tables(summary)[0]
    heads = [f"{task} {kind}" for task in ("math", "chat", "overall") for kind in ("CR", "SD")]
    assert list(table.header) == ["method", *heads, "95 %"]
    assert list(table.rows[0][:3]) == ["plain", "1.00", "1.00"]
    assert list(table.rows[1][:7]) == ["fast", "3.00", "2.00", "3.00", "1.00", "3.00", "1.14"]
    text = tables.markdown(table).splitlines()
    assert text[0].startswith("## Tokens per verification (CR) and speed-up (SD) over plain")
    assert text[2].count("|") == text[3].count("|") == text[4].count("|") == 9


def test_settings_and_what_they_were_chosen_from_are_in_the_last_table(
    summary: dict[str, Any],
) -> None:
    plain, fast = tables.tables(summary)[-1].rows
    assert plain == ["plain", "by hand", "", ""]
    assert fast[2:] == ["speed=2, exit_layers=[4, 20]", "fast(speed=1), fast(speed=2)"]


def test_a_bar_in_a_name_does_not_end_a_cell() -> None:
    text = tables.markdown(tables.Table("t", ["a"], [["one|two"]]))
    assert text.endswith("| one\\|two |\n")


def test_csv_has_a_line_per_group_task_and_method(summary: dict[str, Any]) -> None:
    lines = list(csv.DictReader(io.StringIO(tables.as_csv(summary))))
    assert len(lines) == 2 * 3 * 2
    (line,) = [
        line
        for line in lines
        if (line["answers_in"], line["task"], line["method"]) == ("all", "math", "fast")
    ]
    assert float(line["over_plain_ratio"]) == 2.0
    assert line["over_hugging-face_ratio"] == ""


def test_a_summary_survives_json_unchanged(summary: dict[str, Any]) -> None:
    assert json.loads(json.dumps(summary)) == summary


# --- the file of answers


def test_answers_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    assert answers.read(path) == []
    for entry in ANSWERS:
        answers.append(path, entry)
    assert answers.read(path) == ANSWERS


def test_a_half_written_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answers.drop_unfinished(path)
    answers.append(path, ANSWERS[0])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "\xc3')
    answers.drop_unfinished(path)
    assert path.read_bytes() == whole


def test_a_line_that_is_no_answer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answers.append(path, ANSWERS[0])
    with path.open("a") as file:
        file.write('{"id": "q"}\n')
    with pytest.raises(InvalidData, match=r"answers\.jsonl, line 2 is no answer of a bench"):
        answers.read(path)
