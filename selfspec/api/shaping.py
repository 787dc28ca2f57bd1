"""Keywords of ours that become processors: grammars over one model's tokens, penalties."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from selfspec.api.structure import Grammar, check, matcher_class
from selfspec.decoding.grammar import GrammarMask
from selfspec.decoding.penalties import OccurrencePenalty
from selfspec.errors import InvalidOption

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from selfspec.api.request import Request

_KEPT = 32
"""Grammars that were read, and are kept for the next answers."""

_DRAWING = frozenset({"temperature", "top_k", "top_p", "min_p"})
"""Keywords that mean nothing to greedy decoding."""

_PENALTIES = ("presence_penalty", "frequency_penalty")


class Grammars:
    """Grammars over the tokens of one model. For any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        """`vocab_size`: logits of the model, which may be more than its tokens."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        # reading the tokenizer takes half a second, and a large grammar several
        self._tokens = lru_cache(_KEPT)(self._read_tokens)
        self._matcher = lru_cache(_KEPT)(self._read)

    def read(self, grammar: Grammar, ends: Iterable[int]) -> LLMatcher:
        """A matcher at its beginning, which answers share: copy it.

        Raises InvalidOption for a grammar that is wrong, without a tokenizer of the tokenizers
        library, and without an end token.
        """
        return self._matcher(grammar, frozenset(token for token in ends if token >= 0))

    def mask(self, grammar: Grammar, request: Request) -> GrammarMask:
        """For the texts of a request. Raises as `read`."""
        matcher = self.read(grammar, request.end_tokens).deep_copy()
        ends = [token for token in request.end_tokens if token >= 0]
        return GrammarMask(matcher, request.input_ids.shape[1], ends)

    def _read(self, grammar: Grammar, ends: frozenset[int]) -> LLMatcher:
        check(grammar)
        if not ends:
            raise InvalidOption("a grammar needs an end token. Leave eos_token_id out")
        matcher = matcher_class()(self._tokens(ends), grammar.text)
        if matcher.is_error():
            said = " ".join(matcher.get_error().split())
            raise InvalidOption(f"{grammar.keyword} does not fit this model's tokens: {said}")
        return matcher

    def _read_tokens(self, ends: frozenset[int]) -> LLTokenizer:
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            kind = type(self._tokenizer).__name__
            raise InvalidOption(
                f"a grammar needs a tokenizer of the tokenizers library, this is {kind}. Leave "
                "json_schema and grammar out"
            )
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(ends))


def with_choice(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` that say whether tokens are drawn, where one that only drawing knows is given.

    Temperature 0 is greedy, as in OpenAI's protocol; transformers refuses it.
    """
    rest = dict(options)
    if rest.get("temperature") == 0:
        given = {name: value for name, value in rest.items() if name not in _DRAWING}
        return given | {"do_sample": False}
    unsaid = rest.get("do_sample") is None and rest.get("generation_config") is None
    if unsaid and any(rest.get(name) is not None for name in _DRAWING):
        rest["do_sample"] = True
    return rest


def penalised(options: Mapping[str, Any], start: int) -> dict[str, Any]:
    """`options` with penalties as a processor; `start`: ids in front of the answer."""
    rest = dict(options)
    presence, frequency = (rest.pop(name, None) or 0.0 for name in _PENALTIES)
    if presence or frequency:
        processors = list(rest.get("logits_processor") or [])
        rest["logits_processor"] = [*processors, OccurrencePenalty(presence, frequency, start)]
    return rest
