"""The routes: OpenAI's protocol on a `Writer`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import HTTPException
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from selfspec import untrusted
from selfspec.errors import InvalidData
from selfspec.serve.answers import Reply
from selfspec.serve.keys import Keys
from selfspec.serve.metrics import NOBODY, Counting, Metrics
from selfspec.serve.options import ServeOptions
from selfspec.serve.protocol import Body, ChatBody, TextBody
from selfspec.serve.refusals import Refused, of_error, of_validation
from selfspec.serve.texts import Piece
from selfspec.serve.writer import Choice, Job, Writer

logger = logging.getLogger(__name__)

OPEN = ("/health",)
"""Paths that need no key."""

_OWNER = "selfspec"

_MOST_WAITING = 256
"""Rounds of an answer that wait for a client who does not read; then its answer ends."""

_LOOK_S = 1.0
"""That a round may take before /metrics shows what was there before it."""

B = TypeVar("B", bound=Body)
T = TypeVar("T")


def make_app(writer: Writer, label: str, room: int, options: ServeOptions, keys: Keys) -> FastAPI:
    """The server's application. `label`: the model's name; `room`: tokens of its texts at most.

    It stops the writer when it ends.
    """
    server = _Server(writer, label, room, options)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(writer.stop)

    app = FastAPI(title="selfspec", openapi_url=None, lifespan=life)
    app.state.metrics = writer.metrics
    app.add_exception_handler(Refused, _refuse)
    app.add_exception_handler(HTTPException, _refuse_path)
    app.add_exception_handler(404, _refuse_path)
    app.add_exception_handler(405, _refuse_path)
    app.add_exception_handler(ClientDisconnect, _nobody_reads)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(_Guard, keys=keys)
    app.add_middleware(Counting, metrics=writer.metrics)
    app.post("/v1/chat/completions")(server.chat)
    app.post("/v1/completions")(server.text)
    app.get("/v1/models")(server.models)
    app.get("/v1/models/{name:path}")(server.model)
    app.get("/health")(server.health)
    app.get("/metrics")(server.metrics)
    return app


class _Guard:
    """Lets requests in that bring a key, where keys are asked for."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"] not in OPEN:
            found = dict(scope["headers"]).get(b"authorization", b"")
            if not self._keys.accepts(found.decode("latin-1")):
                error = Refused(401, "the API key is missing or wrong", code="invalid_api_key")
                app = _response(error)
        await app(scope, receive, send)


class _Server:
    """What the routes do."""

    def __init__(self, writer: Writer, label: str, room: int, options: ServeOptions) -> None:
        self._writer, self._label, self._room, self._options = writer, label, room, options
        self._started = int(time.time())

    async def chat(self, request: Request) -> Response:
        body = await self._read(request, ChatBody)
        return await self._answer(request, body, "messages", raw=False)

    async def text(self, request: Request) -> Response:
        body = await self._read(request, TextBody)
        return await self._answer(request, body, "prompt", raw=True)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict[str, Any]:
        self._require_model(name)
        return self._model()

    async def health(self) -> Response:
        alive = self._writer.alive
        state = {"status": "ok" if alive else "stopping", "answers": self._writer.open}
        return JSONResponse(state, 200 if alive else 503)

    async def metrics(self) -> Response:
        writer = self._writer
        if writer.alive:
            with contextlib.suppress(asyncio.TimeoutError):  # a round takes long
                looked = asyncio.wrap_future(writer.look())
                writer.metrics.show(await asyncio.wait_for(looked, _LOOK_S))
        return Response(writer.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._label,
            "object": "model",
            "created": self._started,
            "owned_by": _OWNER,
            "max_model_len": self._room,
        }

    def _require_model(self, name: str | None) -> None:
        if name not in (None, self._label):
            raise Refused(
                404,
                f"the model {name} is not here. There is {self._label}",
                field="model",
                code="model_not_found",
            )

    async def _read(self, request: Request, kind: type[B]) -> B:
        """A body of that kind. Raises Refused."""
        seconds = self._options.client_timeout
        try:
            held = await asyncio.wait_for(self._held(request), seconds)
        except asyncio.TimeoutError as error:
            raise Refused(
                408,
                f"the body did not arrive within {seconds:g} seconds. Send it at once",
                headers={"Connection": "close"},
            ) from error
        try:
            found = untrusted.parse_json(held.decode(), "the body")
            json.dumps(found, ensure_ascii=False).encode()
            body = kind.model_validate(found)
        except UnicodeDecodeError as error:
            raise Refused(400, f"the body is not UTF-8: byte {error.start} is wrong") from error
        except UnicodeEncodeError as error:
            raise Refused(400, "the body holds half of a character. Remove it") from error
        except InvalidData as error:
            raise Refused(400, str(error)) from error
        except ValidationError as error:
            raise of_validation(error) from error
        self._require_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise Refused(
                400, "stream_options is for streams. Leave it out", field="stream_options"
            )
        return body

    async def _held(self, request: Request) -> bytearray:
        """A body as it came."""
        most, held = int(self._options.max_body_mb * 1e6), bytearray()
        async for part in request.stream():
            held += part
            if len(held) > most:
                raise Refused(413, f"the body has more than {most} bytes. Send less")
        return held

    async def _answer(
        self, request: Request, body: ChatBody | TextBody, field: str, *, raw: bool
    ) -> Response:
        longest = min(body.longest or self._options.max_tokens, self._room)
        choices = [
            Choice(
                prompt=prompt,
                options=body.options(number, longest, self._options.timeout),
                stops=body.stops,
                raw=raw and isinstance(prompt, str),
            )
            for prompt in body.prompts
            for number in range(body.n)
        ]
        reply = Reply(self._label, len(choices), chat=not raw)
        pieces = _Pieces(self._writer, choices, reply, field)
        if not body.stream:
            return await _whole(request, pieces, reply)
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        try:
            first = await _unless_gone(request, pieces.first())  # what is refused is no stream
        except BaseException:
            pieces.leave()
            raise
        return _Stream(pieces, _lines(pieces, first, reply, with_usage=with_usage))


class _Pieces:
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
                logger.info("an answer failed", exc_info=piece.error)
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


class _Stream(StreamingResponse):
    """Ends its answer when it ends, however that is: its lines may never have begun."""

    def __init__(self, pieces: _Pieces, lines: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pieces.leave()


async def _whole(request: Request, pieces: _Pieces, reply: Reply) -> Response:
    """All of it at once; a client that goes away ends it."""

    async def collect() -> None:
        while not reply.complete:
            await pieces.first()

    try:
        await _unless_gone(request, collect())
        return JSONResponse(reply.whole())
    finally:
        pieces.leave()


async def _unless_gone(request: Request, wanted: Coroutine[Any, Any, T]) -> T:
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


async def _lines(
    pieces: _Pieces, piece: Piece, reply: Reply, *, with_usage: bool
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


def _response(error: Refused) -> Response:
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)  # noqa: S101  # registered for it alone
    return _response(error)


async def _nobody_reads(_request: Request, _error: Exception) -> Response:
    return Response(status_code=NOBODY)


async def _failed(request: Request, error: Exception) -> Response:
    metrics: Metrics = request.app.state.metrics  # no middleware hears of this one
    metrics.refused(500)
    return _response(of_error(error, ""))


async def _refuse_path(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    said = "is not a path of this server" if status == 404 else f"does not take {request.method}"
    return _response(Refused(status, f"{request.url.path} {said}"))
