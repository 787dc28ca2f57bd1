"""With any drafts and any options the text is Hugging Face's own.

Eighty cases here, 2,100 with `make fuzz`. In float64 tokens are compared with `model.generate`,
called with the same keywords. In float32, bfloat16 and float16 they are compared with selfspec's
plain decoding of the same prompt alone: 20,000 texts of random models with `make same-texts`.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from selfspec.api.speculator import Speculator
from selfspec.api.stream import Generation
from selfspec.errors import InvalidOption, SelfspecError
from tests import fuzz
from tests.decoding.test_mutants import (
    Mutant,
    every_draft_stays,
    mask_sized_by_the_first_layer,
    truncate_one_too_few,
)
from tests.fuzz import Case, Turn
from tests.models import random_ids

FAMILIES = ["llama", "mistral", "gemma2", "granite"]
SOME = FAMILIES if settings().max_examples > 50 else ["mistral", "gemma2"]  # those with windows
MUTANTS = [every_draft_stays, mask_sized_by_the_first_layer, truncate_one_too_few]
COMPILED = ("generic", *(["fused"] if shutil.which("c++") else []))


def expected_of(case: Case, family: str) -> list[int]:
    return fuzz.hugging_face(family, tuple(case.prompt.ids[0].tolist()), case.wishes)


def all_options(case: Case | Turn) -> dict[str, Any]:
    strings = {"stop_strings": list(case.wishes.strings)} if case.wishes.strings else {}
    return case.wishes.options | strings | case.speculation


def agreed(expected: Callable[[], list[int]], ask: Callable[[], object]) -> list[int] | None:
    """Hugging Face's tokens; None if its scores are no distribution, when `ask` must fail too."""
    try:
        return expected()
    except RuntimeError:
        with pytest.raises(InvalidOption, match="no distribution to draw from"):
            ask()
        return None


def check_answer(family: str, case: Case) -> None:
    speculator = fuzz.speculator(family, torch.float64, case.executor, case.heads)
    generate = partial(speculator.generate, case.prompt.ids)
    expected = agreed(lambda: expected_of(case, family), lambda: generate(**all_options(case)))
    if expected is None:
        return
    text = torch.cat([case.prompt.ids, torch.tensor([expected])], dim=1)
    for speculate in (False, True):
        options = all_options(case) | {"speculate": speculate}
        answer = generate(**options)
        assert answer.token_ids == expected
        assert answer.stop_reason == case.wishes.reason(text)
    event("some drafts accepted" if answer.stats.accepted else "none accepted")
    event("some drafts refused" if answer.stats.accepted < answer.stats.drafted else "none refused")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_hugging_faces(family: str) -> None:
    @given(fuzz.cases(("generic", "cuda-graph")))
    def check(case: Case) -> None:
        check_answer(family, case)

    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    @settings(max_examples=1000, phases=[Phase.generate], report_multiple_bugs=False)
    @given(fuzz.cases(("generic",)))
    def check(case: Case) -> None:
        check_answer("llama", case)

    mutant(monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError, SelfspecError)):
        check()
    fuzz.speculator.cache_clear()  # what they measured with the bug, as whether bits are pinned


@pytest.mark.parametrize("family", SOME)
def test_inside_hugging_faces_generate_the_text_is_equal_too(family: str) -> None:
    @given(fuzz.cases(("generic",)))
    def check(case: Case) -> None:
        speculator = fuzz.speculator(family, torch.float64, case.executor, case.heads)
        strings = list(case.wishes.strings) or None
        loop = speculator.hf(strings=strings, **case.speculation)
        options = {"do_sample": False, "custom_generate": loop} | case.wishes.options
        ask = partial(cast(Any, speculator.model).generate, case.prompt.ids, **options)
        expected = agreed(lambda: expected_of(case, family), ask)
        assert expected is None or ask()[0, case.prompt.length :].tolist() == expected

    check()


@pytest.mark.parametrize("family", SOME)
def test_every_turn_of_a_session_is_hugging_faces(family: str) -> None:
    @given(fuzz.conversations())
    def check(conversation: tuple[str, list[Turn]]) -> None:
        heads, turns = conversation
        speculator = fuzz.speculator(family, torch.float64, "generic", heads)
        session, text = speculator.session(), torch.empty(1, 0, dtype=torch.long)
        for turn in turns:
            prompt = torch.cat([text[:, : turn.keep], turn.added.ids], dim=1)
            wishes = turn.wishes
            stream = session.stream(prompt, **all_options(turn))
            ids = tuple(prompt[0].tolist())
            expected = agreed(partial(fuzz.hugging_face, family, ids, wishes), stream.drain)
            if expected is None:
                continue
            for number, _ in enumerate(stream, start=1):
                if number == turn.pieces:
                    break
            answer = stream.result
            assert answer.token_ids == expected[: len(answer.token_ids)]
            text = torch.cat([prompt, torch.tensor([answer.token_ids])], dim=1)
            if answer.stop_reason is not None:
                assert answer.token_ids == expected
                assert answer.stop_reason == wishes.reason(text)

    check()


def test_only_the_last_token_of_a_stream_has_a_stop_reason() -> None:
    """Found by the sessions above."""
    speculator = fuzz.speculator("llama", torch.float64, "generic", "logit-lens")
    options: Any = {"drafter": "exit:threshold=0.01", "never_slower": False}
    for count in range(2, 9):
        stream = speculator.stream(random_ids(9), max_new_tokens=count, **options)
        reasons = [stream.result.stop_reason for _ in stream]
        assert reasons == [None] * (count - 1) + ["length"]
        assert stream.result.stop_reason == "length"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_neither_drafts_nor_other_rows_change_a_text(
    dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    executors = ("generic",) if dtype == torch.float16 else COMPILED
    numbers = st.integers(0, settings().max_examples // 50 + 1)
    compared: Counter[int] = Counter()

    @given(fuzz.batches(executors), numbers, st.sampled_from(fuzz.DRAWS))
    def check(batch: tuple[Case, list[Tensor]], number: int, draws: dict[str, Any]) -> None:
        case, prompts = batch
        family, sizes = fuzz.configuration(number)
        speculator = fuzz.speculator(family, dtype, case.executor, case.heads, sizes)
        answers = dict(speculator.generate_each(prompts, **all_options(case) | draws))
        for row, prompt in enumerate(prompts):
            changes = draws | {"seed": draws["seed"] + row, "speculate": False}
            options = all_options(case) | changes
            plain, drafted = answer_of(speculator, prompt, options), answers[row]
            if isinstance(plain, SelfspecError) or isinstance(drafted, SelfspecError):
                assert str(plain) == str(drafted)
            elif drafted.stats.pinned or (dtype == torch.float16 and not drafted.stats.drafted):
                assert drafted.token_ids == plain.token_ids
                assert drafted.stop_reason == plain.stop_reason
                compared[number] += 1

    check()
    assert compared
    with capsys.disabled():
        sys.stdout.write(f" {compared.total()} texts, {len(compared)} configurations, {dtype} ")


def answer_of(
    speculator: Speculator, prompt: Tensor, options: dict[str, Any]
) -> Generation | SelfspecError:
    try:
        return speculator.generate(prompt, **options)
    except SelfspecError as error:
        return error
