"""No word of a request reaches the file system."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from selfspec.api.speculator import Speculator
from tests.serve.live import CHAT, TEXT, running

PATHS = ("../../etc/passwd-xyzzy", "/etc/passwd-xyzzy", "xyzzy\0")
FIELDS = (
    *("model", "speculation.drafter", "speculation.controller", "messages", "prompt", "stop"),
    *("user", "response_format", "tools", "logit_bias", "metadata.xyzzy"),
)


def bodies(path: str) -> Iterator[tuple[str, Any]]:
    for field in FIELDS:
        for shape in (path, f"ngram:path={path}", {"type": path}, [path]):
            outer, _, inner = field.partition(".")
            body = {"messages": [{"role": "user", "content": path}], "max_tokens": 2}
            yield CHAT, {**body, outer: {inner: shape} if inner else shape}
            yield TEXT, {"prompt": path, "max_tokens": 2, outer: shape}


def test_no_word_of_a_request_reaches_the_file_system(tiny: Speculator) -> None:
    seen, watching = list[str](), threading.Event()

    def watch(event: str, arguments: Any) -> None:
        if watching.is_set() and "xyzzy" in (line := f"{event} {arguments!r}"):
            seen.append(line)

    sys.addaudithook(watch)  # for good; it does nothing behind this test
    statuses = set()
    with running(tiny) as server, httpx.Client(base_url=server.address, timeout=60) as client:
        watching.set()
        for path in PATHS:
            for route, body in bodies(path):
                statuses.add(client.post(route, json=body).status_code)
            statuses.add(client.get(f"/v1/models/{quote(path)}").status_code)
        found = [*seen]
        with pytest.raises(OSError, match="xyzzy"):
            Path("xyzzy").read_text()  # that this is seen proves that the rest would be
        watching.clear()
    assert {200, 400, 404} <= statuses
    assert max(statuses) < 500
    assert found == []
    assert seen[0].startswith("open ")
