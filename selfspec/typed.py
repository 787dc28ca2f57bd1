"""Whether values are of the types that their annotations say: of options, and of records in files.

Comes in: names, values and type hints. Goes out: nothing, or an error at the first that does not
fit. Called by `config` before any range is looked at, and where records are read. Imports no torch.
"""

from __future__ import annotations

import difflib
import functools
import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from selfspec.errors import InvalidData, InvalidOption

_SHOWN = 60
"""Characters of a value that an error repeats."""

_MOST_LISTED = 16
"""Known names that an error lists."""

_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("True or False", "True or False"),
    int: ("a whole number", "whole numbers"),
    float: ("a finite number", "finite numbers"),
    str: ("text", "texts"),
    types.NoneType: ("None", "None"),
    Any: ("a value", "values"),
}
"""How an error calls one value of a type, and several."""


_TORCH_CLASSES = dict.fromkeys(("Tensor", "GenerationConfig", "BaseStreamer"), Any)
"""Names in annotations that need torch: whoever uses such a value checks it."""


def annotations_of(options: type) -> dict[str, Any]:
    """Type hints of a class of options; what only torch knows is Any."""
    return _annotations(options)


@functools.cache
def _annotations(options: type) -> dict[str, Any]:
    return get_type_hints(options, localns=_TORCH_CLASSES)


def check_keys(values: Iterable[str], known: Iterable[str], kind: str) -> None:
    """Raise InvalidOption at the first of `values` not in `known`, naming the nearest known one."""
    names = sorted(known)
    for key in values:
        if key not in names:
            near = _near(str(key), names)
            hint = f"Known: {', '.join(names[:_MOST_LISTED])}"
            if len(names) > _MOST_LISTED:
                hint = f"Leave it out: it is like none of the {len(names)} known ones"
            if near:
                hint = f"Did you mean {' or '.join(near)}?"
            raise InvalidOption(f"unknown {kind} {key!r}. {hint}")


def _near(key: str, names: list[str]) -> list[str]:
    """Names that a person may have meant: those that begin as `key`, else alike ones."""
    longer = [name for name in names if len(key) > 2 and name.startswith(f"{key}_")]
    return longer or difflib.get_close_matches(key, names, n=1)


def check_types(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise InvalidOption at the first value that is not of its hint; others are not looked at."""
    for name, value in values.items():
        if name in hints and not fits(value, hints[name]):
            expected = described(hints[name])
            raise InvalidOption(f"{name} is {shown(value)}, expected {expected}")


def require_types(record: Any) -> None:
    """Raise InvalidData unless each field of a dataclass holds what its annotation says."""
    hints = get_type_hints(type(record))
    for entry in fields(record):
        value = getattr(record, entry.name)
        if not fits(value, hints[entry.name]):
            expected = described(hints[entry.name])
            raise InvalidData(f"{entry.name} is {shown(value)}, expected {expected}")


def fits(value: Any, hint: Any) -> bool:
    """Whether `value` is of a hint made of bool, int, float, str, None, Any, lists and classes.

    A bool is no number, a number is finite, a list may be a tuple and the other way round.
    """
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, member) for member in inner)
    if origin is Literal:
        return value in inner
    if _is_kind(origin, Mapping):
        return isinstance(value, Mapping) and (
            not inner or all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
        )
    if _is_kind(origin, Collection) and origin is not str:
        return isinstance(value, list | tuple) and _all_fit(value, origin, inner)
    if origin is Callable or origin is types.FunctionType:
        return callable(value)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if hint is float:
        number = isinstance(value, Real) and not isinstance(value, bool)
        return number and _finite(value)
    return hint is Any or isinstance(value, origin)


def plain_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with Python's own numbers for those of numpy, which transformers does not take."""
    return {name: _plain(value) for name, value in values.items()}


def described(hint: Any) -> str:
    """A hint in words."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(described(member) for member in inner)
    if origin in (list, tuple):
        kinds = dict.fromkeys(entry for entry in inner if entry is not Ellipsis)
        several = [_WORDS.get(kind, (described(kind),) * 2)[1] for kind in kinds]
        return f"a list of {' and '.join(several)}" if several else "a list"
    if origin is Callable:
        return "a function"
    return _WORDS.get(hint, (f"a {getattr(hint, '__name__', hint)}",) * 2)[0]


def shown(value: object) -> str:
    """A value in an error: on one line, cut if it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001  # the value may be of any class, with a repr that fails
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}.."


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _is_kind(origin: Any, kind: type) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


def _all_fit(values: list[Any] | tuple[Any, ...], origin: Any, inner: tuple[Any, ...]) -> bool:
    if origin is tuple and inner and inner[-1] is not Ellipsis:
        return len(values) == len(inner) and all(map(fits, values, inner))
    return not inner or all(fits(value, inner[0]) for value in values)


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False
