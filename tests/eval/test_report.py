"""Suites, answers, figures worked by hand, a run's folder, pictures and the report."""

from __future__ import annotations

import functools
import json
import math
import operator
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import PreTrainedModel

from selfspec.cli.main import main
from selfspec.errors import CannotWrite, InvalidData, InvalidOption
from selfspec.eval import report, results
from selfspec.eval.report import Results, Table, frame_of, summarise, tables
from selfspec.eval.results import TASKS, Answer, Quality, Question, Run, load_suite, quality_summary
from tests.models import random_ids

# --- figures: eight answers, two methods and a base

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
    by_costs=1.5,
)


def answer(name: str = "q", task: str = "math", turn: int = 1, **values: Any) -> Answer:
    fields: dict[str, Any] = {"repeat": 1, "new_tokens": 4, "runs": {"plain": PLAIN, "fast": FAST}}
    return Answer(id=name, task=task, turn=turn, **fields | values)


ANSWERS = [
    answer("q1"),
    answer("q2", "chat"),
    answer("q2", "chat", 2, runs={"fast": run(8.0, (1, 1.0), (3, 7.0)), "plain": PLAIN}),
    answer("q3", "chat", repeated=0.31),
]


@pytest.fixture
def summary() -> dict[str, Any]:
    return summarise(ANSWERS, METHODS)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (("all", "overall", "fast", "over_plain", "ratio"), 16 / 14),  # turns are added up
        (("all", "overall", "fast", "over_plain", "prompts"), 3),
        (("all", "overall", "fast", "over_plain", "worst"), 8 / 10),
        (("all", "overall", "fast", "over_hugging-face"), None),  # not measured
        (("loop_share",), {"math": 0.0, "chat": 1 / 3, "overall": 0.25}),
        (("without_loops", "overall", "fast", "over_plain", "ratio"), 12 / 12),
        (("without_loops", "chat", "fast", "answers"), 2),
        (("all", "overall", "fast", "acceptance_rate"), 6 / 9),
        (("all", "overall", "plain", "acceptance_rate"), None),
        (("all", "overall", "fast", "worst_by_costs"), 1.0),  # one turn drafted nothing
        (("all", "math", "fast", "worst_by_costs"), 1.5),
        (("all", "overall", "plain", "worst_by_costs"), None),
        (("acceptance", "fast", "by_layer"), {"2": [3, 3], "4": [6, 3]}),
        (("acceptance", "fast", "by_index"), {"1": [3, 3], "2": [3, 3], "3": [3, 0]}),
        (("latency", "fast", "first_token_s"), 1.0),
        (("latency", "fast", "token_p50_s"), pytest.approx(0.3)),
        (("latency", "fast", "token_mean_s"), pytest.approx((9 * 0.3 + 7.0) / 12)),
        (("latency", "fast", "answer_s"), 14 / 4),
        (("latency", "fast", "tokens_per_s"), 16 / 14),
        (("parts_s",), {"fast": {"prefill": 3.0, "draft": 0.75, "verify": 1.5}, "plain": {}}),
    ],
)
def test_figures_by_hand(summary: dict[str, Any], place: tuple[str, ...], expected: Any) -> None:
    assert functools.reduce(operator.getitem, place, summary) == expected
    assert json.loads(json.dumps(summary)) == summary
    gain = summary["all"]["overall"]["fast"]["over_plain"]
    assert gain["low"] <= gain["ratio"] <= gain["high"]
    assert not [table for table in tables(summary) if "Hugging Face" in table.title]


