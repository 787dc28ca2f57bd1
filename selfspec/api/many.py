"""Answers to many prompts, each as soon as it is complete: prompts in, generations out.

Prompts are read as places become free, so there may be any number of them. Called by the facade.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice, repeat

from selfspec.api.stream import Call, Generation, Stream
from selfspec.api.text import Prompt
from selfspec.config import GenerateOptions
from selfspec.decoding.engine import Engine, Running
from selfspec.errors import InvalidOption, InvalidPrompt, SelfspecError
from selfspec.typed import shown

Answered = tuple[int, Generation | SelfspecError]
"""The number of a prompt, from 0, and its answer, or why there is none."""


def each(
    engine: Engine,
    sort: Callable[[Prompt, GenerateOptions], Call],
    prompts: Iterable[Prompt],
    options: GenerateOptions,
    *,
    ahead: int,
    seeds: Iterable[int] | None = None,
) -> Iterator[Answered]:
    """Answers in the order in which they are complete.

    `sort`: what a call asks for. `ahead`: prompts that are in the engine at once. `seeds`: of the
    prompts; None: the seed of the options, plus the number of the prompt. What is wrong with one
    prompt, or raised while it is answered, is its answer.
    """
    if options.get("streamer") is not None or (options.get("num_return_sequences") or 1) != 1:
        raise InvalidOption("a streamer or num_return_sequences for many prompts. Leave it out")
    if seeds is None and (first := options.get("seed")) is not None:
        seeds = count(first)
    left = zip(count(), prompts, repeat(None) if seeds is None else seeds, strict=False)
    running: dict[Running, tuple[int, Stream]] = {}
    try:
        while True:
            for number, prompt, seed in islice(left, ahead - len(running)):
                own = options if seed is None else options | {"seed": seed % 2**64}
                try:
                    call = sort(prompt, own)
                    added = engine.add(call.request.only(), call.speculation)
                except SelfspecError as error:
                    yield number, error
                    continue
                running[added] = number, call.stream(added)
            if not running:
                return
            for one in engine.step():
                if one.ended and one in running:
                    number, stream = running.pop(one)
                    yield number, _drained(stream)
    finally:
        for one in running:
            one.close()


def check_many(prompts: object, seeds: object) -> None:
    """Raise for one prompt in place of many, and for seeds that are no list."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise InvalidPrompt(
            f"the prompts are {shown(prompts)}, expected a list of prompts. For one use generate"
        )
    if seeds is not None and (isinstance(seeds, str) or not isinstance(seeds, Iterable)):
        raise InvalidOption(
            f"seeds are {shown(seeds)}, expected one for each prompt. For the first give seed"
        )


def _drained(stream: Stream) -> Generation | SelfspecError:
    try:
        return stream.drain()
    except SelfspecError as error:
        return error
