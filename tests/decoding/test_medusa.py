"""Medusa's tree: its published shape, its tokens, what of it pays, texts that stay as they are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from selfspec.api.speculator import wrap
from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import GreedyMatch
from selfspec.decoding.decode import StopRule, rounds
from selfspec.decoding.drafters.base import Draft, NoDrafter
from selfspec.decoding.drafters.heads import CHOICES, AskAhead
from selfspec.decoding.drafters.trees import TreeDrafter
from selfspec.decoding.engine import Asked, Engine, Runtime
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import DecodeState
from selfspec.decoding.stats import Round, Stopwatch
from selfspec.decoding.work import alone
from selfspec.errors import InvalidOption
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.folder import MEDUSA
from selfspec.model.backbone import Backbone
from selfspec.options import MEDUSA_FITTED
from tests import ladder
from tests.models import make_model, needs_compiler, random_ids

PUBLISHED = """\
0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21
004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001
16 070"""
"""`mc_sim_7b_63` of FasterDecoding/Medusa, medusa/model/medusa_choices.py: a digit is a rank."""

WHOLE = f"{MEDUSA_FITTED},max_rows=64".removeprefix("ngram+")


def published() -> set[tuple[int, ...]]:
    return {tuple(map(int, path)) for path in PUBLISHED.split()}


def test_the_tree_is_the_published_one() -> None:
    paths = published()
    assert len(paths) == len(PUBLISHED.split()) == 63
    assert {(*path, rank) for path, count in CHOICES.items() for rank in range(count)} == paths


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return Backbone(make_model("llama", torch.float64), executor="generic")


def begun(backbone: Backbone) -> DecodeState:
    """A text whose prompt has been read."""
    state = DecodeState(backbone, random_ids(9), exit_layers=(0,))
    stop = StopRule(max_length=40)
    next(rounds(state, NoDrafter(), GreedyMatch(ladder.greedy()), stop, Stopwatch()))
    return state


def ranked(heads: ExitHeads, state: DecodeState) -> tuple[list[list[int]], Tensor]:
    """The ten likeliest tokens of each head, and their probabilities [K, 10], by hand."""
    assert state.deep is not None
    x, rows = state.backbone.unembedding.norm(state.deep), state.backbone.unembedding.weight
    found = []
    for name, weight in heads.named_parameters():
        if name.endswith("weight"):
            bias = heads.get_parameter(name.replace("weight", "bias"))
            opened = torch.nn.functional.linear(x, weight, bias)
            found.append((x + opened * opened.sigmoid()) @ rows.T)
    best = torch.cat(found).softmax(-1).topk(10)
    return best.indices.tolist(), best.values.detach()


@pytest.mark.parametrize(("row", "least", "most"), [(0.0, 63, 63), (0.02, 5, 62), (0.9, 0, 1)])
def test_a_tree_is_whole_where_rows_cost_nothing_and_cut_to_what_pays_elsewhere(
    backbone: Backbone, row: float, least: int, most: int
) -> None:
    state = begun(backbone)
    drafter: TreeDrafter[DecodeState] = ladder.medusa_drafter(backbone, 63, row)
    with torch.inference_mode():
        draft = alone(drafter.draft(state, 9, Stopwatch()))
    assert least <= len(draft.tokens) <= most
    assert draft.heads == 1
    tokens, chances = ranked(ladder.medusa_heads(backbone), state)
    places = paths_of(draft)
    ranks = {
        tuple(tokens[depth].index(draft.tokens[at]) for depth, at in enumerate(path)): path[-1]
        for path in places
    }
    assert len(ranks) == len(draft.tokens)
    assert ranks.keys() == published() if row == 0.0 else ranks.keys() < published()
    for path, at in ranks.items():
        expected = math.prod(float(chances[depth, rank]) for depth, rank in enumerate(path))
        assert draft.proposed[at].chance == pytest.approx(expected, rel=1e-5)


def paths_of(draft: Draft) -> list[list[int]]:
    return [draft.path(index) for index in range(len(draft.tokens))]


def test_a_tree_is_no_deeper_than_there_are_heads(backbone: Backbone) -> None:
    for count in (1, 3, 5):
        options = SpeculationOptions().updated({"drafter": WHOLE, "costs": "row=0,head=0"})
        engine = Engine(Runtime(backbone, ladder.medusa_heads(backbone, count), None))
        found = [one for one in engine.add(asked(random_ids(9)), options) if one.draft_tokens]
        depths = {max(map(len, paths_of(Draft.again(one)))) for one in found}
        assert max(depths) == min(count, 4)


def asked(prompt: Tensor) -> Asked:
    stop = StopRule(max_length=prompt.shape[1] + 12)
    return Asked(ids=prompt, sampler=Sampler(LogitsProcessorList()), stop=stop)


def test_texts_of_a_batch_have_the_drafts_that_they_have_alone(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []
    done = AskAhead.done

    def counted(self: AskAhead, alike: Any, others: Any) -> Any:
        together.append(len(alike))
        return done(self, alike, others)

    monkeypatch.setattr(AskAhead, "done", counted)
    options = SpeculationOptions().updated({"drafter": WHOLE, "costs": "row=0.001"})
    heads = ladder.medusa_heads(backbone)
    prompts = [random_ids(4 + n, seed=n) for n in range(3)]

    def drafts(entries: list[Round]) -> list[tuple[list[int], list[int]]]:
        return [(one.draft_tokens, one.tokens) for one in entries]

    def engine() -> Engine:
        return Engine(Runtime(backbone, heads, None), most=3)

    lonely = [drafts(list(engine().add(asked(prompt), options))) for prompt in prompts]
    assert set(together) == {1}
    beside = engine()
    running = [beside.add(asked(prompt), options) for prompt in prompts]
    while beside.texts:
        beside.step()
    assert max(together) == 3
    for found, expected in zip([drafts(one.take()) for one in running], lonely, strict=True):
        assert [token for _, new in found for token in new] == [
            token for _, new in expected for token in new
        ]
        assert found[1] == expected[1]  # later trees are narrower: rows cost otherwise in a batch


@pytest.mark.parametrize("executor", ["generic", pytest.param("fused", marks=needs_compiler)])
@pytest.mark.parametrize(
    "options",
    [
        {"drafter": WHOLE, "never_slower": False},
        {"drafter": MEDUSA_FITTED, "costs": "row=0.01"},
        {"drafter": MEDUSA_FITTED, "repetition_penalty": 1.5},
        {"drafter": WHOLE, "controller": "threshold"},
        {"drafter": WHOLE, "pinned": True},
    ],
    ids=str,
)
def test_a_text_stays_what_it_is(options: dict[str, Any], executor: str) -> None:
    model = make_model("llama")
    heads = ladder.medusa_heads(Backbone(model, executor="generic"))
    speculator = wrap(model, heads=heads, executor=executor)
    many: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    many |= {name: options[name] for name in options.keys() & {"repetition_penalty"}}
    plain = speculator.generate(random_ids(9), speculate=False, **many)
    found = speculator.generate(random_ids(9), **many | options)
    assert found.token_ids == plain.token_ids
    assert found.stats.drafted_by_source["exit"] > 0


def test_sampled_sequences_have_the_distribution_of_the_model() -> None:
    model = make_model("llama", torch.float64, vocab_size=8)
    heads = ladder.medusa_heads(Backbone(model, executor="generic"))
    ladder.check_sampling(
        model,
        random_ids(5) % 8,
        draws=800,
        heads=heads,
        drafter="ngram+exit:layers=0,threshold=1e-9,guesses=3,max_rows=6,max_tokens=2",
        costs="row=0,head=0",
        executor="generic",
    )


def test_they_answer_about_no_layer(backbone: Backbone) -> None:
    heads = ladder.medusa_heads(backbone)
    with pytest.raises(InvalidOption, match="none of them reads exit layer 0"):
        heads[0]
    for wrong in ({"num_heads": None}, {"exit_layers": (0, 2)}, {"head_type": "translator"}):
        with pytest.raises(InvalidOption, match=r"num_heads is|exit layer"):
            replace(heads.config, **wrong)
    assert heads.config.head_type == MEDUSA
