"""Sizes of memory as people write them: 500MB, 2GB."""

from __future__ import annotations

import re

from selfspec.errors import InvalidOption

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(|K|M|G|T)(i?)B?", re.IGNORECASE)

_UNITS = ("", "K", "M", "G", "T")


def parsed(name: str, text: str) -> int:
    """Bytes. Raises InvalidOption for what is no size, or none at all."""
    match, size = _SIZE.fullmatch(text), 0
    if match is not None:
        thousand = 1024 if match[3] else 1000
        size = int(float(match[1]) * thousand ** _UNITS.index(match[2].upper()))
    if not size:
        raise InvalidOption(f"{name} is {text!r}, expected a size like 500MB or 2GB")
    return size
