"""A connection that ends where its client neither sends what it began nor reads what it asked for.

Made by uvicorn, one for each client. Its parser is h11 wherever uvicorn has others too: it bounds
what a header may come to.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """uvicorn's, with a limit for the time that it waits for its client.

    It waits for a request that has not begun, or whose header has no end yet, and for a client that
    must read before more can be sent. Bodies have a limit of their own: they get an answer.
    """

    def __init__(self, *args: Any, client_timeout: float, **more: Any) -> None:
        """`client_timeout`: seconds; the rest is uvicorn's."""
        super().__init__(*args, **more)
        self._client_timeout = client_timeout
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's
        """The limit runs from here."""
        super().connection_made(transport)
        self._reckon()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for."""
        self._forget()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """A header may be complete now."""
        super().handle_events()
        self._reckon()

    def on_response_complete(self) -> None:
        """The next request is waited for."""
        super().on_response_complete()
        self._reckon()

    def pause_writing(self) -> None:
        """The client must read."""
        super().pause_writing()
        self._reckon()

    def resume_writing(self) -> None:
        """It did."""
        super().resume_writing()
        self._reckon()

    def _reckon(self) -> None:
        """The limit runs on while the client is waited for, and only then."""
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy and not self.flow.write_paused:
            self._forget()
        elif self._limit is None and not self.transport.is_closing():
            self._limit = self.loop.call_later(self._client_timeout, self.transport.abort)

    def _forget(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None


def connections(client_timeout: float) -> type[asyncio.Protocol]:
    """What uvicorn makes connections by."""
    return cast("type[asyncio.Protocol]", partial(Connection, client_timeout=client_timeout))
