"""Trees of drafts: each row sees only its own path, and costs set the width of a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count, product
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.decoding.acceptance import Draft
from selfspec.decoding.costs import DraftCost
from selfspec.decoding.decode import StopRule
from selfspec.decoding.drafters.base import DraftController, Likeliest
from selfspec.decoding.drafters.ngram import NgramDrafter
from selfspec.decoding.drafters.trees import TreeDrafter
from selfspec.decoding.state import DecodeState, Drafter, NoDrafter, Steps, no_work
from selfspec.decoding.stats import EXIT, Stopwatch
from selfspec.errors import InvalidDraft, UnsupportedModel
from selfspec.eval.verify import BranchingDrafter
from selfspec.model.backbone import Backbone
from selfspec.model.kv import KVCache, Rows
from tests import ladder
from tests.ladder import ask, rounds
from tests.laws import Text
from tests.models import EXECUTORS, random_ids, wrapped

PARENTS = (-1, -1, 0, 0, 1, 3, 3, 2)
"""Two first tokens; the first has two children, one of which has two."""


def run(backbone: Backbone, ids: Tensor, kv: KVCache, parents: Sequence[int] | None = None) -> Any:
    """Logits [T, V] of rows that follow the content of `kv`."""
    rows = Rows.of(kv, kv.length(0), len(ids), ids.device, parents)
    return backbone.logits(backbone.run(backbone.embed(ids), 0, backbone.num_layers, rows))


@torch.inference_mode()
def check_rows_see_their_own_paths(
    backbone: Backbone, held: int, parents: Sequence[int], atol: float
) -> None:
    """Compare each row with its path alone; a parent -n is n - 1 positions before the last held."""
    text, drafts = random_ids(max(held, 1))[0][:held], random_ids(len(parents), seed=1)[0]
    kv = KVCache(backbone.num_layers)
    if held:
        run(backbone, text, kv)
    logits = run(backbone, drafts, kv, parents)
    tree = Draft.of(drafts.tolist(), parents)
    for row in range(len(parents)):
        path = tree.path(row)
        ids = torch.cat([text[: held + parents[path[0]] + 1], drafts[path]])
        alone = run(backbone, ids, KVCache(backbone.num_layers))[-1]
        torch.testing.assert_close(logits[row], alone, rtol=0, atol=atol)


@pytest.mark.parametrize("how", ["generic sdpa", "generic eager", "cuda-graph sdpa"])
@pytest.mark.parametrize("held", [0, 5, 40])  # 40: beyond the sliding windows
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_each_row_of_a_tree_sees_its_own_path(family: str, held: int, how: str) -> None:
    if family == "gpt2" and "cuda-graph" in how:
        family = "qwen3"  # learned positions, as in GPT-2, are not captured
    executor, attn = how.split()
    backbone = wrapped(family, torch.float64, executor, attn=attn)
    # float64, norms and softmax of some families in float32; measured: 4e-6
    check_rows_see_their_own_paths(backbone, held, PARENTS, atol=5e-5)


@pytest.mark.parametrize("executor", [*EXECUTORS, "cuda-graph"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_row_after_an_older_held_position_sees_nothing_newer(family: str, executor: str) -> None:
    backbone = wrapped(family, executor=executor)
    # across the end of a block; float32, logits up to 3; measured: 5e-5
    check_rows_see_their_own_paths(backbone, 70, (-9, 0, -2), atol=5e-4)


@pytest.mark.parametrize("broken", range(1, 12))
def test_an_error_while_a_tree_is_committed_keeps_the_texts_own_rows(broken: int) -> None:
    """A user's stopping criterion raises between two tokens of one round."""
    backbone = wrapped("llama", torch.float64)
    ids = random_ids(9)
    plain = ladder.decode(backbone, ids, NoDrafter(), new_tokens=30)
    text = [*ids[0].tolist(), *plain.tokens]
    calls = count(1)

    def criteria(_: Tensor) -> bool:
        if next(calls) == broken:
            raise ValueError("planted")
        return False

    state = DecodeState(backbone, ids)
    drafter: Drafter = BranchingDrafter(text, 2, backbone.vocab_size, 7)
    stop = StopRule(max_length=len(text), criteria=criteria)
    with pytest.raises(ValueError, match="planted"):
        list(rounds(state, drafter, stop))
    assert {state.kv.length(layer) for layer in range(6)} == {state.length - 1}
    list(rounds(state, drafter, StopRule(max_length=len(text))))
    assert state.ids[0].tolist() == text