def test_a_failed_run_is_left_out_for_both_and_reported_like_a_differing_text() -> None:
    broken = answer("q4", runs={"plain": PLAIN, "fast": Run(error="ValueError: no")})
    unmeasured = Answer(id="q5", task="QA", turn=1, repeat=1, error="too long")
    odd = answer("q6", runs={"fast": Run(seconds=1.0, arrivals=[(4, 1.0)])})
    summary = summarise([*ANSWERS, broken, unmeasured, odd], METHODS)
    figures = summarise([odd], METHODS)["all"]["overall"]["fast"]  # only the prompt's pass
    assert figures["compression_rate"] is None
    unsure = answer(runs={"fast": run(4.0, (1, 1.0), (3, 3.0), by_costs=0.9)})  # of heads alone
    assert summarise([unsure], METHODS)["all"]["overall"]["fast"]["worst_by_costs"] == 0.9
    assert summary["all"]["overall"]["fast"]["over_plain"]["prompts"] == 3
    assert summary["all"]["overall"]["plain"]["over_plain"]["prompts"] == 4
    assert summary["failures"] == ["q4, turn 1, fast: ValueError: no", "q5, turn 1: too long"]
    assert summary["answers"] == 6
    assert summary["unequal"] == {"plain": 0, "fast": 1}
    (by_prompt,) = [table for table in tables(summary) if table.title.endswith("by prompt")]
    assert list(by_prompt.cells.iloc[:, -1]) == ["0 of 5", "1 of 5"]
    assert report.seconds_by_prompt(frame_of([broken]), "fast", "plain").empty
    assert report.rates(summary) == "without drafts 1.0, fast 1.3 tokens/s\n"
    assert report.rates(summarise([unmeasured], METHODS)) == ""  # its rates are None


def test_groups_keep_spec_benchs_order_and_no_measurement_gives_no_figures() -> None:
    frame = frame_of([answer(task="law"), answer(task="QA"), answer(task="math")])
    by_group = report.by_task(frame, len)
    assert list(by_group.items()) == [("math", 2), ("QA", 2), ("law", 2), ("overall", 6)]
    summary = summarise([Answer(id="q", task="QA", turn=1, repeat=1, error="too long")], METHODS)
    assert summary["all"] == {}
    (table,) = tables(summary)
    assert (table.title, len(table.cells)) == ("Methods", 2)


# --- texts

WORDS = "the cat sat on the mat"
SAME = Quality(
    text=WORDS,
    plain_text=WORDS,
    reference=None,
    tokens=6,
    plain_tokens=6,
    first_divergence=None,
    edit_distance=0,
    log_likelihood=-6.0,
    plain_log_likelihood=-6.0,
)
OTHER = replace(
    SAME, text="the cat sat on the rug", first_divergence=5, edit_distance=1, log_likelihood=-9.0
)
TEXT = replace(OTHER, reference=WORDS)


def rows_of(table: Table) -> list[list[str]]:
    rows: list[list[str]] = table.words().to_numpy().tolist()
    return rows


def test_quality_is_summed_up_by_task_and_lossy_methods_are_marked() -> None:
    """Of two answers one was judged."""
    fast = replace(FAST, quality=TEXT)
    pair = [answer("q1", runs={"plain": PLAIN, "fast": fast}), answer("q2", "chat")]
    judged = summarise(pair, METHODS | {"fast": METHODS["fast"] | {"lossy": True}})
    assert list(judged["quality"]) == ["fast"]
    assert list(judged["quality"]["fast"]) == ["math", "overall"]
    assert judged["quality"]["fast"]["overall"] == quality_summary([TEXT])
    (table,) = [table for table in tables(judged) if table.title.startswith("Quality")]
    row = rows_of(table)[1]
    assert row[:8] == ["fast (lossy)", "overall", "1", "0.00", "5", "0.17", "-1.50", "-1.00"]
    assert row[9:] == ["1", "75.98", "100.00", "0.83", "1.00"]
    for table in tables(judged):
        assert not {"fast", "plain (lossy)"} & {*table.cells.get("method", ())}


def test_the_first_table_is_laid_out_as_the_papers(summary: dict[str, Any]) -> None:
    table = tables(summary)[0]
    heads = [f"{task} {kind}" for task in ("math", "chat", "overall") for kind in ("CR", "SD")]
    assert list(table.cells) == ["method", *heads, "95 %"]
    plain, fast = rows_of(table)
    assert plain[:3] == ["plain", "1.00", "1.00"]
    assert fast[:7] == ["fast", "3.00", "2.00", "3.00", "1.00", "3.00", "1.14"]
    text = report.markdown(table).splitlines()
    assert text[0].startswith("## Tokens per verification (CR) and speed-up (SD) over plain")
    assert text[2].count("|") == text[3].count("|") == text[4].count("|") == 9
    # the last table has the settings and the candidates
    plain, fast = rows_of(tables(summary)[-1])
    assert plain == ["plain", "by hand", "", ""]
    assert fast[2:] == ["speed=2, exit_layers=[4, 20]", "fast(speed=1), fast(speed=2)"]
    # a bar in a name does not end a cell
    assert report.markdown(Table("t", pd.DataFrame({"a|b": ["one|two"]}))).count(r"\|") == 2


