"""The routes: OpenAI's protocol for a `Writer`, and a chat page that uses it.

Pieces come from the writer's thread; clients get OpenAI's format, whole or as a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from selfspec import files, pages
from selfspec.errors import InvalidData
from selfspec.serve import gate, protocol
from selfspec.serve.options import Keys
from selfspec.serve.protocol import Body, ChatBody, Choice, Refused, TextBody, refusal_of, trace_of
from selfspec.serve.writer import GIVERS, Job, Json, Piece, Writer

logger = logging.getLogger(__name__)

_MOST_WAITING = 256  # unread rounds that an answer may have per choice; then it is ended
_LOOK_S = 1.0  # /metrics waits so long for the current round, and then shows older values
_PARTS = ("tokens", "figures", "api", "markdown", "answer", "chats", "main")
_SCRIPTS = ("vendor/markdown-it.umd.min.js", *(f"{name}.js" for name in _PARTS))
"""Scripts of the page, joined in this order into one module."""


def make_app(writer: Writer, keys: Keys) -> FastAPI:
    """The server's application. It stops the writer when it ends."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(writer.stop)

    server, page = _Server(writer), _chat_page()
    # a redirect would lead to any host that the Host header names
    app = FastAPI(title="selfspec", openapi_url=None, lifespan=life, redirect_slashes=False)
    route = partial(app.api_route, methods=["GET", "HEAD"])
    app.add_exception_handler(HTTPException, _refuse_path)
    gate.guard(app, writer.options, keys, partial(writer.metrics.count, "request_refused"))
    app.post("/v1/chat/completions")(server.chat)
    app.post("/v1/completions")(server.text)
    route("/v1/models")(server.models)
    route("/v1/models/{name:path}")(server.model)
    route("/health")(server.health)
    route("/")(lambda: page)
    route("/metrics")(server.metrics)
    return app


