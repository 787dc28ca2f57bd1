"""Methods side by side on the same prompts: a speculator and questions in, answers out.

Per prompt and turn all methods run in random order, so that machine drift hits them alike, and
write the same number of tokens: as many as plain decoding writes before its end token. A second
turn's prompt holds plain decoding's first answer, for every method. Called by `selfspec bench`.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from selfspec.errors import InvalidOption, SelfspecError
from selfspec.eval.answers import Answer, Run, append, drop_unfinished, read
from selfspec.eval.methods import Contender, Written, endless
from selfspec.eval.metrics import repeated_share
from selfspec.eval.options import BenchOptions
from selfspec.eval.suites import Question, load_suite, spread
from selfspec.generate import Speculator
from selfspec.hub import first_line
from selfspec.stats import GenerationStats
from selfspec.stream import Generation
from selfspec.text import Prompt, encode

Advance = Callable[[int, int, str], None]
"""Questions done, of how many, and words."""

_WARM_UP = "Count to ten."
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all measurements of a run share."""

    speculator: Speculator
    options: BenchOptions
    now: Callable[[], float] = time.perf_counter
    """Seconds; tests inject their own."""

    def measure(
        self,
        questions: Sequence[Question],
        contenders: Sequence[Contender],
        path: Path,
        advance: Advance,
    ) -> list[Answer]:
        """Answers to all questions; each goes to the file `path` at once.

        What the file holds already is not measured again.
        """
        drop_unfinished(path)
        found = {answer.key: answer for answer in read(path)}
        if any(not self._finished(question, found) for question in questions):
            self._warm_up(contenders)
        for number, question in enumerate(questions):
            advance(number, len(questions), question.id)
            if not self._finished(question, found):
                for answer in self.answers(question, contenders, found):
                    append(path, answer)
                    found[answer.key] = answer
        advance(len(questions), len(questions), "")
        return list(found.values())

    def answers(
        self,
        question: Question,
        contenders: Sequence[Contender],
        known: Mapping[tuple[str, int, int], Answer],
    ) -> Iterator[Answer]:
        """All turns, each as often as asked for, that are not `known`."""
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(question.turns, start=1):
            messages.append({"role": "user", "content": text})
            empty = Answer(id=question.id, task=question.task, turn=turn, repeat=1)
            prompt: Prompt = messages if turn > 1 else text
            try:
                ids = encode(self.speculator.tokenizer, prompt).to(self.speculator.backbone.device)
                plain = self._plain(ids)
            except SelfspecError as error:
                yield replace(empty, error=first_line(error))
                return
            for repeat in range(1, self.options.repeats + 1):
                answer = replace(
                    empty,
                    repeat=repeat,
                    prompt_tokens=ids.shape[1],
                    new_tokens=len(plain.token_ids),
                    repeated=repeated_share(plain.token_ids),
                    text=plain.text,
                )
                if answer.key not in known:
                    yield replace(answer, runs=self._runs(answer, ids, plain, contenders))
            messages.append({"role": "assistant", "content": plain.text})

    def _runs(
        self, answer: Answer, ids: Tensor, plain: Generation, contenders: Sequence[Contender]
    ) -> dict[str, Run]:
        """Every contender once, in an order that depends on the seed and the answer alone."""
        order = list(contenders)
        random.Random(f"{self.options.seed} {answer.key}").shuffle(order)
        return {entry.label: self.run(entry, ids, plain.token_ids) for entry in order}

    def run(self, contender: Contender, ids: Tensor, expected: list[int]) -> Run:
        """One answer behind ids [1, P], as long as the `expected` tokens; or why there is none."""
        streamer = _Arrivals(self.now)
        try:
            with endless(self.speculator):
                start = self.now()
                written = contender.decode(self.speculator, ids, len(expected), streamer)
                seconds = self.now() - start
        except Exception as error:  # noqa: BLE001  # a peer may fail in any way: the others go on
            return Run(error=f"{type(error).__name__}: {first_line(error)}")
        if len(written.token_ids) != len(expected):
            return Run(error=f"wrote {len(written.token_ids)} of {len(expected)} tokens")
        return Run(
            seconds=seconds,
            arrivals=arrivals(streamer.heard, start, written),
            equal=written.token_ids == expected,
            counts=counts(written.stats) if written.stats else {},
        )

    def _plain(self, ids: Tensor) -> Generation:
        """What all methods should write: up to the end token, or to the limit."""
        return self.speculator.generate(
            ids, max_new_tokens=self.options.max_new_tokens, do_sample=False, speculate=False
        )

    def _warm_up(self, contenders: Sequence[Contender]) -> None:
        """Kernels and caches warm, for each method; nothing of it is kept."""
        ids = encode(self.speculator.tokenizer, _WARM_UP).to(self.speculator.backbone.device)
        expected = [0] * _WARM_UP_TOKENS
        for contender in contenders:
            self.run(contender, ids, expected)

    def _finished(self, question: Question, found: Mapping[tuple[str, int, int], Answer]) -> bool:
        """Whether all turns are there, or the reason why they are not."""
        turns = range(1, len(question.turns) + 1)
        repeats = range(1, self.options.repeats + 1)
        keys = [(question.id, *pair) for pair in itertools.product(turns, repeats)]
        known = [found[key] for key in keys if key in found]
        return len(known) == len(keys) or any(answer.error for answer in known)


