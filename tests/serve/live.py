"""A server with the default model, on a port of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from selfspec.api.speculator import Speculator
from selfspec.serve.app import make_app
from selfspec.serve.keys import Keys
from selfspec.serve.options import ServeOptions
from selfspec.serve.run import Server, bound
from selfspec.serve.writer import Writer

JSON = {"Content-Type": "application/json"}


class Running(NamedTuple):
    """A server, and what it is made of."""

    address: str
    speculator: Speculator
    writer: Writer


@contextmanager
def running(
    speculator: Speculator, keys: tuple[str, ...] = (), **options: Any
) -> Iterator[Running]:
    """A server in a thread."""
    asked = ServeOptions(port=0, **options)
    writer, address, ready = Writer(speculator, asked), list[str](), threading.Event()
    app = make_app(
        writer, speculator.label, speculator.backbone.max_positions, asked, Keys([*keys])
    )

    def listens(at: str) -> None:
        address.append(at)
        ready.set()

    with bound(asked) as at:
        server = Server(app, asked, listens)
        thread = threading.Thread(target=lambda: server.run(sockets=[at]))
        thread.start()
        try:
            assert ready.wait(20)
            yield Running(address[0], speculator, writer)
        finally:
            server.should_exit = True
            thread.join(20)
    assert not thread.is_alive()
    assert not writer.alive
