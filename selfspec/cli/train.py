"""The commands that make heads: `adapt`, `data`, `cache`, `fit`, `calibrate`; and `datastore`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from selfspec import files
from selfspec.api import chat_template as templates
from selfspec.cli import base
from selfspec.cli.base import Args, Flag, Given, option_flags, options_of, with_flags
from selfspec.config import SpeculationOptions
from selfspec.decoding.stats import counted
from selfspec.errors import InvalidData, InvalidOption, check_keys, check_packages, shown
from selfspec.heads import folder as folders
from selfspec.hub import models as hub
from selfspec.options import FITTED
from selfspec.training import text
from selfspec.training.options import (
    PRESETS,
    CacheOptions,
    DataOptions,
    FitOptions,
    options_dict,
    seconds_of,
)
from selfspec.training.text import Reader, Writer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from selfspec.model.backbone import Backbone
    from selfspec.training.features import Features, FeatureSpec, Selection
    from selfspec.training.fit import Fitted, Job
    from selfspec.training.recipe import Passages, Recipe
    from selfspec.training.records import Calibration
    from selfspec.training.selfgen import Author, Proposal, Source
    from selfspec.training.text import Conversation, Counts

_FROZEN = ("model", "dtype", "device", "chat_template")
MODEL = base.group_flags(
    "Model",
    _FROZEN,
    *(flag for flag in base.LOADING if flag.name in _FROZEN),
    Flag("base_model", str, "Name of the model in records. Default: its file or id."),
    Flag("skip_bad_rows", bool, "Skip and count unusable lines instead of stopping."),
)

_PROMPTS = (
    Flag("recipe", str, "YAML file of prompt families. Default: the built-in one."),
    Flag("passages", str, "Folder of .txt, .md and .rst files to ask about; German ones in de/."),
)

WORKERS = Flag(
    "workers",
    int,
    "Processes that share the work through Ray, each with its own model; the output is the same. "
    "They run on this machine or, with RAY_ADDRESS, on that Ray cluster. Default: 1.",
)

_TEXT = "Conversations: .jsonl, .jsonl.gz, .json, .parquet, .csv, or a data set's id."


class Base(NamedTuple):
    """A frozen model, ready to compute features."""

    backbone: Backbone
    tokenizer: PreTrainedTokenizerBase
    name: str  # for the record
    chat_template: str | None  # None: the model's own


def _check(args: Args, *, shares: bool = False) -> None:
    """Refuse text that no record can hold and unreadable files, before torch is imported.

    `shares`: the command shares its work among a launcher's processes; else each would do it all.
    """
    if args.get("workers", 1) > 1:
        check_packages("more than one worker", "ray", extra="ray")
    if not shares and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        problem = "a launcher started several processes, whose work only fit shares"
        raise InvalidOption(f"{problem}. Start one; data and cache take --workers N")
    for name in args.keys() - {"output"}:
        if isinstance(args[name], str) and not text.is_text(args[name]):
            raise InvalidOption(
                f"{name} is {shown(args[name])}, half a character. Give another one"
            )
    base.check_model(base.pick(args, MODEL))
    for name in args.keys() & {"data", "validation", "source", "questions"}:
        text.check_source(args[name])


def _load(
    args: Args, *, writes: bool = False, template: str | None = None, expected: str | None = None
) -> Base:
    """Load the model that the flags ask for.

    If it `writes` text it runs on the best executor, else on the generic one, which gives states.
    A worker gets the `template` and the `expected` fingerprint, as it may have only the model.
    """
    from selfspec.model import fingerprint
    from selfspec.model.backbone import Backbone
    from selfspec.training.features import process_state

    template = template or _chat_template(args)
    processes = process_state()
    per_process = processes.num_processes > 1 and processes.device.type != "cpu"
    device = args.get("device", str(processes.device) if per_process else None)
    dtype = args.get("dtype") or hub.training_dtype(device)
    model, tokenizer, source = hub.load_model(args.get("model"), dtype=dtype, device=device)
    actual = fingerprint.of_loaded(model, source.stamps)
    if expected not in (None, actual):
        raise InvalidData(f"a worker found other weights of {source.label} than the first process")
    backbone = Backbone(model, executor="auto" if writes else "generic", fingerprint=actual)
    if template is not None:
        tokenizer = templates.with_template(tokenizer, template)
    return Base(backbone, tokenizer, args.get("base_model", source.label), template)


def _loader_like(args: Args, model: Base, *, writes: bool = False) -> Callable[[], Base]:
    flags = base.pick(args, MODEL) | {"dtype": str(model.backbone.dtype).removeprefix("torch.")}
    keywords = {"template": model.chat_template, "expected": model.backbone.fingerprint}
    return partial(_load, flags, writes=writes, **keywords)


def _chat_template(args: Args) -> str | None:
    """The text of the chosen template, else that of heads, data or cache; notes if they differ."""
    from selfspec.training.features import Manifest

    def heads_template(name: str) -> Any:
        return folders.read_config(hub.resolve_heads(name)).get("chat_template")

    chosen = templates.read(args["chat_template"]) if "chat_template" in args else None
    for flag, template_in in (
        *(("heads", heads_template), ("start_from", heads_template), ("data", text.template_of)),
        ("cache", lambda name: Manifest.read(name).chat_template),
    ):
        template = template_in(args[flag]) if flag in args else None
        if chosen and template and chosen != template:
            names = f"{templates.name_of(template)}, not {templates.name_of(chosen)}"
            base.note(f"selfspec: {args[flag]} was made with the chat template {names}")
        chosen = chosen or template
    return chosen


def lock_output(output: str | Path) -> AbstractContextManager[None]:
    """Lock `output` for this command, in its first process only; a URL is not locked."""
    locks = base.is_first() and not files.is_url(output)
    return files.locked(Path(output).absolute()) if locks else nullcontext()


def _read(
    path: str, model: Base, args: Args, batch_tokens: int | None, max_tokens: int | None = None
) -> list[Conversation]:
    """The conversations of a file that fit the model and `batch_tokens`; None: of any length."""
    return text.read_conversations(
        Path(path),
        model.tokenizer,
        vocab_size=model.backbone.vocab_size,
        max_length=min(batch_tokens, model.backbone.max_positions) if batch_tokens else sys.maxsize,
        max_tokens=max_tokens,
        skip_bad_rows=args.get("skip_bad_rows", False),
    )


def _require_features(spec: FeatureSpec, needed: FeatureSpec) -> None:
    if missing := sorted(set(needed.layers) - set(spec.layers)):
        reason = f"the cache holds exit layers {list(spec.layers)}, not {missing}"
        raise InvalidOption(f"{reason}. Choose among them, or cache again with --exit-layers")
    if needed.everywhere and not spec.everywhere:
        advice = "Fit with --answer-share 1, or cache again without --answers-only"
        raise InvalidOption(f"the cache holds answers alone. {advice}")
    if needed.top_k > 1 == spec.top_k:
        advice = "Fit with --ce-share 1, or cache again with --top-k"
        raise InvalidOption(f"the cache holds the likeliest token alone. {advice}")
    if needed.deep and not spec.deep:
        raise InvalidOption("the cache holds no deep states. Cache again with --deep")
    if needed.states != spec.states[: len(needed.states)]:
        reason = f"the cache holds states of layers {list(spec.states)}, not {list(needed.states)}"
        raise InvalidOption(f"{reason}. Cache again with --state-layers")


# --- adapt


@with_flags(
    Flag("output", str, "Folder for text, heads and report; an unfinished one is continued."),
    Flag("budget", str, "Time for all steps after loading: 90s, 30m, 2h. Default: 30m."),
    Flag("raw", bool, "For base models: continue plain text, without a chat template."),
    *_PROMPTS,
    Flag("questions", str, "File of your own prompts; every fifth is held out to measure on."),
    Flag("seed", int, "Seed of prompts and samples. Default: 0."),
    *(flag for flag in MODEL if flag.name in _FROZEN),
)
def adapt(*, args: Given) -> None:
    """Make heads for a model: all steps in one.

    Writes text, fits heads, tunes settings for this machine and compares speeds. It uses the whole
    budget. The same command continues a killed run; with a larger --budget, a finished run writes
    more text and fits its heads further. Nothing else should run meanwhile.
    """
    _check(args)
    if "budget" in args:
        seconds_of(args["budget"])
    base.check_template(args, "adapt")
    options = {name: value for name, value in args.items() if name != "config"}
    from selfspec.adaptation import adapt as run_adaptation

    with base.bar("adapt", "s") as bar:
        options["show"] = lambda done, total, words: bar(int(done), int(total), words)
        report = run_adaptation(options.pop("model", None), **options)
    base.emit(report.markdown())


# --- data


@with_flags(
    Flag("output", str, "File to write, .jsonl or .jsonl.gz. Required. A rerun continues it."),
    Flag(
        "source",
        str,
        "Answer the user's turns of these conversations: .jsonl, .jsonl.gz, .json, or a data set's "
        "id. Default: prompts from a recipe.",
        ("--from",),
    ),
    *_PROMPTS,
    Flag("questions", str, "File of your own prompts: a tenth of the rows until all are used."),
    Flag(
        "exclude",
        str,
        "Benchmark files, separated by commas: rows that share eight consecutive words with them "
        "are dropped. With a recipe, this includes the built-in suite.",
    ),
    Flag("endpoint", str, "URL of an OpenAI-compatible server that answers instead of the model."),
    WORKERS,
    *MODEL,
    *option_flags(DataOptions),
)
def data(*, args: Given) -> None:
    """Write the text that heads are fitted to. The model answers prompts of many kinds.

    The same command continues a killed run.
    """
    options = options_of(DataOptions, args)
    base.require(args, "output")
    if "endpoint" in args:
        check_packages("--endpoint", "httpx", extra="train")
    if args.get("workers", 1) > 1 and "endpoint" in args:
        raise InvalidOption("workers with endpoint: a server needs no workers. Drop one")
    if "source" in args:
        ignored = {"recipe", "passages", "questions", "raw"}
        base.refuse(args, ignored, "with --from: prompts have one source. Drop one")
    elif options.tokens is None:
        raise InvalidOption("no --tokens. Say how many answer tokens the model should write")
    _check(args)
    if not args.keys() & {"endpoint", "source"}:
        base.check_template(args, "data")
    text.check_output(args["output"], base.inputs(args))
    with lock_output(args["output"]):
        counts = _write_data(args, options)
    if not counts.total("rows"):
        raise InvalidData(f"{args['output']} holds no conversation. Dropped: {counts.dropped()}")
    base.emit(f"{args['output']}: {counts.words()}\n")
    base.say_next("fit", args, "--data", args["output"], "--output", "heads")


def _write_data(args: Args, options: DataOptions) -> Counts:
    from selfspec.training import selfgen
    from selfspec.training.recipe import Passages, read_recipe

    excluded = _excluded_ngrams(args)
    recipe = None if "source" in args else read_recipe(args.get("recipe"))
    passages = Passages(args.get("passages"), recipe.languages if recipe else ())
    workers = args.get("workers", 1)
    model = _load({"dtype": "bfloat16"} | args, writes=workers == 1)
    record = asdict(options) | {
        "source": _identity(args.get("source")),
        "recipe": None if recipe is None else recipe.digest,
        "passages": passages.digest,
        "questions": _identity(args.get("questions")),
        "excluded": hashlib.sha256(repr(sorted(excluded)).encode()).hexdigest()[:16],
        "endpoint": args.get("endpoint"),
        "skip_bad_rows": args.get("skip_bad_rows", False),
        "model": model.name,
        "chat_template": model.chat_template,
        "dtype": str(model.backbone.dtype).removeprefix("torch."),
        "fingerprint": model.backbone.fingerprint,
    }
    del record["tokens"]  # a file may grow
    writer = Writer(Path(args["output"]), record, hub.machine())
    done, generated = writer.counts.total("answer_tokens"), 0
    if options.tokens is not None and done >= options.tokens:
        message = f"selfspec: {args['output']} is finished: it holds {done:,} answer tokens"
        base.note(f"{message}. Raise --tokens to go on")
        return writer.counts
    with base.bar("data", "answer tokens") as show, ExitStack() as stack:

        def count(tokens: int) -> None:
            nonlocal generated
            generated += tokens
            show(done, options.tokens, f"{generated:,} tokens generated" if generated else "")

        try:
            author = selfgen.Author(*model[:2], options, count, args.get("endpoint"))
            source, proposer, rows = _source(args, author, writer, recipe, passages, excluded)
            submit = selfgen.local_submit(proposer(author))
            if workers > 1:
                from selfspec import cluster

                load = _loader_like(args, model, writes=True)
                del author, model  # the workers have their own

                def make() -> Callable[[Any], Proposal]:
                    return proposer(selfgen.Author(*load()[:2], options, lambda _: None))

                submit = stack.enter_context(cluster.workers(workers, make))
            for counts in selfgen.write(source, writer, options, submit, 2 * workers - 1):
                done = counts.total("answer_tokens")
                count(0)
            if "source" in args and not writer.batches:
                raise InvalidData(f"{args['source']} holds no conversation. Give another --from")
        except KeyboardInterrupt:
            base.note(f"\n{args['output']}: the same command continues it")
            raise
    if rows is not None:
        rows.report()
    return writer.counts


def _source(
    args: Args,
    author: Author,
    writer: Writer,
    recipe: Recipe | None,
    passages: Passages,
    excluded: set[int],
) -> tuple[Source, Callable[[Author], Callable[[Any], Proposal]], Reader[Any] | None]:
    """The source of batches, what makes a proposer of an author, and --from's reader, if any."""
    from selfspec.training import selfgen

    skip, options = args.get("skip_bad_rows", False), author.options
    if recipe is not None:
        file = args.get("questions")
        questions = [] if file is None else text.questions_of(file, skip_bad_rows=skip)
        prompts = author.prompts(recipe, passages, questions)
        if prompts.left_out:
            reason = "without --passages" + ("" if author.invents else " or invented turns")
            base.note(f"selfspec: left out {reason}: {', '.join(prompts.left_out)}")
        admission = selfgen.Admission(options, writer.records(), excluded)
        return admission, lambda author: selfgen.Written(author, prompts, excluded).propose, None
    parse = partial(selfgen.talk_of, tokenizer=author.turns.tokenizer, system=options.system)
    rows = Reader(args["source"], parse, skip_bad_rows=skip)
    source = selfgen.Given(rows, writer.batches, options, excluded)
    return source, lambda author: author.answer, rows


