"""Beside llama.cpp on one GGUF file: the same ids, threads and number of tokens, greedy, in turns.

    python -m eval.against_llama_cpp --python /path/to/python --output eval/results/llama-cpp

PYTHON is an interpreter that has `llama-cpp-python`; it runs in a process of its own, which waits
while others work. Answers are as long as our plain decoding's. Methods: llama.cpp, with its prompt
lookup too; ours from the file's blocks, plain and by default; with `--numbers` ours from
de-quantised weights, and Hugging Face's `generate` on those, with its prompt lookup (10 tokens)
too. Nothing else should run on the machine. Writes `answers.jsonl`, `summary.json` and `table.md`.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Annotated, Any, cast

import torch
import typer
from torch import Tensor

import selfspec
from eval.called import command
from selfspec.api.text import encode
from selfspec.cli import progress
from selfspec.cli.env import machine
from selfspec.eval.bench import Arrivals
from selfspec.eval.methods import METHODS, endless
from selfspec.eval.results import Question, load_suite, ratio_interval
from selfspec.files import write
from selfspec.hub.models import default_model_file

LLAMA, LOOKUP, PLAIN, DEFAULT = "llama.cpp", "llama.cpp, prompt lookup", "plain", "default"
NUMBERS, NUMBERS_DEFAULT = "numbers, plain", "numbers, default"
THEIRS, THEIR_LOOKUP = "hugging-face", "hugging-face, prompt lookup"

Write = Callable[[Tensor, int], dict[str, Any]]
"""From ids [1, P] and a number of tokens to token_ids, first_s and seconds."""


def main(
    python: Annotated[str, typer.Option(help="Interpreter with llama-cpp-python.")],
    output: Annotated[Path, typer.Option(help="Results folder.")],
    model: Annotated[Path | None, typer.Option(help=".gguf file; the default model's.")] = None,
    suite: Annotated[str, typer.Option(help="As of selfspec bench.")] = "six-tasks",
    questions: Annotated[Path | None, typer.Option(help="File of a suite.")] = None,
    limit: Annotated[int | None, typer.Option(help="Questions at most, spread evenly.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Per answer at most.")] = 64,
    dtype: Annotated[str | None, typer.Option(help="Of ours.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of all.")] = 2,
    context: Annotated[int, typer.Option(help="Positions that llama.cpp keeps room for.")] = 4096,
    numbers: Annotated[bool, typer.Option(help="De-quantised weights, too.")] = False,
    lookup: Annotated[bool, typer.Option(help="llama.cpp's prompt lookup, too.")] = True,
    in_front: Annotated[int, typer.Option(help="Prompts are repeated to so many tokens.")] = 0,
) -> None:
    """Measure, then write."""
    torch.set_num_threads(threads)
    asked = load_suite(suite, questions, limit)
    gguf = model or default_model_file()
    speculator = selfspec.load(model, dtype=dtype)
    answers = []
    with (
        worker(python, gguf, threads, context) as ask,
        progress.bar("answering", "questions") as advance,
    ):
        ways = methods(speculator, ask, lookup=lookup)
        if numbers:
            ways |= de_quantised(model, speculator)
        answered(asked[0], speculator, ways, new_tokens, in_front)  # what happens once, now
        for done, question in enumerate(asked):
            advance(done, len(asked), question.task)
            answers.append(answered(question, speculator, ways, new_tokens, in_front))
        advance(len(asked), len(asked), "")
    output.mkdir(parents=True, exist_ok=True)
    write(output / "answers.jsonl", "".join(json.dumps(answer) + "\n" for answer in answers))
    summary = {
        "command": command(),
        "machine": machine(),
        "threads": threads,
        "dtype": str(speculator.backbone.dtype),
        "executor": speculator.backbone.executor_name,
        "questions": len(asked),
        "tokens": {name: sum(len(a[name]["token_ids"]) for a in answers) for name in ways},
        "tables": tables(answers, list(ways)),
    }
    write(output / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(output / "table.md", as_text(summary))
    print(as_text(summary), end="")


# --- answers --------------------------------------------------------------------------------------


@contextmanager
def worker(
    python: str, gguf: Path, threads: int, context: int
) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """A process with llama.cpp; gives what asks it for an answer."""
    script = Path(__file__).with_name("llama_cpp_worker.py")
    command = [python, str(script), str(gguf), str(threads), str(context)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        to, answers = cast(IO[str], process.stdin), cast(IO[str], process.stdout)

        def ask(asked: dict[str, Any]) -> dict[str, Any]:
            print(json.dumps(asked), file=to, flush=True)
            if not (line := answers.readline()):
                raise typer.BadParameter(f"{python} cannot run llama.cpp on {gguf}: see above")
            answer: dict[str, Any] = json.loads(line)
            return answer

        try:
            yield ask
        finally:
            to.close()


def methods(
    speculator: selfspec.Speculator,
    ask: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    lookup: bool,
) -> dict[str, Write]:
    """llama.cpp's ways, and ours from blocks."""

    def theirs(ids: Tensor, count: int, *, drafts: bool) -> dict[str, Any]:
        return ask({"ids": ids[0].tolist(), "count": count, "lookup": drafts})

    found: dict[str, Write] = {LLAMA: partial(theirs, drafts=False)}
    if lookup:
        found[LOOKUP] = partial(theirs, drafts=True)
    return found | ours(speculator, PLAIN, DEFAULT)


