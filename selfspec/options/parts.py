"""What all groups of options share: a range said at the field, checked when an object is made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, get_type_hints

from selfspec.errors import InvalidOption
from selfspec.typed import annotations_of, check_types


@dataclass(frozen=True)
class Range:
    """Which values an option may have; written into its annotation with `Annotated`."""

    holds: Callable[[Any], bool]
    expected: str
    """How an error says so."""
    whole: bool = False
    """Of a tuple as a whole, not of each value in it."""
    most: float | None = None
    """The largest value, which costs a few megabytes and milliseconds at most."""
    request: float | None = None
    """The largest that somebody else, a server's client, may ask for; None: nobody else may."""


def between(least: float, most: float, request: float | None = None) -> Range:
    """From the one to the other, both included."""
    expected = f"in [{least}, {most}]"
    return Range(lambda value: least <= value <= most, expected, most=most, request=request)


AMOUNT = between(0, 1000)
POSITIVE = Range(lambda value: 0.0 < value <= 1000.0, "in (0, 1000]", most=1000.0)
SHARE = Range(lambda value: 0.0 < value <= 1.0, "in (0, 1]", most=1.0, request=1.0)
PROBABILITY = between(0, 1, request=1.0)
LAYER = between(0, 4096)


class Part:
    """Settings of one drafter, controller or rule. Lists are kept as tuples."""

    kind: ClassVar[str]
    """Its name on the command line."""

    def __post_init__(self) -> None:
        """Raise InvalidOption for a value of another type, or out of its range."""
        for entry in fields(self):  # type: ignore[arg-type]  # all subclasses are dataclasses
            value = getattr(self, entry.name)
            if isinstance(value, list):
                object.__setattr__(self, entry.name, tuple(value))
        check_fields(self, f"{self.kind}:")


def check_fields(options: Any, prefix: str = "") -> None:
    """Raise InvalidOption unless all fields have values of their types, in their ranges.

    An error names a field behind `prefix`. None is in every range.
    """
    kind: type = type(options)
    hints = annotations_of(kind)
    values = {entry.name: getattr(options, entry.name) for entry in fields(kind)}
    check_types(
        {prefix + name: value for name, value in values.items()},
        {prefix + name: hints[name] for name in values},
    )
    for name, limit in ranges(kind).items():
        value = values[name]
        every = value if isinstance(value, tuple) and not limit.whole else (value,)
        if not every:
            raise InvalidOption(f"{prefix}{name} is empty, expected at least one value")
        for one in every:
            if one is not None and not limit.holds(one):
                raise InvalidOption(f"{prefix}{name} is {one}, expected a value {limit.expected}")


def check_asked(part: Part) -> None:
    """Raise InvalidOption for what a request to a server may not ask for of a part."""
    kind: type = type(part)
    built_in = kind()
    for entry in fields(kind):
        name, value = f"{part.kind}:{entry.name}", getattr(part, entry.name)
        if value == getattr(built_in, entry.name):
            continue
        limit = ranges(kind).get(entry.name)
        if limit is None or limit.request is None:
            raise InvalidOption(f"{name} is up to the server. Leave it out")
        if max(value if isinstance(value, tuple) else (value,)) > limit.request:
            raise InvalidOption(f"{name} is {value}, a request may ask for {limit.request} at most")


@functools.cache
def ranges(kind: type) -> dict[str, Range]:
    """By field name; for fields that have one."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: note
        for name, hint in hints.items()
        for note in getattr(hint, "__metadata__", ())
        if isinstance(note, Range)
    }


Amount = Annotated[float, AMOUNT]
Width = Annotated[int, between(1, 64, request=16)]
"""Draft tokens of a round. With 64 the logits of a verification take 13 MB at 49,152 tokens."""
Rank = Annotated[int, between(1, 1024)]
"""How many of the likeliest tokens."""
Share = Annotated[float, SHARE]
Probability = Annotated[float, PROBABILITY]