def _excluded_ngrams(args: Args) -> set[int]:
    from selfspec.eval.results import load_suite
    from selfspec.training.selfgen import ngrams

    suite = [] if "source" in args else load_suite()  # the user chose the rows of --from
    turns = [turn for question in suite for turn in question.turns]
    for name in filter(None, args.get("exclude", "").split(",")):
        turns += Reader(name, text.texts_of)
    return {ngram for turn in turns for ngram in ngrams(turn)}


def _identity(source: str | None) -> str | None:
    """Identity of a source in records: a file's name and size, or a data set's name."""
    path = source and files.local_path(source)
    return f"{path.name}, {path.stat().st_size} bytes" if path and path.is_file() else source


# --- cache


@with_flags(
    Flag("data", str, f"{_TEXT} Required."),
    Flag("output", str, "Folder to write the features to, or a URL (s3://..). Required."),
    Flag("max_size", float, "Most gigabytes; a larger cache is refused before any work."),
    WORKERS,
    *MODEL,
    *option_flags(CacheOptions),
)
def cache(*, args: Args) -> None:
    """Write the features that heads are fitted to. The frozen model runs once over conversations.

    The same command continues a killed run.
    """
    base.require(args, "data", "output")
    if args["output"].startswith("memory:"):
        raise InvalidOption("memory:// ends with this command. Name a folder or another URL")
    _check(args)
    options = options_of(CacheOptions, args)
    from selfspec.training import features as store

    store.check_output(args["output"], base.inputs(args))
    with lock_output(args["output"]):
        _write_features(args, options)
    base.say_next("fit", args, "--cache", args["output"], "--output", "heads")


