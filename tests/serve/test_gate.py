"""Other origins, and what the log says: only what was asked for, and never a text unasked."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from selfspec.api.speculator import Speculator
from selfspec.errors import InvalidOption
from selfspec.serve.options import ServeOptions
from tests.serve.live import Running, running

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


def test_other_origins_are_told_nothing_by_default(server: Running) -> None:
    assert preflight(server).status_code == 405
    for answer in (preflight(server), server.post(ASK, Origin=PAGE)):
        assert not allowed(answer)


def test_an_origin_that_is_named_may_ask_and_needs_a_key(tiny: Speculator) -> None:
    with running(tiny, keys=("key",), cors_origin=[PAGE]) as server:
        answer = preflight(server)
        assert answer.status_code == 200
        assert allowed(answer)["access-control-allow-origin"] == PAGE
        assert "authorization" in allowed(answer)["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in allowed(answer)
        refused = server.post(ASK, Origin=PAGE)
        assert refused.status_code == 401
        assert allowed(refused)["access-control-allow-origin"] == PAGE  # so that the page sees it
        assert server.post(ASK, Origin=PAGE, Authorization="Bearer key").status_code == 200
        assert preflight(server, "https://other.example").status_code == 400
        other = server.post(ASK, Origin="https://other.example", Authorization="Bearer key")
        assert "access-control-allow-origin" not in allowed(other)


@pytest.mark.parametrize("origin", ["page.example", "https://page.example/", "https://", ""])
def test_an_origin_has_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(InvalidOption, match="expected scheme and host"):
        ServeOptions(cors_origin=[origin])


def test_lines_and_texts_are_logged_where_that_is_asked_for(
    tiny: Speculator, log: pytest.LogCaptureFixture
) -> None:
    with running(tiny, log_requests=True, log_prompts=True) as server:
        text = server.post(ASK).json()["choices"][0]["message"]["content"]
        server.post({**ASK, "stream": True})
        httpx.get(f"{server.address}/nowhere%0A%1b[31m?q={SECRET}")
    lines = [line for line in written(log).splitlines() if line.startswith("selfspec.serve.gate")]
    assert len(lines) == 7
    pattern = r"POST /v1/chat/completions 200, \d+ \+ 8 tokens in \d+\.\d{3} s for 127\.0\.0\.1$"
    for line, asked, answered in (lines[:3], lines[3:6]):
        assert re.search(pattern, line)
        assert SECRET in asked
        assert json.loads(answered.partition("answered ")[2]) == [text]
    assert r"GET /nowhere\n\x1b[31m 404, no tokens" in lines[6]


def test_no_line_where_it_is_not(server: Running, log: pytest.LogCaptureFixture) -> None:
    server.post(ASK)
    assert "POST" not in "".join(
        record.getMessage() for record in log.records if record.name.startswith("selfspec")
    )


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
    tiny: Speculator,
    log: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers, refusals, and errors that nobody foresaw and that quote the prompt."""
    with running(tiny, log_requests=True) as server:
        answers = [server.post(body) for body in HOSTILE]
        assert {answer.status_code for answer in answers} == {200, 400, 404}
        said = answers[1].json()["choices"][0]["message"]["content"]
        assert len(said) > 20
        server.post(f'{{"{SECRET}'.encode())

        def fails(*_: Any, **__: Any) -> Any:
            raise ValueError(f"this quotes {SECRET}")

        for place in (
            "selfspec.api.speculator.Speculator.call",  # where a request enters
            "selfspec.serve.answers.Reply.whole",  # where it leaves
            "selfspec.serve.pieces.Answer.piece",  # on the writer's thread
        ):
            with monkeypatch.context() as patch:
                patch.setattr(place, fails)
                assert server.post(ASK).status_code == 500
        with monkeypatch.context() as patch:
            patch.setattr("selfspec.serve.answers.Reply._told", fails)  # in mid-stream
            with pytest.raises(httpx.RemoteProtocolError):
                server.post({**ASK, "stream": True})
        assert server.post(ASK).status_code == 200
        assert server.writer.open == 0
    everything = written(log) + "".join(capfd.readouterr())
    assert SECRET not in everything
    assert said[:20] not in everything
    assert everything.count("ValueError") >= 4  # it does say what went wrong, and where:
    for place in ("writer.py", "app.py", "in fails"):
        assert place in everything


def test_a_page_elsewhere_cannot_ask_in_the_name_of_who_reads_it(
    server: Running, tiny: Speculator
) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = server.post(b'{"messages": []}', **{"Content-Type": kind})
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]["message"]
    answer = server.post(ASK, **{"Content-Type": "Application/JSON; charset=utf-8"})
    assert answer.status_code == 200
    port = server.address.rpartition(":")[2]
    evil = ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[", "localhost@x")
    here = ("localhost", f"LOCALHOST:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "127.8.0.1")
    for host in (*evil, *here):
        answer = httpx.get(f"{server.address}/", headers={"Host": host})
        assert answer.status_code == (200 if host in here else 403)
    with running(tiny, keys=("one",)) as guarded:
        assert httpx.get(f"{guarded.address}/", headers={"Host": "a.example"}).status_code == 200
