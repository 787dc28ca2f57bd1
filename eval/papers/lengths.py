"""Draft lengths under every controller: a text comes in, the rounds that each would make go out.

Greedy decoding with a lossless rule writes one text whatever is drafted, and what a draft model
writes behind a place of it depends on that place alone. So a text is drafted once, on demand, and
any number of controllers is replayed on it: exactly their rounds, without running the model.
GammaTune's experiment (its table 2) needs 60 of them. Called by eval/papers/gammatune.py.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.papers.prices import RoundCounts
from selfspec.config import SpeculationOptions
from selfspec.decoding.controllers import make_controller
from selfspec.decoding.drafters import DraftCache
from selfspec.decoding.drafters.base import DraftWriter, PacedDrafter
from selfspec.decoding.scores import Choice
from selfspec.decoding.work import alone
from selfspec.heads.confidence import top_probability

CONTROLLERS = ("fixed", "heuristic", "threshold", "gammatune", "gammatune-plus")
"""Those of GammaTune's table 2, its own last."""

INITIAL_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24)
"""GammaTune, section 5."""


class Setting(NamedTuple):
    """A controller and where it starts."""

    controller: str
    initial: int
    changed: tuple[str, float] | None = None
    """An option that is not at its default, and its value."""

    @property
    def name(self) -> str:
        """Of the controller, with what was changed."""
        if self.changed is None:
            return self.controller
        option, value = self.changed
        return f"{self.controller}, {option} {value:g}"

    @property
    def label(self) -> str:
        """Name and initial length."""
        return f"{self.name}/{self.initial}"

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of `generate`."""
        return {
            "drafter": f"draft-model:max_tokens={self.initial}",
            "never_slower": False,
            "controller": {self.controller: dict([self.changed] if self.changed else [])},
        }


SETTINGS = tuple(Setting(name, initial) for name in CONTROLLERS for initial in INITIAL_LENGTHS)

_UNPRINTED: dict[str, dict[str, tuple[float, ...]]] = {
    "gammatune": {
        "rate": (0.1, 0.5, 0.8),
        "step": (0, 1, 4),
        "longest": (5, 20),
    },
    "gammatune-plus": {"rate": (0.1, 0.8), "threshold": (0.2, 0.6)},
}
"""Constants that GammaTune does not print, and values beside our choice."""

VARIANTS = tuple(
    Setting(controller, initial, (option, value))
    for controller, options in _UNPRINTED.items()
    for option, values in options.items()
    for value in values
    for initial in INITIAL_LENGTHS
)


class Chains:
    """What a draft model writes behind each place of a text, greedily, each token run once."""

    def __init__(self, cache: DraftCache, prompt: Tensor, text: Sequence[int]) -> None:
        """`prompt` [1, P]; `text`: the tokens behind it, as plain decoding writes them."""
        self.text = list(text)
        self._cache = cache
        self._ids = prompt[0].tolist() + self.text
        self._start = prompt.shape[1]
        self._drafted: dict[int, list[tuple[int, float]]] = defaultdict(list)

    @torch.inference_mode()
    def token(self, place: int, index: int) -> tuple[int, float]:
        """The draft's token `index`, from 0, behind `place` tokens, and its top probability."""
        known = self._drafted[place]
        while len(known) <= index:
            ids = self._ids[: self._start + place] + [token for token, _ in known]
            logits = alone(self._cache.run(self._cache.rewind(ids)))
            known.append((int(logits.argmax(-1)), float(top_probability(logits))))
        return known[index]


def replayed(chains: Chains, options: SpeculationOptions) -> RoundCounts:
    """The rounds that the draft model and the controller of `options` would make.

    Exactly those of a run where no end token stops a draft. The controller may look at nothing but
    the top probability.
    """
    controller = make_controller(options, options.draft_model.max_tokens)
    drafter = PacedDrafter(controller)
    by_drafts: Counter[int] = Counter()
    text, place, accepted = chains.text, 1, 0  # the prompt's own pass gives the first token
    while place < len(text):
        writer = DraftWriter(drafter, len(text) - place - 1, source="draft-model")
        while writer.room:
            token, confidence = chains.token(place, len(writer.draft.tokens))
            writer.add(Choice(token), confidence)
        draft = writer.draft.tokens
        kept = _shared(draft, text[place:])
        drafter.learn(writer.draft, range(kept))
        by_drafts[len(draft)] += 1
        accepted += kept
        place += kept + 1
    return RoundCounts(
        tokens=len(text) - 1, accepted=accepted, by_drafts=dict(sorted(by_drafts.items()))
    )


@dataclass(frozen=True, kw_only=True)
class Gain:
    """One controller over all initial lengths, as in GammaTune's table 2."""

    controller: str
    """With what was changed."""
    mean: float
    """Its throughput over that of fixed lengths, both means over the initial lengths."""
    spread: float
    """Standard deviation of that over the initial lengths."""
    best: float
    """Throughput from its best initial length over that of the best fixed length."""
    worst: float
    """The same from its worst initial length: at least 0.95 is wanted of GammaTune."""
    worst_initial: int


def gains(seconds: Mapping[Setting, float]) -> list[Gain]:
    """By controller, from seconds for the same tokens under every setting; fixed ones too."""
    speeds: dict[str, dict[int, float]] = defaultdict(dict)
    for setting, value in seconds.items():
        speeds[setting.name][setting.initial] = 1.0 / value
    usual = statistics.fmean(speeds["fixed"].values())
    hindsight = max(speeds["fixed"].values())
    found = []
    for name, by_initial in speeds.items():
        over = [speed / usual for speed in by_initial.values()]
        slowest = min(by_initial, key=lambda initial: by_initial[initial])
        found.append(
            Gain(
                controller=name,
                mean=statistics.fmean(over),
                spread=statistics.pstdev(over),
                best=max(by_initial.values()) / hindsight,
                worst=by_initial[slowest] / hindsight,
                worst_initial=slowest,
            )
        )
    return found


def _shared(draft: Sequence[int], text: Sequence[int]) -> int:
    """Leading tokens of a draft that are the text's."""
    pairs = zip(draft, text, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(text)))
