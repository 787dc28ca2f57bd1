"""Whether a model may be cut into segments, and whether other executors compute what it does.

Comes in: a model, or a Backbone made of it. Goes out: nothing, or an error that says where they
part. Called by the backbone when it is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from selfspec.errors import UnsupportedModel
from selfspec.model.executors import Executor
from selfspec.model.executors.generic import MASKS, attention_types
from selfspec.model.hooks import captured_outputs
from selfspec.model.kv_cache import KVCache
from selfspec.model.parts import text_config

if TYPE_CHECKING:
    from selfspec.model.backbone import Backbone

_CHECK_PREFIX, _CHECK_BLOCK = 7, 3
"""Rows of the conformance check: a first pass on an empty cache, then a block behind it."""

_INSTEAD = "Use transformers' own generate for it"

_NAMES_POSITIONS = re.compile(r"window(?!_layers)|position|chunk|context|seq|length|floor")
"""Names of config fields that count positions: sliding_window, original_max_position_embeddings."""

_MOST_NAMED = 8
"""Positions named by a config that are looked at, from the first; no config in use has more."""

_MOST_HELD = 8192
"""Slots that a check fills: with 8 key heads of 128, 67 MB of a layer in float32."""

_MARKED = 16
"""Slots of a check's cache whose values are not 0."""

