"""Exit heads: small modules from a hidden state, before the final norm, to draft logits.

All kinds consist of the same few parts, so `decoding.drafters.heads` can run each from 8-bit
weights.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, NamedTuple, Protocol

import torch
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn

from selfspec.heads.folder import MEDUSA
from selfspec.model import weights
from selfspec.model.parts import Unembedding
from selfspec.model.weights import CompiledLinear, rows_of

# --- kinds of heads


class DraftVocabulary(NamedTuple):
    """The tokens that heads can draft; all heads of a model share one."""

    ids: Tensor | None  # [V_draft] ids of the model, ascending; None: all
    rows: Tensor  # [V_draft, d]: their rows of the frozen unembedding
    bias: Tensor | None = None  # [V_draft]: their entries of its bias

    @classmethod
    def of(cls, unembedding: Unembedding, ids: Tensor | None) -> DraftVocabulary:
        """Shares the model's tensor if it has all rows; else copies rows, or keeps their blocks."""
        bias = None if unembedding.bias is None else unembedding.bias.detach()
        weight = unembedding.weight.detach()
        if ids is None:
            return cls(ids, weight, bias)
        return cls(ids, rows_of(weight, ids), None if bias is None else bias[ids])


class Parts(NamedTuple):
    """The modules of a head; its features are x + direct(x) + outer(silu(inner(x))), if given.

    x is the normed state. For a head that reads `deep`, x is [state, deep] and not itself a term.
    """

    norm: nn.Module
    direct: nn.Linear | None = None
    inner: nn.Linear | None = None
    outer: nn.Linear | None = None


