"""Options: their bounds, their names, and errors that say what to do."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from selfspec.config import OPTION_NAMES, GenerateOptions, SpeculationOptions, check
from selfspec.errors import InvalidOption
from selfspec.options import (
    CmAsd,
    CmAsdLength,
    DraftModel,
    Easd,
    Exit,
    GammaTune,
    Heuristic,
    Lenient,
    Lossless,
    Ngram,
    Prices,
    Threshold,
)
from selfspec.typed import check_keys


def test_the_defaults_are_valid_and_lossless() -> None:
    options = SpeculationOptions()
    assert options.speculate
    assert options.loss is None


@pytest.mark.parametrize(
    ("made", "values", "message"),
    [
        (Exit, {"threshold": 0.0}, "exit:threshold is 0.0, expected a value in (0, 1]"),
        (Exit, {"threshold": 1.001}, "exit:threshold is 1.001, expected a value in (0, 1]"),
        (
            Exit,
            {"threshold": math.nan},
            "exit:threshold is nan, expected a finite number or a list of finite numbers",
        ),
        (Exit, {"threshold": (0.5, -0.1)}, "exit:threshold is -0.1, expected a value in (0, 1]"),
        (Exit, {"threshold": ()}, "exit:threshold is empty, expected at least one value"),
        (Exit, {"anneal_strength": -0.01}, "exit:anneal_strength is -0.01, expected a value at"),
        (Exit, {"anneal_strength": math.nan}, "exit:anneal_strength is nan, expected a finite"),
        (Exit, {"max_tokens": 0}, "exit:max_tokens is 0, expected a value at least 1"),
        (Ngram, {"size": 0}, "ngram:size is 0, expected a value at least 1"),
        (Ngram, {"max_tokens": 0}, "ngram:max_tokens is 0, expected a value at least 1"),
        (DraftModel, {"max_tokens": 0}, "draft-model:max_tokens is 0, expected a value at least"),
        (Threshold, {"threshold": -0.1}, "threshold:threshold is -0.1, expected a value in [0, 1]"),
        (GammaTune, {"rate": 0.0}, "gammatune:rate is 0.0, expected a value in (0, 1]"),
        (GammaTune, {"step": -1.0}, "gammatune:step is -1.0, expected a value at least 0"),
        (CmAsdLength, {"scale": 1.5}, "cm-asd:scale is 1.5, expected a value in (0, 1]"),
        (CmAsdLength, {"margin_scale": 0.0}, "cm-asd:margin_scale is 0.0, expected a value above"),
        (
            CmAsd,
            {"weights": (0.5, 0.25, 0.2)},
            "cm-asd:weights is (0.5, 0.25, 0.2), "
            "expected a value of three weights, at least 0, that sum to 1",
        ),
        (
            Heuristic,
            {"shortest": 11},
            "heuristic:shortest 11 exceeds heuristic:longest 10. Lower the one or raise the other",
        ),
        (CmAsd, {"top_beta": 0}, "cm-asd:top_beta is 0, expected a value at least 1"),
        (CmAsd, {"tolerance": -0.1}, "cm-asd:tolerance is -0.1, expected a value at least 0"),
        (CmAsd, {"tolerance_gain": -1}, "cm-asd:tolerance_gain is -1, expected a value at least 0"),
        (CmAsd, {"reading": "text"}, "cm-asd:reading is text, expected a value intent or paper"),
        (Easd, {"entropy": -1.0}, "easd:entropy is -1.0, expected a value at least 0"),
        (Easd, {"overlap": 1.1}, "easd:overlap is 1.1, expected a value in [0, 1]"),
        (Easd, {"tokens": 0}, "easd:tokens is 0, expected a value at least 1"),
        (Lenient, {"lenience": 0.0}, "lenient:lenience is 0.0, expected a value in (0, 1]"),
        (Lenient, {"lenience": 1.5}, "lenient:lenience is 1.5, expected a value in (0, 1]"),
        (Prices, {"row": -0.1}, "prices:row is -0.1, expected a value in [0, 1]"),
        (Prices, {"head": -0.1}, "prices:head is -0.1, expected a value at least 0"),
        (Prices, {"row": (0.1, 2.0)}, "prices:row is 2.0, expected a value in [0, 1]"),
        (Prices, {"row": ()}, "prices:row is empty, expected at least one value"),
        (SpeculationOptions, {"drafter": "exits"}, "unknown drafter 'exits'. Did you mean exit?"),
        (
            SpeculationOptions,
            {"acceptance": Easd(), "require_lossless": True},
            "acceptance easd is lossy, but require_lossless is set. Leave one out",
        ),
        (
            SpeculationOptions,
            {"acceptance": Lenient(lenience=0.5), "require_lossless": True},
            "lenience 0.5 is lossy, but require_lossless is set. Leave one out",
        ),
        (
            SpeculationOptions,
            {"controller": Heuristic(shortest=8), "pinned": True},
            "pinned_rows is 8, but heuristic:shortest 8 needs at least 9 rows. "
            "Raise the one or lower the other",
        ),
        (
            SpeculationOptions,
            {"drafter": "draft-model", "draft_model": DraftModel(max_tokens=8), "pinned": True},
            "pinned_rows is 8, but draft-model:max_tokens 8 needs at least 9 rows. "
            "Raise the one or lower the other",
        ),
    ],
)
def test_values_out_of_range_are_named(made: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        made(**values)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("made", "values"),
    [
        (Exit, {"threshold": 1.0}),
        (Exit, {"threshold": 1e-9}),
        (Exit, {"threshold": (1.0, 0.5)}),
        (Exit, {"anneal_strength": 0.0}),
        (Exit, {"max_tokens": 1}),
        (Lenient, {"lenience": 1e-9}),
        (SpeculationOptions, {"pinned": True, "exit": Exit(max_tokens=7), "pinned_rows": 8}),
        (SpeculationOptions, {"pinned": False, "exit": Exit(max_tokens=8), "pinned_rows": 8}),
        (SpeculationOptions, {"pinned": True, "ngram": Ngram(max_tokens=8), "pinned_rows": 8}),
    ],
)
def test_values_at_the_edge_of_their_range_are_kept(made: type, values: dict[str, Any]) -> None:
    options = made(**values)
    assert {name: getattr(options, name) for name in values} == values


def test_one_threshold_and_several_read_as_a_tuple() -> None:
    assert Exit(threshold=0.7).thresholds == (0.7,)
    assert Exit(threshold=(0.7, 0.8)).thresholds == (0.7, 0.8)
    assert Exit(threshold=(0.7,)) == Exit(threshold=0.7)


@pytest.mark.parametrize(
    ("acceptance", "loss"),
    [
        (Lossless(), None),
        (Lenient(lenience=1.0), None),
        (Lenient(lenience=0.5), "lenience 0.5"),
        (CmAsd(), "acceptance cm-asd"),
        (Easd(), "acceptance easd"),
    ],
)
def test_what_changes_the_output_is_named(acceptance: Any, loss: str | None) -> None:
    assert SpeculationOptions(acceptance=acceptance).loss == loss


def test_options_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SpeculationOptions().exit.max_tokens = 5  # type: ignore[misc]  # the mistake


def test_updating_replaces_the_given_values_in_a_copy() -> None:
    before = SpeculationOptions(exit=Exit(max_tokens=3, threshold=0.5))
    after = before.updated({"drafter": "exit:max_tokens=4"})
    assert after.exit == Exit(max_tokens=4, threshold=0.5)
    assert before.exit.max_tokens == 3


def test_updating_turns_lists_from_json_or_yaml_into_tuples() -> None:
    given = {"drafter": {"exit": {"layers": [2, 4], "threshold": [0.5, 0.6]}}}
    options = SpeculationOptions().updated(given)
    assert options.exit == Exit(layers=(2, 4), threshold=(0.5, 0.6))
    hash(options)


def test_an_unknown_option_names_the_nearest_known_one() -> None:
    with pytest.raises(InvalidOption) as caught:
        SpeculationOptions().updated({"draftr": "exit"})
    assert str(caught.value) == "unknown option 'draftr'. Did you mean drafter?"


def test_a_key_like_no_other_lists_all_known_ones() -> None:
    with pytest.raises(InvalidOption) as caught:
        check_keys(["zzz"], {"beta", "alpha"}, "key")
    assert str(caught.value) == "unknown key 'zzz'. Known: alpha, beta"


def test_known_keys_pass() -> None:
    check_keys(["alpha"], ["beta", "alpha"], "key")


def test_every_speculation_option_can_be_given_per_call() -> None:
    assert set(GenerateOptions.__annotations__) >= set(OPTION_NAMES)
    kept = {"exit", "ngram", "draft_model", "easd"}
    fields = {field.name for field in dataclasses.fields(SpeculationOptions)}
    assert fields == {*OPTION_NAMES, *kept}


@pytest.mark.parametrize(
    "values",
    [
        {"drafter": "exit:max_tokens=8", "pinned_rows": 0},
        {"drafter": "exit:max_tokens=0"},
        {"pinned": "yes"},
        {"exit": Exit()},  # reached by `drafter`
        {"exit_threshold": 0.5},
    ],
)
def test_what_no_model_could_take_is_refused_before_one_is_loaded(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        check(values)


def test_what_depends_on_the_heads_is_left_for_later() -> None:
    check({"pinned": True, "pinned_rows": 3})  # enough for heads that draft two tokens
