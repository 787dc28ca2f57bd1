"""From the rounds of an answer to what a client reads: text without its stop, counts, an end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.api.text import TextDecoder, UntilStop, is_end
from selfspec.decoding.engine import Running
from selfspec.decoding.stats import GenerationStats, Round
from selfspec.serve import likely
from selfspec.serve.explain import Explanation, Told
from selfspec.serve.likely import Entry
from selfspec.serve.tools import Calls


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What came of a choice since the last piece."""

    choice: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Entry, ...] = ()
    """Of the tokens, where they are noted."""
    calls: tuple[dict[str, Any], ...] = ()
    """Of functions, with the last piece."""
    told: Told | None = None
    """Who gave the tokens, where that was asked for."""
    finish: str | None = None
    """`stop`, `length` or `tool_calls`, with the last piece."""
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
        *,
        calls: Calls | None = None,
        explanation: Explanation | None = None,
    ) -> None:
        """`stops`: texts that end it, and are not part of it; `calls`: reads these out of it."""
        self.running = running
        self.choice = choice
        self._tokenizer, self._calls = tokenizer, calls
        self._decoder = TextDecoder(tokenizer)
        self._stops = UntilStop(stops)
        self._explanation = explanation
        self._told = 0
        """Tokens that are in earlier pieces."""

    def piece(self) -> Piece:
        """What is new; the last one when the text has ended."""
        text, tokens = "", list[int]()
        try:
            for entry in self.running.take():
                text += self._read(entry)
                tokens += entry.tokens
        except Exception as error:  # noqa: BLE001  # the client's to hear
            return Piece(choice=self.choice, error=error)
        if self.running.error is not None:
            return Piece(choice=self.choice, error=self.running.error)
        stats, ended = self.running.stats, self.running.ended
        if ended:
            text += self._rest()
            stats.seconds = self.running.watch.seconds
        content, calls = self._without_calls(text, ended=ended)
        return Piece(
            choice=self.choice,
            text=content,
            tokens=tuple(tokens),
            logprobs=tuple(self._likely(len(tokens))),
            told=None if self._explanation is None else self._explanation.shown(text, last=ended),
            calls=tuple(calls),
            finish=self._finish(stats, calls) if ended else None,
            stats=stats if ended else None,
        )

    def _read(self, entry: Round) -> str:
        """The text of a round, as far as it is sure to be shown."""
        self.running.stats.add(entry)
        # one by one: rounds are cut by drafts
        texts = [
            self._decoder.push([] if is_end(self._tokenizer, entry, token) else [token])
            for token in entry.tokens
        ]
        if self._explanation is not None:
            self._explanation.add(entry, texts)
        return "".join(map(self._stops.push, texts))

    def _likely(self, count: int) -> list[Entry]:
        """Of the next tokens that are told, as far as they are noted."""
        begin, self._told = self._told, self._told + count
        noted = self.running.logprobs[begin : self._told]
        return [likely.entry(one, self._tokenizer) for one in noted]

    def _rest(self) -> str:
        """What was held back, at the end."""
        rest = self._decoder.push([], last=True)
        if self._explanation is not None:
            self._explanation.rest(rest)
        return self._stops.push(rest, last=True)

    def _without_calls(self, text: str, *, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """What of new text is content, and the calls of an answer that has ended."""
        if self._calls is None:
            return text, []
        text = self._calls.push(text)
        rest, calls = self._calls.end() if ended else ("", [])
        return text + rest, calls

    def _finish(self, stats: GenerationStats, calls: Sequence[dict[str, Any]]) -> str:
        """A time limit is a length; so is the end of the model's positions."""
        if stats.stop_reason == "eos" or self._stops.found:
            return "tool_calls" if calls else "stop"
        return "length"


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
