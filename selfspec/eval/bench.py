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
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from selfspec.api.speculator import Speculator
from selfspec.api.stream import Generation
from selfspec.api.text import Prompt, encode
from selfspec.errors import InvalidOption, SelfspecError, first_line
from selfspec.eval.answers import Answer, Run, append, drop_unfinished, read
from selfspec.eval.arrivals import Arrivals, arrivals, counts
from selfspec.eval.contenders import Contender
from selfspec.eval.memory import Memory, peak_of
from selfspec.eval.methods import endless
from selfspec.eval.metrics import repeated_share
from selfspec.eval.options import BenchOptions
from selfspec.eval.suites import Question, load_suite, spread
from selfspec.eval.texts import Texts

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
                if answer.key in known:
                    continue
                start = self.now()
                runs = self._runs(answer, ids, plain, contenders)
                outside = self.now() - start - sum(run.seconds for run in runs.values())
                if repeat == 1:
                    last = turn == len(question.turns)
                    reference = question.reference if last else None
                    runs |= self._judged(runs, contenders, ids, plain, reference)
                yield replace(answer, runs=runs, outside_s=outside)
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
        streamer = Arrivals(self.now)
        try:
            with endless(self.speculator):
                start = self.now()
                written = contender.decode(self.speculator, ids, len(expected), streamer)
                seconds = self.now() - start
        except Exception as error:  # noqa: BLE001  # a peer may fail in any way: the others go on
            return _failed(error)
        if len(written.token_ids) != len(expected):
            return Run(error=f"wrote {len(written.token_ids)} of {len(expected)} tokens")
        return Run(
            seconds=seconds,
            arrivals=arrivals(streamer.heard, start, written),
            equal=written.token_ids == expected,
            counts=counts(written.stats) if written.stats else {},
        )

    def _judged(
        self,
        runs: Mapping[str, Run],
        contenders: Sequence[Contender],
        ids: Tensor,
        plain: Generation,
        reference: str | None,
    ) -> dict[str, Run]:
        """Those runs whose text is to be looked at, with its quality. Nothing here is timed."""
        texts = Texts(self.speculator, ids, self.options.max_new_tokens, plain, reference)
        found = {}
        for entry in contenders:
            run = runs[entry.label]
            if run.error is None and (entry.own_text or self.options.quality):
                try:
                    found[entry.label] = replace(run, quality=texts.quality_of(entry))
                except Exception as error:  # noqa: BLE001  # as in `run`
                    found[entry.label] = _failed(error)
        return found

    def memory(
        self,
        questions: Sequence[Question],
        answers: Sequence[Answer],
        contenders: Sequence[Contender],
    ) -> dict[str, Any] | None:
        """What each method needs at its peak for the longest first prompt; None if nobody knows.

        A run of its own, not timed: memory that others freed is given back first, which would cost
        a timed run page faults.
        """
        first = [answer for answer in answers if answer.turn == 1 and answer.runs]
        if not first:
            return None
        longest = max(first, key=lambda answer: answer.prompt_tokens)
        (text,) = (question.turns[0] for question in questions if question.id == longest.id)
        device = self.speculator.backbone.device
        ids = encode(self.speculator.tokenizer, text).to(device)
        found = {entry.label: self._peak(entry, ids, longest.new_tokens) for entry in contenders}
        measured = {label: memory for label, memory in found.items() if memory is not None}
        if not measured:
            return None
        return {
            "prompt_tokens": longest.prompt_tokens,
            "new_tokens": longest.new_tokens,
            "device": device.type,
            "before_bytes": max(memory.before for memory in measured.values()),
            "growth_bytes": {label: memory.growth for label, memory in measured.items()},
        }

    def _peak(self, contender: Contender, ids: Tensor, count: int) -> Memory | None:
        """None also where the method fails."""
        runs: list[Run] = []
        work = partial(self.run, contender, ids, [0] * count)
        memory = peak_of(lambda: runs.append(work()), ids.device)
        return None if any(run.error for run in runs) else memory

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


def _failed(error: Exception) -> Run:
    return Run(error=f"{type(error).__name__}: {first_line(error)}")


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
