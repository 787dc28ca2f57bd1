"""Text of an answer on the terminal: whole words wrap, and each piece has the colour of its giver.

Pieces and who gave them come in. Where standard output is no terminal they go out as they are.
Called by `chat` and `demo`. Imports no torch.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from selfspec.api.givers import Giver
from selfspec.cli import common


class Writer:
    """Writes one answer after the other."""

    def __init__(self, num_layers: int, *, colour: bool | None = None) -> None:
        """`colour` None: as the terminal and NO_COLOR say."""
        no_color = None if colour is None else not colour
        self._console = Console(highlight=False, no_color=no_color, soft_wrap=True)
        self._num_layers = num_layers
        self._column = 0
        self._gap = ""
        """Spaces that are written only if the word behind them fits."""
        self._word = Text()
        self._ready = Text()
        self._wipe = ""
        """Clears the line that says what is waited for."""

    @property
    def colour(self) -> bool:
        """Whether colours are shown."""
        console = self._console
        return console.is_terminal and not console.no_color and console.color_system is not None

    @colour.setter
    def colour(self, wanted: bool) -> None:
        self._console.no_color = not wanted

    def waiting(self, text: str) -> None:
        """On a terminal, a line that the next thing written takes the place of."""
        if self._console.is_terminal:
            self._wipe = "\r\x1b[2K"
            common.emit(_still(text)[: self._console.width - 1])

    def piece(self, text: str, source: str, layer: int) -> None:
        """Some text; a word at its end waits until it is complete."""
        if not self._console.is_terminal:
            common.emit(text)
            return
        style = Giver(source, layer).colour(self._num_layers) or ""
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            self._take(part, style)
        self._show()

    def end(self, more: str = "\n") -> None:
        """The end of an answer: what waits, and a new line."""
        self._end_word()
        self._ready.append(more)
        self._show()
        self._column, self._gap = 0, ""

    def line(self, text: str, style: str = "") -> None:
        """A paragraph of its own."""
        with self._console.capture() as capture:
            self._console.print(Text(text, style), soft_wrap=not self._console.is_terminal)
        common.emit(capture.get())

    def entry(self, term: str, text: str) -> None:
        """A term and what is said of it, further lines of which begin below its first."""
        room = max(self._console.width - len(term), 1)
        lines = textwrap.wrap(text, room) if self._console.is_terminal else [text]
        self.line(term + f"\n{'':<{len(term)}}".join(lines))

    def _take(self, part: str, style: str) -> None:
        """A line's end, spaces, or a part of a word."""
        if part == "\n":
            self._end_word()
            self._ready.append("\n")
            self._column, self._gap = 0, ""
        elif part.isspace():
            self._end_word()
            self._gap += part.expandtabs(4)
        elif len(part) == cell_len(part):
            self._append(part, style)
        else:  # scripts without spaces may break anywhere
            for character in part:
                self._append(character, style)
                if cell_len(character) > 1:
                    self._end_word()

    def _append(self, part: str, style: str) -> None:
        self._word.append(_still(part), style)
        if self._word.cell_len >= self._console.width:
            self._end_word()

    def _end_word(self) -> None:
        if not self._word:
            return
        needed = len(self._gap) + self._word.cell_len
        if self._column and self._column + needed >= self._console.width:
            self._ready.append("\n")
            self._column, self._gap = 0, ""
        self._ready.append(self._gap).append_text(self._word)
        self._column += len(self._gap) + self._word.cell_len
        self._word, self._gap = Text(), ""

    def _show(self) -> None:
        with self._console.capture() as capture:
            self._console.print(self._ready, end="", soft_wrap=True)
        if self._ready:
            common.emit(self._wipe + capture.get())
            self._wipe = ""
        self._ready = Text()


def _still(text: str) -> str:
    """Without what would move the cursor."""
    return "".join(c if unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text)
