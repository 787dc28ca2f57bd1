"""Figures over many answers: each statistic by hand, and that every picture is drawn."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from selfspec.api.givers import Giver
from selfspec.decoding.sources import EXIT, MODEL, NGRAM
from selfspec.visualise import figures
from selfspec.visualise.figures import Shares, token_kind
from selfspec.visualise.gain import right_from
from selfspec.visualise.layers import LayerTrace
from tests.hand_traces import RIGHT, WRONG, long_trace, place, said, small_trace
from tests.models import make_model
from tests.talks import make_tokenizer

PICTURES = {"exits.png", "saturation.png", "agreement.png", "acceptance.png"}
SCRIPT = Path(__file__).parents[2] / "eval" / "visualise" / "figures.py"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((text, "word") for text in ("rain", " Über", "b2", "'s", "你", "a<b>")),
        *((text, "number") for text in ("7", " 12", "½", "1.")),
        *((text, "punctuation") for text in (",", " (", "<", "🎉", "<>", "...")),
        *((text, "special") for text in ("<|im_end|>", "</s>", "", " \n", "\ufffd", "a\ufffd")),
    ],
)
def test_tokens_are_told_apart_by_their_text(text: str, kind: str) -> None:
    assert token_kind(text) == kind


def test_who_gave_tokens_of_each_kind() -> None:
    """The prompt's own pass is no choice of anybody, so its token does not count."""
    second, fourth, model = Giver(EXIT, 2), Giver(EXIT, 4), Giver(MODEL)
    assert figures.exits_statistic(figures.exits_data([small_trace()])) == [
        Shares("word", 4, {second: 25.0, fourth: 25.0, model: 50.0}),
        Shares("special", 1, {second: 0.0, fourth: 0.0, model: 100.0}),
    ]


def test_exit_layers_are_ordered_by_number_and_the_model_is_last() -> None:
    last = (Giver(EXIT, 4), Giver(EXIT, 12), Giver(NGRAM), Giver(MODEL))
    tokens = [("word", giver) for giver in reversed(last)]
    assert tuple(figures.exits_statistic(tokens)[0].percent) == last


@pytest.mark.parametrize(
    ("right", "layer"),
    [
        ((True, True, True), 2),
        ((False, True, True), 3),
        ((True, False, True), 4),
        ((True, True, False), 6),
        ((False, False, False), 6),
    ],
)
def test_a_token_saturates_where_no_later_layer_doubts_it(
    right: tuple[bool, ...], layer: int
) -> None:
    guesses = zip((2, 3, 4), right, strict=True)
    layers = tuple(said(layer, 0.5, right=agrees) for layer, agrees in guesses)
    assert right_from(small_trace(), replace(place(0, "a"), layers=layers)) == layer


def test_a_sampled_token_may_saturate_nowhere() -> None:
    found = replace(place(0, "a"), final_top_tokens=(WRONG, RIGHT))
    assert right_from(small_trace(), found) is figures.NEVER


def test_shares_of_saturation_count_all_tokens() -> None:
    found = figures.saturation_statistic([2, 4, 4, None], (2, 3, 4, 6))
    assert (found.tokens, found.layers) == (4, [2, 3, 4, 6])
    assert found.percent == [25.0, 0.0, 50.0, 0.0]
    assert found.cumulative == [25.0, 25.0, 75.0, 75.0]


def test_agreement_and_calibration_by_layer() -> None:
    trace = small_trace()
    data = figures.agreement_data([trace])
    second, third, fourth = figures.agreement_statistic(data, trace.info.head_kinds)
    assert [entry.kind for entry in (second, third, fourth)] == list(trace.info.head_kinds)
    assert (second.layer, second.tokens, second.sure) == (2, 6, 62.5)
    assert second.right == pytest.approx(100 / 6)
    assert second.error == pytest.approx(62.5 - 100 / 6)
    assert third.right == 0.0
    assert third.error == pytest.approx(third.sure)
    assert (fourth.right, fourth.sure, fourth.error) == (100.0, 87.5, 12.5)


def test_acceptance_counts_drafts_of_all_traces() -> None:
    found = figures.acceptance_data([small_trace(), small_trace()])
    assert found["by_layer"] == {"2": (2, 2), "4": (4, 2)}
    assert found["by_index"] == {"1": (4, 4), "2": (2, 0)}
    assert figures.acceptance_statistic(found["by_index"]) == [("1", 4, 100.0), ("2", 2, 0.0)]


@pytest.mark.parametrize(
    ("trace", "names"),
    [(small_trace(), PICTURES), (long_trace(["a", "b"]), PICTURES - {"acceptance.png"})],
    ids=["drafts", "plain"],
)
def test_all_pictures_are_drawn_and_their_numbers_returned(
    trace: LayerTrace, names: set[str], tmp_path: Path
) -> None:
    found = json.loads(json.dumps(figures.save_all([trace], tmp_path)))
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
    assert found["agreement"][2]["right"] == 100.0
    assert found["exits"][0]["percent"]["the model"] > 0


def test_the_script_traces_a_suite(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "suite.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b c"}\n')
    out = tmp_path / "out"
    main = runpy.run_path(str(SCRIPT))["main"]
    main(
        out,
        suite=str(tmp_path / "suite.jsonl"),
        model=str(tmp_path / "model"),
        heads="logit-lens",
        max_new_tokens=5,
        keep=True,
    )
    found = json.loads((out / "figures.json").read_text())
    assert (found["prompts"], found["saturation"]["tokens"]) == (2, 10)
    assert {path.name for path in (out / "traces").iterdir()} == {"1.jsonl", "2.jsonl"}
