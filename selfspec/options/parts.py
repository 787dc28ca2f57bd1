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


AT_LEAST_0 = Range(lambda value: value >= 0, "at least 0")
AT_LEAST_1 = Range(lambda value: value >= 1, "at least 1")
ABOVE_0 = Range(lambda value: value > 0.0, "above 0")
SHARE = Range(lambda value: 0.0 < value <= 1.0, "in (0, 1]")
PROBABILITY = Range(lambda value: 0.0 <= value <= 1.0, "in [0, 1]")


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
    for name, limit in _ranges(kind).items():
        value = values[name]
        every = value if isinstance(value, tuple) and not limit.whole else (value,)
        if not every:
            raise InvalidOption(f"{prefix}{name} is empty, expected at least one value")
        for one in every:
            if one is not None and not limit.holds(one):
                raise InvalidOption(f"{prefix}{name} is {one}, expected a value {limit.expected}")


@functools.cache
def _ranges(kind: type) -> dict[str, Range]:
    """By field name; for fields that have one."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: note
        for name, hint in hints.items()
        for note in getattr(hint, "__metadata__", ())
        if isinstance(note, Range)
    }


AtLeast0 = Annotated[float, AT_LEAST_0]
AtLeast1 = Annotated[int, AT_LEAST_1]
Share = Annotated[float, SHARE]
Probability = Annotated[float, PROBABILITY]
