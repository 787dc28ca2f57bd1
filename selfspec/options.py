"""Settings of drafters, draft controllers, acceptance rules and costs: one dataclass each.

`SpeculationOptions` in `config` is made of them. A field's annotation has its range, which is
checked on creation; below it are symbol, range and meaning; above or beside it is the reason for
its default. To add one: a class in its group, and its name in the group's table. Imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from selfspec.errors import (
    InvalidOption,
    annotations_of,
    check_keys,
    check_types,
    fits,
    hint_name,
    shown,
)

# --- shared base classes and ranges


@dataclass(frozen=True)
class Range:
    """The values that an option may have; part of its annotation through `Annotated`."""

    holds: Callable[[Any], bool]
    expected: str  # its words in an error message
    whole: bool = False  # applies to a tuple as a whole, not to each value in it
    most: float | None = None  # the largest value, which costs a few megabytes and milliseconds
    request: float | None = None  # the largest value in a client's request; None: not allowed


def between(least: float, most: float, request: float | None = None) -> Range:
    """A range with both ends included."""
    holds, expected = lambda value: least <= value <= most, f"in [{least}, {most}]"
    return Range(holds, expected, most=most, request=request)


def at_least(least: float) -> Range:
    return Range(lambda value: value >= least, f"of at least {least}")


@dataclass(frozen=True)
class Part:
    """Settings of one drafter, controller or rule. Lists are stored as tuples."""

    kind: ClassVar[str]  # its name on the command line
    reads_confidence: ClassVar[bool] = False
    """Whether a controller uses each token's confidence; such controllers support chains only."""
    reads_beliefs: ClassVar[bool] = False  # whether a rule reads each draft token's distribution

    def __init_subclass__(cls, kind: str = "") -> None:
        if kind:
            cls.kind = kind

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        check_fields(self, f"{self.kind}:")


def check_fields(options: Any, prefix: str = "") -> None:
    """Raise InvalidOption unless all fields have their types and lie in their ranges."""
    check_types(vars(options), annotations_of(type(options)), prefix)
    check_ranges(vars(options), type(options), prefix)


def check_ranges(values: Mapping[str, Any], kind: type, prefix: str = "") -> None:
    """Raise InvalidOption for a value out of its range in `kind`; `prefix` is put before names."""
    for name, limit in ranges(kind).items():
        value = values.get(name)
        entries = value if isinstance(value, tuple) and not limit.whole else (value,)
        if not entries:
            raise InvalidOption(f"{prefix}{name} is empty, expected at least one value")
        for entry in entries:
            if entry is not None and not limit.holds(entry):
                message = f"{prefix}{name} is {shown(entry)}, expected a value {limit.expected}"
                raise InvalidOption(message)


def check_part_request(part: Part) -> None:
    """Raise InvalidOption for settings of a part that a request to a server may not change."""
    kind: type = type(part)
    for key, value in _changed_settings(part).items():
        name, limit = f"{part.kind}:{key}", ranges(kind).get(key)
        if limit is None or limit.request is None:
            raise InvalidOption(f"{name} is up to the server. Leave it out")
        values = value if isinstance(value, tuple) else (value,)
        if value is not None and max(values) > limit.request:
            raise InvalidOption(f"{name} is {value}, a request may ask for {limit.request} at most")


@functools.cache
def ranges(kind: type) -> dict[str, Range]:
    """The ranges of a class's fields, by name."""
    return {
        name: note
        for name, hint in annotations_of(kind, include_extras=True).items()
        for note in getattr(hint, "__metadata__", ())
        if isinstance(note, Range)
    }


AMOUNT, LAYER = between(0, 1000), between(0, 4096)
PROBABILITY = between(0, 1, request=1.0)
ABOVE_ZERO = Range(lambda value: value > 0, "of more than 0")
POSITIVE = Range(lambda value: 0.0 < value <= 1000.0, "in (0, 1000]", most=1000.0)
SHARE = Range(lambda value: 0.0 < value <= 1.0, "in (0, 1]", most=1.0, request=1.0)

