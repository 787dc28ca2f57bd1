"""One copy of the model, as Ray Serve runs it in a process of its own.

Comes in: what the server's front read of a request. Goes out: what the application sends, message
by message (ASGI). The application is that of the plain server; keys and origins are the front's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Message, Scope

from selfspec import untrusted
from selfspec.errors import InvalidData, SelfspecError
from selfspec.serve import gate
from selfspec.serve.options import Keys, ServeOptions

NAME = "x-selfspec-copy"
"""Header of an answer: which copy wrote it."""

TOKENS = "selfspec.tokens"
"""Type of a message before the last: the tokens of the answer, for the log."""

MARK = "selfspec: cannot load: "
"""Stands before the reason in what Ray says of a copy that could not start."""

_BEGINNING = 256
"""Characters or ids of a prompt without messages that make its session."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a copy is made of."""

    loading: dict[str, Any]
    """Keywords of `selfspec.load`."""
    options: ServeOptions
    kv_memory: int | None = None


class Replica:
    """A model, its writer and its application."""

    def __init__(self, plan: Plan) -> None:
        """Loads the model. Raises RuntimeError, which says behind MARK why there is none."""
        from ray.serve import get_replica_context

        from selfspec.api.speculator import load
        from selfspec.serve.app import make_app
        from selfspec.serve.writer import Writer

        logger = logging.getLogger("selfspec")  # as the command line's; Ray passes stderr on
        logger.setLevel(logging.INFO)
        logger.handlers[:] = [logging.StreamHandler()]
        # without what only the front does
        options = replace(plan.options, cors_origin=None, log_requests=False)
        try:
            self._writer = Writer(load(**plan.loading), options, plan.kv_memory)
        except SelfspecError as error:
            raise RuntimeError(f"{MARK}{error}") from None
        self._name = NAME.encode(), get_replica_context().replica_id.unique_id.encode()
        self._app = make_app(self._writer, Keys([]))

    def label(self) -> str:
        """The model's name."""
        return self._writer.label

    def check_health(self) -> None:
        """Ray starts another copy where this raises."""
        if not self._writer.alive:
            raise RuntimeError("the writer has ended")

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """The application's messages; a caller that stops reading ends the request."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        unread = [{"type": "http.request", "body": body}]

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()  # a client that goes away ends all of this
            return unread.pop()

        task = asyncio.ensure_future(self._app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message["headers"], self._name]}
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    yield {"type": TOKENS, "tokens": gate.tokens(scope)}
                yield message
            task.result()
        finally:
            task.cancel()


def session(body: bytes) -> str:
    """Which conversation a body belongs to: the same for all its turns; empty where it has none.

    All turns share the messages up to the first that a user wrote, or the beginning of a prompt.
    """
    try:
        found = untrusted.parse_json(body.decode(), "the body")
    except (InvalidData, UnicodeError):
        return ""
    if not isinstance(found, dict):
        return ""
    beginning = found.get("messages")
    if isinstance(beginning, list):
        roles = [isinstance(one, dict) and one.get("role") for one in beginning]
        beginning = beginning[: roles.index("user") + 1] if "user" in roles else beginning
    else:
        prompt = found.get("prompt")
        beginning = prompt[:_BEGINNING] if isinstance(prompt, str | list) else None
    return hashlib.sha256(json.dumps(beginning).encode()).hexdigest() if beginning else ""
