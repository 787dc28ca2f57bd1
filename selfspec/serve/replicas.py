"""Several copies of the model: Ray Serve starts, watches and replaces them, and picks one.

The front is that of the plain server: the same socket, keys, limits and shutdown. Ray's own HTTP
proxy is off: it sees only headers, so it cannot tell conversations apart; a copy that dies during
an answer would cut the connection without an error; and it opens a port with paths without a key.
Requests of one conversation go to one copy: its beginning is its session (`ConsistentHashRouter`;
Ray's `PrefixCacheAffinityRouter` asks an actor twice per request, and pulls in its LLM packages).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any, cast

from selfspec import cluster  # before Ray, which reads the environment that it sets

# isort: split

import psutil
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.schema import LoggingConfig
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from selfspec import files
from selfspec.errors import InvalidData, InvalidOption, SelfspecError
from selfspec.files import cores
from selfspec.serve import gate
from selfspec.serve.options import Keys, ServeOptions
from selfspec.serve.protocol import Refused

logger = logging.getLogger(__name__)

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_NAME = "selfspec"
_TOKENS = "selfspec.tokens"  # type of a message before the last: the answer's tokens, for the log
_MARK = "selfspec: cannot load: "  # in Ray's status of a copy, before the reason
_BEGINNING = 256  # first characters or ids of a prompt without messages: they are its session
_OBJECTS_BYTES = 128 << 20  # of Ray's object store; messages are too small to use it
_READY_S = 5.0  # for a copy to accept a request, besides the time for the answer
_SPARE = 64  # requests that a copy gets beyond its limits, so that the copy itself refuses them

_PASSED = {
    *("type", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("client", "server", "asgi"),
}
"""Keys of a request's ASGI scope that a copy gets besides the headers."""


