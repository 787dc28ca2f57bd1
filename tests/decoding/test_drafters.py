"""Drafters: prompt lookup, a second model, fewer layers, successors, lookahead, a datastore."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from selfspec.api.speculator import Speculator, wrap
from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import Draft, GreedyMatch, Target
from selfspec.decoding.costs import DraftCost
from selfspec.decoding.drafters import draft_model, ngram, rest
from selfspec.decoding.drafters.base import ROOT, DraftController, Drafting
from selfspec.decoding.drafters.draft_model import WINDOW, DraftCache, DraftModelDrafter, redraft
from selfspec.decoding.drafters.ngram import LookaheadDrafter, NgramDrafter, SeenTextFirst
from selfspec.decoding.drafters.rest import BEHIND, DOUBT, Datastore, RestGuesser, suffix_array
from selfspec.decoding.state import DecodeState, Steps, no_work, run_alone
from selfspec.decoding.stats import Stopwatch
from selfspec.errors import DraftModelMismatch, HeadsNotFound, InvalidData, InvalidOption
from selfspec.eval.verify import hugging_face
from selfspec.heads.heads import top_probability
from selfspec.model.backbone import Backbone
from selfspec.model.kv import ancestors
from selfspec.options import CONTROLLERS, TOGETHER, Skip
from tests import ladder
from tests.decoding.conftest import WatchedBackbone
from tests.ladder import ask
from tests.laws import Text
from tests.models import EXECUTORS, make_model, random_ids, wrapped
from tests.talks import make_tokenizer


def make_drafter(width: int = 4, rows: tuple[float, ...] = (0.15,), **options: Any) -> NgramDrafter:
    return NgramDrafter(DraftController(width), size=3, cost=DraftCost(rows=rows), **options)


def naive(text: list[int], size: int) -> tuple[int, int]:
    """Length of the longest repeated suffix, and the place of its newest continuation."""
    for count in range(min(size, len(text)), 0, -1):
        for place in range(len(text) - 1, count - 1, -1):
            if text[place - count : place] == text[-count:]:
                return count, place
    return 0, len(text)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_growing_index_finds_what_a_search_of_the_whole_text_finds(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    text = torch.randint(4, (150,), generator=generator).tolist()
    index = ngram.NgramIndex(size)
    matches = set()
    for start in range(0, 150, 3):  # a round commits several tokens
        index.extend(text[start : start + 3])
        assert index.find() == naive(text[: start + 3], size)
        matches.add(index.find()[0])
    assert matches >= set(range(1, min(size, 4)))
    assert index.text == text


REPEATS = [1, 2, 3, 4, 5, 9, 1, 2, 3]
ONCE = [1, 2, 3, 4, 5, 6, 7, 1]
"""Initial rates are 1/4, 1/2, 3/4 for matches of 1, 2, 3 tokens: chances 1/4, 1/8, 3/32, .."""


@pytest.mark.parametrize(
    ("text", "limit", "options", "tokens", "ended"),
    [
        ([1, 2, 3, 4, 5, 9, 3, 8, 1, 2, 3], 99, {}, [4, 5, 9, 3], "width"),
        (REPEATS, 2, {}, [4, 5], "budget"),
        (REPEATS, 0, {}, [], "budget"),
        (REPEATS, 99, {"end_tokens": [5]}, [4, 5], "eos"),
        ([1, 2, 3], 99, {}, [], "off"),
        ([1, 5, 5], 99, {"rows": (0.0,)}, [5] * 4, "width"),  # the copy overlaps itself
        ([9, 1, 2, 1, 2], 99, {"rows": (0.0,)}, [1, 2, 1, 2], "width"),
        ([1, 2, 1], 99, {"rows": (0.3,)}, [], "unsure"),
        # a draft grows while another row raises the tokens per step: at a cost of 0.09, 1.25 tokens
        # in 1.09 steps, 1.375 in 1.18 (a higher rate), and 1.469 in 1.27 (a lower rate)
        *(
            (ONCE, 99, {"rows": (cost,)}, ONCE[1 : 1 + count], "unsure")
            for cost, count in ((0.26, 0), (0.24, 1), (0.12, 1), (0.09, 2), (0.06, 3))
        ),
        # all 0.54 expected tokens must pay for an expensive first row
        (ONCE, 99, {"rows": (0.5, 0.0)}, [2, 3, 4, 5], "width"),
        (ONCE, 99, {"rows": (0.6, 0.0)}, [], "unsure"),
    ],
)
def test_the_continuation_of_the_longest_match_is_drafted_as_far_as_it_pays(
    text: list[int], limit: int, options: dict[str, Any], tokens: list[int], ended: str
) -> None:
    draft = ask(make_drafter(**options), Text(text), limit)
    assert (draft.tokens, draft.ended) == (tokens, ended)
    assert all((one.layer, one.probs, one.source) == (0, None, "ngram") for one in draft.proposed)


def test_wrong_guesses_stop_proposals_and_right_unproposed_guesses_restart_them() -> None:
    # a new token follows 1 every time
    drafter, text = make_drafter(), Text([1, 2, 1])
    proposed = []
    for token in range(3, 23):
        proposed.append(bool(ask(drafter, text).tokens))
        text.tokens += [token, 1]
    # 0.25 * (7/8)^3 = 0.167, then 0.147: proposals stop after four wrong guesses
    assert proposed == [True] * 4 + [False] * 16
    proposed = []
    for count in range(4):  # now 50 always follows: the drafter guesses it without proposing it
        text.tokens += [50, 60 + count, 1]
        proposed.append(bool(ask(drafter, text).tokens))
    # wrong once more, then right: 0.014, 0.137, 0.245, 0.339
    assert proposed == [False, False, True, True]


def test_a_guess_is_scored_up_to_its_first_wrong_token() -> None:
    drafter, text = make_drafter(rows=(0.0,)), Text([1, 2, 3, 4, 5, 6, 1])
    assert ask(drafter, text).tokens == [2, 3, 4, 5]
    text.tokens += [2, 3, 9, 5]  # two as guessed, then others, from another drafter
    ask(drafter, text)
    # right after matches of one and two tokens; the third is wrong; the fourth is not scored
    assert drafter._rates == [0.0, 0.25 + 0.75 / 8, 0.5 + 0.5 / 8, 0.75 - 0.75 / 8]


class Listening(DraftController):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.asked: list[float] = []
        self.heard: list[tuple[int, int]] = []

    def go_on(self, confidence: float) -> bool:
        self.asked.append(confidence)
        return confidence < 0.7

    def end(self, drafted: int, accepted: int) -> None:
        self.heard.append((drafted, accepted))


def test_the_controller_hears_the_rate_of_each_match_and_ends_the_draft() -> None:
    controller = Listening(6)
    drafter = NgramDrafter(controller, size=3, cost=DraftCost(rows=(0.0,)))
    draft = ask(drafter, Text([1, 2, 3, 4, 5, 6, 1]))
    assert controller.asked == [0.25, 0.5, 0.75]
    assert (draft.tokens, draft.ended) == ([2, 3, 4], "unsure")
    drafter.learn(Draft.of([1, 2, 3]), [0, 1])
    drafter.learn(Draft(), [])
    assert controller.heard == [(3, 2)]


class Other:
    """A drafter with a fixed draft, or none while it pauses; records its calls and feedback."""

    def __init__(self, draft: Draft | None = None) -> None:
        self.made = draft or Draft.of([90, 91])
        self.asked, self.pauses = 0, False
        self.heard: list[tuple[int, int]] = []

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:
        self.asked += 1
        return no_work(Draft() if self.pauses else self.made)

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        self.heard.append((len(draft.tokens), len(kept)))


def test_the_other_drafts_without_a_match_and_learns_only_from_its_own_drafts() -> None:
    controller, other, text = Listening(1), Other(), Text([1, 2, 3])
    drafter = SeenTextFirst(NgramDrafter(controller, size=3, cost=DraftCost(rows=(0.0,))), other)
    for expected in ([90, 91], [2]):
        draft = ask(drafter, text)
        assert draft.tokens == expected
        drafter.learn(draft, [0])
        text.tokens += [1]
    assert (other.asked, other.heard, controller.heard) == (1, [(2, 1)], [(1, 1)])


@pytest.mark.parametrize(
    ("rounds", "pauses", "expected"),
    # the other's rate of kept tokens is 1/8 after one round, 0.234 after two: below 1/4
    [(2, False, [2]), (3, False, [90, 91]), (3, True, [2])],
)
def test_prompt_lookup_must_promise_more_than_the_other_drafter_has_given(
    rounds: int, pauses: bool, expected: list[int]
) -> None:
    """A pause does not lower the other drafter's rate; prompt lookup drafts meanwhile."""
    other, text = Other(), Text([1, 2, 3, 4, 5])
    drafter = SeenTextFirst(make_drafter(width=1), other)
    for _ in range(rounds):
        drafter.learn(ask(drafter, text), [0])
    rate = drafter._other_yield
    other.pauses = pauses
    if pauses:
        drafter.learn(ask(drafter, text), [])
    assert (drafter._other_yield, len(other.heard)) == (rate, rounds)
    assert ask(drafter, Text([*text.tokens, 1])).tokens == expected


