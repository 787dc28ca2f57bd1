"""Keywords mean the same as in Hugging Face, and answers stop where plain decoding stops.

In float64 all comparisons are exact: tokens must be equal, with drafts accepted and rejected.
Beyond the context length rotary models go on, as in transformers; only a default length ends there.
"""

from __future__ import annotations

import gc
import logging
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from selfspec.api import speculator as facade
from selfspec.api.speculator import Speculator, wrap
from selfspec.decoding.decode import warn_once
from selfspec.errors import InvalidOption, InvalidPrompt
from selfspec.hub import models as hub
from selfspec.model import kv
from tests.heads.kinds import make_heads
from tests.models import make_model, needs_compiler, noted, random_ids, wrapped
from tests.talks import make_tokenizer


def test_custom_generate_returns_the_output_object_of_transformers(
    speculator: Speculator, exact: Any
) -> None:
    ids, options = random_ids(13), {"max_new_tokens": 30, "do_sample": False}
    loop = speculator.hf(drafter="exit:threshold=0.5")
    record = exact.generate(ids, custom_generate=loop, return_dict_in_generate=True, **options)
    assert torch.equal(record.sequences, exact.generate(ids, **options))


def test_a_pad_token_in_a_single_prompt_is_not_padding(exact: Any) -> None:
    speculator = wrap(exact, heads="logit-lens")
    ids = random_ids(8)
    expected = speculator.generate(ids, max_new_tokens=5).token_ids
    pad = int(ids[0, 3])
    assert speculator.generate(ids, max_new_tokens=5, pad_token_id=pad).token_ids == expected


def test_a_loop_of_another_model_is_refused(speculator: Speculator) -> None:
    other: Any = make_model("llama")
    with pytest.raises(InvalidOption, match="another model"):
        other.generate(random_ids(4), custom_generate=speculator.hf())
    other.get_base_model = None  # PEFT's models have it
    with pytest.raises(InvalidOption, match=r"Wrap PEFT's get_base_model\(\)"):
        other.generate(random_ids(4), custom_generate=speculator.hf())


def test_many_generations_leak_no_tensors(speculator: Speculator) -> None:
    def live() -> int:
        gc.collect()
        return sum(isinstance(item, Tensor) for item in gc.get_objects())

    for _ in range(3):
        speculator.generate(random_ids(13), max_new_tokens=5)
    count = live()
    for _ in range(10):
        speculator.generate(random_ids(13), max_new_tokens=5)
    assert live() <= count


@needs_compiler
def test_keys_and_values_are_freed_without_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = noted(monkeypatch, kv.Page, "__init__", lambda page, _: ref(page))
    speculator = wrap(make_model("llama"), make_tokenizer(), executor="fused")
    gc.disable()
    try:
        speculator.generate(random_ids(200), max_new_tokens=5)
        speculator.generate_batch([random_ids(130, seed) for seed in (1, 2)], max_new_tokens=5)
        next(speculator.stream(random_ids(130), max_new_tokens=50))
        assert pages
        assert not [page for page in pages if page() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["translator", "deep-fused"])
def test_heads_of_another_dtype_still_draft(exact: Any, kind: str) -> None:
    heads = make_heads(kind, wrapped("llama").unembedding, exit_layers=(2,))
    speculator = wrap(exact, heads=heads, drafter="exit:threshold=0.01", never_slower=False)
    answer = speculator.generate(random_ids(9), max_new_tokens=12)
    assert answer.stats.drafted > 0
    plain = speculator.generate(random_ids(9), max_new_tokens=12, speculate=False)
    assert answer.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (torch.autocast("cpu", torch.bfloat16), "autocast is on"),
        (torch.device("meta"), "default device is meta, the model is on cpu"),
    ],
)
def test_modes_are_refused_around_wrapping_an_answer_or_its_rounds(
    exact: Any, mode: Any, message: str
) -> None:
    speculator, ids = wrap(exact, heads="none"), random_ids(5)
    stream = speculator.stream(ids, max_new_tokens=2)
    for work in (
        lambda: wrap(exact, heads="none"),
        lambda: speculator.generate(ids, max_new_tokens=2),
        stream.drain,
    ):
        with mode, pytest.raises(InvalidOption, match=message):
            work()


