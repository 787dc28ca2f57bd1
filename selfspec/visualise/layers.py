"""What every exit layer said at every token of an answer; its file, and what drafts gained.

Made by `look`, drawn by `terminal`, `picture` and `page`. A file has one JSON record per line: the
`info`, then a `place` per token, then a `round` per verification.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from selfspec import files
from selfspec.api.givers import Giver
from selfspec.config import SpeculationOptions
from selfspec.decoding.prices import Costs, DraftCost
from selfspec.decoding.stats import DRAFT_MODEL, SOURCES, GenerationStats, Round
from selfspec.errors import InvalidData
from selfspec.typed import fits, require_types
from selfspec.untrusted import json_lines, parse_json

FORMAT_VERSION = 4

Kind = Literal["prefill", "accepted", "bonus"]
"""Where a token comes from: the prompt's pass, a draft that stayed, verification itself."""

LOGIT_LENS = "logit-lens"
"""Kind of a head that nobody fitted: the model's own output layer."""

_VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True, kw_only=True)
class LayerSays:
    """What one exit layer's head says of one place's token. Texts show spaces as they are."""

    layer: int
    top_tokens: tuple[int, ...]
    """Five ids (fewer in a smaller draft vocabulary), most likely first."""
    top_texts: tuple[str, ...]
    top_probs: tuple[float, ...]
    """Of the head's law, calibrated, before annealing."""
    confidence: float
    """Top-1 probability after annealing: what the judge compares with the threshold."""
    rank: int
    """Of the final token among the head's guesses, from 1; 0: not in the draft vocabulary."""
    divergence: float
    """KL(final law || head's law) in nats, both renormalised over the head's draft vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One emitted token."""

    index: int
    """In the answer, from 0."""
    token: int
    text: str
    """What the token adds to the answer, special tokens included; "" where a later one completes
    a character that begins here. All texts join to the whole."""
    kind: Kind
    round: int
    """Index in `LayerTrace.rounds`; 0 is the prompt's pass."""
    exit_layer: int | None
    """Where an accepted draft of the exit heads left."""
    copied_from: int | None
    """Where an accepted draft from text already seen was found: counted in prompt and answer."""
    final_top_tokens: tuple[int, ...]
    """The whole model's five likeliest, before any processor."""
    final_top_texts: tuple[str, ...]
    final_top_probs: tuple[float, ...]
    layers: tuple[LayerSays, ...]
    """In the order of `TraceInfo.exit_layers`."""


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """How the answer was decoded."""

    exit_layers: tuple[int, ...]
    """Those in use; a trace may look at more."""
    exit_thresholds: tuple[float, ...]
    """tau of each of them."""
    anneal_strength: float
    max_draft_depth: int
    """D_max: the deepest exit layer in use; 0 without exit heads."""
    max_draft_tokens: int
    """W_max of exit heads."""
    guesses: int
    """Tokens that heads might propose for a place; 1: chains."""
    max_rows: int
    """Of a tree's verification at most, with the newest token's."""
    ngram_size: int
    """Longest n-gram that was looked up in text already seen."""
    ngram_tokens: int
    """W_max of text already seen."""
    never_slower: bool
    row_costs: tuple[float, ...]
    """What drafters took a verification's second row to cost, its third and so on, in steps."""
    head_cost: float
    """And an exit head that is asked."""
    drafter: str
    """What proposed; none for plain decoding."""
    controller: str
    lossless: bool
    """False if a lossy acceptance rule was at work."""

    @classmethod
    def of(
        cls,
        options: SpeculationOptions,
        cost: DraftCost,
        taus: Mapping[int, float],
        *,
        drafter: str,
        trees: bool,
        lossless: bool,
    ) -> TraceSettings:
        """What a trace keeps of options; `taus` by exit layer in use, `trees`: whether they ran."""
        return cls(
            exit_layers=tuple(taus),
            exit_thresholds=tuple(taus.values()),
            anneal_strength=options.exit.anneal_strength,
            max_draft_depth=max(taus, default=0),
            max_draft_tokens=options.exit.max_tokens,
            guesses=options.exit.guesses if trees else 1,
            max_rows=options.most_drafts + 1,
            ngram_size=options.ngram.size,
            ngram_tokens=options.ngram.max_tokens,
            never_slower=options.never_slower,
            row_costs=cost.rows,
            head_cost=cost.head,
            drafter=drafter,
            controller=options.controller.kind,
            lossless=lossless,
        )


