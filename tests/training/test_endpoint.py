"""A server of OpenAI's protocol answers in the model's place; its text becomes the model's ids."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from selfspec.errors import SelfspecError
from selfspec.training.endpoint import RemoteAuthor
from selfspec.training.recipe import Passages
from selfspec.training.selfgen import Counts, Written
from tests.authors import RECIPE, make_author, recipe_of


class Server(BaseHTTPRequestHandler):
    """Says the last user turn again, and "b"; a turn of more than three words is cut."""

    asked: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body | {"path": self.path, "key": self.headers["Authorization"]})
        said = body["messages"][-1]["content"]
        reason = "length" if len(said.split()) > 3 else "stop"
        message = {"role": "assistant", "content": f"{said} b"}
        answer = {"choices": [{"index": 0, "message": message, "finish_reason": reason}]}
        self._send(answer)

    def do_GET(self) -> None:
        self._send({"data": [{"id": "its-model"}]} if self.path == "/v1/models" else [])

    def _send(self, answer: Any) -> None:
        sent = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    Server.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def remote(url: str, **options: Any) -> RemoteAuthor:
    own = make_author(batch_size=24, **options)
    return RemoteAuthor(url, own.backbone, own.turns.tokenizer, own.options, lambda tokens: None)


def test_answers_are_the_servers_as_the_models_ids(url: str, tmp_path: Path) -> None:
    author = remote(url, system="c", greedy_share=0.5)
    prompts = author.prompts(recipe_of(RECIPE, tmp_path), Passages())
    assert prompts.left_out == ["free", "pair"]
    rows = Written(author, prompts).batch(0, 0, Counts())
    answered = [row for row in rows if row["family"] != "read"]
    assert len(answered) > 3
    for row in answered:
        system, question, answer = row["messages"]
        assert system == {"role": "system", "content": "c"}
        assert answer["content"].split() == [*question["content"].split(), "b"]
        ended = len(question["content"].split()) <= 3
        assert (row["input_ids"][-1] == author.turns.tokenizer.eos_token_id) is ended
    assert {body["path"] for body in Server.asked} == {"/v1/chat/completions"}
    assert {body["model"] for body in Server.asked} == {"its-model"}
    assert {body["key"] for body in Server.asked} == {"Bearer secret"}
    assert {body["temperature"] for body in Server.asked} == {0.0, author.options.temperature}
    assert {body["max_tokens"] for body in Server.asked} == {author.options.max_new_tokens}


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(SelfspecError, match=r"http://127\.0\.0\.1:9/v1 did not answer") as caught:
        remote("http://127.0.0.1:9/v1/")
    assert "\n" not in str(caught.value)


def test_a_server_of_something_else_is_one_line(url: str) -> None:
    with pytest.raises(SelfspecError, match=r"v1/models is not as OpenAI's: .*TypeError"):
        remote(f"{url}/else")
