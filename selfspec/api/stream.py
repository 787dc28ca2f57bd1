"""An answer while it is generated: rounds in, pieces of text and a finished record out."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from html import escape
from inspect import GEN_RUNNING, getgeneratorstate
from itertools import groupby
from threading import RLock
from typing import NamedTuple
from weakref import finalize, proxy

import torch

from selfspec.api.request import Request
from selfspec.api.text import TextDecoder, UntilStop, is_end
from selfspec.decoding.acceptance import Logprob
from selfspec.decoding.engine import Running
from selfspec.decoding.stats import MODEL, SOURCES, GenerationStats, Giver, Round, StopReason
from selfspec.errors import shown


class Piece(NamedTuple):
    """The text that a token adds to an answer, and who gave the token."""

    text: str  # empty in the middle of a character of several tokens
    giver: Giver


class Estimate(NamedTuple):
    """The estimated gain from drafts after the first token: from costs, not from timing."""

    speed_up: float  # steps of plain decoding / cost of the rounds in such steps
    measured: bool  # whether costs were given, as by `selfspec tune`


@dataclass(frozen=True, kw_only=True, repr=False)
class Generation:
    """One finished answer."""

    text: str
    """The answer, without the end of the turn."""
    token_ids: list[int]
    """New tokens, including an end token."""
    stats: GenerationStats
    stop_reason: StopReason | None
    """None if the stream was closed before its end."""
    logprobs: list[Logprob] | None = None
    """Log-probabilities of each token, if `logprobs` was given."""
    estimate: Estimate | None = None
    """None if nothing was drafted and no head asked, or if passes were shared with other texts."""
    pieces: list[Piece] = field(default_factory=list)
    """The text that each token added, and who gave the token."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Generation {shown(self.text)}: {self.stats.line()}>"

    def summary(self) -> str:
        """The main figures in one sentence; `stats.line()` has all of them."""
        figures = self.stats.summary()
        if self.estimate is None:
            return figures
        speed_up, measured = self.estimate
        grounds = "by costs measured here" if measured else "a guess; to measure: selfspec tune"
        return f"{figures}, about {speed_up:.1f} times as fast as without drafts ({grounds})"

    def _repr_html_(self) -> str:
        """HTML for notebooks: the text, each piece in the colour of who gave it."""
        return html(self.pieces, self.stats.num_layers, self.summary())