# --- the folder of a run

RECORD: dict[str, Any] = {"run": {"limit": 2, "methods": ["plain"]}, "machine": {"threads": 1}}


def test_a_run_without_its_tables_is_not_finished(summary: dict[str, Any], tmp_path: Path) -> None:
    report.begin_results(tmp_path, RECORD)
    (tmp_path / "table.md").mkdir()  # no file can be written there, as on a full disk
    with pytest.raises(CannotWrite):
        report.write_results(tmp_path, summary)
    assert not (tmp_path / report.SUMMARY).exists()


def test_starting_over_removes_what_a_bench_writes_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    report.check_results(tmp_path, overwrite=False)
    report.begin_results(tmp_path, RECORD)
    report.check_results(tmp_path, overwrite=False)  # not finished: it can be resumed
    for name in report.FILES[1:]:
        (tmp_path / name).write_text("old")
    with pytest.raises(InvalidOption, match=r"holds results\. Give --overwrite"):
        report.check_results(tmp_path, overwrite=False)
    report.check_results(tmp_path, overwrite=True)
    report.begin_results(tmp_path, RECORD, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "notes.txt"}
    (tmp_path / "run.yaml").write_text("somebody else's")
    for overwrite in (True, False):
        with pytest.raises(CannotWrite, match=r"holds run\.yaml, which selfspec did not write"):
            report.check_results(tmp_path, overwrite=overwrite)


def test_resuming_is_refused_if_any_setting_differs(tmp_path: Path) -> None:
    for _ in range(2):  # a run without answers may begin again
        report.begin_results(tmp_path, RECORD)
    with pytest.raises(InvalidOption, match="was begun with threads 1, not 2"):
        report.begin_results(tmp_path, {**RECORD, "machine": {"threads": 2}})
    for damaged in ("[]", "run: 1"):
        (tmp_path / report.RUN).write_text(damaged)
        with pytest.raises(InvalidData, match="expected names and values"):
            report.begin_results(tmp_path, RECORD)


# --- pictures: three methods and a sweep

READ = "How to read this"
BEST = (
    "speculation, the fastest of 2: 2.00 times as fast as plain decoding on our runtime "
    "(95 %: 2.00 to 2.00), 2 prompts, all 2 texts equal."
)
SECONDS = {
    **{"plain": 4.0, "speculation": 2.0, "no-width-bound": 5.0},
    **{"speculation(exit.threshold=0.9)": 3.2, "speculation(exit.threshold=0.1)": 2.5},
}
COUNTS: dict[str, dict[str, float]] = {
    "drafted_by_layer": {"2": 4, "10": 1},
    "accepted_by_layer": {"2": 3},
    "drafted_by_index": {"1": 5},
    "accepted_by_index": {"1": 3},
}


@pytest.fixture
def swept() -> dict[str, Any]:
    """Two prompts; three methods and a sweep of two values, in falling order."""
    runs = {name: run(s, (1, 1.0), (3, 1.0), counts=COUNTS) for name, s in SECONDS.items()}
    runs["plain"] = PLAIN
    answers = [answer(name, runs=runs) for name in "ab"]
    fields: dict[str, Any] = {"source": "<source> & more", "setting": {}, "chosen_from": []}
    return summarise(answers, {name: {"method": name.split("(")[0], **fields} for name in SECONDS})


@pytest.fixture
def finished(swept: dict[str, Any]) -> Results:
    record = {
        "run": {"suite": "s.jsonl", "max_new_tokens": 4, "repeats": 1, "seed": 0},
        "questions": {"reported": 2, "settings_chosen_on": ["x"]},
        "model": {"name": "<b>model", "dtype": "float32", "device": "cpu", "heads": "h"},
        "speculation": {"drafter": "exit:threshold=0.9"},
        "machine": {"threads": 1},
    }
    return Results("first", record, swept)


