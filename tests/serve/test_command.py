"""`selfspec serve` as a process: what it refuses before it loads, and how it stops."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from selfspec.cli.main import main
from selfspec.serve.options import VARIABLE


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--host", "0.0.0.0"], "which others can reach. Set SELFSPEC_API_KEY"),
        (["--host", "no.such.host.example"], "which others can reach"),
        (["--cors-origin", "*"], "every web page that"),
        (["--cors-origin", "https://a.example", "--cors-origin", "*"], "every web page that"),
        (["--port", "70000"], "port is 70000, expected at most 65535"),
        (["--concurrency", "0"], "concurrency is 0, expected at least 1"),
        (["--timeout", "0"], "timeout is 0.0, expected more than 0"),
        (["--client-timeout", "0"], "client_timeout is 0.0, expected more than 0"),
        (["--kv-memory", "much"], "expected a size like 500MB or 2GB"),
        (["--api-key-file", "nowhere"], "cannot read nowhere"),
        (["--api-key-file", "empty"], "empty holds no API key"),
        (["--api-key-file", "spaced"], "characters that no header can carry"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(
    flags: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    Path("empty").write_text("# none\n\n", encoding="utf-8")
    Path("spaced").write_text("two words\n", encoding="utf-8")
    assert main(["serve", "--model", "nowhere", *flags]) == 2
    assert reason in capsys.readouterr().err


def test_an_address_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", "nowhere", "--port", port]) == 2
    assert f"cannot listen at 127.0.0.1, port {port}" in capsys.readouterr().err


def test_it_says_where_it_is_and_stops_with_code_0() -> None:
    """By Ctrl-C; several copies are stopped with SIGTERM, in test_replicas."""
    command = [sys.executable, "-m", "selfspec", "serve", "--port", "0", "--no-speculate"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if " at http" in line)
        address = said.split(" at ")[1].split("/v1")[0]
        body = {"prompt": "One, two, three,", "max_tokens": 120, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            assert [line for line in lines if line][-1] == "data: [DONE]"  # it is finished
        assert process.wait(40) == 0
