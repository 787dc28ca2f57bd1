"""The kinds of exit heads: small modules from a hidden state at an exit layer to draft logits.

Come in: a hidden state [.., d], raw, before the final norm; for some kinds also what the model made
of the token before. Go out: draft logits over the draft vocabulary. Held and saved by
`selfspec.heads.exit_heads`, called by the exit drafter, fitted by `selfspec.training`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn

from selfspec.errors import InvalidOption
from selfspec.model.products import Product
from selfspec.model.quantised import QuantisedWeight
from selfspec.model.unembedding import Unembedding


class DraftVocabulary(NamedTuple):
    """The tokens that heads can draft; one for all heads of a model."""

    ids: Tensor | None
    """[V_draft] ids of the model, rising; None: all."""
    rows: Tensor
    """[V_draft, d]: their rows of the frozen unembedding."""
    bias: Tensor | None = None
    """[V_draft]: their entries of its bias."""

    @classmethod
    def of(cls, unembedding: Unembedding, ids: Tensor | None) -> DraftVocabulary:
        """All rows are the model's own tensor; a selection is a copy, or blocks of a file."""
        bias = None if unembedding.bias is None else unembedding.bias.detach()
        weight = unembedding.weight.detach()
        if ids is None:
            return cls(ids, weight, bias)
        rows = weight.part(ids) if isinstance(weight, QuantisedWeight) else weight[ids]
        return cls(ids, rows, None if bias is None else bias[ids])


class ExitHead(nn.Module, ABC):
    """Base of all head types: features, then an unembedding over the draft vocabulary.

    `forward(hidden)`: [.., d] -> draft logits [.., V_draft], float32. Features [.., d] stand for
    the normed output of the last layer, so one head's features can be the next token's `deep`.
    """

    reads_deep: ClassVar[bool] = False
    """Whether `features` looks at `deep`, the normed output of layer L one position earlier."""
    has_inner: ClassVar[bool] = False
    """Whether there is an inner layer whose width can be chosen."""
    draft_ids: Tensor | None

    def __init__(
        self,
        unembedding: Unembedding,
        vocabulary: DraftVocabulary,
        inner_size: int | None = None,
    ) -> None:
        """Raises InvalidOption for an `inner_size` where there is no inner layer."""
        super().__init__()
        if inner_size is not None and not self.has_inner:
            raise InvalidOption(f"{type(self).__name__} has no inner layer, found {inner_size}")
        self.register_buffer("draft_ids", vocabulary.ids)
        self._target_vocab_size = unembedding.weight.shape[0]
        self._finish = unembedding.finish
        # a list: state_dict must not see it, and a file must not be loaded into it
        self._shared = [vocabulary.rows]
        self._bias = (vocabulary.bias,)  # a tuple, for the same reason
        self._packed: Product | None = None
        self._build(unembedding, inner_size)

    @abstractmethod
    def _build(self, unembedding: Unembedding, inner_size: int | None) -> None:
        """Make the head's own modules, as they are before any fitting."""

    @abstractmethod
    def features(self, hidden: Tensor, deep: Tensor | None = None) -> Tensor:
        """[.., d] and the `deep` of the position before, [.., d], -> [.., d]."""

    def unembed(self, features: Tensor) -> Tensor:
        """[.., d] -> draft logits [.., V_draft], float32."""
        if self._packed is None or features.requires_grad:
            rows = self._shared[0]  # of another dtype than hidden states in some models
            return self._finish(nn.functional.linear(features.to(rows.dtype), rows, *self._bias))
        logits = self._packed(features.to(self._packed.dtype))
        (bias,) = self._bias
        return self._finish(logits if bias is None else logits + bias)

    @property
    def small_rows(self) -> Tensor | None:
        """[V_draft, d]: rows of the unembedding that all heads share, if a copy of them is small.

        A selection of them is, and so are the blocks of a quantised file.
        """
        if not self._shared:
            return None
        few = self.draft_ids is not None or isinstance(self._shared[0], QuantisedWeight)
        return self._shared[0] if few else None

    @property
    def is_packed(self) -> bool:
        """Whether `unembed_with` was called."""
        return self._packed is not None

    def unembed_with(self, packed: Product) -> None:
        """Multiply by the draft vocabulary's rows with `packed` where nothing is fitted."""
        self._packed = packed

    def forward(self, hidden: Tensor, deep: Tensor | None = None) -> Tensor:
        """[.., d] -> draft logits [.., V_draft], float32."""
        return self.unembed(self.features(hidden, deep))

    @property
    def draft_vocab_size(self) -> int:
        """V_draft, the width of the draft logits."""
        return self._target_vocab_size if self.draft_ids is None else len(self.draft_ids)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Indices into the draft logits -> token ids of the model; any shape."""
        return draft_ids if self.draft_ids is None else self.draft_ids[draft_ids]

    def to_target_logits(self, draft_logits: Tensor) -> Tensor:
        """[.., V_draft] -> [.., V]; tokens that cannot be drafted get -inf."""
        if self.draft_ids is None:
            return draft_logits
        wide = draft_logits.new_full(
            (*draft_logits.shape[:-1], self._target_vocab_size), -torch.inf
        )
        wide[..., self.draft_ids] = draft_logits
        return wide


class LogitLensHead(ExitHead):
    """The model's own norm and unembedding on an intermediate state; nothing to fit."""

    def _build(self, unembedding: Unembedding, inner_size: int | None) -> None:  # noqa: ARG002  # the base's
        self._norm = (unembedding.norm,)  # a tuple, for the same reason as the list

    def features(self, hidden: Tensor, deep: Tensor | None = None) -> Tensor:  # noqa: ARG002  # the base's
        """The final norm of [.., d]."""
        normed: Tensor = self._norm[0](hidden)
        return normed


