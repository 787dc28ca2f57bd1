"""Whether two checkouts of selfspec give the same bits, and how their speeds compare.

    python -m eval.two_versions ../before . --suite spec-bench --questions question.jsonl --limit 60
    python -m eval.two_versions ../before . --timed --limit 48 --threads 2

Each checkout answers every prompt in a process of its own, one after the other in random order, by
plain decoding and with its default drafts. Token ids and all counters of its rounds are compared;
without --timed a hash of all target logits, too; with it the seconds, and nothing is hashed
meanwhile. PYTHONS: an interpreter for each. Exit code 1 where something differs.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from selfspec.cli import progress
from selfspec.errors import InvalidOption
from selfspec.eval.results import SIX_TASKS, load_suite, speed_up

WAYS = {"plain": {"speculate": False}, "default": {}}
"""Options that both versions know."""

ANSWERS = r"""
import hashlib, json, sys, time
import torch
asked = json.loads(sys.stdin.readline())
torch.set_num_threads(asked.pop("threads"))
timed = asked.pop("timed")
import selfspec
from pathlib import Path
home = str(Path(selfspec.__file__).parents[1])
speculator = selfspec.load(**asked)
whole, digest = speculator.backbone.logits, None
def logits(hidden):
    found = whole(hidden)
    digest.update(found.numpy().tobytes())
    return found
if not timed:
    speculator.backbone.logits = logits
print(json.dumps({"home": home, "executor": speculator.backbone.executor_name}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    digest = hashlib.sha256()
    torch.manual_seed(0)
    start = time.perf_counter()
    answer = speculator.generate(request.pop("prompt"), **request)
    seconds = time.perf_counter() - start
    found = {"ids": answer.token_ids, "logits": digest.hexdigest(), "seconds": seconds}
    counted = answer.stats.to_dict().items()
    timed_too = ("seconds", "ttft_s", "decode_s", "decode_tokens_per_s")
    found["counts"] = {name: value for name, value in counted if name not in timed_too}
    print(json.dumps(found), flush=True)
"""
"""What runs in each checkout: only what both versions offer."""


class Version:
    """A checkout that answers in a process of its own."""

    def __init__(self, folder: Path, python: str, asked: dict[str, Any]) -> None:
        """Raises InvalidOption where that process loads another selfspec than the folder's."""
        self.folder = folder.absolute()
        environment = os.environ | {"PYTHONPATH": str(self.folder)}
        self._process = subprocess.Popen(
            [os.path.abspath(python), "-c", ANSWERS],  # noqa: PTH100  # a link in .venv stays one
            cwd=self.folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = self.ask(asked)
        if Path(said["home"]) != self.folder:
            raise InvalidOption(f"{python} takes selfspec from {said['home']}, not {self.folder}")
        self.executor: str = said["executor"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One line there, one line back. Raises InvalidOption where the process has ended."""
        there, back = self._process.stdin, self._process.stdout
        assert there is not None  # noqa: S101  # both are pipes
        assert back is not None  # noqa: S101
        there.write(json.dumps(request) + "\n")
        there.flush()
        line = back.readline()
        if not line:
            raise InvalidOption(f"the process of {self.folder} has ended: see its error above")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Answered(NamedTuple):
    """What both versions answered to one prompt in one way."""

    prompt: str
    way: str
    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def difference(self) -> str | None:
        """What is not the same, or None."""
        parts = ("ids", "logits", "counts")
        return next((part for part in parts if self.before[part] != self.after[part]), None)


def main(
    before: Annotated[Path, typer.Argument(help="A checkout.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
    pythons: Annotated[tuple[str, str], typer.Option(help="An interpreter for each.")] = (
        sys.executable,
        sys.executable,
    ),
    suite: str = SIX_TASKS,
    questions: Annotated[Path | None, typer.Option(help="The suite's file.")] = None,
    limit: Annotated[int | None, typer.Option(help="Questions, spread over the suite.")] = None,
    model: str | None = None,
    dtype: str = "bfloat16",
    executor: str = "auto",
    new_tokens: int = 48,
    threads: int = 1,
    timed: Annotated[bool, typer.Option("--timed", help="Compare seconds.")] = False,
) -> None:
    """Ask both."""
    asked: dict[str, Any] = {"model": model, "dtype": dtype, "executor": executor}
    asked |= {"threads": threads, "timed": timed}
    prompts = [question.turns[0] for question in load_suite(suite, questions, limit)]
    versions = [Version(*pair, asked) for pair in zip((before, after), pythons, strict=True)]
    try:
        found = answers(versions, prompts, new_tokens)
    finally:
        for version in versions:
            version.close()
    names = " and ".join(version.executor for version in versions)
    print(f"{len(prompts)} prompts, {new_tokens} tokens, {dtype}, {names}")
    for line in (seconds if timed else bits)(found):
        print(line)
    if any(one.difference for one in found):
        raise SystemExit(1)


def answers(versions: Sequence[Version], prompts: Sequence[str], count: int) -> list[Answered]:
    """Every prompt in every way, the versions in random order."""
    shuffled, found = random.Random(0), []
    with progress.bar("ask", "prompts") as show:
        for number, prompt in enumerate(prompts):
            for way, options in WAYS.items():
                request = {"prompt": prompt, "max_new_tokens": count, "do_sample": False} | options
                said = {}
                for index in shuffled.sample(range(2), 2):
                    said[index] = versions[index].ask(request)
                found.append(Answered(prompt, way, said[0], said[1]))
            show(number + 1, len(prompts), "")
    return found


def bits(found: Sequence[Answered]) -> list[str]:
    """What differs, and how much was compared."""
    parted = [one for one in found if one.difference]
    lines = [f"{one.way} {one.difference} differ: {one.prompt[:60]!r}" for one in parted]
    tokens = sum(len(one.after["ids"]) for one in found)
    return [*lines, f"{tokens:,} tokens and their logits, {len(parted)} answers differ"]


def seconds(found: Sequence[Answered]) -> list[str]:
    """How often the second fits into the time of the first, by way."""
    lines = []
    for way in WAYS:
        asked = [one for one in found if one.way == way]
        first = {str(number): one.before["seconds"] for number, one in enumerate(asked)}
        second = {str(number): one.after["seconds"] for number, one in enumerate(asked)}
        gain = speed_up(first, second)
        middle = statistics.median(first[name] / second[name] for name in first)
        lines.append(
            f"{way}: {gain.ratio:.3f} ({gain.low:.3f} to {gain.high:.3f}) times as fast, "
            f"median of prompts {middle:.3f}"
        )
    return lines


if __name__ == "__main__":
    typer.run(main)
