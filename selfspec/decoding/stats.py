"""Records of a generation, with units: its rounds, its totals, and the sources of its tokens.

On an accelerator work is queued, so seconds are charged to the part that waits for its result.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from selfspec import pages as palette

EXIT, NGRAM, DRAFT_MODEL, GRAMMAR = "exit", "ngram", "draft-model", "grammar"
SUCCESSORS, REST, LOOKAHEAD, SKIP = "successors", "rest", "lookahead", "skip"

MODEL = "model"  # the source of undrafted tokens: a verification or the prompt's pass


class Source(NamedTuple):
    """How a source of tokens is shown."""

    words: str
    colour: str | None = None  # None: the text's colour, or that of the exit layer
    line: str = "solid"  # underline of its tokens, for readers who do not see colours
    mark: str = ""  # after its tokens in terminals without colours; exit layers show their number


# CSS class of a token in pages, by its underline
LOOKS = {"plain": "", "solid": "left", "dotted": "seen", "dashed": "grammar", "double": "second"}

# in display order
SOURCES = {
    MODEL: Source("the model", line="plain"),
    NGRAM: Source("prompt lookup", palette.SEEN, "dotted", "n"),
    SUCCESSORS: Source("successors seen before", palette.SEEN, "dotted", "s"),
    REST: Source("a datastore", palette.SEEN, "dotted", "r"),
    LOOKAHEAD: Source("lookahead", palette.SEEN, "dotted", "l"),
    GRAMMAR: Source("the grammar", palette.GRAMMAR, "dashed", "g"),
    DRAFT_MODEL: Source("a draft model", palette.SECOND, "double", "d"),
    SKIP: Source("fewer of its layers", palette.SECOND, "double", "f"),
    EXIT: Source("exit heads"),
}
FREE = frozenset({NGRAM, GRAMMAR})  # sources whose drafts take no work before verification


class Giver(NamedTuple):
    """The source of a token."""

    source: str
    layer: int = 0  # exit layer of a head's draft; 0 is the embedding

    @property
    def words(self) -> str:
        if self.source == EXIT:
            return f"exit layer {self.layer}" if self.layer else "the embedding"
        return SOURCES[self.source].words

    def colour(self, num_layers: int) -> str | None:
        """The colour of its tokens; None: the text's colour."""
        if self.source == EXIT:
            return palette.of_layer(self.layer, num_layers)
        return SOURCES[self.source].colour


Ended = Literal["depth", "width", "budget", "eos", "unsure", "off"]

# why drafting stopped, as shown to users
ENDED: dict[str, str] = {
    "depth": "deepest exit layer",  # nothing was confident by D_max
    "width": "longest allowed",  # W_max drafts
    "budget": "end of the answer",  # no room for more tokens
    "eos": "end token",
    "unsure": "too unsure",  # more would not pay
    "off": "no drafts",  # none were wanted, or they pause
}

StopReason = Literal["eos", "length", "stop"]  # an end token, the token limit, another criterion

PARTS = ("prefill", "draft", "heads", "verify", "bookkeeping")


class Stopwatch:
    """Charges the time since the last reading to a part of the work."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._last = now, now()
        self.seconds: Counter[str] = Counter()

    def start(self) -> None:
        """Discard the time since the last reading: the caller spent it."""
        self._last = self._now()

    def lap(self, part: str) -> None:
        now = self._now()
        self.seconds[part] += now - self._last  # type: ignore[assignment]  # Counter of seconds
        self._last = now


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round: drafting, then one verification."""

    tokens: list[int]  # the accepted drafts, then the correction or bonus token (not after a stop)
    draft_tokens: list[int]
    exit_layers: list[int]  # of each draft; 0 for drafts that ran through no layer
    sources: list[str]  # of each draft, by the names in `SOURCES`
    parents: list[int] | None = None  # the draft before each, -1: the newest token. None: a chain
    kept: list[int]  # indices of the accepted drafts, in order
    ended: Ended
    heads: int = 0  # times that heads were asked: for a token at a layer, or for a level of a tree
    prefill: bool = False  # the prompt's own pass, which is not a verification
    passes: Sequence[tuple[int, int, int]] = ()  # rows, first, last (layers first+1..last)
    stop_reason: StopReason | None = None

    @property
    def accepted(self) -> int:
        return len(self.kept)

    @property
    def origins(self) -> list[tuple[str, int]]:
        """The source and exit layer of each draft."""
        return [*zip(self.sources, self.exit_layers, strict=True)]

    @property
    def givers(self) -> list[Giver]:
        givers = [Giver(self.sources[index], self.exit_layers[index]) for index in self.kept]
        return givers + [Giver(MODEL)] * (len(self.tokens) - len(givers))

    @property
    def depths(self) -> list[int]:
        """Each draft's depth: the number of drafts on its path, itself included."""
        depths: list[int] = []
        for parent in self.parents or range(-1, len(self.draft_tokens) - 1):
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return depths


