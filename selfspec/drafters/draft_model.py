"""Drafts from a second, smaller model with the same vocabulary: speculative decoding as it began.

Source: speculative_decoding_and_lenience.txt; Leviathan et al. 2023. The draft model runs on this
package's own backbone, with keys and values of its own.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.backbone import Backbone
from selfspec.controllers import DraftController
from selfspec.drafters.base import Draft, DraftWriter, PacedDrafter
from selfspec.errors import DraftModelMismatch
from selfspec.hidden_cache import HiddenCache
from selfspec.kv_cache import KVCache
from selfspec.scores import Sampler
from selfspec.state import DecodeState, shared_prefix
from selfspec.stats import Stopwatch


class DraftModelDrafter(PacedDrafter):
    """Drafts by decoding with another model; rejected tokens are cut from its cache next time.

    A round's last draft token never ran there: it runs next time, with the target's own token.
    """

    def __init__(
        self,
        backbone: Backbone,
        sampler: Sampler,
        controller: DraftController,
        end_tokens: Collection[int] = (),
        *,
        beliefs: bool = False,
    ) -> None:
        """`sampler` is the target's: its processors also shape the laws of the drafts."""
        super().__init__(controller, end_tokens, beliefs=beliefs)
        self._backbone = backbone
        self._sampler = sampler.for_drafts()
        self._kv = KVCache(backbone.num_layers)
        self._hidden = HiddenCache(backbone, self._kv)
        self._ran: Tensor | None = None  # [n], the ids behind the keys and values

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Draft:  # noqa: ARG002  # the protocol's
        """Up to min(limit, W_max) tokens, and none beyond the positions the model was made for."""
        ids = state.ids
        room = self._backbone.max_positions - (state.length - state.pad) + 1
        writer = DraftWriter(
            self, min(limit, room), source="draft-model", sampled=self._sampler.do_sample
        )
        if not writer.room:
            return writer.draft
        rows = self._rewound(ids[:, state.pad :])
        while writer.room:
            logits = self._next_logits(rows).to(ids.device)
            choice = self._sampler.choose(ids, logits, believe=self.beliefs)
            writer.add(choice, self._confidence(logits))
            rows = ids.new_tensor([[choice.token]])
            ids = torch.cat([ids, rows], dim=1)
        self._ran = ids[0, state.pad : state.pad + self._kv.length(0)]
        return writer.draft

    def _rewound(self, ids: Tensor) -> Tensor:
        """Cut the cache back to what it shares with `ids` [1, n]; the ids to run, at least one."""
        shared = 0 if self._ran is None else shared_prefix(self._ran, ids[0, :-1])
        self._kv.truncate(shared)
        return ids[:, shared:]

    def _next_logits(self, ids: Tensor) -> Tensor:
        """Run `ids` [1, n]; logits [1, V] of the token behind them."""
        self._hidden.clear()
        self._hidden.push(self._backbone.embed(ids.to(self._backbone.device)))
        last = self._hidden.advance_all()[:, -1:]
        return self._backbone.logits(self._hidden.padded(last))[0, :1]

    def _confidence(self, logits: Tensor) -> float:
        """What the controller wants to know; 1 where it wants nothing."""
        signal = self.controller.signal
        return 1.0 if signal is None else float(signal(logits))


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


def check_same_size(backbone: Backbone, draft_model: Backbone) -> None:
    """Raise DraftModelMismatch unless both give logits over as many tokens."""
    if draft_model.vocab_size != backbone.vocab_size:
        raise DraftModelMismatch(
            f"the draft model has {draft_model.vocab_size} rows in its unembedding, the model "
            f"{backbone.vocab_size}. Choose a smaller model of the same family"
        )