Amount = Annotated[float, AMOUNT]
Count = Annotated[int, at_least(1)]
Seed = Annotated[int, between(-(2**63), 2**64 - 1)]  # torch's range
Probability = Annotated[float, PROBABILITY]
Share = Annotated[float, SHARE]
Rank = Annotated[int, between(1, 1024)]  # a number of likeliest tokens
Rows = Annotated[int, between(1, 64, request=32)]
Width = Annotated[int, between(1, 64, request=16)]
"""Draft tokens of a round. With 64 the logits of a verification take 13 MB at 49,152 tokens."""

# --- drafters


@dataclass(frozen=True, kw_only=True)
class Exit(Part, kind="exit"):
    """Exit heads on shallow layers."""

    layers: Annotated[tuple[int, ...] | None, LAYER] = None
    """Exit layers in use, counted from 1. None: all that the heads were fitted for."""
    threshold: Annotated[float | tuple[float, ...], SHARE] = 0.9  # a wrong draft costs work
    """tau, in (0, 1]: a token exits where its annealed confidence reaches tau. One value for all
    exit layers, or one per layer."""

    # the paper asks for "a small" one without giving it (section 3.3)
    anneal_strength: Amount = 0.2
    """alpha, at least 0, in `T_l = 1 + alpha (1 - l / L)`; 0 turns annealing off."""
    max_depth: Annotated[int | None, LAYER] = None
    """D_max, an exit layer: no draft runs deeper. None: the deepest exit layer in use."""
    max_tokens: Width = 6
    """Maximum draft tokens per round (W_max), or a controller's first length; for a tree, the
    longest path."""
    guesses: Annotated[int, between(1, 32, request=4)] = 1
    """Maximum tokens that a head on the embedding, exit layer 0, proposes for one position, at
    least 1; more than one make a tree. A token is proposed if its probability pays for its row."""
    max_rows: Rows = 16
    """Maximum rows of a tree's verification, including the newest token's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.threshold, tuple) and len(self.threshold) == 1:  # one for all layers
            object.__setattr__(self, "threshold", self.threshold[0])

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Tau as a tuple: of length 1 (all layers) or one per exit layer."""
        return self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)


@dataclass(frozen=True, kw_only=True)
class Ngram(Part, kind="ngram"):
    """Prompt lookup."""

    size: Annotated[int, between(1, 16, request=8)] = 4  # entries per token: 3 KB at 16
    """Longest n-gram that is looked up, 1 to 16; the longest match is used."""

    # more than exit heads: drafting takes no time, and with the newest token fills a pinned pass
    max_tokens: Width = 7
    """Maximum draft tokens per round (W_max)."""


@dataclass(frozen=True, kw_only=True)
class DraftModel(Part, kind="draft-model"):
    """A second, smaller model."""

    max_tokens: Width = 6
    """Maximum draft tokens per round (W_max), or a controller's first length."""


@dataclass(frozen=True, kw_only=True)
class Successors(Part, kind="successors"):
    """Tokens that verification found likely after the same tokens, in this text or another."""

    max_tokens: Width = 6
    """Longest path of a tree, at least 1."""
    guesses: Annotated[int, between(1, 8, request=4)] = 4
    """Maximum tokens proposed for one position, at least 1; each must pay for its row."""
    max_rows: Rows = 16
    """Maximum rows of a tree's verification, including the newest token's."""


@dataclass(frozen=True, kw_only=True)
class Rest(Part, kind="rest"):
    """Continuations of the same tokens in a datastore."""

    max_tokens: Width = 10
    """Longest path of a tree, at least 1; a lookup gives at most 10 tokens."""
    max_rows: Rows = 16  # REST drafts 64 tokens, on a GPU
    """Maximum rows of a tree's verification, including the newest token's."""

    @property
    def guesses(self) -> int:
        """Maximum tokens proposed for one position: as many as fit."""
        return self.max_rows


