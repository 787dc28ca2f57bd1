"""Careless and hostile prompts through the Python API: each gives one line, never a raw error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from selfspec.api.speculator import Speculator, wrap
from selfspec.errors import InvalidOption, InvalidPrompt
from tests.bad_calls import IDS, VOCAB, check, small_model, speaking
from tests.models import addressless


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


@pytest.fixture(scope="module")
def speculator(model: Any) -> Speculator:
    return speaking(model)


class Strange:
    """Its repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


PROMPTS: dict[str, Any] = {
    "none": None,
    "number": 5,
    "float": 1.5,
    "bool": True,
    "bytes": b"hello",
    "dict": {"input_ids": IDS},
    "set": {1, 2},
    "generator": (token for token in IDS),
    "function": len,
    "object": Strange(),
    "path": Path("prompt.txt"),
    "numpy floats": np.array([1.0]),
    "empty text": "",
    "blanks": " \n\t ",
    "half a character": "\ud800",
    "half a character within": "hello \udfff there",
    "empty list": [],
    "empty tuple": (),
    "floats": [1.0, 2.0],
    "bools": [True, False],
    "text and ids": ["hello", 5],
    "ids and text": [5, "hello"],
    "ids and none": [5, None],
    "ids and messages": [5, {"role": "user", "content": "hi"}],
    "messages and ids": [*user("hi"), 5],
    "several texts": ["hello", "there"],
    "lists of ids": [[1, 2], [3, 4]],
    "ragged lists": [[1, 2], [3]],
    "nested lists": [[[1]]],
    "tensors in a list": [torch.tensor(1)],
    "nones": [None],
    "negative id": [-1, 5],
    "id beyond the vocabulary": [5, VOCAB],
    "id beyond 32 bits": [2**40],
    "id beyond 64 bits": [2**64],
    "id below 64 bits": [-(2**70)],
    "float tensor": torch.tensor([1.0, 2.0]),
    "half tensor": torch.tensor([1.0]).half(),
    "complex tensor": torch.tensor([1j]),
    "bool tensor": torch.tensor([True, False]),
    "tensor without dimensions": torch.tensor(5),
    "tensor of three dimensions": torch.ones(1, 2, 3, dtype=torch.long),
    "empty tensor": torch.empty(0, dtype=torch.long),
    "tensor of empty rows": torch.empty(2, 0, dtype=torch.long),
    "tensor of no rows": torch.empty(0, 3, dtype=torch.long),
    "negative tensor": torch.tensor([[-5]]),
    "tensor beyond the vocabulary": torch.tensor([[VOCAB]]),
    "meta tensor": torch.empty(1, 3, dtype=torch.long, device="meta"),
    "sparse tensor": torch.tensor([[1, 0, 2]]).to_sparse(),
    "several rows": torch.tensor([IDS, IDS]),
    "message without role": [{"content": "hi"}],
    "message without content": [{"role": "user"}],
    "empty message": [{}],
    "role of a number": [{"role": 3, "content": "hi"}],
    "content of a number": user(3),
    "content of none": user(None),
    "content of parts": user([{"type": "text", "text": "hi"}]),
    "content of bytes": user(b"hi"),
    "content with half a character": user("\ud800"),
    "message and none": [*user("hi"), None],
    "message and text": [*user("hi"), "hello"],
    "message and list": [*user("hi"), ["user", "hello"]],
    "a role the template refuses": [{"role": "robot", "content": "hi"}],
}


def test_there_are_enough_of_them() -> None:
    assert len(PROMPTS) > 50


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("call", ["generate", "stream", "session"])
def test_what_is_no_prompt_is_refused_in_one_line(
    name: str, call: str, speculator: Speculator
) -> None:
    start: dict[str, Callable[..., Any]] = {
        "generate": speculator.generate,
        "stream": speculator.stream,
        "session": speculator.session().generate,
    }
    with pytest.raises((InvalidPrompt, InvalidOption)) as caught:
        start[call](PROMPTS[name], max_new_tokens=2)
    check(caught.value)


BATCHES = {"several rows", "several texts", "lists of ids", "ragged lists"}
"""Of these: what is several prompts."""


@pytest.mark.parametrize("name", sorted(PROMPTS.keys() - BATCHES))
def test_what_is_no_batch_is_refused_in_one_line(name: str, speculator: Speculator) -> None:
    with pytest.raises(InvalidPrompt) as caught:
        speculator.generate_batch(PROMPTS[name], max_new_tokens=2)
    check(caught.value)


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_what_is_several_prompts_is_answered_by_a_batch(name: str, speculator: Speculator) -> None:
    answers = speculator.generate_batch(PROMPTS[name], max_new_tokens=2, do_sample=False)
    alone = [speculator.generate(one, max_new_tokens=2, do_sample=False) for one in PROMPTS[name]]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("several texts", "generate_batch"),
        ("lists of ids", "generate_batch"),
        ("generator", "generate_each"),
        ("path", "path.read_text()"),
        ("bytes", "prompt.decode()"),
        ("dict", "Give its input_ids"),
    ],
)
def test_a_mistake_that_is_often_made_has_its_own_advice(
    name: str, advice: str, speculator: Speculator
) -> None:
    with pytest.raises(InvalidPrompt) as caught:
        speculator.generate(PROMPTS[name])
    assert advice in str(caught.value)


@pytest.mark.parametrize("prompt", ["hello", user("hi"), "x" * 50])
def test_words_without_a_tokenizer_are_refused_in_one_line(prompt: Any, model: Any) -> None:
    with pytest.raises(InvalidPrompt) as caught:
        wrap(model, heads="logit-lens").generate(prompt)
    check(caught.value)


def test_raw_is_for_text(speculator: Speculator) -> None:
    with pytest.raises(InvalidPrompt, match="raw is for text"):
        speculator.generate(user("hi"), raw=True)


@pytest.mark.parametrize(
    "prompt",
    [
        IDS,
        tuple(IDS),
        torch.tensor(IDS),
        torch.tensor([IDS], dtype=torch.int32),
        torch.tensor([IDS], dtype=torch.uint8),
        np.array(IDS),
        np.array([IDS], dtype=np.uint16),
        list(np.array(IDS)),
    ],
    ids=addressless,
)
def test_ids_of_any_whole_type_are_read(prompt: Any, speculator: Speculator) -> None:
    expected = speculator.generate(torch.tensor([IDS]), max_new_tokens=4).token_ids
    assert speculator.generate(prompt, max_new_tokens=4).token_ids == expected


def test_a_message_of_a_call_needs_no_content(speculator: Speculator) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    messages: Any = [*user("hi"), call, *user("and?")]
    assert speculator.generate(messages, max_new_tokens=2).token_ids
