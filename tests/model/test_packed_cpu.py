"""Packed weights: the model's numbers up to rounding, chosen only where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selfspec.api.speculator import wrap
from selfspec.decoding.hidden_cache import HiddenCache
from selfspec.decoding.probe import PassShape, check_pinned
from selfspec.decoding.work import alone
from selfspec.errors import InvalidOption, PinnedUnavailable, UnsupportedModel
from selfspec.model.backbone import Backbone
from selfspec.model.executors.generic import GenericExecutor
from selfspec.model.executors.packed_cpu import PackedExecutor
from selfspec.model.kv_store import Lease
from selfspec.model.products import PackedLinear, joined
from tests.models import PACKED_EXECUTORS, make_model, random_ids
from tests.packing import EXACT, RUNNING

PACKED = ["llama", "mistral", "qwen2", "qwen3"]


def logits(backbone: Backbone, ids: Tensor) -> Tensor:
    hidden = HiddenCache(backbone, Lease(backbone.num_layers))
    with torch.inference_mode():
        for block in ids[0].split([ids.shape[1] - 4, 4]):
            hidden.clear()
            hidden.push(backbone.embed(block))
            states = alone(hidden.advance_all())
        return backbone.logits(states)


@pytest.mark.parametrize("family", PACKED)
def test_logits_are_as_exact_as_the_models_own(family: str) -> None:
    # longer than the sliding window and than the block of rows that attention takes at a time
    ids = random_ids(200)
    truth = logits(Backbone(make_model(family, torch.float64)), ids)
    for executor, dtype in RUNNING:
        model = make_model(family, dtype)
        packed, generic = Backbone(model, executor=executor), Backbone(model, executor="generic")
        assert packed.executor_name == executor
        error, usual = ((logits(b, ids) - truth).square().mean().sqrt() for b in (packed, generic))
        assert error < 2 * usual


def test_the_rows_of_a_prompt_are_not_multiplied_with_all_that_comes_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    whole = PackedExecutor._weigh

    def weigh(self: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        seen.append(keys.shape[1])
        return whole(self, queries, keys, values, mask)

    backbone = Backbone(make_model("llama"), executor="packed")
    monkeypatch.setattr(PackedExecutor, "_weigh", weigh)
    logits(backbone, random_ids(404))
    first_layer = seen[:7]  # 400 rows, 64 at a time
    assert first_layer == sorted(first_layer)
    assert first_layer[0] < 400 <= first_layer[-1]


@pytest.mark.parametrize("executor", PACKED_EXECUTORS)
@pytest.mark.parametrize("family", PACKED)
def test_a_long_prompt_runs_in_blocks_with_the_same_bits(
    family: str, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is claimed; else with the same numbers."""
    backbone, ids = Backbone(make_model(family), executor=executor), random_ids(150)
    whole = logits(backbone, ids)
    monkeypatch.setattr("selfspec.model.executors.packed_cpu._BLOCK_ROWS", 40)
    again = logits(backbone, ids)
    if backbone.claims.steady_to is None:
        assert torch.equal(again, whole)
    else:
        torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-4)


class Counted:
    """A plain product that notes how many rows it got."""

    def __init__(self, weight: Tensor, seen: list[int]) -> None:
        self.nbytes, self.dtype = weight.nbytes, weight.dtype
        self._weight, self._seen = weight, seen

    def __call__(self, rows: Tensor) -> Tensor:
        self._seen.append(len(rows))
        return nn.functional.linear(rows, self._weight)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 2), (torch.bfloat16, 4)], ids=str)
