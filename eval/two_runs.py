"""Whether two runs of one `selfspec bench` command say the same.

    python -m eval.two_runs eval/results/first eval/results/second

Each speed-up, by group of answers, task, method and base, has a 95 % interval in both runs: do they
overlap? And how far apart are the ratios themselves? Groups of one prompt have no interval and are
left out. Exit code 1 where two intervals do not meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from selfspec.errors import InvalidOption
from selfspec.eval import results
from selfspec.eval.results import Results
from selfspec.eval.summary import ALL, BASES, WITHOUT_LOOPS

SAME = ("run", "questions", "model", "speculation")
"""Parts of a record in which runs of one command agree; machines may differ, and are named."""


class Pair(NamedTuple):
    """One speed-up, measured twice."""

    name: str
    first: dict[str, float]
    second: dict[str, float]

    @property
    def overlap(self) -> bool:
        """Whether the intervals meet."""
        first, second = self.first, self.second
        return first["low"] <= second["high"] and second["low"] <= first["high"]

    @property
    def apart(self) -> float:
        """Relative difference of the ratios."""
        return abs(self.second["ratio"] / self.first["ratio"] - 1.0)

    def __str__(self) -> str:
        """For people."""
        words = (f"{r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})" for r in self[1:])
        return f"{self.name}: {' and '.join(words)}, {self.apart:.1%} apart"


def main(
    first: Annotated[Path, typer.Argument(help="Results folder of selfspec bench.")],
    second: Annotated[Path, typer.Argument(help="That of another run of the same command.")],
) -> None:
    """Compare all speed-ups."""
    runs = results.read(first), results.read(second)
    for note in differences(*runs):
        print(note)
    found = list(pairs(runs[0].summary, runs[1].summary))
    if not found:
        raise SystemExit("no speed-up over several prompts is in both runs")
    parted = [pair for pair in found if not pair.overlap]
    for pair in parted:
        print(f"no overlap: {pair}")
    print(f"{len(found) - len(parted)} of {len(found)} speed-ups agree within their intervals")
    print(f"furthest apart: {max(found, key=lambda pair: pair.apart)}")
    if parted:
        raise SystemExit(1)


def differences(first: Results, second: Results) -> list[str]:
    """What is not the same about the machines. Raises InvalidOption for another command."""
    for part in SAME:
        for name, value in first.run[part].items():
            if (other := second.run[part].get(name)) != value:
                raise InvalidOption(
                    f"these are runs of two commands: {part} {name} is {value} in {first.name}, "
                    f"{other} in {second.name}"
                )
    here, there = first.run["machine"], second.run["machine"]
    return [f"machine {k}: {here[k]}, then {there.get(k)}" for k in here if here[k] != there.get(k)]


def pairs(first: dict[str, Any], second: dict[str, Any]) -> Iterator[Pair]:
    """Every speed-up over several prompts that is in both summaries, but those of a base itself."""
    for group in (ALL, WITHOUT_LOOPS):
        for task in (name for name in first[group] if name in second[group]):
            here, there = first[group][task], second[group][task]
            for label in (name for name in here if name in there):
                for base in BASES:
                    gains = here[label][f"over_{base}"], there[label][f"over_{base}"]
                    if label != base and all(gain and gain["prompts"] > 1 for gain in gains):
                        yield Pair(f"{label} over {base}, {task}, {group} answers", *gains)


if __name__ == "__main__":
    typer.run(main)
