"""What keywords of `generate` can ask for: values in range, and a JSON schema or a grammar.

Imports no torch; llguidance when it is needed. Why that: it compiles nothing per schema (a mask
takes microseconds from the first on), gives forced text as tokens, goes back by any number of them,
refuses keywords of JSON schema that it does not honour, and brings no tensor library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from selfspec.errors import InvalidOption, first_line
from selfspec.typed import shown

if TYPE_CHECKING:
    from llguidance import LLMatcher

KEYWORDS = ("json_schema", "grammar")
"""Keywords of `generate` that ask for a structure."""

_WRITING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it: a small model can go on with spaces for ever, and what is written
in one way only is forced."""

_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("max_time", "min_length", "min_new_tokens"), (0, math.inf)),
    **dict.fromkeys(("no_repeat_ngram_size", "temperature", "top_k", "logprobs"), (0, math.inf)),
    **dict.fromkeys(("max_length", "max_new_tokens", "num_return_sequences"), (1, math.inf)),
    **dict.fromkeys(("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), (0, 1)),
    "seed": (-(2**63), 2**64 - 1),
}


def check_ranges(given: Mapping[str, Any]) -> None:
    """Raise InvalidOption for values that transformers or torch would refuse late or not at all."""
    for name, value in given.items():
        if name in _RANGES:
            least, most = _RANGES[name]
            if not least <= value <= most:
                bound = f"at least {least}" if value < least else f"at most {most}"
                raise InvalidOption(f"{name} is {shown(value)}, expected {bound}")
        if name in ("top_p", "repetition_penalty") and value <= 0:
            raise InvalidOption(f"{name} is {shown(value)}, expected more than 0")


class Grammar(NamedTuple):
    """A grammar as llguidance reads it; not yet known to be right."""

    keyword: str  # that asked for it
    text: str


def wanted(options: Mapping[str, Any]) -> Grammar | None:
    """The grammar that keywords of `generate` ask for. Raises InvalidOption."""
    given = {name: options[name] for name in KEYWORDS if options.get(name) is not None}
    if not given:
        return None
    if len(given) > 1:
        raise InvalidOption("json_schema and grammar at once. Leave one of them out")
    if (schema := given.get("json_schema")) is not None:
        return of_schema(schema)
    if not isinstance(text := given["grammar"], str):
        raise InvalidOption(f"grammar is {shown(text)}, expected text")
    return Grammar("grammar", matcher_class().grammar_from_lark(text))


def of_schema(schema: Mapping[str, Any] | bool) -> Grammar:
    """JSON that follows a schema; True: any object. Raises InvalidOption."""
    if schema is True:
        schema = {"type": "object"}
    if not isinstance(schema, Mapping):
        raise InvalidOption(
            f"json_schema is {shown(schema)}, expected a schema, or True for any object"
        )
    try:
        found = matcher_class().grammar_from_json_schema(dict(schema), overrides=_WRITING)
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidOption(f"json_schema cannot be read: {first_line(error)}") from error
    return Grammar("json_schema", found)


def check(grammar: Grammar) -> None:
    """Raise InvalidOption for what llguidance does not honour. Large ones take seconds."""
    wrong, said = matcher_class().validate_grammar_with_warnings(grammar.text)
    if wrong:
        raise InvalidOption(
            f"{grammar.keyword} is not supported: {said[0].rstrip('.')}. Change it, or leave it out"
        )


def matcher_class() -> type[LLMatcher]:
    """The matcher of llguidance. Raises InvalidOption without the package."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise InvalidOption(
            f"structured output needs one more package ({error.name}): "
            "pip install 'selfspec[serve]'"
        ) from error
    return LLMatcher
