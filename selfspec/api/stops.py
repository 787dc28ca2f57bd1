"""Where a text ends: at an end token or the first of some stops, which are not part of it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from selfspec.decoding.stats import Round


class UntilStop:
    """Text up to the first of some stops; what may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Texts that are not empty."""
        self._stops = tuple(stops)
        self._held = ""
        self.found = False
        """Whether one came; nothing is given from there on."""

    def push(self, text: str, *, last: bool = False) -> str:
        """What of the text so far is sure; `last` gives up what was held back."""
        if self.found:
            return ""
        text = self._held + text
        ends = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)]
        held = 0 if last else max((begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def begun(text: str, stop: str) -> int:
    """How many of the last characters are the first of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def is_end(tokenizer: PreTrainedTokenizerBase | None, entry: Round, token: int) -> bool:
    """Whether a token of a round ends the text and is no word.

    Some tokenizers do not call theirs special, and would write it out.
    """
    ends = entry.stop_reason == "eos" and token == entry.tokens[-1]
    return ends and tokenizer is not None and token in tokenizer.added_tokens_decoder
