r"""GammaTune's experiment: five controllers from twelve initial lengths each (its table 2).

    python -m eval.papers.gammatune --draft-model draft-model \
        --output eval/results/papers/gammatune

The drafter is a draft model, as in the document: its drafts cost time, so their number matters.
All settings answer every prompt in random order, as `selfspec bench` measures. `--unprinted` has
the constants that the document does not print, one changed at a time. The same command goes on
where it was stopped. Writes `run.yaml`, `answers.jsonl`, `summary.json`, `table.md` and
`gammatune.png`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from eval import lab
from eval.papers.shared import Panel, first_turns, load, save
from selfspec.eval.methods import Contender
from selfspec.eval.options import BenchOptions
from selfspec.eval.results import SIX_TASKS, Answer

NOTE = """\
# GammaTune's sweep of initial lengths

Gain: throughput over that of fixed lengths, both means over the twelve initial lengths, ± the
standard deviation over them. Worst: throughput from the worst initial length over the *best* fixed
length, known with hindsight; at least 95 % is wanted of GammaTune. "c": GammaTune's equation 6, a
verification costs c draft tokens, whatever its length: from counts alone. "timed": wall time behind
the prompt's pass. Controllers that adapt stay within 1 to 10 (gamma_max).
"""

CONTROLLERS = ("fixed", "heuristic", "threshold", "gammatune", "gammatune-plus")
"""Those of GammaTune's table 2, its own last."""

INITIAL_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24)
"""GammaTune, section 5."""

STEP_COSTS = (4, 10)
"""c, plain steps of the large model to one of the draft model: "typically 4 to 10" (GammaTune,
section 3)."""


class Setting(NamedTuple):
    """A controller and where it starts."""

    controller: str
    initial: int
    changed: tuple[str, float] | None = None
    """An option that is not at its default, and its value."""

    @property
    def name(self) -> str:
        """Of the controller, with what was changed."""
        return " ".join((self.controller, *(f"{part}" for part in self.changed or ())))

    @property
    def contender(self) -> Contender:
        """As `bench` measures it."""
        options = {
            "drafter": f"draft-model:max_tokens={self.initial}",
            "never_slower": False,
            "controller": {self.controller: dict([self.changed] if self.changed else [])},
        }
        label = f"{self.name}/{self.initial}"
        return Contender(label=label, method="draft-model", setting=options)


SETTINGS = tuple(Setting(name, initial) for name in CONTROLLERS for initial in INITIAL_LENGTHS)

_UNPRINTED: dict[str, dict[str, tuple[float, ...]]] = {
    "gammatune": {"rate": (0.1, 0.5, 0.8), "step": (0, 1, 4), "longest": (5, 20)},
    "gammatune-plus": {"rate": (0.1, 0.8), "threshold": (0.2, 0.6)},
}
"""Constants that GammaTune does not print, and values beside our choice."""

VARIANTS = tuple(
    Setting(controller, initial, (option, value))
    for controller, options in _UNPRINTED.items()
    for option, values in options.items()
    for value in values
    for initial in INITIAL_LENGTHS
)


def main(
    output: lab.Output,
    draft_model: Annotated[Path, typer.Option(help="Folder of a smaller model.")],
    dtype: str = "bfloat16",
    suite: lab.Suite = SIX_TASKS,
    questions: lab.Questions = None,
    limit: Annotated[int, typer.Option(help="Questions, spread over the suite.")] = 24,
    new_tokens: lab.NewTokens = 48,
    unprinted: Annotated[bool, typer.Option("--unprinted", help="Other constants too.")] = False,
) -> None:
    """Run, compare, write."""
    speculator = load(draft_model, dtype)
    asked = first_turns(suite, questions, limit)
    every = SETTINGS + (VARIANTS if unprinted else ())
    options = BenchOptions(max_new_tokens=new_tokens)
    ways = [lab.PLAIN, *(setting.contender for setting in every)]
    answers = lab.benched(output, speculator, asked, ways, options)
    counts = {setting: counted(answers, setting.contender.label) for setting in every}
    alone = counted(answers, lab.PLAIN.label)
    costs = {
        f"c = {c}": {s: one.rounds + one.drafted / c for s, one in counts.items()}
        for c in STEP_COSTS
    }
    costs["timed"] = {setting: one.seconds for setting, one in counts.items()}
    undrafted = dict.fromkeys(costs, float(alone.rounds)) | {"timed": alone.seconds}
    found = {name: gains(cost) for name, cost in costs.items()}
    rows = [
        {"controller": setting.name, "initial": setting.initial, **asdict(one)}
        | {"speed_up": {name: undrafted[name] / cost[setting] for name, cost in costs.items()}}
        for setting, one in counts.items()
    ]
    summary = {
        "questions": len(answers),
        "tokens": alone.rounds,
        "gains": {name: [asdict(gain) for gain in each] for name, each in found.items()},
        "settings": rows,
    }
    told = f"\nQuestions: {len(answers)}, {alone.rounds:,} tokens.\n\n"
    lab.finish(output, summary, NOTE + told + gains_table(found) + "\n" + counts_table(rows))
    save([panel(name, rows) for name in costs], output / "gammatune.png")


