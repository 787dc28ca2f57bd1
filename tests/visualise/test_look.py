"""Tracing changes nothing in an answer, and reports the layers' own guesses and figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec.api.speculator import wrap
from selfspec.api.text import TokenTexts
from selfspec.heads.heads import ExitJudge, top_probability
from selfspec.model.backbone import Backbone
from selfspec.options import merge_values
from selfspec.visualise.layers import LayerTrace
from selfspec.visualise.look import Lens, Reader, chained_features, inspect, ranks
from tests.heads.kinds import make_heads, train
from tests.models import make_model, random_ids
from tests.skilled import KINDS, NEW_TOKENS, skilled
from tests.talks import make_tokenizer

PROMPT = random_ids(5, 1)
EAGER: dict[str, Any] = {"drafter": "exit:threshold=0.15,max_tokens=3", "never_slower": False}
"""Options that give many drafts, right and wrong ones."""


def eagerly(options: dict[str, Any]) -> dict[str, Any]:
    """Keywords of `generate`: EAGER, overridden by `options` setting by setting."""
    drafter = merge_values("drafter", EAGER["drafter"], options.get("drafter", EAGER["drafter"]))
    return {"max_new_tokens": NEW_TOKENS, **EAGER, **options, "drafter": drafter}


def looked(kind: str, *, all_layers: bool = False, **options: Any) -> LayerTrace:
    speculator = skilled(kind)
    return inspect(speculator, PROMPT, all_layers=all_layers, **eagerly(options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"speculate": False}, {"pinned": True}),
        {"drafter": "ngram+exit", "controller": "gammatune"},
        {"do_sample": True, "temperature": 2.0, "seed": 3},
    ],
    ids=["exit", "plain", "pinned", "both", "sampled"],
)
def test_tokens_are_those_of_generate(kind: str, options: dict[str, Any]) -> None:
    trace = looked(kind, **options)
    answer = skilled(kind).generate(PROMPT, **eagerly(options))
    assert [place.token for place in trace.places] == answer.token_ids
    assert sum(entry.accepted for entry in trace.rounds) == answer.stats.accepted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("all_layers", [False, True])
def test_a_kept_draft_is_the_guess_of_the_first_sure_layer(kind: str, all_layers: bool) -> None:
    """Also in chains of drafts: heads after a draft read the same states as in decoding."""
    trace = looked(kind, all_layers=all_layers)
    thresholds = trace.info.taus
    kept = [place for place in trace.places if place.kind == "accepted"]
    assert len(kept) >= 4
    for place in kept:
        guesses = {entry.layer: entry for entry in place.layers}
        sure = [layer for layer in thresholds if guesses[layer].confidence >= thresholds[layer]]
        assert place.exit_layer == sure[0]
        assert guesses[sure[0]].top_tokens[0] == place.token
    if kind == "deep-fused":
        assert len({place.round for place in kept}) < len(kept)


@pytest.mark.parametrize("kind", ["translator", "narrow"])
def test_figures_equal_those_of_a_plain_loop(kind: str) -> None:
    speculator = skilled(kind)
    trace = looked(kind, drafter="exit:anneal_strength=0.5")
    heads: Any = speculator.heads
    temperatures = {int(layer): value for layer, value in heads.config.temperatures.items()}
    layers = heads.config.exit_layers
    judge = ExitJudge(6, dict.fromkeys(layers, 0.5), 0.5, temperatures)
    tokens = [place.token for place in trace.places]
    ids = torch.cat([PROMPT, torch.tensor([tokens])], dim=1)
    with torch.no_grad():
        output = speculator.model(ids, output_hidden_states=True)
        for place in trace.places:
            position = 4 + place.index
            final = output.logits[0, position].float()
            assert place.final_top_tokens[0] == int(final.argmax())
            for guess in place.layers:
                head = heads[guess.layer]
                logits = head(output.hidden_states[guess.layer][0, position])
                wide = head.to_target_logits(logits)
                probs = (wide / temperatures.get(guess.layer, 1.0)).softmax(-1)
                order = probs.argsort(descending=True).tolist()
                top = order[: len(head.rows)]
                assert list(guess.top_tokens) == order[:5]
                assert guess.top_probs == pytest.approx(probs[order[:5]].tolist(), abs=2e-6)
                sure = float(top_probability(logits, judge.temperatures[guess.layer]))
                assert guess.confidence == pytest.approx(sure, abs=2e-6)
                assert guess.rank == (top.index(place.token) + 1 if place.token in top else 0)
                target = final[top].softmax(-1).double()
                divergence = float((target * (target / probs[top]).log()).sum())
                assert guess.divergence == pytest.approx(divergence, abs=1e-4)


def test_all_layers_are_traced_and_only_some_were_in_use() -> None:
    info = looked("deep-fused-0", all_layers=True, drafter="exit:threshold=0.25").info
    assert info.exit_layers == (0, 1, 2, 3, 4, 5)
    assert info.head_kinds == ("deep-fused", *["logit-lens"] * 5)
    assert info.thresholds == (0.25, *[0.9] * 5)
    assert (info.options.drafter, info.taus) == ("exit", {0: 0.25})
    plain = looked("deep-fused-0", speculate=False).info
    assert (plain.options.drafter, plain.taus) == ("none", {})


def test_depth_and_thresholds_by_layer_are_kept() -> None:
    taus = (0.2, 0.3, 0.4)
    info = looked("translator", drafter={"exit": {"threshold": taus, "max_depth": 3}}).info
    assert info.taus == {1: 0.2, 3: 0.3}
    assert info.thresholds == (0.2, 0.3, 0.9)
    assert len(info.prompt_texts) == 5


def test_a_model_without_heads_is_seen_at_all_layers() -> None:
    trace = inspect(wrap(make_model("qwen3"), executor="generic"), PROMPT, max_new_tokens=4)
    assert trace.info.exit_layers == (1, 2, 3, 4, 5)
    assert (trace.info.heads, trace.info.options.drafter) == ("", "ngram")
    assert [place.kind for place in trace.places] == ["prefill", "bonus", "bonus", "bonus"]


def test_texts_and_rejected_drafts_are_kept() -> None:
    model = make_model("llama", vocab_size=10)
    speculator = wrap(model, make_tokenizer(), heads="logit-lens", executor="generic")
    options: dict[str, Any] = {"drafter": "exit:layers=3,threshold=0.01", "max_new_tokens": 12}
    trace = inspect(speculator, "a b c", **options)
    assert trace.info.prompt == "a b c"
    text = "".join(place.text for place in trace.places)
    tokens = [place.token for place in trace.places]
    assert speculator.tokenizer is not None
    assert text == speculator.tokenizer.decode(tokens, skip_special_tokens=False)
    drafts = [token for entry in trace.rounds for token in entry.draft_tokens]
    texts = [text for entry in trace.draft_texts for text in entry]
    assert drafts
    assert [text.strip() for text in texts] == speculator.tokenizer.convert_ids_to_tokens(drafts)


def test_copied_tokens_name_the_place_that_they_were_copied_from() -> None:
    prompt = PROMPT.repeat(1, 4)
    speculator = skilled("translator")
    trace = inspect(speculator, prompt, all_layers=False, **eagerly({"drafter": "ngram"}))
    text = prompt[0].tolist() + [place.token for place in trace.places]
    copied = [place for place in trace.places if place.copied_from is not None]
    assert copied == [place for place in trace.places if place.kind == "accepted"] != []
    for place in copied:
        assert place.copied_from is not None
        assert place.copied_from < prompt.shape[1] + place.index
        assert text[place.copied_from] == place.token


# Where values tie, or tokens cannot be drafted


def test_ranks_count_from_one_and_ties_share_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0, -torch.inf]]).expand(5, -1)
    assert ranks(logits, torch.arange(5)).tolist() == [4, 1, 1, 3, 0]


def test_among_ties_the_guess_that_would_be_drafted_comes_first() -> None:
    reader = Reader({}, ExitJudge(6, {}), TokenTexts(None))
    log_probs = torch.zeros(1, 40).log_softmax(-1)
    for _ in range(3):
        (best,) = reader.likeliest(log_probs)
        assert best["top_tokens"][0] == int(log_probs.argmax())
        assert len(set(best["top_tokens"])) == 5
        assert best["top_probs"] == (0.025,) * 5


def test_a_small_vocabulary_has_fewer_guesses(backbone: Backbone) -> None:
    head = make_heads("linear-draft", backbone.unembedding)[2]
    reader = Reader({}, ExitJudge(6, {}), TokenTexts(None))
    (best,) = reader.likeliest(torch.tensor([[0.1, 0.2, 0.3, 0.05, 0.35]]).log(), head)
    assert best["top_tokens"] == (95, 17, 3, 0, 40)
    (few,) = reader.likeliest(torch.tensor([[0.25, 0.75]]).log())
    assert few["top_tokens"] == (1, 0)


def test_features_after_drafts_come_from_the_layer_that_drafted(backbone: Backbone) -> None:
    heads = train(make_heads("deep-fused", backbone.unembedding))
    lenses = {layer: Lens(heads[layer], "deep-fused", 1.0) for layer in (2, 4)}
    generator = torch.Generator().manual_seed(2)
    hidden = {layer: torch.randn(4, 32, generator=generator) for layer in lenses}
    deep = torch.randn(4, 32, generator=generator)
    with torch.no_grad():
        features = chained_features(lenses, hidden, deep, [4, 2, None, None], [0, 1, 2, 0])
        first = heads[4].features(hidden[4][:1], deep[:1])
        second = heads[2].features(hidden[2][1:2], first)
        third = heads[4].features(hidden[4][2:3], second)
        fourth = heads[4].features(hidden[4][3:], deep[3:])
    assert torch.allclose(features[4][2:], torch.cat([third, fourth]), atol=1e-6)
