"""A fault of the server ends the answers of its round, with an error; nobody waits for ever."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from selfspec.api.speculator import Speculator
from selfspec.decoding.engine import Engine
from tests.serve.live import running
from tests.serve.raw import CHAT, GOOD, answers, wait_until


@pytest.mark.parametrize("stream", [False, True])
def test_a_round_that_fails_is_a_status_500(
    default: Speculator, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with running(default) as broken:
        answers(broken)

        def fail(_: Engine) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "_do_next", fail)
            body: dict[str, Any] = {**GOOD, "n": 3, "stream": stream}
            answer = httpx.post(f"{broken.address}{CHAT}", json=body, timeout=30)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        wait_until(lambda: broken.writer.open == 0)
        assert b'request_refused_total{status="500"} 1.0' in broken.writer.metrics.text()
        answers(broken)
