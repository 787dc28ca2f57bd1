"""What a layer's parts compute, found by asking them: norms, activations, rotations, routers.

Comes in: a module of the model. Goes out: which of the known ways gives its numbers, as data. Names
and classes say little, as families that call their norm RMSNorm differ in what they do to a weight;
answers say all. Called when a layer is read (`recipe`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.model.parts import DecoderParts

_ERROR = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 5e-3}
"""Largest error of an answer, relative to the largest number in it."""


@dataclass(frozen=True)
class Norm:
    """RMSNorm, or LayerNorm where a mean is taken off, over the last dimension."""

    weight: Tensor
    """[d] or [heads, d], float32; what families add to theirs is in it."""
    bias: Tensor | None
    eps: float
    centred: bool
    rounds: bool
    """Whether what is normed is rounded to the model's dtype before the weight."""

    @property
    def is_plain_rms(self) -> bool:
        """Whether it is what torch calls rms_norm."""
        return self.rounds and not self.centred and self.bias is None

    def __call__(self, rows: Tensor) -> Tensor:
        """[.., d] -> [.., d], in the dtype of `rows`."""
        found = rows.float()
        if self.centred:
            found = found - found.mean(-1, keepdim=True)
        found = found * torch.rsqrt(found.square().mean(-1, keepdim=True) + self.eps)
        if self.rounds:
            found = found.to(rows.dtype).float()
        found = found * self.weight
        return (found if self.bias is None else found + self.bias).to(rows.dtype)


@torch.no_grad()
def norm_of(module: Any, width: int, dtype: torch.dtype) -> Norm:
    """The norm that `module` computes on rows of `width`. Raises ValueError for another."""
    kind, one = type(module).__name__, torch.ones(())
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", 1e-5))
    given = torch.ones(width) if weight is None else weight.detach()
    bias = None if bias is None else bias.detach().float()
    sizes = torch.tensor([1.0, 0.1, float(eps) ** 0.5]).view(-1, *[1] * given.dim())
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(3, *given.shape, generator=generator) + 0.5) * sizes
    rows = rows.to(dtype)
    answer = module(rows)
    if answer.dtype != dtype or answer.shape != rows.shape:
        raise ValueError(f"{kind} gives {answer.dtype} {tuple(answer.shape)}")
    weights = [given.float(), given.float() + 1]
    weights += [(given + one.to(given.dtype)).float()]  # rounded, too
    ways = [
        Norm(way, bias, float(eps), centred, rounds)
        for centred, way, rounds in itertools.product((False, True), weights, (True, False))
    ]
    best = min(ways, key=lambda way: float((way(rows) - answer).abs().sum()))
    if not _near(best(rows), answer):
        raise ValueError(f"{kind} is neither RMSNorm nor LayerNorm")
    return best


class Activation(IntEnum):
    """`Activations` of `activations.hpp`."""

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
    """The one that `module` computes. Raises ValueError for another."""
    numbers = torch.linspace(-6, 6, 193)
    answer = module(numbers)
    for name, way in _ACTIVATIONS.items():
        if float((way(numbers) - answer).abs().max()) < 1e-5:
            return name
    raise ValueError(f"the activation is {type(module).__name__}, which is not known")


@dataclass(frozen=True)
class Rotation:
    """How positions turn the first numbers of a query or key, in pairs."""

    size: int
    """Of the numbers that are turned."""
    halves: bool
    """Whether j and j + size / 2 are a pair, else neighbours are."""
    angles: slice
    """Where each pair's angle is among the `size` that the model gives for a position."""

    def pairs(self, head_size: int) -> Tensor:
        """[head_size]: the numbers of a head in the order that makes pairs neighbours."""
        found = torch.arange(head_size)
        if self.halves:
            found[: self.size] = torch.arange(self.size).view(2, -1).T.flatten()
        return found

    def turns(self, cos: Tensor, sin: Tensor) -> Tensor:
        """Of the model, [T, size] each -> one complex number for each pair, [T, size / 2]."""
        return torch.complex(cos[:, self.angles].float(), sin[:, self.angles].float())


def rotation_of(
    decoder: DecoderParts, attention: nn.Module, kind: str, head_size: int, dtype: torch.dtype
) -> Rotation | None:
    """How a layer's queries and keys are rotated; None: not at all. ValueError for other ways."""
    positions = torch.tensor([[1, 5, 60]])
    like = torch.zeros(1, 3, decoder.config.hidden_size, dtype=dtype)
    cos, sin = decoder.rotations(like, positions, kind)
    if not _rotates(attention, like, cos, sin):
        return None
    turn = vars(sys.modules[type(attention).__module__]).get("apply_rotary_pos_emb")
    size = cos.shape[-1]
    if turn is None or size % 2 or not 0 < size <= head_size:
        raise ValueError("positions are rotated in an unknown way")
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(1, 1, 3, size, generator=generator).to(dtype)
    queries, keys = turn(heads, heads, cos, sin)
    half, every_second = slice(0, size // 2), slice(0, None, 2)
    for halves, angles in ((True, half), (False, every_second), (False, half)):
        way = Rotation(size, halves, angles)
        order = way.pairs(size)
        turned = torch.view_as_complex(heads[..., order].float().view(1, 1, 3, -1, 2))
        found = torch.empty(heads.shape)
        turned = torch.view_as_real(turned * way.turns(cos[0], sin[0])).flatten(-2)
        found[..., order] = turned
        if _near(found, queries) and _near(found, keys):
            return way
    raise ValueError("positions are rotated in an unknown way")


def _rotates(attention: nn.Module, like: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether attention asks where it is."""
    rows = torch.randn(like.shape, generator=torch.Generator().manual_seed(1)).to(like.dtype)
    still = torch.ones_like(cos), torch.zeros_like(sin)
    here, nowhere = (
        attention(hidden_states=rows, position_embeddings=given, attention_mask=None)[0]
        for given in ((cos, sin), still)
    )
    return not torch.equal(here, nowhere)


def _near(found: Tensor, answer: Tensor) -> bool:
    error = (found.float() - answer.float()).abs().max()
    return bool(error <= _ERROR[answer.dtype] * answer.float().abs().max())


@dataclass(frozen=True)
class Shares:
    """How a router shares a row out: a softmax over all experts, of which it takes the largest."""

    each: int
    """Experts that a row takes."""
    normalised: bool
    """Whether the shares of those sum up to 1."""
    rounds: bool
    """Whether shares are rounded to the model's dtype."""

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[T, experts] -> shares and experts, [T, each]."""
        shares, chosen = logits.float().softmax(-1).topk(self.each, dim=-1)
        if self.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        return (shares.to(logits.dtype).float() if self.rounds else shares), chosen


def shares_of(router: Any, dtype: torch.dtype) -> Shares:
    """What `router` does with its logits. Raises ValueError for other ways."""
    weight = router.weight
    rows = torch.randn(16, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    answer = router(rows)
    if isinstance(answer, tuple) and len(answer) == 3:
        logits, shares, chosen = answer
        expected = nn.functional.linear(rows, weight)
        for normalised, rounds in itertools.product((False, True), repeat=2):
            way = Shares(chosen.shape[-1], normalised, rounds)
            mine, where = way(logits)
            same = torch.equal(logits, expected) and torch.equal(where, chosen)
            if (
                same
                and shares.dtype == (dtype if rounds else torch.float32)
                and _near(mine, shares)
            ):
                return way
    raise ValueError(f"{type(router).__name__} shares rows out in an unknown way")
