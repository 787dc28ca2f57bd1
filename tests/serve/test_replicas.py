"""Two copies of a tiny model under Ray Serve: the plain server's tests, and tests of copies."""

from __future__ import annotations

import asyncio
import importlib
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import Mock

import httpx
import psutil
import pytest
from starlette.testclient import TestClient

from selfspec.api.speculator import Speculator
from selfspec.serve.gate import COPY
from selfspec.serve.options import Keys, ServeOptions
from selfspec.serve.writer import Writer
from tests.serve.conftest import DRAFTS
from tests.serve.live import CHAT, JSON, Running, streaming, wait_until
from tests.serve.test_protocol import (  # noqa: F401  # the same tests, through Ray
    test_a_bad_body_or_path_is_refused,
    test_a_stream_joins_to_the_same_text,
    test_an_answer_is_that_of_generate,
    test_models_and_health,
)
from tests.talks import dialogue

pytest.importorskip("selfspec.cluster", exc_type=ImportError)  # before ray: it sets how Ray starts
from ray.exceptions import ActorDiedError  # after the check, like the imports below
from ray.serve.exceptions import RequestCancelledError

from selfspec.serve.replicas import make_front, session

LOADING: dict[str, Any] = {"dtype": "float32", "costs": "row=0.1,head=0.1", **DRAFTS}


class Command(NamedTuple):
    """`selfspec serve --replicas 2`, running."""

    process: subprocess.Popen[str]
    log: Path
    address: str

    @property
    def everything(self) -> list[psutil.Process]:
        """All processes that the command has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    @property
    def copies(self) -> list[psutil.Process]:
        return [child for child in self.everything if "ServeReplica" in " ".join(child.cmdline())]


@pytest.fixture(scope="module")
def command(folder: Path) -> Iterator[Command]:
    log = folder.parent / "log"
    flags = [f"--{name}={value}" for name, value in {**LOADING, "model": folder}.items()]
    flags += ["--port=0", "--replicas=2", "--log-requests"]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "selfspec", "serve", *flags], stderr=errors, text=True
        ) as process,
    ):
        try:
            wait_until(lambda: " at http" in log.read_text() or process.poll() is not None, 0.2)
            match = re.search(r"2 copies, at (\S+)/v1", log.read_text())
            assert match is not None, log.read_text()
            yield Command(process, log, match[1])
        finally:
            process.terminate()
            try:
                code = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()  # else leaving the block waits for ever
                raise
        assert code == 0


@pytest.fixture(scope="module")
def server(command: Command, tiny: Speculator) -> Running:
    """The command's address, with the same model in this process to compare answers with."""
    return Running(command.address, tiny, cast("Writer", None))


def ask(command: Command, messages: list[dict[str, str]], **more: Any) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 30, "temperature": 0, **more}
    return httpx.post(f"{command.address}{CHAT}", json=body, timeout=60)


def opening(number: int, *more: str) -> list[dict[str, str]]:
    question = f"Story {number} is about a cat that sat on {number} mats."
    rule = "You tell long stories of cats and mats, and of no dogs."
    return dialogue(question, *more, rule=rule)


def test_a_conversation_stays_on_one_copy_and_both_copies_get_some(command: Command) -> None:
    copies = set()
    for number in range(40):
        first = ask(command, opening(number))
        copies.add(first.headers[COPY])
        text = first.json()["choices"][0]["message"]["content"]
        second = ask(command, opening(number, text, "What is next?"))
        assert second.headers[COPY] == first.headers[COPY]
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        if len(copies) == 2 and number >= 3:
            return
    pytest.fail("one copy has all conversations")


def test_a_killed_copy_loses_only_its_own_answers_and_restarts(command: Command) -> None:
    """Kill one copy while each copy writes a stream."""
    copies = command.copies
    assert len(copies) == 2
    url = f"{command.address}{CHAT}"
    with httpx.Client(timeout=60) as http:
        streams: dict[str, httpx.Response] = {}
        for number in range(40):
            body = {"messages": opening(number), "max_tokens": 1500, "temperature": 0}
            request = http.build_request("POST", url, json={**body, "stream": True})
            answer = http.send(request, stream=True)
            if streams.setdefault(answer.headers[COPY], answer) is not answer:
                answer.close()
            if len(streams) == 2:
                break
        copies[0].kill()
        lines = [[line for line in stream.iter_lines() if line] for stream in streams.values()]
    ends = sorted(stream[-1] for stream in lines)
    assert ends[0] == "data: [DONE]"
    assert "copy of the model that wrote this has ended. Send the request again" in ends[1]
    for number in range(8):  # for either copy
        assert ask(command, opening(number)).status_code == 200
    wait_until(lambda: len(command.copies) == 2, 0.2)
    assert copies[0].pid not in [copy.pid for copy in command.copies]
    lost, other = streams if "ended" in lines[0][-1] else reversed(streams)
    numbers = iter(range(100_000))
    names = set[str]()

    def both() -> bool:
        names.add(ask(command, opening(next(numbers)), max_tokens=1).headers[COPY])
        return len(names) == 2

    wait_until(both, 1.0)  # each request takes time from the copy that starts
    assert other in names
    assert lost not in names


