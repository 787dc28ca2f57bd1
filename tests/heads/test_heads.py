"""Exit heads: what each type computes, draft vocabularies, the logit lens, names and bounds."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from selfspec.errors import InvalidOption
from selfspec.heads.exit_heads import logit_lens
from selfspec.heads.heads import (
    Answer,
    Ensemble,
    ExitHead,
    ExitJudge,
    each_layer,
    entropy,
    joined,
    scored,
    top_probability,
)
from selfspec.model.backbone import Backbone
from selfspec.model.parts import Unembedding
from tests.heads.kinds import DRAFT_IDS, KINDS, make_heads, train
from tests.models import VOCAB_SIZE, make_model, random_ids, wrapped
from training.narrow import narrowed

# What heads compute


# with a soft cap, two kinds of scale, another norm, and a bias
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite", "phi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_untrained_heads_read_a_state_as_the_model_does(family: str, dtype: torch.dtype) -> None:
    backbone = wrapped(family, dtype)
    hidden = backbone.embed(random_ids(3)[0])
    expected = backbone.logits(hidden)
    for kind in KINDS:
        head = make_heads(kind, backbone.unembedding)[4]
        logits = head(hidden)
        assert logits.dtype == torch.float32
        assert {weight.dtype for weight in head.parameters()} <= {dtype}
        if head.draft_ids is None and kind != "deep-fused":
            assert torch.equal(logits, expected), kind


@pytest.mark.parametrize("kind", ["linear", "translator", "deep-fused"])
def test_features_are_the_sum_of_a_heads_terms(
    kind: str, unembedding: Unembedding, hidden: Tensor
) -> None:
    heads, deep = train(make_heads(kind, unembedding)), hidden.flip(-1)
    head, weights = heads[2], heads[2].state_dict()
    x = head.parts.norm(hidden)
    x = torch.cat([x, deep], dim=-1) if kind == "deep-fused" else x

    def mapped(name: str, rows: Tensor) -> Tensor:
        return nn.functional.linear(
            rows, weights[f"{name}.weight"], weights.get(f"{name}.bias", torch.zeros(1))
        )

    def mlp() -> Tensor:
        inner = nn.functional.silu(mapped("change.inner", x))
        return mapped("change.direct", x) + mapped("change.outer", inner)

    terms = {"linear": lambda: x, "translator": lambda: x + mapped("up", x), "deep-fused": mlp}
    expected, rows = terms[kind](), weights.get("weight", unembedding.weight)
    # float32; largest difference measured: 1.9e-6
    assert (head.features(hidden, deep) - expected).abs().max() < 1e-5
    assert (head(hidden, deep) - expected @ rows.T).abs().max() < 1e-5
    assert not torch.equal(head(hidden), heads[4](hidden))
    assert torch.equal(head(hidden), head(hidden, deep)) is (kind != "deep-fused")
    assert torch.equal(head(hidden), head(hidden, torch.zeros_like(deep)))
    with pytest.raises(KeyError):
        heads[3]


def test_states_are_scaled_to_a_mean_square_of_1(unembedding: Unembedding, hidden: Tensor) -> None:
    head = train(make_heads("states", unembedding)).first
    last, *raw = torch.randn(3, *hidden.shape)
    states = [state / state.square().mean(-1, keepdim=True).sqrt() for state in raw]
    norm, direct, inner, outer = cast("Any", head.parts)
    x = torch.cat([norm(hidden), last, *states], dim=-1)
    expected = direct(x) + outer(nn.functional.silu(inner(x)))
    torch.testing.assert_close(head.features(hidden, torch.cat([last, *raw], -1)), expected)


@pytest.mark.parametrize(
    ("kind", "shared"), [("translator", True), ("logit-lens", True), ("linear", False)]
)
def test_the_unembedding_is_the_models_own_storage_unless_a_head_has_a_matrix(
    kind: str, shared: bool, hidden: Tensor
) -> None:
    unembedding = Backbone(make_model("llama"), executor="generic").unembedding
    head = make_heads(kind, unembedding)[2]
    logits = head(hidden)
    with torch.no_grad():
        unembedding.weight.zero_()
    assert torch.equal(head(hidden), torch.zeros_like(logits) if shared else logits)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "draft" in kind])
def test_draft_logits_are_the_full_heads_of_the_chosen_tokens(kind: str, hidden: Tensor) -> None:
    unembedding = wrapped("phi", torch.float64).unembedding  # with a bias
    full = make_heads(kind.removesuffix("-draft"), unembedding)[2]
    heads = make_heads(kind, unembedding)
    narrow = heads[2]
    assert (narrow.rows is heads[4].rows) != kind.startswith("linear")  # one copy for all heads
    assert (len(full.rows), len(narrow.rows)) == (VOCAB_SIZE, 5)
    logits, expected = narrow(hidden.double()), full(hidden.double())[..., DRAFT_IDS]
    # both were computed in float64 and rounded to float32; largest difference measured: 0
    assert (logits - expected).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["linear-draft", "deep-fused-draft", "translator"])
def test_narrowed_heads_give_a_subset_of_the_logits(kind: str, unembedding: Unembedding) -> None:
    heads = train(make_heads(kind, unembedding))
    narrow = narrowed(heads, unembedding, 3, Counter({17: 2, 95: 5, 40: 4}), always=[3])
    ids, hidden = narrow.first.draft_ids, torch.randn(3, unembedding.weight.shape[1])
    assert ids is not None
    assert ids.tolist() == [3, 40, 95]
    wide = heads.first.to_target_logits(heads.first(hidden))
    torch.testing.assert_close(narrow.first(hidden), wide[:, ids])
    with pytest.raises(InvalidOption, match="draft_vocab_size"):
        narrowed(narrow, unembedding, 4, Counter())


def test_draft_logits_widen_to_the_vocabulary(unembedding: Unembedding, hidden: Tensor) -> None:
    head = make_heads("linear-draft", unembedding)[2]
    logits = head(hidden)
    wide = head.to_target_logits(logits)
    assert wide.shape == (1, 3, VOCAB_SIZE)
    assert torch.equal(wide[..., DRAFT_IDS], logits)
    assert wide.isneginf().sum(-1).tolist() == [[VOCAB_SIZE - 5] * 3]
    assert torch.equal(wide.argmax(-1), head.to_target_ids(logits.argmax(-1)))
    assert head.to_target_ids(torch.tensor([[4, 0], [2, 2]])).tolist() == [[95, 0], [17, 17]]


def test_the_logit_lens_has_heads_everywhere_and_takes_no_memory(unembedding: Unembedding) -> None:
    heads = logit_lens(unembedding, 6, "tiny")
    assert heads.config.exit_layers == (1, 2, 3, 4, 5)
    assert heads.config.defaults == {"drafter": "exit:layers=4"}
    assert (heads.config.vocab_size, heads.config.hidden_size) == (VOCAB_SIZE, 32)
    assert not heads.state_dict()
    assert logit_lens(unembedding, 2, "tiny").config.defaults == {"drafter": "exit:layers=1"}
    with pytest.raises(InvalidOption, match="the model has one"):
        logit_lens(unembedding, 1, "tiny")


# --- signals and answers


def test_temperature_anneals_linearly_to_the_calibrated_one_at_the_last_layer() -> None:
    judge = ExitJudge(8, dict.fromkeys(range(1, 9), 0.5), anneal_strength=0.5)
    temperatures = [judge.temperatures[layer] for layer in range(1, 9)]
    assert temperatures == [1.4375, 1.375, 1.3125, 1.25, 1.1875, 1.125, 1.0625, 1.0]
    judge = ExitJudge(30, {1: 0.5, 29: 0.5})
    assert (judge.temperatures[1], judge.temperatures[29]) == (1.0, 1.0)
    judge = ExitJudge(8, {2: 0.5, 4: 0.5}, anneal_strength=0.5, temperatures={2: 3.0})
    assert (judge.temperatures[2], judge.temperatures[4]) == (1.375 * 3.0, 1.25)


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_confidence_equals_that_of_a_full_softmax(scale: float) -> None:
    logits = torch.randn(50, 96, generator=torch.Generator().manual_seed(0)) * scale
    full = (logits.double() / 1.625).softmax(-1).amax(-1)
    confidence = top_probability(logits, 1.625)
    assert confidence.shape == (50,)
    # largest relative difference measured over the three scales: 1.4e-7
    assert (confidence.double() / full - 1).abs().max() < 3e-7


def test_huge_forbidden_and_equal_logits_have_exact_confidence() -> None:
    logits = torch.tensor([[3e38, 0.0, -torch.inf], [-3e38, -torch.inf, -torch.inf]])
    copy = logits.clone()
    assert top_probability(logits, 1.225).tolist() == [1.0, 1.0]
    assert torch.equal(logits, copy)
    assert top_probability(torch.full((1, 64), -3.25), 1.225).tolist() == [1 / 64]


def test_a_token_exits_at_or_above_its_layers_threshold() -> None:
    judge = ExitJudge(8, each_layer((0.75, 0.5), (2, 4)))
    confidences = (0.75, math.nextafter(0.75, 0), 0.5, math.nan)
    assert [judge.exits(value, 2) for value in confidences] == [True, False, False, False]
    assert [judge.exits(value, 4) for value in confidences] == [True, True, True, False]


PROBABILITIES = torch.tensor([0.5, 0.25, 0.125, 0.125])


def test_entropy_is_in_nats_and_handles_impossible_tokens() -> None:
    assert entropy(PROBABILITIES).item() == pytest.approx(1.75 * math.log(2), abs=1e-6)
    assert entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).tolist() == pytest.approx(
        [0.0, math.log(2)], abs=1e-6
    )


@pytest.mark.parametrize(
    ("weights", "scale", "expected"),
    [
        ((1, 0, 0), 1.0, 1 - 1.75 / 2),  # H / log V = 1.75 / 2
        ((0, 1, 0), 1.0, 2 / 3),  # sigmoid(log 2) = 2 / (2 + 1)
        ((0, 1, 0), 0.0, 1 / 2),
        ((0, 1, 0), 2.0, 4 / 5),
        ((0, 0, 1), 1.0, 1 / 2),  # (0.5 - 0.25) / 0.5
        ((0.5, 0.25, 0.25), 1.0, 0.5 / 8 + 0.25 * 2 / 3 + 0.25 / 2),
    ],
)
def test_each_signal_of_the_ensemble_by_hand(
    weights: tuple[float, ...], scale: float, expected: float
) -> None:
    logits = PROBABILITIES.log() + 3.0  # the same distribution, shifted by a constant
    copy, signal = logits.clone(), Ensemble(weights, scale)
    assert signal(logits[None]).tolist() == pytest.approx([expected], abs=1e-6)
    assert torch.equal(logits, copy)
    assert signal(logits[None, :1]).tolist() == [1.0]  # the only possible token


# --- answers


LAYER, TEMPERATURE = 2, 1.3


@pytest.fixture(params=["linear", "linear-draft", "deep-fused", "logit-lens-draft"])
def head(request: pytest.FixtureRequest, unembedding: Unembedding) -> ExitHead:
    """A head with changed weights, maybe with a small draft vocabulary."""
    return train(make_heads(request.param, unembedding)).requires_grad_(False)[LAYER]


def states(count: int, seed: int = 0) -> Tensor:
    """[count, d]"""
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


def asked(head: ExitHead, hidden: Tensor, count: int = 3, **options: Any) -> Answer:
    features, logits = head.ask(hidden, states(len(hidden), seed=1))
    return Answer.read(features, logits, scored(head, logits, TEMPERATURE, count, **options))


@pytest.mark.parametrize("count", [1, 3, 99])  # 99: as many as there are
def test_tokens_are_the_likeliest_ids_with_their_chances(head: ExitHead, count: int) -> None:
    answer = asked(head, states(4), count)
    assert torch.equal(answer.features, head.features(states(4), states(4, seed=1)))
    assert torch.equal(answer.logits, head.unembed(answer.features))
    chances = (answer.logits / TEMPERATURE).softmax(-1)
    for row in range(4):
        order = chances[row].argsort(descending=True)[:count]
        assert answer.tokens[row] == head.to_target_ids(order).tolist()
        # float32 summed in another order; largest difference measured: 2.4e-7
        assert answer.chances[row] == pytest.approx(chances[row, order].tolist(), abs=1e-6)


def test_the_first_of_equally_likely_tokens_is_the_answer(unembedding: Unembedding) -> None:
    head = make_heads("deep-fused", unembedding)[LAYER]  # untrained: all logits are zero
    answer = asked(head.requires_grad_(False), states(2), 1)
    assert answer.tokens == [[0], [0]]
    assert answer.chances == [[pytest.approx(1 / 96, abs=1e-9)]] * 2  # float32


@pytest.mark.parametrize("signal", [top_probability, Ensemble((0.4, 0.3, 0.3), 1.0)])
def test_signals_are_of_the_annealed_logits(head: ExitHead, signal: Any) -> None:
    answer = asked(head, states(4), signal=signal)
    assert answer.signals == signal(answer.logits / TEMPERATURE).tolist()
    assert asked(head, states(4)).signals == []


@pytest.mark.parametrize("token", [0, 7, 151_935, 2**24])
def test_ids_are_exact_beside_chances(
    token: int, unembedding: Unembedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExitHead, "to_target_ids", lambda _, ids: torch.full_like(ids, token))
    head = make_heads("linear", unembedding).requires_grad_(False)[LAYER]
    assert asked(head, states(1), 1).tokens == [[token]]


def test_missing_states_are_zeros_beside_states_of_other_texts() -> None:
    hidden, deep = [states(2), states(1), states(3)], [None, states(1, seed=1), None]
    narrow: Any = joined(deep, hidden, 32)
    expected = torch.cat([torch.zeros(2, 32), states(1, seed=1), torch.zeros(3, 32)])
    assert torch.equal(narrow, expected)
    wide: Any = joined(deep, hidden, 96)  # narrower states are padded
    assert torch.equal(wide, nn.functional.pad(expected, (0, 64)))
    assert joined([None, None, None], hidden, 96) is None
