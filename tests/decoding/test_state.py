"""State of a sequence, every pass of a round, and invariants between rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from selfspec.decoding.decode import StopRule
from selfspec.decoding.drafters.base import DraftController, Drafting
from selfspec.decoding.drafters.heads import ExitDrafter
from selfspec.decoding.state import DecodeState, HiddenCache, NoDrafter, Run, run_alone
from selfspec.decoding.stats import Round
from selfspec.eval.verify import MixedDrafter
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import ExitJudge, likeliest
from selfspec.model.backbone import Backbone
from selfspec.model.kv import KVCache
from selfspec.training.features import FeatureSpec, features, pad_batch
from selfspec.training.text import Conversation
from tests import ladder
from tests.decoding.conftest import WatchedBackbone
from tests.ladder import rounds
from tests.models import VOCAB_SIZE, noted, random_ids

EXIT_LAYERS = (2, 4, 6)


def test_heads_read_the_deep_states_that_they_were_fitted_to(
    precise: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(7)
    assert DecodeState(precise, ids).deep is None  # none before the first pass
    plain = ladder.decode(precise, ids, NoDrafter())
    text = [*ids[0].tolist(), *plain.tokens]
    heads = ladder.HEADS["deep with states"](precise)
    drafter = MixedDrafter(text, 1, precise.vocab_size, width=5)
    kept = noted(
        monkeypatch, MixedDrafter, "draft", lambda _, state, *__: (state.length - 1, state.deep)
    )
    answer = ladder.decode(precise, ids, drafter, heads=heads)
    assert answer.tokens == plain.tokens
    assert len({entry.accepted for entry in answer.entries}) > 2
    batch = pad_batch([Conversation(tuple(text), ((1, len(text)),))])
    expected: Any = features(precise, FeatureSpec.read_by(heads), batch).deep
    assert expected.shape[-1] == heads[0].deep_size == 3 * precise.hidden_size
    assert len(kept) > 3
    for position, deep in kept:
        # float64 with norms in float32; largest difference measured: 3e-7
        torch.testing.assert_close(deep, expected[position : position + 1], rtol=0, atol=1e-5)


def test_states_are_kept_at_any_stop_of_a_pass(precise: Backbone) -> None:
    hidden, layers = precise.embed(random_ids(4)[0]), (2, 3, 5)
    works = [Run(precise, KVCache(6), hidden, 0, last, state_layers=layers) for last in (6, 3)]
    outcome, _ = works[0].do(works, [])
    assert (outcome, works[0].first) == (None, 3)
    (output,) = works[0].do(works[:1], [])
    run = Run(precise, KVCache(6), hidden, 0, 6, state_layers=layers)
    (expected,) = run.do([run], [])
    torch.testing.assert_close(output, expected)
    for layer in layers:
        torch.testing.assert_close(works[0].layer_states[layer], run.layer_states[layer])


# --- rounds over the queues


Decide = Callable[[int, int], int | None]
"""(draft of the round, counted from 0; exit layer) -> a token to draft there, or None: unsure."""


class ScriptedHeads:
    """Stands in for ExitHeads: sure of the token from `decide`, or else uniform."""

    def __init__(self, state: DecodeState, decide: Decide) -> None:
        self.state = state
        self.decide = decide
        self.seen: list[tuple[int, int, Tensor]] = []  # draft, layer, hidden state

    reads_deep, deep_size = False, 0

    def __getitem__(self, layer: int) -> ScriptedHeads:
        self.layer = layer
        return self

    def ask(self, hidden: Tensor, deep: Tensor | None) -> tuple[Tensor, Tensor]:
        assert hidden.shape == (1, 32)
        # rows entered since the round began: the newest token's, then one per draft
        step = self.state.hidden.row_count - 1
        self.seen.append((step, self.layer, hidden))
        token = self.decide(step, self.layer)
        logits = torch.zeros(1, VOCAB_SIZE)
        if token is not None:
            logits[0, token] = 50.0
        return hidden, logits

    def likeliest(self, logits: Tensor, temperature: float, count: int) -> Tensor:
        return torch.cat(likeliest(logits, temperature, count), dim=1)


def make_state(backbone: Backbone) -> DecodeState:
    return DecodeState(backbone, random_ids(5), exit_layers=EXIT_LAYERS)


def make_drafter(heads: ScriptedHeads, drafting: Drafting | None = None) -> ExitDrafter:
    judge = ExitJudge(8, dict.fromkeys(EXIT_LAYERS, 0.9))
    return ExitDrafter(cast(ExitHeads, heads), judge, drafting or ladder.drafting(4))


def decode(state: DecodeState, decide: Decide, max_length: int = 64) -> Iterator[Round]:
    """Rounds of greedy decoding, the prompt's pass first."""
    drafter = make_drafter(ScriptedHeads(state, decide))
    return rounds(state, drafter, StopRule(max_length=max_length))


