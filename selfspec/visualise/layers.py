"""What every exit layer predicts at every token of an answer; its file, and the gain from drafts.

A file has one JSON record per line: the `info`, then a `place` per token, then a `round` per
verification.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from selfspec import files
from selfspec.config import SpeculationOptions
from selfspec.decoding.costs import DraftCost
from selfspec.decoding.stats import ENDED, SOURCES, GenerationStats, Giver, Round, counted
from selfspec.errors import InvalidData, InvalidOption, check_keys, fits, record_of
from selfspec.files import json_lines, parse_json
from selfspec.hub.models import LOGIT_LENS

FORMAT_VERSION = 6

_VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True, kw_only=True)
class LayerSays:
    """What one exit layer's head predicts for one token. Texts contain spaces unchanged."""

    layer: int
    top_tokens: tuple[int, ...]  # five ids (fewer in a smaller draft vocabulary), most likely first
    top_texts: tuple[str, ...]
    top_probs: tuple[float, ...]
    """Their probabilities in the head's distribution, calibrated, before annealing."""
    confidence: float
    """Top-1 probability after annealing, which the judge compares with the threshold."""
    rank: int
    """Rank of the final token among the head's guesses, from 1; 0: not in the draft vocabulary."""
    divergence: float
    """KL(final || head's distribution) in nats, both renormalised over the draft vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One emitted token."""

    index: int  # in the answer, from 0
    token: int
    text: str
    """The text that the token adds to the answer, special tokens included; "" if a later token
    completes a character that begins here. All texts join to the whole."""
    kind: Literal["prefill", "accepted", "bonus"]  # by the prompt's pass, a draft, verification
    round: int  # index in `LayerTrace.rounds`; 0 is the prompt's pass
    exit_layer: int | None  # where an accepted draft of the exit heads left
    copied_from: int | None
    """Where prompt lookup found an accepted draft: its index in the prompt and the answer."""
    final_top_tokens: tuple[int, ...]  # the whole model's five likeliest, before any processor
    final_top_texts: tuple[str, ...]
    final_top_probs: tuple[float, ...]
    layers: tuple[LayerSays, ...]  # in the order of `TraceInfo.exit_layers`


@dataclass(frozen=True, kw_only=True)
class TraceInfo:
    """The model, the prompt and the options of a decode."""

    base_model: str  # the model's name, for people
    base: str  # its fingerprint
    heads: str  # hash of the heads; "" for none but the logit lens
    dtype: str
    executor: str
    num_layers: int
    exit_layers: tuple[int, ...]  # all that were inspected, in increasing order
    head_kinds: tuple[str, ...]
    """Kind of head at each of them: deep-fused, translator, .., logit-lens."""
    thresholds: tuple[float, ...]
    """tau of each of them; for a layer that did not draft, the built-in one."""
    options: SpeculationOptions
    """The options that the decode used: exit layers up to D_max with a threshold each, and the
    costs. In a file: the keywords that give them."""
    lossless: bool  # false if the acceptance rule was lossy
    prompt: str  # the prompt as it was given, before any chat template
    prompt_texts: tuple[str, ...]  # texts of the prompt's tokens, the chat template's too

    @property
    def taus(self) -> dict[int, float]:
        """Thresholds by exit layer in use; empty if heads did not draft."""
        exits = self.options.exit
        if not self.options.uses("exit"):
            return {}
        return dict(zip(exits.layers or (), exits.thresholds, strict=True))


