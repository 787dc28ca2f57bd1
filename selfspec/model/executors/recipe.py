"""What a decoder layer is made of, as data, whatever its family calls its parts.

Comes in: a layer whose modules are all known (`known`). Goes out: its Recipe, from which executors
build what they run; a ValueError names what does not fit. Whether the numbers agree is for the
agreement check. Another family is a line in a table here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfspec.model.executors.asked import (
    Norm,
    Rotation,
    Shares,
    norm_of,
    rotation_of,
    shares_of,
)
from selfspec.model.executors.masks import FULL
from selfspec.model.executors.source import words
from selfspec.model.parts import DecoderParts


@dataclass(frozen=True)
class Attention:
    """Causal attention, from normed rows to what is added."""

    projections: tuple[nn.Linear, ...]
    order: Tensor
    """Which of their outputs, side by side, are queries, keys and values: [(heads + 2 kv) * size].
    What a rotation turns together are neighbours."""
    heads: int
    kv_heads: int
    size: int
    """Of a head."""
    rotation: Rotation | None
    row_norms: tuple[Norm, Norm] | None
    """Of all queries of a row together, and of its keys."""
    head_norms: Norm | None
    """Of each query and key: weight [heads + kv, size]."""
    norms_last: bool
    """Whether these come behind the rotation."""
    scaling: float
    softcap: float | None
    window: int | None
    output: nn.Linear


@dataclass(frozen=True)
class Mlp:
    """From normed rows to what is added."""

    into: tuple[nn.Linear, ...]
    """Gate and up, side by side, or up alone."""
    gated: bool
    activation: nn.Module
    down: nn.Linear


@dataclass(frozen=True)
class Experts:
    """Several MLPs, of which each row takes a few."""

    router: Tensor
    """[experts, d]: gives the logits that choose."""
    shares: Shares
    into: Tensor
    """[experts, 2 * inner, d]: gate and up, side by side."""
    activation: nn.Module
    down: Tensor
    """[experts, d, inner]"""


@dataclass(frozen=True)
class Recipe:
    """One layer. Both parts add to the rows what they make of them."""

    attention: Attention
    mlp: Mlp | Experts
    before: tuple[Norm | None, Norm | None]
    """In front of attention, and of the MLP."""
    behind: tuple[Norm | None, Norm | None]
    parallel: bool
    """Whether the MLP reads what attention reads: its rows, or with one norm for both, its norm."""
    times: float
    """What is added is multiplied by it."""


class _Places(NamedTuple):
    """A layer's norms by name: before and behind attention, before and behind the MLP."""

    before_attention: str | None
    behind_attention: str | None
    before_mlp: str | None
    behind_mlp: str | None


_IN, _POST = "input_layernorm", "post_attention_layernorm"
_PLACES = (
    _Places(_IN, None, _POST, None),  # Llama and most others
    _Places(_IN, None, None, None),  # Cohere, Phi: one for both, which run side by side
    _Places(_IN, None, "pre_feedforward_layernorm", None),  # VaultGemma
    _Places(None, _POST, None, "post_feedforward_layernorm"),  # OLMo 2 and 3, EXAONE 4
    _Places(_IN, _POST, "pre_feedforward_layernorm", "post_feedforward_layernorm"),  # Gemma 2, 3
    _Places(_IN, "post_self_attn_layernorm", _POST, "post_mlp_layernorm"),  # GLM 4
    _Places(_IN, "post_norm1", _POST, "post_norm2"),  # HyperCLOVA X
)

_ATTENTIONS = ("self_attn", "attention")
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("query_key_value",))
_OUTPUTS = ("o_proj", "dense")
_LAST_NORMS = ("query_layernorm", "key_layernorm")
_HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), _LAST_NORMS)
_MLPS = (
    (("gate_proj", "up_proj", "down_proj"), True),
    (("gate_up_proj", "down_proj"), True),
    (("up_proj", "down_proj"), False),
    (("c_fc", "c_proj"), False),
    (("fc1", "fc2"), False),
    (("dense_h_to_4h", "dense_4h_to_h"), False),
)
"""Names of the linear layers, and whether a gate is among them."""
_ACTIVATIONS = ("act_fn", "activation_fn", "act")


