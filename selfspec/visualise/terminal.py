"""The answer itself, each token by who gave it: a LayerTrace comes in, rich text goes out.

Called by `selfspec trace`. Where there are no colours, and beside rejected drafts, marks say it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from rich.console import Console, Group
from rich.text import Text

from selfspec.api.givers import Giver
from selfspec.decoding.stats import SOURCES, Round
from selfspec.pages import palette
from selfspec.visualise.layers import LayerTrace, Place, counted, gain, visible

_SUPERSCRIPT = str.maketrans(
    "0123456789abcdefghijklmnoprstuvwxyz", "⁰¹²³⁴⁵⁶⁷⁸⁹ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ"
)


def show(trace: LayerTrace, console: Console, *, rejected: bool = False) -> None:
    """Print the view; wrapped on a terminal, in whole lines elsewhere.

    `rejected`: with the drafts that were not kept, and where rounds end.
    """
    plain = not console.is_terminal or console.no_color or console.color_system is None
    marks = _Marks(trace, plain=plain, ascii_only=console.options.ascii_only, rejected=rejected)
    said = gain(trace).headline
    headline = Text(said.replace("×", "x") if marks.ascii_only else said, style="bold")
    last = Text(summary(trace), style="dim")
    parts = Group(marks.answer(), Text(), headline, *marks.legend(), last)
    console.print(parts, soft_wrap=not console.is_terminal, highlight=False)


def summary(trace: LayerTrace) -> str:
    """What the decode did, in a line."""
    stats = trace.stats
    ended = ", ".join(f"{reason} {count}" for reason, count in stats.ended.most_common())
    return (
        f"{stats.new_tokens} tokens, {stats.rounds} rounds, {stats.compression_rate:.2f} tokens "
        f"per verification, {stats.accepted} of {stats.drafted} drafts kept"
        + (f"; drafting ended by {ended}" if ended else "")
        + ("" if trace.info.settings.lossless else "; lossy")
    )


class _Marks:
    """How a trace looks on one kind of console."""

    def __init__(self, trace: LayerTrace, *, plain: bool, ascii_only: bool, rejected: bool) -> None:
        """`plain`: neither colours nor struck lines. `ascii_only`: no signs beyond ASCII."""
        self._trace = trace
        self.ascii_only = ascii_only
        self._rejected = rejected
        self._marked = plain or rejected
        self._struck = ("[-", "-]") if plain else ("", "")
        self._texts = [one.text for one in trace.places] if rejected else trace.answer
        self._between = "|" if ascii_only else "·"

    def answer(self) -> Text:
        """All rounds; an end token only beside rejected drafts."""
        text = Text()
        places = groupby(self._trace.places, key=lambda place: place.round)
        for number, entry in places:
            if number > 0 and self._rejected:
                text.append(self._between, style="dim")
            for piece in self._round(number, list(entry)):
                text.append_text(piece)
        return text

    def legend(self) -> Iterator[Text]:
        """Who drafted, in the look of its tokens; only those that did."""
        drafted, kept = Counter[Giver](), Counter[Giver]()
        for entry in self._trace.rounds:
            found = [*map(Giver, entry.sources, entry.exit_layers)]
            drafted.update(found)
            kept.update(found[index] for index in entry.kept)
        for giver, count in counted([*drafted.elements()]):
            line = Text().append(giver.words, self._style(giver)).append(self._mark(giver))
            yield line.append(f": {kept[giver]} of {count} drafts kept")
        if self._rejected:
            line = self._crossed("token").append(": a draft that was rejected   ")
            yield line.append(self._between, style="dim").append(": the next round")

    def _round(self, number: int, places: list[Place]) -> Iterator[Text]:
        """Kept drafts, then what was drafted in vain, then verification's own token."""
        entry = self._trace.rounds[number]
        for place, index in zip(places, entry.kept, strict=False):
            giver = Giver(entry.sources[index], entry.exit_layers[index])
            yield self._token(self._texts[place.index], self._style(giver), self._mark(giver))
        for branch in _branches(entry) if self._rejected else ():
            yield self._crossed("".join(self._trace.draft_texts[number][i] for i in branch))
        for place in places[entry.accepted :]:
            yield self._token(self._texts[place.index], "default", "")

    def _token(self, text: str, style: str, mark: str) -> Text:
        """A line ends behind its sign and mark."""
        shown = self._shown(text)
        body = shown.rstrip("\n")
        return Text(body, style=style).append(mark).append(shown[len(body) :])

    def _crossed(self, text: str) -> Text:
        opening, closing = self._struck
        shown = self._shown(text, ends="⏎").replace("\n", "")
        body = shown.lstrip(" ")  # a struck space would join two words
        spaces = " " * (len(shown) - len(body))
        return Text(spaces).append(f"{opening}{body}{closing}", style=f"strike {palette.REJECTED}")

    def _shown(self, text: str, ends: str = "") -> str:
        """Line ends kept, and visible as `ends`; nothing that could move the cursor."""
        ends = "⏎" if self._marked else ends
        lines = ["" if line == "" else visible(line).replace("␣", " ") for line in text.split("\n")]
        shown = f"{ends}\n".join(lines)
        return shown.encode("ascii", "backslashreplace").decode() if self.ascii_only else shown

    def _mark(self, giver: Giver) -> str:
        if not self._marked:
            return ""
        name = SOURCES[giver.source].mark or str(giver.layer)
        return f"^{name}" if self.ascii_only else name.translate(_SUPERSCRIPT)

    def _style(self, giver: Giver) -> str:
        return f"bold {giver.colour(self._trace.info.num_layers) or ''}".strip()


def _branches(entry: Round) -> list[list[int]]:
    """Drafts that were not kept: each follows the one before in its list."""
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
