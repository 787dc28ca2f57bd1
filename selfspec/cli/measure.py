"""The commands that measure and show: `trace`, `tune`, `bench`, `report`, `verify` and `env`."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from selfspec import files
from selfspec.cli import base
from selfspec.cli.base import Args, Flag
from selfspec.config import SpeculationOptions
from selfspec.decoding.stats import counted
from selfspec.errors import InvalidOption, ModelNotFound, check_keys, check_packages
from selfspec.eval import results
from selfspec.eval.bench import METHODS, Bench, best_of, candidates, describe, split, sweeps, swept
from selfspec.hub import models as hub

if TYPE_CHECKING:
    from selfspec.api.speculator import Speculator
    from selfspec.decoding.measure import StepSpeed
    from selfspec.visualise.layers import LayerTrace

SUITE = base.option_flags(results.BenchOptions, ("suite", "questions", "limit"))


def suite_of(args: Args, limit: int) -> list[results.Question]:
    """The questions that the flags ask for; up to `limit` without --limit."""
    name, questions = args.get("suite", results.SIX_TASKS), args.get("questions")
    return results.load_suite(name, questions, args.get("limit", limit))


def for_model(speculator: Speculator, questions: list[results.Question]) -> list[results.Question]:
    """The questions; for a base model their first turns, which a note says that it continues."""
    if not base.raw_flag(speculator.tokenizer):
        return questions
    advice = "If it is one for chats, give --chat-template"
    base.note(f"{speculator.label} has no chat template: it continues each prompt. {advice}")
    return [replace(question, turns=question.turns[:1]) for question in questions]


# --- trace

_TARGETS = (  # files to write
    Flag("html", str, "File for an interactive page."),
    Flag("output", str, "File for the trace, one JSON record per line."),
    Flag("card", str, "PNG to share: question, answer and one factor."),
)
_FROM = {"source", "html", "card", "rejected", "overwrite"}  # flags that may go with --from


@base.with_flags(
    Flag("source", str, "Show a trace saved by --output; no prompt.", ("--from",), metavar="FILE"),
    *_TARGETS,
    Flag("all_layers", bool, "Also layers without heads. Default: on."),
    Flag("rejected", bool, "Also show rejected drafts."),
    base.RAW,
    Flag("overwrite", bool, "Replace files of an earlier trace."),
    *base.SHARED,
)
def trace(prompt: base.Prompt = None, *, as_json: base.AsJson = False, args: base.Given) -> None:
    """Show where each token of an answer came from. Also each layer's prediction and confidence."""
    if args.get("source") is not None:
        if prompt is not None:
            raise InvalidOption("a prompt and --from at once, expected one. Leave one of them out")
        reason = "means nothing with --from, a saved answer. Leave it out"
        base.refuse(args, args.names - _FROM, reason)
    targets = _check_targets(args)
    with contextlib.ExitStack() as stack:
        for path in targets.values():
            stack.enter_context(files.locked(path))
        layer_trace = _layer_trace(prompt, args)
        from selfspec.visualise.views import render, show

        if "output" in targets:
            layer_trace.save(targets["output"])
        if "card" in targets:
            from selfspec.visualise.picture import save_card

            save_card(layer_trace, targets["card"])
        if "html" in targets:
            files.write(targets["html"], render(layer_trace))
        for path in targets.values():
            base.note(f"wrote {path}")
    if as_json:
        base.emit("".join(json.dumps(line) + "\n" for line in layer_trace.lines()))
        return
    from rich.console import Console

    show(layer_trace, Console(highlight=False), rejected=args.get("rejected", False))


def _check_targets(args: Args) -> dict[str, Path]:
    targets: dict[str, Path] = {}
    for name, file in sorted(base.pick(args, _TARGETS).items()):
        path = base.check_file(args, file)
        suffix = {"card": ".png", "html": ".html"}.get(name, path.suffix)
        if path.suffix != suffix:
            raise InvalidOption(f"--{name} {path}: expected a name that ends in {suffix}")
        if name == "card":
            check_packages("--card", "matplotlib")
        if path in targets.values():
            raise InvalidOption(f"{path} is named for two outputs. Name another file")
        targets[name] = path
    return targets


