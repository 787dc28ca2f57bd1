"""Every option of the runtime: flags, YAML keys and keywords are derived from these classes.

Precedence of values: flag > YAML file > tuned for this machine > the heads' own defaults > here. It
applies to each setting: text changes only the settings that it names, so that `--drafter
exit:threshold=0.9` keeps the heads' exit layers. An object is taken whole.
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

_WIDEST_PROBED = 16  # rows: probing more would take too long


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """How tokens are drafted and verified. Only `acceptance` changes the output.

    The settings of all drafters are kept, whichever are in use.
    """

    speculate: bool = True
    """Use drafts. Without them the same runtime decodes token by token."""
    drafter: str = "exit"
    """One of exit (heads), ngram (prompt lookup), rest, skip, successors, lookahead, draft-model,
    ngram+OTHER, none.

    successors: tokens that verification found likely after the same tokens before; lookahead: the
    model's continuations of guessed tokens; rest: continuations of the same tokens in a datastore;
    skip: the model without some of its layers. With ngram+OTHER the one that promises more drafts;
    heads on the embedding, successors and rest build trees around prompt lookup.
    """
    controller: parts.Controller = field(default_factory=parts.Fixed)
    """How the draft length of a round is set: fixed, heuristic, threshold, gammatune,
    gammatune-plus, cm-asd."""
    acceptance: parts.Acceptance = field(default_factory=parts.Lossless)
    """Which drafts are accepted: lossless, or one of the lossy rules lenient, cm-asd, easd."""
    costs: parts.Costs = field(default_factory=parts.Costs)
    """Costs of drafts on this machine, as shares of one pass without drafts: row, head, token."""
    exit: parts.Exit = field(default_factory=parts.Exit)
    ngram: parts.Ngram = field(default_factory=parts.Ngram)
    draft_model: parts.DraftModel = field(default_factory=parts.DraftModel)
    successors: parts.Successors = field(default_factory=parts.Successors)
    rest: parts.Rest = field(default_factory=parts.Rest)
    lookahead: parts.Lookahead = field(default_factory=parts.Lookahead)
    skip: parts.Skip = field(default_factory=parts.Skip)

    easd: parts.Easd = field(default_factory=parts.Easd)
    """Defaults for `easd` given as text: heads may bring its entropy threshold."""
    never_slower: bool = True
    """Pause heads, a draft model or skip while they cost more than they gain; try again later.

    Prompt lookup costs nothing to draft and has its own rule.
    """
    require_lossless: bool = False
    """Refuse lossy settings."""
    pinned: bool | None = None
    """Drafts change no bit of a logit. True: guaranteed, by passes of one shape where kernels need
    it; an error if bits still change. None: only where kernels do so by themselves, at no cost."""
    pinned_rows: Annotated[int, parts.between(1, 128)] = 8
    """With --pinned, rows of every pass: one for the newest token, one for each draft token."""

    def __post_init__(self) -> None:
        parts.check_fields(self)
        check_keys([self.drafter], parts.TOGETHER, "drafter")
        if self.require_lossless and self.loss is not None:
            raise InvalidOption(f"{self.loss} is lossy, but require_lossless is set. Leave one out")
        widths = {f"{kind}:max_tokens": width for kind, width in self.widths.items()}
        if isinstance(self.controller, parts.Bounded):
            widths[f"{self.controller.kind}:shortest"] = self.controller.shortest
        for name, width in widths.items():
            if self.pinned and self.pinned_rows <= width:
                raise InvalidOption(
                    f"pinned_rows is {self.pinned_rows}, but {name} {width} needs at least "
                    f"{width + 1} rows. Raise the one or lower the other"
                )

    @property
    def grows_trees(self) -> bool:
        """Whether drafters may guess several tokens for a position.

        Lossy rules, and controllers that use each token's confidence, support only one.
        """
        several = self.uses("lookahead") or (self.tree.guesses > 1 and self.uses(self.tree.kind))
        return several and self.loss is None and not self.controller.reads_confidence

    @property
    def tree(self) -> parts.Exit | parts.Successors | parts.Rest:
        """The settings for the size of trees."""
        if self.uses("rest"):
            return self.rest
        return self.successors if self.uses("successors") else self.exit

    @property
    def most_drafts(self) -> int:
        """Maximum tokens of a tree."""
        rows = (self.lookahead if self.uses("lookahead") else self.tree).max_rows
        return min(rows, self.pinned_rows if self.pinned else rows) - 1

    @property
    def widths(self) -> dict[str, int]:
        """W_max of each drafter in use; lookahead has none, since it fits the room there is."""
        return {part.kind: part.max_tokens for part in self._parts if part.kind != "lookahead"}

    @property
    def loss(self) -> str | None:
        """The option that makes drafts change the output; None: lossless."""
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
        """The controller's maximum length for a W_max of `width`, limited by pinned passes."""
        if not isinstance(self.controller, parts.Bounded):
            return width
        longest = self.controller.longest
        return min(longest, self.pinned_rows - 1) if self.pinned else longest

    @property
    def widest_pass(self) -> int:
        """Rows of the widest verification with these options, at most 16."""
        widths = [max(width, self.longest_draft(width)) for width in self.widths.values()]
        if self.grows_trees or self.uses("lookahead"):
            widths.append(self.most_drafts)
        return 1 + min(max(widths, default=0), _WIDEST_PROBED - 1)

    def updated(self, values: Mapping[str, Any]) -> SpeculationOptions:
        """A copy with `values` replaced: objects, text, or nested mappings for settings.

        Naming a drafter turns drafts on, even if tuning found them no faster. Raises
        InvalidOption.
        """
        if not isinstance(values, Mapping):
            raise InvalidOption(f"options are {shown(values)}, expected names and values")
        check_keys(values, vars(self), "option")
        changes = ({"speculate": True} if "drafter" in values else {}) | dict(values)
        for name in ("costs", *_SETTINGS):
            if name in values:
                changes[name] = parts.with_settings(getattr(self, name), values[name])
        for name, kinds in parts.KINDS.items():
            if name not in values:
                continue
            options = vars(self) | changes
            present = {kind: options.get(_field(kind)) or cls() for kind, cls in kinds.items()}
            if name != "drafter":
                present[getattr(self, name).kind] = getattr(self, name)
            choices = parts.parse_parts(name, values[name], kinds, present)
            if name == "drafter":
                changes[name] = "+".join(part.kind for part in choices)
                changes |= {_field(part.kind): part for part in choices if part.kind != "none"}
            elif len(choices) == 1:
                changes[name] = choices[0]
            else:
                reason = f"{name} is {shown(values[name])}, expected one kind"
                raise InvalidOption(f"{reason}. Leave the others out")
        return replace(self, **changes)

    def described(self) -> dict[str, Any]:
        """The keywords for these options, as text if they have settings, ready for JSON."""
        keywords = {name: getattr(self, name) for name in OPTION_NAMES} | {
            "drafter": "+".join(map(parts.as_text, self._parts)) or "none",
            "controller": parts.as_text(self.controller),
            # in full, since the heads' defaults apply to easd as text
            "acceptance": parts.as_text(self.acceptance, full=self.acceptance.kind == "easd"),
            "costs": parts.settings_text(self.costs),
        }
        return {name: value for name, value in keywords.items() if value != ""}

    def differing(self) -> dict[str, Any]:
        """The fewest values with which `updated` makes these of the built-in options, for JSON."""
        idle = [name for name in _SETTINGS if not self.uses(name.replace("_", "-"))]
        texts = {name: parts.settings_text(getattr(self, name)) for name in idle} | self.described()
        defaults = dict.fromkeys(idle, "") | SpeculationOptions().described()
        return {name: value for name, value in texts.items() if value != defaults.get(name)}

    @property
    def _parts(self) -> list[Any]:
        return [getattr(self, _field(kind)) for kind in self.drafter.split("+") if kind != "none"]


