r"""Drafters on the same prompts, each by all, in random order; first turns, greedy.

    python -m eval.compare --drafter "chain=ngram+exit:guesses=1,max_tokens=2" \
        --drafter "tree=ngram+exit" --suite spec-bench --output eval/results/trees

Against plain decoding and against the first, with the tables of `selfspec bench`. Writes into the
folder what that does, and goes on where it was stopped. Exit code 1 where a text differs. Nothing
else should run on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from eval import lab
from selfspec.errors import InvalidOption
from selfspec.eval import report
from selfspec.eval.bench import Contender, described
from selfspec.eval.report import frame_of, seconds_by_prompt, summarise
from selfspec.eval.results import SIX_TASKS, BenchOptions, speed_up
from selfspec.files import write


def main(
    output: lab.Output,
    drafter: Annotated[list[str], typer.Option(help="NAME=DRAFTER, or NAME=DRAFTER;COSTS.")],
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
    """Measure, then write."""
    speculator = lab.loaded(model, heads, dtype, executor, numbers=numbers)
    asked = lab.first_turns(suite, questions, limit)
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
    """Keywords of `generate` by name, from NAME=DRAFTER[;COSTS]."""
    found: dict[str, dict[str, Any]] = {}
    for text in drafters:
        name, equals, rest = text.partition("=")
        drafter, _, costs = rest.partition(";")
        if not (name and equals and drafter) or name == lab.PLAIN.label:
            raise InvalidOption(f"{text!r} is not NAME=DRAFTER. Give --drafter tree=ngram+exit")
        found[name] = {"drafter": drafter} | ({"costs": costs} if costs else {})
    return found


if __name__ == "__main__":
    lab.run(main)