class Replica:
    """One copy, in its own process: the plain server without its keys, CORS and request log."""

    def __init__(
        self, load_options: dict[str, Any], options: ServeOptions, kv_memory: int | None
    ) -> None:
        """`load_options`: keywords of `selfspec.load`. Raises RuntimeError if loading fails."""
        from selfspec.api.speculator import load
        from selfspec.serve.app import make_app
        from selfspec.serve.writer import Writer

        log = logging.getLogger("selfspec")  # as in the command line; Ray forwards stderr
        log.setLevel(logging.INFO)
        log.handlers[:] = [logging.StreamHandler()]
        # the front has checked and logged the requests
        options = replace(options, cors_origin=None, log_requests=False, host="")
        try:
            self._writer = Writer(load(**load_options), options, kv_memory)
        except SelfspecError as error:
            raise RuntimeError(f"{_MARK}{error}") from None
        name = serve.get_replica_context().replica_id.unique_id
        self._header = gate.COPY.encode(), name.encode()
        self._app = make_app(self._writer, Keys([]))

    def label(self) -> str:
        return self._writer.label

    def check_health(self) -> None:
        """Ray starts another copy if this raises."""
        if not self._writer.alive:
            raise RuntimeError("the writer has ended")

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """The application's messages (ASGI); a caller that stops reading ends the request."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        requests = [{"type": "http.request", "body": body}]

        async def receive() -> Message:
            if not requests:
                await asyncio.Event().wait()  # if the client leaves, the task is cancelled
            return requests.pop()

        task = asyncio.ensure_future(self._app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message["headers"], self._header]}
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    yield {"type": _TOKENS, "tokens": gate.token_counts(scope)}
                yield message
            task.result()
        finally:
            task.cancel()


@contextlib.contextmanager
def copies(
    load_options: dict[str, Any], options: ServeOptions, kv_memory: int | None
) -> Iterator[DeploymentHandle[Replica]]:
    """Run copies until the context ends; they share cores and `kv_memory`. Raises InvalidOption."""
    count = options.replicas
    threads = max(1, cores() // count)
    memory = kv_memory or psutil.virtual_memory().available // 2
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    log_config = LoggingConfig(log_level="CRITICAL", enable_access_log=False)
    deployment = serve.deployment(
        num_replicas=count,
        max_ongoing_requests=options.concurrency + options.queue + _SPARE,
        ray_actor_options={"num_cpus": threads, "runtime_env": {"env_vars": variables}},
        health_check_period_s=1.0,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=1.0,  # the front has waited for answers before
        max_constructor_retry_count=1,
        request_router_config=RequestRouterConfig.model_validate({"request_router_class": _ROUTER}),
        logging_config=log_config,
    )(Replica)
    cpus = threads * count
    with cluster.run_ray(num_cpus=cpus, object_store_memory=_OBJECTS_BYTES):
        logging.getLogger("ray.serve").setLevel(logging.CRITICAL)  # its errors are also raised
        serve.start(proxy_location="Disabled", logging_config=log_config)
        app = deployment.bind(load_options, options, memory // count)
        try:
            handle = serve.run(app, name=_NAME, route_prefix=None)
        except (RuntimeError, RayError) as error:
            statuses = serve.status().applications[_NAME].deployments.values()
            text = "".join(status.message for status in statuses)
            _, mark, tail = text.partition(_MARK)  # the line of a copy that could not load
            reason = tail.splitlines()[0] if mark else f"no copy of the model could start: {error}"
            raise InvalidOption(reason) from error
        yield handle  # Serve ends with Ray; `serve.shutdown` would wait for processes that are gone


def make_front(handle: DeploymentHandle[Replica], options: ServeOptions, keys: Keys) -> Starlette:
    """The application of the process that clients talk to."""
    front = Starlette(routes=[Mount("/", app=_Front(handle, options))])
    gate.guard(front, options, keys)
    return front


class _Front:
    def __init__(self, handle: DeploymentHandle[Replica], options: ServeOptions) -> None:
        self._handle, self._options = handle, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytes(await gate.read(Request(scope, receive), self._options))
        fields = {name: scope[name] for name in _PASSED & scope.keys()}
        fields["headers"] = [header for header in scope["headers"] if header[0] != b"authorization"]
        session_id = await asyncio.to_thread(session, body)  # large ones take seconds
        handle = self._handle.options(session_id=session_id, stream=True)
        messages = cast("DeploymentResponseGenerator[Message]", handle.answer.remote(fields, body))
        try:
            with contextlib.suppress(ClientDisconnect):
                await gate.while_open(receive, self._forward(messages, scope, send))
        finally:
            messages.cancel()

    async def _forward(
        self, messages: DeploymentResponseGenerator[Message], scope: Scope, send: Send
    ) -> None:
        """Pass a copy's messages on to the client; if the copy dies or is late, send an error."""
        limit = _READY_S + (0 if scope["path"] in gate.OPEN else self._options.timeout)
        timer = asyncio.get_running_loop().call_later(limit, messages.cancel)
        begun = streams = False
        try:
            async for message in messages:
                if message["type"] == _TOKENS:
                    scope["state"][gate.TOKENS] = message["tokens"]
                    continue
                if message["type"] == "http.response.start":
                    kind: bytes = dict(message["headers"]).get(b"content-type", b"")
                    begun, streams = True, kind.startswith(b"text/event-stream")
                    timer.cancel()
                await send(message)
        except RequestCancelledError:
            if not begun:
                raise Refused(503, "no copy of the model is ready. Try again soon") from None
        except (RayError, RayServeException) as error:
            logger.warning("a copy of the model ended: %s", type(error).__name__)
            if begun and not streams:
                raise RuntimeError("the answer was cut") from None
            refusal = Refused(
                503, "the copy of the model that wrote this has ended. Send the request again"
            )
            if not begun:
                raise refusal from None
            await send({"type": "http.response.body", "body": gate.event(refusal.body()).encode()})
        finally:
            timer.cancel()


def session(body: bytes) -> str:
    """The conversation that a body belongs to, as a hash; empty if there is none.

    Its turns all share the messages up to the first of a user, or the beginning of the prompt.
    """
    fields = None
    with contextlib.suppress(InvalidData, UnicodeError):
        fields = files.parse_json(body.decode(), "the body")
    if not isinstance(fields, dict):
        return ""
    beginning, prompt = fields.get("messages"), fields.get("prompt")
    if isinstance(beginning, list):
        roles = [isinstance(message, dict) and message.get("role") for message in beginning]
        beginning = beginning[: roles.index("user") + 1] if "user" in roles else beginning
    else:
        beginning = prompt[:_BEGINNING] if isinstance(prompt, str | list) else None
    return hashlib.sha256(json.dumps(beginning).encode()).hexdigest() if beginning else ""
