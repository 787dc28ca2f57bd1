"""The answer itself, each token by who gave it: a LayerTrace comes in, rich text goes out.

Called by `selfspec trace`. Where there are no colours, and beside rejected drafts, marks say it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Console, Group
from rich.text import Text

from selfspec import pages
from selfspec.api.givers import Giver
from selfspec.decoding.stats import EXIT, SOURCES
from selfspec.visualise import layers
from selfspec.visualise.layers import LayerTrace, gain, ranked, readable

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
    last = Text(trace.summary, style="dim")
    parts = Group(marks.answer(), Text(), headline, *marks.legend(), last)
    console.print(parts, soft_wrap=not console.is_terminal, highlight=False)


class _Marks:
    def __init__(self, trace: LayerTrace, *, plain: bool, ascii_only: bool, rejected: bool) -> None:
        """`plain`: neither colours nor struck lines. `ascii_only`: no signs beyond ASCII."""
        self._trace = trace
        self.ascii_only = ascii_only
        self._rejected = rejected
        self._marked = plain or rejected
        self._struck = ("[-", "-]") if plain else ("", "")
        self._between = "|" if ascii_only else "·"

    def answer(self) -> Text:
        """All rounds: kept drafts, then what was drafted in vain, then verification's own token.

        An end token only beside rejected drafts.
        """
        trace, text = self._trace, Text()
        texts = iter([one.text for one in trace.places] if self._rejected else trace.answer)
        for entry, drafts in zip(trace.rounds, trace.draft_texts, strict=True):
            if self._rejected and not entry.prefill:
                text.append(self._between, style="dim")
            for giver in entry.givers[: entry.accepted]:
                self._token(text, next(texts), Giver(*giver))
            for _, branch in layers.rejected(entry) if self._rejected else ():
                self._crossed(text, "".join(drafts[index] for index in branch))
            for giver in entry.givers[entry.accepted :]:
                self._token(text, next(texts), Giver(*giver))
        return text

    def legend(self) -> Iterator[Text]:
        drafted, kept = Counter[Giver](), Counter[Giver]()
        for entry in self._trace.rounds:
            found = [*map(Giver, entry.sources, entry.exit_layers)]
            drafted.update(found)
            kept.update(found[index] for index in entry.kept)
        for giver, count in ranked([*drafted.elements()]):
            line = Text()
            self._token(line, giver.words, giver)
            yield line.append(f": {kept[giver]} of {count} drafts kept")
        if self._rejected:
            line = Text()
            self._crossed(line, "token")
            line.append(": a draft that was rejected   ")
            yield line.append(self._between, style="dim").append(": the next round")

    def _token(self, to: Text, text: str, giver: Giver) -> None:
        """A line ends behind its sign and mark."""
        shown = self._shown(text, "⏎" if self._marked else "")
        body = shown.rstrip("\n")
        layer = str(giver.layer) if giver.source == EXIT else ""
        mark = (SOURCES[giver.source].mark or layer) if self._marked else ""
        if mark:
            mark = f"^{mark}" if self.ascii_only else mark.translate(_SUPERSCRIPT)
        colour = giver.colour(self._trace.info.num_layers)
        to.append(body + mark, f"bold {colour}" if colour else "default")
        to.append(shown[len(body) :])

    def _crossed(self, to: Text, text: str) -> None:
        opening, closing = self._struck
        shown = self._shown(text, "⏎").replace("\n", "")
        body = shown.lstrip(" ")  # a struck space would join two words
        to.append(" " * (len(shown) - len(body)))
        to.append(f"{opening}{body}{closing}", style=f"strike {pages.REJECTED}")

    def _shown(self, text: str, ends: str) -> str:
        shown = readable(text, ends)
        return shown.encode("ascii", "backslashreplace").decode() if self.ascii_only else shown
