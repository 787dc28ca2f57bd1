from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from selfspec.training import batched
from selfspec.training.batched import Sampling, continued, loop_start
from tests.models import VOCAB_SIZE, make_model, random_ids

PROMPTS = [random_ids(length, seed=length)[0].tolist() for length in (5, 1, 12, 9)]
GREEDY = Sampling()
LIMIT = 2 * batched.CHUNK + 9  # one token, two chunks, and one that is shorter


@pytest.fixture(scope="module")
def exact() -> PreTrainedModel:
    """In float64, where a row has the same tokens alone and beside others."""
    return make_model("llama", torch.float64)


def run(
    model: PreTrainedModel,
    prompts: list[list[int]] = PROMPTS,
    *,
    ends: frozenset[int] = frozenset({VOCAB_SIZE - 1}),
    sampling: Sampling = GREEDY,
    limit: int = LIMIT,
    heard: list[int] | None = None,
) -> list[list[int]]:
    watch = (lambda tokens: None) if heard is None else heard.append
    return continued(
        model, prompts, max_new_tokens=limit, ends=ends, sampling=sampling, watch=watch
    )


@torch.no_grad()
def alone(model: PreTrainedModel, prompt: list[int], ends: frozenset[int]) -> list[int]:
    """Greedy tokens without cache, padding or company, up to an end or a loop."""
    ids: list[int] = []
    while len(ids) < LIMIT and not (ids and ids[-1] in ends):
        ids.append(int(model(torch.tensor([prompt + ids])).logits[0, -1].argmax()))
    return ids


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_rows_of_a_batch_are_what_they_are_alone(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched, "_ROOM", 3)  # keys and values outgrow it
    model = make_model(family, torch.float64)
    ends = frozenset(alone(model, PROMPTS[0], frozenset())[3:4])
    expected = [alone(model, prompt, ends) for prompt in PROMPTS]
    assert len({len(ids) for ids in expected}) > 1, "rows should leave the batch one by one"
    for ids, whole in zip(run(model, ends=ends), expected, strict=True):
        assert ids == whole[: len(ids)]
        assert len(ids) == len(whole) or loop_start(ids) is not None


def test_a_looping_row_leaves_at_the_next_look(exact: PreTrainedModel) -> None:
    token = alone(exact, PROMPTS[0], frozenset())[0]
    with torch.no_grad():
        stuck = make_model("llama", torch.float64)
        stuck.lm_head.weight[token] *= 100.0
    lengths = [len(ids) for ids in run(stuck, limit=200)]
    assert max(lengths) < 200
    assert all((length - 1) % batched.CHUNK == 0 for length in lengths)  # the first comes alone


def test_draws_come_from_the_global_generator(exact: PreTrainedModel) -> None:
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(run(exact, sampling=Sampling(2.0)))
    assert texts[0] == texts[1] != texts[2]
    assert run(exact, sampling=Sampling(2.0, top_k=1)) == run(exact)


def test_the_models_own_defaults_do_not_change_the_text(exact: PreTrainedModel) -> None:
    expected = run(exact)
    torch.manual_seed(0)
    drawn = run(exact, sampling=Sampling(1.0))
    own = exact.generation_config
    assert own is not None
    own.update(repetition_penalty=5.0, top_p=0.01, do_sample=True, temperature=9.0, max_length=3)
    try:
        assert run(exact) == expected
        torch.manual_seed(0)
        assert run(exact, sampling=Sampling(1.0)) == drawn
        assert exact.generation_config is own
    finally:
        own.update(
            repetition_penalty=None, top_p=None, do_sample=None, temperature=None, max_length=None
        )


def test_defaults_come_back_after_an_error(exact: PreTrainedModel) -> None:
    own = exact.generation_config

    def stop(tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        continued(
            exact, PROMPTS, max_new_tokens=4, ends=frozenset({1}), sampling=GREEDY, watch=stop
        )
    assert exact.generation_config is own


def test_the_watch_hears_of_every_token(exact: PreTrainedModel) -> None:
    heard: list[int] = []
    assert sum(map(len, run(exact, heard=heard))) == sum(heard)
    assert len(heard) > 1


def test_no_prompts_are_no_work(exact: PreTrainedModel) -> None:
    assert run(exact, []) == []


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
