"""`selfspec serve` as a process: what it refuses, how it stops, what docs/serving.md says of it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from selfspec.cli.generate import SERVING
from selfspec.cli.main import main
from selfspec.serve.gate import COPY, OPEN
from selfspec.serve.options import VARIABLE, ServeOptions


def test_an_address_that_cannot_be_had_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", "nowhere", "--port", port]) == 2
    assert re.search(f"port {port}: .* Give another --port", capsys.readouterr().err)
    monkeypatch.setenv(VARIABLE, "key")
    assert main(["serve", "--model", "nowhere", "--host", "a" * 70]) == 2
    assert "a, port 8000: " in capsys.readouterr().err


def test_it_says_where_it_is_and_stops_with_code_0(folder: Path) -> None:
    """By Ctrl-C; several copies are stopped with SIGTERM, in test_replicas."""
    flags = [f"--model={folder}", "--heads=none", "--no-speculate", "--port=0"]
    command = [sys.executable, "-m", "selfspec", "serve", *flags]
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


# docs/serving.md says what is true

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
TEXT = PAGE.read_text(encoding="utf-8")
DOCKERFILE = (PAGE.parents[1] / "Dockerfile").read_text(encoding="utf-8")


def test_each_flag_that_is_named_exists() -> None:
    known = {flag.long_name for flag in SERVING} | {"--config", "--help-all"}
    ours = re.sub(r"^docker (build|run).*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"<!--.*?-->", "", ours)))
    assert named <= known
    assert len(named) > 10


def test_names_and_statuses_that_clients_and_people_need_are_there() -> None:
    for name in (VARIABLE, COPY, *OPEN):
        assert name in TEXT
    for status in (400, 401, 404, 405, 413, 429, 500, 503):
        assert f"\n| {status} | " in TEXT


def test_the_unit_and_the_image_fit_the_options_and_the_extras() -> None:
    (stop_s,) = re.findall(r"TimeoutStopSec=(\d+)", TEXT)
    (extras,) = re.findall(r"\.whl\)\[([a-z,]+)\]", DOCKERFILE)
    assert float(stop_s) > ServeOptions().graceful_seconds
    project = (PAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))
    port = ServeOptions().port
    assert f"EXPOSE {port}\n" in DOCKERFILE
    assert any(f"127.0.0.1:{port}{path}'" in DOCKERFILE for path in OPEN)
    *_, user = DOCKERFILE.partition("\nUSER ")
    assert not user.startswith("root")
    assert "RUN" not in user
