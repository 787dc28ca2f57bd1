"""From text to tokens and back: prompts in, pieces of an answer out, up to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.api.chat_template import advice, apply_template
from selfspec.decoding.stats import Round
from selfspec.errors import InvalidOption, InvalidPrompt, shown

Prompt = str | list[dict[str, str]] | list[int] | Tensor | np.ndarray[Any, Any]
"""A question as text, a conversation, or token ids ([P] or [B, P])."""

_ADVICE: tuple[tuple[Any, str], ...] = (
    (PurePath, "Give the text of the file: path.read_text()"),
    (bytes, "Decode it to text: prompt.decode()"),
    (Mapping, "Give its input_ids, or a list of messages"),
    (Iterator, "Give many prompts to generate_each"),
)
"""Advice for types that people give in place of a prompt."""


def encode(
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Prompt,
    *,
    raw: bool = False,
    tools: list[dict[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Tensor:
    """Encode a prompt as token ids [B, P]; text becomes one user turn if there is a chat template.

    The template shows `tools` to the model, if it can, and reads `variables`; `raw` tokenises text
    without it. Raises InvalidPrompt for an empty or invalid prompt, and for text without a
    tokenizer; InvalidOption for variables that no template reads.
    """
    given = _given_ids(prompt)
    plain = raw or getattr(tokenizer, "chat_template", None) is None
    if variables and (plain or given is not None):
        raise InvalidOption("chat_template_kwargs needs text in a chat template. Leave it out")
    if given is not None:
        return given
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    _check_messages(messages, is_text=isinstance(prompt, str))
    if tokenizer is None:
        raise InvalidPrompt("a prompt in words needs a tokenizer. Give one to selfspec.wrap")
    text: Any = prompt
    if not plain:
        text = apply_template(
            tokenizer,
            messages,
            tools=tools or None,
            add_generation_prompt=True,
            variables=variables,
        )
    elif not isinstance(prompt, str) and tokenizer.chat_template is None:
        raise InvalidPrompt(
            "messages need a chat template, but this model was loaded with none. "
            f"{advice(tokenizer.name_or_path)}; or give text alone: --raw, /v1/completions"
        )
    elif not isinstance(prompt, str):
        raise InvalidPrompt("raw is for text, the prompt is messages. Leave raw out, or give text")
    ids: Tensor = tokenizer(text, add_special_tokens=plain, return_tensors="pt")["input_ids"]
    return ids


def _given_ids(prompt: Any) -> Tensor | None:
    """The ids of a prompt that consists of them, [B, P]; None for words. Raises InvalidPrompt."""
    if isinstance(prompt, np.ndarray) and prompt.dtype.kind in "iu":
        prompt = torch.from_numpy(prompt.astype(np.int64))  # any byte order or strides
    if isinstance(prompt, Tensor):
        return _checked_ids(prompt)
    if not isinstance(prompt, str | list | tuple):
        hint = next((f". {text}" for kind, text in _ADVICE if isinstance(prompt, kind)), "")
        expected = f"expected a question, messages or token ids{hint}"
        raise InvalidPrompt(f"the prompt is {shown(prompt)}, {expected}")
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise InvalidPrompt("the prompt is empty. Give a question, messages or token ids")
    words = isinstance(prompt, str) or isinstance(prompt[0], Mapping)
    return None if words else _listed_ids(prompt)


def _checked_ids(ids: Tensor) -> Tensor:
    """Convert ids [P] or [B, P] of any integer type to [B, P], int64. Raises InvalidPrompt."""
    integral = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not integral or ids.is_quantized or ids.is_meta or ids.layout is not torch.strided:
        kind = "meta" if ids.is_meta else str(ids.dtype).removeprefix("torch.")
        raise InvalidPrompt(f"the prompt is a tensor of {kind}, expected whole numbers: token ids")
    if ids.dim() not in (1, 2):
        raise InvalidPrompt(
            f"the prompt is a tensor {list(ids.shape)}, expected [P], or [B, P] for a batch"
        )
    return ids.long() if ids.dim() == 2 else ids[None].long()


def _listed_ids(ids: Sequence[Any]) -> Tensor:
    """Convert a list of ids to [1, P]. Raises InvalidPrompt for a list of anything else."""
    for place, token in enumerate(ids):
        integral = isinstance(token, Integral) and not isinstance(token, bool)
        if not integral or not -(2**63) <= token < 2**63:
            several = isinstance(token, str | list | tuple | Tensor | np.ndarray)
            hint = "Give several prompts to generate_batch" if several else "Give one kind"
            raise InvalidPrompt(
                f"item {place} of the prompt is {shown(token)}, expected token ids alone, or "
                f"messages alone. {hint}"
            )
    return torch.tensor([[int(token) for token in ids]])


def _check_messages(messages: Sequence[Any], *, is_text: bool) -> None:
    """Raise InvalidPrompt at the first invalid message; `is_text`: the prompt is one text."""
    for place, message in enumerate(messages):
        label = "the prompt" if is_text else f"message {place}"
        if not isinstance(message, Mapping):
            raise InvalidPrompt(f"{label} is {shown(message)}, expected a role and content")
        if not isinstance(message.get("role"), str):
            raise InvalidPrompt(f"{label} has no role. Give user, assistant or system")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        if not isinstance(content, str):
            raise InvalidPrompt(f"{label} has {shown(content)} as its content, expected text")
        try:  # no tokenizer accepts a lone surrogate
            content.encode()
        except UnicodeEncodeError as error:
            raise InvalidPrompt(
                f"{label} is no Unicode text: character {error.start} is half of one. Remove it"
            ) from error


class TextDecoder:
    """Turns a growing list of tokens into pieces of text; if its bytes are text, they join to it.

    A piece is held back while it ends within a character of several tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, special: bool = False) -> None:
        """Without a tokenizer all pieces are empty. `special`: keep the text of special tokens."""
        self._decode: Callable[[list[int]], Any] | None = None
        if tokenizer is not None:
            self._decode = partial(tokenizer.decode, skip_special_tokens=not special)
        self._tokens: list[int] = []
        self._context = 0  # decoding starts here: some tokens decode differently after others
        self._shown_count = 0  # tokens before this one are in earlier pieces

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Return the text that `tokens` add; `last`: with all text that was held back."""
        if self._decode is None:
            return ""
        self._tokens += tokens
        old_text = str(self._decode(self._tokens[self._context : self._shown_count]))
        new_text = str(self._decode(self._tokens[self._context :]))
        if new_text == old_text or (new_text.endswith("\N{REPLACEMENT CHARACTER}") and not last):
            return ""
        self._context, self._shown_count = self._shown_count, len(self._tokens)
        return new_text[len(old_text) :]


class TokenTexts:
    """A tokenizer's tokens as text, each decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Without a tokenizer, a token's text is its id in angle brackets."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def of(self, token: int) -> str:
        """The text of one token in the middle of a text, with its leading space."""
        if self._tokenizer is None:
            return f"<{token}>"
        if token not in self._texts:
            # after another token, because some tokenizers drop the space that opens a text
            prefix = list(self._tokenizer("a", add_special_tokens=False)["input_ids"])
            text = str(self._tokenizer.decode([*prefix, token]))
            self._texts[token] = text.removeprefix(str(self._tokenizer.decode(prefix)))
        return self._texts[token]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each token adds, special tokens included; the pieces join to the whole."""
        if self._tokenizer is None:
            return [self.of(token) for token in tokens]
        decoder = TextDecoder(self._tokenizer, special=True)
        last = len(tokens) - 1
        return [decoder.push([token], last=place == last) for place, token in enumerate(tokens)]


class UntilStop:
    """Passes on text up to the first stop string; holds back text that may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(filter(None, stops))
        self._pending = ""
        self.has_stopped = False
        """Whether a stop was found; no text is passed on after it."""

    def push(self, text: str, *, last: bool = False) -> str:
        """Return text that no stop can cut any more; `last`: with all text that was held back."""
        if self.has_stopped:
            return ""
        text = self._pending + text
        ends = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.has_stopped, self._pending = True, ""
            return text[: min(ends)]
        size = 0 if last else max((overlap_length(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - size :]
        return text[: len(text) - size]


def overlap_length(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def is_end(tokenizer: PreTrainedTokenizerBase | None, entry: Round, token: int) -> bool:
    """Whether a token is the end token, which is not shown even if it is not marked as special."""
    ends = entry.stop_reason == "eos" and token == entry.tokens[-1]
    return ends and tokenizer is not None and token in tokenizer.added_tokens_decoder
