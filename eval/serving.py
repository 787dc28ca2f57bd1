r"""Tests `selfspec serve` under load: its speed against `transformers serve`, and equal texts.

    python -m eval.serving load --output eval/results/serve-load
    python -m eval.serving equal --questions question_dev.jsonl --output eval/results/serve-equal

`load`: streams of greedy answers to a suite's first turns, for 1, 4, 16 and 32 clients that each
wait for an answer before they ask again. One server runs at a time. All read one folder, the
default model's numbers in bfloat16 unless `--model` names another; one more row is for the default
model's own file. Each load has its own prompts as long as the suite lasts, because a repeated
prompt is cached. Nothing else should run on the machine.

`equal`: 60 requests, 16 at once, streamed and whole, with and without drafts, a third sampled with
seeds; in between, some clients cancel requests. Texts, finish reasons, and each token with the
bits of its log-probability are compared with those of `Speculator.generate` in this process. Exit
code 1 if anything differs. Everything stays on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import pandas as pd
import typer

from eval import lab
from selfspec.api.speculator import Speculator
from selfspec.eval.concurrency import Load, table
from selfspec.eval.results import SIX_TASKS
from selfspec.hub.models import DEFAULT_HEADS, resolve_model

Tokens = Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")]

# --- a server in a separate process, and its clients

_READY_S = 300.0  # for a server to load its model
_STOP_S = 40.0  # for a server to stop; after that it is killed


@dataclass
class Heard:
    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    """Each token with its log-probability, if requested."""
    error: str | None = None
    arrivals: list[float] = field(default_factory=list)  # seconds to each chunk of a stream's text

    @property
    def tokens(self) -> int:
        """The server's count of tokens; without one, the count of chunks."""
        return int(self.usage.get("completion_tokens", len(self.arrivals)))

    @property
    def comparable(self) -> list[Any]:
        """The parts that must be equal, however the request was sent."""
        counts = [self.usage.get(f"{kind}_tokens") for kind in ("prompt", "completion")]
        return [self.error or self.text, self.finish, *counts, self.logprobs]

    def take(self, answer: Mapping[str, Any], seconds: float | None = None) -> None:
        """Add a whole answer, or a stream's chunk that arrived after a number of seconds."""
        if "choices" not in answer:
            self.error = json.dumps(answer.get("error", answer))
            return
        self.usage = answer.get("usage") or self.usage
        for choice in answer["choices"]:
            text = (choice.get("message") or choice.get("delta") or {}).get("content") or ""
            self.finish = choice.get("finish_reason") or self.finish
            likely = (choice.get("logprobs") or {}).get("content") or []
            self.logprobs += [(entry["token"], entry["logprob"]) for entry in likely]
            self.text += text
            if text and seconds is not None:
                self.arrivals.append(seconds)


def serve_command(*flags: str) -> list[str]:
    """The command of `selfspec serve`, to which the port is appended."""
    return [sys.executable, "-m", "selfspec", "serve", *flags]


@contextmanager
def running_server(command: Sequence[str]) -> Iterator[str]:
    """Start a server; yields its address. Raises RuntimeError with its last output if it fails."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen([*command, "--port", port], stdout=log, stderr=log, env=env)
        try:
            _wait(address, process)
            yield address
        except RuntimeError as error:
            log.seek(0)
            tail = log.read().decode(errors="replace").strip()[-2000:]
            raise RuntimeError(f"{' '.join(command)}: {error}\n{tail}") from error
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(address: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _READY_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"ended with code {process.returncode}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{address}/health", timeout=5).status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    raise RuntimeError(f"was not ready within {_READY_S:g} seconds")


Work = Callable[[httpx.AsyncClient, Any], Awaitable[None]]


async def share_work(address: str, clients: int, items: Iterable[Any], work: Work) -> float:
    """Let clients work, each on the next remaining item; returns seconds."""
    queue, limits = iter(items), httpx.Limits()  # none

    async def run_client() -> None:
        for item in queue:
            await work(client, item)

    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(run_client() for _ in range(clients)))
        return time.perf_counter() - start


async def ask(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Heard:
    """Send one request; an answer that is not streamed is read whole."""
    heard, start = Heard(), time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            heard.error = f"status {answer.status_code}: {(await answer.aread()).decode()}"
        elif body.get("stream"):
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    heard.take(json.loads(line[6:]), time.perf_counter() - start)
        else:
            heard.take(json.loads(await answer.aread()))
    return heard


def question(text: str, tokens: int, **fields: Any) -> dict[str, Any]:
    """A request of one user's turn; greedy unless told otherwise."""
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, **fields}


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}

