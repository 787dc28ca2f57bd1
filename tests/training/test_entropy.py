"""EASD's entropy threshold: the document's mean, the model's own entropies, where it is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from selfspec.api.speculator import load
from selfspec.cli.main import main
from selfspec.config import SpeculationOptions
from selfspec.heads.exit_heads import HeadsConfig
from selfspec.model.backbone import Backbone
from selfspec.options import Easd
from selfspec.training.calibrate import entropies, high_entropy, measured_entropy
from tests.heads.kinds import make_heads
from tests.models import make_model, random_ids
from tests.talks import make_talks, make_tokenizer

MODEL = ["--model", "model", "--dtype", "float32"]
COMMAND = ["calibrate", "--entropy", *MODEL, "--data", "talks.jsonl"]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, 0.0), (20, 19.0), (21, 19.5), (40, 38.5), (41, 39.0)],  # the highest 1, 1, 2, 2, 3
)
def test_the_threshold_is_the_mean_of_the_highest_twentieth(count: int, expected: float) -> None:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    assert high_entropy(order.float()) == expected


def test_entropies_are_those_of_the_models_own_laws_at_answer_positions(
    backbone: Backbone,
) -> None:
    talks = make_talks(backbone.model)
    found = entropies(backbone, talks[:3])
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
    assert whole.positions == sum(len(talk.answer_ids) for talk in talks)
    assert heard == [(step + 1, len(heard)) for step in range(len(heard))]
    one_batch = measured_entropy(backbone, talks, 10_000, lambda *_: None)
    assert one_batch.entropy_threshold == pytest.approx(whole.entropy_threshold, abs=2e-4)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model, conversations and heads; the current one."""
    model = make_model("llama")
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    lines = [json.dumps({"input_ids": list(t.ids), "answer_start": 5}) for t in make_talks(model)]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n")
    backbone = Backbone(model)
    unembedding, digest = backbone.unembedding, backbone.fingerprint
    defaults = {"drafter": "exit:layers=2,threshold=0.1"}
    heads = make_heads("translator", unembedding, base_fingerprint=digest, defaults=defaults)
    heads.save(tmp_path / "heads")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def entropy_of(config: HeadsConfig) -> float | None:
    """tau_H of the defaults."""
    return SpeculationOptions().updated(config.defaults).easd.entropy


def test_it_becomes_a_default_of_the_heads_and_easd_uses_it(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = HeadsConfig.read(workplace / "heads")
    assert main([*COMMAND, "--heads", "heads"]) == 0
    after = HeadsConfig.read(workplace / "heads")
    value = entropy_of(after)
    assert value is not None
    assert after.defaults == before.defaults | {"easd": f"entropy={value}"}
    output = capsys.readouterr().out
    assert f"entropy threshold {value} nats" in output
    assert "written to heads" in output
    speculator = load("model", heads="heads", dtype="float32", acceptance="easd")
    assert speculator.options.acceptance == Easd(entropy=value)
    assert not speculator.generate(random_ids(5), max_new_tokens=4).stats.lossless


def test_without_heads_or_in_a_dry_run_it_is_only_printed(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (workplace / "heads" / "config.json").read_bytes()
    assert main(COMMAND) == 0
    assert "not stored: give it as --acceptance easd:entropy=" in capsys.readouterr().out
    assert main([*COMMAND, "--heads", "heads", "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"entropy_threshold", "positions", "mean_entropy"}
    assert 0 < found["mean_entropy"] < found["entropy_threshold"]
    assert (workplace / "heads" / "config.json").read_bytes() == before


def test_calibrating_the_heads_later_keeps_it(workplace: Path) -> None:
    assert main([*COMMAND, "--heads", "heads"]) == 0
    value = entropy_of(HeadsConfig.read(workplace / "heads"))
    assert main(["calibrate", *MODEL, "--heads", "heads", "--data", "talks.jsonl"]) == 0
    assert entropy_of(HeadsConfig.read(workplace / "heads")) == value


def test_it_needs_a_text(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--entropy", *MODEL]) == 2
    assert "no --data" in capsys.readouterr().err
