"""The answer itself, each token marked by where it left: a LayerTrace comes in, rich text goes out.

Called by `selfspec trace`. Colour adds to the marks and is never needed to read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from rich.console import Console, Group
from rich.text import Text

from selfspec.decoding.sources import EXIT
from selfspec.decoding.stats import GenerationStats, Round
from selfspec.visualise import palette
from selfspec.visualise.layers import LayerTrace, Place
from selfspec.visualise.texts import visible

_SUPERSCRIPT = str.maketrans("0123456789ndg", "⁰¹²³⁴⁵⁶⁷⁸⁹ⁿᵈᵍ")
_SOURCES = {"ngram": "n", "draft-model": "d", "grammar": "g"}
"""Marks of drafts that ran through no layer."""
_OF_MARK = {mark: source for source, mark in _SOURCES.items()}
_WORDS = {
    "n": "copied from text already seen",
    "d": "from the draft model",
    "g": "forced by the grammar",
}
"""What a mark says."""


def show(trace: LayerTrace, console: Console) -> None:
    """Print the view; wrapped on a terminal, in whole lines elsewhere."""
    plain = not console.is_terminal or console.no_color or console.color_system is None
    marks = _Marks(trace, plain=plain, ascii_only=console.options.ascii_only)
    parts = Group(marks.answer(), Text(), *marks.legend(), Text(summary(trace), style="dim"))
    console.print(parts, soft_wrap=not console.is_terminal, highlight=False)


def summary(trace: LayerTrace) -> str:
    """What the decode did, in a line."""
    stats = GenerationStats(num_layers=trace.info.num_layers)
    for entry in trace.rounds:
        stats.add(entry)
    ended = ", ".join(f"{reason} {count}" for reason, count in stats.ended.most_common())
    return (
        f"{stats.new_tokens} tokens, {stats.rounds} rounds, {stats.compression_rate:.2f} tokens "
        f"per verification, {stats.accepted} of {stats.drafted} drafts kept"
        + (f"; drafting ended by {ended}" if ended else "")
        + ("" if trace.info.settings.lossless else "; lossy")
    )


class _Marks:
    """How a trace looks on one kind of console."""

    def __init__(self, trace: LayerTrace, *, plain: bool, ascii_only: bool) -> None:
        """`plain`: a struck line cannot be relied on. `ascii_only`: nor can signs beyond ASCII."""
        self._trace = trace
        self._ascii = ascii_only
        self._struck = ("[-", "-]") if plain else ("", "")
        self._between = "|" if ascii_only else "·"

    def answer(self) -> Text:
        """All rounds."""
        text = Text()
        places = groupby(self._trace.places, key=lambda place: place.round)
        for number, entry in places:
            if number > 0:
                text.append(self._between, style="dim")
            for piece in self._round(number, list(entry)):
                text.append_text(piece)
        return text

    def legend(self) -> Iterator[Text]:
        """What the marks mean; only those that occur."""
        drafted, kept = Counter[str](), Counter[str]()
        for entry in self._trace.rounds:
            names = [*map(self._name, entry.sources, entry.exit_layers)]
            drafted.update(names)
            kept.update(names[index] for index in entry.kept)
        for name in sorted(drafted, key=lambda name: (not name.isdigit(), name.zfill(4))):
            line = Text().append("token", self._style(name)).append(self._raised(name))
            yield line.append(f" {_where(name)}: {kept[name]} of {drafted[name]} drafts kept")
        line = Text("token checked and emitted by the whole model")
        if drafted.total() > kept.total():
            line.append("   ").append_text(self._crossed("token")).append(" draft not kept")
        yield line.append("   ").append(self._between, style="dim").append(" next round")

    def _round(self, number: int, places: list[Place]) -> Iterator[Text]:
        """Kept drafts, then what was drafted in vain, then verification's own token."""
        entry = self._trace.rounds[number]
        for place, index in zip(places, entry.kept, strict=False):
            name = self._name(entry.sources[index], entry.exit_layers[index])
            yield self._token(place.text, self._style(name), self._raised(name))
        for branch in _rejected(entry):
            yield self._crossed("".join(self._trace.draft_texts[number][i] for i in branch))
        for place in places[entry.accepted :]:
            yield self._token(place.text, "default", "")

    def _token(self, text: str, style: str, mark: str) -> Text:
        """A line ends behind its sign and mark."""
        shown = self._shown(text)
        body = shown.rstrip("\n")
        return Text(body, style=style).append(mark).append(shown[len(body) :])

    def _crossed(self, text: str) -> Text:
        opening, closing = self._struck
        shown = self._shown(text).replace("\n", "")
        body = shown.lstrip(" ")  # a struck space would join two words
        spaces = " " * (len(shown) - len(body))
        return Text(spaces).append(f"{opening}{body}{closing}", style="strike red")

    def _shown(self, text: str) -> str:
        """Line ends visible and kept; nothing that could move the cursor."""
        lines = ["" if line == "" else visible(line).replace("␣", " ") for line in text.split("\n")]
        shown = "⏎\n".join(lines)
        return shown.encode("ascii", "backslashreplace").decode() if self._ascii else shown

    def _name(self, source: str, layer: int) -> str:
        return str(layer) if source == "exit" else _SOURCES[source]

    def _raised(self, name: str) -> str:
        return f"^{name}" if self._ascii else name.translate(_SUPERSCRIPT)

    def _style(self, name: str) -> str:
        source = EXIT if name.isdigit() else _OF_MARK[name]
        layer = int(name) if name.isdigit() else 0
        return f"bold {palette.style(source, layer, self._trace.info.num_layers)}"


def _rejected(entry: Round) -> list[list[int]]:
    """Drafts that were not kept, by branch: each follows the one before in its list."""
    parents = entry.parents or range(-1, len(entry.draft_tokens) - 1)
    branches: list[list[int]] = []
    for index, parent in enumerate(parents):
        if index in entry.kept:
            continue
        if branches and branches[-1][-1] == parent:
            branches[-1].append(index)
        else:
            branches.append([index])
    return branches


def _where(name: str) -> str:
    """In words, the mark of a draft."""
    if name == "0":
        return "drafted from its embedding, before any layer"
    if name.isdigit():
        return f"left behind layer {name}"
    return _WORDS[name]
