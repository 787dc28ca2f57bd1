"""Processed scores and draws: on true prefixes for the target, without state for drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from selfspec.decoding.acceptance import GreedyMatch
from selfspec.decoding.controllers import Fixed
from selfspec.decoding.decode import StopRule, rounds
from selfspec.decoding.drafters.base import Drafter, NoDrafter
from selfspec.decoding.drafters.heads import ExitDrafter
from selfspec.decoding.sampling import GrammarMask, Sampler, is_stateless
from selfspec.decoding.state import DecodeState
from selfspec.decoding.stats import Round, Stopwatch
from selfspec.eval.scripted import MixedDrafter, OracleDrafter, RandomDrafter, WrongDrafter
from selfspec.heads.exit_heads import logit_lens
from selfspec.heads.heads import ExitJudge
from selfspec.model.backbone import Backbone
from tests.models import VOCAB_SIZE, random_ids

PROMPT, LENGTH = 6, 26


class Note(LogitsProcessor):
    """A processor of the user's own: notes the ids of each call and changes nothing."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids[0].tolist())
        return scores


def make_sampler(*processors: Any, **values: Any) -> Sampler:
    return Sampler(LogitsProcessorList(processors), **values)


def watermark() -> SynthIDTextWatermarkLogitsProcessor:
    return SynthIDTextWatermarkLogitsProcessor(
        ngram_len=2,
        keys=[1, 2],
        sampling_table_size=8,
        sampling_table_seed=0,
        context_history_size=4,
        device=torch.device("cpu"),
    )


def decode(
    backbone: Backbone,
    sampler: Sampler,
    drafter: Drafter | None = None,
    exit_layers: Sequence[int] = (),
) -> tuple[list[int], list[Round]]:
    """Greedy decoding of LENGTH ids: the ids and the rounds."""
    state = DecodeState(backbone, random_ids(PROMPT), exit_layers=exit_layers)
    rule, stop = GreedyMatch(sampler), StopRule(max_length=LENGTH)
    entries = list(rounds(state, drafter or NoDrafter(), rule, stop, Stopwatch()))
    return state.ids[0].tolist(), entries


# One call


def test_processors_run_in_their_order() -> None:
    ids, logits = torch.tensor([[1]]), torch.tensor([[1.0, 2.0]])
    sampler = make_sampler(lambda _, scores: scores + 1.0, TemperatureLogitsWarper(0.5))
    assert sampler.scores(ids, logits).tolist() == [[4.0, 6.0]]
    assert make_sampler().scores(ids, logits) is logits


def test_probabilities_are_those_of_the_processed_scores() -> None:
    logits = torch.tensor([[3.0, 1.0, 4.0, 1.0]])
    probs = make_sampler(TopKLogitsWarper(2)).probs(torch.tensor([[1]]), logits)
    kept = torch.tensor([3.0, -torch.inf, 4.0, -torch.inf]).softmax(-1)
    assert torch.equal(probs, kept)


@pytest.mark.parametrize(
    ("sampler", "plain"),
    [
        (make_sampler(), True),
        (make_sampler(do_sample=True), False),
        (make_sampler(TemperatureLogitsWarper(0.5)), False),
    ],
)
def test_greedy_is_plain_without_sampling_and_processors(sampler: Sampler, plain: bool) -> None:
    assert sampler.is_plain_greedy == plain


def draws(sampler: Sampler) -> list[float]:
    law = torch.full((50,), 0.02)
    numbers = [float(sampler.uniform(law.device)) for _ in range(5)]
    return [*numbers, *(sampler.draw(law) for _ in range(5))]


def test_all_draws_come_from_the_given_generator_or_the_global_one() -> None:
    state = torch.get_rng_state()
    first = draws(make_sampler(do_sample=True, generator=torch.Generator().manual_seed(3)))
    again = draws(make_sampler(do_sample=True, generator=torch.Generator().manual_seed(3)))
    other = draws(make_sampler(do_sample=True, generator=torch.Generator().manual_seed(4)))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), state)
    assert all(0.0 <= number < 1.0 for number in first[:5])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        assert draws(make_sampler(do_sample=True)) == first


