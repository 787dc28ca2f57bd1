"""The setting that suits this machine: a record and measured costs in, options and a forecast out.

Thousands of exit settings are replayed on the recorded prompts, the best of them also behind text
already seen. What is promised is held out: each part of the prompts is judged by the setting that
suits the other parts best. Called by `selfspec tune`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from selfspec.config import SpeculationOptions
from selfspec.costs import Costs
from selfspec.errors import InvalidOption
from selfspec.eval import forecast, replay
from selfspec.eval.record import NONE, Record
from selfspec.eval.totals import plain_seconds, predicted_seconds, totals
from selfspec.eval.trace_options import TuneOptions

_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
"""Candidate thresholds let this share of the places exit, of those above the recorded floor."""

_BEHIND_SEEN_TEXT = 4
"""Exit settings that are tried behind text already seen. That drafter learns from round to round,
so its rounds are followed one by one, which takes a thousand times as long."""

_PERCENTILE = 5.0
"""Of the prompts' own speed-ups: what `latency` looks at."""

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was chosen, and what to expect of it over plain decoding behind the prompt's pass."""

    options: dict[str, Any]
    """SpeculationOptions; `speculate: False` alone where plain decoding is as fast."""
    objective: str
    speed_up: float
    """Ratio of total seconds, on prompts that had no part in the choice."""
    percentile_5: float
    """Of the same prompts' own speed-ups."""
    worst: float
    speed_up_in_sample: float
    """Of the chosen setting on the prompts that it was chosen on: too good to promise."""
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


Show = Callable[[int, int, str], None]
"""Called with settings done, settings in all, and words."""


def tune(record: Record, costs: Costs, options: TuneOptions, show: Show) -> Tuned:
    """Choose among all `candidates`. Raises InvalidOption for fewer than two questions."""
    found = _replayed(record, costs, candidates(record, options.max_exit_layers), show)
    plain = plain_seconds(record, costs)
    best = score(found.seconds, plain, options.objective).argsort()[::-1][:_BEHIND_SEEN_TEXT]
    found = found.joined(_behind_seen_text(record, costs, [found.settings[one] for one in best]))
    longer = plain > 0.0  # an answer of one token is the prompt's pass alone
    parts = folds(record, options.folds)[longer]
    seconds, plain = found.seconds[:, longer], plain[longer]
    held_out = cross_validated(seconds, plain, parts, options.objective)
    chosen = int(score(seconds, plain, options.objective).argmax())
    speculates = float(score(held_out[None], plain, options.objective)[0]) > 1.0
    own = plain / held_out
    return Tuned(
        options=_runtime(found.settings[chosen]) if speculates else {"speculate": False},
        objective=options.objective,
        speed_up=float(plain.sum() / held_out.sum()),
        percentile_5=float(np.percentile(own, _PERCENTILE)),
        worst=float(own.min()),
        speed_up_in_sample=float(plain.sum() / seconds[chosen].sum()),
        compression_rate=float(found.tokens[chosen] / found.rounds[chosen]),
        settings=len(found.settings),
        prompts=len(plain),
    )


def candidates(record: Record, max_exit_layers: int) -> list[SpeculationOptions]:
    """All settings to be replayed; neighbours differ in W_max."""
    info = record.info
    found = []
    for alpha, count in itertools.product(
        range(len(info.anneal_strengths)), range(1, max_exit_layers + 1)
    ):
        for layers in itertools.combinations(info.exit_layers, count):
            choices = [thresholds(record, layer, alpha) for layer in layers]
            found += [
                SpeculationOptions(
                    exit_layers=layers,
                    exit_threshold=taus,
                    anneal_strength=info.anneal_strengths[alpha],
                    max_draft_tokens=width,
                )
                for taus in itertools.product(*choices)
                for width in range(1, info.max_draft_tokens + 1)
            ]
    return found


def thresholds(record: Record, layer: int, alpha: int) -> list[float]:
    """Thresholds of an exit layer worth trying: quantiles of its confidence at the places."""
    column = record.info.exit_layers.index(layer)
    roots = record.roots[record.roots != NONE]
    confidence = record.confidence[roots, column, alpha]
    floor = record.info.min_threshold
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