class Stream:
    """An answer while it is generated: iterate for pieces of text; `result` is the answer so far.

    Closing or dropping the stream ends the decoding; a session keeps the text so far.
    """

    def __init__(self, running: Running, request: Request, lock: RLock | None = None) -> None:
        """The request's streamer gets the prompt first. `lock`: the session's, held for a piece."""
        self.request = request
        self.rounds: list[Round] = []
        """The rounds so far, the prompt's pass first."""
        self.giver = Giver(MODEL)
        """Who gave the newest token, the last one of the newest piece."""
        self._running, self._stats = running, running.stats
        self._tokens: list[int] = []
        self._piece_list: list[Piece] = []
        self._decoder, self._stops = TextDecoder(request.tokenizer), UntilStop([request.end])
        self._decoder.push(request.tail, last=True)
        self._lock, self._closed = lock or RLock(), False
        # a dropped stream frees its keys and values at once, not when garbage is collected
        self._pieces = Stream._decode(proxy(self))
        finalize(self, running.close).atexit = False
        next(self._pieces)

    def __iter__(self) -> Iterator[str]:
        """Pieces of text that join to `result.text`."""
        return self

    def __next__(self) -> str:
        try:
            with self._lock:
                return next(self._pieces)
        finally:
            if self._closed:  # perhaps meanwhile, by a thread that did not get the lock
                self.close()

    def __repr__(self) -> str:
        return f"<Stream: {len(self._tokens)} tokens so far. Iterate for its text>"

    def show(self) -> None:
        """Write the answer as it comes: in a notebook with colours, elsewhere to standard output.

        Afterwards, the answer is in `result`.
        """
        notebook = sys.modules.get("IPython")
        shell = notebook.get_ipython() if notebook else None
        if not hasattr(shell, "kernel"):
            for piece in self:
                sys.stdout.write(piece)
                sys.stdout.flush()
            sys.stdout.write("\n")
            return
        handle = notebook.display.display(self.result, display_id=True)  # type: ignore[union-attr]  # there is a shell
        for _ in self:
            handle.update(self.result)

    def close(self) -> None:
        """Stop decoding; by a thread or a streamer in the midst of a round, after it at the latest.

        Never waits: the thread that decodes may itself be waiting for this one, in a streamer.
        """
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                if getgeneratorstate(self._pieces) != GEN_RUNNING:
                    self._pieces.close()
                    self._running.close()
            finally:
                self._lock.release()

    @property
    def result(self) -> Generation:
        """The answer so far."""
        # a reader may close the stream between the tokens of the last round
        handed_out = len(self._tokens) == sum(len(entry.tokens) for entry in self.rounds)
        # decoded at once, half a character may spoil text before it that has been shown
        pieces = [*self._piece_list]
        rest = copy(self._stops).push(copy(self._decoder).push([], last=True), last=True)
        if pieces:
            pieces[-1] = pieces[-1]._replace(text=pieces[-1].text + rest)
        options, estimate = self.request.speculation, None
        drafts = self._stats.drafted or any(entry.heads for entry in self.rounds)
        if drafts and not self._running.shared:
            gain = self._running.draft_cost(options).gain(self.rounds)
            estimate = Estimate(gain, options.costs.rows is not None)
        return Generation(
            text="".join(piece.text for piece in pieces),
            token_ids=list(self._tokens),
            stats=self._stats,
            stop_reason=self._stats.stop_reason if handed_out else None,
            logprobs=self._running.logprobs[: len(self._tokens)] or None,
            estimate=estimate,
            pieces=pieces,
        )

    def drain(self) -> Generation:
        """Decode to the end."""
        for _ in self:
            pass
        return self.result

    def _decode(self) -> Generator[str, None, None]:
        tokenizer, streamer = self.request.tokenizer, self.request.streamer
        decoder, stops = self._decoder, self._stops
        try:
            if streamer is not None and not self.request.streamer_has_prompt:
                streamer.put(self._running.state.ids.cpu())
            yield ""  # started: from here on, the streamer's `end` is always called
            for entry in self._running:
                self.rounds.append(entry)
                self._stats.add(entry)
                for token, giver in zip(entry.tokens, entry.givers, strict=True):
                    self._tokens.append(token)
                    self.giver = giver
                    if streamer is not None:
                        streamer.put(torch.tensor([token]))
                    tokens = [] if is_end(tokenizer, entry, token) else [token]
                    piece = stops.push(decoder.push(tokens))
                    self._piece_list.append(Piece(piece, giver))
                    if piece:
                        yield piece
                if self._closed:  # by another thread, or from within
                    self._running.close()
                    break
            if piece := stops.push(decoder.push([], last=True), last=True):
                last = self._piece_list[-1]
                self._piece_list[-1] = last._replace(text=last.text + piece)
                yield piece
        finally:
            if streamer is not None:
                streamer.end()  # also after an error: a reading thread must not wait


def html(pieces: Sequence[Piece], num_layers: int, note: str) -> str:
    """HTML of a coloured text, a legend of who gave the drafts, and a `note`."""
    runs = groupby(pieces, key=lambda piece: piece.giver)
    body = "".join(
        _span("".join(piece.text for piece in run), giver, num_layers) for giver, run in runs
    )
    givers = sorted({piece.giver for piece in pieces} - {Giver(MODEL)})
    line = " · ".join([*(_span(giver.words, giver, num_layers) for giver in givers), escape(note)])
    return (
        f'<div><div style="white-space:pre-wrap;line-height:1.7">{body}</div>'
        f'<div style="font-size:.85em;opacity:.75;margin-top:.5em">{line}</div></div>'
    )


def _span(text: str, giver: Giver, num_layers: int) -> str:
    colour = giver.colour(num_layers)
    if colour is None or not text:
        return escape(text)
    return (
        f'<span title="a draft: {giver.words}" style="border-radius:3px;'
        f"background:color-mix(in srgb,{colour} 24%,transparent);"
        f"text-decoration:underline 2px {SOURCES[giver.source].line} {colour};"
        f'text-underline-offset:.26em">{escape(text)}</span>'
    )
