"""Processed scores, draws, penalties, rows of a batch, and seeds.

The tests of rows decode two different ones, one left-padded, greedily and in float64: each row must
have the tokens that transformers' own `generate` gives it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
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
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec.api.speculator import Speculator, wrap
from selfspec.api.stream import Generation
from selfspec.decoding import sampling
from selfspec.decoding.acceptance import Draft, GreedyMatch
from selfspec.decoding.costs import Load
from selfspec.decoding.engine import Engine, Running
from selfspec.decoding.sampling import STATELESS, GrammarMask, OccurrencePenalty, Sampler
from selfspec.decoding.state import NoDrafter
from selfspec.errors import InvalidOption, InvalidPrompt
from selfspec.eval.verify import MixedDrafter
from selfspec.model.backbone import Backbone
from tests import ladder, laws
from tests.ladder import chi_square_p, rounds
from tests.models import VOCAB_SIZE, make_model, random_ids

LENGTH, NEW = 30, 16
END = 95


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    """Two rows with nothing in common, the first left-padded."""
    ids = torch.cat([random_ids(LENGTH), random_ids(LENGTH, seed=1)])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def allowed(row: int, ids: Tensor) -> list[int]:
    """Half of the vocabulary: the even or the odd ids, by row and position."""
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
"""Processors that transformers makes from options, and options that change a greedy text."""

SAMPLING = {
    *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper"),
    *("MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper"),
}
"""Processors that only sampling uses: tests/api/test_keywords.py compares their results."""

OF_OTHER_MODELS = {
    *("AlternatingCodebooksLogitsProcessor", "BarkEosPrioritizerLogitsProcessor"),
    *("ClassifierFreeGuidanceLogitsProcessor", "DiaClassifierFreeGuidanceLogitsProcessor"),
    *("DiaEOSChannelFilterLogitsProcessor", "DiaEOSDelayPatternLogitsProcessor"),
    *("WhisperNoSpeechDetection", "WhisperTimeStampLogitsProcessor"),
}
"""Never made for a text decoder: refused in a batch, as a user's own class would be."""


def classes(module: Any, base: type) -> set[str]:
    return {
        name
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    }


