"""The layer between clients and the application, or the front process of several copies of it.

It has the socket, the limits, API keys, CORS and the request log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from selfspec.decoding.stats import counted
from selfspec.errors import InvalidOption
from selfspec.serve.options import Keys, ServeOptions, is_loopback
from selfspec.serve.protocol import Refused, refusal_of, trace_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPEN = ("/", "/health")  # paths that need no key
COPY = "x-selfspec-copy"  # header of a response: the copy of the model that generated it
REPLY = "reply"  # in a request's state: its `app.Reply`
TOKENS = "tokens"  # in a request's state: token counts of the prompt and of the answer
_STOPS = Refused(503, "the server stops before the answer is complete")
_STREAMED = (b"content-type", b"text/event-stream; charset=utf-8")
NOBODY = 499  # status when the client has left; not counted as refused

_LONGEST_PATH = 200  # characters in a line of the log
_SEND_BYTES = 1 << 17  # the socket's send buffer: by default, a whole unread stream would fit


def guard(
    app: Starlette, options: ServeOptions, keys: Keys, count: Callable[[int], None] = lambda _: None
) -> None:
    """Add all checks to `app`; errors become OpenAI's responses, `count` gets their status."""

    async def refuse(_: Request, error: Exception) -> Response:
        gone = isinstance(error, ClientDisconnect)
        return Response(status_code=NOBODY) if gone else response(refusal_of(error))

    for kind in (Refused, ClientDisconnect):
        app.add_exception_handler(kind, refuse)
    app.add_middleware(_Guard, options=options, keys=keys)
    if options.cors_origin:  # before the key check: a browser's preflight has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origin,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
        )
    app.add_middleware(_Around, options=options, count=count)


def event(value: Any) -> str:
    """A server-sent event, in ASCII: many clients end a line at U+2028 or U+0085, too."""
    return f"data: {json.dumps(value)}\n\n"


def response(error: Refused) -> Response:
    """The error as a response that OpenAI's clients understand."""
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def read(request: Request, options: ServeOptions) -> bytearray:
    """Read a request's body. Raises Refused if it is too large or too slow."""
    body, limit, seconds = bytearray(), int(options.max_body_mb * 1e6), options.client_timeout

    async def collect() -> None:
        async for part in request.stream():
            body.extend(part)
            if len(body) > limit:
                raise Refused(413, f"the body has more than {limit} bytes. Send less")

    try:
        await asyncio.wait_for(collect(), seconds)
    except asyncio.TimeoutError as error:
        message = f"the body did not arrive within {seconds:g} seconds. Send it at once"
        raise Refused(408, message, headers={"Connection": "close"}) from error
    return body


