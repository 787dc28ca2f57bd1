"""Hostile bodies and bytes: each gets a status below 500, and the next request is served.

A few examples here; 3,000 of each kind with `--hypothesis-profile=hostile`.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from selfspec.api.speculator import Speculator
from selfspec.options import CONTROLLERS, DRAFTERS
from tests.serve import live
from tests.serve.live import CHAT, GOOD, HTTP, TEXT, Level, Running, answers, request, statuses

LONG = b"X-Long: @"  # stands for a header that is too long, which would make a failure unreadable
slowly = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 2**64, 1e308, -0.0, 10**400]),
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(categories=["Cc", "Cs", "Cf", "Co"]), max_size=8),
    st.sampled_from(["", "\0", "\ud800", "../../etc/passwd", "{{7*7}}", "%s", "auto", "a" * 5000]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXTS | VALUES},
        optional={"name": TEXTS | VALUES, "tool_calls": VALUES},
    ),
    max_size=4,
)
SETTINGS = {
    group: st.builds(
        "{}={}".format,
        st.sampled_from([f"{kind}:{one.name}" for kind in kinds for one in fields(kinds[kind])]),
        st.sampled_from((0, 1, -1, 17, 65, 10**9, 10**30, "1e400", "nan", "none", "9" * 99)),
    )
    for group, kinds in (("drafter", DRAFTERS), ("controller", CONTROLLERS))
}
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    **{"model": st.none(), "n": st.integers(1, 4), "max_tokens": st.integers(1, 4)},
    "stop": TEXTS | st.lists(TEXTS, max_size=5),
    "seed": st.integers(-(2**63), 2**64 - 1),
    **{"temperature": st.floats(0, 2), "top_p": st.floats(0, 1), "stream": st.booleans()},
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "speculation": st.booleans()
    | st.fixed_dictionaries({}, optional={"never_slower": st.booleans(), **SETTINGS}),
    "logprobs": st.booleans() | st.integers(-1, 30),
    **{"top_logprobs": st.integers(-1, 30), "tool_choice": VALUES},
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), st.floats(-3, 3)),
    "logit_bias": st.dictionaries(st.sampled_from(["0", "5", "-1", "999999", "x"]), NUMBERS),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema"])},
        optional={"json_schema": VALUES},
    ),
    "tools": st.lists(VALUES, max_size=2),
}
OTHERS = [*LIKELY, "user", "metadata", "top_k", "min_p", "suffix", "echo", "best_of", "no_such"]


@st.composite
def bodies(draw: st.DrawFn, chat: bool) -> bytes:
    """The body of a request, plausible or damaged."""
    if chat:
        body: Any = {"messages": draw(MESSAGES | st.just(GOOD["messages"]))}
    else:
        ids = st.lists(st.integers(-1, 60_000), max_size=6)
        body = {"prompt": draw(TEXTS | ids | st.lists(ids | TEXTS, max_size=3))}
    for name in draw(st.lists(st.sampled_from([*LIKELY]), max_size=5, unique=True)):
        body[name] = draw(LIKELY[name])
    for name in draw(st.lists(st.sampled_from(OTHERS) | TEXTS, max_size=2)):
        body[name] = draw(VALUES)
    fault = draw(st.sampled_from(["as it is", "as it is", "deep", "twice", "cut", "long", "other"]))
    event(fault)
    if fault == "other":
        body = draw(VALUES)
    elif fault == "deep":
        body["metadata"] = {}
    elif fault == "long":
        body[draw(st.sampled_from(["stop", "messages", "prompt", "tools"]))] = ["a"] * 20_000
    text = json.dumps(body)
    if fault == "deep":
        depth = draw(st.sampled_from([70, 5_000, 200_000]))
        text = text.replace('"metadata": {}', f'"metadata": {"[" * depth}{"]" * depth}')
    elif fault == "twice":
        text = text.replace("{", '{"n": 1, "messages": 3, "n": 2, ', 1)
    elif fault == "cut":
        place = draw(st.integers(0, len(text)))
        text = text[:place] + draw(st.sampled_from(["", "\0", "\ufeff", "\udcff", "]"]))
    return text.encode("utf-8", "surrogatepass")


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """The bytes of one connection: successive requests, some of them malformed."""
    stream = b""
    for _ in range(draw(st.integers(1, 3))):
        raw = draw(st.sampled_from([request(GOOD), request(b""), b"GET /health HTTP/1.1\r\n\r\n"]))
        head, _, rest = raw.partition(b"\r\n")
        line = st.sampled_from(
            [head, b"GET /%ff%00/../.. HTTP/1.1", b"PUT * HTTP/1.1", b"GET / HTTP/9.9", b"\x16\x03"]
        )
        header = st.sampled_from(
            [
                *(b"Content-Length: %s" % size for size in (b"5", b"-1", b"9" * 20)),
                *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked"),
                *(b"Connection: upgrade\r\nUpgrade: websocket", b"Expect: 100-continue"),
                *(b"Host: \xff\x00", b": nameless", LONG, b" folded"),
            ]
        )
        headers = draw(st.lists(header | st.binary(max_size=12), max_size=2))
        stream += b"\r\n".join([draw(line), *headers, rest])
    place = draw(st.integers(0, len(stream)))
    return draw(
        st.sampled_from([stream, stream[:place], stream[:place] + b"\0\xff\r\n" + stream[place:]])
        | st.binary(max_size=200)
    )


@pytest.fixture(scope="module")
def target(tiny: Speculator) -> Iterator[Running]:
    """A server with short time limits and a small limit on bodies."""
    limits: Any = {"timeout": 1.0, "client_timeout": 0.5, "max_body_mb": 0.5}
    with live.running(tiny, max_tokens=4, **limits) as instance:
        answers(instance)
        yield instance


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_any_body_gets_an_answer(target: Running, path: str) -> None:
    level = Level(target)

    @slowly
    @given(bodies(chat=path == CHAT))
    def check(body: bytes) -> None:
        answer = target.post(body, path)
        event(f"status {answer.status_code}")
        assert 200 <= answer.status_code < 500
        if answer.status_code == 200:
            assert "error" not in answer.text[:10]
        else:
            message = answer.json()["error"]["message"]
            assert message
            assert "\n" not in message
        answers(target)
        level.look()

    check()
    level.returns()


def test_any_bytes_end_the_connection_and_others_are_served(target: Running) -> None:
    level = Level(target)

    @slowly
    @given(streams(), st.sampled_from(["half", "wait", "gone"]))
    def check(sent: bytes, then: str) -> None:
        with closing(live.connected(target)) as client:
            try:
                client.sendall(sent.replace(LONG, LONG * 10_000))
                if then == "half":
                    client.shutdown(socket.SHUT_WR)
            except OSError:  # not only ConnectionError: the socket may no longer be connected
                event("cut off while it sends")
            if then != "gone":
                answer = live.all_of(client)
                event(str(statuses(answer)))
                assert all(100 <= status < 500 for status in statuses(answer))
        answers(target)
        level.look()

    check()
    level.returns()


PATHS = ("../../etc/passwd-xyzzy", "/etc/passwd-xyzzy", "xyzzy\0")
FIELDS = (
    *("model", "speculation.drafter", "speculation.controller", "messages", "prompt", "stop"),
    *("user", "response_format", "tools", "logit_bias", "metadata.xyzzy"),
)


def bodies_with(path: str) -> Iterator[tuple[str, Any]]:
    for field in FIELDS:
        for shape in (path, f"ngram:path={path}", {"type": path}, [path]):
            outer, _, inner = field.partition(".")
            body = {"messages": [{"role": "user", "content": path}], "max_tokens": 2}
            yield CHAT, {**body, outer: {inner: shape} if inner else shape}
            yield TEXT, {"prompt": path, "max_tokens": 2, outer: shape}


def test_no_text_of_a_request_reaches_the_file_system(small: Running) -> None:
    events, watching = list[str](), threading.Event()

    def watch(event: str, arguments: Any) -> None:
        if watching.is_set() and "xyzzy" in (line := f"{event} {arguments!r}"):
            events.append(line)

    sys.addaudithook(watch)  # cannot be removed; it does nothing after this test
    watching.set()
    statuses = set()
    for path in PATHS:
        statuses |= {small.post(body, route).status_code for route, body in bodies_with(path)}
        statuses.add(HTTP.get(f"{small.address}/v1/models/{quote(path)}").status_code)
    findings = [*events]
    with pytest.raises(OSError, match="xyzzy"):
        Path("xyzzy").read_text()  # proves that the hook works
    watching.clear()
    assert {200, 400, 404} <= statuses
    assert max(statuses) < 500
    assert findings == []
    assert events[0].startswith("open ")
