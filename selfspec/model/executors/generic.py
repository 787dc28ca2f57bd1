"""Runs the model's own layers, any family: the same modules, masks and kernels as its forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from selfspec.model.executors import Claims
from selfspec.model.executors.masks import MASKS, tree_mask
from selfspec.model.kv_store import Lease
from selfspec.model.parts import DecoderParts, attention_types
from selfspec.model.rows import Rows


class LayerCache(Protocol):
    """What a decoder layer asks of a cache."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append [B, heads, T, head_dim] to `layer`; what its queries see, [B, heads, S, ..]."""


class GenericExecutor:
    """Calls `decoder.layers[i]` directly, with masks sized by the layers that are run."""

    claims = Claims(trees=True)

    def __init__(self, decoder: DecoderParts, lm_head: nn.Module) -> None:
        self.decoder = decoder
        self._lm_head = lm_head
        self.layer_types = attention_types(decoder.config)
        self._rotates_by_kind = decoder.rotates_by_kind

    @property
    def weight_bytes(self) -> int:
        """Bytes of all layers, the final norm and lm_head; shared weights count once."""
        parts = nn.ModuleList([self.decoder.layers, self.decoder.norm, self._lm_head])
        return sum(weight.nbytes for weight in parts.parameters())

    def run(self, hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        """Layers first+1..last on [T, d]; adds keys and values of T positions to the lease."""
        span, block, positions = rows.only, hidden[None], rows.positions[None]
        kinds = set(self.layer_types[first:last])
        if span.parents is None:
            masks = self.masks(kinds, block, first, positions, span.lease)
        else:
            start = span.lease.length(first)
            width = span.lease.get_mask_sizes(span.count, first)[0]
            masks = {
                kind: tree_mask(
                    kind, self.decoder.config, rows.positions, span.parents, start, width, hidden
                )
                for kind in kinds
            }
        return self.run_layers(block, first, last, positions, span.lease, masks)[0]

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
        """Output of layer L, [T, d] -> final norm and lm_head, [T, V]."""
        product: Tensor = self._lm_head(self.decoder.norm(hidden[None]))
        return product[0]

    def masks(
        self, kinds: Iterable[str], hidden: Tensor, first: int, positions: Tensor, lease: Lease
    ) -> dict[str, Any]:
        """By attention type, for [B, T, d] behind what layer first+1 holds.

        None where sdpa needs none.
        """
        return {
            kind: MASKS[kind](
                config=self.decoder.config,
                inputs_embeds=hidden,
                attention_mask=None,
                past_key_values=lease,  # type: ignore[arg-type]  # it offers what masks need
                position_ids=positions,
                layer_idx=first,
            )
            for kind in kinds
        }

    def _rotations(
        self, hidden: Tensor, positions: Tensor, types: Iterable[str]
    ) -> dict[str, dict[str, Any]]:
        """What layers of each type are given of positions, as keywords."""
        decoder, kinds = self.decoder, list(types)
        if decoder.rotary_emb is None:
            return {kind: {} for kind in kinds}
        if self._rotates_by_kind:
            made = {kind: decoder.rotations(hidden, positions, kind) for kind in kinds}
        else:
            made = dict.fromkeys(kinds, decoder.rotations(hidden, positions, kinds[0]))
        return {kind: {"position_embeddings": rotations} for kind, rotations in made.items()}
