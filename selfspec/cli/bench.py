"""`selfspec bench`: methods and prompts in, a folder of measured results out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from selfspec import files
from selfspec.cli import common, concurrency, env, progress, training
from selfspec.cli.flags import Flag, grouped, inputs, merged, option_flags, with_flags
from selfspec.cli.settings import LOADING, SPECULATION, Settings, picked
from selfspec.eval.methods import METHODS, moved
from selfspec.eval.options import BenchOptions
from selfspec.typed import check_keys

if TYPE_CHECKING:
    from selfspec.api.speculator import Speculator
    from selfspec.eval.bench import Bench
    from selfspec.eval.methods import Contender
    from selfspec.eval.results import Question

DEFAULT_METHODS = ("hugging-face", "plain", "speculation", "ngram", "ngram+exit")

FLAGS = (
    Flag("output", str, "Folder to write the results to. Required."),
    Flag("methods", tuple[str, ...], f"Some of {', '.join(METHODS)}. Built in: the first five."),
    Flag(
        "sweep",
        list[str],
        "Also speculation with NAME=VALUE,..: exit.threshold=0.5,0.7; repeatable.",
    ),
    Flag(
        "concurrency",
        tuple[int, ...],
        "At 1,8,32 answers at once; other methods.",
    ),
    Flag("overwrite", bool, "Start over where the output holds results."),
    Flag("resume", bool, "Go on where an interrupted run stopped."),
    *grouped(
        "Prompts", option_flags(BenchOptions), ("suite", "limit", "max_new_tokens", "repeats")
    ),
    *LOADING,
    *SPECULATION,
)


@with_flags(*FLAGS)
def bench(
    *, config: common.ConfigFile = None, as_json: common.AsJson = False, flags: dict[str, Any]
) -> None:
    """Measure methods side by side. All answer the same prompts, in random order.

    Nothing else should run on the machine meanwhile. Exit code 1 where a method failed.
    """
    asked = merged(config, flags, FLAGS)
    training.require(asked, "output")
    options = training.options_of(BenchOptions, asked)
    if "concurrency" in asked:
        common.emit(concurrency.run(asked, options, inputs(asked, config)))
        return
    names = asked.get("methods", DEFAULT_METHODS)
    check_keys(names, METHODS, "method")
    sweep = [move for text in asked.get("sweep", []) for move in moved(text)]
    from selfspec.eval import report
    from selfspec.eval.results import check_packages, load_suite

    resume = asked.get("resume", False)
    folder = report.check_results(
        asked["output"],
        overwrite=asked.get("overwrite", False),
        resume=resume,
        reads=inputs(asked, config),
    )
    suite = load_suite(options.suite, Path(options.questions) if options.questions else None)
    if options.tune_on is not None:
        load_suite(options.tune_on)  # before the work, and where no method has a grid too
    speculator = common.load(Settings(picked(asked, LOADING), picked(asked, SPECULATION)))
    from selfspec.eval import bench as measuring
    from selfspec.eval.methods import candidates, swept
    from selfspec.model.quantised import keep_numbers

    keep_numbers(speculator.model)  # methods of Hugging Face run the model itself

    grid, moves = candidates(speculator, names), swept(speculator, sweep)
    entries = [entry for entries in (*grid.values(), moves) for entry in entries]
    if options.quality or any(entry.own_text for entry in entries):
        check_packages()
    tuning = any(len(entries) > 1 for entries in grid.values())
    questions = measuring.parted(suite, options, tuning=tuning)
    with files.locked(folder):
        report.begin_results(folder, record(asked, options, speculator, questions), resume=resume)
        runner = measuring.Bench(speculator=speculator, options=options)
        summary = measured(runner, grid, moves, questions, folder)
        text = report.write_results(folder, summary)
    common.emit(json.dumps(summary) + "\n" if as_json else text)
    for line in summary["failures"]:
        common.note(f"failed: {line}")
    if summary["failures"]:
        raise typer.Exit(1)


def measured(
    runner: Bench,
    grid: dict[str, list[Contender]],
    moves: list[Contender],
    questions: tuple[list[Question], list[Question]],
    folder: Path,
) -> dict[str, Any]:
    """Choose settings, measure, sum up."""
    from selfspec.eval.bench import chosen
    from selfspec.eval.methods import described
    from selfspec.eval.report import summarise
    from selfspec.eval.results import ANSWERS, TUNING

    reported, others = questions
    tuning = []
    if others:
        tried = [entry for entries in grid.values() if len(entries) > 1 for entry in entries]
        with progress.bar("settings", "questions") as show:
            tuning = runner.measure(others, tried, folder / TUNING, show)
    methods = [*chosen(grid, tuning).values(), *moves]
    with progress.bar("bench", "questions") as show:
        answers = runner.measure(reported, methods, folder / ANSWERS, show)
    memory = runner.memory(reported, answers, methods)
    return summarise(answers, described(methods, grid), runner.options.seed, memory)


def record(
    asked: dict[str, Any],
    options: BenchOptions,
    speculator: Speculator,
    questions: tuple[list[Question], list[Question]],
) -> dict[str, dict[str, Any]]:
    """All that the figures depend on, ready for YAML. Files are named without their folder."""
    run = {
        "methods": asked.get("methods", DEFAULT_METHODS),
        "sweep": asked.get("sweep", []),
        **options.record(),
    }
    backbone, heads = speculator.backbone, speculator.heads
    model = {
        "name": speculator.label,
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "device": str(backbone.device),
        "executor": backbone.executor_name,
        "heads": Path(asked["heads"]).name if "heads" in asked else "default",
        "head_type": None if heads is None else heads.config.head_type,
        "exit_layers": None if heads is None else heads.config.exit_layers,
        "draft_model": Path(asked["draft_model"]).name if "draft_model" in asked else None,
    }
    ids = {
        "reported": len(questions[0]),
        "settings_chosen_on": [entry.id for entry in questions[1]],
    }
    facts = {
        "run": run,
        "questions": ids,
        "model": model,
        "speculation": speculator.options.described(),
        "machine": env.machine(),
    }
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(facts))  # lists, as YAML gives back
    return plain