def scripted(exits: list[int | None]) -> Decide:
    """Draft j leaves at `exits[j]`, as token 10 + j."""
    return lambda step, layer: 10 + step if exits[step] == layer else None


LONG_SHALLOW_CHAIN: list[tuple[list[int], int, int]] = [
    ([5], 0, 2),  # "?" gives "I" at layer 2 and waits there
    ([6], 0, 2),  # "I" is unsure at layer 2,
    ([5, 6], 2, 4),  # takes "?" along and gives "am" at layer 4
    ([7], 0, 2),  # "am" is unsure at layer 2,
    ([7], 2, 4),  # runs alone where the others have been,
    ([5, 6, 7], 4, 6),  # takes them along and gives "a" at layer 6
    ([8], 0, 2),  # "a" gives "chat" at layer 2: W_max drafts
    ([9], 0, 2),  # "chat" enters for the bonus token,
    ([8, 9], 2, 6),  # and is aligned with "a" to layer 6, the deepest exit
    ([5, 6, 7, 8, 9], 6, 8),  # all go through layers 7 and 8 together
]
"""SpecBound, appendix A: a long shallow chain."""

DIFFICULT_TOKEN: list[tuple[list[int], int, int]] = [
    ([5], 0, 2),  # "?" gives "am" at layer 2
    ([6], 0, 2),
    ([5, 6], 2, 4),  # "am" gives "a" at layer 4
    ([7], 0, 2),
    ([7], 2, 4),
    ([5, 6, 7], 4, 6),  # nothing is sure at D_max: all wait there by now
    ([5, 6, 7], 6, 8),  # the deep pass decodes the difficult token too
]
"""SpecBound, section 2.3: a difficult token."""

# a difficult first token costs no row twice
DIFFICULT_AT_ONCE = [([5], 0, 2), ([5], 2, 4), ([5], 4, 6), ([5], 6, 8)]
# room for 2 tokens, one of them the bonus, whose row alone aligns a chain at one layer
NO_ROOM = [([5], 0, 2), ([5], 2, 4), ([6], 0, 4), ([5, 6], 4, 8)]


@pytest.mark.parametrize(
    ("exits", "max_length", "runs", "ended"),
    [
        ([2, 4, 6, 2], 64, LONG_SHALLOW_CHAIN, "width"),
        ([2, 4, None], 64, DIFFICULT_TOKEN, "depth"),
        ([None], 64, DIFFICULT_AT_ONCE, "depth"),
        ([4, 4], 8, NO_ROOM, "budget"),
    ],
)
def test_appendix_a_pass_by_pass(
    watched: WatchedBackbone, exits: list[int | None], max_length: int, runs: list[Any], ended: str
) -> None:
    loop = decode(make_state(watched), scripted(exits), max_length)
    prefill, entry = next(loop), next(loop)
    assert prefill.passes == [(5, 0, 8)]
    layers = [layer for layer in exits if layer][: max_length - 7]
    assert (entry.draft_tokens, entry.exit_layers) == ([10, 11, 12, 13][: len(layers)], layers)
    assert (entry.ended, watched.runs) == (ended, [([0, 1, 2, 3, 4], 0, 8), *runs])
    assert entry.passes == [(len(rows), first, last) for rows, first, last in runs]


