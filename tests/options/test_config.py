"""Options: their bounds, their names, and errors that say what to do."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM

from selfspec.api.speculator import Speculator, wrap
from selfspec.config import (
    OPTION_NAMES,
    GenerateOptions,
    SpeculationOptions,
    check,
    check_request,
)
from selfspec.errors import InvalidOption
from selfspec.options import (
    ACCEPTANCE,
    CONTROLLERS,
    DRAFTERS,
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
    ranges,
)
from selfspec.typed import annotations_of, check_keys
from tests.bad_input import patience
from tests.models import make_model


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
        (Exit, {"anneal_strength": -0.01}, "exit:anneal_strength is -0.01, expected a value in"),
        (Exit, {"anneal_strength": math.nan}, "exit:anneal_strength is nan, expected a finite"),
        (Exit, {"max_tokens": 0}, "exit:max_tokens is 0, expected a value in [1, 64]"),
        (Ngram, {"size": 0}, "ngram:size is 0, expected a value in [1, 16]"),
        (Ngram, {"max_tokens": 0}, "ngram:max_tokens is 0, expected a value in [1, 64]"),
        (DraftModel, {"max_tokens": 0}, "draft-model:max_tokens is 0, expected a value in [1, 64]"),
        (Threshold, {"threshold": -0.1}, "threshold:threshold is -0.1, expected a value in [0, 1]"),
        (GammaTune, {"rate": 0.0}, "gammatune:rate is 0.0, expected a value in (0, 1]"),
        (GammaTune, {"step": -1.0}, "gammatune:step is -1.0, expected a value in [0, 1000]"),
        (CmAsdLength, {"scale": 1.5}, "cm-asd:scale is 1.5, expected a value in (0, 1]"),
        (CmAsdLength, {"margin_scale": 0.0}, "cm-asd:margin_scale is 0.0, expected a value in (0"),
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
        (CmAsd, {"top_beta": 0}, "cm-asd:top_beta is 0, expected a value in [1, 1024]"),
        (CmAsd, {"tolerance": -0.1}, "cm-asd:tolerance is -0.1, expected a value in [0, 1000]"),
        (
            CmAsd,
            {"tolerance_gain": -1},
            "cm-asd:tolerance_gain is -1, expected a value in [0, 1000]",
        ),
        (CmAsd, {"reading": "text"}, "cm-asd:reading is text, expected a value intent or paper"),
        (Easd, {"entropy": -1.0}, "easd:entropy is -1.0, expected a value in [0, 1000]"),
        (Easd, {"overlap": 1.1}, "easd:overlap is 1.1, expected a value in [0, 1]"),
        (Easd, {"tokens": 0}, "easd:tokens is 0, expected a value in [1, 1024]"),
        (Lenient, {"lenience": 0.0}, "lenient:lenience is 0.0, expected a value in (0, 1]"),
        (Lenient, {"lenience": 1.5}, "lenient:lenience is 1.5, expected a value in (0, 1]"),
        (Prices, {"row": -0.1}, "prices:row is -0.1, expected a value in [0, 1]"),
        (Prices, {"head": -0.1}, "prices:head is -0.1, expected a value in [0, 1000]"),
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


KINDS: list[Any] = [*DRAFTERS.values(), *CONTROLLERS.values(), *ACCEPTANCE.values(), Prices]
NUMBERS = [
    (kind, name)
    for kind in [*KINDS, SpeculationOptions]
    for name, hint in annotations_of(kind).items()
    if name in kind.__dataclass_fields__ and re.search(r"\b(int|float)\b", str(hint))
]


def test_every_number_has_a_largest_value_and_no_larger_one_is_taken() -> None:
    assert {("ngram", "size"), ("exit", "guesses")} <= {(k.kind, n) for k, n in NUMBERS[:9]}
    for kind, name in NUMBERS:
        most = ranges(kind)[name].most
        assert most is not None, (kind, name)
        if not ranges(kind)[name].whole:
            for value in (most + 1, 10**9, 10**30):
                with pytest.raises(InvalidOption, match=f"{name} is {value}, expected"):
                    kind(**{name: value})


@pytest.mark.parametrize(("kind", "name"), NUMBERS)
def test_the_largest_value_costs_little(
    kind: Any, name: str, largest: tuple[Speculator, list[int]]
) -> None:
    speculator, text = largest[0], largest[1][: None if kind is Ngram else 300]
    limit = ranges(kind)[name]
    most = int(limit.most or 0) if "int" in str(annotations_of(kind)[name]) else limit.most
    values: dict[str, Any] = {name: (0.0, 0.0, most) if limit.whole else most}
    if name in ("layers", "max_depth"):
        values = {name: (5,) if name == "layers" else 5}  # must be one that has a head
    if name == "shortest":
        values["longest"] = most
    asked: Any = values
    if kind is not SpeculationOptions:
        part = kind(**values)
        groups: dict[str, Any] = {
            "drafter": DRAFTERS,
            "controller": CONTROLLERS,
            "acceptance": ACCEPTANCE,
        }
        group = next((g for g, k in groups.items() if kind in k.values()), "prices")
        asked = {group: part}
    if kind is Easd:
        asked["acceptance"] = dataclasses.replace(part, entropy=part.entropy or 1.0)
    asked = {"drafter": "ngram:max_tokens=64+exit:max_tokens=64", **asked}
    if kind is DraftModel:
        del asked["drafter"]
    before = psutil.Process().memory_info().rss
    with patience():
        speculator.generate(text, max_new_tokens=24, do_sample=kind is Lenient, seed=1, **asked)
    assert psutil.Process().memory_info().rss - before < 50 << 20


@pytest.fixture(scope="module")
def largest() -> tuple[Speculator, list[int]]:
    """A tiny model with heads of 49,152 tokens, and a prompt that fills it."""
    config: Any = make_model("llama", max_position_embeddings=4096).config
    config.vocab_size = 49152
    speculator = wrap(AutoModelForCausalLM.from_config(config), heads="logit-lens")
    text = [n % 50 + 1 for n in range(4000)]
    speculator.generate(text, max_new_tokens=24)
    return speculator, text


REQUESTS = {
    "ngram:size=8,max_tokens=16": "",
    "ngram:size=3+exit:threshold=0.5,max_tokens=16,guesses=4,max_rows=32": "",
    "none": "",
    "ngram:size=9": "ngram:size is 9, a request may ask for 8 at most",
    "ngram:size=1000000000": "ngram:size is 1000000000, expected",
    "ngram:max_tokens=17": "ngram:max_tokens is 17, a request",
    "exit:guesses=5": "exit:guesses is 5, a request",
    "exit:max_rows=33": "exit:max_rows is 33, a request",
    "exit:layers=2": "exit:layers is up to the server. Leave it out",
    "exit:anneal_strength=1": "exit:anneal_strength is up to the server",
}


@pytest.mark.parametrize("drafter", REQUESTS)
def test_a_request_may_ask_for_less_than_the_command_line(drafter: str) -> None:
    if not REQUESTS[drafter]:
        check_request({"drafter": drafter, "controller": "gammatune:longest=16,rate=0.5"})
        return
    with pytest.raises(InvalidOption) as caught:
        check_request({"drafter": drafter})
    assert str(caught.value).startswith(REQUESTS[drafter])
    with pytest.raises(InvalidOption, match="gammatune:longest is 17, a request"):
        check_request({"controller": "gammatune:longest=17"})


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
    kept = {"exit", "ngram", "draft_model", "successors", "easd"}
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
