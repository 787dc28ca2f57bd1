"""`selfspec trace` and `tune`: what they print, write and refuse, and that `generate` uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from selfspec.api import tuned
from selfspec.api.speculator import load, wrap
from selfspec.cli.main import main
from selfspec.config import SpeculationOptions
from selfspec.decoding.measure import measure
from selfspec.decoding.prices import Costs
from selfspec.eval.record import Record
from tests.heads.kinds import make_heads, train
from tests.models import make_model
from tests.talks import make_tokenizer

MODEL = ["--model", "model", "--dtype", "float32", "--heads", "heads"]
SHORT = ["--max-new-tokens", "6", "--max-draft-tokens", "2", "--min-threshold", "0.1"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, two sets of heads, a suite, and a record of the first heads."""
    folder = tmp_path_factory.mktemp("made")
    model = make_model("llama")
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    backbone = wrap(model).backbone
    unembedding, base = backbone.unembedding, backbone.fingerprint
    for name in ("heads", "others"):
        heads = make_heads("translator", unembedding, base_fingerprint=base, exit_layers=(2, 5))
        (train(heads) if name == "others" else heads).save(folder / name)
    lines = [json.dumps({"prompt": text}) for text in ("a", "b c", "c a b", "a a b")]
    (folder / "suite.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["trace", *MODEL, *SHORT, "--suite", "suite.jsonl", "--record", "record"]) == 0
    return folder


@pytest.fixture
def workplace(made: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder as the current one, with a cache folder of this test's own."""
    monkeypatch.chdir(made)
    return made


def test_a_record_of_a_suite_holds_all_its_prompts(workplace: Path) -> None:
    found = Record.load(workplace / "record")
    assert [prompt.id for prompt in found.prompts] == ["1", "2", "3", "4"]
    assert found.info.exit_layers == (2, 5)
    assert (found.info.max_draft_tokens, found.info.min_threshold) == (2, 0.1)
    assert {prompt.max_new_tokens for prompt in found.prompts} == {6}


def test_one_prompt_is_recorded_with_the_layers_asked_for(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "one")
    command = ["trace", "a b c", *MODEL, *SHORT, "--exit-layers", "5", "--record", folder, "--json"]
    assert main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["prompts"], facts["tokens"], facts["exit_layers"]) == (1, 6, [5])
    assert facts["nodes"] == len(Record.load(Path(folder)).tokens)


def test_what_was_tuned_is_kept_used_and_forgotten(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", *MODEL, "--record", "record", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert [str(file) for file in tuned.files()] == [found["file"]]
    assert (found["prompts"], found["objective"]) == (4, "speed")
    assert len(found["costs"]["layers"]) == 3
    options = load("model", heads="heads", dtype="float32").options
    assert options == SpeculationOptions().updated(found["options"])
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tuned"] == [found["file"]]
    assert main(["tune", *MODEL, "--forget"]) == 0
    assert capsys.readouterr().out == f"removed {found['file']}\n"
    assert tuned.files() == []
    assert main(["tune", *MODEL, "--forget"]) == 0
    assert "nothing was tuned" in capsys.readouterr().out


def test_a_dry_run_records_reports_and_keeps_nothing(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = ["--suite", "suite.jsonl", "--limit", "2", "--max-exit-layers", "1"]
    assert main(["tune", *MODEL, *SHORT, *suite, "--objective", "latency", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "settings tried on 2 prompts" in output
    assert "plain decoding" in output
    assert tuned.files() == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["trace", "--record", "record"], "record holds record.json already"),
        (["trace", "a", "--record", "new", "--limit", "2"], "a prompt and --limit at once"),
        (["trace", " ", "--record", "new"], "the prompt is empty"),
        (["trace", "a", "--record", "new", "--min-threshold", "2"], "min_threshold is 2.0"),
        (["trace", "a", "--record", "new", "--exit-layers", "3"], "exit layer 3 is not among"),
        (["trace", "--record", "new", "--suite", "sixtasks"], "Did you mean six-tasks?"),
        (["tune", "--suite", "spec-bench"], "Give --questions FILE"),
        (["tune", "--record", "nowhere"], "cannot read nowhere/record.json"),
        (["tune", "--record", "record", "--heads", "others"], "another set of heads"),
        (["tune", "--record", "record", "--objective", "fast"], "objective is 'fast'"),
        (["tune", "--suite", "suite.jsonl", "--limit", "1", *SHORT], "one question cannot be held"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    workplace: Path, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = arguments
    assert main([name, *MODEL, *rest]) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
    assert reason in line
    assert not (workplace / "new").exists()


def test_a_model_without_heads_is_tuned_for_text_already_seen(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cheap = (1.0,) * 8  # rows for nothing, so that drafts pay wherever one is right
    costs = Costs(num_layers=6, layers=cheap, start=cheap, logits=cheap, head=0.0, round=0.0)
    monkeypatch.setattr("selfspec.decoding.measure.measure", lambda *_, **__: costs)
    bare = ["--model", "model", "--dtype", "float32"]
    suite = ["--suite", "suite.jsonl", "--max-new-tokens", "40"]
    assert main(["tune", *bare, *suite, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"]["drafter"].startswith("ngram:size=")
    assert "exit" not in found["options"]["drafter"]
    assert found["settings"] == 12 * 2  # n-grams by lengths, at two prices of rows
    assert found["speed_up"] > 1.0
    options = load("model", dtype="float32").options
    assert options == SpeculationOptions().updated(found["options"])
    assert load("model", dtype="float32", heads="heads").options.drafter == "exit"
    assert main(["tune", *bare, *suite, "--forget"]) == 0
    assert load("model", dtype="float32").options == SpeculationOptions(drafter="ngram")
    kept = str(workplace / "plain")
    assert main(["trace", *bare, *suite, "--record", kept]) == 0
    capsys.readouterr()
    assert main(["tune", *bare, "--record", kept, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"] == found["options"]
    assert main(["tune", *bare, *suite, "--exit-layers", "2"]) == 2
    assert "exit layers [2] without exit heads" in capsys.readouterr().err
    assert main(["tune", *bare, "--record", "record"]) == 2
    assert "made with another model" in capsys.readouterr().err


def test_without_heads_their_cost_is_not_measured(workplace: Path) -> None:
    costs = measure(load("model", dtype="float32").backbone, None, rows=2)
    assert costs.head == 0.0
    assert costs.plain_step() > 0.0
