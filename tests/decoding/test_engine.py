"""Batches in one engine: a text is the same as alone while others join, leave or fail."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from selfspec.config import SpeculationOptions
from selfspec.decoding import state
from selfspec.decoding.costs import batch_row_costs
from selfspec.decoding.decode import StopRule
from selfspec.decoding.engine import BULK_ROWS, Engine, Pace, Running, Runtime, SequenceRequest
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.stats import Round
from selfspec.errors import InvalidOption
from selfspec.eval.verify import Listening, Recorder
from selfspec.heads.exit_heads import logit_lens
from selfspec.model.backbone import Backbone
from selfspec.model.kv import Rows
from tests.models import make_model, needs_compiler, noted, random_ids, wrapped

NEW = 14


@dataclass(frozen=True)
class Wanted:
    prompt: Tensor
    seed: int | None
    options: SpeculationOptions

    def asked(self, processors: Sequence[Any] = ()) -> SequenceRequest:
        sampler = Sampler(LogitsProcessorList(processors))
        if self.seed is not None:
            sampler = replace(sampler, do_sample=True).seeded(self.seed, torch.device("cpu"))
        return SequenceRequest(
            ids=self.prompt,
            sampler=sampler,
            stop=StopRule(max_length=self.prompt.shape[1] + NEW, end_tokens=(3,)),
        )


BASE = SpeculationOptions(never_slower=False)
PLAIN = SpeculationOptions(speculate=False)
NGRAM = BASE.updated({"drafter": "ngram"})
EXITS = BASE.updated({"drafter": "exit:layers=2,threshold=0.01,max_tokens=3,guesses=1"})
LOOKAHEAD = BASE.updated({"drafter": "lookahead:level=4"})
SECOND = BASE.updated({"drafter": "draft-model:max_tokens=2"})
SKIP = BASE.updated({"drafter": "skip:skipped=3,threshold=0,max_tokens=2"})
SEARCH = BASE.updated({"drafter": "skip:threshold=0.1"})
BOTH = BASE.updated({"drafter": "ngram+exit:layers=2/4,threshold=0.01,max_tokens=3,guesses=3"})


def requests(count: int, options: Sequence[SpeculationOptions]) -> list[Wanted]:
    """Short and long prompts, some with a common prefix, greedy and sampled."""
    common = random_ids(80, seed=99)
    wanted = []
    for number in range(count):
        ids = random_ids(3 + 7 * (number % 9), seed=number)
        prompt = torch.cat([common, ids], dim=1) if number % 4 == 1 else ids
        seed = number if number % 3 == 0 else None
        wanted.append(Wanted(prompt, seed, options[number % len(options)]))
    return wanted


def tokens_of(entries: Iterable[Round]) -> list[int]:
    return [token for entry in entries for token in entry.tokens]


def drain(engine: Engine) -> None:
    while engine.texts:
        engine.step()


def written(runtime: Listening, wanted: Wanted) -> tuple[list[int], Tensor]:
    running = Engine(runtime).add(wanted.asked(), wanted.options)
    return tokens_of(running), runtime.recorders[-1].logits


RUN = [pytest.param(family, marks=needs_compiler) for family in ("llama", "mistral")]


@pytest.fixture(scope="module", params=RUN)
def runtime(request: pytest.FixtureRequest) -> Listening:
    backbone = wrapped(request.param, executor="fused", max_position_embeddings=512)
    heads = logit_lens(backbone.unembedding, backbone.num_layers, "tiny")
    second = Backbone(make_model("llama", num_hidden_layers=2, max_position_embeddings=512))
    return Listening(Runtime(backbone, heads, second))


@pytest.fixture(scope="module")
def alone(runtime: Listening) -> list[tuple[Wanted, tuple[list[int], Tensor]]]:
    """Requests with all kinds of drafts, greedy and sampled, and what each writes alone."""
    wanted = requests(28, [PLAIN, NGRAM, EXITS, BOTH, SECOND, LOOKAHEAD, SKIP, SEARCH])
    return [(request, written(runtime, request)) for request in wanted]


@pytest.mark.parametrize(("most", "patience"), [(2, None), (7, 0.5), (32, None)])
def test_texts_have_the_same_bits_as_alone(
    runtime: Listening, alone: list[Any], most: int, patience: float | None
) -> None:
    """Random arrivals and cancellations, one prefix."""
    dice = random.Random(most)
    engine = Engine(runtime, most=most, patience=patience)
    running: dict[Running, tuple[int, Recorder]] = {}
    dropped = set()
    numbers = list(range(len(alone)))
    dice.shuffle(numbers)
    while numbers or engine.texts:
        for _ in range(min(len(numbers), dice.randrange(4))):
            number = numbers.pop()
            text = engine.add(alone[number][0].asked(), alone[number][0].options)
            running[text] = number, runtime.recorders[-1]
        engine.step()
        if dice.random() < 0.1:
            text = dice.choice([*running])
            text.close()
            dropped.add(text)
    assert dropped
    shared = 0
    for text, (number, rule) in running.items():
        tokens = tokens_of(text.take())
        _, (expected, logits) = alone[number]
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == len(expected) or text in dropped
        if tokens:
            assert torch.equal(rule.logits, logits[: len(tokens)])
        shared += text.stats.reused_tokens
    assert shared >= 64  # a page of the common prefix


@pytest.mark.parametrize(
    "options", [EXITS, SECOND, SKIP], ids=["exits", "second model", "fewer layers"]
)
def test_all_texts_of_a_round_draft_and_verify_together(
    runtime: Listening, options: SpeculationOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass of a round, of the model or of a draft model, has a row of every text."""
    engine = Engine(runtime)
    wanted = [Wanted(random_ids(9 + number, seed=number), None, options) for number in range(5)]
    running = [engine.add(request.asked(), options) for request in wanted]
    engine.step()  # the prompts
    assert not any(text.shared for text in running)

    def layers_of(_: Backbone, __: Tensor, first: int, last: int, rows: Rows, *___: Any) -> Any:
        return len(rows.spans), first, last

    passes = noted(monkeypatch, Backbone, "run", layers_of)
    sizes = noted(monkeypatch, state, "scored", lambda _, features, *__: len(features))
    engine.step()
    assert {texts for texts, _, _ in passes} == {5}
    assert all(text.shared for text in running)
    layers = runtime.backbone.num_layers
    if options is SECOND:
        assert [end for _, _, end in passes] == [2, 2, layers]
        assert not sizes
    elif options is SKIP:
        assert passes == [(5, 0, 2), (5, 3, layers)] * 2 + [(5, 0, layers)]
    else:
        assert passes == [(5, 0, 2)] * 3 + [(5, 0, 2), (5, 2, layers)]
        assert sizes == [5] * 3