def test_a_model_that_runs_only_chains_refuses_a_tree() -> None:
    """Llama 4 scales queries by the number of rows before them, which counts siblings wrongly."""
    backbone, ids = wrapped("llama4"), random_ids(5)
    drafter = BranchingDrafter([*ids[0].tolist(), *range(20)], 1, backbone.vocab_size, 7)
    with pytest.raises(UnsupportedModel, match="comes out differently beside siblings"):
        ladder.decode(backbone, ids, drafter)


def test_nothing_is_queued_after_a_tree() -> None:
    backbone = wrapped("llama", torch.float64)
    state = DecodeState(backbone, random_ids(3))
    with torch.inference_mode():
        rows = backbone.embed(random_ids(2)[0])
        state.hidden.push(rows, [-1, -1])
        with pytest.raises(InvalidDraft, match="behind a tree"):
            state.hidden.push(rows)


# --- the tree drafter


BEST = ((10, 0.5), (11, 0.25), (12, 0.1))
"""Guesses of `Fan` after any token."""


class Fan:
    """A guesser with the same guesses everywhere; records its calls."""

    source = EXIT
    asks_once = False

    def __init__(self, best: Sequence[tuple[int, float]] = BEST) -> None:
        self.best = best
        self.asked: list[list[int]] = []

    def begin(self, state: DecodeState) -> None:
        self.asked.append([])

    def ask(self, draft: Draft, nodes: Sequence[int], watch: Stopwatch) -> Steps[list[Likeliest]]:
        self.asked[-1].append(len(nodes))
        return no_work([Likeliest(*map(list, zip(*self.best, strict=True))) for _ in nodes])


def grown(
    rows: Sequence[float] = (0.0,),
    *,
    head: float = 0.0,
    depth: int = 9,
    most: int = 15,
    limit: int = 99,
    text: Sequence[int] = (1,),
    fan: Fan | None = None,
    ends: Sequence[int] = (),
    trunk: bool = False,
) -> Draft:
    cost = DraftCost(rows=tuple(rows), head=head)
    lookup = NgramDrafter(DraftController(7), size=3, cost=cost) if trunk else None
    drafter = TreeDrafter(
        fan or Fan(), cost, DraftController(depth), ends, most=most, seen=lookup, never_slower=False
    )
    return ask(drafter, Text(list(text)), limit)


def paths_of(draft: Draft) -> set[tuple[int, ...]]:
    return {tuple(draft.tokens_to(index)) for index in range(len(draft.tokens))}


