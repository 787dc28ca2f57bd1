"""`selfspec serve` beside `transformers serve`: the same model, prompts and clients, in turns.

    python -m eval.serve_load --output eval/results/serve-load

Streams of greedy answers to a suite's first turns, by 1, 4, 16 and 32 clients that each wait for an
answer before they ask again. One server lives at a time. All read one folder, the default model's
numbers in bfloat16 unless `--model` names another; a row more has the default model's own file.
Each load has prompts of its own while the suite lasts, for a prompt that comes again is cached.
Tokens are counted by each server's usage. Nothing else should run on the machine. Writes
`summary.json` and `table.md`.
"""

from __future__ import annotations

import asyncio
import json
import platform
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from eval.called import command
from eval.served import Heard, Server, ask, clients, ours, question, served, theirs
from selfspec.cli import progress
from selfspec.cli.common import rendered
from selfspec.cli.env import machine
from selfspec.eval.concurrency import Load
from selfspec.eval.results import SIX_TASKS, load_suite
from selfspec.files import write
from selfspec.hub.models import DEFAULT_HEADS, resolve_model

OURS, PLAIN, FILE = "selfspec", "selfspec, no drafts", "selfspec, the file's blocks"
THEIRS, BATCHING = "transformers", "transformers, continuous batching"
PEERS = THEIRS, BATCHING


@dataclass(kw_only=True)
class Served(Load):
    """Also, what a server needed not compute."""

    cached: int = 0
    """Tokens of prompts that it had from earlier requests, as its usage says."""


PACKAGES = ("uvicorn", "fastapi", "httpx", "h11")

Told = Callable[[Heard], None]


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: Annotated[str | None, typer.Option(help="Folder of all; the default model's.")] = None,
    heads: Annotated[str, typer.Option(help="Of ours.")] = DEFAULT_HEADS,
    questions: Annotated[str, typer.Option(help="A suite's name, or a JSONL file.")] = SIX_TASKS,
    requests: Annotated[int, typer.Option(min=1, help="At each load; at least one a client.")] = 64,
    clients: Annotated[str, typer.Option(help="At once, with commas.")] = "1,4,16,32",
    tokens: Annotated[int, typer.Option(min=1, help="Of an answer at most.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="In turns.")] = 1,
    servers: Annotated[str, typer.Option(help="Names with semicolons; all.")] = "",
    our_args: Annotated[str, typer.Option(help="For selfspec serve.")] = "",
    peer_args: Annotated[str, typer.Option(help="For transformers serve.")] = "",
) -> None:
    """Measure, then write."""
    folder = model or resolve_model(None, "bfloat16").source
    commands = contenders(folder, heads, shlex.split(our_args), shlex.split(peer_args))
    if model is not None:
        del commands[FILE]
    wanted = [name.strip() for name in servers.split(";") if name.strip()] or list(commands)
    if unknown := set(wanted) - set(commands):
        raise typer.BadParameter(f"no server {sorted(unknown)[0]}. There are {list(commands)}")
    prompts = [one.turns[0] for one in load_suite(questions)]
    counts = [int(count) for count in clients.split(",")]
    plan = {count: max(requests, count) for count in counts}
    loads = measured(
        {name: commands[name] for name in wanted}, folder, prompts, plan, tokens, repeats
    )
    summary = {
        "command": command(),
        "machine": machine() | {name: metadata.version(name) for name in PACKAGES},
        "host": platform.processor(),
        "servers": {name: shlex.join(commands[name]) for name in wanted},
        "prompts": len(prompts),
        "tokens": tokens,
        "requests": plan,
        "found": [load.summary() for load in loads],
        "ahead": ahead(loads),
    }
    output.mkdir(parents=True, exist_ok=True)
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    text = as_text(loads)
    write(output / "table.md", text)
    print(rendered(as_table(loads)), end="")


def contenders(
    folder: str, heads: str, our_args: Sequence[str], peer_args: Sequence[str]
) -> dict[str, list[str]]:
    """Commands by name."""
    mine = ["--model", folder, "--heads", heads, *our_args]
    return {
        OURS: ours(*mine),
        PLAIN: ours(*mine, "--no-speculate"),
        FILE: ours(*our_args),
        THEIRS: theirs(folder, *peer_args),
        BATCHING: theirs(folder, "--continuous-batching", *peer_args),
    }


# --- answers --------------------------------------------------------------------------------------


def measured(
    commands: Mapping[str, Sequence[str]],
    folder: str,
    prompts: Sequence[str],
    plan: Mapping[int, int],
    tokens: int,
    repeats: int,
) -> list[Load]:
    """Each server at each load, again and again; the order of servers turns round."""
    loads, done = list[Load](), 0
    starts = dict(zip(plan, accumulate(plan.values(), initial=0), strict=False))
    of = repeats * len(commands) * sum(plan.values())
    names = list(commands)
    with progress.bar("serving", "answers") as show:
        for repeat in range(repeats):
            for name in names[:: -1 if repeat % 2 else 1]:
                model = folder if name in PEERS else None
                with served(commands[name]) as server:
                    asyncio.run(warmed(server, max(plan), model))
                    for count, requests in plan.items():

                        def told(_: Heard, name: str = name, count: int = count) -> None:
                            nonlocal done
                            done += 1
                            show(done, of, f"{name}, {count} at once")

                        own = islice(cycle(prompts), starts[count], starts[count] + requests)
                        asked = bodies([*own], tokens, model)
                        load = Served(method=name, texts=count, repeat=repeat)
                        asyncio.run(loaded(server, asked, load, told))
                        loads.append(load)
    return loads


def bodies(prompts: Sequence[str], tokens: int, model: str | None) -> list[dict[str, Any]]:
    """Streams; `model`: where a server asks for its name."""
    more = {"stream": True, "stream_options": {"include_usage": True}}
    named = {} if model is None else {"model": model}
    return [question(text, tokens, **more, **named) for text in prompts]


async def warmed(server: Server, count: int, model: str | None) -> None:
    """What a server does once is not measured."""
    async with clients(server) as client:
        asked = bodies([f"Hello, {number}." for number in range(count)], 8, model)
        for heard in await asyncio.gather(*(ask(client, body) for body in asked)):
            checked(heard)


async def loaded(
    server: Server, asked: Sequence[Mapping[str, Any]], load: Served, told: Told
) -> None:
    """All requests, by so many clients, each of which takes the next one that is left."""
    left = iter(asked)

    async def work() -> None:
        for body in left:
            heard = checked(await ask(client, body))
            load.tokens += heard.tokens
            details = heard.usage.get("prompt_tokens_details") or {}
            load.cached += details.get("cached_tokens", 0)
            load.first_s += heard.arrivals[:1]
            load.gaps_s += heard.gaps
            told(heard)

    async with clients(server) as client:
        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(load.texts)))
        load.seconds = time.perf_counter() - start


