"""Statistics on numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from selfspec.eval import metrics


def test_speed_up_is_the_ratio_of_total_times_not_the_mean_of_ratios() -> None:
    base = {"a": 8.0, "b": 1.0, "c": 1.0}
    method = {"c": 2.0, "b": 1.0, "a": 2.0}
    found = metrics.speed_up(base, method)
    assert found.ratio == 10.0 / 5.0
    assert found.mean == (4.0 + 1.0 + 0.5) / 3
    assert found.worst == 0.5
    # ranks 0, 1, 2 hold 0.5, 1, 4: the 5th percentile is a tenth of the way from rank 0 to 1
    assert found.p5 == pytest.approx(0.55, abs=1e-12)
    assert found.prompts == 3


@pytest.mark.parametrize("method", [{"a": 1.0}, {"a": 1.0, "c": 1.0}])
def test_speed_up_wants_the_same_prompts(method: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected the same"):
        metrics.speed_up({"a": 1.0, "b": 1.0}, method)
    with pytest.raises(ValueError, match="and some"):
        metrics.speed_up({}, {})


def test_resampled_pairs_stay_together() -> None:
    # each prompt takes the first method exactly twice as long, however long that is
    above, below = [2.0, 40.0, 6.0, 800.0], [1.0, 20.0, 3.0, 400.0]
    assert metrics.ratio_interval(above, below) == (2.0, 2.0)


def test_the_interval_of_two_prompts_has_their_ratios_as_ends() -> None:
    # of the pairs drawn a quarter is twice the first, a quarter twice the second prompt
    assert metrics.ratio_interval([3.0, 1.0], [1.0, 1.0]) == (1.0, 3.0)


def test_the_interval_covers_the_middle_of_the_resampled_ratios() -> None:
    above = [1.0 + index / 10 for index in range(20)]
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(20, (metrics.RESAMPLES, 20), generator=generator)
    ratios = sorted(torch.tensor(above, dtype=torch.float64)[drawn].mean(-1).tolist())
    low, high = metrics.ratio_interval(above, [1.0] * 20, seed=3)
    near = 1e-9  # ratios repeat: of the 50 outermost, 2.5 % of 2,000, some equal the end itself
    assert sum(ratio < low - near for ratio in ratios) <= 50 <= sum(r <= low + near for r in ratios)
    assert sum(ratio > high + near for ratio in ratios) <= 50
    assert sum(ratio >= high - near for ratio in ratios) >= 50


def test_the_seed_makes_the_interval_repeatable() -> None:
    values = [1.0, 2.0, 4.0, 3.0, 1.5], [1.0, 1.1, 1.3, 2.0, 0.7]
    assert metrics.ratio_interval(*values, seed=1) == metrics.ratio_interval(*values, seed=1)
    assert metrics.ratio_interval(*values, seed=1) != metrics.ratio_interval(*values, seed=2)


def test_percentiles_lie_between_the_nearest_values() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [metrics.percentile(values, share) for share in (0.0, 0.5, 1.0)] == [1.0, 2.5, 4.0]


def test_compression_leaves_out_the_prompts_pass() -> None:
    first = [(1, 0.5), (3, 0.1), (1, 0.1)]
    second = [(1, 0.5), (2, 0.1)]
    assert metrics.compression_rate([first, second]) == 6 / 3
    assert metrics.compression_rate([[(1, 0.5)]]) == 0.0


def test_tokens_of_a_round_share_its_seconds() -> None:
    assert metrics.token_seconds([(1, 9.0), (2, 1.0), (1, 0.25)]) == [0.5, 0.5, 0.25]


def test_acceptance_sums_over_runs_and_counts_what_was_never_kept() -> None:
    drafted = [{"4": 3, "20": 2}, {"4": 1}]
    accepted = [{"4": 2}, {"4": 1}]
    assert metrics.acceptance(drafted, accepted) == {4: (4, 3), 20: (2, 0)}


def test_repeated_share_counts_n_grams_that_were_there_before() -> None:
    # 8-grams of a text with period 2: two distinct ones among five
    assert metrics.repeated_share([1, 2] * 6) == 1 - 2 / 5
    assert metrics.repeated_share(list(range(20))) == 0.0
    assert metrics.repeated_share([1] * 7) == 0.0
    # 3-grams 121 212 121 213 131 311: one of six came before
    assert metrics.repeated_share([1, 2, 1, 2, 1, 3, 1, 1], length=3) == pytest.approx(1 / 6)