def cross_validated(
    seconds: Seconds, plain: Seconds, parts: npt.NDArray[np.int64], objective: str
) -> Seconds:
    """Seconds of each prompt, [P], under the setting that is best on the other parts."""
    held_out = np.empty_like(plain)
    for part in np.unique(parts):
        inside = parts == part
        best = score(seconds[:, ~inside], plain[~inside], objective).argmax()
        held_out[inside] = seconds[best, inside]
    return held_out


@dataclass(frozen=True, kw_only=True, eq=False)
class _Forecasts:
    """What S settings should do on P prompts."""

    settings: Sequence[SpeculationOptions]
    seconds: Seconds
    """[S, P]"""
    tokens: Seconds
    """[S], over all prompts, as are the `rounds`."""
    rounds: Seconds

    def joined(self, other: _Forecasts) -> _Forecasts:
        """Both, these first."""
        return _Forecasts(
            settings=[*self.settings, *other.settings],
            seconds=np.concatenate([self.seconds, other.seconds]),
            tokens=np.concatenate([self.tokens, other.tokens]),
            rounds=np.concatenate([self.rounds, other.rounds]),
        )


def _replayed(
    record: Record, costs: Costs, settings: Sequence[SpeculationOptions], show: Show
) -> _Forecasts:
    """Of exit settings, thousands at a time."""
    seconds, tokens, rounds = [], [], []
    done = 0
    for chunk in _chunks(settings):
        show(done, len(settings), "")
        found = totals(record, chunk)
        seconds.append(predicted_seconds(found, costs))
        tokens.append(found.tokens.sum(-1))
        rounds.append(found.rounds.sum(-1))
        done += len(chunk)
    show(done, len(settings), "")
    return _Forecasts(
        settings=settings,
        seconds=np.concatenate(seconds),
        tokens=np.concatenate(tokens),
        rounds=np.concatenate(rounds),
    )


def _behind_seen_text(
    record: Record, costs: Costs, exits: Sequence[SpeculationOptions]
) -> _Forecasts:
    """Of text already seen alone, and of each exit setting where that promises less."""
    width = min(SpeculationOptions().ngram_draft_tokens, record.info.max_draft_tokens)
    alone = SpeculationOptions(drafter="ngram", ngram_draft_tokens=width)
    settings = [alone, *(replace(alone, **_exits(s), drafter="ngram+exit") for s in exits)]
    seconds, tokens, rounds = [], [], []
    for setting in settings:
        layers = setting.exit_layers or ()
        every = [replay.rounds(record, prompt, setting) for prompt in range(len(record.prompts))]
        seconds.append([forecast.seconds(entries, layers, costs) for entries in every])
        behind = [entry for entries in every for entry in entries if not entry.prefill]
        tokens.append(sum(len(entry.tokens) for entry in behind))
        rounds.append(len(behind))
    return _Forecasts(
        settings=settings,
        seconds=np.array(seconds),
        tokens=np.array(tokens, np.float64),
        rounds=np.array(rounds, np.float64),
    )


def _chunks(settings: Sequence[SpeculationOptions]) -> Iterator[Sequence[SpeculationOptions]]:
    """Pieces that keep the counts of all prompts small."""
    size = 1024
    for start in range(0, len(settings), size):
        yield settings[start : start + size]


def _runtime(setting: SpeculationOptions) -> dict[str, Any]:
    """What `selfspec.tuned` keeps, ready for JSON."""
    options: dict[str, Any] = {"speculate": True, "drafter": setting.drafter}
    if setting.uses("ngram"):
        options["ngram_draft_tokens"] = setting.ngram_draft_tokens
    if setting.uses("exit"):
        options |= {key: _plain(value) for key, value in _exits(setting).items()}
    return options


def _exits(setting: SpeculationOptions) -> dict[str, Any]:
    """What an exit drafter goes by."""
    return {
        "exit_layers": setting.exit_layers,
        "exit_threshold": setting.thresholds,
        "anneal_strength": setting.anneal_strength,
        "max_draft_tokens": setting.max_draft_tokens,
    }


def _plain(value: Any) -> Any:
    """A tuple as the list that JSON makes of it."""
    return list(value) if isinstance(value, tuple) else value
