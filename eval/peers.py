"""Beside llama.cpp on one GGUF file: the same ids, threads and number of tokens, greedy, in turns.

    python -m eval.peers --python /path/to/python --output eval/results/llama-cpp

PYTHON is an interpreter that has `llama-cpp-python`; it runs in a process of its own, which waits
while others work. Answers are as long as our plain decoding's. Methods: llama.cpp, with its prompt
lookup too; ours from the file's blocks, plain and by default; with `--numbers` ours from
de-quantised weights, and Hugging Face's `generate` on those, with its prompt lookup (10 tokens)
too. `--busy`: beside other programs, processes that compute without end. Else nothing should run
on the machine. Writes `answers.jsonl`, `summary.json` and `table.md`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from torch import Tensor

import selfspec
from eval import lab
from selfspec.api.text import encode
from selfspec.eval.bench import METHODS, Arrivals, endless
from selfspec.eval.results import SIX_TASKS, Question, load_suite
from selfspec.files import write
from selfspec.hub.models import default_model_file

LLAMA, LOOKUP, PLAIN, DEFAULT = "llama.cpp", "llama.cpp, prompt lookup", "plain", "default"
NUMBERS, NUMBERS_DEFAULT = "numbers, plain", "numbers, default"
THEIRS, THEIR_LOOKUP = "hugging-face", "hugging-face, prompt lookup"

Write = Callable[[Tensor, int], dict[str, Any]]
"""From ids [1, P] and a number of tokens to token_ids, first_s and seconds."""


def main(
    python: lab.LlamaPython,
    output: lab.Output,
    model: Annotated[Path | None, typer.Option(help=".gguf file; the default model's.")] = None,
    suite: lab.Suite = SIX_TASKS,
    questions: lab.Questions = None,
    limit: lab.Limit = None,
    new_tokens: lab.NewTokens = 64,
    dtype: lab.Dtype = None,
    threads: lab.Threads = 2,
    context: Annotated[int, typer.Option(help="Positions that llama.cpp keeps room for.")] = 4096,
    numbers: Annotated[bool, typer.Option(help="De-quantised weights, too.")] = False,
    lookup: Annotated[bool, typer.Option(help="llama.cpp's prompt lookup, too.")] = True,
    in_front: Annotated[int, typer.Option(help="Prompts are repeated to so many tokens.")] = 0,
    busy: Annotated[int, typer.Option(help="Other processes that compute meanwhile.")] = 0,
) -> None:
    """Measure, then write."""
    torch.set_num_threads(threads)
    asked = load_suite(suite, questions, limit)
    speculator = lab.loaded(model, dtype=dtype)
    with worker(python, model or default_model_file(), threads, context) as ask:
        theirs = [LLAMA, LOOKUP] if lookup else [LLAMA]
        ways: dict[str, Write] = {name: partial(llama, ask, name) for name in theirs}
        ways |= ours(speculator, PLAIN, DEFAULT)
        if numbers:
            de_quantised = lab.loaded(model, dtype=dtype, numbers=True)
            ways |= ours(de_quantised, NUMBERS, NUMBERS_DEFAULT)
            setting = {"prompt_lookup_num_tokens": 10}
            ways[THEIRS] = partial(timed, de_quantised, "hugging-face", {})
            ways[THEIR_LOOKUP] = partial(timed, de_quantised, "prompt-lookup", setting)
        answer = partial(
            answered, speculator=speculator, ways=ways, new_tokens=new_tokens, in_front=in_front
        )
        answer(asked[0])  # what happens once, now
        with others(busy):
            answers = [answer(question) for question in lab.each(asked, "answering")]
    output.mkdir(parents=True, exist_ok=True)
    write(output / "answers.jsonl", "".join(json.dumps(answer) + "\n" for answer in answers))
    summary = {
        "threads": threads,
        "busy": busy,
        "dtype": str(speculator.backbone.dtype),
        "executor": speculator.backbone.executor_name,
        "questions": len(asked),
        "tokens": {name: sum(len(a[name]["token_ids"]) for a in answers) for name in ways},
        "tables": tables(answers, list(ways)),
    }
    lab.finish(output, summary, as_text(summary))


def worker(python: str, gguf: Path, threads: int, context: int) -> AbstractContextManager[lab.Ask]:
    script = Path(__file__).with_name("llama_cpp_worker.py")
    return lab.answering([python, str(script), str(gguf), str(threads), str(context)])


@contextmanager
def others(count: int) -> Iterator[None]:
    code = [sys.executable, "-S", "-c", "while True: pass"]
    running = [subprocess.Popen(code) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def llama(ask: lab.Ask, name: str, ids: Tensor, count: int) -> dict[str, Any]:
    return ask({"ids": ids[0].tolist(), "count": count, "lookup": name == LOOKUP})


def ours(speculator: selfspec.Speculator, plain: str, default: str) -> dict[str, Write]:
    """Without drafts, and as the heads' settings say."""
    return {
        plain: partial(timed, speculator, "plain", {"speculate": False}),
        default: partial(timed, speculator, "ngram+exit", {}),
    }