def _field(kind: str) -> str:
    return kind.replace("-", "_")


_SETTINGS = (*(_field(kind) for kind in parts.DRAFTERS if kind != "none"), "easd")
"""Fields with the settings of one kind, which are kept even if it is not in use."""

OPTION_NAMES = tuple(one.name for one in fields(SpeculationOptions) if one.name not in _SETTINGS)
"""Keywords of `generate`, flags and keys of a YAML file. They also set the other fields."""


def check(values: Mapping[str, Any], *, other_names: Sequence[str] = ()) -> None:
    """Raise InvalidOption for unknown keywords and invalid values.

    For use before anything is loaded: checks that depend on the heads' defaults are left out. Names
    in `other_names` are also suggested for unknown ones.
    """
    check_keys(values, [*OPTION_NAMES, *other_names], "option")
    override = {"pinned": None} if values.get("pinned") is True else {}
    SpeculationOptions().updated({**values, **override})


def check_request(values: Mapping[str, Any]) -> None:
    """Raise InvalidOption for drafts that cost more than a client of a server may request."""
    options = SpeculationOptions().updated(values)
    for name in (*_SETTINGS, "controller"):
        parts.check_part_request(getattr(options, name))


DEFAULT_MAX_NEW_TOKENS = 128
"""Tokens to generate if neither the caller nor the model specifies a number."""

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
    # input and output
    attention_mask: Tensor
    num_return_sequences: parts.Count
    generation_config: GenerationConfig
    streamer: BaseStreamer
    # ours: for this call only
    seed: parts.Seed
    """Determines the draws of this call; without it, one is drawn from torch's generator."""
    json_schema: Mapping[str, Any] | bool
    """The answer is JSON that follows this schema; True: any object."""
    grammar: str
    """The answer follows this grammar, in llguidance's Lark syntax."""
    presence_penalty: float
    """Subtracted from the score of each token already in the answer, as OpenAI defines it."""
    frequency_penalty: float
    """Subtracted likewise, once for each occurrence."""
    logprobs: Annotated[int, _NOT_BELOW_0]
    """Record each token's log-probability, and those of this many likeliest alternatives."""
    raw: bool
    """Tokenise a text prompt directly, without the chat template."""
    chat_template_kwargs: Mapping[str, Any]
    """Variables of the chat template, such as {"enable_thinking": False}."""
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

