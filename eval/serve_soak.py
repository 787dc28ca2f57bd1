"""`selfspec serve` for a long time under mixed load: does its memory stay?

    python -m eval.serve_soak --minutes 20 --concurrency 8

Clients stream and wait, draw, go away in mid-answer, send what is wrong; texts are short and long.
Prints each minute what the server holds: memory, open files, threads. Exit code 1 if memory rises
over the second half by more than `--most` megabytes an hour, if files or threads did not return,
or if any answer had a status of 500 or more.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import httpx
import psutil
import typer

from eval.served import Server, ask, clients, ours, question, served
from selfspec.eval.results import SIX_TASKS, load_suite

_WRONG: tuple[dict[str, Any], ...] = (
    {},
    {"messages": []},
    {"messages": [{"role": "user", "content": "a"}], "temperature": 9},
    {"messages": [{"role": "user", "content": "a " * 50_000}]},
)

_REST_S = 8.0
"""After the last request: longer than connections are kept for a next one."""


class Held(NamedTuple):
    """What the server's process holds."""

    minutes: float
    rss_mb: float
    files: int
    threads: int


@dataclass
class Soak:
    """One run."""

    process: psutil.Process
    started: float = field(default_factory=time.monotonic)
    held: list[Held] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def minutes(self) -> float:
        """Since it began."""
        return (time.monotonic() - self.started) / 60

    def look(self) -> Held:
        """What is held now."""
        with self.process.oneshot():
            rss = self.process.memory_info().rss / 1e6
            return Held(self.minutes, rss, self.process.num_fds(), self.process.num_threads())


def main(
    minutes: Annotated[float, typer.Option(min=0.1)] = 20.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients at once.")] = 8,
    questions: Annotated[str, typer.Option(help="A suite's name, or a JSONL file.")] = SIX_TASKS,
    most: Annotated[float, typer.Option(help="Megabytes an hour that memory may rise.")] = 60.0,
    every: Annotated[float, typer.Option(min=1, help="Seconds between two looks.")] = 60.0,
    kv_memory: Annotated[str, typer.Option(help="Of the server; it is full soon.")] = "300MB",
    args: Annotated[str, typer.Option(help="More flags for the server.")] = "",
) -> None:
    """Load, look, judge."""
    prompts = [one.turns[0] for one in load_suite(questions)]
    with served(ours("--kv-memory", kv_memory, *args.split())) as server:
        soak = Soak(psutil.Process(server.process.pid))
        before, after = asyncio.run(run(server, soak, prompts, minutes, concurrency, every))
    slope = per_hour(soak.held)
    print(f"requests: {dict(sorted(soak.counts.items()))}")
    print(
        f"before and after: files {before.files} {after.files}, threads {before.threads} "
        f"{after.threads}"
    )
    print(f"memory over the second half: {slope:+.1f} MB an hour, allowed {most:+.1f}")
    faults = [name for name in soak.counts if name >= "status 500" or name.startswith("failed")]
    leaks = after.files > before.files or after.threads > before.threads
    if slope > most or faults or leaks:
        raise typer.Exit(1)


async def run(
    server: Server,
    soak: Soak,
    prompts: list[str],
    minutes: float,
    concurrency: int,
    every: float,
) -> tuple[Held, Held]:
    """What was held before it, once all parts have run, and behind it."""
    for number in range(concurrency):
        async with clients(server) as client:
            await client.post("/v1/completions", json={"prompt": f"{number}", "max_tokens": 4})
    await asyncio.sleep(_REST_S)
    before, looking = soak.look(), asyncio.ensure_future(looks(soak, every))
    async with clients(server) as client:
        numbers = itertools.count()
        works = [work(client, soak, prompts, minutes, numbers) for _ in range(concurrency)]
        await asyncio.gather(*works)
    looking.cancel()
    await asyncio.sleep(_REST_S)
    return before, soak.look()


async def looks(soak: Soak, every: float) -> None:
    """Prints what is held."""
    while True:
        held = soak.look()
        soak.held.append(held)
        print(
            f"{held.minutes:5.1f} min  {held.rss_mb:8.1f} MB  {held.files:4d} files  "
            f"{held.threads:3d} threads  {soak.counts.total()} requests",
            flush=True,
        )
        await asyncio.sleep(every)


async def work(
    client: httpx.AsyncClient,
    soak: Soak,
    prompts: list[str],
    minutes: float,
    numbers: itertools.count[int],
) -> None:
    """One client after another, until time is over."""
    while soak.minutes < minutes:
        dice = random.Random(next(numbers))
        try:
            soak.counts[await one(client, prompts, dice)] += 1
        except httpx.HTTPError as error:
            soak.counts[f"failed: {type(error).__name__}"] += 1


async def one(client: httpx.AsyncClient, prompts: list[str], dice: random.Random) -> str:
    """A request of some kind; what came of it."""
    kind = dice.choice(["greedy", "sampled", "long", "several", "gone", "gone", "wrong"])
    if kind == "wrong":
        return f"status {(await ask(client, dice.choice(_WRONG))).status}"
    body = question(dice.choice(prompts), dice.choice([4, 16, 64]))
    body["stream"] = dice.random() < 0.5
    if kind == "sampled":
        body |= {"temperature": 0.9, "seed": dice.randrange(2**32), "stop": ["\n\n"]}
    elif kind == "long":
        body |= {"max_tokens": 300}
    elif kind == "several":
        body |= {"stream": True, "n": 3, "temperature": 0.7}
    elif kind == "gone":
        body |= {"max_tokens": 1000, "temperature": 1.5}
        try:
            await asyncio.wait_for(ask(client, body), dice.uniform(0.0, 3.0))
        except asyncio.TimeoutError:
            return "gone"
    return f"status {(await ask(client, body)).status}"


def per_hour(held: list[Held]) -> float:
    """Slope of memory over the second half, megabytes an hour. Raises ValueError for one look."""
    half = held[len(held) // 2 :] if len(held) > 3 else held
    times, sizes = [one.minutes / 60 for one in half], [one.rss_mb for one in half]
    return statistics.linear_regression(times, sizes).slope


if __name__ == "__main__":
    typer.run(main)