class _Server:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._model = {"id": writer.label, "object": "model", "created": int(time.time())}
        self._model |= {"owned_by": "selfspec", "max_model_len": writer.room}

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
        state = {"status": "ok" if alive else "stopping", "answers": self._writer.open_choices}
        return JSONResponse(state, 200 if alive else 503)

    async def metrics(self) -> Response:
        writer = self._writer
        if writer.alive:
            with contextlib.suppress(asyncio.TimeoutError):  # the round takes longer
                await asyncio.wait_for(asyncio.wrap_future(writer.update_gauges()), _LOOK_S)
        return Response(writer.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def _answer(self, request: Request, kind: type[ChatBody | TextBody]) -> Response:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":  # other sites' pages cannot send it without CORS
            raise Refused(415, "Content-Type must be application/json")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refused(415, "Content-Encoding is not supported. Send the body as it is")
        content = await gate.read(request, self._writer.options)
        body, choices = await asyncio.to_thread(self._read, content, kind)
        field = choices[0].tools_field  # all have the same tools, and one grammar
        if field is not None and self._writer.tool_format is None:
            raise Refused(
                400,
                f"{field}: the chat template of {self._writer.label} has no tools, or a format of "
                "calls that is not known here. Use response_format with a schema",
                field=field,
            )
        reply = Reply(self._writer, choices, body, len(content))
        setattr(request.state, gate.REPLY, reply)
        if not body.stream:
            await gate.while_open(request.receive, reply.read_rest())
            return JSONResponse(reply.completion())
        piece = await gate.while_open(request.receive, reply.next())  # an error is not streamed
        return StreamingResponse(
            reply.lines(piece, with_usage=body.stream_options.include_usage),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    def _read(
        self, content: bytearray, kind: type[ChatBody | TextBody]
    ) -> tuple[ChatBody | TextBody, list[Choice]]:
        try:
            body = kind.model_validate(files.parse_json(content.decode(), "the body"))
        except UnicodeDecodeError as error:
            raise Refused(400, f"the body is not UTF-8: byte {error.start} is wrong") from error
        except InvalidData as error:
            raise Refused(400, str(error)) from error
        except ValidationError as error:
            raise protocol.invalid_body(error) from error
        self._require_model(body.model)
        if "stream_options" in body.model_fields_set and not body.stream:
            raise Refused(400, "stream_options needs stream: true. Drop it", field="stream_options")
        return body, body.choices(self._writer.options, self._writer.room)

    def _require_model(self, name: str | None) -> None:
        if name not in (None, self._writer.label):
            message = f"the model {name!r} is not here. This server has {self._writer.label}"
            raise Refused(404, message, field="model", code="model_not_found")


def _chat_page() -> HTMLResponse:
    """The chat page, which may use only its own script and style, and call only its own server."""
    rules = ("connect-src 'self'", "frame-ancestors 'none'", "trusted-types 'none'")
    rule = "require-trusted-types-for 'script'"
    givers = json.dumps(GIVERS)
    html, policy = pages.page(__package__, "chat", _SCRIPTS, *rules, rule, givers=givers)
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


async def _refuse_path(request: Request, error: Any) -> Response:
    status, headers = error.status_code, error.headers  # with the allowed methods
    reason = f"does not take {request.method}"
    if status == 404:
        reason = "is no path here. Use /v1/chat/completions, /v1/completions or /v1/models"
    return gate.response(Refused(status, f"{request.url.path} {reason}", headers=headers))


# --- the response to one request


class Reply:
    """The response to one request: pieces come from the writer's thread to this event loop."""

    def __init__(self, writer: Writer, choices: Sequence[Choice], body: Body, size: int) -> None:
        """Submit the request, of `size` bytes. Raises Refused if too many answers wait."""
        self._writer, self._field = writer, body.field
        self._is_chat = isinstance(body, ChatBody)
        self._has_logprobs = "logprobs" in choices[0].options
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": writer.label,
        }
        self._pieces: list[list[Piece]] = [[] for _ in choices]
        loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Piece] = asyncio.Queue()
        self._room = _MOST_WAITING * len(choices)
        self._job = Job(choices, lambda it: loop.call_soon_threadsafe(self._put, it), body.n, size)
        writer.submit(self._job)

    async def next(self) -> Piece:
        """Receive and keep the next piece; raises the error that ended its choice."""
        piece = await self._queue.get()
        if piece.error is not None:
            self.leave()
            refusal = refusal_of(piece.error, self._field)
            if refusal.status >= 500 and refusal is not piece.error:
                logger.info("an answer failed:\n%s", trace_of(piece.error))
            raise refusal
        self._pieces[piece.choice].append(piece)
        return piece

    async def read_rest(self) -> None:
        while not self._is_complete:
            await self.next()

    def leave(self) -> None:
        """Cancel the rest of the answers."""
        self._writer.cancel(self._job)

    @property
    def prompts(self) -> list[Any]:
        """The prompts, for a log that may contain them."""
        return [choice.prompt for choice in self._job.choices]

    @property
    def texts(self) -> list[str]:
        return ["".join(piece.text for piece in pieces) for pieces in self._pieces]

    @property
    def tokens(self) -> tuple[int, int] | None:
        """Token counts of the prompts and of the answers so far; None before the first piece."""
        stats: list[Any] = [pieces[-1].stats for pieces in self._pieces if pieces]
        return (self._job.prompt_tokens, sum(stat.new_tokens for stat in stats)) if stats else None

    @property
    def usage(self) -> Json:
        """Token counts of complete answers and of speculation, named as in vLLM if it has them."""
        records: list[Any] = [pieces[-1].stats for pieces in self._pieces]

        def total(name: str) -> Any:
            first, *others = (getattr(stats, name) for stats in records)
            return sum(others, first)

        prompt_tokens, new_tokens = self._job.prompt_tokens, total("new_tokens")
        rounds, accepted = total("rounds"), total("accepted")
        by_index = sorted(total("accepted_by_index").items())  # from 1, without a gap
        lengths = sorted(total("accepted_lengths").items())
        drafted_by, accepted_by = total("drafted_by_source"), total("accepted_by_source")
        usage: Json = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
            "speculation": {
                "rounds": rounds,
                "num_draft_tokens": total("drafted"),
                "num_accepted_tokens": accepted,
                "num_accepted_tokens_per_pos": [count for _, count in by_index],
                "mean_acceptance_length": (accepted + total("bonus")) / rounds if rounds else 0.0,
                "accepted_lengths": {str(length): count for length, count in lengths},
                "sources": {
                    source: {"drafted": drafted_by[source], "accepted": accepted_by[source]}
                    for source in sorted(drafted_by)
                },
                "lossless": all(stats.lossless for stats in records),
            },
        }
        if len(records) == 1:  # several choices also share with each other
            usage["prompt_tokens_details"] = {"cached_tokens": records[0].reused_tokens}
        return usage

    def completion(self) -> Json:
        choices = []
        for index, text in enumerate(self.texts):
            *_, last = pieces = self._pieces[index]
            message: Json = {"role": "assistant", "content": text, "refusal": None}
            if last.calls:
                message |= {"content": text or None, "tool_calls": last.calls}
            content = {"message": message} if self._is_chat else {"text": text}
            choices.append(self._choice(index, pieces, content, last.finish))
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage}

    async def lines(self, piece: Piece, *, with_usage: bool) -> AsyncIterator[str]:
        """Server-sent events, from the first piece on."""
        fields: Json = {"usage": None} if with_usage else {}
        try:
            for index in range(len(self._pieces)) if self._is_chat else ():
                delta = {"role": "assistant", "content": ""}
                yield self._event(self._choice(index, [], {"delta": delta}), **fields)
            for choice in self._choices_of(piece):
                yield self._event(choice, **fields)
            while not self._is_complete:
                for choice in self._choices_of(await self.next()):
                    yield self._event(choice, **fields)
            if with_usage:
                yield self._event(usage=self.usage)
            yield "data: [DONE]\n\n"
        except Refused as error:  # the status 200 has been sent already
            self._writer.metrics.count("request_refused", error.status)
            yield gate.event(error.body())

    @property
    def _is_complete(self) -> bool:
        return all(pieces and pieces[-1].finish for pieces in self._pieces)

    def _choices_of(self, piece: Piece) -> Iterator[Json]:
        output = piece.text or piece.logprobs or piece.rounds
        if not self._is_chat:
            if output or piece.finish:
                yield self._choice(piece.choice, [piece], {"text": piece.text}, piece.finish)
            return
        if output:
            yield self._choice(piece.choice, [piece], {"delta": {"content": piece.text}})
        if piece.calls:
            calls = [{"index": index, **call} for index, call in enumerate(piece.calls)]
            yield self._choice(piece.choice, [], {"delta": {"tool_calls": calls}})
        if piece.finish:
            yield self._choice(piece.choice, [], {"delta": {}}, piece.finish)

    def _event(self, *choices: Json, **fields: Json) -> str:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return gate.event({**self._head, "object": kind, "choices": choices, **fields})

    def _choice(
        self, index: int, pieces: Sequence[Piece], content: Json, finish: str | None = None
    ) -> Json:
        """`pieces`: those whose log-probabilities and rounds are added, if requested."""
        logprobs = self._logprobs(pieces) if self._has_logprobs and pieces else None
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
        if groups := [piece.rounds for piece in pieces if piece.rounds is not None]:
            rounds = [*itertools.chain.from_iterable(groups)]
            choice["speculation"] = {"rounds": rounds, "num_layers": self._writer.num_layers}
        return choice

    def _logprobs(self, pieces: Sequence[Piece]) -> Json:
        """Log-probabilities of tokens, in OpenAI's format for chats or for texts."""
        entries = [entry for piece in pieces for entry in piece.logprobs]
        if self._is_chat:
            return {"content": entries, "refusal": None}
        tops = [
            [(top["token"], top["logprob"]) for top in (*entry["top_logprobs"], entry)]
            for entry in entries
        ]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            # parts of characters all have the same text: the likeliest is reported
            "top_logprobs": [dict(top) | dict(reversed(top)) for top in tops],
            "text_offset": [offset for piece in pieces for offset in piece.offsets],
        }

    def _put(self, piece: Piece) -> None:
        """Queue a piece, on the event loop. Ends an answer that its client does not read."""
        if self._room > self._queue.qsize():
            self._queue.put_nowait(piece)
        elif self._room:
            self._room = 0  # no more pieces are queued
            self.leave()
            error = Refused(408, "the client reads more slowly than its answer is written")
            self._queue.put_nowait(Piece(choice=piece.choice, error=error))
