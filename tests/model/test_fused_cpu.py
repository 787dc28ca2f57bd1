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
from selfspec.model.backbone import Backbone
from selfspec.model.executors.fused_cpu import FusedExecutor
from selfspec.model.executors.program import Operation, Program
from selfspec.model.kv_store import Lease
from selfspec.model.parts import parts_of
from selfspec.model.products import CompiledLinear
from tests.models import make_model

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")

DTYPES = [torch.float32, torch.bfloat16]
GROUP, KV_HEADS, SIZE = 3, 2, 24
SLOTS, WIDTH = 256, 32


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def close(found: Tensor, expected: Tensor) -> bool:
    """Up to one rounding of the dtype, which is a relative error, and of what was added up."""
    error = 2**-7 if found.dtype == torch.bfloat16 else 2**-20
    return torch.allclose(found.double(), expected.double(), rtol=error, atol=error)


# --- the numbers


def run(program: Program, rows: Tensor, lease: Lease | None = None, turned: Any = 0) -> Tensor:
    """What the one layer of `program` makes of `rows` [T, d], rotated by `turned` if at all."""
    with torch.inference_mode():
        return program.run(rows, 0, 1, torch.as_tensor(turned), KV_HEADS, lease or Lease(1))


def back(program: Program, width: int, narrow: int, dtype: torch.dtype) -> Operation:
    """From buffer 1, which is narrower, to buffer 0: what it holds, then zeros."""
    return program.product(1, 0, CompiledLinear(torch.eye(width, narrow, dtype=dtype)))


@needs_compiler
@pytest.mark.parametrize("rows", [1, 20])
def test_a_norm_is_that_of_torch(dtype: torch.dtype, rows: int) -> None:
    program = Program(dtype, SIZE, GROUP, [37])
    hidden, weight = torch.randn(rows, 37).to(dtype), torch.randn(37).to(dtype)
    program.add_layer([program.norm(0, 0, weight, 1e-5)])
    expected = nn.functional.rms_norm(hidden.double(), (37,), weight.double(), 1e-5)
    assert close(run(program, hidden), expected)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_products_follow_each_other_and_add(dtype: torch.dtype, rows: int) -> None:
    """Each sum is rounded before it is added, as the model does."""
    first, bias = torch.randn(50, 37).to(dtype), torch.randn(50).to(dtype)
    second, hidden = torch.randn(37, 50).to(dtype), torch.randn(rows, 37).to(dtype)
    one, other = CompiledLinear(first, bias), CompiledLinear(second)
    program = Program(dtype, SIZE, GROUP, [37, 50])
    program.add_layer([program.product(0, 1, one), program.product(1, 0, other, adds=True)])
    assert torch.equal(run(program, hidden), hidden + other(one(hidden)))


@needs_compiler
def test_gates_of_any_size_are_right(dtype: torch.dtype) -> None:
    gates = torch.cat([torch.linspace(-200, 200, 999), torch.tensor([0.0, -1e30, 1e30])]).to(dtype)
    up = torch.randn(len(gates)).to(dtype)
    both = torch.cat([gates, up])[None].repeat(3, 1)
    program = Program(dtype, SIZE, GROUP, [2 * len(up), len(up)])
    program.add_layer([program.gate(0, 1), back(program, 2 * len(up), len(up), dtype)])
    expected = nn.functional.silu(gates.double()) * up.double()
    assert close(run(program, both)[:, : len(up)], expected[None])


