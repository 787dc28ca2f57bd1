r"""Compares two checkouts on the same prompts, in turns: equality of texts, and speed.

    python -m eval.two_versions ../before . --limit 48 --threads 2
    python -m eval.two_versions ../before . --limit 60 --bits --executor generic

Each answers in a separate process with its own PYTHONPATH. Token ids and all counters of rounds are
compared; with --bits also a hash of all target logits, instead of times. Exit code 1 if an answer
differs. Nothing else should run on the machine.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from eval import lab
from selfspec.cli.base import Executor
from selfspec.errors import InvalidOption
from selfspec.eval.results import SIX_TASKS, speed_up

WAYS = {"plain": {"speculate": False}, "default": {}}  # options that both versions know
SIDES = ("before", "after")

ANSWERS = r"""
import hashlib, json, sys, time
import selfspec, torch
asked = json.loads(sys.stdin.readline())
torch.set_num_threads(asked.pop("threads"))
bits, digest = asked.pop("bits"), None
speculator = selfspec.load(**asked)
whole = speculator.backbone.logits
def logits(hidden):
    found = whole(hidden)
    digest.update(found.numpy().tobytes())
    return found
if bits:
    speculator.backbone.logits = logits
print(json.dumps({"file": selfspec.__file__, "executor": speculator.backbone.executor_name}), flush=True)
for line in sys.stdin:
    request, digest = json.loads(line), hashlib.sha256()
    torch.manual_seed(0)
    start = time.perf_counter()
    answer = speculator.generate(request.pop("prompt"), **request)
    found = {"ids": answer.token_ids, "logits": digest.hexdigest(), "seconds": time.perf_counter() - start}
    timed = ("seconds", "ttft_s", "decode_s", "decode_tokens_per_s")
    counted = answer.stats.to_dict().items()
    print(json.dumps(found | {"counts": {k: v for k, v in counted if k not in timed}}), flush=True)
"""  # noqa: E501
"""The program that runs in each checkout: it uses only what both versions offer."""


def main(
    before: Annotated[Path, typer.Argument(exists=True, help="A checkout.")],
    after: Annotated[Path, typer.Argument(exists=True, help="Another one.")],
    suite: lab.Suite = SIX_TASKS,
    limit: lab.Limit = None,
    model: lab.Model = None,
    dtype: str = "bfloat16",
    executor: Executor = "auto",
    new_tokens: lab.NewTokens = 48,
    threads: lab.Threads = 1,
    bits: Annotated[bool, typer.Option("--bits", help="Compare logits, not times.")] = False,
) -> None:
    """Answer each prompt with both checkouts, by plain decoding and with the default drafts."""
    setup = {"model": model, "dtype": dtype, "executor": executor, "threads": threads, "bits": bits}
    prompts = lab.prompts(suite, limit=limit)
    with ExitStack() as stack:
        versions = [stack.enter_context(version(folder, setup)) for folder in (before, after)]
        frame = answers(versions, prompts, new_tokens)
    unlike = differences(frame)
    print(unlike.to_markdown(index=False) if len(unlike) else "")
    print(f"{len(prompts)} prompts, {dtype}: {len(unlike)} of {len(frame)} answers differ")
    if not bits:
        print(speeds(frame).to_markdown(floatfmt=".3f"))
    raise typer.Exit(int(len(unlike) > 0))


@contextmanager
def version(folder: Path, setup: Mapping[str, Any]) -> Iterator[lab.Ask]:
    """A process of a checkout. Raises InvalidOption if it loads another selfspec than its own."""
    home = folder.resolve()
    env = os.environ | {"PYTHONPATH": str(home)}
    with lab.json_process([sys.executable, "-c", ANSWERS], cwd=home, env=env) as ask:
        facts = ask(setup)
        if Path(facts["file"]).parents[1] != home:
            raise InvalidOption(f"{sys.executable} takes selfspec from {facts['file']}, not {home}")
        print(f"{folder}: {facts['executor']}")
        yield ask


def answers(versions: Sequence[lab.Ask], prompts: Sequence[str], count: int) -> pd.DataFrame:
    """A row per prompt and way, the versions in random order: tokens, seconds, what differs."""
    dice, rows = random.Random(0), []
    for prompt in lab.track(prompts, "ask", "prompts"):
        for way, options in WAYS.items():
            request = {"prompt": prompt, "max_new_tokens": count, "do_sample": False} | options
            replies = {SIDES[at]: versions[at](request) for at in dice.sample(range(2), 2)}
            first, second = (replies[side] for side in SIDES)
            parts = [part for part in ("ids", "logits", "counts") if first[part] != second[part]]
            row: dict[str, Any] = {"prompt": prompt, "way": way, "differ": ", ".join(parts)}
            for side, answer in replies.items():
                row |= {side: answer["seconds"], f"{side}_tokens": len(answer["ids"])}
            rows.append(row)
    return pd.DataFrame(rows)


def differences(frame: pd.DataFrame) -> pd.DataFrame:
    """Answers that differ, and how, with the first words of their prompts."""
    unlike = frame.loc[frame.differ != "", ["way", "differ", "prompt"]]
    return unlike.assign(prompt=unlike.prompt.str.slice(0, 60))


def speeds(frame: pd.DataFrame) -> pd.DataFrame:
    """By way: medians of tokens per second, and the speed-up of the second over the first."""
    rows = {}
    for way, runs in frame.groupby("way", sort=False):
        gain = speed_up(runs.before, runs.after)
        rates = {f"{one}, tokens/s": (runs[f"{one}_tokens"] / runs[one]).median() for one in SIDES}
        ends = {"ratio": gain.ratio, "low": gain.low, "high": gain.high}
        rows[way] = rates | ends | {"median ratio": (runs.before / runs.after).median()}
    return pd.DataFrame(rows).T


if __name__ == "__main__":
    lab.run(main)
