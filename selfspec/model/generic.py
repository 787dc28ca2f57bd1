"""A decoder's own modules, run separately: embed, run a range of layers, compute logits.

The model is never copied or changed. `check` tests that the parts together give what
`model.forward` gives; other executors run them faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from selfspec.errors import UnsupportedModel
from selfspec.model.kv import KVCache, PageLayout, Rows, ancestors, count_unseen, upload
from selfspec.model.parts import (
    CACHE,
    CHUNKED,
    FULL,
    SHARED,
    SLIDING,
    DecoderParts,
    attention_types,
    foreign_hooks,
    parts_of,
)
from selfspec.model.weights import QuantisedWeight

States = dict[int, list[Tensor]]  # a layer's outputs, in parts of rows as they are computed


@dataclass(frozen=True)
class Claims:
    """An executor's capabilities. The backbone never gives it a pass that it cannot run."""

    steady: bool = False  # a row's bits do not depend on the other rows; the probe tests this
    joins: bool = False  # runs rows of several sequences in a pass; else the backbone splits them
    keeps_states: bool = False  # can also return the states after layers in between
    pages: PageLayout | None = None  # the layout of keys and values, if sequences can share them
    replay: Callable[..., tuple[Tensor, ...]] | None = None  # runs the work of a key by a graph