@pytest.mark.parametrize("drafter", ["ngram:size=2", "lookahead"])
def test_a_conversation_drafts_from_the_prefix_that_it_reuses(exact: Any, drafter: str) -> None:
    heads = ladder.deep_heads(Backbone(exact, executor="generic"), (0,))  # they draft nothing here
    speculator = wrap(exact, heads=heads, drafter=drafter, costs="row=0.0")
    session, first = speculator.session(), random_ids(9)
    answer = session.generate(first, max_new_tokens=8)
    turn = torch.tensor([[*first[0].tolist(), *answer.token_ids[:5], 3, *first[0, :4].tolist()]])
    plain = speculator.generate(turn, max_new_tokens=20, speculate=False)
    reply = session.generate(turn, max_new_tokens=20)
    assert reply.stats.reused_tokens >= 14
    assert reply.token_ids == plain.token_ids
    assert set(reply.stats.drafted_by_source) == {drafter.partition(":")[0]}
    alone = speculator.generate(turn, max_new_tokens=20)
    assert alone.stats.drafted == reply.stats.drafted


# --- every drafter under every controller


@pytest.fixture(scope="module")
def plain(eager: Speculator) -> list[int]:
    return eager.generate(random_ids(13), max_new_tokens=28, drafter="none").token_ids


