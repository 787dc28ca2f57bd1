r"""Settings of one version, or two versions, on the same prompts: each by all, in random order.

    python -m eval.compare settings --drafter "chain=ngram+exit:guesses=1,max_tokens=2" \
        --drafter "tree=ngram+exit" --suite spec-bench --output eval/results/trees
    python -m eval.compare tuned --limit 12 --output eval/results/tuned-bf16
    python -m eval.compare versions ../before . --limit 60
    python -m eval.compare versions ../before . --timed --limit 48 --threads 2

`settings`: against plain decoding and against the first, with the tables of `selfspec bench`.
`tuned`: what `selfspec tune` chooses, against the best of a grid of settings that are really run.
The grid's best is named twice: with hindsight, on the very prompts that it is timed on, and found
on one half of them and timed on the other, as any real search would have it. Both write into the
folder what `selfspec bench` does, and go on where they were stopped. `versions`: whether two
checkouts give the same bits, or with --timed how their speeds compare; PYTHONS: an interpreter for
each. Exit code 1 where a text differs. Nothing else should run on the machine.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import typer

from eval import lab
from selfspec.api.speculator import Speculator
from selfspec.cli.base import bar
from selfspec.decoding.measure import measure
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.eval import report
from selfspec.eval.methods import Contender, Moved, described, swept
from selfspec.eval.options import BenchOptions, RecordOptions, TuneOptions
from selfspec.eval.record import record
from selfspec.eval.report import frame_of, seconds_by_prompt, summarise
from selfspec.eval.results import SIX_TASKS, Answer, Question, SpeedUp, load_suite, speed_up, spread
from selfspec.eval.tune import Tuned, tune
from selfspec.files import write
from selfspec.options import word

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


# --- what `selfspec tune` chooses -----------------------------------------------------------------

TAUS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
WIDTHS = (1, 2, 3, 5, 7)


@app.command()
def tuned(
    output: lab.Output,
    model: lab.Model = None,
    heads: lab.Heads = None,
    dtype: str = "bfloat16",
    suite: lab.Suite = SIX_TASKS,
    limit: Annotated[int, typer.Option(help="Questions to time, spread over the suite.")] = 12,
    tune_limit: Annotated[int, typer.Option(help="Others to tune on.")] = 12,
    new_tokens: lab.NewTokens = 64,
    points: Annotated[int, typer.Option(help="Settings of the grid.")] = 30,
    repeats: int = 1,
    seed: int = 0,
) -> None:
    """Tune on some questions, then compare with a grid on others."""
    speculator = lab.loaded(model, heads, dtype)
    if speculator.heads is None:
        raise HeadsNotFound("without exit heads there is nothing to tune. Give --heads")
    whole = load_suite(suite)
    tuning = spread(whole, tune_limit)
    asked = spread([question for question in whole if question not in tuning], limit)
    chosen = tuned_on(speculator, tuning, new_tokens)
    settings = [chosen.options | {"never_slower": True}, *grid(speculator, points, seed)]
    # no drafter where none pays
    moves = [Moved("drafter", one.get("drafter", "none"), one) for one in settings]
    own, *others = swept(speculator, moves)
    ways = [lab.PLAIN, replace(own, label="tuned"), *others]
    options = BenchOptions(suite=suite, max_new_tokens=new_tokens, repeats=repeats, seed=seed)
    ids = [question.id for question in tuning]
    about = {"tuned_on": ids, "tuned": dict(own.setting)}
    answers = lab.benched(output, speculator, asked, ways, options, **about)
    summary = compared(answers, [way.label for way in others], seed)
    summary |= {"promised": chosen.speed_up, **about}
    lab.finish(output, summary, tuned_table(summary))


def tuned_on(speculator: Speculator, questions: Sequence[Question], new_tokens: int) -> Tuned:
    """What `selfspec tune` would keep, with its own defaults."""
    with bar("record", "questions") as show:
        made = record(speculator, questions, RecordOptions(max_new_tokens=new_tokens), show)
    rows = made.info.max_draft_tokens + 1
    costs = measure(speculator.backbone, speculator.heads, rows=rows, context=made.mean_context)
    with bar("replay", "settings") as show:
        return tune(made, costs, TuneOptions(), show)


def grid(speculator: Speculator, points: int, seed: int) -> list[dict[str, Any]]:
    """Each exit layer alone and all together, at all thresholds and widths; `points` by chance."""
    assert speculator.heads is not None  # noqa: S101  # `tuned` has checked
    fitted = tuple(speculator.heads.config.exit_layers)
    sets = dict.fromkeys([*((layer,) for layer in fitted), fitted])
    every = [
        {"drafter": f"exit:layers={word(layers)},threshold={tau},max_depth=none,max_tokens={width}"}
        for layers, tau, width in itertools.product(sets, TAUS, WIDTHS)
    ]
    return random.Random(seed).sample(every, min(points, len(every)))


def compared(answers: Sequence[Answer], labels: Sequence[str], seed: int) -> dict[str, Any]:
    """The tuned setting against plain decoding and against the grid's best, found in both ways."""
    every = seconds_by_prompt(frame_of(answers), "tuned", "plain", *labels)
    tuned, plain, points = every.tuned, every.plain, every[list(labels)]
    best, fair = points.sum().idxmin(), searched(points)
    pairs = {
        "tuned_over_plain": (plain, tuned),
        "best_over_plain": (plain, points[best]),
        "searched_over_plain": (plain, fair),
        "tuned_over_best": (points[best], tuned),
        "tuned_over_searched": (fair, tuned),
    }
    return {"prompts": len(plain), "points": len(labels), "best": best} | {
        name: asdict(speed_up(*pair, seed)) for name, pair in pairs.items()
    }


def searched(points: pd.DataFrame) -> pd.Series:
    """Of each half of the prompts the seconds of the setting that is best on the other half."""
    halves = points[::2], points[1::2] if len(points) > 1 else points
    found = [half[other.sum().idxmin()] for half, other in (halves, halves[::-1])]
    return pd.concat(found)[points.index] if len(points) > 1 else found[0]


def tuned_table(summary: Mapping[str, Any]) -> str:
    """Ratios of total seconds with 95 % intervals over prompts."""
    names = {
        "tuned_over_plain": "the tuned setting, over plain decoding",
        "best_over_plain": f"the grid's best with hindsight ({summary['best']}), over plain",
        "searched_over_plain": "the grid's best, found on the other half, over plain",
        "tuned_over_best": "tuned, over the best with hindsight",
        "tuned_over_searched": "tuned, over the best found on the other half",
    }
    gains = {name: SpeedUp(**summary[key]) for key, name in names.items()}
    rows = [
        [name, f"{gain.ratio:.3f}", f"{gain.low:.3f} to {gain.high:.3f}"]
        for name, gain in gains.items()
    ]
    return lab.table(("speed-up of", "ratio", "95 %"), rows) + (
        f"\n{summary['prompts']} prompts, {summary['points']} points of the grid; tune promised "
        f"{summary['promised']:.2f} behind the prompt's pass. To reach: tuned over the best at "
        "least 0.97, over plain decoding at least 0.98.\n"
    )


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
