"""A model named `selfspec` for EleutherAI's lm-eval; `selfspec lm-eval` runs it.

Scores come from Hugging Face's own forward of the same model, as in lm-eval's `hf`, from which the
class below inherits. Our engine generates the answers, `--batch_size` of them at once.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from selfspec.api import speculator
from selfspec.api.request import stop_strings
from selfspec.config import OPTION_NAMES
from selfspec.errors import InvalidOption, check_keys, first_line

_OURS = {*inspect.signature(speculator.load).parameters, *OPTION_NAMES} - {"model", "options"}
_THEIRS = {
    *("add_bos_token", "batch_size", "chat_template_args", "enable_thinking", "logits_cache"),
    *("max_batch_size", "max_length", "prefix_token_id", "softmax_dtype", "think_end_token"),
    "truncation",
}
"""Arguments of `hf` that do not change how a model is loaded."""


class _InAnswer(StoppingCriteria):
    """Stops that must begin in the answer, as lm-eval's own must."""

    def __init__(self, stops: StoppingCriteria, start: int) -> None:
        self._stops, self._start = stops, start

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        stops: Tensor = self._stops(ids[:, self._start :], scores)
        return stops

    def for_row(self, _: int) -> _InAnswer:
        return self


@register_model("selfspec")
class Selfspec(HFLM):
    """The model of lm-eval. `pretrained` is the model for `selfspec.load`; None is the default one.

    Other `--model_args` are keywords of `selfspec.load`, or those of `hf` for a loaded model.
    Raises InvalidOption for unknown ones.
    """

    def __init__(self, pretrained: str | None = None, **options: Any) -> None:
        check_keys(options, _OURS | _THEIRS | {"pretrained"}, "model argument")
        keywords = {name: options.pop(name) for name in _OURS & options.keys()}
        if keywords.get("heads", "") is None:  # lm-eval parses heads=none as None
            keywords["heads"] = "none"
        if "cuda" in str(keywords.get("device")) and not torch.cuda.is_available():
            del keywords["device"]  # lm-eval's own default
        self.speculator = speculator.load(pretrained, **keywords)
        logger = logging.getLogger(HFLM.__module__)
        level = logger.level
        logger.setLevel(logging.ERROR)  # it warns about models that are already loaded
        try:
            super().__init__(self.speculator.model, tokenizer=self.speculator.tokenizer, **options)
        finally:
            logger.setLevel(level)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **options: Any
    ) -> Tensor:
        """Left-padded prompts [B, P] -> prompts and answers [B, longest]."""
        generate, stops = self.speculator.hf(), stop_strings(self.tokenizer, stop) if stop else None

        def answer(*inputs: Any, stopping_criteria: StoppingCriteriaList, **keywords: Any) -> Any:
            if stops is not None:
                stopping_criteria.append(_InAnswer(stops, context.shape[1]))
            return generate(*inputs, stopping_criteria=stopping_criteria, **keywords)

        tokens: Tensor = super()._model_generate(
            context, max_length, [], custom_generate=answer, **options
        )
        return tokens


def run(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line, with the model `selfspec` by default. Raises InvalidOption."""
    command = list(arguments) or ["run", "--help"]
    if command[0] not in ("ls", "validate"):
        command = ["run", "--model", "selfspec", *command[command[0] == "run" :]]
    argv, sys.argv = sys.argv, ["lm-eval", *command]
    try:
        cli_evaluate()
    except (AssertionError, KeyError, ValueError) as error:
        raise InvalidOption(f"lm-eval: {first_line(error)}") from error
    finally:
        sys.argv = argv