def test_the_chart_holds_all_methods_but_no_sweep(swept: dict[str, Any]) -> None:
    ratios = {label: gain["ratio"] for label, gain in report.gains_of(swept)[1].items()}
    assert ratios == {"plain": 1.0, "speculation": 2.0, "no-width-bound": 0.8}
    rows = rows_of(report.acceptance_table(swept))  # in percent of drafted tokens
    assert [row[0] for row in rows] == [*SECONDS][1:]
    assert rows[0][1:] == ["2: 75%, 10: 0%", "1: 60%"]


def test_the_verdict_is_the_fastest_lossless_method_or_none(swept: dict[str, Any]) -> None:
    assert report.verdict(swept) == BEST
    swept["unequal"]["speculation"] = 1
    assert report.verdict(swept).endswith("1 of 2 texts differ.")
    for labels, text in (
        ([*SECONDS][3:], ".threshold=0.1), the fastest of 2: 1.60 times as fast"),  # a sweep
        ([[*SECONDS][4]], ".threshold=0.1): 1.60 times as fast"),
    ):
        chosen = {label: swept["methods"][label] for label in ("plain", *labels)}
        assert text in report.verdict({**swept, "methods": chosen})
    text = "Nothing was faster than plain decoding on our runtime; no-width-bound: 0.80 times"
    for own_text in ({"lossy": True}, {"setting": {"do_sample": True}}):
        entries = swept["methods"] | {"speculation": swept["methods"]["speculation"] | own_text}
        assert report.verdict({**swept, "methods": entries}).startswith(text)
    for figures in swept["all"]["overall"].values():
        figures["over_plain"] = None
    for record in (swept, {**swept, "all": {}}):
        assert report.verdict(record).startswith("No speed-up is known")


# --- the report


def test_the_command_writes_a_page_with_every_table_and_chart(
    finished: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("<s>first", "second")]
    finished.summary["failures"].append("q4, turn 1: too long")
    for folder in folders:
        report.begin_results(folder, finished.run)
        report.write_results(folder, finished.summary)
    command = ["report", *map(str, folders), "--output", str(tmp_path / "it.html")]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'it.html'}\n"
    page = (tmp_path / "it.html").read_text(encoding="utf-8")
    assert re.findall("<h2>(.*)</h2>", page) == ["&lt;s&gt;first", "second", READ]
    assert page.count(f'<p class="verdict">{BEST}</p>') == 2
    assert "chosen on 1 questions that are not among those reported: x." in page
    assert "<p>Failed: q4, turn 1: too long</p>" in page
    for table in tables(finished.summary):
        assert page.count(f"<h3>{table.title}</h3>") == 2
    # the page is self-contained and escaped
    sources = re.findall(r'src="(.{0,30})', page)
    assert len(sources) == 2
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search("<b>|<s>|<source>", page)
    assert "&lt;b&gt;model" in page
    assert "&lt;source&gt; &amp; more" in page
    assert main(command) == 2
    assert main([*command, "--overwrite"]) == 0


def test_incomplete_results_are_named(finished: Results) -> None:
    empty = {**finished.summary, "methods": {"plain": {}}}
    for broken in (finished._replace(run={"run": 1}), finished._replace(summary=empty)):
        with pytest.raises(InvalidData, match="the results first lack what a report shows"):
            report.page([broken])


# --- suites


def write(folder: Path, *records: Any) -> str:
    """One JSON line each; the file's name."""
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(file)


def test_the_built_in_suite_has_eight_questions_of_each_task() -> None:
    suite = load_suite("six-tasks")
    assert Counter(question.task for question in suite) == dict.fromkeys(TASKS, 8)
    assert len({turn for question in suite for turn in question.turns}) == 48 + 8
    assert all(len(q.turns) == (2 if q.task == "chat" else 1) for q in suite)
    assert all(q.reference for q in suite if q.task != "chat")

    few = load_suite("six-tasks", limit=6)  # spread over all groups
    assert [question.task for question in few] == list(TASKS)
    spread = [question.id for question in load_suite("six-tasks", limit=4)]
    assert spread == ["math-1", "chat-5", "rag-1", "summary-5"]
    assert len(load_suite("six-tasks", limit=1000)) == 48