# Why llguidance: it compiles nothing per schema (a mask takes microseconds from the first on),
# returns forced text as tokens, rolls back any number of them, refuses JSON schema keywords that it
# does not support, and depends on no tensor library.

GRAMMAR_KEYWORDS = ("json_schema", "grammar")
"""Keywords of `generate` that ask for a structure."""

WRITING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it: with flexible whitespace, a small model can write spaces for
ever; and text that has only one form is forced, so it can be drafted."""


class Grammar(NamedTuple):
    """A grammar for llguidance, not yet validated."""

    keyword: str  # the keyword that asked for it
    text: str


def grammar_of(options: Mapping[str, Any]) -> Grammar | None:
    """The grammar that keywords of `generate` ask for. Raises InvalidOption."""
    schema, text = (options.get(name) for name in GRAMMAR_KEYWORDS)
    if schema is not None and text is not None:
        raise InvalidOption("json_schema and grammar are both given. Leave one of them out")
    if schema is not None:
        return grammar_of_schema(schema)
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidOption(f"grammar is {shown(text)}, expected text")
    return Grammar("grammar", matcher_class().grammar_from_lark(text))


def grammar_of_schema(schema: Mapping[str, Any] | bool) -> Grammar:
    """The grammar of JSON that follows a schema; True: any object. Raises InvalidOption."""
    if schema is True:
        schema = {"type": "object"}
    if not isinstance(schema, Mapping):
        expected = "a schema, or True for any object"
        raise InvalidOption(f"json_schema is {shown(schema)}, expected {expected}")
    try:
        text = matcher_class().grammar_from_json_schema(dict(schema), overrides=WRITING)
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidOption(f"json_schema cannot be read: {first_line(error)}") from error
    return Grammar("json_schema", text)


def check_grammar(grammar: Grammar) -> None:
    """Raise InvalidOption for grammars that llguidance does not support; may take seconds."""
    failed, messages = matcher_class().validate_grammar_with_warnings(grammar.text)
    if failed:
        reason = messages[0].rstrip(".")
        raise InvalidOption(f"{grammar.keyword} is not supported: {reason}. Change or leave it out")


def matcher_class() -> type[LLMatcher]:
    """The matcher of llguidance. Raises InvalidOption without the package."""
    check_packages("structured output", "llguidance", extra="serve")
    from llguidance import LLMatcher

    return LLMatcher
