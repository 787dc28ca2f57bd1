"""Every drafter under every controller: the tokens of plain decoding, whatever was drafted."""

from __future__ import annotations

from typing import Any

import pytest

from selfspec.api.speculator import Speculator, wrap
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.options import CONTROLLERS, TOGETHER
from tests import ladder
from tests.models import make_model, random_ids


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("drafter", [name for name in TOGETHER if name != "none"])
def test_no_drafter_under_any_controller_changes_a_token(
    eager: Speculator, drafter: str, controller: str
) -> None:
    ids = random_ids(13)
    plain = eager.generate(ids, max_new_tokens=40, drafter="none")
    sure = ":threshold=0.1" if controller in ("threshold", "gammatune-plus") else ""
    options: dict[str, Any] = {"drafter": drafter, "controller": controller + sure}
    found = eager.generate(ids, max_new_tokens=40, **options)
    assert found.token_ids == plain.token_ids
    assert found.stats.drafted > plain.stats.drafted == 0
    assert found.stats.lossless
    assert set(found.stats.drafted_by_source) <= set(drafter.split("+"))


@pytest.mark.parametrize("drafter", [name for name in TOGETHER if name != "none"])
def test_no_drafter_changes_what_a_penalty_or_a_limit_does(eager: Speculator, drafter: str) -> None:
    ids = random_ids(13)
    for options in ({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}):
        for count in (1, 2, 17):
            given: dict[str, Any] = {"max_new_tokens": count, **options}
            plain = eager.generate(ids, drafter="none", **given)
            assert eager.generate(ids, drafter=drafter, **given).token_ids == plain.token_ids


@pytest.mark.parametrize("drafter", ["ngram", "ngram+exit", "draft-model"])
def test_no_drafter_changes_the_distribution_of_samples(drafter: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 4, "num_hidden_layers": 2}
    model, ids = make_model("llama", **sizes), random_ids(6, vocab_size=4)
    options: dict[str, Any] = {"drafter": drafter, "prices": "row=0"}
    if drafter == "draft-model":
        options["draft_model"] = make_model("llama", **sizes | {"num_hidden_layers": 1})
    ladder.check_sampling(model, ids, draws=600, **options)


@pytest.mark.parametrize(
    ("drafter", "kind", "words"),
    [
        ("ngram+exit", HeadsNotFound, r"drafter ngram\+exit needs exit heads"),
        ("draft-model", InvalidOption, "drafter draft-model needs a second model"),
    ],
)
def test_what_drafts_must_be_there(
    drafter: str, kind: type[Exception], words: str, exact: Any
) -> None:
    with pytest.raises(kind, match=words):
        wrap(exact, drafter=drafter).generate(random_ids(5), max_new_tokens=2)


def test_lengths_of_seen_text_and_of_exits_are_bounded_apart(eager: Speculator) -> None:
    found = eager.generate(random_ids(13), max_new_tokens=60, drafter="ngram+exit:max_tokens=1")
    widths = max(found.stats.drafted_by_index)
    assert widths > 1
    with pytest.raises(InvalidOption, match="ngram:max_tokens 7 needs at least 8 rows"):
        eager.generate(random_ids(5), drafter="ngram", pinned=True, pinned_rows=7)
