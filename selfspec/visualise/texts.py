"""Texts of single tokens, and how they look where a space or a line's end must be seen.

Called by `inspect`, which stores them, and by everything that draws.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from selfspec.api.text import TextDecoder

PART_OF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Text of a token that holds some bytes of a character."""

_VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


class TokenTexts:
    """A tokenizer's tokens as text, each decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Without a tokenizer a text is the id in angle brackets."""
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        # behind another token, because some tokenizers drop the space that opens a text
        self._before: list[int] = []
        if tokenizer is not None:
            self._before = list(tokenizer("a", add_special_tokens=False)["input_ids"])

    def of(self, token: int) -> str:
        """One token within a text, its space included."""
        if token not in self._known:
            self._known[token] = self._decoded(token)
        return self._known[token]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """What each token adds to their text; they join to the whole, special tokens included."""
        if self._tokenizer is None:
            return [self.of(token) for token in tokens]
        decoder = TextDecoder(self._tokenizer, special=True)
        last = len(tokens) - 1
        return [decoder.push([token], last=place == last) for place, token in enumerate(tokens)]

    def _decoded(self, token: int) -> str:
        if self._tokenizer is None:
            return f"<{token}>"
        before = str(self._tokenizer.decode(self._before))
        both = str(self._tokenizer.decode([*self._before, token]))
        return both[len(before) :] if both.startswith(before) else both


def visible(text: str, most: int | None = None) -> str:
    """Spaces, ends of lines and control characters made visible, shortened to `most` characters."""
    shown = "".join(_shown(character) for character in text) or "∅"
    return shown if most is None or len(shown) <= most else shown[: most - 1] + "…"


def _shown(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    if unicodedata.category(character)[0] in "CZ":  # control, format, surrogates, other spaces
        return f"\\u{ord(character):04x}"
    return character