def _write_features(args: Args, options: CacheOptions) -> None:
    workers, model = args.get("workers", 1), _load(args)
    import torch

    from selfspec.heads.exit_heads import check_exit_layers
    from selfspec.training import features as store
    from selfspec.training.fit import default_exit_layers, state_layers

    backbone = model.backbone
    first, depth = 0 if options.deep else 1, backbone.num_layers  # layer 0 is the embedding
    layers = options.exit_layers or (*range(first, 1), *default_exit_layers(depth))
    check_exit_layers(layers, range(first, depth))
    states = state_layers(backbone, FitOptions(state_layers=options.state_layers))
    states = states if options.deep else ()
    top_k = min(options.top_k, backbone.vocab_size)
    spec = store.FeatureSpec(layers, options.deep, top_k, not options.answers_only, states)
    texts = _read(args["data"], model, args, options.batch_tokens, options.max_tokens)
    source = store.StreamSource(backbone, spec, texts, options.batch_tokens)
    names = {"base_model": model.name, "data": Path(args["data"]).name}
    manifest = store.Manifest.of(source, **names, chat_template=model.chat_template)
    total, size = manifest.positions, manifest.bytes / 1e9
    base.note(f"selfspec: {total:,} positions at {manifest.bytes // total:,} bytes: {size:.3g} GB")
    if "max_size" in args and size > args["max_size"]:
        raise InvalidOption(
            f"the features would take {size:.3g} GB, more than max_size {args['max_size']}. Take "
            "fewer --exit-layers or --max-tokens, or fit with --data, which keeps nothing on disk"
        )
    done = 0
    with base.bar("cache", "tokens", rate=True) as show, ExitStack() as stack:

        def count(positions: int, computed: bool) -> None:
            nonlocal done
            done += positions
            show(done, total, found=not computed)

        compute = None
        if workers > 1:
            from selfspec import cluster

            load, main_memory = _loader_like(args, model), torch.device("cpu")

            def make() -> Callable[[list[Conversation]], Features]:
                replica = load().backbone
                return lambda batch: store.features(replica, spec, store.pad_batch(batch)).to(
                    main_memory
                )

            submit = stack.enter_context(cluster.workers(workers, make))
            compute = partial(cluster.in_order, submit, 2 * workers)
        store.write(args["output"], source, manifest, count, compute)
    answers = f"{sum(source.answers):,} of them answers"
    base.emit(f"{args['output']}: {total:,} positions, {answers}, {size:.2f} GB\n")