def _layer_trace(prompt: str | None, args: base.Given) -> LayerTrace:
    """Decode and look at each layer, or load a saved trace."""
    if args.get("source") is not None:
        from selfspec.visualise.layers import LayerTrace

        return LayerTrace.load(files.local_path(args["source"]))
    options = base.answer_options(args) | {"raw": args.get("raw", False)}
    text = base.read_prompt(prompt, raw=options["raw"])
    base.check_template(args, "trace")
    speculator = base.load(args)
    from selfspec.visualise.look import inspect

    tokens = itertools.count()  # the prompt comes first
    with base.bar("trace", "tokens") as bar:
        streamer = SimpleNamespace(put=lambda _: bar(next(tokens), None), end=lambda: None)
        options |= {"streamer": streamer, "all_layers": args.get("all_layers", True)}
        return inspect(speculator, text, **options)


# --- tune

_QUESTIONS = 24  # without --limit: four of each task, a few minutes for the default model

_OBJECTIVE = (
    "speed: the least time over all prompts. latency: the best 5th percentile of the prompts' own "
    "speed-ups, so that hardly any prompt is slower than without drafts. Default: speed."
)


@base.with_flags(
    *SUITE,
    *base.LOADING,
    Flag("max_new_tokens", int, "Maximum new tokens per answer, at least 2. Default: 64."),
    Flag("objective", Literal["speed", "latency"], _OBJECTIVE),
    Flag("dry_run", bool, "Report only."),
    Flag("forget", bool, "Remove what was measured and chosen for this model on this machine."),
)
def tune(*, as_json: base.AsJson = False, args: Args) -> None:
    """Find the settings that suit this machine. Commands then use them by default.

    Without exit heads: how prompt lookup drafts. All settings answer some questions (their first
    turns), the faster ones answer more, and the reported speed is measured on held-out questions.
    Answers are timed, so nothing else should run meanwhile.
    """
    from selfspec.api import tuned
    from selfspec.eval import tune as tuning

    if args.get("forget", False) and (as_json or args.get("dry_run", False)):
        raise InvalidOption("--forget removes files, without --json or --dry-run. Leave them out")
    new_tokens = args.get("max_new_tokens", tuning.NEW_TOKENS)
    if new_tokens < 2:
        raise InvalidOption(f"max_new_tokens is {new_tokens}, expected at least 2")
    questions = suite_of(args, _QUESTIONS)
    if len(questions) < 2:
        raise InvalidOption("one question cannot be held out. Use at least two: --limit 2")
    speculator = base.load(base.pick(args, base.LOADING))
    backbone, heads = speculator.backbone, speculator.heads
    if args.get("forget", False):
        lines = [f"removed {file}\n" for file in tuned.forget(backbone, heads)]
        notice = "nothing was tuned for this model and its heads on this machine\n"
        base.emit("".join(lines) or notice)
        return
    prompts = [one.turns[0] for one in for_model(speculator, questions)]
    objective = args.get("objective", "speed")
    with base.bar("tune", "questions") as show:
        choice = tuning.tune(speculator, prompts, show, objective, new_tokens)
    fields, file = asdict(choice), None
    if not args.get("dry_run", False):
        file = tuned.write(backbone, heads, choice.options, fields)
    if as_json:
        base.emit_json(fields | {"file": file and str(file)})
    else:
        base.emit(f"{choice.settings:,} settings tried on {counted(choice.prompts, 'prompt')}\n")
        if choice.options["speculate"]:
            base.emit(f"drafter {choice.options['drafter']}\ncosts {choice.options['costs']}\n")
            rate = f"{choice.compression_rate:.2f} tokens per verification"
            base.emit(f"{rate}, worst prompt {choice.worst:.2f} x\n")
        base.emit(f"{choice.sentence()}\n")
        if file is not None:
            base.emit(f"saved in {file}; selfspec tune --forget removes it\n")
    if file is not None:
        flags = ["--heads", str(args["heads"])] if "heads" in args else []
        flags += base.raw_flag(speculator.tokenizer)
        base.say_next("generate", args, "--stats", *flags, "Name three rivers.")


