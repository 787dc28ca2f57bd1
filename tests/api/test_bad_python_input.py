"""Careless and hostile options through the Python API: each gives one line, never a raw error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from selfspec.api.speculator import Speculator, wrap
from selfspec.config import SpeculationOptions
from selfspec.errors import InvalidOption, InvalidPrompt, SelfspecError
from selfspec.options import Exit, Fixed
from tests.bad_calls import IDS, VOCAB, check, small_model, speaking
from tests.models import addressless, random_ids


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


@pytest.fixture(scope="module")
def speculator(model: Any) -> Speculator:
    return speaking(model)


# Options of generate

NAN, INF = math.nan, math.inf


def options(name: str, *values: Any, **others: Any) -> list[dict[str, Any]]:
    return [{name: value} | others for value in values]


def settings(name: str, kind: str, key: str, *values: Any) -> list[dict[str, Any]]:
    return [{name: {kind: {key: value}}} for value in values]


def too_many(_one: Any, _two: Any, _three: Any) -> None:
    """No processor takes three things."""


OPTIONS: list[dict[str, Any]] = [
    *options("max_new_tokens", "5", 0, -1, 2.5, NAN, INF, True, [5], {}),
    *options("max_length", "5", 0, -3, 2, 9.5),
    *options("min_new_tokens", "5", -1, 1.5),
    *options("min_length", "5", -1),
    *options("max_time", "5", -1.0, NAN, INF, -1),
    *options("num_return_sequences", "2", 0, -1, 2, 1.5),
    *options("do_sample", "yes", 1, 0.5),
    *options("temperature", "1", -1.0, NAN, INF, True, do_sample=True),
    *options("temperature", 1e-42, do_sample=True),
    *options("top_k", "5", -1, 2.5, 0.5, do_sample=True),
    *options("top_p", "x", -0.1, 1.5, NAN, do_sample=True),
    *options("min_p", "x", -0.1, 1.5, NAN, do_sample=True),
    *options("typical_p", "x", -0.1, NAN, do_sample=True),
    *options("epsilon_cutoff", "x", NAN, do_sample=True),
    *options("eta_cutoff", "x", NAN, do_sample=True),
    *options("repetition_penalty", "x", 0.0, -1.0, NAN, INF),
    *options("no_repeat_ngram_size", "x", -1, 1.5),
    *options("bad_words_ids", 5, [], [5], [["a"]], [[-1]], [[VOCAB]], [[1.5]], "word"),
    *options("sequence_bias", 5, [], [[5, 1.0]], [[[VOCAB], 1.0]], [[[5]]], {}, "x"),
    *options("suppress_tokens", 5, ["a"], [VOCAB], [-1], [1.5]),
    *options("begin_suppress_tokens", 5, ["a"], [VOCAB], [10**30]),
    *options("forced_bos_token_id", "a", VOCAB, -1, 1.5),
    *options("forced_eos_token_id", "a", VOCAB, -1, [VOCAB], 1.5),
    *options("eos_token_id", "a", 1.5, ["a"], [[1]], VOCAB + 3),
    *options("pad_token_id", "a", 1.5, [1]),
    *options("exponential_decay_length_penalty", 5, (1,), ("a", 1.0), (1, "a"), (1, 2.0)),
    *options("renormalize_logits", "x", 1),
    *options("remove_invalid_values", "x"),
    *options("guidance_scale", "x", NAN, INF),
    *options("watermarking_config", "x", 5, object()),
    *options("stop_strings", 5, [5], [""], [None], "", b"x", do_sample=True),
    *options("stopping_criteria", 5, [5], ["x"], [None], [too_many], [InvalidOption], "x"),
    *options("logits_processor", 5, [5], ["x"], [None], [too_many], [InvalidOption], "x"),
    *options("prefix_allowed_tokens_fn", 5, "x", lambda _row, _ids: []),
    *options("prefix_allowed_tokens_fn", lambda _row, _ids: [VOCAB], lambda _row, _ids: ["a"]),
    *options("attention_mask", 5, "x", [1, 1, 1], torch.ones(1, 9), torch.ones(3)),
    *options("attention_mask", torch.zeros(1, 3), torch.tensor([[1, 1, 0]]), np.ones((1, 3))),
    *options("attention_mask", torch.full((1, 3), 2), torch.tensor([[0.5, 1.0, 1.0]])),
    *options("attention_mask", torch.tensor([[NAN, 1.0, 1.0]]), torch.tensor([[1, 0, 1]])),
    *options("attention_mask", torch.ones(1, 3, 3)),
    *options("generation_config", 5, "x", {}, {"max_new_tokens": 3}),
    *options("streamer", 5, "x", print, object()),
    *options("seed", "x", 1.5, NAN, 2**64, -(2**64), True),
    *options("raw", "x", 1),
    # of ours, for one call
    *options("speculate", "no", 1),
    *options("drafter", "none at all", 5, [], {}, [5], "draft-model", "ngram+draft-model"),
    *settings("drafter", "exit", "layers", 9, "x", [99], [0], [2.5], [], [5, 2], [2, 2], [-1]),
    *settings("drafter", "exit", "threshold", "x", 0.0, 1.5, NAN, [], [0.5, 0.5, 0.5], ["x"]),
    *settings("drafter", "exit", "anneal_strength", "x", -1.0, NAN, INF),
    *settings("drafter", "exit", "max_depth", "x", 99, 0, 1.5, 3),
    *settings("drafter", "exit", "max_tokens", "six", 0, -1, 2.5, True, None),
    *settings("drafter", "ngram", "size", 0, "x"),
    *options("drafter", "exit:", "exit:3", "exit:layers", "exit:=3", "exit:layers=2,layers=5"),
    *options("drafter", "exit,ngram", {"exit": 5}, {"exit": {5: 5}}, Fixed(), object()),
    *options("controller", "fast", 5, "fixed+threshold", "fixed:longest=3", Exit()),
    *settings("controller", "gammatune", "shortest", 0, "x", 99, 1.5),
    *settings("controller", "gammatune", "longest", 0, "x", -1),
    *settings("controller", "gammatune", "rate", 0.0, "x"),
    *settings("controller", "threshold", "threshold", 1.5, "x", NAN),
    *settings(
        "controller", "cm-asd", "weights", 0.4, [1.0], [0.5, 0.5, 0.5], ["a"], [NAN, 0.5, 0.5]
    ),
    *({"prices": {name: value}} for name in ("row", "head") for value in (NAN, -1.0, "x")),
    *options("prices", "row=2", "rows=1", 5, "0.3", Exit()),
    *options("acceptance", "always", 5, "easd", "lenient:lenience=0.5"),
    *settings("acceptance", "lenient", "lenience", 0.0, 2.0, "x"),
    *settings("acceptance", "easd", "entropy", -1.0, "x"),
    # old names
    *options("exit_layers", [2]),
    *options("lenience", 0.5),
    *options("pinned", "x", 1),
    *options("pinned_rows", 0, -1, 10**9, "x", 1, pinned=True),
    # that do not exist
    *options("max_tokens", 5),
    *options("temprature", 0.5),
    *options("exit_layer", 5),
    *options("num_beams", 2),
    *options("pixel_values", torch.zeros(1)),
    *options("position_ids", torch.arange(3)),
    *options("inputs_embeds", torch.zeros(1, 3, 32)),
    *options("force_words_ids", [[5]]),
    *options("past_key_values", ()),
]


@pytest.mark.parametrize("values", OPTIONS, ids=addressless)
def test_options_that_make_no_sense_are_refused_in_one_line(
    values: dict[str, Any], speculator: Speculator
) -> None:
    given = {"max_new_tokens": 4} | values
    if "max_length" in values:
        del given["max_new_tokens"]
    with pytest.raises(SelfspecError) as caught:
        speculator.generate(torch.tensor([IDS]), **given)
    check(caught.value)


def test_there_are_enough_of_them() -> None:
    assert len(OPTIONS) > 200


CONFIGS: list[dict[str, Any]] = [
    {"max_new_tokens": "5"},
    {"max_new_tokens": 2.5},
    {"temperature": "hot", "do_sample": True},
    {"top_k": "x", "do_sample": True},
    {"stop_strings": ["x", ""]},
    {"stop_strings": 5},
    {"num_return_sequences": 3},
    {"eos_token_id": "x"},
    {"bad_words_ids": "x"},
    {"guidance_scale": "x"},
    {"num_beams": 3},
    {"cache_implementation": "static"},
    {"output_scores": True},
]


@pytest.mark.parametrize("values", CONFIGS, ids=addressless)
def test_a_config_that_makes_no_sense_is_refused_in_one_line(
    values: dict[str, Any], speculator: Speculator
) -> None:
    config = GenerationConfig(max_new_tokens=3)
    for name, value in values.items():
        setattr(config, name, value)
    with pytest.raises(SelfspecError) as caught:
        speculator.generate(torch.tensor([IDS]), generation_config=config)
    check(caught.value)


# What holds for a whole speculator

LOOPS: list[dict[str, Any]] = [
    {"streamer": 5},  # it is for `generate` itself
    {"strings": 5},
    {"strings": [5]},
    {"strings": [""]},
    {"drafter": "exit:max_tokens=six"},
    {"drafter": "exit:treshold=0.5"},
    {"exit_threshold": 0.5},
    {"drafter": "fast"},
    {"temperature": 0.5},
]


@pytest.mark.parametrize("values", LOOPS, ids=addressless)
def test_a_loop_for_hugging_face_is_refused_in_one_line(
    values: dict[str, Any], speculator: Speculator
) -> None:
    with pytest.raises(InvalidOption) as caught:
        speculator.hf(**values)
    check(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        *settings("drafter", "exit", "layers", 9, [99], "x"),
        *settings("drafter", "exit", "threshold", "x", 2.0, [0.5, 0.5, 0.5]),
        *options("drafter", "fast", None),
        *settings("drafter", "exit", "max_tokens", None, "six", 1.5),
        *options("exit_layers", [2]),
        *options("max_tokens", 5),
        *options("executor", "fast", 5, None),
    ],
    ids=addressless,
)
def test_wrapping_with_options_that_make_no_sense_is_refused_in_one_line(
    values: dict[str, Any], model: Any
) -> None:
    with pytest.raises(InvalidOption) as caught:
        wrap(model, **({"heads": "logit-lens", "drafter": "exit:layers=2/5"} | values))
    check(caught.value)


@pytest.mark.parametrize("values", [None, 5, "speculate", ["speculate"], [("speculate", 1)]])
def test_options_are_updated_from_names_and_values_only(values: Any) -> None:
    with pytest.raises(InvalidOption) as caught:
        SpeculationOptions().updated(values)
    check(caught.value)


def test_more_pinned_positions_than_memory_could_hold_are_refused(model: Any) -> None:
    pinned = wrap(model, executor="generic", heads="logit-lens", pinned=True)
    with pytest.raises(InvalidOption, match="pinned passes would look at") as caught:
        pinned.generate(IDS, max_new_tokens=10**9)
    check(caught.value)


MANY: list[dict[str, Any]] = [
    *({"prompts": prompts} for prompts in (None, 5, "one prompt", b"x", {"role": "user"})),
    *({"most": value} for value in ("x", 0, 1.5)),
    *({"kv_memory": value} for value in ("1GB", -1)),
    *({"seeds": value} for value in (5, "x")),
    {"temprature": 0.5},
    {"drafter": "ngrm"},
]


@pytest.mark.parametrize("values", MANY, ids=addressless)
def test_many_prompts_are_refused_before_the_first_is_answered(
    values: dict[str, Any], speculator: Speculator
) -> None:
    given: dict[str, Any] = {"prompts": [IDS], "max_new_tokens": 2} | values
    with pytest.raises((InvalidOption, InvalidPrompt)) as caught:
        speculator.generate_each(**given)
    check(caught.value)


@pytest.mark.parametrize(
    ("option", "meant"), [("stop", "stop_strings"), ("max_tokens", "max_new_tokens")]
)
def test_the_name_that_was_meant_is_named(option: str, meant: str, speculator: Speculator) -> None:
    with pytest.raises(InvalidOption, match=f"Did you mean {meant}"):
        speculator.call(IDS, {option: 5})  # type: ignore[misc]  # the mistake


def test_keywords_of_another_call_are_told_apart(model: Any, speculator: Speculator) -> None:
    with pytest.raises(InvalidOption, match="Did you mean heads"):
        wrap(model, head="logit-lens")
    with pytest.raises(InvalidOption, match=r"streamer is for model\.generate itself"):
        speculator.hf(streamer=None)


def test_numbers_of_numpy_are_numbers(speculator: Speculator) -> None:
    plain: Any = {"max_new_tokens": 4, "temperature": 0.5, "seed": 3}
    numpy: Any = {"max_new_tokens": np.int64(4), "temperature": np.float32(0.5), "seed": np.int8(3)}
    answers = [speculator.generate(IDS, **options).token_ids for options in (plain, numpy)]
    assert answers[0] == answers[1]


# Nothing is lost by it


def test_after_bad_input_a_speculator_and_its_session_answer_as_before(
    speculator: Speculator,
) -> None:
    session, ids = speculator.session(), random_ids(9, vocab_size=VOCAB)
    expected = session.generate(ids, max_new_tokens=6).token_ids
    for prompt in (None, [VOCAB], "\ud800"):
        with pytest.raises(SelfspecError):
            session.generate(prompt, max_new_tokens=3)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(SelfspecError):
        session.generate(ids, prefix_allowed_tokens_fn=lambda _row, _ids: [])
    assert session.generate(ids, max_new_tokens=6).token_ids == expected
    assert speculator.generate(ids, max_new_tokens=6).token_ids == expected
