"""A decoder layer's structure as data, independent of its family's names for the parts.

The fused executor builds its operations from it; a ValueError names a part that does not fit.
Norms, activations, rotations and routers are identified by their outputs on test inputs, since
families' RMSNorms use the weight in different ways. Another family is a line in a table here.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.model.parts import FULL, DecoderParts

_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Largest error of an answer, relative to its largest number. Other dtypes are refused."""


@dataclass(frozen=True)
class Norm:
    """RMSNorm, or LayerNorm if `centred`, over the last dimension."""

    weight: Tensor  # [d] or [heads, d], float32; includes a family's offset, such as 1
    bias: Tensor | None
    eps: float
    centred: bool
    rounds: bool  # whether normed rows are rounded to the model's dtype before the weight

    def __call__(self, rows: Tensor) -> Tensor:
        """[.., d] -> [.., d], in the dtype of `rows`."""
        normed = rows.float()
        if self.centred:
            normed = normed - normed.mean(-1, keepdim=True)
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + self.eps)
        if self.rounds:
            normed = normed.to(rows.dtype).float()
        normed = normed * self.weight
        return (normed if self.bias is None else normed + self.bias).to(rows.dtype)


@torch.no_grad()
def norm_of(module: Any, width: int, dtype: torch.dtype) -> Norm:
    """The norm that `module` computes on rows of `width`. Raises ValueError if it is unknown."""
    kind = type(module).__name__
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", 1e-5))
    scale = torch.ones(width, dtype=torch.float32) if weight is None else weight.detach()
    bias = None if bias is None else bias.detach().float()
    sizes = torch.tensor([1.0, 0.1, float(eps) ** 0.5]).view(-1, *[1] * scale.dim())
    rows = ((_random(3, *scale.shape) + 0.5) * sizes).to(dtype)
    answer = module(rows)
    if answer.dtype != dtype or answer.shape != rows.shape:
        raise ValueError(f"{kind} gives {answer.dtype} {tuple(answer.shape)}")
    weights = [scale.float(), scale.float() + 1, (scale + 1).float()]  # the last is rounded, too
    candidates = [
        Norm(weight, bias, float(eps), centred, rounds)
        for centred, weight, rounds in itertools.product((False, True), weights, (True, False))
    ]
    best = min(candidates, key=lambda norm: float((norm(rows) - answer).abs().sum()))
    if not _is_close(best(rows), answer):
        raise ValueError(f"{kind} is neither RMSNorm nor LayerNorm")
    return best


class Activation(IntEnum):
    """The numbers of the functions of `activate` in `functions.hpp`."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    RELU_SQUARED = 4


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: nn.functional.silu,
    Activation.GELU: nn.functional.gelu,
    Activation.GELU_TANH: lambda x: nn.functional.gelu(x, approximate="tanh"),
    Activation.RELU: nn.functional.relu,
    Activation.RELU_SQUARED: lambda x: nn.functional.relu(x).square(),
}


def activation_of(module: Callable[[Tensor], Tensor]) -> Activation:
    """The Activation that `module` computes. Raises ValueError if it is unknown."""
    far = torch.tensor([-1e4, -30.0, 30.0, 1e4])  # some functions are clipped from 6 or 10 on
    numbers = torch.cat([torch.linspace(-6, 6, 193), far]).float()
    answer = module(numbers)
    for activation, function in _ACTIVATIONS.items():
        if float((function(numbers) - answer).abs().max()) < 1e-5:
            return activation
    raise ValueError(f"the activation is {type(module).__name__}, which is not known")


@dataclass(frozen=True)
class Rotation:
    """How positions turn the first numbers of a query or key, in pairs."""

    size: int  # how many numbers are turned
    halves: bool  # whether j and j + size / 2 form a pair; else neighbours do
    angles: slice  # the place of each pair's angle among the model's `size` angles of a position

    def pairs(self, head_size: int) -> Tensor:
        """[head_size]: the numbers of a head in the order that makes pairs neighbours."""
        order = torch.arange(head_size)
        if self.halves:
            order[: self.size] = torch.arange(self.size).view(2, -1).T.flatten()
        return order

    def turns(self, cos: Tensor, sin: Tensor) -> Tensor:
        """The model's `cos`, `sin`, each [T, size] -> a complex number per pair, [T, size / 2]."""
        return torch.complex(cos[:, self.angles].float(), sin[:, self.angles].float())


