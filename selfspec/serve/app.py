"""The routes: OpenAI's protocol on a `Writer`, and a page for a chat by it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from selfspec import pages, untrusted
from selfspec.errors import InvalidData, InvalidOption
from selfspec.serve import gate
from selfspec.serve.answers import Reply
from selfspec.serve.options import Keys
from selfspec.serve.protocol import ChatBody, Refused, TextBody, of_error, of_validation
from selfspec.serve.writer import Writer

_LOOK_S = 1.0
"""That a round may take before /metrics shows what was there before it."""

_SCRIPTS = (
    "vendor/markdown-it.umd.min.js",
    "tokens.js",
    "figures.js",
    "api.js",
    "markdown.js",
    "answer.js",
    "chats.js",
    "main.js",
)
"""Scripts of the page: in this order they make one module."""


def make_app(writer: Writer, keys: Keys) -> FastAPI:
    """The server's application. It stops the writer when it ends."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(writer.stop)

    server = _Server(writer)
    app = FastAPI(title="selfspec", openapi_url=None, lifespan=life)
    app.add_exception_handler(HTTPException, _refuse_path)
    gate.guard(app, writer.options, keys, writer.metrics.refused)
    app.post("/v1/chat/completions")(server.chat)
    app.post("/v1/completions")(server.text)
    app.get("/v1/models")(server.models)
    app.get("/v1/models/{name:path}")(server.model)
    app.get("/health")(server.health)
    app.get("/")(server.page)
    app.get("/metrics")(server.metrics)
    return app


class _Server:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._model = {
            "id": writer.label,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "selfspec",
            "max_model_len": writer.room,
        }
        self._page = _chat_page()

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatBody)

    async def text(self, request: Request) -> Response:
        return await self._answer(request, TextBody)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model]}

    async def model(self, name: str) -> dict[str, Any]:
        self._require_model(name)
        return self._model

    async def health(self) -> Response:
        alive = self._writer.alive
        state = {"status": "ok" if alive else "stopping", "answers": self._writer.open}
        return JSONResponse(state, 200 if alive else 503)

    async def page(self) -> Response:
        return self._page

    async def metrics(self) -> Response:
        writer = self._writer
        if writer.alive:
            with contextlib.suppress(asyncio.TimeoutError):  # a round takes long
                looked = asyncio.wrap_future(writer.look())
                writer.metrics.show(await asyncio.wait_for(looked, _LOOK_S))
        return Response(writer.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def _answer(self, request: Request, kind: type[ChatBody | TextBody]) -> Response:
        body = await self._read(request, kind)
        choices = body.choices(self._writer.options, self._writer.room)
        field = choices[0].needs_tools  # all have the same tools, and one grammar
        if field is not None and not self._writer.knows_tools:
            raise Refused(
                400,
                f"{field}: the chat template of {self._writer.label} knows no tools, or calls them "
                "in a way that is not known here. Use response_format with a schema",
                field=field,
            )
        try:
            await asyncio.to_thread(self._writer.read_grammar, choices[0])
        except InvalidOption as error:
            raise of_error(error) from error
        reply = Reply(self._writer, choices, body.field)
        setattr(request.state, gate.REPLY, reply)
        if not body.stream:
            await gate.unless_gone(request.receive, reply.rest())
            return JSONResponse(reply.whole())
        first = await gate.unless_gone(request.receive, reply.next())  # a refusal is no stream
        return StreamingResponse(
            reply.lines(first, with_usage=body.stream_options.include_usage),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def _read(self, request: Request, kind: type[ChatBody | TextBody]) -> ChatBody | TextBody:
        sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if sent != "application/json":  # what a page elsewhere cannot send without being asked
            raise Refused(415, "Content-Type must be application/json")
        held = await gate.read(request, self._writer.options)
        try:
            body = kind.model_validate(untrusted.parse_json(held.decode(), "the body"))
        except UnicodeDecodeError as error:
            raise Refused(400, f"the body is not UTF-8: byte {error.start} is wrong") from error
        except InvalidData as error:
            raise Refused(400, str(error)) from error
        except ValidationError as error:
            raise of_validation(error) from error
        self._require_model(body.model)
        if "stream_options" in body.model_fields_set and not body.stream:
            raise Refused(400, "stream_options is for streams. Drop it", field="stream_options")
        return body

    def _require_model(self, name: str | None) -> None:
        if name not in (None, self._writer.label):
            said = f"the model {name} is not here. There is {self._writer.label}"
            raise Refused(404, said, field="model", code="model_not_found")


def _chat_page() -> HTMLResponse:
    """It may run its own script and style alone, and asks only its server."""
    rules = ("connect-src 'self'", "frame-ancestors 'none'", "trusted-types 'none'")
    trusted = "require-trusted-types-for 'script'"
    html, policy = pages.page(__package__, "chat", _SCRIPTS, *rules, trusted)
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


async def _refuse_path(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    said = "is not a path of this server" if status == 404 else f"does not take {request.method}"
    return gate.response(Refused(status, f"{request.url.path} {said}"))
