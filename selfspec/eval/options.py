"""What `bench`, `trace --record` and `tune` can be asked for; their flags derive from here.

Imports no torch, so that `--help` stays fast.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidOption
from selfspec.eval.results import SIX_TASKS

OBJECTIVES = ("speed", "latency")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Which prompts, how many tokens, how often."""

    suite: str = SIX_TASKS
    """six-tasks, spec-bench, or a JSONL file of prompts."""

    questions: str | None = None
    """File of a suite that is not built in: Spec-Bench's question.jsonl."""

    limit: int | None = None
    """Questions to report at most, spread evenly over the suite."""

    tune_on: str | None = None
    """Suite or file whose questions settle the settings of methods with a grid. Without it
    questions of the suite itself, which the report leaves out."""

    tune_questions: int = 6
    """Questions for that, spread evenly; at least 1."""

    max_new_tokens: int = 64
    """Tokens per answer at most; each method writes as many as plain decoding does."""

    repeats: int = 1
    """Times that each prompt is measured, by all methods, each time in another order."""

    quality: bool = False
    """Judge the texts of all methods, not only of those that are lossy or draw tokens: where a
    lossless one rounds otherwise, that is the least that a lossy one can be told from."""

    seed: int = 0
    """Of the order of methods and of the bootstrap."""

    def record(self) -> dict[str, Any]:
        """As values; files are named without their folder."""
        paths = ("suite", "questions", "tune_on")
        return asdict(self) | {n: Path(path).name for n in paths if (path := getattr(self, n))}

    def __post_init__(self) -> None:
        """Raise InvalidOption for counts below 1."""
        _at_least(self, tune_questions=1, max_new_tokens=1, repeats=1)


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """What is recorded, and so which settings can be replayed."""

    exit_layers: tuple[int, ...] | None = None
    """Exit layers to record. None: all that the heads were fitted for. Fewer take less time."""

    max_new_tokens: int = 64
    """Tokens of each answer, at least 2."""

    max_draft_tokens: int = 7
    """W_max of the widest setting to be replayed, at least 1."""

    min_threshold: float | None = None
    """Lowest tau to be replayed, in (0, 1]. A real round goes on behind a wrong draft: all that it
    could do there is recorded, and a lower value makes these branches many. None: 0.2, or 0.01 for
    a single exit layer, where there is one branch only."""

    anneal_strengths: tuple[float, ...] = (0.0, 0.2, 0.5, 1.0)
    """Each alpha to be replayed, at least 0, rising."""

    def __post_init__(self) -> None:
        """Raise InvalidOption for values that no record could have."""
        _at_least(self, max_new_tokens=2, max_draft_tokens=1)
        floor, alphas = self.min_threshold, self.anneal_strengths
        if floor is not None and not 0.0 < floor <= 1.0:
            raise InvalidOption(f"min_threshold is {floor}, expected a value in (0, 1]")
        if not alphas or list(alphas) != sorted({*alphas}) or alphas[0] < 0.0:
            raise InvalidOption(
                f"anneal_strengths is {alphas}, expected values that are at least 0 and rise"
            )


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """How a setting is chosen among those replayed."""

    objective: str = "speed"
    """speed: the least time over all prompts. latency: the best 5th percentile of the prompts'
    own speed-ups, so that hardly any prompt is slower than without drafts."""

    max_exit_layers: int = 2
    """Exit layers used together at most, at least 1."""

    folds: int = 4
    """Prompts are divided into so many parts; each is judged by the setting that suits the others
    best. At least 2."""

    def __post_init__(self) -> None:
        """Raise InvalidOption for values that make no sense for any record."""
        if self.objective not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise InvalidOption(f"objective is {self.objective!r}, expected one of {known}")
        _at_least(self, max_exit_layers=1, folds=2)


def _at_least(options: object, **least: int) -> None:
    for name, number in least.items():
        if getattr(options, name) < number:
            raise InvalidOption(f"{name} is {getattr(options, name)}, expected at least {number}")
