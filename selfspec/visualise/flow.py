"""Tokens set as lines of text: pieces and their widths come in, places on lines go out.

Knows nothing of drawing: `picture` measures and draws. A line breaks where a word begins; a word
that is longer than a line breaks between its tokens, a token that is longer within itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

Width = Callable[[str], float]


class Run(NamedTuple):
    """A token's text, or a part of it, on one line."""

    place: int
    """Of the token in the answer."""
    text: str
    line: int
    left: float
    width: float


class _Part(NamedTuple):
    place: int
    text: str


def flow(texts: Sequence[str], width: Width, room: float) -> list[Run]:
    """All texts on lines that are `room` wide."""
    runs: list[Run] = []
    line, left = 0, 0.0
    for word in _words(texts):
        if word is None:
            line, left = line + 1, 0.0
            continue
        whole = sum(width(part.text) for part in word)
        if left and left + whole > room:
            line, left = line + 1, 0.0
            word = [_Part(word[0].place, word[0].text.lstrip(" ")), *word[1:]]
        for part in _short(word, width, room):
            wide = width(part.text)
            if left and left + wide > room:
                line, left = line + 1, 0.0
            if part.text:
                runs.append(Run(part.place, part.text, line, left, wide))
            left += wide
    return runs


def _words(texts: Iterable[str]) -> Iterator[list[_Part] | None]:
    """Parts up to the next that begins with a space; None: the line ends."""
    word: list[_Part] = []
    for place, text in enumerate(texts):
        for number, piece in enumerate(text.split("\n")):
            if number:
                yield from ([word] if word else [])
                yield None
                word = []
            if piece.startswith(" ") and word:
                yield word
                word = []
            if piece:
                word.append(_Part(place, piece))
    if word:
        yield word


def _short(word: Iterable[_Part], width: Width, room: float) -> Iterator[_Part]:
    """None of them wider than a line."""
    for place, text in word:
        while len(text) > 1 and width(text) > room:
            fits = max(1, int(len(text) * room / width(text)) - 1)
            yield _Part(place, text[:fits])
            text = text[fits:]
        yield _Part(place, text)
