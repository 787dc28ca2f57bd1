"""A grammar that a text follows: which tokens may come next, and which ones must.

Comes in: a matcher of llguidance, made by `api.structure`. `scores` runs the mask as a processor,
on true prefixes; the grammar drafter asks what is forced, and how much of a draft is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from selfspec.decoding.prefix import common
from selfspec.errors import InvalidOption

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarMask(LogitsProcessor):
    """Rules out tokens that the grammar forbids behind a prefix; that alone decides.

    The matcher goes along with a text, and back where the next question has another prefix.
    """

    stateless = True

    def __init__(self, matcher: LLMatcher, start: int, ends: Collection[int]) -> None:
        """`matcher`: at its beginning; `start`: ids in front of the text, padding included.

        `ends`: end tokens, each of which closes a complete text.
        """
        self.start = start
        self._matcher = matcher
        self._ends = sorted(ends)
        self._text: list[int] = []

    def for_row(self, _row: int) -> GrammarMask:
        """The same grammar for another text."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return GrammarMask(matcher, self.start, self._ends)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[1, n], [1, V] -> [1, V]. Raises InvalidOption where no allowed token is left."""
        self._follow(input_ids[0, self.start :].tolist())
        allowed = self._allowed(scores.shape[1]).to(scores.device)
        masked = scores.masked_fill(~allowed, -math.inf)
        if bool(masked.isneginf().all()):
            raise InvalidOption(
                "another option rules out every token that the grammar allows. Leave out "
                "min_new_tokens, suppress_tokens, bad_words_ids or logits_processor"
            )
        return masked

    def forced(self, text: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens that must follow, the end token included."""
        self._follow(text)
        found: list[int] = self._matcher.compute_ff_tokens()[:limit]
        if len(found) < limit:
            count = self._matcher.try_consume_tokens(found)
            if count == len(found) and self._matcher.is_stopped():
                found.append(self._ends[0])
            self._matcher.rollback(count)
        return found

    def allows(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` may follow, one behind the other."""
        self._follow(text)
        return int(self._matcher.validate_tokens(list(tokens)))

    def _follow(self, text: Sequence[int]) -> None:
        """Bring the matcher to the end of `text`."""
        text = list(text)
        same = common(self._text, text)
        if same < len(self._text):
            self._matcher.rollback(len(self._text) - same)
        fresh = text[same:]
        count = self._matcher.try_consume_tokens(fresh) if fresh else 0
        self._text = text[: same + count]
        if count < len(fresh):
            raise InvalidOption(
                f"another option puts token {fresh[count]} where the grammar forbids it. Leave out "
                "forced_eos_token_id, forced_bos_token_id or logits_processor"
            )

    def _allowed(self, vocab_size: int) -> Tensor:
        """[V], bool."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            said = " ".join(self._matcher.get_error().split())
            raise InvalidOption(f"the grammar cannot be followed: {said}. Give a simpler one")
        bits = np.unpackbits(packed, bitorder="little", count=min(vocab_size, 8 * packed.size))
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        allowed[: bits.size] = torch.from_numpy(bits).bool()
        if any(allowed[end] for end in self._ends):
            allowed[self._ends] = True
        return allowed
