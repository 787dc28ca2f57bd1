"""A row of a batch gives what it gives in Hugging Face's batch, whatever processors run.

Two different rows, one left-padded, in float64 and greedy: tokens must be those of transformers'
own `generate`, row for row.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.logits_process import (
    LogitNormalization,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from selfspec.api.speculator import Speculator
from selfspec.decoding.engine import Engine, Running
from selfspec.decoding.sampling import _PROCESSORS, STATELESS, criterion_for, processor_for
from selfspec.errors import InvalidOption
from tests.models import VOCAB_SIZE, random_ids

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
    assert tried == STATELESS | _PROCESSORS.keys()
    assert not OF_OTHER_MODELS & (STATELESS | _PROCESSORS.keys())


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


def test_stateless_processors_are_shared_by_all_rows() -> None:
    processor = TemperatureLogitsWarper(0.5)
    assert processor_for(processor, 1, 2) is processor
    normal = LogitNormalization()
    assert processor_for(normal, 0, 2) is normal


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