# --- datastore


@with_flags(
    Flag("data", str, _TEXT),
    Flag("texts", str, "Folder of .txt, .md and .rst files, in addition to --data or instead."),
    Flag("output", str, "File to write, .safetensors. Required."),
    Flag("overwrite", bool, "Replace an existing datastore."),
    *(flag for flag in MODEL if flag.name not in ("base_model", "dtype", "device")),
)
def datastore(*, args: Args) -> None:
    """Sort text for --drafter rest. It drafts what follows the same tokens in that text.

    A datastore fits one tokenizer. Each token takes 8 bytes; a million tokens take a second.
    """
    base.require(args, "output", *(() if "texts" in args else ("data",)))
    _check(args)
    output = base.check_file(args, args["output"])
    with lock_output(output):
        from selfspec.decoding.drafters.rest import Datastore

        model = _load(args)
        texts: list[Sequence[int]] = []
        if "texts" in args:
            documents = text.texts_in(args["texts"])
            texts += (model.tokenizer(content)["input_ids"] for _, content in documents)
        if "data" in args:
            texts += (talk.ids for talk in _read(args["data"], model, args, None))
        store = Datastore.of(texts, model.tokenizer)
        store.save(output)
    base.emit(f"{output}: {counted(len(texts), 'text')}, {len(store.ids) - len(texts):,} tokens\n")
    raw = base.raw_flag(model.tokenizer)
    command = ["generate", *raw, "Once upon a time"] if raw else ["chat"]
    base.say_next(command[0], args, *command[1:], "--datastore", args["output"])


