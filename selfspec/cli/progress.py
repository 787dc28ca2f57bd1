"""A progress bar on standard error, with the time that is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

shown = True
"""Whether bars are drawn; `--quiet` says no."""


class Show(Protocol):
    """Moves a progress bar."""

    def __call__(
        self, done: int, total: int | None, words: str = "", *, found: bool = False
    ) -> None:
        """What is done, of how much (None: not known), and words beside it.

        `found`: earlier runs did this much, so it says nothing about the time that is left.
        """


@contextmanager
def bar(name: str, unit: str) -> Iterator[Show]:
    """A bar on standard error; call what it gives to move it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit + "  {task.fields[words]}"),
        Remaining(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as drawn:
        task = drawn.add_task(name, total=None, words="")

        def show(done: int, total: int | None, words: str = "", *, found: bool = False) -> None:
            if found:  # or the time that is left would be reckoned from it
                drawn.reset(task, completed=done, total=total, words=words)
            else:
                drawn.update(task, completed=done, total=total, words=words)

        yield show
