"""Prompts of unequal lengths in, what the model says next out: many rows at once.

Hugging Face's own `generate` does the work, on prompts of like length and a few tokens at a time;
in between, rows that have ended or fallen into a loop leave the batch. Called by `selfgen`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

CHUNK = 16
"""Tokens between two looks at the batch."""

_ROOM = 128  # positions: growing costs one copy, a hundred times less often than at every step

LOOP_NGRAM = 8
"""Tokens whose third occurrence makes a loop."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float | None = None
    """None: greedy, the likeliest token."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0: from all."""

    def keywords(self) -> dict[str, Any]:
        """As `GenerationConfig` names them."""
        if self.temperature is None:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k}


def continued(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    ends: frozenset[int],
    sampling: Sampling,
    watch: Callable[[int], None],
) -> list[list[int]]:
    """New ids of each prompt, at most `max_new_tokens`, with the one of `ends` that ended it.

    A row that loops is given up soon after. Draws come from torch's global generator. `watch` hears
    of tokens as they come.
    """
    made: list[list[int]] = [[] for _ in prompts]
    if not prompts:
        return made
    base = GenerationConfig(
        eos_token_id=sorted(ends), pad_token_id=min(ends), **sampling.keywords()
    )
    groups = _of_like_length(prompts)
    order = [index for group in groups for index in group]  # the prompt behind each row
    with _neutral(model), torch.no_grad():
        parts = [_Rows.of([prompts[index] for index in group], model.device) for group in groups]
        new = [tokens for part in parts for tokens in part.extend(model, base, 1)]
        rows = _Rows.joined(parts)
        while True:
            for index, tokens in zip(order, new, strict=True):
                made[index] += _through_end(tokens, ends)
            watch(sum(len(_through_end(tokens, ends)) for tokens in new))
            written = max(map(len, made))
            kept = [row for row, index in enumerate(order) if _goes_on(made[index], ends)]
            if not kept or written == max_new_tokens:
                return made
            order = [order[row] for row in kept]
            rows.keep(kept)
            new = rows.extend(model, base, min(CHUNK, max_new_tokens - written))


@dataclass
class _Rows:
    """The rows of a batch and their keys and values."""

    ids: Tensor
    """[B, T], padded on the left."""
    mask: Tensor
    """[B, T], 0 on padding."""
    cache: Cache

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], device: torch.device) -> _Rows:
        """Prompts that the model has not read yet."""
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        return cls(ids.to(device), mask.to(device), Cache(layer_class_to_replicate=_RoomyLayer))

    @classmethod
    def joined(cls, parts: Sequence[_Rows]) -> _Rows:
        """All rows, padded to the longest: a step costs little more for many rows than for few."""
        longest = max(part.ids.shape[1] for part in parts)
        pads = [longest - part.ids.shape[1] for part in parts]
        ids = torch.cat([F.pad(part.ids, (pad, 0)) for part, pad in zip(parts, pads, strict=True)])
        mask = torch.cat(
            [F.pad(part.mask, (pad, 0)) for part, pad in zip(parts, pads, strict=True)]
        )
        cache = Cache(layer_class_to_replicate=_RoomyLayer)
        for number, layers in enumerate(zip(*(part.cache.layers for part in parts), strict=True)):
            keys = [
                F.pad(layer.keys, (0, 0, pad, 0)) for layer, pad in zip(layers, pads, strict=True)
            ]
            values = [
                F.pad(layer.values, (0, 0, pad, 0)) for layer, pad in zip(layers, pads, strict=True)
            ]
            cache.update(torch.cat(keys), torch.cat(values), number)
        return cls(ids, mask, cache)

    def extend(
        self, model: PreTrainedModel, config: GenerationConfig, count: int
    ) -> list[list[int]]:
        """Up to `count` new ids of every row; fewer if all of them end."""
        length = self.ids.shape[1]
        config.max_new_tokens = count
        generate: Any = model.generate  # typed as a Tensor or Module in some versions
        self.ids = generate(
            self.ids,
            attention_mask=self.mask,
            past_key_values=self.cache,
            generation_config=config,
        )
        new = self.ids[:, length:]
        self.mask = torch.cat([self.mask, torch.ones_like(new)], dim=1)
        ids: list[list[int]] = new.tolist()
        return ids

    def keep(self, rows: list[int]) -> None:
        """Only these rows, by their place in the batch."""
        chosen = torch.tensor(rows, dtype=torch.int64)
        self.ids, self.mask = self.ids[chosen], self.mask[chosen]
        self.cache.batch_select_indices(chosen)


class _RoomyLayer(DynamicLayer):
    """Keys and values with room behind them: a step writes one position, and copies nothing.

    transformers' own layer copies all positions at every step, which took 61 % of the time of 40
    rows at 250 positions on a CPU.
    """

    _buffers: tuple[Tensor, Tensor]
    """[B, kv heads, slots, head_dim] each; `keys` and `values` are the part that is filled."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append [B, kv heads, T, head_dim]; all that the layer holds."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = (key_states[:, :, :0], value_states[:, :, :0])
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self._buffers[0].shape[-2]:
            grown = [
                part.new_empty(*part.shape[:2], end + _ROOM, part.shape[3])
                for part in self._buffers
            ]
            for new, old in zip(grown, self._buffers, strict=True):
                new[:, :, :start] = old[:, :, :start]
            self._buffers = (grown[0], grown[1])
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        return self._show(end)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows."""
        length = self.get_seq_length()
        keys, values = self._buffers
        self._buffers = (keys[indices], values[indices])
        self._show(length)

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        keys, values = (part[:, :, :length] for part in self._buffers)
        self.keys, self.values = keys, values
        return keys, values


def loop_start(ids: Sequence[int]) -> int | None:
    """Where the second turn of a loop begins, so that one stays; None without a loop."""
    places: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(ids) - LOOP_NGRAM + 1):
        found = places.setdefault(tuple(ids[start : start + LOOP_NGRAM]), [])
        found.append(start)
        if len(found) == 3:
            return found[1]
    return None


def _goes_on(ids: list[int], ends: frozenset[int]) -> bool:
    return ids[-1] not in ends and loop_start(ids) is None


def _through_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """`tokens` up to the first end token, included; padding stands behind it."""
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens


def _of_like_length(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of `prompts`, those together whose lengths differ by less than a factor of two.

    To read padding takes as long as to read text: a few long prompts would slow all others down.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index])):
        if groups and len(prompts[index]) < 2 * len(prompts[groups[-1][0]]):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


@contextmanager
def _neutral(model: PreTrainedModel) -> Iterator[None]:
    """Set the model's own defaults aside: `generate` would add its penalties, top-p and limits."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
