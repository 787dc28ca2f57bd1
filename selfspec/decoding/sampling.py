"""From logits to tokens: Hugging Face's logits processors, and the choice from their scores.

Processors run on true prefixes, once per committed token, exactly as in plain decoding, so stateful
processors see the same calls.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process, stopping_criteria

from selfspec.decoding.stats import EXIT
from selfspec.errors import InvalidOption
from selfspec.model.kv import common_prefix

if TYPE_CHECKING:
    from llguidance import LLMatcher

# --- processors and criteria of a batch, adapted to one of its rows

# transformers' processors that read neither the ids before a token nor which token has which score
_WARPERS = frozenset(
    {
        *("EpsilonLogitsWarper", "EtaLogitsWarper", "MinPLogitsWarper", "TemperatureLogitsWarper"),
        *("TopHLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TypicalLogitsWarper"),
    }
)

# those whose calls do not affect each other
STATELESS = _WARPERS | {
    *("EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor"),
    *("ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor"),
    *("ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization"),
    *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"),
    *("NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor"),
    *("RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor"),
    *("SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor"),
    "WatermarkLogitsProcessor",  # its generator is seeded anew for each row and call
}


def processor_for(processor: Any, row: int, rows: int) -> Any:
    """A logits processor for one row; raises InvalidOption if it may mix rows of a batch."""
    if type(processor).__module__ == logits_process.__name__:
        if attributes := _row_attributes(processor, row, rows):
            clone = copy.copy(processor)
            vars(clone).update(attributes)
            return clone
        if type(processor).__name__ in STATELESS:
            return processor
    return _for_row(processor, row)


def criterion_for(criterion: Any, row: int, rows: int, max_time: float | None) -> Any:
    """A stopping criterion for one row; raises InvalidOption if it may mix rows of a batch.

    The clock of the option `max_time` starts now; a MaxTimeCriteria of the user's keeps its own.
    """
    kind = type(criterion)
    if rows == 1:
        return criterion
    if kind is stopping_criteria.MaxTimeCriteria:
        return kind(max_time) if criterion.max_time == max_time else criterion
    return criterion if kind is stopping_criteria.StopStringCriteria else _for_row(criterion, row)


def name_of(function: object) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)


def _for_row(function: Any, row: int) -> Any:
    if callable(for_row := getattr(function, "for_row", None)):
        return for_row(row)
    raise InvalidOption(
        f"{name_of(function)} may treat rows of a batch in different ways, but each row is decoded "
        "separately here. Give it a method for_row(row), or decode one prompt at a time"
    )


def _part(processor: Any, entries: Any, row: int, rows: int, *, shared: bool = False) -> Any:
    """The part of `entries` that belongs to `row`; if `shared`, repeated prompts have one part."""
    count = len(entries)
    if count != rows and not (shared and count and rows % count == 0):
        raise InvalidOption(
            f"{name_of(processor)} was made for {count} rows, the batch has {rows}. Make it anew"
        )
    index = row // (rows // count)
    return entries[index : index + 1]


def _row_attributes(processor: Any, row: int, rows: int) -> dict[str, Any]:
    """The attributes of a transformers processor that differ by row, for `row`."""
    part = partial(_part, processor, row=row, rows=rows)
    match type(processor).__name__:
        case "RepetitionPenaltyLogitsProcessor":  # padding that is skipped, [B]
            lengths = processor.prompt_ignore_length
            return {"prompt_ignore_length": part(lengths)} if isinstance(lengths, Tensor) else {}
        case "EncoderRepetitionPenaltyLogitsProcessor":  # ids of the prompts, [B, P]
            return {"encoder_input_ids": part(processor.encoder_input_ids, shared=True)}
        case "EncoderNoRepeatNGramLogitsProcessor":  # a table of n-grams per prompt
            tables = part(processor.generated_ngrams, shared=True)
            return {"generated_ngrams": tables, "batch_size": 1}
        case "PrefixConstrainedLogitsProcessor":  # its function gets the row's index
            allowed = processor._prefix_allowed_tokens_fn
            return {"_prefix_allowed_tokens_fn": lambda _, ids: allowed(row, ids)}
        case "SynthIDTextWatermarkLogitsProcessor":  # contexts that were seen, [B, ..]
            return {"state": None}  # made at the first call
        case "UnbatchedClassifierFreeGuidanceLogitsProcessor":  # negative prompts, and their cache
            context = dict(processor.unconditional_context)
            for name in ("input_ids", "attention_mask"):  # [B, N]
                if (tensor := context[name]) is not None:
                    context[name] = part(tensor)
            return {"unconditional_context": context}
    return {}


# --- penalties, as OpenAI defines them


class OccurrencePenalty(LogitsProcessor):
    """Subtracts `presence` from the score of each answer token, and `frequency` per occurrence."""

    stateless = True

    def __init__(self, presence: float, frequency: float, start: int) -> None:
        """`start`: ids in front of the answer, padding included."""
        self._presence, self._frequency, self._start = presence, frequency, start

    def for_row(self, _row: int) -> OccurrencePenalty:
        return self

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[1, n], [1, V] -> [1, V]."""
        tokens, counts = input_ids[0, self._start :].unique(return_counts=True)
        lowered = scores.clone()
        lowered[0, tokens] -= self._presence + self._frequency * counts
        return lowered


