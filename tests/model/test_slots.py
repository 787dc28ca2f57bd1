from __future__ import annotations

import pytest
import torch
from torch import Tensor

from selfspec.model.executors.slots import SteadySlots

BMM = torch.bmm


def in_blocks(weights: Tensor, values: Tensor) -> Tensor:
    """Sums of 80 to 112 slots are cut into halves, as some kernels do between two lengths."""
    slots = weights.shape[-1]
    if not 64 < slots < 128:
        return BMM(weights.double(), values.double()).float()
    half = slots // 2
    first = BMM(weights[..., :half].double(), values[:, :half].double()).float()
    return first + BMM(weights[..., half:].double(), values[:, half:].double()).float()


def test_counts_have_room_and_are_the_least_that_agree() -> None:
    steady = SteadySlots(2, 16, (12, 24))
    counts = sorted({steady.at_least(held) for held in range(1, 500)})
    assert all(steady.at_least(held) >= held for held in range(1, 500))
    assert all(count % 16 == 0 for count in counts)
    assert all(steady.at_least(count) == count for count in counts)


@pytest.mark.parametrize("rows", [12, 24])
def test_masked_slots_change_no_bit_on_this_machine(rows: int) -> None:
    steady = SteadySlots(3, 64, (12, 24))
    values = torch.randn(3, 1024, 64)
    weights = torch.rand(3, rows, 1024)
    for held in range(8, 600, 40):
        fewer = steady.at_least(held)
        more = steady.at_least(held + 8)
        weights[..., fewer:] = 0.0
        short = BMM(weights[..., :fewer].contiguous(), values[:, :fewer])
        assert torch.equal(short, BMM(weights[..., :more].contiguous(), values[:, :more]))
        weights = torch.rand(3, rows, 1024)


def test_lengths_that_are_added_up_otherwise_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "bmm", in_blocks)
    steady = SteadySlots(2, 16, (12,))
    assert [steady.at_least(held) for held in (16, 64, 65, 112, 129)] == [64, 64, 128, 128, 144]


def test_where_no_lengths_agree_nothing_is_spent_on_more_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch, "bmm", lambda weights, values: BMM(weights, values) + weights.shape[-1]
    )
    steady = SteadySlots(2, 16, (12,))
    assert [steady.at_least(held) for held in (16, 64, 100)] == [64, 64, 112]
