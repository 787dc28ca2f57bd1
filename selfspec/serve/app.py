"""The routes: OpenAI's protocol on a `Writer`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import HTTPException
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError

from selfspec import untrusted
from selfspec.errors import InvalidData, InvalidOption
from selfspec.serve import gate
from selfspec.serve.answers import Reply
from selfspec.serve.keys import Keys
from selfspec.serve.metrics import Counting
from selfspec.serve.options import ServeOptions
from selfspec.serve.page import chat_page
from selfspec.serve.protocol import Body, ChatBody, TextBody
from selfspec.serve.refusals import Refused, of_error, of_validation
from selfspec.serve.streams import Pieces, Stream, lines, unless_gone, whole
from selfspec.serve.writer import Choice, Writer

logger = logging.getLogger(__name__)

_OWNER = "selfspec"

_LOOK_S = 1.0
"""That a round may take before /metrics shows what was there before it."""

B = TypeVar("B", bound=Body)


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
    app.add_exception_handler(HTTPException, _refuse_path)
    app.add_exception_handler(404, _refuse_path)
    app.add_exception_handler(405, _refuse_path)
    gate.guard(app, options, keys)
    app.add_middleware(Counting, metrics=writer.metrics)
    app.post("/v1/chat/completions")(server.chat)
    app.post("/v1/completions")(server.text)
    app.get("/v1/models")(server.models)
    app.get("/v1/models/{name:path}")(server.model)
    app.get("/health")(server.health)
    app.get("/")(server.page)
    app.get("/metrics")(server.metrics)
    return app


class _Server:
    """What the routes do."""

    def __init__(self, writer: Writer, label: str, room: int, options: ServeOptions) -> None:
        self._writer, self._label, self._room, self._options = writer, label, room, options
        self._started = int(time.time())
        self._page = chat_page()

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

    async def page(self) -> Response:
        return HTMLResponse(self._page.html, headers=self._page.headers)

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
        sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if sent != "application/json":  # what a page elsewhere cannot send without being asked
            raise Refused(415, "Content-Type must be application/json")
        held = await gate.read(request, self._options)
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

    def _require_tools(self, body: Body) -> None:
        """Raise Refused for tools where the chat template cannot show them."""
        field = body.needs_tools if isinstance(body, ChatBody) else None
        if field is not None and not self._writer.knows_tools:
            raise Refused(
                400,
                f"{field}: the chat template of {self._label} knows no tools, or calls them in a "
                "way that is not known here. Use response_format with a schema",
                field=field,
            )

    async def _read_grammar(self, choice: Choice) -> None:
        """Beside the answers that are being written. Raises Refused."""
        if not choice.has_grammar:
            return
        try:
            await asyncio.to_thread(self._writer.read_grammar, choice)
        except InvalidOption as error:
            raise of_error(error, "") from error

    async def _answer(
        self, request: Request, body: ChatBody | TextBody, field: str, *, raw: bool
    ) -> Response:
        self._require_tools(body)
        longest = min(body.longest or self._options.max_tokens, self._room)
        choices = [
            Choice(
                prompt=prompt,
                options=body.options(number, longest, self._options.timeout),
                stops=body.stops,
                raw=raw and isinstance(prompt, str),
                tools=body.callable if isinstance(body, ChatBody) else (),
                must_call=isinstance(body, ChatBody) and body.must_call,
                explain=body.explains,
            )
            for prompt in body.prompts
            for number in range(body.n)
        ]
        await self._read_grammar(choices[0])  # all have one
        noted = body.alternatives is not None
        reply = Reply(self._label, len(choices), chat=not raw, noted=noted)
        reply.asked = body.prompts
        setattr(request.state, gate.REPLY, reply)
        pieces = Pieces(self._writer, choices, reply, field)
        if not body.stream:
            return await whole(request, pieces, reply)
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        try:
            first = await unless_gone(request, pieces.first())  # what is refused is no stream
        except BaseException:
            pieces.leave()
            raise
        return Stream(pieces, lines(pieces, first, reply, with_usage=with_usage))


async def _refuse_path(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    said = "is not a path of this server" if status == 404 else f"does not take {request.method}"
    return gate.response(Refused(status, f"{request.url.path} {said}"))
