"""Exit heads from 8-bit copies of their weights: the same answers, and when there is no copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selfspec.decoding.drafters.heads import pack
from selfspec.decoding.state import alone
from selfspec.heads.heads import HEAD_TYPES
from selfspec.model.backbone import Backbone
from tests.heads.kinds import make_heads, train
from tests.ladder import attending_heads
from tests.models import make_model, needs_compiler, random_ids


@needs_compiler
@pytest.mark.parametrize("family", ["llama", "phi"])  # phi: LayerNorm, an unembedding with a bias
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", HEAD_TYPES)
def test_packed_heads_answer_the_same_up_to_eight_bits(
    kind: str, dtype: torch.dtype, family: str
) -> None:
    backbone = Backbone(make_model(family, dtype), executor="generic")
    heads = train(make_heads(kind, backbone.unembedding, draft_vocab_size=5))
    hidden = backbone.embed(random_ids(6)[0]).view(2, 3, -1)

    def answers() -> list[Tensor]:
        with torch.no_grad():
            features = [heads.first.features(hidden, deep) for deep in (hidden.flip(0), None)]
            return [*features, heads.first.unembed(hidden)]

    whole = answers()
    pack(heads)
    packed = answers()
    for found, expected in zip(packed, whole, strict=True):
        assert found.dtype == expected.dtype
        assert near(found, expected)
    if dtype == torch.float32:  # else, where blocks are slow, they are the same numbers
        assert not torch.equal(packed[-1], whole[-1])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_of_heads_that_attend_is_packed_too(dtype: torch.dtype) -> None:
    backbone = Backbone(make_model("llama", dtype), executor="generic")
    heads = attending_heads(backbone)
    states = torch.cat([backbone.embed(random_ids(6, seed=n)[0]) for n in range(3)], dim=-1)

    def answers() -> list[Tensor]:
        with torch.no_grad():
            reading = heads.attention(backbone.embed)
            reading.add(states)
            output = alone(reading.read(random_ids(7)[0].tolist()))
            assert output is not None
            return [heads.fuse(states), output, heads.head(output)]

    whole, nbytes = answers(), heads.nbytes
    pack(heads)
    packed = answers()
    assert heads.nbytes < nbytes
    assert all(near(found, expected) for found, expected in zip(packed, whole, strict=True))
    assert not torch.equal(packed[1], whole[1])
    assert torch.equal(heads.twin(backbone.unembedding).fuse(states), whole[0])


def near(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).abs().max()) < 0.02 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("deep-fused-draft", {"compiler": "no-such-compiler"}),
        ("mlp", {"draft_vocab_size": 5, "norm": nn.Softmax(dim=-1)}),  # of a kind of its own
        *((kind, {}) for kind in ("linear", "deep-fused", "logit-lens")),  # these draft any token
    ],
)
@torch.no_grad()
def test_some_heads_stay_as_they_are(
    kind: str, options: dict[str, Any], backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "compiler" in options:
        monkeypatch.setenv("CXX", options["compiler"])
    sizes = {name: value for name, value in options.items() if name == "draft_vocab_size"}
    heads = train(make_heads(kind, backbone.unembedding, **sizes))
    if "norm" in options:
        heads[2].parts = heads[2].parts._replace(norm=options["norm"])
    hidden = backbone.embed(random_ids(3)[0])
    whole = heads[2](hidden, hidden)
    pack(heads)
    assert torch.equal(heads[2](hidden, hidden), whole)


def test_packed_heads_can_still_be_fitted(backbone: Backbone) -> None:
    heads = train(make_heads("deep-fused-draft", backbone.unembedding))
    pack(heads)
    hidden = backbone.embed(random_ids(3)[0])
    heads[2](hidden, hidden).sum().backward()
    assert all(weight.grad is not None for weight in heads[2].parameters())