# --- grammars: tokens that may come next, and tokens that must


class GrammarMask(LogitsProcessor):
    """Rules out tokens that the grammar forbids after a prefix; depends on the prefix alone.

    The matcher advances with a text, and rolls back for a different prefix.
    """

    stateless = True

    def __init__(self, matcher: LLMatcher, start: int, end_tokens: Collection[int]) -> None:
        """`start`: ids before the text, padding included; `end_tokens`: the end tokens."""
        self.start, self._matcher, self._end_tokens = start, matcher, sorted(end_tokens)
        self._text: list[int] = []

    def for_row(self, _row: int) -> GrammarMask:
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return GrammarMask(matcher, self.start, self._end_tokens)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """[1, n], [1, V] -> [1, V]. Raises InvalidOption if no allowed token is left."""
        self._follow(input_ids[0, self.start :].tolist())
        allowed = self._allowed_mask(scores.shape[1]).to(scores.device)
        masked = scores.masked_fill(~allowed, -math.inf)
        if bool(masked.isneginf().all()):
            raise InvalidOption(
                "another option rules out every token that the grammar allows. Remove "
                "min_new_tokens, suppress_tokens, bad_words_ids or logits_processor"
            )
        return masked

    def forced_tokens(self, text: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens that must follow, the end token included."""
        self._follow(text)
        tokens: list[int] = self._matcher.compute_ff_tokens()[:limit]
        if len(tokens) < limit:
            count = self._matcher.try_consume_tokens(tokens)
            if count == len(tokens) and self._matcher.is_stopped():
                tokens.append(self._end_tokens[0])
            self._matcher.rollback(count)
        return tokens

    def count_allowed(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        self._follow(text)
        return int(self._matcher.validate_tokens(list(tokens)))

    def _follow(self, text: Sequence[int]) -> None:
        text = list(text)
        shared = common_prefix(self._text, text)
        if shared < len(self._text):
            self._matcher.rollback(len(self._text) - shared)
        tokens = text[shared:]
        count = self._matcher.try_consume_tokens(tokens) if tokens else 0
        self._text = text[: shared + count]
        self._check_matcher()
        if count < len(tokens):
            raise InvalidOption(
                f"another option puts token {tokens[count]} where the grammar forbids it. Remove "
                "forced_eos_token_id, forced_bos_token_id or logits_processor"
            )

    def _check_matcher(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("<state>")[0].strip()  # then a long dump
            raise InvalidOption(f"the grammar cannot be followed: {reason}. Give a simpler one")

    def _allowed_mask(self, vocab_size: int) -> Tensor:
        """[V], bool."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check_matcher()
        bits = np.unpackbits(packed, bitorder="little", count=min(vocab_size, 8 * packed.size))
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        allowed[: bits.size] = torch.from_numpy(bits).bool()
        if any(allowed[end] for end in self._end_tokens):
            allowed[self._end_tokens] = True
        return allowed


# --- scores

_BITS = 2**64 - 1
_Temperature, _TopK = logits_process.TemperatureLogitsWarper, logits_process.TopKLogitsWarper
_UNKNOWN = -3e4  # lowest score of a token, where a head may know no allowed one; fits any dtype


class DraftToken(NamedTuple):
    """A proposed token, and what its drafter knows of it."""

    token: int
    parent: int = -1  # index of the draft token that it follows; -1: the newest committed one
    layer: int = 0  # exit layer; 0 for tokens that ran through no layer
    source: str = EXIT  # its drafter, by the names in `stats`
    chance: float = 0.0  # the drafter's estimate that its path is accepted; 0: no estimate
    probs: Tensor | None = None  # [V] it was drawn from, processed; None: deterministic draft
    belief: Tensor | None = None  # [V] drafter's distribution at its position, if a rule reads it


@dataclass(frozen=True)
class Sampler:
    """Chooses tokens from processed scores: the most likely one, or a draw."""

    processors: LogitsProcessorList
    do_sample: bool = False
    generator: torch.Generator | None = None  # for draws without a seed; None: torch's global one
    seed: int | None = None  # if set, seed, position and probabilities determine each draw
    pad: int = 0  # padding ids before a text, which do not count as positions
    lowest: float | None = None  # lower bound that logits are clamped to before processors run

    @property
    def grammar(self) -> GrammarMask | None:
        return next((one for one in self.processors if isinstance(one, GrammarMask)), None)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether this is greedy decoding without processors."""
        return not self.do_sample and not self.processors

    @property
    def reads_scores_alone(self) -> bool:
        """Whether the processors give some tokens' scores the same results without the others."""
        return all(_is_of(_WARPERS, processor) for processor in self.processors)

    def scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Processed scores of the token after `ids` [1, n]; [1, V] -> [1, V]."""
        # processors read ids and scores, and may write; lm_head may be on another device
        scores = logits.to(ids.device, copy=bool(self.processors))
        scores = scores if self.lowest is None else scores.clamp(min=self.lowest)
        for processor in self.processors:
            scores = _run_processor(processor, ids, scores)
        return scores

    def probs(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Distribution of the token after `ids` [1, n]; [1, V] -> [V], float32."""
        return self.scores(ids, logits)[0].softmax(-1)

    def choose(self, ids: Tensor, logits: Tensor, *, believe: bool = False) -> DraftToken:
        """Choose a token to follow `ids` [1, n] from [1, V]; `believe`: keep its distribution."""
        if self.do_sample and self.seed is not None and not believe:
            candidates, tokens = self.candidates(ids, logits)
            return DraftToken(self.draw(candidates, ids.shape[1], tokens))
        scores = self.scores(ids, logits)
        if self.do_sample:
            probs = scores[0].softmax(-1)
            return DraftToken(self.draw(probs, ids.shape[1]), probs=probs, belief=probs)
        return DraftToken(int(scores.argmax(-1)), belief=scores[0].softmax(-1) if believe else None)

    def candidates(
        self, ids: Tensor, logits: Tensor, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The probabilities of tokens that can be drawn after `ids` [1, n], and their ids, [N].

        `logits`: [1, V] of all tokens, or [1, T] of `tokens` [T]. Where a top-k of few tokens
        comes first, the others are left out, which changes probabilities by their rounding alone.
        """
        logits = logits.to(ids.device)  # as in `scores`
        count, racing = self._top_k, min(_RACING, logits.shape[1])
        if 0 < count < racing and logits.device.type == "cpu":  # elsewhere reading it takes longer
            best = logits[0].topk(racing)
            least = float(best.values[count - 1])
            if least - float(best.values[-1]) > 1e-6 * abs(least):  # no tie makes the top k more
                found = best.indices if tokens is None else tokens[best.indices]
                return self.probs(ids, best.values[None]), found
        return self.probs(ids, logits), tokens

    @property
    def _top_k(self) -> int:
        """The k of a top-k that only a temperature precedes; 0: none, or ids are read after it."""
        for processor in self.processors if self.reads_scores_alone else ():
            if type(processor) is _TopK and processor.filter_value == -math.inf:
                return int(processor.top_k)
            if type(processor) is not _Temperature:
                break
        return 0

    def with_token(self, ids: Tensor, token: int) -> Tensor:
        """`ids` [1, n] with `token` appended; unchanged for plain greedy, which ignores them."""
        if self.is_plain_greedy:
            return ids
        return torch.cat([ids, ids.new_full((1, 1), token)], dim=1)

    def draw(self, probs: Tensor, place: int | None = None, tokens: Tensor | None = None) -> int:
        """Draw one of `tokens` by `probs` [N]; with a seed it is a function of its `place`.

        `torch.multinomial` is not used: it draws an exponential number for each of [V].
        """
        if self.seed is not None and place is not None:
            order, _, share = _race(probs, self.seed, place - self.pad, tokens)
            if order[0] != _OTHERS:
                return order[0]
            others = probs.index_fill(0, probs.topk(min(_RACING, len(probs))).indices, 0.0)
            return _pick(others, probs.new_tensor([share], dtype=torch.float64))
        number = torch.rand(1, dtype=torch.float64, device=probs.device, generator=self.generator)
        return _pick(probs, number)

    def likely_draws(
        self, probs: Tensor, place: int, count: int, doubt: float, tokens: Tensor | None = None
    ) -> tuple[list[int], list[float]]:
        """The likeliest seeded draws after `place` ids: `count` tokens, their chances descending.

        `probs` [V] are a draft's; `tokens` [V] their ids, if not all tokens are drafted. The
        target's logits are modelled as the draft's plus Gumbel noise of scale `doubt`. A token then
        wins the target's race with a probability proportional to its time in the draft's race to
        the power of -temperature / doubt. Near temperature 0 that is softmax(logits / doubt), which
        judges greedy drafts.
        """
        assert self.seed is not None  # noqa: S101  # only called with a seed
        racing, times, _ = _race(probs, self.seed, place - self.pad, tokens)
        shares = (times[0] / times) ** (self.temperature / doubt)
        odds = zip(racing, (shares / shares.sum()).tolist(), strict=True)
        pairs = [(token, chance) for token, chance in odds if token != _OTHERS][:count]
        return [token for token, _ in pairs], [chance for _, chance in pairs]

    @property
    def temperature(self) -> float:
        found = (float(p.temperature) for p in self.processors if isinstance(p, _Temperature))
        return next(found, 1.0)

    def uniform(self, device: torch.device) -> Tensor:
        """One number from [0, 1), a 0-d tensor."""
        return torch.rand((), device=device, generator=self.generator)

    def for_drafts(self) -> Sampler:
        """The same choice, with only the processors that may run on uncommitted tokens."""
        # a head may know none of the tokens that a grammar allows: all then get equal scores
        processors = [p for p in self.processors if is_stateless(p)]
        lowest = None if self.grammar is None else _UNKNOWN
        return replace(self, processors=LogitsProcessorList(processors), lowest=lowest)

    def for_row(self, row: int, rows: int, pad: int = 0) -> Sampler:
        """The sampler of row `row` of a batch; its seed is the batch's plus `row`."""
        if rows == 1:
            return replace(self, pad=pad)
        processors = [processor_for(processor, row, rows) for processor in self.processors]
        sampler = replace(self, processors=LogitsProcessorList(processors), pad=pad)
        if self.seed is None or self.generator is None:
            return sampler
        return sampler.seeded((self.seed + row) & _BITS, self.generator.device)

    def seeded(self, seed: int, device: torch.device) -> Sampler:
        return replace(self, seed=seed, generator=torch.Generator(device).manual_seed(seed))


def _pick(probs: Tensor, share: Tensor) -> int:
    """The token at which the cumulative sum of `probs` [V] reaches `share` [1], in [0, 1)."""
    sums = probs.cumsum(0, dtype=torch.float64)
    index = torch.searchsorted(sums, sums[-1:] * share, right=True)
    token, total = torch.cat([index, sums[-1:]]).tolist()
    _check_whole(total)
    return min(int(token), len(probs) - 1)


_RACING = 64  # likeliest tokens that race individually; all others race as one
_OTHERS, _WHICH = -1, -2  # pseudo token ids: the others as one, and the choice among them


def _race(
    probs: Tensor, seed: int, place: int, tokens: Tensor | None = None
) -> tuple[list[int], np.ndarray[Any, Any], float]:
    """Tokens of [V] sorted by arrival time, fastest first, these times, and a share for `_pick`.

    A time is an exponential variable divided by the token's probability. The variable depends on
    the token id, `seed` and `place` alone, so two distributions mostly share the winner.
    """
    count = min(_RACING, len(probs))
    best = probs.topk(count)
    sums = [probs.sum(dtype=torch.float64), best.values.sum(dtype=torch.float64)]
    racing = best.indices if tokens is None else tokens[best.indices]
    numbers = torch.cat([best.values.double(), racing.double(), torch.stack(sums)]).tolist()
    total, best_total = numbers[-2:]
    _check_whole(total)
    ids = np.array([*numbers[count:-2], _OTHERS, _WHICH]).astype(np.int64)
    number = _splitmix64(_splitmix64(seed, 0), place)  # any bit changes half of its bits
    bits = _splitmix64(number, (ids - _WHICH).astype(np.uint64)) >> 11
    shares = (bits.astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
    with np.errstate(divide="ignore"):
        times = -np.log(shares[:-1]) / np.array([*numbers[:count], max(total - best_total, 0.0)])
    order = times.argsort()[: np.isfinite(times).sum()]
    return ids[order].tolist(), times[order], float(shares[-1])


def _check_whole(total: float) -> None:
    if not 0.0 < total < math.inf:
        raise InvalidOption(
            "the scores are no distribution to draw from: all tokens are ruled out, or a score is "
            "NaN or infinite. Check temperature, guidance_scale and logits_processor"
        )


def _splitmix64(number: Any, step: Any) -> Any:
    """Advance a 64-bit number or array by `step` + 1 steps and mix it, as splitmix64 does.

    Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators".
    """
    number = (number + (step + 1) * 0x9E3779B97F4A7C15) & _BITS
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _BITS
    return number ^ (number >> 31)


def is_stateless(processor: object) -> bool:
    """Whether calls do not affect each other; users' processors declare it by `stateless = True`.

    Leaving a processor out for drafts costs acceptance, never correctness: the target runs all.
    """
    return getattr(type(processor), "stateless", False) is True or _is_of(STATELESS, processor)


def _is_of(names: Collection[str], processor: object) -> bool:
    """Whether this is one of transformers' processors with these names."""
    kind = type(processor)
    return kind.__module__ == logits_process.__name__ and kind.__name__ in names


def _run_processor(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    """Run a processor; InvalidOption if one of transformers' fails, users' errors pass through."""
    try:
        output = processor(ids, scores)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if type(processor).__module__ != logits_process.__name__:
            raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InvalidOption(
            f"{name_of(processor)} failed: {reason}. Change its option, or leave it out"
        ) from error
    if not isinstance(output, Tensor) or output.shape != scores.shape:
        shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InvalidOption(
            f"{name_of(processor)} gives {shape}, expected scores of shape {list(scores.shape)}"
        )
    return output
