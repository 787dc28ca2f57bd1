"""Methods of a bench: all write plain decoding's tokens, each in its own way."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from selfspec.api.speculator import Speculator, wrap
from selfspec.decoding.drafters.rest import Datastore
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.eval import methods
from selfspec.eval.methods import (
    METHODS,
    NO_BOUND,
    Contender,
    Written,
    candidates,
    described,
    endless,
    swept,
)
from selfspec.eval.methods import moved as moves
from tests import ladder
from tests.models import make_model, random_ids
from tests.talks import make_tokenizer

COUNT = 20


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    """Heads on layers 1 to 5, of which 2 and 4 are in use, beside a draft model of two layers.

    And a datastore. All in float64, so tokens must be equal.
    """
    found = wrap(
        make_model("llama", torch.float64),
        heads="logit-lens",
        draft_model=make_model("llama", torch.float64, num_hidden_layers=2),
        drafter="exit:layers=2/4,threshold=0.04/0.06,max_tokens=3",
    )
    found.runtime.datastore = Datastore.of(random_ids(20_000).tolist(), make_tokenizer())
    found.options = found.options.updated({"skip": "skipped=3"})
    return found


@pytest.fixture(scope="module")
def plain(speculator: Speculator) -> list[int]:
    answer = speculator.generate(random_ids(9), max_new_tokens=COUNT, speculate=False)
    return answer.token_ids


def moved(speculator: Speculator, **values: Any) -> Speculator:
    """The same speculator with other options."""
    other = copy.copy(speculator)
    other.options = speculator.options.updated(values)
    return other


@pytest.fixture(scope="module")
def bare() -> Speculator:
    """Without heads, without a second model."""
    return wrap(make_model("llama"))


def written(speculator: Speculator, name: str, number: int = 0) -> Written:
    """What a method writes with one of its settings."""
    contender = grid(speculator, name)[number]
    with endless(speculator):
        return contender.decode(speculator, random_ids(9), COUNT)


def grid(speculator: Speculator, name: str) -> list[Contender]:
    return candidates(speculator, [name])[name]


LOSSY = ("cm-asd", "easd", "lenience")
DRAWN = ("sampling", "sampled-speculation", "lenience")


OWN_TEXT_OR_HEADS = (*LOSSY, *DRAWN, "medusa")


@pytest.mark.parametrize("name", [name for name in METHODS if name not in OWN_TEXT_OR_HEADS])
def test_every_setting_of_every_method_writes_the_tokens_of_plain_decoding(
    speculator: Speculator, plain: list[int], name: str
) -> None:
    for number, entry in enumerate(grid(speculator, name)):
        assert written(speculator, name, number).token_ids == plain
        assert not entry.own_text


def test_medusa_verifies_all_of_its_tree_or_what_pays(
    speculator: Speculator, plain: list[int]
) -> None:
    own = wrap(speculator.model, heads=ladder.medusa_heads(speculator.backbone))
    whole, cut = (written(own, "medusa", number) for number in range(2))
    assert whole.token_ids == cut.token_ids == plain
    widest = [max(len(one.draft_tokens) for one in found.rounds) for found in (whole, cut)]
    assert widest[0] == 63 > widest[1] > 0


# --- methods with a text of their own


@pytest.mark.parametrize("name", dict.fromkeys((*LOSSY, *DRAWN)))
def test_a_method_with_a_text_of_its_own_says_so_and_has_nothing_to_choose(
    speculator: Speculator, plain: list[int], name: str
) -> None:
    wavering = moved(
        speculator,
        exit={"threshold": 1e-6},
        acceptance="cm-asd:top_beta=100,tolerance=100" if name == "cm-asd" else "lossless",
        easd={"entropy": 0.0, "overlap": 0.0},
    )
    (entry,) = grid(wavering, name)
    assert entry.own_text
    assert entry.lossy == (name in LOSSY)
    assert described([entry], {})[entry.label]["lossy"] == entry.lossy
    found = written(wavering, name)
    assert len(found.token_ids) == COUNT
    assert found.token_ids != plain
    assert found.stats is not None
    assert found.stats.lossless == (name not in LOSSY)
    assert written(wavering, name).token_ids == found.token_ids  # drawn ones too: they are seeded


def test_options_and_sweeps_that_are_lossy_are_marked_but_plain_decoding_is_not(
    speculator: Speculator,
) -> None:
    loose = moved(speculator, acceptance="cm-asd")
    names = ["plain", "hugging-face", "speculation", "ngram"]
    assert [grid(loose, name)[0].lossy for name in names] == [False, False, True, True]
    entries = swept(speculator, moves("acceptance=lossless,cm-asd,lenient"))
    assert [entry.lossy for entry in entries] == [False, True, True]
    assert [entry.setting.get("do_sample") for entry in entries] == [None, None, True]


def test_the_model_is_as_before_after_an_error_within_an_early_exit(
    speculator: Speculator,
) -> None:
    model: Any = speculator.model
    config = model.generation_config

    def break_off() -> None:
        with endless(speculator):
            model.config.num_hidden_layers = 1
            model.generation_config.num_assistant_tokens = 99
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert model.generation_config is config
    assert config.num_assistant_tokens != 99
    assert speculator.backbone.num_layers == 6


@pytest.mark.parametrize(
    ("name", "without", "options", "reason"),
    [
        ("prompt-look-up", False, {}, "Did you mean prompt-lookup"),
        ("medusa", False, {}, "--head-type medusa"),
        ("easd", False, {}, "calibrate --entropy"),
        ("no-annealing", False, {"exit": {"anneal_strength": 0.0}}, "the same as speculation"),
        ("no-depth-bound", False, {"exit": {"layers": None, "threshold": 0.1}}, "the same as"),
        ("draft-model", True, {}, "Give --draft-model"),
        ("rest", True, {}, "Give --datastore"),
        ("self-sd", True, {}, "nobody has searched"),
    ],
)
def test_a_method_that_is_not_to_be_had_says_what_to_do(
    speculator: Speculator,
    bare: Speculator,
    name: str,
    without: bool,
    options: dict[str, Any],
    reason: str,
) -> None:
    with pytest.raises(InvalidOption, match=reason):
        candidates(bare if without else moved(speculator, **options), [name])


def test_methods_with_drafts_need_heads(bare: Speculator) -> None:
    assert candidates(bare, ["plain", "hugging-face", "prompt-lookup"])
    for name in ("speculation", "fixed-exit", "no-depth-bound", "no-never-slower"):
        with pytest.raises(HeadsNotFound):
            candidates(bare, [name])
    with pytest.raises(HeadsNotFound):
        swept(bare, moves("exit.threshold=0.5"))


@pytest.mark.parametrize(
    ("name", "source"),
    [("draft-model", "draft-model"), ("speculation", "exit"), ("rest", "rest")],
)
def test_the_draft_model_drafts_where_its_method_is_asked_for(
    speculator: Speculator, name: str, source: str
) -> None:
    stats = written(speculator, name).stats
    assert stats is not None
    assert set(stats.drafted_by_source) == {source}


def test_a_draft_model_needs_no_heads(speculator: Speculator) -> None:
    second = wrap(speculator.model, draft_model=make_model("llama", torch.float64))
    entries = swept(second, moves("draft-model.max_tokens=1,4"))
    assert [entry.setting["drafter"] for entry in entries] == [
        f"draft-model:max_tokens={count}" for count in (1, 4)
    ]


def test_self_sd_leaves_out_what_was_found_for_the_model(
    speculator: Speculator, bare: Speculator
) -> None:
    assert grid(speculator, "self-sd")[0].setting["drafter"] == "skip:skipped=3"
    known = copy.copy(bare)
    known.label = next(iter(methods.SKIPPED))
    with pytest.raises(InvalidOption, match="the model has 6 layers"):  # not those of 30
        candidates(known, ["self-sd"])


# --- ablations


def test_ablations_change_one_thing(speculator: Speculator) -> None:
    """Without a depth bound all layers are in use, each with the nearest threshold."""
    bounded = moved(speculator, exit={"max_depth": 2})
    for name, drafter in (
        ("no-annealing", "exit:anneal_strength=0"),
        (
            "no-depth-bound",
            "exit:max_depth=none,layers=1/2/3/4/5,threshold=0.04/0.04/0.04/0.06/0.06",
        ),
    ):
        (entry,) = grid(bounded, name)
        assert entry.setting == {"drafter": drafter, "never_slower": False}


def test_without_a_width_bound_no_round_ends_because_of_its_width(speculator: Speculator) -> None:
    bold = moved(speculator, exit={"threshold": 1e-6})
    ends = {entry.ended for entry in written(bold, "speculation").rounds if not entry.prefill}
    assert "width" in ends
    ends = {entry.ended for entry in written(bold, "no-width-bound").rounds if not entry.prefill}
    assert ends == {"budget"}


@pytest.mark.parametrize(
    ("name", "costs", "source"),
    [("no-value-rule", "row=1/0.9", "ngram"), ("no-never-slower", "head=9", "exit")],
)
def test_without_a_rule_dear_drafts_go_on(
    speculator: Speculator, name: str, costs: str, source: str
) -> None:
    dear = moved(speculator, costs=costs)
    every = [written(dear, method).stats for method in ("ngram+exit", name)]
    ruled, free = (stats.drafted_by_source[source] for stats in every if stats)
    assert ruled < free


# --- peers


def test_schedules_of_peers_keep_their_rules(speculator: Speculator) -> None:
    """A fixed exit always leaves there, thresholds know no bound, one exit stops where unsure."""
    fixed = [speculator.options.updated(one.setting).exit for one in grid(speculator, "fixed-exit")]
    assert [setting.layers for setting in fixed[::3]] == [(1,), (3,), (5,)]
    for number, setting in enumerate(fixed):
        for one in written(speculator, "fixed-exit", number).rounds[1:]:
            assert set(one.exit_layers) <= set(setting.layers or ())
            assert len(one.draft_tokens) == setting.max_tokens or one.ended == "budget"
    for entry in grid(speculator, "threshold-exit"):
        setting = speculator.options.updated(entry.setting).exit
        found = setting.layers, setting.max_tokens, setting.anneal_strength
        assert found == ((1, 2, 3, 4, 5), NO_BOUND, 0.0)
    assert "depth" in {entry.ended for entry in written(speculator, "one-exit", 2).rounds[1:]}


# --- sweeps and labels


def test_a_sweep_moves_one_option_at_a_time_of_exit_heads_whatever_the_defaults_name(
    speculator: Speculator,
) -> None:
    settings = moves("exit.threshold=0.3") | moves("exit.layers=4/5")
    labels = ["speculation(exit.threshold=0.3)", "speculation(exit.layers=4/5)"]
    for changes in ({"exit": {"threshold": 0.1}}, {"drafter": "ngram+exit"}):
        entries = swept(moved(speculator, **changes), settings)
        assert [entry.label for entry in entries] == labels
        assert entries[0].setting["drafter"] == "exit:threshold=0.3"
    with pytest.raises(InvalidOption, match="exit:max_depth 3 is not among"):
        swept(speculator, moves("exit.max_depth=3"))


def test_the_record_says_what_a_method_is_and_what_it_was_chosen_from(
    speculator: Speculator,
) -> None:
    grid = candidates(speculator, ["plain", "prompt-lookup"])
    best = replace(grid["prompt-lookup"][1], label="prompt-lookup")
    found = described([grid["plain"][0], best], grid)
    assert found["prompt-lookup"]["setting"] == {"prompt_lookup_num_tokens": 4}
    assert len(found["prompt-lookup"]["chosen_from"]) == 3
    (label,) = set(found) - {"prompt-lookup"}
    assert label == "plain(speculate=False)"
    assert found[label]["chosen_from"] == []