@dataclass(kw_only=True)
class GenerationStats:
    """Counters of one generation; `add` takes its rounds in order."""

    num_layers: int
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens whose keys and values a session still held."""
    lossless: bool = True
    """False if a lossy acceptance rule was used."""
    pinned: bool = False
    """Whether a probe on this machine found that no draft can change a bit of a logit."""
    drafts_refused: str | None = None
    """Why nothing was drafted despite the options: no draft is lossless with this model."""
    new_tokens: int = 0
    rounds: int = 0
    """Verifications; the prompt's pass is not one."""
    drafted: int = 0
    accepted: int = 0
    bonus: int = 0
    """Tokens that verification itself gave: after a rejection or after the last draft."""
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    """Keys: those of `SOURCES`."""
    drafted_by_layer: Counter[int] = field(default_factory=Counter)
    accepted_by_layer: Counter[int] = field(default_factory=Counter)
    """Drafts of exit heads only."""
    drafted_by_index: Counter[int] = field(default_factory=Counter)
    """Keys count from 1: the first, second, .. draft of a round; in a tree, of their paths."""
    accepted_by_index: Counter[int] = field(default_factory=Counter)
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    """Rounds by the number of drafts they kept."""
    ended: Counter[str] = field(default_factory=Counter)
    """Rounds by the reason why drafting stopped."""
    seconds: Counter[str] = field(default_factory=Counter)
    """Seconds by part: prefill, draft, heads, verify, bookkeeping."""
    stop_reason: StopReason | None = None

    def add(self, entry: Round) -> None:
        """Count one more round."""
        self.new_tokens += len(entry.tokens)
        self.stop_reason = entry.stop_reason
        if entry.prefill:
            return
        self.rounds += 1
        self.drafted += len(entry.draft_tokens)
        self.accepted += entry.accepted
        self.bonus += len(entry.tokens) - entry.accepted
        self.ended[entry.ended] += 1
        self.accepted_lengths[entry.accepted] += 1
        self.drafted_by_index.update(entry.depths)
        self.accepted_by_index.update(range(1, entry.accepted + 1))
        drafts = entry.origins
        kept = [drafts[index] for index in entry.kept]
        for origins, by_source, by_layer in (
            (drafts, self.drafted_by_source, self.drafted_by_layer),
            (kept, self.accepted_by_source, self.accepted_by_layer),
        ):
            by_source.update(source for source, _ in origins)
            by_layer.update(layer for source, layer in origins if source == EXIT)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def compression_rate(self) -> float:
        """CR: tokens committed per verification; 0 before the first."""
        return (self.accepted + self.bonus) / self.rounds if self.rounds else 0.0

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token: the prompt's pass."""
        return float(self.seconds["prefill"])

    @property
    def decode_s(self) -> float:
        """Seconds after the first token, without the time that the caller held the stream."""
        return float(sum(self.seconds[part] for part in PARTS if part != "prefill"))

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first per second of `decode_s`."""
        return max(self.new_tokens - 1, 0) / self.decode_s if self.decode_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Counters and rates by name, ready for JSON; in seconds and tokens per second."""
        names = [entry.name for entry in fields(self)] + ["acceptance_rate", "compression_rate"]
        names += ["ttft_s", "decode_s", "decode_tokens_per_s"]
        values = {name: getattr(self, name) for name in names}
        return {k: dict(v) if isinstance(v, Counter) else v for k, v in values.items()}

    def summary(self) -> str:
        """Tokens, speed and tokens per pass: the line of `--stats`."""
        speed = f" at {rate(self.decode_tokens_per_s)}" if self.decode_tokens_per_s else ""
        passes = f", {self.compression_rate:.1f} tokens per pass" if self.rounds else ""
        refusal = f", no drafts: {self.drafts_refused}" if self.drafts_refused else ""
        lossy = "" if self.lossless else ", lossy"
        return f"{counted(self.new_tokens, 'token')}{speed}{passes}{lossy}{refusal}"

    def line(self) -> str:
        """All figures: the line of `--stats=full`."""
        parts = [
            f"exit layer {layer}: {self.accepted_by_layer[layer]} of {count}"
            for layer, count in sorted(self.drafted_by_layer.items())
        ] + [
            f"{SOURCES[source].words}: {self.accepted_by_source[source]} of {count}"
            for source, count in sorted(self.drafted_by_source.items())
            if source != EXIT
        ]
        return (
            f"{counted(self.new_tokens, 'token')} at {rate(self.decode_tokens_per_s)}, first after "
            f"{self.ttft_s * 1e3:.0f} ms; {counted(self.rounds, 'round')}, "
            f"{self.compression_rate:.2f} tokens per pass; "
            f"{self.accepted} of {self.drafted} drafts accepted"
            + (f" ({', '.join(parts)})" if parts else "")
            + ("; pinned" if self.pinned else "")
            + ("" if self.lossless else "; lossy")
            + (f"; no drafts: {self.drafts_refused}" if self.drafts_refused else "")
        )


def counted(count: int, noun: str) -> str:
    """For people: 1 token, 2 tokens."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def rate(tokens_per_s: float) -> str:
    """For people: at least two digits."""
    return f"{tokens_per_s:.{0 if tokens_per_s >= 10 else 1}f} tokens/s"
