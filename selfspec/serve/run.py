"""Runs the application: a socket of its own, a line that says where, an end that loses nothing."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

from selfspec.errors import InvalidOption
from selfspec.serve.connections import connections
from selfspec.serve.options import ServeOptions

_SEND_BYTES = 1 << 17
"""That the system keeps for a client to read; the whole of a long stream would fit otherwise."""


def bound(options: ServeOptions) -> socket.socket:
    """A socket at the address, before anything long begins; nobody can connect yet.

    Raises InvalidOption where that cannot be had.
    """
    where = f"{options.host}, port {options.port}"
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM
        )
        found = socket.socket(family, kind)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        found.bind(address)
    except OSError as error:
        raise InvalidOption(f"cannot listen at {where}: {error.strerror or error}") from error
    return found


def run(
    app: Starlette, at: socket.socket, options: ServeOptions, ready: Callable[[str], None]
) -> None:
    """Until SIGINT or SIGTERM; running answers have `graceful_seconds` then.

    `ready` gets the address.
    """
    server = Server(app, options, ready)

    def stop(*_: object) -> None:
        server.should_exit = True

    # uvicorn raises the signal again when it is done: whoever stopped it made no mistake
    before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[at])
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class Server(uvicorn.Server):
    """Says where it listens."""

    def __init__(self, app: Starlette, options: ServeOptions, ready: Callable[[str], None]) -> None:
        """`ready` gets the address."""
        config = uvicorn.Config(
            app,
            http=connections(options.client_timeout),
            ws="none",
            log_level="warning",
            timeout_graceful_shutdown=int(options.graceful_seconds),
            server_header=False,
        )
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; then it says so."""
        await super().startup(sockets)
        for one in sockets or []:
            host, port = one.getsockname()[:2]
            self._ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
