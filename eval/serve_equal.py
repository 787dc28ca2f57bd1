"""Over HTTP, in company, with and without drafts: is each text that of `generate` alone?

    python -m eval.serve_equal --questions question_dev.jsonl --output eval/results/serve-equal

60 requests to `selfspec serve`, 16 at once, streamed and whole, a third sampled with seeds; between
them come requests whose clients go away. Texts, ends, and each token with the bits of its logarithm
are compared with those that `Speculator.generate` gives in this process. Writes `summary.json`;
exit code 1 where anything differs.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import typer

import selfspec
from eval.called import command
from eval.served import Heard, Server, ask, clients, ours, question, served
from selfspec.api.speculator import Speculator
from selfspec.cli import progress
from selfspec.cli.env import machine
from selfspec.eval.results import SIX_TASKS, load_suite
from selfspec.files import write

SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}


class Alone(NamedTuple):
    """What a request is without a server."""

    text: str
    finish: str
    prompt_tokens: int
    tokens: int
    likely: list[tuple[str, float]]
    """Each token, and the logarithm of its probability."""


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    questions: Annotated[str, typer.Option(help="A suite's name, or a JSONL file.")] = SIX_TASKS,
    model: str | None = None,
    heads: str | None = None,
    dtype: str | None = None,
    requests: Annotated[int, typer.Option(min=1)] = 60,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients at once.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Of an answer at most.")] = 64,
) -> None:
    """Compare, then write."""
    prompts = [one.turns[0] for one in load_suite(questions, limit=requests)]
    given = {"model": model, "heads": heads, "dtype": dtype}
    flags = {name: value for name, value in given.items() if value is not None}
    speculator = selfspec.load(**flags)
    alone = []
    with progress.bar("alone", "answers") as show:
        for number, prompt in enumerate(prompts):
            show(number, len(prompts))
            alone.append(without_server(speculator, number, prompt, tokens))
        show(len(prompts), len(prompts))
    asked = ours(*[part for name, value in flags.items() for part in (f"--{name}", value)])
    found = []
    with served(asked) as server:
        for speculation in (True, False):
            work = compared(server, prompts, alone, tokens, concurrency, speculation=speculation)
            found.append(asyncio.run(work))
            print(found[-1], flush=True)
    summary = {
        "command": command(),
        "machine": machine(),
        "requests": len(prompts),
        "concurrency": concurrency,
        "found": found,
    }
    output.mkdir(parents=True, exist_ok=True)
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    if any(entry["differing"] for entry in found):
        raise typer.Exit(1)


def without_server(speculator: Speculator, number: int, prompt: str, tokens: int) -> Alone:
    """Without drafts either."""
    options: Any = {"do_sample": False}
    if sampled(number):
        options = {"do_sample": True, "top_k": 0, "min_p": 0.0, "seed": number, **SAMPLED}
    options |= {"max_new_tokens": tokens, "speculate": False, "logprobs": 0}
    found = speculator.generate(prompt, **options)
    words: Any = speculator.tokenizer
    return Alone(
        found.text,
        "stop" if found.stop_reason == "eos" else "length",
        found.stats.prompt_tokens,
        len(found.token_ids),
        [(words.decode([one.token]), one.logprob) for one in found.logprobs or ()],
    )


def sampled(number: int) -> bool:
    """Whether a request draws."""
    return number % 3 == 0


def body(number: int, prompt: str, tokens: int, *, speculation: bool) -> dict[str, Any]:
    """A request; every second one streams."""
    more: dict[str, Any] = {"speculation": speculation, "logprobs": True}
    if number % 2:
        more |= {"stream": True, "stream_options": {"include_usage": True}}
    if sampled(number):
        more |= {"seed": number, **SAMPLED}
    return question(prompt, tokens, **more)


async def compared(
    server: Server,
    prompts: Sequence[str],
    alone: Sequence[Alone],
    tokens: int,
    concurrency: int,
    *,
    speculation: bool,
) -> dict[str, Any]:
    """How many there were, and which differ."""
    dice = random.Random(concurrency)
    order = list(range(len(prompts)))
    dice.shuffle(order)
    left, heard, gone = iter(order), dict[int, Heard](), list[float]()

    async def work() -> None:
        for number in left:
            asked = body(number, prompts[number], tokens, speculation=speculation)
            if dice.random() < 0.25:
                gone.append(dice.uniform(0.05, 1.0))
                await left_alone(client, asked, gone[-1])
            heard[number] = await ask(client, asked)

    async with clients(server) as client:
        await asyncio.gather(*(work() for _ in range(concurrency)))
    differing = {
        number: [*alone[number], "over HTTP:", *_said(heard[number])]
        for number in sorted(heard)
        if tuple(alone[number]) != _said(heard[number])
    }
    drafts = [one.usage.get("speculation", {}) for one in heard.values()]
    return {
        "speculation": speculation,
        "answers": len(heard),
        "sampled": sum(map(sampled, heard)),
        "streams": sum(number % 2 for number in heard),
        "cancelled": len(gone),
        "tokens": sum(one.tokens for one in heard.values()),
        "drafted": sum(one.get("num_draft_tokens", 0) for one in drafts),
        "accepted": sum(one.get("num_accepted_tokens", 0) for one in drafts),
        "differing": differing,
    }


async def left_alone(client: httpx.AsyncClient, asked: Mapping[str, Any], seconds: float) -> None:
    """A request whose client goes away after so many seconds, unless it was answered."""
    try:
        await asyncio.wait_for(ask(client, asked), seconds)
    except asyncio.TimeoutError:
        return


def _said(heard: Heard) -> tuple[Any, ...]:
    counts = heard.usage.get("prompt_tokens"), heard.usage.get("completion_tokens")
    text = heard.text if heard.error is None else heard.error
    return (text, heard.finish, *counts, heard.likely)


if __name__ == "__main__":
    typer.run(main)