def test_every_processor_of_transformers_is_tried_or_refused_by_name_in_a_batch() -> None:
    names = classes(logits_process, LogitsProcessor)
    tried = ROWS.keys() | SAMPLING
    assert names == tried | OF_OTHER_MODELS, "a new one: does it hold anything per row?"
    assert tried - STATELESS == {
        "PrefixConstrainedLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    }
    for name in OF_OTHER_MODELS:
        kind = getattr(logits_process, name)
        with pytest.raises(InvalidOption, match=f"^{name} may treat rows"):
            sampling.processor_for(kind.__new__(kind), 0, 2)


def test_every_criterion_of_transformers_is_known() -> None:
    names = classes(stopping_criteria, StoppingCriteria)
    assert names == {
        *("MaxLengthCriteria", "EosTokenCriteria"),  # read by `request`
        *("MaxTimeCriteria", "StopStringCriteria"),  # passed, or given a clock
        "ConfidenceCriteria",  # refused
    }


Compare = Callable[..., Tensor]


@pytest.fixture(scope="module")
def compare(exact: Any, eager: Speculator, batch: dict[str, Tensor]) -> Compare:
    """A function that decodes rows of the batch and compares them with transformers' own."""

    def go(rows: slice = slice(None), theirs: bool = True, **options: Any) -> Tensor:
        defaults = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        keywords = {name: value[rows] for name, value in batch.items()} | defaults | options
        output: Tensor = exact.generate(custom_generate=eager.hf(), **keywords)
        assert not theirs or torch.equal(output, exact.generate(**keywords))
        return output

    return go


@pytest.fixture(scope="module")
def unprocessed(compare: Compare) -> Tensor:
    return compare()


@pytest.mark.parametrize("name", ROWS)
def test_two_rows_have_the_tokens_of_hugging_faces_batch(
    name: str, compare: Compare, unprocessed: Tensor
) -> None:
    output = compare(**ROWS[name])
    if name not in ("InfNanRemoveLogitsProcessor", "ForcedBOSTokenLogitsProcessor"):
        assert not torch.equal(output, unprocessed), "the processor changes nothing here"
    for row in range(2):  # a row alone has the tokens that it has in the batch
        options = dict(ROWS[name])
        if name == "PrefixConstrainedLogitsProcessor":
            options["prefix_allowed_tokens_fn"] = lambda _, ids, row=row: allowed(row, ids)
        answer = compare(slice(row, row + 1), theirs=False, **options)
        assert torch.equal(answer[0], output[row, : answer.shape[1]])


@pytest.mark.parametrize(
    "options", [{"encoder_repetition_penalty": 3.0}, {"encoder_no_repeat_ngram_size": 1}], ids=str
)
def test_sequences_of_one_prompt_share_its_state(options: dict[str, Any], compare: Compare) -> None:
    pytest.importorskip("transformers", "5.24")  # 5.17 penalises by the rows of other prompts
    output = compare(**options, num_return_sequences=2, do_sample=True, top_k=1)
    assert output.shape[0] == 4
    assert torch.equal(output[0], output[1])


def test_negative_prompts_belong_to_their_rows(compare: Compare) -> None:
    mask = torch.ones_like(NEGATIVE)
    mask[1, :2] = 0
    options = {"guidance_scale": 1.8, "negative_prompt_attention_mask": mask}
    output = compare(**options, negative_prompt_ids=NEGATIVE)
    assert not torch.equal(output, compare(**options, negative_prompt_ids=NEGATIVE.flip(0)))


def test_prompt_lengths_of_a_users_own_penalty_belong_to_their_rows(
    compare: Compare, eager: Speculator, batch: dict[str, Tensor]
) -> None:
    pytest.importorskip("transformers", "5.24")  # in 5.17 all rows have one length

    def penalty(*lengths: int) -> list[Any]:
        return [RepetitionPenaltyLogitsProcessor(2.0, torch.tensor(lengths))]

    output = compare(logits_processor=penalty(4, LENGTH))
    assert not torch.equal(output, compare(logits_processor=penalty(LENGTH, 0)))
    with pytest.raises(InvalidOption, match="made for 3 rows, the batch has 2"):
        eager.generate_batch(batch["input_ids"], logits_processor=penalty(1, 2, 3))


class PerRow(LogitsProcessor):
    """A user's processor with different tokens for each row."""

    def __init__(self, *first: int) -> None:
        self.first = first

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, first in enumerate(self.first):
            scores[row, first::2] = -torch.inf
        return scores


class Cuttable(PerRow):
    """The same processor, which can be reduced to one row."""

    def for_row(self, row: int) -> PerRow:
        return PerRow(self.first[row])


def test_a_users_processor_runs_in_a_batch_only_if_it_can_be_reduced_to_a_row(
    compare: Compare, exact: Any, eager: Speculator, batch: dict[str, Tensor]
) -> None:
    with pytest.raises(InvalidOption, match=r"^PerRow may treat rows .*for_row\(row\)"):
        exact.generate(**batch, custom_generate=eager.hf(), logits_processor=[PerRow(0, 1)])
    with pytest.raises(InvalidOption, match=r"^<lambda> may treat rows"):
        eager.generate_batch(batch["input_ids"], logits_processor=[lambda _, scores: scores])
    compare(slice(1, 2), logits_processor=[PerRow(1)])
    compare(logits_processor=[Cuttable(0, 1)])


class EverySecond(LogitsProcessor):
    """A user's processor with state: every second call rules out the likeliest token."""

    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.scatter(1, scores.argmax(1, True), -torch.inf) if self.calls % 2 else scores

    def for_row(self, _row: int) -> EverySecond:
        return EverySecond()


def test_a_users_processor_with_state_is_copied_for_each_prompt(eager: Speculator) -> None:
    prompts = [random_ids(5), random_ids(9, seed=2)]
    answers = eager.generate_batch(prompts, max_new_tokens=9, logits_processor=[EverySecond()])
    alone = [
        eager.generate(prompt, max_new_tokens=9, logits_processor=[EverySecond()])
        for prompt in prompts
    ]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]


