"""What `selfspec serve` can be asked for; its flags derive from here. Keys for its clients.

The command line reads this, so nothing of a server and no torch is imported.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from selfspec import untrusted
from selfspec.errors import InvalidOption

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")

VARIABLE = "SELFSPEC_API_KEY"

_MOST_KEY_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where to listen, how much at once, how long."""

    host: str = "127.0.0.1"
    """Address to listen at. Any but this machine's own needs keys."""

    port: int = 8000
    """Port; 0 takes a free one."""

    concurrency: int = 32
    """Answers that are written at once."""

    queue: int = 128
    """Answers that may wait besides; more are refused with status 429."""

    timeout: float = 600.0
    """Seconds for an answer, waiting included; then it ends where it is."""

    max_tokens: int = 1024
    """Most tokens of an answer where its request does not say."""

    max_prompt_tokens: int | None = None
    """Most tokens of a prompt; without it as many as the model has positions."""

    max_body_mb: float = 4.0
    """Largest body of a request, in megabytes."""

    client_timeout: float = 30.0
    """Seconds for a client to send a request, or to read on; then its connection ends."""

    patience: float = 1.0
    """How much longer the next token of an answer may take while a prompt enters, in tokens."""

    graceful_seconds: float = 30.0
    """For running answers, when the server is stopped."""

    replicas: int = 1
    """Copies of the model; more than one run under Ray Serve and share the cores."""

    cors_origin: list[str] | None = None
    """Web page that may ask besides those of this server: https://example.com; repeatable."""

    log_requests: bool = False
    """A line per request: path, status, tokens, seconds and address; no text."""

    log_prompts: bool = False
    """The texts of requests and answers, too."""

    def __post_init__(self) -> None:
        """Raise InvalidOption for numbers that nothing could be served with."""
        least = {"concurrency": 1, "queue": 0, "port": 0, "patience": 0, "max_tokens": 1}
        for name, lowest in {**least, "max_prompt_tokens": 1, "replicas": 1}.items():
            if (value := getattr(self, name)) is not None and value < lowest:
                raise InvalidOption(f"{name} is {value}, expected at least {lowest}")
        for name in ("timeout", "client_timeout", "max_body_mb", "graceful_seconds"):
            if not getattr(self, name) > 0:
                raise InvalidOption(f"{name} is {getattr(self, name)}, expected more than 0")
        if self.port > 65535:
            raise InvalidOption(f"port is {self.port}, expected at most 65535")
        for origin in self.cors_origin or ():
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise InvalidOption(
                    f"cors_origin is {origin}, expected scheme and host: https://example.com"
                )

    @property
    def is_local(self) -> bool:
        """Whether nobody outside of this machine can connect."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Keys:
    """API keys that are accepted; none: everybody is."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Raises InvalidOption for a key that no header could carry."""
        self._keys = [key.strip() for key in keys if key.strip()]
        if not all(key.isascii() and key.isprintable() and " " not in key for key in self._keys):
            raise InvalidOption("an API key has characters that no header can carry")

    @classmethod
    def found(cls, file: Path | None) -> Keys:
        """The keys of a file, one a line, and of SELFSPEC_API_KEY, with commas between several."""
        lines = [] if file is None else untrusted.read_text(file, _MOST_KEY_BYTES).splitlines()
        given = [line for line in lines if not line.startswith("#")]
        keys = cls([*given, *os.environ.get(VARIABLE, "").split(",")])
        if file is not None and not keys:
            raise InvalidOption(f"{file} holds no API key. Give one a line")
        return keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def accepts(self, authorization: str) -> bool:
        """The value of an Authorization header. Takes as long whichever key it is."""
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode("utf-8", "replace")
        matches = [hmac.compare_digest(given, one.encode()) for one in self._keys]
        return scheme.lower() == "bearer" and any(matches)
