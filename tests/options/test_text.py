"""Options as text: what it says, its way back, what is kept of what was there, and its errors."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.config import SpeculationOptions
from selfspec.errors import InvalidOption
from selfspec.options import (
    ACCEPTANCE,
    CONTROLLERS,
    DRAFTERS,
    TOGETHER,
    CmAsdLength,
    Costs,
    Easd,
    Exit,
    Fixed,
    GammaTune,
    Lenient,
    Lossless,
    Ngram,
    NoDrafts,
    Part,
    Threshold,
    as_text,
    changed,
)

SHARES = st.floats(0.0, 1.0, exclude_min=True)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "layers": st.none() | st.lists(st.integers(0, 30), min_size=1).map(tuple),
    "threshold": SHARES,
    "max_depth": st.none() | st.integers(0, 30),
    "skipped": st.none() | st.lists(st.integers(2, 30), min_size=1).map(tuple),
    "target": st.none() | SHARES,
    "shortest": st.integers(1, 5),
    "longest": st.integers(5, 20),
    "rate": SHARES,
    "scale": SHARES,
    "lenience": SHARES,
    "overlap": SHARES,
    "row": SHARES,
    "weights": st.sampled_from([(1.0, 0.0, 0.0), (0.2, 0.2, 0.6)]),
    "reading": st.sampled_from(["intent", "paper"]),
    "entropy": st.none() | SHARES,
    "size": st.integers(1, 9),
    "max_tokens": st.integers(1, 64),
    "guesses": st.integers(1, 9),
    "level": st.integers(2, 8),
    "window": st.integers(1, 9),
    "max_rows": st.integers(1, 64),
    "top_beta": st.integers(1, 9),
    "tokens": st.integers(1, 9),
}
"""By field; those that are missing take any share."""


def some(made: type[Part]) -> st.SearchStrategy[Part]:
    strategies = {
        entry.name: VALUES.get(entry.name, SHARES)
        for entry in fields(made)  # type: ignore[arg-type]  # all parts are dataclasses
    }
    if made is Exit:
        strategies["threshold"] = SHARES | st.lists(SHARES, min_size=1).map(tuple)
    return st.builds(made, **strategies)


KINDS: list[type[Part]] = [*DRAFTERS.values(), *CONTROLLERS.values(), *ACCEPTANCE.values(), Costs]

options = st.builds(
    SpeculationOptions,
    speculate=st.booleans(),
    drafter=st.sampled_from(TOGETHER),
    controller=st.one_of([some(made) for made in CONTROLLERS.values()]),
    acceptance=st.one_of([some(made) for made in ACCEPTANCE.values()]),
    costs=some(Costs),
    exit=some(Exit),
    ngram=some(Ngram),
    draft_model=some(DRAFTERS["draft-model"]),
    lookahead=some(DRAFTERS["lookahead"]),
    skip=some(DRAFTERS["skip"]),
    easd=some(Easd),
    never_slower=st.booleans(),
    pinned=st.sampled_from([None, False]),
    pinned_rows=st.integers(1, 128),
)


# --- there and back


@given(st.one_of([some(made) for made in KINDS]))
def test_a_part_is_what_its_text_says(part: Part) -> None:
    for full in (False, True):
        _, _, said = as_text(part, full=full).partition(":")
        assert changed(type(part)(), said or None) == part


@given(options)
def test_options_are_what_their_least_description_makes_of_the_built_in_ones(
    found: SpeculationOptions,
) -> None:
    said = json.loads(json.dumps(found.differing()))
    assert SpeculationOptions().updated(said) == found


@given(options)
def test_a_description_gives_all_that_is_in_use(found: SpeculationOptions) -> None:
    said = json.loads(json.dumps(found.described()))
    assert SpeculationOptions().updated(said).described() == said


def test_the_shortest_text_says_what_differs() -> None:
    assert as_text(Exit()) == "exit"
    assert as_text(Exit(threshold=0.5, layers=(10, 20))) == "exit:layers=10/20,threshold=0.5"
    assert as_text(Easd(), full=True) == "easd:entropy=none,overlap=0.8,tokens=5"
    assert SpeculationOptions().differing() == {}


# --- what text, mappings and objects mean


@pytest.mark.parametrize(
    ("drafter", "name", "parts"),
    [
        ("ngram:size=3+exit", "ngram+exit", {"ngram": Ngram(size=3)}),
        ("exit:threshold=0.5/0.7", "exit", {"exit": Exit(threshold=(0.5, 0.7))}),
        (" exit : max-depth = 4 , layers=2/4", "exit", {"exit": Exit(max_depth=4, layers=(2, 4))}),
        ("exit:layers=none", "exit", {"exit": Exit()}),
        ("exit:anneal_strength=1e+1", "exit", {"exit": Exit(anneal_strength=10.0)}),
        ({"ngram": {"size": 3}, "exit": None}, "ngram+exit", {"ngram": Ngram(size=3)}),
        ({"exit": "threshold=0.5"}, "exit", {"exit": Exit(threshold=0.5)}),
        ({"exit": {"layers": [2, 4]}}, "exit", {"exit": Exit(layers=(2, 4))}),  # from JSON or YAML
        (Exit(threshold=0.5), "exit", {"exit": Exit(threshold=0.5)}),
        ([Ngram(size=3), Exit()], "ngram+exit", {"ngram": Ngram(size=3)}),
        ("none", "none", {}),
        (NoDrafts(), "none", {}),
    ],
)
def test_objects_text_and_mappings_agree(drafter: Any, name: str, parts: dict[str, Any]) -> None:
    found = SpeculationOptions().updated({"drafter": drafter})
    assert found == SpeculationOptions(drafter=name, **parts)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"controller": "gammatune:rate=0.5,longest=8"}, GammaTune(rate=0.5, longest=8)),
        ({"controller": {"gammatune": {"rate": 0.5}}}, GammaTune(rate=0.5)),
        ({"controller": "cm-asd:weights=1/0/0"}, CmAsdLength(weights=(1.0, 0.0, 0.0))),
        ({"controller": "fixed"}, Fixed()),
        ({"acceptance": "lenient:lenience=0.8"}, Lenient(lenience=0.8)),
        ({"acceptance": Lossless()}, Lossless()),
        ({"costs": "row=0.1/0.2,head=none"}, Costs(row=(0.1, 0.2))),
        ({"costs": {"head": 0.1}}, Costs(head=0.1)),
        ({"costs": Costs(head=0.1)}, Costs(head=0.1)),
    ],
)
def test_an_option_of_one_kind_reads_the_same_way(values: dict[str, Any], expected: Part) -> None:
    (name,) = values
    assert getattr(SpeculationOptions().updated(values), name) == expected


def test_text_changes_what_it_names_and_an_object_is_taken_whole() -> None:
    before = SpeculationOptions(
        exit=Exit(layers=(2,), max_tokens=3), controller=GammaTune(rate=0.5), costs=Costs(row=0.5)
    )
    after = before.updated(
        {"drafter": "ngram+exit:threshold=0.5", "controller": "gammatune:step=1"}
    )
    assert after.exit == Exit(layers=(2,), max_tokens=3, threshold=0.5)
    assert after.controller == GammaTune(rate=0.5, step=1.0)
    assert after.updated({"costs": "head=0"}).costs == Costs(row=0.5, head=0.0)
    assert after.updated({"drafter": Exit(threshold=0.5)}).exit == Exit(threshold=0.5)
    assert after.updated({"controller": "threshold"}).controller == Threshold()
    assert after.updated({"drafter": "ngram"}).exit == after.exit  # kept for later


def test_easd_as_text_starts_where_the_heads_say() -> None:
    heads = SpeculationOptions().updated({"easd": "entropy=2.5"})
    assert heads.loss is None
    assert heads.updated({"acceptance": "easd"}).acceptance == Easd(entropy=2.5)
    assert heads.updated({"acceptance": "easd:tokens=3"}).acceptance == Easd(entropy=2.5, tokens=3)
    assert heads.updated({"acceptance": Easd()}).acceptance == Easd()


# --- errors


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"draftr": "exit"}, "unknown option 'draftr'. Did you mean drafter?"),
        ({"drafter": "exits"}, "unknown drafter 'exits'. Did you mean exit?"),
        ({"drafter": "exit+ngram"}, "unknown drafter 'exit+ngram'. Did you mean ngram?"),
        ({"drafter": "exit:treshold=1"}, "unknown setting of exit: 'treshold'. Did you mean"),
        ({"drafter": "ngram:zzz=1"}, "unknown setting of ngram: 'zzz'. Known: max_tokens, size"),
        ({"drafter": "exit:threshold=high"}, "exit:threshold is 'high', expected a finite number"),
        ({"drafter": "exit:0.5"}, "exit is followed by '0.5', expected KEY=VALUE,.."),
        ({"drafter": "ngram:size=2,size=3"}, "ngram:size is given twice. Leave one out"),
        ({"drafter": "none:size=2"}, "none has no settings, found 'size=2'. Leave them out"),
        ({"drafter": {"exit": 5}}, "exit is 5, expected KEY=VALUE,.. or a mapping"),
        (
            {"drafter": Fixed()},
            "drafter is Fixed(), expected one of exit, ngram, draft-model, successors, rest",
        ),
        ({"controller": "gamatune"}, "unknown controller 'gamatune'. Did you mean gammatune?"),
        ({"controller": "fixed+fixed"}, "controller is 'fixed+fixed', expected one kind"),
        ({"acceptance": CmAsdLength()}, "acceptance is CmAsdLength("),
        ({"costs": "rows=1"}, "unknown setting of costs: 'rows'. Did you mean row?"),
    ],
)
def test_an_error_is_one_line_that_names_the_nearest(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        SpeculationOptions().updated(values)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