class Longer(StoppingCriteria):
    """A user's criterion that ends each row at a different length."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return torch.tensor([input_ids.shape[1] >= length for length in self.lengths])

    def for_row(self, row: int) -> Longer:
        return Longer(self.lengths[row])


def test_a_users_criteria_end_each_row_separately(compare: Compare) -> None:
    output = compare(stopping_criteria=[Longer(LENGTH + 2, LENGTH + 6)], eos_token_id=END)
    assert output.shape[1] == LENGTH + 6
    assert output[0, LENGTH + 2 :].eq(0).all()
    # without a pad token transformers pads with the first end token
    compare(eos_token_id=[*range(40, 60), 3], pad_token_id=None)


@pytest.mark.parametrize(
    ("criterion", "rows", "words"),
    [
        (lambda *_: True, 2, r"^<lambda> may treat rows"),
        (Longer(7, 9), 1, r"^Longer gives .* for one row"),
        (stopping_criteria.ConfidenceCriteria(0.5), 1, "ConfidenceCriteria needs scores"),
    ],
    ids=["uncut", "of more rows", "of scores"],
)
def test_criteria_that_cannot_be_evaluated_are_refused_by_name(
    criterion: Any, rows: int, words: str, eager: Speculator, batch: dict[str, Tensor]
) -> None:
    with pytest.raises(InvalidOption, match=words):
        eager.generate_batch(batch["input_ids"][:rows], stopping_criteria=[criterion])


@pytest.mark.parametrize("rows", [1, 2])
def test_lengths_and_end_tokens_given_as_criteria_count(compare: Compare, rows: int) -> None:
    end_tokens = stopping_criteria.EosTokenCriteria(list(range(30)))
    assert compare(slice(rows), stopping_criteria=[end_tokens]).shape[1] < LENGTH + NEW
    max_length = stopping_criteria.MaxLengthCriteria(LENGTH + 3)
    assert compare(slice(rows), stopping_criteria=[max_length]).shape[1] == LENGTH + 3


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
    assert now == 106.0  # both rows are written in the same six seconds


def test_a_clock_of_the_users_own_is_left_alone() -> None:
    clock = stopping_criteria.MaxTimeCriteria(5.0, initial_timestamp=3.0)
    assert sampling.criterion_for(clock, 1, 2, max_time=None) is clock
    assert sampling.criterion_for(clock, 0, 1, max_time=5.0) is clock
    fresh = sampling.criterion_for(clock, 1, 2, max_time=5.0)
    assert fresh is not clock
    assert fresh.initial_timestamp > 3.0


# --- processed scores and draws


def make_sampler(*processors: Any, **values: Any) -> Sampler:
    return Sampler(LogitsProcessorList(processors), **values)


def draws(sampler: Sampler) -> list[float]:
    law = torch.full((50,), 0.02)
    numbers = [float(sampler.uniform(law.device)) for _ in range(5)]
    return [*numbers, *(sampler.draw(law) for _ in range(5))]


def test_all_draws_come_from_the_given_generator_or_the_global_one() -> None:
    state = torch.get_rng_state()
    first = draws(make_sampler(do_sample=True, generator=torch.Generator().manual_seed(3)))
    repeat = draws(make_sampler(do_sample=True, generator=torch.Generator().manual_seed(3)))
    other = draws(make_sampler(do_sample=True, generator=torch.Generator().manual_seed(4)))
    assert first == repeat != other
    assert torch.equal(torch.get_rng_state(), state)
    assert all(0.0 <= number < 1.0 for number in first[:5])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        assert draws(make_sampler(do_sample=True)) == first


def test_drafts_are_chosen_without_processors_that_may_keep_state() -> None:
    generator = torch.Generator()
    kept = [TemperatureLogitsWarper(0.5), TopKLogitsWarper(3), NoRepeatNGramLogitsProcessor(2)]
    # transformers' class around a user's function
    constraint = PrefixConstrainedLogitsProcessor(lambda _row, _ids: [1], num_beams=1)
    watermark = SynthIDTextWatermarkLogitsProcessor(2, [1, 2], 8, 0, 4, torch.device("cpu"))
    others = [PerRow(), watermark, lambda _ids, scores: scores, constraint]
    sampler = make_sampler(*others, *kept, do_sample=True, generator=generator)
    drafting = sampler.for_drafts()
    assert list(drafting.processors) == kept
    assert drafting.do_sample
    assert drafting.generator is generator
    assert len(sampler.processors) == 7


def test_target_processors_see_each_true_prefix_once(backbone: Backbone) -> None:
    prompt, prefixes = random_ids(6), list[list[int]]()
    plain = ladder.decode(backbone, prompt, NoDrafter()).tokens
    truth = prompt[0].tolist() + plain

    def note(ids: Tensor, scores: Tensor) -> Tensor:
        prefixes.append(ids[0].tolist())
        return scores

    for drafter in (NoDrafter(), MixedDrafter(truth, 0, VOCAB_SIZE)):
        prefixes.clear()
        answer = ladder.decode(backbone, prompt, drafter, sampler=make_sampler(note))
        assert answer.tokens == plain
        assert prefixes == [truth[:length] for length in range(6, len(truth))]


def test_a_head_that_knows_no_allowed_token_still_has_a_distribution() -> None:
    class Allows(GrammarMask):
        def __init__(self, *tokens: int) -> None:
            self.tokens = list(tokens)

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            masked = torch.full_like(scores, -torch.inf)
            masked[:, self.tokens] = scores[:, self.tokens]
            return masked

    logits = torch.tensor([[1.0, 2.0, -torch.inf, -torch.inf]])
    ids = torch.tensor([[0]])
    for tokens, law in (((2, 3), [0, 0, 0.5, 0.5]), ((3,), [0, 0, 0, 1]), ((0, 3), [1, 0, 0, 0])):
        sampler = Sampler(LogitsProcessorList([Allows(*tokens)])).for_drafts()
        assert sampler.probs(ids, logits).tolist() == law


# --- log-probabilities of tokens, and penalties for tokens that occurred before


@pytest.mark.parametrize("drafts", [{"speculate": False}, {"drafter": "exit:threshold=0.01"}])
@pytest.mark.parametrize("drawing", [{}, {"do_sample": True, "temperature": 3.0, "seed": 1}])
def test_log_probabilities_are_those_of_the_models_own_logits(
    eager: Speculator, drafts: dict[str, Any], drawing: dict[str, Any]
) -> None:
    ids = random_ids(9)
    answer: Any = eager.generate(ids, max_new_tokens=12, logprobs=3, **drafts, **drawing)
    text = torch.tensor([ids[0].tolist() + answer.token_ids])
    logs = eager.model(text).logits[0, 8:-1].log_softmax(-1)
    assert [entry.token for entry in answer.logprobs] == answer.token_ids
    for row, entry in zip(logs, answer.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()
        assert [log for _, log in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    processors = [lambda _, scores: scores.clamp_(max=0.0)]  # changes its input in place
    options: Any = {"max_new_tokens": 1, "logprobs": 3, "logits_processor": processors}
    first: Any = eager.generate(ids, **options, **drafts).logprobs
    assert first[0].top == answer.logprobs[0].top
    if drawing:
        assert any(entry.token != entry.top[0][0] for entry in answer.logprobs)


def test_log_probabilities_are_recorded_only_on_request(eager: Speculator) -> None:
    def noted(**options: Any) -> Any:
        return eager.generate(random_ids(4), max_new_tokens=3, **options).logprobs

    assert noted() is None
    assert [entry.top for entry in noted(logprobs=0)] == [()] * 3
    assert [len(entry.top) for entry in noted(logprobs=10**6)] == [VOCAB_SIZE] * 3
    with pytest.raises(InvalidOption, match="logprobs is -1, expected a value of at least 0"):
        noted(logprobs=-1)


def test_penalties_count_the_answer_alone() -> None:
    penalty = OccurrencePenalty(0.5, 0.25, start=2)
    scores = penalty(torch.tensor([[1, 2, 3, 3, 4]]), torch.zeros(1, 6))
    assert scores.tolist() == [[0.0, 0.0, 0.0, -1.0, -0.75, 0.0]]


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_change_the_answer_and_drafts_do_not(eager: Speculator, name: str) -> None:
    def answer(value: float, **drafts: Any) -> Generation:
        options: Any = {"max_new_tokens": 40, name: value, **drafts}
        return eager.generate(random_ids(6), **options)

    plain, penalised = (answer(value, speculate=False).token_ids for value in (0.0, 4.0))
    assert len({*penalised}) > len({*plain})
    drafted = answer(4.0, drafter="exit:threshold=0.01", never_slower=False)
    assert drafted.token_ids == penalised
    assert drafted.stats.accepted > 0  # drafts are made under the penalty, too


# --- with a seed: a text is a function of prompt and seed, drawn from the model's distribution
#
# Each draw is tied to the seed and its position, so a draft can only be right or wrong: with any
# drafter, and with any other rows in the batch, the text is that of plain decoding.

SEED, NEW_TOKENS = 11, 24

METHODS: dict[str, dict[str, Any]] = {
    "exit": {"drafter": "exit:layers=3,threshold=0.01,max_tokens=3"},
    "exit of two layers": {"drafter": "exit:threshold=0.05,max_tokens=3"},
    "trees": {"drafter": "exit:layers=0,threshold=0.01,guesses=3,max_rows=9,max_tokens=3"},
    "trees around seen text": {"drafter": "ngram+exit:layers=0,threshold=0.01,guesses=3"},
    "ngram": {"drafter": "ngram:size=2"},
    "ngram, else exit": {"drafter": "ngram+exit:layers=3,threshold=0.01,max_tokens=3"},
    "lookahead": {"drafter": "lookahead", "never_slower": False},
    "draft model": {"drafter": "draft-model:max_tokens=3"},
    "ngram, else draft model": {"drafter": "ngram+draft-model:max_tokens=3"},
    "fewer layers": {"drafter": "skip:skipped=3/4,threshold=0.3,max_tokens=3"},
    "confident exits": {"drafter": "exit:threshold=0.05", "controller": "threshold:threshold=0.1"},
    "exit, pinned": {"drafter": "exit:layers=3,threshold=0.01", "pinned": True},
}
"""Options of drafters; each of them drafts here, mostly wrongly."""

FLAT: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 2.0}
"""The tiny models' own distributions are nearly one-hot."""


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    """The tiny Llama in float64: differences in the last bits must not decide a draw."""
    model = make_model("llama", torch.float64)
    heads = ladder.deep_heads(Backbone(model, executor="generic"))
    second = make_model("llama", torch.float64, num_hidden_layers=2)
    options: dict[str, Any] = {"costs": "row=0,head=0", "never_slower": False}
    return wrap(model, heads=heads, draft_model=second, executor="generic", **options)


