"""Controllers replayed on a drafted text make the rounds of live runs, and are compared rightly."""

from __future__ import annotations

import pytest
import torch

from eval.papers.lengths import CONTROLLERS, Chains, Setting, gains, replayed
from eval.papers.prices import counts
from selfspec.api.speculator import Speculator, wrap
from selfspec.decoding.drafters import DraftCache
from tests.models import make_model, random_ids

COUNT = 24


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    """The draft model is the first half of the target: often right, often wrong; float64."""
    model = make_model("llama", torch.float64)
    small = make_model("llama", torch.float64, num_hidden_layers=4)
    small.load_state_dict(model.state_dict(), strict=False)
    return wrap(model, draft_model=small)


@pytest.fixture(scope="module")
def chains(speculator: Speculator) -> Chains:
    assert speculator.draft_model is not None
    ids = random_ids(9)
    text = speculator.generate(ids, max_new_tokens=COUNT, speculate=False).token_ids
    return Chains(DraftCache(speculator.draft_model), ids, text)


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("initial", [1, 3, 24])
def test_replayed_rounds_are_those_of_a_live_run(
    speculator: Speculator, chains: Chains, controller: str, initial: int
) -> None:
    unsure = ("threshold", 0.03) if controller in ("threshold", "gammatune-plus") else None
    options = Setting(controller, initial, unsure).options
    live = speculator.generate(random_ids(9), max_new_tokens=COUNT, **options)
    assert live.token_ids == chains.text
    found = replayed(chains, speculator.options.updated(options))
    assert found == counts(live.stats)
    assert 0 < found.accepted < found.drafted


def test_gains_are_over_the_mean_of_fixed_lengths_and_the_best_of_them() -> None:
    fixed, tuned = Setting("fixed", 1), Setting("gammatune", 1)
    seconds = {fixed: 1.0, fixed._replace(initial=8): 2.0}  # throughput 1 and 0.5, mean 0.75
    seconds |= {tuned: 1.25, tuned._replace(initial=8): 1.0}  # throughput 0.8 and 1
    usual, own = gains(seconds)
    assert (usual.mean, usual.best, usual.worst, usual.worst_initial) == (1.0, 1.0, 0.5, 8)
    assert own.mean == pytest.approx(0.9 / 0.75)
    assert own.spread == pytest.approx(0.1 / 0.75)
    assert (own.best, own.worst, own.worst_initial) == (1.0, 0.8, 1)