@dataclass(frozen=True, kw_only=True)
class Lookahead(Part, kind="lookahead"):
    """n-grams that the model generates after guessed tokens, beside each verification.

    A verification has (level - 1) (window + guesses) rows, at most 128. If it has room for fewer,
    the window loses columns first, and then guesses; models that run no trees draft one guess, from
    the text alone.
    """

    # the original's N, W, G are 5, 7, 7, which take 56 rows: for a GPU. These defaults take 8
    level: Annotated[int, between(2, 8, request=4)] = 3
    """N, at least 2: tokens of an n-gram, including the newest."""
    window: Annotated[int, between(1, 16, request=4)] = 2
    """W, at least 1: columns of guessed tokens."""
    guesses: Annotated[int, between(1, 16, request=4)] = 2
    """G, at least 1: maximum n-grams that are drafted, and that are kept per first token."""

    @property
    def max_rows(self) -> int:
        """Maximum rows of a verification, including the newest token's."""
        return min((self.level - 1) * (self.window + self.guesses), 128)


@dataclass(frozen=True, kw_only=True)
class Skip(Part, kind="skip"):
    """The model itself without some of its layers: Self-SD, SWIFT."""

    skipped: Annotated[tuple[int, ...] | None, between(2, 4096)] = None
    """Layers that drafts skip, counted from 1; the first always runs. None: search for the best
    ones during generation."""
    threshold: Probability = 0.8
    """Top probability, in [0, 1], from which drafting continues; `target` changes it over time."""
    target: Annotated[float | None, PROBABILITY] = 0.9
    """Share of drafts that should be accepted; the threshold moves by 0.001 a round to reach it.
    None: the threshold stays constant."""
    max_tokens: Width = 8
    """Maximum draft tokens per round (W_max), or a controller's first length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skipped is not None:
            object.__setattr__(self, "skipped", tuple(sorted(set(self.skipped))))


@dataclass(frozen=True, kw_only=True)
class NoDrafts(Part, kind="none"):
    """Nothing is drafted."""


Kinds = Mapping[str, type[Part]]

DRAFTERS: Kinds = {
    cls.kind: cls for cls in (Exit, Ngram, DraftModel, Successors, Rest, Lookahead, Skip, NoDrafts)
}
_BEHIND_NGRAMS = ("exit", "draft-model", "successors", "rest", "skip")
TOGETHER = (*DRAFTERS, *(f"ngram+{kind}" for kind in _BEHIND_NGRAMS))
"""Values of `drafter`: one drafter alone, or prompt lookup combined with another."""

FITTED = "ngram+exit"
"""The default drafter for fitted heads: prompt lookup costs nothing beside them."""

MEDUSA_FITTED = f"{FITTED}:threshold=1e-09,anneal_strength=0,guesses=10"
"""The same for Medusa heads: they are not calibrated, so no threshold limits their tree."""

_WEIGHTS = Range(
    lambda weights: len(weights) == 3 and min(weights) >= 0.0 and abs(sum(weights) - 1) < 1e-6,
    "of three weights, at least 0, that sum to 1",
    whole=True,
    most=1.0,
)


@dataclass(frozen=True, kw_only=True)
class Ensemble(Part):
    """A weighted mean of three signals."""

    # not in the paper: the two margins measure nearly the same
    weights: Annotated[tuple[float, ...], _WEIGHTS] = (0.4, 0.3, 0.3)
    """lambda: weights of entropy, logit margin and softmax margin, which sum to 1."""

    # not in the paper: 1 gives a sigmoid of the unscaled margin, in nats
    margin_scale: Annotated[float, POSITIVE] = 1.0
    """beta, above 0: sharpness of the logit margin."""


# --- draft controllers, which set the draft length of the next round


@dataclass(frozen=True, kw_only=True)
class Fixed(Part, kind="fixed"):
    """The same length in every round."""


@dataclass(frozen=True, kw_only=True)
class Bounded(Part):
    """A length that varies between bounds."""

    shortest: Width = 1
    """gamma_min, k_min, at least 1: smallest length that is asked for."""
    longest: Width = 10  # not in the papers: where verification starts to cost on a CPU
    """gamma_max, k_max, at least 1: largest length; in pinned mode at most `pinned_rows - 1`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest > self.longest:
            raise InvalidOption(
                f"{self.kind}:shortest {self.shortest} exceeds {self.kind}:longest {self.longest}. "
                "Lower the one or raise the other"
            )