# Which processors keep state


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (TemperatureLogitsWarper(0.5), True),
        (NoRepeatNGramLogitsProcessor(2), True),
        (watermark(), False),
        (Note(), False),
        (lambda _ids, scores: scores, False),
        # transformers' class around a function of the user's
        (PrefixConstrainedLogitsProcessor(lambda _row, _ids: [1], num_beams=1), False),
    ],
)
def test_only_transformers_own_processors_are_taken_to_be_stateless(
    processor: object, expected: bool
) -> None:
    assert is_stateless(processor) == expected


def test_drafts_are_chosen_without_processors_that_keep_state() -> None:
    generator = torch.Generator()
    kept = [TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)]
    sampler = make_sampler(
        Note(), kept[0], watermark(), kept[1], do_sample=True, generator=generator
    )
    drafting = sampler.for_drafts()
    assert list(drafting.processors) == kept
    assert drafting.do_sample
    assert drafting.generator is generator
    assert len(sampler.processors) == 4


# In the loop


@pytest.fixture(scope="module")
def truth(backbone: Backbone) -> list[int]:
    """Prompt and greedy continuation."""
    return decode(backbone, make_sampler())[0]


SCRIPTS: dict[str, Callable[[list[int]], Drafter]] = {
    "none": lambda truth: NoDrafter(),
    "oracle": OracleDrafter,
    "wrong": lambda truth: WrongDrafter(truth, 0, VOCAB_SIZE),
    "random": lambda truth: RandomDrafter((), 0, VOCAB_SIZE),
    "mixed": lambda truth: MixedDrafter(truth, 0, VOCAB_SIZE),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_target_processors_see_each_true_prefix_once_whatever_was_drafted(
    name: str, backbone: Backbone, truth: list[int]
) -> None:
    note = Note()
    ids, _ = decode(backbone, make_sampler(note), SCRIPTS[name](truth))
    assert ids == truth
    assert note.seen == [truth[:length] for length in range(PROMPT, LENGTH)]


@pytest.fixture
def seen_by_all(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of each call of any NoRepeatNGramLogitsProcessor, on either side."""
    seen: list[list[int]] = []
    original = NoRepeatNGramLogitsProcessor.__call__

    def noting(self: Any, input_ids: Any, scores: Any) -> Any:
        seen.append(input_ids[0].tolist())
        return original(self, input_ids, scores)

    monkeypatch.setattr(NoRepeatNGramLogitsProcessor, "__call__", noting)
    return seen


def exit_drafter(backbone: Backbone, sampler: Sampler) -> ExitDrafter:
    """Drafts 3 tokens a round at layer 4, however unsure."""
    heads = logit_lens(backbone.unembedding, backbone.num_layers, "tiny")
    return ExitDrafter(heads, ExitJudge(backbone.num_layers, {4: 1e-9}), sampler, Fixed(3))


def test_the_exit_drafter_shows_its_drafts_to_stateless_processors_only(
    backbone: Backbone, seen_by_all: list[list[int]]
) -> None:
    note = Note()
    sampler = make_sampler(note, NoRepeatNGramLogitsProcessor(1))
    ids, entries = decode(backbone, sampler, exit_drafter(backbone, sampler), exit_layers=(4,))
    assert note.seen == [ids[:length] for length in range(PROMPT, LENGTH)]
    first = entries[1]  # the round after the prompt's pass
    assert len(first.draft_tokens) == 3
    drafted = [ids[: PROMPT + 1] + first.draft_tokens[:count] for count in range(3)]
    assert seen_by_all[1:4] == drafted
    # and so no draft repeats anything
    assert len({*ids[: PROMPT + 1], *first.draft_tokens}) == len({*ids[: PROMPT + 1]}) + 3


def test_a_head_that_knows_no_allowed_token_has_a_law_all_the_same() -> None:
    class Allows(GrammarMask):
        def __init__(self, *tokens: int) -> None:
            self.tokens = list(tokens)

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            masked = torch.full_like(scores, -torch.inf)
            masked[:, self.tokens] = scores[:, self.tokens]
            return masked

    known = torch.tensor([[1.0, 2.0, -torch.inf, -torch.inf]])
    ids = torch.tensor([[0]])
    for tokens, law in (((2, 3), [0, 0, 0.5, 0.5]), ((3,), [0, 0, 0, 1]), ((0, 3), [1, 0, 0, 0])):
        sampler = Sampler(LogitsProcessorList([Allows(*tokens)])).for_drafts()
        assert sampler.probs(ids, known).tolist() == law
