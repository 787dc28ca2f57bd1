"""Settings of drafters: exit heads, text already seen, a second model.

Below each field: symbol, range and meaning; behind a blank line the reason of its default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from selfspec.options.parts import LAYER, SHARE, Amount, Part, Width, between


@dataclass(frozen=True, kw_only=True)
class Exit(Part):
    """Exit heads on shallow layers."""

    kind: ClassVar[str] = "exit"

    layers: Annotated[tuple[int, ...] | None, LAYER] = None
    """Exit layers in use, counted from 1. None: all that the heads were fitted for."""

    threshold: Annotated[float | tuple[float, ...], SHARE] = 0.9
    """tau, in (0, 1]: a token exits where its annealed confidence reaches it. One value for all
    exit layers, or one per layer.

    High by default: a wrong draft costs work.
    """

    anneal_strength: Amount = 0.2
    """alpha, at least 0, in `T_l = 1 + alpha (1 - l / L)`; 0 turns annealing off.

    The paper calls for "a small" one without printing it (section 3.3).
    """

    max_depth: Annotated[int | None, LAYER] = None
    """D_max, an exit layer: no draft runs deeper. None: the deepest exit layer in use."""

    max_tokens: Width = 6
    """W_max, at least 1: drafts per round, or where a controller starts; of a tree the longest
    path."""

    guesses: Annotated[int, between(1, 32, request=4)] = 1
    """Tokens that a head may propose for one place, at least 1; more than one make a tree.

    Each is proposed where its probability pays for its row (`prices`). Heads on the embedding, exit
    layer 0, grow whole trees; beside a draft of deeper layers stand single tokens.
    """

    max_rows: Annotated[int, between(1, 64, request=32)] = 16
    """Rows of a tree's verification at most, with the newest token's."""

    def __post_init__(self) -> None:
        """Keep one threshold as a number: it is for all layers. Raises InvalidOption."""
        super().__post_init__()
        if isinstance(self.threshold, tuple) and len(self.threshold) == 1:
            object.__setattr__(self, "threshold", self.threshold[0])

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Tau as a tuple: of length 1 (all layers) or one per exit layer."""
        return self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)


@dataclass(frozen=True, kw_only=True)
class Ngram(Part):
    """Text already seen."""

    kind: ClassVar[str] = "ngram"

    size: Annotated[int, between(1, 16, request=8)] = 4
    """Longest n-gram that is looked up, 1 to 16; the longest that is found decides.

    Each token of the text is kept in as many n-grams: 3 KB at 16."""

    max_tokens: Width = 7
    """W_max of these drafts, at least 1.

    Larger than that of exit heads, because they cost no time to make; with the newest token they
    fill a pinned pass.
    """


@dataclass(frozen=True, kw_only=True)
class DraftModel(Part):
    """A second, smaller model."""

    kind: ClassVar[str] = "draft-model"

    max_tokens: Width = 6
    """W_max, at least 1: drafts per round, or where a controller starts."""


@dataclass(frozen=True, kw_only=True)
class NoDrafts(Part):
    """Nothing is drafted."""

    kind: ClassVar[str] = "none"


DRAFTERS: dict[str, type[Exit | Ngram | DraftModel | NoDrafts]] = {
    one.kind: one for one in (Exit, Ngram, DraftModel, NoDrafts)
}
"""By name."""

TOGETHER = ("exit", "ngram", "ngram+exit", "draft-model", "ngram+draft-model", "none")
"""Drafters in use: alone, or text already seen in front of another."""

FITTED = "ngram+exit"
"""What drafts where heads were fitted: text already seen costs nothing to look up beside them."""