class Failing:
    def __init__(self, after: int, error: BaseException) -> None:
        self.left, self.error = after, error

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return scores


def test_an_error_of_one_text_reaches_only_its_own_reader(runtime: Listening) -> None:
    wanted = requests(5, [PLAIN, BOTH])
    alone = [written(runtime, request)[0] for request in wanted]
    engine = Engine(runtime)
    error = ZeroDivisionError("in a processor")
    running = [
        engine.add(request.asked([Failing(4, error)] if number == 2 else ()), request.options)
        for number, request in enumerate(wanted)
    ]
    drain(engine)
    for number, (text, expected) in enumerate(zip(running, alone, strict=True)):
        tokens = tokens_of(text.take())
        if number == 2:
            assert tokens == expected[: len(tokens)]
            with pytest.raises(ZeroDivisionError):
                text.take()
        else:
            assert tokens == expected
    assert engine.memory.used == 0


def test_an_engine_still_works_after_an_interrupt(runtime: Listening) -> None:
    wanted = requests(4, [PLAIN])
    alone = [written(runtime, request)[0] for request in wanted]
    engine = Engine(runtime)
    stop = [Failing(3, KeyboardInterrupt())]
    for number, request in enumerate(wanted):
        engine.add(request.asked(stop if number == 1 else ()), request.options)
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    assert engine.texts == 0
    assert engine.memory.used == 0
    rerun = engine.add(wanted[0].asked(), wanted[0].options)
    assert tokens_of(rerun) == alone[0]


