"""Weights for compiled code, including quantised blocks: sums are exact and in a fixed order."""

from __future__ import annotations

import copy
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from selfspec.files import cache_folder
from selfspec.model import weights
from selfspec.model.compiler import MACROS, SOURCE, TARGETS, Target, library_name, make_library
from selfspec.model.weights import DTYPES, FORMATS, ZEROED, CompiledLinear, QuantisedWeight
from tests.gguf_models import de_quantised, random_blocks, usual_blocks
from tests.models import needs_compiler, noted

pytestmark = needs_compiler


def made_weights(out: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight [out, in] and a bias, of many magnitudes."""
    generator = torch.Generator().manual_seed(out * 1000 + inner)
    scale = torch.exp2(torch.randint(-20, 4, (out, 1), generator=generator).float())
    weight = torch.randn(out, inner, generator=generator) * scale
    return weight.to(dtype), torch.randn(out, generator=generator).to(dtype)


def inputs(rows: int, inner: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows)).to(dtype)


def close(found: Tensor, rows: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether `found` [rows, out] is as exact as float32 sums; bfloat16 results are rounded."""
    truth = rows.double() @ weight.double().T + bias.double()
    sums = (rows.double().abs() @ weight.double().abs().T) * rows.shape[1] * 2**-24
    rounding = truth.abs() * 2**-8 if found.dtype == torch.bfloat16 else truth.abs() * 2**-24
    return bool(((found.double() - truth).abs() <= sums + rounding + 1e-30).all())


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
def test_the_bits_of_a_row_depend_only_on_it(out: int, inner: int, dtype: torch.dtype) -> None:
    """Alone, among 2 to 17 others, among 63 and 511; on one thread and on two."""
    linear, x = CompiledLinear(*made_weights(out, inner, dtype)), inputs(512, inner, dtype)
    expected = linear(x)
    for count in (1, 2):
        torch.set_num_threads(count)
        for rows in (*range(1, 18), 64, 512):
            assert torch.equal(linear(x[:rows]), expected[:rows]), rows
            assert torch.equal(linear(x[-rows:]), expected[-rows:]), rows


def test_a_chain_adds_from_the_first_input_to_the_last() -> None:
    """2^24, then ones: each one is lost if added singly, none if the ones are added up first."""
    row, weight = torch.ones(1, 64), torch.ones(20, 64)
    weight[:, 0] = 2**24
    assert (CompiledLinear(weight)(row) == 2**24).all()
    assert (CompiledLinear(weight.flip(1))(row) > 2**24).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_numbers_are_kept(dtype: torch.dtype) -> None:
    """Infinities, not-a-number and the largest numbers, as float32 sums have them."""
    top = torch.finfo(dtype).max
    weight = torch.eye(5, dtype=dtype)
    for value in (float("inf"), -float("inf"), float("nan"), top, -top, 0.0, 2.0**-120):
        row = torch.full((1, 5), 0.0, dtype=dtype)
        row[0, 2] = value
        product = CompiledLinear(weight)(row)[0, 2]
        assert torch.equal(product, row[0, 2]) or (product.isnan() and row[0, 2].isnan())


def test_empty_input_gives_empty_output_and_wrong_input_is_refused() -> None:
    linear = CompiledLinear(torch.randn(20, 8))
    assert linear(torch.empty(0, 8)).shape == (0, 20)
    for rows in (torch.empty(2, 7), torch.empty(2, 9), torch.empty(2, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="not of this layer"):
            linear(rows)


def test_joined_layers_in_another_order() -> None:
    first, second = nn.Linear(7, 5), nn.Linear(7, 4, bias=False)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 3, 7)
    expected = torch.cat([first(x), second(x)], -1)[..., order]
    output = CompiledLinear.of(first, second, order=order)(x)
    assert output.shape == (2, 3, 9)
    assert torch.allclose(output, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "target"),  # registers for bfloat16 change nothing in float32
    [(dtype, target) for dtype in DTYPES for target in TARGETS["x86_64"]
     if dtype == torch.bfloat16 or "avx512_bf16" not in target.needs],
    ids=lambda value: getattr(value, "name", str(value)),
)  # fmt: skip
def test_it_compiles_for_every_processor_and_runs_if_this_machine_has_it(
    target: Target, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    macro = MACROS[dtype == torch.bfloat16]
    strict = target._replace(flags=f"{target.flags} -Wall -Wextra -Werror -O0")
    # cached like all compiled code: the name has a digest of source and flags
    library = cache_folder() / "compiled" / library_name(SOURCE, macro, strict)
    if not library.exists():
        make_library(tmp_path / library.name, SOURCE, macro, strict)
        shutil.move(tmp_path / library.name, library)
    if not target.needs <= weights.processor_features():
        pytest.skip(f"compiled; this processor does not run {target.name}")
    monkeypatch.setattr(weights, "compiled_library", lambda *_, **__: weights._load(library))
    monkeypatch.setattr(weights, "library", weights.library.__wrapped__)
    (weight, bias), x = made_weights(50, 333, dtype), inputs(40, 333, dtype)
    linear = CompiledLinear(weight, bias)
    assert close(linear(x), x, weight, bias)
    for rows in (1, 2, 5, 9):
        assert torch.equal(linear(x[:rows]), linear(x)[:rows])


# --- weights kept as blocks: their values, sums and tensors


def weight_of(
    kind: str, dtype: torch.dtype, out: int = 53, inner: int = 512, *, usual: bool = True
) -> tuple[QuantisedWeight, Tensor]:
    """Blocks with permuted rows, and the numbers that the gguf package decodes from them."""
    blocks = (usual_blocks if usual else random_blocks)(kind, out, inner)
    rows = torch.from_numpy(np.random.default_rng(1).permutation(out))
    weight = QuantisedWeight(torch.from_numpy(blocks), FORMATS[kind], dtype, rows)
    return weight, de_quantised(kind, blocks)[rows].to(dtype)


def zeroed(bits: int, dtype: torch.dtype) -> tuple[QuantisedWeight, Tensor]:
    """Blocks with a zero point, and their numbers, which the tests of hub check."""
    blocks = usual_blocks(f"Q{bits}_0", 53, 512).reshape(53, 16, -1)
    blocks = np.insert(blocks, 2, np.random.default_rng(bits).integers(0, 8, (53, 16)), axis=-1)
    weight = QuantisedWeight(torch.from_numpy(blocks.reshape(53, -1)), ZEROED[bits], dtype)
    return weight, weight.expanded()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_those_of_the_gguf_package(kind: str, dtype: torch.dtype) -> None:
    weight, expected = weight_of(kind, dtype, usual=False)  # with denormal and large scales
    assert weight.shape == expected.shape
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    assert torch.equal(weight.expanded().view(bits), expected.view(bits))  # signs of zeros, too


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*FORMATS, *ZEROED])
def test_sums_are_exact_and_equal_in_any_pass(kind: str | int, dtype: torch.dtype) -> None:
    make: Any = zeroed if isinstance(kind, int) else weight_of
    weight, numbers = make(kind, dtype)
    x = inputs(600, weight.shape[1], dtype)  # in more than one piece
    x[-2:] *= torch.tensor([[2.0**-106], [2.0**-125]])  # smaller numbers are zero in registers
    layer = CompiledLinear(weight)
    assert layer.nbytes < 0.75 * numbers.nbytes
    output = layer(x)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 12, 17):
        assert torch.equal(layer(x[-rows:]), output[-rows:]), rows
    exact = make(kind, torch.float32)[1].double().T  # no weight is rounded
    sizes = x.double().abs() @ exact.abs()
    error = (output.double() - x.double() @ exact).abs()
    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-20
    assert bool((error <= (x.double() @ exact).abs() * rounding + sizes * 2**-20 + 1e-26).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_several_formats_run_as_one(dtype: torch.dtype) -> None:
    pairs = [weight_of(kind, dtype, out) for kind, out in (("Q5_K", 64), ("Q6_K", 32), ("Q5_0", 7))]
    plain = torch.randn(16, 512).to(dtype)
    layers = [linear(weight) for weight, _ in pairs]
    layers.insert(1, linear(plain))
    numbers = torch.cat([pairs[0][1], plain, pairs[1][1], pairs[2][1]])
    x = torch.randn(5, 512).to(dtype)
    expected = torch.cat([CompiledLinear.of(layer)(x) for layer in layers], -1)
    assert torch.equal(CompiledLinear.of(*layers)(x), expected)
    order = torch.cat([torch.arange(64).flip(0), torch.arange(64, 119)])
    assert torch.equal(CompiledLinear.of(*layers, order=order)(x), expected[:, order])
    mixed = torch.arange(119).flip(0)  # panels with two formats become numbers
    joined = CompiledLinear.of(*layers, order=mixed)
    assert torch.equal(joined(x), CompiledLinear(numbers[mixed])(x))
    assert joined.nbytes >= numbers.nbytes


def linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


@pytest.mark.parametrize("biased", [False, True])
def test_large_layers_are_expanded_in_pieces(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, numbers = weight_of("Q4_K", torch.float32)
    bias = torch.randn(len(numbers)) if biased else None
    monkeypatch.setattr(weights, "_PIECE", 5 * 512)
    pieces = noted(monkeypatch, QuantisedWeight, "expanded", lambda _, rows: len(rows))
    x = torch.randn(2, 3, 512)
    expected = nn.functional.linear(x, numbers, bias)
    output = nn.functional.linear(input=x, weight=weight, bias=bias)
    assert torch.allclose(output, expected, rtol=1e-5, atol=1e-5)
    assert max(pieces) == 5


@pytest.mark.parametrize("kept", [False, True])
def test_a_quantised_weight_behaves_like_a_tensor(kept: bool) -> None:
    weight, numbers = weight_of("Q8_0", torch.bfloat16)
    layer = linear(weight)
    if kept:
        weights.keep_numbers(layer)
    x, ids = torch.randn(2, 3, 512).bfloat16(), torch.tensor([[3, 52], [0, 3]])
    assert torch.equal(layer(x), nn.functional.linear(x, numbers))
    assert torch.equal(nn.functional.embedding(ids, layer.weight), numbers[ids])
    assert torch.equal(x @ layer.weight.T, x @ numbers.T)
    assert torch.equal(layer.weight[5:9], numbers[5:9])
    assert torch.equal(layer.weight[:, 5:9], numbers[:, 5:9])
    assert torch.equal(layer.weight[torch.tensor([4, 4, 1])], numbers[[4, 4, 1]])
    assert torch.equal(layer.weight[numbers[:, 0] > 0], numbers[numbers[:, 0] > 0])
    assert torch.equal(layer.weight.float(), numbers.float())
    assert torch.equal(layer.weight.detach().reshape(-1), numbers.reshape(-1))
    detached: Any = layer.weight.detach()
    assert (detached.plain is not None) == kept
    assert torch.equal(torch.empty_like(numbers).copy_(layer.weight), numbers)
    for copied in pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer):
        assert torch.equal(copied.weight, numbers)
        copied.weight.zero_()  # a copy may be changed
    assert torch.equal(layer.weight.clone(), numbers)
    assert layer.to(torch.bfloat16).weight is layer.weight
    assert torch.equal(copied.double().weight, torch.zeros_like(numbers).double())


def test_rows_by_a_list_equal_rows_by_a_tensor() -> None:
    blocks, numbers = zeroed(4, torch.bfloat16)  # all of a file's rows, in order
    for rows in torch.arange(53), torch.arange(53).flip(0):
        weight: Any = blocks if rows[0] == 0 else weights.rows_of(blocks, rows)
        assert torch.equal(weight.listed([7, 0, 7]), numbers[rows[[7, 0, 7]]])
        for wrong in (-54, 53):
            with pytest.raises(IndexError):
                weight.listed([0, wrong])


@given(
    size=st.integers(1, 700),
    count=st.integers(1, 12),
    scale=st.sampled_from([0.1, 5.0, 200.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_the_likeliest_are_those_of_a_softmax(
    size: int, count: int, scale: float, dtype: torch.dtype
) -> None:
    """The first of equal logits comes first; with so few values many are equal."""
    count, generator = min(count, size), torch.Generator().manual_seed(size)
    logits = torch.randint(-9, 10, (3, size), generator=generator) * scale / 9
    ids = torch.randint(200_000, (size,), generator=generator)
    top = weights.likeliest(logits, 1.3, count, ids, dtype)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(top[:, :count], ids[order].float())
    chances = (logits.double() / 1.3).softmax(-1).gather(-1, order)
    torch.testing.assert_close(top[:, count:].double(), chances, rtol=3e-5, atol=1e-30)


def test_blocks_cannot_be_changed() -> None:
    weight, numbers = weight_of("Q4_0", torch.float32)
    layer = linear(weight)
    add = partial(weight.add_, 1)
    for change in (weight.zero_, add, layer.double, layer.half, layer.share_memory):
        with pytest.raises(RuntimeError, match="blocks of a file cannot be changed"):
            change()
    assert torch.equal(weight.expanded(), numbers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_eight_bits_each_number_is_rounded_to_a_step_of_its_group(dtype: torch.dtype) -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[1, :32], weight[2, 32:] = 0.0, 1e-30
    quantised = weights.in_8_bits(weight)
    assert isinstance(quantised, QuantisedWeight)
    assert quantised.dtype == dtype
    groups = weight.float().view(5, 2, 32)
    steps = groups.abs().amax(-1, keepdim=True) / 127
    error = (quantised.expanded().float().view(5, 2, 32) - groups).abs()
    rounding = 2**-8 if dtype == torch.bfloat16 else 0.0
    assert bool((error <= steps * 0.51 + groups.abs() * rounding + 1e-29).all())


def test_weights_that_do_not_fit_eight_bits_are_kept() -> None:
    for weight in (torch.randn(3, 33), torch.full((3, 32), 1e8), weight_of("Q4_0", DTYPES[0])[0]):
        assert weights.in_8_bits(weight) is weight