HOWS: list[dict[str, Any]] = [
    *({"controller": {name: {}}} for name in CONTROLLERS if "threshold" not in name),
    *({"controller": {name: {"threshold": 0.1}}} for name in ("threshold", "gammatune-plus")),
    *({"acceptance": name} for name in ("cm-asd", "easd:entropy=0.1")),
    {"acceptance": "cm-asd", "do_sample": True, "temperature": 2.0, "seed": 0},
]
ALONE = [name for name in TOGETHER if name != "none" and "+" not in name]
BOTH = [name for name in TOGETHER if "+" in name]  # their parts are the same, so some pairs do


@pytest.mark.parametrize(
    ("drafter", "how"),
    [*product(ALONE, HOWS), *((BOTH[at % len(BOTH)], how) for at, how in enumerate(HOWS))],
    ids=str,
)
def test_every_drafter_works_with_every_controller_and_rule(
    eager: Speculator, plain: list[int], drafter: str, how: dict[str, Any]
) -> None:
    ids, options = random_ids(13), how | {"max_new_tokens": 28, "drafter": drafter}
    answer = eager.generate(ids, **options)
    assert answer.stats.drafted > 0
    assert set(answer.stats.drafted_by_source) <= set(drafter.split("+"))
    assert answer.stats.lossless == ("controller" in how)
    if answer.stats.lossless:
        assert answer.token_ids == plain


@pytest.fixture(scope="module")
def writer() -> Speculator:
    """A speculator whose datastore holds its own text, and a copy with every third id right."""
    speculator = wrap(make_model("llama"), never_slower=False, costs="row=0.01")
    plain = speculator.generate(random_ids(9), max_new_tokens=WINDOW + 30, speculate=False)
    text = [*random_ids(9)[0].tolist(), *plain.token_ids]
    wrong = [(token + at % 3) % 96 for at, token in enumerate(text)]
    speculator.runtime.datastore = Datastore.of([text, wrong], make_tokenizer())
    return speculator


@pytest.mark.parametrize(
    "drafter", ["successors", "ngram+successors", "rest", "ngram+rest", "skip"]
)
def test_a_repeated_text_is_drafted(writer: Speculator, drafter: str) -> None:
    skipped = writer.runtime.layers.skipped
    options: dict[str, Any] = {"max_new_tokens": WINDOW + 30, "do_sample": False}
    plain = writer.generate(random_ids(9), speculate=False, **options)
    answers = [writer.generate(random_ids(9), drafter=drafter, **options) for _ in range(2)]
    assert [answer.token_ids for answer in answers] == [plain.token_ids] * 2
    source = drafter.removeprefix("ngram+")
    assert answers[1].stats.accepted_by_source[source] > (0 if source == "skip" else 6)
    assert (writer.runtime.layers.skipped != skipped) == (drafter == "skip")


SAMPLED: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("ngram", "exit", "draft-model", "lookahead", "rest")},
    "skip:skipped=2,threshold=0.3,max_tokens=2": {"draws": 1200},
    "successors:max_tokens=2": {"draws": 1000},
    "exit:layers=0,threshold=0.01,max_tokens=2": {"heads": ladder.attending_heads, "draws": 1000},
    "ngram+exit:layers=0,threshold=0.01,guesses=3,max_rows=5,max_tokens=2": {
        "heads": ladder.deep_heads,
        "draws": 800,
    },
    "ngram+exit:layers=0,threshold=1e-9,guesses=3,max_rows=6,max_tokens=2": {
        "heads": ladder.medusa_heads,
        "draws": 800,
    },
}


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [*((drafter, "lossless") for drafter in SAMPLED)]
    + [(drafter, ladder.RATIO) for drafter in ("exit", "draft-model", [*SAMPLED][-2])],
)
def test_no_drafter_changes_the_distribution_of_samples(
    drafter: str, rule: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"draws": 600, "costs": "row=0,head=0"} | SAMPLED[drafter]
    options["acceptance"] = rule
    layers = 4 if "heads" in options else 2
    model = make_model("llama", vocab_size=4, num_hidden_layers=layers)
    if "heads" in options:
        options["heads"] = options["heads"](Backbone(model, executor="generic"))
    if drafter == "draft-model":
        options["draft_model"] = make_model("llama", vocab_size=4, num_hidden_layers=1)
    if drafter == "rest":
        options["datastore"] = tmp_path / "store.safetensors"
        text = random_ids(300, vocab_size=4).tolist()
        Datastore.of(text, make_tokenizer()).save(options["datastore"])
    ladder.check_sampling(model, random_ids(6, vocab_size=4), drafter=drafter, **options)