@dataclass(frozen=True, kw_only=True)
class Heuristic(Bounded, kind="heuristic"):
    """Two longer after a round whose drafts were all accepted, else one shorter."""


@dataclass(frozen=True, kw_only=True)
class Threshold(Part, kind="threshold"):
    """A fixed length; a draft also ends after an unsure token."""

    reads_confidence: ClassVar[bool] = True

    # as in Hugging Face's `assistant_confidence_threshold`; GammaTune gives none
    threshold: Probability = 0.4
    """Top probability, in [0, 1], from which drafting continues."""


@dataclass(frozen=True, kw_only=True)
class GammaTune(Bounded, kind="gammatune"):
    """An exponential mean of accepted lengths."""

    rate: Share = 0.3  # not in the paper
    """eta, in (0, 1]: weight of the last round in the mean."""
    step: Amount = 2.0  # not in the paper; the heuristic's own step
    """delta, at least 0: added for a round whose drafts were all accepted."""


@dataclass(frozen=True, kw_only=True)
class GammaTunePlus(Threshold, GammaTune, kind="gammatune-plus"):
    """GammaTune that also stops after an unsure token."""


@dataclass(frozen=True, kw_only=True)
class CmAsdLength(Bounded, Ensemble, kind="cm-asd"):
    """A length that follows the drafter's confidence."""

    reads_confidence: ClassVar[bool] = True

    scale: Share = 1.0  # the document's "full confidence"
    """alpha, in (0, 1]: share of `longest` that is drafted at full confidence."""


Controller = Fixed | Threshold | Heuristic | GammaTune | CmAsdLength

CONTROLLERS: Kinds = {
    cls.kind: cls for cls in (Fixed, Heuristic, Threshold, GammaTune, GammaTunePlus, CmAsdLength)
}

# --- acceptance rules, which decide how many drafts are accepted


@dataclass(frozen=True, kw_only=True)
class Lossless(Part, kind="lossless"):
    """A draft must equal the model's own choice: its best token, or the draw of its seed."""


@dataclass(frozen=True, kw_only=True)
class Lenient(Part, kind="lenient"):
    """Speculative sampling that accepts more drafts. Lossy below a lenience of 1."""

    lenience: Share = 0.6  # measured at this value: eval/results/papers/lenience
    """In (0, 1]: a sampled draft is accepted if u < p / (q * lenience)."""


@dataclass(frozen=True, kw_only=True)
class CmAsd(Ensemble, kind="cm-asd"):
    """Accepts drafts close to the model's best token. Lossy."""

    reads_beliefs: ClassVar[bool] = True

    reading: Annotated[str, Range(("intent", "paper").__contains__, "intent or paper")] = "intent"
    """intent: stricter if the drafter is unsure, as the paper's text says; paper: looser, as in its
    formula."""
    top_beta: Rank = 3  # not in the paper
    """beta, at least 1: a draft must be among this many best tokens."""
    tolerance: Amount = 0.1  # the paper's example
    """tau_base, at least 0: how far a draft may be below the best token, in nats."""

    # not in the paper: with tolerance 0.1 a token may be e times less likely than the best
    tolerance_gain: Amount = 0.9
    """gamma, at least 0, in nats: tolerance added by confidence (intent) or by its lack (paper)."""