def rotation_of(
    decoder: DecoderParts, attention: nn.Module, kind: str, head_size: int, dtype: torch.dtype
) -> Rotation | None:
    """How a layer's queries and keys are rotated; None: not at all. ValueError if unknown."""
    positions = torch.tensor([[1, 5, 60]])
    like = torch.zeros(1, 3, decoder.config.hidden_size, dtype=dtype)
    cos, sin = decoder.rotations(like, positions, kind)
    rows = _random(*like.shape, seed=1).to(dtype)
    output, unrotated = (
        attention(hidden_states=rows, position_embeddings=embeddings, attention_mask=None)[0]
        for embeddings in ((cos, sin), (torch.ones_like(cos), torch.zeros_like(sin)))
    )
    if torch.equal(output, unrotated):  # attention ignores positions
        return None
    turn = vars(sys.modules[type(attention).__module__]).get("apply_rotary_pos_emb")
    size = cos.shape[-1]
    if turn is None or size % 2 or not 0 < size <= head_size:
        raise ValueError("positions are rotated in an unknown way")
    heads = _random(1, 1, 3, size).to(dtype)
    queries, keys = turn(heads, heads, cos, sin)
    half, every_second = slice(0, size // 2), slice(0, None, 2)
    for halves, angles in ((True, half), (False, every_second), (False, half)):
        rotation = Rotation(size, halves, angles)
        order = rotation.pairs(size)
        turned = torch.view_as_complex(heads[..., order].float().view(1, 1, 3, -1, 2))
        rotated = torch.empty(heads.shape, dtype=torch.float32)
        turned = torch.view_as_real(turned * rotation.turns(cos[0], sin[0])).flatten(-2)
        rotated[..., order] = turned
        if _is_close(rotated, queries) and _is_close(rotated, keys):
            return rotation
    raise ValueError("positions are rotated in an unknown way")


def _random(*shape: int, seed: int = 0) -> Tensor:
    """The same normal numbers each time, float32 regardless of torch's default dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _is_close(output: Tensor, answer: Tensor) -> bool:
    error = (output.float() - answer.float()).abs().max()
    return bool(error <= _ERROR[answer.dtype] * answer.float().abs().max())


@dataclass(frozen=True)
class Shares:
    """How a router weighs experts: a softmax over all, of which it takes the largest."""

    each: int  # experts per row
    normalised: bool  # whether the shares of the chosen experts sum up to 1
    rounds: bool  # whether shares are rounded to the model's dtype

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[T, experts] -> shares and experts, [T, each]."""
        shares, chosen = logits.float().softmax(-1).topk(self.each, dim=-1)
        if self.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        return (shares.to(logits.dtype).float() if self.rounds else shares), chosen


def shares_of(router: Any, dtype: torch.dtype) -> Shares:
    """How `router` turns its logits into shares. Raises ValueError if unknown."""
    weight = router.weight
    rows = _random(16, weight.shape[1]).to(dtype)
    answer = router(rows)
    if isinstance(answer, tuple) and len(answer) == 3:
        logits, shares, chosen = answer
        expected = nn.functional.linear(rows, weight)
        for normalised, rounds in itertools.product((False, True), repeat=2):
            rule = Shares(chosen.shape[-1], normalised, rounds)
            guess, experts = rule(logits)
            same = torch.equal(logits, expected) and torch.equal(experts, chosen)
            rounded = shares.dtype == (dtype if rounds else torch.float32)
            if same and rounded and _is_close(guess, shares):
                return rule
    raise ValueError(f"{type(router).__name__} shares rows out in an unknown way")


@dataclass(frozen=True)
class Attention:
    """Causal attention, from normed rows to the numbers added to them."""

    projections: tuple[nn.Linear, ...]
    order: Tensor
    """Indices into their joined outputs, in order: queries, keys, values, [(heads + 2 kv) * size].
    The two numbers of a rotated pair are neighbours."""
    heads: int
    kv_heads: int
    size: int  # of a head
    rotation: Rotation | None
    row_norms: tuple[Norm, Norm] | None  # over all queries of a row together, and over its keys
    head_norms: Norm | None  # over each query and key: weight [heads + kv, size]
    norms_last: bool  # whether `head_norms` follow the rotation
    scaling: float
    softcap: float | None
    window: int | None
    output: nn.Linear


@dataclass(frozen=True)
class Mlp:
    """An MLP, from normed rows to the numbers added to them."""

    into: tuple[nn.Linear, ...]  # gate and up, side by side, or only up
    gated: bool
    activation: nn.Module
    down: nn.Linear


@dataclass(frozen=True)
class Experts:
    """Several MLPs, of which each row takes a few."""

    router: Tensor  # [experts, d]: gives the logits that choose experts
    shares: Shares
    into: Tensor  # [experts, 2 * inner, d]: gate and up, side by side
    activation: nn.Module
    down: Tensor  # [experts, d, inner]


@dataclass(frozen=True)
class Recipe:
    """One layer. Attention and MLP each add their output to the rows."""

    attention: Attention
    mlp: Mlp | Experts
    input_norms: tuple[Norm | None, Norm | None]  # before attention, and before the MLP
    output_norms: tuple[Norm | None, Norm | None]  # after them
    parallel: bool
    """Whether the MLP reads the same rows as attention; with one norm for both, the normed ones."""
    factor: float  # factor of the added outputs


_IN, _POST = "input_layernorm", "post_attention_layernorm"
_PLACES = (
    (_IN, None, _POST, None),  # Llama and most others
    (_IN, None, None, None),  # Cohere, Phi: one for both, which run in parallel
    (_IN, None, "pre_feedforward_layernorm", None),  # VaultGemma
    (None, _POST, None, "post_feedforward_layernorm"),  # OLMo 2 and 3, EXAONE 4
    (_IN, _POST, "pre_feedforward_layernorm", "post_feedforward_layernorm"),  # Gemma 2, 3
    (_IN, "post_self_attn_layernorm", _POST, "post_mlp_layernorm"),  # GLM 4
    (_IN, "post_norm1", _POST, "post_norm2"),  # HyperCLOVA X
)
"""A layer's norms by name: before and after attention, before and after the MLP."""

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
_ACTIVATION_NAMES = ("act_fn", "activation_fn", "act")
_CAPPED = ("gemma2", "vaultgemma")
"""Families known to apply the cap: outputs would not reveal a cap that few scores reach."""


@torch.no_grad()
def recipe_of(decoder: DecoderParts, layer: Any, kind: str, dtype: torch.dtype) -> Recipe:
    """The recipe of `layer`, whose attention is of `kind`. Raises ValueError for unknown layers."""
    for name, part in layer.named_modules():
        allowed = {"weight", "bias"} if not [*part.children()] else set()
        if name == "mlp.experts":
            allowed = {"gate_up_proj", "down_proj"}
        tensors = dict([*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)])
        if unknown := tensors.keys() - allowed:  # unknown weights, which may act on few rows only
            raise ValueError(f"{name or 'the layer'} has {', '.join(sorted(unknown))}")
    children = _names_of_children(layer)
    attention = _single_name(_ATTENTIONS, children, "attention")
    names = children - {attention, "mlp"}
    places = next((group for group in _PLACES if names == {*group} - {None}), None)
    if places is None or "mlp" not in children:
        raise ValueError(f"the layer holds {', '.join(sorted(children))}")
    norms = [
        None if name is None else norm_of(getattr(layer, name), decoder.config.hidden_size, dtype)
        for name in places
    ]
    return Recipe(
        attention=_attention(decoder, getattr(layer, attention), kind, dtype),
        mlp=_mlp(layer.mlp, dtype),
        input_norms=(norms[0], norms[2]),
        output_norms=(norms[1], norms[3]),
        parallel=bool(getattr(layer, "use_parallel_residual", places[2:] == (None, None))),
        factor=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def plain_linear(module: Any, name: str, dtype: torch.dtype) -> nn.Linear:
    """Return `module`. Raises ValueError for another kind of layer, or unusual weights."""
    if type(module) is not nn.Linear:
        raise ValueError(f"{name} is {type(module).__module__}.{type(module).__name__}")
    _require_usual(name, module.weight, dtype)
    return module


def why_unusual(weight: Tensor) -> str | None:
    numbers = getattr(weight, "blocks", weight.detach())  # blocks of a file are fine, too
    if type(numbers) is not Tensor:
        return f"weights are of type {type(numbers).__name__}"
    if weight.device.type != "cpu":
        return f"weights are on {weight.device}"
    return None if weight.dtype in _ERROR else f"weights are {weight.dtype}"


def _require_usual(name: str, weight: Tensor, dtype: torch.dtype) -> None:
    reason = why_unusual(weight)
    if reason is None and weight.dtype != dtype:
        reason = f"weights are {weight.dtype}, others {dtype}"
    if reason is not None:
        raise ValueError(f"{name}: {reason}")


def _names_of_children(part: nn.Module) -> set[str]:
    """The names of a module's children, without those that do nothing in evaluation."""
    idle = (nn.Dropout, nn.Identity)
    return {name for name, child in part.named_children() if not isinstance(child, idle)}


def _attention(decoder: DecoderParts, part: Any, kind: str, dtype: torch.dtype) -> Attention:
    children = _names_of_children(part)
    names = next((group for group in _PROJECTIONS if children.issuperset(group)), ())
    output = _single_name(_OUTPUTS, children, "output of attention")
    norms = next((group for group in _HEAD_NORMS if children.issuperset(group)), ())
    if not names or children != {*names, output, *norms}:
        raise ValueError(f"attention holds {', '.join(sorted(children))}")
    projections = tuple(plain_linear(getattr(part, name), name, dtype) for name in names)
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
            row_norms = _reorder(queries, pairs), _reorder(keys, pairs)
        else:
            head_norms = _head_norm(queries, heads, keys, kv_heads, pairs)
    cap = getattr(part, "attn_logit_softcapping", None)
    if decoder.config._attn_implementation != "eager":
        cap = None  # transformers' sdpa leaves it out, with a warning
    if cap is not None and decoder.config.model_type not in _CAPPED:
        raise ValueError("attention may cap its scores")
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
        softcap=cap,
        window=None if kind == FULL else int(decoder.config.sliding_window),
        output=plain_linear(getattr(part, output), output, dtype),
    )