PROMPTS = (random_ids(13, 0, 4), random_ids(7, 1, 4), random_ids(10, 2, 4))
"""Ids with four different values, so that prompt lookup finds matches."""


def plain(speculator: Speculator, ids: Tensor, **options: Any) -> list[int]:
    keywords = FLAT | {"max_new_tokens": NEW_TOKENS, "seed": SEED} | options
    return speculator.generate(ids, drafter="none", **keywords).token_ids


def test_a_text_cut_short_is_continued_with_the_same_tokens(speculator: Speculator) -> None:
    """A draw depends on its position, not on where the prompt came from."""
    tokens = plain(speculator, PROMPTS[0])
    longer = torch.cat([PROMPTS[0], torch.tensor([tokens[:15]])], dim=1)
    assert plain(speculator, longer, max_new_tokens=NEW_TOKENS - 15) == tokens[15:]


def left_padded() -> tuple[Tensor, Tensor]:
    """`PROMPTS` as rows of one batch, and its mask."""
    longest = max(prompt.shape[1] for prompt in PROMPTS)
    ids = torch.full((len(PROMPTS), longest), 3)  # an ordinary token: only the mask marks padding
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(PROMPTS):
        ids[row, longest - prompt.shape[1] :] = prompt[0]
        mask[row, longest - prompt.shape[1] :] = 1
    return ids, mask


