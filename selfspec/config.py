"""Every option of the runtime: flags, YAML keys and keywords are derived from these classes.

A value given in several places is taken from: flag > YAML file > what was tuned for this machine >
the heads' own defaults > here. That holds for each setting: text changes what it names, so that
`--drafter exit:threshold=0.9` leaves the heads' exit layers as they are. An object is taken whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict

from selfspec import options as parts
from selfspec.errors import InvalidOption, check_keys, check_packages, first_line, shown

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from torch import Tensor
    from transformers import GenerationConfig
    from transformers.generation.streamers import BaseStreamer

_WIDEST_PROBED = 16  # rows: a probe of more would take longer than it is worth


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """How tokens are drafted and checked. Only `acceptance` changes the output.

    Settings of all drafters are kept side by side, whichever are in use.
    """

    speculate: bool = True
    """Use drafts. Without them the same runtime decodes token by token."""
    drafter: str = "exit"
    """One of exit (heads), ngram (prompt lookup), rest, skip, successors, lookahead, draft-model,
    ngram+OTHER, none.

    Successors are what verification found likely behind the same tokens before, lookahead what the
    model says behind guessed tokens, rest what follows the same ones in a datastore; skip is the
    model without some of its layers. Of two the one that promises more drafts; heads on the
    embedding, successors and rest draft around prompt lookup.
    """
    controller: parts.Controller = field(default_factory=parts.Fixed)
    """What sets the draft length of the next round: fixed, heuristic, threshold, gammatune,
    gammatune-plus, cm-asd."""
    acceptance: parts.Acceptance = field(default_factory=parts.Lossless)
    """Which drafts stay: lossless, or one of the lossy rules lenient, cm-asd, easd."""
    costs: parts.Costs = field(default_factory=parts.Costs)
    """What drafts cost here, as shares of one pass without drafts: row, head, token."""
    exit: parts.Exit = field(default_factory=parts.Exit)
    ngram: parts.Ngram = field(default_factory=parts.Ngram)
    draft_model: parts.DraftModel = field(default_factory=parts.DraftModel)
    successors: parts.Successors = field(default_factory=parts.Successors)
    rest: parts.Rest = field(default_factory=parts.Rest)
    lookahead: parts.Lookahead = field(default_factory=parts.Lookahead)
    skip: parts.Skip = field(default_factory=parts.Skip)

    easd: parts.Easd = field(default_factory=parts.Easd)
    """Where `easd` as text starts: heads may know its entropy threshold."""
    never_slower: bool = True
    """Pause heads, a draft model or skip while they cost more than they give; try again later.

    Prompt lookup costs nothing to draft and has its own rule.
    """
    require_lossless: bool = False
    """Refuse lossy settings."""
    pinned: bool | None = None
    """No draft changes one bit of a logit. True: by passes of one shape where kernels need it, or
    an error where bits still move. None: as far as kernels have it, which costs nothing."""
    pinned_rows: Annotated[int, parts.between(1, 128)] = 8
    """With --pinned, rows of every pass: one for the newest token, one for each draft token."""

    def __post_init__(self) -> None:
        parts.check_fields(self)
        check_keys([self.drafter], parts.TOGETHER, "drafter")
        if self.require_lossless and self.loss is not None:
            raise InvalidOption(f"{self.loss} is lossy, but require_lossless is set. Leave one out")
        needed = {f"{kind}:max_tokens": width for kind, width in self.widths.items()}
        if isinstance(self.controller, parts.Bounded):
            needed[f"{self.controller.kind}:shortest"] = self.controller.shortest
        for name, width in needed.items():
            if self.pinned and self.pinned_rows <= width:
                raise InvalidOption(
                    f"pinned_rows is {self.pinned_rows}, but {name} {width} needs at least "
                    f"{width + 1} rows. Raise the one or lower the other"
                )

    @property
    def grows_trees(self) -> bool:
        """Whether heads may guess several tokens for a place.

        Lossy rules, and controllers that look at each token's confidence, know of one.
        """
        several = self.uses("lookahead") or (self.tree.guesses > 1 and self.uses(self.tree.kind))
        return several and self.loss is None and not self.controller.reads_confidence

    @property
    def tree(self) -> parts.Exit | parts.Successors | parts.Rest:
        """What sets the size of trees."""
        if self.uses("rest"):
            return self.rest
        return self.successors if self.uses("successors") else self.exit

    @property
    def most_drafts(self) -> int:
        """Tokens of a tree at most."""
        most = (self.lookahead if self.uses("lookahead") else self.tree).max_rows
        return min(most, self.pinned_rows if self.pinned else most) - 1

    @property
    def widths(self) -> dict[str, int]:
        """W_max of each drafter in use; lookahead fits what there is room for."""
        return {one.kind: one.max_tokens for one in self._used if one.kind != "lookahead"}

    @property
    def loss(self) -> str | None:
        """Which option changes the output where drafts are made; None: none does."""
        if isinstance(self.acceptance, parts.Lossless):
            return None
        if isinstance(self.acceptance, parts.Lenient):
            lenience = self.acceptance.lenience
            return f"lenience {lenience}" if lenience < 1.0 else None
        return f"acceptance {self.acceptance.kind}"

    def uses(self, source: str) -> bool:
        """Whether `source` (exit, ngram, ..) is part of the drafter."""
        return source in self.drafter.split("+")

    def longest_draft(self, width: int) -> int:
        """What the controller never exceeds where W_max is `width`; pinned passes hold no more."""
        if not isinstance(self.controller, parts.Bounded):
            return width
        longest = self.controller.longest
        return min(longest, self.pinned_rows - 1) if self.pinned else longest

    @property
    def widest_pass(self) -> int:
        """Rows of the widest verification that these drafts lead to, 16 if that is more."""
        widths = [max(width, self.longest_draft(width)) for width in self.widths.values()]
        if self.grows_trees or self.uses("lookahead"):
            widths.append(self.most_drafts)
        return 1 + min(max(widths, default=0), _WIDEST_PROBED - 1)

    def updated(self, values: Mapping[str, Any]) -> SpeculationOptions:
        """A copy with `values` replaced: objects, text, or nested mappings for those that have one.

        Who names a drafter wants drafts, also where tuning found them no faster. Raises
        InvalidOption.
        """
        if not isinstance(values, Mapping):
            raise InvalidOption(f"options are {shown(values)}, expected names and values")
        check_keys(values, vars(self), "option")
        found = ({"speculate": True} if "drafter" in values else {}) | dict(values)
        for name in ("costs", *_SETTINGS):
            if name in values:
                found[name] = parts.changed(getattr(self, name), values[name])
        for name, kinds in parts.KINDS.items():
            if name not in values:
                continue
            kept = vars(self) | found
            present = {kind: kept.get(_field(kind)) or made() for kind, made in kinds.items()}
            if name != "drafter":
                present[getattr(self, name).kind] = getattr(self, name)
            chosen = parts.parsed(name, values[name], kinds, present)
            if name == "drafter":
                found[name] = "+".join(part.kind for part in chosen)
                found |= {_field(part.kind): part for part in chosen if part.kind != "none"}
            elif len(chosen) == 1:
                found[name] = chosen[0]
            else:
                wrong = f"{name} is {shown(values[name])}, expected one kind"
                raise InvalidOption(f"{wrong}. Leave the others out")
        return replace(self, **found)

    def described(self) -> dict[str, Any]:
        """Keywords that give these options, as text where they have settings, ready for JSON."""
        found = {name: getattr(self, name) for name in OPTION_NAMES} | {
            "drafter": "+".join(map(parts.as_text, self._used)) or "none",
            "controller": parts.as_text(self.controller),
            # in full: easd as text starts where the heads say
            "acceptance": parts.as_text(self.acceptance, full=self.acceptance.kind == "easd"),
            "costs": parts.settings_text(self.costs),
        }
        return {name: value for name, value in found.items() if value != ""}

    def differing(self) -> dict[str, Any]:
        """The least that `updated` needs to make these options of the built-in ones, for JSON."""
        idle = [name for name in _SETTINGS if not self.uses(name.replace("_", "-"))]
        found = {name: parts.settings_text(getattr(self, name)) for name in idle} | self.described()
        usual = dict.fromkeys(idle, "") | SpeculationOptions().described()
        return {name: value for name, value in found.items() if value != usual.get(name)}

    @property
    def _used(self) -> list[Any]:
        return [getattr(self, _field(one)) for one in self.drafter.split("+") if one != "none"]


def _field(kind: str) -> str:
    return kind.replace("-", "_")


_SETTINGS = (*(_field(kind) for kind in parts.DRAFTERS if kind != "none"), "easd")
"""Fields that keep settings of one kind, whichever is in use."""

OPTION_NAMES = tuple(one.name for one in fields(SpeculationOptions) if one.name not in _SETTINGS)
"""Keywords of `generate`, flags and keys of a YAML file. The other fields are reached by these."""


def check(values: Mapping[str, Any], *, beside: Sequence[str] = ()) -> None:
    """Raise InvalidOption for keywords that do not exist, or values that they cannot have.

    For use before anything is loaded: what depends on the heads' defaults is not looked at. Names
    that stand `beside` these may have been meant.
    """
    check_keys(values, [*OPTION_NAMES, *beside], "option")
    rows_later = {"pinned": None} if values.get("pinned") is True else {}
    SpeculationOptions().updated({**values, **rows_later})


def check_request(values: Mapping[str, Any]) -> None:
    """Raise InvalidOption for drafts that cost others more than a server's client may ask for."""
    asked = SpeculationOptions().updated(values)
    for name in (*_SETTINGS, "controller"):
        parts.check_asked(getattr(asked, name))


