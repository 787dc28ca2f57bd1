"""A Hugging Face decoder, cut open: embed, run a range of layers, read logits, by its own modules.

Comes in: a PreTrainedModel, never copied or changed. Goes out: its pieces. Whether they give what
`model.forward` gives is for `conformance`; faster ways to run them are the backbone's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.errors import UnsupportedModel
from selfspec.model.executors.generic import GenericExecutor
from selfspec.model.kv_store import Lease
from selfspec.model.parts import parts_of
from selfspec.model.quantised import QuantisedWeight
from selfspec.model.rows import Rows
from selfspec.model.unembedding import Unembedding


class Decoder:
    """The decoder of `model` as pieces that can be run apart."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UnsupportedModel for a model without the parts of a decoder."""
        self.model = model
        self.parts = parts_of(model)
        self.config: Any = self.parts.config
        self.lm_head: Any = model.get_output_embeddings()
        self.own = GenericExecutor(self.parts, self.lm_head)
        """Runs the model's own modules."""
        self.mode: Callable[[], AbstractContextManager[object]] = nullcontext
        """What layers run in; else inference mode, where the caller sees to it."""

    @cached_property
    def num_layers(self) -> int:
        """L, the number of decoder layers."""
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """d, the width of a hidden state."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """V, the rows of the unembedding."""
        weight = self.lm_head.weight
        if isinstance(weight, Tensor) and weight.shape[1:] == (self.hidden_size,):
            return int(weight.shape[0])
        return int(self.lm_head.out_features)  # quantised weights have other shapes

    @property
    def max_positions(self) -> int:
        """Positions the model was made for; where they are rotations, a text may go on.

        Raises UnsupportedModel where its config has no such number.
        """
        if (count := int(self.config.max_position_embeddings)) < 1:
            raise UnsupportedModel(
                f"max_position_embeddings of the model's config is {count}, expected at least 1: "
                "the length of text that it was made for. Set it"
            )
        return count

    @property
    def position_limit(self) -> int | None:
        """Positions that the model can compute, if there is an end: learned ones are a table."""
        return self.max_positions if self.parts.rotary_emb is None else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where token ids enter."""
        embedding: Any = self.parts.embed_tokens
        if embedding.weight.is_meta:  # offloaded: accelerate brings it there when it is called
            hook = embedding._hf_hook
            places = [
                getattr(one, "execution_device", None) for one in getattr(hook, "hooks", [hook])
            ]
            return torch.device(next(place for place in places if place is not None))
        return embedding.weight.device  # type: ignore[no-any-return]  # untyped module attribute

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, for hooks."""
        return self.parts.layers

    @property
    def unembedding(self) -> Unembedding:
        """The model's own way from a hidden state to logits, shared with exit heads.

        Raises UnsupportedModel where lm_head keeps its weight in another form.
        """
        weight = self.lm_head.weight
        if (
            type(weight) not in (Tensor, nn.Parameter, QuantisedWeight)
            or not weight.is_floating_point()
        ):
            kind = type(getattr(weight, "data", weight)).__name__
            raise UnsupportedModel(
                f"exit heads read lm_head's weight, which is quantised ({kind}). Leave lm_head as "
                "it was when quantising, or draft without heads: drafter='ngram'"
            )
        if weight.is_meta:
            raise UnsupportedModel(
                "exit heads read lm_head's weight, which is offloaded. Keep lm_head on a device, "
                "or draft without heads: drafter='ngram'"
            )
        bias = getattr(self.lm_head, "bias", None)
        return Unembedding(weight, self.parts.norm, self.finish, bias)

    def embed(self, ids: Tensor) -> Tensor:
        """[T] ids -> [T, d] hidden states at boundary 0.

        Positions, learned ones too, enter where layers run.
        """
        with self.mode():
            return self.parts.embed(ids[None])[0]

    def run(self, hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        """Layers first+1..last on [T, d]; adds keys and values of T positions to the leases."""
        with self.mode():
            return self.own.run(hidden, first, last, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of layer L, [T, d] -> target logits [T, V], float32."""
        with self.mode():
            return self.finish(self.own.logits(hidden))

    def states(self, ids: Tensor, layers: Sequence[int]) -> list[Tensor]:
        """Hidden states of texts of one length, [B, T], after each of the rising `layers`.

        Each [B, T, d]; by the model's own modules, without drafts.
        """
        found, lease = [], Lease(self.num_layers)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        with self.mode():
            hidden = self.parts.embed(ids)
            for first, last in itertools.pairwise((0, *layers)):
                if first < last:
                    kinds = set(self.own.layer_types[first:last])
                    masks = self.own.masks(kinds, hidden, first, positions, lease)
                    hidden = self.own.run_layers(hidden, first, last, positions, lease, masks)
                found.append(hidden)
        return found

    def finish(self, logits: Tensor) -> Tensor:
        """The scalings that some families put behind lm_head, then float32."""
        if (divisor := self.parts.logits_divisor) is not None:  # Granite
            logits = logits / divisor
        if (factor := getattr(self.config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * factor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits.float()


@contextmanager
def without_gradients() -> Iterator[None]:
    """For layers that cannot run in inference mode: what they make are ordinary tensors."""
    with torch.inference_mode(False), torch.no_grad():
        yield
