"""`--sweep exit.threshold=0.1,0.3`: text comes in, a setting for each value goes out.

Called by `bench`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from selfspec.config import OPTION_NAMES, SpeculationOptions
from selfspec.errors import InvalidOption
from selfspec.options.controllers import CONTROLLERS
from selfspec.options.drafters import DRAFTERS
from selfspec.options.parts import Part
from selfspec.options.prices import Prices
from selfspec.options.rules import ACCEPTANCE
from selfspec.options.text import word
from selfspec.options.values import typed
from selfspec.typed import annotations_of, check_keys

_GROUPS: dict[str, Mapping[str, type[Part]]] = {
    "drafter": DRAFTERS,
    "controller": CONTROLLERS,
    "acceptance": ACCEPTANCE,
    "prices": {"": Prices},
}


class Moved(NamedTuple):
    """One option at one value."""

    name: str
    """As `--sweep` has it."""
    value: Any
    setting: dict[str, Any]
    """The keyword that says so. A drafter's setting is moved with this drafter alone."""


def moved(said: str) -> list[Moved]:
    """`NAME=VALUE,VALUE,..` as one setting per value, typed; `/` stands between those of a list.

    NAME is an option (pinned_rows, acceptance), or a setting of one: exit.threshold, prices.row,
    acceptance.cm-asd.tolerance. Raises InvalidOption.
    """
    name, equals, values = (piece.strip() for piece in said.partition("="))
    if not equals:
        raise InvalidOption(f"sweep is {said!r}, expected NAME=VALUE,VALUE,..")
    known = _known()
    check_keys([name], known, "option to sweep")
    option, prefix, hint = known[name]
    found = []
    for text in values.split(","):
        value = typed(name, text.strip(), hint)
        found.append(Moved(name, value, {option: prefix + word(value) if prefix else value}))
    return found


def _known() -> dict[str, tuple[str, str, Any]]:
    """By name: the option, what stands in front of the value in its text, the value's type."""
    hints = annotations_of(SpeculationOptions)
    found = {
        name: (name, "", str if name in _GROUPS else hints[name])
        for name in OPTION_NAMES
        if name != "prices"
    }
    for option, kinds in _GROUPS.items():
        for kind, made in kinds.items():
            path = f"{option}.{kind}" if kind in CONTROLLERS and kind in ACCEPTANCE else kind
            for entry in fields(made):  # type: ignore[arg-type]  # all parts are dataclasses
                prefix = f"{kind}:{entry.name}=" if kind else f"{entry.name}="
                hint = annotations_of(made)[entry.name]
                found[f"{path or option}.{entry.name}"] = (option, prefix, hint)
    return found
