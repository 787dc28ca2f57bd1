"""Whether a model may be cut into segments, and whether other executors compute what it does.

Comes in: a model, or a Backbone made of it. Goes out: nothing, or an error that says where they
part. Called by the backbone when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from selfspec.errors import UnsupportedModel
from selfspec.executors import Executor
from selfspec.executors.generic import MASKS, attention_types
from selfspec.hooks import captured_outputs
from selfspec.kv_cache import KVCache
from selfspec.parts import text_config

if TYPE_CHECKING:
    from selfspec.backbone import Backbone

_CHECK_PREFIX, _CHECK_BLOCK = 7, 3
"""Rows of the conformance check: a first pass on an empty cache, then a block behind it."""

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
            f"{name} uses {found.pop()} RoPE, whose rotations depend on rejected drafts"
        )
    if others := set(attention_types(config)) - MASKS.keys():
        raise UnsupportedModel(f"{name} has {others.pop()} layers, which cannot be rewound")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{name} shares keys and values between layers")


def check_conformance(backbone: Backbone) -> None:
    """Raise UnsupportedModel at the first layer whose bits differ from `model.forward`.

    A random block goes through both on an empty cache, then a second one behind it, ours in two
    segments. Costs four short passes.
    """
    device, num_layers = backbone.device, backbone.num_layers
    generator = torch.Generator().manual_seed(0)
    shape = (1, _CHECK_PREFIX + _CHECK_BLOCK)
    ids = torch.randint(backbone.vocab_size, shape, generator=generator).to(device)
    theirs, ours = DynamicCache(), KVCache(num_layers)
    with torch.inference_mode(), evaluation(backbone.model):
        for block in ids.split([_CHECK_PREFIX, _CHECK_BLOCK], dim=1):
            start = ours.length(0)
            positions = torch.arange(start, start + block.shape[1], device=device)[None]
            with captured_outputs(list(backbone.layers)) as expected:
                logits = backbone.model(
                    block, past_key_values=theirs, position_ids=positions
                ).logits.float()
            hidden = backbone.embed(block)
            for layer in range(num_layers):
                hidden = backbone.run(hidden, layer, layer + 1, positions, ours)
                _require_equal(hidden, expected[layer], f"layer {layer + 1}", backbone)
            _require_equal(backbone.logits(hidden), logits, "the logits", backbone)


def check_agreement(
    backbone: Backbone, other: Executor, done: Callable[[nn.Module], object] = lambda _: None
) -> None:
    """Raise ValueError unless `other` computes each layer, and the logits, up to rounding.

    Both get the same inputs layer by layer, so that errors do not add up and none can hide. Each
    layer is handed to `done` when it has been read.
    """
    caches = KVCache(backbone.num_layers), KVCache(backbone.num_layers)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(backbone.vocab_size, (1, _CHECK_PREFIX + _CHECK_BLOCK), generator=generator)
    ids = ids.to(backbone.device)
    bound = _AGREEMENT[backbone.dtype]
    with torch.inference_mode(), evaluation(backbone.model):
        for block in ids.split([_CHECK_PREFIX, _CHECK_BLOCK], dim=1):
            start = caches[0].length(0)
            positions = torch.arange(start, start + block.shape[1], device=ids.device)[None]
            hidden = backbone.embed(block)
            for layer in range(backbone.num_layers):
                ours = backbone.run(hidden, layer, layer + 1, positions, caches[0])
                theirs = other.run(hidden, layer, layer + 1, positions, caches[1])
                if not _size(theirs - ours) <= bound * _size(ours - hidden):
                    raise ValueError(f"layer {layer + 1} comes out differently")
                done(backbone.layers[layer])
                hidden = ours
            logits = backbone._executor.logits(hidden)
            if not _size(other.logits(hidden) - logits) <= bound * _size(logits):
                raise ValueError("the logits come out differently")


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
            f"by up to {difference:.3g}: its decoder does more than embed, layers, norm, lm_head"
        )
