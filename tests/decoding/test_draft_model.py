"""A second model drafts: its own text and laws, no row run twice, and only with the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedTokenizerFast
from transformers.generation.logits_process import TemperatureLogitsWarper

from selfspec.api import speculator as facade
from selfspec.api.speculator import Speculator, wrap
from selfspec.config import SpeculationOptions
from selfspec.decoding.controllers import Fixed, Threshold
from selfspec.decoding.drafters.draft_model import DraftCache, DraftModelDrafter, check_same_tokens
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import DecodeState
from selfspec.decoding.stats import Stopwatch, common
from selfspec.decoding.work import alone
from selfspec.errors import DraftModelMismatch
from selfspec.heads.heads import top_probability
from selfspec.hub import models as hub
from selfspec.hub.models import ModelFiles
from selfspec.model.backbone import Backbone
from selfspec.model.kv import Rows
from tests.models import make_model, random_ids
from tests.talks import make_tokenizer


class CountingBackbone(Backbone):
    def __init__(self, model: Any) -> None:
        self.passes: list[list[int]] = []
        super().__init__(model, executor="generic")
        self.passes.clear()

    def run(self, hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        if first == 0:
            self.passes.append(rows.positions.tolist())
        return super().run(hidden, first, last, rows)


@pytest.fixture(scope="module")
def second() -> CountingBackbone:
    """Two layers, float64."""
    return CountingBackbone(make_model("llama", torch.float64, num_hidden_layers=2))


@pytest.fixture(scope="module")
def target(exact: Any) -> Backbone:
    """Only holds a state here; it runs nothing."""
    return Backbone(exact, executor="generic")


def make_sampler(*processors: Any, do_sample: bool = False) -> Sampler:
    generator = torch.Generator().manual_seed(0)
    return Sampler(LogitsProcessorList(processors), do_sample, generator)


def own_text(backbone: Backbone, ids: Tensor, count: int) -> list[int]:
    model: Any = backbone.model
    return model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :].tolist()


@torch.inference_mode()
def test_drafts_are_the_other_models_own_text_and_no_row_runs_twice(
    second: CountingBackbone, target: Backbone
) -> None:
    state = DecodeState(target, random_ids(7))
    drafter = DraftModelDrafter(DraftCache(second), make_sampler(), Fixed(4))
    second.passes.clear()
    for kept in (2, 4, 0):
        draft = alone(drafter.draft(state, 20, Stopwatch()))
        assert draft.tokens == own_text(second, state.ids, 4)
        assert (draft.sources, draft.probs, draft.exit_layers) == (
            ["draft-model"] * 4,
            None,
            [0] * 4,
        )
        for token in draft.tokens[:kept]:
            state.append(token, 0)
        state.append((draft.tokens[kept] if kept < 4 else 0) ^ 1, 0)  # the target's own
    assert second.passes == [
        [*range(7)],
        [7],
        [8],
        [9],  # the fourth draft does not run
        [9],  # two of four were kept and are there; 9 is now the target's token
        [10],
        [11],
        [12],
        [13, 14],  # all four were kept: the last of them had not run, 14 is the target's
        [15],
        [16],
        [17],
    ]


@torch.inference_mode()
def test_sampled_drafts_come_with_the_law_they_were_drawn_from(
    second: CountingBackbone, target: Backbone
) -> None:
    state = DecodeState(target, random_ids(7))
    sampler = make_sampler(TemperatureLogitsWarper(3.0), do_sample=True)
    drafter = DraftModelDrafter(DraftCache(second), sampler, Fixed(5))
    draft = alone(drafter.draft(state, 20, Stopwatch()))
    assert draft.probs is not None
    whole = torch.cat([state.ids, torch.tensor([draft.tokens])], dim=1)
    logits = second.model(whole).logits[0, 6:-1].float()
    for law, expected in zip(draft.probs, (logits / 3.0).softmax(-1), strict=True):
        # float64 run in other blocks, rounded to float32; largest difference measured: 0
        torch.testing.assert_close(law, expected, rtol=0, atol=1e-6)


@torch.inference_mode()
def test_the_controller_sees_the_other_models_top_probability(
    second: CountingBackbone, target: Backbone
) -> None:
    state = DecodeState(target, random_ids(7))
    whole_draft = DraftModelDrafter(DraftCache(second), make_sampler(), Fixed(9))
    tokens = alone(whole_draft.draft(state, 9, Stopwatch())).tokens
    whole = torch.cat([state.ids, torch.tensor([tokens])], dim=1)
    sure = top_probability(second.model(whole).logits[0, 6:-1].float()).tolist()
    unsure = next(place for place, value in enumerate(sure) if value < 0.5)
    cut_short = DraftModelDrafter(DraftCache(second), make_sampler(), Threshold(9, 0.5))
    draft = alone(cut_short.draft(state, 20, Stopwatch()))
    assert draft.tokens == tokens[: unsure + 1]


@torch.inference_mode()
def test_nothing_is_drafted_beyond_the_other_models_last_position(target: Backbone) -> None:
    short = Backbone(make_model("llama", num_hidden_layers=1, max_position_embeddings=16))
    drafter = DraftModelDrafter(DraftCache(short), make_sampler(), Fixed(4))
    for length, room in ((10, 4), (14, 3), (16, 1), (17, 0), (30, 0)):
        state = DecodeState(target, random_ids(length))
        assert len(alone(drafter.draft(state, 20, Stopwatch())).tokens) == room


def test_a_conversation_runs_what_is_new_only_in_the_other_model_too(
    second: CountingBackbone, exact: Any
) -> None:
    options = SpeculationOptions(drafter="draft-model")
    speculator = Speculator(Backbone(exact), None, None, "", options, second)
    session = speculator.session()
    first = random_ids(9)
    answer = session.generate(first, max_new_tokens=8)
    turn = torch.cat([first, torch.tensor([[*answer.token_ids, 5, 6]])], dim=1)
    second.passes.clear()
    again = session.generate(turn, max_new_tokens=8)
    assert second.passes[0][0] >= 9
    assert again.token_ids == speculator.generate(turn, max_new_tokens=8).token_ids


def test_a_model_that_drafts_for_itself_is_always_right(exact: Any) -> None:
    speculator = wrap(exact, draft_model=exact, drafter="draft-model:max_tokens=3")
    assert wrap(exact, draft_model=exact).options.drafter == "draft-model"
    assert wrap(exact, draft_model=exact, drafter="ngram").options.drafter == "ngram"
    stats = speculator.generate(random_ids(9), max_new_tokens=21).stats
    assert (stats.drafted, stats.accepted) == (15, 15)
    assert stats.drafted_by_source == {"draft-model": 15}
    sampled = speculator.generate(random_ids(9), max_new_tokens=21, do_sample=True, seed=1).stats
    assert sampled.accepted == sampled.drafted


def test_a_draft_model_takes_the_place_of_the_default_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny = make_model("llama"), make_tokenizer(), ModelFiles("tiny", "tiny", is_default=True)
    monkeypatch.setattr(hub, "load_model", lambda *_, **__: tiny)
    asked: list[Any] = []
    monkeypatch.setattr(facade, "find_heads", lambda _model, heads, _label: asked.append(heads))
    facade.load()
    facade.load(draft_model="small")
    facade.load(draft_model="small", heads="own")
    assert asked == [hub.DEFAULT_HEADS, None, "own"]


def test_another_vocabulary_is_refused_with_sizes_and_the_first_difference() -> None:
    ours = make_tokenizer()
    assert isinstance(ours, PreTrainedTokenizerFast)
    words = {i: t for t, i in ours.get_vocab().items()}
    check_same_tokens(ours, make_tokenizer(), "small")
    other = make_tokenizer()
    other.add_tokens(["zebra"])
    with pytest.raises(DraftModelMismatch) as caught:
        check_same_tokens(ours, other, "small")
    size = len(words)
    assert str(caught.value) == (
        f"the draft model small has another vocabulary: {size + 1} tokens instead of {size}, the "
        f"first that differs is {size}: 'zebra' instead of None. "
        "Choose a smaller model of the same family"
    )


@pytest.mark.parametrize("rows", [64, 96, 128])
def test_unembeddings_padded_to_other_sizes_draft_the_same_tokens(rows: int, exact: Any) -> None:
    tokenizer = make_tokenizer()  # of ten tokens: all rows behind them are padding
    small = make_model("llama", vocab_size=rows)
    plain = wrap(exact, speculate=False).generate(random_ids(9), max_new_tokens=12).token_ids
    speculator = wrap(exact, tokenizer, draft_model=small, drafter="draft-model:max_tokens=3")
    for talker in (speculator, speculator.session()):
        answer = talker.generate(random_ids(9), max_new_tokens=12)
        assert answer.token_ids == plain
        assert answer.stats.drafted > 0
    sampled = speculator.generate(random_ids(9), max_new_tokens=12, do_sample=True, seed=0)
    assert sampled.stats.drafted > 0


@torch.inference_mode()
@pytest.mark.parametrize("size", [64, 128])
def test_logits_have_the_targets_length_and_none_for_what_the_draft_model_lacks(
    second: CountingBackbone, size: int
) -> None:
    ids = random_ids(7)[0].tolist()
    own = alone(DraftCache(second).run(ids))
    fitted = alone(DraftCache(second, size).run(ids))
    shared = min(size, second.vocab_size)
    assert fitted.shape == (1, size)
    assert torch.equal(fitted[:, :shared], own[:, :shared])
    assert bool((fitted[:, shared:] == -torch.inf).all())


@pytest.mark.parametrize("named", [False, True])
def test_another_number_of_logits_is_refused_unless_padding_begins_behind_the_last_token(
    named: bool,
) -> None:
    tokenizer = make_tokenizer() if named else None
    if tokenizer is not None:
        tokenizer.add_tokens([f"word {number}" for number in range(70)])
    with pytest.raises(DraftModelMismatch, match="has 64 rows in its unembedding, the model 96"):
        wrap(make_model("llama"), tokenizer, draft_model=make_model("llama", vocab_size=64))


def test_the_prefix_that_two_texts_share_is_counted() -> None:
    old = [1, 2, 3, 4]
    assert common(old, [1, 2, 9, 4, 5]) == 2
    assert common(old, [1, 2, 3]) == 3
    assert common(old, [9]) == 0
    assert common(old, []) == 0