def test_products_get_as_many_rows_as_they_are_fast_with(
    dtype: torch.dtype, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Products:
        @staticmethod
        def of(*parts: nn.Linear, order: Tensor | None = None) -> Counted:
            return Counted(joined(parts, order)[0], seen)

    monkeypatch.setattr("selfspec.model.executors.packed_cpu.PackedLinear", Products)
    backbone = Backbone(make_model("llama", dtype), executor="packed")
    seen.clear()
    hidden = HiddenCache(backbone, Lease(backbone.num_layers))
    with torch.inference_mode():
        for rows in (1, 2, 3, 4, 5):
            hidden.clear()
            hidden.push(backbone.embed(random_ids(rows)[0]))
            alone(hidden.unembed(alone(hidden.advance_all())))
    assert sorted(set(seen)) == list(range(least, 6))


@pytest.mark.parametrize(("executor", "dtype"), RUNNING)
def test_a_row_has_one_set_of_bits_from_one_row_on(executor: str, dtype: torch.dtype) -> None:
    backbone = Backbone(make_model("llama", dtype), executor=executor)
    check_pinned(backbone, PassShape(), 8)


@pytest.mark.parametrize(
    ("family", "what"),
    [
        ("gemma2", "places of norms"),
        ("cohere", "places of norms"),
        ("gpt_neox", "norms of another kind"),
        ("granite", "residuals"),
    ],
)
def test_families_unlike_llama_are_refused_with_what_differs(family: str, what: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"the packed executor cannot run it: .*{what}"):
        Backbone(make_model(family), executor="packed")


@pytest.mark.parametrize("executor", PACKED_EXECUTORS)
@pytest.mark.parametrize("family", ["gpt2", "persimmon", "gptj", "llama4"])
def test_other_families_keep_their_own_layers(family: str, executor: str) -> None:
    model = make_model(family)
    assert isinstance(Backbone(model)._executor, GenericExecutor)
    with pytest.raises(UnsupportedModel, match=f"{executor} executor cannot run it"):
        Backbone(model, executor=executor)


def test_float64_and_hooked_layers_keep_their_own(model: Any) -> None:
    assert isinstance(Backbone(make_model("llama", torch.float64))._executor, GenericExecutor)
    hooked: Any = make_model("llama")
    hooked.model.layers[2].mlp.register_forward_hook(lambda *_: None)
    assert isinstance(Backbone(hooked)._executor, GenericExecutor)


def test_where_nothing_multiplies_bfloat16_layers_keep_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("selfspec.model.products.fast_bfloat16", lambda: False)
    model = make_model("llama", torch.bfloat16)
    with pytest.raises(UnsupportedModel, match="this processor has no products in bfloat16"):
        Backbone(model, executor="packed")
    assert isinstance(Backbone(make_model("llama"), executor="packed")._executor, PackedExecutor)
    speculator = wrap(model, heads="logit-lens", drafter="exit:threshold=0.05")
    assert speculator.backbone.executor_name == "generic"
    plain = speculator.generate(random_ids(9), max_new_tokens=20, pinned=True, speculate=False)
    drafted = speculator.generate(random_ids(9), max_new_tokens=20, pinned=True)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0


def test_an_executor_that_computes_something_else_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for (kind, name), exact in EXACT.items():
        monkeypatch.setattr(kind, name, lambda self, rows, right=exact: right(self, rows) * 1.001)
    assert isinstance(Backbone(make_model("llama"))._executor, GenericExecutor)


def test_an_unknown_executor_is_refused(model: Any) -> None:
    with pytest.raises(InvalidOption, match="fused, packed, cuda-graph, generic"):
        Backbone(model, executor="fast")


def depends_on_rows(self: Any, rows: Tensor) -> Tensor:
    """A kernel that rounds otherwise for four rows or more."""
    (exact,) = (right for (kind, _), right in EXACT.items() if isinstance(self, kind))
    product: Tensor = exact(self, rows)
    return product * (1 + 2**-22) if len(rows) >= 4 else product


@pytest.mark.parametrize("executor", PACKED_EXECUTORS)
def test_the_probe_finds_kernels_that_depend_on_the_number_of_rows(
    executor: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = Backbone(model, executor=executor)
    check_pinned(backbone, PassShape(), 8)
    kind, name = list(EXACT)[executor == "fused"]
    monkeypatch.setattr(kind, name, depends_on_rows)
    with pytest.raises(PinnedUnavailable, match="do not treat all rows alike"):
        check_pinned(backbone, PassShape(), 8)
    check_pinned(backbone, PassShape(rows=8, slots=64), 8)


def test_pinned_mode_falls_back_to_fixed_shapes(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculator = wrap(model, heads="logit-lens", executor="packed", drafter="exit:threshold=0.05")
    free = PassShape()
    assert speculator.runtime.probe.shape(PassShape(8, 64), 8) == free
    monkeypatch.setattr(PackedLinear, "__call__", depends_on_rows)
    again = wrap(model, heads="logit-lens", executor="packed", drafter="exit:threshold=0.05")
    assert again.runtime.probe.shape(PassShape(8, 64), 8) == PassShape(8, 64)
    plain = again.generate(random_ids(9), max_new_tokens=20, pinned=True, speculate=False)
    drafted = again.generate(random_ids(9), max_new_tokens=20, pinned=True)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0


def test_bits_are_pinned_by_default_where_a_probe_finds_it_so(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pinned(executor: str, **options: Any) -> bool:
        speculator = wrap(
            model, heads="logit-lens", executor=executor, drafter="exit:threshold=0.05"
        )
        return speculator.generate(random_ids(9), max_new_tokens=6, **options).stats.pinned

    assert pinned("packed")
    assert not pinned("packed", pinned=False)
    assert not pinned("packed", speculate=False)  # nothing was probed
    assert not pinned("generic")
    assert pinned("generic", pinned=True)
    monkeypatch.setattr(PackedLinear, "__call__", depends_on_rows)
    assert not pinned("packed")


def test_pinned_mode_is_refused_where_neither_way_holds(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, exact = iter(range(10**6)), PackedLinear.__call__
    monkeypatch.setattr(
        PackedLinear, "__call__", lambda self, rows: exact(self, rows) * (1 + next(calls) * 1e-6)
    )
    backbone_check = pytest.MonkeyPatch()
    backbone_check.setattr("selfspec.model.choosing.check_agreement", lambda *_: None)
    speculator = wrap(model, heads="logit-lens", executor="packed")
    backbone_check.undo()
    with pytest.raises(PinnedUnavailable):
        speculator.generate(random_ids(9), max_new_tokens=5, pinned=True)