def test_spec_benchs_categories_are_six_groups(tmp_path: Path) -> None:
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["", "good"]},
        {"question_id": 305, "category": "rag", "turns": ["c"], "reference": [["x", "y"]]},
        {"question_id": 7, "category": "math_reasoning", "turns": ["d"], "reference": [""]},
    ]
    assert load_suite("spec-bench", write(tmp_path, *lines)) == [
        Question(id="81", task="chat", turns=("a", "b"), reference="good"),
        Question(id="305", task="RAG", turns=("c",), reference="x"),
        Question(id="7", task="math", turns=("d",)),
    ]
    name = write(tmp_path, {"prompt": "a"}, {"turns": ["b", "c"], "id": "two", "task": "law\n or"})
    assert load_suite(name) == [  # any file of prompts is a suite
        Question(id="1", task="prompts", turns=("a",)),
        Question(id="two", task="law or", turns=("b", "c")),
    ]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ("{", "JSON"),
        ("[1]", "a list"),
        ("{}", "turns"),
        ('{"turns": []}', "turns"),
        ('{"turns": ["a", " "]}', "turn"),
        ('{"prompt": 3}', "turn"),
        ('{"prompt": "b", "id": "1"}', "id 1"),
        ('{"prompt": "b", "id": [1]}', "id"),
        ('{"prompt": "b", "task": "overall"}', "task"),
        ('{"prompt": "b", "reference": 3}', "reference"),
    ],
)
def test_a_broken_line_is_named_with_its_reason(tmp_path: Path, second: str, reason: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"prompt": "a"}\n' + second + "\n", encoding="utf-8")
    with pytest.raises(InvalidData, match=rf"questions\.jsonl, line 2 .*{reason}"):
        load_suite(str(file))
    file.write_text("\n")
    with pytest.raises(InvalidData, match="holds no questions"):
        load_suite(str(file))


# --- the file of answers


def test_answers_are_read_back_unchanged_except_for_a_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    results.drop_unfinished(path)
    assert results.read(path) == []
    written = [answer("q1"), answer("q2", runs={"fast": replace(FAST, quality=TEXT)})]
    for entry in written:
        results.append(path, entry)
    content = path.read_bytes()
    path.write_bytes(content + b'{"id": "\xc3')
    results.drop_unfinished(path)
    assert path.read_bytes() == content
    assert results.read(path) == written
    path.write_bytes(content + b'{"id": "q"}\n')
    with pytest.raises(InvalidData, match=r"answers\.jsonl, line 3 is no answer of a bench"):
        results.read(path)


# --- statistics


def test_speed_up_is_the_ratio_of_total_times_not_the_mean_of_ratios() -> None:
    gain = results.speed_up([8.0, 1.0, 1.0], [2.0, 1.0, 2.0])
    assert gain.ratio == 10.0 / 5.0
    assert gain.mean == (4.0 + 1.0 + 0.5) / 3
    assert gain.worst == 0.5
    # ranks 0, 1, 2 hold 0.5, 1, 4: the 5th percentile is a tenth of the way from rank 0 to 1
    assert gain.p5 == pytest.approx(0.55, abs=1e-12)
    assert gain.prompts == 3


def test_an_interval_resamples_pairs_and_its_seed_repeats_it() -> None:
    # each prompt takes the first method exactly twice as long, however long that is
    above, below = [2.0, 40.0, 6.0, 800.0], [1.0, 20.0, 3.0, 400.0]
    assert results.ratio_interval(above, below) == (2.0, 2.0)
    # a quarter of the samples holds the first prompt twice, a quarter the second one
    assert results.ratio_interval([3.0, 1.0], [1.0, 1.0]) == (1.0, 3.0)
    values = [1.0, 2.0, 4.0, 3.0, 1.5], [1.0, 1.1, 1.3, 2.0, 0.7]
    assert results.ratio_interval(*values, seed=1) == results.ratio_interval(*values, seed=1)
    assert results.ratio_interval(*values, seed=1) != results.ratio_interval(*values, seed=2)


