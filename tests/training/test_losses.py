"""Losses are torch's own, written for sparse targets; agreement is counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from selfspec.errors import InvalidData
from selfspec.heads.exit_heads import logit_lens
from selfspec.model.backbone import Backbone
from selfspec.training.features import Features
from selfspec.training.fit import cross_entropy, draft_index, targets
from selfspec.training.measure import agreements, coverage
from tests.models import VOCAB_SIZE

DRAFT_IDS = torch.tensor([1, 2, 5])


@pytest.fixture
def few() -> Features:
    """Three positions whose likeliest next tokens are 1, 5 and 9; the last is no answer's."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, VOCAB_SIZE, generator=generator)
    logits[torch.arange(3), torch.tensor([1, 5, 9])] = 9.0
    best = logits.log_softmax(-1).topk(VOCAB_SIZE)
    return Features(
        hidden={},
        following=torch.tensor([2, 2, 2]),
        continues=torch.tensor([False, True, True]),
        answers=torch.tensor([True, True, False]),
        top_ids=best.indices.int(),
        top_log_probs=best.values.to(torch.float16),
    )


ALIKE = (1.0, 1.0)


@pytest.fixture
def guess() -> torch.Tensor:
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(1))


def test_the_models_distribution_is_a_soft_target_within_the_draft_vocabulary(
    few: Features, guess: torch.Tensor
) -> None:
    assert few.top_ids is not None
    assert few.top_log_probs is not None
    full = torch.zeros(3, VOCAB_SIZE).scatter(
        1, few.top_ids.long(), few.top_log_probs.float().exp()
    )
    expected = -(full[:, DRAFT_IDS] * guess.log_softmax(-1)).sum()
    found = cross_entropy(guess, targets(few, draft_index(DRAFT_IDS, VOCAB_SIZE), 0.0, ALIKE))
    torch.testing.assert_close(found, expected)


def test_the_next_token_is_a_target_where_it_can_be_drafted(
    few: Features, guess: torch.Tensor
) -> None:
    found = cross_entropy(guess, targets(few, draft_index(DRAFT_IDS, VOCAB_SIZE), 1.0, ALIKE))
    expected = functional.cross_entropy(guess[:2], torch.tensor([0, 2]), reduction="sum")
    torch.testing.assert_close(found, expected)
    whole = targets(few, draft_index(None, VOCAB_SIZE), 1.0, ALIKE)
    assert whole.ids.tolist() == [[1], [5], [9]]


def test_positions_weigh_what_answers_and_others_are_given(
    few: Features, guess: torch.Tensor
) -> None:
    index = draft_index(None, VOCAB_SIZE)
    wanted = targets(few, index, 1.0, (1.5, 0.25))
    assert wanted.weights.tolist() == [[1.5], [1.5], [0.25]]
    with pytest.raises(InvalidData, match="no targets"):
        targets(replace(few, top_ids=None), index, 1.0, ALIKE)


def test_a_mixture_is_the_weighted_sum(few: Features, guess: torch.Tensor) -> None:
    index = draft_index(DRAFT_IDS, VOCAB_SIZE)
    hard, soft, mixed = (
        cross_entropy(guess, targets(few, index, s, ALIKE)) for s in (1.0, 0.0, 0.25)
    )
    torch.testing.assert_close(mixed, 0.25 * hard + 0.75 * soft)


def test_positions_that_are_left_out_weigh_nothing(few: Features, guess: torch.Tensor) -> None:
    wanted = targets(few, draft_index(DRAFT_IDS, VOCAB_SIZE), 0.5, ALIKE)
    kept = cross_entropy(guess, wanted.where(torch.tensor([True, False, False])))
    torch.testing.assert_close(kept, cross_entropy(guess[:1], wanted.rows(slice(0, 1))))


def test_agreement_is_counted_over_all_and_over_the_most_confident(backbone: Backbone) -> None:
    heads = logit_lens(backbone.unembedding, backbone.num_layers, "tiny")
    hidden = torch.randn(40, backbone.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = heads[1](hidden)
    top = logits.argmax(-1)
    top[:21] = (top[:21] + 1) % VOCAB_SIZE
    states = dict.fromkeys(heads.config.exit_layers, hidden)
    halves = [
        Features(
            {layer: state[part] for layer, state in states.items()},
            following=top[part],
            continues=torch.ones(20, dtype=torch.bool),
            answers=torch.ones(20, dtype=torch.bool),
            top_ids=top[part, None].int(),
        )
        for part in (slice(0, 20), slice(20, 40))
    ]
    found = agreements(heads, halves)[1]
    assert found.positions == 40
    assert found.agreement == pytest.approx(19 / 40)
    assert found.agreement_second is None
    assert coverage(heads, halves) == 1.0


def test_measuring_without_targets_is_refused(backbone: Backbone) -> None:
    heads = logit_lens(backbone.unembedding, backbone.num_layers, "tiny")
    nothing = torch.zeros(1, dtype=torch.int64)
    batch = Features(
        {1: torch.zeros(1, backbone.hidden_size)}, nothing, nothing.bool(), nothing.bool()
    )
    with pytest.raises(InvalidData, match="no targets"):
        agreements(heads, [batch])
