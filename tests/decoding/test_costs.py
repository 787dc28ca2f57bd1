"""Costs of rounds and how they are measured, counters, and pauses by the never-slower rule."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.api.speculator import Speculator, wrap
from selfspec.config import SpeculationOptions
from selfspec.decoding import measure as measuring
from selfspec.decoding.acceptance import Draft
from selfspec.decoding.costs import ASKING_ONE_MORE, DraftCost, Load
from selfspec.decoding.drafters.trees import LONGEST_PAUSE, SHORTEST_PAUSE, PausableDrafter, Paying
from selfspec.decoding.engine import Runtime
from selfspec.decoding.measure import ROWS, Clock, PassShape, StepSpeed, why_unpinned
from selfspec.decoding.sampling import DraftToken
from selfspec.decoding.stats import PARTS, GenerationStats, Stopwatch
from selfspec.errors import PinnedUnavailable
from selfspec.heads.exit_heads import ExitHeads
from selfspec.model.backbone import Backbone
from selfspec.model.fused import FusedExecutor
from selfspec.model.generic import GenericExecutor
from selfspec.model.weights import TEAM
from selfspec.options import Costs
from tests.decoding.test_drafters import Other
from tests.heads.kinds import make_heads
from tests.ladder import ask, asked, attending_heads
from tests.laws import Text
from tests.models import make_model, needs_compiler, random_ids, wrapped
from tests.recorded import RecordedCapture
from tests.traces import entry


def made(source: str, *layers: int, heads: int = 0, rest: Sequence[DraftToken] = ()) -> Draft:
    """A chain of tokens that exited at `layers`, followed by `rest`."""
    tokens = [DraftToken(1, index - 1, layer, source) for index, layer in enumerate(layers)]
    return Draft(proposed=[*tokens, *rest], heads=heads)


@pytest.mark.parametrize(
    ("rows", "draft", "cost"),
    [
        ((0.08,), made("exit", 3, 6, heads=3), 9 / 12 + 0.16 + 0.15),
        ((0.08,), Draft(heads=2), 0.1),  # a difficult token: all heads, no layers
        ((0.8, 0.1), Draft(), 0.0),
        ((0.8, 0.1), made("draft-model", 0, 0, 0), 1.0),
        # prompt lookup adds no cost of heads
        ((0.8, 0.1, 0.2), made("ngram", 0, 0, rest=[DraftToken(1, 1)], heads=1), 0.25),
    ],
)
def test_a_draft_costs_its_layers_its_rows_and_the_heads_that_ran(
    rows: tuple[float, ...], draft: Draft, cost: float
) -> None:
    assert DraftCost(rows=rows, head=0.05, num_layers=12).of(draft) == pytest.approx(cost)


def test_a_draft_model_costs_its_share_of_the_weights_that_a_row_reads() -> None:
    def read(model: Any) -> int:
        parts = model.model.layers, model.model.norm, model.lm_head  # one row of the embedding
        return sum(weight.nbytes for part in parts for weight in part.parameters())

    backbone, options = Backbone(make_model("llama"), executor="generic"), SpeculationOptions()
    share = read(make_model("llama", num_hidden_layers=3)) / read(backbone.model)
    for dtype, times in ((torch.float32, 1), (torch.float64, 2)):
        second = make_model("llama", dtype, num_hidden_layers=3)
        runtime = Runtime(backbone, None, Backbone(second, executor="generic"))
        drafting = options.updated({"drafter": "draft-model"})
        assert runtime.draft_cost(drafting).token == pytest.approx(times * share)
        fixed = drafting.updated({"costs": "token=0.4"})
        assert runtime.draft_cost(fixed).token == 0.4
    drafts = made("draft-model", 0, 0)
    assert DraftCost(rows=(0.1,), token=share).of(drafts) == pytest.approx(0.2 + 2 * share)


# --- the never-slower rule


COST = DraftCost(rows=(0.08,), head=0.05, num_layers=12)

EXITS = Draft(proposed=[DraftToken(90, layer=3)], heads=1, ended="width")
ONE = COST.of(EXITS)
"""Cost of a round with this draft: 0.38 plain steps."""


def while_paying(cost: DraftCost, drafter: Other | None = None) -> PausableDrafter:
    rule = Paying(cost)
    return PausableDrafter(drafter or Other(EXITS), rule.pauses, rule.learn)


def play(paying: PausableDrafter, right: Sequence[bool]) -> list[bool]:
    """Whether each round drafted, given whether its draft would be right."""
    drafted = []
    for accepted in right:
        draft = ask(paying, Text([]), 9)
        drafted.append(bool(draft.tokens))
        assert draft.tokens or draft.ended == "off"
        paying.learn(draft, [0] if accepted and draft.tokens else [])
    return drafted


def runs(drafted: Sequence[bool]) -> list[int]:
    """Lengths of the alternating runs: rounds that drafted, a pause, .."""
    return [len(list(group)) for _, group in groupby(drafted)]


def test_drafts_that_are_never_right_run_in_14_rounds_and_then_in_one_of_65() -> None:
    heads = Other(EXITS)
    drafted = play(while_paying(COST, heads), [False] * 2000)
    first = math.ceil(math.log(1 + 0.5 / ONE) / math.log(16 / 15))
    assert first == 14
    assert runs(drafted)[:10] == [first, 8, 1, 16, 1, 32, 1, 64, 1, 64]
    assert sum(drafted) == first + 3 + (2000 - first - 8 - 16 - 32 - 3) // 65
    assert heads.heard == [(1, 0)] * sum(drafted)


@pytest.mark.parametrize(("share", "texts"), [(0.3, 1), (0.1, 16)])
def test_expensive_drafts_begin_with_a_pause_until_they_pay(share: float, texts: int) -> None:
    """Judged by the load of the first round: texts may have joined since this one was added."""
    load = Load()
    dear = DraftCost(rows=(*(share,) * 32, 0.01), head=share, num_layers=10**9, load=load)
    wrong, right = while_paying(dear), while_paying(dear)
    load.texts = texts
    cost = texts * share + share * (1 + ASKING_ONE_MORE * (texts - 1))  # rows, and one call
    assert dear.row_costs[0] + dear.head_call == pytest.approx(cost / (1 + (texts - 1) * share))
    assert runs(play(wrong, [False] * 300))[:6] == [LONGEST_PAUSE // 2, 1, 64, 1, 64, 1]
    if texts == 1:
        half = LONGEST_PAUSE // 2
        assert runs(play(right, [True] * 300)) == [half, 300 - half]


def test_no_match_is_searched_when_a_large_batch_makes_drafts_expensive() -> None:
    options, load = SpeculationOptions().updated({"drafter": "ngram", "costs": "row=0.3"}), Load()
    drafter = Runtime(wrapped("llama"), None, None).drafter(asked(random_ids(1)), options, load)
    for load.texts, text in ((1, Text([1, 2] * 9)), (32, None), (1, Text([1, 2] * 9))):
        draft = ask(drafter, text, 9)  # a text that is not searched is not read
        assert bool(draft.proposed) == (text is not None)


def test_heads_that_improve_are_noticed_and_retried_sooner_when_they_fail_again() -> None:
    paying = while_paying(COST)
    play(paying, [False] * 500)
    drafted = play(paying, [True] * 100)
    assert runs(drafted)[1] == 100 - runs(drafted)[0]  # no pause after the first success
    assert not drafted[0]
    assert runs(drafted)[0] <= LONGEST_PAUSE
    lengths = runs(play(paying, [False] * 100))
    assert lengths[1:4] == [SHORTEST_PAUSE, 1, 2 * SHORTEST_PAUSE]


def test_no_sequence_of_drafts_loses_more_than_eight_steps_and_a_round_for_each_pause() -> None:
    worst = 0.0
    for seed in range(200):
        dice = random.Random(seed)
        row = dice.choice([0.02, 0.3, 1.0, 5.0, 20.0])
        # only rows have a cost
        paying = while_paying(DraftCost(rows=(row,), num_layers=10**9))
        rate, gain, pauses, previous = 0.5, 0.0, 0, True
        for place in range(400):
            if place % dice.randint(5, 60) == 0:
                rate = dice.choice([0.0, 0.1, 0.5, 1.0])
            right = dice.random() < rate
            (drafts,) = play(paying, [right])
            gain += (right - row) if drafts else 0.0
            pauses += previous and not drafts
            previous = drafts
            # a pause that begins in this round is counted in the next one
            bound = 8.0 + row * (pauses + 1)
            worst = max(worst, -gain / bound)
    assert 0.5 < worst <= 1.0


def test_tokens_of_prompt_lookup_do_not_count_as_a_gain_of_heads() -> None:
    rule = Paying(DraftCost(rows=(0.1,), head=0.1))
    draft = Draft(proposed=[DraftToken(1, source="ngram"), DraftToken(2, 0)], heads=1)
    pauses = 0
    for _ in range(100):
        if rule.pauses():
            pauses += 1
        else:
            rule.learn(draft, [0])
    assert pauses > 50


EAGER = {"exit": "layers=2/5,threshold=0.05", "costs": "row=0.08"}
"""Unfitted heads: they draft all the time, wrongly."""


@pytest.mark.parametrize("drafter", ["exit", "draft-model"])
def test_wrong_drafters_are_paused_and_no_token_changes(drafter: str, exact: Any) -> None:
    second = make_model("llama", torch.float64, num_hidden_layers=2)
    speculator = wrap(exact, heads="logit-lens", draft_model=second, drafter=drafter)
    speculator.options = speculator.options.updated(EAGER)
    ids, count = random_ids(13), 80
    plain = speculator.generate(ids, max_new_tokens=count, speculate=False)
    answers = {
        switch: speculator.generate(ids, max_new_tokens=count, never_slower=switch)
        for switch in (True, False)
    }
    assert answers[True].token_ids == answers[False].token_ids == plain.token_ids
    assert answers[False].stats.ended["off"] == 0
    stats = answers[True].stats
    # a round costs at least half a step here: eleven rounds, then one after 8, 16, 32 more
    assert stats.rounds - stats.ended["off"] <= 11 + 3 + 2 * stats.accepted


# --- measured costs


CPU = torch.device("cpu")


def test_work_is_timed_in_turn_and_the_first_lap_does_not_count() -> None:
    time, order = iter([0, 50, 100, 130, 200, 201, 300, 304, 400, 403, 500, 505]), []
    clock = Clock(CPU, 2, lambda: float(next(time)))
    works = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    assert clock.laps(works) == {"a": [1.0, 3.0], "b": [4.0, 5.0]}
    assert order == ["a", "b"] * 3
    time = iter([0, 1, 10, 17, 20, 22, 30, 33])
    assert Clock(CPU, 3, lambda: float(next(time))).seconds({"a": lambda: None}) == {"a": 3.0}


def test_quick_costs_ignore_slow_passes_and_interpolate_between_row_counts(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {1: 0.01, 2: 0.011, 3: 0.014, 4: 0.014, 5: 0.02, 6: 0.021, 8: 0.025, 16: 0.033}
    clock, threads = [0.0], set[int]()
    slow = [2, 8, 16]  # disturbed: a pass of the first lap, and two that count

    def run(_passes: object, rows: int) -> None:
        clock[0] += seconds[rows]
        threads.add(torch.get_num_threads())
        if rows in slow[:1]:
            slow.pop(0)
            clock[0] += 0.2

    monkeypatch.setattr(measuring.Passes, "run", run)
    monkeypatch.setattr(measuring, "_QUICK_S", 2.0)
    costs = measuring.quick_costs(backbone, None, now=lambda: clock[0])
    assert costs == Costs(row=(0.1, 0.3, 0.0, 0.6, 0.1, *[0.2] * 2, *[0.1] * 8))
    assert not slow
    torch.set_num_threads(2)
    threads.clear()
    monkeypatch.setattr(TEAM, "_retry_at", math.inf)
    monkeypatch.setattr(TEAM, "_trying", False)  # a busy machine may have set it
    monkeypatch.setattr(TEAM, "_free_cores", 1)  # other programs keep the machine busy: a line
    for cost, slow[:] in (0.153, [8] * 9), (0.01, [1] * 99):  # all but one, or all single rows
        assert measuring.quick_costs(backbone, None, lambda: clock[0]) == Costs(row=(cost,) * 15)
    assert threads == {1}


@pytest.mark.parametrize("kind", ["translator", "deep-fused", "medusa", "attending"])
def test_the_cost_of_a_head_is_measured_too(kind: str) -> None:
    backbone = wrapped("llama", num_hidden_layers=3)
    options = {} if kind == "medusa" else {"exit_layers": (2,)}
    heads: ExitHeads = attending_heads(backbone)
    if kind != "attending":
        heads = make_heads(kind, backbone.unembedding, num_layers=3, **options)
    clock = itertools.count()  # a tick for each reading
    costs = measuring.quick_costs(backbone, heads, now=lambda: float(next(clock)))
    assert costs == Costs(row=(0.0,) * 15, head=1.0)


# --- a plain step against the limit of memory

LAYERS, KV_HEADS, HEAD_SIZE = 6, 2, 8
PRODUCTS = LAYERS * (64 * 32 + 32 * 32 + 128 * 32 + 32 * 64) + 96 * 32
"""Numbers in a tiny Llama: queries, keys and values; output; gate and up; down; lm_head."""
NORMS = LAYERS * 2 * 32 + 32


def ticking(seconds: float = 1.0) -> Clock:
    ticks = itertools.count()
    return Clock(CPU, 1, lambda: seconds * next(ticks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("executor", "weights", "width"),
    [
        ("generic", PRODUCTS + NORMS, HEAD_SIZE),
        ("cuda-graph", PRODUCTS + NORMS, HEAD_SIZE),  # its segments are the modules
        pytest.param("fused", PRODUCTS, 16, marks=needs_compiler),  # values are padded to sixteens
    ],
)
def test_a_step_reads_weights_keys_and_values_in_the_models_dtype(
    executor: str, weights: int, width: int, dtype: torch.dtype
) -> None:
    backbone = wrapped("llama", dtype, executor)
    speed = measuring.step_speed(backbone, context=10, clock=ticking(0.5))
    assert speed.weight_bytes == dtype.itemsize * weights
    assert speed.kv_bytes == dtype.itemsize * 2 * LAYERS * KV_HEADS * width * 10
    assert speed.rows_s == dict.fromkeys(ROWS, 0.5)
    assert speed.memory_bytes_per_s == measuring.memory_rate(ticking(0.5)) == 8000.0
    assert speed.rows_in_steps == {2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0}


def test_a_tied_unembedding_counts_once_and_a_separate_embedding_never() -> None:
    tied, untied = (wrapped("llama", tie_word_embeddings=tie).weight_bytes for tie in (True, False))
    assert tied == untied == 4 * (PRODUCTS + NORMS)


@pytest.mark.parametrize(
    ("positions", "context", "rows"), [(128, 112, ROWS), (24, 8, ROWS), (14, 1, (1, 2, 4, 8))]
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # rotations, and a table of positions
def test_the_context_leaves_room_in_models_of_few_positions(
    family: str, positions: int, context: int, rows: tuple[int, ...]
) -> None:
    model = make_model(family, max_position_embeddings=positions)
    speed = measuring.step_speed(Backbone(model), clock=ticking())
    assert speed.context_tokens == context
    assert tuple(speed.rows_s) == rows


def test_the_limit_is_the_time_to_read_memory() -> None:
    fields = {
        "context_tokens": 10,
        "weight_bytes": 900,
        "kv_bytes": 100,
        "memory_bytes_per_s": 500.0,
        "rows_s": {1: 4.0, 2: 5.0, 8: 10.0},
    }
    assert StepSpeed(**fields).to_dict() == fields | {  # type: ignore[arg-type]  # by name
        "step_bytes": 1000,
        "limit_s": 2.0,
        "step_s": 4.0,
        "share_of_limit": 0.5,
        "rows_in_steps": {2: 1.25, 8: 2.5},
    }


# --- whether a row's bits depend on other rows, and what pinned mode does if they do

FIXED = PassShape(8, 64)
EXACT = FusedExecutor.unembed


def probed(model: Any, executor: str = "fused") -> Speculator:
    return wrap(model, heads="logit-lens", executor=executor, drafter="exit:threshold=0.05")


def other_by(factor: float, self: FusedExecutor, rows: Tensor) -> tuple[Tensor, Tensor]:
    normed, logits = EXACT(self, rows)
    return normed, logits * factor


def depends_on_rows(self: FusedExecutor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """A kernel that rounds differently for four rows or more."""
    return other_by(1 + 2**-22 * (len(rows) >= 4), self, rows)


def assert_drafts_leave_the_pinned_text(speculator: Speculator, rows: int = 8) -> None:
    options: Any = {"max_new_tokens": 20, "pinned": True, "pinned_rows": rows}
    plain = speculator.generate(random_ids(9), speculate=False, **options)
    drafted = speculator.generate(random_ids(9), **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0


@needs_compiler
def test_kernels_that_depend_on_the_number_of_rows_get_passes_of_one_shape(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probed(model).runtime.probe.shape(FIXED, 8) == PassShape()
    monkeypatch.setattr(FusedExecutor, "unembed", depends_on_rows)
    speculator = probed(model)
    assert "do not treat all rows alike" in str(why_unpinned(speculator.backbone, PassShape(), 8))
    assert speculator.runtime.probe.shape(FIXED, 8) == FIXED
    assert_drafts_leave_the_pinned_text(speculator)


def test_graphs_of_such_kernels_have_8_or_16_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, exact = probed(make_model("llama"), "cuda-graph"), GenericExecutor.run_layers
    monkeypatch.setattr(
        GenericExecutor,
        "run_layers",
        lambda self, hidden, *args: exact(self, hidden, *args) + 0.01 * hidden.shape[1],
    )
    speculator.backbone._executor.start_capture(RecordedCapture, None)  # type: ignore[attr-defined]
    assert "do not treat all rows alike" in str(why_unpinned(speculator.backbone, PassShape(), 8))
    for rows in (8, 16):
        assert_drafts_leave_the_pinned_text(speculator, rows)


@needs_compiler
def test_bits_are_pinned_if_a_probe_allows_it(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def pinned(executor: str, **options: Any) -> bool:
        answer = probed(model, executor).generate(random_ids(9), max_new_tokens=6, **options)
        return answer.stats.pinned

    assert pinned("fused")
    assert not pinned("fused", pinned=False)
    assert not pinned("fused", speculate=False)  # nothing was probed
    assert not pinned("generic")
    assert pinned("generic", pinned=True)
    assert pinned("generic", pinned=True, pinned_rows=1, drafter="none")  # no row left for a draft
    monkeypatch.setattr(FusedExecutor, "unembed", depends_on_rows)
    assert not pinned("fused")


@needs_compiler
def test_pinned_mode_is_refused_if_neither_way_works(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculator, calls = probed(model), iter(range(10**6))
    monkeypatch.setattr(
        FusedExecutor, "unembed", lambda *rows: other_by(1 + next(calls) * 1e-6, *rows)
    )
    with pytest.raises(PinnedUnavailable):
        speculator.generate(random_ids(9), max_new_tokens=5, pinned=True)


# --- counters of a generation, on rounds worked by hand


PREFILL = entry(1, prefill=True, ended="off")
ALL_ACCEPTED = entry(4, [2, 4, 2], 3)
ONE_REJECTED = entry(2, [4, 2], 1, ended="depth")
SEEN = entry(2, [0] * 3, 1, sources=["ngram"] * 3, ended="off")
STOPPED = entry(2, [4, 4], 2, ended="eos", stop_reason="eos")


@pytest.fixture
def stats() -> GenerationStats:
    stats = GenerationStats(num_layers=8, prompt_tokens=5)
    for record in (PREFILL, ALL_ACCEPTED, ONE_REJECTED, SEEN, STOPPED):
        stats.add(record)
    return stats


def test_a_lap_is_charged_to_its_part_and_the_callers_time_to_no_part() -> None:
    seconds = iter([100.0, 160.0, 162.0, 162.5, 163.5])
    watch = Stopwatch(lambda: next(seconds))
    watch.start()
    for part in ("draft", "verify", "draft"):
        watch.lap(part)
    assert watch.seconds == {"draft": 3.0, "verify": 0.5}


def test_the_printed_line(stats: GenerationStats) -> None:
    stats.seconds.update({"prefill": 0.013, "verify": 4.0})
    lossy = GenerationStats(num_layers=8, lossless=False)  # all rates are zero without rounds
    assert (lossy.acceptance_rate, lossy.compression_rate) == (0.0, 0.0)
    assert lossy.line() == GenerationStats(num_layers=8).line() + "; lossy"
    assert GenerationStats(num_layers=8, pinned=True).line().endswith("; pinned")
    assert stats.line() == (
        "11 tokens at 2.5 tokens/s, first after 13 ms; 4 rounds, 2.50 tokens per pass; 7 of 10 "
        "drafts accepted (exit layer 2: 2 of 3, exit layer 4: 4 of 4, prompt lookup: 1 of 3)"
    )
    assert stats.summary() == "11 tokens at 2.5 tokens/s, 2.5 tokens per pass"
    one = GenerationStats(num_layers=8, new_tokens=1, rounds=1)
    assert one.summary() == "1 token, 0.0 tokens per pass"
    assert one.line().startswith("1 token at 0.0 tokens/s, first after 0 ms; 1 round, 0.00 tokens ")


def test_the_dict_survives_json(stats: GenerationStats) -> None:
    parts = {"prefill": 0.5, "draft": 1.0, "heads": 0.25, "verify": 2.0, "bookkeeping": 0.75}
    assert tuple(parts) == PARTS
    stats.seconds.update(parts)
    values = json.loads(json.dumps(stats.to_dict()))
    assert values == {
        "num_layers": 8,
        "prompt_tokens": 5,
        "reused_tokens": 0,
        "lossless": True,
        "pinned": False,
        "drafts_refused": None,
        "new_tokens": 11,
        "rounds": 4,
        "drafted": 10,
        "accepted": 7,
        "bonus": 3,
        "drafted_by_source": {"exit": 7, "ngram": 3},
        "accepted_by_source": {"exit": 6, "ngram": 1},
        "drafted_by_layer": {"2": 3, "4": 4},
        "accepted_by_layer": {"2": 2, "4": 4},
        "drafted_by_index": {"1": 4, "2": 4, "3": 2},
        "accepted_by_index": {"1": 4, "2": 2, "3": 1},
        "accepted_lengths": {"3": 1, "1": 2, "2": 1},
        "ended": {"width": 1, "depth": 1, "off": 1, "eos": 1},
        "seconds": parts,
        "stop_reason": "eos",
        "acceptance_rate": 0.7,
        "compression_rate": 2.5,
        "ttft_s": 0.5,
        "decode_s": 4.0,
        "decode_tokens_per_s": 2.5,
    }