def test_repeated_share_counts_n_grams_that_occurred_before() -> None:
    # 8-grams of a text with period 2: two distinct ones among five
    assert results.repeated_share([1, 2] * 6) == 1 - 2 / 5
    assert results.repeated_share(list(range(20))) == 0.0
    assert results.repeated_share([1] * 7) == 0.0


# --- lossy texts


@pytest.mark.parametrize(
    ("found", "expected", "index", "distance"),
    [
        ("123", "123", None, 0),
        ("193", "123", 1, 1),
        ("12", "123", 2, 1),  # the text ends early
        ("123", "12", 2, 1),
        ("", "", None, 0),
        ("", "abc", 0, 3),
        ("kitten", "sitting", 0, 3),  # the textbook example: two replacements and an insertion
        ("abcd", "bcda", 0, 2),  # moved, not replaced four times
    ],
)
def test_first_divergence_and_edit_distance_of_texts(
    found: str, expected: str, index: int | None, distance: int
) -> None:
    tokens = [*map(ord, found)], [*map(ord, expected)]
    assert results.first_divergence(*tokens) == index
    assert results.edit_distance(*tokens) == distance


def test_bleu_of_a_word_is_100_and_rouge_l_the_f1_of_the_longest_common_subsequence() -> None:
    assert results.bleu(["Paris"], ["Paris"]) == pytest.approx(100.0)  # although it has no 4-gram
    # "the cat on mat": 4 of its 5 words, 4 of 6 of the reference
    f1 = 2 * (4 / 5) * (4 / 6) / (4 / 5 + 4 / 6)
    score = results.rouge_l(["the big cat on mat", WORDS], [WORDS, WORDS])
    assert score == pytest.approx((f1 + 1) / 2)
    assert results.rouge_l(["Größe", "你好"], ["größe", "你好"]) == 1.0
    assert results.rouge_l(["grosse"], ["größe"]) == 0.0
    assert results.rouge_l(["他们好"], ["你们好吗"]) == pytest.approx(4 / 7)  # 2 of 3, of 4


def test_log_likelihood_is_the_sum_over_the_answers_tokens(model: PreTrainedModel) -> None:
    ids, tokens = random_ids(5), [7, 3, 90]
    sequence = torch.cat([ids, torch.tensor([tokens])], dim=1)
    with torch.no_grad():
        logs = model(sequence).logits[0].log_softmax(-1)
    expected = sum(float(logs[4 + place, token]) for place, token in enumerate(tokens))
    # one block of 8 rows either way: only the order of the sum differs
    assert results.log_likelihood(model, ids, tokens) == pytest.approx(expected, abs=1e-5)


def test_a_summary_weighs_by_tokens_and_uses_references_if_any() -> None:
    other = replace(OTHER, tokens=2, plain_tokens=4, log_likelihood=-4.0)
    assert quality_summary([SAME, other]) == pytest.approx(
        {
            "answers": 2,
            "exact_share": 0.5,
            "median_first_divergence": 5,
            "edits_per_token": 1 / 10,
            "nats_per_token": -10 / 8,
            "plain_nats_per_token": -12 / 10,
            # both answers are one corpus: 11 of 12 words, 9 of 10 pairs, 7 of 8, 5 of 6
            "relative_bleu": 100 * math.prod([11 / 12, 9 / 10, 7 / 8, 5 / 6]) ** 0.25,
            "with_reference": 0,
            **dict.fromkeys(("bleu", "plain_bleu", "rouge_l", "plain_rouge_l")),
        }
    )
    summary = quality_summary([SAME, replace(SAME, text="a dog", reference=WORDS)])
    assert summary["with_reference"] == 1
    assert (summary["plain_bleu"], summary["plain_rouge_l"]) == pytest.approx((100.0, 1.0))
    assert summary["rouge_l"] == 0.0
    assert summary["bleu"] < 10.0
