"""What Prometheus reads at /metrics: counts of rounds and requests come in, its text goes out.

Called on the writer's thread, but for `refused`, `show` and `text`. Names are vLLM's behind
`selfspec_`, where it has one; a request there is an answer here: with n=2 there are two.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from selfspec.decoding.stats import MODEL

if TYPE_CHECKING:
    from selfspec.model.kv import Memory
    from selfspec.serve.pieces import Answer

PREFIX = "selfspec_"

_GAUGES = {
    "num_requests_running": "Answers that are being written.",
    "num_requests_waiting": "Answers that wait for room.",
    "kv_memory_bytes": "Keys and values of answers that are being written.",
    "kv_memory_promised_bytes": "What these may still grow to.",
    "kv_memory_kept_bytes": "Of ended texts, for others that begin alike.",
    "kv_memory_limit_bytes": "The budget for keys and values.",
}

_COUNTERS = {
    "request_success": ("Answers that came to their end.", "finished_reason"),
    "request_cancelled": ("Answers whose client went away.",),
    "request_refused": ("Requests that got an error.", "status"),
    "prompt_tokens": ("Tokens of prompts.",),
    "generation_tokens": ("Tokens of answers.",),
    "tokens_by_source": ("Tokens of answers by who gave them.", "source"),
    "prefix_cache_queries": ("Tokens of prompts that entered.",),
    "prefix_cache_hits": ("Those whose keys and values were there.",),
    "spec_decode_num_drafts": ("Rounds that had drafts.",),
    "spec_decode_num_draft_tokens": ("Drafted tokens.",),
    "spec_decode_num_accepted_tokens": ("Accepted drafts.",),
    "spec_decode_num_accepted_tokens_per_pos": (
        "Accepted drafts by their place in a round, from 0.",
        "position",
    ),
}
"""What each counts, and its label."""

_GAPS_S = tuple(0.005 * 2**step for step in range(12))
"""Between rounds: 5 ms to 10 s."""

_ANSWERS_S = tuple(0.01 * 2**step for step in range(17))
"""To a first token, and to an end: 10 ms to 11 minutes."""

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request to its first token.", _ANSWERS_S),
    "inter_token_latency_seconds": ("Between rounds of an answer.", _GAPS_S),
    "e2e_request_latency_seconds": ("From a request to its answer's end.", _ANSWERS_S),
}


class State(NamedTuple):
    """What a writer has at one moment."""

    running: int
    waiting: int
    memory: Memory


class Metrics:
    """The metrics of one server: nothing in them is shared with another one."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._gauges = {
            name: Gauge(PREFIX + name, said, registry=registry) for name, said in _GAUGES.items()
        }
        self._counters = {
            name: Counter(PREFIX + name, said, labels, registry=registry)
            for name, (said, *labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(PREFIX + name, said, buckets=buckets, registry=registry)
            for name, (said, buckets) in _HISTOGRAMS.items()
        }

    def count(self, name: str, *label: str, by: int = 1) -> None:
        """Add to a counter; `label`: its value, where it has one. From any thread."""
        counter = self._counters[name]
        (counter.labels(*label) if label else counter).inc(by)

    def refused(self, status: int) -> None:
        """A request got an error. From any thread."""
        self.count("request_refused", str(status))

    def wrote(self, answer: Answer) -> None:
        """Counts rounds of an answer which nobody took yet."""
        running = answer.running
        for entry in running.fresh:
            self.count("generation_tokens", by=len(entry.tokens))
            self.count("tokens_by_source", MODEL, by=len(entry.tokens) - entry.accepted)
            if entry.prefill:
                self.count("prefix_cache_queries", by=running.stats.prompt_tokens)
                self.count("prefix_cache_hits", by=running.stats.reused_tokens)
            if entry.draft_tokens:
                self.count("spec_decode_num_drafts")
                self.count("spec_decode_num_draft_tokens", by=len(entry.draft_tokens))
                self.count("spec_decode_num_accepted_tokens", by=entry.accepted)
            for position, index in enumerate(entry.kept):
                self.count("spec_decode_num_accepted_tokens_per_pos", str(position))
                self.count("tokens_by_source", entry.sources[index])
        if any(entry.tokens for entry in running.fresh):
            now = time.perf_counter()
            if answer.newest_s is None:
                self._histograms["time_to_first_token_seconds"].observe(now - answer.job.came_s)
            else:
                self._histograms["inter_token_latency_seconds"].observe(now - answer.newest_s)
            answer.newest_s = now

    def finished(self, answer: Answer, reason: str) -> None:
        """An answer came to its end."""
        self.count("request_success", reason)
        seconds = time.perf_counter() - answer.job.came_s
        self._histograms["e2e_request_latency_seconds"].observe(seconds)

    def show(self, state: State) -> None:
        """Set gauges. From any thread."""
        memory = state.memory
        values = (*state[:2], memory.used, memory.promised, memory.kept, memory.most)
        for gauge, value in zip(self._gauges.values(), values, strict=True):
            gauge.set(value)

    def text(self) -> bytes:
        """The metrics as Prometheus reads them. From any thread."""
        return generate_latest(self._registry)