@pytest.mark.parametrize(
    ("drafter", "kind", "words"),
    [
        ("exit", HeadsNotFound, "drafter exit needs exit heads, which were not loaded"),
        ("ngram+exit", HeadsNotFound, r"drafter ngram\+exit needs exit heads"),
        ("draft-model", InvalidOption, "drafter draft-model needs a second model"),
        ("rest", InvalidOption, "drafter rest needs a datastore. Give --datastore"),
        ("skip:skipped=2/7", InvalidOption, "skip:skipped is 2/7, the model has 6 layers"),
    ],
)
def test_a_drafter_without_its_source_is_refused(
    drafter: str, kind: type[Exception], words: str, exact: Any
) -> None:
    with pytest.raises(kind, match=words):
        wrap(exact, drafter=drafter).generate(random_ids(5), max_new_tokens=2)


def test_prompt_lookup_and_exits_have_separate_length_limits(eager: Speculator) -> None:
    answer = eager.generate(random_ids(13), max_new_tokens=60, drafter="ngram+exit:max_tokens=1")
    assert max(answer.stats.drafted_by_index) > 1


# --- a second model drafts


@pytest.fixture(scope="module")
def second() -> WatchedBackbone:
    return WatchedBackbone(2)


@torch.inference_mode()
def test_drafts_are_the_draft_models_own_text(second: WatchedBackbone, precise: Backbone) -> None:
    state = DecodeState(precise, random_ids(7))
    drafter = DraftModelDrafter(DraftCache(second), ladder.drafting(4))
    second.runs.clear()
    for kept in (2, 4, 0):
        draft = ask(drafter, state)
        assert draft.tokens == hugging_face(second.model, state.ids, 4)[0]
        labels = {(token.source, token.layer, token.probs) for token in draft.proposed}
        assert labels == {("draft-model", 0, None)}
        for token in draft.tokens[:kept]:
            state.append(token, 0)
        state.append((draft.tokens[kept] if kept < 4 else 0) ^ 1, 0)  # the target's own token
    assert [positions for positions, _, _ in second.runs] == [
        *([*range(7)], [7], [8], [9]),  # the fourth draft is not run
        *([9], [10], [11], [12]),  # two of four were kept; 9 is now the target's token
        *([13, 14], [15], [16], [17]),  # all four were kept, the last had not run; 14: as above
    ]


@torch.inference_mode()
def test_the_controller_sees_draft_confidences(second: WatchedBackbone, precise: Backbone) -> None:
    state = DecodeState(precise, random_ids(7))
    whole, cut_short = (
        ask(DraftModelDrafter(DraftCache(second), Drafting(ladder.greedy(), controller)), state)
        for controller in (DraftController(9), DraftController(9, 0.5))
    )
    text = torch.cat([state.ids, torch.tensor([whole.tokens])], dim=1)
    confidences = top_probability(second.model(text).logits[0, 6:-1].float()).tolist()
    unsure = next(place for place, value in enumerate(confidences) if value < 0.5)
    assert cut_short.tokens == whole.tokens[: unsure + 1]


@torch.inference_mode()
def test_nothing_is_drafted_beyond_the_draft_models_last_position(precise: Backbone) -> None:
    short = Backbone(make_model("llama", num_hidden_layers=1, max_position_embeddings=16))
    drafter = DraftModelDrafter(DraftCache(short), ladder.drafting(4))
    for length, room in ((10, 4), (14, 3), (16, 1), (17, 0), (30, 0)):
        state = DecodeState(precise, random_ids(length))
        assert len(ask(drafter, state).tokens) == room


def test_a_conversation_runs_only_new_tokens_in_the_draft_model_too(
    second: WatchedBackbone, exact: Any
) -> None:
    options = SpeculationOptions(drafter="draft-model")
    speculator = Speculator(Backbone(exact), None, None, "", options, second)
    session = speculator.session()
    first = random_ids(9)
    answer = session.generate(first, max_new_tokens=8)
    turn = torch.cat([first, torch.tensor([[*answer.token_ids, 5, 6]])], dim=1)
    second.runs.clear()
    reply = session.generate(turn, max_new_tokens=8)
    assert second.runs[0][0][0] >= 9
    assert reply.token_ids == speculator.generate(turn, max_new_tokens=8).token_ids


def test_a_model_that_drafts_for_itself_is_always_right(exact: Any) -> None:
    speculator = wrap(exact, draft_model=exact, drafter="draft-model:max_tokens=3")
    assert wrap(exact, draft_model=exact).options.drafter == "draft-model"
    assert wrap(exact, draft_model=exact, drafter="ngram").options.drafter == "ngram"
    stats = speculator.generate(random_ids(9), max_new_tokens=21).stats
    assert (stats.drafted, stats.accepted) == (15, 15)
    assert stats.drafted_by_source == {"draft-model": 15}
    sampled = speculator.generate(random_ids(9), max_new_tokens=21, do_sample=True, seed=1).stats
    assert sampled.accepted == sampled.drafted


