"""Other origins, the log, /metrics, `selfspec serve` as a process, and docs/serving.md."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from selfspec.api.speculator import Speculator
from selfspec.cli.generate import SERVING
from selfspec.cli.main import main
from selfspec.serve.gate import COPY, OPEN, Server, _Around
from selfspec.serve.options import VARIABLE, ServeOptions
from tests.serve.live import LONG, Running, running, streaming, wait_until

PAGE = "https://page.example"
SECRET = "xyzzy"
SAY = [{"role": "user", "content": f"Say {SECRET}."}]
ASK = {"messages": SAY, "max_tokens": 8, "temperature": 0}


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """The whole log at level DEBUG, without a handler left over from a CLI test."""
    monkeypatch.setattr(caplog.handler, "formatter", logging.Formatter("%(name)s %(message)s"))
    monkeypatch.setattr(logging.getLogger("selfspec"), "handlers", [])
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "selfspec"):
        yield caplog


def preflight(server: Running, origin: str = PAGE) -> httpx.Response:
    fields = {"Method": "POST", "Headers": "authorization,content-type"}
    headers = {f"Access-Control-Request-{name}": value for name, value in fields.items()}
    headers["Origin"] = origin
    return httpx.options(f"{server.address}/v1/chat/completions", headers=headers)


def allowed(answer: httpx.Response) -> dict[str, str]:
    return {k: v for k, v in answer.headers.items() if k.startswith("access-control")}


def test_other_origins_are_not_allowed_by_default(server: Running) -> None:
    assert preflight(server).status_code == 405
    for answer in (preflight(server), server.post(ASK, Origin=PAGE)):
        assert not allowed(answer)


def test_a_named_origin_is_allowed_and_needs_a_key(tiny: Speculator) -> None:
    with running(tiny, keys=("key",), cors_origin=[PAGE]) as server:
        answer = preflight(server)
        assert answer.status_code == 200
        assert allowed(answer)["access-control-allow-origin"] == PAGE
        assert "authorization" in allowed(answer)["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in allowed(answer)
        refused = server.post(ASK, Origin=PAGE)
        assert refused.status_code == 401
        assert allowed(refused)["access-control-allow-origin"] == PAGE  # for the page to read
        assert server.post(ASK, Origin=PAGE, Authorization="Bearer key").status_code == 200
        assert preflight(server, "https://other.example").status_code == 400
        other = server.post(ASK, Origin="https://other.example", Authorization="Bearer key")
        assert "access-control-allow-origin" not in allowed(other)
        # a server that requires a key accepts any Host header
        assert httpx.get(f"{server.address}/", headers={"Host": "a.example"}).status_code == 200


def test_requests_and_texts_are_logged_on_request(
    tiny: Speculator, log: pytest.LogCaptureFixture
) -> None:
    with running(tiny, log_requests=True, log_prompts=True) as server:
        text = server.post(ASK).json()["choices"][0]["message"]["content"]
        server.post({**ASK, "stream": True})
        httpx.get(f"{server.address}/nowhere%0A%1b[31m?q={SECRET}")
        with streaming(server):
            pass  # the client leaves
    lines = [line for line in log.text.splitlines() if line.startswith("selfspec.serve.gate")]
    assert len(lines) == 10
    pattern = r"POST /v1/chat/completions 200, \d+ \+ 8 tokens in \d+\.\d{3} s for 127\.0\.0\.1$"
    for line, question, answer in (lines[:3], lines[3:6]):
        assert re.search(pattern, line)
        assert SECRET in question
        assert json.loads(answer.partition("answered ")[2]) == [text]
    assert r"GET /nowhere\n\x1b[31m 404, no tokens" in lines[6]
    assert re.search(r" 200, \d+ \+ [1-9]\d* tokens in", lines[7])


def test_an_answer_cut_by_shutdown_is_logged_on_one_line(log: pytest.LogCaptureFixture) -> None:
    async def cut(*_: Any) -> None:
        raise asyncio.CancelledError

    async def cut_in_mid_stream(_scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        raise asyncio.CancelledError

    async def send(message: Any) -> None:
        sent.append(message)

    nobody: Any = None
    scope = {"type": "http", "method": "POST", "path": "/", "client": None}
    for app, status in ((cut, 503), (cut_in_mid_stream, 200)):
        sent: list[Any] = []
        asyncio.run(_Around(app, ServeOptions(), lambda _: None)(scope, nobody, send))
        start, end = sent
        body = json.loads(end["body"].decode().removeprefix("data: "))
        assert start["status"] == status
        assert body["error"]["message"].startswith("the server stops")
    lines = {line for line in log.text.splitlines() if line.startswith("selfspec")}
    assert lines == {"selfspec.serve.gate an answer was cut: the server stops, or its client left"}
    server = Server(nobody, ServeOptions(graceful_seconds=0.5, client_timeout=9.5), nobody)
    assert server.config.timeout_graceful_shutdown == 1  # rounded up
    assert server.config.timeout_keep_alive == 9.5  # equals client_timeout


HOSTILE: list[Any] = [
    ASK,
    {**ASK, "max_tokens": 30},
    {**ASK, "stream": True},
    {**ASK, "model": SECRET},
    {**ASK, SECRET: SECRET},
    {**ASK, "temperature": SECRET},
    {**ASK, "speculation": {"drafter": SECRET}},
    {**ASK, "speculation": {"drafter": f"exit:{SECRET}=1"}},
    {"messages": [{"role": SECRET, "content": SECRET}]},
    {"messages": [{"role": "user", "content": SECRET * 30_000}]},
    {"messages": SECRET},
    SECRET,
]


def test_no_text_is_logged_by_default_at_any_level(
    tiny: Speculator,
    log: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check answers, refusals, and unexpected errors that quote the prompt."""
    with running(tiny, log_requests=True) as server:
        answers = [server.post(body) for body in HOSTILE]
        assert {answer.status_code for answer in answers} == {200, 400, 404}
        assert "an answer failed" not in log.text  # a client's mistake is no server fault
        text = answers[1].json()["choices"][0]["message"]["content"]
        assert len(text) > 20
        server.post(f'{{"{SECRET}'.encode())

        def fails(*_: Any, **__: Any) -> Any:
            raise ValueError(f"this quotes {SECRET}")

        for place in (
            "selfspec.api.speculator.Speculator.call",  # where a request enters
            "selfspec.serve.app.Reply.completion",  # where it leaves
            "selfspec.serve.writer.Answer.piece",  # on the writer's thread
        ):
            with monkeypatch.context() as patch:
                patch.setattr(place, fails)
                assert server.post(ASK).status_code == 500
        with monkeypatch.context() as patch:
            patch.setattr("selfspec.serve.app.Reply._choices_of", fails)  # in mid-stream
            with pytest.raises(httpx.RemoteProtocolError):
                server.post({**ASK, "stream": True})
        headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
        assert server.post(ASK, **headers).status_code == 200
        assert server.writer.open_choices == 0
    output = log.text + "".join(capfd.readouterr())
    assert SECRET not in output
    assert "WebSocket" not in output
    assert text[:20] not in output
    assert output.count("ValueError") >= 4  # the log has the error and its place:
    for place in ("writer.py", "app.py", "in fails"):
        assert place in output


