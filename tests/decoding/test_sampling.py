"""Scores, draws and penalties, and rows of a batch, each by itself as in Hugging Face's batch.

Rows: two different ones, one left-padded, in float64 and greedy: tokens must be those of
transformers' own `generate`, row for row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.logits_process import (
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from selfspec.api.speculator import Speculator, wrap
from selfspec.api.stream import Generation
from selfspec.decoding.controllers import DraftController
from selfspec.decoding.drafters.base import Drafter, Drafting, NoDrafter
from selfspec.decoding.drafters.heads import ExitDrafter
from selfspec.decoding.engine import Engine, Running
from selfspec.decoding.sampling import (
    STATELESS,
    GrammarMask,
    OccurrencePenalty,
    Sampler,
    criterion_for,
    is_stateless,
    processor_for,
)
from selfspec.decoding.stats import Round
from selfspec.errors import InvalidOption
from selfspec.eval.verify import MixedDrafter, OracleDrafter, RandomDrafter, WrongDrafter
from selfspec.heads.exit_heads import logit_lens
from selfspec.heads.heads import ExitJudge
from selfspec.model.backbone import Backbone
from tests import ladder
from tests.models import VOCAB_SIZE, make_model, random_ids

LENGTH, NEW = 30, 16
END = 95


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Two rows with nothing in common, the first left-padded."""
    ids = torch.cat([random_ids(LENGTH), random_ids(LENGTH, seed=1)])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def allowed(row: int, ids: Tensor) -> list[int]:
    """Another half of the vocabulary for each row, and another one at every second position."""
    return list(range((row + len(ids)) % 2, VOCAB_SIZE, 2))


NEGATIVE = torch.cat([random_ids(5, seed=7), random_ids(5, seed=8)])

ROWS: dict[str, dict[str, Any]] = {
    "MinLengthLogitsProcessor": {"min_length": LENGTH + 9, "eos_token_id": list(range(60))},
    "MinNewTokensLengthLogitsProcessor": {"min_new_tokens": 9, "eos_token_id": list(range(60))},
    "RepetitionPenaltyLogitsProcessor": {"repetition_penalty": 1.6},
    "EncoderRepetitionPenaltyLogitsProcessor": {"encoder_repetition_penalty": 3.0},
    "NoRepeatNGramLogitsProcessor": {"no_repeat_ngram_size": 1},
    "EncoderNoRepeatNGramLogitsProcessor": {"encoder_no_repeat_ngram_size": 1},
    "SequenceBiasLogitsProcessor": {"sequence_bias": [[[4], 4.0], [[4, 5], 9.0]]},
    "NoBadWordsLogitsProcessor": {"bad_words_ids": [[token] for token in range(0, 60, 2)]},
    "PrefixConstrainedLogitsProcessor": {"prefix_allowed_tokens_fn": allowed},
    "ForcedBOSTokenLogitsProcessor": {"forced_bos_token_id": 3},
    "ForcedEOSTokenLogitsProcessor": {"forced_eos_token_id": END, "eos_token_id": END},
    "InfNanRemoveLogitsProcessor": {"remove_invalid_values": True},
    "ExponentialDecayLengthPenalty": {
        "exponential_decay_length_penalty": (3, 1.9),
        "eos_token_id": END,
    },
    "LogitNormalization": {"renormalize_logits": True, "repetition_penalty": 1.6},
    "SuppressTokensAtBeginLogitsProcessor": {"begin_suppress_tokens": list(range(93))},
    "SuppressTokensLogitsProcessor": {"suppress_tokens": list(range(60))},
    "WatermarkLogitsProcessor": {"watermarking_config": WatermarkingConfig(bias=6.0)},
    "SynthIDTextWatermarkLogitsProcessor": {
        "watermarking_config": SynthIDTextWatermarkingConfig(
            ngram_len=3, keys=[3, 5, 7, 11], context_history_size=8, sampling_table_size=64
        )
    },
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": {"guidance_scale": 1.8},
}
"""A processor that transformers makes of options, and options that make it bite when greedy."""

SAMPLING: dict[str, dict[str, Any]] = {
    "TemperatureLogitsWarper": {"temperature": 3.0},
    "TopKLogitsWarper": {"top_k": 1},
    "TopPLogitsWarper": {"top_p": 1e-6},
    "TopHLogitsWarper": {"top_h": 1e-6},
    "MinPLogitsWarper": {"min_p": 1.0},
    "TypicalLogitsWarper": {"typical_p": 1e-6},
    "EpsilonLogitsWarper": {"epsilon_cutoff": 0.9},
    "EtaLogitsWarper": {"eta_cutoff": 0.9},
}
"""Those that only sampling uses; all but the first leave one token, so that draws are certain."""

