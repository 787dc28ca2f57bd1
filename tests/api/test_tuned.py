"""Settings kept for this machine: their conditions, their precedence, and ignored files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfspec.api import tuned
from selfspec.api.speculator import wrap
from selfspec.cli.base import SPECULATION, merge_options
from selfspec.config import SpeculationOptions
from selfspec.heads.exit_heads import ExitHeads
from selfspec.hub.models import load_model
from selfspec.model.backbone import Backbone
from selfspec.model.weights import TEAM
from selfspec.options import Costs, Exit, Ngram
from tests.gguf_models import write_model
from tests.heads.kinds import make_heads, train
from tests.models import make_model, needs_compiler

pytestmark = pytest.mark.usefixtures("empty_cache")

FIRST_COSTS = tuned.first_costs  # stubbed for other tests

OPTIONS: dict[str, Any] = {
    "speculate": True,
    "drafter": "exit:layers=4,threshold=0.25,anneal_strength=0.5,max_tokens=3",
}
DEFAULTS: dict[str, Any] = {"drafter": "exit:layers=2,threshold=0.8"}


@pytest.fixture
def heads(backbone: Backbone) -> ExitHeads:
    return make_heads("translator", backbone.unembedding, defaults=DEFAULTS)


@pytest.fixture
def kept(backbone: Backbone, heads: ExitHeads) -> Path:
    return tuned.write(backbone, heads, OPTIONS, {"speed_up": 1.2})


def test_a_model_without_heads_is_measured_once_too(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = [Costs(row=0.1), Costs(), Costs(row=0.9)]  # not a fourth time
    monkeypatch.setattr(tuned, "quick_costs", lambda *_: measured.pop())
    monkeypatch.setattr(tuned, "first_costs", FIRST_COSTS)
    with monkeypatch.context() as busy:
        busy.setattr(TEAM, "_free_cores", 1)
        assert wrap(model, heads="none").options.costs == Costs(row=0.9)
    assert wrap(model, heads="none").options.costs == Costs()  # too few positions to compare rows
    for _ in range(2):
        assert wrap(model, heads="none").options.costs == Costs(row=0.1)


def test_costs_are_measured_once_and_kept(
    model: PreTrainedModel, heads: ExitHeads, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "first_costs", FIRST_COSTS)
    measured = [Costs(row=(0.1 + number / 99,) * 15, head=0.1) for number in range(6)]
    monkeypatch.setattr(tuned, "quick_costs", lambda *_: measured.pop())
    costs = wrap(model, heads=heads).options.costs
    assert costs.head
    assert len(costs.rows or ()) == 15
    [file] = (empty_cache / "costs").iterdir()
    text = file.read_text()
    assert wrap(model, heads=heads).options.costs == costs
    assert file.read_text() == text
    for content in ("", "{}", '{"format_version": 2, "options": {"costs": "row=7"}}'):
        file.write_text(content)
        assert wrap(model, heads=heads).options.costs.rows is not None
        assert json.loads(file.read_text())["options"].keys() == {"costs"}
    with monkeypatch.context() as patch:
        patch.setattr(tuned, "KERNELS", empty_cache)  # other kernels
        assert wrap(model, heads=heads).options.costs.rows is not None
    assert len([*file.parent.iterdir()]) == 2
    speculator = wrap(model, heads=heads, costs="head=0.5")
    assert speculator.options.costs == Costs(head=0.5)
    assert tuned.forget(speculator.backbone, heads) == [file]
    assert not file.exists()
    file.mkdir()  # nothing can be kept there
    assert wrap(model, heads=heads).options.costs.rows is not None


def test_each_setting_comes_from_the_first_source_that_has_it(
    model: PreTrainedModel, backbone: Backbone, tmp_path: Path
) -> None:
    """The order is: flag, file, tuned settings, heads, built-in defaults."""
    defaults = {"drafter": "ngram:size=2+exit:threshold=0.8,layers=2", "costs": "head=0.5,row=0.3"}
    heads = make_heads("translator", backbone.unembedding, defaults=defaults)
    settings = {"drafter": "ngram+exit:layers=4,max_tokens=3", "costs": "row=0.2"}
    tuned.write(backbone, heads, settings, {})
    (tmp_path / "run.yaml").write_text("drafter: exit:max_tokens=4,anneal_strength=0\n")
    flags = {"drafter": "exit:max_tokens=5"}
    keywords = merge_options(tmp_path / "run.yaml", flags, SPECULATION)
    options = wrap(model, heads=heads, **keywords).options
    assert options.drafter == "exit"
    assert options.exit == Exit(layers=(4,), threshold=0.8, anneal_strength=0.0, max_tokens=5)
    assert options.ngram == Ngram(size=2)
    assert options.costs == Costs(row=0.2, head=0.5)


def test_a_file_holds_its_conditions_and_its_use_is_logged(
    backbone: Backbone, heads: ExitHeads, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = json.loads(kept.read_text())
    assert values["conditions"] == tuned.conditions(backbone, heads)
    assert values["found"] == {"speed_up": 1.2}
    with caplog.at_level(logging.DEBUG, "selfspec.api.tuned"):
        assert tuned.read(backbone, heads) == OPTIONS
    assert said(caplog) == [f"settings tuned for this machine, from {kept}"]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of the module under test; other modules may log too."""
    return [record.message for record in caplog.records if record.name == "selfspec.api.tuned"]