class LinearHead(ExitHead):
    """Norm and a trained LM head of its own (SpecBound section 3.1; AdaDecode).

    Starts as the model's own norm and (rows of the) unembedding.
    """

    def _build(self, unembedding: Unembedding, inner_size: int | None) -> None:  # noqa: ARG002  # the base's
        self.norm = _own_norm(unembedding)
        self.weight = nn.Parameter(self._shared.pop().clone())

    def features(self, hidden: Tensor, deep: Tensor | None = None) -> Tensor:  # noqa: ARG002  # the base's
        """The head's norm of [.., d]."""
        normed: Tensor = self.norm(hidden)
        return normed

    def unembed(self, features: Tensor) -> Tensor:
        """[.., d] -> draft logits [.., V_draft], float32."""
        return self._finish(nn.functional.linear(features, self.weight, *self._bias))


class TranslatorHead(ExitHead):
    """Norm, an affine map on top of the identity, then the model's own frozen unembedding.

    The map translates from the language of layer l to that of the last layer (the idea of the
    tuned lens). Starts as the identity.
    """

    def _build(self, unembedding: Unembedding, inner_size: int | None) -> None:  # noqa: ARG002  # the base's
        self.norm = _own_norm(unembedding)
        size = unembedding.weight.shape[1]
        self.up = _zeros(size, size, unembedding)

    def features(self, hidden: Tensor, deep: Tensor | None = None) -> Tensor:  # noqa: ARG002  # the base's
        """[.., d] -> [.., d]."""
        normed = self.norm(hidden)
        translated: Tensor = normed + self.up(normed)
        return translated


class LowRankHead(ExitHead):
    """A translator whose map is the product of two narrow matrices; `inner_size` is the rank.

    None: a quarter of d.
    """

    has_inner = True

    def _build(self, unembedding: Unembedding, inner_size: int | None) -> None:
        self.norm = _own_norm(unembedding)
        size = unembedding.weight.shape[1]
        rank = inner_size or max(1, size // 4)
        self.down = nn.Linear(size, rank, bias=False).to(unembedding.weight)
        self.up = _zeros(rank, size, unembedding)

    def features(self, hidden: Tensor, deep: Tensor | None = None) -> Tensor:  # noqa: ARG002  # the base's
        """[.., d] -> [.., d]."""
        normed = self.norm(hidden)
        translated: Tensor = normed + self.up(self.down(normed))
        return translated


class MlpHead(ExitHead):
    """A translator with one hidden layer beside its affine map; `inner_size` is its width.

    None: d.
    """

    has_inner = True

    def _build(self, unembedding: Unembedding, inner_size: int | None) -> None:
        self.norm = _own_norm(unembedding)
        size = unembedding.weight.shape[1]
        self.change = _Mlp(size, inner_size or size, unembedding)

    def features(self, hidden: Tensor, deep: Tensor | None = None) -> Tensor:  # noqa: ARG002  # the base's
        """[.., d] -> [.., d]."""
        normed = self.norm(hidden)
        changed: Tensor = normed + self.change(normed)
        return changed


class DeepFusedHead(ExitHead):
    """An affine map and a hidden layer that also read what the model made of the token before.

    That is known for the first draft of a round: verification computed it. For later ones the
    features of the head that drafted the token before take its place. At exit layer 0 the hidden
    state is the token's embedding, and drafting needs no layer pass at all. It starts from nothing:
    with tied embeddings the identity would foretell the token that has just been read.
    `inner_size` is the width of the hidden layer; None: 2 d.
    """

    reads_deep = True
    has_inner = True

    def _build(self, unembedding: Unembedding, inner_size: int | None) -> None:
        self.norm = _own_norm(unembedding)
        size = unembedding.weight.shape[1]
        self.change = _Mlp(2 * size, inner_size or 2 * size, unembedding)

    def features(self, hidden: Tensor, deep: Tensor | None = None) -> Tensor:
        """[.., d] and [.., d] -> [.., d]; an unknown `deep` is all zeros."""
        normed = self.norm(hidden)
        deep = torch.zeros_like(normed) if deep is None else deep.to(normed.dtype)
        made: Tensor = self.change(torch.cat([normed, deep], dim=-1))
        return made


class _Mlp(nn.Module):
    """An affine map and a hidden layer side by side, [.., inputs] -> [.., d]; zero at first."""

    def __init__(self, inputs: int, inner_size: int, unembedding: Unembedding) -> None:
        super().__init__()
        size = unembedding.weight.shape[1]
        self.direct = _zeros(inputs, size, unembedding)
        self.inner = nn.Linear(inputs, inner_size).to(unembedding.weight)
        self.outer = _zeros(inner_size, size, unembedding)

    def forward(self, inputs: Tensor) -> Tensor:
        made: Tensor = self.direct(inputs) + self.outer(nn.functional.silu(self.inner(inputs)))
        return made


def _own_norm(unembedding: Unembedding) -> nn.Module:
    """A copy of the final norm to fit, without the hooks by which accelerate moves the model's."""
    norm: nn.Module = remove_hook_from_module(copy.deepcopy(unembedding.norm))
    return norm.requires_grad_(True)


def _zeros(inputs: int, outputs: int, unembedding: Unembedding) -> nn.Linear:
    """An affine map that adds nothing before it is fitted."""
    layer = nn.Linear(inputs, outputs).to(unembedding.weight)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


HEAD_TYPES: dict[str, type[ExitHead]] = {
    "linear": LinearHead,
    "translator": TranslatorHead,
    "low-rank": LowRankHead,
    "mlp": MlpHead,
    "deep-fused": DeepFusedHead,
    "logit-lens": LogitLensHead,
}
