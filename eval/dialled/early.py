"""A model that knows its answer early, made from any other: the stand-in for a large model.

Layers that add nothing are put behind the first ones, so an exit before them sees what the last
layer gives; then a head there is made wrong at a chosen share of positions. Synthetic: it shows
what the runtime does with good heads, and nothing about how good heads are. Called by `dialled`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.errors import InvalidOption, UnsupportedModel
from selfspec.heads.exit_heads import ExitHeads, HeadsConfig
from selfspec.heads.types import DraftVocabulary, LogitLensHead
from selfspec.model.backbone import Backbone
from selfspec.model.parts import text_config
from selfspec.model.unembedding import Unembedding

_PLACES = 1 << 16
"""Rows of the table that says where a head is wrong."""

_SPIKE = 1e4
"""Added to the logit of a wrong token: more than any logit."""


def early_model(model: PreTrainedModel, layers: int, extra: int) -> PreTrainedModel:
    """A copy of the first `layers` layers of `model` and `extra` layers that add nothing.

    Those have weights of their own, so they cost what layers cost; only their two output
    projections are zero. No token ends a text. Raises UnsupportedModel, InvalidOption.
    """
    deep = copy.deepcopy(model)
    config, decoder = text_config(deep), deep.get_decoder()
    if not 1 <= layers <= len(decoder.layers):
        raise InvalidOption(f"{layers} layers asked for, the model has {len(decoder.layers)}")
    kept = list(decoder.layers[:layers])
    total = layers + extra
    decoder.layers = nn.ModuleList(
        [*kept, *(_silent(kept[-1], index) for index in range(layers, total))]
    )
    config.num_hidden_layers = total
    if (kinds := getattr(config, "layer_types", None)) is not None:
        config.layer_types = [*kinds[:layers], *itertools.repeat(kinds[layers - 1], extra)]
    if deep.generation_config is not None:
        deep.generation_config.eos_token_id = None
    return deep


class DialledHead(LogitLensHead):
    """The model's own norm and unembedding, made to prefer a wrong token now and then.

    Where, and which token, is a function of the hidden state's bits and the seed: the same at
    every run, independent from position to position, and the more places the larger
    `wrong_share`, each in addition to those of a smaller one.
    """

    def __init__(
        self, unembedding: Unembedding, vocabulary: DraftVocabulary, seed: int = 0
    ) -> None:
        """Right everywhere at first."""
        super().__init__(unembedding, vocabulary)
        self.wrong_share = 0.0
        device, size = unembedding.weight.device, unembedding.weight.shape[1]
        generator = torch.Generator().manual_seed(seed)
        whole = torch.iinfo(torch.int64)
        factors = torch.randint(whole.min, whole.max, (size,), generator=generator)
        self._factors = factors.to(device)  # [d]
        self._chance = torch.rand(_PLACES, generator=generator).to(device)
        victims = torch.randint(self.draft_vocab_size, (_PLACES,), generator=generator)
        self._victims = victims.to(device)

    def unembed(self, features: Tensor) -> Tensor:
        """[.., d] -> draft logits [.., V_draft], float32."""
        logits = super().unembed(features)
        place = self._place(features)
        spike = (self._chance[place] < self.wrong_share).to(logits.dtype) * _SPIKE
        return logits.scatter_add_(-1, self._victims[place][..., None], spike[..., None])

    def _place(self, features: Tensor) -> Tensor:
        """A hash of each row's bits, [.., d] -> 0.._PLACES-1, [..]."""
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[features.element_size()]
        mixed = (features.contiguous().view(whole).long() * self._factors).sum(-1)
        return (mixed >> 40) & (_PLACES - 1)  # products are mixed best in their upper bits


def dialled_heads(
    backbone: Backbone, layer: int, draft_ids: Tensor | None = None, seed: int = 0
) -> tuple[ExitHeads, DialledHead]:
    """Heads of one exit at `layer`, and that head, whose `wrong_share` is to be dialled."""
    config = HeadsConfig(
        base_model="early",
        base_fingerprint="",
        hidden_size=backbone.hidden_size,
        num_layers=backbone.num_layers,
        vocab_size=backbone.vocab_size,
        exit_layers=(layer,),
        head_type="logit-lens",
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
    )
    heads = ExitHeads(config, backbone.unembedding, draft_ids)
    vocabulary = DraftVocabulary.of(backbone.unembedding, draft_ids)
    head = DialledHead(backbone.unembedding, vocabulary, seed)
    heads.by_layer[str(layer)] = head
    return heads.eval(), head


def small_vocabulary(tokens: Iterable[int], size: int, vocab_size: int) -> Tensor:
    """`size` ids, rising: all of `tokens`, then the lowest others. Raises InvalidOption.

    A head over these alone costs little beside a layer, as a full one does in a large model.
    """
    needed = set(tokens)
    if not len(needed) <= size <= vocab_size:
        raise InvalidOption(
            f"a draft vocabulary of {size} for {len(needed)} different tokens of {vocab_size}"
        )
    others = (token for token in range(vocab_size) if token not in needed)
    return torch.tensor(sorted({*needed, *itertools.islice(others, size - len(needed))}))


def _silent(layer: Any, index: int) -> nn.Module:
    """A copy of `layer`, at place `index`, that passes its input on."""
    twin = copy.deepcopy(layer)
    try:
        outputs = (twin.self_attn.o_proj, twin.mlp.down_proj)
    except AttributeError as error:
        raise UnsupportedModel(f"layers without o_proj and down_proj: {error}") from error
    for projection in outputs:
        for weight in projection.parameters():
            nn.init.zeros_(weight)
    for module in twin.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = index
    return twin  # type: ignore[no-any-return]  # a layer is untyped here
