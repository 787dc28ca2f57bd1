"""LangChain's adapter for OpenAI, as it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.live import Running

ASK = "Name two planets and one river."


@pytest.fixture
def chat(server: Running) -> Any:
    module = pytest.importorskip("langchain_openai")
    return module.ChatOpenAI(
        base_url=f"{server.address}/v1",
        api_key="none",
        model=server.speculator.label,
        temperature=0,
        max_tokens=20,
        max_retries=0,
    )


def test_a_chat_is_that_of_generate(chat: Any, server: Running) -> None:
    expected = server.speculator.generate(ASK, max_new_tokens=20, do_sample=False)
    answer = chat.invoke(ASK)
    assert answer.content == expected.text
    assert answer.usage_metadata["output_tokens"] == len(expected.token_ids)
    again = chat.invoke([("human", ASK), answer, ("human", "And a mountain?")])
    assert again.content
    assert again.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


def test_so_is_a_stream(chat: Any, server: Running) -> None:
    expected = server.speculator.generate(ASK, max_new_tokens=20, do_sample=False)
    pieces = [piece.content for piece in chat.stream(ASK)]
    assert "".join(pieces) == expected.text
    assert sum(bool(piece) for piece in pieces) > 1