@pytest.mark.parametrize("exits", [[2, 4, 6, 2], [6, 2, 2, 4], [2, 4, None]])
@torch.inference_mode()
def test_heads_see_the_row_being_drafted_at_their_own_layer(
    watched: WatchedBackbone, exits: list[int | None]
) -> None:
    state = make_state(watched)
    next(decode(state, scripted([])))
    heads = ScriptedHeads(state, scripted(exits))
    with state.round():
        draft = ladder.ask(make_drafter(heads), state)
    ids = torch.cat([state.ids, torch.tensor([draft.tokens])], dim=1)
    expected = watched.model(ids, output_hidden_states=True).hidden_states
    calls = [(step, layer) for step, layer, _ in heads.seen]
    assert calls == [
        (step, layer)
        for step, exit_layer in enumerate(exits)
        for layer in EXIT_LAYERS
        if layer <= (exit_layer or 6)
    ]
    for step, layer, hidden in heads.seen:
        # float64; largest difference measured: 0
        assert (hidden - expected[layer][:, 5 + step]).abs().max() < 1e-13


def test_the_ids_of_a_long_text_are_complete(watched: WatchedBackbone) -> None:
    state, text = DecodeState(watched, torch.tensor([[0, 7, 8]]), pad=1), [0, 7, 8]
    for count in (9, 1600):  # at first the buffer holds 259 ids
        while len(text) < count:
            state.append(len(text), 0)
            text.append(len(text))
        assert state.ids[0].tolist() == text


@pytest.fixture(scope="module")
def truth(shared: WatchedBackbone) -> list[int]:
    state = make_state(shared)
    list(decode(state, lambda _step, _layer: None, max_length=45))
    return state.ids[0].tolist() + [0] * 8


@pytest.mark.parametrize("passes", range(11))
def test_an_error_in_any_pass_leaves_the_committed_text(
    watched: WatchedBackbone, truth: list[int], passes: int
) -> None:
    """The error comes in the prompt's pass, or in one of the ten passes of a round."""
    state = make_state(watched)
    loop = decode(state, scripted([2, 4, 6, 2]))
    if passes:
        next(loop)
    watched.passes_until_error = max(passes, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        next(loop)
    assert state.ids[0].tolist() == truth[: 6 if passes else 5]
    assert {state.kv.length(layer) for layer in range(8)} == {5 if passes else 0}
    assert state.hidden.row_count == 0
    watched.passes_until_error = -1
    list(decode(state, scripted([None] * 8), max_length=20))
    assert state.ids[0].tolist() == truth[:20]


def test_a_controller_ends_drafts_and_is_told(watched: WatchedBackbone, truth: list[int]) -> None:
    state = make_state(watched)
    heads = ScriptedHeads(state, lambda step, _: truth[state.length + step] + (step == 2))
    reports: list[tuple[int, int]] = []

    class ThreeThenUnsure(DraftController):
        def go_on(self, confidence: float) -> bool:
            assert confidence == 1.0  # scripted heads are sure
            return len(heads.seen) % 3 != 0

        def end(self, drafted: int, accepted: int) -> None:
            reports.append((drafted, accepted))

    drafter = make_drafter(heads, Drafting(ladder.greedy(), ThreeThenUnsure(5)))
    loop = rounds(state, drafter, StopRule(max_length=64))
    entries = [next(loop) for _ in range(3)]
    assert [entry.ended for entry in entries] == ["off", "unsure", "unsure"]
    assert reports == [(3, 2), (3, 2)]
    assert state.ids[0].tolist() == truth[: state.length]


@given(st.sets(st.integers(0, 7), max_size=3), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_all_rows_go_through_all_layers_once(exit_layers: set[int], reached: list[int]) -> None:
    """`reached`: how far each new row advances, with all rows that it meets."""
    backbone: Any = SimpleNamespace(num_layers=8, run=lambda hidden, *_: hidden)
    cache = HiddenCache(backbone, KVCache(8), sorted(exit_layers))
    for depth in reached:
        cache.push(torch.zeros(1, 1))
        for boundary in range(min(depth, len(exit_layers))):
            run_alone(cache.advance(boundary))
    assert len(run_alone(cache.advance_all())) == len(reached)
    assert sum(rows * (last - first) for rows, first, last in cache.passes) == 8 * len(reached)
    assert [last for _, _, last in cache.passes].count(8) == 1  # one pass for all