@pytest.fixture(scope="module")
def texts(speculator: Speculator) -> list[list[int]]:
    """The text of each prompt alone, without drafts."""
    pairs = ((prompt, SEED + row) for row, prompt in enumerate(PROMPTS))
    return [plain(speculator, prompt, max_new_tokens=20, seed=seed) for prompt, seed in pairs]


@pytest.mark.parametrize("method", [None, *METHODS], ids=str)
def test_a_row_of_a_batch_equals_its_prompt_alone_with_the_seed_plus_its_number(
    speculator: Speculator, method: str | None, texts: list[list[int]]
) -> None:
    drafting = {"drafter": "none"} if method is None else METHODS[method]
    ids, mask = left_padded()
    options = FLAT | {"max_new_tokens": 20, "attention_mask": mask} | drafting
    answers = speculator.generate_batch(ids, **options, seed=SEED)
    assert [answer.token_ids for answer in answers] == texts
    assert all(answer.stats.lossless for answer in answers)
    drafted = sum(answer.stats.drafted for answer in answers)
    accepted = sum(answer.stats.accepted for answer in answers)
    # some drafts are right, some wrong; prompt lookup has none right here
    assert method in (None, "ngram") or 0 < accepted < drafted


def test_without_a_seed_torchs_decides_whatever_is_drafted(speculator: Speculator) -> None:
    texts = []
    for drafting in ({"drafter": "none"}, METHODS["trees"]):
        options = FLAT | {"max_new_tokens": 20} | drafting
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            answers = [speculator.generate(PROMPTS[0], **options) for _ in range(2)]
        assert answers[1].stats.accepted > 0 or drafting["drafter"] == "none"
        texts.append([answer.token_ids for answer in answers])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_seeds_wrap_around_at_64_bits(speculator: Speculator) -> None:
    ids = torch.cat([PROMPTS[0], PROMPTS[0]])
    last, first = speculator.generate_batch(ids, **FLAT, max_new_tokens=8, seed=2**64 - 1)
    assert last.token_ids == plain(speculator, PROMPTS[0], max_new_tokens=8, seed=-1)
    assert first.token_ids == plain(speculator, PROMPTS[0], max_new_tokens=8, seed=0)


