"""From tokens to text: prompts in, pieces of an answer out."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidPrompt

_MOST_TEMPLATE_LINES = 2_000_000
"""A conversation of a hundred turns takes some thousand."""

Prompt = str | list[dict[str, str]] | list[int] | Tensor
"""A question in words, a conversation, or token ids ([P] or [B, P])."""


def encode(
    tokenizer: PreTrainedTokenizerBase | None, prompt: Prompt, *, raw: bool = False
) -> Tensor:
    """Token ids [B, P]. Words become one user turn of the chat template, if there is one.

    `raw` tokenises words as they are. Raises InvalidPrompt for empty prompts, and for words
    without a tokenizer.
    """
    if isinstance(prompt, Tensor):
        return prompt if prompt.dim() == 2 else prompt[None]
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise InvalidPrompt("the prompt is empty. Give a question, messages or token ids")
    if not isinstance(prompt, str) and isinstance(prompt[0], int):
        return torch.tensor([prompt])
    if tokenizer is None:
        raise InvalidPrompt("a prompt in words needs a tokenizer. Give one to selfspec.wrap")
    if isinstance(prompt, str) and (raw or tokenizer.chat_template is None):
        return _ids(tokenizer(prompt, return_tensors="pt"))
    if tokenizer.chat_template is None:
        raise InvalidPrompt("messages need a chat template, the tokenizer has none. Give text")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return _ids(
        templated(
            tokenizer, messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    )


def templated(tokenizer: PreTrainedTokenizerBase, messages: Any, **options: Any) -> Any:
    """What `apply_chat_template` gives; a template is a program from outside.

    Raises InvalidPrompt for messages that it does not take, for its own mistakes, and for one that
    runs without end.
    """
    try:
        with _ended():
            return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InvalidPrompt(
            f"the chat template does not take these messages: {reason or type(error).__name__}. "
            "Give other messages, or a raw prompt"
        ) from error


@contextmanager
def _ended() -> Iterator[None]:
    """Stops a template after as many lines as none needs, with a ValueError."""
    lines = itertools.count()

    def line(*_: Any) -> Any:
        if next(lines) > _MOST_TEMPLATE_LINES:
            raise ValueError(f"it went on for more than {_MOST_TEMPLATE_LINES} lines")
        return line

    def call(frame: FrameType, *_: Any) -> Any:
        """Only the lines of templates are followed."""
        return line() if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


def _ids(encoded: Any) -> Tensor:
    ids: Tensor = encoded["input_ids"]
    return ids


class TextDecoder:
    """Turns a growing list of tokens into pieces of text that join to the decoded whole.

    A piece is held back while it ends within a character of several tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, special: bool = False) -> None:
        """Without a tokenizer all pieces are empty. `special` tokens are left out unless asked."""
        self._tokenizer = tokenizer
        self._skip = not special
        self._tokens: list[int] = []
        self._context = 0  # decoding starts here: some tokens look different behind others
        self._shown = 0  # tokens before this one are in earlier pieces

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The text that `tokens` add; `last` gives up what was held back."""
        if self._tokenizer is None:
            return ""
        self._tokens += tokens
        before = self._decode(self._tokens[self._context : self._shown])
        after = self._decode(self._tokens[self._context :])
        if after == before or (after.endswith("\N{REPLACEMENT CHARACTER}") and not last):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return after[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)  # type: ignore[union-attr]  # push returns early without one
        return str(text)