def test_missing_heads_are_reported(exact: Any, caplog: pytest.LogCaptureFixture) -> None:
    wrap(exact, heads="none")
    assert not caplog.text
    speculator = wrap(exact)
    assert "selfspec adapt --raw --model" in caplog.text  # not the default model
    assert "prompt lookup drafts" in caplog.text
    ids = torch.tensor([[7, 8, 9] * 8])
    reply = speculator.generate(ids, max_new_tokens=20)
    assert {*reply.stats.drafted_by_source} <= {"ngram"}
    assert reply.token_ids == speculator.generate(ids, max_new_tokens=20, speculate=False).token_ids
    caplog.clear()
    wrap(exact, drafter="none")
    wrap(exact, speculate=False)
    assert not caplog.text


@pytest.mark.parametrize(
    ("dtype", "options", "heads"),
    [
        (torch.float32, {}, hub.DEFAULT_HEADS),
        (torch.float32, {"draft_model": "small"}, None),  # the draft model replaces heads
        (torch.float32, {"draft_model": "small", "heads": "own"}, "own"),
        (torch.float16, {"dtype": "float16"}, None),  # its heads do not fit float16
    ],
)
def test_the_default_model_gets_its_heads_unless_dtype_or_drafter_differ(
    dtype: torch.dtype, options: Any, heads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = hub.ModelFiles("tiny", "tiny", is_default=True)
    parts = make_model("llama", dtype), make_tokenizer(), files
    names: list[Any] = []
    monkeypatch.setattr(hub, "load_model", lambda *_, **__: parts)
    monkeypatch.setattr(facade, "find_heads", lambda _model, heads, _label: names.append(heads))
    facade.load(executor="generic", **options)
    assert names == [heads]


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_sampling_keywords_turn_sampling_on(speculator: Speculator, name: str) -> None:
    value: Any = {"temperature": 1.5, "top_k": 50}.get(name, 0.5)
    options: Any = {"max_new_tokens": 12, "seed": 3, name: value}
    sampled = speculator.generate(random_ids(5), do_sample=True, **options).token_ids
    assert speculator.generate(random_ids(5), **options).token_ids == sampled
    greedy = speculator.generate(random_ids(5), max_new_tokens=12).token_ids
    assert speculator.generate(random_ids(5), do_sample=False, **options).token_ids == greedy
    at_zero: Any = {**options, "temperature": 0}
    assert speculator.generate(random_ids(5), **at_zero).token_ids == greedy


# --- at and beyond the context length

LIMIT = 64
DRAFTER = "exit:layers=2/5,threshold=0.05,max_tokens=4"
DRAFTING: dict[str, Any] = {"heads": "logit-lens", "drafter": DRAFTER}


@pytest.fixture(scope="module")
def limited() -> Speculator:
    """The tiny Llama in float64, made for 64 positions."""
    return wrap(make_model("llama", torch.float64, max_position_embeddings=LIMIT), **DRAFTING)


def plain(model: Any, ids: Tensor, **options: Any) -> list[int]:
    return model.generate(ids, do_sample=False, **options)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("length", [LIMIT - 6, LIMIT - 1])
def test_a_default_length_ends_at_the_limit(limited: Speculator, length: int) -> None:
    ids = random_ids(length)
    expected = plain(limited.model, ids)  # transformers' own default is cut at the limit too
    answer = limited.generate(ids)
    assert answer.token_ids == expected
    assert len(answer.token_ids) == LIMIT - length
    assert answer.stop_reason == "length"


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 3])
def test_without_a_length_a_prompt_at_the_limit_is_refused_as_by_hugging_face(
    limited: Speculator, length: int
) -> None:
    with pytest.raises(ValueError, match="max_length"):
        plain(limited.model, random_ids(length))
    with pytest.raises(InvalidPrompt, match=rf"has {length} tokens, .* {LIMIT} .*max_new_tokens"):
        limited.generate(random_ids(length))


