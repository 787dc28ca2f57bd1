"""Runs the model's own layers, any family: the same modules, masks and kernels as its forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from selfspec.model.kv_cache import KVCache
from selfspec.model.parts import DecoderParts

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
MASKS = {
    FULL: create_causal_mask,
    SLIDING: create_sliding_window_causal_mask,
    CHUNKED: create_chunked_causal_mask,
}
"""Attention types whose layers keep one key and value per position, and who makes their masks."""


class LayerCache(Protocol):
    """What a decoder layer asks of a cache."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append [B, heads, T, head_dim] to `layer`; what its queries see, [B, heads, S, ..]."""


class GenericExecutor:
    """Calls `decoder.layers[i]` directly, with masks sized by the layers that are run."""

    min_rows = 1

    def __init__(self, decoder: DecoderParts, lm_head: nn.Module) -> None:
        self.decoder = decoder
        self._lm_head = lm_head
        self.layer_types = attention_types(decoder.config)
        rotary = decoder.rotary_emb
        taken = {} if rotary is None else inspect.signature(rotary.forward).parameters
        self._rotary_by_type = "layer_type" in taken  # Gemma3 has one base frequency per type

    def run(self, hidden: Tensor, first: int, last: int, positions: Tensor, kv: KVCache) -> Tensor:
        """Layers first+1..last on [B, T, d] at `positions` [B, T]; appends T positions to `kv`."""
        types = set(self.layer_types[first:last])
        masks = {kind: self._mask(kind, hidden, first, positions, kv) for kind in types}
        return self.run_layers(hidden, first, last, positions, kv, masks)

    def run_layers(
        self,
        hidden: Tensor,
        first: int,
        last: int,
        positions: Tensor,
        kv: LayerCache,
        masks: Mapping[str, Any],
    ) -> Tensor:
        """Layers first+1..last on [B, T, d], with a mask for each attention type among them."""
        if first == 0:
            hidden = self.decoder.with_positions(hidden, positions)
        rotations = self._rotations(hidden, positions, masks.keys())
        for layer in range(first, last):
            kind = self.layer_types[layer]
            output = self.decoder.layers[layer](
                hidden,  # positional: hooks and checkpoint wrappers read args[0]
                attention_mask=masks[kind],
                position_ids=positions,
                use_cache=True,
                **{self.decoder.cache_keyword: kv},
                **rotations[kind],
            )
            hidden = output[0] if isinstance(output, tuple) else output
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of layer L, [B, T, d] -> final norm and lm_head, [B, T, V]."""
        product: Tensor = self._lm_head(self.decoder.norm(hidden))
        return product

    def _mask(self, kind: str, hidden: Tensor, first: int, positions: Tensor, kv: KVCache) -> Any:
        """The mask for T rows behind what layer first+1 holds; None only where sdpa needs none."""
        return MASKS[kind](
            config=self.decoder.config,
            inputs_embeds=hidden,
            attention_mask=None,
            past_key_values=kv,  # type: ignore[arg-type]  # our cache offers what masks need
            position_ids=positions,
            layer_idx=first,
        )

    def _rotations(
        self, hidden: Tensor, positions: Tensor, types: Iterable[str]
    ) -> dict[str, dict[str, Any]]:
        """What layers of each type are given of positions, as keywords."""
        rotary = self.decoder.rotary_emb
        if rotary is None:
            return {kind: {} for kind in types}
        if self._rotary_by_type:
            made = {kind: rotary(hidden, positions, kind) for kind in types}
        else:
            made = dict.fromkeys(types, rotary(hidden, position_ids=positions))
        return {kind: {"position_embeddings": rotations} for kind, rotations in made.items()}


def attention_types(config: PreTrainedConfig) -> list[str]:
    """Attention type of each layer; one for all, by `sliding_window`, if the config names none."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return list(types)
    one = FULL if getattr(config, "sliding_window", None) is None else SLIDING
    return [one] * config.num_hidden_layers
