"""Every drafter under every controller: the tokens of plain decoding, whatever was drafted."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from selfspec.api.speculator import Speculator, wrap
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.options import CONTROLLERS, TOGETHER
from tests import ladder
from tests.models import make_model, random_ids

FREE = "row=0"
"""Prices at which text already seen is proposed in full."""


@pytest.fixture(scope="module")
def exact() -> Any:
    """The tiny Llama in float64, where equal tokens are no matter of luck."""
    return make_model("llama", torch.float64)


@pytest.fixture(scope="module")
def speculator(exact: Any) -> Speculator:
    second = make_model("llama", torch.float64, num_hidden_layers=2)
    eager = "exit:layers=2/5,threshold=0.05,max_tokens=3"  # drafts all the time, mostly wrongly
    found = wrap(exact, heads="logit-lens", draft_model=second, drafter=eager, prices=FREE)
    found.options = found.options.updated({"draft_model": "max_tokens=3"})
    return found


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("drafter", [name for name in TOGETHER if name != "none"])
def test_no_drafter_under_any_controller_changes_a_token(
    speculator: Speculator, drafter: str, controller: str
) -> None:
    ids = random_ids(13)
    plain = speculator.generate(ids, max_new_tokens=40, drafter="none")
    sure = ":threshold=0.1" if controller in ("threshold", "gammatune-plus") else ""
    options: dict[str, Any] = {"drafter": drafter, "controller": controller + sure}
    found = speculator.generate(ids, max_new_tokens=40, **options)
    assert found.token_ids == plain.token_ids
    assert found.stats.drafted > 0
    assert found.stats.lossless
    assert set(found.stats.drafted_by_source) <= set(drafter.split("+"))


@pytest.mark.parametrize("drafter", [name for name in TOGETHER if name != "none"])
def test_no_drafter_changes_what_a_penalty_or_a_limit_does(
    speculator: Speculator, drafter: str
) -> None:
    ids = random_ids(13)
    for options in ({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}):
        for count in (1, 2, 17):
            given: dict[str, Any] = {"max_new_tokens": count, **options}
            plain = speculator.generate(ids, drafter="none", **given)
            assert speculator.generate(ids, drafter=drafter, **given).token_ids == plain.token_ids


@pytest.mark.parametrize("drafter", ["ngram", "ngram+exit", "draft-model"])
def test_no_drafter_changes_the_distribution_of_samples(drafter: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 4, "num_hidden_layers": 2}
    model, ids = make_model("llama", **sizes), random_ids(6, vocab_size=4)
    options: dict[str, Any] = {"drafter": drafter, "prices": FREE}
    if drafter == "draft-model":
        options["draft_model"] = make_model("llama", **sizes | {"num_hidden_layers": 1})
    ladder.check_sampling(model, ids, draws=600, **options)


def test_drafting_nothing_is_plain_decoding(speculator: Speculator) -> None:
    stats = speculator.generate(random_ids(5), max_new_tokens=5, drafter="none").stats
    assert (stats.drafted, stats.rounds) == (0, 4)


def test_seen_text_needs_no_heads_and_no_warning(
    exact: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "selfspec"):
        alone = wrap(exact, drafter="ngram", prices=FREE)
        assert not caplog.messages
        wrap(exact, drafter="exit")
        assert "plain decoding" in caplog.text
    assert alone.generate(random_ids(13), max_new_tokens=40).stats.drafted > 0


def test_heads_that_were_asked_for_must_be_there(exact: Any) -> None:
    with pytest.raises(HeadsNotFound, match=r"drafter ngram\+exit needs exit heads"):
        wrap(exact, drafter="ngram+exit").generate(random_ids(5), max_new_tokens=2)


def test_a_draft_model_that_was_asked_for_must_be_there(exact: Any) -> None:
    with pytest.raises(InvalidOption, match="drafter draft-model needs a second model"):
        wrap(exact, drafter="draft-model").generate(random_ids(5), max_new_tokens=2)


def test_an_unknown_drafter_names_the_nearest(exact: Any) -> None:
    with pytest.raises(InvalidOption, match="Did you mean ngram"):
        wrap(exact, drafter="n-gram")


def test_lengths_of_seen_text_and_of_exits_are_bounded_apart(speculator: Speculator) -> None:
    found = speculator.generate(
        random_ids(13), max_new_tokens=60, drafter="ngram+exit:max_tokens=1"
    )
    widths = max(found.stats.drafted_by_index)
    assert widths > 1
    with pytest.raises(InvalidOption, match="ngram:max_tokens 7 needs at least 8 rows"):
        speculator.generate(random_ids(5), drafter="ngram", pinned=True, pinned_rows=7)