@dataclass(frozen=True, kw_only=True)
class TraceInfo:
    """What was decoded, on what."""

    base_model: str
    """The model's name, for people."""
    base: str
    """Its fingerprint."""
    heads: str
    """Hash of the heads; "" for none but the logit lens."""
    dtype: str
    executor: str
    num_layers: int
    exit_layers: tuple[int, ...]
    """All that were looked at, rising."""
    head_kinds: tuple[str, ...]
    """Of each of them: deep-fused, translator, .., logit-lens."""
    thresholds: tuple[float, ...]
    """tau of each of them; of a layer that was not in use, the built-in one."""
    settings: TraceSettings
    prompt: str
    """As it was asked, before any chat template."""
    prompt_texts: tuple[str, ...]
    """Of the prompt's tokens, the chat template's too."""

    @property
    def prompt_tokens(self) -> int:
        """How many the prompt has."""
        return len(self.prompt_texts)


@dataclass(frozen=True, kw_only=True)
class LayerTrace:
    """One answer, token by token and layer by layer."""

    info: TraceInfo
    places: tuple[Place, ...]
    rounds: tuple[Round, ...]
    """Of the decode itself, the prompt's pass first; rejected drafts and passes included."""
    draft_texts: tuple[tuple[str, ...], ...]
    """Of each round's draft tokens."""

    @property
    def answer(self) -> list[str]:
        """What each token adds to the text that people read; an end token adds nothing."""
        texts = [place.text for place in self.places]
        if texts and self.rounds[-1].stop_reason == "eos":
            texts[-1] = ""
        return texts

    @property
    def stats(self) -> GenerationStats:
        """Of all rounds."""
        found = GenerationStats(num_layers=self.info.num_layers)
        for entry in self.rounds:
            found.add(entry)
        return found

    def save(self, path: Path) -> None:
        """Write a file. Raises CannotWrite."""
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in self.lines())
        files.write(path, "".join(lines))

    def lines(self) -> list[dict[str, Any]]:
        """Ready for JSON: what each line of a file holds."""
        head = {"made_by": "selfspec", "format_version": FORMAT_VERSION, "type": "info"}
        places = [{"type": "place", **asdict(place)} for place in self.places]
        rounds = [
            {"type": "round", **asdict(entry), "draft_texts": texts}
            for entry, texts in zip(self.rounds, self.draft_texts, strict=True)
        ]
        return [head | asdict(self.info), *places, *rounds]

    @classmethod
    def load(cls, path: Path) -> LayerTrace:
        """From a file. Raises InvalidData: file, line, reason."""
        reader = _Reader()
        for number, line in json_lines(path):
            try:
                reader.line(_parsed(line), first=number == 1)
            except InvalidData as error:
                raise InvalidData(f"{path}, line {number}: {error}") from error
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise InvalidData(
                    f"{path}, line {number} is no line of a trace: {error}. "
                    'Make one: selfspec trace "..." --output FILE'
                ) from error
        try:
            return reader.trace()
        except InvalidData as error:
            raise InvalidData(f"{path}: {error}") from error


def _parsed(line: str) -> dict[str, Any]:
    """Raises ValueError."""
    try:
        values = parse_json(line, "it")
    except InvalidData as error:
        raise ValueError(str(error)) from error
    if not isinstance(values, dict):
        raise ValueError(f"it holds a {type(values).__name__}")
    return values


