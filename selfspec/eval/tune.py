"""The setting that suits this machine: a record and measured costs in, options and a forecast out.

A cost model screens thousands of exit settings by how often each exits at the recorded places.
The best are replayed by the runtime's own classes, alone and behind prompt lookup; without
heads, drafts from prompt lookup of several lengths. What is promised is held out: each part of
the prompts is judged by the setting that the same search finds on the other parts. Called by
`selfspec tune`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from selfspec.config import SpeculationOptions
from selfspec.decoding.costs import Exits, MeasuredCosts, expected
from selfspec.decoding.stats import Round
from selfspec.errors import InvalidOption
from selfspec.eval.record import NONE, Record, replay
from selfspec.eval.results import Show
from selfspec.options import Costs, Exit, Ngram, as_text, settings_text

_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
"""Candidate thresholds let this share of the places exit, of those above the recorded floor."""

_SHORTLIST = 50
"""Exit settings that are replayed: each alone and behind prompt lookup, at two costs of a row."""

_MOST_LAYERS = 2
"""Exit layers used together."""

_FOLDS = 4
"""Parts of the prompts; each is judged by the setting that suits the others best."""

_LONGEST_PATH = 4
"""Most levels of a tree; more gained < 0.1 % on 36 Spec-Bench questions, whatever a row cost."""

_NGRAMS, _LENGTHS = (2, 3, 4, 6), (2, 4)
"""Sizes of n-grams and lengths of drafts to be tried without heads; the longest is the built-in."""

_PERCENTILE = 5.0
"""The percentile of the prompts' own speed-ups that `latency` looks at."""

Seconds = npt.NDArray[np.float64]
Prompts = npt.NDArray[np.bool_]
"""Some of them, [P]."""
_Ints = npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was chosen, and what to expect of it over plain decoding behind the prompt's pass."""

    options: dict[str, Any]
    """SpeculationOptions; `speculate: False` alone where plain decoding is as fast."""
    objective: str
    speed_up: float
    """Ratio of total seconds, on prompts that had no part in the choice."""
    percentile_5: float
    """5th percentile of the same prompts' own speed-ups."""
    worst: float
    speed_up_in_sample: float
    """Speed-up of the chosen setting on the prompts it was chosen on: too good to promise."""
    compression_rate: float
    """Tokens per verification, in sample."""
    settings: int
    prompts: int

    @property
    def speculates(self) -> bool:
        """Whether drafting pays."""
        return bool(self.options.get("speculate"))

    def sentence(self) -> str:
        """What to expect, for people."""
        if not self.speculates:
            return (
                f"plain decoding is faster here: the best of {self.settings:,} settings gives "
                f"{self.speed_up:.2f} x, so drafting is switched off"
            )
        return (
            f"expect {self.speed_up:.2f} x plain decoding after the prompt "
            f"({self.percentile_5:.2f} x or more for 95 % of the prompts)"
        )


def tune(record: Record, costs: MeasuredCosts, show: Show, objective: str = "speed") -> Tuned:
    """The best of all that is `screened`. Raises InvalidOption for fewer than two questions.

    `objective`: speed is about the time over all prompts, latency about the prompts' own.
    """
    parts = folds(record, _FOLDS)
    search = _Search(record, costs, objective, show)
    plain = search.plain
    held_out = cross_validated(lambda some: search.seconds(search.best(some)), parts[search.longer])
    setting = search.best(np.ones_like(plain, np.bool_))
    kept = [len(one.tokens) for each in search.rounds(setting) for one in each if not one.prefill]
    own = plain / held_out
    speculates = float(score(held_out[None], plain, objective)[0]) > 1.0
    drafters = [part for part in (setting.ngram, setting.exit) if setting.uses(part.kind)]
    runtime = {
        "drafter": "+".join(as_text(part, full=True) for part in drafters),
        "costs": settings_text(setting.costs, full=True),
    }  # in full, over whatever the heads say
    return Tuned(
        options={"speculate": speculates, **(runtime if speculates else {})},
        objective=objective,
        speed_up=float(plain.sum() / held_out.sum()),
        percentile_5=float(np.percentile(own, _PERCENTILE)),
        worst=float(own.min()),
        speed_up_in_sample=float(plain.sum() / search.seconds(setting).sum()),
        compression_rate=sum(kept) / len(kept),
        settings=len(search.screened) + len(search.followed),
        prompts=len(plain),
    )


