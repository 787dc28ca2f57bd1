"""Options: their bounds, their names, and errors that say what to do."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from selfspec.config import OPTION_NAMES, GenerateOptions, SpeculationOptions
from selfspec.errors import InvalidOption
from selfspec.typed import check_keys


def test_the_defaults_are_valid_and_lossless() -> None:
    options = SpeculationOptions()
    assert options.speculate
    assert options.lenience == 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"exit_threshold": 0.0}, "exit_threshold is 0.0, expected a value in (0, 1]"),
        ({"exit_threshold": 1.001}, "exit_threshold is 1.001, expected a value in (0, 1]"),
        (
            {"exit_threshold": math.nan},
            "exit_threshold is nan, expected a finite number or a list of finite numbers",
        ),
        ({"exit_threshold": (0.5, -0.1)}, "exit_threshold is -0.1, expected a value in (0, 1]"),
        ({"anneal_strength": -0.01}, "anneal_strength is -0.01, expected a value at least 0"),
        ({"anneal_strength": math.nan}, "anneal_strength is nan, expected a finite number"),
        ({"max_draft_tokens": 0}, "max_draft_tokens is 0, expected a value at least 1"),
        (
            {"controller_threshold": -0.1},
            "controller_threshold is -0.1, expected a value in [0, 1]",
        ),
        ({"top_beta": 0}, "top_beta is 0, expected a value at least 1"),
        ({"tolerance": -0.1}, "tolerance is -0.1, expected a value at least 0"),
        ({"tolerance_gain": -1}, "tolerance_gain is -1, expected a value at least 0"),
        ({"entropy_threshold": -1.0}, "entropy_threshold is -1.0, expected a value at least 0"),
        ({"overlap_threshold": 1.1}, "overlap_threshold is 1.1, expected a value in [0, 1]"),
        ({"overlap_tokens": 0}, "overlap_tokens is 0, expected a value at least 1"),
        ({"acceptance": "loss"}, "unknown acceptance 'loss'. Did you mean lossless?"),
        (
            {"cm_asd_reading": "text"},
            "unknown cm_asd_reading 'text'. Did you mean intent?",
        ),
        (
            {"acceptance": "easd", "require_lossless": True},
            "acceptance easd is lossy, but require_lossless is set. Leave one out",
        ),
        (
            {"lenience": 0.5, "require_lossless": True},
            "lenience 0.5 is lossy, but require_lossless is set. Leave one out",
        ),
        (
            {"lenience": 0.5, "acceptance": "easd"},
            "lenience 0.5 and acceptance easd: each is a rule of its own. Leave one out",
        ),
        ({"ngram_size": 0}, "ngram_size is 0, expected a value at least 1"),
        ({"ngram_draft_tokens": 0}, "ngram_draft_tokens is 0, expected a value at least 1"),
        ({"row_cost": -0.1}, "row_cost is -0.1, expected a value in [0, 1]"),
        ({"head_cost": -0.1}, "head_cost is -0.1, expected a value at least 0"),
        ({"block_cost": -0.1}, "block_cost is -0.1, expected a value at least 0"),
        ({"gammatune_rate": 0.0}, "gammatune_rate is 0.0, expected a value in (0, 1]"),
        ({"gammatune_step": -1.0}, "gammatune_step is -1.0, expected a value at least 0"),
        ({"length_scale": 1.5}, "length_scale is 1.5, expected a value in (0, 1]"),
        ({"margin_scale": 0.0}, "margin_scale is 0.0, expected a value above 0"),
        (
            {"confidence_weights": (0.5, 0.25, 0.2)},
            "confidence_weights is (0.5, 0.25, 0.2), "
            "expected a value of three weights, at least 0, that sum to 1",
        ),
        (
            {"shortest_draft": 11},
            "shortest_draft 11 exceeds longest_draft 10. Lower the one or raise the other",
        ),
        (
            {"shortest_draft": 8, "pinned": True},
            "shortest_draft 8 exceeds longest_draft 10 and pinned_rows 8. "
            "Lower the one or raise the other",
        ),
        ({"lenience": 0.0}, "lenience is 0.0, expected a value in (0, 1]"),
        ({"lenience": 1.5}, "lenience is 1.5, expected a value in (0, 1]"),
    ],
)
def test_values_out_of_range_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        SpeculationOptions(**values)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "values",
    [
        {"exit_threshold": 1.0},
        {"exit_threshold": 1e-9},
        {"exit_threshold": (1.0, 0.5)},
        {"anneal_strength": 0.0},
        {"max_draft_tokens": 1},
        {"lenience": 1e-9},
        {"pinned": True, "max_draft_tokens": 7, "pinned_rows": 8},
        {"pinned": False, "max_draft_tokens": 8, "pinned_rows": 8},
    ],
)
def test_values_at_the_edge_of_their_range_are_kept(values: dict[str, Any]) -> None:
    options = SpeculationOptions(**values)
    assert {name: getattr(options, name) for name in values} == values


def test_pinned_passes_need_a_row_for_each_draft_and_one_more() -> None:
    with pytest.raises(InvalidOption, match=r"pinned_rows is 8, .* 8 needs at least 9 rows"):
        SpeculationOptions(pinned=True, max_draft_tokens=8, pinned_rows=8)


def test_one_threshold_and_several_read_as_a_tuple() -> None:
    assert SpeculationOptions(exit_threshold=0.7).thresholds == (0.7,)
    assert SpeculationOptions(exit_threshold=(0.7, 0.8)).thresholds == (0.7, 0.8)


def test_options_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SpeculationOptions().lenience = 0.5  # type: ignore[misc]  # the mistake


def test_updating_replaces_the_given_values_in_a_copy() -> None:
    before = SpeculationOptions(max_draft_tokens=3, lenience=0.5)
    after = before.updated({"max_draft_tokens": 4})
    assert (after.max_draft_tokens, after.lenience) == (4, 0.5)
    assert before.max_draft_tokens == 3


def test_updating_turns_lists_from_json_or_yaml_into_tuples() -> None:
    options = SpeculationOptions().updated({"exit_layers": [2, 4], "exit_threshold": [0.5, 0.6]})
    assert (options.exit_layers, options.exit_threshold) == ((2, 4), (0.5, 0.6))
    hash(options)


def test_updating_checks_ranges_again() -> None:
    with pytest.raises(InvalidOption, match="lenience is 2"):
        SpeculationOptions().updated({"lenience": 2})


def test_an_unknown_option_names_the_nearest_known_one() -> None:
    with pytest.raises(InvalidOption) as caught:
        SpeculationOptions().updated({"exit_treshold": 0.5})
    assert str(caught.value) == "unknown option 'exit_treshold'. Did you mean exit_threshold?"


def test_a_key_like_no_other_lists_all_known_ones() -> None:
    with pytest.raises(InvalidOption) as caught:
        check_keys(["zzz"], {"beta", "alpha"}, "key")
    assert str(caught.value) == "unknown key 'zzz'. Known: alpha, beta"


def test_known_keys_pass() -> None:
    check_keys(["alpha"], ["beta", "alpha"], "key")


def test_every_speculation_option_can_be_given_per_call() -> None:
    assert set(GenerateOptions.__annotations__) >= OPTION_NAMES
    assert {field.name for field in dataclasses.fields(SpeculationOptions)} == OPTION_NAMES
