"""Ranks, divergences and best guesses, where values tie or tokens cannot be drafted."""

from __future__ import annotations

import torch

from selfspec.heads.judge import ExitJudge
from selfspec.model.backbone import Backbone
from selfspec.visualise.lenses import Lens, Reader, chained, divergences, ranks
from selfspec.visualise.texts import TokenTexts
from tests.heads.kinds import DRAFT_IDS, make_heads, train


def test_ranks_count_from_one_and_ties_share_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0, -torch.inf]]).expand(5, -1)
    assert ranks(logits, torch.arange(5)).tolist() == [4, 1, 1, 3, 0]


def test_among_ties_the_guess_that_would_be_drafted_comes_first(backbone: Backbone) -> None:
    reader = Reader({}, ExitJudge(6, {}), TokenTexts(None))
    law = torch.zeros(1, 40).log_softmax(-1)
    for _ in range(3):
        (best,) = reader.likeliest(law)
        assert best.tokens[0] == int(law.argmax())
        assert len(set(best.tokens)) == 5
        assert best.probs == (0.025,) * 5


def test_a_small_vocabulary_has_fewer_guesses(backbone: Backbone) -> None:
    head = make_heads("linear-draft", backbone.unembedding)[2]
    reader = Reader({}, ExitJudge(6, {}), TokenTexts(None))
    (best,) = reader.likeliest(torch.tensor([[0.1, 0.2, 0.3, 0.05, 0.35]]).log(), head)
    assert best.tokens == (95, 17, 3, 0, 40)
    (few,) = reader.likeliest(torch.tensor([[0.25, 0.75]]).log())
    assert few.tokens == (1, 0)


def test_laws_are_compared_over_the_draft_vocabulary(backbone: Backbone) -> None:
    head = make_heads("linear-draft", backbone.unembedding)[2]
    target = torch.randn(3, backbone.vocab_size, generator=torch.Generator().manual_seed(0))
    same = target[:, DRAFT_IDS].log_softmax(-1)
    assert divergences(head, target, same).abs().max() < 1e-6
    uniform = torch.zeros(3, 5).log_softmax(-1)
    expected = torch.nn.functional.kl_div(uniform, same, reduction="none", log_target=True).sum(-1)
    assert torch.allclose(divergences(head, target, uniform), expected)


def test_features_behind_drafts_are_those_of_the_layer_that_drafted(backbone: Backbone) -> None:
    heads = train(make_heads("deep-fused", backbone.unembedding))
    lenses = {layer: Lens(heads[layer], "deep-fused", 1.0) for layer in (2, 4)}
    generator = torch.Generator().manual_seed(2)
    hidden = {layer: torch.randn(4, 32, generator=generator) for layer in lenses}
    deep = torch.randn(4, 32, generator=generator)
    with torch.no_grad():
        made = chained(lenses, hidden, deep, [4, 2, None, None], [0, 1, 2, 0])
        first = heads[4].features(hidden[4][:1], deep[:1])
        second = heads[2].features(hidden[2][1:2], first)
        third = heads[4].features(hidden[4][2:3], second)
        fourth = heads[4].features(hidden[4][3:], deep[3:])
    assert torch.allclose(made[4][2:], torch.cat([third, fourth]), atol=1e-6)
