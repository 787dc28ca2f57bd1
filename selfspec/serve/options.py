"""Options and API keys of `selfspec serve`. Flags derive from the options: no torch in here."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from selfspec import files
from selfspec.errors import InvalidOption
from selfspec.options import ABOVE_ZERO, at_least, between, check_fields

VARIABLE = "SELFSPEC_API_KEY"

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where to listen, how many requests to serve at once, and for how long."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address needs keys."""
    port: Annotated[int, between(0, 65535)] = 8000
    """Port; 0 takes a free one."""
    concurrency: Annotated[int, at_least(1)] = 32
    """Answers generated at once, in one batch."""
    queue: Annotated[int, at_least(0)] = 128
    """Requests that may wait; more are refused with status 429."""
    timeout: Annotated[float, ABOVE_ZERO] = 600.0
    """Seconds for an answer, including its wait; then it is cut."""
    max_tokens: Annotated[int, at_least(1)] = 1024
    """Most tokens of an answer, if its request sets no limit."""
    max_prompt_tokens: Annotated[int | None, at_least(1)] = None
    """Most tokens of a prompt. None: the model's context length."""
    max_body_mb: Annotated[float, ABOVE_ZERO] = 4.0
    """Largest body of a request, in megabytes."""
    client_timeout: Annotated[float, ABOVE_ZERO] = 30.0
    """Seconds for a client to send a request, or to read on; then it is disconnected."""
    patience: Annotated[float, at_least(0)] = 1.0
    """Longest delay of an answer's next token while another prompt is read, in tokens."""
    graceful_seconds: Annotated[float, ABOVE_ZERO] = 30.0
    """Seconds that running answers get when the server is stopped."""
    replicas: Annotated[int, at_least(1)] = 1
    """Copies of the model; more than one runs under Ray Serve, and they share the cores."""
    cors_origin: list[str] | None = None
    """Origin of web pages that may use this server: https://example.com; repeatable."""
    log_requests: bool = False
    """A line per request: path, status, tokens, seconds and address; no text."""
    log_prompts: bool = False
    """The texts of requests and answers, too."""

    def __post_init__(self) -> None:
        check_fields(self)
        for origin in self.cors_origin or ():
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise InvalidOption(
                    f"cors_origin is {origin}, expected scheme and host: https://example.com"
                )


def is_loopback(host: str) -> bool:
    """Whether a host name or an address is a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Keys:
    """The accepted API keys; without any, no key is needed."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.strip() for key in keys if key.strip()]
        if not all(key.isascii() and key.isprintable() and " " not in key for key in self._keys):
            raise InvalidOption("an API key has characters that no header can carry")

    @classmethod
    def read(cls, file: Path | None) -> Keys:
        """Read keys from a file, one per line, and from SELFSPEC_API_KEY, separated by commas."""
        lines = [] if file is None else files.read_text(file, 1 << 20).splitlines()
        entries = [line for line in lines if not line.startswith("#")]
        keys = cls([*entries, *os.environ.get(VARIABLE, "").split(",")])
        if file is not None and not keys:
            raise InvalidOption(f"{file} holds no API key. Give one per line")
        return keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def accepts(self, authorization: str) -> bool:
        """Whether an Authorization header has an accepted key. Takes the same time for any key."""
        scheme, _, key = authorization.partition(" ")
        candidate = key.strip().encode("utf-8", "replace")
        matches = [hmac.compare_digest(candidate, known.encode()) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)