class _Arrivals(BaseStreamer):
    """When tokens came."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.heard: list[tuple[int, float]] = []
        """Tokens that came together, and when."""
        self._now = now
        self._prompt_came = False

    def put(self, value: Tensor) -> None:
        """Hugging Face gives the prompt first, then tokens."""
        if self._prompt_came:
            self.heard.append((value.numel(), self._now()))
        self._prompt_came = True

    def end(self) -> None:
        """Nothing is left to do."""


def arrivals(
    heard: Sequence[tuple[int, float]], start: float, written: Written
) -> list[tuple[int, float]]:
    """Tokens by the pass that gave them, with the seconds since the pass before.

    Our runtime hands a round's tokens over one by one, so they are put together again.
    """
    if written.rounds:
        ends = itertools.accumulate(len(entry.tokens) for entry in written.rounds)
        sizes = [len(entry.tokens) for entry in written.rounds]
        heard = [(size, heard[end - 1][1]) for size, end in zip(sizes, ends, strict=True)]
    times = [start, *(when for _, when in heard)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return [(count, gap) for (count, _), gap in zip(heard, gaps, strict=True)]


def counts(stats: GenerationStats) -> dict[str, dict[str, float]]:
    """What acceptance and the parts of a round are computed from."""
    return {
        "seconds": dict(stats.seconds),
        **{
            name: {str(key): count for key, count in getattr(stats, name).items()}
            for name in (
                "drafted_by_layer",
                "accepted_by_layer",
                "drafted_by_index",
                "accepted_by_index",
            )
        },
    }


def chosen(
    grid: Mapping[str, Sequence[Contender]], tuning: Sequence[Answer]
) -> dict[str, Contender]:
    """Of each method the setting that failed least, then took least time; labelled as the method.

    The first of the grid where nothing was measured.
    """

    def cost(contender: Contender) -> tuple[int, float]:
        runs = [answer.runs[contender.label] for answer in tuning if answer.runs]
        return sum(run.error is not None for run in runs), sum(run.seconds for run in runs)

    return {
        name: replace(min(entries, key=cost) if len(entries) > 1 else entries[0], label=name)
        for name, entries in grid.items()
    }


def parted(
    suite: Sequence[Question], options: BenchOptions, *, tuning: bool
) -> tuple[list[Question], list[Question]]:
    """Questions to report and, where settings must be chosen, others to choose them on.

    Raises InvalidOption if nothing would be left to report.
    """
    others: list[Question] = []
    if tuning:
        pool = suite if options.tune_on is None else load_suite(options.tune_on)
        others = spread(pool, options.tune_questions)
    taken = {question.turns for question in others}
    rest = [question for question in suite if question.turns not in taken]
    if not rest:
        raise InvalidOption(
            f"all {len(others)} questions would be used to choose settings. Give --tune-on, or "
            "fewer --tune-questions"
        )
    return spread(rest, options.limit), others
