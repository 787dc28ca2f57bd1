"""Where the model's positions end, and behind that: the same tokens, length and reason as plain.

Rotary models go on, as in transformers; only a default length ends there. In float64 tokens are
compared with Hugging Face's own.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.api.speculator import Speculator, wrap
from selfspec.decoding.decode import remind
from selfspec.errors import InvalidPrompt
from selfspec.model.backbone import Backbone
from tests.models import EXECUTORS, make_model, random_ids

LIMIT = 64
FAMILIES = ["mistral", "gemma3"]
DRAFTING: dict[str, Any] = {
    "heads": "logit-lens",
    "drafter": "exit:layers=2/5,threshold=0.05,max_tokens=4",
}


@pytest.fixture(scope="module")
def short() -> Any:
    """The tiny Llama in float64, made for 64 positions."""
    return make_model("llama", torch.float64, max_position_embeddings=LIMIT)


@pytest.fixture
def speculator(short: Any) -> Speculator:
    return wrap(short, **DRAFTING)


def plain(model: Any, ids: Tensor, **options: Any) -> list[int]:
    return model.generate(ids, do_sample=False, **options)[0, ids.shape[1] :].tolist()


LENGTHS: list[tuple[int, dict[str, int]]] = [
    (LIMIT - 6, {"max_new_tokens": 30}),
    (LIMIT - 1, {"max_new_tokens": 9}),
    (LIMIT, {"max_new_tokens": 9}),
    (LIMIT + 20, {"max_new_tokens": 9}),
    (LIMIT - 6, {"max_length": LIMIT + 5}),
    (LIMIT + 2, {"max_length": LIMIT + 9}),
]
"""Ids of the prompt, and how far to go."""


@pytest.mark.parametrize(("length", "options"), LENGTHS, ids=str)
@pytest.mark.parametrize("drafter", ["ngram+exit", "none"])
def test_answers_go_on_behind_the_limit_as_hugging_faces_do(
    speculator: Speculator, short: Any, drafter: str, length: int, options: dict[str, Any]
) -> None:
    ids = random_ids(length)
    expected = plain(short, ids, **options)
    answer = speculator.generate(ids, drafter=drafter, **options)
    assert answer.token_ids == expected
    assert answer.stop_reason == "length"
    found = short.generate(ids, custom_generate=speculator.hf(drafter=drafter), **options)
    assert found[0, length:].tolist() == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_rotation_goes_on_behind_the_limit(family: str) -> None:
    model = make_model(family, torch.float64, max_position_embeddings=LIMIT)
    ids = random_ids(LIMIT - 4)
    answer = wrap(model, **DRAFTING).generate(ids, max_new_tokens=80)
    assert answer.token_ids == plain(model, ids, max_new_tokens=80)


@pytest.mark.parametrize("length", [LIMIT - 6, LIMIT - 1])
def test_a_length_that_nobody_gave_ends_at_the_limit(
    speculator: Speculator, short: Any, length: int
) -> None:
    ids = random_ids(length)
    expected = plain(short, ids)  # transformers' own default is cut at the limit too
    answer = speculator.generate(ids)
    assert answer.token_ids == expected
    assert len(answer.token_ids) == LIMIT - length
    assert answer.stop_reason == "length"


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 3])
def test_without_a_length_a_prompt_at_the_limit_is_refused_as_by_hugging_face(
    speculator: Speculator, short: Any, length: int
) -> None:
    with pytest.raises(ValueError, match="max_length"):
        plain(short, random_ids(length))
    with pytest.raises(InvalidPrompt, match=rf"has {length} tokens, .* {LIMIT} .*max_new_tokens"):
        speculator.generate(random_ids(length))


@pytest.mark.parametrize("executor", [*EXECUTORS, "cuda-graph"])
def test_every_executor_goes_on_behind_the_limit(executor: str) -> None:
    model = make_model("llama", max_position_embeddings=LIMIT)
    ids = random_ids(LIMIT - 9)
    expected = wrap(model, executor="generic", drafter="none").generate(ids, max_new_tokens=90)
    answer = wrap(model, executor=executor, **DRAFTING).generate(ids, max_new_tokens=90)
    assert answer.token_ids == expected.token_ids
    assert len(answer.token_ids) == 90


@pytest.mark.parametrize("executor", EXECUTORS)
def test_pinned_drafts_leave_the_text_behind_the_limit_unchanged(executor: str) -> None:
    model = make_model("llama", max_position_embeddings=LIMIT)
    speculator = wrap(model, executor=executor, pinned=True, **DRAFTING)
    ids = random_ids(LIMIT - 9)
    answers = [
        speculator.generate(ids, max_new_tokens=90, speculate=speculate).token_ids
        for speculate in (True, False)
    ]
    assert answers[0] == answers[1]


def test_a_draft_model_made_for_fewer_positions_drafts_up_to_them(short: Any) -> None:
    second = make_model("llama", torch.float64, num_hidden_layers=1, max_position_embeddings=32)
    ids = random_ids(20)
    answer = wrap(short, draft_model=second).generate(ids, max_new_tokens=70)
    assert answer.token_ids == plain(short, ids, max_new_tokens=70)
    assert answer.stats.drafted > 0


@pytest.mark.parametrize(
    ("length", "new", "told"), [(10, 5, 0), (LIMIT - 4, 4, 0), (LIMIT - 4, 9, 1), (LIMIT + 1, 2, 1)]
)
def test_one_line_says_that_the_text_goes_beyond_the_limit(
    speculator: Speculator, caplog: pytest.LogCaptureFixture, length: int, new: int, told: int
) -> None:
    remind.cache_clear()
    caplog.set_level(logging.WARNING, "selfspec")
    for _ in range(2):  # once, as transformers does
        speculator.generate(random_ids(length), max_new_tokens=new)
    found = [entry.getMessage() for entry in caplog.records if "goes beyond" in entry.getMessage()]
    assert len(found) == told
    assert all(f"{LIMIT} positions" in text and "\n" not in text for text in found)


def test_padding_takes_no_position_of_the_limit(speculator: Speculator, short: Any) -> None:
    ids = torch.cat([random_ids(LIMIT + 4), random_ids(LIMIT + 4, seed=1)])
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 40}
    expected = short.generate(ids, do_sample=False, **options)
    found = short.generate(ids, do_sample=False, custom_generate=speculator.hf(), **options)
    assert torch.equal(found, expected)


class Learned(Backbone):
    """A backbone whose positions end, as learned ones do."""

    position_limit = LIMIT


def test_where_positions_are_a_table_the_answer_ends_with_them(short: Any) -> None:
    speculator = wrap(short, **DRAFTING)
    speculator.runtime.backbone = Learned(short)
    ids = random_ids(LIMIT - 5)
    answer = speculator.generate(ids, max_new_tokens=30)
    assert answer.token_ids == plain(short, ids, max_new_tokens=6)  # the last one takes no position
    assert answer.stop_reason == "length"
    with pytest.raises(InvalidPrompt, match=f"has {LIMIT} positions. Shorten the prompt"):
        speculator.generate(random_ids(LIMIT + 1), max_new_tokens=3)
    padded = random_ids(LIMIT - 5 + 8)
    mask = torch.ones_like(padded)
    mask[0, :8] = 0
    padded[0, 8:] = ids[0]
    again = speculator.generate(padded, attention_mask=mask, max_new_tokens=30)
    assert again.token_ids == answer.token_ids


def test_rotations_have_no_end(backbone: Backbone) -> None:
    assert backbone.position_limit is None
