"""Whether a row's bits are its own: what is probed, and what pinned mode does elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.api.speculator import Speculator, wrap
from selfspec.decoding.measure import PassShape, check_pinned
from selfspec.errors import PinnedUnavailable
from selfspec.model import weights
from selfspec.model.backbone import Backbone
from selfspec.model.fused import FusedExecutor
from selfspec.model.generic import GenericExecutor
from tests.models import make_model, needs_compiler, random_ids
from tests.recorded import RecordedCapture

FIXED = PassShape(8, 64)
EXACT = FusedExecutor.logits


def wrapped(model: Any, executor: str = "fused") -> Speculator:
    return wrap(model, heads="logit-lens", executor=executor, drafter="exit:threshold=0.05")


def depends_on_rows(self: FusedExecutor, rows: Tensor) -> Tensor:
    """A kernel that rounds otherwise for four rows or more."""
    found = EXACT(self, rows)
    return found * (1 + 2**-22) if len(rows) >= 4 else found


def assert_drafts_leave_the_pinned_text(speculator: Speculator, rows: int = 8) -> None:
    options: Any = {"max_new_tokens": 20, "pinned": True, "pinned_rows": rows}
    plain = speculator.generate(random_ids(9), speculate=False, **options)
    drafted = speculator.generate(random_ids(9), **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_one_set_of_bits(dtype: torch.dtype) -> None:
    check_pinned(Backbone(make_model("llama", dtype), executor="fused"), PassShape(), 8)


@needs_compiler
def test_kernels_that_depend_on_the_number_of_rows_get_passes_of_one_shape(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrapped(model).runtime.probe.shape(FIXED, 8) == PassShape()
    monkeypatch.setattr(FusedExecutor, "logits", depends_on_rows)
    again = wrapped(model)
    with pytest.raises(PinnedUnavailable, match="do not treat all rows alike"):
        check_pinned(again.backbone, PassShape(), 8)
    assert again.runtime.probe.shape(FIXED, 8) == FIXED
    assert_drafts_leave_the_pinned_text(again)


def test_graphs_of_such_kernels_are_of_8_rows_or_16(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, exact = wrapped(make_model("llama"), "cuda-graph"), GenericExecutor.run_layers
    monkeypatch.setattr(
        GenericExecutor,
        "run_layers",
        lambda self, hidden, *rest: exact(self, hidden, *rest) + 0.01 * hidden.shape[1],
    )
    speculator.backbone._executor.start_capture(RecordedCapture)  # type: ignore[attr-defined]
    with pytest.raises(PinnedUnavailable, match="do not treat all rows alike"):
        check_pinned(speculator.backbone, PassShape(), 8)
    for rows in (8, 16):
        assert_drafts_leave_the_pinned_text(speculator, rows)


@needs_compiler
def test_bits_are_pinned_by_default_where_a_probe_finds_it_so(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pinned(executor: str, **options: Any) -> bool:
        answer = wrapped(model, executor).generate(random_ids(9), max_new_tokens=6, **options)
        return answer.stats.pinned

    assert pinned("fused")
    assert not pinned("fused", pinned=False)
    assert not pinned("fused", speculate=False)  # nothing was probed
    assert not pinned("generic")
    assert pinned("generic", pinned=True)
    monkeypatch.setattr(FusedExecutor, "logits", depends_on_rows)
    assert not pinned("fused")


@needs_compiler
def test_pinned_mode_is_refused_where_neither_way_holds(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculator, calls = wrapped(model), iter(range(10**6))
    monkeypatch.setattr(
        FusedExecutor, "logits", lambda self, rows: EXACT(self, rows) * (1 + next(calls) * 1e-6)
    )
    with pytest.raises(PinnedUnavailable):
        speculator.generate(random_ids(9), max_new_tokens=5, pinned=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_compiled_code_own_modules_run_and_a_line_says_what_to_install(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Drafts may decide near ties then; passes of one shape keep bits."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(weights, "_prebuilt", lambda *_: None)
    weights._log_once.cache_clear()
    speculator = wrapped(make_model("llama", dtype), "auto")
    assert speculator.backbone.executor_name == "generic"
    (line,) = caplog.messages
    assert "no C++ compiler no-such-compiler. The model's own modules run" in line
    assert "Install a wheel" in line
    assert not speculator.generate(random_ids(9), max_new_tokens=5).stats.pinned
    assert_drafts_leave_the_pinned_text(speculator)
