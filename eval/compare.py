r"""Compares ways of decoding on the same prompts (first turns, greedy), in random order.

    python -m eval.compare --drafter "chain=ngram+exit:guesses=1,max_tokens=2" \
        --drafter "tree=ngram+exit" --suite spec-bench --output eval/results/trees
    python -m eval.compare --numbers --llama-cpp PYTHON --openvino PYTHON --output rivals

Runs plain decoding and the given drafters, or the default. `--llama-cpp` and `--openvino` name
interpreters that have `llama-cpp-python` and `openvino-genai`: these run on the same GGUF file, ids
and threads, also with their prompt lookup; with `--int4` OpenVINO also runs on a folder that
`optimum-cli export openvino` made. Each runs in its own process, which waits while others work.
`--numbers` adds selfspec with de-quantised weights, and Hugging Face's `generate` on those, also
with its prompt lookup and its early exit. Prompt lookup drafts 10 tokens. `--busy` starts other
busy processes; nothing else should run on the machine. Writes the files of `selfspec
bench`, and each way's speed-up over the first rival, or over the first drafter. The same
command continues a stopped run. Exit code 1 if drafts change a text.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from torch import Tensor

from eval import lab
from selfspec.api.speculator import Speculator
from selfspec.errors import InvalidOption
from selfspec.eval import report
from selfspec.eval.bench import METHODS, Contender, Decode, Setting, Written, describe, endless
from selfspec.eval.results import SIX_TASKS, Answer, BenchOptions, speed_up
from selfspec.files import write
from selfspec.hub.models import default_model_file

DEFAULT, NUMBERS, LOOKUP = "default", "numbers, ", ", prompt lookup"
LLAMA, OPENVINO, INT4 = "llama.cpp", "openvino", "openvino, its int4"
THEIRS = "hugging-face"
ASSISTED: dict[str, dict[str, Any]] = {
    LOOKUP: {"prompt_lookup_num_tokens": 10},
    ", early exit": {"assistant_early_exit": 3},
}
"""Keywords of Hugging Face's `generate`; the shallow early exit was the fastest."""


def rival(
    ask: lab.Ask, _: Speculator, ids: Tensor, count: int, setting: Setting, streamer: Any
) -> Written:
    start = time.perf_counter()
    answer = ask({"ids": ids[0].tolist(), "count": count, **setting})
    if streamer is not None:
        arrivals = [(1, start + answer["first_s"]), (count - 1, start + answer["seconds"])]
        streamer.events += arrivals[:count]
    return Written(answer["token_ids"])


def decode_on(speculator: Speculator, decode: Decode, _: Speculator, *arguments: Any) -> Written:
    """Decode on a model with other weights than the bench's."""
    with endless(speculator):
        return decode(speculator, *arguments)