def checked(heard: Heard) -> Heard:
    """An answer. Raises RuntimeError for an error, which no figure may hide."""
    if heard.error is not None or heard.status != 200:
        raise RuntimeError(f"status {heard.status}: {heard.error}")
    return heard


# --- tables ---------------------------------------------------------------------------------------


def ahead(loads: Sequence[Load]) -> dict[int, float]:
    """By load: tokens per second of our best with drafts, in those of their best."""
    found = {}
    for count in sorted({load.texts for load in loads}):
        mine = [one.tokens_per_s for one in loads if (one.texts == count and one.method == OURS)]
        best = [one.tokens_per_s for one in loads if one.texts == count and one.method in PEERS]
        if mine and best:
            found[count] = max(mine) / max(best)
    return found


def rows(loads: Sequence[Load]) -> list[list[str]]:
    """Server, clients, tokens, tokens/s, first token and gaps in milliseconds; all repeats."""
    found = []
    for name in dict.fromkeys(load.method for load in loads):
        for count in sorted({load.texts for load in loads}):
            some = [load for load in loads if (load.method, load.texts) == (name, count)]
            whole = Load(
                method=name,
                texts=count,
                seconds=sum(one.seconds for one in some),
                tokens=sum(one.tokens for one in some),
                first_s=[one for load in some for one in load.first_s],
                gaps_s=[one for load in some for one in load.gaps_s],
            )
            figures = whole.summary()
            waits = [_ms(figures[part]) for part in ("first_s", "gaps_s")]
            found.append([name, str(count), str(whole.tokens), f"{whole.tokens_per_s:.1f}", *waits])
    return found


def _ms(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{1e3 * pair[0]:.0f} / {1e3 * pair[1]:.0f}"


HEADER = ("server", "clients", "tokens", "tokens/s", "first token, ms", "gaps, ms: p50 / p95")


def as_table(loads: Sequence[Load]) -> Table:
    """For a terminal."""
    table = Table(*HEADER[:1])
    for name in HEADER[1:]:
        table.add_column(name, justify="right")
    for row in rows(loads):
        table.add_row(*row)
    return table


def as_text(loads: Sequence[Load]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(HEADER)} |", "| --- |" + " ---: |" * (len(HEADER) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in rows(loads)]
    lines.append("")
    for count, times in ahead(loads).items():
        lines.append(f"- {count} at once: {times:.2f} times the best of transformers serve")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
