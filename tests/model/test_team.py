"""How many threads compute a round: as many as find a free core, by clocks that the tests set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from selfspec.model.compiled import Team


class Machine:
    """Cores of which other programs take a share; its clocks move with the passes."""

    def __init__(self) -> None:
        self.cores = 2
        self.pass_s = 0.01
        self.wall_s = self.processor_s = 0.0
        self.others = 0.0
        """Cores that other programs keep busy."""
        self.team = Team(lambda: self.wall_s, lambda: self.processor_s)
        self.used: list[int] = []
        """Threads of each pass."""

    def run(self, seconds: float) -> list[int]:
        """Rounds of one pass each; the threads that torch had in them."""
        before = len(self.used)
        end = self.wall_s + seconds
        while self.wall_s < end:
            with self.team.limited(), self.team.measured():
                threads = torch.get_num_threads()
                self.used.append(threads)
                self.wall_s += self.pass_s
                self.processor_s += self.pass_s * min(threads, self.cores - self.others)
        return self.used[before:]


@pytest.fixture
def machine() -> Iterator[Machine]:
    """With torch's number of threads at two."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield Machine()
    finally:
        torch.set_num_threads(before)


def test_a_quiet_machine_gives_all_threads(machine: Machine) -> None:
    machine.others = 0.1  # the system's own
    assert set(machine.run(5.0)) == {2}


@pytest.mark.parametrize("others", [0.8, 1.0, 1.5])
def test_beside_busy_programs_one_thread_goes_on_alone(machine: Machine, others: float) -> None:
    machine.others = others
    used = machine.run(20.0)
    assert used[0] == 2
    assert used[10] == 1
    assert 0.01 < used[len(used) // 2 :].count(2) / (len(used) / 2) < 0.05  # tries for a free core


def test_long_passes_are_seldom_tried_with_more_threads(machine: Machine) -> None:
    machine.others, machine.pass_s = 1.0, 2.0
    used = machine.run(1000.0)
    assert used[0] == 2
    assert used.count(2) < 0.06 * len(used)


def test_of_many_cores_only_the_busy_ones_are_left_out(machine: Machine) -> None:
    torch.set_num_threads(16)
    machine.cores, machine.others = 16, 3.0
    assert machine.run(20.0)[-1] == 13


def test_all_threads_come_back_when_the_others_have_gone(machine: Machine) -> None:
    machine.others = 1.0
    machine.run(20.0)
    machine.others = 0.0
    assert set(machine.run(10.0)[-500:]) == {2}
    machine.others = 1.0
    machine.run(0.1)
    assert 2 in machine.run(0.2)  # tries soon again: a quiet time forgets the busy one


def test_the_number_of_threads_is_the_users_again_behind_a_round(machine: Machine) -> None:
    machine.others = 1.0
    machine.run(0.1)
    with suppress(KeyboardInterrupt), machine.team.limited():
        assert torch.get_num_threads() == 1
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert set(machine.run(1.0)) == {1}
