"""Drafts from a second, smaller model with the same vocabulary: speculative decoding as it began.

Source: speculative_decoding_and_lenience.txt; Leviathan et al. 2023. The draft model runs on this
package's own backbone, with keys and values of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.decoding.acceptance import Draft
from selfspec.decoding.drafters.base import ChoosingDrafter, Drafting, DraftWriter
from selfspec.decoding.state import DecodeState, Embed, HiddenCache, Steps
from selfspec.decoding.stats import DRAFT_MODEL, Stopwatch, common
from selfspec.errors import DraftModelMismatch
from selfspec.model.backbone import Backbone
from selfspec.model.kv import Lease


class DraftCache:
    """A draft model with the keys and values of one sequence; a session keeps it between turns."""

    def __init__(self, backbone: Backbone, vocab_size: int | None = None) -> None:
        """Empty at first. `vocab_size`: rows of the target's unembedding; None: as many as ours.

        Where the two differ, the longer one ends in padding, which no draft may name.
        """
        self.backbone = backbone
        self._vocab_size = backbone.vocab_size if vocab_size is None else vocab_size
        self._lease = Lease(backbone.num_layers)
        self._hidden = HiddenCache(backbone, self._lease)
        self._ran: list[int] = []

    def rewind(self, ids: list[int]) -> list[int]:
        """Keep what is shared with `ids`; those that have to run, at least one."""
        shared = common(self._ran, ids[:-1])
        self._lease.truncate(shared)
        del self._ran[shared:]
        return ids[shared:]

    def run(self, ids: list[int]) -> Steps[Tensor]:
        """Append `ids`; logits [1, V] of the token behind them, V as the target has it."""
        self._hidden.clear()
        # an id of the target's padding has no embedding here: any other one costs a draft at most
        known = [min(token, self.backbone.vocab_size - 1) for token in ids]
        self._hidden.push((yield Embed(backbone=self.backbone, ids=known)))
        hidden = yield from self._hidden.advance_all()
        self._ran += ids
        target = yield from self._hidden.unembed(hidden[-1:])
        logits = target.row(0)
        missing = self._vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


class DraftModelDrafter(ChoosingDrafter):
    """Drafts by decoding with another model; refused tokens are cut from its cache next time.

    A round's last draft token never ran there: it runs next time, with the target's own token.
    """

    def __init__(self, cache: DraftCache, how: Drafting) -> None:
        super().__init__(how)
        self._cache = cache

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """Up to min(limit, W_max) tokens, and none beyond the positions the model was made for."""
        ids = state.ids
        room = self._cache.backbone.max_positions - (state.length - state.pad) + 1
        writer = DraftWriter(self, min(limit, room), source=DRAFT_MODEL)
        rows, signal = self._cache.rewind(state.committed(0)), self.controller.signal
        while writer.room:
            logits = yield from self._cache.run(rows)
            choice = self.sampler.choose(ids, logits, believe=self.beliefs)
            writer.add(choice, 1.0 if signal is None else float(signal(logits)))
            rows = [choice.token]
            ids = self.sampler.behind(ids, choice.token)
        return writer.draft


def check_same_tokens(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, label: str
) -> None:
    """Raise DraftModelMismatch unless `other`, of the draft model `label`, has the same tokens."""
    ours, theirs = ({i: t for t, i in found.get_vocab().items()} for found in (tokenizer, other))
    if ours == theirs:
        return
    first = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    raise DraftModelMismatch(
        f"the draft model {label} has another vocabulary: {len(theirs)} tokens instead of "
        f"{len(ours)}, the first that differs is {first}: {theirs.get(first)!r} instead of "
        f"{ours.get(first)!r}. Choose a smaller model of the same family"
    )


def check_same_size(
    backbone: Backbone, draft_model: Backbone, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Raise DraftModelMismatch unless both give logits over the same tokens.

    Unembeddings are often padded to a round number of rows: behind the last token of a `tokenizer`
    that both share, they may differ.
    """
    ours, theirs = backbone.vocab_size, draft_model.vocab_size
    tokens = max(tokenizer.get_vocab().values()) + 1 if tokenizer else max(ours, theirs)
    if ours != theirs and min(ours, theirs) < tokens:
        raise DraftModelMismatch(
            f"the draft model has {theirs} rows in its unembedding, the model {ours}. Choose a "
            "smaller model of the same family"
        )