# --- fit

_FILES = (
    Flag("data", str, _TEXT),
    Flag("cache", str, "Features from selfspec cache, a folder or a URL; instead of --data."),
    Flag("output", str, "Folder to write the heads to. Required."),
    Flag("validation", str, "Conversations to measure agreement on. Default: a 20th of the data."),
    Flag("start_from", str, "Heads of the same model to continue from, instead of new ones."),
    Flag("preset", str, f"Named options; other flags override them: {', '.join(PRESETS)}."),
    Flag("overwrite", bool, "Start over and replace a fit in the output."),
    Flag("keep_features", bool, "With --data: compute features once and keep them in memory."),
    *MODEL,
    *option_flags(CacheOptions, ("batch_tokens", "max_tokens")),
)

_IS_CACHED = "with cache: that holds the features of a text, in batches. Drop one"
_OF_HEADS = {"exit_layers", "head_type", "inner_size", "draft_vocab_size", "preset"}


@with_flags(*_FILES, *option_flags(FitOptions))
def fit(*, args: Given) -> None:
    """Fit exit heads to a model. They are measured and written to a folder.

    The same command continues a killed run. With `accelerate launch -m selfspec fit ...` several
    processes share the batches of a step.
    """
    if "preset" in args:
        check_keys([args["preset"]], PRESETS, "preset")
        args.update(PRESETS[args["preset"]] | args)
    base.require(args, "output", "cache" if "cache" in args else "data")
    if "start_from" in args:
        base.refuse(args, _OF_HEADS, "with start_from: the heads fix it. Drop one")
    if "cache" in args:
        batched = () if "validation" in args else ("batch_tokens",)
        base.refuse(args, {"data", "keep_features", *batched}, _IS_CACHED)
    _check(args, shares=True)
    options = options_of(FitOptions, args)
    _check_heads_output(args)
    from selfspec.training import fit as fitting
    from selfspec.training import records

    output = Path(args["output"])
    with lock_output(output):
        _check_heads_output(args)  # another fit may have written it meanwhile
        state = output / hub.CHECKPOINT
        if args.get("overwrite"):
            state.unlink(missing_ok=True)
        model = _load(args)
        job = _job(args, options, model, state)
        try:
            with base.bar("fit", "steps") as show:
                fitted = fitting.fit(job, show)
        except KeyboardInterrupt:
            if base.is_first():
                again = " without --overwrite" if args.get("overwrite") and state.is_file() else ""
                base.note(f"{output}: the same command{again} continues it")
            raise
        if base.is_first():
            values = {flag.name: args.get(flag.name) for flag in _FILES}
            run = values | {"base_model": job.base_model} | options_dict(job.options)
            records.write(output, fitted, run)
            folders.remember(output)
            state.unlink(missing_ok=True)
            _say_results(fitted, model, args)


