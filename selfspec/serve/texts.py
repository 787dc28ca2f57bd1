"""From the rounds of an answer to what a client reads: text without its stop, counts, an end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.api.text import TextDecoder
from selfspec.decoding.engine import Running
from selfspec.decoding.stats import GenerationStats
from selfspec.serve.explain import Explanation, Told


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What came of a choice since the last piece."""

    choice: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    told: Told | None = None
    """Who gave the tokens, where that was asked for."""
    finish: str | None = None
    """`stop` or `length`, with the last piece."""
    stats: GenerationStats | None = None
    """With the last piece."""
    error: BaseException | None = None
    """In place of an end."""


class Answer:
    """One choice while it is written."""

    def __init__(
        self,
        choice: int,
        running: Running,
        tokenizer: PreTrainedTokenizerBase | None,
        stops: Sequence[str],
        explanation: Explanation | None = None,
    ) -> None:
        """`stops`: texts that end it, and are not part of it."""
        self.running = running
        self._choice = choice
        self._decoder = TextDecoder(tokenizer)
        self._stops = UntilStop(stops)
        self._explanation = explanation

    def piece(self) -> Piece:
        """What is new; the last one when the text has ended."""
        text, tokens, stats = "", list[int](), self.running.stats
        try:
            for entry in self.running.take():
                stats.add(entry)
                tokens += entry.tokens
                # one by one: rounds are cut by drafts
                texts = [self._decoder.push([token]) for token in entry.tokens]
                text += "".join(map(self._stops.push, texts))
                if self._explanation is not None:
                    self._explanation.add(entry, texts)
        except Exception as error:  # noqa: BLE001  # the client's to hear
            return Piece(choice=self._choice, error=error)
        if self.running.error is not None:
            return Piece(choice=self._choice, error=self.running.error)
        if not self.running.ended:
            told = self._told(text)
            return Piece(choice=self._choice, text=text, tokens=tuple(tokens), told=told)
        rest = self._decoder.push([], last=True)
        text += self._stops.push(rest, last=True)
        stats.seconds = self.running.watch.seconds
        return Piece(
            choice=self._choice,
            text=text,
            tokens=tuple(tokens),
            told=self._told(text, rest),
            finish=self._finish(stats),
            stats=stats,
        )

    def _told(self, text: str, rest: str | None = None) -> Told | None:
        """`rest`, at the end: what the last token has besides."""
        if self._explanation is None:
            return None
        if rest is not None:
            self._explanation.rest(rest)
        return self._explanation.shown(text, last=rest is not None)

    def _finish(self, stats: GenerationStats) -> str:
        """A time limit is a length; so is the end of the model's positions."""
        return "stop" if stats.stop_reason == "eos" or self._stops.found else "length"


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
        held = 0 if last else max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _begun(text: str, stop: str) -> int:
    """How many of the last characters are the first of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def usage(prompt_tokens: int, all_stats: Sequence[GenerationStats]) -> dict[str, Any]:
    """Tokens, and what speculation did; words as vLLM has them, where it has one."""
    written = sum(stats.new_tokens for stats in all_stats)
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
        "speculation": speculation(all_stats),
    }
    if len(all_stats) == 1:  # several choices also share with each other
        found["prompt_tokens_details"] = {"cached_tokens": all_stats[0].reused_tokens}
    return found


def speculation(all_stats: Sequence[GenerationStats]) -> dict[str, Any]:
    """Rounds and drafts of all choices."""
    rounds = sum(stats.rounds for stats in all_stats)
    accepted = sum(stats.accepted for stats in all_stats)
    kept, by_index, drafted_by, accepted_by = (Counter[Any]() for _ in range(4))
    for stats in all_stats:
        kept.update(stats.accepted_lengths)
        by_index.update(stats.accepted_by_index)
        drafted_by.update(stats.drafted_by_source)
        accepted_by.update(stats.accepted_by_source)
    bonus = sum(stats.bonus for stats in all_stats)
    return {
        "rounds": rounds,
        "num_draft_tokens": sum(stats.drafted for stats in all_stats),
        "num_accepted_tokens": accepted,
        "num_accepted_tokens_per_pos": [
            by_index[index] for index in range(1, max(by_index, default=0) + 1)
        ],
        "mean_acceptance_length": (accepted + bonus) / rounds if rounds else 0.0,
        "accepted_lengths": {str(length): kept[length] for length in sorted(kept)},
        "sources": {
            source: {"drafted": drafted_by[source], "accepted": accepted_by[source]}
            for source in sorted(drafted_by)
        },
        "lossless": all(stats.lossless for stats in all_stats),
    }