def test_no_separator_in_an_answer_ends_a_line_of_its_stream(server: Running) -> None:
    form = {"name": "a", "schema": {"const": "1\u20282\u20293\x854"}}
    shape = {"response_format": {"type": "json_schema", "json_schema": form}}
    text = server.post({**ASK, **shape, "max_tokens": 40, "stream": True}).text
    assert "\\u2028" in text
    assert all(line.startswith("data: ") for line in text.splitlines() if line)


def test_cross_site_requests_are_refused(server: Running) -> None:
    kinds = ("text/plain", "application/x-www-form-urlencoded", "")
    for name, value in (*(("Content-Type", kind) for kind in kinds), ("Content-Encoding", "gzip")):
        answer = server.post(b'{"messages": []}', **{name: value})
        assert answer.status_code == 415
        assert answer.json()["error"]["message"].startswith(name)
    answer = server.post(ASK, **{"Content-Type": "Application/JSON; charset=utf-8"})
    assert answer.status_code == 200
    port = server.address.rpartition(":")[2]
    evil = ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[", "localhost@x")
    local = ("localhost", f"LOCALHOST:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "127.8.0.1")
    for host in (*evil, *local):
        answer = httpx.get(f"{server.address}/", headers={"Host": host})
        assert answer.status_code == (200 if host in local else 403)


COUNT = "Count: one, two, three, one, two, three. Again, ten times."
BODY = {**ASK, "messages": [{"role": "user", "content": COUNT}], "max_tokens": 24}

Figures = dict[tuple[str, ...], float]


def read_metrics(server: Running) -> Figures:
    """The samples of /metrics by name and values of labels."""
    answer = httpx.get(f"{server.address}/metrics", timeout=20)
    assert answer.status_code == 200
    return {
        (sample.name.removeprefix("selfspec_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def metrics_since(server: Running, before: Figures) -> Figures:
    return {name: value - before.get(name, 0) for name, value in read_metrics(server).items()}


def asked(server: Running, **more: Any) -> Any:
    answer = server.post({**BODY, **more})
    assert answer.status_code == 200
    return answer.json()


def test_counters_are_the_sums_of_usage(small: Running) -> None:
    wishes: list[dict[str, Any]] = [{}, {"speculation": False}, {"n": 2, "temperature": 0.8}]
    before = read_metrics(small)
    answers = [asked(small, **wish) for wish in wishes]
    expected = Counter[tuple[str, ...]]()
    for answer in answers:
        usage, drafts = answer["usage"], answer["usage"]["speculation"]
        model = usage["completion_tokens"] - drafts["num_accepted_tokens"]
        expected["prompt_tokens_total",] += usage["prompt_tokens"]
        expected["generation_tokens_total",] += usage["completion_tokens"]
        expected["spec_decode_num_draft_tokens_total",] += drafts["num_draft_tokens"]
        expected["spec_decode_num_accepted_tokens_total",] += drafts["num_accepted_tokens"]
        expected["tokens_by_source_total", "model"] += model
        for position, count in enumerate(drafts["num_accepted_tokens_per_pos"]):
            expected["spec_decode_num_accepted_tokens_per_pos_total", str(position)] += count
        for source, counts in drafts["sources"].items():
            expected["tokens_by_source_total", source] += counts["accepted"]
        for choice in answer["choices"]:
            expected["request_success_total", choice["finish_reason"]] += 1
    assert expected["spec_decode_num_accepted_tokens_total",] > 0
    growth = metrics_since(small, before)
    assert {name: growth.get(name, 0) for name in expected} == expected
    rounds = sum(answer["usage"]["speculation"]["rounds"] for answer in answers)
    assert 0 < growth["spec_decode_num_drafts_total",] <= rounds


def test_times_are_recorded_once_and_a_repeated_prompt_is_a_hit(small: Running) -> None:
    asked(small, speculation=False)
    before = read_metrics(small)
    usage = asked(small, speculation=False)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    expected = {
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": usage["completion_tokens"] - 1,
        "e2e_request_latency_seconds_count": 1,
        "prefix_cache_queries_total": usage["prompt_tokens"],
        "prefix_cache_hits_total": cached,
    }
    growth = metrics_since(small, before)
    assert {name: growth[name,] for name in expected} == expected


def test_gauges_rise_and_return_to_zero(tiny: Speculator) -> None:
    with running(tiny, concurrency=1) as narrow:
        with streaming(narrow, {**LONG, "n": 2}):
            busy = read_metrics(narrow)
        assert busy["num_requests_running",] == 1
        assert busy["num_requests_waiting",] == 1
        assert 0 < busy["kv_memory_bytes",] <= busy["kv_memory_limit_bytes",]
        wait_until(narrow.idle)
        idle = read_metrics(narrow)
        for name in ("num_requests_running", "num_requests_waiting", "kv_memory_bytes"):
            assert idle[name,] == 0
        assert idle["kv_memory_promised_bytes",] == 0
        assert idle["request_cancelled_total",] == 2


# --- `selfspec serve` as a process


def test_an_unavailable_address_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])
        assert main(["serve", "--model", "nowhere", "--port", port]) == 2
    assert re.search(f"port {port}: .* Give another --port", capsys.readouterr().err)
    monkeypatch.setenv(VARIABLE, "key")
    assert main(["serve", "--model", "nowhere", "--host", "a" * 70]) == 2
    assert "a, port 8000: " in capsys.readouterr().err


def test_serve_prints_its_address_and_stops_with_code_0(folder: Path) -> None:
    """Stop one copy with Ctrl-C; test_replicas stops several with SIGTERM."""
    flags = [f"--model={folder}", "--heads=none", "--no-speculate", "--port=0"]
    command = [sys.executable, "-m", "selfspec", "serve", *flags]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            banner = next(line for line in process.stderr if " at http" in line)
            host, port = banner.split(" at http://")[1].split("/v1")[0].split(":")
            body = b'{"prompt": "One, two", "max_tokens": 9, "stream": true}'
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
                "Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n"
            )
            with socket.create_connection((host, int(port)), timeout=60) as client:
                client.sendall(head.encode())
                assert b" 100 " in client.recv(1000)  # the request runs until it gets its body
                process.send_signal(signal.SIGINT)
                line = "completing 1 request, for at most 30 seconds. Ctrl-C again stops at once"
                assert line in process.stderr.readline()
                client.sendall(body)
                answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
            assert b"data: [DONE]" in answer
            assert process.wait(40) == 0
        finally:
            process.kill()


# docs/serving.md matches the code

GUIDE = Path(__file__).parents[2] / "docs" / "serving.md"
TEXT = GUIDE.read_text(encoding="utf-8")
DOCKERFILE = (GUIDE.parents[1] / "Dockerfile").read_text(encoding="utf-8")


def test_the_guide_names_only_existing_flags() -> None:
    known = {flag.long_name for flag in SERVING} | {"--config", "--help-all"}
    text = re.sub(r"^docker (build|run).*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"<!--.*?-->", "", text)))
    assert flags <= known
    assert len(flags) > 10


def test_the_guide_has_the_names_and_statuses_that_clients_need() -> None:
    for name in (VARIABLE, COPY, *OPEN):
        assert name in TEXT
    for status in (400, 401, 404, 405, 413, 429, 500, 503):
        assert f"\n| {status} | " in TEXT


def test_the_unit_and_the_image_fit_the_options_and_the_extras() -> None:
    (stop_s,) = re.findall(r"TimeoutStopSec=(\d+)", TEXT)
    (extras,) = re.findall(r"\.whl\)\[([a-z,]+)\]", DOCKERFILE)
    assert float(stop_s) > ServeOptions().graceful_seconds
    project = (GUIDE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))
    port = ServeOptions().port
    assert f"EXPOSE {port}\n" in DOCKERFILE
    assert any(f"127.0.0.1:{port}{path}'" in DOCKERFILE for path in OPEN)
    *_, user = DOCKERFILE.partition("\nUSER ")
    assert not user.startswith("root")
    assert "RUN" not in user
