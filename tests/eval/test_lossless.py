"""The losslessness ladder of design.md section 5 on tiny models of every family."""

from __future__ import annotations

import pytest
import torch

from selfspec.model.backbone import Backbone
from tests import ladder
from tests.models import FAMILIES, make_model, needs_compiler, random_ids

DTYPES = [torch.float32, torch.bfloat16]

COMPILED = ["llama", "mistral", "qwen2", "qwen3"]

CASES = [
    *[(family, "generic") for family in FAMILIES],
    *[(family, "auto") for family in COMPILED],
    *[(family, "cuda-graph") for family in ("llama", "gemma3")],
]
"""Auto is the fused executor where it runs; cuda-graph runs uncaptured here, and is compared in
float64 for every family."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_do_not_change_one_bit_of_a_logit(family: str, dtype: torch.dtype) -> None:
    backbone = Backbone(make_model(family, dtype), executor="generic")
    # longer than the sliding windows; once shorter than a pinned pass
    for length in (1, 13) if dtype == torch.float32 else (13,):
        ladder.check_draft_invariance(backbone, random_ids(length), ladder.FIXED)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", COMPILED)
def test_compiled_code_needs_no_fixed_shape_for_that(family: str, dtype: torch.dtype) -> None:
    backbone = Backbone(make_model(family, dtype), executor="fused")
    for length in (1, 13):
        ladder.check_draft_invariance(backbone, random_ids(length), ladder.FREE)


@pytest.mark.parametrize("executor", ["generic", "cuda-graph"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_tokens_equal_hugging_face(family: str, executor: str) -> None:
    ladder.check_equal_to_hugging_face(make_model(family, torch.float64), random_ids(13), executor)


@pytest.mark.parametrize("executor", sorted({executor for _, executor in CASES}))
def test_float32_tokens_equal_hugging_face_up_to_ties(executor: str) -> None:
    families = [family for family, run_by in CASES if run_by == executor]
    ties = sum(
        ladder.count_ties(make_model(family), random_ids(13), executor) for family in families
    )
    assert ties <= 2, "near ties are rare on these texts: more of them point to a bug"


@pytest.mark.parametrize(("family", "executor"), CASES)
def test_bfloat16_tokens_lie_within_noise_of_the_top(family: str, executor: str) -> None:
    model, exact = make_model(family, torch.bfloat16), make_model(family, torch.float32)
    ladder.check_near_top(model, exact, random_ids(13), executor)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sampled_sequences_have_the_distribution_of_the_model(family: str) -> None:
    model = make_model(family, vocab_size=4, num_hidden_layers=2)
    ladder.check_sampling(model, random_ids(3, vocab_size=4))