@needs_compiler
def test_nothing_is_read_or_written_beside_a_buffer() -> None:
    program = Program(torch.float32, SIZE, GROUP, [37, 50])
    for wrong in (
        lambda: program.norm(0, 0, torch.ones(50), 1e-5),
        lambda: program.product(0, 1, CompiledLinear(torch.ones(51, 37))),
        lambda: program.product(0, 1, CompiledLinear(torch.ones(50, 36))),
        lambda: program.gate(0, 1),
        lambda: program.attend(0, 1, layer=0, kv_heads=1, scaling=1.0),
    ):
        with pytest.raises(ValueError, match="layers differ in width"):
            wrong()
    program.add_layer([program.norm(0, 0, torch.ones(37), 1e-5)])
    assert run(program, torch.empty(0, 37)).shape == (0, 37)
    for rows in (torch.ones(2, 36), torch.ones(2, 37, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="not of these layers"):
            run(program, rows)


@needs_compiler
def test_layers_of_several_widths_are_left_to_others() -> None:
    model: Any = make_model("llama")
    mlp = model.model.layers[2].mlp
    for name, shape in {"gate_proj": (32, 96), "up_proj": (32, 96), "down_proj": (96, 32)}.items():
        setattr(mlp, name, nn.Linear(*shape, bias=False))
    backbone = Backbone(model)
    assert backbone.executor_name == "packed"
    assert "layers differ in width: 192 and 128" in backbone.refused["fused"]


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

    def found(self, widths: list[int]) -> Tensor:
        """In passes of `widths` rows."""
        dtype, all_heads = self.projected.dtype, KV_HEADS * (GROUP + 2) * SIZE
        program = Program(dtype, SIZE, GROUP, [all_heads, KV_HEADS * GROUP * SIZE])
        options = {"scaling": SIZE**-0.5, "eps": 1e-6, "head_norms": self.norms}
        attend = program.attend(0, 1, layer=0, kv_heads=KV_HEADS, window=self.window, **options)
        program.add_layer([attend, back(program, all_heads, KV_HEADS * GROUP * SIZE, dtype)])
        lease, outs = self.held_by_a_lease(), []
        for projected, turned in zip(
            self.projected.split(widths), self.rotations.split(widths), strict=True
        ):
            outs.append(run(program, projected.flatten(1), lease, turned))
        whole = torch.cat(outs)[:, : KV_HEADS * GROUP * SIZE]
        return whole.unflatten(1, (KV_HEADS * GROUP, SIZE))

    def held_by_a_lease(self) -> Lease:
        """Keys in panels of 16 positions, values one by one, filled up to WIDTH."""
        lease = Lease(1)
        like = self.keys.new_empty(1, KV_HEADS, 0, WIDTH)
        ((keys, values),) = lease.room(SLOTS - 60, 0, 1, like)
        assert keys.shape[2] == SLOTS
        panels = self.keys.unflatten(1, (-1, 16)).transpose(2, 3).flatten(2)
        keys.copy_(nn.functional.pad(panels, (0, 16 * (WIDTH - SIZE))).view_as(keys))
        values[..., :SIZE] = self.values
        lease.extend(self.held, 0, 1)
        return lease

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
def test_attention_is_that_of_torch(dtype: torch.dtype, held: int, window: int) -> None:
    """Within one block of 64 positions and across several."""
    rows = Attended(dtype, held, 90, window)
    assert close(rows.found([90]), rows.expected())


@needs_compiler
def test_what_is_behind_a_row_is_not_looked_at(dtype: torch.dtype) -> None:
    """Not even where a rejected draft, or a later row of the pass, gave no number."""
    clean, spoilt = Attended(dtype, 60, 12), Attended(dtype, 60, 12)
    spoilt.keys[:, 60:] = torch.nan
    spoilt.values[:, 60:] = torch.nan
    spoilt.projected[7:] = torch.nan
    assert torch.equal(clean.found([12])[:7], spoilt.found([12])[:7])


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for window in (0, 17):
            alone = Attended(dtype, 60, 12, window).found([1] * 12)  # across a block's end
            for widths in ([12], [5, 1, 4, 2], [9, 3]):
                together = Attended(dtype, 60, 12, window).found(widths)
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


@needs_compiler
def test_a_broken_library_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def broken(*_: object) -> ctypes.CDLL:
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(ctypes, "CDLL", broken)
    assert Backbone(make_model("llama")).executor_name == "packed"