@torch.no_grad()
def recipe_of(decoder: DecoderParts, layer: Any, kind: str, dtype: torch.dtype) -> Recipe:
    """What `layer`, with attention of `kind`, is made of. Raises ValueError for other layers."""
    children = _names_of_children(layer)
    attention = _only(_ATTENTIONS, children, "attention")
    names = children - {attention, "mlp"}
    places = next((one for one in _PLACES if names == {*one} - {None}), None)
    if places is None or "mlp" not in children:
        raise ValueError(f"the layer holds {', '.join(sorted(children))}")
    norms = [
        None if name is None else norm_of(getattr(layer, name), decoder.config.hidden_size, dtype)
        for name in places
    ]
    parallel = places.before_mlp is None and places.behind_mlp is None
    return Recipe(
        attention=_attention(decoder, getattr(layer, attention), kind, dtype),
        mlp=_mlp(layer.mlp, dtype),
        before=(norms[0], norms[2]),
        behind=(norms[1], norms[3]),
        parallel=bool(getattr(layer, "use_parallel_residual", parallel)),
        times=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _names_of_children(part: nn.Module) -> set[str]:
    """The names of what it holds, without what does nothing in evaluation."""
    idle = (nn.Dropout, nn.Identity)
    return {name for name, child in part.named_children() if not isinstance(child, idle)}


def _attention(decoder: DecoderParts, part: Any, kind: str, dtype: torch.dtype) -> Attention:
    children = _names_of_children(part)
    names = next((one for one in _PROJECTIONS if children.issuperset(one)), ())
    output = _only(_OUTPUTS, children, "output of attention")
    norms = next((one for one in _HEAD_NORMS if children.issuperset(one)), ())
    if not names or children != {*names, output, *norms}:
        raise ValueError(f"attention holds {', '.join(sorted(children))}")
    projections = tuple(getattr(part, name) for name in names)
    size = int(getattr(part, "head_dim", 0) or part.head_size)
    places, heads = _heads_among(projections, size, decoder.config)
    kv_heads = (len(places) - heads) // 2
    turned, values = places[:-kv_heads], places[-kv_heads:]
    rotation = rotation_of(decoder, part, kind, size, dtype)
    pairs = torch.arange(size) if rotation is None else rotation.pairs(size)
    row_norms = head_norms = None
    if norms:
        queries, keys = (norm_of(getattr(part, name), size, dtype) for name in norms)
        if queries.weight.dim() == 1 and len(queries.weight) > size:
            row_norms = _in_order(queries, pairs), _in_order(keys, pairs)
        else:
            head_norms = _of_heads(queries, heads, keys, kv_heads, pairs)
    # transformers' sdpa leaves the cap out, with a warning
    capped = decoder.config._attn_implementation == "eager"
    capped = capped and "softcap=" in words(type(part).forward)
    return Attention(
        projections=projections,
        order=torch.cat([turned[:, pairs], values]).flatten(),
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        rotation=rotation,
        row_norms=row_norms,
        head_norms=head_norms,
        norms_last=norms == _LAST_NORMS,
        scaling=float(part.scaling),
        softcap=part.attn_logit_softcapping if capped else None,
        window=window_of(decoder.config, kind),
        output=getattr(part, output),
    )


def window_of(config: Any, kind: str) -> int | None:
    """Positions that a query of this kind may look at; None: all before it."""
    return None if kind == FULL else int(config.sliding_window)


def _heads_among(projections: tuple[nn.Linear, ...], size: int, config: Any) -> tuple[Tensor, int]:
    """Where queries, keys and values stand among the outputs, [heads + 2 kv, size], and heads."""
    count = sum(one.out_features for one in projections) // size
    places = torch.arange(count * size).view(count, size)
    if len(projections) == 3:
        heads, keys, values = (one.out_features // size for one in projections)
    elif config.model_type == "gpt_neox":  # query, key and value of each head side by side
        heads = keys = values = count // 3
        places = places.view(-1, 3, size).transpose(0, 1).reshape(count, size)
    else:
        heads = config.num_attention_heads
        keys = values = config.num_key_value_heads
    if keys != values or heads % keys or heads + keys + values != count:
        raise ValueError(f"attention has {heads} query, {keys} key and {values} value heads")
    return places, heads


def _in_order(norm: Norm, pairs: Tensor) -> Norm:
    """A norm over a whole row of heads, its numbers in the order of the projections."""

    def ordered(values: Tensor) -> Tensor:
        return values.view(-1, len(pairs))[:, pairs].flatten()

    bias = None if norm.bias is None else ordered(norm.bias)
    return replace(norm, weight=ordered(norm.weight), bias=bias)


def _of_heads(queries: Norm, heads: int, keys: Norm, kv_heads: int, pairs: Tensor) -> Norm:
    """Norms of single heads as one, [heads + kv, size]."""
    if queries.bias is not None or keys.bias is not None:
        raise ValueError("norms of queries and keys have a bias")
    weights = (queries.weight.expand(heads, -1), keys.weight.expand(kv_heads, -1))
    both = replace(queries, weight=torch.cat(weights)[:, pairs].contiguous())
    if both != replace(keys, weight=both.weight):
        raise ValueError("the norms of queries and of keys differ in kind")
    return both


def _mlp(part: Any, dtype: torch.dtype) -> Mlp | Experts:
    children = _names_of_children(part)
    if children == {"gate", "experts"}:
        shares, inner = shares_of(part.gate, dtype), part.experts
        return Experts(part.gate.weight, shares, inner.gate_up_proj, inner.act_fn, inner.down_proj)
    activation = _only(_ACTIVATIONS, children, "activation")
    for names, gated in _MLPS:
        if children == {*names, activation}:
            *into, down = (getattr(part, name) for name in names)
            return Mlp(tuple(into), gated, getattr(part, activation), down)
    raise ValueError(f"mlp holds {', '.join(sorted(children))}")


def _only(names: tuple[str, ...], children: set[str], what: str) -> str:
    """The one of `names` that is there."""
    found = [name for name in names if name in children]
    if len(found) != 1:
        raise ValueError(f"{what}: found {', '.join(sorted(children))}")
    return found[0]
