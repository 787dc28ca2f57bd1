"""The losslessness ladder of design.md section 5 on tiny models of every family."""

from __future__ import annotations

import pytest
import torch

from selfspec.model.backbone import Backbone
from tests import ladder
from tests.models import FAMILIES, make_model, random_ids
from tests.packing import RUNNING, RUNNING_BFLOAT16

DTYPES = [torch.float32, torch.bfloat16]

PACKED = ["llama", "mistral", "qwen2", "qwen3"]
"""Families that the packed executor runs."""

FLOAT32 = [
    *[(family, "generic") for family in FAMILIES],
    *[(family, "auto") for family in PACKED],
    *[(family, "cuda-graph") for family in ("llama", "gemma3")],
]
"""Auto is the fused executor where it runs; cuda-graph runs uncaptured here, and is compared in
float64 for every family."""

BFLOAT16 = [case for case in FLOAT32 if case[1] != "auto" or len(RUNNING_BFLOAT16) > 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_do_not_change_one_bit_of_a_logit(family: str, dtype: torch.dtype) -> None:
    backbone = Backbone(make_model(family, dtype), executor="generic")
    # longer than the sliding windows; once shorter than a pinned pass
    for length in (1, 13) if dtype == torch.float32 else (13,):
        ladder.check_draft_invariance(backbone, random_ids(length), ladder.FIXED)


@pytest.mark.parametrize(("executor", "dtype"), RUNNING, ids=str)
@pytest.mark.parametrize("family", PACKED)
def test_packed_weights_need_no_fixed_shape_for_that(
    family: str, executor: str, dtype: torch.dtype
) -> None:
    backbone = Backbone(make_model(family, dtype), executor=executor)
    for length in (1, 13):
        ladder.check_draft_invariance(backbone, random_ids(length), ladder.FREE)


@pytest.mark.parametrize("executor", ["generic", "cuda-graph"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_tokens_equal_hugging_face(family: str, executor: str) -> None:
    ladder.check_equal_to_hugging_face(make_model(family, torch.float64), random_ids(13), executor)


@pytest.mark.parametrize("executor", sorted({executor for _, executor in FLOAT32}))
def test_float32_tokens_equal_hugging_face_up_to_ties(executor: str) -> None:
    families = [family for family, run_by in FLOAT32 if run_by == executor]
    ties = sum(
        ladder.count_ties(make_model(family), random_ids(13), executor) for family in families
    )
    assert ties <= 2, "near ties are rare on these texts: more of them point to a bug"


@pytest.mark.parametrize(("family", "executor"), BFLOAT16)
def test_bfloat16_tokens_lie_within_noise_of_the_top(family: str, executor: str) -> None:
    model, exact = make_model(family, torch.bfloat16), make_model(family, torch.float32)
    ladder.check_near_top(model, exact, random_ids(13), executor)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sampled_sequences_have_the_distribution_of_the_model(family: str) -> None:
    model = make_model(family, vocab_size=4, num_hidden_layers=2)
    ladder.check_sampling(model, random_ids(3, vocab_size=4))
