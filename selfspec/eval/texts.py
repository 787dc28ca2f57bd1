"""What a method writes up to its own end token, and how good that is; nothing here is timed.

Timed answers are as long as plain decoding's, so their text is cut off or runs on behind an end
token: what is judged is written once more. Called by `bench`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from selfspec.api.speculator import Speculator
from selfspec.api.stream import Generation
from selfspec.eval.contenders import Contender
from selfspec.eval.methods import unchanged
from selfspec.eval.quality import Quality, Text, quality
from selfspec.eval.reference import log_likelihood


class Texts:
    """Answers to one prompt."""

    def __init__(
        self,
        speculator: Speculator,
        ids: Tensor,
        max_new_tokens: int,
        plain: Generation,
        reference: str | None,
    ) -> None:
        """`plain` is plain decoding's answer behind `ids` [1, P], under the same limit."""
        self._speculator = speculator
        self._ids = ids
        self._max_new_tokens = max_new_tokens
        self._plain = Text(plain.token_ids, plain.text)
        self._reference = reference
        # plain decoding's answer is asked about once for each method
        self._nats = cache(lambda tokens: log_likelihood(speculator.model, ids, tokens))

    def quality_of(self, contender: Contender) -> Quality:
        """Write an answer and look at it."""
        with unchanged(self._speculator):
            written = contender.decode(self._speculator, self._ids, self._max_new_tokens, _Nobody())
        text = Text(written.token_ids, self._words(written.token_ids))
        return quality(text, self._plain, self._reference, lambda ids: self._nats(tuple(ids)))

    def _words(self, token_ids: Sequence[int]) -> str:
        """As Generation.text has them."""
        tokenizer = self._speculator.tokenizer
        if tokenizer is None:
            return ""
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


class _Nobody(BaseStreamer):
    """Does not listen."""

    def put(self, value: Tensor) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""
