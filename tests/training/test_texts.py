"""Many texts that one model writes at once, for training data."""

from __future__ import annotations

import pytest
import torch

from selfspec.model.backbone import Backbone
from selfspec.training.text import Ask, Sampling, Texts, loop_start
from tests.models import VOCAB_SIZE, make_model, random_ids

PROMPTS = [random_ids(length, seed=length)[0].tolist() for length in (5, 1, 12, 9)]
GREEDY = Sampling()
LIMIT = 41


@pytest.fixture(scope="module")
def exact() -> Backbone:
    """In float64, where a row has the same tokens in every way to compute it."""
    return Backbone(make_model("llama", torch.float64))


def run(
    backbone: Backbone,
    prompts: list[list[int]] = PROMPTS,
    *,
    ends: frozenset[int] = frozenset({VOCAB_SIZE - 1}),
    sampling: Sampling = GREEDY,
    limit: int = LIMIT,
    seed: int = 0,
    heard: list[int] | None = None,
) -> list[list[int]]:
    texts = Texts(backbone, (lambda tokens: None) if heard is None else heard.append)
    places = {
        texts.add(Ask(prompt, limit, ends, sampling, 100 * seed + place)): place
        for place, prompt in enumerate(prompts)
    }
    found: dict[int, list[int]] = {}
    while len(found) < len(prompts):
        found |= {places[text]: ids for text, ids in texts.step()}
    assert texts.step() == []
    return [found[place] for place in range(len(prompts))]


@torch.no_grad()
def alone(backbone: Backbone, prompt: list[int], ends: frozenset[int]) -> list[int]:
    """Greedy tokens without cache or company, up to an end or a loop."""
    ids: list[int] = []
    while len(ids) < LIMIT and not (ids and ids[-1] in ends) and _begun(ids) < 3:
        ids.append(int(backbone.model(torch.tensor([prompt + ids])).logits[0, -1].argmax()))
    return ids


def _begun(ids: list[int]) -> int:
    """How often the newest eight tokens were written."""
    newest = ids[-8:]
    return sum(ids[at : at + 8] == newest for at in range(len(ids) - 7))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_texts_are_what_they_are_alone(family: str) -> None:
    backbone = Backbone(make_model(family, torch.float64))
    ends = frozenset(alone(backbone, PROMPTS[0], frozenset())[3:4])
    expected = [alone(backbone, prompt, ends) for prompt in PROMPTS]
    assert len({len(ids) for ids in expected}) > 1, "texts should end one by one"
    assert run(backbone, ends=ends) == expected


def test_a_text_that_loops_ends_with_its_third_turn() -> None:
    stuck = make_model("llama", torch.float64)
    token = run(Backbone(stuck))[0][0]
    with torch.no_grad():
        stuck.lm_head.weight[token] *= 100.0
    found = run(Backbone(stuck), limit=200)
    assert max(map(len, found)) < 200
    for ids in found:
        assert loop_start(ids) is not None
        assert loop_start(ids[:-1]) is None


def test_draws_come_from_the_seed_of_a_text(exact: Backbone) -> None:
    drawn = Sampling(2.0)
    texts = run(exact, sampling=drawn)
    torch.manual_seed(3)
    assert run(exact, sampling=drawn) == texts
    assert run(exact, PROMPTS[:2], sampling=drawn) == texts[:2]
    assert run(exact, sampling=drawn, seed=1) != texts
    twins = run(exact, [PROMPTS[0]] * 2, sampling=drawn)
    assert twins[0] != twins[1]
    assert run(exact, sampling=Sampling(2.0, top_k=1)) == run(exact)


def test_the_models_own_defaults_do_not_change_the_text(exact: Backbone) -> None:
    expected, drawn = run(exact), run(exact, sampling=Sampling(1.0))
    own = exact.model.generation_config
    assert own is not None
    own.update(repetition_penalty=5.0, top_p=0.01, do_sample=True, temperature=9.0, max_length=3)
    try:
        assert run(exact) == expected
        assert run(exact, sampling=Sampling(1.0)) == drawn
    finally:
        own.update(
            repetition_penalty=None, top_p=None, do_sample=None, temperature=None, max_length=None
        )


def test_the_watch_hears_of_every_token(exact: Backbone) -> None:
    heard: list[int] = []
    assert sum(map(len, run(exact, heard=heard))) == sum(heard)
    assert len(heard) > 1


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("abcdefgh", None),
        ("abcdefghabcdefgh", None),
        ("abcdefghabcdefghabcdefgh", 8),
        ("xyzabcdefghabcdefghabcdefgh", 11),
        ("xaaaaaaaaa", None),
        ("xaaaaaaaaaa", 2),
        ("xabababababababab", 3),
        ("abcdefgh-abcdefgh+abcdefgh", 9),
        ("abcdefg-abcdefg+abcdefg*", None),
        ("", None),
    ],
)
def test_a_loop_begins_at_the_second_of_three_occurrences(text: str, start: int | None) -> None:
    assert loop_start([ord(letter) for letter in text]) == start
