"""Weights as compiled products read them: panels of outputs, by stripes that are kept in one form.

Comes in: weights of linear layers, plain or as blocks of a file. Goes out: copies of them, laid out
for one pass over memory. Called by `products` and the fused executor's program.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.model.compiled import compiled
from selfspec.model.compiler import KERNELS
from selfspec.model.quantised import QuantisedWeight

_SOURCE = KERNELS / "products.cpp"

PANEL = 16
"""Outputs side by side, as in `panels.hpp`."""

_PLAIN = 0
"""The form of panels of plain numbers, as in `blocks.hpp`."""


class Stripe(NamedTuple):
    """Panels side by side that are kept in one form."""

    panels: int
    form: int
    """Its number in `blocks.hpp`."""
    weights: Tensor


class _Stripe(ctypes.Structure):
    """The struct `Stripe` of `linear.hpp`."""

    _fields_ = (
        ("panels", ctypes.c_long),
        ("form", ctypes.c_long),
        ("weights", ctypes.c_void_p),
    )


def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The functions of `products.cpp`. Raises ValueError, with the reason, if there are none."""
    return _library(dtype, os.environ.get("CXX"))


@cache
def _library(dtype: torch.dtype, _compiler: str | None) -> ctypes.CDLL:
    found = compiled(_SOURCE, BFLOAT16=int(dtype == torch.bfloat16))
    whole, pointer = ctypes.c_long, ctypes.c_void_p
    found.pack.argtypes = (*(whole,) * 2, *(pointer,) * 2)
    found.product.argtypes = (*(whole,) * 3, *(pointer,) * 4)
    found.pack_blocks.argtypes = (*(whole,) * 3, *(pointer,) * 3)
    found.panel_bytes.argtypes = whole, whole
    found.form_of.argtypes = (whole,)
    found.panel_bytes.restype = found.form_of.restype = found.blocks_pay.restype = whole
    found.wide_vectors.restype = found.tiles.restype = whole
    found.pack.restype = found.product.restype = found.pack_blocks.restype = None
    return found


def blocks_pay(dtype: torch.dtype) -> bool:
    """Whether products from blocks are faster than from numbers of this dtype, on this processor.

    Expanded to bfloat16 without its instructions, each weight is rounded: 0.4 to 1.0 times as fast
    as numbers (AVX2, 1 to 4 rows); in float32 2 to 3 times. Raises ValueError without a compiler.
    """
    return bool(library(dtype).blocks_pay())


def wide_vectors(dtype: torch.dtype) -> bool:
    """Whether products compute 16 numbers at once: AVX-512. ValueError without a compiler."""
    return bool(library(dtype).wide_vectors())


def tiles(dtype: torch.dtype) -> bool:
    """Whether products compute with matrix registers: AMX. ValueError without a compiler."""
    return bool(library(dtype).tiles())


def can_compile(dtype: torch.dtype) -> bool:
    """Whether there are products of our own here."""
    try:
        library(dtype)
    except ValueError:
        return False
    return True


class Stripes:
    """The weights of linear layers side by side, as compiled code reads them: a copy."""

    def __init__(self, weights: Sequence[Tensor], order: Tensor | None = None) -> None:
        """[out, in] each; `order` [out] rearranges their outputs.

        Blocks stay blocks where whole panels have one format. Raises ValueError, with the reason,
        where nothing compiles.
        """
        self._stripes = list(_stripes(weights, order))
        self.nbytes = sum(stripe.weights.nbytes for stripe in self._stripes)
        entries = [_Stripe(panels, form, kept.data_ptr()) for panels, form, kept in self._stripes]
        self._table = (_Stripe * len(entries))(*entries)

    @property
    def forms(self) -> list[int]:
        """Of each stripe; 0 is that of plain numbers."""
        return [stripe.form for stripe in self._stripes]

    @property
    def address(self) -> int:
        """Of a table for `linear.hpp`; this object keeps it."""
        return ctypes.addressof(self._table)


def in_panels(weights: Tensor) -> Tensor:
    """Plain weights [E, out, in] of linear layers in panels, [E, ..]: a copy.

    Raises ValueError, with the reason, where nothing compiles.
    """
    functions = library(weights.dtype)
    count, outputs, inner = weights.shape
    odd = inner % 2 if weights.dtype == torch.bfloat16 else 0
    panels = weights.new_empty(count, -(-outputs // PANEL) * PANEL * (inner + odd))
    for weight, to in zip(weights, panels, strict=True):
        weight = weight.contiguous()
        functions.pack(inner, outputs, weight.data_ptr(), to.data_ptr())
    return panels


def side_by_side(weights: Sequence[Tensor], order: Tensor | None) -> Tensor:
    """Weights [out, in] as one of plain numbers, its outputs rearranged by `order` [out]."""
    plain = [
        weight.expanded() if isinstance(weight, QuantisedWeight) else weight for weight in weights
    ]
    whole = torch.cat(plain) if len(plain) > 1 else plain[0]
    return whole if order is None else whole[order]


def _stripes(weights: Sequence[Tensor], order: Tensor | None) -> list[Stripe]:
    ends = torch.tensor([len(weight) for weight in weights]).cumsum(0)
    places = torch.arange(int(ends[-1])) if order is None else order
    owners = torch.bucketize(places, ends, right=True).tolist()
    lengths = [len(list(run)) for _, run in groupby(owners)]
    blocks = any(isinstance(weight, QuantisedWeight) for weight in weights)
    blocks = blocks and blocks_pay(weights[0].dtype)
    if not blocks or any(length % PANEL for length in lengths[:-1]):
        return [_as_numbers(side_by_side(weights, order))]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    found = []
    for first, last in pairwise(starts):
        owner = owners[first]
        rows = places[first:last] - (ends[owner] - len(weights[owner]))
        found.append(_stripe(weights[owner], rows))
    return found


def _stripe(weight: Tensor, rows: Tensor) -> Stripe:
    """These rows of one weight."""
    if isinstance(weight, QuantisedWeight):
        return _as_blocks(weight, rows)
    return _as_numbers(weight[rows])


def _as_numbers(weight: Tensor) -> Stripe:
    (panels,) = in_panels(weight[None])
    return Stripe(-(-len(weight) // PANEL), _PLAIN, panels)


def _as_blocks(weight: QuantisedWeight, rows: Tensor) -> Stripe:
    functions, number = library(weight.dtype), weight.format.number
    count, inner = -(-len(rows) // PANEL), weight.shape[1]
    panels = torch.empty(count * functions.panel_bytes(number, inner), dtype=torch.uint8)
    places = weight.places(rows)
    functions.pack_blocks(
        number, inner, len(places), places.data_ptr(), weight.blocks.data_ptr(), panels.data_ptr()
    )
    return Stripe(count, functions.form_of(number), panels)
