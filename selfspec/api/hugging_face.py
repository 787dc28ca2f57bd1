"""A decoding loop for Hugging Face's own `generate`: what it prepared comes in, ids go out.

Made by `Speculator.hf`, called by transformers in place of its loop.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from selfspec.api.request import Request, from_prepared
from selfspec.api.stream import Call, Generation
from selfspec.config import OPTION_NAMES, GenerateOptions, SpeculationOptions
from selfspec.errors import InvalidOption
from selfspec.model.backbone import Backbone

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


@dataclass(frozen=True)
class Loop:
    """A `custom_generate` for one model."""

    backbone: Backbone
    tokenizer: PreTrainedTokenizerBase | None
    options: Callable[[], SpeculationOptions]
    """As they are when it is called."""
    answered: Callable[[Call], list[Generation]]
    """All rows of a call."""
    ends_at: StopStringCriteria | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Ids [B, longest]: prompts and answers."""
        if model is not self.backbone.model:
            raise InvalidOption("this custom_generate belongs to another model. Wrap that model")
        if streamer is None:
            streamer = _callers_streamer()
        if self.ends_at is not None:
            stopping_criteria.append(self.ends_at)
        request = from_prepared(
            self.backbone,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_kwargs,
        )
        call = Call(request, self.options(), self.tokenizer, streamer, greeted=True)
        return sequences(request, self.answered(call))


def _callers_streamer() -> BaseStreamer | None:
    """What the `generate` that runs now was given; None where no `generate` runs.

    transformers (5.17 to 5.23) gives the prompt to the streamer, but the streamer to its own loops
    alone: to a callable it hands only keywords that its loops do not have. Whatever else sees it
    belongs to the model, which is never changed. Where this finds nothing, the answer comes whole.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("streamer")


def check_drafting(keywords: Iterable[str]) -> None:
    """Raise InvalidOption for keywords of `generate` that are not about drafts."""
    for name in keywords:
        if name in GenerateOptions.__annotations__ and name not in OPTION_NAMES:
            raise InvalidOption(f"{name} is for model.generate itself. Give it there")


def sequences(request: Request, answers: list[Generation]) -> Tensor | GenerateDecoderOnlyOutput:
    """Prompts and answers as Hugging Face returns them: [B, longest], padded on the right."""
    longest = max(len(answer.token_ids) for answer in answers)
    padded = [
        answer.token_ids + [request.pad_token_id] * (longest - len(answer.token_ids))
        for answer in answers
    ]
    ids = torch.cat([request.input_ids, request.input_ids.new_tensor(padded)], dim=1)
    return GenerateDecoderOnlyOutput(sequences=ids) if request.return_dict else ids  # type: ignore[arg-type]  # annotated LongTensor upstream