OF_OTHER_MODELS = {
    "AlternatingCodebooksLogitsProcessor",
    "BarkEosPrioritizerLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "WhisperNoSpeechDetection",
    "WhisperTimeStampLogitsProcessor",
}
"""Never made for a decoder of text: refused in a batch, as a class of the user's would be."""


def classes(module: Any, base: type) -> set[str]:
    """Names of the subclasses of `base` that a module defines."""
    return {
        name
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    }


def test_every_processor_of_transformers_is_sorted() -> None:
    found = classes(logits_process, LogitsProcessor)
    tried = set(ROWS) | set(SAMPLING)
    assert found == tried | OF_OTHER_MODELS, "a new one: does it hold anything per row?"
    assert tried - STATELESS == {
        "PrefixConstrainedLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    }
    assert not OF_OTHER_MODELS & STATELESS


def test_every_criterion_of_transformers_is_known() -> None:
    found = classes(stopping_criteria, StoppingCriteria)
    assert found == {
        *("MaxLengthCriteria", "EosTokenCriteria"),  # read by `request`
        *("MaxTimeCriteria", "StopStringCriteria"),  # passed, or given a clock
        "ConfidenceCriteria",  # refused
    }


def compare(exact: Any, eager: Speculator, options: dict[str, Any]) -> Tensor:
    """Ours, after it was compared with transformers' own batch and with `generate_batch`."""
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    expected = exact.generate(**options)
    found = exact.generate(custom_generate=eager.hf(), **options)
    assert torch.equal(found, expected)
    return found


@pytest.mark.parametrize("name", ROWS)
def test_two_rows_give_what_they_give_in_hugging_faces_batch(
    name: str, exact: Any, eager: Speculator, batch: dict[str, Tensor]
) -> None:
    given = {"pad_token_id": 0} | batch | ROWS[name]
    found = compare(exact, eager, given)
    without = exact.generate(**batch, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    if name not in ("InfNanRemoveLogitsProcessor", "ForcedBOSTokenLogitsProcessor"):
        assert not torch.equal(found, without), "the processor changes nothing here"
    for row in range(2):  # and a row alone gives what it gives in the batch
        alone = {key: value[row : row + 1] for key, value in batch.items()}
        options = {"pad_token_id": 0} | alone | ROWS[name]
        if name == "PrefixConstrainedLogitsProcessor":
            options["prefix_allowed_tokens_fn"] = lambda _, ids, row=row: allowed(row, ids)
        answer = compare(exact, eager, options)
        length = answer.shape[1]
        assert torch.equal(answer[0], found[row, :length])


@pytest.mark.parametrize("name", SAMPLING)
def test_rows_drawn_from_one_token_are_those_of_hugging_faces_batch(
    name: str, exact: Any, eager: Speculator, batch: dict[str, Tensor]
) -> None:
    options = {"do_sample": True, "top_k": 1, "pad_token_id": 0} | SAMPLING[name]
    compare(exact, eager, batch | options)


@pytest.mark.parametrize("name", ["encoder_repetition_penalty", "encoder_no_repeat_ngram_size"])
def test_sequences_of_one_prompt_share_what_is_held_for_it(
    name: str, exact: Any, eager: Speculator, batch: dict[str, Tensor]
) -> None:
    value: Any = 3.0 if "penalty" in name else 1
    options = {name: value, "num_return_sequences": 2, "do_sample": True, "top_k": 1}
    found = compare(exact, eager, batch | options | {"pad_token_id": 0})
    assert found.shape[0] == 4
    assert torch.equal(found[0], found[1])


def test_negative_prompts_belong_to_their_rows(
    exact: Any, eager: Speculator, batch: dict[str, Tensor]
) -> None:
    mask = torch.ones_like(NEGATIVE)
    mask[1, :2] = 0
    options = {"negative_prompt_ids": NEGATIVE, "negative_prompt_attention_mask": mask}
    found = compare(exact, eager, batch | {"guidance_scale": 1.8} | options)
    swapped = options | {"negative_prompt_ids": NEGATIVE.flip(0)}
    assert not torch.equal(found, compare(exact, eager, batch | {"guidance_scale": 1.8} | swapped))


def test_prompt_lengths_of_a_users_own_penalty_belong_to_their_rows(
    exact: Any, eager: Speculator, batch: dict[str, Tensor]
) -> None:
    def penalty(*lengths: int) -> list[Any]:
        return [RepetitionPenaltyLogitsProcessor(2.0, torch.tensor(lengths))]

    found = compare(exact, eager, batch | {"logits_processor": penalty(4, LENGTH)})
    other = compare(exact, eager, batch | {"logits_processor": penalty(LENGTH, 0)})
    assert not torch.equal(found, other)
    with pytest.raises(InvalidOption, match="made for 3 rows, the batch has 2"):
        eager.generate_batch(batch["input_ids"], logits_processor=penalty(1, 2, 3))


class PerRow(LogitsProcessor):
    """A user's own: each row has tokens of its own."""

    def __init__(self, *first: int) -> None:
        self.first = first

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, first in enumerate(self.first):
            scores[row, first::2] = -torch.inf
        return scores


class Cuttable(PerRow):
    """The same, which knows how to be one row."""

    def for_row(self, row: int) -> PerRow:
        return PerRow(self.first[row])


def test_a_users_processor_runs_in_a_row_and_in_a_batch_only_if_it_can_be_cut(
    exact: Any, eager: Speculator, batch: dict[str, Tensor]
) -> None:
    with pytest.raises(InvalidOption, match=r"^PerRow may treat rows .*for_row\(row\)"):
        exact.generate(**batch, custom_generate=eager.hf(), logits_processor=[PerRow(0, 1)])
    with pytest.raises(InvalidOption, match=r"^<lambda> may treat rows"):
        eager.generate_batch(batch["input_ids"], logits_processor=[lambda _, scores: scores])
    alone = {key: value[1:] for key, value in batch.items()}
    compare(exact, eager, alone | {"logits_processor": [PerRow(1)]})
    compare(exact, eager, batch | {"logits_processor": [Cuttable(0, 1)]})


@pytest.mark.parametrize("name", sorted(OF_OTHER_MODELS))
def test_processors_of_other_models_are_refused_by_name_in_a_batch(name: str) -> None:
    kind = getattr(logits_process, name)
    processor = kind.__new__(kind)
    with pytest.raises(InvalidOption, match=f"^{name} may treat rows"):
        processor_for(processor, 0, 2)


# Criteria


class Longer(StoppingCriteria):
    """A user's own: each row ends at a length of its own."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return torch.tensor([input_ids.shape[1] >= length for length in self.lengths])

    def for_row(self, row: int) -> Longer:
        return Longer(self.lengths[row])


def test_criteria_of_the_users_own_end_their_own_row(
    exact: Any, eager: Speculator, batch: dict[str, Tensor]
) -> None:
    options = batch | {"stopping_criteria": [Longer(LENGTH + 2, LENGTH + 6)], "pad_token_id": 0}
    found = compare(exact, eager, options | {"eos_token_id": END})
    assert found.shape[1] == LENGTH + 6
    assert found[0, LENGTH + 2 :].eq(0).all()
    # without a pad token transformers takes the first end token
    compare(exact, eager, batch | {"eos_token_id": [*range(40, 60), 3]})


@pytest.mark.parametrize(
    ("criterion", "rows", "words"),
    [
        (lambda *_: True, 2, r"^<lambda> may treat rows"),
        (Longer(7, 9), 1, r"^Longer gives .* for one row"),
        (stopping_criteria.ConfidenceCriteria(0.5), 1, "ConfidenceCriteria needs scores"),
    ],
    ids=["uncut", "of more rows", "of scores"],
)
def test_criteria_that_cannot_be_asked_are_refused_by_name(
    criterion: Any, rows: int, words: str, eager: Speculator, batch: dict[str, Tensor]
) -> None:
    with pytest.raises(InvalidOption, match=words):
        eager.generate_batch(batch["input_ids"][:rows], stopping_criteria=[criterion])


@pytest.mark.parametrize("rows", [1, 2])
def test_lengths_and_end_tokens_given_as_criteria_count(
    exact: Any, eager: Speculator, batch: dict[str, Tensor], rows: int
) -> None:
    part = {key: value[:rows] for key, value in batch.items()}
    ends = stopping_criteria.EosTokenCriteria(list(range(30)))
    found = compare(exact, eager, part | {"stopping_criteria": [ends], "pad_token_id": 0})
    assert found.shape[1] < LENGTH + NEW
    length = stopping_criteria.MaxLengthCriteria(LENGTH + 3)
    found = compare(exact, eager, part | {"stopping_criteria": [length]})
    assert found.shape[1] == LENGTH + 3


def test_every_row_has_the_whole_time_to_itself(
    eager: Speculator, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, step = 100.0, Engine.step

    def a_second(engine: Engine) -> list[Running]:
        nonlocal now
        now += 1.0
        return step(engine)

    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(Engine, "step", a_second)
    answers = eager.generate_batch(
        batch["input_ids"], max_new_tokens=NEW, max_time=5.5, speculate=False
    )
    assert [len(answer.token_ids) for answer in answers] == [6, 6]
    assert {answer.stop_reason for answer in answers} == {"stop"}
    assert now == 106.0  # they are written in the same six seconds


def test_a_clock_of_the_users_own_is_left_alone() -> None:
    own = stopping_criteria.MaxTimeCriteria(5.0, initial_timestamp=3.0)
    assert criterion_for(own, 1, 2, max_time=None) is own
    assert criterion_for(own, 0, 1, max_time=5.0) is own
    fresh = criterion_for(own, 1, 2, max_time=5.0)
    assert fresh is not own
    assert fresh.initial_timestamp > 3.0


# --- processed scores and draws -------------------------------------------------------------------


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


def decoded(
    backbone: Backbone,
    sampler: Sampler,
    drafter: Drafter | None = None,
    exit_layers: tuple[int, ...] = (),
) -> tuple[list[int], list[Round]]:
    """Greedy decoding of LENGTH ids: the ids and the rounds."""
    ids, new = random_ids(PROMPT), LENGTH - PROMPT
    found = ladder.decode(
        backbone,
        ids,
        drafter or NoDrafter(),
        new_tokens=new,
        exit_layers=exit_layers,
        sampler=sampler,
    )
    return ids[0].tolist() + found.tokens, found.entries


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
    return decoded(backbone, make_sampler())[0]


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
    ids, _ = decoded(backbone, make_sampler(note), SCRIPTS[name](truth))
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
    judge = ExitJudge(backbone.num_layers, {4: 1e-9})
    return ExitDrafter(heads, judge, Drafting(sampler, DraftController(3)))


def test_the_exit_drafter_shows_its_drafts_to_stateless_processors_only(
    backbone: Backbone, seen_by_all: list[list[int]]
) -> None:
    note = Note()
    sampler = make_sampler(note, NoRepeatNGramLogitsProcessor(1))
    ids, entries = decoded(backbone, sampler, exit_drafter(backbone, sampler), exit_layers=(4,))
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


# --- likelihoods that are noted beside tokens, and penalties for tokens that are there already ----


@pytest.fixture(scope="module")
def speaker() -> Speculator:
    made = make_model("llama", torch.float64)
    return wrap(made, heads="logit-lens", executor="generic")


@pytest.mark.parametrize("drafts", [{"speculate": False}, {"drafter": "exit:threshold=0.01"}])
@pytest.mark.parametrize("drawing", [{}, {"do_sample": True, "temperature": 3.0, "seed": 1}])
def test_likelihoods_are_those_of_the_models_own_logits(
    speaker: Speculator, drafts: dict[str, Any], drawing: dict[str, Any]
) -> None:
    ids = random_ids(9)
    found = speaker.generate(ids, max_new_tokens=12, logprobs=3, **drafts, **drawing)
    whole = torch.tensor([ids[0].tolist() + found.token_ids])
    logs = speaker.model(whole).logits[0, 8:-1].log_softmax(-1)
    assert found.logprobs is not None
    assert [one.token for one in found.logprobs] == found.token_ids
    for row, one in zip(logs, found.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-4)
        assert [token for token, _ in one.top] == row.topk(3).indices.tolist()
        assert [said for _, said in one.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    if drawing:
        assert any(one.token != one.top[0][0] for one in found.logprobs)


def test_they_are_noted_only_where_asked_for(speaker: Speculator) -> None:
    assert speaker.generate(random_ids(4), max_new_tokens=3).logprobs is None
    none = speaker.generate(random_ids(4), max_new_tokens=3, logprobs=0).logprobs
    assert none is not None
    assert [one.top for one in none] == [()] * 3
    with pytest.raises(InvalidOption, match="logprobs is -1, expected at least 0"):
        speaker.generate(random_ids(4), logprobs=-1)
    many = speaker.generate(random_ids(4), max_new_tokens=1, logprobs=10**6).logprobs
    assert many is not None
    assert len(many[0].top) == VOCAB_SIZE


def test_penalties_count_the_answer_alone() -> None:
    penalty = OccurrencePenalty(0.5, 0.25, start=2)
    scores = torch.zeros(1, 6)
    found = penalty(torch.tensor([[1, 2, 3, 3, 4]]), scores)
    assert found.tolist() == [[0.0, 0.0, 0.0, -1.0, -0.75, 0.0]]
    assert scores.eq(0).all()


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_change_the_answer_and_drafts_do_not(speaker: Speculator, name: str) -> None:
    def answer(value: float, **drafts: Any) -> Generation:
        asked: Any = {"max_new_tokens": 40, name: value, **drafts}
        return speaker.generate(random_ids(6), **asked)

    plain, penalised = (answer(value, speculate=False).token_ids for value in (0.0, 4.0))
    assert len({*penalised}) > len({*plain})
    drafted = answer(4.0, drafter="exit:threshold=0.01", never_slower=False)
    assert drafted.token_ids == penalised
    assert drafted.stats.accepted > 0  # drafts are made under the penalty, too
