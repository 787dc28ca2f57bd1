"""What `bench` and `tune` can be asked for; their flags derive from here.

Imports no torch, so that `--help` stays fast.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from selfspec.eval.results import SIX_TASKS
from selfspec.options import SHARE, Range, at_least, check_fields
from selfspec.typed import check_keys

OBJECTIVES = ("speed", "latency")

_RISING = Range(
    lambda values: values and list(values) == sorted({*values}) and values[0] >= 0.0,
    "of values that are at least 0 and rise",
    whole=True,
)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Which prompts, how many tokens, how often."""

    suite: str = SIX_TASKS
    """six-tasks, spec-bench, or a JSONL file of prompts."""

    questions: str | None = None
    """File of a suite that is not built in: Spec-Bench's question.jsonl."""

    limit: int | None = None
    """Questions to report at most, spread over the suite."""

    tune_on: str | None = None
    """Suite or file whose questions choose the settings of methods that have several. Without it
    questions of the suite itself, which the report leaves out."""

    tune_questions: Annotated[int, at_least(1)] = 6
    """Questions for that, spread evenly; at least 1."""

    max_new_tokens: Annotated[int, at_least(1)] = 64
    """Tokens per answer at most; each method writes as many."""

    repeats: Annotated[int, at_least(1)] = 1
    """Times that each prompt is measured."""

    quality: bool = False
    """Judge the texts of all methods by their references, not only of those that are lossy or
    sample."""

    seed: int = 0
    """Seed of the order of methods and of the bootstrap."""

    def record(self) -> dict[str, Any]:
        """The options as values; files are named without their folder."""
        paths = ("suite", "questions", "tune_on")
        return asdict(self) | {n: Path(path).name for n in paths if (path := getattr(self, n))}

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """What is recorded, and so which settings can be replayed."""

    exit_layers: tuple[int, ...] | None = None
    """Exit layers to record. None: all that the heads were fitted for. Fewer take less time."""

    max_new_tokens: Annotated[int, at_least(2)] = 64
    """Tokens of each answer, at least 2."""

    max_draft_tokens: Annotated[int, at_least(1)] = 7
    """Draft tokens per round of the longest setting to be replayed (W_max)."""

    min_threshold: Annotated[float | None, SHARE] = None
    """Lowest exit threshold to be replayed, in (0, 1]; a lower one makes larger records. None: 0.2,
    or 0.01 for a single exit layer."""

    anneal_strengths: Annotated[tuple[float, ...], _RISING] = (0.0, 0.2, 0.5, 1.0)
    """Values of exit:anneal_strength to be replayed, at least 0, rising."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """How a setting is chosen among those replayed."""

    objective: str = "speed"
    """speed: the least time over all prompts. latency: the best 5th percentile of the prompts'
    own speed-ups, so that hardly any prompt is slower than without drafts."""

    max_exit_layers: Annotated[int, at_least(1)] = 2
    """Exit layers used together at most, at least 1."""

    folds: Annotated[int, at_least(2)] = 4
    """Prompts are divided into so many parts; each is judged by the setting that suits the others
    best. At least 2."""

    def __post_init__(self) -> None:
        check_keys([self.objective], OBJECTIVES, "objective")
        check_fields(self)
