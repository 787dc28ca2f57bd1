"""Compiled loops: what torch would compute, each row by itself; and what happens without them."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selfspec.errors import UnsupportedModel
from selfspec.files import cache_folder
from selfspec.model.backbone import Backbone
from selfspec.model.compiled import compiled, compiler
from selfspec.model.executors.fused_cpu import FusedExecutor, _Kernels, _Shape
from selfspec.model.executors.packed_cpu import RowNorm
from selfspec.model.parts import parts_of
from tests.models import make_model

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")

DTYPES = [torch.float32, torch.bfloat16]
GROUP, KV_HEADS, SIZE = 3, 2, 24
SLOTS, WIDTH = 256, 32


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def kernels(dtype: torch.dtype) -> _Kernels:
    return _Kernels(dtype, head_size=SIZE, group=GROUP)


def close(found: Tensor, expected: Tensor) -> bool:
    """Up to one rounding of the dtype, which is a relative error, and of what was added up."""
    error = 2**-7 if found.dtype == torch.bfloat16 else 2**-20
    return torch.allclose(found.double(), expected.double(), rtol=error, atol=error)


# --- the numbers


@needs_compiler
@pytest.mark.parametrize("rows", [1, 20])
def test_a_norm_adds_first(kernels: _Kernels, dtype: torch.dtype, rows: int) -> None:
    hidden, added = torch.randn(2, rows, 37).to(dtype)
    by, out = RowNorm(torch.randn(37).to(dtype), 1e-5), torch.empty(rows, 37, dtype=dtype)
    total = hidden + added
    kernels.norm(hidden, added, by, out)
    assert torch.equal(hidden, total)
    expected = nn.functional.rms_norm(total.double(), (37,), by.weight.double(), by.eps)
    assert close(out, expected)
    kernels.norm(hidden, None, by, out)
    assert torch.equal(hidden, total)
    assert close(out, expected)


@needs_compiler
def test_gates_of_any_size_are_right(kernels: _Kernels, dtype: torch.dtype) -> None:
    gates = torch.cat([torch.linspace(-200, 200, 999), torch.tensor([0.0, -1e30, 1e30])]).to(dtype)
    up = torch.randn(len(gates)).to(dtype)
    both, out = torch.cat([gates, up])[None].repeat(3, 1), torch.empty(3, len(up), dtype=dtype)
    kernels.gate(both, out)
    expected = nn.functional.silu(gates.double()) * up.double()
    assert close(out, expected[None])


class Attended:
    """Rows behind `held` random positions, attended to by compiled code."""

    def __init__(self, dtype: torch.dtype, held: int, rows: int, window: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)
        heads = KV_HEADS * (GROUP + 2)
        self.held, self.window = held, window
        self.projected = torch.randn(rows, heads, SIZE, generator=generator).to(dtype)
        angles = torch.rand(rows, 1, SIZE // 2, generator=generator) * 7
        self.rotations = torch.polar(torch.ones_like(angles), angles)
        self.norms = torch.rand(KV_HEADS * (GROUP + 1), SIZE, generator=generator)
        self.keys, self.values = torch.randn(2, KV_HEADS, SLOTS, SIZE, generator=generator).to(
            dtype
        )

    def found(self, kernels: _Kernels, widths: list[int]) -> Tensor:
        """In passes of `widths` rows."""
        outs, held = [], self.held
        values = nn.functional.pad(self.values, (0, WIDTH - SIZE)).contiguous()
        panels = self.keys.unflatten(1, (-1, 16)).transpose(2, 3).flatten(2)  # 16 positions each
        keys = nn.functional.pad(panels, (0, 16 * (WIDTH - SIZE))).contiguous()
        for projected, rotations in zip(
            self.projected.split(widths), self.rotations.split(widths), strict=True
        ):
            shape = _Shape(len(projected), KV_HEADS, held, self.window, SLOTS, SIZE**-0.5, 1e-6)
            out = projected.new_empty(len(projected), KV_HEADS * GROUP, SIZE)
            kernels.attend(shape, projected, self.norms, rotations, keys, values, out)
            outs.append(out)
            held += len(projected)
        return torch.cat(outs)

    def expected(self) -> Tensor:
        """By torch, in float64."""
        parts = self.projected.double()
        turned, new_values = parts.split([KV_HEADS * (GROUP + 1), KV_HEADS], dim=1)
        turned = nn.functional.rms_norm(turned, (SIZE,), eps=1e-6) * self.norms
        pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2))) * self.rotations
        queries, new_keys = (
            torch.view_as_real(pairs).flatten(2).split([KV_HEADS * GROUP, KV_HEADS], 1)
        )
        end = self.held + len(parts)
        keys, values = self.keys[:, :end].double(), self.values[:, :end].double()
        keys[:, self.held :] = new_keys.movedim(0, 1).to(self.keys.dtype)
        values[:, self.held :] = new_values.movedim(0, 1)
        behind = torch.arange(self.held, end)[:, None] - torch.arange(end)
        seen = (behind >= 0) & (behind < (self.window or end))
        return nn.functional.scaled_dot_product_attention(
            queries.movedim(0, 1),
            keys.repeat_interleave(GROUP, 0),
            values.repeat_interleave(GROUP, 0),
            attn_mask=seen,
        ).movedim(0, 1)


@needs_compiler
@pytest.mark.parametrize("window", [0, 5, 70])
@pytest.mark.parametrize("held", [0, 6, 130])
def test_attention_is_that_of_torch(
    kernels: _Kernels, dtype: torch.dtype, held: int, window: int
) -> None:
    """Within one block of 64 positions and across several."""
    rows = Attended(dtype, held, 90, window)
    assert close(rows.found(kernels, [90]), rows.expected())


@needs_compiler
def test_what_is_behind_a_row_is_not_looked_at(kernels: _Kernels, dtype: torch.dtype) -> None:
    """Not even where a rejected draft, or a later row of the pass, gave no number."""
    clean, spoilt = Attended(dtype, 60, 12), Attended(dtype, 60, 12)
    spoilt.keys[:, 60:] = torch.nan
    spoilt.values[:, 60:] = torch.nan
    spoilt.projected[7:] = torch.nan
    assert torch.equal(clean.found(kernels, [12])[:7], spoilt.found(kernels, [12])[:7])


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_company(
    kernels: _Kernels, dtype: torch.dtype, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for window in (0, 17):
            alone = Attended(dtype, 60, 12, window).found(kernels, [1] * 12)  # across a block's end
            for widths in ([12], [5, 1, 4, 2], [9, 3]):
                together = Attended(dtype, 60, 12, window).found(kernels, widths)
                assert torch.equal(alone, together)
    finally:
        torch.set_num_threads(before)


# --- where they cannot be had


def test_another_activation_keeps_its_own() -> None:
    model = make_model("llama", hidden_act="gelu")
    assert Backbone(model).executor_name == "packed"
    with pytest.raises(UnsupportedModel, match="the activation is gelu"):
        Backbone(model, executor="fused")


def test_norms_in_another_dtype_are_not_read() -> None:
    model: Any = make_model("llama")
    model.model.layers[1].input_layernorm.bfloat16()
    with pytest.raises(ValueError, match=r"those of a norm are torch\.bfloat16"):
        FusedExecutor(parts_of(model), model.lm_head)


def test_without_a_compiler_packed_weights_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert Backbone(make_model("llama")).executor_name == "packed"
    with pytest.raises(UnsupportedModel, match=r"no compiled library: .*no-such-compiler"):
        Backbone(make_model("llama"), executor="fused")


@needs_compiler
def test_with_one_they_run() -> None:
    backbone = Backbone(make_model("llama"))
    assert backbone.executor_name == "fused"
    assert isinstance(backbone._executor, FusedExecutor)


def test_the_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (compiler() is None) == (shutil.which("c++") is None)
    monkeypatch.setenv("CXX", "echo a compiler")
    assert compiler() == "a compiler --version"


@needs_compiler
def test_a_file_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return NUMBER; }', encoding="utf-8")
    assert compiled(source, NUMBER=42).answer() == 42
    made = list(cache_folder().rglob("*"))
    monkeypatch.setattr("selfspec.model.compiled._make", None)
    assert compiled(source, NUMBER=42).answer() == 42
    with pytest.raises(TypeError):
        compiled(source, NUMBER=43)
    assert list(cache_folder().rglob("*")) == made


@needs_compiler
def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "answer.cpp"
    source.write_text("#error not today", encoding="utf-8")
    with pytest.raises(ValueError, match="the compiler failed"):
        compiled(source)
    assert not list((cache_folder() / "compiled").iterdir())


@needs_compiler
def test_a_broken_library_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def broken(*_: object) -> ctypes.CDLL:
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(ctypes, "CDLL", broken)
    assert Backbone(make_model("llama")).executor_name == "packed"
