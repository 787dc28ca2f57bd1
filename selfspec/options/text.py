"""Options as text, `ngram:size=4+exit:layers=10/20,threshold=0.5`, and back.

A kind, a colon, settings with commas between them; `+` joins drafters, `/` the values of a list,
`none` is no value, dashes in names count as underscores. What text may say, nested mappings say
too, as YAML has them: `{ngram: {size: 4}, exit: {threshold: 0.5}}`. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from selfspec.errors import InvalidOption
from selfspec.options.parts import Part
from selfspec.options.values import typed
from selfspec.typed import annotations_of, check_keys, shown

P = TypeVar("P", bound=Part)

Kinds = Mapping[str, type[Part]]

_JOIN = re.compile(r"\+(?=\s*[A-Za-z])")
"""A plus in front of a name; not that of 1e+3."""


def parsed(group: str, value: Any, kinds: Kinds, present: Mapping[str, Part]) -> list[Part]:
    """What `value` asks for of a `group` (drafter, controller, ..), in its order.

    Objects are taken as they are. Text and mappings change what they name of what is `present`.
    Raises InvalidOption.
    """
    found = []
    for entry in _entries(group, value):
        if isinstance(entry, Part):
            if entry.kind not in kinds or not isinstance(entry, kinds[entry.kind]):
                raise InvalidOption(
                    f"{group} is {shown(entry)}, expected one of {', '.join(kinds)}"
                )
            found.append(entry)
        else:
            kind, settings = entry
            check_keys([kind], kinds, group)
            found.append(changed(present[kind], settings))
    return found


def changed(part: P, settings: Any) -> P:
    """A copy with `settings` replaced: text, names and values, an object of its kind, or None.

    Raises InvalidOption for names that it does not have and values that they cannot have.
    """
    if isinstance(settings, type(part)):
        return settings
    hints = annotations_of(type(part))
    names = _named(part.kind, settings)
    known = [entry.name for entry in fields(part)]  # type: ignore[arg-type]  # a dataclass
    if names and not known:
        raise InvalidOption(f"{part.kind} has no settings, found {shown(settings)}. Leave them out")
    check_keys(names, known, f"setting of {part.kind}:")
    read = {name: typed(f"{part.kind}:{name}", value, hints[name]) for name, value in names.items()}
    return replace(part, **read)  # type: ignore[type-var]  # a dataclass


def laid_over(group: str, below: Any, above: Any) -> dict[str, Any]:
    """What two values of one option say together, each text or a mapping, as a mapping.

    Kinds are those of `above`; of one that both name, `above` wins setting by setting. Raises
    InvalidOption.
    """
    if group == "prices":
        return _named(group, below) | _named(group, above)
    first, second = (
        {entry[0]: _named(*entry) for entry in _entries(group, value) if isinstance(entry, tuple)}
        for value in (below, above)
    )
    return {kind: first.get(kind, {}) | settings for kind, settings in second.items()}


def as_text(part: Part, *, full: bool = False) -> str:
    """The shortest text that gives `part`: its kind, and what differs from the defaults.

    `full`: all settings, for where other defaults may be in force.
    """
    said = settings_text(part, full=full)
    return f"{part.kind}:{said}" if said else part.kind


def settings_text(part: Part, *, full: bool = False) -> str:
    """`KEY=VALUE,..` of what differs from the defaults; empty if nothing does."""
    built_in = type(part)()
    values = {
        entry.name: getattr(part, entry.name)
        for entry in fields(part)  # type: ignore[arg-type]  # all parts are dataclasses
        if full or getattr(part, entry.name) != getattr(built_in, entry.name)
    }
    return ",".join(f"{name}={word(value)}" for name, value in values.items())


def word(value: Any) -> str:
    """A value as text has it, without blanks."""
    if value is None:
        return "none"
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _entries(group: str, value: Any) -> Iterator[Part | tuple[str, Any]]:
    """Objects, and kinds with their settings."""
    if isinstance(value, Part):
        yield value
    elif isinstance(value, str):
        for piece in _JOIN.split(value):
            kind, colon, settings = piece.partition(":")
            yield kind.strip().replace("_", "-"), settings if colon else None
    elif isinstance(value, Mapping) and value:
        for kind, settings in value.items():
            yield str(kind).strip().replace("_", "-"), settings
    elif isinstance(value, Sequence) and value:
        for one in value:
            yield from _entries(group, one)
    else:
        raise InvalidOption(f"{group} is {shown(value)}, expected text like KIND:KEY=VALUE,..")


def _named(kind: str, settings: Any) -> dict[str, Any]:
    """Settings by name: of text, a mapping, or nothing. Raises InvalidOption."""
    values = _pairs(kind, settings) if isinstance(settings, str) else settings or {}
    if not isinstance(values, Mapping):
        raise InvalidOption(f"{kind} is {shown(settings)}, expected KEY=VALUE,.. or a mapping")
    return {str(name).strip().replace("-", "_"): value for name, value in values.items()}


def _pairs(kind: str, said: str) -> dict[str, str]:
    """`KEY=VALUE,..` by key. Raises InvalidOption for anything else, and for a key given twice."""
    values: dict[str, str] = {}
    for entry in said.split(","):
        name, equals, value = (piece.strip() for piece in entry.partition("="))
        if not equals or not name:
            raise InvalidOption(f"{kind} is followed by {shown(entry)}, expected KEY=VALUE,..")
        if name in values:
            raise InvalidOption(f"{kind}:{name} is given twice. Leave one out")
        values[name] = value
    return values
