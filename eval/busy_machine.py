"""Tokens a second beside other programs: ours, Hugging Face's `generate` and llama.cpp, in turns.

    python -m eval.busy_machine --output eval/results/busy [--python /path/to/python]

Other programs: so many processes that compute without end, started before an answer and stopped
after it. PYTHON: an interpreter that has `llama-cpp-python`, as for `eval.peers`. Nothing else
should run on the machine. Writes `summary.json` and `table.md`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from statistics import median
from typing import Annotated

import torch
import typer

from eval import lab
from eval.peers import LLAMA, de_quantised, methods, worker
from selfspec.api.text import encode
from selfspec.hub.models import default_model_file

_PROMPT = "Write a long story about the keeper of a lighthouse."


def main(
    output: lab.Output,
    python: Annotated[str | None, typer.Option(help="Interpreter with llama-cpp-python.")] = None,
    busy: Annotated[str, typer.Option(help="Numbers of other processes.")] = "0,1,2,4",
    turns: Annotated[int, typer.Option(min=1, help="Answers by each, of which the median.")] = 5,
    new_tokens: lab.NewTokens = 64,
    threads: lab.Threads = 2,
) -> None:
    """Measure, then write."""
    torch.set_num_threads(threads)
    counts = lab.counts(busy)
    with ExitStack() as stack:
        ask = python and stack.enter_context(worker(python, default_model_file(), threads, 1024))
        speculator = lab.loaded()
        ways = methods(speculator, ask or dict, lookup=False) | de_quantised(None, speculator)
        if not ask:
            del ways[LLAMA]
        ids = encode(speculator.tokenizer, _PROMPT)
        for way in ways.values():
            way(ids, new_tokens)  # what happens once, now
        rates: dict[tuple[str, int], list[float]] = {pair: [] for pair in product(ways, counts)}
        for _, n, name in lab.each(list(product(range(turns), counts, ways)), "answering", ""):
            with others(n):
                answer = ways[name](ids, new_tokens)
            behind = answer["seconds"] - answer["first_s"]
            rates[name, n].append((len(answer["token_ids"]) - 1) / behind)
    found = {n: {name: median(rates[name, n]) for name in ways} for n in counts}
    header = ("tokens/s behind the prompt", *(f"{n} busy" for n in counts))
    rows = [[name, *(f"{found[n][name]:.1f}" for n in counts)] for name in ways]
    text = f"`{lab.command()}`\n\n{lab.table(header, rows)}"
    lab.finish(output, {"threads": threads, "table": found}, text)


@contextmanager
def others(count: int) -> Iterator[None]:
    """So many processes that never wait."""
    code = [sys.executable, "-S", "-c", "while True: pass"]
    running = [subprocess.Popen(code) for _ in range(count)]
    try:
        time.sleep(0.5 if count else 0.0)  # until they run
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


if __name__ == "__main__":
    lab.run(main)
