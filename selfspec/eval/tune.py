"""Finds the settings that suit this machine: takes a model and prompts, returns options and gains.

All candidates answer some of the prompts, in turns with plain decoding; the fastest third answers
more of them, and so on (successive halving, Jamieson and Talwalkar 2016). The reported gains are
measured on prompts that had no part in the choice. No setting changes an answer, so time alone
decides. Called by `selfspec tune` and `adapt`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from selfspec.api.speculator import Speculator
from selfspec.api.text import Prompt
from selfspec.config import SpeculationOptions
from selfspec.decoding.measure import quick_costs
from selfspec.errors import InvalidOption
from selfspec.eval.results import Show
from selfspec.options import Exit, Ngram, as_text, settings_text

NEW_TOKENS = 64  # most tokens of an answer
ANSWERS = 16  # most time for a prompt, in plain answers: some settings do not pay
_STAGES = 3  # each chooses on a third of the prompts, and drops two thirds of the settings
_THRESHOLDS = (0.4, 0.8)  # tried at each exit layer alone, in addition to the heads' own
_LENGTHS = (2, 4, 8)  # most draft tokens of a round
_NGRAMS = (2, 3, 4, 6)  # sizes of n-grams, tried without heads
_PERCENTILE = 5.0  # the percentile of the prompts' own speed-ups that `latency` maximises
Options = dict[str, Any]  # keywords of `generate`

PLAIN: Options = {"speculate": False}

Seconds = npt.NDArray[np.float64]


class Timed(NamedTuple):
    """A timed answer; all values count from after the prompt's pass."""

    seconds: float
    tokens: int
    verifications: int


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The chosen options, and their gain over plain decoding after the prompt's pass."""

    options: Options  # `speculate: False` alone if plain decoding is as fast
    objective: str
    speed_up: float  # ratio of total seconds, on prompts that had no part in the choice
    percentile_5: float  # 5th percentile of the same prompts' own speed-ups
    worst: float
    compression_rate: float  # tokens per verification, on the same prompts
    settings: int
    prompts: int

    def sentence(self) -> str:
        if not self.options["speculate"]:
            gain = f"{self.speed_up:.2f} x"
            if self.objective == "latency":  # over all prompts, drafts may save time
                gain = f"{self.percentile_5:.2f} x or more for 95 % of the prompts"
            return (
                f"drafts do not pay here: the best of {self.settings:,} settings gives {gain}, so "
                "drafting is switched off"
            )
        return (
            f"expect {self.speed_up:.2f} x plain decoding after the prompt "
            f"({self.percentile_5:.2f} x or more for 95 % of the prompts)"
        )


def tune(
    speculator: Speculator,
    prompts: Sequence[Prompt],
    show: Show,
    objective: str = "speed",
    new_tokens: int = NEW_TOKENS,
) -> Tuned:
    """Find the fastest candidate: `speed` over all prompts' time, `latency` over their speed-ups.

    Raises InvalidOption unless two answers have a second token.
    """

    def ask(number: int, options: Options) -> Timed:
        keywords = {"max_new_tokens": new_tokens, "do_sample": False, **options}
        stats = speculator.generate(prompts[number], **keywords).stats
        return Timed(stats.decode_s, stats.accepted + stats.bonus, stats.rounds)

    return race([*candidates(speculator)], len(prompts), ask, show, objective)


