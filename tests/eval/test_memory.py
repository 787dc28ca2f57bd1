"""Peak memory: what a piece of work needs for a while is seen, what it gave back before is not."""

from __future__ import annotations

import sys

import pytest
import torch

from selfspec.eval import memory
from selfspec.eval.memory import peak_of

MIB = 2**20
CPU = torch.device("cpu")

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count is Linux's")


def work(mebibytes: int) -> None:
    """Holds so much, filled, and gives it back."""
    torch.ones(mebibytes * MIB, dtype=torch.uint8)


@linux
def test_growth_is_what_the_work_held_at_its_peak() -> None:
    found = peak_of(lambda: work(64), CPU)
    assert found is not None
    assert 63 * MIB <= found.growth < 80 * MIB  # counters lag by some pages
    assert found.before > 16 * MIB


@linux
def test_what_other_work_needed_before_does_not_count() -> None:
    work(256)
    small = peak_of(lambda: work(64), CPU)  # more than what glibc may take from freed memory
    assert small is not None
    assert 63 * MIB <= small.growth < 80 * MIB


def test_where_nothing_can_be_measured_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: str) -> int:
        raise LookupError

    monkeypatch.setattr(memory, "_resident", refused)
    assert peak_of(lambda: None, CPU) is None
