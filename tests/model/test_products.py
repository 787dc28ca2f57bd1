"""Products of our own: exact sums in one order, whatever runs beside a row; for every processor."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from selfspec.files import cache_folder
from selfspec.model import compiled, weights
from selfspec.model.compiler import TARGETS, Target, library_name, make_library
from selfspec.model.weights import CompiledLinear

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")

DTYPES = [torch.float32, torch.bfloat16]

PROCESSORS = [Target("x86-64", "-march=x86-64"), *TARGETS["x86_64"]]
"""Vectors of four and no fused additions, and what wheels are built for."""


def made_weights(out: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[out, in] and a bias, of many magnitudes."""
    made = torch.Generator().manual_seed(out * 1000 + inner)
    scale = torch.exp2(torch.randint(-20, 4, (out, 1), generator=made).float())
    weight = torch.randn(out, inner, generator=made) * scale
    return weight.to(dtype), torch.randn(out, generator=made).to(dtype)


def inputs(rows: int, inner: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows)).to(dtype)


def bound(weight: Tensor, rows: Tensor) -> Tensor:
    """How far sums of float32 may be from the truth, [rows, out]; bfloat16 results are rounded."""
    size = rows.double().abs() @ weight.double().abs().T
    return size * rows.shape[1] * 2**-24


def close(found: Tensor, rows: Tensor, weight: Tensor, bias: Tensor) -> bool:
    truth = rows.double() @ weight.double().T + bias.double()
    rounding = truth.abs() * 2**-8 if found.dtype == torch.bfloat16 else truth.abs() * 2**-24
    return bool(((found.double() - truth).abs() <= bound(weight, rows) + rounding + 1e-30).all())


@given(
    rows=st.integers(1, 40),
    inner=st.integers(1, 70),
    out=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
)
def test_sums_are_right_at_any_size(rows: int, inner: int, out: int, dtype: torch.dtype) -> None:
    weight, bias = made_weights(out, inner, dtype)
    x = inputs(rows, inner, dtype)
    assert close(CompiledLinear(weight, bias)(x), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out", "inner"), [(96, 32), (50, 2100), (1000, 577)])
def test_the_bits_of_a_row_depend_on_the_row(out: int, inner: int, dtype: torch.dtype) -> None:
    """Alone, among 2 to 17 others, among 63 and 511; on one thread and on two."""
    linear, x = CompiledLinear(*made_weights(out, inner, dtype)), inputs(512, inner, dtype)
    whole = linear(x)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (*range(1, 18), 64, 512):
                assert torch.equal(linear(x[:rows]), whole[:rows]), rows
                assert torch.equal(linear(x[-rows:]), whole[-rows:]), rows
    finally:
        torch.set_num_threads(threads)


def test_a_chain_adds_from_the_first_input_to_the_last() -> None:
    """2^24, then ones: each is lost when it comes alone, and none when they are added up first."""
    inner = 64
    row = torch.ones(1, inner)
    weight = torch.ones(20, inner)
    weight[:, 0] = 2**24
    assert (CompiledLinear(weight)(row) == 2**24).all()
    assert (CompiledLinear(weight.flip(1))(row) > 2**24).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_at_the_ends_stay_what_they_are(dtype: torch.dtype) -> None:
    """Infinities, not-a-number and the largest numbers, as float32 sums have them."""
    top = torch.finfo(dtype).max
    weight = torch.eye(5, dtype=dtype)
    for value in (float("inf"), -float("inf"), float("nan"), top, -top, 0.0, 2.0**-120):
        row = torch.full((1, 5), 0.0, dtype=dtype)
        row[0, 2] = value
        found = CompiledLinear(weight)(row)[0, 2]
        assert torch.equal(found, row[0, 2]) or (found.isnan() and row[0, 2].isnan())


def test_no_rows_are_no_rows_and_others_are_refused() -> None:
    linear = CompiledLinear(torch.randn(20, 8))
    assert linear(torch.empty(0, 8)).shape == (0, 20)
    for rows in (torch.empty(2, 7), torch.empty(2, 9), torch.empty(2, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="not of this layer"):
            linear(rows)


def test_layers_side_by_side_in_another_order() -> None:
    first, second = nn.Linear(7, 5), nn.Linear(7, 4, bias=False)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 3, 7)
    expected = torch.cat([first(x), second(x)], -1)[..., order]
    found = CompiledLinear.of(first, second, order=order)(x)
    assert found.shape == (2, 3, 9)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("target", PROCESSORS, ids=lambda target: target.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_compiles_for_every_processor_and_runs_where_it_is_one(
    target: Target, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = target.needs <= compiled._features()
    constants = {"BFLOAT16": int(dtype == torch.bfloat16)}
    quickly = "" if runs else " -O0"
    strict = target._replace(flags=f"{target.flags} -Wall -Wextra -Werror{quickly}")
    # kept like all that is compiled: its name has a digest of source and flags
    library = cache_folder() / "compiled" / library_name(weights._PRODUCTS, constants, strict)
    if not library.exists():
        make_library(tmp_path / library.name, weights._PRODUCTS, constants, strict)
        shutil.move(tmp_path / library.name, library)
    if not runs:
        pytest.skip(f"compiled; this processor does not run {target.name}")
    monkeypatch.setattr(weights, "compiled", lambda *_, **__: compiled._load(library))
    monkeypatch.setattr(weights, "_library", weights._library.__wrapped__)
    (weight, bias), x = made_weights(50, 333, dtype), inputs(40, 333, dtype)
    linear = CompiledLinear(weight, bias)
    assert close(linear(x), x, weight, bias)
    for rows in (1, 2, 5, 9):
        assert torch.equal(linear(x[:rows]), linear(x)[:rows])
