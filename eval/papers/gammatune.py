r"""GammaTune's experiment: five controllers from twelve initial lengths each (its table 2).

    python -m eval.papers.gammatune --draft-model draft-model \
        --output eval/results/papers/gammatune

The drafter is a draft model, as in the document: its drafts cost time, so their number matters.
All settings answer every prompt in random order, as `selfspec bench` measures. The same
command goes on where it was stopped. Writes `run.yaml`, `answers.jsonl`, `summary.json` and
`table.md`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import pandas as pd
import typer

from eval import lab
from selfspec.eval.methods import Contender
from selfspec.eval.options import BenchOptions
from selfspec.eval.report import frame_of
from selfspec.eval.results import SIX_TASKS

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
    controller: str
    initial: int

    @property
    def contender(self) -> Contender:
        options = {
            "drafter": f"draft-model:max_tokens={self.initial}",
            "never_slower": False,
            "controller": self.controller,
        }
        label = f"{self.controller}/{self.initial}"
        return Contender(label=label, method="draft-model", setting=options)


SETTINGS = tuple(Setting(name, initial) for name in CONTROLLERS for initial in INITIAL_LENGTHS)


def main(
    output: lab.Output,
    draft_model: Annotated[Path, typer.Option(help="Folder of a smaller model.")],
    dtype: str = "bfloat16",
    suite: lab.Suite = SIX_TASKS,
    questions: lab.Questions = None,
    limit: Annotated[int, typer.Option(help="Questions, spread over the suite.")] = 24,
    new_tokens: lab.NewTokens = 48,
) -> None:
    """Run, compare, write."""
    speculator = lab.drafting(draft_model, dtype)
    asked = lab.first_turns(suite, questions, limit)
    options = BenchOptions(max_new_tokens=new_tokens)
    ways = [lab.PLAIN, *(setting.contender for setting in SETTINGS)]
    answers = lab.benched(output, speculator, asked, ways, options)
    found = frame_of(answers).rename(columns={"passes": "rounds"})
    found["timed"] = found.token_s.map(sum)
    found = found.groupby("method")[["rounds", "drafted", "accepted", "timed"]].sum()
    rows = pd.DataFrame({**one._asdict(), **found.loc[one.contender.label]} for one in SETTINGS)
    alone = found.loc[lab.PLAIN.label]
    undrafted = {"timed": alone.timed}
    for c in STEP_COSTS:
        rows[f"c = {c}"], undrafted[f"c = {c}"] = rows.rounds + rows.drafted / c, alone.rounds
    gained = {name: gains(rows, name) for name in undrafted}
    for name, cost in undrafted.items():
        rows[f"speed-up, {name}"] = cost / rows[name]
    summary = {
        "questions": len(answers),
        "tokens": int(alone.rounds),
        "gains": {name: each.to_dict("records") for name, each in gained.items()},
        "settings": rows.to_dict("records"),
    }
    text = f"{NOTE}\nQuestions: {len(answers)}, {int(alone.rounds):,} tokens.\n"
    for name, each in (*((f"Gain, {name}", each) for name, each in gained.items()), ("All", rows)):
        text += f"\n## {name}\n\n{each.to_markdown(index=False, floatfmt='.2f')}\n"
    lab.finish(output, summary, text)


def gains(rows: pd.DataFrame, measure: str) -> pd.DataFrame:
    """By controller, as in GammaTune's table 2, from what the same tokens cost in `measure`.

    Mean and spread: throughput over the mean of fixed lengths', over initial lengths. Best and
    worst: over that of the best fixed length; of the worst at least 0.95 is wanted of GammaTune.
    """
    speed = 1.0 / rows.set_index(["controller", "initial"])[measure]
    usual, hindsight = speed["fixed"].mean(), speed["fixed"].max()
    by = speed.groupby("controller", sort=False)
    return pd.DataFrame(
        {
            "mean": by.mean() / usual,
            "spread": by.std(ddof=0) / usual,
            "best": by.max() / hindsight,
            "worst": by.min() / hindsight,
            "worst_initial": by.idxmin().str[1],
        }
    ).reset_index()


if __name__ == "__main__":
    lab.run(main)
