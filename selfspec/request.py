"""What a caller of `generate` wants, as Hugging Face prepares it.

`model.generate` itself checks inputs, merges configs and builds processors and criteria; a callable
in place of its loop hands all that back. So keywords mean here what they mean there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StopStringCriteria,
)

from selfspec.backbone import Backbone
from selfspec.config import DEFAULT_MAX_NEW_TOKENS
from selfspec.decode import StopRule
from selfspec.errors import InvalidOption, InvalidPrompt
from selfspec.scores import Sampler, stateful

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "use_cache": (None, True),
    "cache_implementation": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
"""Generation settings that mean another way of decoding, and the values that do not."""


_NO_MAX_LENGTH = 20
"""What transformers puts where nobody set a maximum length."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Prompts and rules of one call."""

    input_ids: Tensor
    """[B, P], left-padded."""
    pads: list[int]
    """Padding ids in front of each row."""
    sampler: Sampler
    stop: StopRule
    pad_token_id: int
    return_dict: bool

    def require_one(self) -> None:
        """Raise InvalidOption for more than one sequence."""
        if (count := self.input_ids.shape[0]) != 1:
            raise InvalidOption(f"{count} sequences at once. Use generate_batch for more than one")


def prepare(
    backbone: Backbone,
    tokenizer: PreTrainedTokenizerBase | None,
    input_ids: Tensor,
    options: Mapping[str, Any],
) -> Request:
    """A Request from ids [B, P] and Hugging Face's keywords.

    Raises InvalidPrompt, or InvalidOption for what Hugging Face or this runtime refuses.
    """
    backbone.check_ids(input_ids)
    model, rest = backbone.model, dict(options)
    seed = rest.pop("seed", None)
    criteria = StoppingCriteriaList(rest.pop("stopping_criteria", []))
    strings = rest.pop("stop_strings", None) or model.generation_config.stop_strings
    if strings:
        criteria.append(stop_strings(tokenizer, strings))
    if input_ids.shape[0] == 1:
        # else a pad token within a prompt would be taken for padding
        rest.setdefault("attention_mask", torch.ones_like(input_ids))
    if not rest.keys() & {"max_new_tokens", "max_length", "generation_config"}:
        own = model.generation_config
        if own.max_new_tokens is None and own.max_length in (None, _NO_MAX_LENGTH):
            rest["max_new_tokens"] = DEFAULT_MAX_NEW_TOKENS
    try:
        prepared = model.generate(  # type: ignore[operator]  # typed as Tensor | Module upstream
            input_ids,
            stopping_criteria=criteria,
            stop_strings=None,  # a callable loop never gets the tokenizer they need
            custom_generate=_hand_back,
            **rest,
        )
    except (ValueError, TypeError) as error:
        raise InvalidOption(str(error).strip().splitlines()[0]) from error
    return from_prepared(backbone, *prepared, seed=seed)


def from_prepared(
    backbone: Backbone,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    *,
    seed: int | None = None,
) -> Request:
    """A Request from what Hugging Face hands to a `custom_generate` callable."""
    backbone.check_ids(input_ids)
    refuse_other_decoding(config, model_kwargs)
    pads = left_padding(input_ids, model_kwargs.get("attention_mask"))
    if input_ids.shape[0] > 1 and (names := stateful(processors)):
        raise InvalidOption(f"{names[0]} keeps state across calls: decode one sequence at a time")
    ends = config.eos_token_id
    end_tokens = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
    others = StoppingCriteriaList(
        c for c in criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)
    )
    return Request(
        input_ids=input_ids,
        pads=pads,
        sampler=Sampler(processors, bool(config.do_sample), _generator(seed, input_ids.device)),
        stop=StopRule(
            max_length=min(config.max_length, backbone.max_positions),
            end_tokens=end_tokens,
            criteria=_asking(others) if others else None,
        ),
        pad_token_id=config.pad_token_id if config.pad_token_id is not None else 0,
        return_dict=bool(config.return_dict_in_generate),
    )


def refuse_other_decoding(config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidOption, by name, for settings that this loop cannot honour."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise InvalidOption(f"{name}={value} is not supported. Leave it out")
    if model_kwargs.get("inputs_embeds") is not None:
        raise InvalidOption("inputs_embeds are not supported. Give input_ids")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise InvalidOption("past_key_values are not supported. Use speculator.session()")


def left_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """Padding ids in front of each row of [B, P]. Raises InvalidPrompt for any other padding."""
    rows, length = input_ids.shape
    if attention_mask is None:
        return [0] * rows
    counts = [int(count) for count in attention_mask.sum(-1)]
    for row, count in enumerate(counts):
        if count == 0 or not bool(attention_mask[row, length - count :].all()):
            raise InvalidPrompt(f"row {row} of the batch is not left-padded. Pad on the left")
    return [length - count for count in counts]


def stop_strings(
    tokenizer: PreTrainedTokenizerBase | None, strings: str | list[str]
) -> StopStringCriteria:
    """The criterion for `strings`. Raises InvalidOption without a tokenizer."""
    if tokenizer is None:
        raise InvalidOption("stop_strings need a tokenizer. Give one to selfspec.wrap")
    return StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)


def _hand_back(
    model: PreTrainedModel,  # noqa: ARG001  # the signature is Hugging Face's
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> tuple[Any, ...]:
    """In place of a decoding loop: return what was prepared for one."""
    return input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs


def _asking(criteria: StoppingCriteriaList) -> Callable[[Tensor], bool]:
    """`criteria` as one question about ids [1, n]; scores are None in plain decoding too."""
    return lambda ids: bool(criteria(ids, None).all())


def _generator(seed: int | None, device: torch.device) -> torch.Generator | None:
    return None if seed is None else torch.Generator(device).manual_seed(seed)
