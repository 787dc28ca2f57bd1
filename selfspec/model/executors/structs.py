"""The structs of `kernels/layers.cpp` in Python: field by field the same. Used by `program`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum

from selfspec.model.kv_pages import Page

Long, Float, Pointer = ctypes.c_long, ctypes.c_float, ctypes.c_void_p


class Kind(IntEnum):
    """`Kinds` of `layers.cpp`."""

    NORM = 0
    PRODUCT = 1
    ATTEND = 2
    ACTIVATE = 3
    EXPERTS = 4
    ADD = 5


class Heads(ctypes.Structure):
    """The struct of `attention.hpp` by this name, which says what the fields mean."""

    _fields_ = (
        ("size", Long),
        ("group", Long),
        ("kv", Long),
        ("rotated", Long),
        ("norms", Pointer),
        ("centred", Long),
        ("norms_last", Long),
        ("window", Long),
        ("eps", Float),
        ("scaling", Float),
        ("softcap", Float),
    )


class ExpertsStruct(ctypes.Structure):
    """The struct `Experts` of `experts.hpp`, which says what the fields mean."""

    _fields_ = (
        ("count", Long),
        ("each", Long),
        ("normalised", Long),
        ("rounds", Long),
        ("inner", Long),
        ("activation", Long),
        ("into", Pointer),
        ("down", Pointer),
        ("into_size", Long),
        ("down_size", Long),
        ("gathered", Long),
        ("opened", Long),
        ("activated", Long),
        ("closed", Long),
    )


class Operation(ctypes.Structure):
    """The struct of `layers.cpp` by this name, which says what the fields mean."""

    _fields_ = (
        ("kind", Long),
        ("source", Long),
        ("target", Long),
        ("inputs", Long),
        ("outputs", Long),
        ("weight", Pointer),
        ("bias", Pointer),
        ("adds", Float),
        ("eps", Float),
        ("at", Long),
        ("row", Long),
        ("centred", Long),
        ("rounds", Long),
        ("activation", Long),
        ("gated", Long),
        ("keys", Long),
        ("rotation", Long),
        ("heads", Heads),
        ("logits", Long),
        ("experts", ExpertsStruct),
    )


class SpanStruct(ctypes.Structure):
    """The struct `Span` of `layers.cpp`."""

    _fields_ = (
        ("first", Long),
        ("rows", Long),
        ("held", Long),
        ("parents", ctypes.POINTER(Long)),
        ("pages", ctypes.POINTER(Pointer)),
    )
    memory: list[Page]
    """A lease may forget them while they are read."""


class Pass(ctypes.Structure):
    """The struct `Pass` of `layers.cpp`."""

    _fields_ = (
        ("rows", Long),
        ("buffers", ctypes.POINTER(Pointer)),
        ("rotations", ctypes.POINTER(Pointer)),
        ("spans", Long),
        ("span", ctypes.POINTER(SpanStruct)),
        ("room", Pointer),
    )


def pointers(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    """A table of addresses."""
    return (Pointer * len(addresses))(*addresses)
