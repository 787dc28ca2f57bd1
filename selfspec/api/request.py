"""Turn the keywords of `generate` into a Request, as Hugging Face prepares them.

`model.generate` itself checks inputs, merges configs and builds processors and criteria; a callable
in place of its decoding loop returns them to us. So keywords have the same meaning as there, and
those without support are refused by name. Our own keywords become additional processors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import stopping_criteria as stopping
from transformers.generation.streamers import BaseStreamer

from selfspec.config import (
    DEFAULT_MAX_NEW_TOKENS,
    GRAMMAR_KEYWORDS,
    OPTION_NAMES,
    GenerateOptions,
    Grammar,
    SpeculationOptions,
    check_grammar,
    grammar_of,
    matcher_class,
)
from selfspec.decoding.decode import BEYOND_CONTEXT, CONTEXT_ENDS, StopRule, warn_once
from selfspec.decoding.engine import SequenceRequest
from selfspec.decoding.sampling import (
    GrammarMask,
    OccurrencePenalty,
    Sampler,
    criterion_for,
    name_of,
)
from selfspec.errors import (
    InvalidOption,
    InvalidPrompt,
    annotations_of,
    check_keys,
    check_types,
    first_line,
    shown,
)
from selfspec.model.backbone import Backbone
from selfspec.model.parts import CACHES
from selfspec.options import check_ranges

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LENGTHS = ("max_new_tokens", "max_length", "generation_config")  # may set the answer's length

_TOKENS = (
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "eos_token_id"),
)
"""Keywords that hold token ids, all of which must exist."""

_REFUSALS = (
    *(AttributeError, LookupError, ArithmeticError, RuntimeError, TypeError, ValueError),
    ImportError,  # a cache of another package's
)
"""Errors that transformers raises for invalid keywords."""

_KEPT = 32  # grammars that are cached for later answers
_DRAWING = frozenset({"temperature", "top_k", "top_p", "min_p"})  # no effect on greedy decoding

HONOURED = frozenset(
    {
        # transformers turns them into processors, criteria and rows of input_ids
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time"),
        *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
        *("epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("renormalize_logits", "forced_bos_token_id", "forced_eos_token_id"),
        *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens", "sequence_bias", "guidance_scale", "watermarking_config"),
        *("num_return_sequences", "eos_token_id", "stop_strings"),
        # read here
        *("do_sample", "pad_token_id", "return_dict_in_generate"),
    }
)
"""Fields of GenerationConfig that take effect here."""

NEUTRAL = frozenset(
    {
        # for beam search, which is refused by its num_beams
        *("early_stopping", "length_penalty", "diversity_penalty"),
        # for an assistant model, which a decoding loop never gets
        *("num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "max_matching_ngram_size"),
        *("assistant_lookbehind", "target_lookbehind"),
        # how the model is run, not what it computes
        *("cache_config", "max_cache_len", "compile_config", "disable_compile"),
        *("continuous_batching_config", "low_memory", "prefill_chunk_size"),
        # for encoders, and for prompts without ids
        *("decoder_start_token_id", "bos_token_id"),
        # where the config comes from
        *("_from_model_config", "_commit_hash", "transformers_version"),
    }
)
"""Fields that change no token of plain decoding."""

REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups"), (None, 1)),
    "penalty_alpha": (None, 0),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic", "static"),
    **dict.fromkeys(("dola_layers", "constraints", "force_words_ids"), (None,)),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit"), (None,)),
    **dict.fromkeys(("assistant_ensemble_weight", "speculation_type"), (None,)),
    **dict.fromkeys(("use_mtp", "is_assistant", "token_healing"), (None, False)),
    **dict.fromkeys(("output_scores", "output_logits"), (None, False)),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), (None, False)),
}
"""Fields that ask for other decoding or another result, with the values that do not ask for it."""

_OF_THE_MODEL = REFUSED | {"is_causal": (None, True), "output_router_logits": (None, False)}
_OF_THE_MODEL |= {"mm_encoder_outputs": (None, {})}  # {}: of no image
"""The same for keywords of a model's forward, except `logits_to_keep`, which may be anything."""