def _say_results(fitted: Fitted, model: Base, args: Args) -> None:
    for layer, shares in fitted.metrics["layers"].items():
        second = shares["agreement_second"]
        suffix = "" if second is None else f"  second draft {second:.1%}"
        base.emit(f"layer {layer:>3}  agreement {shares['agreement']:.1%}{suffix}\n")
    layers = counted(len(fitted.metrics["layers"]), "layer")
    base.emit(f"{args['output']}: exit heads at {layers}\n")
    if fitted.heads.looks_ahead:  # medusa heads are not calibrated
        options = ("--methods", "plain,medusa", "--output", "results")
        base.say_next("bench", args, "--heads", args["output"], *options)
        return
    # calibration needs text that the heads were not fitted to: without any, suggest to write some
    data = args.get("validation", "held-out.jsonl")
    if "validation" not in args:
        template = model.chat_template
        name = template and templates.name_of(template)
        defaults = {"chat_template": name if name in templates.NAMES else template} if name else {}
        arguments = ("--output", data, "--tokens", "20000", "--seed", "1")
        base.say_next("data", defaults | args, *arguments, *base.raw_flag(model.tokenizer))
    base.say_next("calibrate", args, "--heads", args["output"], "--data", data)


def _check_heads_output(args: Args) -> None:
    # a fit that was killed while it wrote its heads still has its checkpoint, and may continue
    overwrite = args.get("overwrite", False) or Path(args["output"], hub.CHECKPOINT).is_file()
    output, is_ours, reads = args["output"], folders.is_heads_folder, base.inputs(args)
    files.check_folder(output, hub.HEADS_FILES, is_ours, overwrite=overwrite, reads=reads)


