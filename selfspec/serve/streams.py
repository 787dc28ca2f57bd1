"""From the writer's thread to a client: pieces of answers as a whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from selfspec.serve.answers import Reply
from selfspec.serve.faults import places
from selfspec.serve.refusals import Refused, of_error
from selfspec.serve.texts import Piece
from selfspec.serve.writer import Choice, Job, Writer

logger = logging.getLogger(__name__)

_MOST_WAITING = 256
"""Rounds of an answer that wait for a client who does not read; then its answer ends."""

T = TypeVar("T")


class Pieces:
    """Pieces of one request's answers, from the writer's thread to this loop."""

    def __init__(self, writer: Writer, choices: list[Choice], reply: Reply, field: str) -> None:
        """Submits the request. Raises Refused where too much waits."""
        self._writer, self._reply, self._field = writer, reply, field
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Piece] = asyncio.Queue()
        self._room = _MOST_WAITING * len(choices)
        self._job = Job(choices=choices, begun=self._begun, wrote=self._wrote)
        writer.submit(self._job)

    async def first(self) -> Piece:
        """The next piece, counted in; raises what ended its choice."""
        piece = await self._queue.get()
        if piece.error is not None:
            self.leave()
            if not isinstance(piece.error, Refused):
                logger.info("an answer failed:\n%s", places(piece.error))
            raise of_error(piece.error, self._field)
        self._reply.add(piece)
        return piece

    def leave(self) -> None:
        """Nobody wants the rest."""
        self._writer.cancel(self._job)

    def count(self, error: Refused) -> None:
        """A stream ends with an error, behind a status that said otherwise."""
        self._writer.metrics.refused(error.status)

    def _begun(self, prompt_tokens: int) -> None:
        self._reply.prompt_tokens = prompt_tokens

    def _wrote(self, piece: Piece) -> None:
        try:
            self._loop.call_soon_threadsafe(self._put, piece)
        except RuntimeError:  # the loop has ended: nobody reads
            logger.debug("a piece came too late")

    def _put(self, piece: Piece) -> None:
        """On the loop. Ends an answer that its client does not read."""
        if self._room > self._queue.qsize():
            self._queue.put_nowait(piece)
        elif self._room:
            self._room = 0  # nothing more is taken
            self.leave()
            error = Refused(408, "the client reads more slowly than its answer is written")
            self._queue.put_nowait(Piece(choice=piece.choice, error=error))


class Stream(StreamingResponse):
    """Ends its answer when it ends, however that is: its lines may never have begun."""

    def __init__(self, pieces: Pieces, lines: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pieces.leave()


async def whole(request: Request, pieces: Pieces, reply: Reply) -> Response:
    """All of it at once; a client that goes away ends it."""

    async def collect() -> None:
        while not reply.complete:
            await pieces.first()

    try:
        await unless_gone(request, collect())
        return JSONResponse(reply.whole())
    finally:
        pieces.leave()


async def unless_gone(request: Request, wanted: Coroutine[Any, Any, T]) -> T:
    """What is wanted. Raises ClientDisconnect where the client goes away first."""
    waits = asyncio.ensure_future(wanted)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((waits, gone), return_when=asyncio.FIRST_COMPLETED)
        if not waits.done():
            raise ClientDisconnect
        return waits.result()
    finally:
        gone.cancel()
        waits.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def lines(
    pieces: Pieces, piece: Piece, reply: Reply, *, with_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events, from the first piece on."""
    try:
        for chunk in reply.opening():
            yield _event(chunk)
        while True:
            for chunk in reply.chunks(piece):
                yield _event(chunk)
            if reply.complete:
                break
            piece = await pieces.first()
        if with_usage:
            yield _event(reply.last())
        yield "data: [DONE]\n\n"
    except Refused as error:
        pieces.count(error)
        yield _event(error.body())


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