# --- bench

_METHODS = ("hugging-face", "plain", "speculation", "ngram", "ngram+exit")
_NO_HEADS = ("hugging-face", "plain", "ngram")
_USUAL = ("suite", "limit", "max_new_tokens", "repeats")  # flags that --help lists


@base.with_flags(
    Flag("output", str, "Folder to write the results to. Required."),
    Flag("methods", tuple[str, ...], f"Some of {', '.join(METHODS)}. Default: the first five."),
    Flag(
        "sweep",
        list[str],
        "Also measure speculation with NAME=VALUE,..: exit.threshold=0.5,0.7; repeatable.",
    ),
    Flag("concurrency", tuple[int, ...], "Measure this many answers at once instead: 1,8,32."),
    Flag("overwrite", bool, "Start over and replace results in the output."),
    *base.group_flags("Prompts", _USUAL, *base.option_flags(results.BenchOptions)),
    *base.LOADING,
    *base.SPECULATION,
)
def bench(*, as_json: base.AsJson = False, args: base.Given) -> None:
    """Measure methods side by side. All answer the same prompts, in random order.

    Nothing else should run on the machine meanwhile. The same command continues a killed run. Exit
    code 1 if a method failed.
    """
    base.require(args, "output")
    options = base.options_of(results.BenchOptions, args)
    check_packages("bench", "pandas", "tabulate", "matplotlib")
    if "concurrency" in args.names:
        base.emit(_concurrency(args, options, as_json=as_json))
        return
    check_keys(args.get("methods", ()), METHODS, "method")
    sweep = {label: move for text in args.get("sweep", []) for label, move in sweeps(text).items()}
    from selfspec.eval import report

    overwrite = args.get("overwrite", False)
    folder = report.check_results(args["output"], overwrite=overwrite, reads=base.inputs(args))
    suite = results.load_suite(options.suite, options.questions)
    costs = {} if overwrite else report.costs_of(folder / report.RUN)
    speculator = base.load(costs | args, runs_model=True)
    names = args.get("methods", _METHODS if speculator.heads else _NO_HEADS)
    grid, moves = candidates(speculator, names), swept(speculator, sweep)
    own_text = any(entry.may_differ for entries in (*grid.values(), moves) for entry in entries)
    if options.quality or own_text:
        check_packages("the quality of texts", "sacrebleu", "rouge_score")
    contenders = [entry for entries in grid.values() if len(entries) > 1 for entry in entries]
    questions = split(for_model(speculator, suite), options, tuning=bool(contenders))
    record = _record(args, names, options, speculator, questions)
    runner, tuning = Bench(speculator=speculator, options=options), []
    with files.locked(folder):
        report.begin_results(folder, record, overwrite=overwrite)
        if contenders:
            with base.bar("settings", "questions") as show:
                tuning = runner.measure(questions[1], contenders, folder / results.TUNING, show)
        methods = [*best_of(grid, tuning).values(), *moves]
        with base.bar("bench", "questions") as show:
            answers = runner.measure(questions[0], methods, folder / results.ANSWERS, show)
        summary = report.summarise(answers, describe(methods), options.seed)
        report.write_results(folder, summary)
    text = f"{report.verdict(summary)}\nTables: {folder / 'table.md'}\n{report.rates(summary)}"
    base.emit(json.dumps(summary) + "\n" if as_json else text)
    if failures := summary["failures"]:
        base.to_stderr("".join(f"failed: {line}\n" for line in failures).rstrip())
        raise typer.Exit(1)