@dataclass(frozen=True)
class Counts:
    """What a setting did behind the prompts' passes, of all answers."""

    rounds: int
    drafted: int
    accepted: int
    seconds: float


def counted(answers: Sequence[Answer], label: str) -> Counts:
    """Of one setting."""
    runs = [answer.runs[label] for answer in answers]
    drafted, accepted = (
        sum(int(n) for run in runs for n in run.counts.get(f"{kind}_by_index", {}).values())
        for kind in ("drafted", "accepted")
    )
    return Counts(
        rounds=sum(len(run.arrivals) - 1 for run in runs),
        drafted=drafted,
        accepted=accepted,
        seconds=sum(gap for run in runs for _, gap in run.arrivals[1:]),
    )


@dataclass(frozen=True, kw_only=True)
class Gain:
    """One controller over all initial lengths, as in GammaTune's table 2."""

    controller: str
    """With what was changed."""
    mean: float
    """Its throughput over that of fixed lengths, both means over the initial lengths."""
    spread: float
    """Standard deviation of that over the initial lengths."""
    best: float
    """Throughput from its best initial length over that of the best fixed length."""
    worst: float
    """The same from its worst initial length: at least 0.95 is wanted of GammaTune."""
    worst_initial: int


def gains(costs: Mapping[Setting, float]) -> list[Gain]:
    """By controller, from what the same tokens cost under every setting; fixed ones too."""
    speeds: dict[str, dict[int, float]] = defaultdict(dict)
    for setting, value in costs.items():
        speeds[setting.name][setting.initial] = 1.0 / value
    usual = statistics.fmean(speeds["fixed"].values())
    hindsight = max(speeds["fixed"].values())
    found = []
    for name, by_initial in speeds.items():
        over = [speed / usual for speed in by_initial.values()]
        slowest = min(by_initial, key=lambda initial: by_initial[initial])
        found.append(
            Gain(
                controller=name,
                mean=statistics.fmean(over),
                spread=statistics.pstdev(over),
                best=max(by_initial.values()) / hindsight,
                worst=by_initial[slowest] / hindsight,
                worst_initial=slowest,
            )
        )
    return found


def gains_table(found: Mapping[str, Sequence[Gain]]) -> str:
    """Controllers down, measures across."""
    header = ["controller"]
    for name in found:
        header += [f"gain, {name}", "worst", "from"]
    rows = []
    for every in zip(*found.values(), strict=True):
        cells = [every[0].controller]
        for gain in every:
            cells += [f"{gain.mean:.2f} ± {gain.spread:.2f}", f"{gain.worst:.0%}"]
            cells += [str(gain.worst_initial)]
        rows.append(cells)
    return lab.table(header, rows)


def counts_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Exact counts of every setting, and speed-ups over plain decoding."""
    names = ("controller", "initial", "rounds", "drafted", "accepted")
    lines = [
        [*(row[name] for name in names), *(f"{value:.2f}×" for value in row["speed_up"].values())]
        for row in rows
    ]
    return lab.table([*names, *rows[0]["speed_up"]], lines)


def panel(measure: str, rows: Sequence[Mapping[str, Any]]) -> Panel:
    """Speed-up by initial length, a line per controller."""
    lines = {}
    for name in CONTROLLERS:
        own = [row for row in rows if row["controller"] == name]
        speeds = [row["speed_up"][measure] for row in own]
        lines[name] = ([row["initial"] for row in own], speeds)
    return Panel(measure, "initial length", "speed-up over plain decoding", lines)


if __name__ == "__main__":
    lab.run(main)
