"""`selfspec trace`: what it shows, keeps and draws, and what it refuses before the work starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfspec.api.speculator import load
from selfspec.cli.main import main
from selfspec.visualise.layers import LayerTrace
from tests.hand_traces import long_trace
from tests.models import make_model
from tests.talks import make_tokenizer

COMMAND = ["trace", "--model", "model", "--dtype", "float32", "--heads", "logit-lens"]
COMMAND += ["--drafter", "exit:layers=2/4,threshold=0.05", "--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and a trace that was kept."""
    folder = tmp_path_factory.mktemp("made")
    make_model("llama").save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    long_trace([f"t{number} " for number in range(45)]).save(folder / "long.jsonl")
    other = (
        (folder / "long.jsonl").read_text().replace('"format_version": 4', '"format_version": 9')
    )
    (folder / "future.jsonl").write_text(other)
    return folder


@pytest.fixture
def workplace(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder as the current one."""
    monkeypatch.chdir(made)
    return made


def test_it_shows_keeps_and_draws_the_answer_that_generate_gives(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, card = (str(tmp_path / name) for name in ("t.jsonl", "card.png"))
    assert main([*COMMAND, "a b c", "--output", kept, "--card", card]) == 0
    shown = capsys.readouterr().out
    found = LayerTrace.load(Path(kept))
    plain = load("model", dtype="float32", heads="logit-lens")
    options = {"drafter": "exit:layers=2/4,threshold=0.05", "max_new_tokens": 6}
    answer = plain.generate("a b c", **options)  # type: ignore[arg-type]  # checked by generate
    assert [place.token for place in found.places] == answer.token_ids
    assert found.info.settings.exit_layers == (2, 4)
    assert "6 tokens" in shown
    assert "\x1b" not in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["card.png", "t.jsonl"]
    assert main(["trace", "--from", kept]) == 0
    assert capsys.readouterr().out == shown


def test_json_is_what_a_file_holds(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "t.jsonl"
    assert main([*COMMAND, "a b", "--json", "--output", str(kept)]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [json.loads(line) for line in kept.read_text().splitlines()]
    assert printed[0]["exit_layers"] == [1, 2, 3, 4, 5]


def page_data(page: Path) -> dict[str, Any]:
    """What a page shows."""
    found: dict[str, Any] = json.loads(
        page.read_text().split('id="data">')[1].split("</script>")[0]
    )
    return found


@pytest.mark.parametrize(
    ("more", "replays"), [([], True), (["--temperature", "9", "--seed", "1"], False)]
)
def test_the_page_replays_the_very_answer_or_nothing(
    workplace: Path,
    tmp_path: Path,
    more: list[str],
    replays: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "page.html"
    assert main([*COMMAND, "a b c", *more, "--html", str(page)]) == 0
    assert ("cannot replay settings" in capsys.readouterr().err) != replays
    data = page_data(page)
    assert (data["grid"] is not None, data["plain_step"] is not None) == (replays, replays)
    assert ("greedy decoding without drafts gives another answer" in data["why"]) != replays
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_page_of_a_kept_trace_replays_nothing(workplace: Path, tmp_path: Path) -> None:
    assert main(["trace", "--from", "long.jsonl", "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "t44" in page
    assert "has sliders: selfspec trace --html PAGE.html PROMPT" in page


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["a", "--html", "nowhere/a.html"], "--html nowhere/a.html: there is no folder nowhere"),
        (["a", "--html", "page"], "expected a name that ends in .html"),
        (["a", "--card", "nowhere/a.png"], "--card nowhere/a.png: there is no folder nowhere"),
        (["a", "--output", "nowhere/t.jsonl"], "there is no folder nowhere. Make it first"),
        (["a", "--output", "model"], "model is a folder. Name a file"),
        (["a", "--card", "card.jpg"], "--card card.jpg: expected a name that ends in .png"),
        (["a", "--drafter", "exit:layers=2/9"], "exit layer 9 is not among"),
        (["a", "--heads", "nowhere"], "nowhere"),
        (["a", "--suite", "six-tasks"], "--suite means nothing without --record"),
        (["a", "--min-threshold", "0.1"], "--min-threshold means nothing without --record"),
        (["a", "--record", "new", "--card", "a.png"], "--card means nothing with --record"),
        (["a", "--record", "new", "--drafter", "exit"], "--drafter means nothing with"),
        (["a", "--from", "long.jsonl"], "a prompt and --from at once"),
        ([" "], "the prompt is empty"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    workplace: Path, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(workplace.iterdir())
    command = ["trace", "--model", "model", "--dtype", "float32"]
    heads = [] if "--heads" in arguments else ["--heads", "logit-lens"]
    assert main([*command, *heads, *arguments]) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
    assert reason in line
    assert sorted(workplace.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["future.jsonl"], "future.jsonl, line 1: format version 9, this selfspec reads 4"),
        (["nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["model/config.json"], "model/config.json, line 1 is no line of a trace: it is not JSON"),
        (["long.jsonl", "--all-layers"], "--all-layers means nothing with --from"),
        (["long.jsonl", "--no-all-layers"], "--no-all-layers means nothing with --from"),
        (["long.jsonl", "--max-new-tokens", "3"], "--max-new-tokens means nothing with --from"),
    ],
)
def test_a_file_that_cannot_be_shown_is_one_line(
    workplace: Path, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--from", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_a_model_without_heads_is_looked_at_through_the_logit_lens(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["trace", "a", "--model", "model", "--dtype", "float32", "--max-new-tokens", "3"]
    assert main([*command, "--no-all-layers"]) == 2
    assert "no exit heads to look through. Give --heads, or drop" in capsys.readouterr().err
    page = tmp_path / "page.html"
    assert main([*command, "--html", str(page)]) == 0
    assert "3 tokens, 2 rounds" in capsys.readouterr().out
    grid = page_data(page)["grid"]
    assert (grid["begin"]["drafter"], list(grid["drafters"]), grid["notes"]) == (
        "ngram",
        ["ngram", "none"],
        [],
    )


def test_cards_need_matplotlib_and_say_so_first(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["trace", "--from", "long.jsonl", "--card", "a.png"]) == 2
    assert "--card needs matplotlib. Install it" in capsys.readouterr().err