@dataclass(frozen=True, kw_only=True)
class LayerTrace:
    """One answer, token by token and layer by layer."""

    info: TraceInfo
    places: tuple[Place, ...]
    rounds: tuple[Round, ...]
    """Rounds of the decode itself, the prompt's pass first; rejected drafts and passes included."""
    draft_texts: tuple[tuple[str, ...], ...]  # by round

    @property
    def answer(self) -> list[str]:
        """The text that each token adds to the answer as people read it; an end token adds none."""
        texts = [place.text for place in self.places]
        if texts and self.rounds[-1].stop_reason == "eos":
            texts[-1] = ""
        return texts

    @property
    def stats(self) -> GenerationStats:
        stats = GenerationStats(num_layers=self.info.num_layers)
        for entry in self.rounds:
            stats.add(entry)
        return stats

    @property
    def cost(self) -> DraftCost:
        """The costs that drafts were chosen by: of rows and heads, mostly measured there."""
        return DraftCost.with_costs(self.info.options.costs, self.info.num_layers)

    @property
    def summary(self) -> str:
        """The decode's statistics, in a line."""
        stats = self.stats
        ended = ", ".join(f"{ENDED[reason]} {count}" for reason, count in stats.ended.most_common())
        return (
            f"{counted(stats.new_tokens, 'token')}, {counted(stats.rounds, 'round')}, "
            f"{stats.compression_rate:.2f} tokens per verification, "
            f"{stats.accepted} of {stats.drafted} drafts kept"
            + (f"; why drafts ended: {ended}" if ended else "")
            + ("" if self.info.lossless else "; lossy")
        )

    def save(self, path: Path) -> None:
        """Write the trace to a file. Raises CannotWrite."""
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in self.lines())
        files.write(path, "".join(lines))

    def lines(self) -> list[dict[str, Any]]:
        """The record of each line of a file, ready for JSON."""
        head = {"made_by": "selfspec", "format_version": FORMAT_VERSION, "type": "info"}
        options = {"options": self.info.options.differing()}
        places = [{"type": "place", **asdict(place)} for place in self.places]
        rounds = [
            {"type": "round", **asdict(entry), "draft_texts": texts}
            for entry, texts in zip(self.rounds, self.draft_texts, strict=True)
        ]
        return [head | asdict(self.info) | options, *places, *rounds]

    @classmethod
    def load(cls, path: Path) -> LayerTrace:
        """Read a trace from a file. Raises InvalidData with the file, the line and the reason."""
        infos: list[TraceInfo] = []
        places: list[Place] = []
        rounds: list[tuple[Round, tuple[str, ...]]] = []
        for number, line in json_lines(path):
            try:
                values = parse_json(line, "it")
                kind = values.pop("type")
                if (kind == "info") != (number == 1):
                    raise InvalidData(f"found {kind!r}, the first line must be 'info' and no other")
                if kind == "info":
                    infos.append(_info(values))
                elif kind == "place":
                    places.append(_place(values, infos[0].exit_layers, len(places)))
                elif kind == "round":
                    rounds.append(_round(values, infos[0].exit_layers))
                else:
                    raise InvalidData(f"found {kind!r}, expected a place or a round")
            except (InvalidData, InvalidOption) as error:
                raise InvalidData(f"{path}, line {number}: {error}") from error
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise InvalidData(
                    f"{path}, line {number} is no line of a trace: {error}. "
                    'Make one: selfspec trace "..." --output FILE'
                ) from error
        pairs = [(n, token) for n, (entry, _) in enumerate(rounds) for token in entry.tokens]
        if not places or pairs != [(place.round, place.token) for place in places]:
            raise InvalidData(
                f"{path}: rounds and places hold different tokens: the file is cut off"
            )
        entries, texts = zip(*rounds, strict=True)
        return cls(info=infos[0], places=tuple(places), rounds=entries, draft_texts=texts)


def _info(values: dict[str, Any]) -> TraceInfo:
    values.pop("made_by", None)
    version = values.pop("format_version")
    if version != FORMAT_VERSION:
        raise InvalidData(
            f"format version {version}, this selfspec reads {FORMAT_VERSION}. Trace again"
        )
    options = SpeculationOptions().updated(values.pop("options"))
    info = record_of(TraceInfo, {**values, "options": options})
    _ = info.taus  # a threshold for each layer
    if not len(info.exit_layers) == len(info.head_kinds) == len(info.thresholds):
        raise InvalidData("exit_layers, head_kinds and thresholds are not of one length")
    if not all(0 <= layer < info.num_layers for layer in info.exit_layers):
        raise InvalidData(f"exit layers {info.exit_layers}, the model has {info.num_layers}")
    return info


def _place(values: dict[str, Any], layers: tuple[int, ...], index: int) -> Place:
    place = record_of(Place, values)
    if (numbers := tuple(record.layer for record in place.layers)) != layers:
        raise InvalidData(f"exit layers {[*numbers]} are not those of the first line")
    for record in (place, *place.layers):
        counts = {len(value) for name, value in vars(record).items() if "top_" in name}
        if len(counts) > 1 or 0 in counts:
            raise InvalidData(f"guesses of {sorted(counts)} tokens, texts and probabilities")
    if place.index != index:
        raise InvalidData(f"place {place.index}, expected {index}")
    return place


