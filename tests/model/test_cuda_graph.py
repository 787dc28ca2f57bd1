"""CUDA-graph segments at fixed addresses: replays give the bits of the model's own layers."""

from __future__ import annotations

import gc
import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from eval.families import tiny_model
from selfspec.decoding.state import NoDrafter
from selfspec.errors import UnsupportedModel
from selfspec.model import cuda_graph
from selfspec.model.backbone import Backbone
from selfspec.model.cuda_graph import CudaGraphExecutor, Replays, Segment, StaticSlots, Work
from selfspec.model.kv import KVCache, Rows
from selfspec.model.parts import parts_of
from tests import ladder
from tests.models import FAMILIES, MAX_POSITIONS, make_model, noted, random_ids
from tests.recorded import RecordedCapture

PREFIX = 20
BLOCKS = [*itertools.accumulate([30, *[1, 5, 2] * 40])]
"""Ends of a prompt of 30 and of the following passes of 1, 5 and 2 rows."""


def recorded(
    family: str = "llama", dtype: torch.dtype = torch.float32, layers: int = 6
) -> Backbone:
    """A backbone whose segments are recorded once and replayed, as on a GPU."""
    backbone = Backbone(make_model(family, dtype, num_hidden_layers=layers), executor="cuda-graph")
    executor_of(backbone).start_capture(RecordedCapture, None)
    return backbone


def executor_of(backbone: Backbone) -> CudaGraphExecutor:
    assert isinstance(backbone._executor, CudaGraphExecutor)
    return backbone._executor


def behind(kv: KVCache, layer: int, count: int) -> Rows:
    return Rows.of(kv, kv.length(layer), count, torch.device("cpu"))


def copied(kv: KVCache) -> KVCache:
    copy = KVCache(kv.num_layers)
    copy.extend(kv.length(0), 0, kv.num_layers)
    buffers = [[buffer.clone() for buffer in layers] for layers in (kv._keys, kv._values)]  # type: ignore[union-attr]
    copy.move_to(*buffers)
    return copy


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    """A shared backbone: slots that a test leaves filled do not affect the next one."""
    return recorded()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in FAMILIES), ("llama", torch.bfloat16)],
    ids=str,
)
def test_replays_give_the_bits_of_the_models_own_layers(family: str, dtype: torch.dtype) -> None:
    backbone = Backbone(make_model(family, dtype, num_hidden_layers=3), executor="cuda-graph")
    executor_of(backbone).replays = Replays(RecordedCapture)
    fixed = KVCache(3, slots=256)
    hidden = backbone.embed(random_ids(PREFIX + 9)[0])
    backbone.generic.run(hidden[:PREFIX], 0, 3, behind(fixed, 0, PREFIX))
    kv = copied(fixed)
    at = PREFIX
    for count, padded in ((1, 1), (3, 4), (1, 1), (4, 4)):
        block = hidden[at : at + count]
        for first, last in ((0, 1), (1, 3)):
            wide = torch.nn.functional.pad(block, (0, 0, 0, padded - count))
            rows = behind(fixed, first, padded)
            expected = backbone.generic.run(wide, first, last, rows)[:count]
            fixed.truncate(at + count, first, last)
            output = backbone.run(block, first, last, behind(kv, first, count))
            assert torch.equal(output, expected)
            block = output
        wide = torch.nn.functional.pad(block, (0, 0, 0, padded - count))
        expected = backbone.finish(backbone.generic.unembed(wide)[1])[:count]
        assert torch.equal(backbone.logits(block), expected)
        at += count
        assert {kv.length(layer) for layer in range(3)} == {at}


def test_drafts_do_not_change_one_bit_of_a_logit() -> None:
    kinds = (*ladder.FEW, "mixed over exits", "deep with states")  # as many graphs as all kinds
    backbone = recorded("gemma3", torch.bfloat16)  # layers with windows and without
    ladder.check_draft_invariance(backbone, random_ids(13), ladder.FIXED, kinds=kinds)


@torch.inference_mode()
def test_trees_and_chains_share_a_graph() -> None:
    """A tree of seven rows, kept in part, then a chain, then another tree."""
    backbone = recorded("mistral", torch.float64, 2)
    executor, own, cuda_kv, own_kv = executor_of(backbone), backbone.generic, KVCache(2), KVCache(2)
    hidden, at = backbone.embed(random_ids(PREFIX + 30)[0]), PREFIX
    for kv in (cuda_kv, own_kv):
        own.run(hidden[:at], 0, 2, behind(kv, 0, at))
    graphs = {*executor.replays._graphs}
    for parents in ((-1, -1, 0, 0, 1, 3, 3), None, (-1, 0, -1, 2, 1, 4, 4)):
        block = hidden[at : at + 7]
        rows = [Rows.of(kv, at, 7, torch.device("cpu"), parents) for kv in (cuda_kv, own_kv)]
        output, expected = backbone.run(block, 0, 2, rows[0]), own.run(block, 0, 2, rows[1])
        assert (output - expected).abs().max() < 1e-13
        for kv in (cuda_kv, own_kv):
            kv.keep(at, (0, 3) if parents else (0, 1))
        at += 2
    assert executor.replays._graphs.keys() == graphs