def thresholds(record: Record, layer: int, alpha: float) -> list[float]:
    """Thresholds of an exit layer worth trying: quantiles of its confidence at the places."""
    roots = record.roots[record.roots != NONE]
    column, strength = record.exit_layers.index(layer), record.anneal_strengths.index(alpha)
    confidence, floor = record.confidence[roots, column, strength], record.min_threshold
    sure = np.sort(confidence[confidence >= floor])[::-1]
    places = [int(share * (len(sure) - 1)) for share in _SHARES] if len(sure) else []
    rounded = (math.floor(float(sure[place]) * 1e3) / 1e3 for place in places)
    return sorted({floor, *(max(floor, tau) for tau in rounded)})


def folds(record: Record, count: int) -> npt.NDArray[np.int64]:
    """A part for each prompt, [P]; all turns of a question are in one, tasks are in all.

    Raises InvalidOption for fewer than two questions.
    """
    names = list(dict.fromkeys(prompt.id for prompt in record.prompts))
    require_two(len(names))
    parts = min(count, len(names))
    return np.array([names.index(prompt.id) % parts for prompt in record.prompts])


def require_two(questions: int) -> None:
    """Raise InvalidOption unless there are questions to choose by and others to judge by."""
    if questions < 2:
        raise InvalidOption("one question cannot be held out. Take at least two: --limit 2")


def score(seconds: Seconds, plain: Seconds, objective: str) -> Seconds:
    """[S, P] and [P] -> [S]: the speed-up that `objective` is about."""
    if objective == "speed":
        return np.asarray(plain.sum() / seconds.sum(-1))
    return np.asarray(np.percentile(plain / seconds, _PERCENTILE, axis=-1))


def cross_validated(best: Callable[[Prompts], Seconds], parts: npt.NDArray[np.int64]) -> Seconds:
    """Seconds of each prompt, [P], under what is best (seconds [P]) on those of other `parts`."""
    held_out = np.empty(len(parts))
    for part in np.unique(parts):
        here = parts == part
        held_out[here] = best(~here)[here]
    return held_out


class _Search:
    """For the setting that suits some prompts best; what was followed for it is kept."""

    def __init__(self, record: Record, costs: MeasuredCosts, objective: str, show: Show) -> None:
        self.screened, seconds = screened(record, costs, show)
        self.followed: dict[SpeculationOptions, Seconds] = {}
        self.longer = [n for n, prompt in enumerate(record.prompts) if len(prompt.answer) > 1]
        """Prompts: an answer of one token is the prompt's pass alone."""
        self.plain = plain_seconds(record, costs)[self.longer]
        self._record, self._costs, self._objective = record, costs, objective
        self._show = show
        self._seconds = seconds[:, self.longer]

    def best(self, prompts: Prompts) -> SpeculationOptions:
        """The few best without the never-slower rule are followed with it."""
        first = self._score(self._seconds, prompts).argsort()[::-1][:_SHORTLIST]
        exits = [self.screened[one] for one in first]
        settings = _to_follow(self._record, exits, self._costs)
        seconds = np.stack([self.seconds(setting) for setting in settings])
        return settings[int(self._score(seconds, prompts).argmax())]

    def rounds(self, setting: SpeculationOptions) -> list[list[Round]]:
        return [replay(self._record, number, setting) for number in self.longer]

    def seconds(self, setting: SpeculationOptions) -> Seconds:
        """[P]."""
        if setting not in self.followed:
            every = map(self._costs.seconds_of, self.rounds(setting))
            self.followed[setting] = np.fromiter(every, np.float64)
            count = len(self.screened)
            self._show(count, count, f"{len(self.followed)} followed round by round")
        return self.followed[setting]

    def _score(self, seconds: Seconds, prompts: Prompts) -> Seconds:
        return score(seconds[:, prompts], self.plain[prompts], self._objective)


def plain_seconds(record: Record, costs: MeasuredCosts) -> Seconds:
    """Wall time of plain decoding behind the prompt's pass, [P]."""
    return np.array([(len(entry.answer) - 1) * costs.plain_step() for entry in record.prompts])