async def while_open(receive: Receive, coroutine: Coroutine[Any, Any, T]) -> T:
    """Await `coroutine`. Raises ClientDisconnect if the client disconnects first."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = work, _ = asyncio.create_task(coroutine), asyncio.create_task(disconnect())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # a cancelled task may raise


def token_counts(scope: Scope) -> tuple[int, int] | None:
    """Token counts of the prompt and of the answer; None if nothing was generated."""
    reply: Any = scope["state"].get(REPLY)  # an `app.Reply`
    counts = scope["state"].get(TOKENS) if reply is None else reply.tokens
    return cast("tuple[int, int] | None", counts)


class _Guard:
    """Admits requests with a valid key; without keys, those whose Host header names this machine.

    Else a page whose own host name resolves to this machine could read all answers (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, keys: Keys) -> None:
        self._app, self._options, self._keys = app, options, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if error is None else response(error))(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        if self._keys:
            if scope["path"] in OPEN or self._keys.accepts(headers.get("authorization", "")):
                return None
            return Refused(401, "the API key is missing or wrong", code="invalid_api_key")
        host = headers.get("host", "")
        if not host or not is_loopback(self._options.host):
            return None
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # an incomplete IPv6 address
            name = ""
        if name == self._options.host or is_loopback(name):
            return None
        return Refused(403, "the Host header names another machine. Set API keys")


class _Around:
    """Wraps each request: ends its answer when the request ends, turns errors into responses, logs.

    No text of a request or an answer is logged, unless `log_prompts` is set.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, count: Callable[[int], None]) -> None:
        self._app, self._options, self._count = app, options, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        start, status, streams = time.monotonic(), 0, False

        async def tracked_send(message: Message) -> None:
            nonlocal status, streams
            if message["type"] == "http.response.start":
                status, streams = message["status"], _STREAMED in message["headers"]
                if status >= 400 and status != NOBODY:
                    self._count(status)
            await send(message)

        try:
            await self._app(scope, receive, tracked_send)
        except asyncio.CancelledError:  # the server stops before the answer is complete
            logger.error("an answer was cut: the server stops, or its client left")
            if streams:
                await send({"type": "http.response.body", "body": event(_STOPS.body()).encode()})
            elif not status:
                await response(_STOPS)(scope, receive, tracked_send)
        except Exception as error:  # noqa: BLE001  # uvicorn would log its message
            logger.error("a request failed:\n%s", trace_of(error))
            if status:
                raise RuntimeError("the answer was cut, as the log says above") from None
            await response(refusal_of(error))(scope, receive, tracked_send)
        finally:
            reply: Any = state.get(REPLY)
            if reply is not None:
                reply.leave()
            self._log(scope, status, time.monotonic() - start)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        path, client, counts = scope["path"][:_LONGEST_PATH], scope["client"], token_counts(scope)
        if self._options.log_requests:
            logger.info(
                "%s %s %s, %s in %.3f s for %s",
                *(scope["method"], ascii(path)[1:-1], status or "unanswered"),
                "no tokens" if counts is None else f"{counts[0]} + {counts[1]} tokens",
                *(seconds, client[0] if client else "nobody known"),
            )
        reply: Any = scope["state"].get(REPLY)
        if self._options.log_prompts and reply is not None:
            logger.info("asked for %s", json.dumps(reply.prompts))
            logger.info("answered %s", json.dumps(reply.texts))


# Connections


def bind_socket(options: ServeOptions) -> socket.socket:
    """A socket bound to the address, which does not listen yet. Raises InvalidOption."""
    place = f"{options.host}, port {options.port}"
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM
        )
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        sock.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is too long
        reason = getattr(error, "strerror", None) or error
        message = f"cannot listen at {place}: {reason}. Give another --port or --host"
        raise InvalidOption(message) from error
    return sock


class Server(uvicorn.Server):
    """Runs until SIGINT or SIGTERM; running answers then get `graceful_seconds`."""

    def __init__(self, app: Starlette, options: ServeOptions, ready: Callable[[str], None]) -> None:
        """`ready` is called with the address as soon as clients can connect."""
        seconds: Any = options.client_timeout  # may be fractional, though uvicorn's type is int
        config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            log_level="warning",
            timeout_keep_alive=seconds,
            timeout_graceful_shutdown=math.ceil(options.graceful_seconds),
            server_header=False,
        )
        super().__init__(config)
        self._ready = ready

    def handle_exit(self, sig: int, _: FrameType | None) -> None:
        """Stop. uvicorn's own method would raise the signal again at the end, as an error."""
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if tasks := self.server_state.tasks:
            message = "completing %s, for at most %s seconds. Ctrl-C again stops at once"
            seconds = self.config.timeout_graceful_shutdown
            logger.info(message, counted(len(tasks), "request"), seconds)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn cleans up nothing; the model's thread must end
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or []:
            host, port = sock.getsockname()[:2]
            self._ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")


def _then_update_timer(event: Callable[..., None]) -> Any:
    def handler(connection: _Connection, *args: Any) -> None:
        event(connection, *args)
        connection._update_timer()

    return handler


class _Connection(H11Protocol):
    """uvicorn's connection to one client, with a limit on the time that it waits for the client.

    It waits for a request to begin, for the end of its headers, and for a client that must read
    before more can be sent. Bodies have a limit of their own, which gets an error response. The
    parser is always h11, since it limits the size of headers.
    """

    _timer: asyncio.TimerHandle | None = None

    connection_made = _then_update_timer(H11Protocol.connection_made)
    handle_events = _then_update_timer(H11Protocol.handle_events)
    on_response_complete = _then_update_timer(H11Protocol.on_response_complete)
    pause_writing = _then_update_timer(H11Protocol.pause_writing)
    resume_writing = _then_update_timer(H11Protocol.resume_writing)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _should_upgrade(self) -> bool:
        return False  # uvicorn would log advice to install packages

    def _update_timer(self) -> None:
        """Run the timer while the connection waits for its client, and only then."""
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy and not self.flow.write_paused:
            self._stop_timer()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