def test_a_client_that_goes_away_ends_its_answer(command: Command, server: Running) -> None:
    body = {"messages": opening(1), "max_tokens": 8000, "temperature": 0}
    with streaming(server, {**body, "stream": True}):
        pass
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{command.address}{CHAT}", json=body, timeout=0.5)

    def idle() -> bool:  # enough requests to reach both copies
        reports = [httpx.get(f"{command.address}/health").json() for _ in range(8)]
        return all(report == {"status": "ok", "answers": 0} for report in reports)

    wait_until(idle, 0.2)


def test_the_log_has_a_line_per_request_and_no_text(command: Command) -> None:
    ask(command, dialogue("a word nobody says: xyzzy"))
    wait_until(lambda: "+ 30 tokens" in command.log.read_text())
    log = command.log.read_text()
    assert re.search(r"POST \S+ns 200, \d+ \+ 30 tokens in \d+\.\d{3} s for 127.0.0.1", log)
    (folder,) = {  # the log folder of Ray's processes
        Path(word.partition("=")[2])
        for process in psutil.Process(command.process.pid).children()
        for word in process.cmdline()
        if word.startswith("--log_dir=")
    }
    texts = [file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file()]
    assert len(texts) > 5
    assert "xyzzy" not in "".join([log, *texts])
    assert "Traceback" not in log


def test_ports_of_ray_are_local_or_require_a_token(command: Command) -> None:
    grpc: Any = importlib.import_module("grpc")  # it has no types
    bodies: Any = importlib.import_module("ray.serve.generated.serve_pb2")
    service: Any = importlib.import_module("ray.serve.generated.serve_pb2_grpc")
    addresses = [
        (str(connection.laddr.ip), int(connection.laddr.port))
        for process in [psutil.Process(command.process.pid), *command.everything]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(addresses) > 3
    for host, port in set(addresses):
        if host.removeprefix("::ffff:") == "127.0.0.1":
            continue
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = service.ASGIServiceStub(channel)
            with pytest.raises(grpc.RpcError) as error:
                stub.HandleRequest(bodies.ASGIRequest(), timeout=20)
        assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_running_answer_is_finished_before_shutdown(command: Command, server: Running) -> None:
    """The last of the live tests, as it stops the server."""
    processes = command.everything
    body = {"messages": opening(1), "max_tokens": 500, "temperature": 0, "stream": True}
    with streaming(server, body) as lines:
        command.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert command.process.wait(40) == 0
    assert not psutil.wait_procs(processes, timeout=10)[1]


def test_keys_origins_and_sizes_are_checked_before_any_copy() -> None:
    options = ServeOptions(cors_origin=["https://page.example"], max_body_mb=0.001)
    front = TestClient(make_front(cast("Any", None), options, Keys(["key"])))
    url, key = "/v1/chat/completions", {"Authorization": "Bearer key"}
    assert front.post(url, json={}).status_code == 401
    origin = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert front.options(url, headers=origin).status_code == 200
    answer = front.post(url, content=b"x" * 2000, headers=JSON | key)
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"


class Messages:
    """The stream of a fake copy: the given messages, then a wait or an error."""

    def __init__(self, messages: Sequence[dict[str, Any]], error: Exception | None) -> None:
        self._messages, self._error, self._cancelled = messages, error, asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        for message in self._messages:
            yield message
        if self._error is None:
            await self._cancelled.wait()
        raise self._error or RequestCancelledError("0")

    def cancel(self) -> None:
        self._cancelled.set()


def ask_front(
    *messages: dict[str, Any], error: Exception | None = None, path: str = "/v1/models"
) -> Any:
    handle = Mock()
    handle.options.return_value.answer.remote.return_value = Messages(messages, error)
    front = make_front(handle, ServeOptions(timeout=0.05), Keys([]))
    return TestClient(front, base_url="http://localhost").get(path)


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_a_server_without_a_ready_copy_says_so_in_time(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("selfspec.serve.replicas._READY_S", 0.05)
    answer = ask_front(path=path)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no copy of the model is ready. Try again soon"


def test_the_answer_of_a_dead_copy_is_refused_or_visibly_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(_: bytes) -> str:
        with pytest.raises(RuntimeError):  # off the thread of the event loop
            asyncio.get_running_loop()
        return ""

    monkeypatch.setattr("selfspec.serve.replicas.session", read)
    answer = ask_front(error=ActorDiedError())
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_error"
    assert "Send the request again" in answer.json()["error"]["message"]
    start = {"type": "http.response.start", "status": 200, "headers": []}
    half = {"type": "http.response.body", "body": b'{"half', "more_body": True}
    with pytest.raises(RuntimeError, match="the answer was cut"):
        ask_front(start, half, error=ActorDiedError())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (b'{"messages": [1, {"role": "user"}]}', b'{"messages": [1, {"role": "user"}, 2]}', True),
        (b'{"messages": [{"role": "user"}]}', b'{"messages": [1, {"role": "user"}]}', False),
        (b'{"prompt": "%s"}' % (b"a" * 300), b'{"prompt": "%s"}' % (b"a" * 400), True),
        (b'{"prompt": [1, 2]}', b'{"prompt": [1, 3]}', False),
    ],
)
def test_a_session_is_the_beginning_of_a_conversation(one: bytes, other: bytes, same: bool) -> None:
    assert session(one)
    assert (session(one) == session(other)) is same
    for body in (b"", b"{", b"[]", b"null", b"{}", b'{"prompt": 3}', b'{"messages": []}', b"\xff"):
        assert session(body) == ""
