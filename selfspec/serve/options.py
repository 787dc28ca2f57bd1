"""What `selfspec serve` can be asked for; its flags derive from here. Imports no torch."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from selfspec.errors import InvalidOption

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


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
    """Of an answer where its request does not say."""

    max_prompt_tokens: int | None = None
    """Of a request; without it as many as the model has positions."""

    max_body_mb: float = 4.0
    """Of a request, in megabytes."""

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
        least |= {"replicas": 1}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise InvalidOption(f"{name} is {getattr(self, name)}, expected at least {lowest}")
        for name in ("timeout", "client_timeout", "max_body_mb", "graceful_seconds"):
            if not getattr(self, name) > 0:
                raise InvalidOption(f"{name} is {getattr(self, name)}, expected more than 0")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise InvalidOption(
                f"max_prompt_tokens is {self.max_prompt_tokens}, expected at least 1"
            )
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
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