def race(
    settings: Sequence[Options],
    prompts: int,
    ask: Callable[[int, Options], Timed],
    show: Show,
    objective: str = "speed",
) -> Tuned:
    """`tune` on numbered prompts: every second one is held out, the others choose."""
    show(0, prompts, "without drafts")
    # leaves out answers of one token, which are the prompt's pass alone; also warms up
    timed = [number for number in range(prompts) if ask(number, PLAIN).verifications]
    if len(timed) < 2:
        raise InvalidOption("too few answers have a second token, so nothing is timed. Give others")
    choosers, judges = timed[::2], timed[1::2]
    parts = [part.tolist() for part in np.array_split(choosers, min(_STAGES, len(choosers)))]
    survivors, times = list(settings), dict[int, list[float]]()

    def answer_all(number: int, ways: Sequence[Options]) -> list[Timed]:
        """Answer in all ways, in a random order, so that none gains from the machine's drift."""
        order = random.Random(number).sample(range(len(ways)), len(ways))
        by_way = {way: ask(number, ways[way]) for way in order}
        # scaled to plain's length: after a near tie, a text may have another length
        length, answers = by_way[0].tokens, [by_way[way] for way in range(len(ways))]
        return [one._replace(seconds=one.seconds * length / max(1, one.tokens)) for one in answers]

    for stage, part in enumerate(parts):
        for number in part:
            show(len(times), len(timed), f"{len(survivors)} settings")
            times[number] = [answer.seconds for answer in answer_all(number, [PLAIN, *survivors])]
        plain, *others = np.array([times[number] for number in times]).T
        keep = 1 if stage == len(parts) - 1 else max(1, len(survivors) // 3)
        best = (-score(np.array(others), plain, objective)).argsort(kind="stable")[:keep]
        survivors = [survivors[index] for index in best]
        times = {number: [row[0], *(row[1 + i] for i in best)] for number, row in times.items()}
    held_out = []
    for done, number in enumerate(judges, start=len(times)):
        show(done, len(timed), "held out")
        held_out.append(answer_all(number, [PLAIN, *survivors]))
    show(len(timed), len(timed), "")
    plain, chosen = np.array([[answer.seconds for answer in pair] for pair in held_out]).T
    pays = float(score(chosen[None], plain, objective)[0]) > 1.0
    verifications = sum(answer.verifications for _, answer in held_out)
    return Tuned(
        options={"speculate": True, **survivors[0]} if pays else PLAIN,
        objective=objective,
        speed_up=float(plain.sum() / chosen.sum()),
        percentile_5=float(np.percentile(plain / chosen, _PERCENTILE)),
        worst=float((plain / chosen).min()),
        compression_rate=sum(answer.tokens for _, answer in held_out) / verifications,
        settings=len(settings),
        prompts=len(timed),
    )


def score(seconds: Seconds, plain: Seconds, objective: str) -> Seconds:
    """Seconds [S, P] and [P] -> [S]: the speed-up of each setting by `objective`."""
    if objective == "speed":
        return np.asarray(plain.sum() / seconds.sum(-1))
    return np.asarray(np.percentile(plain / seconds, _PERCENTILE, axis=-1))


# --- candidates


def candidates(speculator: Speculator) -> Iterator[Options]:
    """Prompt lookup, exit heads, and both, each with the costs of rows and heads measured here.

    Each also with the default cost of a row, with which fewer unsure drafts are made.
    """
    built_in = SpeculationOptions()
    measured = quick_costs(speculator.backbone, speculator.heads)
    pair = (measured, replace(measured, row=built_in.costs.row))
    lookups, exits = [built_in.ngram], _exits(speculator)
    if not exits:
        lengths = (built_in.ngram.max_tokens, *_LENGTHS)
        sizes = itertools.product(_NGRAMS, dict.fromkeys(lengths))
        lookups = [Ngram(size=size, max_tokens=length) for size, length in sizes]
    alone = [(part,) for part in (*lookups, *exits)]
    for parts, costs in itertools.product([*alone, *((lookups[0], part) for part in exits)], pair):
        # in full, to override the heads' defaults
        drafter = "+".join(as_text(part, full=True) for part in parts)
        yield {"drafter": drafter, "costs": settings_text(costs, full=True)}


def _exits(speculator: Speculator) -> list[Exit]:
    """The heads' own setting, with other lengths and as chains; and each layer above 0 alone."""
    heads, setting = speculator.heads, speculator.options.exit
    if heads is None:
        return []
    settings = [
        replace(setting, max_tokens=length, guesses=guesses)
        for guesses in (setting.guesses, 1)
        for length in (setting.max_tokens, *_LENGTHS)
    ]
    settings += [
        replace(setting, layers=(layer,), threshold=tau, max_depth=None, guesses=1)
        for layer, tau in itertools.product(heads.config.exit_layers, _THRESHOLDS)
        if layer > 0
    ]
    return [*dict.fromkeys(settings)]
