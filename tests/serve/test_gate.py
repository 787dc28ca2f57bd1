"""Other origins, and what the log says: only what was asked for, and never a text unasked."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from selfspec.api.speculator import Speculator
from selfspec.errors import InvalidOption
from selfspec.serve.options import ServeOptions
from tests.serve.live import JSON, Running, running

PAGE = "https://page.example"
SECRET = "xyzzy"
ASK = {
    "messages": [{"role": "user", "content": f"Say {SECRET}."}],
    "max_tokens": 8,
    "temperature": 0,
}


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """All of it, at its most talkative; without a handler that a command's test left."""
    monkeypatch.setattr(logging.getLogger("selfspec"), "handlers", [])
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "selfspec"):
        yield caplog


def written(log: pytest.LogCaptureFixture) -> str:
    """What a log file would hold, tracebacks included."""
    shape = logging.Formatter("%(name)s %(message)s")
    return "\n".join(shape.format(record) for record in log.records)


def preflight(server: Running, origin: str = PAGE) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return httpx.options(f"{server.address}/v1/chat/completions", headers=headers)


def allowed(answer: httpx.Response) -> dict[str, str]:
    return {k: v for k, v in answer.headers.items() if k.startswith("access-control")}


def post(server: Running, body: Any = ASK, **headers: str) -> httpx.Response:
    url = f"{server.address}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60)


def test_other_origins_are_told_nothing_by_default(server: Running) -> None:
    assert preflight(server).status_code == 405
    for answer in (preflight(server), post(server, Origin=PAGE)):
        assert not allowed(answer)


def test_an_origin_that_is_named_may_ask_and_needs_a_key(default: Speculator) -> None:
    with running(default, keys=("key",), cors_origin=[PAGE]) as server:
        answer = preflight(server)
        assert answer.status_code == 200
        assert allowed(answer)["access-control-allow-origin"] == PAGE
        assert "authorization" in allowed(answer)["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in allowed(answer)
        refused = post(server, Origin=PAGE)
        assert refused.status_code == 401
        assert allowed(refused)["access-control-allow-origin"] == PAGE  # so that the page sees it
        assert post(server, Origin=PAGE, Authorization="Bearer key").status_code == 200
        assert preflight(server, "https://other.example").status_code == 400
        other = post(server, Origin="https://other.example", Authorization="Bearer key")
        assert "access-control-allow-origin" not in allowed(other)


@pytest.mark.parametrize("origin", ["page.example", "https://page.example/", "https://", ""])
def test_an_origin_has_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(InvalidOption, match="expected scheme and host"):
        ServeOptions(cors_origin=[origin])


def test_a_line_per_request_where_that_is_asked_for(
    default: Speculator, log: pytest.LogCaptureFixture
) -> None:
    with running(default, log_requests=True) as server:
        post(server)
        httpx.get(f"{server.address}/nowhere%0A%1b[31m?q={SECRET}")
    lines = [line for line in written(log).splitlines() if line.startswith("selfspec.serve.gate")]
    assert len(lines) == 2
    pattern = r"POST /v1/chat/completions 200, \d+ \+ 8 tokens in \d+\.\d{3} s for 127\.0\.0\.1$"
    assert re.search(pattern, lines[0])
    assert r"GET /nowhere\n\x1b[31m 404, no tokens" in lines[1]


def test_no_line_where_it_is_not(server: Running, log: pytest.LogCaptureFixture) -> None:
    post(server)
    assert "POST" not in "".join(
        record.getMessage() for record in log.records if record.name.startswith("selfspec")
    )


@pytest.mark.parametrize("stream", [False, True])
def test_texts_are_logged_where_that_is_asked_for(
    default: Speculator, log: pytest.LogCaptureFixture, *, stream: bool
) -> None:
    with running(default, log_prompts=True) as server:
        answer = post(server, {**ASK, "stream": stream})
    asked, answered = (
        line for line in written(log).splitlines() if line.startswith("selfspec.serve.gate")
    )
    assert SECRET in asked
    if not stream:
        assert answer.json()["choices"][0]["message"]["content"][:8] in answered
    assert answered.count('"') == 2


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


def test_no_text_is_logged_unasked_at_any_level(
    default: Speculator,
    log: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers, refusals, and errors that nobody foresaw and that quote the prompt."""
    with running(default, log_requests=True) as server:
        answers = [post(server, body) for body in HOSTILE]
        assert {answer.status_code for answer in answers} == {200, 400, 404}
        said = answers[1].json()["choices"][0]["message"]["content"]
        assert len(said) > 20
        httpx.post(f"{server.address}/v1/chat/completions", content=f'{{"{SECRET}', headers=JSON)

        def fails(*_: Any, **__: Any) -> Any:
            raise ValueError(f"this quotes {SECRET}")

        with monkeypatch.context() as patch:
            patch.setattr(Speculator, "call", fails)  # where a request enters
            assert post(server).status_code == 500
        with monkeypatch.context() as patch:
            patch.setattr("selfspec.serve.answers.Reply.whole", fails)  # where it leaves
            assert post(server).status_code == 500
        with monkeypatch.context() as patch:
            patch.setattr("selfspec.serve.answers.Reply.last", fails)  # in mid-stream
            more = {"stream": True, "stream_options": {"include_usage": True}}
            with pytest.raises(httpx.RemoteProtocolError):
                post(server, {**ASK, **more})
        with monkeypatch.context() as patch:
            patch.setattr("selfspec.serve.texts.Answer.piece", fails)  # on the writer's thread
            assert post(server).status_code == 500
        assert post(server).status_code == 200
        assert server.writer.open == 0
    everything = written(log) + "".join(capfd.readouterr())
    assert SECRET not in everything
    assert said[:20] not in everything
    assert everything.count("ValueError") >= 4  # it does say what went wrong, and where:
    for place in ("writer.py", "app.py", "in fails"):
        assert place in everything


def test_a_page_elsewhere_cannot_ask_in_the_name_of_who_reads_it(
    server: Running, default: Speculator
) -> None:
    url, body = f"{server.address}/v1/chat/completions", b'{"messages": []}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = httpx.post(url, content=body, headers={"Content-Type": kind})
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]["message"]
    assert post(server, **{"Content-Type": "Application/JSON; charset=utf-8"}).status_code == 200
    port = server.address.rpartition(":")[2]
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "[",
        "localhost@x",
    ):
        assert httpx.get(f"{server.address}/", headers={"Host": host}).status_code == 403
    for host in (
        "localhost",
        f"LOCALHOST:{port}",
        f"127.0.0.1:{port}",
        f"[::1]:{port}",
        "127.8.0.1",
    ):
        assert httpx.get(f"{server.address}/", headers={"Host": host}).status_code == 200
    with running(default, keys=("one",)) as guarded:
        assert httpx.get(f"{guarded.address}/", headers={"Host": "a.example"}).status_code == 200
