"""Exit heads: what each type computes, draft vocabularies, the logit lens, names and bounds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from selfspec.errors import InvalidOption
from selfspec.heads.exit_heads import check_exit_layers, logit_lens
from selfspec.heads.folder import WEIGHTS_FILE
from selfspec.model.backbone import Backbone
from selfspec.model.parts import Unembedding
from tests.heads.kinds import DRAFT_IDS, KINDS, TRAINED, make_config, make_heads, train
from tests.models import VOCAB_SIZE, make_model, random_ids
from training.narrow import narrowed

# What heads compute


# with a soft cap, two kinds of scale, and another norm
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite"])
@torch.inference_mode()
def test_untrained_heads_read_the_last_state_as_the_model_does(family: str) -> None:
    backbone = Backbone(make_model(family), executor="generic")
    hidden = backbone.embed(random_ids(3)[0])
    for kind in ("linear", "translator", "low-rank", "mlp", "logit-lens"):
        found = make_heads(kind, backbone.unembedding)[4](hidden)
        assert found.dtype == torch.float32
        assert torch.equal(found, backbone.logits(hidden)), kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_in_the_models_dtype_and_give_float32(dtype: torch.dtype) -> None:
    backbone = Backbone(make_model("llama", dtype), executor="generic")
    hidden = backbone.embed(random_ids(3)[0])
    assert hidden.dtype == dtype
    for kind in KINDS:
        head = make_heads(kind, backbone.unembedding)[2]
        assert head(hidden).dtype == torch.float32
        assert {weight.dtype for weight in head.parameters()} <= {dtype}


def test_a_linear_head_is_a_norm_and_a_matrix_of_its_layer(
    unembedding: Unembedding, hidden: Tensor
) -> None:
    heads = train(make_heads("linear", unembedding))
    for layer in (2, 4):
        normed = heads[layer].parts.norm(hidden)
        expected = nn.functional.linear(normed, heads[layer].state_dict()["weight"])
        assert torch.equal(heads[layer](hidden), expected)
    assert not torch.equal(heads[2](hidden), heads[4](hidden))
    with pytest.raises(KeyError):
        heads[3]


@pytest.mark.parametrize("kind", ["translator", "low-rank"])
def test_a_translator_adds_an_affine_map_to_the_identity(
    kind: str, unembedding: Unembedding, hidden: Tensor
) -> None:
    head = train(make_heads(kind, unembedding))[2]
    weights, normed = head.state_dict(), head.parts.norm(hidden)
    narrow = normed if kind == "translator" else normed @ weights["down.weight"].T
    if kind == "low-rank":
        assert weights["down.weight"].shape == (3, 32)
        assert weights["up.weight"].shape == (32, 3)
    moved = normed + narrow @ weights["up.weight"].T + weights["up.bias"]
    # float32; largest difference measured: 1.9e-6
    assert (head(hidden) - moved @ unembedding.weight.T).abs().max() < 1e-5


@pytest.mark.parametrize("kind", TRAINED)
def test_training_heads_leaves_the_model_alone(
    kind: str, backbone: Backbone, hidden: Tensor
) -> None:
    before = {name: weight.clone() for name, weight in backbone.model.state_dict().items()}
    heads = make_heads(kind, backbone.unembedding)
    heads[2](hidden).logsumexp(-1).sum().backward()
    own = dict(heads[2].named_parameters())
    # the narrow matrix gets no gradient at first, because the wide one behind it is still zero
    assert all(weight.grad is not None for weight in own.values())
    assert any(weight.grad is not None and weight.grad.any() for weight in own.values())
    assert all(weight.grad is None for weight in backbone.model.parameters())
    train(heads)
    after = backbone.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", ["linear", "translator", "logit-lens"])
def test_heads_without_an_inner_layer_refuse_a_width(kind: str, unembedding: Unembedding) -> None:
    with pytest.raises(InvalidOption, match="Head has no inner layer, found 3"):
        make_heads(kind, unembedding, inner_size=3)


def test_an_mlp_adds_a_hidden_layer_to_a_translator(
    unembedding: Unembedding, hidden: Tensor
) -> None:
    head = train(make_heads("mlp", unembedding))[2]
    weights, normed = head.state_dict(), head.parts.norm(hidden)
    inner = nn.functional.silu(
        normed @ weights["change.inner.weight"].T + weights["change.inner.bias"]
    )
    assert inner.shape[-1] == 7
    moved = normed + normed @ weights["change.direct.weight"].T + weights["change.direct.bias"]
    moved = moved + inner @ weights["change.outer.weight"].T + weights["change.outer.bias"]
    # float32; largest difference measured: 1.9e-6
    assert (head(hidden) - moved @ unembedding.weight.T).abs().max() < 1e-5


def test_a_deep_fused_head_is_an_mlp_over_both_states(
    unembedding: Unembedding, hidden: Tensor
) -> None:
    untrained = make_heads("deep-fused", unembedding)
    assert not untrained[2](hidden, hidden).any()  # it foretells nothing
    head, deep = train(untrained)[2], hidden.flip(-1)
    weights = head.state_dict()
    both = torch.cat([head.parts.norm(hidden), deep], dim=-1)
    inner = nn.functional.silu(
        both @ weights["change.inner.weight"].T + weights["change.inner.bias"]
    )
    moved = both @ weights["change.direct.weight"].T + weights["change.direct.bias"]
    moved = moved + inner @ weights["change.outer.weight"].T + weights["change.outer.bias"]
    # float32; largest difference measured: 1.9e-6
    assert (head.features(hidden, deep) - moved).abs().max() < 1e-5
    assert torch.equal(head(hidden), head(hidden, torch.zeros_like(deep)))
    assert not torch.equal(head(hidden), head(hidden, deep))


# The unembedding is the model's


@pytest.mark.parametrize(
    ("kind", "shared"),
    [("translator", True), ("low-rank", True), ("logit-lens", True), ("linear", False)],
)
def test_the_unembedding_is_the_models_own_storage_unless_a_head_has_a_matrix(
    kind: str, shared: bool, own: Unembedding, hidden: Tensor
) -> None:
    head = make_heads(kind, own)[2]
    before = head(hidden)
    with torch.no_grad():
        own.weight.zero_()
    assert torch.equal(head(hidden), torch.zeros_like(before) if shared else before)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("linear", {"norm.weight", "weight"}),
        ("translator", {"norm.weight", "up.weight", "up.bias"}),
        ("low-rank", {"norm.weight", "down.weight", "up.weight", "up.bias"}),
        (
            "deep-fused",
            {
                "norm.weight",
                *(
                    f"change.{part}.{name}"
                    for part in ("direct", "inner", "outer")
                    for name in ("weight", "bias")
                ),
            },
        ),
    ],
)
def test_a_file_holds_exactly_what_was_trained(
    kind: str, names: set[str], unembedding: Unembedding, tmp_path: Path
) -> None:
    make_heads(kind, unembedding).save(tmp_path)
    found = set(load_file(tmp_path / WEIGHTS_FILE))
    assert found == {f"by_layer.{layer}.{name}" for layer in (2, 4) for name in names}


# Draft vocabularies


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "draft" in kind])
def test_draft_logits_are_the_full_heads_logits_of_the_chosen_tokens(
    kind: str, hidden: Tensor
) -> None:
    unembedding = Backbone(make_model("llama", torch.float64), executor="generic").unembedding
    full = make_heads(kind.removesuffix("-draft"), unembedding)[2]
    heads = make_heads(kind, unembedding)
    narrow = heads[2]
    assert (narrow.rows is heads[4].rows) != kind.startswith("linear")  # held once for all
    assert (len(full.rows), len(narrow.rows)) == (VOCAB_SIZE, 5)
    found, expected = narrow(hidden.double()), full(hidden.double())[..., DRAFT_IDS]
    # both were computed in float64 and rounded to float32; largest difference measured: 0
    assert (found - expected).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["linear-draft", "deep-fused-draft", "translator"])
def test_narrowed_heads_say_the_same_of_fewer_tokens(kind: str, unembedding: Unembedding) -> None:
    heads = train(make_heads(kind, unembedding))
    narrow = narrowed(heads, unembedding, 3, Counter({17: 2, 95: 5, 40: 4}), always=[3])
    kept, hidden = narrow.first.draft_ids, torch.randn(3, unembedding.weight.shape[1])
    assert kept is not None
    assert kept.tolist() == [3, 40, 95]
    wide = heads.first.to_target_logits(heads.first(hidden))
    torch.testing.assert_close(narrow.first(hidden), wide[:, kept])
    with pytest.raises(InvalidOption, match="draft_vocab_size"):
        narrowed(narrow, unembedding, 4, Counter())


def test_draft_logits_widen_to_the_vocabulary_without_the_other_tokens(
    unembedding: Unembedding, hidden: Tensor
) -> None:
    head = make_heads("linear-draft", unembedding)[2]
    logits = head(hidden)
    wide = head.to_target_logits(logits)
    assert wide.shape == (1, 3, VOCAB_SIZE)
    assert torch.equal(wide[..., DRAFT_IDS], logits)
    assert wide.isneginf().sum(-1).tolist() == [[VOCAB_SIZE - 5] * 3]
    assert torch.equal(wide.argmax(-1), head.to_target_ids(logits.argmax(-1)))
    assert head.to_target_ids(torch.tensor([[4, 0], [2, 2]])).tolist() == [[95, 0], [17, 17]]


# Logit lens


def test_the_logit_lens_has_a_head_at_every_layer_uses_one_and_takes_no_memory(
    unembedding: Unembedding,
) -> None:
    heads = logit_lens(unembedding, 6, "tiny")
    assert heads.config.exit_layers == (1, 2, 3, 4, 5)
    assert heads.config.defaults == {"drafter": "exit:layers=4"}
    assert (heads.config.vocab_size, heads.config.hidden_size) == (VOCAB_SIZE, 32)
    assert not heads.state_dict()
    assert logit_lens(unembedding, 2, "tiny").config.defaults == {"drafter": "exit:layers=1"}


# Names and bounds


def test_layers_that_may_be_exits() -> None:
    check_exit_layers([2, 6], [2, 4, 6])
    assert make_config(exit_layers=(1, 5)).exit_layers == (1, 5)
    assert make_config(head_type="deep-fused", exit_layers=(0, 2)).exit_layers == (0, 2)
    with pytest.raises(InvalidOption) as caught:
        check_exit_layers([30], range(1, 30))
    assert str(caught.value) == "exit layer 30 is not among 1..29. Give one that is"