def screened(
    record: Record, costs: MeasuredCosts, show: Show
) -> tuple[list[SpeculationOptions], Seconds]:
    """All exit settings without the never-slower rule, their seconds by the cost model, [S, P]."""
    plain, widths = plain_seconds(record, costs), range(1, record.max_draft_tokens + 1)
    families = [
        (layers, alpha, [*itertools.product(*(thresholds(record, one, alpha) for one in layers))])
        for alpha in record.anneal_strengths
        for count in range(1, _MOST_LAYERS + 1)
        for layers in itertools.combinations(record.exit_layers, count)
    ]
    total = len(widths) * sum(len(taus) for *_, taus in families)
    settings, seconds = list[SpeculationOptions](), [np.empty((0, len(plain)))]
    for layers, alpha, taus in families:
        show(len(settings), total, "")
        first, later = _exits(record, layers, alpha, np.array(taus))
        gains = [expected(costs, layers, first, later, width)[1] for width in widths]
        seconds.append((plain / np.stack(gains, axis=1)).reshape(-1, len(plain)))
        settings += [
            SpeculationOptions(
                exit=Exit(layers=layers, threshold=one, anneal_strength=alpha, max_tokens=width),
                never_slower=False,
            )
            for one, width in itertools.product(taus, widths)
        ]
    show(total, total, "")
    return settings, np.concatenate(seconds)


def _exits(
    record: Record, layers: Sequence[int], alpha: float, taus: Seconds
) -> tuple[Exits, Exits]:
    """At a round's first place and behind a draft that was right; each [C, P], for taus [C, E]."""
    columns = [record.exit_layers.index(layer) for layer in layers]
    confidence = record.confidence[:, columns, record.anneal_strengths.index(alpha)]
    tokens, children = record.tokens[:, columns, 0], record.children[:, columns, 0]
    asked = np.flatnonzero(record.roots != NONE)  # [T]
    ends = np.cumsum([len(entry.answer) for entry in record.prompts])
    prompts = np.eye(len(ends))[np.searchsorted(ends, asked, side="right")]  # [T, P]

    def looked(nodes: _Ints, truth: _Ints) -> tuple[Exits, _Ints]:
        """At nodes [C, T], where NONE does not count; also the nodes behind drafts that stay."""
        there = (nodes != NONE)[..., None]
        sure = there & (confidence[nodes] >= taus[:, None])  # [C, T, E]
        leaves = sure & (sure.cumsum(-1) == 1)
        stays = leaves & (tokens[nodes] == truth[..., None])
        counts = np.maximum(there[..., 0] @ prompts, 1.0)
        at = tuple((leaves[..., column] @ prompts) / counts for column in range(len(columns)))
        behind = np.where(stays, children[nodes], NONE).max(-1)
        return Exits(at, (stays.any(-1) @ prompts) / counts), behind

    roots = np.broadcast_to(record.roots[asked], (len(taus), len(asked)))
    first, behind = looked(roots, record.answers[asked + 1])
    later, _ = looked(behind, record.answers.take(asked + 2, mode="clip"))
    return first, later


def _to_follow(
    record: Record, exits: Sequence[SpeculationOptions], costs: MeasuredCosts
) -> list[SpeculationOptions]:
    """Prompt lookup alone, each exit setting alone and behind it, and trees around it.

    With what rows cost here, and with the built-in reserve, which is safer where guesses get worse.
    """
    built_in, most = SpeculationOptions(), record.max_draft_tokens
    ngram = Ngram(max_tokens=min(built_in.ngram.max_tokens, most))
    # to what a measurement can tell
    head, *here = (round(share, 3) for share in (costs.head_cost, *costs.row_costs))
    seen = replace(built_in, drafter="ngram", ngram=ngram, costs=Costs(head=head))
    kinds = [seen]
    if not record.exit_layers:
        lengths = {min(length, ngram.max_tokens) for length in (*_LENGTHS, ngram.max_tokens)}
        sizes = itertools.product(_NGRAMS, sorted(lengths))
        kinds = [replace(seen, ngram=Ngram(size=n, max_tokens=length)) for n, length in sizes]
    ways = itertools.product(("exit", "ngram+exit"), (setting.exit for setting in exits))
    trees = (("ngram+exit", tree) for tree in _trees(record, len(costs.layers)))
    kinds += [replace(seen, exit=one, drafter=drafter) for drafter, one in (*ways, *trees)]
    two = [replace(seen.costs, row=row) for row in dict.fromkeys((tuple(here), built_in.costs.row))]
    return [replace(kind, costs=one) for kind in kinds for one in two]


def _trees(record: Record, rows: int) -> list[Exit]:
    """Trees of exit layer 0, where it was recorded; costs say how wide they are, up to `rows`."""
    if record.guesses == 1:
        return []
    return [
        Exit(
            layers=(0,),
            threshold=record.min_threshold,
            anneal_strength=alpha,
            max_tokens=min(_LONGEST_PATH, record.max_draft_tokens),
            guesses=record.guesses,
            max_rows=min(Exit().max_rows, rows),
        )
        for alpha in record.anneal_strengths[:2]
    ]