def timed(
    speculator: selfspec.Speculator, method: str, setting: dict[str, Any], ids: Tensor, count: int
) -> dict[str, Any]:
    streamer = Arrivals(time.perf_counter)
    with endless(speculator):
        start = time.perf_counter()
        found = METHODS[method].decode(speculator, ids, count, setting, streamer)
        seconds = time.perf_counter() - start
    first = next(moment for tokens, moment in streamer.heard if tokens)
    return {"token_ids": found.token_ids, "first_s": first - start, "seconds": seconds}


def answered(
    question: Question,
    speculator: selfspec.Speculator,
    ways: Mapping[str, Write],
    new_tokens: int,
    in_front: int,
) -> dict[str, Any]:
    """The first turn by all methods, in an order that depends on the question alone."""
    ids = encode(speculator.tokenizer, question.turns[0])
    ids = ids.repeat(1, -(-in_front // ids.shape[1]))[:, -in_front:] if in_front else ids
    plain = speculator.generate(ids, max_new_tokens=new_tokens, speculate=False, do_sample=False)
    order = random.Random(question.id).sample(list(ways), len(ways))
    found = {name: ways[name](ids, max(2, len(plain.token_ids))) for name in order}
    return {"id": question.id, "task": question.task, "prompt_tokens": ids.shape[1], **found}


PARTS = {"whole": "seconds", "behind the prompt": "behind"}


def tables(answers: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Each method against llama.cpp, whole and behind the prompt; tokens per second; texts."""
    rows = pd.DataFrame(
        {"method": name, "task": answer["task"], "plain": answer[PLAIN]["token_ids"]} | answer[name]
        for name in names
        for answer in answers
    )
    rows = rows.assign(behind=rows.seconds - rows.first_s, tokens=rows.token_ids.map(len) - 1)
    llama = rows[rows.method == LLAMA]
    return {
        name: {
            "tokens_per_s": float(own.tokens.sum() / own.behind.sum()),
            "first_token_s": float(own.first_s.median()),
            "equal_to_plain": int((own.token_ids == own.plain).sum()),
            **{part: lab.faster(llama[of], own[of], own.task) for part, of in PARTS.items()},
        }
        for name, own in rows.groupby("method", sort=False)
    }


def as_text(summary: Mapping[str, Any]) -> str:
    found: Mapping[str, Any] = summary["tables"]
    text = (
        f"Times as fast as llama.cpp on the same file; {summary['questions']} questions, "
        f"{summary['threads']} threads, ours in {summary['dtype'].removeprefix('torch.')}\n"
    )
    for part in PARTS:
        tasks = found[LLAMA][part]["tasks"]
        rows = []
        for name, entry in found.items():
            ends = [f"{entry['tokens_per_s']:.1f}", f"{1e3 * entry['first_token_s']:.0f} ms"]
            rows.append([name, *lab.faster_cells(entry[part]), *ends])
        header = ("method", "overall", "worst", *tasks, "tokens/s", "first token")
        text += f"\n{part.capitalize()}:\n\n{lab.table(header, rows)}"
    same = ", ".join(f"{name} {entry['equal_to_plain']}" for name, entry in found.items())
    return f"{text}\nTexts equal to plain's, of {summary['questions']}: {same}.\n"


if __name__ == "__main__":
    lab.run(main)