@torch.inference_mode()
def test_layers_share_a_compiled_graph_and_their_results_stay() -> None:
    """Layers differ in their windows alone."""
    windows: Any = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    windows |= {"use_sliding_window": True, "num_hidden_layers": 2}
    model = make_model("qwen2", torch.float64, **windows)
    executor = executor_of(Backbone(model, executor="cuda-graph"))
    expected = executor._trial()
    counters.clear()
    executor.start_capture(lambda: cuda_graph.uncaptured, "aot_eager")
    assert counters["stats"]["unique_graphs"] in (2, 3)  # one row, and more rows
    for output, reference in zip(executor._trial(), expected, strict=True):
        assert (output - reference).abs().max() < 1e-12


def test_layers_that_cannot_be_compiled_run_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    executor = executor_of(Backbone(make_model("llama"), executor="cuda-graph"))
    expected = executor._trial()
    executor.start_capture(lambda: cuda_graph.uncaptured, "no such compiler")
    assert "layers run uncompiled: " in caplog.text
    assert all(map(torch.equal, executor._trial(), expected))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("count", "moves", "room"),
    [(8, 0, None), (9, 2 * 9, None), (2, 2 * 2, "none"), (9, 2 * 9, "half"), (4, 0, "half")],
)
def test_eight_texts_in_turn_keep_their_slots(
    count: int, moves: int, room: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of nine texts each is moved out and in again; so are those that memory has no room for."""
    backbone, grow = recorded(layers=1), StaticSlots.grow
    executor_of(backbone)._most_lanes = 8
    four = 4.5 * executor_of(backbone)._slots.size_of(1, 1024)
    moved = noted(monkeypatch, KVCache, "move_to", lambda *_: None)

    def no_room(store: StaticSlots, lanes: int, slots: int) -> None:
        grow(store, 0, slots)
        if lanes > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        grow(store, 1, slots)

    if room == "none":
        monkeypatch.setattr(StaticSlots, "grow", no_room)
    elif room == "half":  # for four texts
        slots = executor_of(backbone)._slots
        free: Any = lambda _: 2 * four - slots.size_of(slots.lanes, slots.slots)  # noqa: E731
        monkeypatch.setattr(cuda_graph, "free_bytes", free)
    kvs, own_kvs = ([KVCache(1) for _ in range(count)] for _ in range(2))
    for rows in backbone.embed(random_ids(3 * count)[0]).split(count):
        moved.clear()  # in the last round the number of lanes is at its maximum
        for row, kv, own_kv in zip(rows.split(1), kvs, own_kvs, strict=True):
            output = backbone.run(row, 0, 1, behind(kv, 0, 1))
            expected = backbone.generic.run(row, 0, 1, behind(own_kv, 0, 1))
            assert (output - expected).abs().max() < 1e-3
    assert len(moved) == moves


@torch.inference_mode()
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_rows_of_many_texts_share_a_graph(family: str) -> None:
    """Prompts, chains and a tree of texts with different lengths, some of which join later."""
    backbone = recorded(family, torch.float64, 2)
    executor = executor_of(backbone)
    # assumed here, even if this processor's kernels do not keep their bits
    executor._alike_rows, executor.claims = 8, replace(executor.claims, joins=True)
    vars(backbone)["runs_many"] = True
    graph_kvs, own_kvs = ([KVCache(2) for _ in range(20)] for _ in range(2))
    tree, replays = (-1, -2, 0, 0), list[int]()
    calls: list[dict[int, Any]] = [  # number of rows per text, or their parents
        {0: 30},  # prompts run as they are
        {0: 1, 1: 20, 2: 3},
        {0: 1, 1: 1, 2: 1},
        {0: 1, 1: tree, 2: 2},
        {0: 1, 1: tree, 2: 1, 3: 9, 4: 1},
        {4: 2, 2: 1, 0: 5, 1: 1},
        {text * 7 % 20: 1 for text in range(20)},
        dict.fromkeys(range(20), 1),
    ]
    for call in calls:
        rows, expected = list[Rows](), list[Tensor]()
        counts = [len(entry) if isinstance(entry, tuple) else entry for entry in call.values()]
        hidden = backbone.embed(random_ids(sum(counts), seed=len(replays))[0])
        for text, count, block in zip(call, counts, hidden.split(counts), strict=True):
            parents = call[text] if isinstance(call[text], tuple) else None
            at, device = graph_kvs[text].length(), torch.device("cpu")
            rows.append(Rows.of(graph_kvs[text], at, count, device, parents))
            own_rows = Rows.of(own_kvs[text], at, count, device, parents)
            expected.append(backbone.generic.run(block, 0, 2, own_rows))
        with pytest.MonkeyPatch.context() as patch:
            keys = noted(patch, Replays, "run", lambda _, key, *__: isinstance(key, Segment))
            output = backbone.run(hidden, 0, 2, Rows.joined(rows))
        replays.append(sum(keys))
        # Gemma 2's probabilities are float32
        assert (output - torch.cat(expected)).abs().max() < (1e-5 if family == "gemma2" else 1e-13)
        for kv in (graph_kvs[1], own_kvs[1]):
            if call.get(1) == tree:
                kv.keep(kv.length() - 4, (0, 3))
    # a text with more rows than keep their bits runs by itself
    assert replays == [0, 2, 1, 1, 3, 2, 3, 3]
    assert executor._slots.lanes == 32
    sizes = {key.size for key in executor.replays._graphs if isinstance(key, Segment)}
    assert max(sizes) == 8  # adjacent texts together


@pytest.mark.parametrize("most", [1, 4, 16])
def test_a_trial_finds_up_to_how_many_rows_bits_are_kept(most: int) -> None:
    """The kernel depends on the number of rows."""
    model = make_model("llama")
    executor = CudaGraphExecutor(parts_of(model), model.lm_head)

    def run(hidden: Tensor, first: int, last: int, rows: Rows) -> Tensor:
        rows.span.kv.extend(len(hidden), first, last)
        return hidden

    def unembed(hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, hidden + (len(hidden) > most)

    executor.run, executor._generic.unembed = run, unembed  # type: ignore[method-assign]
    executor._alike_rows = executor._count_alike_rows()
    assert executor._alike_rows == most
    assert executor.unembed(torch.zeros(13, 32))[1].any() == (most == 1)  # else in pieces of `most`


def test_leftovers_of_a_sequence_or_of_padding_reach_no_row(backbone: Backbone) -> None:
    """A prompt of 12 rows is padded to 16."""
    expected = ladder.decode(backbone, random_ids(12), NoDrafter()).logits
    poisoned, hidden, executor = KVCache(6), torch.full((40, 32), torch.nan), executor_of(backbone)
    with torch.inference_mode():
        backbone.run(hidden, 0, 6, behind(poisoned, 0, 40))
        backbone.run(hidden[:4], 0, 6, behind(poisoned, 0, 4))
        executor._hidden.fill_(torch.nan)
    assert executor._slots.keys[0].isnan().any()
    del poisoned
    gc.collect()
    assert torch.equal(ladder.decode(backbone, random_ids(12), NoDrafter()).logits, expected)


def test_slots_grow_and_segments_are_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "_FEWEST_SEEN", 16)
    model = make_model("llama", torch.float64, num_hidden_layers=2)
    executor = CudaGraphExecutor(parts_of(model), model.lm_head, slots=16)
    executor.start_capture(RecordedCapture, None)
    backbone = Backbone(model, executor="generic")
    sizes = []
    # then a short text: segments captured for smaller slots must not be used
    for ids in (random_ids(MAX_POSITIONS), random_ids(40, seed=1)):
        own_kv, graph_kv = KVCache(2), KVCache(2)
        with torch.inference_mode():
            for block in filter(len, ids[0].tensor_split(BLOCKS)):
                count, hidden = len(block), backbone.embed(block)
                expected = backbone.run(hidden, 0, 2, behind(own_kv, 0, count))
                output = executor.run(hidden, 0, 2, behind(graph_kv, 0, count))
                # float64; the largest difference measured is 3e-15
                assert (output - expected).abs().max() < 1e-13
                sizes.append(executor._slots.slots)
    assert sorted(set(sizes)) == [32, 64, 128, 256, 320]
    assert sizes[-1] == 320


def test_with_fixed_slots_every_pass_reads_all_slots_and_none_beyond() -> None:
    executor = executor_of(recorded(layers=2))
    kv, hidden, graphs = KVCache(2, slots=250), torch.ones(240, 32), {*executor.replays._graphs}
    with torch.inference_mode():
        for count in (4, 240, 4):
            executor.run(hidden[:count], 0, 2, behind(kv, 0, count))
        assert executor.replays._graphs.keys() - graphs == {(0, 1, 0, 2, 4, 320)}
        with pytest.raises(IndexError, match="251 positions do not fit 250"):
            executor.run(hidden[:3], 0, 2, behind(kv, 0, 3))


def test_answers_in_two_threads_are_those_of_one(backbone: Backbone) -> None:
    prompts = [random_ids(12, seed) for seed in (1, 2)]

    def answer(ids: Tensor) -> list[int]:
        return ladder.decode(backbone, ids, NoDrafter()).tokens

    expected = [answer(ids) for ids in prompts]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(answer, prompts)) == expected


def forgetful(work: Work) -> Work:
    """A graph that ignores its inputs: every replay gives the first result."""
    first = tuple(output.clone() for output in work())
    return lambda: first


def test_a_replay_that_computes_something_else_is_refused() -> None:
    executor = executor_of(Backbone(make_model("llama"), executor="cuda-graph"))
    with pytest.raises(ValueError, match="replayed, comes out differently"):
        executor.start_capture(lambda: forgetful, None)


def test_segments_run_uncaptured_if_a_capture_fails(caplog: pytest.LogCaptureFixture) -> None:
    def fails(work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing\nand a trace")

    backbone = Backbone(make_model("llama"), executor="cuda-graph")
    expected = ladder.decode(backbone, random_ids(12), NoDrafter()).logits
    caplog.clear()
    executor_of(backbone).start_capture(lambda: fails, None)
    assert not executor_of(backbone).replays.captures
    assert torch.equal(ladder.decode(backbone, random_ids(12), NoDrafter()).logits, expected)
    assert [record.getMessage() for record in caplog.records] == [
        "no CUDA graphs (operation not permitted when stream is capturing): "
        "segments run uncaptured from now on"
    ]


def test_the_least_recently_used_graph_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.model.cuda_graph._MOST_GRAPHS", 2)
    graphs: list[str] = []

    def noting(work: Work) -> Work:
        graphs.append(str(int(*work())))
        return work

    replays = Replays(lambda: noting)
    for key in (1, 2, 1, 3, 1, 2):
        assert int(*replays.run(key, lambda key=key: (torch.tensor(key),))) == key
    assert graphs == ["1", "2", "3", "2"]


def test_on_a_cpu_a_warning_says_that_graphs_gain_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("gemma2")
    with caplog.at_level(logging.WARNING):
        assert Backbone(model).executor_name in ("fused", "generic")
        assert not caplog.records
        backbone = Backbone(model, executor="cuda-graph")
    assert backbone.executor_name == "cuda-graph"
    assert not executor_of(backbone).replays.captures
    assert "no CUDA device" in caplog.text


def test_on_a_gpu_it_is_chosen_if_it_can_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backbone, "device", torch.device("cuda"))
    monkeypatch.setattr("selfspec.model.check.check_conformance", lambda _: [])
    monkeypatch.setattr("selfspec.model.check.check_agreement", lambda *_: None)
    monkeypatch.setattr("selfspec.model.check.find_mixing", lambda *_: None)
    strategy: list[Any] = [RecordedCapture]
    start = CudaGraphExecutor.start_capture
    started: Any = lambda self: start(self, strategy[0], None)  # noqa: E731
    monkeypatch.setattr(CudaGraphExecutor, "start_capture", started)
    assert Backbone(make_model("llama")).executor_name == "cuda-graph"
    strategy[0] = lambda: cuda_graph.uncaptured
    assert Backbone(make_model("llama")).executor_name == "generic"
    assert Backbone(make_model("llama"), executor="cuda-graph").executor_name == "cuda-graph"


def test_models_that_cannot_be_captured_are_refused_by_name() -> None:
    hooked, flash, spread = (make_model("llama") for _ in range(3))
    elsewhere = torch.nn.Linear(32, 96, bias=False, device="meta")
    hooked.model.layers[2].mlp.register_forward_hook(lambda *_: None)
    flash.config._attn_implementation = "flash_attention_2"
    for model, reason in (
        (hooked, r"layers\.2\.mlp has hooks"),
        (flash, "attention is flash_attention_2"),
        (spread, "on 2 devices"),
        (make_model("llama4"), "layers have chunked_attention"),
        (make_model("gpt2"), "positions are not rotated"),
        (tiny_model("mixtral", torch.float32), r"Mixtral\w+ reads values back"),
    ):
        with pytest.raises(ValueError, match=reason):
            CudaGraphExecutor(parts_of(model), elsewhere if model is spread else model.lm_head)


def test_an_executor_with_other_results_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CudaGraphExecutor._mask

    def blind(self: CudaGraphExecutor, kind: str, of: Segment) -> Tensor:
        return original(self, kind, of).roll(-1, -1)  # a row does not see itself

    monkeypatch.setattr(CudaGraphExecutor, "_mask", blind)
    with pytest.raises(UnsupportedModel, match="layer 1 comes out differently"):
        Backbone(make_model("llama"), executor="cuda-graph")