def test_another_vocabulary_is_refused_with_sizes_and_the_first_difference() -> None:
    tokenizer, other = make_tokenizer(), make_tokenizer()
    draft_model.check_same_tokens(tokenizer, other, "small")
    size = len(tokenizer.get_vocab())
    other.add_tokens(["zebra"])
    pattern = rf"{size + 1} tokens instead of {size}, .* is {size}: 'zebra' instead of None"
    with pytest.raises(DraftModelMismatch, match=pattern):
        draft_model.check_same_tokens(tokenizer, other, "small")


@pytest.mark.parametrize("rows", [64, 128])
def test_unembeddings_padded_to_other_sizes_draft_the_same_tokens(rows: int, exact: Any) -> None:
    tokenizer = make_tokenizer()  # ten tokens: all later rows are padding
    small = make_model("llama", vocab_size=rows)
    plain = wrap(exact, speculate=False).generate(random_ids(9), max_new_tokens=12).token_ids
    speculator = wrap(exact, tokenizer, draft_model=small, drafter="draft-model:max_tokens=3")
    for talker in (speculator, speculator.session()):
        answer = talker.generate(random_ids(9), max_new_tokens=12)
        assert answer.token_ids == plain
        assert answer.stats.drafted > 0
    sampled = speculator.generate(random_ids(9), max_new_tokens=12, do_sample=True, seed=0)
    assert sampled.stats.drafted > 0


def test_another_number_of_logits_is_refused_unless_padding_begins_after_the_last_token() -> None:
    large = make_tokenizer()
    large.add_tokens([f"word {number}" for number in range(70)])
    message = "has 64 rows in its unembedding, the model 96"
    for tokenizer in (None, large):
        with pytest.raises(DraftModelMismatch, match=message):
            wrap(make_model("llama"), tokenizer, draft_model=make_model("llama", vocab_size=64))


# --- drafts from the model without some of its layers


def skipping(**options: Any) -> draft_model.SkipDrafter:
    layers = draft_model.LayerSearch(6)
    return draft_model.SkipDrafter(Skip(**options), layers, ladder.drafting(8))


def entered(backbone: Backbone, ids: Tensor) -> DecodeState:
    """A state whose ids, except the newest, have run through all layers."""
    state = DecodeState(backbone, ids)
    state.hidden.push(backbone.embed(ids[0, :-1]))
    run_alone(state.hidden.advance_all())
    state.hidden.clear()
    return state


def lengths(state: DecodeState) -> set[int]:
    return {state.kv.length(layer) for layer in range(state.backbone.num_layers)}


@torch.inference_mode()
@pytest.mark.parametrize("skipped", [(2,), (5, 3), (2, 3, 6)])
def test_drafts_are_those_of_a_shorter_model(precise: Backbone, skipped: tuple[int, ...]) -> None:
    """Without a prefix, whose keys and values would come from the whole model."""
    kept = [one for at, one in enumerate(make_model("llama").model.layers, 1) if at not in skipped]
    shorter = make_model("llama", num_hidden_layers=len(kept))
    shorter.load_state_dict(precise.model.state_dict(), strict=False)
    for at, layer in enumerate(kept):
        shorter.model.layers[at].load_state_dict(layer.state_dict())
    state = DecodeState(precise, torch.tensor([[7]]))
    draft = ask(skipping(skipped=skipped, threshold=0.0), state)
    assert draft.tokens == hugging_face(shorter, state.ids, 8)[0]
    assert {token.source for token in draft.proposed} == {"skip"}
    assert lengths(state) == {0}


@torch.inference_mode()
@pytest.mark.parametrize("executor", EXECUTORS)
def test_redrafting_a_window_gives_the_models_tokens_and_keeps_caches(executor: str) -> None:
    backbone = wrapped("llama", executor=executor)
    ids = random_ids(9)
    text = torch.cat([ids, torch.tensor([hugging_face(backbone.model, ids, 12)[0]])], dim=1)
    state, untouched = entered(backbone, text), entered(backbone, text)
    assert run_alone(redraft(state, (), 12)).best == text[0, 9:].tolist()
    assert run_alone(redraft(state, (2, 3, 4, 5), 12)).best != text[0, 9:].tolist()
    assert lengths(state) == {20}
    draft, expected = (ask(skipping(skipped=(3,)), one) for one in (state, untouched))
    assert draft.tokens == expected.tokens


