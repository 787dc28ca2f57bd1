"""Planted bugs: each must make a rung of the ladder fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.decoding import acceptance, decode
from selfspec.decoding.acceptance import Draft, GreedyMatch, Prefix, Proposed, Target, Verdict
from selfspec.decoding.drafters.heads import ExitDrafter
from selfspec.decoding.sampling import DraftToken, Sampler
from selfspec.decoding.state import DecodeState, HiddenCache, Steps
from selfspec.errors import SelfspecError
from selfspec.model.generic import GenericExecutor
from selfspec.model.kv import KVCache, Rows
from tests import ladder
from tests.models import make_model, random_ids, wrapped

Mutant = Callable[[pytest.MonkeyPatch], None]


def truncate_one_too_few(patch: pytest.MonkeyPatch) -> None:
    """A rejected draft's keys stay in the cache."""
    original = KVCache.truncate

    def wrong(self: KVCache, length: int, *layers: int) -> None:
        original(self, length if layers else length + 1, *layers)

    patch.setattr(KVCache, "truncate", wrong)


def mask_sized_by_the_first_layer(patch: pytest.MonkeyPatch) -> None:
    """Deep passes get the mask of layer 1, which holds more positions."""
    original = GenericExecutor.masks

    def wrong(self: Any, hidden: Tensor, first: int, *args: Any) -> dict[str, Any]:
        del first
        return original(self, hidden, 0, *args)

    patch.setattr(GenericExecutor, "masks", wrong)


def positions_start_one_late(patch: pytest.MonkeyPatch) -> None:
    """Rows of deep passes are rotated to the next position."""
    original = GenericExecutor.run

    def wrong(self: Any, hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        late = replace(rows.span, start=rows.span.start + 1) if first else rows.span
        return original(self, hidden, first, last, Rows(rows.device, (late,)))

    patch.setattr(GenericExecutor, "run", wrong)


def bonus_row_dropped(patch: pytest.MonkeyPatch) -> None:
    """The last draft never runs; its successor is read from the row before."""

    def wrong(state: DecodeState, draft: Draft) -> Steps[Target]:
        shortened = Draft(proposed=draft.proposed[:-1])
        target = yield from original(state, shortened)
        if not draft.tokens:
            return target
        return Target(torch.cat([target.logits, target.logits[-1:]]))

    original = decode.verify
    patch.setattr(decode, "verify", wrong)


def rows_judged_one_late(patch: pytest.MonkeyPatch) -> None:
    """Each draft is compared with the logits of its own row, not of the row before."""

    def wrong(state: DecodeState, draft: Draft) -> Steps[Target]:
        target = yield from original(state, draft)
        return Target(target.logits.roll(-1, dims=0))

    original = decode.verify
    patch.setattr(decode, "verify", wrong)


def every_draft_stays(patch: pytest.MonkeyPatch) -> None:
    """Drafts are committed without verification."""
    original = GreedyMatch.verdict

    def wrong(
        self: GreedyMatch, text: Prefix, target: Target, row: int, proposed: Proposed
    ) -> Verdict:
        if proposed:
            return Verdict(proposed[0].token, 0)
        return original(self, text, target, row, proposed)

    patch.setattr(GreedyMatch, "verdict", wrong)


def queues_keep_rejected_rows(patch: pytest.MonkeyPatch) -> None:
    """The hidden cache is not emptied after a round."""
    patch.setattr(HiddenCache, "clear", lambda self: setattr(self, "passes", []))


def shallow_rows_swapped(patch: pytest.MonkeyPatch) -> None:
    """Rows that meet at a boundary are queued in the wrong order."""
    original = HiddenCache.rows

    def wrong(self: HiddenCache, boundary: int) -> Tensor:
        hidden = original(self, boundary)
        return hidden.flip(0) if boundary and len(hidden) == 2 else hidden

    patch.setattr(HiddenCache, "rows", wrong)


GREEDY_MUTANTS = [
    *(truncate_one_too_few, mask_sized_by_the_first_layer, positions_start_one_late),
    *(bonus_row_dropped, rows_judged_one_late, every_draft_stays),
    *(queues_keep_rejected_rows, shallow_rows_swapped),
]


def residual_is_the_target(patch: pytest.MonkeyPatch) -> None:
    """After a rejection the token is drawn from p instead of norm(max(0, p - q))."""
    patch.setattr(acceptance, "residual", lambda target_probs, _: target_probs)


def exit_looks_at_the_drawn_token(patch: pytest.MonkeyPatch) -> None:
    """A draft is withdrawn if the drawn token was unlikely, so kept drafts are biased."""
    original = ExitDrafter._first_exit

    def wrong(self: ExitDrafter, *args: Any) -> Steps[Any]:
        early_exit = yield from original(self, *args)
        if early_exit is None or (law := early_exit.choice.probs) is None:
            return None
        return early_exit if law[early_exit.choice.token] > law.max() - 1e-6 else None

    patch.setattr(ExitDrafter, "_first_exit", wrong)


def distribution_of_another_temperature(patch: pytest.MonkeyPatch) -> None:
    """Acceptance divides by another distribution than the draft was drawn from."""
    original = Sampler.choose

    def wrong(self: Sampler, ids: Tensor, logits: Tensor, **options: Any) -> DraftToken:
        choice = original(self, ids, logits, **options)
        return choice._replace(probs=(logits[0] / 2).softmax(-1))

    patch.setattr(Sampler, "choose", wrong)


SAMPLING_MUTANTS = [
    *(residual_is_the_target, exit_looks_at_the_drawn_token, distribution_of_another_temperature)
]


@pytest.mark.parametrize("mutant", GREEDY_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_ladder_catches_greedy(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = wrapped("llama")
    mutant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, SelfspecError)):
        ladder.check_draft_invariance(backbone, random_ids(13), kinds=ladder.BRIEF)


@pytest.mark.parametrize("mutant", SAMPLING_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_ladder_catches_sampling(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", vocab_size=4, num_hidden_layers=2)
    options: dict[str, Any] = {"costs": "row=0,head=0", "acceptance": ladder.RATIO}
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="not the distribution"):
        ladder.check_sampling(model, random_ids(3, vocab_size=4), **options)