@dataclass(frozen=True, kw_only=True)
class Easd(Part, kind="easd"):
    """Rules out drafts where both models are unsure between the same tokens. Lossy."""

    reads_beliefs: ClassVar[bool] = True

    entropy: Annotated[float | None, AMOUNT] = None
    """tau_H, at least 0, in nats. None: that of the heads, from selfspec calibrate --entropy."""
    overlap: Probability = 0.8
    """tau_O, in [0, 1]: more than this share of the best tokens is common to both models."""
    tokens: Rank = 5
    """N, at least 1: number of best tokens that are compared."""


Acceptance = Lossless | Lenient | CmAsd | Easd

ACCEPTANCE: Kinds = {cls.kind: cls for cls in (Lossless, Lenient, CmAsd, Easd)}

KINDS = {"drafter": DRAFTERS, "controller": CONTROLLERS, "acceptance": ACCEPTANCE}
"""Options that choose one kind of several (for drafters, up to two), by name."""

# --- the costs of drafts, as shares of a step of one row


@dataclass(frozen=True, kw_only=True)
class Costs(Part, kind="costs"):
    """Shares of one pass without drafts."""

    row: Annotated[float | tuple[float, ...] | None, PROBABILITY] = None
    """Cost of one more row in a verification, in [0, 1]: of the second row, the third and so on, if
    they differ; a draft token is proposed if it is likely enough to pay for its row. None: as
    measured when this model was first loaded on this machine."""
    head: Annotated[float | None, AMOUNT] = None
    """Cost of asking one exit head in a round, at least 0. None: as measured, likewise."""
    token: Annotated[float | None, AMOUNT] = None
    """Cost of a draft token of a second model, of the model without some layers, or of heads that
    attend. None: by the size of the weights that are read."""

    @property
    def rows(self) -> tuple[float, ...] | None:
        """`row` as a tuple; the last value holds for all further rows."""
        return self.row if self.row is None or isinstance(self.row, tuple) else (self.row,)


PARTS: dict[str, Kinds] = {**KINDS, "costs": {"": Costs}}
"""All options with settings of their own; costs have a single kind, without a name."""

# --- values from text, YAML and JSON, by type hint