def _record(
    args: Args,
    names: Sequence[str],
    options: results.BenchOptions,
    speculator: Speculator,
    questions: tuple[list[results.Question], list[results.Question]],
) -> dict[str, dict[str, Any]]:
    """Everything that the figures depend on, ready for YAML. Files are named without a folder."""
    from selfspec.api import tuned

    backbone, heads = speculator.backbone, speculator.heads
    draft, store = speculator.runtime.draft_model, speculator.runtime.datastore
    flags = ("heads", "draft_model", "datastore")
    file_names = {name: Path(args[name]).name for name in flags if args.get(name)}
    facts = {
        "run": {"methods": names, "sweep": args.get("sweep", []), **options.record()},
        "questions": {
            "reported": len(questions[0]),
            "settings_chosen_on": [question.id for question in questions[1]],
            "digest": hashlib.sha256(repr(questions).encode()).hexdigest()[:16],
        },
        "model": {
            "name": speculator.label,
            "fingerprint": backbone.fingerprint[:16],
            "dtype": str(backbone.dtype).removeprefix("torch."),
            "device": str(backbone.device),
            "executor": backbone.executor_name,
            "heads": file_names.get("heads", "default" if heads else "none"),
            "heads_digest": heads and tuned.heads_hash(heads)[:16],
            "head_type": heads and heads.config.head_type,
            "exit_layers": heads and heads.config.exit_layers,
            "draft_model": file_names.get("draft_model"),
            "draft_fingerprint": draft and draft.fingerprint[:16],
            "datastore": file_names.get("datastore"),
            "datastore_digest": store and hashlib.sha256(store.ids.tobytes()).hexdigest()[:16],
        },
        "speculation": speculator.options.described(),
        "machine": hub.machine(),
    }
    record: dict[str, dict[str, Any]] = json.loads(json.dumps(facts))  # lists, as YAML reads them
    return record


def _concurrency(args: base.Given, options: results.BenchOptions, *, as_json: bool) -> str:
    ignored = {"sweep", "quality", "tune_questions"}
    base.refuse(args, ignored, "means nothing with --concurrency. Leave it out")
    texts = tuple(dict.fromkeys(args["concurrency"]))  # the table has one line for each
    folder = files.local_path(args["output"])
    file_names = ("concurrency.json", "concurrency.md")
    outputs = [base.check_file(args, folder / name) for name in file_names]
    suite = results.load_suite(options.suite, options.questions, options.limit)
    if max(texts) > len(suite):
        problem = f"{max(texts)} texts at once, of {counted(len(suite), 'question')}"
        raise InvalidOption(f"{problem}. Give a larger --limit or a smaller --concurrency")
    from selfspec.eval import concurrency, report

    names = tuple(dict.fromkeys(args.get("methods", concurrency.METHODS)))
    check_keys(names, concurrency.METHODS, "method")
    overwrite, parse = args.get("overwrite", False), lambda line: concurrency.Load(**line)
    partial, total = folder / "concurrency.jsonl", len(texts) * len(names) * options.repeats
    costs = {} if overwrite else report.costs_of(partial)
    speculator = base.load(costs | args, runs_model=True)
    record = _record(args, names, options, speculator, (for_model(speculator, suite), []))
    summary: dict[str, Any] = {"made_by": "selfspec bench", **record, "texts": list(texts)}
    with files.locked(folder), base.bar("concurrency", "measurements") as show:
        loads = results.resume(partial, summary, parse, overwrite=overwrite)
        show(len(loads), total)
        for load in concurrency.measure_loads(speculator, suite, texts, names, options, [*loads]):
            files.append(partial, json.dumps(asdict(load)))
            loads.append(load)
            show(len(loads), total, f"{load.method}, {counted(load.texts, 'text')}")
        summary["loads"] = [load.summary() for load in loads]
        text = concurrency.table(loads)
        files.write(outputs[0], json.dumps(summary, indent=2) + "\n")
        files.write(outputs[1], f"<!-- written by selfspec bench -->\n{text}")
        partial.unlink()
    return json.dumps(summary) + "\n" if as_json else text


