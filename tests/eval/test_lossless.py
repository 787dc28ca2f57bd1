"""The losslessness ladder of design.md section 5 on tiny models of every family.

Every family meets all kinds of drafts in float64, WHOLE ones elsewhere too; others meet FEW there.
"""

from __future__ import annotations

import shutil

import pytest
import torch

from tests import ladder
from tests.models import FAMILIES, make_model, random_ids, wrapped

RUN_BY = {
    "generic": [*FAMILIES],
    "fused": ["llama", "mistral", "qwen2", "qwen3"] if shutil.which("c++") else [],
    "cuda-graph": ["llama", "gemma3"],
}
"""Families of an executor; cuda-graph runs uncaptured here, and is compared in float64 for all."""

WHOLE = ("llama", "gemma3")


def cells(*executors: str) -> list[tuple[str, str]]:
    return [(family, executor) for executor in executors for family in RUN_BY[executor]]


def kinds(family: str) -> ladder.Kinds:
    return None if family in WHOLE else ladder.FEW


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "executor"), cells("generic", "fused"))
def test_drafts_do_not_change_one_bit_of_a_logit(
    family: str, executor: str, dtype: torch.dtype
) -> None:
    backbone = wrapped(family, dtype, executor)
    shape = ladder.FREE if executor == "fused" else ladder.FIXED
    # longer than the sliding windows; once shorter than a pinned pass
    ladder.check_draft_invariance(backbone, random_ids(13), shape, kinds=kinds(family))
    if dtype == torch.float32:
        ladder.check_draft_invariance(backbone, random_ids(1), shape, kinds=ladder.FEW)


@pytest.mark.parametrize("executor", ["generic", "cuda-graph"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_tokens_equal_hugging_face(family: str, executor: str) -> None:
    some = None if executor == "generic" else kinds(family)
    backbone = wrapped(family, torch.float64, executor)
    ladder.check_equal_to_hugging_face(backbone, random_ids(13), some)


@pytest.mark.parametrize("executor", RUN_BY)
def test_float32_tokens_equal_hugging_face_up_to_ties(executor: str) -> None:
    backbones = (wrapped(family, executor=executor) for family in RUN_BY[executor])
    ties = sum(ladder.count_ties(one, random_ids(13), kinds=ladder.FEW) for one in backbones)
    assert ties <= 2, "near ties are rare on these texts: more of them point to a bug"


@pytest.mark.parametrize(("family", "executor"), cells(*RUN_BY))
def test_bfloat16_tokens_lie_within_noise_of_the_top(family: str, executor: str) -> None:
    backbone = wrapped(family, torch.bfloat16, executor)
    ladder.check_near_top(backbone, make_model(family), random_ids(13), kinds=ladder.FEW)


def test_sampled_sequences_have_the_distribution_of_the_model() -> None:
    model = make_model("llama", vocab_size=4, num_hidden_layers=2)
    ladder.check_sampling(model, random_ids(3, vocab_size=4))