def test_another_model_dtype_thread_count_or_head_has_another_file(
    backbone: Backbone, heads: ExitHeads, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [
        (backbone, train(make_heads("translator", backbone.unembedding))),
        (backbone, make_heads("translator", backbone.unembedding, temperatures={"2": 1.5})),
        (backbone, make_heads("translator", backbone.unembedding, exit_layers=(2, 5))),
        (backbone, make_heads("linear", backbone.unembedding)),
        (Backbone(make_model("llama", torch.bfloat16)), heads),
        (Backbone(make_model("llama"), executor="generic"), heads),
        (backbone, make_heads("translator", backbone.unembedding, base_fingerprint="other")),
    ]
    files = {tuned.path(*pair) for pair in pairs}
    assert tuned.processor(torch.device("cpu"))
    for module, name, stub in (
        (tuned, "processor", lambda _: "another one"),
        (torch, "get_num_threads", lambda: 64),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, stub)
            files.add(tuned.path(backbone, heads))
    assert len(files) == len(pairs) + 2
    assert kept not in files
    same = make_heads("translator", backbone.unembedding, defaults={"drafter": "ngram"})
    assert tuned.path(backbone, same) == kept


@needs_compiler
def test_quantised_and_de_quantised_weights_have_separate_costs(tmp_path: Path) -> None:
    """The fingerprint is the same, but the share of a step that a row costs differs."""
    write_model(file := tmp_path / "it.gguf")
    blocks, numbers = (
        Backbone(load_model(file, dtype="float32", device="cpu", blocks=quantised)[0])
        for quantised in (True, False)
    )
    assert blocks.fingerprint == numbers.fingerprint
    assert tuned.path(blocks, None) != tuned.path(numbers, None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "list indices"),
        ("{}", "format_version"),
        ('{"format_version": 1}', "format version 1, not 2"),
        ('{"format_version": 2}', "options"),
        ({"acceptance": "lenient"}, "unknown option 'acceptance'"),  # would change the output
        ({"pinned": True}, "unknown option 'pinned'"),
        ({"drafter": "exit:layers=3"}, "exit layer 3 is not among [2, 4]"),
        ({"drafter": "exit:layers=2,threshold=0.5/0.6"}, "2 exit thresholds for 1 exit layers"),
        ({"drafter": "exit:max_tokens=0"}, "exit:max_tokens is 0"),
        ({"drafter": "exit:max_tokens=x"}, "exit:max_tokens is 'x', expected a whole number"),
    ],
    ids=str,
)
def test_a_broken_file_is_named_in_one_line_and_ignored(
    content: str | dict[str, Any],
    reason: str,
    model: PreTrainedModel,
    heads: ExitHeads,
    kept: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if isinstance(content, dict):
        content = json.dumps({"format_version": 2, "options": content})
    kept.write_text(content)
    options = wrap(model, heads=heads).options
    assert (options.exit.layers, options.loss, options.pinned) == ((2,), None, None)
    (line,) = said(caplog)
    assert line.startswith(f"ignored {kept}: ")
    assert reason in line
    assert "\n" not in line
    assert line.endswith("Run selfspec tune again, or with --forget")


def test_a_model_without_heads_has_a_file_of_its_own(
    model: PreTrainedModel, backbone: Backbone, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert wrap(model).options == SpeculationOptions(drafter="ngram")
    assert tuned.write(backbone, None, {"speculate": False}, {}) != kept
    caplog.clear()
    plain = wrap(model).options
    assert not plain.speculate
    assert plain.updated({"drafter": "ngram"}).speculate, "asked for by name"
    assert not plain.updated({"drafter": "ngram", "speculate": False}).speculate
    assert "heads" not in caplog.text
    assert wrap(model, drafter="ngram:size=2").options.ngram == Ngram(size=2)
    tuned.write(backbone, None, OPTIONS, {})  # options of exit heads
    assert wrap(model).options == SpeculationOptions(drafter="ngram")
    assert "its drafts come from exit heads" in caplog.text