def de_quantised(model: Path | None, like: selfspec.Speculator) -> dict[str, Write]:
    """Ours, and Hugging Face's, from weights that are numbers."""
    from selfspec.hub.models import load_model

    loaded, tokenizer, files = load_model(model, dtype=like.backbone.dtype)
    speculator = selfspec.wrap(loaded, tokenizer, heads=like.heads or "none", label=files.label)
    found = ours(speculator, NUMBERS, NUMBERS_DEFAULT)
    return found | {
        THEIRS: partial(timed, speculator, "hugging-face", {}),
        THEIR_LOOKUP: partial(timed, speculator, "prompt-lookup", {"prompt_lookup_num_tokens": 10}),
    }


def ours(speculator: selfspec.Speculator, plain: str, default: str) -> dict[str, Write]:
    """Without drafts, and as the heads' settings say."""
    return {
        plain: partial(timed, speculator, "plain", {"speculate": False}),
        default: partial(timed, speculator, "ngram+exit", {}),
    }


def timed(
    speculator: selfspec.Speculator, method: str, setting: dict[str, Any], ids: Tensor, count: int
) -> dict[str, Any]:
    """One answer of `count` tokens."""
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
    plain = speculator.generate(
        ids, max_new_tokens=new_tokens, speculate=False, do_sample=False
    ).token_ids
    order = list(ways)
    random.Random(question.id).shuffle(order)
    found = {name: ways[name](ids, max(2, len(plain))) for name in order}
    return {"id": question.id, "task": question.task, "prompt_tokens": ids.shape[1], **found}


# --- tables ---------------------------------------------------------------------------------------


def tables(answers: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Each method against llama.cpp, whole and behind the prompt; tokens per second; texts."""
    found: dict[str, Any] = {}
    for name in names:
        rows = [answer[name] for answer in answers]
        behind = sum(row["seconds"] - row["first_s"] for row in rows)
        tokens = sum(len(row["token_ids"]) - 1 for row in rows)
        same = sum(answer[name]["token_ids"] == answer[PLAIN]["token_ids"] for answer in answers)
        found[name] = {
            "tokens_per_s": tokens / behind,
            "first_token_s": median(row["first_s"] for row in rows),
            "equal_to_plain": same,
            **{
                part: _faster(answers, name, part)
                for part in ("whole", "behind the prompt", "first token")
            },
        }
    return found


def _faster(answers: Sequence[Mapping[str, Any]], name: str, part: str) -> dict[str, Any]:
    """How many times as fast as llama.cpp: of all, by task, its interval, and the worst."""
    pairs = [(_seconds(answer[LLAMA], part), _seconds(answer[name], part)) for answer in answers]
    theirs, mine = zip(*pairs, strict=True)
    by_task: dict[str, list[tuple[float, float]]] = {}
    for answer, pair in zip(answers, pairs, strict=True):
        by_task.setdefault(answer["task"], []).append(pair)
    return {
        "ratio": sum(theirs) / sum(mine),
        "interval": ratio_interval(theirs, mine),
        "worst": min(a / b for a, b in pairs),
        "tasks": {
            task: sum(a for a, _ in some) / sum(b for _, b in some)
            for task, some in by_task.items()
        },
    }


def _seconds(row: Mapping[str, Any], part: str) -> float:
    whole, first = float(row["seconds"]), float(row["first_s"])
    return {"whole": whole, "behind the prompt": whole - first, "first token": first}[part]


def as_text(summary: Mapping[str, Any]) -> str:
    """For people."""
    found: Mapping[str, Any] = summary["tables"]
    tasks = list(next(iter(found.values()))["whole"]["tasks"])
    lines = [
        f"Times as fast as llama.cpp on the same file; {summary['questions']} questions, "
        f"{summary['threads']} threads, ours in {summary['dtype'].removeprefix('torch.')}",
        "",
    ]
    for part in ("whole", "behind the prompt"):
        lines += [f"{part.capitalize()}:", ""]
        lines += [f"| method | overall | worst | {' | '.join(tasks)} | tokens/s | first token |"]
        lines += ["| --- |" + " ---: |" * (len(tasks) + 4)]
        for name, entry in found.items():
            figures = entry[part]
            low, high = figures["interval"]
            cells = [f"{figures['ratio']:.2f} ({low:.2f} to {high:.2f})", f"{figures['worst']:.2f}"]
            cells += [f"{figures['tasks'][task]:.2f}" for task in tasks]
            cells += [f"{entry['tokens_per_s']:.1f}", f"{1e3 * entry['first_token_s']:.0f} ms"]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    same = ", ".join(f"{name} {entry['equal_to_plain']}" for name, entry in found.items())
    lines.append(f"Texts equal to plain's, of {summary['questions']}: {same}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
