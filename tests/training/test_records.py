"""Calibration: errors and thresholds by hand, the cost model against the paper's formula."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from selfspec.api.chat_template import read
from selfspec.cli.train import calibration_words
from selfspec.config import SpeculationOptions
from selfspec.decoding.costs import DraftCost, ExitOdds, expected_gain
from selfspec.errors import CannotWrite, InvalidData
from selfspec.heads.exit_heads import ExitHeads, HeadsConfig
from selfspec.hub import models as hub
from selfspec.model.backbone import Backbone
from selfspec.options import Costs, Exit
from selfspec.training import records
from selfspec.training.features import Selection
from selfspec.training.fit import Fitted, Job, fit
from tests.bad_input import limited, snapshot
from tests.talks import Talks
from tests.training.test_fit import fitted as fit_to
from tests.training.test_fit import make_job

FLAT = Costs(row=0.0, head=0.0)
"""Verification as cheap as a step, whatever its rows; heads for nothing."""


def test_calibration_error_is_the_mean_distance_of_confidence_and_truth() -> None:
    confidence = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.3, 0.3])
    right = torch.tensor([True, True, False, True, False, False])
    # the bin of 0.9: |3.6 - 3| over 4 positions; that of 0.3: |0.6 - 0| over 2
    assert records.calibration_error(confidence, right) == pytest.approx((0.6 + 0.6) / 6)
    assert records.calibration_error(torch.tensor([1.0, 1.0]), torch.tensor([True, True])) == 0.0


def test_the_fitted_temperature_makes_confidence_true() -> None:
    """Of two tokens the first is right with a known chance; heads have twice its logit."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(4000, generator=generator) * 2.0  # logit of the first token, at least 0
    right = torch.rand(4000, generator=generator) < truth.sigmoid()
    confidence = torch.stack([(2.0 * truth / t).sigmoid() for t in records.TEMPERATURES])
    reliability = records.reliability(records.Scores(confidence, right))
    assert reliability.temperature == pytest.approx(2.0, rel=0.1)
    assert reliability.ece < 0.02 < reliability.ece_before
    expected = records.calibration_error((2.0 * truth).sigmoid(), right)
    assert reliability.ece_before == expected  # at temperature 1, not near it


def test_exits_are_at_the_first_sure_layer() -> None:
    sure = [torch.tensor([0.9, 0.1, 0.1, 0.9]), torch.tensor([0.9, 0.9, 0.1, 0.1])]
    right = [torch.tensor([True, True, True, False]), torch.tensor([False, True, True, True])]
    assert records.odds([*zip(sure, right, strict=True)], (0.5, 0.5)) == ExitOdds((0.5, 0.25), 0.5)


def test_the_cost_model_predicts_a_simulated_scheduler() -> None:
    """Independent positions and two layers, counted over 40,000 rounds."""
    cost = DraftCost(rows=(0.3, 0.1, 0.2), head=0.05, num_layers=10)
    odds = ExitOdds((0.5, 0.3), 0.6), ExitOdds((0.4, 0.2), 0.3)  # of a round's first draft, others
    tokens, seconds, rounds = 0, 0.0, 40_000
    dice = random.Random(0)
    for _ in range(rounds):
        kept, alive = 0, True
        for place in range(3):
            exits_at, right = odds[place > 0].exits, odds[place > 0].accepted
            seconds += 0.2 + cost.head
            draw = dice.random()
            if draw >= exits_at[0]:
                seconds += 0.4 + cost.head
            if draw >= sum(exits_at):
                seconds -= 0.6  # the row has reached layer 6
                break
            seconds += cost.rows[place]
            alive &= dice.random() < right / sum(exits_at)
            kept += alive
        tokens, seconds = tokens + kept + 1, seconds + 1.0
    rate, gain = expected_gain(cost, (2, 6), *odds, 3)
    assert rate == pytest.approx(tokens / rounds, rel=0.01)
    assert gain == pytest.approx(tokens / seconds, rel=0.01)


@pytest.fixture(scope="module")
def learned(backbone: Backbone, talks: Talks) -> tuple[Job, Fitted]:
    job = make_job(backbone, talks, head_type="deep-fused", epochs=6, learning_rate=3e-2)
    return job, fit(job)


@pytest.fixture
def fitted(learned: tuple[Job, Fitted]) -> Iterator[Fitted]:
    config = learned[1].heads.config
    yield learned[1]
    learned[1].heads.config = config


def test_calibrated_heads_carry_settings_that_the_runtime_uses(
    backbone: Backbone, learned: tuple[Job, Fitted], fitted: Fitted, tmp_path: Path
) -> None:
    records.write(tmp_path, fitted, {})
    calibration = records.calibrate(fitted.heads, learned[0].validation, FLAT)
    records.write_calibration(fitted.heads, tmp_path, calibration, {"data": "talks"})
    loaded = ExitHeads.from_pretrained(tmp_path, backbone, "tiny")
    options = SpeculationOptions().updated(loaded.config.defaults)
    assert options.exit.layers == calibration.setting.exit_layers
    assert options.exit.thresholds == calibration.setting.exit_threshold
    assert loaded.config.temperatures == {
        str(layer): entry.temperature for layer, entry in calibration.layers.items()
    }
    record = json.loads((tmp_path / records.CALIBRATION).read_text())
    assert record["run"] == {"data": "talks"}
    assert record["positions"] == calibration.positions == 210
    assert record["setting"]["speed_up"] == calibration.setting.speed_up > 1.0
    empty = Selection(learned[0].validation.source, ())
    with pytest.raises(InvalidData, match="holds no answers"):
        records.calibrate(fitted.heads, empty, FLAT)
    single = records.calibrate(fitted.heads, learned[0].validation, FLAT, most_layers=1).setting
    assert (single.exit_layers, calibration.setting.exit_layers) == ((2,), (2, 4))
    assert 1.0 < single.speed_up < calibration.setting.speed_up


