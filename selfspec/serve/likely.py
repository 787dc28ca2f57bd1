"""How likely tokens were, in OpenAI's two shapes: of chats, and of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.decoding.likely import Logprob

_HALF = "\N{REPLACEMENT CHARACTER}"

Entry = dict[str, Any]
"""Of one token, as a chat's answer has it."""


def entry(found: Logprob, tokenizer: PreTrainedTokenizerBase | None) -> Entry:
    """A token and the likeliest in its place."""
    top = [_one(token, logprob, tokenizer) for token, logprob in found.top]
    return _one(found.token, found.logprob, tokenizer) | {"top_logprobs": top}


def of_chat(entries: Sequence[Entry]) -> dict[str, Any]:
    """`logprobs` of a choice, or of a chunk."""
    return {"content": list(entries), "refusal": None}


def of_text(entries: Sequence[Entry], offset: int) -> dict[str, Any]:
    """The same for `/v1/completions`; `offset`: characters in front of the first token."""
    offsets = []
    for one in entries:
        offsets.append(offset)
        offset += len(one["token"])
    return {
        "tokens": [one["token"] for one in entries],
        "token_logprobs": [one["logprob"] for one in entries],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in entries
        ],
        "text_offset": offsets,
    }


def _one(token: int, logprob: float, tokenizer: PreTrainedTokenizerBase | None) -> Entry:
    """Half of a character has no bytes here: a tokenizer gives text alone."""
    text = "" if tokenizer is None else str(tokenizer.decode([token]))
    data = None if _HALF in text else [*text.encode()]
    return {"token": text, "logprob": logprob, "bytes": data}