def test_the_cost_of_a_row_sets_the_width_of_a_tree() -> None:
    """The value of a row is the chance of its path over the expected tokens per step."""
    assert grown([0.9]).tokens == []
    assert paths_of(grown([0.3])) == {(10,)}
    assert paths_of(grown([0.15])) == {(10,), (11,), (10, 10)}
    wide = grown([0.001], depth=2)
    assert paths_of(wide) == {(a,) for a in (10, 11, 12)} | {*product((10, 11, 12), (10, 11, 12))}
    sizes = [len(grown([price]).tokens) for price in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (15, 0)
    assert len(grown([0.0, 0.0, 0.0, 9.0]).tokens) == 3  # later rows may cost more


def test_a_head_runs_as_long_as_it_is_expected_to_pay() -> None:
    for head, levels in ((0.0, 3), (0.15, 2), (9.0, 1)):
        fan = Fan()
        draft = grown([0.05], head=head, fan=fan, depth=4, most=99)
        assert len(fan.asked[0]) == draft.heads == levels
    assert fan.asked == [[1]]  # the first guess is made at any cost


def test_depth_rows_the_limit_and_end_tokens_bound_a_tree() -> None:
    assert (grown(depth=1).depth, grown(depth=1).ended) == (1, "width")
    assert (grown(limit=2).depth, grown(limit=2).ended) == (2, "budget")
    full = grown(most=4)
    assert (len(full.tokens), full.ended) == (4, "width")
    assert grown(limit=0).tokens == []
    closed = grown([0.01], ends=[10, 11, 12])
    assert (closed.depth, closed.ended, closed.heads) == (1, "eos", 1)
    assert all(10 not in path[:-1] for path in paths_of(grown([0.01], ends=[10])))


def test_the_likeliest_path_comes_first_so_that_keeping_it_moves_no_rows() -> None:
    draft = grown([0.02], depth=3)
    assert draft.tokens[:3] == [10, 10, 10]
    assert draft.parents[:3] == [-1, 0, 1]
    assert all(parent < index for index, parent in enumerate(draft.parents))
    for index, token in enumerate(draft.proposed):
        expected = math.prod(dict(BEST)[draft.tokens[at]] for at in draft.path(index))
        assert token.chance == pytest.approx(expected)


def test_prompt_lookup_gives_the_trunk_and_heads_branch_beside_and_after_it() -> None:
    text = [1, 2, 3, 4, 1, 2, 3]  # 4, 1, 2, 3 .. followed before
    alone = grown([0.01], text=text, trunk=True, fan=Fan([(4, 0.5), (9, 0.3)]), depth=0)
    assert {token.source for token in alone.proposed} == {"ngram"}
    draft = grown([0.01], text=text, trunk=True, fan=Fan([(4, 0.5), (9, 0.3)]), depth=2)
    trunk = [at for at, token in enumerate(draft.proposed) if token.source == "ngram"]
    assert [draft.tokens[index] for index in trunk] == alone.tokens
    branches = [at for at, token in enumerate(draft.proposed) if token.source == "exit"]
    assert [draft.tokens[index] for index in draft.children(0)] == [4, 9]  # no duplicates
    first = next(index for index in branches if len(draft.path(index)) == 1)
    rest = 1.0 - draft.proposed[trunk[0]].chance
    # 4 is taken: its chance is removed
    assert draft.proposed[first].chance == pytest.approx(rest * 0.3 / 0.5)


def test_a_sure_trunk_is_left_alone() -> None:
    fan, cost = Fan(), DraftCost(rows=(0.1,), head=0.1)
    lookup = NgramDrafter(DraftController(7), size=3, cost=cost)
    lookup._rates = [0.99] * 4
    drafter = TreeDrafter(fan, cost, DraftController(3), most=15, seen=lookup)
    draft = ask(drafter, Text([1, 2, 3, 1, 2]), 9)
    assert (fan.asked, draft.is_chain) == ([[]], True)
    assert {token.source for token in draft.proposed} == {"ngram"}


def test_heads_that_are_always_wrong_are_paused_and_prompt_lookup_continues() -> None:
    fan, cost = Fan([(99, 0.9)]), DraftCost(rows=(0.1,), head=0.1)
    lookup = NgramDrafter(DraftController(2), size=2, cost=cost)
    drafter = TreeDrafter(fan, cost, DraftController(1), most=15, seen=lookup)
    text, calls = Text([]), []
    for step in range(300):
        text.tokens.append(step + 100)  # no repetition
        draft = ask(drafter, text, 9)
        calls.append(draft.heads)
        drafter.learn(draft, [])
    assert calls[:5] == [1] * 5
    assert sum(calls[-130:]) <= 2
    text.tokens += [100, 101]
    copied = ask(drafter, text, 9)
    assert (copied.tokens[0], copied.heads) == (102, 0)
    assert {token.source for token in copied.proposed} == {"ngram"}
