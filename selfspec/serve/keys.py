"""Who may ask: keys from the environment or a file, compared in constant time."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from selfspec import untrusted
from selfspec.errors import InvalidOption

VARIABLE = "SELFSPEC_API_KEY"

_MOST_BYTES = 1 << 20


class Keys:
    """Those that are accepted; none: everybody is."""

    def __init__(self, keys: list[str]) -> None:
        """Raises InvalidOption for a key that no header could carry."""
        for key in keys:
            if not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidOption("an API key has characters that no header can carry")
        self._keys = [key.encode() for key in keys]

    @classmethod
    def found(cls, file: Path | None) -> Keys:
        """Of a file, one a line, and of SELFSPEC_API_KEY, with commas between several."""
        lines = [] if file is None else untrusted.read_text(file, _MOST_BYTES).splitlines()
        given = [line for line in lines if not line.startswith("#")]
        given += os.environ.get(VARIABLE, "").split(",")
        keys = [key.strip() for key in given if key.strip()]
        if file is not None and not keys:
            raise InvalidOption(f"{file} holds no API key. Give one a line")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def accepts(self, authorization: str | None) -> bool:
        """The value of an Authorization header. Takes as long whichever key it is."""
        if not self._keys:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip().encode("utf-8", "replace")
        matches = [hmac.compare_digest(given, one) for one in self._keys]
        return scheme.lower() == "bearer" and any(matches)
