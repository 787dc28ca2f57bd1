"""`selfspec demo`: one prompt, Hugging Face's own generate and ours beside it, and what it gains.

One after the other, because two at once would share the processor. Both write greedily, from the
same weights, and are warmed up before their clocks start.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli import common
from selfspec.cli.flags import merged, with_flags
from selfspec.cli.settings import GENERATION, LOADING, SPECULATION, sorted_settings
from selfspec.config import DEFAULT_MAX_NEW_TOKENS
from selfspec.decoding.sources import MODEL

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec.api.speculator import Speculator
    from selfspec.api.stream import Generation
    from selfspec.cli.panels import Show

FLAGS = (*LOADING, *SPECULATION, *(flag for flag in GENERATION if flag.name == "max_new_tokens"))

PROMPT = "Explain in a few sentences how a rainbow forms."

THEIRS, OURS = "Hugging Face generate", "selfspec"

_WARM_UP_TOKENS = 4

_NEAR = 0.05
"""A difference in speed that one run does not tell from none."""


@with_flags(*FLAGS)
def demo(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The question.")] = PROMPT,
    *,
    config: common.ConfigFile = None,
    flags: dict[str, Any],
) -> None:
    """Compare with Hugging Face's generate. Both answer one prompt, one after the other.

    In float32 unless --dtype says otherwise: with fewer digits, near ties between tokens may fall
    otherwise in two programs. Exit code 1 if the texts differ.
    """
    asked = sorted_settings(merged(config, flags, FLAGS))
    text = common.read_prompt(prompt, None, raw=False)
    count = asked.generation.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    speculator = common.load(replace(asked, loading={"dtype": "float32", **asked.loading}))
    found = compared(speculator, text, count)
    common.emit(found.verdict() + "\n")
    if found.differs_at is not None:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Compared:
    """Two answers to one prompt."""

    theirs: list[int]
    theirs_s: float
    ours: Generation
    ours_s: float

    @property
    def differs_at(self) -> int | None:
        """The first place, from 1, at which the tokens are others; None: they are the same."""
        theirs, ours = self.theirs, self.ours.token_ids
        if theirs == ours:
            return None
        pairs = enumerate(zip(theirs, ours, strict=False), start=1)
        both = min(len(theirs), len(ours))
        return next((place for place, (one, other) in pairs if one != other), both + 1)

    def verdict(self) -> str:
        """In two lines; speeds were measured, so nothing is guessed."""
        return f"{self.ours.stats.summary()}\n{self._sameness()}; {self._gain()}"

    def _sameness(self) -> str:
        if self.differs_at is None:
            return "same text: yes"
        return (
            f"same text: no, token {self.differs_at} is another one (a near tie may be rounded "
            "otherwise; --dtype float64 tells)"
        )

    def _gain(self) -> str:
        gain = self.theirs_s / self.ours_s
        if gain > 1 + _NEAR:
            return f"{gain:.1f}× faster"
        return "about as fast" if gain > 1 - _NEAR else f"{1 / gain:.1f}× slower"


def compared(speculator: Speculator, text: str, count: int) -> Compared:
    """Both answers, shown while they are written."""
    from selfspec.api.text import encode
    from selfspec.cli.panels import panels
    from selfspec.model.quantised import keep_numbers

    keep_numbers(speculator.model)  # theirs runs the model itself, at its best
    ids = encode(speculator.tokenizer, text).to(speculator.backbone.device)
    for write in (theirs, ours):
        write(speculator, ids, _WARM_UP_TOKENS, lambda *_: None)
    with panels((THEIRS, OURS), speculator.backbone.num_layers) as panel:
        with panel(THEIRS) as show:
            start = time.perf_counter()
            their_tokens = theirs(speculator, ids, count, show)
            theirs_s = time.perf_counter() - start
        with panel(OURS) as show:
            start = time.perf_counter()
            answer = ours(speculator, ids, count, show)
            ours_s = time.perf_counter() - start
    return Compared(their_tokens, theirs_s, answer, ours_s)


def theirs(speculator: Speculator, ids: Tensor, count: int, show: Show) -> list[int]:
    """By transformers' own generate."""
    from transformers import TextStreamer

    from selfspec.eval.methods import METHODS

    class Shown(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002
            show(text, MODEL, 0)

    tokenizer: Any = speculator.tokenizer
    streamer = Shown(tokenizer, skip_prompt=True, skip_special_tokens=True)
    return METHODS["hugging-face"].decode(speculator, ids, count, {}, streamer).token_ids


def ours(speculator: Speculator, ids: Tensor, count: int, show: Show) -> Generation:
    """By our runtime."""
    stream = speculator.stream(ids, max_new_tokens=count, do_sample=False)
    for piece in stream:
        show(piece, *stream.giver)
    return stream.result
