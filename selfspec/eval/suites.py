"""Prompts to measure on: a file comes in, questions by task group go out.

Called by every command of evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Question:
    """One conversation to be held: the user's turns, each to be answered by the model."""

    id: str
    task: str
    """Task group: math, chat, QA, RAG, summary, translation, or the file's own word."""
    turns: tuple[str, ...]
    """What the user says, at least one turn."""
    reference: str | None = None
    """A good answer to the last turn, where the file has one."""
