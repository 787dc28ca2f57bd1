"""Compiled layers: torch's results, with bits of a row that no other row of the pass changes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selfspec.model.backbone import Backbone
from selfspec.model.fused import FusedExecutor, Operation, Program
from selfspec.model.kv import POSITIONS, KVCache, PageLayout, Rows, Span
from selfspec.model.recipe import _ACTIVATIONS, Activation, Attention, Norm, Rotation
from selfspec.model.weights import CompiledLinear
from tests.models import make_model, needs_compiler, noted, random_ids

pytestmark = needs_compiler

DTYPES = [torch.float32, torch.bfloat16]
GROUP, KV_HEADS, SIZE = 3, 2, 24
WIDTH = 32


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether values are equal up to one rounding of the dtype, relative and absolute."""
    error = 2**-7 if found.dtype == torch.bfloat16 else 2**-20
    return torch.allclose(found.double(), expected.double(), rtol=error, atol=error)


# --- the numbers


def rms(weight: Tensor, **fields: Any) -> Norm:
    """Llama's norm, except for `fields`."""
    defaults: dict[str, Any] = {"bias": None, "eps": 1e-5, "centred": False, "rounds": True}
    return Norm(weight.float(), **defaults | fields)


def attention(**fields: Any) -> Attention:
    """GROUP * KV_HEADS queries with whole heads rotated, except for `fields`."""
    defaults: dict[str, Any] = {
        **{"projections": (), "order": torch.empty(0), "output": nn.Identity()},
        **{"heads": GROUP * KV_HEADS, "kv_heads": KV_HEADS, "size": SIZE},
        **{"rotation": Rotation(SIZE, False, slice(0, None, 2)), "row_norms": None},
        **{"head_norms": None, "norms_last": False},
        **{"scaling": SIZE**-0.5, "softcap": None, "window": None},
    }
    return Attention(**defaults | fields)


def program_of(dtype: torch.dtype, width: int, other: int) -> Program:
    program = Program(dtype, width)
    assert program.buffer("other", other) == 1
    return program


def run(
    program: Program,
    rows: Tensor,
    kv: KVCache | None = None,
    turned: Tensor | None = None,
    parents: list[int] | None = None,
) -> Tensor:
    """Run the one layer of `program` on `rows` [T, d], rotated by `turned` if given."""
    turns = torch.empty(0) if turned is None else turned.contiguous()
    span = Span(kv or KVCache(1), len(rows), 0, None if parents is None else tuple(parents))
    with torch.inference_mode():
        return program.run(rows, 0, 1, [turns], [span])[0]


def back(program: Program, width: int, narrow: int, dtype: torch.dtype) -> Operation:
    """Copy buffer 1, which is narrower, to buffer 0, padded with zeros."""
    return program.linear(1, 0, CompiledLinear(torch.eye(width, narrow, dtype=dtype)))


def test_a_norm_subtracts_the_mean_and_adds_a_multiple(dtype: torch.dtype) -> None:
    program, eye = program_of(dtype, 37, 37), CompiledLinear(torch.eye(37, dtype=dtype))
    hidden, weight, bias = torch.randn(9, 37).to(dtype) + 3, torch.randn(37), torch.randn(37)
    norm = rms(weight, bias=bias, centred=True, rounds=False)
    wide = replace(norm, weight=weight.double())  # as under another default dtype
    program.add_layer([program.linear(0, 1, eye), program.norm(1, 0, wide, adds=0.5)])
    numbers = weight.double(), bias.double()
    normed = nn.functional.layer_norm(hidden.double(), (37,), *numbers, 1e-5)
    output = run(program, hidden)
    assert close(output, hidden + (normed.to(dtype) * 0.5).double())
    assert torch.equal(output, hidden + norm(hidden) * 0.5) or dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_linear_layers_follow_each_other_and_add(dtype: torch.dtype, rows: int) -> None:
    """Each sum is rounded before it is added, as the model does."""
    first, bias = torch.randn(50, 37).to(dtype), torch.randn(50).to(dtype)
    second, hidden = torch.randn(37, 50).to(dtype), torch.randn(rows, 37).to(dtype)
    up, down = CompiledLinear(first, bias), CompiledLinear(second)
    program = program_of(dtype, 37, 50)
    program.add_layer([program.linear(0, 1, up), program.linear(1, 0, down, adds=1)])
    assert torch.equal(run(program, hidden), hidden + down(up(hidden)))


