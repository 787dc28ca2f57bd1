"""Values from text, YAML and JSON, as a type hint wants them. Imports no torch."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, Union, get_args, get_origin

from selfspec.errors import InvalidOption
from selfspec.typed import shown


def members(hint: Any) -> tuple[Any, ...]:
    """The types in a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as `hint` says; text is parsed. Raises InvalidOption if no reading fits."""
    for member in members(hint):
        try:
            return _CONVERTERS[get_origin(member) or member](value, member)
        except (TypeError, ValueError, OverflowError):
            continue
    expected = " or ".join(_described(member) for member in members(hint))
    raise InvalidOption(f"{name} is {shown(value)}, expected {expected}")


def _number(value: Any, member: Any) -> Any:
    """Int or float; a whole number where the type is int, and never a bool."""
    number = member(value)
    if not math.isfinite(number):
        raise ValueError(value)
    if isinstance(value, bool) or (not isinstance(value, str) and number != value):
        raise ValueError(value)
    return number


def _exactly(value: Any, member: Any) -> Any:
    if not isinstance(value, member):
        raise TypeError(value)
    return value


def _sequence(value: Any, member: Any) -> Any:
    """A list or tuple, text with commas or slashes, or one item on its own."""
    entry, *_ = get_args(member)
    container = get_origin(member)
    items: Sequence[Any]
    if isinstance(value, str):
        items = re.split("[,/]", value) if container is tuple else [value]
    else:
        items = value if isinstance(value, list | tuple) else [value]
    if not items:
        raise ValueError(value)
    return container(_CONVERTERS[entry](item, entry) for item in items)


def _nothing(value: Any, _member: Any) -> None:
    if str(value).lower() != "none":
        raise TypeError(value)


_CONVERTERS: dict[Any, Callable[[Any, Any], Any]] = {
    bool: _exactly,
    str: _exactly,
    dict: _exactly,
    int: _number,
    float: _number,
    tuple: _sequence,
    list: _sequence,
    types.NoneType: _nothing,
}


def _described(member: Any) -> str:
    words = {
        **{bool: "true or false", str: "text", int: "a whole number", float: "a number"},
        dict: "names and values",
        types.NoneType: "none",
    }
    if get_origin(member) in (tuple, list):
        return f"a list (each {words[get_args(member)[0]]})"
    return words[get_origin(member) or member]