@torch.inference_mode()
def test_a_draft_keeps_its_layers_while_another_text_finds_better_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers that skipped a token have no keys of it; masks of a sliding window count them."""
    state, drafter = entered(wrapped("mistral"), random_ids(9)), skipping(threshold=0.0)
    expected = ask(drafter, state).tokens
    sets = PropertyMock(side_effect=cycle([drafter._search.skipped, (3,)]))
    monkeypatch.setattr(draft_model.LayerSearch, "skipped", sets, raising=False)
    assert ask(drafter, state).tokens == expected


@torch.inference_mode()
def test_an_unsure_token_ends_a_draft_and_a_dropped_draft_leaves_nothing(precise: Backbone) -> None:
    state = entered(precise, random_ids(9, 1))  # sure by 0.72, 0.97, 0.94, 0.92, 0.47, 0.38, ..
    taus = (0.0, 0.5, 1.0)
    drafts = [ask(skipping(skipped=(3,), threshold=tau), state) for tau in taus]
    ends = [(8, "width"), (5, "unsure"), (1, "unsure")]
    assert [(len(draft.tokens), draft.ended) for draft in drafts] == ends
    assert drafts[1].tokens == drafts[0].tokens[:5]
    with state.round():
        works = skipping(skipped=(3,), threshold=0.0).draft(state, 20, Stopwatch())
        work = next(works)
        for _ in range(6):
            work = works.send(work.do([work], [])[0])
        assert lengths(state) == {8, 9, 10}
        works.close()
    assert lengths(state) == {8}


def test_the_threshold_moves_as_self_sd_moves_it() -> None:
    """Worked by hand: the rate goes 0.5, 0.75, 0.875, 0.9375, 0.96875, 0.484375."""
    rule, fixed = (skipping(threshold=0.8, target=target) for target in (0.9, None))
    whole, wide = Draft.of([1, 2], ended="unsure"), Draft.of([1, 2], ended="width")
    thresholds = []
    for draft, kept in ((whole, 2), (whole, 2), (whole, 2), (whole, 2), (wide, 2), (whole, 0)):
        for drafter in (rule, fixed):
            drafter.learn(draft, range(kept))
        thresholds.append(rule.threshold)
    assert thresholds == pytest.approx([0.801, 0.802, 0.803, 0.802, 0.802, 0.803])
    rule.learn(Draft(), [])
    assert rule.threshold == pytest.approx(0.803)
    assert fixed.threshold == 0.8


def test_a_search_keeps_the_best_set_and_ends() -> None:
    search = draft_model.LayerSearch(12)
    assert search.skipped == (2, 4, 6, 8, 10)
    first, second = search.draw(), search.draw()
    assert first != second
    assert all(len(drawn) == 4 and set(drawn) <= {*range(2, 12)} for drawn in (first, second))
    search.learn(first, 0.5)
    search.learn(second, 0.4)
    assert search.skipped == first
    for _ in range(299):
        assert search.goes_on
        search.learn(second, 0.5)
    assert search.goes_on
    search.learn(second, 0.5)
    assert not search.goes_on  # 301 in a row were no better
    fresh = draft_model.LayerSearch(12)
    fresh.learn(second, 0.96)
    assert (fresh.skipped, fresh.goes_on) == (second, False)
    assert draft_model.LayerSearch(3).draw() == (2,)  # at least one, even of few layers
    assert not draft_model.LayerSearch(2).goes_on


# --- drafts from successors


def test_two_tokens_come_before_one_and_the_newest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ngram.Successors()
    assert table.guesses([1, 2]).tokens == []
    table.learn([1, 2], [5, 6], 5)
    table.learn([3, 2], [7, 8], 7)
    assert list(table.guesses([1, 2]).tokens) == [5, 6]
    assert list(table.guesses([9, 2]).tokens) == [7, 8]  # by the last token alone
    chances = table.guesses([1, 2]).chances
    for _ in range(300):
        table.learn([1, 2], [6, 5], 5)
    guesses = table.guesses([1, 2])
    assert (list(guesses.tokens), guesses.chances[0] < chances[0]) == ([6, 5], True)
    assert list(guesses.chances) == sorted(guesses.chances, reverse=True)
    monkeypatch.setattr(ngram, "_MOST", 2)  # the oldest entries make room
    table = ngram.Successors()
    for first in (1, 2, 1, 3):
        table.learn([first, first], [first + 10], 0)
    assert [list(table.guesses([n, n]).tokens) for n in (1, 2, 3)] == [[11], [], [13]]


def test_a_table_learns_the_tokens_after_the_two_newest_ones() -> None:
    table = ngram.Successors()
    rule = ngram.TeachingRule(GreedyMatch(ladder.greedy()), table, [1, 2])
    for token in (3, 4):
        rule.note(torch.eye(9)[token], token)
    table.learn([9, 3], [7], 7)
    assert [table.guesses([first, 3]).tokens[0] for first in (2, 9, 8)] == [4, 7, 7]


# --- lookahead


def make_lookahead(
    level: int, window: int, *end_tokens: int, most: int = 99, controller: Any = None
) -> LookaheadDrafter:
    control = controller or DraftController(level - 1)
    return LookaheadDrafter(control, end_tokens, level=level, window=window, guesses=2, most=most)


def verified(drafter: LookaheadDrafter, draft: Draft, said: Sequence[int]) -> None:
    """Let the target say `said`: a token after the newest one, and one after each draft token."""
    assert len(said) == len(draft.proposed) + 1
    draft.target = Target(torch.empty(0), best=lambda: list(said))
    drafter.learn(draft, [])


def test_a_window_fills_and_moves_up_and_gives_an_ngram_of_each_column() -> None:
    drafter, text = make_lookahead(3, 2), Text([7, 7])
    draft = ask(drafter, text)  # two columns of one level: the newest token, and a drawn one
    assert (draft.tokens, draft.parents) == ([7], [-1])
    verified(drafter, draft, [20, 21])
    text.tokens.append(20)
    draft = ask(drafter, text)  # the first column is gone; 21 stands over the newest token
    assert (draft.tokens, draft.parents) == ([21, 7, 7], [-1, -1, 1])
    verified(drafter, draft, [0, 31, 0, 32])  # so 20 21 31 and 7 7 32 are n-grams
    text.tokens.append(20)
    draft = ask(drafter, text)  # the first of them, and the window, one level up
    assert (draft.tokens, draft.parents) == ([21, 31, 31, 7, 32], [-1, 0, -1, -1, 3])
    assert {(token.source, token.layer, token.probs) for token in draft.proposed} == {
        ("lookahead", 0, None)
    }
    verified(drafter, draft, [0, 0, 0, 0, 0, 40])
    text.tokens.append(7)
    assert ask(drafter, text).tokens[:2] == [32, 40]


@pytest.mark.parametrize(("level", "window"), [(5, 7), (3, 2), (4, 1), (2, 4)])
def test_rows_of_the_window_see_what_the_papers_mask_allows(level: int, window: int) -> None:
    drafter, text = make_lookahead(level, window), Text([*range(1000, 1100)])
    ids = iter(range(999))  # no two tokens are equal, so no rows are merged
    for levels in (*range(1, level), level - 1):
        draft = ask(drafter, text)
        order = [(j, i) for i in range(window) for j in range(levels)]
        rows = {place: row for row, place in enumerate(order)}
        mask = ancestors([-1, *(token.parent + 1 for token in draft.proposed)])
        for j, i in order:  # level 0 up to column i, and column i up to level j
            allowed = {rows[0, at] for at in range(i + 1)} | {rows[at, i] for at in range(j + 1)}
            assert set(mask[rows[j, i]].nonzero().flatten().tolist()) == allowed
        verified(drafter, draft, [next(ids) for _ in order])
        text.tokens.append(next(ids))


def test_guesses_come_from_the_text_and_equal_rows_are_merged() -> None:
    drafter, text = make_lookahead(3, 0), Text([1, 2, 3, 1, 2, 4, 1])
    draft = ask(drafter, text)
    assert (draft.tokens, draft.parents) == ([2, 4, 3], [-1, 0, 0])
    text.tokens += [5, 6, 1]
    assert ask(drafter, text).tokens == [5, 6, 2, 4]  # the oldest of three makes room
    text.tokens += [2, 4, 1]
    assert ask(drafter, text).tokens == [2, 4, 5, 6]  # the newest now
    text.tokens.append(9)
    assert (ask(drafter, text).tokens, ask(drafter, text).ended) == ([], "off")


def test_nothing_is_drafted_after_an_end_token() -> None:
    drafter, text, drafted = make_lookahead(4, 3, 9), Text([9, 8]), 0
    for start in range(30, 70, 10):
        draft = ask(drafter, text)
        assert not any(draft.proposed[at].token == 9 for at in draft.parents if at >= 0)
        drafted += draft.tokens.count(9)
        verified(drafter, draft, [9, *range(start, start + len(draft.proposed))])
        text.tokens.append(8)
    assert drafted > 1


@pytest.mark.parametrize("most", range(1, 16))
def test_a_draft_has_no_more_rows_and_no_longer_paths_than_fit(most: int) -> None:
    drafter, text, widest = make_lookahead(4, 3, most=most), Text([*range(50), *range(50)]), 0
    for limit in (99, 99, 99, 99, 4, 2, 1, 0):
        text.tokens.append(3)
        draft = ask(drafter, text, limit)
        assert len(draft.proposed) <= most
        assert draft.depth <= limit
        widest = max(widest, len(draft.proposed))
        verified(drafter, draft, range(60, 61 + len(draft.proposed)))
    assert widest == min(most, 14)  # three columns of three, less the newest; two n-grams


def test_the_controller_sets_how_much_of_an_ngram_is_drafted_and_hears_of_it() -> None:
    controller = Listening(2)
    drafter = make_lookahead(4, 2, controller=controller)
    draft = ask(drafter, Text([1, 2, 3, 4, 1]))
    assert draft.tokens[:2] == [2, 3]
    assert 4 not in draft.tokens[:-1]
    drafter.learn(draft, [0])
    assert controller.heard == [(2, 1)]


# --- drafts from a datastore: continuations, their probabilities, and the file

Prefix = tuple[int, ...]


def store_of(*texts: list[int]) -> Datastore:
    return Datastore.of(texts, make_tokenizer())


def weights(texts: list[list[int]], newest: list[int]) -> tuple[Counter[Prefix], int]:
    """By definition: how often each prefix of 10 tokens follows the longest suffix that occurs."""
    for count in range(min(16, len(newest)), 1, -1):
        suffix, prefixes = newest[-count:], Counter[Prefix]()
        for text in texts:
            for at in range(len(text) - count + 1):
                if text[at : at + count] == suffix:
                    tail = text[at + count : at + count + BEHIND]
                    prefixes.update(tuple(tail[: n + 1]) for n in range(len(tail)))
                    prefixes[()] += 1
        if prefixes:
            return prefixes, count
    return Counter(), 0


@pytest.mark.parametrize("seed", range(20))
def test_the_heaviest_prefixes_after_the_longest_suffix_are_found(seed: int) -> None:
    dice = random.Random(seed)
    texts = [[dice.randrange(3) for _ in range(dice.randrange(1, 60))] for _ in range(12)]
    newest = [dice.randrange(3) for _ in range(dice.randrange(1, 20))]
    (expected, matched), store = weights(texts, newest), store_of(*texts)
    for most in (4, 15, 10_000):
        trie = store.continuations(newest, most)
        paths = {(*path, token) for path, guesses in trie.items() for token in guesses.tokens}
        assert paths <= expected.keys()
        sizes = sorted((count for path, count in expected.items() if path), reverse=True)
        assert sorted((expected[path] for path in paths), reverse=True) == sizes[:most]
        for path, guesses in trie.items():
            assert path == () or path in paths
            total = expected[path] + DOUBT / (matched + len(path))
            chances = [expected[path + (token,)] / total for token in guesses.tokens]  # noqa: RUF005  # 3.10
            assert list(guesses.chances) == chances == sorted(chances, reverse=True)


def test_a_suffix_array_sorts_places_by_the_ids_from_there_on() -> None:
    dice = random.Random(0)
    for size in (1, 2, 31, 500):
        ids = np.array([dice.randrange(-1, 3) for _ in range(size)], np.int32)
        expected = sorted(range(size), key=lambda at: (ids[at : at + 32].tolist(), at))
        assert suffix_array(ids).tolist() == expected


def test_many_hits_are_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(*([1, 2, 3] for _ in range(30)), *([1, 2, 4] for _ in range(60)))
    monkeypatch.setattr(rest, "HITS", 9)
    guesses = store.continuations([1, 2], 15)[()]
    assert (guesses.tokens, guesses.chances) == ((4, 3), (6 / (9 + 4), 3 / (9 + 4)))


def test_a_guesser_continues_each_path_of_a_draft_and_in_chains_by_the_heaviest() -> None:
    store, draft = store_of([1, 2, 5, 6], [1, 2, 5, 7], [1, 2, 8, 6]), Draft.of([5, 8], [-1, -1])
    for trees, expected in ((True, [[5, 8], [6, 7], [6]]), (False, [[5], [6], [6]])):
        guesser = RestGuesser(store, 15, trees=trees)
        guesser.begin(Text([9, 1, 2]))
        guesses = run_alone(guesser.ask(draft, [ROOT, 0, 1], Stopwatch()))
        assert [[*guess.tokens] for guess in guesses] == expected


WRONG: list[dict[str, Any]] = [
    {"ids": None},
    {"more": np.zeros(3, np.int32)},
    {"ids": np.zeros(2, np.int32)},
    {"ids": np.zeros(7, np.int64)},
    {"ids": np.full(7, -2, np.int32)},
    {"suffixes": np.full(7, 7, np.int32)},
    {"suffixes": np.full(7, -1, np.int32)},
    {"ids": np.zeros(0, np.int32), "suffixes": np.zeros(0, np.int32)},
    {"ids": np.zeros((7, 1), np.int32), "suffixes": np.zeros((7, 1), np.int32)},
    {"vocabulary": np.zeros(31, np.uint8)},
]


@pytest.mark.parametrize("changed", WRONG, ids=range(len(WRONG)))
def test_damaged_datastores_are_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "store.safetensors"
    store_of([1, 2, 3], [4, 5]).save(path)
    tensors = {name: one for name, one in (load_file(path) | changed).items() if one is not None}
    save_file(tensors, path)
    with pytest.raises(InvalidData, match=f"{path} is (no datastore|damaged)"):
        wrap(make_model("llama"), datastore=path)


def test_another_vocabulary_is_refused(tmp_path: Path, exact: Any) -> None:
    path, other = tmp_path / "store.safetensors", make_tokenizer()
    other.add_tokens(["zebra"])
    Datastore.of([[1, 2, 3]], other).save(path)
    assert wrap(exact, other, datastore=path).options.drafter == "ngram+rest"
    with pytest.raises(InvalidData, match=f"the datastore {path} is of another vocabulary"):
        wrap(exact, make_tokenizer(), datastore=path)
    Datastore.of([[1, 96, 3]], other).save(path)  # a token that the model does not have
    with pytest.raises(InvalidData, match="of another vocabulary than the model's"):
        wrap(exact, other, datastore=path)


def test_longest_paths_and_rows_are_bounded(tmp_path: Path, exact: Any) -> None:
    ids, path = random_ids(9), tmp_path / "store.safetensors"
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "costs": "row=0"}
    plain = wrap(exact, speculate=False).generate(ids, **options)
    store_of(*[[*ids[0].tolist(), *plain.token_ids]] * 50).save(path)  # nearly certain
    speculator = wrap(exact, datastore=path, drafter="rest")
    lengths = [
        max(speculator.generate(ids, drafter=f"rest:{setting}", **options).stats.drafted_by_index)
        for setting in ("max_tokens=2", "max_rows=4", "max_rows=16")
    ]
    assert lengths == [2, 3, 10]