def _heads_among(projections: tuple[nn.Linear, ...], size: int, config: Any) -> tuple[Tensor, int]:
    """Indices of queries, keys and values in the outputs, [heads + 2 kv, size], and `heads`."""
    count = sum(projection.out_features for projection in projections) // size
    places = torch.arange(count * size).view(count, size)
    if len(projections) == 3:
        heads, keys, values = (projection.out_features // size for projection in projections)
    elif config.model_type == "gpt_neox":  # query, key and value of each head side by side
        heads = keys = values = count // 3
        places = places.view(-1, 3, size).transpose(0, 1).reshape(count, size)
    else:
        heads = config.num_attention_heads
        keys = values = getattr(config, "num_key_value_heads", heads)
    if keys != values or heads % keys or heads + keys + values != count:
        raise ValueError(f"attention has {heads} query, {keys} key and {values} value heads")
    return places, heads


def _reorder(norm: Norm, pairs: Tensor) -> Norm:
    """A norm over a whole row of heads, its numbers in the order of `Attention.order`."""

    def reorder(values: Tensor) -> Tensor:
        return values.view(-1, len(pairs))[:, pairs].flatten()

    bias = None if norm.bias is None else reorder(norm.bias)
    return replace(norm, weight=reorder(norm.weight), bias=bias)


def _head_norm(queries: Norm, heads: int, keys: Norm, kv_heads: int, pairs: Tensor) -> Norm:
    """The norms of single heads as one norm, [heads + kv, size]."""
    if queries.bias is not None or keys.bias is not None:
        raise ValueError("norms of queries and keys have a bias")
    # by field: from Python 3.13 on, == of two dataclasses compares their tensors, too
    if len({(norm.eps, norm.centred, norm.rounds) for norm in (queries, keys)}) > 1:
        raise ValueError("the norms of queries and of keys differ in kind")
    weights = (queries.weight.expand(heads, -1), keys.weight.expand(kv_heads, -1))
    return replace(queries, weight=torch.cat(weights)[:, pairs].contiguous())


def _mlp(part: Any, dtype: torch.dtype) -> Mlp | Experts:
    children = _names_of_children(part)
    if children == {"gate", "experts"}:
        shares, inner = shares_of(part.gate, dtype), part.experts
        for weight in (part.gate.weight, inner.gate_up_proj, inner.down_proj):
            _require_usual("experts", weight, dtype)
        return Experts(part.gate.weight, shares, inner.gate_up_proj, inner.act_fn, inner.down_proj)
    activation = _single_name(_ACTIVATION_NAMES, children, "activation")
    for names, gated in _MLPS:
        if children == {*names, activation}:
            *into, down = (plain_linear(getattr(part, name), name, dtype) for name in names)
            return Mlp(tuple(into), gated, getattr(part, activation), down)
    raise ValueError(f"mlp holds {', '.join(sorted(children))}")


def _single_name(names: tuple[str, ...], children: set[str], kind: str) -> str:
    matches = [name for name in names if name in children]
    if len(matches) != 1:
        raise ValueError(f"{kind}: found {', '.join(sorted(children))}")
    return matches[0]
