"""What each request passes before its route: keys, other origins, one line of the log.

The whole of it stands before the application, and before what hands requests to copies of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.serve.faults import places
from selfspec.serve.keys import Keys
from selfspec.serve.metrics import NOBODY
from selfspec.serve.options import ServeOptions
from selfspec.serve.refusals import Refused, of_error

if TYPE_CHECKING:
    from selfspec.serve.answers import Reply

logger = logging.getLogger(__name__)

OPEN = ("/", "/health")
"""Paths that need no key."""

REPLY = "reply"
"""In a request's state: what is written for it."""

TOKENS = "tokens"
"""The same: tokens of the prompt and of the answer."""

_LONGEST_PATH = 200
"""Characters in a line of the log."""


def guard(app: Starlette, options: ServeOptions, keys: Keys) -> None:
    """Have all requests of an application pass; errors get the shape that clients read."""
    app.add_exception_handler(Refused, _refuse)
    app.add_exception_handler(ClientDisconnect, _nobody_reads)
    app.add_middleware(_Guard, keys=keys)
    if options.is_local and not keys:
        app.add_middleware(_Here, host=options.host)
    if options.cors_origin:  # around the keys: a browser asks beforehand, and shows none
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origin,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
        )
    app.add_middleware(_Log, options=options)


def response(error: Refused) -> Response:
    """As OpenAI's clients read it."""
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def read(request: Request, options: ServeOptions) -> bytearray:
    """A body. Raises Refused for one that is too large or too slow."""
    seconds = options.client_timeout
    try:
        return await asyncio.wait_for(_held(request, int(options.max_body_mb * 1e6)), seconds)
    except asyncio.TimeoutError as error:
        raise Refused(
            408,
            f"the body did not arrive within {seconds:g} seconds. Send it at once",
            headers={"Connection": "close"},
        ) from error


async def _held(request: Request, most: int) -> bytearray:
    held = bytearray()
    async for part in request.stream():
        held += part
        if len(held) > most:
            raise Refused(413, f"the body has more than {most} bytes. Send less")
    return held


def tokens(scope: Scope) -> tuple[int, int] | None:
    """Of the prompt and the answer, where something was written."""
    state = scope.get("state", {})
    reply: Reply | None = state.get(REPLY)
    if reply is not None:
        return reply.usage["prompt_tokens"], reply.usage["completion_tokens"]
    found: tuple[int, int] | None = state.get(TOKENS)
    return found


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
                app = response(error)
        await app(scope, receive, send)


class _Here:
    """Lets requests in that are meant for this machine by name.

    Else a page elsewhere whose name comes to mean this machine could read what a server without
    keys says (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            found = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if found and not self._means_here(found):
                app = response(Refused(403, "the Host header names another machine. Set API keys"))
        await app(scope, receive, send)

    def _means_here(self, found: str) -> bool:
        try:
            name = urlsplit(f"//{found}").hostname or ""
            return name in ("localhost", self._host) or ip_address(name).is_loopback
        except ValueError:
            return False


class _Log:
    """Says what was asked for, and by whom; of an error that nobody foresaw, where it came from.

    No text of a request or an answer is said, unless `log_prompts` asks for it.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})
        begun, status = time.monotonic(), 0

        async def sent(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception as error:  # noqa: BLE001  # uvicorn would log its message
            logger.error("a request failed:\n%s", places(error))
            if status:
                raise RuntimeError("the answer was cut, as the log says above") from None
            await response(of_error(error, ""))(scope, receive, sent)
        finally:
            self._say(scope, status, time.monotonic() - begun)

    def _say(self, scope: Scope, status: int, seconds: float) -> None:
        if self._options.log_requests:
            path, client = scope["path"][:_LONGEST_PATH], scope["client"]
            found = tokens(scope)
            logger.info(
                "%s %s %s, %s in %.3f s for %s",
                *(scope["method"], ascii(path)[1:-1], status or "unanswered"),
                "no tokens" if found is None else f"{found[0]} + {found[1]} tokens",
                *(seconds, client[0] if client else "nobody known"),
            )
        reply: Reply | None = scope["state"].get(REPLY)
        if self._options.log_prompts and reply is not None:
            logger.info("asked for %s", json.dumps(reply.asked))
            logger.info("answered %s", json.dumps(reply.texts))


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)  # noqa: S101  # registered for it alone
    return response(error)


async def _nobody_reads(_request: Request, _error: Exception) -> Response:
    return Response(status_code=NOBODY)
