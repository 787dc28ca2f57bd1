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
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from selfspec.api.speculator import Speculator
from selfspec.api.stream import Generation
from selfspec.api.text import Prompt, encode
from selfspec.decoding.stats import GenerationStats
from selfspec.errors import InvalidOption, SelfspecError, first_line
from selfspec.eval.methods import Contender, Written, endless, unchanged
from selfspec.eval.options import BenchOptions
from selfspec.eval.results import (
    Answer,
    Quality,
    Question,
    Run,
    Show,
    append,
    drop_unfinished,
    edit_distance,
    first_divergence,
    load_suite,
    read,
    repeated_share,
    spread,
)
from selfspec.eval.verify import log_likelihood

_WARM_UP, _WARM_UP_TOKENS = "Count to ten.", 16


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
        show: Show,
    ) -> list[Answer]:
        """Answers to all questions; each goes to the file `path` at once.

        What the file holds already is not measured again.
        """
        drop_unfinished(path)
        found = {answer.key: answer for answer in read(path)}
        if any(not self._finished(question, found) for question in questions):
            for contender in contenders:  # kernels and caches are warm then
                self.run(contender, self._ids(_WARM_UP), [0] * _WARM_UP_TOKENS)
        for number, question in enumerate(questions):
            show(number, len(questions), question.id)
            if not self._finished(question, found):
                for answer in self.answers(question, contenders, found):
                    append(path, answer)
                    found[answer.key] = answer
        show(len(questions), len(questions), "")
        return list(found.values())

    def answers(
        self,
        question: Question,
        contenders: Sequence[Contender],
        known: Mapping[tuple[str, int, int], Answer],
    ) -> Iterator[Answer]:
        """All turns, each as often as asked for, that are not `known`."""
        messages: list[dict[str, str]] = []
        most = self.options.max_new_tokens
        for turn, text in enumerate(question.turns, start=1):
            messages.append({"role": "user", "content": text})
            answer = Answer(id=question.id, task=question.task, turn=turn, repeat=1)
            try:
                ids = self._ids(messages if turn > 1 else text)
                plain = self.speculator.generate(
                    ids, max_new_tokens=most, do_sample=False, speculate=False
                )
            except SelfspecError as error:
                yield replace(answer, error=first_line(error))
                return
            answer = replace(
                answer,
                prompt_tokens=ids.shape[1],
                new_tokens=len(plain.token_ids),
                repeated=repeated_share(plain.token_ids),
                text=plain.text,
            )
            for repeat in range(1, self.options.repeats + 1):
                answer = replace(answer, repeat=repeat)
                if answer.key in known:
                    continue
                order = list(contenders)
                random.Random(f"{self.options.seed} {answer.key}").shuffle(order)
                runs = {entry.label: self.run(entry, ids, plain.token_ids) for entry in order}
                if repeat == 1:
                    last = turn == len(question.turns)
                    reference = question.reference if last else None
                    runs |= self._judged(runs, contenders, ids, plain, reference)
                yield replace(answer, runs=runs)
            messages.append({"role": "assistant", "content": plain.text})

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
            counts=_counts(written.stats) if written.stats else {},
        )

    def _judged(
        self,
        runs: Mapping[str, Run],
        contenders: Sequence[Contender],
        ids: Tensor,
        plain: Generation,
        reference: str | None,
    ) -> dict[str, Run]:
        """Those runs whose text is to be looked at, with its quality; untimed.

        Timed answers are as long as plain decoding's: what is judged is written once more, up to
        its own end.
        """
        speculator, found, usual = self.speculator, {}, plain.token_ids
        tokenizer: Any = speculator.tokenizer
        # cached: plain decoding's answer is asked about once for each method
        nats = cache(lambda tokens: log_likelihood(speculator.model, ids, tokens))
        for entry in contenders:
            run = runs[entry.label]
            if run.error is not None or not (entry.own_text or self.options.quality):
                continue
            try:
                with unchanged(speculator):
                    tokens = entry.decode(speculator, ids, self.options.max_new_tokens).token_ids
                looked = Quality(
                    text=tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer else "",
                    plain_text=plain.text,
                    reference=reference,
                    tokens=len(tokens),
                    plain_tokens=len(usual),
                    first_divergence=first_divergence(tokens, usual),
                    edit_distance=edit_distance(tokens, usual),
                    log_likelihood=nats(tuple(tokens)),
                    plain_log_likelihood=nats(tuple(usual)),
                )
                found[entry.label] = replace(run, quality=looked)
            except Exception as error:  # noqa: BLE001  # as in `run`
                found[entry.label] = _failed(error)
        return found

    def _ids(self, prompt: Prompt) -> Tensor:
        return encode(self.speculator.tokenizer, prompt).to(self.speculator.backbone.device)

    def _finished(self, question: Question, found: Mapping[tuple[str, int, int], Answer]) -> bool:
        """Whether all turns are there, or the reason why they are not."""
        turns = range(1, len(question.turns) + 1)
        repeats = range(1, self.options.repeats + 1)
        keys = [(question.id, *pair) for pair in itertools.product(turns, repeats)]
        known = [found[key] for key in keys if key in found]
        return len(known) == len(keys) or any(answer.error for answer in known)


def _failed(error: Exception) -> Run:
    return Run(error=f"{type(error).__name__}: {first_line(error)}")


# --- choosing settings and questions --------------------------------------------------------------


def chosen(
    grid: Mapping[str, Sequence[Contender]], tuning: Sequence[Answer]
) -> dict[str, Contender]:
    """Each method's setting that failed least, then took least time; else its first.

    Labelled as the method.
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


# --- what is heard of a method --------------------------------------------------------------------


class Arrivals(BaseStreamer):
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
    """Tokens by the pass that gave them, with the seconds since the pass before."""
    if written.rounds:  # our runtime hands a round's tokens over one by one
        sizes = [len(entry.tokens) for entry in written.rounds]
        ends = itertools.accumulate(sizes)
        heard = [(size, heard[end - 1][1]) for size, end in zip(sizes, ends, strict=True)]
    times = [start, *(when for _, when in heard)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return [(count, gap) for (count, _), gap in zip(heard, gaps, strict=True)]


def _counts(stats: GenerationStats) -> dict[str, dict[str, float]]:
    kinds = [f"{word}_by_{kind}" for kind in ("layer", "index") for word in ("drafted", "accepted")]
    found = {name: getattr(stats, name) for name in ("seconds", *kinds)}
    return {name: {str(key): n for key, n in count.items()} for name, count in found.items()}
