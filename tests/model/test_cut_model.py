"""Draft models cut from larger ones: the same first layers, which learn; nothing else moves."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from selfspec.api.speculator import load, wrap
from selfspec.errors import InvalidOption
from selfspec.model.check import captured_outputs
from selfspec.training.features import planned
from tests.models import make_model, random_ids
from tests.talks import make_talks, save_tiny, talk_lines
from training import draft_model
from training.draft_model import agreement, cut, fit


@pytest.fixture(scope="module")
def whole() -> PreTrainedModel:
    return make_model("llama")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.inference_mode()
def test_the_first_layers_are_kept_bit_by_bit(family: str) -> None:
    whole = make_model(family)
    ids = random_ids(9)
    small: Any = cut(whole, 2)
    expected = whole(ids, output_hidden_states=True).hidden_states[2]
    _, last = small.base_model.layers
    with captured_outputs([last]) as outputs:
        small(ids)
    assert torch.equal(outputs[last], expected)
    assert wrap(whole, draft_model=small).options.drafter == "draft-model"


def test_a_cut_that_leaves_no_smaller_model_is_refused(whole: PreTrainedModel) -> None:
    for layers in (0, 6):
        with pytest.raises(InvalidOption, match=rf"layers is {layers}, expected 1\.\.5"):
            cut(whole, layers)


def test_a_fit_raises_agreement_and_leaves_all_else_alone(whole: PreTrainedModel) -> None:
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    talks = make_talks(whole)
    small = cut(whole, 2)
    at_first = agreement(small, talks, 64)
    batches = itertools.cycle(planned(talks, 64))
    fit(small, batches, steps=60, learning_rate=1e-2, progress=lambda *_: None)
    # 12 texts learned by heart: 21 % before, 100 % after when measured
    assert agreement(small, talks, 64) > at_first + 0.4
    embedding: Any = small.get_input_embeddings()
    assert torch.equal(embedding.weight, before["model.embed_tokens.weight"])
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())
    assert all(parameter.requires_grad for parameter in small.parameters())
    assert not small.training


def test_the_recipe_writes_a_folder_that_drafts(tmp_path: Path, whole: PreTrainedModel) -> None:
    save_tiny(tmp_path / "whole")
    data = tmp_path / "talks.jsonl"
    data.write_text(talk_lines(whole))
    folder = tmp_path / "small"
    asked: dict[str, Any] = {"data": data, "validation": data, "model": str(tmp_path / "whole")}
    draft_model.main(output=folder, **asked, steps=2, batch_tokens=64, validation_tokens=50)
    found = json.loads((folder / "fit.json").read_text())
    assert found["options"]["layers"] == 2
    assert 0.0 <= found["agreement_before"] <= 1.0
    speculator = load(tmp_path / "whole", draft_model=folder)
    assert speculator.generate("a b", raw=True, max_new_tokens=8).stats.drafted > 0
    with pytest.raises(InvalidOption, match="is there already"):
        draft_model.main(output=folder, **asked)