def test_the_setting_is_the_one_that_was_evaluated(
    learned: tuple[Job, Fitted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Surer than the threshold's last digit, heads draft as often as the expected gain says."""
    sure = torch.linspace(0.99955, 0.9999, 210).repeat(len(records.TEMPERATURES), 1)
    scores = records.Scores(sure, torch.ones(210, dtype=torch.bool))
    monkeypatch.setattr(records, "score", lambda *_: {2: (scores, scores), 4: (scores, scores)})
    setting = records.calibrate(learned[1].heads, learned[0].validation, FLAT).setting
    assert setting.compression_rate == pytest.approx(8.0)
    assert bool((sure >= setting.exit_threshold[0]).all())


def test_slower_settings_are_never_written_and_the_report_names_the_faster(
    learned: tuple[Job, Fitted], fitted: Fitted, tmp_path: Path
) -> None:
    records.write(tmp_path, fitted, {})

    def defaults(costs: Costs) -> tuple[SpeculationOptions, str]:
        calibration = records.calibrate(fitted.heads, learned[0].validation, costs)
        records.write_calibration(fitted.heads, tmp_path, calibration, {})
        settings = HeadsConfig.read(tmp_path).defaults
        return SpeculationOptions().updated(settings), calibration_words(calibration)

    fast, report = defaults(FLAT)
    assert (fast.drafter, fast.exit.layers is None) == ("ngram+exit", False)
    assert "not faster" not in report
    dear = replace(FLAT, head=9.0)
    slow, report = defaults(dear)
    assert (slow.drafter, slow.exit) == ("ngram", Exit())
    assert "is not faster" in report
    assert "--drafter ngram, prompt lookup" in report
    assert defaults(replace(dear, row=1.0))[0].drafter == "none"
    assert defaults(FLAT)[0] == fast


def test_entropies_are_those_of_the_model_at_answers(backbone: Backbone, talks: Talks) -> None:
    """The threshold is the mean of the highest twentieth: 11 of 210, or 1 of 12."""
    entropies = []
    for talk in talks:
        with torch.no_grad():
            probs = backbone.model(torch.tensor([talk.ids])).logits[0].softmax(-1)
        ((first, end),) = talk.answers
        entropies.append(-(probs * probs.log()).sum(-1)[first - 1 : end - 1])
    progress: list[tuple[int, int]] = []
    for count, highest, batch_tokens in ((12, 11, 64), (12, 11, 10_000), (1, 1, 64)):
        expected = torch.cat(entropies[:count])
        entropy = records.measure_entropy(
            backbone, talks[:count], batch_tokens, lambda *step: progress.append(step)
        )
        # float32, other batches; largest difference measured: 2e-6, and rounded to 4 places
        assert entropy == pytest.approx(
            {
                "entropy_threshold": expected.topk(highest).values.mean().item(),
                "positions": len(expected),
                "mean_entropy": expected.mean().item(),
            },
            abs=8e-5,
        )
    assert progress == [*((step, 6) for step in range(1, 7)), (1, 1), (1, 1)]


# --- records


def test_records_make_card_and_run(backbone: Backbone, talks: Talks, tmp_path: Path) -> None:
    result = fit_to(backbone, talks)
    records.write(tmp_path, result, {"exit_layers": [2, 4]})
    assert {file.name for file in tmp_path.iterdir()} == {*hub.HEADS_FILES} - {records.CALIBRATION}
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics == result.metrics
    card = (tmp_path / "README.md").read_text()
    assert f"| 4 | {100 * metrics['layers']['4']['agreement']:.1f} % |" in card
    assert "210 answer positions (a 20th of the data)" in card
    assert f"{metrics['steps']} steps" in " ".join(card.split())
    assert "second draft" not in card
    run = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert run["run"] == {"exit_layers": [2, 4]}
    assert run["machine"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == result.epochs
    (tmp_path / records.CALIBRATION).touch()
    content = snapshot(tmp_path)
    with limited(resource.RLIMIT_FSIZE, 1), pytest.raises(CannotWrite):  # a full disk
        records.write(tmp_path, result, {})
    assert snapshot(tmp_path) == content
    deep = fit_to(backbone, talks, head_type="deep-fused", ce_share=0.5)
    card = records.card(deep.heads.config, deep.metrics)
    share = deep.metrics["layers"]["2"]["agreement_second"]
    assert f"| {100 * share:.1f} % |" in card
    assert "0.5 of it cross-entropy" in card


def test_a_card_names_the_model_and_how_to_use_the_heads(backbone: Backbone, talks: Talks) -> None:
    result = fit_to(backbone, talks)
    known = replace(result.heads.config, base_model="lmsys/vicuna-7b", chat_template=read("vicuna"))
    text = records.card(known, result.metrics, licence="apache-2.0")
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["base_model"] == "lmsys/vicuna-7b"
    assert (header["license"], header["library_name"]) == ("apache-2.0", "selfspec")
    assert "selfspec generate --model lmsys/vicuna-7b --heads HEADS" in text
    assert "chat template that the model does not bring, `vicuna`" in text
    local = records.card(result.heads.config, result.metrics)
    assert "base_model" not in yaml.safe_load(local.split("---\n")[1])
    assert "--model MODEL --heads HEADS" in local
