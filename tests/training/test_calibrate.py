"""Calibration: errors and thresholds by hand, the cost model against the paper's formula."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from selfspec.cli.train import calibration_words
from selfspec.config import SpeculationOptions
from selfspec.decoding.costs import Exits, MeasuredCosts, expected
from selfspec.heads.exit_heads import ExitHeads, HeadsConfig
from selfspec.model.backbone import Backbone
from selfspec.options import Exit
from selfspec.training import calibrate, records
from selfspec.training.calibrate import (
    TEMPERATURES,
    Scores,
    best_setting,
    calibration_error,
    entropies,
    exits,
    high_entropy,
    measured_entropy,
)
from selfspec.training.features import FeatureSpec, features, padded
from selfspec.training.fit import Fitted, Job, fit
from selfspec.training.text import Conversation
from tests.talks import make_talks
from tests.training.test_fit import make_job

NOTHING = (0.0,) * 8
FLAT = MeasuredCosts(
    num_layers=10, layers=(1.0,) * 8, start=NOTHING, logits=NOTHING, head=0.0, round=0.0
)
"""Verification as cheap as a step, whatever its rows; heads for nothing."""


def test_calibration_error_is_the_mean_distance_of_confidence_and_truth() -> None:
    confidence = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.3, 0.3])
    right = torch.tensor([True, True, False, True, False, False])
    # the bin of 0.9: |3.6 - 3| over 4 positions; that of 0.3: |0.6 - 0| over 2
    assert calibration_error(confidence, right) == pytest.approx((0.6 + 0.6) / 6)
    assert calibration_error(torch.tensor([1.0, 1.0]), torch.tensor([True, True])) == 0.0


def test_the_fitted_temperature_makes_confidence_true() -> None:
    """Of two tokens the first is right with a known chance; heads are twice as sure as that."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(4000, generator=generator) * 2.0  # logit of the first token, at least 0
    right = torch.rand(4000, generator=generator) < truth.sigmoid()
    confidence = torch.stack([(2.0 * truth / t).sigmoid() for t in TEMPERATURES])
    found = calibrate.reliability(Scores(confidence, right))
    assert found.temperature == pytest.approx(2.0, rel=0.1)
    assert found.ece < 0.02 < found.ece_before


def test_exits_are_at_the_first_sure_layer() -> None:
    sure = [torch.tensor([0.9, 0.1, 0.1, 0.9]), torch.tensor([0.9, 0.9, 0.1, 0.1])]
    right = [torch.tensor([True, True, True, False]), torch.tensor([False, True, True, True])]
    assert exits(sure, right, (0.5, 0.5)) == Exits((0.5, 0.25), 0.5)


@pytest.mark.parametrize(("acceptance", "width"), [(0.3, 1), (0.3, 7), (0.8, 3)])
def test_the_cost_model_is_the_papers_formula_where_its_assumptions_hold(
    acceptance: float, width: int
) -> None:
    """One exit layer at 3 of 10, always taken; deep layers for all, and shallow ones once more."""
    always = Exits((1.0,), acceptance)
    tokens, gain = expected(FLAT, (3,), always, always, width)
    assert tokens == pytest.approx((1 - acceptance ** (width + 1)) / (1 - acceptance))
    seconds = width * 0.3 + 0.7  # k D_max / L + (L - D_max) / L
    # ours runs the last draft's own row through the shallow layers too: it gives the bonus token
    assert gain == pytest.approx(tokens / (seconds + 0.3))


def test_later_drafts_have_their_own_chances() -> None:
    first, later = Exits((1.0,), 0.5), Exits((1.0,), 0.1)
    assert expected(FLAT, (3,), first, later, 3)[0] == pytest.approx(1 + 0.5 + 0.05 + 0.005)
    never = Exits((0.0,), 0.0)  # a difficult token is not run twice through the shallow layers
    assert expected(FLAT, (3,), never, never, 4) == pytest.approx((1.0, 1.0))


def test_the_model_foretells_a_simulated_scheduler() -> None:
    """Independent places, two layers, rows that cost nothing: counted over 40,000 rounds."""
    found = Exits((0.5, 0.3), 0.6)
    tokens, seconds, rounds = 0, 0.0, 40_000
    dice = random.Random(0)
    for _ in range(rounds):
        kept, alive = 0, True
        for _place in range(3):
            seconds += 0.2
            at = dice.random()
            if at >= 0.5:
                seconds += 0.4
            if at >= 0.8:
                seconds -= 0.6  # this row has come to layer 6
                break
            alive &= dice.random() < 0.6 / 0.8
            kept += alive
        tokens, seconds = tokens + kept + 1, seconds + 1.0
    rate, gain = expected(FLAT, (2, 6), found, found, 3)
    assert rate == pytest.approx(tokens / rounds, rel=0.01)
    assert gain == pytest.approx(tokens / seconds, rel=0.01)