# --- report


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR..", help="Results folders of selfspec bench.")
    ],
    *,
    output: Annotated[str, typer.Option("--output", metavar="FILE", help="The page, HTML.")],
    overwrite: base.Overwrite = False,
) -> None:
    """Gather results of benchmarks into one page."""
    check_packages("report", "pandas", "tabulate", "matplotlib")
    from selfspec.eval.report import FILES, page, read_results

    reads = [folder / name for folder in folders for name in FILES]
    path = files.check_file(output, overwrite=overwrite, reads=reads)
    files.write(path, page([read_results(files.local_path(folder)) for folder in folders]))
    base.emit(f"{path}\n")


# --- verify

_PROMPTS, _NEW_TOKENS, _COPY_GB = 6, 48, 8.0


@base.with_flags(
    *base.LOADING,
    *(flag for flag in base.SPECULATION if flag.name != "pinned"),  # the checks set it themselves
    *SUITE,
    Flag("max_new_tokens", int, f"Maximum new tokens per prompt. Default: {_NEW_TOKENS}."),
    Flag("rungs", tuple[int, ...], "Which of the seven checks to run: 1,2,6. The third is slow."),
    Flag("max_copy_gb", float, f"Largest float32 or float64 copy to make. Default: {_COPY_GB}."),
)
def verify(*, as_json: base.AsJson = False, args: Args) -> None:
    """Check that drafts change nothing here. Seven checks; exit code 1 if one fails.

    The checks decode greedily, six prompts unless --limit is given. The test suite checks that
    samples keep their distribution.
    """
    from selfspec.eval import verify as ladder

    new_tokens = base.answer_options(args).get("max_new_tokens", _NEW_TOKENS)
    questions = suite_of(args, _PROMPTS)
    speculator = base.load(args, runs_model=True)
    subject = ladder.Subject(
        speculator=speculator,
        cases=ladder.cases_of(speculator, for_model(speculator, questions), new_tokens),
        rungs=args.get("rungs", range(1, 8)),
        max_copy_gb=args.get("max_copy_gb", _COPY_GB),
    )
    rungs, claims = [], [*ladder.RUNGS, ""]
    with base.bar("verify", "rungs") as show:
        show(0, len(ladder.RUNGS), claims[0])  # the claim that is being checked
        for claim, rung in ladder.climb(subject):
            rungs.append((claim, rung))
            show(len(rungs), len(ladder.RUNGS), claims[len(rungs)])
    verdict = ladder.verdict([rung for _, rung in rungs])
    passed = all(rung.outcome != "failed" for _, rung in rungs)
    if as_json:
        facts = {
            "model": speculator.label,
            "prompts": len(subject.cases),
            "max_new_tokens": new_tokens,
            "options": speculator.options.described(),
            "rungs": [{"claim": claim, **asdict(rung)} for claim, rung in rungs],
            "passed": passed,
            "verdict": verdict,
        }
        base.emit_json(facts)
    else:
        for number, (claim, rung) in enumerate(rungs, start=1):
            base.emit(f"{number} {rung.outcome:<8} {claim}\n           {rung.found}\n")
        left_out = len(questions) - len(subject.cases)
        compared = counted(len(subject.cases), "prompt")
        compared += f" ({left_out} left out, too long)" * bool(left_out)
        compared += f", up to {counted(new_tokens, 'new token')} each"
        base.emit(f"\n{speculator.label}, {compared}: {verdict}\n")
    if not passed:
        raise typer.Exit(1)


# --- env


def lm_eval(words: Annotated[list[str] | None, typer.Argument(metavar="..")] = None) -> None:
    """Evaluate on tasks of EleutherAI's lm-eval.

    All arguments are passed to its command line, with selfspec as the model: --model_args
    pretrained=NAME,heads=NAME. Help: selfspec lm-eval run -h
    """
    check_packages("lm-eval", "lm_eval", extra="lm-eval")
    from selfspec.plugins.lm_eval import run

    run(words or [])