class _Reader:
    """Collects the lines of a file."""

    def __init__(self) -> None:
        self._info: TraceInfo | None = None
        self._places: list[Place] = []
        self._rounds: list[Round] = []
        self._draft_texts: list[tuple[str, ...]] = []

    def line(self, values: dict[str, Any], *, first: bool) -> None:
        """Add one. Raises InvalidData, and what a wrong shape gives."""
        kind = values.pop("type")
        if first != (kind == "info"):
            raise InvalidData(f"found {kind!r}, the first line must be 'info' and no other")
        if kind == "info":
            values.pop("made_by", None)
            version = values.pop("format_version")
            if version != FORMAT_VERSION:
                raise InvalidData(
                    f"format version {version}, this selfspec reads {FORMAT_VERSION}. Trace again"
                )
            settings = _typed(TraceSettings, values.pop("settings"))
            self._info = _typed(TraceInfo, {**values, "settings": settings})
        elif kind == "place":
            said = tuple(_typed(LayerSays, entry) for entry in values.pop("layers"))
            place, layers = _typed(Place, {**values, "layers": said}), [one.layer for one in said]
            if self._info is None or layers != list(self._info.exit_layers):
                raise InvalidData(f"exit layers {layers} are not those of the first line")
            if place.index != len(self._places):
                raise InvalidData(f"place {place.index}, expected {len(self._places)}")
            self._places.append(place)
        elif kind == "round":
            texts = tuple(values.pop("draft_texts"))
            if not fits(texts, tuple[str, ...]):
                raise InvalidData("draft_texts are no texts")
            self._draft_texts.append(texts)
            passes = [tuple(entry) for entry in values.pop("passes")]
            entry = Round(**values, passes=passes)
            require_types(entry)
            _check_drafts(entry, texts)
            self._rounds.append(entry)
        else:
            raise InvalidData(f"found {kind!r}, expected a place or a round")

    def trace(self) -> LayerTrace:
        """All of them. Raises InvalidData if they do not make one answer."""
        emitted = [(n, token) for n, entry in enumerate(self._rounds) for token in entry.tokens]
        found = [(place.round, place.token) for place in self._places]
        if self._info is None or not found or found != emitted:
            raise InvalidData("rounds and places hold different tokens: the file is cut off")
        return LayerTrace(
            info=self._info,
            places=tuple(self._places),
            rounds=tuple(self._rounds),
            draft_texts=tuple(self._draft_texts),
        )


def _check_drafts(entry: Round, texts: Sequence[str]) -> None:
    """Raise InvalidData unless all that a round says of its drafts is said of those it has."""
    count = len(entry.draft_tokens)
    parents = [*range(-1, count - 1)] if entry.parents is None else entry.parents
    told = (entry.exit_layers, entry.sources, parents, texts)
    if any(len(each) != count for each in told):
        raise InvalidData(f"a round of {count} drafts says more or less of them")
    if not all(-1 <= parent < index for index, parent in enumerate(parents)):
        raise InvalidData(f"parents {parents} are no tree of drafts")
    if not all(0 <= index < count for index in entry.kept) or entry.accepted > len(entry.tokens):
        raise InvalidData(f"drafts {entry.kept} were kept, of {count}")


Kept = TypeVar("Kept", LayerSays, Place, TraceSettings, TraceInfo)


def _typed(kind: type[Kept], values: Mapping[str, Any]) -> Kept:
    """A dataclass from JSON, whose lists are tuples here."""
    unknown = values.keys() - {entry.name for entry in fields(kind)}
    if unknown:
        raise InvalidData(f"unknown key {min(unknown)!r}")
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    made = kind(**{**values, **lists})
    require_types(made)
    return made