def test_a_long_prompt_runs_in_pieces_while_others_continue(runtime: Listening) -> None:
    engine = Engine(runtime, patience=0.5)
    first = engine.add(Wanted(random_ids(4), None, PLAIN).asked(), PLAIN)
    engine.step()
    late = Wanted(random_ids(300, seed=5), None, PLAIN)
    second = engine.add(late.asked(), PLAIN)
    while not second.new_rounds:
        count = len(first.new_rounds)
        engine.step()
        assert len(first.new_rounds) == count + 1 or first.ended
    assert len(first.new_rounds) > 3
    (entry,) = second.take()
    assert len(entry.passes) > 3
    assert sum(rows for rows, _, _ in entry.passes) == 300


def test_memory_is_bounded_and_a_text_that_never_fits_is_refused(runtime: Listening) -> None:
    page = runtime.backbone.position_bytes * 64
    engine = Engine(runtime, kv_memory=6 * page)
    with pytest.raises(InvalidOption, match=r"a text of up to 514 tokens needs .*kv_memory is"):
        engine.add(Wanted(random_ids(500), None, PLAIN).asked(), PLAIN)
    wanted = requests(12, [PLAIN, BOTH])
    alone = [written(runtime, request)[0] for request in wanted]
    running = [engine.add(request.asked(), request.options) for request in wanted]
    most = 0
    while engine.texts:
        engine.step()
        memory = engine.memory
        assert memory.used + memory.kept <= memory.most == 6 * page
        assert memory.used + memory.promised <= memory.most
        most = max(most, memory.used)
    assert most > 3 * page  # several texts at once
    for text, expected in zip(running, alone, strict=True):
        assert tokens_of(text.take()) == expected


def test_a_row_costs_a_larger_share_of_a_larger_batch() -> None:
    rows = (0.05,) * 9 + (0.1,)
    assert batch_row_costs(rows, 1) == rows
    costs = [batch_row_costs(rows, texts)[0] for texts in (1, 2, 4, 8, 16, 32)]
    assert costs == sorted(costs)
    # two more rows, one for each text, over a round of 1 + one row
    assert batch_row_costs(rows, 2)[0] == pytest.approx(0.1 / 1.05)
    # after the tenth row each costs the same: rows are nearly all of a round of 32 texts
    assert batch_row_costs(rows, 32) == pytest.approx([32 * 0.1 / (1 + 9 * 0.05 + 22 * 0.1)])


def test_costs_set_the_rows_until_rounds_were_timed() -> None:
    pace = Pace()
    assert pace.rows(1, 1.01) == 12  # of 0.08 each
    assert pace.rows(26, 1.01) == 37  # a round of 26 texts takes three times as long
    assert pace.rows(1, 0.0) == 1
    assert pace.rows(0, 0.0) == BULK_ROWS


@pytest.mark.parametrize("row_s", [0.02, 0.5, 3.0])
def test_rounds_reach_the_given_length_whatever_the_costs_were(row_s: float) -> None:
    pace = Pace()
    round_s, patience = 2.0, 1.5
    for _ in range(3):
        pace.note(8, 0, round_s)
    for _ in range(12):
        rows = pace.rows(8, patience)
        pace.note(8, rows, round_s + rows * row_s)
    assert rows == pytest.approx(max(patience * round_s / row_s, 1), abs=1)
    assert pace.rows(9, patience) == rows  # as for the nearest timed number of texts


def test_a_quick_round_doubles_the_rows_at_most() -> None:
    pace = Pace()
    pace.note(1, 0, 1.0)
    pace.note(1, 5, 1.0)
    assert pace.rows(1, 1.0) == 10
    for _ in range(20):
        pace.note(1, pace.rows(1, 1.0), 1.0)
    assert pace.rows(1, 1.0) == BULK_ROWS


def test_rounds_of_prompts_alone_do_not_change_the_pace() -> None:
    pace = Pace()
    pace.note(0, 100, 9.0)
    pace.note(3, 100, 9.0)  # no round without prompts was timed
    assert pace.rows(1, 1.01) == 12
