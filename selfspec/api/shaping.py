"""Keywords of ours that become processors: grammars over one model's tokens, penalties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from selfspec.decoding.grammar import GrammarMask
from selfspec.decoding.penalties import OccurrencePenalty
from selfspec.errors import InvalidOption
from selfspec.options.structure import matcher_class

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from selfspec.api.request import Request

_PENALTIES = ("presence_penalty", "frequency_penalty")


class Grammars:
    """Of one tokenizer, which is read once for each set of end tokens; that takes half a second."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        """`vocab_size`: logits of the model, which may be more than its tokens."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._read: dict[frozenset[int], LLTokenizer] = {}

    def mask(self, grammar: str, request: Request) -> GrammarMask:
        """For the texts of a request.

        Raises InvalidOption without a tokenizer of the tokenizers library, or an end token.
        """
        ends = frozenset(token for token in request.end_tokens if token >= 0)
        if not ends:
            raise InvalidOption("a grammar needs an end token. Leave eos_token_id out")
        matcher = matcher_class()(self._tokens(ends), grammar)
        if matcher.is_error():
            said = " ".join(matcher.get_error().split())
            raise InvalidOption(f"the grammar does not fit this model's tokens: {said}")
        return GrammarMask(matcher, request.input_ids.shape[1], ends)

    def _tokens(self, ends: frozenset[int]) -> LLTokenizer:
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            kind = type(self._tokenizer).__name__
            raise InvalidOption(
                f"a grammar needs a tokenizer of the tokenizers library, this is {kind}. Leave "
                "json_schema and grammar out"
            )
        if ends not in self._read:
            from llguidance.hf import from_tokenizer

            self._read[ends] = from_tokenizer(
                self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(ends)
            )
        return self._read[ends]


def penalised(options: Mapping[str, Any], start: int) -> dict[str, Any]:
    """`options` with penalties as a processor; `start`: ids in front of the answer."""
    rest = dict(options)
    presence, frequency = (rest.pop(name, None) or 0.0 for name in _PENALTIES)
    if presence or frequency:
        processors = list(rest.get("logits_processor") or [])
        rest["logits_processor"] = [*processors, OccurrencePenalty(presence, frequency, start)]
    return rest