def main(
    output: lab.Output,
    drafter: Annotated[
        list[str] | None, typer.Option(help="NAME=DRAFTER, or NAME=DRAFTER;COSTS.")
    ] = None,
    llama_cpp: Annotated[str | None, typer.Option(help="A Python with llama-cpp-python.")] = None,
    openvino: Annotated[str | None, typer.Option(help="A Python with openvino-genai.")] = None,
    int4: Annotated[Path | None, typer.Option(help="OpenVINO's own folder of the model.")] = None,
    model: lab.Model = None,
    heads: lab.Heads = None,
    dtype: lab.Dtype = None,
    executor: str = "auto",
    suite: lab.Suite = SIX_TASKS,
    questions: lab.Questions = None,
    limit: lab.Limit = None,
    new_tokens: lab.NewTokens = 64,
    threads: lab.Threads = 2,
    context: Annotated[int, typer.Option(help="Context length of llama.cpp.")] = 4096,
    numbers: Annotated[bool, typer.Option(help="Also run de-quantised weights.")] = False,
    lookup: Annotated[bool, typer.Option(help="Also run the others with their own drafts.")] = True,
    busy: Annotated[int, typer.Option(help="Other processes that compute at the same time.")] = 0,
) -> None:
    if int4 is not None and openvino is None:
        raise InvalidOption("int4 is a folder for OpenVINO. Give --openvino, or leave it out")
    torch.set_num_threads(threads)
    speculator = lab.load(model, heads, dtype, executor)
    turns = lab.first_turns(suite, questions, limit)
    our_ways = [lab.PLAIN]
    for name, setting in named_settings(drafter or []).items():
        our_ways.append(Contender(label=name, method="ngram+exit", setting=setting))
    ways = list(our_ways)
    if numbers:
        dequantised = lab.load(model, heads, dtype, executor, numbers=True)
        extras = [replace(way, label=NUMBERS + way.label) for way in our_ways]
        for name, setting in ({"": {}} | (ASSISTED if lookup else {})).items():
            by = METHODS[THEIRS].decode
            extras.append(Contender(label=THEIRS + name, method=THEIRS, setting=setting, by=by))
        ways += [replace(way, by=partial(decode_on, dequantised, way.by)) for way in extras]
    gguf = Path(model) if model else default_model_file()
    rivals = {LLAMA: (llama_cpp, gguf), OPENVINO: (openvino, gguf), INT4: (openvino, int4)}
    with ExitStack() as stack:
        rival_ways: list[Contender] = []
        for name, (python, file) in rivals.items():
            if python is None or file is None:
                continue
            by = partial(rival, stack.enter_context(worker(name, python, file, threads, context)))
            rival_ways += [
                Contender(label=name + drafts, method=name, setting={"lookup": bool(drafts)}, by=by)
                for drafts in ("", LOOKUP)[: 1 + lookup]
            ]
        stack.enter_context(busy_processes(busy))
        ways[:0] = rival_ways
        options = BenchOptions(suite=suite, max_new_tokens=new_tokens)
        answers = lab.run_bench(output, speculator, turns, ways, options)
    labels = [way.label for way in ways][0 if rival_ways else 1 :]
    summary = summary_of(answers, ways)
    text = f"{report.write_results(output, summary)}\n{over_first(answers, labels)}"
    write(output / "table.md", text)
    print(text, end="")
    if any(summary["unequal"][way.label] for way in our_ways):
        raise typer.Exit(1)


def named_settings(drafters: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Keywords of `generate` by name, from NAME=DRAFTER[;COSTS]; without any, the default's."""
    settings: dict[str, dict[str, Any]] = {} if drafters else {DEFAULT: {}}
    for text in drafters:
        name, equals, rest = text.partition("=")
        drafter, _, costs = rest.partition(";")
        if not (name and equals and drafter) or name == lab.PLAIN.label:
            raise InvalidOption(f"{text!r} is not NAME=DRAFTER. Give --drafter tree=ngram+exit")
        settings[name] = {"drafter": drafter} | ({"costs": costs} if costs else {})
    return settings


def summary_of(answers: Sequence[Answer], ways: Sequence[Contender]) -> dict[str, Any]:
    """All figures of a bench; the passes of rivals cannot be counted from outside."""
    contenders = [replace(way, method=way.label, source=way.method) for way in ways]
    summary = report.summarise(answers, describe(contenders))
    outside = [way.label for way in ways if way.method in (LLAMA, OPENVINO, INT4)]
    for figures in (*summary[report.ALL].values(), *summary[report.WITHOUT_LOOPS].values()):
        for label in outside:
            figures[label]["compression_rate"] = None
    return summary


def over_first(answers: Sequence[Answer], labels: Sequence[str]) -> str:
    """Speed-ups of each method over the first, with the prompt and after it.

    After the prompt, answers of one token take no time, and are left out.
    """
    runs = report.frame_of(answers)
    runs["behind the prompt"] = runs.token_s.map(sum)
    runs["whole"] = runs.first_s + runs["behind the prompt"]
    rows: dict[str, dict[str, str]] = {label: {} for label in labels}
    for part in ("whole", "behind the prompt"):
        wide = runs.pivot(index=["id", "turn", "repeat"], columns="method", values=part)
        wide = wide[(wide > 0.0).all(axis=1)]
        for label in labels:
            gain = speed_up(wide[labels[0]], wide[label])
            rows[label][part] = f"{gain.ratio:.3f} ({gain.low:.3f} to {gain.high:.3f})"
            rows[label][f"{part}, worst"] = f"{gain.worst:.2f}"
    frame = pd.DataFrame(rows).T.rename_axis("method")
    return report.markdown(report.Table(f"Over {labels[0]}", frame.reset_index()))


def worker(
    name: str, python: str, model: Path, threads: int, context: int
) -> AbstractContextManager[lab.Ask]:
    script = Path(__file__).with_name("rivals.py")
    return lab.json_process([python, str(script), name, str(model), str(threads), str(context)])


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    code = [sys.executable, "-S", "-c", "while True: pass"]
    processes = [subprocess.Popen(code) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    lab.run(main)