@pytest.mark.parametrize(
    ("family", "executor"),
    [(family, "fused") for family in ("llama", "mistral", "gemma3")]
    + [("gemma3", executor) for executor in ("generic", "cuda-graph")],
)
@needs_compiler
def test_every_executor_and_rotation_goes_on_beyond_the_limit(family: str, executor: str) -> None:
    dtype = torch.float32 if executor == "fused" else torch.float64
    model, ids = make_model(family, dtype, max_position_embeddings=LIMIT), random_ids(LIMIT - 9)
    answer = wrap(model, executor=executor, **DRAFTING).generate(ids, max_new_tokens=90)
    assert answer.token_ids == plain(model, ids, max_new_tokens=90)


@pytest.mark.parametrize(
    ("length", "new", "told"), [(10, 5, 0), (LIMIT - 4, 4, 0), (LIMIT - 4, 9, 1), (LIMIT + 1, 2, 1)]
)
def test_one_warning_says_that_the_text_goes_beyond_the_limit(
    limited: Speculator, caplog: pytest.LogCaptureFixture, length: int, new: int, told: int
) -> None:
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "selfspec")
    for _ in range(2):  # warned once, as in transformers
        limited.generate(random_ids(length), max_new_tokens=new)
    lines = [entry.getMessage() for entry in caplog.records if "goes beyond" in entry.getMessage()]
    assert len(lines) == told
    assert all(f"{LIMIT} positions" in text and "\n" not in text for text in lines)


LONG: dict[str, Any] = {
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": LIMIT // 2,
}


@pytest.mark.parametrize("executor", ["fused", "generic"])
@pytest.mark.parametrize(
    ("family", "kind", "more", "limit"),
    [("qwen2", "dynamic", {}, LIMIT), ("llama", "longrope", LONG, LIMIT // 2)],
)
def test_answers_end_before_rotations_change(
    family: str,
    kind: str,
    more: dict[str, Any],
    limit: int,
    executor: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_once.cache_clear()
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}
    model: Any = make_model(family, max_position_embeddings=LIMIT, rope_parameters=rope)
    speculator = wrap(model, executor=executor, **DRAFTING)
    ids = random_ids(limit - 9)
    expected = plain(model, ids, max_new_tokens=10)
    options: list[dict[str, Any]] = [{}, {"drafter": "ngram"}, {"speculate": False}]
    options += [{"pinned": True, "pinned_rows": 16}] if executor == "generic" else []
    for option in options:
        plain(model, ids, max_new_tokens=12)  # the model itself goes on, with other rotations
        assert speculator.generate(ids, max_new_tokens=12, **option).token_ids == expected
    assert caplog.text.count(f"the model has {limit} positions here") == 1
    with pytest.raises(InvalidPrompt, match=f"has {limit} positions"):
        speculator.generate(random_ids(limit + 1), max_new_tokens=3)


def test_answers_end_with_a_table_of_positions(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    model = make_model("gpt2", torch.float64, max_position_embeddings=LIMIT)
    limited, ids = wrap(model, **DRAFTING), random_ids(LIMIT - 5)
    answer = limited.generate(ids, max_new_tokens=30)
    assert answer.token_ids == plain(model, ids, max_new_tokens=6)  # the last takes no position
    assert answer.stop_reason == "length"
    assert "goes beyond" not in caplog.text
    with pytest.raises(InvalidPrompt, match=f"has {LIMIT} positions. Shorten the prompt"):
        limited.generate(random_ids(LIMIT + 1), max_new_tokens=3)
    padded = torch.cat([random_ids(8), ids], dim=1)
    mask = torch.ones_like(padded)
    mask[0, :8] = 0
    repeat = limited.generate(padded, attention_mask=mask, max_new_tokens=30)
    assert repeat.token_ids == answer.token_ids
    # padded passes stay within the table of positions
    pinned = limited.generate(ids, max_new_tokens=30, pinned=True, pinned_rows=16)
    assert pinned.token_ids == answer.token_ids
