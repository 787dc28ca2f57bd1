"""Servers in processes of their own, and clients that note when an answer's chunks come.

Used by `serve_load`, `serve_equal` and `serve_soak`. Everything stays on this machine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

CHAT = "/v1/chat/completions"

_READY_S = 300.0
"""For a server to load its model."""

_STOP_S = 40.0
"""For a server to stop when it is asked to; then it is killed."""

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)


@dataclass(frozen=True)
class Server:
    """One that answers."""

    address: str
    process: subprocess.Popen[bytes]


@dataclass
class Heard:
    """What one request got."""

    status: int = 0
    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    likely: list[tuple[str, float]] = field(default_factory=list)
    """Each token and how likely it was, where that was asked for."""
    error: str | None = None
    seconds: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Seconds from the request to each chunk with text, of streams."""

    @property
    def tokens(self) -> int:
        """As the server counts them; where it does not, a chunk is one."""
        return int(self.usage.get("completion_tokens", len(self.arrivals)))

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [later - earlier for earlier, later in pairs]


def ours(*flags: str) -> list[str]:
    """The command of `selfspec serve`; its port comes behind."""
    return [sys.executable, "-m", "selfspec", "serve", *flags]


def theirs(folder: str, *flags: str) -> list[str]:
    """The command of `transformers serve`, of the same environment."""
    command = str(Path(sys.executable).with_name("transformers"))
    return [command, "serve", folder, "--host", "127.0.0.1", *flags]


@contextmanager
def served(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server that is ready. Raises RuntimeError with its last words where it never is."""
    port = _free_port()
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=said,
            stderr=said,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        )
        try:
            _wait(address, process)
            yield Server(address, process)
        except RuntimeError as error:
            said.seek(0)
            words = said.read().decode(errors="replace").strip()[-2000:]
            raise RuntimeError(f"{' '.join(command)}: {error}\n{words}") from error
        finally:
            _stop(process)


def clients(server: Server) -> httpx.AsyncClient:
    """As many connections as are wanted at once."""
    return httpx.AsyncClient(base_url=server.address, timeout=None, limits=_LIMITS)


async def ask(client: httpx.AsyncClient, body: Mapping[str, Any], path: str = CHAT) -> Heard:
    """Sends one request; what is no stream is read whole."""
    heard, start = Heard(), time.perf_counter()
    if not body.get("stream"):
        answer = await client.post(path, json=body)
        heard.status = answer.status_code
        _whole(heard, answer.json())
    else:
        async with client.stream("POST", path, json=body) as answer:
            heard.status = answer.status_code
            if answer.status_code != httpx.codes.OK:
                _whole(heard, json.loads(await answer.aread()))
            else:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        _chunk(heard, json.loads(line[6:]), time.perf_counter() - start)
    heard.seconds = time.perf_counter() - start
    return heard


def question(text: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A request of one user's turn; greedy unless told otherwise."""
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, **more}


def _whole(heard: Heard, answer: Mapping[str, Any]) -> None:
    if "choices" not in answer:
        heard.error = json.dumps(answer)
        return
    (choice,) = answer["choices"]
    heard.text = choice["message"]["content"] if "message" in choice else choice["text"]
    heard.finish, heard.usage = choice["finish_reason"], answer.get("usage") or {}
    heard.likely += _likely(choice)


def _chunk(heard: Heard, chunk: Mapping[str, Any], seconds: float) -> None:
    if "error" in chunk:
        heard.error = json.dumps(chunk["error"])
        return
    heard.usage = chunk.get("usage") or heard.usage
    for choice in chunk["choices"]:
        text = (choice.get("delta") or choice).get("content") or choice.get("text") or ""
        heard.finish = choice.get("finish_reason") or heard.finish
        heard.likely += _likely(choice)
        if text:
            heard.text += text
            heard.arrivals.append(seconds)


def _likely(choice: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Of a chat's choice."""
    found = (choice.get("logprobs") or {}).get("content") or []
    return [(one["token"], one["logprob"]) for one in found]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def _wait(address: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _READY_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"ended with code {process.returncode}")
        try:
            if httpx.get(f"{address}/health", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise RuntimeError(f"was not ready within {_READY_S:g} seconds")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