_OF_A_CALL = REFUSED | dict.fromkeys(("return_dict_in_generate", "synced_gpus"), (None, False))
"""The same for keywords of our own `generate`, which always returns one type of result."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call: its prompts, how to sample, when to stop, how to draft, and its streamer."""

    input_ids: Tensor  # [B, P], left-padded
    pads: list[int]  # padding ids in front of each row
    sampler: Sampler
    max_length: int  # most ids, prompt and padding included
    end_tokens: frozenset[int]
    criteria: StoppingCriteriaList  # other criteria that end an answer, for all rows
    max_time: float | None = None  # seconds for each row, from its own start
    context_length: int  # context length that the model was made for
    position_limit: int | None = None  # positions that the model can compute; None: no limit
    pad_token_id: int
    return_dict: bool
    logprobs: int | None = None  # likely tokens to record per token; None: record nothing
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    tokenizer: PreTrainedTokenizerBase | None = None
    streamer: BaseStreamer | None = None  # gets each token
    streamer_has_prompt: bool = False  # whether the streamer already has the prompt
    end: str = ""  # text that ends the answer and is not part of it
    tail: Sequence[int] = ()  # last prompt tokens of a continued text: spaces may depend on them

    def only(self) -> SequenceRequest:
        """The only sequence. Raises InvalidOption if there are several."""
        if (count := self.input_ids.shape[0]) != 1:
            raise InvalidOption(f"{count} sequences at once. Use generate_batch for more than one")
        return self.row(0)

    def row(self, row: int) -> SequenceRequest:
        """One sequence; its `max_time` starts now. Raises InvalidOption for criteria of batches."""
        rows, pad = len(self.pads), self.pads[row]
        criteria = [criterion_for(entry, row, rows, self.max_time) for entry in self.criteria]
        max_length, limit = self.max_length, self.position_limit
        if limit is not None and max_length > limit + 1 + pad:  # the newest token takes no position
            max_length = limit + 1 + pad
            warn_once(CONTEXT_ENDS, limit)
        stop = StopRule(
            max_length=max_length,
            end_tokens=self.end_tokens,
            criteria=partial(_has_ended, criteria) if criteria else None,
            context=self.context_length + pad if limit is None else None,
        )
        sampler = self.sampler.for_row(row, rows, pad)
        ids = self.input_ids[row : row + 1]
        return SequenceRequest(ids=ids, pad=pad, sampler=sampler, stop=stop, logprobs=self.logprobs)