def test_no_prompt_is_lost_if_seeds_run_out_or_are_invalid(speculator: Speculator) -> None:
    prompts, seeds = [PROMPTS[0]] * 4, [2**64 + 5, "x", None]
    options: Any = {"seeds": seeds, **FLAT, "max_new_tokens": 3}
    answers = dict(speculator.generate_each(prompts, **options))
    kinds = [type(answers[number]) for number in range(4)]
    assert kinds == [Generation, InvalidOption, Generation, InvalidOption]
    assert "more prompts than seeds" in str(answers[3])
    prompts, options["seeds"] = [torch.tensor([-1]), PROMPTS[0]] * 2, [1] * 4
    answers = dict(speculator.generate_each(prompts, **options, most=1))
    assert [type(answers[number]) for number in range(4)] == [InvalidPrompt, Generation] * 2


def sampler_of(seed: int) -> Sampler:
    return Sampler(LogitsProcessorList(), do_sample=True).seeded(seed, torch.device("cpu"))


def test_the_draft_that_equals_the_targets_own_draw_is_kept() -> None:
    sampler, kept = sampler_of(5), Counter[bool]()
    drafts = [*(Draft.of([token]) for token in range(5)), Draft.of([1, 4], [-1, -1])]
    for draft, position in product(drafts, range(1, 60)):
        token = sampler.draw(laws.TARGET, position)
        logits = laws.TARGET.log().expand(len(draft.tokens) + 1, 5)
        pairs = laws.verdicts(GreedyMatch(sampler), laws.Text([0] * position), logits, draft)
        assert pairs[0] == (token, token in draft.tokens)
        kept[token in draft.tokens] += 1
    assert set(kept) == {True, False}


def test_guesses_are_the_draws_of_a_seed_without_replacement() -> None:
    sampler = sampler_of(7)
    for place in range(40):
        tokens, chances = sampler.likely_draws(laws.TARGET, place, 4, doubt=1.0)
        probs, drawn = laws.TARGET.clone(), list[int]()
        for _ in range(4):
            drawn.append(sampler.draw(probs, place))
            probs[drawn[-1]] = 0.0
        assert tokens == drawn
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) < 1.0 + 1e-9


def test_tokens_that_race_together_are_no_guess() -> None:
    flat = torch.full((1000,), 0.001)  # tokens that race together win most races
    for place in range(20):
        tokens, chances = sampler_of(7).likely_draws(flat, place, 3, doubt=1.0)
        assert len(tokens) == 3
        assert min(tokens) >= 0
        assert sum(chances) < 0.4