def _job(args: Args, options: FitOptions, model: Base, checkpoint: Path) -> Job:
    from selfspec.api.speculator import heads_of
    from selfspec.training import fit
    from selfspec.training.features import CacheSource, Selection, StreamSource, split

    backbone, tokenizer = model.backbone, model.tokenizer
    limits, validation, start = options_of(CacheOptions, args), args.get("validation"), None

    def selection(
        talks: list[Conversation], *, measured: bool = True, keep: bool = True
    ) -> Selection:
        spec = fit.feature_spec(backbone, options, measured=measured)
        return Selection(StreamSource(backbone, spec, talks, limits.batch_tokens, keep=keep))

    if "start_from" in args:
        start = heads_of(hub.resolve_heads(args["start_from"]), backbone, model.name)
        options = fit.continued_options(options, start)
    if "cache" in args:
        source = CacheSource(args["cache"], backbone)
        data, layers, kind = source.manifest.data, source.spec.layers, options.head_type
        train, held_out = (Selection(source),) * 2 if validation else split(source)
        if args.get("max_tokens"):
            train = train.limited(args["max_tokens"])
        attends = kind == folders.EAGLE3
        own_layers = attends or kind == folders.MEDUSA or (kind == "deep-fused" and 0 in layers)
        if options.exit_layers is None and not own_layers:
            options = replace(options, exit_layers=tuple(filter(None, layers)) or layers)
        if options.state_layers is None and fit.state_layers(backbone, options) and not attends:
            options = replace(options, state_layers=source.spec.states)
        _require_features(source.spec, fit.feature_spec(backbone, options, measured=False))
    else:  # features are computed from conversations when they are needed
        data = Path(args["data"]).name
        talks = _read(args["data"], model, args, limits.batch_tokens, limits.max_tokens)
        talks, others = (talks, talks) if validation else text.split(talks)
        train = selection(talks, measured=False, keep=args.get("keep_features", False))
        held_out = selection(others)
    if validation:
        held_out = selection(_read(validation, model, args, limits.batch_tokens))
    return fit.Job(
        backbone=backbone,
        base_model=model.name,
        train=train,
        validation=held_out,
        options=options,
        start=start,
        chat_template=model.chat_template,
        special_ids=text.special_ids(tokenizer),
        data=data,
        **({"held_out": Path(validation).name} if validation else {}),
        checkpoint=checkpoint,
    )


# --- calibrate

Found = tuple[dict[str, Any], str]  # results for programs, and in words

_INSTEAD = {  # why a drafter is the default instead of the heads
    "ngram": "prompt lookup, which pauses where it does not pay",
    "none": "because a verification of several rows costs more than as many steps",
}


@with_flags(
    Flag("heads", str, "Folder of fitted heads; settings go to its config.json. Required."),
    Flag("data", str, "Conversations that the heads were not fitted to: .jsonl or .jsonl.gz."),
    Flag("cache", str, "Features of such conversations, from selfspec cache; instead of --data."),
    Flag("max_tokens", int, "Answer tokens to use. Default: all."),
    Flag("max_exit_layers", int, "Most exit layers to use together. Default: 2."),
    Flag("entropy", bool, "Find only the entropy threshold of --acceptance easd, from --data."),
    Flag("dry_run", bool, "Report only."),
    *MODEL,
)
def calibrate(*, as_json: base.AsJson = False, args: Given) -> None:
    """Find the settings of exit heads. It scales their confidence, chooses layers and thresholds.

    Costs of layers and heads are measured on this machine; nothing else should run meanwhile.
    """
    entropy, source = args.get("entropy", False), "cache" if "cache" in args else "data"
    base.require(args, *(("data",) if entropy else ("heads", source)))
    reason = "means nothing with --entropy. Leave it out" if entropy else _IS_CACHED
    ignored = {"cache", "max_exit_layers"} if entropy else {"data"} if source == "cache" else set()
    base.refuse(args, ignored, reason)
    _check(args)
    heads = hub.resolve_heads(args["heads"]) if "heads" in args else None
    output = None if args.get("dry_run", False) else heads
    if output is not None:
        names = {folders.CONFIG_FILE, "calibration.json"}
        files.check_folder(output, names, folders.is_heads_folder, overwrite=True)
    with nullcontext() if output is None else lock_output(output):
        if heads is None or entropy:
            record, summary = _calibrate_entropy(args, output)
        else:
            record, summary = _calibrate(args, heads, output)
    base.emit(json.dumps(record) + "\n" if as_json else summary)
    if output is not None and not entropy:
        base.note(f"wrote {output / folders.CONFIG_FILE}")
        base.say_next("tune", args, "--heads", str(output))


