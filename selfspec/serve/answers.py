"""From pieces of the writer's thread to a client: OpenAI's shapes, whole or as a stream."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from selfspec.decoding.stats import GenerationStats
from selfspec.serve.pieces import Json, Piece
from selfspec.serve.protocol import Choice, Refused, of_error, places
from selfspec.serve.writer import Job, Writer

logger = logging.getLogger(__name__)

_MOST_WAITING = 256
"""Rounds of an answer that wait for a client who does not read; then its answer ends."""


class Reply:
    """What one request gets back, made of pieces as they come."""

    def __init__(self, model: str, choices: Sequence[Choice], *, chat: bool) -> None:
        """`chat`: messages, else text."""
        self._chat, self._notes = chat, "logprobs" in choices[0].options
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._pieces: list[list[Piece]] = [[] for _ in choices]
        self.prompt_tokens = 0
        self.asked = [choice.prompt for choice in choices]
        """What it answers, for a log that may say so."""

    def add(self, piece: Piece) -> None:
        """One more piece."""
        self._pieces[piece.choice].append(piece)

    @property
    def complete(self) -> bool:
        """Whether all choices have ended."""
        return all(pieces and pieces[-1].finish for pieces in self._pieces)

    @property
    def texts(self) -> list[str]:
        """What is written, by choice."""
        return ["".join(piece.text for piece in pieces) for pieces in self._pieces]

    @property
    def usage(self) -> Json:
        """Tokens of what has ended, and what speculation did."""
        stats = [pieces[-1].stats for pieces in self._pieces if pieces]
        return usage(self.prompt_tokens, [one for one in stats if one is not None])

    def whole(self) -> Json:
        """The answer to a request that does not stream."""
        choices = []
        for index, text in enumerate(self.texts):
            *_, last = pieces = self._pieces[index]
            said: Json = {"text": text}
            if self._chat:
                content = (text or None) if last.calls else text
                said = {"message": {"role": "assistant", "content": content, "refusal": None}}
                if last.calls:
                    said["message"]["tool_calls"] = last.calls
            choices.append(self._choice(index, pieces, said, last.finish))
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage}

    def opening(self) -> list[Json]:
        """The chunks before any text: who speaks."""
        delta = {"role": "assistant", "content": ""}
        numbers = range(len(self._pieces)) if self._chat else ()
        return [self._chunk(self._choice(index, [], {"delta": delta})) for index in numbers]

    def chunks(self, piece: Piece) -> list[Json]:
        """A piece that was added, for a client that reads along."""
        found = []
        told = piece.told is not None and piece.told["rounds"]
        if not self._chat:
            if piece.text or piece.logprobs or told or piece.finish:
                text: Json = {"text": piece.text}
                found.append(self._choice(piece.choice, [piece], text, piece.finish))
            return [self._chunk(one) for one in found]
        if piece.text or piece.logprobs or told:
            said = {"delta": {"content": piece.text}}
            found.append(self._choice(piece.choice, [piece], said))
        if piece.calls:
            calls = [{"index": index, **call} for index, call in enumerate(piece.calls)]
            found.append(self._choice(piece.choice, [], {"delta": {"tool_calls": calls}}))
        if piece.finish:
            found.append(self._choice(piece.choice, [], {"delta": {}}, piece.finish))
        return [self._chunk(one) for one in found]

    def last(self) -> Json:
        """The chunk behind all text, for who asked for usage."""
        return self._chunk() | {"usage": self.usage}

    def _chunk(self, *choices: Json) -> Json:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _choice(
        self, index: int, pieces: Sequence[Piece], said: Json, finish: str | None = None
    ) -> Json:
        """`pieces`: of whose tokens more is said, where that was asked for."""
        likely = self._likely(index, pieces) if self._notes and pieces else None
        found = {"index": index, **said, "logprobs": likely, "finish_reason": finish}
        told = [piece.told for piece in pieces if piece.told is not None]
        if told:
            rounds = [entry for one in told for entry in one["rounds"]]
            found["speculation"] = {**told[0], "rounds": rounds}
        return found

    def _likely(self, index: int, pieces: Sequence[Piece]) -> Json:
        """How likely tokens were; OpenAI has two shapes."""
        entries = [one for piece in pieces for one in piece.logprobs]
        if self._chat:
            return {"content": entries, "refusal": None}
        every = [one for piece in self._pieces[index] for one in piece.logprobs]
        *offsets, _ = [0, *itertools.accumulate(len(one["token"]) for one in every)]
        return {
            "tokens": [one["token"] for one in entries],
            "token_logprobs": [one["logprob"] for one in entries],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in entries
            ],
            "text_offset": offsets[len(offsets) - len(entries) :],
        }


def usage(prompt_tokens: int, all_stats: Sequence[GenerationStats]) -> Json:
    """Tokens, and what speculation did; words as vLLM has them, where it has one."""

    def number(name: str) -> int:
        return sum(getattr(stats, name) for stats in all_stats)

    def counts(name: str) -> Counter[Any]:
        return sum((getattr(stats, name) for stats in all_stats), Counter[Any]())

    written, rounds, accepted = map(number, ("new_tokens", "rounds", "accepted"))
    lengths, by_index = counts("accepted_lengths"), counts("accepted_by_index")
    drafted_by, accepted_by = counts("drafted_by_source"), counts("accepted_by_source")
    found: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
        "speculation": {
            "rounds": rounds,
            "num_draft_tokens": number("drafted"),
            "num_accepted_tokens": accepted,
            "num_accepted_tokens_per_pos": [
                by_index[index] for index in range(1, max(by_index, default=0) + 1)
            ],
            "mean_acceptance_length": (accepted + number("bonus")) / rounds if rounds else 0.0,
            "accepted_lengths": {str(length): lengths[length] for length in sorted(lengths)},
            "sources": {
                source: {"drafted": drafted_by[source], "accepted": accepted_by[source]}
                for source in sorted(drafted_by)
            },
            "lossless": all(stats.lossless for stats in all_stats),
        },
    }
    if len(all_stats) == 1:  # several choices also share with each other
        found["prompt_tokens_details"] = {"cached_tokens": all_stats[0].reused_tokens}
    return found


class Pieces:
    """Pieces of one request's answers, from the writer's thread to this loop, where they reply."""

    def __init__(self, writer: Writer, choices: Sequence[Choice], reply: Reply, field: str) -> None:
        """Submits the request. Raises Refused where too much waits."""
        self.reply = reply
        self._writer, self._field = writer, field
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Piece] = asyncio.Queue()
        self._room = _MOST_WAITING * len(choices)
        self._job = Job(choices=choices, begun=self._begun, wrote=self._wrote)
        writer.submit(self._job)

    async def next(self) -> Piece:
        """The next piece, counted in; raises what ended its choice."""
        piece = await self._queue.get()
        if piece.error is not None:
            self.leave()
            if not isinstance(piece.error, Refused):
                logger.info("an answer failed:\n%s", places(piece.error))
            raise of_error(piece.error, self._field)
        self.reply.add(piece)
        return piece

    async def rest(self) -> None:
        """All of them."""
        while not self.reply.complete:
            await self.next()

    def leave(self) -> None:
        """Nobody wants the rest."""
        self._writer.cancel(self._job)

    async def lines(self, piece: Piece, *, with_usage: bool) -> AsyncIterator[str]:
        """Server-sent events, from the first piece on."""
        reply = self.reply
        try:
            for chunk in reply.opening():
                yield _event(chunk)
            while True:
                for chunk in reply.chunks(piece):
                    yield _event(chunk)
                if reply.complete:
                    break
                piece = await self.next()
            if with_usage:
                yield _event(reply.last())
            yield "data: [DONE]\n\n"
        except Refused as error:  # behind a status that said otherwise
            self._writer.metrics.refused(error.status)
            yield _event(error.body())

    def _begun(self, prompt_tokens: int) -> None:
        self.reply.prompt_tokens = prompt_tokens

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

    def __init__(self, pieces: Pieces, first: Piece, *, with_usage: bool) -> None:
        """Behind the first piece: what is refused is no stream."""
        super().__init__(
            pieces.lines(first, with_usage=with_usage),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pieces.leave()


def _event(value: Json) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
