"""Whether the values of a dataclass are of the types that it says; for those read from files.

Comes in: an instance made of plain values. Raises InvalidData where a field holds another type.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from selfspec.errors import InvalidData


def require_types(record: Any) -> None:
    """Raise InvalidData, naming the field, unless each holds what its annotation says."""
    hints = get_type_hints(type(record))
    for entry in fields(record):
        value = getattr(record, entry.name)
        if not fits(value, hints[entry.name]):
            kind = getattr(hints[entry.name], "__name__", "")
            expected = kind if kind in ("int", "float", "str", "bool") else hints[entry.name]
            raise InvalidData(f"{entry.name} is {str(value)[:80]!r}, expected {expected}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type: plain ones, unions, lists, tuples and mappings of them."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return any(fits(value, member) for member in inner)
    if kind in (int, float):
        allowed = int if kind is int else int | float
        return isinstance(value, allowed) and not isinstance(value, bool)
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        same = isinstance(value, list | tuple) and len(value) == len(inner)
        return same and all(map(fits, value, inner))
    if isinstance(kind, type) and inner and issubclass(kind, Mapping):
        return isinstance(value, Mapping) and all(
            fits(key, inner[0]) and fits(entry, inner[1]) for key, entry in value.items()
        )
    if isinstance(kind, type) and inner and issubclass(kind, Collection):
        return isinstance(value, list | tuple) and all(fits(entry, inner[0]) for entry in value)
    return not isinstance(kind, type) or isinstance(value, kind)