def _round(values: dict[str, Any], layers: tuple[int, ...]) -> tuple[Round, tuple[str, ...]]:
    """A round and the texts of its drafts. All its lists must describe each of its drafts."""
    texts = tuple(values.pop("draft_texts"))
    if not fits(texts, tuple[str, ...]):
        raise InvalidData("draft_texts are no texts")
    entry = record_of(Round, values)
    count = len(entry.draft_tokens)
    parents = [*range(-1, count - 1)] if entry.parents is None else entry.parents
    if any(len(column) != count for column in (entry.exit_layers, entry.sources, parents, texts)):
        raise InvalidData(f"a round of {count} drafts says more or less of them")
    if not all(-1 <= parent < index for index, parent in enumerate(parents)):
        raise InvalidData(f"parents {parents} are no tree of drafts")
    if not all(0 <= index < count for index in entry.kept) or entry.accepted > len(entry.tokens):
        raise InvalidData(f"drafts {entry.kept} were kept, of {count}")
    check_keys(entry.sources, SOURCES, "source of a draft")
    if not {*entry.exit_layers} <= {0, *layers}:
        raise InvalidData(f"drafts of exit layers {entry.exit_layers}, looked at were {layers}")
    return entry, texts


# --- the gain from drafts, in words that the page, the card and the terminal share


class Gain(NamedTuple):
    """The gain from drafts in one answer."""

    tokens: int
    drafted: int  # how many of the tokens were drafts that were kept
    speed_up: float
    """Speed-up over plain decoding, by costs. Rounded to one digit, as it is shown, so that the
    words fit the number beside them."""

    @property
    def headline(self) -> str:
        rate = f"{self.speed_up:.1f}× plain decoding"
        if not self.drafted:
            text = "No draft was kept: each token took a pass of the whole model"
            return f"{text}, {rate}" if self.speed_up < 1 else text
        share = f"{self.drafted / self.tokens:.0%}".replace("%", " %")
        verdict = f", which {self.verdict}:" if self.verdict else ","
        return f"{share} of this answer came as drafts{verdict} {rate}"

    @property
    def verdict(self) -> str:
        """What drafts did without a gain; empty if they gained, or gave and cost nothing."""
        if self.speed_up > 1 or (self.speed_up == 1 and not self.drafted):
            return ""
        return "cost more than they gave" if self.speed_up < 1 else "cost what they gave"


def gain(trace: LayerTrace) -> Gain:
    stats, times = trace.stats, round(trace.cost.gain(trace.rounds), 1)
    return Gain(stats.new_tokens, stats.accepted, times)


def givers(trace: LayerTrace) -> list[Giver]:
    return [giver for entry in trace.rounds for giver in entry.givers]


def source_counts(sources: Sequence[Giver]) -> list[tuple[Giver, int]]:
    """Sources and the tokens of each: the model first, then prompt lookup, then heads by layer."""
    order = {source: place for place, source in enumerate(SOURCES)}
    return sorted(Counter(sources).items(), key=lambda pair: (order[pair[0].source], pair[0].layer))


def rejections(entry: Round) -> list[tuple[int, list[int]]]:
    """Rejected drafts as branches, in which each draft follows the one before it.

    Each branch comes with the index in `entry.tokens` of the token in the place where it begins.
    """
    parents = entry.parents or range(-1, len(entry.draft_tokens) - 1)
    places = {-1: 0} | {draft: index + 1 for index, draft in enumerate(entry.kept)}
    branches: list[tuple[int, list[int]]] = []
    for draft, parent in enumerate(parents):
        if draft in entry.kept:
            continue
        places[draft] = places[parent]
        if branches and branches[-1][1][-1] == parent:
            branches[-1][1].append(draft)
        else:
            branches.append((places[draft], [draft]))
    return branches


def right_from(trace: LayerTrace, place: Place) -> int | None:
    """The layer from which on every first guess is the token, at most num_layers.

    None if the whole model prefers another token: then this one was sampled.
    """
    if place.final_top_tokens[0] != place.token:
        return None
    layer = trace.info.num_layers
    for guess in reversed(place.layers):
        if guess.top_tokens[0] != place.token:
            break
        layer = guess.layer
    return layer


def head_right(trace: LayerTrace, place: Place) -> int | None:
    """The first layer whose fitted head guesses the token, whatever deeper layers say."""
    pairs = zip(place.layers, trace.info.head_kinds, strict=True)
    guesses = (guess for guess, kind in pairs if kind != LOGIT_LENS)
    return next((guess.layer for guess in guesses if guess.top_tokens[0] == place.token), None)


# --- texts with visible spaces and ends of lines


def visible(text: str) -> str:
    """Spaces, ends of lines and control characters made visible."""
    hidden = (char for char in text if unicodedata.category(char)[0] in "CZ")  # controls, spaces
    signs = {char: _VISIBLE.get(char, f"\\u{ord(char):04x}") for char in hidden}
    return "".join(signs.get(char, char) for char in text) or "∅"


def readable(text: str, ends: str = "") -> str:
    """A text with `ends` before each line feed, and no character that could move a cursor."""
    lines = ("" if line == "" else visible(line).replace("␣", " ") for line in text.split("\n"))
    return f"{ends}\n".join(lines)