class Packed(Protocol):
    """A faster, rounded copy of a head."""

    rows: CompiledLinear  # [.., d] -> [.., V_draft], bias included, before the model's own finish

    def features(self, hidden: Tensor, beside: Tensor) -> Tensor:
        """The head's features, approximately; `beside` has the full width of the head's."""

    def ask(self, hidden: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        """The features, and the output of `rows` for them."""


class ExitHead(nn.Module, ABC):
    """Base of all head types: features, then an unembedding over the draft vocabulary.

    `forward(hidden)`: [.., d] -> draft logits [.., V_draft], float32. Features [.., d] approximate
    the normed output of the last layer, so one head's features can be the next token's `deep`.
    """

    reads_deep: ClassVar[bool] = False  # `deep`, the normed output of layer L one position earlier
    looks_ahead: ClassVar[bool] = False  # one of several; its `hidden` is the others' `deep`
    draft_ids: Tensor | None

    def __init__(
        self,
        unembedding: Unembedding,
        vocabulary: DraftVocabulary,
        inner_size: int | None = None,
        states: int = 0,
    ) -> None:
        super().__init__()
        self.deep_size = unembedding.weight.shape[1] * (1 + states) if self.reads_deep else 0
        """Width of `deep`: the normed output of layer L, then raw states, which the head scales."""
        self.register_buffer("draft_ids", vocabulary.ids)
        self._target_vocab_size = unembedding.weight.shape[0]
        self._finish = unembedding.finish
        # in a list, so that it is not part of state_dict and no file is loaded into it
        self._shared = [vocabulary.rows]
        self.bias = vocabulary.bias
        """[V_draft], added to logits; not a parameter."""
        self.packed: Packed | None = None  # in use from then on, except with gradients
        self.parts = self._build(unembedding, inner_size)  # a tuple adds no names to state_dict

    @abstractmethod
    def _build(self, unembedding: Unembedding, inner_size: int | None) -> Parts:
        """Make the head's own modules, initialised for fitting."""

    def features(self, hidden: Tensor, deep: Tensor | None = None) -> Tensor:
        """[.., d] and `deep`, [.., up to `deep_size`], -> [.., d]; its missing numbers are 0."""
        hidden = hidden.to(self.rows.device)  # heads are on lm_head's device, not the layer's
        beside = widened(deep, hidden, self.deep_size)
        if (packed := self._packed_for(hidden)) is not None:
            return packed.features(hidden, beside)
        norm, direct, inner, outer = self.parts
        x: Tensor = norm(hidden)
        if self.deep_size:
            last, *states = beside.to(x).split(x.shape[-1], dim=-1)
            states = [nn.functional.rms_norm(state.float(), state.shape[-1:]) for state in states]
            x = torch.cat([x, last, *(state.to(x) for state in states)], dim=-1)
        terms: list[Tensor] = [] if self.deep_size else [x]
        if direct is not None:
            terms.append(direct(x))
        if inner is not None:
            activations = nn.functional.silu(inner(x))
            terms.append(activations if outer is None else outer(activations))
        return reduce(torch.add, terms)

    def ask(self, hidden: Tensor, deep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[n, d] and `deep` -> `features` and their `unembed`; a single call if packed."""
        if (packed := self._packed_for(hidden)) is None:
            features = self.features(hidden, deep)
            return features, self.unembed(features)
        features, logits = packed.ask(hidden, widened(deep, hidden, self.deep_size))
        return features, self._finish(logits)

    def unembed(self, features: Tensor) -> Tensor:
        """[.., d] -> draft logits [.., V_draft], float32."""
        if (packed := self._packed_for(features)) is not None:
            return self._finish(packed.rows(features))
        rows = self.rows  # in some models their dtype differs from that of hidden states
        return self._finish(
            nn.functional.linear(features.to(rows.device, rows.dtype), rows, self.bias)
        )

    def _packed_for(self, rows: Tensor) -> Packed | None:
        usable = not torch.is_grad_enabled() and rows.dtype == self.rows.dtype
        return self.packed if usable else None

    @property
    def rows(self) -> Tensor:
        """[V_draft, d]: rows of the unembedding, or the head's own."""
        return self._shared[0]

    def forward(self, hidden: Tensor, deep: Tensor | None = None) -> Tensor:
        return self.unembed(self.features(hidden, deep))

    def likeliest(self, logits: Tensor, temperature: float, count: int) -> Tensor:
        """Draft logits [n, V_draft] -> [n, 2 * count]: the likeliest tokens, then their chances."""
        count = min(count, logits.shape[-1])
        if self.packed is not None and not torch.is_grad_enabled():
            dtype = self.packed.rows.dtype
            return weights.likeliest(logits, temperature, count, self.draft_ids, dtype)
        indices, chances = likeliest(logits, temperature, count)
        # float32 is exact up to 2^24 token ids
        return torch.cat([self.to_target_ids(indices).float(), chances.float()], dim=1)

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

    def _build(self, unembedding: Unembedding, inner_size: int | None) -> Parts:  # noqa: ARG002  # the base's
        return Parts(unembedding.norm)


class LinearHead(ExitHead):
    """Norm and a trained LM head (SpecBound section 3.1; AdaDecode), initialised from the model."""

    def _build(self, unembedding: Unembedding, inner_size: int | None) -> Parts:  # noqa: ARG002  # the base's
        self.norm = _trainable_norm(unembedding)
        self.weight = nn.Parameter(self._shared.pop().clone())
        return Parts(self.norm)

    @property
    def rows(self) -> Tensor:
        return self.weight


class TranslatorHead(ExitHead):
    """Norm, identity plus an affine map, the model's unembedding (as in the tuned lens)."""

    def _build(self, unembedding: Unembedding, inner_size: int | None) -> Parts:  # noqa: ARG002  # the base's
        self.norm = _trainable_norm(unembedding)
        size = unembedding.weight.shape[1]
        self.up = _zero_linear(size, size, unembedding)
        return Parts(self.norm, direct=self.up)


class DeepFusedHead(ExitHead):
    """An affine map and a hidden layer that also read the model's output for the previous token.

    Verification computed that output for the first draft of a round. For later drafts the features
    of the head that drafted the previous token replace it, and states of earlier layers, if the
    head reads any, are missing. Output weights start at zero: with tied embeddings, an identity
    would guess the token just read. `inner_size`: that of the hidden layer; None: 2 d.
    """

    reads_deep = True

    def _build(self, unembedding: Unembedding, inner_size: int | None) -> Parts:
        size = unembedding.weight.shape[1]
        inputs, width = size + self.deep_size, inner_size or 2 * size
        self.norm = _trainable_norm(unembedding)
        self.change = nn.ModuleDict()
        self.change["direct"] = direct = _zero_linear(inputs, size, unembedding)
        self.change["inner"] = inner = nn.Linear(inputs, width).to(unembedding.weight)
        self.change["outer"] = outer = _zero_linear(width, size, unembedding)
        return Parts(self.norm, direct=direct, inner=inner, outer=outer)


class MedusaHead(ExitHead):
    """One block, x + silu(W x + b), then the model's own frozen unembedding (Cai et al. 2024).

    Medusa-1 gives each head its own unembedding: K copies to store, fit and read.
    """

    looks_ahead = True

    def _build(self, unembedding: Unembedding, inner_size: int | None) -> Parts:  # noqa: ARG002  # the base's
        size = unembedding.weight.shape[1]
        self.inner = _zero_linear(size, size, unembedding)
        return Parts(nn.Identity(), inner=self.inner)  # the state is already normed


def _trainable_norm(unembedding: Unembedding) -> nn.Module:
    """A trainable copy of the final norm on lm_head's device, without accelerate's hooks."""
    norm: nn.Module = remove_hook_from_module(copy.deepcopy(unembedding.norm))
    return norm.to(unembedding.weight.device).requires_grad_(True)


def _zero_linear(inputs: int, outputs: int, unembedding: Unembedding) -> nn.Linear:
    layer = nn.Linear(inputs, outputs).to(unembedding.weight)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


HEAD_TYPES: dict[str, type[ExitHead]] = {
    "linear": LinearHead,
    "translator": TranslatorHead,
    "deep-fused": DeepFusedHead,
    "logit-lens": LogitLensHead,
    MEDUSA: MedusaHead,
}

# --- confidence: from the whole distribution, never from the drawn token

Signal = Callable[[Tensor], Tensor]  # draft logits [.., V] -> [..] in [0, 1]; 1: certain


def top_probability(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[.., V] -> the largest of softmax(logits / temperature), [..]."""
    # max softmax(z / T) = 1 / sum exp((z - max z) / T): no normalised vector is needed
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    return scaled.exp_().sum(-1).reciprocal_()


def likeliest(logits: Tensor, temperature: float, count: int) -> tuple[Tensor, Tensor]:
    """[.., V] -> indices and values of the largest of softmax(logits / temperature), descending."""
    if count == 1:  # ties go to the first, as in greedy decoding
        best, indices = logits.max(-1, keepdim=True)  # three times as fast as argmax
    else:
        best, indices = logits.topk(min(count, logits.shape[-1]), dim=-1)
    highest = best[..., :1]
    total = ((logits - highest) / temperature).exp_().sum(-1, keepdim=True)
    return indices, ((best - highest) / temperature).exp_() / total


def entropy(probs: Tensor) -> Tensor:
    """Shannon entropy of distributions [.., V] -> [..], in nats."""
    nats: Tensor = torch.special.entr(probs).sum(-1)
    return nats


@dataclass(frozen=True)
class Ensemble:
    """CM-ASD's confidence C, section III-B: a weighted mean of three signals.

    | document | here |
    |---|---|
    | C(ent), an uncertainty | 1 - H / log V: inverted, so that 1 means certain in all three |
    | C(margin), beta | sigmoid(margin_scale * (z1 - z2)), at least 1/2 |
    | C(soft) | (p1 - p2) / p1 |
    | lambda 1, 2, 3 | `weights` of these, which sum to 1 |
    """

    weights: tuple[float, ...]
    margin_scale: float

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [.., V] (or log-probabilities) -> [..]."""
        if logits.shape[-1] == 1:  # a draft vocabulary of one token is always certain
            return logits.new_ones(logits.shape[:-1])
        log_probs = logits.log_softmax(-1)
        first, second = log_probs.topk(2, dim=-1).values.unbind(-1)
        signals = (
            1.0 - entropy(log_probs.exp()) / math.log(logits.shape[-1]),
            torch.sigmoid(self.margin_scale * (first - second)),
            1.0 - (second - first).exp(),
        )
        parts = [weight * signal for weight, signal in zip(self.weights, signals, strict=True)]
        return torch.stack(parts).sum(0)


# --- answers about rows, with one pass of a head and one device read


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A head's answer for n rows."""

    features: Tensor  # [n, d]: the head's estimate of layer L's normed output
    logits: Tensor  # draft logits, [n, V_draft]
    tokens: list[list[int]]  # the likeliest tokens of each row, best first; ids of the model
    chances: list[list[float]]  # their probabilities, descending, at the judge's temperature
    signals: list[float]  # the requested signal for each row; empty without one

    @classmethod
    def read(cls, features: Tensor, logits: Tensor, numbers: Tensor) -> Answer:
        """Make an answer of the `numbers` of `scored`; one device read."""
        rows, count = numbers.tolist(), numbers.shape[1] // 2
        return cls(
            features=features,
            logits=logits,
            tokens=[[*map(int, row[:count])] for row in rows],
            chances=[row[count : 2 * count] for row in rows],
            signals=[row[-1] for row in rows if len(row) > 2 * count],
        )

    def part(self, rows: slice) -> Answer:
        return Answer(**{name: values[rows] for name, values in vars(self).items()})


def scored(
    head: ExitHead, logits: Tensor, temperature: float, count: int, signal: Signal | None = None
) -> Tensor:
    """The numbers that an Answer needs from draft logits [n, V_draft]: tokens, chances, signal."""
    numbers = head.likeliest(logits, temperature, count)
    if signal is None:
        return numbers
    return torch.cat([numbers, signal(logits / temperature).float()[:, None]], dim=1)


def widened(deep: Tensor | None, hidden: Tensor, width: int) -> Tensor:
    """`deep` padded with zeros to [.., `width`], for use beside `hidden`."""
    if deep is None:
        return hidden.new_zeros(*hidden.shape[:-1], width)
    missing, deep = width - deep.shape[-1], deep.to(hidden)
    return nn.functional.pad(deep, (0, missing)) if missing else deep


def joined(deep: Sequence[Tensor | None], hidden: Sequence[Tensor], width: int) -> Tensor | None:
    """The `deep` of many sequences' rows, joined and padded; None if no sequence has any."""
    if all(part is None for part in deep):
        return None
    return torch.cat([widened(*pair, width) for pair in zip(deep, hidden, strict=True)])


# --- the exit judge


class ExitJudge:
    """Annealed confidence threshold, ACT (SpecBound section 2.2).

    `T_l = 1 + alpha (1 - l / L)`; `c_l = max softmax(z / T_l)`; exit at `c_l >= tau_l`. The layer's
    calibrated temperature multiplies T_l; it is not in the paper, and 1 by default.
    """

    def __init__(
        self,
        num_layers: int,
        thresholds: Mapping[int, float],
        anneal_strength: float = 0.0,
        temperatures: Mapping[int, float] | None = None,
    ) -> None:
        """`thresholds` and `temperatures` by exit layer; `anneal_strength` is alpha."""
        self.thresholds = dict(thresholds)
        self.temperatures = {  # T_l by exit layer, calibration included
            layer: (1.0 + anneal_strength * (1.0 - layer / num_layers))
            * (temperatures or {}).get(layer, 1.0)
            for layer in thresholds
        }

    def exits(self, confidence: float, layer: int) -> bool:
        return confidence >= self.thresholds[layer]


def each_layer(values: Sequence[float], layers: Sequence[int]) -> dict[int, float]:
    """One value for all `layers`, or one per layer, as a mapping by layer."""
    if len(values) == 1:
        return dict.fromkeys(layers, values[0])
    return dict(zip(layers, values, strict=True))