DEFAULT_MAX_NEW_TOKENS = 128
"""Tokens to generate where neither the caller nor the model says."""

_NOT_BELOW_0 = parts.at_least(0)


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate` and `stream`: Hugging Face's, with its meaning, and ours."""

    # how long, and where to stop
    max_new_tokens: parts.Count
    max_length: parts.Count
    min_new_tokens: Annotated[int, _NOT_BELOW_0]
    min_length: Annotated[int, _NOT_BELOW_0]
    max_time: Annotated[float, _NOT_BELOW_0]
    eos_token_id: int | list[int]
    pad_token_id: int
    stop_strings: str | list[str]
    stopping_criteria: list[Any]
    # how a token is chosen
    do_sample: bool
    temperature: Annotated[float, _NOT_BELOW_0]
    top_k: Annotated[int, _NOT_BELOW_0]
    top_p: parts.Share
    min_p: parts.Probability
    typical_p: parts.Probability
    epsilon_cutoff: parts.Probability
    eta_cutoff: parts.Probability
    repetition_penalty: Annotated[float, parts.ABOVE_ZERO]
    no_repeat_ngram_size: Annotated[int, _NOT_BELOW_0]
    bad_words_ids: list[list[int]]
    sequence_bias: list[tuple[list[int], float]] | dict[tuple[int, ...], float]
    suppress_tokens: list[int]
    begin_suppress_tokens: list[int]
    forced_bos_token_id: int
    forced_eos_token_id: int | list[int]
    exponential_decay_length_penalty: tuple[int, float]
    renormalize_logits: bool
    remove_invalid_values: bool
    guidance_scale: float
    watermarking_config: Any
    logits_processor: list[Any]
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]]
    # what comes in and out
    attention_mask: Tensor
    num_return_sequences: parts.Count
    generation_config: GenerationConfig
    streamer: BaseStreamer
    # ours: for this call only
    seed: parts.Seed
    """Seeds a generator of this call's own; without it draws come from torch's global one."""
    json_schema: Mapping[str, Any] | bool
    """The answer is JSON that follows this schema; True: any object."""
    grammar: str
    """The answer follows this grammar: Lark, as llguidance reads it."""
    presence_penalty: float
    """Taken off the score of tokens that the answer has already, as OpenAI defines it."""
    frequency_penalty: float
    """The same, for each time that the answer has them."""
    logprobs: Annotated[int, _NOT_BELOW_0]
    """How likely each token was is noted, and so many of the likeliest in its place."""
    raw: bool
    """A prompt in words is tokenised as it is, without the chat template."""
    speculate: bool
    drafter: str | Mapping[str, Any] | parts.Exit | parts.Ngram | parts.DraftModel | Sequence[Any]
    controller: str | Mapping[str, Any] | parts.Controller
    acceptance: str | Mapping[str, Any] | parts.Acceptance
    costs: str | Mapping[str, Any] | parts.Costs
    never_slower: bool
    require_lossless: bool
    pinned: bool | None
    pinned_rows: int


# --- the structure of an answer: a JSON schema or a grammar

# llguidance reads them. It compiles nothing per schema (a mask takes microseconds from the first
# on), gives forced text as tokens, goes back by any number of them, refuses keywords of JSON schema
# that it does not honour, and brings no tensor library.

GRAMMAR_KEYWORDS = ("json_schema", "grammar")
"""Keywords of `generate` that ask for a structure."""

WRITING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it: a small model can go on with spaces for ever, and what is written
in one way only is forced."""


class Grammar(NamedTuple):
    """A grammar as llguidance reads it; not yet known to be right."""

    keyword: str  # that asked for it
    text: str


def wanted_grammar(options: Mapping[str, Any]) -> Grammar | None:
    """The grammar that keywords of `generate` ask for. Raises InvalidOption."""
    schema, text = (options.get(name) for name in GRAMMAR_KEYWORDS)
    if schema is not None and text is not None:
        raise InvalidOption("json_schema and grammar at once. Leave one of them out")
    if schema is not None:
        return grammar_of_schema(schema)
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidOption(f"grammar is {shown(text)}, expected text")
    return Grammar("grammar", matcher_class().grammar_from_lark(text))


def grammar_of_schema(schema: Mapping[str, Any] | bool) -> Grammar:
    """JSON that follows a schema; True: any object. Raises InvalidOption."""
    if schema is True:
        schema = {"type": "object"}
    if not isinstance(schema, Mapping):
        expected = "a schema, or True for any object"
        raise InvalidOption(f"json_schema is {shown(schema)}, expected {expected}")
    try:
        found = matcher_class().grammar_from_json_schema(dict(schema), overrides=WRITING)
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidOption(f"json_schema cannot be read: {first_line(error)}") from error
    return Grammar("json_schema", found)


def check_grammar(grammar: Grammar) -> None:
    """Raise InvalidOption for what llguidance does not honour. Large ones take seconds."""
    wrong, said = matcher_class().validate_grammar_with_warnings(grammar.text)
    if wrong:
        why = said[0].rstrip(".")
        raise InvalidOption(f"{grammar.keyword} is not supported: {why}. Change or leave it out")


def matcher_class() -> type[LLMatcher]:
    """The matcher of llguidance. Raises InvalidOption without the package."""
    check_packages("structured output", "llguidance", extra="serve")
    from llguidance import LLMatcher

    return LLMatcher
