"""Where drafts from text already seen were copied from: a prompt and rounds come in, places go out.

The drafter's own index, read again round by round. Called by `inspect`.
"""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.decoding.drafters.ngram import NgramIndex
from selfspec.decoding.sources import NGRAM
from selfspec.decoding.stats import Round


def origins(prompt: Sequence[int], rounds: Sequence[Round], size: int) -> list[int | None]:
    """For each token of the answer its place in prompt and answer; None: it was not copied.

    `size`: the longest n-gram that the drafter looked for.
    """
    index = NgramIndex(size)
    index.extend(prompt)
    found: list[int | None] = []
    for entry in rounds:
        for offset, token in enumerate(entry.tokens):
            draft = entry.kept[offset] if offset < entry.accepted else None
            copied = draft is not None and entry.sources[draft] == NGRAM
            found.append(_place(index, offset, token) if copied else None)
        index.extend(entry.tokens)
    return found


def _place(index: NgramIndex, offset: int, token: int) -> int | None:
    """Where the token that many behind the newest was seen; a copy may go on into itself."""
    _, begin = index.find()
    period = len(index.text) - begin
    if not period:
        return None
    place = begin + offset % period
    return place if index.text[place] == token else None
