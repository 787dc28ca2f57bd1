"""Tests, on this machine and model, that a row's bits do not depend on what runs with it.

Two ways lead there: kernels whose result for a row is the same for any number of rows, or passes
of one fixed shape, padded, over a fixed number of slots. Either is a property of the kernels, so it
is measured here before anyone relies on it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.decoding.state import HiddenCache, alone
from selfspec.errors import InvalidOption, PinnedUnavailable
from selfspec.model.backbone import Backbone
from selfspec.model.kv import Lease

logger = logging.getLogger(__name__)

_CONTEXTS = (16, 180)
"""Tokens in front of the probed ones: kernels may cut longer sums otherwise than short ones (MKL
with AVX512 does between 192 and 384)."""


_PIECE = 13
"""Rows of the pieces that a prompt is cut into."""

_FEW_LAYERS = 4

_MOST_SLOTS = 1 << 20
"""Positions with memory of their own from the start: a slip of the pen asks for more."""


class PassShape(NamedTuple):
    """What all passes of a pinned decoding have in common."""

    rows: int | None = None
    """Fixed number of rows; None where the kernels do not care."""
    slots: int | None = None
    """Fixed number of key slots; None where the kernels do not care."""


class PinnedProbe:
    """What was found about one model on this machine; each question is probed once."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._found: dict[tuple[PassShape, int, bool], PinnedUnavailable | None] = {}

    def shape(self, fixed: PassShape, widest: int) -> PassShape:
        """What makes bits independent of drafts: the kernels by themselves, else a `fixed` shape.

        Raises PinnedUnavailable if neither does, InvalidOption for more slots than could be had.
        """
        if self._backbone.claims.steady and self._failure(PassShape(), widest) is None:
            return PassShape()
        if (fixed.slots or 0) > _MOST_SLOTS:
            raise InvalidOption(
                f"pinned passes would look at {fixed.slots} positions each, expected at most "
                f"{_MOST_SLOTS}. Lower max_new_tokens, or leave pinned out"
            )
        if (failure := self._failure(fixed, widest)) is not None:
            raise failure
        return fixed

    def holds_unpadded(self, widest: int) -> bool:
        """Whether kernels treat rows alike by themselves, as a quick look has it."""
        if not self._backbone.claims.steady:
            return False
        failure = self._failure(PassShape(), widest, quick=True)
        if failure is not None:
            logger.info("drafts may move bits here: %s", failure)
        return failure is None

    def _failure(
        self, shape: PassShape, widest: int, *, quick: bool = False
    ) -> PinnedUnavailable | None:
        key = (shape, widest, quick)
        if key not in self._found:
            try:
                check_pinned(self._backbone, shape, widest, quick=quick)
                self._found[key] = None
            except PinnedUnavailable as error:
                self._found[key] = error
        return self._found[key]


@torch.inference_mode()
def check_pinned(backbone: Backbone, shape: PassShape, widest: int, *, quick: bool = False) -> None:
    """Raise PinnedUnavailable unless logits are bitwise the same for every grouping of rows.

    The same random tokens run one at a time, in blocks of `widest` rows (which `shape` must have
    room for), and in uneven blocks; every second block has wrong tokens behind it, as rejected
    drafts would be. What is in front of them runs at once, and for the blocks in pieces where the
    executor claims that this changes nothing either. Costs about 3 * `widest` passes at each of two
    contexts; `quick` looks at the longer one alone, at half as many tokens and at the first few
    layers; `selfspec verify` looks at all.
    """
    contexts: Sequence[int] = _CONTEXTS
    count, layers = 2 * widest, backbone.num_layers
    if quick:
        contexts, count, layers = _CONTEXTS[-1:], widest, min(layers, _FEW_LAYERS)
    for context in contexts:
        room = (shape.slots or backbone.max_positions) - widest - context
        if room > 0:
            _check_at(backbone, shape, widest, context, min(count, room), layers)


def _check_at(
    backbone: Backbone, shape: PassShape, widest: int, context: int, count: int, layers: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(backbone.vocab_size, (context + count,), generator=generator)
    front, ids = ids.to(backbone.device).split([context, count])
    pieces = _PIECE if any_split(backbone, shape) else context
    whole, parts = (
        _Text(backbone, shape, widest, layers, front.split(size)) for size in (context, pieces)
    )
    alone = whole.logits(ids, [1] * count)
    uneven = [1 + step % (widest - 1) for step in range(count)]
    for name, widths in {"full": [widest] * count, "uneven": uneven}.items():
        differing = int((alone != parts.logits(ids, widths)).any(-1).sum())
        if differing:
            raise PinnedUnavailable(
                f"{differing} of {count} positions behind {context} others changed bits between "
                f"single rows and {name} blocks of up to {widest} rows: these kernels do not treat "
                "all rows alike"
            )


def any_split(backbone: Backbone, shape: PassShape) -> bool:
    """Whether a text is claimed to have the same bits however it is cut into passes."""
    return shape == PassShape() and backbone.claims.steady


class _Text:
    def __init__(
        self,
        backbone: Backbone,
        shape: PassShape,
        widest: int,
        layers: int,
        pieces: Sequence[Tensor],
    ) -> None:
        """A context, in `pieces` of ids, through the first `layers`."""
        self._backbone, self._widest = backbone, widest
        self._lease = Lease(backbone.num_layers, shape.slots)
        upto = (layers,) if layers < backbone.num_layers else ()
        self._hidden = HiddenCache(backbone, self._lease, upto, pinned_rows=shape.rows)
        for piece in pieces:
            self._run(piece)
        self._context = self._lease.length(0)

    def logits(self, ids: Tensor, widths: Sequence[int]) -> Tensor:
        """Logits [count, V] of `ids` [count] behind the context, run in blocks of `widths`."""
        found: list[Tensor] = []
        done = 0
        while done < len(ids):
            block = ids[done : done + widths[len(found)]]
            wrong = (block[-1:] + 1) % self._backbone.vocab_size
            drafted = torch.cat([block, wrong.expand(self._widest - len(block))])
            states = self._run(drafted if len(found) % 2 else block)
            found.append(alone(self._hidden.unembed(states)).logits[: len(block)])
            done += len(block)
            self._lease.truncate(self._context + done)
        self._lease.truncate(self._context)
        return torch.cat(found)

    def _run(self, ids: Tensor) -> Tensor:
        self._hidden.clear()
        self._hidden.push(self._backbone.embed(ids))
        return alone(self._hidden.advance(0))