_POSITION_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""RoPE whose frequencies depend on the longest position of a pass: a rejected draft would leave
its trace in the rotations of accepted tokens."""

_AGREEMENT = {
    torch.float64: 1e-4,  # the softmax of eager attention is float32
    torch.float32: 1e-4,
    torch.bfloat16: 0.05,
    torch.float16: 0.01,
}
"""Largest error of another executor, relative to what a layer adds (root mean square). Rounding
gives 1.5e-6 and 0.023 on the default model; a forgotten factor or norm gives more than this."""


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel, by name, for what would pass a short check and still go wrong."""
    config, name = text_config(model), type(model).__name__
    rope = getattr(config, "rope_parameters", None) or {}
    rope_types = {rope.get("rope_type")} | {
        value.get("rope_type") for value in rope.values() if isinstance(value, dict)
    }
    if found := rope_types & _POSITION_DEPENDENT_ROPE:
        raise UnsupportedModel(
            f"{name} uses {found.pop()} RoPE, whose rotations depend on rejected drafts. {_INSTEAD}"
        )
    if others := set(attention_types(config)) - MASKS.keys():
        raise UnsupportedModel(
            f"{name} has {sorted(others)[0]} layers, which cannot be rewound. {_INSTEAD}"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{name} shares keys and values between layers. {_INSTEAD}")


def check_conformance(backbone: Backbone) -> None:
    """Raise UnsupportedModel at the first layer whose bits differ from `model.forward`.

    Random blocks go through both, one layer of ours at a time: one at the first positions, one
    behind it, and one for each stretch of `stretches`. Costs two short passes each.
    """
    num_layers, ids = backbone.num_layers, _random_ids(backbone, seed=0)
    theirs, ours = DynamicCache(), KVCache(num_layers)
    with evaluation(backbone.model):
        for block in ids.split([_CHECK_PREFIX, _CHECK_BLOCK], dim=1):
            _conform(backbone, block, ours.length(0), theirs, ours)
        for start, held in stretches(backbone):
            _conform(
                backbone, ids, start, PlantedCache(num_layers, held), PlantedCache(num_layers, held)
            )


def _conform(backbone: Backbone, ids: Tensor, start: int, theirs: Any, ours: KVCache) -> None:
    """Compare one block at positions from `start` on, behind what the caches hold."""
    positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    with captured_outputs(list(backbone.layers)) as expected:
        output = backbone.model(ids, past_key_values=theirs, position_ids=positions)
    if (found := output.logits.shape[1]) != ids.shape[1]:
        raise UnsupportedModel(
            f"{type(backbone.model).__name__} runs {found} rows for {ids.shape[1]} tokens: it adds "
            f"its own (prompt tuning does). {_INSTEAD}"
        )
    hidden = backbone.embed(ids)
    for layer in range(backbone.num_layers):
        hidden = backbone.run(hidden, layer, layer + 1, positions, ours)
        where = f"layer {layer + 1}" + (f" behind {start} positions" if start else "")
        _require_equal(hidden, expected[layer], where, backbone)
    _require_equal(backbone.logits(hidden), output.logits.float(), "the logits", backbone)


def check_agreement(
    backbone: Backbone, other: Executor, done: Callable[[nn.Module], object] = lambda _: None
) -> None:
    """Raise ValueError unless `other` computes each layer, and the logits, up to rounding.

    Both get the same inputs layer by layer, so that errors do not add up and none can hide; at the
    places of the conformance check. Each layer is handed to `done` when it has been read.
    """
    num_layers, ids = backbone.num_layers, _random_ids(backbone, seed=1)
    caches = KVCache(num_layers), KVCache(num_layers)
    with torch.inference_mode(), evaluation(backbone.model):
        for block in ids.split([_CHECK_PREFIX, _CHECK_BLOCK], dim=1):
            _agree(backbone, other, block, caches[0].length(0), caches, done)
        for start, held in stretches(backbone):
            caches = PlantedCache(num_layers, held), PlantedCache(num_layers, held)
            _agree(backbone, other, ids, start, caches, done)


def _agree(
    backbone: Backbone,
    other: Executor,
    ids: Tensor,
    start: int,
    caches: tuple[KVCache, KVCache],
    done: Callable[[nn.Module], object],
) -> None:
    """Compare one block at positions from `start` on, behind what the caches hold."""
    bound = _AGREEMENT[backbone.dtype]
    positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    hidden = backbone.embed(ids)
    for layer in range(backbone.num_layers):
        ours = backbone.run(hidden, layer, layer + 1, positions, caches[0])
        theirs = other.run(hidden, layer, layer + 1, positions, caches[1])
        if not _size(theirs - ours) <= bound * _size(ours - hidden):
            raise ValueError(f"layer {layer + 1} comes out differently at position {start}")
        done(backbone.layers[layer])
        hidden = ours
    logits = backbone._executor.logits(hidden)
    if not _size(other.logits(hidden) - logits) <= bound * _size(logits):
        raise ValueError("the logits come out differently")


def stretches(backbone: Backbone) -> list[tuple[int, int]]:
    """Where else to look: first position, and filled slots in front of it.

    Just under the model's limit, and across every position that its config names. Up to
    _MOST_HELD, slots are filled as in a text of that length; beyond, positions alone are far and no
    slot is filled: a window wider than that is not tried.
    """
    rows, limit = _CHECK_PREFIX + _CHECK_BLOCK, backbone.max_positions
    named = sorted(named_positions(backbone.config.to_dict(), limit))[:_MOST_NAMED]
    starts = {max(0, min(place - _CHECK_PREFIX, limit - rows)) for place in (*named, limit)}
    return [(start, start if start <= _MOST_HELD else 0) for start in sorted(starts - {0})]


def named_positions(fields: Mapping[str, Any], limit: int) -> set[int]:
    """Numbers below `limit` in a config, nested ones too, whose names speak of positions."""
    found: set[int] = set()
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found |= named_positions(value, limit)
        elif isinstance(value, int | float) and _NAMES_POSITIONS.search(name):
            found |= {int(value)} if 1 < value < limit else set()
    return found


class PlantedCache(KVCache):
    """Says that it holds positions, of keys 0 and values that show who looks at which.

    It forgets what a layer adds: one block runs through it, and memory is needed for one layer
    only. The first values, which lie at the edge of a window, outweigh all others together.
    """

    def __init__(self, num_layers: int, held: int) -> None:
        super().__init__(num_layers)
        self._held = held
        self.extend(held, 0, num_layers)

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, seen: int = 0, **__: object
    ) -> tuple[Tensor, Tensor]:
        """As of any cache."""
        self._plant(layer, keys, values)
        found = super().update(keys, values, layer, seen=seen)
        self._keys[layer] = self._values[layer] = None
        return found

    def room(
        self, count: int, first: int, last: int, like: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """As of any cache."""
        for layer in range(first, last):
            self._plant(layer, like, like)
            yield from super().room(count, layer, layer + 1, like)
            self._keys[layer] = self._values[layer] = None

    def move_to(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """As of any cache."""
        super().move_to(keys, values)
        for buffer in values:
            self._mark(buffer)

    def _plant(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill the slots that are said to be filled; the tensors show shape and dtype."""
        if self._keys[layer] is None:
            self._keys[layer] = self._room(None, keys, 0, self._held + 1)
            planted = self._values[layer] = self._room(None, values, 0, self._held + 1)
            self._mark(planted)

    def _mark(self, values: Tensor) -> None:
        count = min(_MARKED, self._held)
        size = torch.arange(1, count + 1, dtype=values.dtype, device=values.device)
        values[..., :count, :] = size[:, None] * (self._held / _MARKED**2)


def _random_ids(backbone: Backbone, *, seed: int) -> Tensor:
    """[1, rows] ids for a check."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, _CHECK_PREFIX + _CHECK_BLOCK)
    return torch.randint(backbone.vocab_size, shape, generator=generator).to(backbone.device)


def _size(values: Tensor) -> float:
    """Root mean square."""
    return float(values.float().square().mean().sqrt())


@contextmanager
def evaluation(model: PreTrainedModel) -> Iterator[None]:
    """Dropout off while open; afterwards the mode that the caller had set."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _require_equal(found: Tensor, expected: Tensor, where: str, backbone: Backbone) -> None:
    if not torch.equal(found, expected.to(found.device)):
        difference = (found.float() - expected.to(found.device).float()).abs().max().item()
        raise UnsupportedModel(
            f"{type(backbone.model).__name__} differs from its own forward at {where} "
            f"by up to {difference:.3g}: its decoder does more than embed, layers, norm, lm_head. "
            f"{_INSTEAD}"
        )