def heated(temperature: float) -> Sampler:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    return replace(sampler_of(9), processors=warpers)


def test_near_temperature_0_a_guess_has_the_chance_of_a_greedy_one() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.7, 0.4]])
    sampler, ids = heated(0.01), random_ids(3)
    for place in range(5):
        tokens, chances = sampler.likely_draws(sampler.probs(ids, logits), place, 4, doubt=2.0)
        assert chances == pytest.approx((logits[0] / 2.0).softmax(0)[tokens].tolist(), abs=0.02)


@pytest.mark.parametrize(("temperature", "doubt"), [(0.3, 0.5), (1.0, 1.0), (1.0, 2.0)])
def test_a_guess_is_right_as_often_as_its_chance_says(temperature: float, doubt: float) -> None:
    generator = torch.Generator().manual_seed(1)
    sampler, ids = heated(temperature), random_ids(3)
    expected, right, count = 0.0, 0, 1500
    for place in range(count):
        draft = 2.0 * torch.randn(1, 5, generator=generator)
        noise = -torch.empty(1, 5).exponential_(generator=generator).log()
        tokens, chances = sampler.likely_draws(sampler.probs(ids, draft), place, 2, doubt)
        drawn = sampler.draw(sampler.probs(ids, draft + doubt * noise), place)
        expected += chances[1]
        right += drawn == tokens[1]
    assert expected > 0.1 * count
    assert abs(right - expected) < 4 * math.sqrt(expected)


