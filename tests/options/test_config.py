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
from selfspec.decoding.drafters.rest import Datastore
from selfspec.errors import InvalidOption
from selfspec.options import (
    KINDS,
    CmAsd,
    CmAsdLength,
    Costs,
    DraftModel,
    Easd,
    Exit,
    GammaTune,
    Heuristic,
    Lenient,
    Lossless,
    Ngram,
    Skip,
    Threshold,
    ranges,
)
from selfspec.typed import annotations_of
from tests.bad_input import patience
from tests.models import make_model
from tests.talks import make_tokenizer

BAD: list[tuple[type, str, list[Any]]] = [
    (Exit, "threshold", [0.0, 1.001, math.nan, (0.5, -0.1), (), "0.9", None, ("a",), 10**400]),
    (Exit, "anneal_strength", [-0.01, math.nan, math.inf]),
    (Exit, "max_tokens", [0, "6", 2.5, True]),
    (Exit, "layers", [5, "2,4", (2, "4"), {2: 4}]),
    (Ngram, "size", [0]),
    (Ngram, "max_tokens", [0]),
    (DraftModel, "max_tokens", [0]),
    (Skip, "skipped", [(1, 3), (), "2"]),
    (Skip, "threshold", [1.5]),
    (Skip, "target", [-0.1]),
    (Threshold, "threshold", [-0.1]),
    (GammaTune, "rate", [0.0]),
    (GammaTune, "step", [-1.0]),
    (CmAsdLength, "scale", [1.5]),
    (CmAsdLength, "margin_scale", [0.0]),
    (CmAsdLength, "weights", [0.4]),
    (CmAsd, "weights", [(0.5, 0.25, 0.2)]),
    (CmAsd, "top_beta", [0]),
    (CmAsd, "tolerance", [-0.1]),
    (CmAsd, "tolerance_gain", [-1]),
    (CmAsd, "reading", ["text"]),
    (Easd, "entropy", [-1.0]),
    (Easd, "overlap", [1.1]),
    (Easd, "tokens", [0]),
    (Lenient, "lenience", [0.0, 1.5]),
    (Costs, "row", [-0.1, (0.1, 2.0), ()]),
    (Costs, "head", [-0.1, "0.1", math.nan, math.inf]),
    (SpeculationOptions, "pinned_rows", ["6", 2.5, True, 0, 10**9]),
    (SpeculationOptions, "speculate", ["no"]),
    (SpeculationOptions, "drafter", [3]),
    (SpeculationOptions, "controller", ["fixed"]),
]


@pytest.mark.parametrize(("made", "name", "values"), BAD)
def test_values_of_other_types_or_out_of_range_are_named(
    made: Any, name: str, values: list[Any]
) -> None:
    kind = f"{made.kind}:" if hasattr(made, "kind") else ""
    for value in values:
        with pytest.raises(InvalidOption, match=rf"^{kind}{name} is .*, expected") as caught:
            made(**{name: value})
        assert "\n" not in str(caught.value)


EIGHT = DraftModel(max_tokens=8)


@pytest.mark.parametrize(
    ("made", "values", "words"),
    [
        (Heuristic, {"shortest": 11}, "heuristic:shortest 11 exceeds heuristic:longest 10"),
        (SpeculationOptions, {"acceptance": Easd(), "require_lossless": True}, "easd is lossy"),
        (
            SpeculationOptions,
            {"acceptance": Lenient(lenience=0.5), "require_lossless": True},
            "lenience 0.5 is lossy",
        ),
        (
            SpeculationOptions,
            {"controller": Heuristic(shortest=8), "pinned": True},
            "pinned_rows is 8, but heuristic:shortest 8 needs at least 9 rows",
        ),
        (
            SpeculationOptions,
            {"drafter": "draft-model", "draft_model": EIGHT, "pinned": True},
            "pinned_rows is 8, but draft-model:max_tokens 8 needs at least 9 rows",
        ),
    ],
)
def test_values_that_exclude_each_other_are_named(
    made: type, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidOption, match=words):
        made(**values)


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


PARTS: list[Any] = [part for kinds in KINDS.values() for part in kinds.values()]
NUMBERS: list[tuple[Any, str]] = [
    (kind, name)
    for kind in (*PARTS, Costs, SpeculationOptions)
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
    if name in ("layers", "max_depth", "skipped"):
        values = {name: 5 if name == "max_depth" else (5,)}  # must be one that there is
    if name == "shortest":
        values["longest"] = most
    asked: Any = values
    if kind is not SpeculationOptions:
        part = kind(**values)
        group = next((g for g, k in KINDS.items() if kind in k.values()), "costs")
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
    speculator.runtime.datastore = Datastore.of([text], make_tokenizer())
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
        (SpeculationOptions().acceptance, None),
        (Lossless(), None),
        (Lenient(lenience=1.0), None),
        (Lenient(lenience=0.5), "lenience 0.5"),
        (CmAsd(), "acceptance cm-asd"),
        (Easd(), "acceptance easd"),
    ],
)
def test_what_changes_the_output_is_named(acceptance: Any, loss: str | None) -> None:
    assert SpeculationOptions(acceptance=acceptance).loss == loss


@pytest.mark.parametrize(
    ("said", "drafts", "rows"),
    [
        ({}, 7, 8),
        ({"pinned": True}, 7, 8),
        ({"pinned": True, "pinned_rows": 4}, 3, 4),
        ({"controller": "threshold"}, 7, 8),
        ({"drafter": "lookahead:level=5,window=7,guesses=7"}, 55, 16),
        ({"drafter": "lookahead:level=8,window=16,guesses=16"}, 127, 16),
    ],
)
def test_a_lookahead_has_as_many_rows_as_its_sizes_make_and_as_fit(
    said: dict[str, Any], drafts: int, rows: int
) -> None:
    options = SpeculationOptions().updated({"drafter": "lookahead", **said})
    assert (options.most_drafts, options.widest_pass) == (drafts, rows)
    assert options.grows_trees == ("controller" not in said)


def test_every_speculation_option_can_be_given_per_call() -> None:
    assert set(GenerateOptions.__annotations__) >= set(OPTION_NAMES)
    kept = {"exit", "ngram", "draft_model", "successors", "rest", "lookahead", "skip", "easd"}
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
    check({"pinned": True, "pinned_rows": 3})  # enough for heads that draft two tokens
    with pytest.raises(InvalidOption):
        check(values)