# --- what drafts gained, in words that the page, the card and the terminal share ------------------


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Of one answer."""

    tokens: int
    drafted: int
    """Of them, those that came as drafts and were kept."""
    per_verification: float
    speed_up: float | None
    """Over plain decoding, by what passes cost on this machine; None: not known."""

    @property
    def headline(self) -> str:
        """What was gained, in a line."""
        if not self.drafted:
            words = "No draft was kept: each token took a pass of the whole model"
            return f"{words}, {self.rate}" if self._times is not None and self._times < 1 else words
        share = f"{self.drafted / self.tokens:.0%}".replace("%", " %")
        verdict = f", which {self.verdict}:" if self.verdict else ","
        return f"{share} of this answer {self.came}{verdict} {self.rate}"

    @property
    def came(self) -> str:
        """How drafts came: for nothing only where the answer is known to be faster with them."""
        gained = self._times is not None and self._times > 1
        return "came for nothing" if gained else "came as drafts"

    @property
    def verdict(self) -> str:
        """What drafts did that gained nothing; empty if they did, or nobody knows."""
        if self._times is None or self._times > 1:
            return ""
        return "cost more than they gave" if self._times < 1 else "cost what they gave"

    @property
    def rate(self) -> str:
        """The one number beside the share."""
        if self._times is None:
            return f"{self.per_verification:.1f} tokens per verification"
        return f"{self._times:.1f}× plain decoding"

    @property
    def _times(self) -> float | None:
        """The speed-up as it is read: words must fit the number beside them."""
        return None if self.speed_up is None else round(self.speed_up, 1)


def gain(trace: LayerTrace, costs: Costs | None = None) -> Gain:
    """Drafts of a draft model have no costs here, so there is no speed-up with them."""
    stats, speed_up = trace.stats, None
    if costs is not None and stats.rounds and DRAFT_MODEL not in stats.drafted_by_source:
        plain = (stats.accepted + stats.bonus) * costs.plain_step()
        speed_up = plain / costs.seconds_of(trace.rounds)
    return Gain(
        tokens=stats.new_tokens,
        drafted=stats.accepted,
        per_verification=stats.compression_rate,
        speed_up=speed_up,
    )


def givers(trace: LayerTrace) -> list[Giver]:
    """Of each token."""
    return [Giver(*giver) for entry in trace.rounds for giver in entry.givers]


def counted(found: Sequence[Giver]) -> list[tuple[Giver, int]]:
    """How many tokens each gave: the model first, then text already seen, then by layer."""
    order = {source: place for place, source in enumerate(SOURCES)}
    return sorted(Counter(found).items(), key=lambda pair: (order[pair[0].source], pair[0].layer))


def right_from(trace: LayerTrace, place: Place) -> int | None:
    """The layer from which on every first guess is the token.

    num_layers at the latest; None if not even the whole model prefers the token: it was drawn.
    """
    if place.final_top_tokens[0] != place.token:
        return None
    first = trace.info.num_layers
    for said in reversed(place.layers):
        if said.top_tokens[0] != place.token:
            break
        first = said.layer
    return first


def head_right(trace: LayerTrace, place: Place) -> int | None:
    """The first layer whose fitted head guesses the token, whatever deeper layers say."""
    looked = zip(place.layers, trace.info.head_kinds, strict=True)
    fitted = (said for said, kind in looked if kind != LOGIT_LENS)
    return next((said.layer for said in fitted if said.top_tokens[0] == place.token), None)


# --- how a text looks where a space or a line's end must be seen ----------------------------------


def visible(text: str, most: int | None = None) -> str:
    """Spaces, ends of lines and control characters made visible, shortened to `most` characters."""
    hidden = (one for one in text if unicodedata.category(one)[0] in "CZ")  # controls, spaces
    signs = {one: _VISIBLE.get(one, f"\\u{ord(one):04x}") for one in hidden}
    shown = "".join(signs.get(one, one) for one in text) or "∅"
    return shown if most is None or len(shown) <= most else shown[: most - 1] + "…"