def _calibrate(args: Args, folder: Path, output: Path | None) -> Found:
    model = _load(args)
    from selfspec.api.speculator import heads_of
    from selfspec.decoding.measure import quick_costs
    from selfspec.model.backbone import Backbone
    from selfspec.training import records
    from selfspec.training.features import CacheSource, FeatureSpec, Selection, StreamSource

    heads = heads_of(folder, model.backbone, model.name)
    if heads.looks_ahead:
        problem = f"{folder} holds medusa heads, whose tree has no thresholds or layers to choose"
        raise InvalidOption(f"{problem}. Use them as they are: selfspec bench")
    needed = FeatureSpec.read_by(heads)
    limit = args.get("max_tokens")
    if "cache" in args:
        source = CacheSource(args["cache"], model.backbone)
        _require_features(source.spec, needed)
        features = Selection(source) if limit is None else Selection(source).limited(limit)
    else:
        batch_tokens = CacheOptions().batch_tokens
        if heads.config.training.get("data") == Path(args["data"]).name:
            note = "selfspec: these heads were fitted to a file of this name. Is this one held out?"
            base.note(f"{note} If not, the heads look better than they are")
        talks = _read(args["data"], model, args, batch_tokens, limit)
        features = Selection(StreamSource(model.backbone, needed, talks, batch_tokens, keep=True))
    costs = quick_costs(Backbone(model.backbone.model), heads)
    calibration = records.calibrate(heads, features, costs, args.get("max_exit_layers", 2))
    if output is not None:
        options = {name: args[name] for name in sorted(args) if name != "config"}
        records.write_calibration(heads, output, calibration, options)
    return calibration.record(), calibration_words(calibration)


def _calibrate_entropy(args: Args, output: Path | None) -> Found:
    model = _load(args)
    from selfspec.api.speculator import heads_of
    from selfspec.training.records import SHARE, measure_entropy

    batch_tokens = CacheOptions().batch_tokens
    texts = _read(args["data"], model, args, batch_tokens, args.get("max_tokens"))
    with base.bar("entropies", "batches") as show:
        stats = measure_entropy(model.backbone, texts, batch_tokens, show)
    threshold = stats["entropy_threshold"]
    place = f"not stored: use --acceptance easd:entropy={threshold}"
    if output is not None:
        config = heads_of(output, model.backbone, model.name).config
        options = SpeculationOptions().updated(config.defaults)
        options = options.updated({"easd": {"entropy": threshold}})
        replace(config, defaults=options.differing()).write(output)
        place = f"written to {output}"
    return stats, (
        f"entropy threshold {threshold} nats, the mean of the highest {SHARE:.0%} at "
        f"{stats['positions']:,} answer positions (mean of all {stats['mean_entropy']}); {place}\n"
    )


def calibration_words(results: Calibration) -> str:
    from rich.table import Table

    columns = ("layer", "agreement", "2nd draft", "ECE", "T", "ECE at T")
    grid = Table(*columns, box=None, pad_edge=False)
    for layer, figures in results.layers.items():
        second = "" if figures.agreement_second is None else f"{figures.agreement_second:.1%}"
        cells = f"{figures.ece_before:.3f}", f"{figures.temperature:.2f}", f"{figures.ece:.3f}"
        grid.add_row(str(layer), f"{figures.agreement:.1%}", second, *cells)
    setting = results.setting
    message = (
        f"{results.positions:,} held-out positions; heads can draft {results.coverage:.1%} of the "
        f"model's tokens\n\n{base.table_text(grid)}\n"
        f"exit layers {list(setting.exit_layers)}, thresholds {list(setting.exit_threshold)}, "
        f"at most {setting.max_draft_tokens} draft tokens\n"
        f"expected: {setting.compression_rate:.2f} tokens per verification, "
        f"{setting.speed_up:.2f} x plain decoding\n"
    )
    if results.drafter != FITTED:
        message += (
            "This is not faster, so these heads do not draft by default: their default is "
            f"--drafter {results.drafter}, {_INSTEAD[results.drafter]}\n"
        )
    return message
