"""Rows of a pass that change each other are found, and such a model gets no drafts."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selfspec.api.speculator import wrap
from selfspec.eval.scripted import planted
from selfspec.model.backbone import Backbone
from tests.models import make_model, random_ids


class OneScale(nn.Linear):
    """Rounds activations to 8 bits, with one scale for all rows of a pass."""

    def forward(self, rows: Tensor) -> Tensor:
        scale = rows.abs().max().clamp(min=1e-9) / 127
        return super().forward((rows / scale).round() * scale)


class OwnScale(nn.Linear):
    """The same with a scale for each row."""

    def forward(self, rows: Tensor) -> Tensor:
        scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return super().forward((rows / scale).round() * scale)


def quantised(kind: type[nn.Linear], dtype: torch.dtype = torch.float32, layer: int = 3) -> Any:
    model: Any = make_model("llama", dtype)
    model.model.layers[layer].mlp.down_proj.__class__ = kind
    return model


@pytest.mark.parametrize(("dtype", "layer"), [(torch.float32, 0), (torch.bfloat16, 5)], ids=str)
def test_one_scale_for_all_rows_is_found_in_its_layer(dtype: torch.dtype, layer: int) -> None:
    found = Backbone(quantised(OneScale, dtype, layer)).mixing
    assert found is not None
    assert found.startswith(f"layer {layer + 1}, by 0.")
    assert Backbone(quantised(OwnScale, dtype, layer)).mixing is None


def test_it_is_found_in_the_unembedding() -> None:
    model = make_model("llama", tie_word_embeddings=False)
    head: Any = model.lm_head
    head.__class__ = OneScale
    assert str(Backbone(model).mixing).startswith("the logits, by ")


@pytest.mark.filterwarnings("ignore")  # torch has it no longer in view of torchao
def test_dynamic_quantisation_of_activations_is_found() -> None:
    model = torch.ao.quantization.quantize_dynamic(make_model("llama"), {nn.Linear})
    backbone = Backbone(model)
    assert backbone.executor_name == "generic"
    assert backbone.mixing is not None
    ids = random_ids(9)
    answer = wrap(model, drafter="ngram").generate(ids, max_new_tokens=12)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert answer.token_ids == expected[0, 9:].tolist()


def test_such_a_model_gets_no_drafts_and_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = quantised(OneScale), random_ids(9)
    with caplog.at_level(logging.WARNING):
        speculator = wrap(model, heads="logit-lens", drafter="exit:threshold=0.01")
    assert "no drafts for LlamaForCausalLM: the rows of a pass change each other" in caplog.text
    answer = speculator.generate(ids, max_new_tokens=40)
    assert answer.stats.drafted == 0
    assert str(answer.stats.drafts_refused).startswith("layer 4, by ")
    assert "no drafts: layer 4" in answer.stats.line()
    expected = model.generate(ids, max_new_tokens=40, do_sample=False)
    assert answer.token_ids == expected[0, 9:].tolist()
    assert set(planted(speculator, speculator.options, [1, 2])) == {"no"}
    plain = speculator.generate(ids, max_new_tokens=4, speculate=False)
    assert plain.stats.drafts_refused is None  # none were asked for


def test_float16_drafts_where_bits_are_pinned_and_says_so_once_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A seed whose text drafts changed."""
    speculator = wrap(make_model("llama", torch.float16), heads="logit-lens")
    ids, options = random_ids(9, seed=5), dict[str, Any](max_new_tokens=40)
    eager: dict[str, Any] = {"drafter": "exit:threshold=0.01", "never_slower": False}
    plain = speculator.generate(ids, **options, speculate=False)
    assert plain.stats.drafts_refused is None
    for drafting in (eager, {"drafter": "ngram"}):
        answer = speculator.generate(ids, **options | drafting)
        assert answer.token_ids == plain.token_ids
        assert "float16" in str(answer.stats.drafts_refused)
    assert caplog.text.count("no drafts in float16") == 1
    options |= {"pinned": True, "pinned_rows": 16}
    answer = speculator.generate(ids, **options | eager)
    assert answer.stats.drafted > 0
    assert answer.token_ids == speculator.generate(ids, **options, speculate=False).token_ids
