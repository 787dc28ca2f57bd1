"""Options: types, bounds, names, conversion to text and back, updates, and errors."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from selfspec import options as parts
from selfspec.api.speculator import Speculator, wrap
from selfspec.config import OPTION_NAMES, GenerateOptions, SpeculationOptions, check, check_request
from selfspec.decoding.drafters.rest import Datastore
from selfspec.errors import (
    InvalidOption,
    SelfspecError,
    annotations_of,
    first_line,
    fits,
    hint_name,
    shown,
)
from selfspec.eval.results import BenchOptions
from selfspec.options import CmAsd, CmAsdLength, Costs, Easd, Exit, Fixed, GammaTune, Lenient, Ngram
from selfspec.training.options import CacheOptions, DataOptions, FitOptions
from tests import bad_input
from tests.bad_input import Strange, patience
from tests.models import addressless, make_model
from tests.talks import make_tokenizer

BAD: list[tuple[type, str, list[Any]]] = [
    (Exit, "threshold", [0.0, 1.001, math.nan, (0.5, -0.1), (), "0.9", None, ("a",), 10**400]),
    (Exit, "anneal_strength", [-0.01, math.nan, math.inf]),
    (Exit, "max_tokens", [0, "6", 2.5, True]),
    (Exit, "layers", [5, "2,4", (2, "4"), {2: 4}]),
    *((kind, "max_tokens", [0]) for kind in (Ngram, parts.DraftModel)),
    *((kind, name, [0]) for kind, name in ((Ngram, "size"), (CmAsd, "top_beta"), (Easd, "tokens"))),
    *((kind, "threshold", [-0.1, 1.5]) for kind in (parts.Skip, parts.Threshold)),
    *((CmAsd, name, [-0.1]) for name in ("tolerance", "tolerance_gain")),
    (parts.Skip, "skipped", [(1, 3), (), "2"]),
    (parts.Skip, "target", [-0.1]),
    (GammaTune, "rate", [0.0]),
    (GammaTune, "step", [-1.0]),
    (CmAsdLength, "scale", [1.5]),
    (CmAsdLength, "margin_scale", [0.0]),
    (CmAsdLength, "weights", [0.4, (0.5, 0.25, 0.2)]),
    (CmAsd, "reading", ["text"]),
    (Easd, "entropy", [-1.0]),
    (Easd, "overlap", [1.1]),
    (Lenient, "lenience", [0.0, 1.5]),
    (Costs, "row", [-0.1, (0.1, 2.0), ()]),
    (Costs, "head", [-0.1, "0.1", math.nan, math.inf]),
    (BenchOptions, "tune_questions", [0]),
    *((DataOptions, name, [0]) for name in ("tokens", "batch_size", "max_new_tokens")),
    *((DataOptions, name, [0]) for name in ("max_question_tokens", "temperature")),
    *((DataOptions, name, [-1]) for name in ("question_top_k", "seed")),
    (DataOptions, "max_prompt_tokens", [31]),
    (DataOptions, "greedy_share", [1.1]),
    (DataOptions, "question_temperature", [(1.0,), (1.0, 0.9), (0.0, 1.0)]),
    *((CacheOptions, name, [0]) for name in ("top_k", "batch_tokens", "max_tokens")),
    *((FitOptions, name, [0]) for name in ("inner_size", "epochs", "accumulate", "answer_share")),
    *((FitOptions, name, [0]) for name in ("step_decay", "learning_rate", "max_grad_norm")),
    (FitOptions, "head_type", ["logit-lens"]),
    (FitOptions, "ce_share", [1.5]),
    (FitOptions, "warmup", [1.0]),
    (FitOptions, "weight_decay", [-0.1]),
    (SpeculationOptions, "pinned_rows", ["6", 2.5, True, 0, 10**9]),
    (SpeculationOptions, "speculate", ["no"]),
    (SpeculationOptions, "drafter", [3]),
    (SpeculationOptions, "controller", ["fixed"]),
]


@pytest.mark.parametrize(("made", "name", "values"), BAD)
def test_values_of_wrong_type_or_range_are_named(made: Any, name: str, values: list[Any]) -> None:
    kind = f"{made.kind}:" if hasattr(made, "kind") else ""
    for value in values:
        with pytest.raises(InvalidOption, match=rf"^{kind}{name} is .*, expected"):
            made(**{name: value})


def test_the_bounds_themselves_are_valid() -> None:
    ones = dict.fromkeys(("tokens", "batch_size", "max_question_tokens", "max_new_tokens"), 1)
    least = {"max_prompt_tokens": 32, "greedy_share": 0.0, "question_top_k": 0, "seed": 0}
    DataOptions(**ones, **least, question_temperature=(0.5, 0.5))  # type: ignore[arg-type]  # of several kinds
    DataOptions(greedy_share=1.0)
    FitOptions(ce_share=0.0, answer_share=1.0, step_decay=1.0, warmup=0.0, weight_decay=0.0)
    with pytest.raises(InvalidOption, match="system is a, expected none with raw"):
        DataOptions(raw=True, system="a")


PARTS: list[Any] = [part for kinds in parts.KINDS.values() for part in kinds.values()]
NUMBERS: list[tuple[Any, str]] = [
    (kind, name)
    for kind in (*PARTS, Costs, SpeculationOptions)
    for name, hint in annotations_of(kind).items()
    if name in kind.__dataclass_fields__ and re.search(r"\b(int|float)\b", str(hint))
]


def test_every_number_has_an_upper_bound_that_is_enforced() -> None:
    assert {("ngram", "size"), ("exit", "guesses")} <= {(k.kind, n) for k, n in NUMBERS[:9]}
    for kind, name in NUMBERS:
        most = parts.ranges(kind)[name].most
        assert most is not None, (kind, name)
        if not parts.ranges(kind)[name].whole:
            for value in (most + 1, 10**9, 10**30):
                with pytest.raises(InvalidOption, match=f"{name} is {value}, expected"):
                    kind(**{name: value})


@pytest.mark.parametrize(("kind", "name"), NUMBERS)
def test_maxima_cost_little(kind: Any, name: str, largest: tuple[Speculator, list[int]]) -> None:
    speculator, text = largest[0], largest[1][: None if kind is Ngram else 300]
    limit = parts.ranges(kind)[name]
    most = int(limit.most or 0) if "int" in str(annotations_of(kind)[name]) else limit.most
    values: dict[str, Any] = {name: (0.0, 0.0, most) if limit.whole else most}
    if name in ("layers", "max_depth", "skipped"):
        values = {name: 5 if name == "max_depth" else (5,)}  # must be an existing layer
    if name == "shortest":
        values["longest"] = most
    keywords: Any = values
    if kind is not SpeculationOptions:
        part = kind(**values)
        group = next((g for g, k in parts.KINDS.items() if kind in k.values()), "costs")
        keywords = {group: part}
    if kind is Easd:
        keywords["acceptance"] = dataclasses.replace(part, entropy=part.entropy or 1.0)
    keywords = {"drafter": "ngram:max_tokens=64+exit:max_tokens=64", **keywords}
    if kind is parts.DraftModel:
        del keywords["drafter"]
    before = psutil.Process().memory_info().rss
    with patience():
        speculator.generate(text, max_new_tokens=24, do_sample=kind is Lenient, seed=1, **keywords)
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
    "ngram:size=9": "ngram:size is 9, a request may ask for 8 at most",
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


def test_lossy_settings_are_named() -> None:
    rules = (parts.Lossless(), Lenient(lenience=1.0), Lenient(lenience=0.5), CmAsd(), Easd())
    losses = [SpeculationOptions(acceptance=rule).loss for rule in rules]
    assert losses == [None, None, "lenience 0.5", "acceptance cm-asd", "acceptance easd"]


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
def test_a_lookahead_has_as_many_rows_as_fit(said: dict[str, Any], drafts: int, rows: int) -> None:
    options = SpeculationOptions().updated({"drafter": "lookahead", **said})
    assert (options.most_drafts, options.widest_pass) == (drafts, rows)
    assert options.grows_trees == ("controller" not in said)


def test_every_speculation_option_can_be_given_per_call() -> None:
    assert set(GenerateOptions.__annotations__) >= set(OPTION_NAMES)
    kept = {"exit", "ngram", "draft_model", "successors", "rest", "lookahead", "skip", "easd"}
    fields = {field.name for field in dataclasses.fields(SpeculationOptions)}
    assert fields == {*OPTION_NAMES, *kept}


def test_options_that_no_model_accepts_are_refused_before_loading() -> None:
    check({"pinned": True, "pinned_rows": 3})  # enough for heads that draft two tokens
    wrong: list[dict[str, Any]] = [{"pinned_rows": 0}, {"exit": Exit()}]  # exit: by `drafter`
    for values in wrong:
        with pytest.raises(InvalidOption):
            check(values)


SHARES = st.floats(0.0, 1.0, exclude_min=True)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "layers": st.none() | st.lists(st.integers(0, 30), min_size=1).map(tuple),
    "max_depth": st.none() | st.integers(0, 30),
    "skipped": st.none() | st.lists(st.integers(2, 30), min_size=1).map(tuple),
    **dict.fromkeys(("target", "entropy"), st.none() | SHARES),
    **dict.fromkeys(("size", "guesses", "window", "top_beta", "tokens"), st.integers(1, 8)),
    **dict.fromkeys(("max_tokens", "max_rows"), st.integers(1, 64)),
    "level": st.integers(2, 8),
    "shortest": st.integers(1, 5),
    "longest": st.integers(5, 20),
    "weights": st.sampled_from([(1.0, 0.0, 0.0), (0.2, 0.2, 0.6)]),
    "reading": st.sampled_from(["intent", "paper"]),
}
"""Values by field; other fields take any share."""


def some(made: type[parts.Part]) -> st.SearchStrategy[parts.Part]:
    values = {entry.name: VALUES.get(entry.name, SHARES) for entry in fields(made)}
    if made is Exit:
        values["threshold"] = SHARES | st.lists(SHARES, min_size=1).map(tuple)
    return st.builds(made, **values)


options = st.builds(
    SpeculationOptions,
    speculate=st.booleans(),
    drafter=st.sampled_from(parts.TOGETHER),
    controller=st.one_of([some(kind) for kind in parts.CONTROLLERS.values()]),
    acceptance=st.one_of([some(kind) for kind in parts.ACCEPTANCE.values()]),
    costs=some(Costs),
    **{kind.replace("-", "_"): some(one) for kind, one in parts.DRAFTERS.items() if kind != "none"},
    easd=some(Easd),
    never_slower=st.booleans(),
    pinned=st.sampled_from([None, False]),
    pinned_rows=st.integers(1, 128),
)

# --- conversion to text and back


@given(st.one_of([some(kind) for kind in (*PARTS, Costs)]))
def test_a_part_can_be_read_back_from_its_text(part: parts.Part) -> None:
    for full in (False, True):
        _, _, text = parts.as_text(part, full=full).partition(":")
        assert parts.with_settings(type(part)(), text or None) == part


@given(options)
def test_options_can_be_read_back_from_their_differences(found: SpeculationOptions) -> None:
    values = json.loads(json.dumps(found.differing()))
    assert SpeculationOptions().updated(values) == found


@given(options)
def test_a_description_covers_all_options_in_use(found: SpeculationOptions) -> None:
    values = json.loads(json.dumps(found.described()))
    assert SpeculationOptions().updated(values).described() == values


def test_the_shortest_text_holds_only_differences() -> None:
    assert parts.as_text(Exit()) == "exit"
    assert parts.as_text(Exit(threshold=0.5, layers=(10, 20))) == "exit:layers=10/20,threshold=0.5"
    assert parts.as_text(Easd(), full=True) == "easd:entropy=none,overlap=0.8,tokens=5"
    assert SpeculationOptions().differing() == {}


# --- options as text, mappings and objects


BOTH = {"drafter": "ngram+exit", "ngram": Ngram(size=3)}
NONE = {"drafter": "none"}


@pytest.mark.parametrize(
    ("name", "value", "settings"),
    [
        ("drafter", "ngram:size=3+exit", BOTH),
        ("drafter", "exit:threshold=0.5/0.7", {"exit": Exit(threshold=(0.5, 0.7))}),
        ("drafter", " exit : max-depth = 4 , layers=2", {"exit": Exit(max_depth=4, layers=(2,))}),
        ("drafter", "exit:layers=none", {}),
        ("drafter", "exit:anneal_strength=1e+1", {"exit": Exit(anneal_strength=10.0)}),
        ("drafter", {"ngram": {"size": 3}, "exit": None}, BOTH),
        ("drafter", {"exit": "threshold=0.5"}, {"exit": Exit(threshold=0.5)}),
        ("drafter", {"exit": {"threshold": [0.7]}}, {"exit": Exit(threshold=0.7)}),
        ("drafter", {"exit": {"layers": [2, 4]}}, {"exit": Exit(layers=(2, 4))}),  # as in JSON
        ("drafter", Exit(threshold=0.5), {"exit": Exit(threshold=0.5)}),
        ("drafter", [Ngram(size=3), Exit()], BOTH),
        ("drafter", "none", NONE),
        ("drafter", parts.NoDrafts(), NONE),
        ("controller", "gammatune:longest=8", {"controller": GammaTune(longest=8)}),
        ("controller", {"gammatune": {"rate": 0.5}}, {"controller": GammaTune(rate=0.5)}),
        ("acceptance", Lenient(lenience=0.8), {"acceptance": Lenient(lenience=0.8)}),
        ("costs", "row=0.1/0.2,head=none", {"costs": Costs(row=(0.1, 0.2))}),
        ("costs", {"head": 0.1}, {"costs": Costs(head=0.1)}),
    ],
)
def test_objects_text_and_mappings_agree(name: str, value: Any, settings: dict[str, Any]) -> None:
    assert SpeculationOptions().updated({name: value}) == SpeculationOptions(**settings)


def test_text_changes_only_named_settings_and_an_object_replaces_all() -> None:
    old = SpeculationOptions(
        exit=Exit(layers=(2,), max_tokens=3), controller=GammaTune(rate=0.5), costs=Costs(row=0.5)
    )
    new = old.updated({"drafter": "ngram+exit:threshold=0.5", "controller": "gammatune:step=1"})
    assert new.exit == Exit(layers=(2,), max_tokens=3, threshold=0.5)
    assert new.controller == GammaTune(rate=0.5, step=1.0)
    assert new.updated({"costs": "head=0"}).costs == Costs(row=0.5, head=0.0)
    assert new.updated({"drafter": Exit(threshold=0.5)}).exit == Exit(threshold=0.5)
    assert new.updated({"controller": "threshold"}).controller == parts.Threshold()
    assert new.updated({"drafter": "ngram"}).exit == new.exit  # kept for later


def test_easd_as_text_starts_from_the_heads_settings() -> None:
    heads = SpeculationOptions().updated({"easd": "entropy=2.5"})
    assert heads.loss is None
    assert heads.updated({"acceptance": "easd"}).acceptance == Easd(entropy=2.5)
    assert heads.updated({"acceptance": "easd:tokens=3"}).acceptance == Easd(entropy=2.5, tokens=3)
    assert heads.updated({"acceptance": Easd()}).acceptance == Easd()


# --- errors

TOO_FEW = "pinned_rows is 8, but"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"draftr": "exit"}, "unknown option 'draftr'. Did you mean drafter?"),
        ({"drafter": "exits"}, "unknown drafter 'exits'. Did you mean exit?"),
        ({"drafter": "exit+ngram"}, "unknown drafter 'exit+ngram'. Known: draft-model"),
        ({"drafter": "exit:treshold=1"}, "unknown setting of exit: 'treshold'. Did you mean"),
        ({"drafter": "ngram:zzz=1"}, "unknown setting of ngram: 'zzz'. Known: max_tokens, size"),
        ({"drafter": "exit:threshold=high"}, "exit:threshold is 'high', expected a finite number"),
        *(
            ({"drafter": f"exit:{text}"}, f"exit is followed by '{text}', expected KEY=VALUE,..")
            for text in ("", "0.5", "layers", "=3")
        ),
        ({"drafter": "ngram:size=2,size=3"}, "ngram:size is given twice. Leave one out"),
        ({"drafter": "none:size=2"}, "none has no settings, found 'size=2'. Leave them out"),
        ({"drafter": {"exit": 5}}, "exit is 5, expected KEY=VALUE,.. or a mapping"),
        ({"drafter": {"ngram": False}}, "ngram is False, expected KEY=VALUE,.. or a mapping"),
        ({"drafter": {"exit": {5: 5}}}, "unknown setting of exit: '5'. Known: anneal_strength"),
        (
            {"drafter": Fixed()},
            "drafter is Fixed(), expected one of exit, ngram, draft-model, successors, rest",
        ),
        ({"controller": "fixed+fixed"}, "controller is 'fixed+fixed', expected one kind"),
        ({"acceptance": CmAsdLength()}, "acceptance is CmAsdLength("),
        ({"costs": "rows=1"}, "unknown setting of costs: 'rows'. Did you mean row?"),
        # values that exclude each other
        ({"controller": "heuristic:shortest=11"}, "heuristic:shortest 11 exceeds"),
        ({"acceptance": "easd", "require_lossless": True}, "acceptance easd is lossy"),
        ({"acceptance": "lenient:lenience=0.5", "require_lossless": True}, "lenience 0.5 is lossy"),
        ({"controller": "heuristic:shortest=8", "pinned": True}, f"{TOO_FEW} heuristic:shortest 8"),
        ({"drafter": "draft-model:max_tokens=8", "pinned": True}, f"{TOO_FEW} draft-model:max_tok"),
    ],
)
def test_an_error_names_the_value_and_gives_advice(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        SpeculationOptions().updated(values)
    assert str(caught.value).startswith(message)
    bad_input.check(caught.value)


# --- types


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (int, [3, np.int64(3)], [True, 3.0, "3", None]),
        (float, [0.5, 1, np.float32(0.5), Fraction(1, 2)], [True, math.nan, math.inf, 10**400, 1j]),
        (bool, [True], [1]),
        (str, ["a"], [b"a"]),
        (int | None, [None], []),
        (tuple[int, ...], [[1, 2]], []),
        (list[int], [(1, 2), []], [[1, "2"], "12"]),
        (tuple[int, float], [(5, 1.2)], [(5,)]),
        (list[list[int]], [[[1], [2]]], [[1]]),
        (Callable[[int], int], [len], [3]),
        (Any, [object()], []),
        (dict[str, int], [{}, {"a": 1}], [{"a": "b"}, {1: 1}]),
    ],
    ids=addressless,
)
def test_a_value_fits_its_annotation(hint: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [fits(value, hint) for value in right] == [True] * len(right)
    assert [fits(value, hint) for value in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "a whole number"),
        (tuple[int, ...] | None, "a list of whole numbers or None"),
        (tuple[int, float], "a list of whole numbers and finite numbers"),
        (Callable[[int], int], "a function"),
        (str | list[str], "text or a list of texts"),
    ],
    ids=addressless,
)
def test_annotations_in_words(hint: Any, words: str) -> None:
    assert hint_name(hint) == words


@pytest.mark.parametrize("value", ["x" * 500, "a\nb", Strange(), [None] * 900])
def test_a_value_is_shown_on_one_short_line(value: object) -> None:
    assert len(shown(value)) < 70
    assert "\n" not in shown(value)


def test_every_error_is_one_line_of_bounded_length() -> None:
    (line,) = str(SelfspecError("a\nb\r\x85\u2028" + "long\n" * 900)).splitlines()
    assert len(line) < 2000


def test_errors_of_libraries_become_one_line_with_the_reason() -> None:
    """An error of huggingface_hub about a config."""
    assert first_line(ValueError("\nwrong for 'heads':\n    ValueError: 5 heads.\n")) == (
        "wrong for 'heads': ValueError: 5 heads"
    )


@pytest.mark.parametrize("options", [SpeculationOptions, GenerateOptions])
def test_every_option_has_a_type_in_words(options: type) -> None:
    for hint in annotations_of(options).values():
        assert hint_name(hint)
        assert "typing." not in hint_name(hint)