# --- load

OURS, PLAIN, FILE = "selfspec", "selfspec, no drafts", "selfspec, the file's blocks"
THEIRS, BATCHING = "transformers", "transformers, continuous batching"
PEERS = [THEIRS, BATCHING]


def load(
    output: lab.Output,
    model: Annotated[str | None, typer.Option(help="Folder for all. Default: ours.")] = None,
    heads: Annotated[str, typer.Option(help="Heads of our server.")] = DEFAULT_HEADS,
    questions: lab.Suite = SIX_TASKS,
    requests: Annotated[int, typer.Option(min=1, help="Per load; at least one a client.")] = 64,
    clients: lab.Numbers = "1,4,16,32",
    tokens: Tokens = 128,
    repeats: lab.Repeats = 1,
) -> None:
    """Measure each server at each load, repeatedly; every second time in reverse order."""
    folder = model or resolve_model(None, "bfloat16").source
    flags = ["--model", folder, "--heads", heads]
    program = str(Path(sys.executable).with_name("transformers"))  # of the same environment
    peer = [program, "serve", folder, "--host", "127.0.0.1"]
    commands = {
        OURS: serve_command(*flags),
        PLAIN: serve_command(*flags, "--no-speculate"),
        **({FILE: serve_command()} if model is None else {}),
        THEIRS: peer,
        BATCHING: [*peer, "--continuous-batching"],
    }
    prompts = lab.prompts(questions)
    plan = {count: max(requests, count) for count in lab.numbers(clients, int)}
    names = [*commands]
    turns = [(turn, name) for turn in range(repeats) for name in names[:: -1 if turn % 2 else 1]]
    loads = list[Load]()
    for turn, name in lab.track(turns, "serving", "servers"):
        with running_server(commands[name]) as address:
            extra = {"model": folder, **STREAMED} if name in PEERS else STREAMED  # it needs a name
            hello = [question(f"Hello, {number}.", 8, **extra) for number in range(max(plan))]
            warm = Load(texts=max(plan))  # one-time work of a server is not measured
            run_load(address, hello, warm)
            texts = itertools.cycle(prompts)
            for count, number in plan.items():
                jobs = [question(text, tokens, **extra) for text in itertools.islice(texts, number)]
                loads.append(Load(method=name, texts=count, repeat=turn))
                run_load(address, jobs, loads[-1])
    summary: dict[str, Any] = {
        "servers": {name: shlex.join(command) for name, command in commands.items()},
        "prompts": len(prompts),
        "tokens": tokens,
        "requests": plan,
        "found": [load.summary() for load in loads],
        "ahead": relative_rates(loads),
    }
    text = "".join(
        f"- {count} at once: {times:.2f} times the best of transformers serve\n"
        for count, times in summary["ahead"].items()
    )
    lab.finish(output, summary, f"{table(loads)}\n{text}")


def run_load(address: str, requests: Sequence[Mapping[str, Any]], load: Load) -> None:
    """Send all requests. Raises RuntimeError for an error, which figures would hide."""

    async def work(client: httpx.AsyncClient, body: Mapping[str, Any]) -> None:
        heard = await ask(client, body)
        if heard.error is not None:
            raise RuntimeError(heard.error)
        load.tokens += heard.tokens
        load.first_s += heard.arrivals[:1]
        pairs = itertools.pairwise(heard.arrivals)
        load.gaps_s += [later - earlier for earlier, later in pairs]

    load.seconds = asyncio.run(share_work(address, load.texts, requests, work))


def relative_rates(loads: Sequence[Load]) -> dict[int, float]:
    """By number of clients: our tokens per second with drafts, relative to the best peer's."""
    rates = pd.DataFrame([(load.texts, load.method, load.tokens / load.seconds) for load in loads])
    best = rates.pivot_table(index=0, columns=1, values=2, aggfunc="max")
    return (best[OURS] / best.filter(PEERS).max(axis=1)).to_dict()  # type: ignore[no-any-return]


# --- equal

SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}


def equal(
    output: lab.Output,
    questions: lab.Suite = SIX_TASKS,
    model: lab.Model = None,
    heads: lab.Heads = None,
    dtype: lab.Dtype = None,
    requests: Annotated[int, typer.Option(min=1)] = 60,
    concurrency: Annotated[int, typer.Option(min=1)] = 16,
    tokens: Tokens = 64,
) -> None:
    """Check that each text over HTTP equals that of `generate` alone."""
    prompts = lab.prompts(questions, limit=requests)
    settings = {"model": model, "heads": heads, "dtype": dtype}
    speculator, alone = lab.load(model, heads, dtype), list[Heard]()
    for prompt in lab.track(prompts, "alone", "answers"):
        alone.append(without_server(speculator, len(alone), prompt, tokens))
    flags = [part for name, value in settings.items() if value for part in (f"--{name}", value)]
    entries = []
    with running_server(serve_command(*flags)) as address:
        for speculation in (True, False):
            arguments = address, prompts, alone, tokens, concurrency
            entries.append(compare(*arguments, speculation=speculation))
            print(entries[-1], flush=True)
    summary = {"requests": len(prompts), "concurrency": concurrency, "found": entries}
    header = [name for name in entries[0] if name != "differing"]
    rows = [[*(entry[name] for name in header), len(entry["differing"])] for entry in entries]
    lab.finish(output, summary, lab.table([*header, "differing"], rows))
    if any(entry["differing"] for entry in entries):
        raise typer.Exit(1)


def without_server(speculator: Speculator, number: int, prompt: str, tokens: int) -> Heard:
    options: Any = {"max_new_tokens": tokens, "speculate": False, "logprobs": 0, "do_sample": False}
    if is_sampled(number):
        options |= {"do_sample": True, "top_k": 0, "min_p": 0.0, "seed": number, **SAMPLED}
    answer = speculator.generate(prompt, **options)
    tokenizer: Any = speculator.tokenizer
    counts = {"prompt_tokens": answer.stats.prompt_tokens}
    return Heard(
        text=answer.text,
        finish="stop" if answer.stop_reason == "eos" else "length",
        usage=counts | {"completion_tokens": len(answer.token_ids)},
        logprobs=[(tokenizer.decode([one.token]), one.logprob) for one in answer.logprobs or ()],
    )


def is_sampled(number: int) -> bool:
    return number % 3 == 0


def compare(
    address: str,
    prompts: Sequence[str],
    expected: Sequence[Heard],
    tokens: int,
    concurrency: int,
    *,
    speculation: bool,
) -> dict[str, Any]:
    """Counts of the requests, and the answers that differ. Every second request streams."""
    dice = random.Random(concurrency)
    order = dice.sample(range(len(prompts)), len(prompts))
    heard, cancelled = dict[int, Heard](), 0

    async def work(client: httpx.AsyncClient, number: int) -> None:
        nonlocal cancelled
        fields: dict[str, Any] = {"speculation": speculation, "logprobs": True}
        if number % 2:
            fields |= STREAMED
        if is_sampled(number):
            fields |= {"seed": number, **SAMPLED}
        body = question(prompts[number], tokens, **fields)
        if dice.random() < 0.25:
            cancelled += 1
            with suppress(asyncio.TimeoutError):  # the client disconnects, unless it has the answer
                await asyncio.wait_for(ask(client, body), dice.uniform(0.05, 1.0))
        heard[number] = await ask(client, body)

    asyncio.run(share_work(address, concurrency, order, work))
    counts = [answer.usage.get("speculation", {}) for answer in heard.values()]
    return {
        "speculation": speculation,
        "answers": len(heard),
        "sampled": sum(map(is_sampled, heard)),
        "streams": sum(number % 2 for number in heard),
        "cancelled": cancelled,
        "tokens": sum(answer.tokens for answer in heard.values()),
        "drafted": sum(count.get("num_draft_tokens", 0) for count in counts),
        "accepted": sum(count.get("num_accepted_tokens", 0) for count in counts),
        "differing": {
            number: [*expected[number].comparable, "over HTTP:", *answer.comparable]
            for number, answer in sorted(heard.items())
            if answer.comparable != expected[number].comparable
        },
    }


if __name__ == "__main__":
    lab.run(load, equal)