@pytest.mark.parametrize("function", list(Activation))
def test_activations_of_any_size_are_right(dtype: torch.dtype, function: Activation) -> None:
    x = torch.cat([torch.linspace(-200, 200, 999), torch.linspace(-6, 6, 99)])
    x = torch.cat([x, torch.tensor([0.0, -1e18, 1e18])]).to(dtype)
    times, width = torch.randn(len(x)).to(dtype), len(x)
    expected = _ACTIVATIONS[function](x.double())
    program = program_of(dtype, 2 * width, width)
    gate = program.activate(0, 1, function, gated=True)
    program.add_layer([gate, back(program, 2 * width, width, dtype)])
    output = run(program, torch.cat([x, times])[None].repeat(3, 1))[:, :width]
    assert close(output, expected.to(dtype).double() * times.double())
    program = program_of(dtype, width, width)
    eye = CompiledLinear(torch.eye(width, dtype=dtype))
    program.add_layer([program.activate(0, 1, function, gated=False), program.linear(1, 0, eye)])
    assert close(run(program, x[None]), expected[None])


def test_nothing_is_read_or_written_outside_a_buffer() -> None:
    program = program_of(torch.float32, 37, 50)
    for build in (
        lambda: program.norm(0, 1, rms(torch.ones(37))),
        lambda: program.linear(0, 1, CompiledLinear(torch.ones(51, 37))),
        lambda: program.linear(0, 1, CompiledLinear(torch.ones(50, 36))),
        lambda: program.activate(0, 1, Activation.SILU, gated=True),
        lambda: program.activate(0, 1, Activation.SILU, gated=False),
        lambda: program.attend(0, 1, attention(), rotation=0),
    ):
        with pytest.raises(ValueError, match="layers differ in width"):
            build()
    with pytest.raises(ValueError, match="a norm of 30 numbers does not fit 50"):
        program.norm(1, 1, rms(torch.ones(30)), at=21)
    program.add_layer([program.norm(0, 0, rms(torch.ones(37)), adds=1)])
    assert run(program, torch.empty(0, 37)).shape == (0, 37)
    for rows in (torch.ones(2, 36), torch.ones(2, 37, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="not of these layers"):
            run(program, rows)
    for parents in ([-1, 1], [-2, -1], [-1]):
        with pytest.raises(ValueError, match="are no parents of 2 rows"):
            run(program, torch.ones(2, 37), parents=parents)


def test_layers_of_several_widths_run() -> None:
    model: Any = make_model("llama")
    mlp = model.model.layers[2].mlp
    for name, shape in {"gate_proj": (32, 96), "up_proj": (32, 96), "down_proj": (96, 32)}.items():
        setattr(mlp, name, nn.Linear(*shape, bias=False))
    backbone = Backbone(model)
    assert backbone.executor_name == "fused"


class Attended:
    """Rows after `held` random positions; compiled code computes their attention."""

    def __init__(
        self, dtype: torch.dtype, held: int, rows: int, window: int = 0, softcap: float = 1e9
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        heads = KV_HEADS * (GROUP + 2)
        self.held, self.window, self.softcap = held, window, softcap
        self.slots = 256 if held + rows <= 256 else 1280
        self.projected = torch.randn(rows, heads, SIZE, generator=generator).to(dtype)
        angles = torch.rand(rows, 1, SIZE // 2, generator=generator) * 7
        self.rotations = torch.polar(torch.ones_like(angles), angles)
        self.norms = torch.rand(KV_HEADS * (GROUP + 1), SIZE, generator=generator)
        self.keys, self.values = torch.randn(2, KV_HEADS, self.slots, SIZE, generator=generator).to(
            dtype
        )
        self.filled: list[Tensor] = []

    def found(self, widths: list[int], parents: list[int] | None = None) -> Tensor:
        """Attention by compiled code, in passes of `widths` rows; `parents` of rows of one pass."""
        dtype, all_heads = self.projected.dtype, KV_HEADS * (GROUP + 2) * SIZE
        program = program_of(dtype, all_heads, KV_HEADS * GROUP * SIZE)
        norms = rms(self.norms, eps=1e-6)
        cap = None if self.softcap == 1e9 else self.softcap
        layer = attention(head_norms=norms, window=self.window or None, softcap=cap)
        attend = program.attend(0, 1, layer, rotation=0)
        program.add_layer([attend, back(program, all_heads, KV_HEADS * GROUP * SIZE, dtype)])
        kv, outs = self.held_by_a_cache(), []
        for projected, turned in zip(
            self.projected.split(widths), self.rotations.split(widths), strict=True
        ):
            outs.append(run(program, projected.flatten(1), kv, turned, parents))
        output = torch.cat(outs)[:, : KV_HEADS * GROUP * SIZE]
        return output.unflatten(1, (KV_HEADS * GROUP, SIZE))

    def held_by_a_cache(self) -> KVCache:
        """A KV cache that holds the keys and values, padded to WIDTH."""
        kv, layout = KVCache(1), PageLayout(self.keys.dtype, ((KV_HEADS, WIDTH),))
        pages = kv.pages(self.slots, 0, layout)
        for page, numbers in zip(pages, self.filled, strict=False):
            page.numbers.copy_(numbers)
        for slot in () if self.filled else range(self.slots):
            [places] = layout.slots(pages[slot // POSITIONS].numbers, slot % POSITIONS)
            for to, source in zip(places, (self.keys, self.values), strict=True):
                to.copy_(nn.functional.pad(source[:, slot], (0, WIDTH - SIZE)).view(to.shape))
        self.filled = self.filled or [page.numbers.clone() for page in pages]
        kv.extend(self.held, 0, 1)
        return kv

    def expected(self) -> Tensor:
        """Attention by torch, in float64."""
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
        scores = queries.movedim(0, 1) @ keys.repeat_interleave(GROUP, 0).mT * SIZE**-0.5
        scores = self.softcap * torch.tanh(scores / self.softcap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ values.repeat_interleave(GROUP, 0)).movedim(0, 1)


@pytest.mark.parametrize("window", [0, 5, 70, 600])
@pytest.mark.parametrize("held", [0, 6, 130, 1100])
@pytest.mark.parametrize("count", [90, 3])
def test_attention_is_that_of_torch(dtype: torch.dtype, held: int, window: int, count: int) -> None:
    """Within one block of 64 positions, across several, and across chunks of 512."""
    rows = Attended(dtype, held, count, window, softcap=0.7 if held == 130 else 1e9)
    assert close(rows.found([count]), rows.expected())


def test_positions_after_a_row_are_not_read(dtype: torch.dtype) -> None:
    """Even if a rejected draft or a later row of the pass left NaN there."""
    clean, spoilt = Attended(dtype, 60, 12), Attended(dtype, 60, 12)
    spoilt.keys[:, 60:] = torch.nan
    spoilt.values[:, 60:] = torch.nan
    spoilt.projected[7:] = torch.nan
    assert torch.equal(clean.found([12])[:7], spoilt.found([12])[:7])


def test_a_row_has_the_same_bits_in_any_pass(dtype: torch.dtype) -> None:
    """Across ends of blocks and of a chunk, on one thread and on two."""
    for held, window in ((60, 0), (60, 17), (1000, 0), (1000, 700)):
        case = Attended(dtype, held, 40, window)
        alone = case.found([1] * 40)
        for threads in (2, 1):
            torch.set_num_threads(threads)
            for widths in ([40], [5, 1, 4, 30], [9, 31]):
                assert torch.equal(alone, case.found(widths))


@pytest.mark.parametrize(("held", "window"), [(0, 0), (50, 17), (60, 0), (1020, 17)])
def test_a_branch_has_the_bits_of_a_chain(dtype: torch.dtype, held: int, window: int) -> None:
    """Also across the end of a block of 64 positions."""
    parents = [-1, -1, *range(1, 9), 4, 4, 11]
    tree = Attended(dtype, held, len(parents), window)
    rotations = tree.rotations.clone()
    for leaf in {*range(len(parents))} - {*parents}:
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        tree.rotations[path] = rotations[: len(path)]  # siblings share a position
        branch, chain = tree.found([len(parents)], parents)[path], copy.copy(tree)
        chain.projected, chain.rotations = tree.projected[path], rotations[: len(path)]
        assert torch.equal(branch, chain.found([len(path)]))


def test_a_branch_is_added_up_in_the_order_of_a_chain(dtype: torch.dtype) -> None:
    """Halves of a matrix register's inputs cancel out: only the rounding of the sum is left."""
    tree, chain = (Attended(dtype, 31, 3) for _ in range(2))
    for case in (tree, chain):
        case.keys[:, 16:31], case.values[:, 16:31] = case.keys[:, :15], -case.values[:, :15]
        case.values[:, 15], case.projected[:, -KV_HEADS:] = 0, 0
    chain.projected, chain.rotations = chain.projected[[0, 2]], chain.rotations[[0, 2]]
    tree.rotations[1] = tree.rotations[0]
    branch = tree.found([3], [-1, -1, 0])[[0, 2]]
    assert torch.equal(branch, chain.found([2]))


def test_a_long_prompt_runs_in_blocks_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the states of layers on the way."""
    backbone, ids = Backbone(make_model("mistral"), executor="fused"), torch.arange(90)

    def states(*stops: int) -> list[Tensor]:
        rows = Rows.of(KVCache(6), 0, 90, ids.device)
        kept: dict[int, list[Tensor]] = {2: [], 5: []}
        hidden = [backbone.embed(ids)]
        for first, last in itertools.pairwise((0, *stops)):
            hidden.append(backbone.run(hidden[-1], first, last, rows, {} if stops[1:] else kept))
        return hidden[1:] if stops[1:] else [*map(torch.cat, kept.values()), *hidden[1:]]

    with torch.inference_mode():
        expected = torch.stack(states(2, 5, 6))
        assert torch.equal(torch.stack(states(6)), expected)
        monkeypatch.setattr("selfspec.model.fused._BLOCK_ROWS", 40)
        assert torch.equal(torch.stack(states(6)), expected)


@torch.inference_mode()
@pytest.mark.parametrize("beside", [0, 3])  # rows of another text, which are all read
@pytest.mark.parametrize("family", ["llama", "cohere", "gpt_neox", "gemma2"])
def test_rows_that_nobody_reads_leave_the_last_layer_early(
    monkeypatch: pytest.MonkeyPatch, family: str, beside: int
) -> None:
    """What is read has the same bits, and so do keys and values, which later rows read."""
    backbone, ids = Backbone(make_model(family), executor="fused"), random_ids(50)[0]
    layers, host = backbone.num_layers, ids.device

    def outputs(read: int | None) -> list[Tensor]:
        kv, states = KVCache(layers), {3: list[Tensor]()}
        rows = Rows.of(kv, 0, 40, host, read=read)
        if beside:
            rows = Rows.joined([rows, Rows.of(KVCache(layers), 0, beside, host)])
        output = backbone.run(backbone.embed(ids[: 40 + beside]), 0, layers, rows, states)
        later = backbone.run(backbone.embed(ids[40:]), 0, layers, Rows.of(kv, 40, 10, host))
        return [torch.cat(states[3]), later, output]

    *expected, full = outputs(None)
    for size in (1024, 16):
        monkeypatch.setattr("selfspec.model.fused._BLOCK_ROWS", size)
        for read in (0, 1, 10, 40):
            *others, output = outputs(read)
            assert all(map(torch.equal, others, expected))
            assert torch.equal(output[40 - read :], full[40 - read :])
            assert torch.equal(output, full) == (read == 40)


# --- several texts in one pass


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32),
        ("gpt_neox", torch.float32),
        ("mistral", torch.bfloat16),
        ("gemma3", torch.bfloat16),
    ],
    ids=str,
)
def test_texts_of_one_pass_have_the_same_bits_as_alone(
    monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype
) -> None:
    """A prompt, one row after the end of a chunk, a chain, a tree after an older position."""
    backbone = Backbone(make_model(family, dtype, max_position_embeddings=700), executor="fused")
    layers, host = backbone.num_layers, torch.device("cpu")
    texts: list[tuple[int, int, Sequence[int] | None]] = [
        *((0, 33, None), (530, 1, None), (70, 3, None), (40, 4, (-4, 0, -1, 0)))
    ]

    def behind() -> list[Rows]:
        """New rows after freshly filled KV caches."""
        rows = []
        for held, count, parents in texts:
            kv = KVCache(layers)
            if held:
                text = backbone.embed(random_ids(held, seed=held)[0])
                backbone.run(text, 0, layers, Rows.of(kv, 0, held, host))
            rows.append(Rows.of(kv, held, count, host, parents))
        return rows

    alone, together = behind(), behind()
    parts = [backbone.embed(random_ids(count, seed=90 + count)[0]) for _, count, _ in texts]
    expected = [backbone.run(part, 0, layers, one) for part, one in zip(parts, alone, strict=True)]
    output = backbone.run(torch.cat(parts), 0, layers, Rows.joined(together))
    assert torch.equal(output, torch.cat(expected))
    newest = backbone.embed(random_ids(1)[0])
    for pair in zip(alone, together, strict=True):  # the added keys and values are the same too
        caches = [rows.span.kv for rows in pair]
        both = [Rows.of(kv, kv.length(layers - 1), 1, host) for kv in caches]
        assert torch.equal(*(backbone.run(newest, 0, layers, rows) for rows in both))

    def counts(*work: Any) -> list[int]:
        return [span.count for span in work[4].spans]

    passes = noted(monkeypatch, FusedExecutor, "run", counts)
    monkeypatch.setattr("selfspec.model.fused._BLOCK_ROWS", 36)
    divided = backbone.run(torch.cat(parts), 0, layers, Rows.joined(behind()))
    assert passes[-3:] == [[33, 1, 3, 4], [33, 1], [3, 4]]
    assert torch.equal(divided, output)


def test_rows_without_a_text_or_with_the_same_text_twice_are_refused() -> None:
    backbone = Backbone(make_model("llama"), executor="fused")
    embedded, kv = backbone.embed(random_ids(4)[0]), KVCache(backbone.num_layers)
    two = Rows.joined([Rows.of(kv, 0, 2, embedded.device)] * 2)
    few = Rows.of(kv, 0, 3, embedded.device)
    for rows in (two, few):
        with torch.inference_mode(), pytest.raises(ValueError, match="4 rows are not those of"):
            backbone.run(embedded, 0, backbone.num_layers, rows)


@torch.inference_mode()
def test_texts_that_change_each_other_run_one_by_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FusedExecutor.run

    def mixing(*work: Any) -> Tensor:
        return run(*work) + 1e-3 * (len(work[4].spans) > 1)

    monkeypatch.setattr(FusedExecutor, "run", mixing)
    backbone = Backbone(make_model("llama"), executor="fused")
    layers, text = backbone.num_layers, backbone.embed(random_ids(4)[0])
    parts = [Rows.of(KVCache(layers), 0, 2, text.device) for _ in range(2)]
    joint = backbone.run(text, 0, layers, Rows.joined(parts))
    alone = [Rows.of(KVCache(layers), 0, 2, text.device) for _ in range(2)]
    both = zip(text.split(2), alone, strict=True)
    assert torch.equal(joint, torch.cat([backbone.run(part, 0, layers, one) for part, one in both]))
    assert "each runs by itself" in caplog.text
