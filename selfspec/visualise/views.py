"""Views of an answer: a LayerTrace comes in, text for a terminal or one HTML file goes out.

The file shows the answer layer by layer, without network or framework. On a terminal, each token
has the colour of who gave it; without colours, and with rejected drafts, marks tell it.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from selfspec import pages
from selfspec.decoding.costs import DraftCost
from selfspec.decoding.stats import EXIT, LOOKS, SOURCES, Giver, Round
from selfspec.visualise import layers
from selfspec.visualise.layers import LayerTrace, gain, givers, readable, rejections, visible

_SCRIPTS = tuple(f"{part}.js" for part in ("story", "readout", "answer", "map", "lanes", "main"))
"""Scripts of the page, joined in this order into one module."""


def render(trace: LayerTrace) -> str:
    """The whole HTML file as text."""
    info = trace.info
    # "<" is escaped, so that the JSON can neither close its element nor open another
    data = page_data(trace)
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    html, _ = pages.page(
        "selfspec.visualise",
        "page",
        _SCRIPTS,
        title=escape(f"{' '.join(info.prompt.split())[:60]} · {info.base_model}"),
        headline=escape(gain(trace).headline),
        facts=escape(f"{info.base_model} · {info.dtype}, {info.executor} · {trace.summary}"),
        prompt=escape(info.prompt),
        data=text.replace("<", "\\u003c"),
    )
    return html


def page_data(trace: LayerTrace) -> dict[str, Any]:
    """All data of the page, ready for JSON; a token is an index into `words`."""
    info, words = trace.info, dict[tuple[int, str], int]()

    def tops(tokens: Sequence[int], texts: Sequence[str]) -> list[int]:
        return [words.setdefault(word, len(words)) for word in zip(tokens, texts, strict=True)]

    counts = dict(layers.source_counts(givers(trace)))
    rejects = _rejected_texts(trace)
    places = [
        {
            "word": words.setdefault((place.token, place.text), len(words)),
            "round": place.round,
            "giver": list(counts).index(giver),
            "rejected": rejects[place.index],
            "copied_from": place.copied_from,
            "right_from": layers.right_from(trace, place),
            "head_right": layers.head_right(trace, place),
            "top": tops(place.final_top_tokens, place.final_top_texts),
            "probs": place.final_top_probs,
            "layers": [
                {
                    "top": tops(guess.top_tokens, guess.top_texts),
                    "probs": guess.top_probs,
                    "sure": guess.confidence,
                    "rank": guess.rank,
                    "kl": guess.divergence if math.isfinite(guess.divergence) else None,
                }
                for guess in place.layers
            ],
        }
        for place, giver in zip(trace.places, givers(trace), strict=True)
    ]
    return {
        "num_layers": info.num_layers,
        "exit_layers": info.exit_layers,
        "head_kinds": info.head_kinds,
        "thresholds": info.thresholds,
        "in_use": list(info.taus),
        "prompt_texts": info.prompt_texts,
        "places": places,
        "rounds": [(len(entry.tokens), *_round_times(entry, trace.cost)) for entry in trace.rounds],
        "givers": [
            {
                "words": giver.words,
                "look": LOOKS[SOURCES[giver.source].line],
                "layer": giver.layer if giver.source == EXIT else None,
                "colour": giver.colour(info.num_layers),
                "count": count,
            }
            for giver, count in counts.items()
        ],
        "words": [(token, text, visible(text)) for token, text in words],
    }


def _rejected_texts(trace: LayerTrace) -> defaultdict[int, list[dict[str, Any]]]:
    """Rejected drafts before each place: their texts, and the layer of the exit head, if any."""
    rejects, begin = defaultdict[int, list[dict[str, Any]]](list), 0
    for entry, texts in zip(trace.rounds, trace.draft_texts, strict=True):
        for offset, branch in rejections(entry):
            is_exit = entry.sources[branch[0]] == EXIT
            layer = entry.exit_layers[branch[0]] if is_exit else None
            text = "".join(texts[draft] for draft in branch)
            rejects[begin + offset].append({"text": text, "visible": visible(text), "layer": layer})
        begin += len(entry.tokens)
    return rejects


def _round_times(entry: Round, cost: DraftCost) -> tuple[float, float]:
    """Time of drafting and of verifying, in steps of plain decoding."""
    if entry.prefill:
        return 0.0, 0.0
    drafting = cost.drafting(entry.origins, entry.heads)
    return round(drafting, 4), round(cost.steps(entry.origins, entry.heads) - drafting, 4)


# --- on a terminal

_SUPERSCRIPT = str.maketrans(
    "0123456789abcdefghijklmnoprstuvwxyz", "⁰¹²³⁴⁵⁶⁷⁸⁹ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ"
)


def show(trace: LayerTrace, console: Console, *, rejected: bool = False) -> None:
    """Print the view; lines are wrapped on a terminal only.

    `rejected`: also show the drafts that were not kept, and where rounds end.
    """
    plain = not console.is_terminal or console.no_color or console.color_system is None
    marks = _Marks(trace, plain=plain, ascii_only=console.options.ascii_only, rejected=rejected)
    line = gain(trace).headline
    headline = Text(line.replace("×", "x") if marks.ascii_only else line, style="bold")
    summary = Text(trace.summary, style="dim")
    parts = Group(marks.answer(), Text(), headline, *marks.legend(), summary)
    console.print(parts, soft_wrap=not console.is_terminal, highlight=False)


class _Marks:
    def __init__(self, trace: LayerTrace, *, plain: bool, ascii_only: bool, rejected: bool) -> None:
        """`plain`: no colours and no strikethrough. `ascii_only`: no characters beyond ASCII."""
        self._trace, self._has_rejected, self.ascii_only = trace, rejected, ascii_only
        self._has_marks = plain or rejected
        self._brackets = ("[-", "-]") if plain else ("", "")
        self._separator = "|" if ascii_only else "·"

    def answer(self) -> Text:
        """All rounds: kept drafts, then rejected drafts, then verification's own token.

        An end token is shown only with rejected drafts.
        """
        trace, text = self._trace, Text()
        texts = iter([place.text for place in trace.places] if self._has_rejected else trace.answer)
        for entry, drafts in zip(trace.rounds, trace.draft_texts, strict=True):
            if self._has_rejected and not entry.prefill:
                text.append(self._separator, style="dim")
            for giver in entry.givers[: entry.accepted]:
                self._append_token(text, next(texts), giver)
            for _, branch in rejections(entry) if self._has_rejected else ():
                self._append_rejected(text, "".join(drafts[index] for index in branch))
            for giver in entry.givers[entry.accepted :]:
                self._append_token(text, next(texts), giver)
        return text

    def legend(self) -> Iterator[Text]:
        kept = Counter(givers(self._trace))
        sources = [Giver(*origin) for entry in self._trace.rounds for origin in entry.origins]
        for giver, count in layers.source_counts(sources):
            line = Text()
            self._append_token(line, giver.words, giver)
            yield line.append(f": {kept[giver]} of {count} drafts kept")
        if self._has_rejected:
            line = Text()
            self._append_rejected(line, "token")
            line.append(": a draft that was rejected   ")
            yield line.append(self._separator, style="dim").append(": the next round")

    def _append_token(self, line: Text, text: str, giver: Giver) -> None:
        """Append a token with its colour and mark; line feeds come after the mark."""
        output = self._printable(text, "⏎" if self._has_marks else "")
        body = output.rstrip("\n")
        layer = str(giver.layer) if giver.source == EXIT else ""
        mark = (SOURCES[giver.source].mark or layer) if self._has_marks and body else ""
        if mark:
            mark = f"^{mark}" if self.ascii_only else mark.translate(_SUPERSCRIPT)
        colour = giver.colour(self._trace.info.num_layers)
        line.append(body + mark, f"bold {colour}" if colour else "default")
        line.append(output[len(body) :])

    def _append_rejected(self, line: Text, text: str) -> None:
        opening, closing = self._brackets
        output = self._printable(text, "⏎").replace("\n", "")
        body = output.lstrip(" ")  # a struck space would join two words
        line.append(" " * (len(output) - len(body)))
        line.append(f"{opening}{body}{closing}", style=f"strike {pages.REJECTED}")

    def _printable(self, text: str, ends: str) -> str:
        output = readable(text, ends)
        return output.encode("ascii", "backslashreplace").decode() if self.ascii_only else output
