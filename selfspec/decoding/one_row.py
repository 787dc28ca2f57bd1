"""One row of a batch, decoded alone: processors and criteria that were made for all rows, for it.

Comes in: what transformers built for B rows. Goes out: the same for row r, so that a row's scores
are those of the batch. Only classes that are known to treat rows apart pass; others are refused
by name. Called by `scores` and `request`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation import logits_process, stopping_criteria

from selfspec.errors import InvalidOption

STATELESS = frozenset(
    {
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
        "WatermarkLogitsProcessor",  # its generator is seeded anew for each row and call
    }
)
"""transformers' processors whose calls do not affect each other."""

Cut = Callable[[Any, int, int], Any]
"""(processor or criterion, row, rows of the batch) -> the one for that row; the other stays."""


def processor_for(processor: Any, row: int, rows: int) -> Any:
    """A logits processor for row `row` of `rows`.

    Raises InvalidOption for one that is not known to treat each row by itself.
    """
    name = type(processor).__name__
    if type(processor).__module__ == logits_process.__name__:
        if name in _PROCESSORS:
            return _PROCESSORS[name](processor, row, rows)
        if name in STATELESS:
            return processor
    return _by_itself(processor, row)


def criterion_for(criterion: Any, row: int, rows: int, max_time: float | None) -> Any:
    """A stopping criterion for row `row` of `rows`, whose clock starts now if it has one.

    `max_time`: what was asked for as an option; a MaxTimeCriteria of the user's keeps its clock.
    Raises InvalidOption for one that is not known to treat each row by itself.
    """
    kind = type(criterion)
    if rows == 1:
        return criterion
    if kind is stopping_criteria.MaxTimeCriteria:
        if criterion.max_time != max_time:
            return criterion
        own = copy.copy(criterion)
        own.initial_timestamp = time.time()  # of this row's own start
        return own
    return criterion if kind is stopping_criteria.StopStringCriteria else _by_itself(criterion, row)


def called(thing: object) -> str:
    """The name of a processor or criterion: of its class, or of a function."""
    return str(getattr(thing, "__name__", None) or type(thing).__name__)


def _by_itself(thing: Any, row: int) -> Any:
    """What a class of the user's own gives for a row, if it can."""
    if callable(own := getattr(thing, "for_row", None)):
        return own(row)
    raise InvalidOption(
        f"{called(thing)} may treat rows of a batch in different ways, and each row is judged by "
        "itself here. Give it a method for_row(row), or decode one prompt at a time"
    )


def _place(processor: Any, held: int, row: int, rows: int, *, shared: bool = False) -> slice:
    """Which of `held` entries belongs to `row`; `shared` by several where prompts repeat."""
    if held != rows and not (shared and held and rows % held == 0):
        raise InvalidOption(
            f"{called(processor)} was made for {held} rows, the batch has {rows}. Make it anew"
        )
    at = row // (rows // held)
    return slice(at, at + 1)


def _prompt_lengths(processor: Any, row: int, rows: int) -> Any:
    """RepetitionPenalty: padding that is skipped, [B]."""
    lengths = processor.prompt_ignore_length
    if not isinstance(lengths, Tensor):
        return processor
    alone = copy.copy(processor)
    alone.prompt_ignore_length = lengths[_place(processor, len(lengths), row, rows)]
    return alone


def _prompt_ids(processor: Any, row: int, rows: int) -> Any:
    """EncoderRepetitionPenalty: ids of the prompts, [B, P]."""
    ids = processor.encoder_input_ids
    alone = copy.copy(processor)
    alone.encoder_input_ids = ids[_place(processor, len(ids), row, rows, shared=True)]
    return alone


def _prompt_ngrams(processor: Any, row: int, rows: int) -> Any:
    """EncoderNoRepeatNGram: a table of n-grams per prompt."""
    tables = processor.generated_ngrams
    alone = copy.copy(processor)
    alone.generated_ngrams = tables[_place(processor, len(tables), row, rows, shared=True)]
    alone.batch_size = 1
    return alone


def _batch_id(processor: Any, row: int, _rows: int) -> Any:
    """PrefixConstrained: the user's function is told which row it is asked about."""
    allowed = processor._prefix_allowed_tokens_fn
    alone = copy.copy(processor)
    alone._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
    return alone


def _fresh_state(processor: Any, _row: int, _rows: int) -> Any:
    """SynthIDTextWatermark: contexts that were seen, [B, ..], made at the first call."""
    alone = copy.copy(processor)
    alone.state = None
    return alone


def _own_context(processor: Any, row: int, rows: int) -> Any:
    """UnbatchedClassifierFreeGuidance: ids of the negative prompts, [B, N], and their cache."""
    alone = copy.copy(processor)
    context = dict(processor.unconditional_context)
    for name in ("input_ids", "attention_mask"):
        if (held := context[name]) is not None:
            context[name] = held[_place(processor, len(held), row, rows)]
    alone.unconditional_context = context
    return alone


_PROCESSORS: dict[str, Cut] = {
    "EncoderNoRepeatNGramLogitsProcessor": _prompt_ngrams,
    "EncoderRepetitionPenaltyLogitsProcessor": _prompt_ids,
    "PrefixConstrainedLogitsProcessor": _batch_id,
    "RepetitionPenaltyLogitsProcessor": _prompt_lengths,
    "SynthIDTextWatermarkLogitsProcessor": _fresh_state,
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": _own_context,
}
"""transformers' processors that hold something per row."""
