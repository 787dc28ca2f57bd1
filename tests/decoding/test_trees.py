"""Trees of drafts: each row sees its own path only, and the text stays plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count, product

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from selfspec.decoding.acceptance import GreedyMatch, SpeculativeSampling, Target
from selfspec.decoding.decode import StopRule, rounds
from selfspec.decoding.drafters.base import Draft, Drafter, NoDrafter
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import DecodeState
from selfspec.decoding.stats import Stopwatch
from selfspec.errors import InvalidDraft, UnsupportedModel
from selfspec.eval.scripted import BranchingDrafter
from selfspec.model.backbone import Backbone
from selfspec.model.kv import Lease, Rows, ancestors, depths, held_behind
from tests import ladder, laws
from tests.models import MAX_POSITIONS, make_model, needs_compiler, random_ids


@cache
def cut(family: str = "llama", dtype: torch.dtype = torch.float64, attn: str = "sdpa") -> Backbone:
    return Backbone(make_model(family, dtype, attn), executor="generic")


FAMILIES = ["llama", "mistral", "gemma2", "gpt2"]
PARENTS = (-1, -1, 0, 0, 1, 3, 3, 2)
"""Two first tokens; the first has two children, one of which has two."""


def paths(parents: Sequence[int]) -> list[list[int]]:
    """The rows down to each row, itself included."""
    found: list[list[int]] = []
    for row, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), row])
    return found


def logits_of(backbone: Backbone, ids: Tensor) -> Tensor:
    rows = Rows.of(Lease(backbone.num_layers), 0, len(ids), ids.device)
    return backbone.logits(backbone.run(backbone.embed(ids), 0, backbone.num_layers, rows))


def test_a_tree_s_depths_and_ancestors() -> None:
    assert depths(PARENTS) == [0, 0, 1, 1, 1, 2, 2, 2]
    seen = ancestors(PARENTS, torch.device("cpu"))
    assert [row.nonzero().flatten().tolist() for row in seen] == paths(PARENTS)


@torch.inference_mode()
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("held", [0, 5, 40])  # 40: beyond the sliding windows
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_of_a_tree_sees_its_own_path(family: str, held: int, attn: str) -> None:
    backbone = cut(family, attn=attn)
    text, drafts = random_ids(max(held, 1))[0][:held], random_ids(len(PARENTS), seed=1)[0]
    lease = Lease(backbone.num_layers)
    if held:
        before = Rows.of(lease, 0, held, text.device)
        backbone.run(backbone.embed(text), 0, backbone.num_layers, before)
    rows = Rows.of(lease, held, len(PARENTS), text.device, PARENTS)
    found = backbone.logits(backbone.run(backbone.embed(drafts), 0, backbone.num_layers, rows))
    for row, path in enumerate(paths(PARENTS)):
        alone = logits_of(backbone, torch.cat([text, drafts[path]]))[-1]
        # float64, norms and softmax of some families in float32; measured: 4e-6
        torch.testing.assert_close(found[row], alone, rtol=0, atol=5e-5)


@torch.inference_mode()
def test_a_lease_keeps_one_path_in_every_layer() -> None:
    backbone = cut()
    text, drafts = random_ids(6)[0], random_ids(len(PARENTS), seed=1)[0]
    lease, plain = Lease(6), Lease(6)
    path = [0, 3, 6]
    for kept, rows in ((lease, drafts), (plain, drafts[path])):
        first = Rows.of(kept, 0, 6, text.device)
        backbone.run(backbone.embed(text), 0, 6, first)
        parents = PARENTS if kept is lease else None
        behind = Rows.of(kept, 6, len(rows), text.device, parents)
        backbone.run(backbone.embed(rows), 0, 6, behind)
    lease.keep(6, path)
    assert {lease.length(layer) for layer in range(6)} == {9}
    pairs = zip(lease._keys + lease._values, plain._keys + plain._values, strict=True)
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours[..., :9, :], theirs[..., :9, :], rtol=0, atol=1e-12)


@pytest.mark.parametrize("exits", [(), ladder.EXITS], ids=["", "exits"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FAMILIES)
def test_an_oracle_tree_gives_plain_decoding_s_text(
    family: str, seed: int, exits: tuple[int, ...]
) -> None:
    backbone = cut(family)
    ids = random_ids(11, seed)
    plain = ladder.decode(backbone, ids, NoDrafter(), new_tokens=40)
    text = [*ids[0].tolist(), *plain.tokens]
    drafter = BranchingDrafter(text, seed, backbone.vocab_size, 7)
    found = ladder.decode(backbone, ids, drafter, new_tokens=40, exit_layers=exits)
    assert found.tokens == plain.tokens
    torch.testing.assert_close(found.logits, plain.logits, rtol=0, atol=5e-5)
    accepted = {entry.accepted for entry in found.entries}
    assert {0, 1, 2} <= accepted
    assert max(len(entry.draft_tokens) for entry in found.entries) == 7


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_tree_moves_no_bit_in_compiled_code(family: str, dtype: torch.dtype) -> None:
    backbone = Backbone(make_model(family, dtype), executor="fused")
    ids = random_ids(55)  # across a block of 64 positions
    plain = ladder.decode(backbone, ids, NoDrafter(), new_tokens=40)
    for seed, exits in product(range(3), ((), ladder.EXITS)):
        drafter = BranchingDrafter([*ids[0].tolist(), *plain.tokens], seed, backbone.vocab_size, 7)
        found = ladder.decode(backbone, ids, drafter, new_tokens=40, exit_layers=exits)
        assert found.tokens == plain.tokens
        assert torch.equal(found.logits, plain.logits)
        assert max(entry.accepted for entry in found.entries) > 1


def test_a_tree_at_the_models_last_positions() -> None:
    backbone = cut()
    ids = random_ids(MAX_POSITIONS - 20)
    plain = ladder.decode(backbone, ids, NoDrafter(), new_tokens=20)
    drafter = BranchingDrafter([*ids[0].tolist(), *plain.tokens], 0, backbone.vocab_size)
    assert ladder.decode(backbone, ids, drafter, new_tokens=20).tokens == plain.tokens


@pytest.mark.parametrize("broken", range(1, 12))
def test_an_error_while_a_tree_is_committed_keeps_the_text_s_own_rows(broken: int) -> None:
    """A user's stopping criterion raises between two tokens of one round."""
    backbone = cut()
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
    rule = GreedyMatch(ladder.greedy())
    stop = StopRule(max_length=len(text), criteria=criteria)
    with pytest.raises(ValueError, match="planted"):
        list(rounds(state, drafter, rule, stop, Stopwatch()))
    assert {state.lease.length(layer) for layer in range(6)} == {state.length - 1}
    for _ in rounds(state, drafter, rule, StopRule(max_length=len(text)), Stopwatch()):
        pass
    assert state.ids[0].tolist() == text