class Executor(Protocol):
    """Runs a range of decoder layers on a block of rows, and the unembedding."""

    claims: Claims
    weight_bytes: int  # of the weights that a row reads, as kept: all layers' and the unembedding's

    def run(self, hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        """Run [T, d] through layers first+1..last; adds T positions to the KV caches."""

    def unembed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Output of layer L, [T, d] -> normed rows, [T, d], and lm_head's output, [T, V]."""


# --- masks: the positions that a row attends to

MASKS = {
    FULL: create_causal_mask,
    SLIDING: create_sliding_window_causal_mask,
    CHUNKED: create_chunked_causal_mask,
}
"""Attention types whose layers keep one key and value per position, and their mask functions."""


def tree_mask(kind: str, config: PreTrainedConfig, rows: Rows, layer: int, like: Tensor) -> Tensor:
    """The mask for rows of one tree in layer+1, [1, 1, T, width]; siblings share a position."""
    span, positions = rows.span, rows.positions
    parents = span.parents or ()
    start, end = span.kv.length(layer), span.kv.length(layer) + span.count
    slots = torch.arange(span.kv.get_mask_sizes(span.count, layer)[0], device=positions.device)
    slots[start:end] = positions
    unseen = upload(count_unseen(parents), positions.device)
    visible = slots < start - unseen[:, None]
    visible[:, start:end] = ancestors(parents).to(positions.device)
    return as_mask(in_reach(visible, kind, config, positions, slots), config, like)


def in_reach(
    visible: Tensor, kind: str, config: PreTrainedConfig, rows: Tensor, slots: Tensor
) -> Tensor:
    """`visible` [T, S], reduced to the reach of a kind's layers; positions of rows and slots."""
    if kind == SLIDING:
        visible = visible & (rows[:, None] - slots < config.sliding_window)
    elif kind == CHUNKED:
        size = config.attention_chunk_size
        visible = visible & (rows[:, None] // size == slots // size)
    return visible


def as_mask(visible: Tensor, config: PreTrainedConfig, like: Tensor) -> Tensor:
    """[T, S] bool -> [1, 1, T, S] for the model's attention; `like`: for dtype and device."""
    visible = visible.to(like.device)
    if config._attn_implementation == "eager":
        visible = torch.where(visible, like.new_zeros(()), torch.finfo(like.dtype).min)
    return visible[None, None]


def run_layer(layer: nn.Module, hidden: Tensor, **keywords: Any) -> Tensor:
    """Run a layer of the model on [B, T, d], by its own code."""
    output = layer(hidden, **keywords)  # positional: hooks and checkpoint wrappers read args[0]
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


class GenericExecutor:
    """Calls `decoder.layers[i]` directly, with masks sized for the layers that run."""

    claims = Claims()

    def __init__(self, decoder: DecoderParts, lm_head: nn.Module) -> None:
        self.decoder = decoder
        self._lm_head = lm_head
        self.layer_types = attention_types(decoder.config)
        parts = nn.ModuleList([decoder.layers, decoder.norm, lm_head])
        self.weight_bytes = sum(weight.nbytes for weight in parts.parameters())  # shared ones once

    def run(self, hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        span, block, positions = rows.span, hidden[None], rows.positions[None]
        if (limit := self.decoder.position_limit) is not None:  # padding rows may exceed it
            positions = positions.clamp(max=limit - 1)
        if span.parents is None:
            masks = self.masks(block, first, last, positions, span.kv)
        else:
            config, kinds = self.decoder.config, set(self.layer_types[first:last])
            masks = {kind: tree_mask(kind, config, rows, first, hidden) for kind in kinds}
        return self.run_layers(block, first, last, positions, [span.kv] * last, masks)[0]

    def run_layers(
        self,
        hidden: Tensor,
        first: int,
        last: int,
        positions: Tensor,
        caches: Sequence[Any],
        masks: Mapping[str, Any],
        layer_function: Callable[..., Tensor] = run_layer,
    ) -> Tensor:
        """Run [B, T, d] through layers first+1..last; `masks` by kind, `caches` by layer."""
        if first == 0 and (embed := self.decoder.learned_positions) is not None:
            hidden = hidden + embed(positions).to(hidden.device)
        rotations = self._rotations(hidden, positions, list(masks))
        shared: dict[str, Any] = {SHARED: {}} if self.decoder.shares else {}
        for layer in range(first, last):
            kind = self.layer_types[layer]
            hidden = layer_function(
                self.decoder.layers[layer],
                hidden,
                attention_mask=masks[kind],
                position_ids=positions,
                use_cache=True,
                **{self.decoder.cache_keyword: caches[layer]},
                **rotations[kind],
                **shared,
            )
        return hidden

    def unembed(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed: Tensor = self.decoder.norm(hidden[None])
        return normed[0], self._lm_head(normed)[0]

    def masks(
        self, hidden: Tensor, first: int, last: int, positions: Tensor, kv: KVCache
    ) -> dict[str, Any]:
        """Masks by attention type for [B, T, d] in layers first+1..last; None: sdpa needs none."""
        return {
            kind: MASKS[kind](
                config=self.decoder.config,
                inputs_embeds=hidden,
                attention_mask=None,
                position_ids=positions,
                layer_idx=first,
                **{CACHE: kv},  # has the methods that mask functions call
            )
            for kind in set(self.layer_types[first:last])
        }

    def _rotations(
        self, hidden: Tensor, positions: Tensor, kinds: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        decoder = self.decoder
        if decoder.rotary_emb is None:
            return {kind: {} for kind in kinds}
        if decoder.rotates_by_kind:
            by_kind = {kind: decoder.rotations(hidden, positions, kind) for kind in kinds}
        else:
            by_kind = dict.fromkeys(kinds, decoder.rotations(hidden, positions, kinds[0]))
        return {kind: {"position_embeddings": rotations} for kind, rotations in by_kind.items()}


class Decoder:
    """The decoder of `model` as parts that can be run separately."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UnsupportedModel for a model without the parts of a decoder."""
        self.model = model
        self.parts = parts_of(model)
        self.config: Any = self.parts.config
        self.num_layers = int(self.config.num_hidden_layers)
        self.hidden_size = int(self.config.hidden_size)
        self.layers = self.parts.layers
        self.lm_head: Any = model.get_output_embeddings()
        self.generic = GenericExecutor(self.parts, self.lm_head)  # runs the model's own modules
        self.mode: Callable[[], AbstractContextManager[object]] = nullcontext
        """The context in which layers run; by default the caller's, usually inference mode."""

    @property
    def vocab_size(self) -> int:
        """V, the rows of the unembedding."""
        weight = self.lm_head.weight
        if isinstance(weight, Tensor) and weight.shape[1:] == (self.hidden_size,):
            return int(weight.shape[0])
        return int(self.lm_head.out_features)  # quantised weights have other shapes

    @property
    def max_positions(self) -> int:
        """The context length, which texts may exceed with RoPE. Raises UnsupportedModel."""
        if not 0 < (count := int(self.config.max_position_embeddings)) < 1 << 63:
            raise UnsupportedModel(
                f"max_position_embeddings of the model's config is {count}, expected 1 or more, of "
                "64 bits: the model's context length. Set it"
            )
        return min(count, self.parts.position_limit or count)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @cached_property
    def device(self) -> torch.device:
        """The device of the embedding, which reads token ids."""
        embedding: Any = self.parts.embed_tokens
        if embedding.weight.is_meta:  # offloaded: accelerate loads it to this device when called
            hooks = getattr(embedding._hf_hook, "hooks", [embedding._hf_hook])
            devices = (getattr(hook, "execution_device", None) for hook in hooks)
            return torch.device(next(device for device in devices if device is not None))
        return embedding.weight.device  # type: ignore[no-any-return]  # untyped module attribute

    def embed(self, ids: Tensor) -> Tensor:
        """[T] ids -> [T, d] at boundary 0; `run` adds positions, learned ones too."""
        with self.mode():
            return self.parts.embed(ids[None])[0]

    def embed_listed(self, ids: Sequence[int]) -> Tensor:
        """The same for ids that are on the host."""
        if self._blocks is None:
            return self.embed(upload(ids, self.device))
        return self._blocks.listed(ids)

    @cached_property
    def _blocks(self) -> QuantisedWeight | None:
        """The embeddings as blocks of a file, if reading a row is all that embedding does."""
        module, parts = self.parts.embed_tokens, self.parts
        weight, scale = getattr(module, "weight", None), parts.embedding_multiplier
        unhooked = type(module) is nn.Embedding and not foreign_hooks(vars(module))
        plain = unhooked and not hasattr(module, "_hf_hook") and "forward" not in vars(module)
        if not plain or scale is not None or parts.norms_embeddings:
            return None
        return weight if isinstance(weight, QuantisedWeight) else None

    def states(self, ids: Tensor, layers: Sequence[int]) -> list[Tensor]:
        """[B, T] ids -> [B, T, d] after each of the ascending `layers`, by the model's modules."""
        states, kv = [], KVCache(self.num_layers)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        with self.mode():
            hidden = self.parts.embed(ids)
            for first, last in itertools.pairwise((0, *layers)):
                if first < last:
                    masks = self.generic.masks(hidden, first, last, positions, kv)
                    caches = [kv] * last
                    hidden = self.generic.run_layers(hidden, first, last, positions, caches, masks)
                states.append(hidden)
        return states

    def finish(self, logits: Tensor) -> Tensor:
        """Apply the scalings that some families have after lm_head, then convert to float32."""
        parts = self.parts
        if parts.logits_divisor is not None:
            logits = logits / parts.logits_divisor
        if parts.logits_factor is not None:
            logits = logits * parts.logits_factor
        if parts.logits_cap is not None:
            logits = torch.tanh(logits / parts.logits_cap) * parts.logits_cap
        return logits.float()


@contextmanager
def without_gradients() -> Iterator[None]:
    """Disable gradients without inference mode, for layers that need ordinary tensors."""
    with torch.inference_mode(False), torch.no_grad():
        yield
