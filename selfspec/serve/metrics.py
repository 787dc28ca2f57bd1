"""What Prometheus reads at /metrics: counts of rounds and requests come in, its text goes out.

Called on the writer's thread, but for `refused`, `show` and `text`. Names are vLLM's behind
`selfspec_`, where it has one; a request there is an answer here: with n=2 there are two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.decoding.sources import MODEL

if TYPE_CHECKING:
    from selfspec.decoding.engine import Running
    from selfspec.decoding.stats import Round
    from selfspec.model.kv_memory import Memory

PREFIX = "selfspec_"

NOBODY = 499
"""Status in place of an answer that nobody reads; no refusal."""

_GAPS_S = tuple(0.005 * 2**step for step in range(12))
"""Between rounds: 5 ms to 10 s."""

_ANSWERS_S = tuple(0.01 * 2**step for step in range(17))
"""To a first token, and to an end: 10 ms to 11 minutes."""


class State(NamedTuple):
    """What a writer has at one moment."""

    running: int
    waiting: int
    memory: Memory


@dataclass
class _Times:
    """Of one answer, in seconds."""

    came: float
    told: float | None = None
    """When its newest tokens came."""


class Metrics:
    """Of one server: nothing in it is shared with another one."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """`now` gives seconds; tests inject their own."""
        self._now = now
        self._times: dict[Running, _Times] = {}
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests()
        self._tokens()
        self._drafts()
        self._seconds()

    def came(self, running: Running, at: float) -> None:
        """An answer has begun, whose request came at a time of `now`."""
        self._times[running] = _Times(at)

    def prompt(self, tokens: int) -> None:
        """A request's prompts were read; as its usage counts them."""
        self._prompt_tokens.inc(tokens)

    def wrote(self, running: Running) -> None:
        """Counts rounds of an answer which nobody took yet."""
        for entry in running.fresh:
            self._generation_tokens.inc(len(entry.tokens))
            if entry.prefill:
                self._queries.inc(running.stats.prompt_tokens)
                self._hits.inc(running.stats.reused_tokens)
                self._by_source.labels(MODEL).inc(len(entry.tokens))
            else:
                self._round(entry)
        times = self._times.get(running)
        if times is not None and any(entry.tokens for entry in running.fresh):
            now = self._now()
            if times.told is None:
                self._first.observe(now - times.came)
            else:
                self._gaps.observe(now - times.told)
            times.told = now

    def finished(self, running: Running, reason: str) -> None:
        """An answer came to its end."""
        self._success.labels(reason).inc()
        if (times := self._times.get(running)) is not None:
            self._latency.observe(self._now() - times.came)

    def left(self, running: Running) -> None:
        """Nobody writes this answer any more."""
        self._times.pop(running, None)

    def cancelled(self) -> None:
        """An answer was left before its end."""
        self._cancelled.inc()

    def refused(self, status: int) -> None:
        """A request got an error. From any thread."""
        self._refused.labels(str(status)).inc()

    def show(self, state: State) -> None:
        """Set gauges. From any thread."""
        self._running.set(state.running)
        self._waiting.set(state.waiting)
        for name, value in state.memory._asdict().items():
            self._memory[name].set(value)

    def text(self) -> bytes:
        """As Prometheus reads it. From any thread."""
        return generate_latest(self._registry)

    def _round(self, entry: Round) -> None:
        """One verification."""
        if entry.draft_tokens:
            self._num_drafts.inc()
            self._draft_tokens.inc(len(entry.draft_tokens))
        self._accepted.inc(entry.accepted)
        for position in range(entry.accepted):
            self._by_position.labels(str(position)).inc()
        for index in entry.kept:
            self._by_source.labels(entry.sources[index]).inc()
        self._by_source.labels(MODEL).inc(len(entry.tokens) - entry.accepted)

    def _requests(self) -> None:
        self._running = self._gauge("num_requests_running", "Answers that are being written.")
        self._waiting = self._gauge("num_requests_waiting", "Answers that wait for room.")
        said = {
            "used": ("kv_memory_bytes", "Keys and values of answers that are being written."),
            "promised": ("kv_memory_promised_bytes", "What these may still grow to."),
            "kept": ("kv_memory_kept_bytes", "Of ended texts, for others that begin alike."),
            "most": ("kv_memory_limit_bytes", "The budget for keys and values."),
        }
        self._memory = {name: self._gauge(*words) for name, words in said.items()}
        self._success = self._counter(
            "request_success", "Answers that came to their end.", "finished_reason"
        )
        self._cancelled = self._counter("request_cancelled", "Answers whose client went away.")
        self._refused = self._counter("request_refused", "Requests that got an error.", "status")

    def _tokens(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens of answers.")
        self._by_source = self._counter(
            "tokens_by_source", "Tokens of answers by who gave them.", "source"
        )
        self._queries = self._counter("prefix_cache_queries", "Tokens of prompts that entered.")
        self._hits = self._counter("prefix_cache_hits", "Those whose keys and values were there.")

    def _drafts(self) -> None:
        self._num_drafts = self._counter("spec_decode_num_drafts", "Rounds that had drafts.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted drafts.")
        self._by_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by their place in a round, from 0.",
            "position",
        )

    def _seconds(self) -> None:
        self._first = self._histogram(
            "time_to_first_token_seconds", "From a request to its first token.", _ANSWERS_S
        )
        self._gaps = self._histogram(
            "inter_token_latency_seconds", "Between rounds of an answer.", _GAPS_S
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "From a request to its answer's end.", _ANSWERS_S
        )

    def _gauge(self, name: str, said: str) -> Gauge:
        return Gauge(PREFIX + name, said, registry=self._registry)

    def _counter(self, name: str, said: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, said, labels, registry=self._registry)

    def _histogram(self, name: str, said: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, said, buckets=buckets, registry=self._registry)


class Counting:
    """Around an application: counts the errors that it answers with."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        """As Starlette makes middleware."""
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""

        async def counted(message: Message) -> None:
            status = message.get("status", 200)
            if status >= 400 and status != NOBODY:
                self._metrics.refused(status)
            await send(message)

        await self._app(scope, receive, counted)
