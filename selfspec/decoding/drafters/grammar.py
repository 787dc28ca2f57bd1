"""Drafts of what a grammar forces: keys, quotes, brackets, the end. They are always accepted.

llguidance allows one way only to cut a forced text into tokens, the tokenizer's own, so these are
the tokens that verification would give. Where nothing is forced, text already seen is proposed as
far as the grammar allows it.
"""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.decoding.drafters.base import Committed, Draft, Trunks
from selfspec.decoding.grammar import GrammarMask
from selfspec.decoding.sources import GRAMMAR


class GrammarDrafter:
    """Trunks of one text under a grammar."""

    def __init__(self, mask: GrammarMask, pad: int, most: int, seen: Trunks | None = None) -> None:
        """`pad`: padding ids in front of the text; `most`: draft tokens of a round."""
        self._mask, self._start, self._most = mask, mask.start - pad, most
        self._seen = seen
        self._forced = False

    def propose(self, state: Committed, limit: int, rival: float = 0.0) -> Draft:
        """What is forced, whatever `rival` promises; else text already seen."""
        text = state.committed(self._start)
        forced = self._mask.forced(text, max(min(limit, self._most), 0))
        self._forced = bool(forced)
        if forced:
            return Draft(
                tokens=forced,
                chances=[1.0] * len(forced),
                sources=[GRAMMAR] * len(forced),
                ended="width",
            )
        if self._seen is None:
            return Draft()
        draft = self._seen.propose(state, limit, rival)
        return _cut(draft, self._mask.allows(text, draft.tokens))

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """Of text already seen; what is forced teaches nothing."""
        if self._seen is not None and not self._forced:
            self._seen.learn(draft, kept)


def _cut(draft: Draft, count: int) -> Draft:
    """The first `count` tokens of a chain without laws."""
    if count == len(draft.tokens):
        return draft
    return Draft(
        tokens=draft.tokens[:count],
        chances=draft.chances[:count],
        exit_layers=draft.exit_layers[:count],
        sources=draft.sources[:count],
        ended="unsure",
    )