def test_the_best_setting_is_the_best_of_all() -> None:
    candidates = {2: (0.1, 0.6), 5: (0.4,)}

    def evaluate(layers: tuple[int, ...], taus: tuple[float, ...]) -> tuple[Exits, Exits]:
        at = tuple(0.9 - tau for tau in taus)
        found = Exits(tuple(share / len(at) for share in at), sum(at) / len(at) * 0.8)
        return found, found

    found = best_setting(FLAT, candidates, evaluate)
    every: list[tuple[tuple[int, ...], tuple[float, ...]]] = [
        ((layer,), (tau,)) for layer, taus in candidates.items() for tau in taus
    ]
    every += [((2, 5), pair) for pair in itertools.product(*candidates.values())]
    gains = [
        expected(FLAT, layers, *evaluate(layers, taus), width)[1]
        for layers, taus in every
        for width in range(1, 8)
    ]
    assert found.speed_up == max(gains)


@pytest.fixture(scope="module")
def learned(backbone: Backbone, talks: list[Conversation]) -> tuple[Job, Fitted]:
    job = make_job(backbone, talks, head_type="deep-fused", epochs=6, learning_rate=3e-2)
    return job, fit(job)


@pytest.fixture
def fitted(learned: tuple[Job, Fitted]) -> Iterator[Fitted]:
    before = learned[1].heads.config
    yield learned[1]
    learned[1].heads.config = before


def test_calibrated_heads_carry_settings_that_the_runtime_takes(
    backbone: Backbone, learned: tuple[Job, Fitted], fitted: Fitted, tmp_path: Path
) -> None:
    records.write(tmp_path, fitted, {})
    found = calibrate.calibrate(fitted.heads, learned[0].validation, FLAT)
    calibrate.write(fitted.heads, tmp_path, found, {"data": "talks"})
    loaded = ExitHeads.from_pretrained(tmp_path, backbone.unembedding, backbone.fingerprint, "tiny")
    options = SpeculationOptions().updated(loaded.config.defaults)
    assert options.exit.layers == found.setting.exit_layers
    assert options.exit.thresholds == found.setting.exit_threshold
    assert loaded.config.temperatures == {
        str(layer): entry.temperature for layer, entry in found.reliabilities.items()
    }
    record = json.loads((tmp_path / records.CALIBRATION).read_text())
    assert record["run"] == {"data": "talks"}
    assert record["positions"] == found.positions == 210
    assert record["setting"]["speed_up"] == found.setting.speed_up > 1.0


def test_what_is_slower_is_never_written_and_the_report_says_what_is(
    learned: tuple[Job, Fitted], fitted: Fitted, tmp_path: Path
) -> None:
    records.write(tmp_path, fitted, {})

    def defaults(costs: MeasuredCosts) -> tuple[SpeculationOptions, str]:
        found = calibrate.calibrate(fitted.heads, learned[0].validation, costs)
        calibrate.write(fitted.heads, tmp_path, found, {})
        kept = HeadsConfig.read(tmp_path).defaults
        return SpeculationOptions().updated(kept), calibration_words(found)

    fast, words = defaults(FLAT)
    assert (fast.drafter, fast.exit.layers is None) == ("ngram+exit", False)
    assert "not faster" not in words
    dear = replace(FLAT, num_layers=6, head=9.0)
    seen, words = defaults(dear)
    assert (seen.drafter, seen.exit) == ("ngram", Exit())
    assert "which is not faster" in words
    assert "--drafter ngram, prompt lookup" in words
    rows = replace(
        dear, layers=tuple(2.0 * layers * (r + 1) for r, layers in enumerate(FLAT.layers))
    )
    assert defaults(rows)[0].drafter == "none"
    assert defaults(FLAT)[0] == fast


# --- the entropy threshold of easd


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, 0.0), (20, 19.0), (21, 19.5), (40, 38.5), (41, 39.0)],  # the highest 1, 1, 2, 2, 3
)
def test_the_threshold_is_the_mean_of_the_highest_twentieth(count: int, expected: float) -> None:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    assert high_entropy(order.float()) == expected


def test_entropies_are_those_of_the_models_own_laws_at_answer_positions(backbone: Backbone) -> None:
    talks = make_talks(backbone.model)
    last = backbone.num_layers
    batch = features(backbone, FeatureSpec((last,)), padded(talks[:3]))
    found = entropies(backbone, batch.hidden[last])
    expected = []
    for talk in talks[:3]:
        with torch.no_grad():
            probs = backbone.model(torch.tensor([talk.ids])).logits[0].softmax(-1)
        ((first, end),) = talk.answers
        expected.append(-(probs * probs.log()).sum(-1)[first - 1 : end - 1])
    # float32, batched otherwise; largest difference measured: 2e-6
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=2e-5)
    heard: list[tuple[int, int]] = []
    whole = measured_entropy(backbone, talks, 64, lambda done, total: heard.append((done, total)))
    assert whole["positions"] == sum(len(talk.answer_ids) for talk in talks)
    assert heard == [(step + 1, len(heard)) for step in range(len(heard))]
    one_batch = measured_entropy(backbone, talks, 10_000, lambda *_: None)
    assert one_batch == pytest.approx(whole, abs=2e-4)
