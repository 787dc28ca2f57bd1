"""What `selfspec bench` can be asked for; its flags derive from here. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidOption
from selfspec.eval.suites import SIX_TASKS


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
        for name in ("tune_questions", "max_new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise InvalidOption(f"{name} is {getattr(self, name)}, expected at least 1")