@torch.inference_mode()
@pytest.mark.parametrize("method", ["exit", "trees", "draft model"])
def test_every_drafter_draws_at_the_place_of_its_token(
    speculator: Speculator, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = left_padded()
    options = speculator.options.updated(METHODS[method])
    call = speculator.call(ids, FLAT | {"seed": SEED, "attention_mask": mask})  # type: ignore[arg-type]  # by name
    request, runtime = call.row(1), speculator.runtime
    state, drafter = runtime.state(request, options), runtime.drafter(request, options, Load())
    next(rounds(state, NoDrafter(), request.stop, GreedyMatch(request.sampler)))
    chosen, foreseen, draw = dict[int, set[int]](), Sampler.likely_draws, Sampler.draw

    def guessed(self: Sampler, probs: Tensor, place: int, *args: Any) -> Any:
        guess = foreseen(self, probs, place, *args)
        assert guess[0][0] == draw(request.sampler, probs, place, *args[2:])
        chosen.setdefault(place, set()).update(guess[0])
        return guess

    def drawn(self: Sampler, probs: Tensor, place: int, *args: Any) -> int:
        token = draw(request.sampler, probs, place, *args)
        chosen.setdefault(place, set()).add(token)
        return token

    monkeypatch.setattr(Sampler, "likely_draws", guessed)
    monkeypatch.setattr(Sampler, "draw", drawn)
    with state.round():
        draft = ladder.ask(drafter, state, 9)
    assert len(draft.tokens) > 1
    for index, choice in enumerate(draft.proposed):
        place = state.length + len(draft.path(index)) - 1  # the ids before it, and padding
        assert choice.token in chosen[place]


TOP_P, TOP_40 = TopPLogitsWarper(0.8), TopKLogitsWarper(40)


@pytest.mark.parametrize("tied", [0, 30])
@pytest.mark.parametrize(
    ("warpers", "few"),
    [
        ([TOP_40], True),
        ([TemperatureLogitsWarper(0.7), TOP_40, TOP_P, MinPLogitsWarper(0.02)], True),
        ([TOP_P, TOP_40], False),
        ([TopKLogitsWarper(64)], False),
        ([TopKLogitsWarper(40, filter_value=-5.0)], False),
        ([TOP_40, SuppressTokensLogitsProcessor([3])], False),
    ],
)
def test_tokens_below_a_top_k_are_left_out_unless_one_is_tied(
    warpers: list[Any], few: bool, tied: int
) -> None:
    sampler = replace(sampler_of(3), processors=LogitsProcessorList(warpers))
    ids, logits = random_ids(3), 3.0 * torch.randn(1, 500, generator=torch.manual_seed(2))
    order = logits[0].argsort(descending=True)
    logits[0, order[39 : 40 + tied]] = float(logits[0, order[39]])
    probs, tokens = sampler.candidates(ids, logits)
    assert (tokens is not None) == (few and not tied)
    whole = sampler.probs(ids, logits)
    places = torch.arange(500) if tokens is None else tokens
    torch.testing.assert_close(torch.zeros(500).index_put((places,), probs), whole)
    for place in range(40):
        row = torch.zeros(1, place, dtype=torch.long)
        assert sampler.choose(row, logits).token == sampler.draw(whole, place)


def test_sampled_sequences_follow_the_models_distribution_over_seeds() -> None:
    model, ids = make_model("llama", vocab_size=4, num_hidden_layers=2), random_ids(3, 0, 4)
    ladder.check_sampling(model, ids, 600, seeded=True, costs="row=0,head=0")


@pytest.mark.parametrize("seeded", [True, False])
def test_draws_from_many_tokens_follow_their_distribution(seeded: bool) -> None:
    """Of 200 tokens only the likeliest 64 race individually; their probability is 54 % here."""
    law = torch.arange(1.0, 201.0)
    law, sampler = law / law.sum(), sampler_of(4)
    drawn = (sampler.draw(law, at if seeded else None) for at in range(8_000))
    counts = Counter[tuple[int, ...]]((token,) for token in drawn)
    expected: laws.Law = {(token,): chance for token, chance in enumerate(law.tolist())}
    assert chi_square_p(counts, expected, counts.total()) > 0.001


@pytest.mark.parametrize("place", [None, 3])
def test_an_invalid_distribution_is_refused(place: int | None) -> None:
    for value in (0.0, math.nan, math.inf):
        with pytest.raises(InvalidOption, match="no distribution to draw from"):
            sampler_of(0).draw(torch.full((100,), value), place)


def agreement(one: Sampler, law: Tensor, other: Sampler, their_law: Tensor) -> float:
    """Share of 4,000 places of a text where two samplers draw the same token."""
    drawn = ((one.draw(law, at), other.draw(their_law, at)) for at in range(1, 4001))
    return sum(first == second for first, second in drawn) / 4000


def test_drafts_of_the_same_seed_and_place_agree_more_often_than_independent_ones() -> None:
    p, q = laws.TARGET, laws.DRAFT
    coupled = agreement(sampler_of(0), p, sampler_of(0), q)
    independent = agreement(sampler_of(0), p, sampler_of(1), q)
    chance, distance = float(p @ q), float((p - q).abs().sum() / 2)
    assert independent == pytest.approx(chance, abs=0.03)  # 4 sigma of 4,000 draws
    # not below the coupling's own bound; no coupling agrees more often than 1 - TV
    assert (1 - distance) / (1 + distance) - 0.03 < coupled < 1 - distance + 0.03
    assert coupled > independent + 0.2
    assert agreement(sampler_of(0), p, sampler_of(0), p.clone()) == 1.0


LAW = torch.tensor([0.4, 0.3, 0.2, 0.1])

LINES: dict[str, Callable[[int], tuple[int, int]]] = {
    "places of a seed": lambda number: (0, number),
    "seeds at a place": lambda number: (number, 1),
    "seeds that rise with the place": lambda number: (number, number),
    "seeds that fall as the place rises": lambda number: (4000 - number, number),
    "seeds of 40 bits more": lambda number: (number << 40, 5),
}
"""Sequences in which successive draws could be correlated; number -> (seed, place)."""


@pytest.mark.parametrize("line", LINES)
def test_neighbours_are_drawn_independently(line: str) -> None:
    places = map(LINES[line], range(1, 4001))
    drawn = [sampler_of(seed).draw(LAW, place) for seed, place in places]
    expected: laws.Law = {(a, b): float(LAW[a] * LAW[b]) for a, b in product(range(4), repeat=2)}
    for step in (1, 2, 64):
        pairs = Counter[tuple[int, ...]](zip(drawn, drawn[step:], strict=False))
        assert chi_square_p(pairs, expected, pairs.total()) > 0.001
