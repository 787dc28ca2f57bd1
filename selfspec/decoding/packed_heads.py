"""Exit heads by compiled code, from 8-bit copies of their weights.

A draft decides no text, so it needs few digits; what counts is how few bytes it reads. Come in:
heads as they were fitted. What goes out replaces them while no gradient is wanted. Called by the
facade.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from selfspec.heads.attending import AttendingHeads
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import ExitHead, Parts
from selfspec.model.fused import HIDDEN, Operation, Program
from selfspec.model.recipe import Activation, norm_of, why_unusual
from selfspec.model.weights import CompiledLinear, QuantisedWeight, blocks_pay, in_8_bits


@torch.no_grad()
def pack(heads: ExitHeads) -> None:
    """Make heads cheaper to ask, on a CPU with compiled code.

    Copies in 8 bits agree with the model as often: 46.2 % of 6,163 places, SmolLM2-135M's own heads
    before and after. Later changes of weights do not reach them. Heads stay as they are that
    multiply by all rows of an unembedding of plain numbers, of which a copy would be large.
    """
    if isinstance(heads, AttendingHeads):
        _pack_layer(heads)
    shared: dict[int, CompiledLinear] = {}  # most heads of a model have the same rows
    for head in heads.by_layer.values():
        assert isinstance(head, ExitHead)  # noqa: S101  # a ModuleDict of them
        rows = head.rows
        small = head.draft_ids is not None or isinstance(rows.detach(), QuantisedWeight)
        if not small or why_unusual(rows) is not None:
            continue
        try:
            if id(rows) not in shared:
                shared[id(rows)] = _light(rows, head.bias)
            head.pack(PackedHead(head, shared[id(rows)]))
        except ValueError:  # no compiler, or numbers or a norm of a kind of its own
            continue


def _pack_layer(heads: AttendingHeads) -> None:
    """The linear layers of heads that attend; its attention reads no weights."""
    for linear in heads.parts.modules():
        if isinstance(linear, nn.Linear) and why_unusual(linear.weight) is None:
            try:
                light = _light(linear.weight, linear.bias)
            except ValueError:  # no compiler, or other numbers
                return
            heads.nbytes += light.nbytes - linear.weight.nbytes
            linear.forward = light.__call__  # type: ignore[method-assign,assignment]  # heads are ours


class PackedHead:
    """The features of one head in one compiled call, and its draft logits in another."""

    def __init__(self, head: ExitHead, rows: CompiledLinear) -> None:
        """`rows`: the head's. Raises ValueError, with the reason, where it cannot be compiled."""
        self._rows, self._reads_deep = rows, head.reads_deep
        width = rows.in_features
        self._program = Program(rows.dtype, 2 * width if head.reads_deep else width)
        self._features = self._program.buffer("features", width)
        self._program.add_layer(list(self._operations(head.parts)))

    def features(self, hidden: Tensor, deep: Tensor | None) -> Tensor:
        inputs = hidden
        if self._reads_deep:
            beside = torch.zeros_like(hidden) if deep is None else deep.to(hidden.dtype)
            inputs = torch.cat([hidden, beside], dim=-1)
        found = self._program.transform(inputs.reshape(-1, inputs.shape[-1]), self._features)
        return found.view_as(hidden)

    def unembed(self, features: Tensor) -> Tensor:
        """[.., d] -> [.., V_draft], bias included, before the model's own finish."""
        return self._rows(features)

    def _operations(self, parts: Parts) -> Iterator[Operation]:
        """Operations from the hidden state, and `deep` where the head reads that, to features."""
        program, to = self._program, self._features
        if not isinstance(parts.norm, nn.Identity):
            norm = norm_of(parts.norm, self._rows.in_features, self._rows.dtype)
            if parts.direct is None and parts.inner is None:
                yield program.norm(HIDDEN, to, norm)
                return
            yield program.norm(HIDDEN, HIDDEN, norm)
        terms = 0.0  # 1: the target holds some
        if parts.inner is not None:
            inner, outer = _light(parts.inner.weight, parts.inner.bias), parts.outer
            opened = to if outer is None else program.buffer("opened", inner.out_features)
            yield program.product(HIDDEN, opened, inner)
            if parts.activated:
                yield program.activate(opened, opened, Activation.SILU, gated=False)
            if outer is not None:
                yield program.product(opened, to, _light(outer.weight, outer.bias))
            terms = 1.0
        if parts.direct is not None:
            direct = _light(parts.direct.weight, parts.direct.bias)
            yield program.product(HIDDEN, to, direct, adds=terms)
        if parts.keeps:
            yield program.add(HIDDEN, to, 1.0)


def _light(weight: Tensor, bias: Tensor | None) -> CompiledLinear:
    """In 8 bits where products read these faster than numbers; ValueError as those raise it."""
    weight = weight.detach()
    return CompiledLinear(in_8_bits(weight) if blocks_pay(weight.dtype) else weight, bias)
