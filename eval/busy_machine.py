"""Tokens a second beside other programs: ours, Hugging Face's `generate` and llama.cpp, in turns.

    python -m eval.busy_machine --output eval/results/busy [--python /path/to/python]

Other programs: so many processes that compute without end, started before an answer and stopped
after it. PYTHON: an interpreter that has `llama-cpp-python`, as for `eval.against_llama_cpp`.
Nothing else should run on the machine. Writes `summary.json` and `table.md`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

import selfspec
from eval.against_llama_cpp import LLAMA, de_quantised, methods, worker
from eval.called import command
from selfspec.api.text import encode
from selfspec.cli.base import bar
from selfspec.cli.measure import machine
from selfspec.files import write
from selfspec.hub.models import default_model_file

_PROMPT = "Write a long story about the keeper of a lighthouse."


def main(
    output: Annotated[Path, typer.Option(help="Results folder.")],
    python: Annotated[str | None, typer.Option(help="Interpreter with llama-cpp-python.")] = None,
    busy: Annotated[str, typer.Option(help="Numbers of other processes.")] = "0,1,2,4",
    turns: Annotated[int, typer.Option(min=1, help="Answers by each, of which the median.")] = 5,
    new_tokens: Annotated[int, typer.Option(min=2, help="Per answer.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Of all.")] = 2,
) -> None:
    """Measure, then write."""
    torch.set_num_threads(threads)
    counts = [int(word) for word in busy.split(",")]
    with ExitStack() as stack:
        ask = python and stack.enter_context(worker(python, default_model_file(), threads, 1024))
        speculator = selfspec.load()
        ways = methods(speculator, ask or dict, lookup=False) | de_quantised(None, speculator)
        if not ask:
            del ways[LLAMA]
        ids = encode(speculator.tokenizer, _PROMPT)
        rates: dict[int, dict[str, list[float]]] = {n: {w: [] for w in ways} for n in counts}
        advance = stack.enter_context(bar("answering", "answers"))
        for way in ways.values():
            way(ids, new_tokens)  # what happens once, now
        for turn in range(turns):
            for n in counts:
                for name, way in ways.items():
                    advance(turn * len(counts) + counts.index(n), turns * len(counts), name)
                    with others(n):
                        answer = way(ids, new_tokens)
                    behind = answer["seconds"] - answer["first_s"]
                    rates[n][name].append((len(answer["token_ids"]) - 1) / behind)
    table = {n: {name: median(found) for name, found in each.items()} for n, each in rates.items()}
    output.mkdir(parents=True, exist_ok=True)
    summary = {"command": command(), "machine": machine(), "threads": threads, "table": table}
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    head = f"| tokens/s behind the prompt | {' | '.join(f'{n} busy' for n in counts)} |"
    lines = [f"`{command()}`", "", head, "|---|" + "---:|" * len(counts)]
    for name in ways:
        lines.append(f"| {name} | {' | '.join(f'{table[n][name]:.1f}' for n in counts)} |")
    write(output / "table.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


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
    typer.run(main)
