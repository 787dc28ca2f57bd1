"""What each of Hugging Face's generation keywords means to this loop.

Comes in: a GenerationConfig and the keywords meant for the model's forward, as transformers hands
them to a decoding loop. Goes out: nothing, or InvalidOption with the name of what cannot be
honoured. Whatever is not listed here is refused, so a new keyword upstream is never ignored.
Called by `request`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria

from selfspec.errors import InvalidOption
from selfspec.typed import shown

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
"""Fields of GenerationConfig that have their effect."""

NEUTRAL = frozenset(
    {
        # of beam search, which is refused by num_beams
        *("early_stopping", "length_penalty", "diversity_penalty"),
        # of an assistant, which a decoding loop is never told of
        *("num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "max_matching_ngram_size"),
        *("assistant_lookbehind", "target_lookbehind"),
        # how the model is run, not what it computes
        *("cache_config", "max_cache_len", "compile_config", "disable_compile"),
        *("continuous_batching_config", "low_memory", "prefill_chunk_size"),
        # of encoders, and of prompts without ids
        *("decoder_start_token_id", "bos_token_id"),
        # where the config comes from
        *("_from_model_config", "_commit_hash", "transformers_version"),
    }
)
"""Fields that change no token of plain decoding."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "speculation_type": (None,),
    "use_mtp": (None, False),
    "is_assistant": (None, False),
    "token_healing": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
"""Fields that mean another way of decoding or another result, and the values that do not."""

_MODEL_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, True),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_router_logits": (None, False),
    "is_causal": (None, True),
}
"""Keywords of a model's forward, and the values that change nothing. `logits_to_keep` may be
anything: of the logits only the last are used."""


def refuse_other_decoding(config: GenerationConfig) -> None:
    """Raise InvalidOption, by name, for settings that this loop cannot honour."""
    for name, neutral in REFUSED.items():
        value = getattr(config, name, None)
        if not _among(value, neutral):
            raise InvalidOption(f"{name}={shown(value)} is not supported. Leave it out")
    known = HONOURED | NEUTRAL | REFUSED.keys()
    for name in vars(GenerationConfig()).keys() - known:  # not an attribute of some model's own
        if (value := getattr(config, name, None)) is not None:
            raise InvalidOption(f"{name}={shown(value)} is not known here. Leave it out")


def refuse_model_keywords(model_kwargs: Mapping[str, Any], input_ids: Tensor) -> None:
    """Raise InvalidOption, by name, for what the model's forward would use and this loop does not.

    `input_ids` [B, P]. Understood are a mask over it, the positions that follow from the mask, and
    an empty cache.
    """
    for name, value in model_kwargs.items():
        if value is None or name in ("attention_mask", "logits_to_keep"):
            continue
        if name == "position_ids":
            _check_positions(value, model_kwargs.get("attention_mask"), input_ids)
        elif name == "past_key_values":
            if not hasattr(value, "get_seq_length") or value.get_seq_length() > 0:
                raise InvalidOption("past_key_values are not supported. Use speculator.session()")
        elif not _among(value, _MODEL_NEUTRAL.get(name, ())):
            hint = "Give input_ids alone" if name == "inputs_embeds" else "Leave it out"
            raise InvalidOption(f"{name} is not supported: it would be ignored. {hint}")


def _among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether `value` is one of these plain values; tensors and the like are none."""
    plain = value is None or isinstance(value, bool | int | float | str)
    return plain and value in allowed


def _check_positions(positions: Any, mask: Tensor | None, input_ids: Tensor) -> None:
    """Raise InvalidOption unless each row counts its own ids from 0; padding does not matter."""
    rows, length = input_ids.shape
    if mask is None:
        expected, counted = torch.arange(length), None
    else:
        expected, counted = mask.long().cumsum(-1) - 1, mask.bool()
    fits = isinstance(positions, Tensor) and positions.shape in ((rows, length), (1, length))
    if fits:
        same = positions == expected.to(positions.device)
        fits = bool((same if counted is None else same | ~counted.to(same.device)).all())
    if not fits:
        raise InvalidOption(
            "position_ids, or an attention_mask of another length, are not those of the prompt: "
            "each row counts from 0 here. Leave them out"
        )


def stop_strings(
    tokenizer: PreTrainedTokenizerBase | None, strings: str | list[str]
) -> StopStringCriteria:
    """The criterion for `strings`. Raises InvalidOption for what can be none."""
    if tokenizer is None:
        raise InvalidOption("stop_strings need a tokenizer. Give one to selfspec.wrap")
    listed = strings if isinstance(strings, list | tuple) else [strings]
    if not all(isinstance(text, str) and text for text in listed):
        raise InvalidOption(f"stop_strings are {shown(strings)}, expected texts that are not empty")
    try:
        return StopStringCriteria(tokenizer=tokenizer, stop_strings=list(listed))
    except ValueError as error:
        raise InvalidOption(
            f"stop_strings are {shown(strings)}: no token writes that. Leave it out"
        ) from error