def test_an_executor_of_chains_refuses_a_tree() -> None:
    backbone = Backbone(make_model("llama"), executor="cuda-graph")
    ids = random_ids(5)
    drafter = BranchingDrafter([*ids[0].tolist(), *range(20)], 1, backbone.vocab_size, 7)
    with pytest.raises(InvalidDraft, match="the cuda-graph executor runs chains of drafts"):
        ladder.decode(backbone, ids, drafter)


def test_layers_that_count_positions_by_themselves_run_no_trees() -> None:
    """Llama 4 scales queries by how many rows lie in front, which siblings are not."""
    backbone = Backbone(make_model("llama4"), executor="generic")
    ids = random_ids(5)
    drafter = BranchingDrafter([*ids[0].tolist(), *range(20)], 1, backbone.vocab_size, 7)
    with pytest.raises(UnsupportedModel, match="comes out otherwise beside siblings"):
        ladder.decode(backbone, ids, drafter)


def test_rows_of_a_tree_may_follow_held_positions_that_are_not_the_newest() -> None:
    assert depths((-3, -1, 0, 1)) == [-2, 0, -1, 1]
    assert held_behind((-3, -1, 0, 1)) == [2, 0, 2, 0]


@torch.inference_mode()
@pytest.mark.parametrize("executor", ["generic", "fused"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_row_behind_an_older_held_position_sees_nothing_newer(family: str, executor: str) -> None:
    backbone = Backbone(make_model(family, torch.float32), executor=executor)
    layers = backbone.num_layers
    text, drafts = random_ids(70)[0], random_ids(3, seed=1)[0]  # over a block's end
    lease = Lease(layers)
    backbone.run(backbone.embed(text), 0, layers, Rows.of(lease, 0, 70, text.device))
    parents = (-9, 0, -2)
    rows = Rows.of(lease, 70, 3, text.device, parents)
    found = backbone.logits(backbone.run(backbone.embed(drafts), 0, layers, rows))
    ways = (text[:62], drafts[:1]), (text[:62], drafts[:2]), (text[:69], drafts[2:])
    for row, way in enumerate(ways):
        alone = logits_of(backbone, torch.cat(way))[-1]
        # float32, logits up to 3; measured: 5e-5
        torch.testing.assert_close(found[row], alone, rtol=0, atol=5e-4)


def test_nothing_is_queued_behind_a_tree() -> None:
    backbone = cut()
    state = DecodeState(backbone, random_ids(3))
    with torch.inference_mode():
        rows = backbone.embed(random_ids(2)[0])
        state.hidden.push(rows, [-1, -1])
        with pytest.raises(InvalidDraft, match="behind a tree"):
            state.hidden.push(rows)


def drawn(law: Sequence[float], number: int) -> Callable[[Sampler], Draft]:
    """So many first tokens, each drawn from `law` by itself."""
    probs = torch.tensor(law)

    def make(sampler: Sampler) -> Draft:
        tokens = [sampler.draw(probs) for _ in range(number)]
        return Draft(tokens=tokens, parents=[-1] * number, probs=[probs] * number)

    return make


def copied(_: Sampler) -> Draft:
    """Two tokens that were certain."""
    return Draft(tokens=[1, 0], parents=[-1, -1])


@pytest.mark.parametrize("make", [drawn([0.5, 0.25, 0.25], 2), drawn([0.0, 0.5, 0.5], 3), copied])
def test_siblings_keep_the_distribution_of_sampling(make: Callable[[Sampler], Draft]) -> None:
    sampler = laws.ExactSampler(LogitsProcessorList(), do_sample=True)
    law = torch.tensor([0.5, 0.2, 0.3])
    rule, target = SpeculativeSampling(sampler), Target(law.log()[None])
    ids = torch.zeros(1, 1, dtype=torch.int64)

    def play() -> tuple[int, ...]:
        draft = make(sampler)
        proposed = [draft.proposed(index) for index in draft.following(0)]
        return (rule.verdict(ids, target, 0, proposed).token,)

    found = laws.enumerate_law(sampler, play)
    laws.assert_same(found, {(token,): float(chance) for token, chance in enumerate(law)})