def members(hint: Any) -> tuple[Any, ...]:
    """The types in a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def parse(name: str, value: Any, hint: Any) -> Any:
    """`value` converted to the type of `hint`; text is parsed. Raises InvalidOption."""
    for member in members(hint):
        converted = _parse(value, member)
        if fits(converted, member):
            return converted
    raise InvalidOption(f"{name} is {shown(value)}, expected {hint_name(hint)}")


def _parse(value: Any, member: Any) -> Any:
    """Convert to one type: text with commas or slashes to a tuple, a single item to a list."""
    kind = get_origin(member) or member
    if kind in (tuple, list):
        is_text = isinstance(value, str) and kind is tuple
        items = re.split("[,/]", value) if is_text else value
        items = items if isinstance(items, list | tuple) else [items]
        return kind(_parse(item, get_args(member)[0]) for item in items)
    if kind in (bool, types.NoneType):
        return {"true": True, "false": False, "none": None}.get(str(value).lower(), value)
    if kind in (int, float) and isinstance(value, str | int) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return kind(value)
    return value


# --- options as text, `ngram:size=4+exit:layers=10/20`, and back

P = TypeVar("P", bound=Part)


def parse_parts(group: str, value: Any, kinds: Kinds, current: Mapping[str, Part]) -> list[Part]:
    """The parts of a `group` (drafter, controller, ..) that `value` asks for, in its order.

    Objects are taken unchanged. Text and mappings change the settings that they name, starting from
    `current`. Raises InvalidOption.
    """
    parts = []
    for kind, settings in _entries(group, value):
        if isinstance(settings, Part) and kinds.get(kind) is not type(settings):
            raise InvalidOption(f"{group} is {shown(settings)}, expected one of {', '.join(kinds)}")
        check_keys([kind], kinds, group)
        parts.append(with_settings(current[kind], settings))
    return parts


def with_settings(part: P, settings: Any) -> P:
    """A copy with `settings` replaced: text, names and values, an object of its kind, or None.

    Raises InvalidOption for unknown names and invalid values.
    """
    if isinstance(settings, type(part)):
        return settings
    hints, entries = annotations_of(type(part)), _settings_by_name(part.kind, settings)
    if entries and not vars(part):
        raise InvalidOption(f"{part.kind} has no settings, found {shown(settings)}. Leave them out")
    check_keys(entries, vars(part), f"setting of {part.kind}:")
    values = {key: parse(f"{part.kind}:{key}", value, hints[key]) for key, value in entries.items()}
    return replace(part, **values)


def merge_values(group: str, defaults: Any, changes: Any) -> dict[str, Any]:
    """Merge two values of one option, each text or a mapping, to a mapping.

    Kinds are those of `changes`; for a kind in both, `changes` overrides single settings. Raises
    InvalidOption.
    """
    if group == "costs":
        return _settings_by_name(group, defaults) | _settings_by_name(group, changes)
    base = {kind: _settings_by_name(kind, settings) for kind, settings in _entries(group, defaults)}
    return {
        kind: base.get(kind, {}) | _settings_by_name(kind, settings)
        for kind, settings in _entries(group, changes)
    }


def as_text(part: Part, *, full: bool = False) -> str:
    """The shortest text for `part`: its kind, and the settings that differ from the defaults.

    `full`: all settings, for use where other defaults may apply.
    """
    settings = settings_text(part, full=full)
    return f"{part.kind}:{settings}" if settings else part.kind


def settings_text(part: Part, *, full: bool = False) -> str:
    """`KEY=VALUE,..` for settings that differ from the defaults; may be empty."""
    values = vars(part) if full else _changed_settings(part)
    return ",".join(f"{name}={as_word(value)}" for name, value in values.items())


def _changed_settings(part: Part) -> dict[str, Any]:
    defaults = vars(type(part)())
    return {name: value for name, value in vars(part).items() if value != defaults[name]}


def as_word(value: Any) -> str:
    """A value as text, without blanks."""
    if value is None:
        return "none"
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _entries(group: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Kinds with their settings, which are text, a mapping, None, or a whole object."""
    if isinstance(value, Part):
        yield value.kind, value
    elif isinstance(value, str):
        for piece in re.split(r"\+(?=\s*[A-Za-z])", value):  # not at the + of 1e+3
            kind, _, settings = piece.partition(":")
            yield kind.strip().replace("_", "-"), settings if ":" in piece else None
    elif isinstance(value, Mapping) and value:
        for kind, settings in value.items():
            yield str(kind).strip().replace("_", "-"), settings
    elif isinstance(value, Sequence) and value:
        for entry in value:
            yield from _entries(group, entry)
    else:
        raise InvalidOption(f"{group} is {shown(value)}, expected text like KIND:KEY=VALUE,..")


def _settings_by_name(kind: str, settings: Any) -> dict[str, Any]:
    """Settings by name, from `KEY=VALUE,..`, a mapping, or nothing.

    Raises InvalidOption for anything else, and for a key given twice.
    """
    values: Any = {} if settings is None or isinstance(settings, str) else settings
    if isinstance(settings, str):
        for entry in settings.split(","):
            name, equals, value = (piece.strip() for piece in entry.partition("="))
            if not equals or not name:
                raise InvalidOption(f"{kind} is followed by {shown(entry)}, expected KEY=VALUE,..")
            if name in values:
                raise InvalidOption(f"{kind}:{name} is given twice. Leave one out")
            values[name] = value
    if not isinstance(values, Mapping):
        raise InvalidOption(f"{kind} is {shown(settings)}, expected KEY=VALUE,.. or a mapping")
    return {str(name).strip().replace("-", "_"): value for name, value in values.items()}