_OF_MODELS = ("model", "dtype", "device", "attn_implementation", "executor")


@base.with_flags(*(flag for flag in base.LOADING if flag.name in _OF_MODELS))
def env(*, as_json: base.AsJson = False, args: base.Given) -> None:
    """Show versions, device, threads, folders. With --model: how it runs, and how fast."""
    loading = {name: args[name] for name in args.names}
    base.check_model(loading)
    from selfspec.api import tuned

    try:
        version = metadata.version(hub.DEFAULT_MODEL_PACKAGE)
        model = f"{hub.default_model_file()} ({hub.DEFAULT_MODEL_PACKAGE} {version})"
    except ModelNotFound as error:
        model = str(error)  # it says how to get it
    file = base.default_file()
    config = f"{file}{'' if file.exists() else ' (not there)'}"
    if path := os.environ.get("SELFSPEC_CONFIG"):
        config = f"{path} (SELFSPEC_CONFIG), then {config}"
    facts: dict[str, Any] = {
        **hub.machine(),
        "default_model": model,
        "bundled_heads": hub.DEFAULT_HEADS,
        "cache_folder": str(files.cache_folder()),
        "config": config,
        "tuned": [str(file) for file in tuned.files()],
    }
    if loading:
        model_facts, speed = _model_facts(loading)
        facts |= model_facts | ({"speed": speed.to_dict()} if as_json else speed_lines(speed))
    (base.emit_json if as_json else base.emit_facts)(facts)


def _model_facts(args: Args) -> tuple[dict[str, Any], StepSpeed]:
    """The model's executor, why others were refused, what drafts do to its bits; its speed."""
    import torch

    from selfspec.api.speculator import heads_for
    from selfspec.decoding.measure import PinnedProbe, step_speed
    from selfspec.model.backbone import Backbone

    executor = args.pop("executor", "auto")
    blocks = executor in hub.FROM_BLOCKS
    model, _, source = hub.load_model(args.pop("model", None), blocks=blocks, **args)
    backbone = Backbone(model, executor=executor)
    if backbone.mixing is not None:
        drafts = f"refused: the rows of a pass change each other ({backbone.mixing})"
    elif PinnedProbe(backbone).treats_rows_alike(SpeculationOptions().widest_pass):
        drafts = "no draft moves a bit of a logit"
    elif backbone.dtype == torch.float16:
        drafts = "refused without --pinned: passes of several rows round differently in float16"
    else:
        drafts = "passes of several rows may round differently and resolve near ties differently"
    heads = heads_for(model, lambda: backbone.fingerprint, chosen=source.is_default)
    default = hub.DEFAULT_HEADS if source.is_default else hub.NO_HEADS
    facts = {"model": source.label, "heads": hub.heads_name(heads) if heads else default}
    refusals = {f"no_{name}_executor": reason for name, reason in backbone.refusals.items()}
    facts |= {"executor": backbone.executor_name, **refusals, "drafts": drafts}
    return facts, step_speed(backbone)


def speed_lines(speed: StepSpeed) -> dict[str, str]:
    """Compare a plain step with the memory's limit, and passes of several rows with a step."""

    def short(value: float) -> str:  # at least three digits, no exponent for realistic values
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"

    step = f"{short(1e3 * speed.step_s)} ms after {speed.context_tokens} positions"
    rate = f"{short(speed.memory_bytes_per_s / 1e9)} GB/s"
    limit = f"reading {short(speed.step_bytes / 1e6)} MB at {rate} takes "
    limit += f"{short(1e3 * speed.limit_s)} ms: {100 * speed.share_of_limit:.0f} % of the limit"
    rows = "  ".join(f"{count}: {cost:.2f}" for count, cost in speed.rows_in_steps.items())
    return {"plain step": f"{step}; {limit}", "rows": f"{rows} of a step"}
