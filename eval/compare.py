r"""Settings of one version, or two versions, on the same prompts: each by all, in random order.

    python -m eval.compare settings --drafter "chain=ngram+exit:guesses=1,max_tokens=2" \
        --drafter "tree=ngram+exit" --suite spec-bench --output eval/results/trees
    python -m eval.compare versions ../before . --limit 60
    python -m eval.compare versions ../before . --timed --limit 48 --threads 2

`settings`: against plain decoding and against the first, with the tables of `selfspec bench`.
Writes into the folder what `selfspec bench` does, and goes on where it was stopped. `versions`:
whether two checkouts give the same bits, or with --timed how their speeds compare; PYTHONS: an
interpreter for each. Exit code 1 where a text differs. Nothing else should run on the machine.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from eval import lab
from selfspec.errors import InvalidOption
from selfspec.eval import report
from selfspec.eval.methods import Contender, described
from selfspec.eval.options import BenchOptions
from selfspec.eval.report import frame_of, seconds_by_prompt, summarise
from selfspec.eval.results import SIX_TASKS, load_suite, speed_up
from selfspec.files import write

app = typer.Typer(pretty_exceptions_enable=False)

# --- settings -------------------------------------------------------------------------------------


@app.command()
def settings(
    output: lab.Output,
    drafter: Annotated[list[str], typer.Option(help="NAME=DRAFTER, or NAME=DRAFTER;PRICES.")],
    model: lab.Model = None,
    heads: lab.Heads = None,
    dtype: lab.Dtype = None,
    executor: str = "auto",
    suite: lab.Suite = SIX_TASKS,
    questions: lab.Questions = None,
    limit: lab.Limit = None,
    new_tokens: lab.NewTokens = 64,
    numbers: Annotated[bool, typer.Option(help="De-quantised weights.")] = False,
) -> None:
    """Drafters side by side, first turns, greedy."""
    speculator = lab.loaded(model, heads, dtype, executor, numbers=numbers)
    asked = [replace(q, turns=q.turns[:1]) for q in load_suite(suite, questions, limit)]
    ways = [lab.PLAIN]
    for name, setting in named_settings(drafter).items():
        ways.append(Contender(label=name, method="ngram+exit", setting=setting))
    options = BenchOptions(suite=suite, max_new_tokens=new_tokens)
    answers = lab.benched(output, speculator, asked, ways, options, drafters=drafter)
    summary = summarise(answers, described(ways, {}))
    seconds = seconds_by_prompt(frame_of(answers), *(way.label for way in ways[1:]))
    first, rows = ways[1].label, []
    for label in seconds:
        gain = speed_up(seconds[first], seconds[label])
        interval = f"{gain.ratio:.3f} ({gain.low:.3f} to {gain.high:.3f})"
        rows.append([label, interval, f"{gain.worst:.2f}"])
    text = report.write_results(output, summary)
    text += f"\n## Over {first}\n\n{lab.table(('setting', 'ratio', 'worst prompt'), rows)}"
    write(output / "table.md", text)
    print(text, end="")
    if any(summary["unequal"].values()):
        raise SystemExit(1)


def named_settings(drafters: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Keywords of `generate` by name, from NAME=DRAFTER[;PRICES]."""
    found: dict[str, dict[str, Any]] = {}
    for text in drafters:
        name, equals, rest = text.partition("=")
        drafter, _, prices = rest.partition(";")
        if not (name and equals and drafter) or name == lab.PLAIN.label:
            raise InvalidOption(f"{text!r} is not NAME=DRAFTER. Give --drafter tree=ngram+exit")
        found[name] = {"drafter": drafter} | ({"prices": prices} if prices else {})
    return found


# --- versions -------------------------------------------------------------------------------------

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


@contextmanager
def version(folder: Path, python: str, asked: Mapping[str, Any]) -> Iterator[lab.Ask]:
    """A checkout that answers in a process of its own.

    Raises InvalidOption where that process loads another selfspec than the folder's.
    """
    home = folder.absolute()
    command = [os.path.abspath(python), "-c", ANSWERS]  # noqa: PTH100  # a link in .venv stays one
    environment = os.environ | {"PYTHONPATH": str(home)}
    with lab.answering(command, cwd=home, env=environment) as ask:
        said = ask(asked)
        if Path(said["home"]) != home:
            raise InvalidOption(f"{python} takes selfspec from {said['home']}, not {home}")
        print(f"{folder}: {said['executor']}")
        yield ask


SIDES = ("before", "after")


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


@app.command()
def versions(
    before: Annotated[Path, typer.Argument(help="A checkout.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
    pythons: Annotated[tuple[str, str], typer.Option(help="An interpreter for each.")] = (
        sys.executable,
        sys.executable,
    ),
    suite: lab.Suite = SIX_TASKS,
    questions: lab.Questions = None,
    limit: lab.Limit = None,
    model: lab.Model = None,
    dtype: str = "bfloat16",
    executor: str = "auto",
    new_tokens: lab.NewTokens = 48,
    threads: lab.Threads = 1,
    timed: Annotated[bool, typer.Option("--timed", help="Compare seconds.")] = False,
) -> None:
    """Each prompt by both checkouts, by plain decoding and with the default drafts.

    Token ids and all counters of rounds are compared; without --timed a hash of all target logits,
    too; with it the seconds, and nothing is hashed meanwhile.
    """
    asked: dict[str, Any] = {"model": model, "dtype": dtype, "executor": executor}
    asked |= {"threads": threads, "timed": timed}
    prompts = [question.turns[0] for question in load_suite(suite, questions, limit)]
    with ExitStack() as stack:
        pairs = zip((before, after), pythons, strict=True)
        both = [stack.enter_context(version(*pair, asked)) for pair in pairs]
        found = answers(both, prompts, new_tokens)
    print(f"{len(prompts)} prompts, {new_tokens} tokens, {dtype}")
    print("\n".join((seconds if timed else bits)(found)))
    if any(one.difference for one in found):
        raise SystemExit(1)


def answers(versions: Sequence[lab.Ask], prompts: Sequence[str], count: int) -> list[Answered]:
    """Every prompt in every way, the versions in random order."""
    shuffled, found = random.Random(0), []
    for prompt in lab.each(prompts, "ask", "prompts"):
        for way, options in WAYS.items():
            request = {"prompt": prompt, "max_new_tokens": count, "do_sample": False} | options
            said = {index: versions[index](request) for index in shuffled.sample(range(2), 2)}
            found.append(Answered(prompt, way, said[0], said[1]))
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
        first, second = ([getattr(one, side)["seconds"] for one in asked] for side in SIDES)
        gain = speed_up(first, second)
        middle = statistics.median(a / b for a, b in zip(first, second, strict=True))
        lines.append(
            f"{way}: {gain.ratio:.3f} ({gain.low:.3f} to {gain.high:.3f}) times as fast, "
            f"median of prompts {middle:.3f}"
        )
    return lines


if __name__ == "__main__":
    lab.run(app)