def check_options(options: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Check the keywords of `generate`, and drop those without effect. Raises InvalidOption.

    `num_beams=1` has one if the model's generation_config asks for beams.
    """
    hints = annotations_of(GenerateOptions)
    fields = {k: value for k, value in options.items() if not _is_in(value, _OF_A_CALL.get(k, ()))}
    for name in fields.keys() & REFUSED.keys():
        raise InvalidOption(f"{name} is not supported. Leave it out")
    check_keys(fields, hints, "option")
    values = {name: value for name, value in fields.items() if value is not None}
    rest = {name: value for name, value in values.items() if name not in OPTION_NAMES}
    check_types(rest, hints)  # SpeculationOptions checks the others
    check_ranges(values, GenerateOptions)
    config = values.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise InvalidOption(f"generation_config is {shown(config)}, expected a GenerationConfig")
    streamer = values.get("streamer")
    methods = [getattr(streamer, name, None) for name in ("put", "end")]
    if streamer is not None and not all(map(callable, methods)):
        expected = "expected a TextStreamer or the like. Leave it out, or use stream"
        raise InvalidOption(f"streamer is {shown(streamer)}, {expected}")
    for name in ("logits_processor", "stopping_criteria"):
        for entry in values.get(name, ()):
            _check_function(name, entry)
    for name in _TOKENS:
        for token in _flatten(values.get(name, ())):
            # some configs use -1 for no end token
            if not (-1 if name == "eos_token_id" else 0) <= token < vocab_size:
                raise InvalidOption(
                    f"{name} holds {shown(token)}, expected ids in 0..{vocab_size - 1}"
                )
    if config is None and options.get("num_beams") == 1:
        fields["num_beams"] = 1
    return {name: _python_value(value) for name, value in fields.items()}


def _python_value(value: Any) -> Any:
    """Convert a numpy number to a Python number: transformers does not take numpy's."""
    if not isinstance(value, Real) or isinstance(value, bool | int | float):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _check_function(option: str, entry: Any) -> None:
    if not callable(entry) or isinstance(entry, type):
        raise InvalidOption(f"{option} holds {shown(entry)}, expected functions of ids and scores")
    try:
        inspect.signature(entry).bind("ids", "scores")
    except TypeError as error:
        raise InvalidOption(
            f"{option}: {name_of(entry)} is called with ids and scores. Give a function of two"
        ) from error
    except ValueError:  # built in, without a signature
        return


def _flatten(values: Any) -> list[int]:
    if not isinstance(values, list | tuple):
        return [values]
    return [token for entry in values for token in _flatten(entry)]


def prepare(
    backbone: Backbone,
    tokenizer: PreTrainedTokenizerBase | None,
    grammars: Grammars,
    input_ids: Tensor,
    options: Mapping[str, Any],
) -> Request:
    """Make a Request from ids [B, P] and keywords of `generate`, Hugging Face's and ours."""
    model, start = backbone.model, input_ids.shape[1]
    keywords = _for_transformers(options, start)
    grammar = grammar_of({name: keywords.pop(name, None) for name in GRAMMAR_KEYWORDS})
    backbone.check_ids(input_ids)
    seed, logprobs = keywords.pop("seed", None), keywords.pop("logprobs", None)
    criteria = StoppingCriteriaList(keywords.pop("stopping_criteria", None) or [])
    strings = keyword_value(model, keywords, "stop_strings")
    if strings is not None:
        keywords["stop_strings"] = None  # a callable loop never gets the tokenizer they need
    if strings not in (None, []):
        criteria.append(stop_strings(tokenizer, strings))
    decays = keyword_value(model, keywords, "exponential_decay_length_penalty") is not None
    if decays and keyword_value(model, keywords, "eos_token_id") is None:
        raise InvalidOption(
            "exponential_decay_length_penalty makes the end token likelier, and the model has "
            "none. Give eos_token_id, or leave it out"
        )
    if keywords.get("attention_mask") is not None:
        left_padding(input_ids, keywords["attention_mask"])
    elif input_ids.shape[0] == 1:
        # without a mask, a pad token in a prompt would count as padding
        keywords["attention_mask"] = torch.ones_like(input_ids)
    if not any(keywords.get(name) is not None for name in _LENGTHS):
        keywords.update(_default_length(backbone, start))
    try:
        prepared = model.generate(  # type: ignore[operator]  # typed as Tensor | Module upstream
            input_ids, stopping_criteria=criteria, custom_generate=_hand_back, **keywords
        )
    except _REFUSALS as error:
        config = keywords.get("generation_config") or model.generation_config
        fields = {name: value for name, value in vars(config).items() if value is not None}
        check_types(fields, annotations_of(GenerateOptions), "in the generation_config, ")
        reason = first_line(error)
        advice = "Change that option, or leave it out, of the model's generation_config too"
        raise InvalidOption(f"{reason}. {advice}") from error
    request = from_prepared(backbone, *prepared, seed=seed, logprobs=logprobs, tokenizer=tokenizer)
    if grammar is None:
        return request
    processors = LogitsProcessorList(request.sampler.processors)
    # after processors that rule out tokens, before those that shape sampling
    warpers = (n for n, entry in enumerate(processors) if type(entry).__name__.endswith("Warper"))
    mask = grammars.mask(grammar, request.end_tokens, request.input_ids.shape[1])
    processors.insert(next(warpers, len(processors)), mask)
    return replace(request, sampler=replace(request.sampler, processors=processors))


def _for_transformers(options: Mapping[str, Any], start: int) -> dict[str, Any]:
    """Set `do_sample` in `options`, and turn penalties into a processor.

    Temperature 0 is greedy, as in OpenAI's API; transformers refuses it. `start`: ids of a prompt.
    """
    keywords = dict(options)
    if keywords.get("generation_config") is None:
        keywords["use_cache"] = True  # a config may have False from training; a caller's is refused
    if keywords.get("temperature") == 0:
        keywords = {name: value for name, value in keywords.items() if name not in _DRAWING}
        keywords["do_sample"] = False
    unset = keywords.get("do_sample") is None and keywords.get("generation_config") is None
    if unset and any(keywords.get(name) is not None for name in _DRAWING):
        keywords["do_sample"] = True
    presence = keywords.pop("presence_penalty", None) or 0.0
    frequency = keywords.pop("frequency_penalty", None) or 0.0
    if presence or frequency:
        processors = list(keywords.get("logits_processor") or [])
        keywords["logits_processor"] = [*processors, OccurrencePenalty(presence, frequency, start)]
    return keywords


def from_prepared(
    backbone: Backbone,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    *,
    seed: int | None = None,
    **others: Any,
) -> Request:
    """Make a Request from the arguments of a `custom_generate`; `others`: more of its fields."""
    refuse_other_decoding(config)
    refuse_model_keywords(model_kwargs, input_ids, backbone.model.config.model_type)
    backbone.check_ids(input_ids)  # empty if embeddings were given
    pads = left_padding(input_ids, model_kwargs.get("attention_mask"))
    limit, length = backbone.parts.position_limit, input_ids.shape[1] - min(pads)
    if limit is not None and length > limit:
        raise InvalidPrompt(
            f"the prompt has {length} tokens, the model has {limit} positions. Shorten the prompt"
        )
    if length > backbone.max_positions:
        warn_once(BEYOND_CONTEXT, backbone.max_positions)
    lengths = [entry.max_length for entry in criteria if type(entry) is stopping.MaxLengthCriteria]
    max_length = min(lengths, default=config.max_length)
    if not isinstance(max_length, int):
        raise InvalidOption(f"the longest length is {shown(max_length)}, expected a whole number")
    ends = (entry for entry in criteria if type(entry) is stopping.EosTokenCriteria)
    kinds = (stopping.MaxLengthCriteria, stopping.EosTokenCriteria)
    sampler = Sampler(processors, bool(config.do_sample))
    pad = getattr(config, "_pad_token_tensor", None)  # without a pad token: 0
    if any(isinstance(entry, stopping.ConfidenceCriteria) for entry in criteria):
        raise InvalidOption("ConfidenceCriteria needs scores, which are not kept. Leave it out")
    return Request(
        input_ids=input_ids,
        pads=pads,
        sampler=sampler if seed is None else sampler.seeded(seed, input_ids.device),
        max_length=max_length,
        end_tokens=frozenset(int(end) for entry in ends for end in entry.eos_token_id.flatten()),
        criteria=StoppingCriteriaList(entry for entry in criteria if type(entry) not in kinds),
        max_time=config.max_time,
        context_length=backbone.max_positions,
        position_limit=limit,
        pad_token_id=int((config.pad_token_id if pad is None else pad) or 0),
        return_dict=bool(config.return_dict_in_generate),
        **others,
    )


def left_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """Padding ids in front of each row of [B, P]. Raises InvalidPrompt for any other padding."""
    rows, length = input_ids.shape
    if attention_mask is None:
        return [0] * rows
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
        is_tensor = isinstance(attention_mask, Tensor)
        found = [*attention_mask.shape] if is_tensor else f"of type {type(attention_mask).__name__}"
        raise InvalidOption(
            f"attention_mask is {found}, expected a tensor [{rows}, {length}] like the ids"
        )
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise InvalidOption("attention_mask holds values other than 0 and 1. Use only these")
    counts = [int(count) for count in attention_mask.sum(-1)]
    for row, count in enumerate(counts):
        if count == 0 or not bool(attention_mask[row, length - count :].all()):
            raise InvalidPrompt(f"row {row} of the batch is not left-padded. Pad on the left")
    return [length - count for count in counts]


def keyword_value(model: PreTrainedModel, options: Mapping[str, Any], name: str) -> Any:
    """The value of a keyword, else from the given generation_config, else from the model's own."""
    configs = options.get("generation_config"), model.generation_config
    values = (options.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def _default_length(backbone: Backbone, length: int) -> dict[str, int]:
    """The default length of an answer to `length` ids, within the model's context length."""
    config: Any = backbone.model.generation_config
    if config.max_new_tokens is not None or config.max_length is not None:
        return {}
    if (room := backbone.max_positions - length) < 1:
        raise InvalidPrompt(
            f"the prompt has {length} tokens, the model reads {backbone.max_positions} and needs "
            "room for at least one more. Shorten the prompt (in a chat: /clear), or give "
            "max_new_tokens to go beyond"
        )
    return {"max_new_tokens": min(DEFAULT_MAX_NEW_TOKENS, room)}


def _hand_back(_model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> tuple[Any, ...]:
    """Take the place of a decoding loop, and return the arguments that `generate` prepared."""
    names = ("logits_processor", "stopping_criteria", "generation_config")
    return input_ids, *(prepared.pop(name) for name in names), prepared


def _has_ended(criteria: list[Any], ids: Tensor) -> bool:
    """Whether any criterion ends ids [1, n]. All are called, since some count their calls."""
    ends = False
    for criterion in criteria:
        verdict = criterion(ids, None)  # without scores, as in plain decoding
        if hasattr(verdict, "tolist"):
            verdict = verdict.tolist()  # a tensor [1], or a number of numpy's
        if isinstance(verdict, list) and len(verdict) == 1:
            (verdict,) = verdict
        if not isinstance(verdict, bool):
            raise InvalidOption(
                f"{name_of(criterion)} gives {shown(verdict)} for one row, expected True or False"
            )
        ends = ends or verdict
    return ends


def refuse_other_decoding(config: GenerationConfig) -> None:
    """Raise InvalidOption, by name, for settings that this loop cannot honour."""
    for name, neutral in REFUSED.items():
        value = getattr(config, name, None)
        if not _is_in(value, neutral):
            hint = "Leave it out, of the model's generation_config too"
            raise InvalidOption(f"{name}={shown(value)} is not supported. {hint}")
    known = HONOURED | NEUTRAL | REFUSED.keys()
    for name in vars(GenerationConfig()).keys() - known:  # not an attribute of some model's own
        if (value := getattr(config, name, None)) is not None:
            raise InvalidOption(f"{name}={shown(value)} is not known here. Leave it out")


def refuse_model_keywords(
    model_kwargs: Mapping[str, Any], input_ids: Tensor, model_type: str = ""
) -> None:
    """Raise InvalidOption, by name, for keywords that the model would use and this loop does not.

    Allowed are a mask over `input_ids`, the positions that follow from it, an empty cache, and
    image markers that mark no image: a processor returns them with any text.
    """
    types = "token_type_ids" if model_type == "gemma3" else None  # other models read zeros, too
    marks = (types, "mm_token_type_ids", "moe_mm_token_type_ids")
    for name, value in model_kwargs.items():
        if value is None or name in ("attention_mask", "logits_to_keep"):
            continue
        if name in marks and not torch.as_tensor(value).any():
            continue
        if name == "position_ids":
            _check_positions(value, model_kwargs.get("attention_mask"), input_ids)
        elif name in CACHES:
            if not hasattr(value, "get_seq_length") or value.get_seq_length() > 0:
                raise InvalidOption(f"{name} is not supported. Use speculator.session()")
        elif not _is_in(value, _OF_THE_MODEL.get(name, ())):
            hint = "Leave it out: input_ids alone are read"
            raise InvalidOption(f"{name} is not supported: it would be ignored. {hint}")


def _is_in(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether `value` is one of these plain values; a tensor or other object never is."""
    return isinstance(value, bool | int | float | str | dict | None) and value in allowed


def _check_positions(positions: Any, mask: Tensor | None, input_ids: Tensor) -> None:
    """Raise InvalidOption unless each row (on each axis) counts from 0; padding does not matter."""
    rows, length = input_ids.shape
    counted = torch.ones_like(input_ids) if mask is None else mask.long()
    fits = isinstance(positions, Tensor) and positions.shape[-2:] in ((rows, length), (1, length))
    if fits:
        counted = counted.to(positions.device)
        fits = bool(((positions == counted.cumsum(-1) - 1) | (counted == 0)).all())
    if not fits:
        raise InvalidOption(
            "position_ids or attention_mask do not match the prompt: they need its length, and "
            "positions must count from 0 in each row. Leave them out"
        )


@lru_cache(8)  # the size of the cache that transformers has for them
def _criterion(tokenizer: Any, strings: tuple[str, ...], _size: int) -> stopping.StopStringCriteria:
    """Cached by `_size`, too: a tokenizer that grew has new tokens, which may hold the strings."""
    return stopping.StopStringCriteria(tokenizer, list(strings))


def stop_strings(
    tokenizer: PreTrainedTokenizerBase | None, strings: str | list[str]
) -> stopping.StopStringCriteria:
    """The criterion for `strings`. Raises InvalidOption for values that cannot be stop strings."""
    if tokenizer is None:
        raise InvalidOption("stop_strings need a tokenizer. Give one: tokenizer=...")
    texts = strings if isinstance(strings, list | tuple) else [strings]
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidOption(f"stop_strings are {shown(strings)}, expected texts that are not empty")
    try:
        return _criterion(tokenizer, tuple(texts), len(tokenizer))
    except ValueError as error:
        raise InvalidOption(
            f"stop_strings are {shown(strings)}: no token writes that. Leave it out"
        ) from error


class Grammars:
    """Grammars over the tokens of one model, each read once. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        """`vocab_size`: number of the model's logits, which may exceed that of its tokens."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        # reading the tokenizer takes half a second, and a large grammar several
        self._tokens = lru_cache(_KEPT)(self._read_tokens)
        self._matcher = lru_cache(_KEPT)(self._read)

    def mask(self, grammar: Grammar, end_tokens: Iterable[int], start: int = 0) -> GrammarMask:
        """The mask for answers that begin after `start` ids. Raises InvalidOption."""
        ends = frozenset(token for token in end_tokens if token >= 0)
        return GrammarMask(self._matcher(grammar, ends).deep_copy(), start, ends)

    def _read(self, grammar: Grammar, ends: frozenset[int]) -> LLMatcher:
        check_grammar(grammar)
        if not ends:
            advice = "Set eos_token_id in the model's generation_config, or leave it out"
            raise InvalidOption(f"{grammar.keyword} needs an end token. {advice}")
        matcher = matcher_class()(self._tokens(ends), grammar.text)
        if matcher.is_error():
            reason = matcher.get_error()
            raise InvalidOption(f"{grammar.keyword} does not fit this model's tokens: {reason}")
        return matcher

    def _read_tokens(self, ends: frozenset[int]) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        tokenizer: Any = self._tokenizer
        if tokenizer is None:
            raise InvalidOption("a grammar needs a tokenizer. Give one to selfspec.wrap")
        if len(tokenizer) > self._vocab_size:
            counts = f"its tokenizer has {len(tokenizer)} tokens, the model {self._vocab_size}"
            raise InvalidOption(f"a grammar needs a logit for each token: {counts}. Leave it out")
        try:
            return from_tokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=sorted(ends))
        except ValueError as error:
            kind = type(tokenizer).__name__
            raise InvalidOption(
                f"a grammar cannot be used with this tokenizer, {kind}: {first_line(error)}. "
                "Leave json_schema and grammar out"
            ) from error
