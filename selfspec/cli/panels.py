"""Two texts while they are written: side by side on a terminal, else one below the other.

Called by `selfspec demo`. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from selfspec.api.givers import Giver
from selfspec.cli import common

Show = Callable[[str, str, int], None]
"""Takes text, and who gave it: a source, and an exit layer."""

Begin = Callable[[str], AbstractContextManager[Show]]
"""Begins the next text, under its title; its clock runs while it is open."""


@contextmanager
def panels(titles: tuple[str, str], num_layers: int) -> Iterator[Begin]:
    """For two texts with these titles, begun in this order."""
    console = Console(highlight=False)
    if not console.is_terminal:
        yield _below
        return
    side = _Side(titles, num_layers)
    with Live(side, console=console, refresh_per_second=12, vertical_overflow="visible"):
        yield side.begin


@contextmanager
def _below(title: str) -> Iterator[Show]:
    common.emit(f"{title}:\n")
    start = time.perf_counter()
    yield lambda text, *_: common.emit(text)
    common.emit(f"\n({time.perf_counter() - start:.1f} s)\n\n")


class _Side:
    """What the terminal shows now."""

    def __init__(self, titles: tuple[str, str], num_layers: int) -> None:
        self._texts = {title: Text() for title in titles}
        self._began: dict[str, float] = {}
        self._took: dict[str, float] = {}
        self._num_layers = num_layers
        self._sources: dict[str, str] = {}

    @contextmanager
    def begin(self, title: str) -> Iterator[Show]:
        """Its text grows with what is shown."""
        self._began[title] = time.perf_counter()

        def show(text: str, source: str, layer: int) -> None:
            giver = Giver(source, layer)
            style = giver.colour(self._num_layers) or ""
            self._texts[title].append(text, style)
            self._sources.setdefault(giver.words, style)

        yield show
        self._took[title] = time.perf_counter() - self._began[title]

    def __rich__(self) -> RenderableType:
        """Both texts, and what the colours mean."""
        grid = Table.grid(expand=True)
        for _ in self._texts:
            grid.add_column(ratio=1)
        grid.add_row(
            *(
                Panel(text, title=title, subtitle=self._clock(title))
                for title, text in self._texts.items()
            )
        )
        given = Text("given by: ", "dim")
        given.append_text(Text(", ", "dim").join(Text(*one) for one in self._sources.items()))
        return Group(grid, given)

    def _clock(self, title: str) -> str:
        if title not in self._began:
            return "then"
        took = self._took.get(title, time.perf_counter() - self._began[title])
        return f"{took:.1f} s"
